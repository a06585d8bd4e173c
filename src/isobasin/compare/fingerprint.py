"""A short string that all members of an orbit share, and other models do not.

Its entries are numbers that no symmetry of the model changes. Products of the embeddings and the head with fixed
numbers over tokens, positions and outputs give vectors that rotate with the stream, `left` and `right`. Each layer
gives invariants between them: left (V Oᵀ) right summed over heads, left (Q Kᵀ) right with a fixed phase for each rotary
pair, gate·up·down summed over units; and the logarithms of the norms of these products.

The invariants are mixed over the layers with fixed signs and rounded to a quantum. Two fingerprints match if no entry
differs by more than one quantum: numbers closer than a quantum are never rounded to entries two apart.
"""

import hashlib
import json
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.arch import Architecture, Axis, HeadSpace, Space
from isobasin.compare.canonical import pair_weights
from isobasin.compare.stream_frame import fixed_numbers, stream_rows
from isobasin.compare.uncertainty import Doubt, noise_of
from isobasin.config_keys import unknown_settings
from isobasin.errors import IsobasinError
from isobasin.shapes import Float
from isobasin.symmetries.attention import AttentionMatrices, attention_matrices, rotary_pairs
from isobasin.symmetries.normal_form import MOVES, NormalForm, holding_constants, unit_rows
from isobasin.views import Tensors, View
from isobasin.weights import Weights

VERSION = "ib1"
SAFE_ERROR = 1.0  # quanta: an entry that rounding changes by more decides nothing
QUANTUM = 0.03  # twice the largest change of an entry by a cast to bfloat16; measured in docs/distance.md
EACH = 8  # entries of each kind
SOFTENING = 0.1  # of the largest table: added to the norm by which a table is divided, so rounding is not amplified
KINDS = ("ends", "qk", "vo", "ff", "vectors")  # seeds of the fixed signs, so part of the format; ends: embeddings, head
SIZES = ("size qk", "size vo", "size ff")
COUNT = EACH * len(KINDS) + 2 * len(SIZES) + 1
_DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
_HALF = len(_DIGITS) ** 2 // 2


@dataclass(frozen=True)
class Fingerprint:
    """Family, a digest of shapes and settings, and quantised invariants. `str` writes it, `read` parses it."""

    family: str
    digest: str
    entries: tuple[int, ...]

    def __str__(self) -> str:
        digits = (divmod(entry + _HALF, len(_DIGITS)) for entry in self.entries)
        text = "".join(_DIGITS[high] + _DIGITS[low] for high, low in digits)
        return ".".join((VERSION, self.family, self.digest, text))

    @staticmethod
    def read(text: str) -> "Fingerprint":
        """Parse a fingerprint; the error says what is wrong with the string."""
        parts = text.strip().split(".")
        if len(parts) != 4 or parts[0] != VERSION:
            raise IsobasinError(
                f"{text.strip()[:60]!r} is no fingerprint of this version, expected {VERSION}.family.digest.entries; "
                "make it again with `isobasin fingerprint`"
            )
        body = parts[3]
        if len(body) != 2 * COUNT or not set(body) <= set(_DIGITS):
            raise IsobasinError(
                f"fingerprint {text.strip()[:40]}…: found {len(body)} characters of entries, expected {2 * COUNT} "
                "letters, digits, - or _; it was cut or changed: make it again"
            )
        numbers = list(map(_DIGITS.index, body))
        entries = (high * len(_DIGITS) + low - _HALF for high, low in zip(numbers[::2], numbers[1::2]))
        return Fingerprint(parts[1], parts[2], tuple(entries))

    def steps(self, other: "Fingerprint") -> tuple[int, ...]:
        """The difference of each entry in quanta; empty if the two models have different shapes or settings."""
        if (self.family, self.digest) != (other.family, other.digest):
            return ()
        return tuple(abs(x - y) for x, y in zip(self.entries, other.entries, strict=True))

    def matches(self, other: "Fingerprint") -> bool:
        """Whether both can belong to one orbit: the same shape, and no entry more than one quantum away."""
        steps = self.steps(other)
        return bool(steps) and max(steps) <= 1


