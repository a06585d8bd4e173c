"""The command `demo`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from isobasin.cli.options import Force, PrintOptions, Seed, with_options
from isobasin.cli.output import emit, number, progress


@with_options
def demo_command(
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="A folder for models, figures and the page.")] = Path(
        "isobasin-demo"
    ),
    seed: Seed = 0,
    force: Force = False,
    show: PrintOptions,
) -> None:
    """Train, align, measure, merge and report, on digits that ship with the package. About a minute."""
    from isobasin.demo import run_demo

    with progress(quiet=show.silent, keep=True) as on_progress:
        facts = run_demo(output, seed=seed, force=force, on_progress=on_progress)
    emit(facts, demo_lines(facts), show.json)


def demo_lines(facts: dict[str, Any]) -> list[str]:
    accuracy = facts["accuracy"]
    rows = [
        f"{row['metric']:12s} {row['path']:8s} "
        + " ".join(f"{number(row[place], '.4f'):>9s}" for place in ("A", "middle", "B", "barrier"))
        for row in facts["table"]
    ]
    return [
        f"a RoPE model for digits, attention re-initialised from two seeds; scope {facts['scope']}, "
        f"matcher {facts['matcher']}",
        f"{'':12s} {'path':8s} {'A':>9s} {'midpoint':>9s} {'B':>9s} {'barrier':>9s}",
        *rows,
        f"accuracy of the average: {accuracy['naive average']:.1%} as they are, {accuracy['aligned average']:.1%} "
        f"aligned (A {accuracy['A']:.1%}, B {accuracy['B']:.1%})",
        facts["sentence"],
        f"{facts['report']}: open it in a browser; {facts['seconds']:.0f} s",
    ]
