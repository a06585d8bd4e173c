"""isobasin: do two Transformers compute the same function, and do they lie in the same basin?

Importing this package imports neither torch nor transformers; each public name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "ActivationMatching": "isobasin.match.matchers",
    "Alignment": "isobasin.alignment.result",
    "Check": "isobasin.checking",
    "Curve": "isobasin.path",
    "Fingerprint": "isobasin.likeness.fingerprint",
    "IsobasinError": "isobasin.errors",
    "Likeness": "isobasin.likeness.distance",
    "Many": "isobasin.merging.many",
    "ModelConfig": "isobasin.model",
    "ReferenceMatching": "isobasin.match.reference",
    "Symmetry": "isobasin.symmetries",
    "Task": "isobasin.tasks",
    "Transform": "isobasin.transform",
    "Transformer": "isobasin.model",
    "Verdict": "isobasin.equivalence",
    "WeightMatching": "isobasin.match.matchers",
    "Weights": "isobasin.weights",
    "align": "isobasin.match.align",
    "align_many": "isobasin.merging.many",
    "canonical": "isobasin.likeness.canonical",
    "check": "isobasin.checking",
    "distance": "isobasin.likeness.distance",
    "equivalent": "isobasin.equivalence",
    "evaluate_path": "isobasin.path",
    "fingerprint": "isobasin.likeness.fingerprint",
    "load": "isobasin.weights",
    "load_transform": "isobasin.transform_file",
    "merge": "isobasin.merging",
    "normalize": "isobasin.normalize",
    "open_task": "isobasin.tasks",
    "plot_explain": "isobasin.plots",
    "plot_layers": "isobasin.plots",
    "plot_path": "isobasin.plots",
    "plot_plane": "isobasin.plots",
    "save_transform": "isobasin.transform_file",
    "scramble": "isobasin.transform",
    "symmetry": "isobasin.symmetries",
    "write_report": "isobasin.report",
}

if TYPE_CHECKING:
    from isobasin.checking import Check, check
    from isobasin.equivalence import Verdict, equivalent
    from isobasin.errors import IsobasinError
    from isobasin.likeness.canonical import canonical
    from isobasin.likeness.distance import Likeness, distance
    from isobasin.likeness.fingerprint import Fingerprint, fingerprint
    from isobasin.match.align import align
    from isobasin.match.alignment import Alignment
    from isobasin.match.matchers import ActivationMatching, WeightMatching
    from isobasin.match.reference import ReferenceMatching
    from isobasin.merging import merge
    from isobasin.merging.many import Many, align_many
    from isobasin.model import ModelConfig, Transformer
    from isobasin.normalize import normalize
    from isobasin.path import Curve, evaluate_path
    from isobasin.plots import plot_explain, plot_layers, plot_path, plot_plane
    from isobasin.report import write_report
    from isobasin.symmetries import Symmetry, symmetry
    from isobasin.tasks import Task, open_task
    from isobasin.transform import Transform, scramble
    from isobasin.transform_file import load_transform, save_transform
    from isobasin.weights import Weights, load

__all__ = [
    "ActivationMatching",
    "Alignment",
    "Check",
    "Curve",
    "Fingerprint",
    "IsobasinError",
    "Likeness",
    "Many",
    "ModelConfig",
    "ReferenceMatching",
    "Symmetry",
    "Task",
    "Transform",
    "Transformer",
    "Verdict",
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
    "normalize",
    "open_task",
    "plot_explain",
    "plot_layers",
    "plot_path",
    "plot_plane",
    "save_transform",
    "scramble",
    "symmetry",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'isobasin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
