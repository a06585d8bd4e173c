"""The normal form in which this room compares models, and the steps that lead to it.

1. Free coordinates at fixed values (`fold_norms`): gains one, shifts folded, means and unseen biases zero; the shift in
   front of a reader without a bias is always one.
2. Units balanced: ‖up row‖ = ‖down column‖. Heads balanced: Q and K of a head have the same Gram matrix, and V and O
   too. Both are the forms of least norm under the scales of the units and the factors of the heads.
3. For a canonical point also a fixed frame of the residual stream (`stream_frame`); `canonical` then fixes the order,
   the signs and the rotations of heads and units in that frame.

A model is processed block by block. A block is the heads or the units of one layer with the vectors of the stream that
belong to them (output biases, and shifts and gains that do not fold). What remains is the block of embeddings and head:
token and position embeddings, the output head, the last norm.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.arch.architecture import ROTATED
from isobasin.gauge import NormCoordinate
from isobasin.groups import GL, Blocks, Element, HeadsElement, Matrix, Monomial, Phases
from isobasin.match.attention import AttentionMatrices, attention_matrices
from isobasin.match.canonical import ENDS, STREAM, Canonical, blocks, stream_of
from isobasin.match.heads import stacked
from isobasin.match.matchers import WeightMatching
from isobasin.match.rotary import complex_pairs
from isobasin.match.scales import balance
from isobasin.match.sweep import Board
from isobasin.match.untying import untied
from isobasin.match.whole import dressed
from isobasin.normalize import normalize
from isobasin.shapes import Complex, Float
from isobasin.symmetries import group_of, symmetry
from isobasin.transform import Transform, Value
from isobasin.views import Doubled, Tensors, View, chain
from isobasin.weights import Weights

MAX_HELD_BYTES = 2**29  # a model up to this size stays in memory
MAX_FLOAT64_NUMBERS = 2**24  # a model with a larger block is computed in float32
MOVES = ("primal", "dual", "magnitude")  # how an axis moves: by g, by g⁻ᵀ, by the permutation of g alone
EMPTY = 1e-12  # relative to the largest: smaller singular values count as zero
TABLE_ROWS = 4096  # rows of a table that are processed at once
RANK_THRESHOLD = 1e-8  # smallest eigenvalue of XᵀX relative to the largest, below which layers contribute to the frame
REFINING_SWEEPS = 10


def fixed_numbers(label: str, *shape: int) -> Tensor:
    """Numbers of mean zero and variance one that depend on the label and the shape alone.

    They are the directions that canonical points and fingerprints refer to. They come from the raw bits of PCG64, which
    numpy guarantees not to change; torch generators give no such guarantee.
    """
    count = int(np.prod(shape)) if shape else 1
    raw = np.random.PCG64(crc32(label.encode())).random_raw(count)
    uniform = (np.asarray(raw, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy((2 * uniform - 1) * 3**0.5).reshape(shape)


def split_space(space: str) -> tuple[str, int | None]:
    """Kind and layer: `heads3` is ("heads", 3), `pool` is ("pool", None)."""
    found = re.fullmatch(r"(heads|ff)(\d+)", space)
    return (found[1], int(found[2])) if found else (space, None)


def block_tensors(arch: Architecture) -> dict[str, tuple[str, ...]]:
    """Tensor names by block: as `match.canonical.blocks`, but vectors of the stream go to the layer they belong to."""
    found = {space: list(names) for space, names in blocks(arch).items()}
    home = {name: space for space, names in found.items() if space != ENDS for name in names}
    for weight, space in list(home.items()):
        bias = arch.bias_of(weight)
        home |= {bias: space} if bias is not None and bias not in home else {}
    for norm in arch.norms.values():
        space = next((home[r.weight] for r in arch.readers(norm.name) if r.weight in home), ENDS)
        home |= {name: space for name in (norm.gain, norm.shift) if name in arch.tensors and name not in home}
    for name in list(found[ENDS]):
        if home.get(name, ENDS) != ENDS:
            found[ENDS].remove(name)
            found[home[name]].append(name)
    return {space: tuple(names) for space, names in found.items() if names or space == ENDS}


def _norms_without_bias(arch: Architecture) -> dict[str, NormCoordinate]:
    """Gains and shifts of norms with a reader that has no bias."""
    coordinates = symmetry(arch).coordinates.items()
    return {name: c for name, c in coordinates if isinstance(c, NormCoordinate) and c.lacks_bias}


def with_unit_shift(weights: Weights) -> Weights:
    """The same function with shift one in front of every reader that has no bias.

    Such a reader then stores its constant along the all-ones vector, whatever the shift was. `normalize` does this only
    where the inverse is accurate, which a small change of the shift decides; a comparison must not depend on that.
    """
    chosen = _norms_without_bias(weights.arch).values()
    changes = chain(*(c.set(torch.ones(2, c.space_size, dtype=torch.float64)) for c in chosen))
    if not changes:
        return weights
    view = View(Doubled(weights), changes)
    return replace(weights, tensors=View(weights, {name: lambda _, n=name: view[n] for name in changes}))  # type: ignore[misc]


def fold_norms(weights: Weights) -> Transform:
    """`normalize` of the model with unit shifts, as one transform of the model itself."""
    found = normalize(with_unit_shift(weights))
    gauge = dict(found.gauge)
    for name, coordinate in _norms_without_bias(weights.arch).items():
        norm = coordinate.norm
        before = torch.stack([weights[norm.gain].cpu().double(), weights[norm.shift].cpu().double()])
        gauge[name] = Value(before, gauge[name].after)
    return replace(found, gauge=gauge)


@dataclass(frozen=True)
class BalancedModel:
    """One model in balanced form. Small models stay in memory; of larger ones only the block that was read last."""

    weights: Weights
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _kept: dict[str, tuple[Element | None, dict[str, Tensor]]] = field(default_factory=dict, repr=False)

    @property
    def arch(self) -> Architecture:
        return self.weights.arch

    @cached_property
    def blocks(self) -> dict[str, tuple[str, ...]]:
        return block_tensors(self.arch)

    @property
    def spaces(self) -> list[str]:
        """All blocks except embeddings and head, layers in their order."""
        return [space for space in self.blocks if space not in (ENDS, STREAM)]

    @cached_property
    def folding(self) -> Transform:
        return fold_norms(self.weights)

    @cached_property
    def _folded(self) -> Weights:
        return self.folding.apply(self.weights, device=self.device)

    @cached_property
    def _dtype(self) -> torch.dtype:
        sizes = (sum(torch.Size(self.arch.shapes[n]).numel() for n in names) for names in self.blocks.values())
        return torch.float32 if max(sizes) > MAX_FLOAT64_NUMBERS else torch.float64

    def read(self, name: str) -> Tensor:
        """One folded tensor."""
        return self._folded[name].to(self.device, self._dtype)

    def folded(self, space: str) -> dict[str, Tensor]:
        """The tensors of a block, folded but not balanced."""
        return {name: self.read(name) for name in self.blocks[space]}

    def without_space(self) -> dict[str, Tensor]:
        """Folded tensors that no group element moves, such as the bias of a classifier."""
        patterns = self.arch.tensors.items()
        names = [n for n, p in patterns if p.roles and not any(axis.terms for role in p.roles for axis in role.axes)]
        return {name: self.read(name) for name in names}

    def block(self, space: str) -> Mapping[str, Tensor]:
        """The balanced tensors of a block, by name."""
        return self.balanced(space)[1]

    def balanced(self, space: str) -> tuple[Element | None, Mapping[str, Tensor]]:
        """The element that balances a block (scales of units, factors of heads), and the tensors after it acted."""
        if space in self._kept:
            return self._kept[space]
        if self.weights.n_params * self._dtype.itemsize > MAX_HELD_BYTES:
            self._kept.clear()
        element, tensors = None, self.folded(space)
        if space != ENDS and space in symmetry(self.arch).groups:
            element = self._balancing(space, tensors)
            action = Action(self.arch, {space: element})
            tensors = {name: action.tensor(name, t) for name, t in tensors.items()}
        self._kept[space] = element, tensors
        return element, tensors

    def _balancing(self, space: str, tensors: Tensors) -> Element:
        place = self.arch.spaces[space]
        if isinstance(place, HeadSpace):
            return balance_heads(self.arch, place, {name: t.to("cpu", torch.float64) for name, t in tensors.items()})
        if place.kind not in ("positive", "scaled"):
            return group_of(place).identity()
        sizes = {move: torch.zeros(place.size, dtype=torch.float64) for move in MOVES}
        for _, rows, move in unit_rows(self.arch, space, tensors):
            sizes[move] += rows.square().sum(1)
        return Monomial(torch.arange(place.size), balance(sizes["primal"], sizes["dual"]))


def unit_rows(arch: Architecture, space: str, tensors: Tensors) -> Iterator[tuple[str, Tensor, str]]:
    """Each tensor with an axis in this space of units: its name, one row per unit (float64), and how the rows move."""
    for name, tensor in tensors.items():
        for axis, words in enumerate(arch.tensors[name].roles[0].axes):
            if len(words.terms) == 1 and arch.space_of(words.terms[0]).name == space:
                term, rows = words.terms[0], tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)
                move = "magnitude" if term.magnitude else "dual" if term.dual else "primal"
                yield name, rows.to("cpu", torch.float64), move


def balance_heads(arch: Architecture, heads: HeadSpace, tensors: Tensors) -> HeadsElement:
    """The element that balances every head of a layer, without a permutation.

    In balanced form the remaining freedom of a head is compact: O(n) for a matrix factor, a phase for a rotary pair. So
    balanced heads can be compared by rotations alone.
    """
    m = attention_matrices(arch, heads, tensors)
    places = torch.arange(heads.group_size).expand(heads.n_kv_heads, -1).clone()
    vo = Matrix(GL(heads.d_head).project(_balancing_factor(stacked(m.o, heads), m.v)).value)
    return HeadsElement(torch.arange(heads.n_kv_heads), places, _query_key_balancing(m, heads), vo)


def _query_key_balancing(m: AttentionMatrices, heads: HeadSpace) -> Element:
    """How keys move: a positive number for every rotary pair, a matrix for the other columns."""
    q, k, r = stacked(m.q, heads), m.k, heads.rotary
    parts: list[Element] = []
    if r:
        sizes = [rotary_pairs(x[..., :r], heads).abs().square().sum(-2).sqrt() for x in (q, k)]
        full = (sizes[0] > EMPTY * sizes[0].max()) & (sizes[1] > EMPTY * sizes[1].max())
        scale = torch.where(full, sizes[0] / torch.where(full, sizes[1], 1), 1).sqrt()
        parts.append(Phases(torch.complex(scale, torch.zeros_like(scale)), heads.interleaved))
    if r < heads.d_head:
        parts.append(GL(heads.d_head - r).project(_balancing_factor(q[..., r:], k[..., r:])))
    return parts[0] if len(parts) == 1 else Blocks(tuple(parts))


def _balancing_factor(x: Float[Tensor, "b rows_x n"], y: Float[Tensor, "b rows_y n"]) -> Float[Tensor, "b n n"]:
    """The g for which x g⁻¹ and y gᵀ have the same diagonal Gram matrix.

    With x = Y_x R_x, y = Y_y R_y and R_x R_yᵀ = Z Σ Wᵀ it is g = Σ^-½ Zᵀ R_x; the identity for a head of zeros. A
    deficient rank does not determine g: singular values of zero then get a small ridge.
    """
    n = x.shape[-1]
    r_x, r_y = _triangular_factor(x), _triangular_factor(y)
    z, sigma, _ = torch.linalg.svd(r_x @ r_y.mT)
    sigma = torch.maximum(sigma, 1e-8 * sigma[..., :1])
    eye = torch.eye(n, dtype=x.dtype, device=x.device).expand(len(x), n, n)
    zero = (sigma[..., 0] <= 0)[:, None, None]
    g = z.mT @ r_x / torch.where(zero[..., 0], 1, sigma).sqrt()[..., None]
    return torch.where(zero, eye, g)


def _triangular_factor(x: Tensor) -> Tensor:
    """R of x = Y R, with a ridge of the size of rounding errors."""
    n = x.shape[-1]
    ridge = EMPTY**0.5 * torch.linalg.matrix_norm(x, ord=2)[:, None, None]
    rows = ridge * torch.eye(n, dtype=x.dtype, device=x.device)
    return torch.linalg.qr(torch.cat([x, rows], dim=-2), mode="r").R


def rotary_pairs(x: Float[Tensor, "*b d r"], heads: HeadSpace) -> Complex[Tensor, "*b d p"]:
    """Rotary columns as complex numbers, in the layout of these heads."""
    return complex_pairs(x.contiguous(), "interleaved" if heads.interleaved else "half")


# Frame of the residual stream


def stream_frame(model: BalancedModel) -> Element:
    """The element that brings the stream to its canonical frame, by rotation, permutation or signs as its group allows.

    A rotation is determined by the rows X of the tables whose other axis nothing moves (tokens, positions, classes): it
    brings whitened X closest to fixed numbers. Unlike eigenvectors it needs no choice of signs, and equal eigenvalues
    do not matter.
    """
    space = stream_of(model.arch)
    if space.kind in ROTATED:
        return group_of(space).project(_rotation(model, space))
    if space.kind == "fixed":
        return group_of(space).identity()
    return _coordinate_order(model, space)


def tables(arch: Architecture, names: tuple[str, ...]) -> Iterator[tuple[str, int, bool]]:
    """Tensors with one axis on the stream and nothing that moves on the others: name, axis, and whether it is a gain
    (which has no sign)."""
    for name in names:
        found = [(axis, words.terms) for axis, words in enumerate(arch.tensors[name].roles[0].axes) if words.terms]
        if len(found) == 1 and [arch.space_of(term).name for term in found[0][1]] == [STREAM]:
            yield name, found[0][0], found[0][1][0].magnitude


def stream_rows(model: BalancedModel, *spaces: str) -> Iterator[tuple[str, Tensor]]:
    """The rows on the stream of the tables in these blocks that are not gains, in float64."""
    for space in spaces:
        for name, axis, gain in tables(model.arch, model.blocks[space]):
            if not gain:
                tensor = model.read(name)
                yield name, tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis]).to("cpu", torch.float64)


def _rotation(model: BalancedModel, space: Space) -> Tensor:
    """Fᵀ X (XᵀX)^-½ with fixed numbers F: its projection onto the group is the frame."""
    gram = torch.zeros(space.size, space.size, dtype=torch.float64)
    product = gram.clone()
    for name, table in stream_rows(model, ENDS, *model.spaces):
        for start in range(0, len(table), TABLE_ROWS):
            part = table[start : start + TABLE_ROWS]
            gram += part.mT @ part
            product += fixed_numbers(f"{name}:{start}", *part.shape).mT @ part
    free = space.size - (space.kind == "orthogonal1")
    mean = torch.full_like(gram, 1 / space.size) if space.kind == "orthogonal1" else torch.zeros_like(gram)
    centre = torch.eye(space.size, dtype=torch.float64) - mean
    rows = centre @ product @ centre
    for name in model.spaces:
        values = torch.linalg.eigvalsh(centre @ gram @ centre)
        if values[-free] > RANK_THRESHOLD * values[-1]:
            break
        rows = _linear_response(model, name, rows) @ centre
        rows = rows * (gram.trace().sqrt() / torch.linalg.matrix_norm(rows).clamp_min(1e-300))
        gram = gram + rows.mT @ rows
        product = product + fixed_numbers(f"through {name}", *rows.shape).mT @ rows
    return product @ _inverse_root(centre @ gram @ centre)


def _inverse_root(gram: Tensor) -> Tensor:
    values, basis = torch.linalg.eigh(gram)
    kept = values > 1e-14 * values[-1]
    return (basis * torch.where(kept, values.clamp_min(1e-300).rsqrt(), 0)) @ basis.mT


def _linear_response(model: BalancedModel, space: str, rows: Tensor) -> Tensor:
    """The output of a layer for rows of the stream if it were linear: Σ_h x V_h O_hᵀ, or x up down.

    It rotates with the stream, and no element of the layer's own space changes it.
    """
    place, tensors = model.arch.spaces[space], model.block(space)
    if isinstance(place, HeadSpace):
        m = attention_matrices(model.arch, place, {n: t.to("cpu", torch.float64) for n, t in tensors.items()})
        values = (rows @ m.v[:, : rows.shape[1]]).repeat_interleave(place.group_size, 0)
        return (values @ m.o.mT).sum(0)
    found: dict[str, Tensor] = {}
    for name, matrix, move in unit_rows(model.arch, space, tensors):
        terms = [axis.terms for axis in model.arch.tensors[name].roles[0].axes]
        if list(map(len, terms)) == [1, 1] and not any(term.magnitude for (term,) in terms):
            found.setdefault(move, matrix)
    return rows @ found["primal"].mT @ found["dual"] if len(found) == 2 else rows


def _coordinate_order(model: BalancedModel, space: Space) -> Monomial:
    """Coordinates sorted by the products of their columns with fixed numbers; signs where the stream has them.

    Where only the common sign is free, the mean is subtracted first: it holds a constant (see `with_unit_shift`) that
    does not change with the sign of the stream.
    """
    signed, unsigned = (torch.zeros(space.size, dtype=torch.float64) for _ in range(2))
    for name, rows in stream_rows(model, ENDS, *model.spaces):
        signed += fixed_numbers(name, len(rows)) @ rows / len(rows) ** 0.5
    for name, _, gain in tables(model.arch, model.blocks[ENDS]):
        unsigned += fixed_numbers(name, 1) * model.read(name).to("cpu", torch.float64) if gain else 0
    sign = torch.ones_like(signed)
    if space.kind == "signed":
        sign = torch.where(signed < 0, -1.0, 1.0).to(torch.float64)
    elif space.kind == "permutation±":
        signed -= signed.mean()
        sign = sign if float(signed.pow(3).sum()) >= 0 else -sign
    index = torch.argsort(sign * signed + unsigned, stable=True)
    return Monomial(index, sign[index])


def is_tied(weights: Weights) -> bool:
    """Whether the head and the embedding are one tensor."""
    return any(weights.arch.tied(name) for name in weights.arch.tensors)


def with_same_tying(a: Weights, b: Weights) -> tuple[Weights, Weights]:
    """The same two functions; where only one model ties its head to the embedding, that one is untied."""
    if is_tied(a) == is_tied(b):
        return a, b
    return (untied(a), b) if is_tied(a) else (a, untied(b))


def refine_transform(a: Weights, b: Weights, transform: Transform, device: torch.device) -> Transform:
    """A few more sweeps of weight matching in float64, starting from a transform that brings B to A.

    `align` sweeps wide models in float32 and only a few times. The sweeps take place between the normal forms of
    alignment (`match.canonical.Canonical`); the result is mapped back to A's own gauge.
    """
    group = symmetry(b.arch)
    board = Board(
        Canonical(a, group, torch.float64, device),
        Canonical(b, group, torch.float64, device),
        WeightMatching(scope="model"),
    )
    scales = {name: (board.a.balance(name), board.b.balance(name)) for name in group.groups}
    start = {
        name: scales[name][0] @ transform.elements.get(name, each.identity()) @ scales[name][1].inverse()
        for name, each in group.groups.items()
    }
    found = board.descend(start, most=REFINING_SWEEPS).elements
    elements = {name: scales[name][0].inverse() @ g @ scales[name][1] for name, g in found.items()}
    return dressed(a, b, group, elements, device)
