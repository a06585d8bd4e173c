"""The commands `scramble`, `apply` and `invert`: transforms, and models moved by them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobasin.cli.options import (
    VERIFY,
    DeviceOptions,
    Force,
    Json,
    Model,
    PrintOptions,
    SaveOptions,
    Seed,
    Verify,
    check_choice,
    choice,
    with_options,
)
from isobasin.cli.output import (
    check_outputs,
    companion_facts,
    emit,
    not_copied_lines,
    transform_files,
    verified_change,
    write_model,
)
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
    scope: Annotated[str, choice("model, all-attention, first-attention, first-block")] = "model",
    save_transform: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the transform too.", rich_help_panel="Output")
    ] = None,
    verify: Verify = "auto",
    seed: Seed = 0,
    device: DeviceOptions,
    show: PrintOptions,
) -> None:
    """Write a functionally identical model elsewhere on its orbit."""
    from isobasin.symmetries.transform import scramble
    from isobasin.weights import load

    check_choice("--verify", verify, VERIFY)
    weights = load(model)
    check_outputs(save, [weights.path] if weights.path else [], save_transform)
    transform = scramble(weights, scope=scope, seed=seed)
    facts = _write_moved(transform, weights, save, device, show, verify, save_transform)
    facts |= {"transform": str(save_transform)} if save_transform else {}
    emit(facts, moved_lines(facts), show.json)


@with_options
def apply_command(
    *,
    transform: Annotated[Path, typer.Argument(metavar="FILE", help="From --save-transform or invert.")],
    model: Model,
    save: SaveOptions,
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Move this LoRA adapter of MODEL, and write it.")
    ] = None,
    verify: Verify = "auto",
    device: DeviceOptions,
    show: PrintOptions,
) -> None:
    """Move a model by a saved transform (a base and its fine-tune by the same one, for instance)."""
    from isobasin.symmetries import symmetry
    from isobasin.symmetries.transform_file import load_transform
    from isobasin.weights import load

    check_choice("--verify", verify, VERIFY)
    loaded, weights = load_transform(transform), load(model)
    try:
        loaded.check(symmetry(weights.arch), weights)
    except TransformError as error:
        raise TransformError(f"{transform}: {error}") from error
    if adapter is not None:
        facts = _write_moved_adapter(loaded, weights, adapter, save, verify, show)
        emit(facts, adapter_lines(facts), show.json)
        return
    check_outputs(save, [weights.path] if weights.path else [])
    facts = _write_moved(loaded, weights, save, device, show, verify)
    emit(facts, moved_lines(facts), show.json)


def invert_command(
    transform: Annotated[Path, typer.Argument(metavar="FILE", help="From --save-transform.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write.")],
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the inverse of a saved transform."""
    from isobasin.symmetries.transform_file import load_transform, save_transform

    save_transform(load_transform(transform).inverse(), output, force=force, inputs=[transform])
    emit({"output": str(output)}, [f"{output}: the inverse transform"], json)


def _write_moved(
    transform: "Transform",
    weights: "Weights",
    save: SaveOptions,
    device: DeviceOptions,
    show: PrintOptions,
    verify: str,
    save_transform: Path | None = None,
) -> dict[str, Any]:
    """Write the moved model if it has the outputs of the model, and measure the largest change of a weight."""
    place = device.find()
    weights = weights.resident(place)
    moved = transform.apply(weights, device=place)
    output_change = verified_change(weights, moved, verify, device=place, quiet=show.silent)
    changes = [0.0]

    def measure(name: str, tensor: "Tensor | None") -> None:
        if tensor is not None and name in moved.changed and tensor.numel():
            changes.append(float((tensor.double() - weights[name].cpu()).abs().max()))

    files = transform_files(transform, save_transform)
    dtype = write_model(moved, save, quiet=show.silent, files=files, on_tensor=measure)
    return {
        "output": str(save.output),
        "max_weight_change": max(changes),
        "max_output_change": output_change.largest,
        "outputs_compared": output_change.text,
        "exact": moved.exact,
        "dtype": dtype,
        **companion_facts(weights.path, save),
    }


def _write_moved_adapter(
    transform: "Transform", weights: "Weights", source: str, save: SaveOptions, verify: str, show: PrintOptions
) -> dict[str, Any]:
    """Write the adapter of the moved model, if both with their adapters have the same outputs."""
    from isobasin.checkpoint import Adapter
    from isobasin.checkpoint.adapter import check_adapter_output
    from isobasin.merging.adapters import move_adapter
    from isobasin.weights import with_adapter

    adapter, out = Adapter.open(source), save.output.resolve()
    folders = [path for path in (weights.path, adapter.path) if path]
    check_adapter_output(out, force=save.force, inputs=folders)
    moved = move_adapter(transform, adapter, weights)
    before, after = with_adapter(weights, adapter), with_adapter(transform.apply(weights), moved)
    change = verified_change(before, after, verify, quiet=show.silent)
    moved.save(out, force=save.force)
    facts: dict[str, Any] = {"output": str(save.output), "modules": len(moved.modules), "biases": len(moved.biased)}
    rank = max(moved.factors(module).rank for module in moved.modules)
    return facts | {"rank": rank, "max_output_change": change.largest, "outputs_compared": change.text}


def adapter_lines(facts: dict[str, Any]) -> list[str]:
    biases = f", and {facts['biases']} biases" if facts["biases"] else ""
    size = f"{facts['modules']} modules of rank {facts['rank']}{biases}"
    return [
        f"{facts['output']}: the adapter for the moved model, {size}",
        f"outputs with the adapters: {facts['outputs_compared']}",
    ]


def moved_lines(facts: dict[str, Any]) -> list[str]:
    how = "nothing was rounded" if facts["exact"] else f"rounded once, to {facts['dtype']}"
    narrow = facts["max_output_change"] is not None and not facts["exact"] and facts["dtype"] in ("bfloat16", "float16")
    before = f", before weights were rounded to {facts['dtype']}" if narrow else ""
    return [
        f"{facts['output']}: the same function, weights changed by up to {facts['max_weight_change']:.3g}; {how}",
        f"outputs: {facts['outputs_compared']}{before}",
        *not_copied_lines(facts),
    ]
