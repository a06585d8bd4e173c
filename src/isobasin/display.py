"""How results are shown: a few lines at a prompt; a table, and the progress of a long call, in a notebook."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

MAX_ROWS = 12  # of a table; the rest is counted
MAX_WIDTH = 110  # characters of a line
_INTERVAL = 0.1  # seconds between two updates of a progress bar
_NOTEBOOK = "ZMQInteractiveShell"  # the shell of a notebook, or of Colab, which inherits from it


@dataclass(frozen=True)
class Summary:
    """What is worth showing of an object: a title, facts by name, and a table."""

    title: str
    facts: Mapping[str, object] = field(default_factory=dict)
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()

    @property
    def more(self) -> str:
        """How many rows are not shown."""
        return f"… {len(self.rows) - MAX_ROWS} more rows" if len(self.rows) > MAX_ROWS else ""

    def text(self) -> str:
        """At most a screenful of lines."""
        width = max(map(len, self.facts), default=0)
        lines = [self.title, *(f"  {name:<{width}}  {value}" for name, value in self.facts.items())]
        table = [list(map(str, row)) for row in ([self.columns] if self.rows else []) + list(self.rows)[:MAX_ROWS]]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines += ["  " + "  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths)).rstrip() for row in table]
        lines += [f"  {self.more}"] if self.more else []
        return "\n".join(line if len(line) <= MAX_WIDTH else line[: MAX_WIDTH - 1] + "…" for line in lines)

    def html(self) -> str:
        """The same as HTML without scripts or styles of its own."""
        facts = "".join(
            f"<tr><th>{escape(name)}</th><td>{_cell(value)}</td></tr>" for name, value in self.facts.items()
        )
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns) if self.rows else ""
        rows = "".join(
            "<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in self.rows[:MAX_ROWS]
        )
        parts = [
            f"<p><b>{escape(self.title)}</b></p>",
            f"<table>{facts}</table>" if facts else "",
            f"<table><tr>{head}</tr>{rows}</table>" if rows else "",
            f"<p>{self.more}</p>" if self.more else "",
        ]
        return f"<div>{''.join(parts)}</div>"


def _cell(value: object) -> str:
    text = str(value)
    return escape(text if len(text) <= 4 * MAX_WIDTH else text[: 4 * MAX_WIDTH] + "…")


class Shown:
    """An object that prints as its summary, whatever its size."""

    def summary(self) -> Summary:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summary().text()

    def _repr_html_(self) -> str:
        return self.summary().html()


# -- progress in a notebook -------------------------------------------------------------------------------------------

Watch = Callable[[int, int], None]  # (done, of)


def in_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == _NOTEBOOK for kind in type(shell).__mro__)


@contextmanager
def notebook_progress(title: str, watch: Watch | None) -> Iterator[Watch | None]:
    """`watch` itself if it is given, or one that shows a bar while the body runs in a notebook; elsewhere None."""
    if watch is not None or not in_notebook():
        yield watch
        return
    with _changing_line() as show:
        last = [0.0]

        def advance(done: int, of: int) -> None:
            if done >= of or time.monotonic() - last[0] >= _INTERVAL:
                last[0] = time.monotonic()
                show(f'{escape(title)} <progress value="{done}" max="{of}"></progress> {done} of {of}')

        yield advance


@contextmanager
def notebook_steps(watch: Callable[[str], None] | None) -> Iterator[Callable[[str], None] | None]:
    """The same for work that tells the name of each step."""
    if watch is not None or not in_notebook():
        yield watch
        return
    with _changing_line() as show:
        yield lambda text: show(f"{escape(text)} …")


@contextmanager
def _changing_line() -> Iterator[Callable[[str], None]]:
    """A line under the cell that changes in place, and is empty at the end."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(""), display_id=True)
    try:
        yield lambda html: handle.update(HTML(html))
    finally:
        handle.update(HTML(""))
