# SHIM
# mypy: implicit-reexport
from isobasin.learn.align import LearnedAlignment as LearnedAlignment  # noqa: F401
from isobasin.learn.align import LearnedMatchingSettings as LearnedMatching  # noqa: F401
from isobasin.learn.align import align_learned as align_learned  # noqa: F401
