# SHIM
# mypy: implicit-reexport
from isobasin.report.figures import plot_explain as plot_explain
from isobasin.report.figures import plot_layers as plot_layers
from isobasin.report.figures import plot_path as plot_path
from isobasin.report.figures import plot_plane as plot_plane
