"""The commands distance, canonical and fingerprint, and their flags."""

from pathlib import Path
from typing import Annotated

import typer

from isobasin.cli.app import Cuda, Device, Dtype, Force, Json, Model, Out, Quiet, Seed, Shard, app
from isobasin.cli.printing import emit


@app.command()
def distance(
    a: Annotated[str, typer.Argument(metavar="A", help="The reference.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another model of its shape, or of another depth.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the layer-to-layer matrix: .png, .svg or .pdf.")] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="The layer-to-layer matrix, also for models of one depth.")
    ] = False,
    draws: Annotated[int, typer.Option(help="Unrelated models to draw for comparison.")] = 8,
    seed: Seed = 0,
    device: Device = "cpu",
    cuda: Cuda = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """How far two models are apart modulo symmetry, part by part, with a score from 0 (unrelated) to 1 (one orbit)."""
    from isobasin.cli.likening import Comparing, distance_facts, distance_lines

    place = "cuda" if cuda else device
    facts = distance_facts(a, b, Comparing(plot, layers, draws, seed, place, quiet or json))
    emit(facts, distance_lines(facts), json)


@app.command()
def canonical(
    model: Model,
    output: Out,
    dtype: Dtype = "auto",
    max_shard_size: Shard = "5GB",
    force: Force = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write the canonical point of a model's orbit: the same function, the same weights for every scrambled copy."""
    from isobasin.cli.likening import canonical_lines, canonical_model
    from isobasin.cli.moving import Saving

    facts = canonical_model(model, Saving(output, dtype, max_shard_size, force, "cpu", quiet or json))
    emit(facts, canonical_lines(facts), json)


@app.command()
def fingerprint(
    model: Model,
    compare: Annotated[
        str | None, typer.Option(help="A fingerprint, a file with one, or another model. Exit 1 if they differ.")
    ] = None,
    json: Json = False,
) -> None:
    """A short string that every scrambled, cast or re-saved copy of a model shares."""
    from isobasin.cli.likening import fingerprint_facts, fingerprint_lines

    facts = fingerprint_facts(model, compare)
    emit(facts, fingerprint_lines(facts), json)
    if facts.get("equal") is False:
        raise typer.Exit(1)
