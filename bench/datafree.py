"""Matching two independent models without data: the barrier of every variant, as a share of the naive one.

    python bench/datafree.py --place FOLDER --kinds llama vit-rope --json results/datafree/table.json

Trains three seeds of each kind on the data that ship with the package (kept under --place, so that a second run only
matches), aligns two or three pairs by each variant of whole-model matching, and measures the test loss along the line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isobasin as ib
from isobasin.alignment.descent import descend, from_embeddings, solve
from isobasin.alignment.gauge import with_reference_gauge
from isobasin.alignment.heads import HeadMatcher
from isobasin.alignment.matchers import ActivationMatching, WeightMatching
from isobasin.alignment.problem import AlignmentProblem, overlap
from isobasin.data import shipped
from isobasin.groups import Element, SignedPermutation
from isobasin.learn.trainer import TrainConfig, learn
from isobasin.path.evaluation import evaluate_path
from isobasin.runtime import module_of
from isobasin.study import TrainingRecipe, shifted, train
from isobasin.symmetries import symmetry
from isobasin.tasks import Batch, Task, read_images, scaled
from isobasin.views import Tensors
from isobasin.weights import Weights

CPU = torch.device("cpu")
LENGTH = 64  # of a text


@dataclass(frozen=True)
class Kind:
    """A small model, how it is trained, and what it is measured on."""

    config: ib.ModelConfig
    recipe: TrainingRecipe
    inputs: Tensor
    targets: Tensor | None
    test: Task
    unlabeled: list[dict[str, Tensor]] = field(repr=False)
    augment: Any = None


def batches(key: str, x: Tensor, y: Tensor, size: int) -> list[Batch]:
    return [Batch({key: x[k : k + size]}, y[k : k + size]) for k in range(0, len(x), size)]


def task(kind: str, held: list[Batch]) -> Task:
    return Task(kind, kind, "memory", sum(map(len, held)), {}, "", lambda: iter(held))


def text(preset: str, **sizes: int) -> Kind:
    """Characters of the shipped Shakespeare: the last tenth is for tests."""
    raw = torch.tensor(list(shipped("shakespeare").read_bytes()))
    _, ids = raw.unique(return_inverse=True)
    cut = len(ids) * 9 // 10
    rows = ids[cut : cut + 96 * (LENGTH + 1)].view(-1, LENGTH + 1)
    config = ib.ModelConfig.preset(
        preset, d_model=96, n_layers=3, n_heads=4, d_vocab=int(ids.max()) + 1, n_positions=LENGTH, **sizes
    )
    pieces = ids[: 128 * LENGTH].view(-1, LENGTH)
    return Kind(
        config,
        TrainingRecipe(steps=800, batch_size=16, peak_lr=3e-3, weight_decay=0.1),
        ids[:cut],
        None,
        task("lm", batches("input_ids", rows[:, :-1], rows[:, 1:], 48)),
        [{"input_ids": pieces[k : k + 32]} for k in range(0, len(pieces), 32)],
    )


def digits(positions: str) -> Kind:
    def read(split: str) -> tuple[Tensor, Tensor]:
        images = read_images(shipped("mnist"), split)
        return scaled(np.array(images.pixels)), torch.tensor(images.labels)

    (x, y), (test_x, test_y) = read("train"), read("test")
    sizes = {"image_size": 28, "patch_size": 7, "n_channels": 1, "d_model": 64, "d_ff": 128, "n_layers": 3}
    config = ib.ModelConfig.preset("vit", positions=positions, n_heads=4, rope_theta=100.0, **sizes)
    return Kind(
        config,
        TrainingRecipe(steps=1200, batch_size=64, peak_lr=3e-3, weight_decay=0.1),
        x,
        y,
        task("image", batches("pixel_values", test_x[:1000], test_y[:1000], 500)),
        [{"pixel_values": x[k : k + 128]} for k in range(0, 512, 128)],
        shifted(by=1),
    )


KINDS: Mapping[str, Callable[[], Kind]] = {
    "llama": lambda: text("llama", d_ff=256),
    "vit-rope": lambda: digits("rope"),
    "vit-sinusoidal": lambda: digits("sinusoidal"),
    "gpt2": lambda: text("gpt2", d_ff=384),
}


def model(name: str, kind: Kind, seed: int, place: Path) -> Weights:
    """Trained once, then read from its folder."""
    folder = place / f"{name}-{seed}"
    if not (folder / "config.json").exists():
        began = time.perf_counter()
        made = ib.Transformer(kind.config, seed=seed)
        done = train(made, kind.inputs, kind.targets, kind.recipe, seed=seed, augment=kind.augment)
        done.model.save(folder)
        print(f"{name}-{seed}: {done} in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return ib.load(folder)


# -- variants --------------------------------------------------------------------------------------------------------

WEIGHTS = WeightMatching(scope="model")
PAIRS = ((0, 1), (1, 2), (2, 0))
Factor = Callable[[str, Tensor, Tensor], float]


@dataclass(frozen=True)
class WeightedProblem(AlignmentProblem):
    """The alignment problem with a factor per tensor: it changes the objective and no symmetry."""

    factor: Factor = lambda name, x, y: 1.0

    def pieces(self, space: str) -> Iterator[tuple[Tensors, Tensors]]:
        for x, y in AlignmentProblem.pieces(self, space):
            by = {name: self.factor(name, x[name], y[name]) for name in x}
            yield {name: t * by[name] for name, t in x.items()}, {name: t * by[name] for name, t in y.items()}


@dataclass(frozen=True)
class Pair:
    """A, B, and the kind of model they are."""

    a: Weights
    b: Weights
    kind: Kind

    def problem(self, matcher: HeadMatcher = WEIGHTS, **factor: Factor) -> WeightedProblem:
        return WeightedProblem(self.a, self.b, symmetry(self.b.arch), matcher, CPU, **factor)

    def moved(self, elements: Mapping[str, Element]) -> Weights:
        """B moved by these elements, in A's gauge."""
        return with_reference_gauge(self.a, self.b, symmetry(self.b.arch), elements, CPU).apply(self.b)

    def nearest(self, matcher: HeadMatcher = WEIGHTS) -> Mapping[str, Element]:
        """As `isobasin.align` finds them, with fewer sweeps."""
        problem = self.problem(matcher)
        return problem.without_scales(solve(problem, sweeps=8).elements)

    def descended(self, problem: WeightedProblem, start: Mapping[str, Element]) -> Weights:
        """Rotations inside heads first, then a few full sweeps."""
        rough = descend(replace(problem, matcher=problem.matcher.rough()), start, most=30)
        return self.moved(problem.without_scales(descend(problem, rough.elements, most=3).elements))


