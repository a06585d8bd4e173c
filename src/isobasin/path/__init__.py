"""The straight path between two models: metrics along it, its barrier, and which components cause the barrier."""

from isobasin.path.curve import Curve as Curve  # SHIM-NAME
from isobasin.path.evaluation import evaluate_path as evaluate_path  # SHIM-NAME
