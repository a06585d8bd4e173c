"""A packed study: one file that is read like the folder, and that gives the folder back."""

import json
from pathlib import Path

import pytest
from study_documents import full_study

from isobasin.errors import IsobasinError
from isobasin.report.study_page import write_study_report
from isobasin.study.__main__ import main
from isobasin.study.results import Study, read_study
from isobasin.study.store import pack, unpack

RESULTS = Path(__file__).parents[2] / "results/study"


def contents(folder: Path) -> dict[str, object]:
    return {str(path.relative_to(folder)): json.loads(path.read_text()) for path in folder.rglob("*.json")}


def test_a_packed_study_reads_like_its_folder(tmp_path: Path) -> None:
    folder = full_study(tmp_path / "studies" / "paper")
    (tmp_path / "packed").mkdir()
    packed = pack(folder, tmp_path / "packed" / "paper.jsonl")
    before, after = read_study(tmp_path / "studies"), read_study(packed.parent)
    assert after == before
    (folder / "study.json").unlink()
    alone = read_study(tmp_path / "studies")
    assert alone != before
    pack(folder, packed)
    assert read_study(packed.parent) == alone


def test_the_report_of_a_packed_study_goes_into_a_folder_of_its_name(tmp_path: Path) -> None:
    packed = pack(full_study(tmp_path / "studies" / "paper"), tmp_path / "packed.jsonl")
    assert read_study(packed) == read_study(tmp_path / "studies" / "paper")
    page = write_study_report(packed)
    assert page == tmp_path / "packed" / "report.html"
    assert page.read_text() == write_study_report(tmp_path / "studies" / "paper").read_text()
    assert [*(tmp_path / "packed" / "figures").iterdir()]
    assert write_study_report(packed) == page
    with pytest.raises(IsobasinError, match="can not be read"):
        write_study_report(tmp_path / "nothing.jsonl")


def test_a_packed_study_gives_its_folder_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = full_study(tmp_path / "paper")
    before = contents(folder)
    assert main(["pack", str(folder)]) == 0
    packed = Path(json.loads(capsys.readouterr().out)["output"])
    assert packed == tmp_path / "paper.jsonl"
    assert main(["unpack", str(packed)]) == 2
    assert "paper: already there; choose another folder with -o" in capsys.readouterr().err
    assert main(["unpack", str(packed), "-o", str(tmp_path / "again")]) == 0
    assert contents(tmp_path / "again") == before


def test_packing_replaces_packed_studies_only(tmp_path: Path) -> None:
    folder = full_study(tmp_path / "paper")
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(IsobasinError, match="notes: already there, and no packed study; choose another name with -o"):
        pack(folder, tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"
    assert pack(folder) == pack(folder)


def test_a_folder_is_read_in_place_of_a_packed_study_of_its_name(tmp_path: Path) -> None:
    full_study(tmp_path / "paper")
    n_cells = len(read_study(tmp_path).cells)
    pack(tmp_path / "paper")
    assert len(read_study(tmp_path).cells) == n_cells
    pack(tmp_path / "paper", tmp_path / "copy.jsonl")
    both: Study = read_study(tmp_path)
    assert (len(both.cells), both.name) == (2 * n_cells, tmp_path.name)


@pytest.mark.parametrize("text", ["", "{", "[1]\n", '{"study": null}\n{"name": "pair-1"}\n', '{"study": null}\n3\n'])
def test_a_file_that_is_no_packed_study_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "paper.jsonl").write_text(text)
    with pytest.raises(IsobasinError, match=r"paper\.jsonl: is not a packed study .*; pack the folder"):
        read_study(tmp_path)


def test_only_a_study_is_packed(tmp_path: Path) -> None:
    with pytest.raises(IsobasinError, match=r"no study in it, expected study\.json or done"):
        pack(tmp_path)
    with pytest.raises(IsobasinError, match="is not a packed study"):
        unpack(tmp_path / "missing.jsonl")


def test_the_results_of_the_repository_are_a_study() -> None:
    study = read_study(RESULTS)
    summary = json.loads((RESULTS / "summary.json").read_text(encoding="utf-8"))
    assert [cell.about["cell"] for cell in study.cells] == [row["cell"] for row in summary["cells"]]
    assert [cell.status for cell in study.cells] == [row["status"] for row in summary["cells"]]
    assert sum(len(cell.pairs) for cell in study.cells) == sum(len(row["pairs"]) for row in summary["cells"])
