"""Files and folders appear whole or not at all; outputs are refused early; a resume file belongs to one key."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import IO, get_args

import pytest
import torch

from isobasin import files
from isobasin.cli import run
from isobasin.errors import IsobasinError, TransformError
from isobasin.files import (
    AtomicOutput,
    FileKind,
    NullResumeStore,
    ResumeFile,
    atomic_write,
    atomic_write_all,
    check_output_file,
    commit_with,
    recover,
    remove,
    remove_unfinished,
)
from isobasin.model import ModelConfig, Transformer
from isobasin.weights import load


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
    atomic_write(tmp_path / "file", b"x")
    (root,) = seen[0]
    assert root.startswith(".file.isobasin-tmp-")
    assert seen[1:] == [[root, "file"]]  # the folder, once the name is in it
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["n" * 255, "字" * 85])  # the longest names a file may have
def test_long_names(name: str, tmp_path: Path) -> None:
    atomic_write(tmp_path / name, b"x")
    with AtomicOutput(tmp_path / name[:-1], folder=True) as folder:
        folder.commit()
    ResumeFile(tmp_path / name, "partial", {}).keep("a", 1)
    assert ResumeFile(tmp_path / name, "partial", {}).find("a") == 1
    ResumeFile(tmp_path / name, "partial", {}).close()
    assert names(tmp_path) == [name[:-1], name]


def test_places_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for place, options, message in (
        (tmp_path, {}, "a folder, expected the name of a file to write"),
        (tmp_path / "taken", {}, "taken: already there; choose another name, or use --force to replace it"),
        (tmp_path / "no" / "file", {}, "no: no such folder for file; create it first"),
        (tmp_path / "no" / "file", {"what": "the page"}, "no such folder for the page"),
        (tmp_path / "new", {"inputs": (tmp_path,)}, "new: lies inside the input"),
    ):
        with pytest.raises(IsobasinError, match=message):
            check_output_file(place, force=False, **options)  # type: ignore[arg-type]
    os.mkfifo(tmp_path / "pipe")  # a rename would replace it; for root /dev/null as well
    with pytest.raises(IsobasinError, match="pipe: a device or pipe, expected the name of a file"):
        check_output_file(tmp_path / "pipe", force=True)
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


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced_only_by_commit(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    out = tmp_path / "deep" / "out"
    with AtomicOutput(out, folder=True) as folder:
        (folder.new / "sub").mkdir()
        (folder.new / "sub" / "file").write_text("old")
        folder.commit()
    assert (out / "sub" / "file").read_text() == "old"
    with AtomicOutput(out, folder=True) as folder:
        (folder.new / "file").write_text("lost")
    assert names(out) == ["sub"]
    with AtomicOutput(out, folder=True) as folder:
        (folder.new / "file").write_text("new")
        folder.commit()
    assert names(out) == ["file"]
    assert names(out.parent) == ["out"]


@pytest.mark.skipif(sys.platform != "linux", reason="whether the file system can exchange folders is known here only")
def test_folders_are_exchanged_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    monkeypatch.setattr(os, "rename", lambda *_: pytest.fail("the output is away for a moment"))
    with AtomicOutput(tmp_path / "out", folder=True) as folder:
        (folder.new / "new").touch()
        folder.commit()
        assert names(folder.new) == ["old"]
    assert names(tmp_path / "out") == ["new"]
    assert names(tmp_path) == ["out"]
    assert not files._exchange(tmp_path / "out", tmp_path / "missing")


def test_a_deletion_is_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    monkeypatch.setattr(files, "_settle", lambda root, path: None)  # killed here
    remove(tmp_path / "folder")
    monkeypatch.undo()
    assert not (tmp_path / "folder").exists()
    remove(tmp_path / "folder")  # it is gone, and so is what was left
    assert names(tmp_path) == []


# -- what a killed process leaves ------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from isobasin import files
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
place = Path(sys.argv[1])
"""


def killed(place: Path, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED + code, str(place)], timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(IsobasinError, match=r"file: can not be written \(No space left\)"):
        atomic_write(tmp_path / "file", "x")
    assert names(tmp_path) == []