@dataclass(frozen=True)
class FingerprintComparison:
    """Two fingerprints entry by entry: `apart` beyond one quantum, `uncertain` those that rounding may account for."""

    steps: tuple[int, ...]
    apart: int
    uncertain: int

    @property
    def equal(self) -> bool | None:
        """None: the only entries that differ are those that rounding of the files may change by as much."""
        if not self.steps or self.apart > self.uncertain:
            return False
        return None if self.apart else True


def compare_fingerprints(x: Fingerprint, y: Fingerprint, errors: Sequence[float] = ()) -> FingerprintComparison:
    """Compare two fingerprints; `errors` are those of their entries in quanta, as `entry_errors` estimates them."""
    steps = x.steps(y)
    allowed = [1 + (math.ceil(4 * e) if e > SAFE_ERROR else 0) for e in errors] or [1] * len(steps)
    apart = [step for step in steps if step > 1]
    uncertain = [step for step, most in zip(steps, allowed, strict=True) if 1 < step <= most] if steps else []
    return FingerprintComparison(steps, len(apart), len(uncertain))


def entry_errors(weights: Weights) -> tuple[float, ...]:
    """How much a usual rounding of every weight of the file changes each entry, in quanta; measured."""
    return tuple(((invariants(weights) - invariants(_rounded(weights))).abs() / QUANTUM).tolist())


def doubts(errors: Sequence[float]) -> list[Doubt]:
    """The kinds of entries that a copy may not share, with the largest change in quanta."""
    found = []
    for kind, start, stop in _sections():
        largest = max(errors[start:stop])
        if largest > SAFE_ERROR:
            reason = "rounding of the file changes its entries by more than a quantum"
            found.append(Doubt(kind, reason, largest))
    return found


def _sections() -> Iterator[tuple[str, int, int]]:
    """Every kind of entries, and where they are."""
    start = 0
    for kind, count in (*((k, EACH) for k in KINDS), *((k, 2) for k in SIZES), ("size of the tables", 1)):
        yield kind, start, start + count
        start += count


def _rounded(weights: Weights) -> Weights:
    """The model with every weight larger or smaller, by fixed signs, by the root mean square of a rounding error."""

    def moved(name: str) -> Tensor:
        x, step = weights[name].to("cpu", torch.float64), torch.finfo(weights.dtypes[name]).eps / 12**0.5
        return x * (1 + step * fixed_numbers(f"rounding {name}", *x.shape).sign())

    names = [n for n, pattern in weights.arch.tensors.items() if not pattern.buffer]
    changes = {name: lambda _, n=name: moved(n) for name in names}
    return replace(weights, tensors=View(weights, changes), changed=weights.changed | set(names), exact=False)


def fingerprint(weights: Weights) -> Fingerprint:
    """The fingerprint of a model, from its weights alone; one block in memory at a time, sums in float64."""
    found = (invariants(weights) / QUANTUM).round().clamp(-_HALF, _HALF - 1)
    return Fingerprint(weights.arch.family, _digest(weights), tuple(int(x) for x in found))


def invariants(weights: Weights) -> Tensor:
    """The entries before rounding."""
    model = NormalForm.for_comparison(weights)
    sketch, stream = _Sketch.of(model), model.arch.stream.name
    found: dict[str, list[Tensor]] = {kind: [] for kind in (*KINDS, *SIZES)}
    products: list[_Product] = []
    found["ends"].append((sketch.left * sketch.right).mean(1) * sketch.left.shape[1] ** 0.5)
    copied = set(weights.arch.copied_tensors)
    plain = {name: tensor for name, tensor in model.without_space().items() if name not in copied}
    found["vectors"] += _vector_features(model, stream, plain | model.folded(stream), sketch)
    found["vectors"] += _copied_features(weights)
    found["vectors"] += [_plain(f"constants {name}", values) for name, values in sketch.constants.items()]
    for space in model.spaces:
        place = weights.arch.spaces[space]
        tensors = {name: t.to("cpu", torch.float64) for name, t in model.folded(space).items()}
        if isinstance(place, HeadSpace):
            m = _with_constants(model, place, attention_matrices(weights.arch, place, tensors))
            if place.whole_norm:
                m = _with_gains(m, place, tensors)
            features = _head_features(m, place, sketch)
            found["vectors"] += _table_features(weights.arch, m, place, tensors, sketch)
        else:
            features = _unit_features(model, place, tensors, sketch)
        products += features
        found["vectors"] += _vector_features(model, space, tensors, sketch)
    for kind, values in _relative_products(products, min(noise_of(weights), 1e-3)).items():
        found[kind] += values
    mixed = [_mixed(kind, found[kind]) for kind in KINDS]
    sizes = [_level_and_slope(kind, found[kind]) for kind in SIZES]
    return torch.cat([*mixed, *sizes, torch.tensor([sketch.log_size], dtype=torch.float64)])