def weighted(factor: Factor) -> Callable[[Pair], Weights]:
    def run(pair: Pair) -> Weights:
        problem = pair.problem(factor=factor)
        return pair.descended(problem, from_embeddings(problem))

    return run


def times(words: tuple[str, ...], by: float) -> Callable[[Pair], Weights]:
    return weighted(lambda name, x, y: by if any(word in name for word in words) else 1.0)


def layers(late: bool) -> Callable[[Pair], Weights]:
    def factor(name: str, x: Tensor, y: Tensor) -> float:
        if not name.startswith("blocks."):
            return 1.0
        depth = int(name.split(".")[1])
        return (1.0, 1.7, 3.0)[depth if late else 2 - depth]

    return weighted(factor)


def stream_overlap(problem: AlignmentProblem, x: Tensors, y: Tensors) -> Tensor:
    stream = problem.stream
    return overlap(problem.arch, stream, x, y, list(x), problem.identity[stream]).self_dual


def started(how: Callable[[AlignmentProblem], Tensor]) -> Callable[[Pair], Weights]:
    """From another first guess of the stream's map."""

    def run(pair: Pair) -> Weights:
        problem = pair.problem()
        group = problem.part.groups[problem.stream]
        return pair.descended(problem, problem.identity | {problem.stream: group.project(how(problem))})

    return run


def whitened(problem: AlignmentProblem) -> Tensor:
    a, b = (form.block(problem.stream) for form in (problem.form_a, problem.form_b))

    def inverse_root(gram: Tensor) -> Tensor:
        values, basis = torch.linalg.eigh(gram)
        return (basis / values.clamp_min(1e-3 * values.max()).sqrt()) @ basis.mT

    left, right = (inverse_root(stream_overlap(problem, x, x)) for x in (a, b))
    return left @ stream_overlap(problem, a, b) @ right


def signed(problem: AlignmentProblem) -> Tensor:
    a, b = (form.block(problem.stream) for form in (problem.form_a, problem.form_b))
    found = stream_overlap(problem, a, b)
    return SignedPermutation(len(found)).project(found).matrix()


