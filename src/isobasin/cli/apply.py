"""The commands `scramble`, `apply` and `invert`: transforms, and models moved by them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobasin.cli.options import DeviceOptions, Force, Json, Model, PrintOptions, SaveOptions, Seed, with_options
from isobasin.cli.output import check_transform_path, emit, saved_transform, write_model
from isobasin.errors import TransformError

if TYPE_CHECKING:
    from torch import Tensor

    from isobasin.symmetries.transform import Transform
    from isobasin.weights import Weights


@with_options
def scramble_command(
    *,
    model: Model,
    save: SaveOptions,
    scope: Annotated[str, typer.Option(help="first-attention, all-attention, first-block or model.")] = "model",
    save_transform: Annotated[Path | None, typer.Option(help="Also save the transform, to invert or reuse.")] = None,
    seed: Seed = 0,
    device: DeviceOptions,
    show: PrintOptions,
) -> None:
    """Write a functionally identical model elsewhere on its orbit."""
    from isobasin.symmetries.transform import scramble
    from isobasin.weights import load

    weights = load(model)
    check_transform_path(save_transform, save, [weights.path] if weights.path else [])
    transform = scramble(weights, scope=scope, seed=seed)
    with saved_transform(transform, save_transform):
        facts = _write_moved(transform, weights, save, device, show)
    facts |= {"transform": str(save_transform)} if save_transform else {}
    emit(facts, moved_lines(facts), show.json)


@with_options
def apply_command(
    *,
    transform: Annotated[Path, typer.Argument(help="A file written by --save-transform or invert.")],
    model: Model,
    save: SaveOptions,
    device: DeviceOptions,
    show: PrintOptions,
) -> None:
    """Move a model by a saved transform (a base and its fine-tune by the same one, for instance)."""
    from isobasin.symmetries import symmetry
    from isobasin.symmetries.transform_file import load_transform
    from isobasin.weights import load

    loaded, weights = load_transform(transform), load(model)
    try:
        loaded.check(symmetry(weights.arch), weights)
    except TransformError as error:
        raise TransformError(f"{transform}: {error}") from error
    facts = _write_moved(loaded, weights, save, device, show)
    emit(facts, moved_lines(facts), show.json)


def invert_command(
    transform: Annotated[Path, typer.Argument(help="A file written by --save-transform.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the inverse of a saved transform."""
    from isobasin.symmetries.transform_file import load_transform, save_transform

    save_transform(load_transform(transform).inverse(), output, force=force)
    emit({"output": str(output)}, [f"{output}: the inverse transform"], json)


def _write_moved(
    transform: "Transform", weights: "Weights", save: SaveOptions, device: DeviceOptions, show: PrintOptions
) -> dict[str, Any]:
    """Write the moved model, and measure the largest change of a weight as it is written."""
    moved = transform.apply(weights, device=device.find())
    changes = [0.0]

    def measure(name: str, tensor: "Tensor | None") -> None:
        if tensor is not None and name in moved.changed and tensor.numel():
            changes.append(float((tensor.double() - weights[name]).abs().max()))

    dtype = write_model(moved, save, quiet=show.silent, on_tensor=measure)
    return {"output": str(save.output), "max_weight_change": max(changes), "exact": moved.exact, "dtype": dtype}


def moved_lines(facts: dict[str, Any]) -> list[str]:
    how = "nothing was rounded" if facts["exact"] else f"rounded once, to {facts['dtype']}"
    return [f"{facts['output']}: the same function, weights changed by up to {facts['max_weight_change']:.3g}; {how}"]
