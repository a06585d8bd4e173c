"""Files and folders appear whole or not at all; outputs are refused early; a resume file belongs to one key."""

import os
import re
from pathlib import Path
from typing import IO

import pytest
import torch

from isobasin.errors import IsobasinError, TransformError
from isobasin.files import AtomicFolder, NullResumeStore, ResumeFile, atomic_write, atomic_write_all, check_output_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_there_and_nothing_beside_it(tmp_path: Path) -> None:
    atomic_write(tmp_path / "bytes", b"\r\n\x00")
    atomic_write(tmp_path / "filled", lambda stream: stream.write(b"two"))
    atomic_write(tmp_path / "text", "naïve\n")
    assert (tmp_path / "bytes").read_bytes() == b"\r\n\x00"
    assert (tmp_path / "filled").read_bytes() == b"two"
    assert (tmp_path / "text").read_bytes() == "naïve\n".encode()
    atomic_write(tmp_path / "text", "again")
    assert (tmp_path / "text").read_text() == "again"
    assert names(tmp_path) == ["bytes", "filled", "text"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt("stop"), ValueError("not ours"), OSError(28, "No space left")])
def test_a_failure_leaves_the_old_file_and_no_other(failure: BaseException, tmp_path: Path) -> None:
    atomic_write(tmp_path / "file", "old")

    def half(stream: IO[bytes]) -> None:
        stream.write(b"half of the ne")
        stream.flush()
        assert len(names(tmp_path)) == 2  # it is written beside
        raise failure

    expected = TransformError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected, match=r"stop|not ours|file: can not be written \(No space left\); free space or"):
        atomic_write(tmp_path / "file", half, error=TransformError)
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_data_reach_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(names(tmp_path)))
    atomic_write(tmp_path / ("n" * 255), b"x")  # the longest name a file may have
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
            check_output_file(place, force=False, **options)  # type: ignore[arg-type]
    with pytest.raises(TransformError, match="a folder"):
        check_output_file(tmp_path, force=True, error=TransformError)
    check_output_file(tmp_path / "taken", force=True)
    check_output_file(tmp_path / "new", force=False, inputs=(tmp_path / "other",))
    with pytest.raises(IsobasinError, match=r"file: can not be written \(No such file or directory\)"):
        atomic_write(tmp_path / "no" / "file", b"")


def test_of_several_files_none_is_replaced_before_all_are_on_the_disk(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    atomic_write_all({one: b"old", two: "old"})

    def fails(stream: IO[bytes]) -> None:
        raise OSError("no message of the system")

    with pytest.raises(IsobasinError, match=r"two: can not be written \(no message of the system\); free space"):
        atomic_write_all({one: b"new", two: fails})
    assert (one.read_text(), two.read_text()) == ("old", "old")
    assert names(tmp_path) == ["one", "two"]


def test_a_folder_is_replaced_only_by_commit(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with AtomicFolder(out) as folder:
        (folder.new / "sub").mkdir()
        (folder.new / "sub" / "file").write_text("old")
        folder.commit()
    assert (out / "sub" / "file").read_text() == "old"
    with AtomicFolder(out) as folder:
        (folder.new / "file").write_text("lost")
    assert names(out) == ["sub"]
    with AtomicFolder(out) as folder:
        (folder.new / "file").write_text("new")
        folder.commit()
    assert names(out) == ["file"]
    assert names(out.parent) == ["out"]


@pytest.mark.parametrize("tensors", [False, True])
def test_a_resume_file_belongs_to_one_key(tensors: bool, tmp_path: Path) -> None:
    def opened(**key: int) -> ResumeFile:
        return ResumeFile(tmp_path / "out", "partial", key, tensors=tensors)

    value = {"step": 3, "w": torch.ones(2)} if tensors else {"loss": float("inf")}
    cache = opened(seed=0)
    assert (cache.n_found, cache.find("a")) == (0, None)
    cache.keep("a", value)
    cache.keep("b", [1])
    assert names(tmp_path) == [".out.isobasin-partial"]
    again = opened(seed=0)
    assert (again.n_found, again.find("b"), repr(again.find("a"))) == (2, [1], repr(value))
    assert opened(seed=1).n_found == 0
    again.path.write_bytes(again.path.read_bytes()[:-9])  # damaged
    assert opened(seed=0).n_found == 0
    cache.close()
    assert names(tmp_path) == []


def test_caches_that_do_not_write(tmp_path: Path) -> None:
    ResumeFile(tmp_path / "out", "partial", {}, writes=False).keep("a", 1)
    assert names(tmp_path) == []
    ResumeFile(tmp_path / "out", "partial", {}).keep("a", 1)
    reader = ResumeFile(tmp_path / "out", "partial", {}, writes=False)
    reader.close()
    assert reader.find("a") == 1
    assert names(tmp_path) == [".out.isobasin-partial"]
    nothing = NullResumeStore()
    nothing.keep("a", 1)
    assert nothing.find("a") is None
