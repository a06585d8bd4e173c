# SHIM
# mypy: implicit-reexport
from isobasin.report.figures import plot_explain as plot_explain  # noqa: F401
from isobasin.report.figures import plot_layers as plot_layers  # noqa: F401
from isobasin.report.figures import plot_path as plot_path  # noqa: F401
from isobasin.report.figures import plot_plane as plot_plane  # noqa: F401
