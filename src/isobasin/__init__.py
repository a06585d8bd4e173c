"""isobasin: do two Transformers compute the same function, and do they lie in the same basin?

Importing this package imports neither torch nor transformers; each public name is loaded when it is first used.
"""

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# What most programs need.
_PUBLIC = {
    "ActivationMatching": "isobasin.alignment.matchers",
    "Adapter": "isobasin.checkpoint.adapter",
    "BarrierCallback": "isobasin.callback",
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
    "lightning_barrier_callback": "isobasin.callback",
    "lineage": "isobasin.compare.lineage",
    "load": "isobasin.weights",
    "load_transform": "isobasin.symmetries.transform_file",
    "merge": "isobasin.merging.merge",
    "Task": "isobasin.tasks.task",
    "merge_adapters": "isobasin.merging.adapters",
    "move_adapter": "isobasin.merging.adapters",
    "open_task": "isobasin.tasks.loader",
    "plot_path": "isobasin.report.figures",
    "push_to_hub": "isobasin.hub",
    "save_transform": "isobasin.symmetries.transform_file",
    "scramble": "isobasin.symmetries.transform",
    "symmetry": "isobasin.symmetries.symmetry",
    "write_lineage_page": "isobasin.report.lineage_page",
    "write_report": "isobasin.report.page",
}
# The types of results, the project's own model, and what fewer programs need.
_FURTHER = {
    "Aligner": "isobasin.merging.joint_alignment",
    "Alignment": "isobasin.alignment.result",
    "Check": "isobasin.symmetries.check",
    "Curve": "isobasin.path.barrier",
    "DistanceResult": "isobasin.compare.distance",
    "Fingerprint": "isobasin.compare.fingerprint",
    "JointAlignment": "isobasin.merging.joint_alignment",
    "Lineage": "isobasin.compare.lineage",
    "Matcher": "isobasin.alignment.align",
    "ModelConfig": "isobasin.model",
    "Symmetry": "isobasin.symmetries.symmetry",
    "Transformer": "isobasin.model",
    "Verdict": "isobasin.compare.equivalence",
    "normalize": "isobasin.symmetries.normal_form",
    "plot_explain": "isobasin.report.figures",
    "plot_layers": "isobasin.report.figures",
    "plot_plane": "isobasin.report.figures",
    "plot_similarity": "isobasin.report.figures",
}
# Names of version 0.1.
_OLD = {"Likeness": "DistanceResult", "Many": "JointAlignment"}

if TYPE_CHECKING:
    from isobasin.alignment.align import Matcher as Matcher
    from isobasin.alignment.align import align as align
    from isobasin.alignment.matchers import ActivationMatching as ActivationMatching
    from isobasin.alignment.matchers import WeightMatching as WeightMatching
    from isobasin.alignment.reference import ReferenceMatching as ReferenceMatching
    from isobasin.alignment.result import Alignment as Alignment
    from isobasin.callback import BarrierCallback as BarrierCallback
    from isobasin.callback import lightning_barrier_callback as lightning_barrier_callback
    from isobasin.checkpoint.adapter import Adapter as Adapter
    from isobasin.compare.canonical import canonical as canonical
    from isobasin.compare.distance import DistanceResult as DistanceResult
    from isobasin.compare.distance import distance as distance
    from isobasin.compare.equivalence import Verdict as Verdict
    from isobasin.compare.equivalence import equivalent as equivalent
    from isobasin.compare.fingerprint import Fingerprint as Fingerprint
    from isobasin.compare.fingerprint import fingerprint as fingerprint
    from isobasin.compare.lineage import Lineage as Lineage
    from isobasin.compare.lineage import lineage as lineage
    from isobasin.errors import IsobasinError as IsobasinError
    from isobasin.hub import push_to_hub as push_to_hub
    from isobasin.learn.matching import LearnedMatching as LearnedMatching
    from isobasin.merging.adapters import merge_adapters as merge_adapters
    from isobasin.merging.adapters import move_adapter as move_adapter
    from isobasin.merging.joint_alignment import Aligner as Aligner
    from isobasin.merging.joint_alignment import JointAlignment as JointAlignment
    from isobasin.merging.joint_alignment import align_many as align_many
    from isobasin.merging.merge import merge as merge
    from isobasin.model import ModelConfig as ModelConfig
    from isobasin.model import Transformer as Transformer
    from isobasin.path.barrier import Curve as Curve
    from isobasin.path.evaluation import evaluate_path as evaluate_path
    from isobasin.report.figures import plot_explain as plot_explain
    from isobasin.report.figures import plot_layers as plot_layers
    from isobasin.report.figures import plot_path as plot_path
    from isobasin.report.figures import plot_plane as plot_plane
    from isobasin.report.figures import plot_similarity as plot_similarity
    from isobasin.report.lineage_page import write_lineage_page as write_lineage_page
    from isobasin.report.page import write_report as write_report
    from isobasin.symmetries.check import Check as Check
    from isobasin.symmetries.check import check as check
    from isobasin.symmetries.normal_form import normalize as normalize
    from isobasin.symmetries.symmetry import Symmetry as Symmetry
    from isobasin.symmetries.symmetry import symmetry as symmetry
    from isobasin.symmetries.transform import Transform as Transform
    from isobasin.symmetries.transform import scramble as scramble
    from isobasin.symmetries.transform_file import load_transform as load_transform
    from isobasin.symmetries.transform_file import save_transform as save_transform
    from isobasin.tasks.loader import open_task as open_task
    from isobasin.tasks.task import Task as Task
    from isobasin.weights import Weights as Weights
    from isobasin.weights import load as load

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    name = _OLD.get(name, name)
    module = _PUBLIC.get(name) or _FURTHER.get(name)
    if module is None:
        raise AttributeError(f"module 'isobasin' has no attribute {name!r}")
    found = getattr(import_module(module), name)
    if isinstance(found, FunctionType):
        from isobasin.arguments import checked

        return checked(found, name, __getattr__)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *_FURTHER])
