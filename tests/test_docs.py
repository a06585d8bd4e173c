"""README and docs: every console and Python block runs, and what it prints is compared.

The blocks of a page run in order in one folder, which holds what `workspace` makes. Python blocks share their names.
`…` stands for anything on a line, and alone on a line for any lines. A block with a title is a file of that name. What
can not run here is a `text` block whose title begins with "not run". After `<!-- slow -->` a block is run by the slow
tests alone.
"""

import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

import isobasin as ib
import tiny
from isobasin.cli import run
from isobasin.data import shipped
from test_adapters import TARGETS, adapter_folder
from test_other_formats import write_gguf

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": ROOT / "README.md"} | {
    path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))
}
SLOW = os.environ.get("ISOBASIN_SLOW", "0") == "1"
FENCE = re.compile(
    r"^(?P<slow><!-- slow -->\n)?(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {"console", "python", "text", "toml", "yaml", "json"}  # any other would not be run, and would not say so
EXIT_CODES = {
    "different:": 1,
    "NOT": 1,
    "isobasin:": 2,
    "undecided:": 3,
}  # by the first word of a line


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    title: str
    slow: bool
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, source: str) -> Iterator[Block]:
    for found in FENCE.finditer(source):
        line = source.count("\n", 0, found.start("language")) + 1
        text = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        yield Block(page, line, found["language"], found["title"] or "", bool(found["slow"]), text)


def shown_as(expected: str, printed: str) -> bool:
    """Whether this was printed; `…` stands for anything on a line, and alone on a line for any lines."""
    lines = [line.replace("\xa0", " ").rstrip() + "\n" for line in printed.rstrip().splitlines()]
    words = [re.escape(line.rstrip()).replace("…", ".*") + "\n" for line in expected.rstrip().splitlines()]
    return re.fullmatch("".join("(.*\n)*" if word == ".*\n" else word for word in words), "".join(lines)) is not None


# -- console -----------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[tuple[str, str]]:
    """Every command of a console block, without its comment, and what is shown below it."""
    first, *parts = re.split(r"^\$ ", text.replace("\\\n", ""), flags=re.MULTILINE)
    assert not first.strip(), f"not a command: {first}"
    return [(part.partition("\n")[0].partition("  #")[0].strip(), part.partition("\n")[2]) for part in parts]


def call(words: list[str]) -> int:
    if words[0] == "isobasin":
        return run(words[1:])
    runpy.run_path(words[1], run_name="__main__")
    return 0


def execute(command: str, last: int) -> tuple[int, str]:
    """The exit code of a command, and what it printed; isobasin and Python files run in this process."""
    if command == "echo $?":
        return 0, str(last)
    if not command.startswith(("isobasin ", "python ")):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr
    command, _, file = command.partition(" > ")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = call(shlex.split(command))
    if file:
        Path(file.strip()).write_text(out.getvalue(), encoding="utf-8")
        return code, ""
    return code, err.getvalue() if code == 2 else out.getvalue()


def check_console(block: Block) -> None:
    found = commands(block.text)
    code = 0
    for i, (command, expected) in enumerate(found):
        code, printed = execute(command, code)
        asked = [shown for other, shown in found[i + 1 : i + 2] if other == "echo $?"]
        said = [EXIT_CODES[word] for word in re.findall(r"^\S+", expected, re.MULTILINE) if word in EXIT_CODES]
        allowed = int(asked[0]) if asked else (said or [0])[0]
        assert code == allowed, f"{block.place}: {command}: exit code {code}\n{printed}"
        if expected:
            assert shown_as(expected, printed), f"{block.place}: {command}: printed\n{printed}"


# -- Python ------------------------------------------------------------------------------------------------------------


def expected_of(lines: list[str], line: int) -> str:
    """What the comment beside a line says, or the comments below it."""
    beside = lines[line - 1].partition("  # ")[2]
    if beside:
        return beside
    below = []
    for following in lines[line:]:
        if not following.startswith("# "):
            break
        below.append(following[2:])
    return "\n".join(below)


