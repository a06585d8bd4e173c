"""Single files: whole or not at all, no leavings, and refusals before anything is computed."""

import os
import re
from pathlib import Path
from typing import IO

import pytest

from isobasin.errors import IsobasinError, TransformError
from isobasin.files import check_place, write_text, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_there_and_nothing_beside_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "bytes", b"\r\n\x00")
    write_whole(tmp_path / "filled", lambda stream: stream.write(b"two"))
    write_text(tmp_path / "text", "naïve\n")
    assert (tmp_path / "bytes").read_bytes() == b"\r\n\x00"
    assert (tmp_path / "filled").read_bytes() == b"two"
    assert (tmp_path / "text").read_bytes() == "naïve\n".encode()
    write_text(tmp_path / "text", "again")
    assert (tmp_path / "text").read_text() == "again"
    assert names(tmp_path) == ["bytes", "filled", "text"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt("stop"), ValueError("not ours"), OSError(28, "No space left")])
def test_a_failure_leaves_the_old_file_and_no_other(failure: BaseException, tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")

    def half(stream: IO[bytes]) -> None:
        stream.write(b"half of the ne")
        stream.flush()
        assert len(names(tmp_path)) == 2  # it is written beside
        raise failure

    expected = TransformError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected, match=r"stop|not ours|file: can not be written \(No space left\); free space or"):
        write_whole(tmp_path / "file", half, error=TransformError)
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_data_reach_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(names(tmp_path)))
    write_whole(tmp_path / ("n" * 255), b"x")  # the longest name a file may have
    assert len(seen) == 1
    assert re.fullmatch(r"\.n{100}\.isobasin-tmp-\d+", seen[0][0])
    assert names(tmp_path) == ["n" * 255]


def test_places_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for place, options, message in (
        (tmp_path, {}, "a folder, expected the name of a file to write"),
        (tmp_path / "taken", {}, "taken: already there; choose another name or use --force"),
        (tmp_path / "no" / "file", {}, "no: no such folder for file; create it first"),
        (tmp_path / "no" / "file", {"what": "the page"}, "no such folder for the page"),
        (tmp_path / "new", {"inputs": (tmp_path,)}, "new: lies inside the input"),
    ):
        with pytest.raises(IsobasinError, match=message):
            check_place(place, force=False, **options)  # type: ignore[arg-type]
    with pytest.raises(TransformError, match="a folder"):
        check_place(tmp_path, force=True, error=TransformError)
    check_place(tmp_path / "taken", force=True)
    check_place(tmp_path / "new", force=False, inputs=(tmp_path / "other",))
    with pytest.raises(IsobasinError, match=r"file: can not be written \(No such file or directory\)"):
        write_whole(tmp_path / "no" / "file", b"")
