"""Jobs beside `pair`: all head permutations, each layer's attention re-initialised, and the causal control."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from isobasin.alignment.align import align
from isobasin.alignment.experts import nearest_elements
from isobasin.alignment.gauge import with_reference_gauge
from isobasin.alignment.head_linear import Method
from isobasin.alignment.heads import match_heads, permuted
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.problem import AlignmentProblem
from isobasin.arch import HeadSpace
from isobasin.groups import GL, Element, HeadsElement
from isobasin.groups.assignment import GroupedAssignment
from isobasin.model import ModelConfig, Transformer
from isobasin.path.barrier import midpoint
from isobasin.path.evaluation import FlatModel, evaluate_points
from isobasin.study.pairs import PathEvaluator, barriers, evaluation_task
from isobasin.study.plan import Context
from isobasin.symmetries import Symmetry, heads_group, symmetry
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import attention_matrices
from isobasin.symmetries.transform import Transform
from isobasin.weights import Weights, load

POINTS = 9  # of each path: there are two dozen of them
SAMPLES = 3  # re-initialisations and reparametrisations
MAX_PERMUTATIONS = 24  # that are measured: all permutations of four heads

CPU = torch.device("cpu")

Side = Literal["inside", "outside"]  # of the symmetry group
HeadPermutations = Mapping[str, tuple[int, ...]]  # by attention layer: the kv head of B that takes the place of A's i


def heads(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """Stage 2 after every permutation of the heads (or 23 random ones and the matched one), and the rank of Stage 1's.

    L is the loss at the midpoint; `normalised` is 100 (L_matched − L_best) / (L_naive − L_best). For scopes with
    several layers the heads of all of them are permuted; stream and units stay where matching puts them.
    """
    a, b = (load(folder / "model") for folder in needs)
    path = PathEvaluator.of(settings, a, context, n_points=settings.get("points", POINTS))
    aligner = FixedHeadAligner(a, b, settings.get("scope", "first-attention"), settings.get("stage2", "full"))
    tried = head_permutations(aligner.layers, aligner.matched, seed=settings.get("seed", 0))
    curves = [path.curve(aligner.transform(each).apply(b)) for each in tried]
    naive = path.curve(b)
    losses = [curve.metrics["loss"][midpoint(curve.lambdas)] for curve in curves]
    naive_loss = naive.metrics["loss"][midpoint(naive.lambdas)]
    chosen = next(i for i, each in enumerate(tried) if dict(each) == dict(aligner.matched))
    return {
        "permutations": [[list(places) for places in each.values()] for each in tried],
        "lambdas": list(path.lambdas),
        "curves": [list(curve.metrics["loss"]) for curve in curves],
        "loss": losses,
        "barrier": [barriers(curve)["loss"] for curve in curves],
        "naive": naive_loss,
        "naive_curve": list(naive.metrics["loss"]),
        "naive_barrier": barriers(naive)["loss"],
        "chosen": chosen,
        "rank": 1 + sum(loss < losses[chosen] for loss in losses),
        "normalised": normalised(losses[chosen], min(losses), naive_loss),
        "n_samples": path.task.n_samples,
    }


def normalised(method: float, best: float, naive: float) -> float | None:
    """L̂ = 100 (L_method − L_best) / (L_naive − L_best); None if the naive path is as good as the best."""
    return round(100 * (method - best) / (naive - best), 10) if naive > best else None


def head_permutations(layers: Sequence[HeadSpace], matched: HeadPermutations, *, seed: int) -> list[HeadPermutations]:
    """All permutations if one layer has at most MAX_PERMUTATIONS of them; otherwise the matched one and random ones."""
    if len(layers) == 1 and math.factorial(layers[0].n_kv_heads) <= MAX_PERMUTATIONS:
        return [{layers[0].name: places} for places in permutations(range(layers[0].n_kv_heads))]
    rng, found = torch.Generator().manual_seed(seed), [dict(matched)]
    most = min(MAX_PERMUTATIONS, math.prod(math.factorial(heads.n_kv_heads) for heads in layers))
    while len(found) < most:
        drawn = {h.name: tuple(torch.randperm(h.n_kv_heads, generator=rng).tolist()) for h in layers}
        if drawn not in found:
            found.append(drawn)
    return [*found]


@dataclass(frozen=True)
class FixedHeadAligner:
    """Aligns B to A with given head permutations: finds the elements inside the heads, and keeps the stream and the
    units where matching puts them."""

    a: Weights
    b: Weights
    scope: str
    stage2: Method = "full"

    @cached_property
    def layers(self) -> tuple[HeadSpace, ...]:
        """The attention layers of the scope."""
        return tuple(heads for heads in self.b.arch.heads() if heads.name in self._part.groups)

    @cached_property
    def matched(self) -> HeadPermutations:
        """The permutation that Stage 1 of weight matching chooses, for each layer."""
        found = {heads.name: self._matched_elements[heads.name].face("vo").tensors() for heads in self.layers}
        return {name: tuple(tensors["index"].tolist()) for name, tensors in found.items()}

    def transform(self, permutations: HeadPermutations) -> Transform:
        """These permutations, the best elements inside the heads, and A's values for all free coordinates."""
        elements = {heads.name: self._element(heads, permutations[heads.name]) for heads in self.layers}
        return with_reference_gauge(self.a, self.b, self._part, {**self._other_elements, **elements}, CPU)

    @cached_property
    def _part(self) -> Symmetry:
        return symmetry(self.b.arch).scoped(self.scope)

    @cached_property
    def _matched_elements(self) -> Mapping[str, Element]:
        """All elements that weight matching finds."""
        matcher = WeightMatching(scope=self.scope, stage2=self.stage2)
        return nearest_elements(self.a, self.b, self.scope, matcher, CPU)

    @cached_property
    def _other_elements(self) -> Mapping[str, Element]:  # of stream and units
        spaces = self.b.arch.spaces
        return {name: g for name, g in self._matched_elements.items() if spaces[name].role != "heads"}

    @cached_property
    def _elements_between_heads(self) -> Mapping[str, HeadsElement]:
        """For each attention layer the best element between every head of A and every head of B in one batch: head
        i·n + j is the pair i, j. The best element of a pair of heads does not depend on how the others are paired.

        The matrices are in normal form, the stream of B moved to A's.
        """
        problem = AlignmentProblem(self.a, self.b, self._part, WeightMatching(), CPU)
        streams = self.b.arch.streams
        action = Action(self.b.arch, {name: g for name, g in self._other_elements.items() if name in streams})
        found = {}
        for heads in self.layers:
            first, second = (form.block(heads.name) for form in (problem.form_a, problem.form_b))
            moved = {name: action.tensor(name, t) for name, t in second.items()}
            a, b = (attention_matrices(self.b.arch, heads, tensors) for tensors in (first, moved))
            n = heads.n_kv_heads
            rows, columns = torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n)
            wide = replace(heads, n_heads=n * heads.n_heads, n_kv_heads=n * n, permutable=False)
            every = permuted(a, _whole_groups(rows, heads)), permuted(b, _whole_groups(columns, heads))
            found[heads.name] = match_heads(*every, wide, stage2=self.stage2).element
        return found

    def _element(self, heads: HeadSpace, permutation: tuple[int, ...]) -> HeadsElement:
        found, kv = self._elements_between_heads[heads.name], torch.tensor(permutation)
        chosen = torch.arange(len(kv)) * len(kv) + kv
        queries = torch.arange(heads.group_size).expand(len(kv), -1).clone()
        return HeadsElement(kv, queries, found.qk.take(chosen), found.vo.take(chosen))


