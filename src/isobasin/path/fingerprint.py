# SHIM
# mypy: implicit-reexport
from isobasin.path.provenance import model_hash as model_hash
from isobasin.path.provenance import model_provenance as model_facts  # noqa: F401
from isobasin.path.provenance import provenance as provenance
from isobasin.path.provenance import source_commit as source_commit