def by_activations(weight: float) -> Callable[[Pair], Weights]:
    def run(pair: Pair) -> Weights:
        matcher = ActivationMatching(pair.kind.unlabeled, activation_weight=weight)
        return pair.moved(pair.nearest(matcher.prepared(pair.a, pair.b).heads))

    return run


def sampled(model: Weights, n: int, length: int, seed: int) -> Tensor:
    """Texts that a language model generates without a prompt: token ids, sampled from its own predictions."""
    module, rng = module_of(model), torch.Generator().manual_seed(seed)
    ids = torch.randint(int(model.config["d_vocab"]), (n, 1), generator=rng)
    with torch.no_grad():
        for _ in range(length):
            odds = torch.softmax(module(ids[:, -LENGTH:])[:, -1], -1)
            ids = torch.cat([ids, torch.multinomial(odds, 1, generator=rng)], 1)
    return ids


def learned(own_text: bool, steps: int = 200) -> Callable[[Pair], Weights]:
    """Descend the loss on the path, on text that the two models generate or on training data."""

    def run(pair: Pair) -> Weights:
        if own_text:
            rows = torch.cat([sampled(m, 400, LENGTH, seed) for seed, m in enumerate((pair.a, pair.b))])
        else:
            rows = pair.kind.inputs[: 800 * (LENGTH + 1)].view(-1, LENGTH + 1)
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        training, held_out = (batches("input_ids", r[:, :-1], r[:, 1:], 16) for r in (rows[:-64], rows[-64:]))
        config = TrainConfig(steps=steps, lr=3e-3, check_every=steps // 4)
        got = learn(pair.a, pair.b, pair.nearest(), task("lm", training), task("lm", held_out), config=config)
        return pair.moved(got.elements)

    return run


VARIANTS: Mapping[str, Callable[[Pair], Weights]] = {
    "weights": lambda p: p.moved(p.nearest()),
    "identity start": lambda p: p.descended(p.problem(), p.problem().identity),
    "each matrix by 1/norm": weighted(lambda name, x, y: 1 / max(float(x.norm() * y.norm()) ** 0.5, 1e-9)),
    "embeddings and head ×3": times(("embed", "head"), 3.0),
    "queries and keys ×0.3": times((".q.", ".k."), 0.3),
    "attention ×0.3": times((".attn.",), 0.3),
    "feed-forward ×0.3": times((".mlp.",), 0.3),
    "late layers ×3": layers(late=True),
    "early layers ×3": layers(late=False),
    "whitened embeddings and head as start": started(whitened),
    "signed permutation as start": started(signed),
    "activations, weight 0.3": by_activations(0.3),
    "activations, weight 1": by_activations(1.0),
    "activations, weight 3": by_activations(3.0),
    "learned on the models' own text": learned(own_text=True),
    "learned on training text": learned(own_text=False),
}


def table(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Shares of the naive barrier, variant by variant, pair by pair."""
    kind = KINDS[name]()
    models = [model(name, kind, seed, arguments.place) for seed in range(3)]
    pairs = [Pair(models[i], models[j], kind) for i, j in PAIRS[: arguments.pairs]]

    def barrier(pair: Pair, b: Weights) -> float:
        return evaluate_path(pair.a, b, kind.test, n_points=arguments.points).barrier.height

    naive = [barrier(pair, pair.b) for pair in pairs]
    print(f"{name}: naive {', '.join(f'{v:.3f}' for v in naive)}", flush=True)
    rows: dict[str, Any] = {"naive": naive}
    for variant in arguments.variants:
        if variant.startswith("learned") and kind.targets is not None:
            continue  # image classifiers: there is no text to sample
        began = time.perf_counter()
        shares = [barrier(pair, VARIANTS[variant](pair)) / v for pair, v in zip(pairs, naive)]
        rows[variant] = shares
        each = " ".join(f"{100 * s:5.1f}" for s in shares)
        seconds = time.perf_counter() - began
        print(f"  {variant:34s} {100 * sum(shares) / len(shares):5.1f} %   {each}   {seconds:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole-model barriers by variant, as shares of the naive one.")
    parser.add_argument("--place", type=Path, required=True, help="where trained models are kept")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--points", type=int, default=9)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: table(name, arguments) for name in arguments.kinds}
    if arguments.json:
        facts = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "kinds": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
