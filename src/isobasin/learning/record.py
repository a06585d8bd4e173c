# SHIM
# mypy: implicit-reexport
from isobasin.learn.resume import NullResumeStore as Unrecorded  # noqa: F401
from isobasin.learn.resume import ResumeFile as FileRecord  # noqa: F401
from isobasin.learn.resume import ResumeStore as Record  # noqa: F401
from isobasin.learn.resume import pack_transform as packed_transform  # noqa: F401
