"""The straight line between two models: losses along it, its barrier, where the barrier sits."""

from isobasin.path.curve import Barrier, Curve, grid
from isobasin.path.evaluate import evaluate_path

__all__ = ["Barrier", "Curve", "evaluate_path", "grid"]
