"""Hub folders made for the tests: a tiny model made messy, and a judge of what became of it."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny
from isobasin.symmetries.transform import scramble
from isobasin.weights import load

Tensors = dict[str, Tensor]
Config = dict[str, Any]
LAYERS = 2
SEEN = 1e-3  # a change that nobody can miss
NOTHING = r"(?!)"  # a pattern that matches no name


def make(
    folder: Path,
    case: str,
    messy: Callable[[Tensors], Tensors] = dict,
    *,
    dtype: torch.dtype = torch.float32,
    pickled: bool = False,
    config: Callable[[Config], Config] = dict,
) -> Path:
    """A tiny model as transformers writes it, then made messy: other names, more tensors, an older config."""
    tiny.save(tiny.case(case), folder, dtype=dtype)
    tensors, found = tiny.read(folder)
    (folder / "model.safetensors").unlink()
    tensors = {name: tensor.contiguous() for name, tensor in messy(tensors).items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config(found)))
    return folder


def said(folder: Path, case: str, *, leftovers: str = "", seed: int = 0) -> Tensor:
    """What transformers makes of a folder, in float32; `leftovers` are names it may have no use for."""
    inputs = tiny.case(case).inputs(seed)
    if not leftovers:
        return tiny.logits(tiny.load(folder), inputs)
    config = json.loads((folder / "config.json").read_text())
    model, report = tiny._class(config["architectures"][0]).from_pretrained(
        folder, local_files_only=True, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    unused = [key for key in report["unexpected_keys"] if not re.fullmatch(leftovers, key)]
    assert not any((report["missing_keys"], unused, report["mismatched_keys"])), report
    return tiny.logits(model.eval(), inputs)


def described(source: Any) -> dict[str, Any]:
    """All that the architecture of a folder or model says, to be compared."""
    return asdict(load(source).arch)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def largest_change(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    assert after.keys() == before.keys()
    floating = [name for name in before if before[name].is_floating_point() and before[name].isfinite().all()]
    return max(float((after[name].double() - before[name].double()).abs().max()) for name in floating)


def check_survives(folder: Path, case: str, *, leftovers: str = "", seed: int = 1) -> Path:
    """Scramble the folder: same names, other weights, the same logits in transformers; gives back the output."""
    out = folder.with_name(f"{folder.name}-scrambled")
    weights = load(folder)
    scramble(weights, seed=seed).apply(weights).save(out)
    before, after = (said(place, case, leftovers=leftovers) for place in (folder, out))
    assert distance(after, before) <= 1e-5 * LAYERS
    assert distance(said(out, case, leftovers=leftovers, seed=1), before) > SEEN  # other inputs: others answers
    assert largest_change(tiny.read(out)[0], tiny.read(folder)[0]) > 0.1
    return out


def check_kept(out: Path, folder: Path, names: str) -> None:
    """Buffers are copied bitwise, in their own type."""
    before, after = tiny.read(folder)[0], tiny.read(out)[0]
    found = [name for name in before if re.search(names, name)]
    assert len(found) >= LAYERS
    for name in found:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name]), name


def renamed(*pairs: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    def rename(name: str) -> str:
        for old, new in pairs:
            name = re.sub(old, new, name)
        return name

    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


def with_buffers(buffers: Mapping[str, Tensor]) -> Callable[[Tensors], Tensors]:
    """Buffers of every layer; `{i}` stands for its number."""
    return lambda tensors: (
        tensors | {name.format(i=i): tensor.clone() for name, tensor in buffers.items() for i in range(LAYERS)}
    )