@dataclass(frozen=True)
class _Product:
    """A product of weights between the sketch vectors, the norm to divide it by, and the square of its size."""

    kind: str
    value: Float[Tensor, " k"]
    norm: Tensor
    size: Tensor


def _relative_products(products: Sequence[_Product], empty: float) -> dict[str, list[Tensor]]:
    """Every product divided by its norm, and the logarithm of its size.

    A product below the share `empty` of the largest is rounding (a layer that writes nothing, behind gains of zero): it
    counts as zero.
    """
    found: dict[str, list[Tensor]] = {key: [] for p in products for key in (p.kind, f"size {p.kind}")}
    largest = max((float(p.size) for p in products), default=0.0)
    for p in products:
        seen = float(p.size) > empty**2 * largest
        found[p.kind].append(_ratio(p.value, p.norm) if seen else torch.zeros_like(p.value))
        found[f"size {p.kind}"].append(_log_root(p.size if seen else torch.zeros_like(p.size)))
    return found


def _mixed(kind: str, values: Sequence[Tensor]) -> Tensor:
    """Σ_l ± f_l / √L with fixed signs: layers can not be permuted, so their order counts."""
    if not values:
        return torch.zeros(EACH, dtype=torch.float64)
    signs = fixed_numbers(f"signs {kind}", len(values), EACH).sign()
    return (signs * torch.stack(list(values))).sum(0) / len(values) ** 0.5


def _level_and_slope(kind: str, values: Sequence[Tensor]) -> Tensor:
    """The mean over the layers, and their differences from it summed with fixed signs."""
    logs = torch.cat(list(values))
    slope = (fixed_numbers(f"slope {kind}", len(logs)).sign() * (logs - logs.mean())).sum() / len(logs) ** 0.5
    return torch.stack([logs.mean(), slope])


def _digest(weights: Weights) -> str:
    """Eight hexadecimal digits of everything that must agree before entries can be compared."""
    arch = weights.arch
    shapes = {name: arch.shapes[name] for name, pattern in arch.tensors.items() if not pattern.buffer}
    settings = {key: weights.settings[key] for key in weights.family.settings}
    rotary = dict(arch.rotary) if any(heads.rotary for heads in arch.heads()) else {}
    unusual = weights.family.unusual_settings(weights.config) | unknown_settings(weights)
    content = [arch.family, vars(arch.sizes), shapes, settings, rotary, *([unusual] if unusual else [])]
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class _Sketch:
    """Vectors that rotate with the stream, each of norm √d, and the sizes of the tables they were made from."""

    left: Float[Tensor, "k d"]
    right: Float[Tensor, "k d"]
    scale: float  # root mean square of the largest table's product
    log_size: float  # logarithm of the size of all tables together
    constants: Mapping[str, Tensor]  # of tables that hold one along the all-ones vector

    @staticmethod
    def of(model: NormalForm) -> "_Sketch":
        """From every table among embeddings and head, with about the same weight whatever its size."""
        found, heights, holding = [], [], holding_constants(model.arch)
        constants: dict[str, Tensor] = {}
        for name, rows in stream_rows(model, model.arch.stream.name):
            if name in holding:
                constants[name] = rows.sum(1)
                rows = rows - rows.mean(1, keepdim=True)
            found.append(fixed_numbers(f"sketch {name}", 2 * EACH, len(rows)) @ rows / len(rows) ** 0.5)
            heights.append(len(rows))
        sizes = [float(x.square().mean().sqrt()) for x in found]
        most = max(*sizes, 1e-30)
        weights = [1 / (s**2 + (SOFTENING * most) ** 2) ** 0.5 if h > 1 else 1 / most for s, h in zip(sizes, heights)]
        total = torch.stack([w * x for w, x in zip(weights, found)]).sum(0)
        total = total / total.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
        return _Sketch(total[:EACH], total[EACH:], most, math.log(math.hypot(*sizes, 1e-30)), constants)


