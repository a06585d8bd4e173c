"""What the documentation site adds to the pages, and what its strict build refuses. `make lint` builds the site."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_section_of_readme_has_links_that_start_at_the_pages(hooks: ModuleType) -> None:
    section = hooks.readme_section("With your own models")
    assert section.startswith("## With your own models\n")
    assert "(merging.md)" in section
    assert "(docs/" not in section
    assert hooks.readme_section("").startswith("**Merge training runs")
    with pytest.raises(KeyError, match="no section 'Nothing'"):
        hooks.readme_section("Nothing")


def test_every_command_has_a_section_with_its_options(hooks: ModuleType) -> None:
    sections = list(hooks.commands())
    titles = [section.partition("\n")[0] for section in sections]
    assert "## isobasin equal" in titles
    assert "## isobasin study run" in titles
    (path,) = [section for section in sections if section.startswith("## isobasin path\n")]
    assert "| `--points N` | Points of the line, both ends included. [25] |" in path
    assert "| `-h, --help` |" in path


def test_the_reason_why_a_block_is_not_run_is_not_shown(hooks: ModuleType) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_path="a.md", abs_src_path=str(ROOT / "a.md")), meta={})
    text = '```text title="not run: installs"\n$ make demo\n```\n```toml title="a.toml"\n```\n'
    assert hooks.on_page_markdown(text, page) == '```text\n$ make demo\n```\n```toml title="a.toml"\n```\n'


def test_names_of_options_stay_on_one_line(hooks: ModuleType) -> None:
    html = "<p><code>--seq-len</code> <code>-o</code> <code>a-b</code> <code>--to A</code></p>"
    found = hooks.on_page_content(html)
    assert found.count('<code class="option">') == 2
    assert '<code class="option">--seq-len</code>' in found


def test_what_a_page_may_not_load(hooks: ModuleType) -> None:
    assert hooks.foreign('<script src="https://other.org/a.js"></script><a href="https://other.org">a</a>') != []
    assert hooks.foreign("<link href=//other.org/font.css>") != []
    assert hooks.foreign('<img src="img/path.png"><a href="https://other.org">a</a>') == []


def test_examples_and_tables(hooks: ModuleType) -> None:
    assert hooks.fenced("One.\n\n>>> f(1)  # doctest: +SKIP\n2\n\nTwo.") == "One.\n\n```pycon\n>>> f(1)\n2\n```\n\nTwo."
    assert hooks.unescaped("| `\\|a\\|` | b \\| c |") == "| `|a|` | b \\| c |"


PAGES = {
    "a page": ("# Title\n\n## Part\n\n[part](#part)\n", True),
    "a link to nothing": ("# Title\n\n[away](nowhere.md)\n", False),
    "an anchor that is not there": ("# Title\n\n[part](#nowhere)\n", False),
    "a picture from another host": ("# Title\n\n![a](https://other.org/a.png)\n", False),
    "a name that does not exist": ("# Title\n\n::: isobasin.nothing\n", False),
}


def build(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """The site with this one page, in its own settings."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[0]
    settings = settings.replace("docs/hooks.py", f"{ROOT}/docs/hooks.py").replace("[src]", f"[{ROOT}/src]")
    (folder / "mkdocs.yml").write_text(settings.replace("  - site.css\n", "") + "\nnav: [{Home: index.md}]\n")
    (folder / "docs").mkdir()
    (folder / "docs/index.md").write_text(source)
    shutil.copy(ROOT / "docs/iframe-worker.js", folder / "docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # with --quiet warnings would not count
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("name", PAGES)
def test_the_strict_build_refuses(name: str, tmp_path: Path) -> None:
    """The settings of the site, with one page."""
    source, sound = PAGES[name]
    done = build(tmp_path, source)
    assert (done.returncode == 0) is sound, done.stdout + done.stderr
