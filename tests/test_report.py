"""The report without a browser: reading untrusted results, the verdict's rule, the page's text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from isobasin.cli import run
from isobasin.errors import IsobasinError
from isobasin.report import page, read_result, table_rows, verdict, write_report
from isobasin.report.layout import embed
from isobasin.report.page import MAX_BYTES, render
from isobasin.report.result import PairResult, components, exactness, heat_map
from isobasin.report.text import clean, element, short
from path_documents import Document, document, minimal, with_hole

HOSTILE = (
    "<script>window.pwned=1</script>",
    "</script><script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=1">',
)


def pair_of(found: Document) -> PairResult:
    return read_result(found).pairs[0]


def said(found: Document) -> tuple[str, str]:
    result = verdict(pair_of(found))
    return result.state, result.sentence.replace("\N{NO-BREAK SPACE}", " ")


def page_of(*documents: Document) -> str:
    return render([read_result(found) for found in documents])


@pytest.mark.parametrize(
    ("naive", "aligned", "state", "words"),
    [
        (1.0, 0.05, "connected", "falls from 1 to 0.05 nats, 5 % of the naive one"),
        (1.0, 0.0501, "not connected", "only falls from 1 to 0.0501 nats"),
        (0.3, 0.02, "connected", "from 0.3 to 0.02 nats, 6.7 %"),
        (0.3, 0.0201, "not connected", "only falls"),
        (0.3, 0.4, "not connected", "does not fall: it goes from 0.3 to 0.4 nats, 133.3 %"),
        (0.02, 0.01, "already connected", "naive loss barrier is 0.02 nats; after alignment it is 0.01 nats"),
        (0.01, 0.5, "already connected", "after alignment it is 0.5 nats"),
        (0.01, None, "already connected", "already without alignment: the naive loss barrier is 0.01 nats."),
        (0.0201, None, "not connected", "naive loss barrier is 0.0201 nats; alignment was not tried"),
        (0.0, 0.0, "already connected", "naive loss barrier is 0 nats"),
    ],
)
def test_the_verdict_follows_the_rule(naive: float, aligned: float | None, state: str, words: str) -> None:
    found = document(naive=naive, aligned=aligned)
    for path, height in (("naive", naive), ("aligned", aligned)):
        if height is not None:
            found["barrier"]["A-B"][path]["loss"] = height  # without the rounding of the curve
    assert said(found)[0] == state
    assert words in said(found)[1]


def test_a_path_with_a_hole_is_not_judged() -> None:
    state, words = said(with_hole(document(aligned=None)))
    assert state == "not measured"
    assert words.endswith("the loss on the naive path is not finite at λ = 0.5.")
    state, words = said(with_hole(document(), "aligned", 6))
    assert state == "not measured"
    assert words.endswith("aligned path is not finite at λ = 0.25; the naive barrier is 1.204 nats.")
    state, words = said(with_hole(with_hole(document()), "aligned", 6))
    assert state == "not measured"
    assert "the naive path has no barrier to compare with" in words


def test_without_a_naive_barrier_only_the_absolute_rule_counts() -> None:
    state, words = said(with_hole(document(aligned=0.01)))
    assert state == "connected"
    assert "aligned loss barrier is 0.01 nats; the naive path has no barrier to compare with" in words
    assert said(with_hole(document(aligned=0.03)))[0] == "not connected"
    assert said(document(aligned=0.03))[0] == "connected"


def test_two_points_judge_nothing() -> None:
    assert said(minimal(2))[0] == "not measured"
    assert "only the two ends were measured" in said(minimal(2))[1]
    assert said(minimal(3))[0] == "not connected"


def test_barriers_come_from_the_curve_where_the_file_is_silent() -> None:
    found = document()
    del found["barrier"], found["barrier_lambda"]
    for path, height in (("naive", 1.204), ("aligned", 0.031)):
        barrier = pair_of(found).paths[path].barrier("loss")
        assert barrier.height == pytest.approx(height)
        assert barrier.lam == 0.5
    accuracy = pair_of(found).paths["naive"].barrier("accuracy")
    assert accuracy.height == pytest.approx(0.28 * 1.204)
    found["barrier"] = {"A-B": {"naive": {"loss": 0.5}}}
    assert pair_of(found).paths["naive"].barrier("loss").height == 0.5


def test_table_rows_are_ends_middle_and_barrier() -> None:
    rows = table_rows(pair_of(document(kind="lm")))
    metrics = ["loss", "accuracy", "perplexity", "bits_per_byte"]
    assert [(row.metric, row.path) for row in rows] == [(m, p) for m in metrics for p in ("naive", "aligned")]
    first = rows[0]
    assert (first.start, first.end) == (0.21, 0.19)
    assert first.middle == pytest.approx(0.2 + 1.204)
    assert first.barrier.height == pytest.approx(1.204)
    assert rows[4].barrier.height is None, "perplexity has no barrier"


def test_heat_map_puts_the_whole_model_last_and_leaves_gaps() -> None:
    alignment = pair_of(document()).alignment
    assert alignment is not None
    table = heat_map(alignment.layers[::-1])
    assert table.layers == (0, 1, 2, 3, None)
    assert set(table.spaces) == {"heads", "ff", "resid"}
    row = dict(zip(table.spaces, table.cells[0]))
    assert row["heads"] is not None
    assert row["heads"].gain == pytest.approx(0.78)
    assert row["resid"] is None


@pytest.mark.parametrize(
    ("change", "dtype", "words"),
    [
        (9e-7, "float32", "computes the same function as B: outputs moved by at most 9e-7"),
        (2e-6, "float32", "more than rounding does"),
        (2e-6, "float64", "more than rounding does"),
        (0.01, "bfloat16", "computes the same function"),
        (0.5, "bfloat16", "more than rounding does"),
        (None, "float32", "was not measured"),
    ],
)
def test_exactness_is_judged_by_the_type(change: float | None, dtype: str, words: str) -> None:
    found = document()
    found["alignment"]["A-B"]["max_output_change"] = change
    found["models"]["B"]["dtype"] = dtype
    assert words in (exactness(pair_of(found)) or "")
    assert exactness(pair_of(document(aligned=None))) is None


def test_components_of_both_paths_are_listed_once() -> None:
    found = document()
    found["explain"]["A-B"]["aligned"]["components"] = [{"name": "other", "barrier": None, "share": None}]
    pair = pair_of(found)
    assert components(pair) == [*pair.explain["naive"], "other"]
    assert "other" not in pair.explain["naive"]
    assert pair.explain["aligned"] == {"other": None}


def test_a_plane_names_its_points_by_the_letters_of_its_pair() -> None:
    found = document(3)
    found["plane"]["B-C"] = {**found["plane"]["A-B"]}
    planes = [pair.plane for pair in read_result(found).pairs]
    assert [list(plane.points) for plane in planes if plane] == [["A", "B", "B aligned"], ["B", "C", "C aligned"]]
    found["plane"]["B-C"]["points"] = {"B": [0, 0], "elsewhere": [1, 1]}
    plane = read_result(found).pairs[2].plane
    assert plane is not None
    assert list(plane.points) == ["B", "elsewhere"], "names of its own stay"


def change(found: Document, place: str, value: Any) -> Document:
    """Put a value at a dotted place."""
    *above, last = place.split(".")
    inner: Any = found
    for key in above:
        inner = inner[key]
    inner[last] = value
    return found


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("kind", "other", "expected 'isobasin.path', schema 1"),
        ("schema", 2, "schema 2, expected"),
        ("lambdas", [0.0], "ascending numbers from 0 to 1"),
        ("lambdas", [0.0, 0.5, 0.4, 1.0], "ascending numbers"),
        ("lambdas", ["x"], r"lambdas\[0\] is 'x', expected a number"),
        ("lambdas", [0.0] * 20_000, "at most 10001 entries"),
        ("curves", {}, "at least one pair"),
        ("curves", [], "expected an object"),
        ("curves.A-B", {"aligned": {"loss": [0] * 25}}, r"curves\.A-B\.naive is None"),
        ("curves.A-B.naive.loss", [1.0, 2.0], "a list of 2, expected one value for each of 25 lambdas"),
        ("curves.A-B.naive.loss", None, "expected a list of losses"),
        ("curves.A-B.naive.loss", [True] * 25, "is True, expected a number or null"),
        ("curves.<b>", {}, "two letters such as 'A-B'"),
        ("alignment.A-B.per_layer", [3], r"per_layer\[0\] is 3, expected an object"),
        ("alignment.A-B.per_layer", [{"layer": "one"}], "expected a whole number or null"),
        ("explain.A-B.naive.components", {"a": 1}, "expected a list"),
        ("plane.A-B.loss", [[1.0]], "expected 21 rows of 21"),
        ("plane.A-B.x", [3, 2, 1], "two ascending numbers"),
        ("plane.A-B.points", {"A": [1]}, "expected two numbers"),
        ("models.A", "seed0", r"models\.A is 'seed0', expected an object"),
    ],
)
def test_malformed_results_are_one_line_errors(place: str, value: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(change(document(), place, value)))
    with pytest.raises(IsobasinError, match=message) as caught:
        read_result(file)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(file)), "the file is named"


def test_files_that_are_none_are_one_line_errors(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with pytest.raises(IsobasinError, match=r"run\.json: can not be read"):
        read_result(file)
    for content, message in (("{", "not valid JSON"), ("[1]", "holds a JSON list"), ("[" * 100_000, "not valid JSON")):
        file.write_text(content)
        with pytest.raises(IsobasinError, match=message):
            read_result(file)
    file.write_text(json.dumps(document()))
    assert read_result(file).pairs[0].key == "A-B"
    deep: Document = {}
    for _ in range(30):
        deep = {"a": deep}
    with pytest.raises(IsobasinError, match="nested deeper than 20"):
        read_result({**document(), "task": deep})


def test_what_is_not_finite_counts_as_a_hole() -> None:
    for value in (float("nan"), float("inf"), 10**400, 1e40, None):
        found = document()
        found["curves"]["A-B"]["naive"]["loss"][12] = value
        line = pair_of(found).paths["naive"]
        assert line.not_finite(pair_of(found).lambdas, "loss") == (0.5,)
        assert line.barrier("loss").height is None
        assert "NaN" not in page_of(found)
    assert pair_of(document()).paths["naive"].not_finite((0.0,), "loss") == ()


@pytest.mark.parametrize(
    "found",
    [
        minimal(),
        minimal(101),
        document(3, 101),
        document(2),
        document(aligned=None),
        with_hole(document()),
        document(kind="lm"),
    ],
)
def test_every_shape_gives_a_page_of_bounded_size_that_loads_nothing(found: Document) -> None:
    text = page_of(found)
    assert 20_000 < len(text.encode("utf-8")) < MAX_BYTES
    assert "{{" not in text
    assert loads(text) == []


def loads(text: str) -> list[str]:
    """What in a page would ask for something outside it."""
    outside = re.findall(
        r"""(?:src|srcset|action|poster|background)\s*=|@import|url\(|<(?:iframe|object|embed|base)\b""", text
    )
    links = re.findall(r"<link[^>]*>", text)
    targets = re.findall(r"""href="([^"]*)""", text)
    return (
        outside
        + [x for x in links if 'href="data:,"' not in x]
        + [x for x in targets if not x.startswith(("#", "data:,"))]
    )


def test_a_planted_request_is_found() -> None:
    plain = page_of(minimal())
    for planted in (
        '<img src="x">',
        '<link rel="stylesheet" href="x.css">',
        "<style>@import 'x'</style>",
        '<a href="http://x">',
    ):
        assert loads(plain + planted) != []


def test_nothing_runs_but_the_script_of_the_page() -> None:
    text = page_of(document())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert re.search(r"""\sstyle\s*=|\son\w+\s*=""", text.split("<script", maxsplit=1)[0]) is None
    assert len(re.findall("<script", text)) == 3


@pytest.mark.parametrize("name", [*HOSTILE, "{{script}}", "{{body}}", "a\u2028b", "half \ud800", "-->", "&lt;"])
def test_odd_names_stay_names(name: str) -> None:
    found = document(names=(name, name, name))
    found["models"]["A"] |= {"family": name, "sha256": name, name: name}
    found["alignment"]["A-B"]["scope"] = name
    found["alignment"]["A-B"]["per_layer"][0]["space"] = name
    found["explain"]["A-B"]["naive"]["components"][0]["name"] = name
    found["plane"]["A-B"]["points"][name] = [0.2, 0.3]
    found["task"]["name"] = name
    found["provenance"]["command"] = name
    found["provenance"][name] = {name: name}
    page_text = page_of(found)
    assert page_text.encode("utf-8"), "valid text"
    assert len(re.findall("<script", page_text)) == 3
    assert len(re.findall("</script>", page_text)) == 3
    assert "<img" not in page_text
    data = re.search(r'id="results">(.*?)</script>', page_text)
    assert data is not None
    assert json.loads(data[1])[0]["models"]["B"]["name"] == name.encode("utf-8", "replace").decode("utf-8")


def test_escaping_is_not_optional() -> None:
    assert str(element("p", HOSTILE[0], title='"x"')) == (
        '<p title="&quot;x&quot;">&lt;script&gt;window.pwned=1&lt;/script&gt;</p>'
    )
    assert str(element("p", element("b", "x"), None, hidden=True, lang=None)) == "<p hidden><b>x</b></p>"
    assert embed(["</script>&\u2028"]) == '["\\u003c/script\\u003e\\u0026\\u2028"]'
    assert clean("a\u202eb\x00c") == "a\ufffdb\ufffdc"
    assert short("n" * 400, 9) == "nnnn…nnnn"


def test_the_page_is_written_whole_and_only_where_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.html"
    assert write_report([document()], out) == out
    first = out.read_bytes()
    with pytest.raises(IsobasinError, match="already there; choose another name, or use --force to replace it"):
        write_report([document()], out)
    write_report([document(naive=0.5)], out, force=True)
    assert out.read_bytes() != first
    kept = out.read_bytes()
    monkeypatch.setattr("os.fsync", _no_space)
    with pytest.raises(IsobasinError, match=r"can not be written \(No space left"):
        write_report([document()], out, force=True)
    assert out.read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"], "a temporary file is left"


def _no_space(handle: int) -> None:
    raise OSError(28, "No space left on device")


def test_bad_places_and_sizes_are_one_line_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IsobasinError, match="a folder, expected the name of a file"):
        write_report([document()], tmp_path)
    with pytest.raises(IsobasinError, match=r"no such folder for report\.html"):
        write_report([document()], tmp_path / "none" / "report.html")
    with pytest.raises(IsobasinError, match=r"at least one path\.json"):
        write_report([], tmp_path / "report.html")
    monkeypatch.setattr(page, "MAX_BYTES", 10_000)
    with pytest.raises(IsobasinError, match=r"the page would have 0\.\d MB, expected at most 0"):
        write_report([document()], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_the_command_reports_each_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_text(json.dumps(document(3)))
    files[1].write_text(json.dumps(document(aligned=0.9)))
    words = ["report", *map(str, files), "-o", str(tmp_path / "report.html")]
    assert run([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["output"] == str(tmp_path / "report.html")
    assert [pair["verdict"] for pair in facts["pairs"]] == ["connected"] * 3 + ["not connected"]
    assert run([*words, "--force"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert 'id="r2-A-B"' in (tmp_path / "report.html").read_text("utf-8")