def _with_constants(model: NormalForm, heads: HeadSpace, m: AttentionMatrices) -> AttentionMatrices:
    """Q, K and V with such constants as their last row, where a bias would be."""
    if holding_constants(model.arch).isdisjoint(name for name, *_ in model.arch.carriers(heads.qk)):
        return m
    q, k, v = (torch.cat([x - x.mean(1, keepdim=True), x.sum(1, keepdim=True)], 1) for x in (m.q, m.k, m.v))
    return AttentionMatrices(q, k, v, m.o)


def _with_gains(m: AttentionMatrices, heads: HeadSpace, tensors: Tensors) -> AttentionMatrices:
    """Q and K times the gains of the norms on them, of which every head has its own."""
    q, k = (tensors[name].reshape(-1, 1, heads.d_head) for name in (heads.q_gain, heads.k_gain))
    return AttentionMatrices(m.q * q, m.k * k, m.v, m.o)


def _table_features(
    arch: Architecture, m: AttentionMatrices, heads: HeadSpace, tensors: Tensors, sketch: _Sketch
) -> Iterator[Tensor]:
    """Tables of relative positions that heads carry with them: each head's column with what that head writes."""
    v, width = m.v.repeat_interleave(heads.group_size, 0), sketch.left.shape[1]
    written = ((sketch.left @ v[:, :width]) * (sketch.right @ m.o)).sum(-1)
    for name in (name for name in arch.tables if name in tensors):
        columns = tensors[name].mT @ fixed_numbers(f"table {name}", tensors[name].shape[0], EACH)
        yield _ratio((columns * written).sum(0), columns.norm() * written.norm() / len(columns) ** 0.5)
        yield _ratio(columns.sum(0), columns.norm())


