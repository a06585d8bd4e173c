"""isobasin: do two Transformers compute the same function, and do they lie in the same basin?

Importing this package imports neither torch nor transformers; each public name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# What most programs need.
_PUBLIC = {
    "ActivationMatching": "isobasin.alignment.matchers",
    "IsobasinError": "isobasin.errors",
    "LearnedMatching": "isobasin.learn.matching",
    "ReferenceMatching": "isobasin.alignment.reference",
    "Transform": "isobasin.symmetries.transform",
    "WeightMatching": "isobasin.alignment.matchers",
    "Weights": "isobasin.weights",
    "align": "isobasin.alignment.align",
    "align_many": "isobasin.merging.joint_alignment",
    "canonical": "isobasin.compare.canonical",
    "check": "isobasin.symmetries.check",
    "distance": "isobasin.compare.distance",
    "equivalent": "isobasin.compare.equivalence",
    "evaluate_path": "isobasin.path.evaluation",
    "fingerprint": "isobasin.compare.fingerprint",
    "load": "isobasin.weights",
    "load_transform": "isobasin.symmetries.transform_file",
    "merge": "isobasin.merging.merge",
    "open_task": "isobasin.tasks.loader",
    "plot_path": "isobasin.report.figures",
    "save_transform": "isobasin.symmetries.transform_file",
    "scramble": "isobasin.symmetries.transform",
    "symmetry": "isobasin.symmetries.symmetry",
    "write_report": "isobasin.report.page",
}
# The types of results, the project's own model, and what fewer programs need.
_FURTHER = {
    "Alignment": "isobasin.alignment.result",
    "Check": "isobasin.symmetries.check",
    "Curve": "isobasin.path.curve",
    "DistanceResult": "isobasin.compare.distance",
    "Fingerprint": "isobasin.compare.fingerprint",
    "JointAlignment": "isobasin.merging.joint_alignment",
    "ModelConfig": "isobasin.model",
    "Symmetry": "isobasin.symmetries.symmetry",
    "Task": "isobasin.tasks.task",
    "Transformer": "isobasin.model",
    "Verdict": "isobasin.compare.equivalence",
    "normalize": "isobasin.symmetries.normal_form",
    "plot_explain": "isobasin.report.figures",
    "plot_layers": "isobasin.report.figures",
    "plot_plane": "isobasin.report.figures",
}
# Names of version 0.1.
_OLD = {"Likeness": "DistanceResult", "Many": "JointAlignment"}

if TYPE_CHECKING:
    from isobasin.alignment.align import align
    from isobasin.alignment.matchers import ActivationMatching, WeightMatching
    from isobasin.alignment.reference import ReferenceMatching
    from isobasin.compare.canonical import canonical
    from isobasin.compare.distance import distance
    from isobasin.compare.equivalence import equivalent
    from isobasin.compare.fingerprint import fingerprint
    from isobasin.errors import IsobasinError
    from isobasin.learn.matching import LearnedMatching
    from isobasin.merging.joint_alignment import align_many
    from isobasin.merging.merge import merge
    from isobasin.path.evaluation import evaluate_path
    from isobasin.report.figures import plot_path
    from isobasin.report.page import write_report
    from isobasin.symmetries.check import check
    from isobasin.symmetries.symmetry import symmetry
    from isobasin.symmetries.transform import Transform, scramble
    from isobasin.symmetries.transform_file import load_transform, save_transform
    from isobasin.tasks.loader import open_task
    from isobasin.weights import Weights, load

__all__ = [
    "ActivationMatching",
    "IsobasinError",
    "LearnedMatching",
    "ReferenceMatching",
    "Transform",
    "WeightMatching",
    "Weights",
    "__version__",
    "align",
    "align_many",
    "canonical",
    "check",
    "distance",
    "equivalent",
    "evaluate_path",
    "fingerprint",
    "load",
    "load_transform",
    "merge",
    "open_task",
    "plot_path",
    "save_transform",
    "scramble",
    "symmetry",
    "write_report",
]


def __getattr__(name: str) -> Any:
    name = _OLD.get(name, name)
    module = _PUBLIC.get(name) or _FURTHER.get(name)
    if module is None:
        raise AttributeError(f"module 'isobasin' has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_FURTHER])
