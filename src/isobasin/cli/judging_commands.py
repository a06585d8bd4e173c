"""The command `equal`: its flags. Nothing heavy is imported before it runs."""

from pathlib import Path
from typing import Annotated

import typer

from isobasin.cli.app import Cuda, Device, Force, Json, Quiet, Seed, app
from isobasin.cli.printing import emit

EXIT = {"same": 0, "different": 1, "undecided": 3}


@app.command()
def equal(
    a: Annotated[str, typer.Argument(metavar="A", help="A Hugging Face folder, or a hub id in the local cache.")],
    b: Annotated[str, typer.Argument(metavar="B", help="A model of the same family and vocabulary.")],
    precision: Annotated[
        str, typer.Option(help="Judge at the rounding of the stored types, or of float32, float16, bfloat16.")
    ] = "stored",
    save_transform: Annotated[Path | None, typer.Option(help="Same: save the element that brings B to A.")] = None,
    save_witness: Annotated[
        Path | None, typer.Option(help="Different: save the input and both outputs, as safetensors.")
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    cuda: Cuda = False,
    force: Force = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Do A and B compute the same function? Exit 0 same, 1 different, 3 undecided; with the evidence."""
    from isobasin.cli.judging import Keeping, equal_facts, equal_lines

    keeping = Keeping(save_transform, save_witness, force)
    facts = equal_facts(a, b, keeping, precision, seed, "cuda" if cuda else device, quiet=quiet or json)
    emit(facts, equal_lines(facts), json)
    if code := EXIT[str(facts["verdict"])]:
        raise typer.Exit(code)
