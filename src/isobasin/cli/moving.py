"""Commands that write: scramble, apply, invert."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobasin.checkpoint import dtype_name
from isobasin.cli.printing import progress
from isobasin.errors import IsobasinError, TransformError
from isobasin.symmetries import symmetry
from isobasin.transform import Transform, scramble
from isobasin.transform_file import check_free, load_transform, save_transform
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
    if keep is None:
        return _write(scramble(weights, scope=scope, seed=seed), weights, saving)
    _check_place(keep, saving, weights)
    transform = scramble(weights, scope=scope, seed=seed)
    # Beside its place first, so that a failure leaves neither a transform without a model nor the reverse.
    aside = keep.with_name(f".{keep.name}.isobasin-tmp-{os.getpid()}")
    try:
        save_transform(transform, aside, force=True)
        facts = _write(transform, weights, saving)
        aside.replace(keep)
    finally:
        aside.unlink(missing_ok=True)
    return facts | {"transform": str(keep)}


def _check_place(keep: Path, saving: Saving, weights: Weights) -> None:
    """A transform inside the input would change it, inside the output it would be replaced with the folder."""
    check_free(keep, force=saving.force)
    for folder in (saving.output, weights.path):
        if folder is not None and keep.resolve().is_relative_to(folder.resolve()):
            raise TransformError(f"--save-transform {keep}: lies inside {folder}; choose a place beside it")


def apply_transform(transform: Path, model: str, saving: Saving) -> dict[str, Any]:
    loaded, weights = load_transform(transform), load(model)
    try:
        loaded.check(symmetry(weights.arch), weights)
    except TransformError as error:
        raise TransformError(f"{transform}: {error}") from error
    return _write(loaded, weights, saving)


def invert_transform(transform: Path, output: Path, force: bool) -> dict[str, Any]:
    save_transform(load_transform(transform).inverse(), output, force=force)
    return {"output": str(output)}


def _write(transform: Transform, weights: Weights, saving: Saving) -> dict[str, Any]:
    """Move the model and write it, tensor by tensor, measuring on the way how far the weights went."""
    moved = transform.apply(weights, device=device_named(saving.device))
    largest, done = 0.0, 0

    with progress("writing", len(moved), quiet=saving.quiet) as step:

        def watch(name: str, tensor: Tensor | None) -> None:
            nonlocal largest, done
            done += 1
            step(done)
            if tensor is not None and name in moved.changed and tensor.numel():
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


def device_named(name: str) -> torch.device:
    if re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) is None:
        raise IsobasinError(f"--device {name!r} is no device; expected cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise IsobasinError(f"--device {name}: this machine has no such CUDA device; leave it out to use the CPU")
    return device