def _whole_groups(groups: Tensor, heads: HeadSpace) -> GroupedAssignment:
    """An assignment of whole groups, with their query heads in order."""
    queries = (groups[:, None] * heads.group_size + torch.arange(heads.group_size)).flatten()
    return GroupedAssignment(groups, queries, 0.0)


def layers(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """The loss after the attention of one layer alone is re-initialised: the mean over `seeds`, for each layer."""
    model = load(needs[0] / "model")
    mixture = FlatModel.of(model, torch.device(context.device))
    trained = mixture.buffer.clone()
    seeds = list(settings.get("seeds", range(SAMPLES)))
    config = ModelConfig.from_dict(dict(model.config))
    initialised = {seed: Transformer(config, seed=seed).state_dict() for seed in seeds}
    fresh = {seed: mixture.vector(load(state, config.to_dict())) for seed, state in initialised.items()}

    def place(layer: int | None, seed: int) -> None:
        mixture.buffer.copy_(trained)
        for name in mixture.offsets:
            if layer is not None and name.startswith(f"blocks.{layer}.attn."):
                mixture.part(mixture.buffer, name).copy_(mixture.part(fresh[seed], name))

    every_layer = range(model.arch.sizes.n_layers)
    points = {f"{i}/{seed}": (lambda i=i, seed=seed: place(i, seed)) for i in every_layer for seed in seeds}
    task = evaluation_task(settings, model, context)
    sums = evaluate_points(mixture, {"before": lambda: place(None, 0), **points}, task)
    found = {name: each.metrics(task.kind) for name, each in sums.items()}
    each = {metric: [[found[f"{i}/{s}"][metric] for s in seeds] for i in every_layer] for metric in found["before"]}
    return {
        "loss": [fmean(values) for values in each["loss"]],
        "accuracy": [fmean(values) for values in each["accuracy"]],
        "draws": each["loss"],
        "before": found["before"]["loss"],
        "accuracy_before": found["before"]["accuracy"],
        "n_samples": task.n_samples,
    }


def control(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """A model and itself with Q and K reparametrised, by its own symmetry and by matrices outside it; then aligned.

    Only a reparametrisation inside the group leaves the outputs unchanged, and only that one is reverted by alignment.
    """
    model = load(needs[0] / "model")
    path = PathEvaluator.of(settings, model, context, n_points=settings.get("points", POINTS))
    scope, seed = settings.get("scope", "all-attention"), settings.get("seed", 0)
    return {
        "positions": model.config.get("positions"),
        "group": str(symmetry(model.arch).scoped(scope)),
        "lambdas": list(path.lambdas),
        "n_samples": path.task.n_samples,
        **{side: _reparametrise_and_align(model, path, side, scope, seed) for side in get_args(Side)},
    }


def _reparametrise_and_align(
    model: Weights, path: PathEvaluator, side: Side, scope: str, seed: int
) -> dict[str, list[Any]]:
    """Several random reparametrisations, each measured before and after alignment."""
    layers = list(range(len(list(model.arch.heads()))))
    layers = layers[:1] if scope == "first-attention" else layers
    rows: dict[str, list[Any]] = {}
    for sample in range(SAMPLES):
        other, element = reparametrised(model, layers, side, seed=seed + 1000 * sample)
        found = align(other, to=model, matcher=WeightMatching(scope=scope))
        moved = found.transform.apply(other)
        naive, aligned = path.curve(other), path.curve(moved)
        row = {
            "element": element,
            "function_change": path.output_change(model, other),
            "end_loss": naive.metrics["loss"][-1],
            "barrier": [barriers(naive)["loss"], barriers(aligned)["loss"]],
            "excess": [excess(curve.metrics["loss"]) for curve in (naive, aligned)],
            "distance": [found.distance_before, found.distance_after],
            "output_change": path.output_change(other, moved),
            "curves": {"naive": list(naive.metrics["loss"]), "aligned": list(aligned.metrics["loss"])},
        }
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
    return rows


def excess(losses: Sequence[float]) -> float:
    """The largest rise over the first end. Unlike the barrier it shows that the other end is bad."""
    return max(losses) - losses[0]


def random_reparametrisation(model: Weights, side: Side, layer: int, *, seed: int) -> tuple[str, Tensor, Tensor]:
    """The name, U and V of a random reparametrisation q → U q, k → V k of one layer's heads, singular values in ½ … 2.

    Inside, V = U⁻ᵀ with U of the group: a complex number per rotary pair under RoPE, any invertible matrix without it.
    Outside, under RoPE, V = U⁻ᵀ with any invertible U: QKᵀ stays the same, but not with rotations between Q and K.
    Without rotary positions that is inside the group, so outside only the queries change.
    """
    group = heads_group(next(heads for heads in model.arch.heads() if heads.layer == layer))
    rotary = any(heads.rotary for heads in model.arch.heads())
    n, width = group.n_kv, group.qk.n
    inner = group.qk if side == "inside" else GL(width)
    keys = inner.sample(n, seed=seed).matrix()
    queries = torch.linalg.inv(keys).mT
    if side == "outside" and not rotary:
        return "queries alone", queries, torch.eye(width, dtype=keys.dtype).expand_as(keys)
    return str(inner), queries, keys


def reparametrised(model: Weights, layers: list[int], side: Side, *, seed: int) -> tuple[Weights, str]:
    """One of our own models with the attention of these layers reparametrised, and the name of the matrices."""
    tensors: dict[str, Tensor] = {name: model[name] for name in model}
    names = []
    for layer in layers:
        label, queries, keys = random_reparametrisation(model, side, layer, seed=seed + layer)
        names.append(label)
        for letter, matrix in (("q", queries), ("k", keys)):
            for kind in ("weight", "bias"):
                name = f"blocks.{layer}.attn.{letter}.{kind}"
                if name in tensors:
                    tensors[name] = _per_head(tensors[name], matrix)
    return replace(model, tensors=tensors), names[0]


def _per_head(tensor: Tensor, matrix: Tensor) -> Tensor:
    """The rows of a projection, those of each head times its matrix; query heads of a group share one matrix."""
    width = matrix.shape[-1]
    heads = tensor.to(torch.float64).reshape(-1, width, *tensor.shape[1:])
    each = matrix.repeat_interleave(len(heads) // len(matrix), 0)
    return torch.einsum("hij,hj...->hi...", each, heads).reshape(tensor.shape).to(tensor.dtype)