def check_python(block: Block, names: dict[str, object]) -> None:
    """Run a block; every value that it prints is that of the comment beside or below."""
    printed: list[tuple[int, str]] = []

    def record(*values: object, **_: object) -> None:
        printed.append((sys._getframe(1).f_lineno, " ".join(map(str, values))))

    names["print"] = record
    exec(compile(block.text, block.place, "exec"), names)
    lines = block.text.splitlines()
    for line, text in printed:
        expected = expected_of(lines, line)
        assert expected, f"{block.place}: nothing to compare with what line {line} prints\n{text}"
        assert shown_as(expected, text), f"{block.place}: line {line} printed\n{text}"


# -- pages -------------------------------------------------------------------------------------------------------------

TEXT = "To be, or not to be, that is the question. " * 8


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of `isobasin demo`, and what a reader may have: runs, a text, a base with fine-tune and adapter."""
    folder = tmp_path_factory.mktemp("workspace")
    for name in "AB":
        shutil.copytree(shipped("digits") / name, folder / "isobasin-demo" / name)
    config = ib.ModelConfig.preset("llama", d_model=16, n_layers=1, n_heads=2, d_ff=24, d_vocab=256, n_positions=16)
    for seed in range(3):
        ib.Transformer(config, seed=seed).save(folder / f"runs/seed{seed}")
    for name, seed in (("base_a", 0), ("base_b", 1), ("tuned_b", 1)):
        model = ib.Transformer(config, seed=seed)
        if name.startswith("tuned"):
            model.head.weight.data[0] += 0.1
        model.save(folder / name)
    tiny.save(tiny.case("llama-gqa"), folder / "base")
    base = tiny.case("llama-gqa").build(seed=0)
    adapter_folder(base, folder / "adapter", targets=TARGETS["llama-gqa"])
    write_gguf(folder / "base.gguf", base, "llama")
    for name in ("train.txt", "test.txt"):
        (folder / name).write_text(TEXT)
    return folder


def check_page(page: str, source: str, *, slow: bool) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, source):
        if block.slow and not slow:
            continue
        if block.title and block.language != "text":
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            check_console(block)
        elif block.language == "python":
            check_python(block, names)


RUNNABLE = [page for page, path in PAGES.items() if re.search(r"^ *```(console|python)", path.read_text("utf-8"), re.M)]


@pytest.fixture
def inside(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_families: None) -> Path:
    """The working directory, with a copy of the workspace."""
    shutil.copytree(workspace, tmp_path / "page")
    monkeypatch.chdir(tmp_path / "page")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "page"


@pytest.mark.parametrize("page", RUNNABLE)
def test_every_block_of_a_page_runs_and_prints_what_is_shown(page: str, inside: Path) -> None:
    if page == "README.md" and SLOW:
        shutil.rmtree("isobasin-demo")  # README makes it
    check_page(page, PAGES[page].read_text("utf-8"), slow=SLOW)
    assert len(list(inside.iterdir())) >= 4


# -- the runner itself -------------------------------------------------------------------------------------------------


def test_what_is_shown_is_compared() -> None:
    assert shown_as("a … c\n…", "a b c\nd\ne")
    assert not shown_as("a … c\n…", "a b d\ne")
    assert not shown_as("a", "a\nb")
    assert shown_as("…\na\n…", "x\ny\na")
    assert not shown_as("…\na", "a\nb")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("```console\n$ echo one\ntwo\n```\n", r"page:1: echo one: printed\s+one"),
        ("```console\n$ isobasin info isobasin-demo/A\nfamily      llama\n…\n```\n", r"printed\s+family      isobasin"),
        ("```console\n$ isobasin info nowhere\n```\n", "exit code 2"),
        ("```console\n$ isobasin equal isobasin-demo/A isobasin-demo/A\ndifferent: …\n```\n", "exit code 0"),
        ("```console\n$ false\n$ echo $?\n0\n```\n", "exit code 1"),
        ("```console\nisobasin info A\n```\n", "not a command: isobasin info A"),
        ("1. list\n\n    ```python\n    print(1 + 1)  # 3\n    ```\n", r"page:3: line 1 printed\s+2"),
        ("```python\nprint(1 + 1)\n# 2\n# 3\n```\n", r"line 1 printed\s+2"),
        ("```python\nprint(1 + 1)\n```\n", "nothing to compare"),
    ],
)
def test_a_wrong_block_fails(source: str, complaint: str, inside: Path) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_page("page", source, slow=False)


def test_a_right_block_passes_and_slow_ones_are_left_to_the_slow_tests(inside: Path) -> None:
    right = '```toml title="x.toml"\na = 1\n```\n```console\n$ cat x.toml  # a file\na = …\n```\n'
    right += "```console\n$ false\n$ echo $?\n1\n```\n"
    check_page("page", right + "```python\nx = 2\n```\n```python\nprint(x)  # 2\n```\n", slow=False)
    slow = "<!-- slow -->\n```python\nprint(1)  # 2\n```\n"
    check_page("page", slow, slow=False)
    with pytest.raises(AssertionError, match=r"line 1 printed\s+1"):
        check_page("page", slow, slow=True)


def unmarked(source: str) -> list[str]:
    """Commands outside of executed blocks, and blocks in no language, that do not say that they are not run."""
    rest = FENCE.sub("", source)
    found = re.findall(r"^ {4,}(?:\$ |isobasin |python |pip |make ).*", rest, re.MULTILINE)
    for block in blocks("", source):
        commanding = re.search(r"^(\$ |isobasin |python |pip |make )", block.text, re.MULTILINE)
        if block.language not in ("console", "python") and commanding and not block.title.startswith("not run"):
            found.append(block.text)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_says_so(page: str) -> None:
    source = PAGES[page].read_text("utf-8")
    assert {block.language for block in blocks(page, source)} <= LANGUAGES
    assert unmarked(source) == []
    assert source.count("```") == 2 * len(list(blocks(page, source)))


def test_an_unmarked_command_is_found() -> None:
    assert unmarked("    isobasin info A\n") == ["    isobasin info A"]
    assert unmarked("```text\n$ isobasin info A\n```\n") == ["$ isobasin info A\n"]
    assert unmarked('```text title="not run: needs a cluster"\n$ isobasin info A\n```\n') == []


# -- links -------------------------------------------------------------------------------------------------------------


def missing_links(folder: Path, source: str) -> list[str]:
    """Relative links of a Markdown text to files that do not exist."""
    targets = re.findall(r"\]\(([^)#\s]+)", re.sub(r"^```.*?^```", "", source, flags=re.MULTILINE | re.DOTALL))
    return [t for t in targets if not t.startswith(("http:", "https:", "mailto:")) and not (folder / t).exists()]


def test_links_and_mentions_of_pages_lead_to_files() -> None:
    for name in ("README.md", "CONTRIBUTING.md", *PAGES):
        path = ROOT / name
        assert missing_links(path.parent, path.read_text("utf-8")) == [], name
    for folder in ("src", "tests", "bench", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"docs/[\w-]+\.(?:md|py)", path.read_text("utf-8")):
                assert (ROOT / page).exists(), f"{path}: {page}"
    assert missing_links(ROOT, "[a](docs/#b) [b](nowhere.md#b) [c](README.md)") == ["nowhere.md"]


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: isobasin\.(\w+)$", PAGES["docs/api.md"].read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(set(dir(ib)) - {"__version__"})
    assert len(listed) == len(set(listed))


def test_the_home_page_answers_in_two_clicks() -> None:
    home = PAGES["docs/index.md"].read_text("utf-8")
    glossary = PAGES["docs/glossary.md"].read_text("utf-8")
    assert "(glossary.md#barrier)" in home
    assert "\n### Barrier\n" in glossary
    assert "(checking.md)" in home
