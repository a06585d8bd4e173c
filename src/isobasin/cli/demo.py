"""The command `demo`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from isobasin.cli.options import Force, PrintOptions, Seed, with_options
from isobasin.cli.output import emit, progress, reserve_outputs

ALIGNED = {"naive": "as they are", "aligned": "B aligned by its weights", "learned": "B aligned by learning"}


@with_options
def demo_command(
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="For models, figures and the page.")
    ] = Path("isobasin-demo"),
    train: Annotated[bool, typer.Option("--train", help="Train the two models first; a minute more.")] = False,
    seed: Seed = 0,
    force: Force = False,
    show: PrintOptions,
) -> None:
    """Align two models of digits that ship with the package, by weights and by learning; measure, merge, report."""
    from isobasin.demo import run_demo

    reserve_outputs(output)
    with progress(quiet=show.silent, keep=True) as on_progress:
        facts = run_demo(output, train=train, seed=seed, force=force, on_progress=on_progress)
    emit(facts, demo_lines(facts), show.json)


def demo_lines(facts: dict[str, Any]) -> list[str]:
    """A table with as many digits as every machine gives."""
    from isobasin.path.barrier import is_connected

    accuracy, barrier = facts["accuracy"], facts["barrier"]
    loss = {row["path"]: row["middle"] for row in facts["table"] if row["metric"] == "loss"}
    rows = [
        f"  {words:26s} {accuracy[f'{name} average']:6.0%} {loss[name]:8.2f} {barrier[name]['loss']:8.2f}"
        + ("  linearly connected" if is_connected(barrier[name]["loss"], barrier["naive"]["loss"]) else "")
        for name, words in ALIGNED.items()
    ]
    return [
        f"A and B: two models of handwritten digits, trained {'just now' if facts['trained'] else 'before'} from two "
        f"seeds; {accuracy['A']:.0%} and {accuracy['B']:.0%} correct",
        f"{'the average of A and B':28s} correct     loss  barrier",
        *rows,
        f"{facts['report']}: open it in a browser; {facts['seconds']:.0f} s",
    ]