def _head_features(m: AttentionMatrices, heads: HeadSpace, sketch: _Sketch) -> list[_Product]:
    """`vo` and `qk`: the products of a layer's heads between the sketch vectors."""
    q, k, v, o, r = m.q, m.k, m.v, m.o, heads.rotary
    left, right = sketch.left, sketch.right
    if q.shape[1] > left.shape[1]:  # the matrices have a row for the bias
        left, right = (torch.cat([s, torch.ones_like(s[:, :1])], 1) for s in (left, right))
    k, v = (x.repeat_interleave(heads.group_size, 0) for x in (k, v))
    # Heads that can not be permuted get different weights, so that a swap of two of them changes the sum.
    weight = torch.ones(len(q)) if heads.permutable else fixed_numbers("head", len(q))
    values = ((left @ v) * (sketch.right @ o)).sum(-1)
    scores = ((left @ q[..., r:]) * (right @ k[..., r:])).sum(-1)
    value_size, score_size = _product_size(v, o), _product_size(q[..., r:], k[..., r:])
    if r:
        rotary_q, rotary_k = (rotary_pairs(x[..., :r], heads) for x in (q, k))
        left_q, right_k = left.to(rotary_q) @ rotary_q, right.to(rotary_k) @ rotary_k
        scores = scores + (left_q * right_k.conj() * pair_weights(r // 2)).sum(-1).real
        sizes = [x.abs().square().sum(-2) for x in (rotary_q, rotary_k)]
        score_size = score_size + (sizes[0] * sizes[1]).sum()
    return [
        _Product("vo", weight.to(values) @ values, value_size.sqrt(), value_size),
        _Product("qk", weight.to(scores) @ scores, score_size.sqrt(), score_size),
    ]


def _product_size(x: Tensor, y: Tensor) -> Tensor:
    """Σ_h ‖X_h Y_hᵀ‖², from Gram matrices."""
    return ((x.mT @ x) * (y.mT @ y)).sum()


def _unit_features(model: NormalForm, space: Space, tensors: Tensors, sketch: _Sketch) -> list[_Product]:
    """`ff`: the sum over units of (gate·) up · down between the sketch vectors, with the norm of its terms."""
    seen = {move: torch.zeros(EACH, space.size, dtype=torch.float64) for move in MOVES}
    sizes = {move: torch.zeros(space.size, dtype=torch.float64) for move in MOVES}
    gated, stream, holding = False, model.arch.stream, holding_constants(model.arch)
    for name, rows, move in unit_rows(model.arch, space.name, tensors):
        on_stream = any(word.terms and model.arch.space_of(word.terms[0]) == stream for word in _axes(model, name))
        vectors = {"primal": sketch.left, "dual": sketch.right, "permuted": sketch.left.roll(1, 0)}[move]
        if name in holding:
            vectors = torch.cat([vectors, torch.ones_like(vectors[:, :1])], 1)
            rows = torch.cat([rows - rows.mean(1, keepdim=True), rows.sum(1, keepdim=True)], 1)
        seen[move] += (vectors if on_stream else fixed_numbers(f"row {name}", EACH, rows.shape[1])) @ rows.mT
        sizes[move] += rows.square().sum(1)
        gated |= move == "permuted"
    gate = seen["permuted"] if gated else torch.ones_like(seen["dual"])
    terms = gate * seen["primal"] * seen["dual"]
    size = (sizes["primal"] * sizes["dual"] * (sizes["permuted"] if gated else 1)).sum()
    return [_Product("ff", terms.sum(1), terms.square().sum(1).sqrt(), size)]


def _axes(model: NormalForm, name: str) -> tuple[Axis, ...]:
    return model.arch.tensors[name].roles[0].axes


def _vector_features(model: NormalForm, space: str, tensors: Tensors, sketch: _Sketch) -> Iterator[Tensor]:
    """Biases, shifts and gains on the stream, matrices from the stream to itself, and tensors on no space at all."""
    holding = holding_constants(model.arch)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and name in holding:  # the shift of such a norm is the all-ones vector in every model
            continue
        axes = [word for word in _axes(model, name) if word.terms]
        x = tensor.to("cpu", torch.float64)
        if not axes:
            yield _plain(f"plain {name}", x.flatten())
        elif any(len(word.terms) != 1 or model.arch.space_of(word.terms[0]) != model.arch.stream for word in axes):
            continue
        elif x.dim() == 2 and len(axes) == 2:
            yield _ratio(((sketch.left @ x) * sketch.right).sum(1), x.norm())
        elif x.dim() == 1 and axes[0].terms[0].permutation_part:
            yield _ratio((sketch.left * sketch.right) @ (x - x.mean()), x.norm())
        elif x.dim() == 1 and space != model.arch.stream.name:
            yield sketch.left @ x / len(x) ** 0.5 / (x.square().mean().sqrt() + SOFTENING * sketch.scale)


def _copied_features(weights: Weights) -> Iterator[Tensor]:
    """Parts that nothing moves (a vision tower): their tensors with fixed numbers, in one sum that is not divided by
    their number, so that a change of one of them is seen."""
    found = []
    for name in weights.arch.copied_tensors:
        x = weights[name].to("cpu", torch.float64).flatten()
        found.append(_ratio(x @ fixed_numbers(f"copied {name}", x.numel(), EACH), x.norm()))
        found.append(_log_root(x.square().mean()).expand(EACH))
    if found:
        yield (fixed_numbers("signs copied", len(found), EACH).sign() * torch.stack(found)).sum(0)


def _plain(label: str, x: Float[Tensor, " n"]) -> Tensor:
    """Numbers that no group element moves, against fixed numbers."""
    return x @ fixed_numbers(label, x.numel(), EACH) / (x.norm() + SOFTENING * x.numel() ** 0.5)


def _ratio(x: Tensor, size: Tensor) -> Tensor:
    """x / size, and 0 where the size is 0."""
    return torch.where(size > 0, x / torch.where(size > 0, size, 1), 0)


def _log_root(square: Tensor) -> Tensor:
    return square.clamp_min(1e-60).log()[None] / 2
