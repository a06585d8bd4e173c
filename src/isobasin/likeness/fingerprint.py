# SHIM
# mypy: implicit-reexport
from isobasin.compare.fingerprint import VERSION as VERSION  # noqa: F401
from isobasin.compare.fingerprint import Fingerprint as Fingerprint  # noqa: F401
from isobasin.compare.fingerprint import fingerprint as fingerprint  # noqa: F401
