"""Which expert of B goes to which expert of A. Experts are paired before the descent, since their units move inside.

Every expert has a signature that no permutation, sign or scale of its units changes: its row of the router, and the
products downᵀ·up and gateᵀ·gate over its units, applied to a few fixed vectors of the stream. For a given map of the
stream the pairs of least total distance between signatures are an assignment problem. The map of the stream that the
descent finds may favour other pairs; then the descent is repeated with these.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from isobasin.alignment.descent import OnSweep, SweepState, from_embeddings, solve
from isobasin.alignment.heads import HeadMatcher
from isobasin.alignment.problem import AlignmentProblem, Elements
from isobasin.arch import Architecture
from isobasin.groups import Element, Monomial, Overlap
from isobasin.groups.group import generator
from isobasin.shapes import Float
from isobasin.symmetries.action import Action
from isobasin.symmetries.normal_form import NormalForm, unit_rows
from isobasin.symmetries.symmetry import group_of, symmetry
from isobasin.weights import Weights

VECTORS = 32  # fixed vectors of the stream in a signature
ROUNDS = 3  # orders of experts that are tried


def solve_with_experts(problem: AlignmentProblem, *, on_sweep: OnSweep = None) -> tuple[SweepState, dict[str, Element]]:
    """What `solve` finds, and the elements between the models as they are, the order of experts among them."""
    if not problem.orders_experts:
        state = solve(problem, on_sweep=on_sweep)
        return state, problem.without_scales(state.elements)
    starts = [problem.identity, *([from_embeddings(problem)[0]] if problem.moves_stream else [])]
    order, _ = min((expert_order(problem, start) for start in starts), key=lambda found: found[1])
    best: tuple[SweepState, dict[str, Element]] | None = None
    for _ in range(ROUNDS):
        ordered = problem.with_expert_order(order)
        state = solve(ordered, on_sweep=on_sweep)
        if best is not None and not state.square < best[0].square:
            break
        best = state, {**order, **ordered.without_scales(state.elements)}
        again, _ = expert_order(problem, state.elements)
        if all(torch.equal(again[name].index, order[name].index) for name in order):
            break
        order = again
    assert best is not None
    return best


def nearest_elements(a: Weights, b: Weights, scope: str, matcher: HeadMatcher, device: torch.device) -> Elements:
    """The elements of a scope that bring B closest to A, between the models as they are; free coordinates apart."""
    problem = AlignmentProblem(a, b, symmetry(b.arch).scoped(scope), matcher, device)
    found: dict[str, Element] = {}
    for part in problem.independent_parts():
        found |= solve_with_experts(part)[1]
    return found


def expert_order(problem: AlignmentProblem, elements: Elements) -> tuple[dict[str, Monomial], float]:
    """The best order of B's experts in every layer, with the streams moved by these elements; and its relative cost."""
    streams = problem.act({name: elements[name] for name in problem.streams})
    return best_order(problem.form_a, problem.form_b, streams, problem.orders_experts)


def best_order(
    a: NormalForm, b: NormalForm, streams: Action, spaces: tuple[str, ...]
) -> tuple[dict[str, Monomial], float]:
    """The order of B's experts that comes closest to A's in each of these spaces, and the mean relative cost."""
    found, total = {}, 0.0
    for space in spaces:
        cost = _costs(signatures(a, space, Action(a.arch, {})), signatures(b, space, streams))
        nearest = group_of(a.arch.spaces[space]).nearest(replace(Overlap.empty(len(cost), cost), permuted=-cost))
        found[space], index = cast(Monomial, nearest), nearest.tensors()["index"]
        total += float(cost[torch.arange(len(index)), index].mean()) / len(spaces)
    return found, total


def signatures(model: NormalForm, space: str, streams: Action) -> list[Float[Tensor, "experts k"]]:
    """The signature of every expert in parts, one row for each expert, with the streams moved."""
    arch = model.arch
    router = [streams.tensor(name, model.read(name)) for name in router_tensors(arch, space)]
    experts = [_unit_products(model, member, streams) for member in arch.expert_spaces[space].members]
    rows = (x.reshape(len(x), -1) for x in router)
    parts = [(x - x.mean(0)).to("cpu", torch.float64) for x in rows]  # the mean row is free
    return [*parts, *(torch.stack(each) for each in zip(*experts, strict=True))]


def router_tensors(arch: Architecture, space: str) -> list[str]:
    """The tensors of a space of experts: the router, then its biases."""
    return sorted(arch.blocks[space], key=lambda name: -len(arch.shapes[name]))


def _unit_products(model: NormalForm, space: str, streams: Action) -> list[Tensor]:
    """upᵀ·down and gateᵀ·gate (without a gate, upᵀ·up) of balanced units, times fixed vectors."""
    moved = {name: streams.tensor(name, t) for name, t in model.block(space).items()}
    rows: dict[str, Tensor] = {}
    for _, x, move in unit_rows(model.arch, space, moved):
        rows[move] = torch.cat([rows[move], x], 1) if move in rows else x
    gate = rows.get("permuted", rows["primal"])
    pairs = ((rows["primal"], rows["dual"]), (gate, gate))
    return [(x.mT @ (y @ _vectors(y.shape[1]).to(y))).flatten().to("cpu", torch.float64) for x, y in pairs]


def _vectors(size: int) -> Float[Tensor, "size k"]:
    return torch.randn(size, VECTORS, generator=generator(size), dtype=torch.float64)


def _costs(a: list[Tensor], b: list[Tensor]) -> Float[Tensor, "experts experts"]:
    """Squared distances of the signatures of all pairs; each part relative to its mean size."""
    return sum((_relative_cost(x, y) for x, y in zip(a, b, strict=True)), torch.zeros(len(a[0]), len(b[0])).double())


def _relative_cost(x: Float[Tensor, "e k"], y: Float[Tensor, "e k"]) -> Float[Tensor, "e e"]:
    scale = (x.square().sum(1).mean() + y.square().sum(1).mean()).clamp_min(1e-300)
    return (x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.mT) / scale
