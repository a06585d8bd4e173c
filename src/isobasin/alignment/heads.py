"""The two stages for one attention layer: which head is which, then the best element inside each head."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor

from isobasin.alignment.head_cost import complete_cost, cosine_cost, product_cost, singular_cost
from isobasin.alignment.head_linear import Method, align_matrices
from isobasin.alignment.head_rotary import align_rotary, pair_constants
from isobasin.arch import HeadSpace
from isobasin.errors import IsobasinError
from isobasin.groups import GL, Element, HeadsElement, Matrix, Phases
from isobasin.groups.assignment import GroupedAssignment, assign_grouped
from isobasin.symmetries.attention import AttentionMatrices, Layout, rotary_columns, stacked
from isobasin.symmetries.head_balance import query_key_element
from isobasin.symmetries.symmetry import norm_group

HeadDistance = Literal["complete", "frobenius", "singular", "cosine"]
HEAD_DISTANCES = ("complete", "frobenius", "singular", "cosine")
STAGES = ("none", "orthogonal", "full")
RANK = 1e-6  # singular values below this share of the largest are the rounding of a float32 file
REACH = 1e25  # |u| and 1 / |u| of rotary pairs: far inside what group elements may have
WIDEST = 1e3  # how far |u| of a rotary pair may be from the others': a transform file holds a ratio of 1e6


@dataclass(frozen=True)
class HeadMatch:
    """The element that moves B's heads next to A's, and how each solver ended, per kv head."""

    element: HeadsElement
    converged: Tensor
    deficient: Tensor


class HeadMatcher(ABC):
    """What the descent asks of a matcher: it pairs the heads of one layer, and says what activations add."""

    correlations: Mapping[str, Tensor] = MappingProxyType({})  # by space: which coordinates of A and B go together
    activation_weight: float = 0.0
    fixed_basis: ClassVar[bool] = False  # see `align.Matcher`

    def rough(self) -> "HeadMatcher":
        """Rotations inside heads, which have a closed form: for sweeps while the stream still moves."""
        return self

    @abstractmethod
    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch: ...


class NoHeadMatcher(HeadMatcher):
    """For problems whose elements are known."""

    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch:
        raise AssertionError("the elements of this problem are known")


def match_heads(
    a: AttentionMatrices,
    b: AttentionMatrices,
    heads: HeadSpace,
    *,
    stage2: Method = "full",
    distance: HeadDistance = "complete",
) -> HeadMatch:
    """Stage 1 by the chosen head distance, Stage 2 inside the heads it paired.

    Rank-deficient heads: directions that hold nothing but rounding are taken as empty, and what the weights then
    do not determine is drawn to the identity (`linear`), so that no element is worse conditioned than float32 carries.
    """
    return match_paired_heads(a, b, heads, pair_heads(a, b, heads, distance), stage2=stage2)


def match_paired_heads(
    a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace, found: GroupedAssignment, *, stage2: Method = "full"
) -> HeadMatch:
    """Stage 2 alone, for heads that are paired already."""
    moved = permuted(b, found)
    vo, vo_converged = _linear(a.v, stacked(a.o, heads), moved.v, stacked(moved.o, heads), stage2)
    (qk, shared), qk_converged = _query_key(a, moved, heads, stage2)
    queries = found.heads.reshape(heads.n_kv_heads, -1) - found.groups[:, None] * heads.group_size
    element = HeadsElement(found.groups.cpu(), queries.cpu(), qk, vo, shared)
    return HeadMatch(element, qk_converged & vo_converged, rank_deficient(a, moved, heads))


def pair_heads(
    a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace, distance: HeadDistance
) -> GroupedAssignment:
    """The cheapest way to send B's heads to A's: Q–K and V–O together, as a head moves as one thing."""
    if not heads.permutable:
        return GroupedAssignment(torch.arange(heads.n_kv_heads), torch.arange(heads.n_heads), 0.0)
    return assign_grouped(head_cost(a, b, heads, distance), heads.n_kv_heads)


def head_cost(a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace, distance: HeadDistance) -> Tensor:
    """How far each head of B is from each of A, Q–K and V–O together."""
    return query_key_cost(a, b, heads, distance) + _cost(distance, a.v, a.o, b.v, b.o)


def query_key_cost(a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace, distance: HeadDistance) -> Tensor:
    """`complete` sees every offset of rotary positions; without them it is the plain product."""
    if distance == "complete" and heads.rotary:
        return complete_cost(a.q, a.k, b.q, b.k, layout=_layout(heads), rotary=heads.rotary)
    return _cost(distance, a.q, a.k, b.q, b.k)


def _cost(distance: HeadDistance, x_a: Tensor, y_a: Tensor, x_b: Tensor, y_b: Tensor) -> Tensor:
    match distance:
        case "complete" | "frobenius":
            return product_cost(x_a, y_a, x_b, y_b)
        case "singular":
            return singular_cost(x_a, y_a, x_b, y_b)
        case "cosine":
            return cosine_cost(x_a, y_a, x_b, y_b)
    raise IsobasinError(f"--head-distance {distance!r} is unknown, expected one of {', '.join(HEAD_DISTANCES)}")


def permuted(b: AttentionMatrices, found: GroupedAssignment) -> AttentionMatrices:
    return AttentionMatrices(b.q[found.heads], b.k[found.groups], b.v[found.groups], b.o[found.heads])


def rank_deficient(a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> Tensor:
    """Which kv heads have, in A or B, a Q, K, V or O (of all their query heads) that is not of full column rank."""
    sides = [x for m in (a, b) for x in (m.v, stacked(m.o, heads))]
    if not heads.layer_norm:  # which makes the columns of a head sum to zero
        sides += [x for m in (a, b) for x in (stacked(m.q, heads), m.k)]
    return torch.stack([_is_empty(torch.linalg.eigvalsh((x.mT @ x).cpu())).any(-1) for x in sides]).any(0)


def _is_empty(squares: Tensor) -> Tensor:
    """Which squared singular values of a head, in rising order, are nothing but rounding."""
    return squares <= RANK**2 * squares[..., -1:]


def _without_rounding(x: Tensor) -> Tensor:
    """The same heads with their empty directions truly empty."""
    gram = (x.mT @ x).cpu()
    if not bool(_is_empty(torch.linalg.eigvalsh(gram)).any()):  # the usual case, without vectors
        return x
    squares, basis = torch.linalg.eigh(gram)
    hidden = (basis * _is_empty(squares).unsqueeze(-2)).to(x.device)
    return x - x @ hidden @ hidden.mT


def _linear(x_a: Tensor, y_a: Tensor, x_b: Tensor, y_b: Tensor, stage2: Method) -> tuple[Matrix, Tensor]:
    """The U of X_B Uᵀ ≈ X_A, Y_B U⁻¹ ≈ Y_A, per kv head, and whether each solver converged."""
    found = align_matrices(*map(_without_rounding, (x_a, y_a, x_b, y_b)), method=stage2)
    return GL(x_a.shape[-1]).project(found.u.cpu()), found.converged.cpu()


def _query_key(
    a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace, stage2: Method
) -> tuple[tuple[Element, Element | None], Tensor]:
    """Rotary columns by one complex number per pair, the others by a matrix; keys move by the dual of U."""
    if heads.qk_norm:
        return (norm_signs(a, b, heads, stage2), None), torch.ones(heads.n_kv_heads, dtype=torch.bool)
    r = heads.rotary
    q_a, q_b = stacked(a.q, heads), stacked(b.q, heads)
    converged = torch.ones(heads.n_kv_heads, dtype=torch.bool)
    parts: list[Element] = []
    if r:
        parts.append(rotary_element(*rotary_columns(a, heads), *rotary_columns(b, heads), heads, stage2))
    if r < heads.d_head:
        plain, converged = _linear(q_a[..., r:], a.k[..., r:], q_b[..., r:], b.k[..., r:], stage2)
        parts.append(plain.dual())
    return query_key_element(parts, heads), converged


def norm_signs(a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace, stage2: Method) -> Phases:
    """Behind norms on queries and keys: the signs at which rotary pairs overlap most, for `none` no turn at all."""
    group = norm_group(heads)
    if stage2 == "none":
        return group.identity(heads.n_kv_heads)
    sides = zip((stacked(a.q, heads), a.k), (stacked(b.q, heads), b.k))
    overlap = torch.stack([(x * y).sum(-2) for x, y in sides]).sum(0)
    pairs = overlap.unflatten(-1, (-1, 2)).sum(-1) if heads.interleaved else overlap.unflatten(-1, (2, -1)).sum(-2)
    return group.nearest_signs(pairs.cpu())


def rotary_element(q_a: Tensor, k_a: Tensor, q_b: Tensor, k_b: Tensor, heads: HeadSpace, stage2: Method) -> Phases:
    """k → k / conj(u): for `orthogonal` only the phase of u, for `none` no turn at all."""
    c = pair_constants(q_a, k_a, q_b, k_b, layout=_layout(heads))
    u = align_rotary(c.eta_q, c.eta_k, c.gamma_q, c.gamma_k).u
    if stage2 == "none":
        u = torch.ones_like(u)
    elif stage2 == "orthogonal":
        u = torch.polar(torch.ones_like(c.eta_q), -(c.gamma_q + c.gamma_k).angle())
    return phases(u, heads)


def phases(u: Tensor, heads: HeadSpace) -> Phases:
    """How keys move. Pairs that hold next to nothing ask for any |u|: it stays within reach of the others' and of 1."""
    size = u.abs()
    middle = size.median().clamp(1 / REACH, REACH)
    held = size.clamp(middle / WIDEST, middle * WIDEST)
    near = torch.where(held == size, u, u * (held / size))
    return Phases((1 / near.conj().resolve_conj()).cpu(), heads.interleaved)


def _layout(heads: HeadSpace) -> Layout:
    return "interleaved" if heads.interleaved else "half"
