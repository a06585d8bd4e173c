"""Figures: every one is written, whole, for every shape of result, and shows what it should."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from isobasin.errors import IsobasinError
from isobasin.report.figures import plot_explain, plot_layers, plot_path, plot_plane
from isobasin.report.result import N_BANDS, LossPlane, bands, read_result
from isobasin.report.svg import band_of, interpolate
from path_documents import Document, document, minimal, with_hole

PLOTS = [plot_path, plot_explain, plot_plane, plot_layers]
STARTS = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}
ODD = "$x_1$ <script>&\u202e\x00 模型 " + "n" * 300


@pytest.fixture
def as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """SVG keeps words as words, so that a test can read them."""
    monkeypatch.setattr("isobasin.report.figures._STYLE", {**_style(), "svg.fonttype": "none"})


def _style() -> Document:
    from isobasin.report.figures import _STYLE

    return dict(_STYLE)


def written(plot: Callable[..., Figure], out: Path, result: Document | None = None) -> Path:
    plot(document() if result is None else result, out)
    return out


def words(path: Path) -> str:
    return path.read_text("utf-8").replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("suffix", STARTS)
@pytest.mark.parametrize("plot", PLOTS)
def test_each_figure_is_written_in_each_format(plot, suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"figure{suffix}"
    assert isinstance(plot(document(), out), Figure)
    assert out.read_bytes().startswith(STARTS[suffix])
    assert out.stat().st_size > 3000
    assert [path.name for path in tmp_path.iterdir()] == [out.name], "a temporary file is left"


@pytest.mark.parametrize("plot", PLOTS)
def test_the_same_result_gives_the_same_file_and_settings_stay(plot, tmp_path: Path) -> None:
    settings = dict(matplotlib.rcParams)
    first = written(plot, tmp_path / "a.svg").read_bytes()
    assert dict(matplotlib.rcParams) == settings
    with matplotlib.rc_context({"font.size": 30, "figure.facecolor": "black", "axes.grid": True}):
        assert written(plot, tmp_path / "b.svg").read_bytes() == first
    changed = document(naive=0.7, names=("x", "y", "z"))
    changed["explain"]["A-B"]["naive"]["components"][0]["share"] = 0.9
    changed["plane"]["A-B"]["loss"][0][0] = 9.0
    changed["alignment"]["A-B"]["per_layer"][0]["distance_after"] = 1.0
    assert written(plot, tmp_path / "c.svg", changed).read_bytes() != first


@pytest.mark.parametrize(
    "result",
    [
        minimal(),
        minimal(3),
        document(3),
        document(2, 101),
        document(aligned=None),
        with_hole(document()),
        with_hole(document(), "aligned", 0),
        document(naive=0.0, aligned=0.0),
        document(names=(ODD, ODD, ODD)),
    ],
    ids=["two points", "three points", "triple", "101 points", "naive", "hole", "no end", "flat", "odd names"],
)
def test_paths_of_every_shape_are_drawn(result: Document, tmp_path: Path) -> None:
    before = copy.deepcopy(result)
    assert written(plot_path, tmp_path / "path.png", result).stat().st_size > 3000
    assert result == before, "the input was changed"


@pytest.mark.usefixtures("as_text")
def test_the_path_names_ends_barriers_scope_and_matcher(tmp_path: Path) -> None:
    found = words(written(plot_path, tmp_path / "path.svg", document()))
    for text in (
        "seed0",
        "seed1",
        "barrier 1.204",
        "barrier 0.0310",
        "barrier 33.7 pt",
        "scope model, matcher weights",
    ):
        assert text in found
    for text in ("barrier 0.0310", "scope model"):
        assert text not in words(written(plot_path, tmp_path / "naive.svg", document(aligned=None)))


@pytest.mark.usefixtures("as_text")
def test_a_hole_is_named_at_its_lambda_and_has_no_barrier(tmp_path: Path) -> None:
    found = words(written(plot_path, tmp_path / "path.svg", with_hole(document())))
    assert "naive: not finite at λ = 0.5" in found
    assert "barrier 1.204" not in found
    assert "not finite" not in words(written(plot_path, tmp_path / "whole.svg", document()))


@pytest.mark.usefixtures("as_text")
def test_a_dollar_starts_no_formula(tmp_path: Path) -> None:
    assert "$x_1$ &lt;" in words(written(plot_path, tmp_path / "path.svg", document(names=("$x_1$ <", "b", "c"))))


def test_all_empty_and_constant_planes_are_drawn(tmp_path: Path) -> None:
    for fill in (None, 0.3):
        result = document()
        surface = result["plane"]["A-B"]
        surface["loss"] = [[fill] * len(surface["x"]) for _ in surface["y"]]
        assert bands(read_result(result).pairs[0].plane) is None
        assert written(plot_plane, tmp_path / "plane.png", result).exists()


def test_numbers_of_narrow_ranges_differ(tmp_path: Path, as_text: None) -> None:
    """Losses that have three digits in common."""
    result = document()
    surface = result["plane"]["A-B"]
    surface["loss"] = [[2.7 + 1e-4 * value for value in row] for row in surface["loss"]]
    for pair in result["curves"].values():
        for path in pair.values():
            path["loss"] = [2.7 + 1e-4 * value for value in path["loss"]]
    for plot in (plot_plane, plot_path):
        found = re.findall(r">(2\.[67]\d*)<", words(written(plot, tmp_path / "figure.svg", result)))
        assert 3 <= len(found) == len(set(found)), found


def test_a_plane_with_holes_has_bands_that_hold_its_losses() -> None:
    plane = LossPlane((0.0, 1.0, 2.0), (0.0, 1.0), ((0.0, 1.0, None), (2.0, 3.0, 4.0)), {})
    levels = bands(plane)
    assert levels is not None
    assert len(levels) == N_BANDS + 1
    assert (band_of(0.0, levels), band_of(100.0, levels)) == (0, N_BANDS - 1)
    assert 5 * (levels[1] - levels[0]) < levels[-1] - levels[-2], "dense where the loss is low"
    fine = interpolate(plane, 4)
    assert fine[0][0] == pytest.approx(0.875 * 0.25 + 0.125 * 2.25)  # at x = 0.25, y = 0.125
    assert np.isnan(fine[0][3]), "beside the hole"


@pytest.mark.parametrize(
    ("plot", "absent"), [(plot_explain, "explain"), (plot_plane, "plane"), (plot_layers, "alignment")]
)
def test_an_absent_part_is_a_clear_error(plot, absent: str, tmp_path: Path) -> None:
    result = document()
    del result[absent]
    with pytest.raises(IsobasinError, match=r"pair A-B: the result has no .*isobasin path --"):
        plot(result, tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(IsobasinError, match=r"'perplexity' was not measured, expected one of loss, accuracy"):
        plot_path(document(), tmp_path / "path.png", metric="perplexity")
    with pytest.raises(IsobasinError, match=r"'\.gif', expected \.png, \.svg or \.pdf"):
        plot_path(document(), tmp_path / "path.gif")
    with pytest.raises(IsobasinError, match="no such folder"):
        plot_path(document(), tmp_path / "nowhere" / "path.png")
    assert list(tmp_path.iterdir()) == []
    plot_path(document(kind="lm"), tmp_path / "path.png", metric="perplexity")
    assert (tmp_path / "path.png").exists()


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_an_older_figure_is_replaced(tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"path.{ending}"
    older = written(plot_path, out).read_bytes() + b"an older one"
    out.write_bytes(older)
    assert b"an older one" not in written(plot_path, out).read_bytes()
    for other in (b"no picture", b"<?xml version='1.0'?><svg/>", b"\x89PNG\r\n\x1a\n", b"%PDF-1.7\n"):
        out.write_bytes(other)
        with pytest.raises(IsobasinError, match="not a figure of isobasin, so it is not replaced"):
            plot_path(document(), out)
        assert out.read_bytes() == other
