"""Figures for papers, from a path.json: PNG, SVG or PDF by the ending of the name. matplotlib is imported on use."""

from isobasin.plots.curves import plot_path
from isobasin.plots.explanation import plot_explain
from isobasin.plots.heat import plot_layers
from isobasin.plots.plane import plot_plane

__all__ = ["plot_explain", "plot_layers", "plot_path", "plot_plane"]