def test_what_a_killed_process_left_beside_a_file_the_next_removes(tmp_path: Path) -> None:
    killed(tmp_path, "files.atomic_write(place / 'file', kill)")
    assert len(names(tmp_path)) == 1
    recover(tmp_path / "other")
    recover(tmp_path / "fil")
    assert len(names(tmp_path)) == 1  # not theirs
    check_output_file(tmp_path / "file", force=False)
    assert names(tmp_path) == []


@pytest.mark.parametrize("at", ["os.mkdir", "os.open", "files._lock", "json.dumps", "os.write"])
def test_killed_before_the_marker_is_complete(at: str, tmp_path: Path) -> None:
    module, _, function = at.rpartition(".")
    after = f"import json; do = {at}; {module}.{function} = lambda *a, **k: (do(*a, **k), kill())"
    killed(tmp_path, f"{after}\nfiles.atomic_write(place / 'file', 'x')")
    assert len(names(tmp_path)) == 1
    recover(tmp_path / "file")
    assert names(tmp_path) == []


def test_what_a_killed_process_left_beside_a_resume_file(tmp_path: Path) -> None:
    after = "do = os.replace; os.replace = lambda *a: (do(*a), kill())"
    killed(tmp_path, f"{after}\nfiles.ResumeFile(place / 'out', 'partial', {{}}).keep('a', 1)")
    assert len(names(tmp_path)) == 2
    resume = ResumeFile(tmp_path / "out", "partial", {})
    assert resume.find("a") == 1
    assert names(tmp_path) == [".out.isobasin-partial"]


def test_what_a_live_process_uses_stays(tmp_path: Path) -> None:
    with AtomicOutput(tmp_path / "out", folder=True) as first, AtomicOutput(tmp_path / "out", folder=True) as second:
        recover(tmp_path / "out")
        (first.new / "first").touch()
        (second.new / "second").touch()
        first.commit()
        second.commit()
    assert names(tmp_path / "out") == ["second"]
    assert names(tmp_path) == ["out"]


WRITER = """
for i in range(60):
    files.atomic_write(place / 'file', str(i) * 1000)
    with files.AtomicOutput(place / 'out', folder=True) as folder:
        (folder.new / 'file').write_text(str(i))
        folder.commit()
"""


def test_writers_to_the_same_output_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Each recovers before it writes; it must not take what the others have just begun for something left."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    words = [sys.executable, "-c", KILLED + WRITER, str(tmp_path)]
    writers = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [writer.communicate(timeout=60)[1] for writer in writers] == [""] * 3
    assert names(tmp_path) == ["file", "out"]
    assert (tmp_path / "file").read_text() == "59" * 1000
    assert (tmp_path / "out" / "file").read_text() == "59"


def leave(root: Path, marker: object, *parts: str) -> None:
    root.mkdir()
    for part in parts:
        (root / part).write_text("content")
    if marker is not None:
        (root / "isobasin-writer.json").write_text(marker if isinstance(marker, str) else json.dumps(marker))


def test_only_folders_known_to_be_stale_are_removed(tmp_path: Path) -> None:
    here = {"output": "out", **files._machine()}
    kept: dict[str, tuple[object, ...]] = {
        ".out.isobasin-tmp-1": (here | {"host": "elsewhere", "boot": "1"}, "new"),
        ".out.isobasin-tmp-2": (here | {"host": "elsewhere", "boot": None}, "new"),
        ".out.isobasin-tmp-3": (None, "new"),
        ".out.isobasin-tmp-4": ("{oops", "new"),
        ".out.isobasin-tmp-5": ([], "new"),
        ".out.isobasin-tmp-6": (here | {"output": "../out"}, "new"),
        ".out.isobasin-tmp-7": ({}, "new"),
        ".out2.isobasin-tmp-8": (here | {"output": "out2"}, "new"),
    }
    stale: dict[str, tuple[object, ...]] = {
        ".out.isobasin-tmp-container": (here | {"host": "elsewhere"}, "new"),
        ".out.isobasin-tmp-restarted": (here | {"boot": "1"}, "new"),
        ".out.isobasin-tmp-cut": ("{oops",),
        ".out.isobasin-tmp-empty": (None,),
        ".out.isobasin-tmp-due": (here, "new", "after.json"),
    }
    for name, (marker, *parts) in (kept | stale).items():
        leave(tmp_path / name, marker, *map(str, parts))
    leave(tmp_path / "target", here, "new")
    (tmp_path / ".out.isobasin-tmp-link").symlink_to("target")
    (tmp_path / ".out.isobasin-tmp-file").touch()
    recover(tmp_path / "out")
    assert names(tmp_path) == sorted([*kept, ".out.isobasin-tmp-file", ".out.isobasin-tmp-link", "target"])
    assert names(tmp_path / "target") == ["isobasin-writer.json", "new"]


