"""What the site adds to the pages: sections of README, notebooks, the commands, docstrings with examples."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import typer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))


LOG = logging.getLogger("mkdocs.isobasin")


FIRST = ("glossary.md", "concepts.md")  # in what the search finds: who looks for a term wants to know what it means


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the comments that stand for sections of README, for a notebook and for the commands."""
    if page.file.src_path in FIRST:
        page.meta["search"] = {"boost": 4}
    folder = Path(page.file.abs_src_path).parent
    markdown = re.sub(r"^<!-- README: *(.*?) *-->$", lambda found: readme_section(found[1]), markdown, flags=re.M)
    markdown = re.sub(r"^<!-- NOTEBOOK: (\S+) -->$", lambda found: notebook(folder / found[1]), markdown, flags=re.M)
    markdown = re.sub(r'(?<=```text) title="not run[^"]*"', "", markdown)  # for who writes the page, not who reads it
    markdown = re.sub(r"^<!-- COMMANDS -->$", lambda _: "\n\n".join(commands()), markdown, flags=re.M)
    return re.sub(r"^\|.*", lambda found: unescaped(found[0]), markdown, flags=re.M)


def unescaped(row: str) -> str:
    """A row of a table without the backslashes that GitHub needs before a bar in code; here they would be shown."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row)


def on_page_content(html: str, **_: Any) -> str:
    """Names of options get a class: the style keeps each on one line, where it would be broken behind a hyphen."""
    return re.sub(r"<code>(--?[\w-]+)</code>", r'<code class="option">\1</code>', html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """A page that would load something from another host is a warning, which the strict build refuses."""
    for tag in foreign(output):
        LOG.warning("%s loads from another host: %s", page.file.src_path, tag)
    return output


def foreign(html: str) -> list[str]:
    """The tags that make a browser ask another host."""
    loading = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", html)
    return [tag for tag in loading if re.search(r"(?:src|href)=[\"']?(?:https?:)?//", tag)]


def readme_section(title: str) -> str:
    """A section of README with its heading, or without a title what stands before the first; links lead to pages."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = dict(part.partition("\n")[::2] for part in text.split("\n## "))
    first = next(iter(parts))
    if title and title not in parts:
        raise KeyError(f"README.md has no section {title!r}; it has {', '.join(list(parts)[1:])}")
    body = re.sub(r"\]\(docs/", "](", parts[title or first]).strip()
    return f"## {title}\n\n{body}" if title else body


def notebook(path: Path) -> str:
    """The cells of a notebook with their outputs, as a page."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _cell_parts(cell))


def _cell_parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        shown = output.get("data", {})
        if "image/png" in shown:
            yield f"![Figure](data:image/png;base64,{''.join(shown['image/png']).strip()})"
        elif text := "".join(output.get("text", shown.get("text/plain", ""))).rstrip():
            yield f"```text\n{text}\n```"


def commands() -> Iterator[str]:
    """A section for every command: what it does, its arguments and options in groups, and examples."""
    from isobasin.cli.app import app

    yield from _sections(typer.main.get_command(app), "isobasin", None)


def _sections(group: Any, path: str, parent: Any) -> Iterator[str]:
    context = _context(group, path, parent)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "commands"):
            yield from _sections(command, f"{path} {name}", context)
        else:
            yield _section(command, f"{path} {name}", _context(command, name, context))


def _context(command: Any, path: str, parent: Any) -> Any:
    return command.context_class(command, info_name=path.rpartition(" ")[2], parent=parent, **command.context_settings)


def _section(command: Any, path: str, context: Any) -> str:
    from isobasin.cli.help import EXAMPLES

    lines = [f"## {path}", "", " ".join((command.help or "").split()), ""]
    for title, rows in command.rows_by_group(context).items():
        lines += [f"| {title} | |", "|---|---|", *(f"| `{_cell(name)}` | {_cell(text)} |" for name, text in rows), ""]
    examples = EXAMPLES[path.partition(" ")[2]]
    return "\n".join([*lines, "```text", *(f"isobasin {example}" for example in examples), "```"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


class Doctests(griffe.Extension):
    """Runs of `>>>` lines in docstrings become blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """A docstring with fences around its examples, without the directives of doctest."""
    text = re.sub(r" *# doctest: .*", "", docstring)
    return re.sub(r"^>>> (?:.+\n?)+", lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text, flags=re.M)
