"""What all figures share: colours, type, captions, and writing a file whole.

Colours are those of Okabe and Ito, which people with any of the common colour blindnesses tell apart.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobasin.errors import IsobasinError
from isobasin.files import check_place, write_whole
from isobasin.report.fields import short
from isobasin.report.result import PathResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, FAINT = "#222222", "#666666", "#d9d9d9"
COLOURS = {"naive": "#8a8a8a", "aligned": "#0072B2"}
ACCENT = "#D55E00"
SUFFIXES = (".png", ".svg", ".pdf")
_DPI = 200
_STYLE: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.formatter.useoffset": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,  # names are shown as they are: a `$` in one starts no formula
    "svg.hashsalt": "isobasin",
}

Draw = Callable[["Figure"], None]
_CLIP = re.compile(rb'(?<=id=")p[0-9a-f]{10}(?=")|(?<=url\(#)p[0-9a-f]{10}(?=\))')
_FINE = re.compile(rb"\b[1-9]\d*\.\d{4,}\b")


def write_figure(out: str | Path, size: tuple[float, float], draw: Draw) -> Path:
    """Draw on a new figure of that size in inches and write it; an older file at that place is replaced.

    The reader's own matplotlib settings neither change the figure nor are changed by it.
    """
    return write_figure_as([Path(out)], size, draw)[0]


def write_figure_as(paths: Sequence[Path], size: tuple[float, float], draw: Draw, *, dpi: int = _DPI) -> list[Path]:
    """The same, drawn once and written to several places, each by the ending of its name."""
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise IsobasinError(f"{path}: no kind of picture is known by {path.suffix!r}, expected .png, .svg or .pdf")
        check_place(path, force=True)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # A name may hold letters the font does not have: a box is drawn, which is no reason to warn.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*missing")
        figure = Figure(figsize=size, dpi=dpi, layout="constrained")
        draw(figure)
        made = [_saved(figure, path.suffix.lower().removeprefix(".")) for path in paths]
    for path, data in zip(paths, made):
        write_whole(path, data)
    return list(paths)


def _saved(figure: "Figure", kind: str) -> bytes:
    # Without a date the same result gives the same file.
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    data = io.BytesIO()
    figure.savefig(data, format=kind, metadata=dated)
    return _rounded(_counted(data.getvalue())) if kind == "svg" else data.getvalue()


def _rounded(svg: bytes) -> bytes:
    """Coordinates in thousandths of a point: the last bits of a layout vary, and matplotlib writes six decimals.

    Layouts like halves of such units, so what decides about them is nudged to one side. Scales below 1 stay exact.

    >>> _rounded(b"translate(398.867187 3.0625) translate(398.867188 3.062499) scale(0.015625)")
    b'translate(398.867 3.063) translate(398.867 3.063) scale(0.015625)'
    """
    return _FINE.sub(lambda found: b"%.3f" % (float(found[0]) + 1e-5), svg)


def _counted(svg: bytes) -> bytes:
    """Clip paths by their number: matplotlib names them by a hash over the last bits of a layout, which vary."""
    names: dict[bytes, bytes] = {}
    return _CLIP.sub(lambda found: names.setdefault(found[0], b"clip%d" % len(names)), svg)


def caption(figure: "Figure", title: str, below: str) -> None:
    """A title, and under it in grey what a reader must know to judge the figure."""
    engine = figure.get_layout_engine()
    height = figure.get_figheight()
    if engine is not None:
        engine.set(rect=(0.005, 0.01, 0.99, 1 - 0.56 / height), w_pad=0.08)  # type: ignore[call-arg]
    figure.text(0.02, 1 - 0.10 / height, title, fontsize=12, weight="bold", va="top")
    most = int(13 * figure.get_figwidth())  # characters that fit beside each other
    figure.text(0.02, 1 - 0.34 / height, short(below, most), fontsize=9, color=MUTED, va="top")


def legend(figure: "Figure", axes: "Axes") -> None:
    """Under the panels, where it covers nothing; the line between the ends comes last."""
    found = sorted(zip(*axes.get_legend_handles_labels()), key=lambda entry: entry[1] not in COLOURS)
    if found:
        handles, labels = zip(*found)
        figure.legend(handles, labels, loc="outside lower center", ncols=len(found), fontsize=9)


def measured_on(result: PathResult) -> str:
    """The task in a few words."""
    name, samples = result.task.get("name"), result.task.get("n_samples")
    words = [short(name, 24)] if name else []
    words += [f"{samples:,} samples"] if isinstance(samples, int) else []
    return ", ".join(words)


def joined(*parts: str) -> str:
    return "  ·  ".join(part for part in parts if part)
