"""isobasin: do two Transformers compute the same function, and do they lie in the same basin?

Importing this package imports neither torch nor transformers; each public name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "ActivationMatching": "isobasin.match.matchers",
    "Alignment": "isobasin.match.align",
    "Check": "isobasin.checking",
    "IsobasinError": "isobasin.errors",
    "ModelConfig": "isobasin.model",
    "ReferenceMatching": "isobasin.match.reference",
    "Symmetry": "isobasin.symmetries",
    "Transform": "isobasin.transform",
    "Transformer": "isobasin.model",
    "WeightMatching": "isobasin.match.matchers",
    "Weights": "isobasin.weights",
    "align": "isobasin.match.align",
    "check": "isobasin.checking",
    "load": "isobasin.weights",
    "load_transform": "isobasin.transform_file",
    "normalize": "isobasin.normalize",
    "save_transform": "isobasin.transform_file",
    "scramble": "isobasin.transform",
    "symmetry": "isobasin.symmetries",
}

if TYPE_CHECKING:
    from isobasin.checking import Check, check
    from isobasin.errors import IsobasinError
    from isobasin.match.align import Alignment, align
    from isobasin.match.matchers import ActivationMatching, WeightMatching
    from isobasin.match.reference import ReferenceMatching
    from isobasin.model import ModelConfig, Transformer
    from isobasin.normalize import normalize
    from isobasin.symmetries import Symmetry, symmetry
    from isobasin.transform import Transform, scramble
    from isobasin.transform_file import load_transform, save_transform
    from isobasin.weights import Weights, load

__all__ = [
    "ActivationMatching",
    "Alignment",
    "Check",
    "IsobasinError",
    "ModelConfig",
    "ReferenceMatching",
    "Symmetry",
    "Transform",
    "Transformer",
    "WeightMatching",
    "Weights",
    "__version__",
    "align",
    "check",
    "load",
    "load_transform",
    "normalize",
    "save_transform",
    "scramble",
    "symmetry",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'isobasin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