TWO = """
step, out = {step}, place / 'out'
with files.AtomicOutput(out, folder=True) as first:
    (first.new / 'config').write_text('new')
    commit = files.AtomicOutput.commit
    def counted(self):
        global step
        step -= 1
        if step == 0:
            kill()
        commit(self)
    files.AtomicOutput.commit = counted
    files.commit_with(first, {{place / 'other' / 'transform': 'new'}})
kill()
"""


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("step", "expected"), [(1, "old"), (2, "new"), (3, "new")])
def test_killed_between_two_outputs_that_belong_together(step: int, expected: str, force: bool, tmp_path: Path) -> None:
    out, transform = tmp_path / "out", tmp_path / "other" / "transform"
    transform.parent.mkdir()
    if force:
        out.mkdir()
        (out / "config").write_text("old")
        transform.write_text("old")
    killed(tmp_path, TWO.format(step=step))
    for path in (out, transform):
        recover(path)
    assert names(tmp_path) == (["other", "out"] if force or step > 1 else ["other"])
    found = [file.read_text() for file in (out / "config", transform) if file.exists()]
    assert found == ([expected] * 2 if force or step > 1 else [])
    assert len(names(transform.parent)) == len(found) // 2


def test_a_file_that_belongs_to_another_output_is_not_put_beside_it(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    killed(tmp_path, TWO.format(step=2))
    with AtomicOutput(tmp_path / "out", folder=True) as folder:  # another run, with another transform or none
        (folder.new / "config").write_text("new")
        folder.commit()
    recover(tmp_path / "other" / "transform")
    assert names(tmp_path / "other") == []


def test_interrupted_between_two_outputs_both_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = AtomicOutput.commit

    def interrupted(self: AtomicOutput) -> None:
        commit(self)
        raise KeyboardInterrupt("stop")

    monkeypatch.setattr(AtomicOutput, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stop"):
        atomic_write_all({tmp_path / "one": "1", tmp_path / "two": "2"})
    assert names(tmp_path) == ["one", "two"]


def test_if_one_of_two_outputs_fails_neither_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(TransformError, match="transform: can not be written"),
        AtomicOutput(tmp_path / "out", folder=True) as folder,
    ):
        commit_with(folder, {tmp_path / "missing" / "transform": "x"}, error=TransformError)
    assert names(tmp_path) == []


def test_an_interrupt_before_the_block_begins(tmp_path: Path) -> None:
    lost = [AtomicOutput(tmp_path / "out", folder=True)]  # no `with` statement removes it
    assert len(names(tmp_path)) == 1
    remove_unfinished()
    assert names(tmp_path) == []
    lost[0].discard()


def test_a_child_process_leaves_the_outputs_of_its_parent_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AtomicOutput(tmp_path / "out", folder=True) as folder:
        monkeypatch.setattr(os, "getpid", lambda: 1)
        remove_unfinished()
        assert folder.new.exists()


@pytest.mark.parametrize("folder", [False, True])
def test_a_resume_file_older_than_the_output_is_removed(folder: bool, tmp_path: Path) -> None:
    output = tmp_path / "out"
    states = [".out.isobasin-partial", ".out.A-B.isobasin-learning", ".out.0-12.isobasin-learning"]
    others = [".out.x.A-B.isobasin-learning", ".out2.isobasin-partial", ".out.isobasin-notes"]
    (tmp_path / "old").touch()
    for name in (*states, *others):
        (tmp_path / name).touch()
    if folder:
        output.mkdir()
    written = output / "config.json" if folder else output
    written.touch()
    os.utime(written, (1, 1))  # an interrupted run would replace this output
    files.remove_obsolete(output)
    assert set(names(tmp_path)) >= {*states, *others}
    written.touch()
    files.remove_obsolete(output)
    assert names(tmp_path) == sorted(["old", "out", *others])


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


def safetensors(metadata: dict[str, str]) -> bytes:
    header = json.dumps({"__metadata__": metadata}).encode()
    return len(header).to_bytes(8, "little") + header


def test_force_replaces_files_of_the_same_kind_only(tmp_path: Path) -> None:
    contents: dict[str, bytes] = {
        "run.py": b"print()",
        "other.json": b'{"lambdas": []}',
        "other.html": b"<!DOCTYPE html><p>mine</p>",
        "model.safetensors": safetensors({"format": "pt"}),
        "none.safetensors": (2).to_bytes(8, "little") + b"{}",
        "transform": safetensors({"isobasin-transform": "{}"}),
        "witness": safetensors({"isobasin-witness": "1"}),
        "path result": b'{\n "kind": "isobasin.path", "schema": 1}',
        "page": b'<!doctype html>\n<p class="brand">isobasin</p>',
        "figure": b"\x89PNG\r\n\x1a\n: tEXtSoftware\x00Matplotlib",
        "photograph.png": b"\x89PNG\r\n\x1a\n",
        "drawing.svg": b"<?xml version='1.0'?><svg/>",
        "paper.pdf": b"%PDF-1.7\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").write_bytes(b"")
    kinds = get_args(FileKind)
    assert set(kinds) < set(contents)
    for kind in kinds:
        for own in (kind, "empty"):
            check_output_file(tmp_path / own, force=True, kind=kind)
        for other in contents.keys() - {kind}:
            with pytest.raises(IsobasinError, match=f"not a {kind} of isobasin, so it is not replaced"):
                check_output_file(tmp_path / other, force=True, kind=kind)
    result = tmp_path / "path result"
    with pytest.raises(IsobasinError, match="is the input"):
        check_output_file(result, force=True, kind="path result", inputs=[tmp_path / "." / "path result"])
    (tmp_path / "linked.json").hardlink_to(result)
    with pytest.raises(IsobasinError, match="is the input"):
        check_output_file(tmp_path / "linked.json", force=True, kind="path result", inputs=[result])


HOLDS = "import sys, pathlib, isobasin.files as f; f.reserve(pathlib.Path(sys.argv[1])); print(1, flush=True); input()"


def test_an_output_that_another_process_computes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For files and folders, with --force too; and no longer once the other one has ended, however it did."""
    a, out = str(tmp_path / "a"), tmp_path / "out"
    config = ModelConfig(d_model=6, n_layers=1, n_heads=1, d_ff=4, d_vocab=5, n_positions=4)
    load(Transformer(config, seed=0).state_dict(), config.to_dict()).save(a)
    commands = [["scramble", a], ["lineage", a, a], ["path", a, a, "--data", str(tmp_path / "text.txt")]]
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(out)], stdin=PIPE, stdout=PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        for words in [*commands, ["scramble", a, "--force"]]:
            assert run([*words, "-o", str(out)]) == 2
            assert "another isobasin is computing it" in capsys.readouterr().err
        other.kill()
    assert names(tmp_path) == [".out.isobasin-lock", "a"]
    assert run(["scramble", a, "-o", str(out)]) == 0
    assert run(["scramble", a, "-o", str(out)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert names(tmp_path) == ["a", "out"]


def test_an_output_is_kept_until_the_command_ends_and_by_one_process_alone(tmp_path: Path) -> None:
    files.reserve(tmp_path / "one")
    files.reserve(tmp_path / "one")
    files.reserve(tmp_path / "no such folder" / "two")
    files.reserve(Path(os.devnull))
    assert names(tmp_path) == [".one.isobasin-lock"]
    files.release()
    assert names(tmp_path) == []
