"""Commands that write: scramble, apply, invert."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobasin.checkpoint import dtype_name
from isobasin.cli.printing import progress
from isobasin.errors import IsobasinError
from isobasin.transform import Transform, scramble
from isobasin.transform_file import load_transform, save_transform
from isobasin.weights import Weights, load


@dataclass(frozen=True)
class Saving:
    """Where and how an output folder is written."""

    output: Path
    dtype: str
    max_shard_size: str
    force: bool
    device: str
    quiet: bool


def scramble_model(model: str, saving: Saving, scope: str, seed: int, keep: Path | None) -> dict[str, Any]:
    weights = load(model)
    transform = scramble(weights, scope=scope, seed=seed)
    if keep is not None:
        save_transform(transform, keep, force=saving.force)
    try:
        facts = _write(transform, weights, saving)
    except BaseException:
        if keep is not None:
            keep.unlink(missing_ok=True)
        raise
    return facts | ({"transform": str(keep)} if keep else {})


def apply_transform(transform: Path, model: str, saving: Saving) -> dict[str, Any]:
    return _write(load_transform(transform), load(model), saving)


def invert_transform(transform: Path, output: Path, force: bool) -> dict[str, Any]:
    save_transform(load_transform(transform).inverse(), output, force=force)
    return {"output": str(output)}


def _write(transform: Transform, weights: Weights, saving: Saving) -> dict[str, Any]:
    """Move the model and write it, tensor by tensor, measuring on the way how far the weights went."""
    moved = transform.apply(weights, device=_device(saving.device))
    largest, done = 0.0, 0

    with progress("writing", len(moved), quiet=saving.quiet) as step:

        def watch(name: str, tensor: Tensor) -> None:
            nonlocal largest, done
            done += 1
            step(done)
            if name in moved.changed:
                largest = max(largest, float((tensor.to(torch.float64) - weights[name]).abs().max()))

        dtypes = moved.save(
            saving.output,
            dtype=saving.dtype,
            force=saving.force,
            max_shard_size=saving.max_shard_size,
            watch=watch,
        )
    written = sorted({dtype_name(d) for d in dtypes.values() if d.is_floating_point})
    return {
        "output": str(saving.output),
        "max_weight_change": largest,
        "exact": moved.exact,
        "dtype": "+".join(written),
    }


def moved_lines(facts: dict[str, Any]) -> list[str]:
    how = "nothing was rounded" if facts["exact"] else f"rounded once, to {facts['dtype']}"
    return [f"{facts['output']}: the same function, weights changed by up to {facts['max_weight_change']:.3g}; {how}"]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise IsobasinError(f"--device {name!r} is no device; expected cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise IsobasinError("--device cuda: this machine has no usable CUDA device; leave it out to use the CPU")
    return device
