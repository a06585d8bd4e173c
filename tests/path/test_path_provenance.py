"""Where a result says it comes from."""

import shutil
import subprocess
from pathlib import Path

import pytest

from isobasin.path import provenance


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_result_names_its_commit_and_says_whether_the_source_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "src" / "isobasin" / "path" / "provenance.py"
    source.parent.mkdir(parents=True)
    source.write_text("first\n")
    monkeypatch.setattr(provenance, "__file__", str(source))

    def commit() -> str | None:
        found: str | None = provenance.provenance(command="", seed=0, device="cpu", seconds=0)["git"]
        return found

    def git(*words: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *author, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    git("init", "--quiet")
    assert commit() is None  # a file that nobody keeps
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    head = git("rev-parse", "--short=12", "HEAD").strip()
    assert commit() == head
    (tmp_path / "notes.txt").write_text("not source\n")
    assert commit() == head
    source.write_text("second\n")
    assert commit() == head + "+"
