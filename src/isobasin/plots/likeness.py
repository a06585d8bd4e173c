# SHIM
# mypy: implicit-reexport
from isobasin.report.figures import plot_similarity as plot_likeness  # noqa: F401
