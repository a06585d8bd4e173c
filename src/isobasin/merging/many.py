# SHIM
# mypy: implicit-reexport
from isobasin.merging.joint_alignment import Aligner as Aligner
from isobasin.merging.joint_alignment import JointAlignment as Many  # noqa: F401
from isobasin.merging.joint_alignment import align_many as align_many
