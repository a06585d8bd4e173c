"""`isobasin equal` on copies of one Llama: scrambled, cast, pruned, fine-tuned; and what `align` undoes.

    python bench/equality.py [FOLDER] [--json FILE]

Every copy is written to disk and read again. FOLDER is a Llama checkpoint (the table in docs/equality.md is
stories15M's); without it a small random one is made.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import isobasin as ib
from isobasin.compare.equivalence import is_tied
from isobasin.groups import HeadsElement, Matrix, Phases
from isobasin.runtime import module_of
from isobasin.weights import untied
from synthetic import SMALL, write_llama

Copy = tuple[str, Callable[[Path], object]]


def changed(weights: ib.Weights, name: str, change: Callable[[Tensor], Tensor]) -> ib.Weights:
    """The model with one tensor replaced."""
    tensors = {n: weights[n] for n in weights}
    tensors[name] = change(tensors[name])
    return replace(weights, tensors=tensors, changed=frozenset({name}), exact=True)


def noisy(t: Tensor, share: float) -> Tensor:
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(0))
    return (t.float() + share * t.float().norm() / noise.norm() * noise).to(t.dtype)


def without_head(weights: ib.Weights, layer: int, head: int) -> ib.Weights:
    """Pruned by one head: its columns of the output projection are zero."""
    n = weights.arch.sizes.d_head

    def cut(t: Tensor) -> Tensor:
        return torch.where((torch.arange(t.shape[1]) // n == head)[None], torch.zeros_like(t), t)

    return changed(weights, f"model.layers.{layer}.self_attn.o_proj.weight", cut)


def badly_conditioned(weights: ib.Weights, seed: int = 5) -> ib.Transform:
    """Heads shuffled, Q–K and V–O of every head multiplied by random invertible matrices with no bound on their
    condition: Gaussian for V–O, inside H for Q–K (any other would change the function of a rotary model)."""
    transform = ib.scramble(weights, scope="model", seed=seed)
    rng = torch.Generator().manual_seed(seed)
    elements = {
        name: gaussian_factors(g, rng) if isinstance(g, HeadsElement) else g for name, g in transform.elements.items()
    }
    return replace(transform, elements=elements)


def gaussian_factors(g: HeadsElement, rng: torch.Generator) -> HeadsElement:
    assert isinstance(g.vo, Matrix)
    assert isinstance(g.qk, Phases)
    real, imaginary = torch.randn(2, *g.qk.u.shape, generator=rng, dtype=torch.float64)
    values = torch.randn(g.vo.value.shape, generator=rng, dtype=torch.float64)
    return replace(g, vo=Matrix(values), qk=Phases(torch.complex(real, imaginary), g.qk.interleaved))


def fine_tuned(weights: ib.Weights, rate: float, steps: int = 10) -> ib.Weights:
    """A few steps of AdamW on Shakespeare, byte by byte (a Llama tokenizer holds the bytes as words 3 to 258)."""
    from importlib.resources import files

    text = files("isobasin.data").joinpath("shakespeare.txt").read_bytes()[: 256 * 65 * steps // 8]
    vocabulary = int(weights.config["vocab_size"])
    ids = (torch.tensor(list(text)) + 3) % vocabulary
    model = module_of(weights).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        batch = ids[step * 8 * 64 : (step + 1) * 8 * 64].view(8, 64)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return ib.load(model.eval(), dict(weights.config) | {"dtype": "float32"})


def copies(base: ib.Weights) -> Iterator[Copy]:
    free = untied(base) if is_tied(base) else base
    yield "saved again in small shards", lambda out: base.save(out, max_shard_size="5MB")
    yield "cast to bfloat16", lambda out: base.save(out, dtype="bfloat16")
    yield "scrambled, float32", lambda out: ib.scramble(base, seed=1).apply(base).save(out, dtype="float32")
    yield "scrambled, float16", lambda out: ib.scramble(base, seed=1).apply(base).save(out, dtype="float16")
    yield "scrambled, bfloat16", lambda out: ib.scramble(base, seed=1).apply(base).save(out, dtype="bfloat16")
    yield "untied, stream rotated, all scrambled", lambda out: ib.scramble(free, seed=2).apply(free).save(out)
    yield "the same, V–O by Gaussian matrices", lambda out: badly_conditioned(free).apply(free).save(out)
    yield (
        "one matrix changed by 1e-3",
        lambda out: changed(base, "model.layers.1.mlp.up_proj.weight", lambda t: noisy(t, 1e-3)).save(out),
    )
    yield (
        "one matrix changed by 1e-2",
        lambda out: changed(base, "model.layers.1.mlp.up_proj.weight", lambda t: noisy(t, 1e-2)).save(out),
    )
    yield "pruned by one head", lambda out: without_head(base, 1, 2).save(out)
    yield "fine-tuned, 10 steps at 1e-5", lambda out: fine_tuned(base, 1e-5).save(out)
    yield "fine-tuned, 10 steps at 1e-4", lambda out: fine_tuned(base, 1e-4).save(out)


def verdict_row(base: ib.Weights, label: str, copy: ib.Weights) -> tuple[dict[str, object], ib.Verdict]:
    start = time.perf_counter()
    found = ib.equivalent(base, copy)
    seconds = time.perf_counter() - start
    worst, outputs = found.evidence.worst, found.outputs
    where = f"layer {worst.layer} {worst.kind}" if worst and worst.layer is not None else worst.kind if worst else "–"
    print(
        f"| {label} | {found.answer} | {found.precision} | {found.evidence.kind} | "
        f"{worst.ratio if worst else float('nan'):.2g} × ({where}) | "
        f"{outputs.difference:.1e} ({outputs.rounding:.1e}) | {seconds:.0f} s |",
        flush=True,
    )
    return {"copy": label, "seconds": seconds, **found.to_dict()}, found


def undone(base: ib.Weights, label: str, copy: ib.Weights, transform: ib.Transform) -> dict[str, object]:
    """What the element that `align` found makes of a scrambled copy: its distance from the base, as a share of it."""
    reference = untied(base) if is_tied(base) and not is_tied(copy) else base
    back = transform.apply(copy)
    names = [n for n in reference if not reference.arch.tensors[n].buffer]
    before, after, size = (
        {n: float((t(n).double() - shift * reference[n].double()).square().sum()) for n in names}
        for t, shift in ((copy.__getitem__, 1.0), (back.__getitem__, 1.0), (reference.__getitem__, 0.0))
    )
    whole = [(sum(x.values()) / sum(size.values())) ** 0.5 for x in (before, after)]
    worst = max((after[n] / size[n]) ** 0.5 for n in names)
    print(f"| {label} | {whole[0]:.3f} | {whole[1]:.1e} | {worst:.1e} |", flush=True)
    return {"copy": label, "before": whole[0], "after": whole[1], "worst_tensor": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        source = arguments.folder or write_llama(Path(place, "base"), seed=1, **SMALL)
        base = ib.load(source)
        print("| copy | verdict | precision | element | residual / rounding | outputs (rounding) | time |")
        print("|---|---|---|---|---|---|---|")
        rows, found = [], []
        for number, (label, write) in enumerate(copies(base)):
            write(Path(place, str(number)))
            copy = ib.load(Path(place, str(number)))
            row, verdict = verdict_row(base, label, copy)
            rows.append(row)
            if verdict.transform is not None and verdict.evidence.kind != "identity":
                found.append((label, copy, verdict.transform))
        print("\n| scrambled copy | distance before | after `align` | worst tensor after |\n|---|---|---|---|")
        back = [undone(base, *one) for one in found]
    if arguments.json:
        command = f"python bench/equality.py {source.name} --json {arguments.json}"
        facts = {"version": ib.__version__, "command": command, "verdicts": rows, "undone": back}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
