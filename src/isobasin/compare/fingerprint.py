"""A short string that all members of an orbit share, and other models do not.

Its entries are numbers that no symmetry of the model changes. Products of the embeddings and the head with fixed
numbers over tokens, positions and outputs give vectors that rotate with the stream, `left` and `right`. Each layer
gives invariants between them: left (V Oᵀ) right summed over heads, left (Q Kᵀ) right with a fixed phase for each rotary
pair, gate·up·down summed over units; and the logarithms of the norms of these products. Two signs in a unit, such as
those of gate and up, leave gate·up·down as it is but change the function, so |gate|·up·down is summed too: the entries
that the second version of the format adds.

The invariants are mixed over the layers with fixed signs and rounded to a quantum. Two fingerprints match if no entry
differs by more than one quantum: numbers closer than a quantum are never rounded to entries two apart.

A model whose head is tied to its embedding has the fingerprint of its copy with a head of its own. Versions before 0.2
gave it one with another digest, of the model as it is stored.
"""

import hashlib
import json
import math
import string
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from isobasin.alignment.experts import router_tensors
from isobasin.arch import Architecture, Axis, HeadSpace, Space, describe
from isobasin.arguments import checks_arguments
from isobasin.checkpoint import dtype_name
from isobasin.compare.canonical import pair_weights
from isobasin.compare.stream_frame import fixed_numbers, fixed_signs, joint_blocks, stream_rows, tables
from isobasin.compare.uncertainty import Doubt, noise_of
from isobasin.config_keys import unknown_settings
from isobasin.display import Shown, Summary
from isobasin.errors import ArchitectureError, IsobasinError, with_article
from isobasin.shapes import Float
from isobasin.symmetries.attention import AttentionMatrices, attention_matrices, norm_gains, rotary_pairs
from isobasin.symmetries.normal_form import MOVES, NormalForm, constant_axis, holding_constants, unit_rows
from isobasin.symmetries.transform import scramble
from isobasin.views import Tensors, View
from isobasin.weights import ModelSource, Weights, load, read_part, untied

SAFE_ERROR = 1.0  # quanta: an entry that rounding changes by more decides nothing
OUTLIER = 1000.0  # times the usual size of a weight: a number that copies may mix with the others
COPIES = 4  # scrambled and rounded copies of a model with such numbers, or of a 16-bit one with up to SMALL weights
SMALL = 5_000_000
LARGE = 40_000_000  # weights
QUANTUM = 0.03  # twice the largest change of an entry by a cast to bfloat16; measured in docs/distance.md
EACH = 8  # entries of each kind
SOFTENING = 0.1  # of the largest table: added to the norm by which a table is divided, so rounding is not amplified
SMALLEST_BIAS = 1e-3  # of a router: added to the norm by which its biases are divided
KINDS = ("ends", "qk", "vo", "ff", "vectors")  # seeds of the fixed signs, so part of the format; ends: embeddings, head
SIZES = ("size qk", "size vo", "size ff")
EVEN = "even ff"  # the sum over units that does not see the sign of what the activation is applied to
FIRST_COUNT = EACH * len(KINDS) + 2 * len(SIZES) + 1
COUNT = FIRST_COUNT + EACH
VERSIONS = {"ib1": FIRST_COUNT, "ib2": COUNT}  # each version with its number of entries; later ones add entries
VERSION = "ib2"
_DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
_HALF = len(_DIGITS) ** 2 // 2
CPU = torch.device("cpu")


@dataclass(frozen=True, repr=False)
class Fingerprint(Shown):
    """Family, a digest of shapes and settings, and quantised invariants. `str` writes it, `read` parses it.

    Copies of a model may round an entry to a neighbouring number, so `==` between fingerprints or between their
    strings says nothing: `matches` compares them, as `isobasin fingerprint --compare` does.
    """

    family: str
    digest: str
    entries: tuple[int, ...]
    tied_digest: str = field(default="", compare=False)  # of the same model with head and embedding in one tensor

    def __str__(self) -> str:
        digits = (divmod(entry + _HALF, len(_DIGITS)) for entry in self.entries)
        text = "".join(_DIGITS[high] + _DIGITS[low] for high, low in digits)
        version = next(name for name, count in VERSIONS.items() if count == len(self.entries))
        return ".".join((version, self.family, self.digest, text))

    @staticmethod
    @checks_arguments
    def read(text: str) -> "Fingerprint":
        """Parse a fingerprint; the error says what is wrong with the string."""
        parts = text.strip().split(".")
        if len(parts) != 4 or parts[0] not in VERSIONS:
            raise IsobasinError(
                f"{text.strip()[:60]!r} is no fingerprint, expected {VERSION}.family.digest.entries; "
                "make it again with `isobasin fingerprint`"
            )
        body, count = parts[3], VERSIONS[parts[0]]
        if len(body) != 2 * count or not set(body) <= set(_DIGITS):
            raise IsobasinError(
                f"fingerprint {text.strip()[:40]}…: found {len(body)} characters of entries, expected {2 * count} "
                "letters, digits, - or _; it was cut or changed: make it again"
            )
        numbers = list(map(_DIGITS.index, body))
        entries = (high * len(_DIGITS) + low - _HALF for high, low in zip(numbers[::2], numbers[1::2]))
        return Fingerprint(parts[1], parts[2], tuple(entries))

    @checks_arguments
    def steps(self, other: "Fingerprint") -> tuple[int, ...]:
        """The difference of each entry that both versions have, in quanta; empty if the two models have different
        shapes or settings."""
        if (self.family, self.digest) != (other.family, other.digest):
            if self.digest == other.tied_digest or other.digest == self.tied_digest:
                raise IsobasinError(
                    "one of the two fingerprints is of a model without a head, or was made before version 0.2 of one "
                    "whose head is tied to its embedding; compare the models with `isobasin equal`"
                )
            return ()
        return tuple(abs(x - y) for x, y in zip(self.entries, other.entries))

    def summary(self) -> Summary:
        """The string, and how it is compared."""
        how = "with matches(other), or isobasin fingerprint MODEL --compare; not by =="
        return Summary(f"fingerprint of {with_article(self.family)} model", {"string": str(self), "compare": how})

    @checks_arguments
    def matches(self, other: "Fingerprint | ModelSource") -> bool:
        """Whether both can belong to one orbit: the same shape, and no entry more than one quantum away. The other one
        may be a fingerprint, its string, or a model."""
        steps = self.steps(self._of(other))
        return bool(steps) and max(steps) <= 1

    def _of(self, other: "Fingerprint | ModelSource") -> "Fingerprint":
        if isinstance(other, Fingerprint):
            return other
        if isinstance(other, str) and other.split(".")[0] in VERSIONS:
            return Fingerprint.read(other)
        return _fingerprint(_form(load(other).resident(CPU), self), CPU)


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
    known = [*errors[: len(steps)]] or [0.0] * len(steps)
    allowed = [1 + (math.ceil(4 * e) if e > SAFE_ERROR else 0) for e in known]
    apart = [step for step in steps if step > 1]
    uncertain = [step for step, most in zip(steps, allowed, strict=True) if 1 < step <= most] if steps else []
    return FingerprintComparison(steps, len(apart), len(uncertain))


def fingerprint_with_errors(
    model: ModelSource, device: torch.device | None = None, *, like: Fingerprint | None = None
) -> tuple[Fingerprint, tuple[float, ...]]:
    """The fingerprint, and how much a usual rounding of every weight of the file changes each entry, in quanta;
    measured. `like`: the one that it will be compared with, which may be of a tied model and of an older version."""
    weights = _form(load(model).resident(device or CPU), like)
    here = invariants(weights, device)
    errors = (here - invariants(_rounded(weights), device)).abs()
    copies = [(here - invariants(copy, device)).abs() for copy in _moved_copies(weights)]
    if copies:  # a few copies may all change one entry less than others of its kind by chance
        most = torch.stack(copies).amax(0)
        usual = [most[start:stop].mean().expand(stop - start) for _, start, stop in _sections()]
        errors = torch.stack([errors, most, torch.cat(usual)]).amax(0)
    return _quantised(weights, here), tuple((errors / QUANTUM).tolist())


def _moved_copies(weights: Weights) -> Iterator[Weights]:
    """Scrambled and rounded copies of a 16-bit model, whose rounding a scramble may make larger, and of one with
    numbers far larger than the others: what these were mixed with is lost. None of other models, and none of larger
    ones, where they take too long."""
    narrow = any(t.is_floating_point and t.itemsize < 4 for t in weights.dtypes.values())
    if weights.n_params > LARGE or not ((narrow and weights.n_params <= SMALL) or _has_outliers(weights)):
        return
    for seed in range(COPIES):
        yield _rounded_to_stored(scramble(weights, seed=seed).apply(weights))


def _rounded_to_stored(moved: Weights) -> Weights:
    """The numbers that a file in the stored types would hold, in float64."""

    def rounded(name: str) -> Tensor:
        return moved[name].to(moved.dtypes[name]).to(torch.float64)

    changes = {name: lambda _, n=name: rounded(n) for name in moved.dtypes}
    return replace(moved, tensors=View(moved, changes))


def _has_outliers(weights: Weights) -> bool:
    tensors = [weights[n].to(torch.float64) for n, p in weights.arch.tensors.items() if not p.buffer]
    sizes = torch.stack([x.square().mean().sqrt() for x in tensors if x.numel()])
    return max(float(x.abs().max()) for x in tensors if x.numel()) > OUTLIER * float(sizes.median())


def entry_errors(model: ModelSource) -> tuple[float, ...]:
    """The errors of `fingerprint_with_errors` alone."""
    return fingerprint_with_errors(model)[1]


def doubts(errors: Sequence[float]) -> list[Doubt]:
    """The kinds of entries that a copy may not share, with the largest change in quanta."""
    found = []
    for kind, start, stop in _sections():
        largest = max(errors[start:stop])
        if largest > SAFE_ERROR:
            reason = "rounding of the file changes its entries by more than a quantum"
            found.append(Doubt(kind, reason, largest))
    return found


def type_doubts(weights: Weights) -> list[Doubt]:
    """Whether the type that config.json names, in which transformers runs the model, does not hold its weights: entries
    are those of the stored numbers."""
    largest = torch.finfo(weights.dtype_run).max
    if largest >= torch.finfo(weights.dtype).max:
        return []
    names = [name for name, pattern in weights.arch.tensors.items() if not pattern.buffer]
    size = max(float(weights[name].abs().max()) for name in names if weights[name].numel())
    reason = f"names {dtype_name(weights.dtype_run)}, which holds numbers up to {largest:.3g}; weights are larger"
    return [Doubt("config.json", reason, size / largest)] if size > largest else []


def _sections() -> Iterator[tuple[str, int, int]]:
    """Every kind of entries, and where they are."""
    start = 0
    for kind, count in (*((k, EACH) for k in KINDS), *((k, 2) for k in SIZES), ("size of the tables", 1), (EVEN, EACH)):
        yield kind, start, start + count
        start += count


def _numbers(label: str, *shape: int, like: Tensor) -> Tensor:
    """`fixed_numbers` in float64, where a tensor is."""
    return fixed_numbers(label, *shape).to(like.device)


def _signs(name: str, like: Tensor) -> Tensor:
    """Fixed signs; on CUDA those of its own generator, as copying the others takes longer than all the rest."""
    if like.device.type != "cuda":
        return fixed_signs(f"rounding {name}", *like.shape).to(like.device)
    rng = torch.Generator(like.device).manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, 2, like.shape, generator=rng, device=like.device).mul_(2).sub_(1).to(like.dtype)


def _rounded(weights: Weights) -> Weights:
    """The model with every weight larger or smaller, by fixed signs, by the root mean square of a rounding error.

    In a copy, a large number was mixed with the others of its row, of its column or of the whole tensor before it was
    rounded, so its error is shared out among them.
    """

    def moved(name: str) -> Tensor:
        x = weights[name].to(torch.float64, copy=True)
        size = float(x.abs().max()) if x.numel() else 0.0
        if not 0 < size < math.inf:
            return x
        step = size * torch.finfo(weights.dtypes[name]).eps / 12**0.5
        noise = _mixed_sizes((x / size).to(torch.float32)).mul_(_signs(name, x))
        return x.add_(noise, alpha=step)

    names = [n for n, pattern in weights.arch.tensors.items() if not pattern.buffer]
    changes = {name: lambda _, n=name: moved(n) for name in names}
    return replace(weights, tensors=View(weights, changes), changed=weights.changed | set(names), exact=False)


def _mixed_sizes(x: Tensor) -> Tensor:
    """For every number the root mean square of itself, its row, its column and the whole tensor, in equal shares; takes
    the place of x."""
    squares = x.square_()
    parts = [squares.mean(k, keepdim=True) for k in range(x.dim())] if x.dim() > 1 else []
    for share in (squares.mean(), *parts):
        squares.add_(share)
    return squares.div_(2 + len(parts)).sqrt_()


def fingerprint(model: ModelSource, device: torch.device | str | None = None) -> Fingerprint:
    """The fingerprint of a model, from its weights alone; one block in memory at a time, sums in float64."""
    place = torch.device(device or "cpu")
    return _fingerprint(_form(load(model).resident(place)), place)


def _fingerprint(weights: Weights, device: torch.device) -> Fingerprint:
    return _quantised(weights, invariants(weights, device))


def _form(weights: Weights, like: Fingerprint | None = None) -> Weights:
    """The model with a head of its own, where it can have one; as it is stored, if such a fingerprint is asked for."""
    if like is not None and like.digest == _digest(weights):
        return weights
    try:
        return untied(weights)
    except ArchitectureError:
        return weights


def _tied_digest(weights: Weights) -> str:
    """The digest of the same model with its head tied to the embedding; empty where it can not be."""
    config, shapes = {**weights.config, weights.family.tied_key: True}, weights.arch.stored_shapes()
    try:
        heads = weights.family.architecture(config).aliases
        arch, names = describe(config, {name: shape for name, shape in shapes.items() if name not in heads})
    except ArchitectureError:
        return ""
    return _digest(replace(weights, arch=arch, config=config, names=names))


def _quantised(weights: Weights, entries: Tensor) -> Fingerprint:
    found = (entries / QUANTUM).round().clamp(-_HALF, _HALF - 1)
    return Fingerprint(weights.arch.family, _digest(weights), tuple(int(x) for x in found), _tied_digest(weights))


def invariants(weights: Weights, device: torch.device | None = None) -> Tensor:
    """The entries before rounding."""
    weights = read_part(weights)
    model = NormalForm.for_comparison(weights, device)
    sketches = _sketches(model)
    found: dict[str, list[Tensor]] = {kind: [] for kind in (*KINDS, *SIZES, EVEN)}
    products: list[_Product] = []
    copied = set(weights.arch.copied_tensors)
    rest = {name: tensor for name, tensor in model.without_space().items() if name not in copied}
    for stream, sketch in sketches.items():
        found["ends"].append((sketch.left * sketch.right).mean(1) * sketch.left.shape[1] ** 0.5)
        found["vectors"] += _vector_features(model, stream, rest | model.folded(stream), sketches)
        found["vectors"] += [_plain(f"constants {name}", values) for name, values in sketch.constants.items()]
        rest = {}
    found["vectors"] += _copied_features(weights)
    for space, *experts in joint_blocks(model):
        place = weights.arch.spaces[space]
        if experts:
            joint, vectors = _expert_features(model, space, experts, sketches)
            products += joint
            found["vectors"] += vectors
            continue
        tensors = {name: t.to(model.device, torch.float64) for name, t in model.folded(space).items()}
        if isinstance(place, HeadSpace):
            m = _with_constants(model, place, attention_matrices(weights.arch, place, tensors))
            if place.own_gains:
                m = _with_gains(model, m, place)
            around = _HeadSketch.of(weights.arch, place, sketches)
            features = _head_features(m, place, around)
            found["vectors"] += _table_features(weights.arch, m, place, tensors, around)
        else:
            features = _unit_features(model, place, tensors, sketches)
        products += features
        found["vectors"] += _vector_features(model, space, tensors, sketches)
    for kind, values in _relative_products(products, min(noise_of(weights), 1e-3)).items():
        found[kind] += values
    mixed = [_mixed(kind, found[kind]) for kind in KINDS]
    sizes = [_level_and_slope(kind, found[kind]) for kind in SIZES]
    log_size = fmean(sketch.log_size for sketch in sketches.values())
    return torch.cat([*mixed, *sizes, torch.tensor([log_size], dtype=torch.float64), _mixed(EVEN, found[EVEN])])


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
    found.pop(f"size {EVEN}", None)  # that of `ff`
    largest = max((float(p.size) for p in products), default=0.0)
    for p in products:
        seen = float(p.size) > empty**2 * largest
        found[p.kind].append(_ratio(p.value, p.norm) if seen else torch.zeros_like(p.value))
        if p.kind != EVEN:
            found[f"size {p.kind}"].append(_log_root(p.size if seen else torch.zeros_like(p.size)))
    return found


def _mixed(kind: str, values: Sequence[Tensor]) -> Tensor:
    """Σ_l ± f_l / √L with fixed signs: layers can not be permuted, so their order counts."""
    if not values:
        return torch.zeros(EACH, dtype=torch.float64)
    signs = fixed_numbers(f"signs {kind}", len(values), EACH).sign()
    return (signs * torch.stack([value.cpu() for value in values])).sum(0) / len(values) ** 0.5


def _level_and_slope(kind: str, values: Sequence[Tensor]) -> Tensor:
    """The mean over the layers, and their differences from it summed with fixed signs."""
    logs = torch.cat(list(values)).cpu()
    slope = (fixed_numbers(f"slope {kind}", len(logs)).sign() * (logs - logs.mean())).sum() / len(logs) ** 0.5
    return torch.stack([logs.mean(), slope])


def _digest(weights: Weights) -> str:
    """Eight hexadecimal digits of everything that must agree before entries can be compared."""
    arch = weights.arch.read_part
    shapes = {name: arch.shapes[name] for name, pattern in arch.tensors.items() if not pattern.buffer}
    settings = {key: weights.settings[key] for key in weights.family.settings}
    rotary = dict(arch.rotary) if any(heads.rotary for heads in arch.heads()) else {}
    unusual = weights.family.unusual_settings(weights.config)
    # A key of a multimodal model may be called as one of its language model.
    unusual |= {f"config: {k}" if k in unusual else k: value for k, value in unknown_settings(weights).items()}
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

    @property
    def rows(self) -> Float[Tensor, "2k d"]:
        return torch.cat([self.left, self.right])

    @staticmethod
    def of(model: NormalForm, stream: str, others: "Mapping[str, _Sketch]") -> "_Sketch":
        """From every table among embeddings and head, with about the same weight whatever its size, and from tensors
        that come from other streams."""
        found, heights, holding = [], [], holding_constants(model.arch)
        constants: dict[str, Tensor] = {}
        every = [*stream_rows(model, stream, [stream]), *_images(model, stream, others)]
        if not every:  # of a stream that has neither embeddings nor a head, and does not move
            plain = fixed_numbers(f"sketch {stream}", 2 * EACH, model.arch.streams[stream].size)
            return _Sketch(plain[:EACH], plain[EACH:], 1.0, 0.0, {})
        for name, rows in every:
            if name in holding and len(model.arch.spaces_of(name)) == 1:
                constants[name] = rows.sum(1)
                rows = rows - rows.mean(1, keepdim=True)
            found.append(_numbers(f"sketch {name}", 2 * EACH, len(rows), like=rows) @ rows / len(rows) ** 0.5)
            heights.append(len(rows))
        sizes = [float(x.square().mean().sqrt()) for x in found]
        most = max(*sizes, 1e-30)
        weights = [1 / (s**2 + (SOFTENING * most) ** 2) ** 0.5 if h > 1 else 1 / most for s, h in zip(sizes, heights)]
        total = torch.stack([w * x for w, x in zip(weights, found)]).sum(0)
        total = total / total.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
        return _Sketch(total[:EACH], total[EACH:], most, math.log(math.hypot(*sizes, 1e-30)), constants)


def _sketches(model: NormalForm) -> dict[str, _Sketch]:
    """The vectors of every stream, one stream after the other."""
    found: dict[str, _Sketch] = {}
    for stream in model.arch.streams:
        found[stream] = _Sketch.of(model, stream, found)
    return found


def _images(model: NormalForm, stream: str, others: Mapping[str, _Sketch]) -> Iterator[tuple[str, Tensor]]:
    """What the vectors of earlier streams become on this one, by tensors between the two."""
    for name, axis, _ in tables(model.arch, model.blocks[stream], stream, others):
        if model.arch.spaces_of(name) != [stream]:
            (other,) = (s for s in model.arch.spaces_of(name) if s != stream)
            tensor = model.read(name).to(model.device, torch.float64)
            if name in holding_constants(model.arch):
                tensor = tensor - tensor.mean(constant_axis(model.arch, name)[0], keepdim=True)
            yield name, others[other].rows @ tensor.movedim(axis, -1)


_SIDES = ("left", "right")


@dataclass(frozen=True)
class _HeadSketch:
    """The vectors of the streams that the matrices of attention heads lie on."""

    q: Float[Tensor, "k d_q"]
    k: Float[Tensor, "k d_k"]
    v: Float[Tensor, "k d_v"]
    o: Float[Tensor, "k d"]

    @staticmethod
    def of(arch: Architecture, heads: HeadSpace, sketches: Mapping[str, _Sketch]) -> "_HeadSketch":
        q, k, v, o = ([sketches[stream.name] for stream in streams] for streams in arch.head_streams(heads))
        left, right = ([torch.cat([getattr(s, side) for s in each], 1) for each in (q, k, v, o)] for side in _SIDES)
        return _HeadSketch(left[0], right[1], left[2], right[3])


def _with_constants(model: NormalForm, heads: HeadSpace, m: AttentionMatrices) -> AttentionMatrices:
    """Q, K and V with such constants in their last row, where a bias would be."""
    arch, holding = model.arch, holding_constants(model.arch)
    faces = ((heads.qk, True), (heads.qk, False), (heads.vo, False))
    held = [any(n in holding and t.dual is dual for n, *_, t in arch.carriers(face)) for face, dual in faces]
    if not any(held):
        return m
    sides = zip((m.q, m.k, m.v), arch.head_streams(heads), held)
    q, k, v = (_with_last_row(x, stream.size, holds) for x, (stream,), holds in sides)
    return AttentionMatrices(q, k, v, m.o)


def _with_last_row(x: Float[Tensor, "h rows n"], width: int, holds: bool) -> Float[Tensor, "h rows1 n"]:
    """A matrix with a row for its bias; the constant that it holds is moved there."""
    weight, bias = x[:, :width], x[:, width:].sum(1, keepdim=True)
    if holds:
        weight, bias = weight - weight.mean(1, keepdim=True), bias + weight.sum(1, keepdim=True)
    return torch.cat([weight, bias], 1)


def _with_gains(model: NormalForm, m: AttentionMatrices, heads: HeadSpace) -> AttentionMatrices:
    """Q and K times the gains of the norms on them, of which every head has its own."""
    names = (name for names in heads.gain_names for name in names)
    q, k = norm_gains(heads, {name: model.read(name).to("cpu", torch.float64) for name in names})
    on_q, on_k = (x - x.mean(-1, keepdim=True) if heads.layer_norm else x for x in (m.q, m.k))
    return AttentionMatrices(on_q * q, on_k * k, m.v, m.o)


def _table_features(
    arch: Architecture, m: AttentionMatrices, heads: HeadSpace, tensors: Tensors, around: _HeadSketch
) -> Iterator[Tensor]:
    """Tables of relative positions that heads carry with them, and sinks: each head's column with what it writes."""
    v, width = m.v.repeat_interleave(heads.group_size, 0), around.v.shape[1]
    written = ((around.v @ v[:, :width]) * (around.o @ m.o)).sum(-1)
    if heads.sinks:
        sinks = _compressed(tensors[heads.sinks])
        yield _ratio(sinks @ written, written.norm())
        yield sinks.mean().expand(EACH)
    for name in (name for name in arch.tables if name in tensors):
        table = tensors[name]
        columns = table.mT @ _numbers(f"table {name}", table.shape[0], EACH, like=table)
        yield _ratio((columns * written).sum(0), columns.norm() * written.norm() / len(columns) ** 0.5)
        yield _ratio(columns.sum(0), columns.norm())


def _head_features(m: AttentionMatrices, heads: HeadSpace, around: _HeadSketch) -> list[_Product]:
    """`vo` and `qk`: the products of a layer's heads between the sketch vectors."""
    q, k, v, o, r = m.q, m.k, m.v, m.o, heads.rotary
    on_q, on_k, on_v = around.q, around.k, around.v
    if q.shape[1] > on_q.shape[1]:  # the matrices have a row for the bias
        on_q, on_k, on_v = (torch.cat([s, torch.ones_like(s[:, :1])], 1) for s in (on_q, on_k, on_v))
    k, v = (x.repeat_interleave(heads.group_size, 0) for x in (k, v))
    # Heads that can not be permuted get different weights, so that a swap of two of them changes the sum.
    weight = torch.ones(len(q)) if heads.permutable else fixed_numbers("head", len(q))
    values = ((on_v @ v) * (around.o @ o)).sum(-1)
    scores = ((on_q @ q[..., r:]) * (on_k @ k[..., r:])).sum(-1)
    value_size, score_size = _product_size(v, o), _product_size(q[..., r:], k[..., r:])
    if r:
        rotary_q, rotary_k = (rotary_pairs(x[..., :r], heads) for x in (q, k))
        left_q, right_k = on_q.to(rotary_q) @ rotary_q, on_k.to(rotary_k) @ rotary_k
        scores = scores + (left_q * right_k.conj() * pair_weights(r // 2).to(left_q)).sum(-1).real
        sizes = [x.abs().square().sum(-2) for x in (rotary_q, rotary_k)]
        score_size = score_size + (sizes[0] * sizes[1]).sum()
    return [
        _Product("vo", weight.to(values) @ values, value_size.sqrt(), value_size),
        _Product("qk", weight.to(scores) @ scores, score_size.sqrt(), score_size),
    ]


def _product_size(x: Tensor, y: Tensor) -> Tensor:
    """Σ_h ‖X_h Y_hᵀ‖², from Gram matrices."""
    return ((x.mT @ x) * (y.mT @ y)).sum()


def _unit_features(
    model: NormalForm, space: Space, tensors: Tensors, sketches: Mapping[str, _Sketch]
) -> list[_Product]:
    """`ff`: the sum over units of (gate·) up · down between the sketch vectors, with the norm of its terms. Unless the
    sign of what the activation is applied to is free, the same with its absolute value."""
    nothing = torch.zeros(EACH, space.size, dtype=torch.float64, device=model.device)
    seen = {move: nothing.clone() for move in MOVES}
    sizes = {move: nothing[0].clone() for move in MOVES}
    gated, holding = False, holding_constants(model.arch)
    for name, rows, move in unit_rows(model.arch, space.name, tensors):
        stream = model.arch.stream_of(name)
        label = model.arch.without_expert(name)
        if stream is None:
            vectors = _numbers(f"row {label}", EACH, rows.shape[1], like=rows)
        else:
            sketch = sketches[stream.name]
            vectors = {"primal": sketch.left, "dual": sketch.right, "permuted": sketch.left.roll(1, 0)}[move]
        if name in holding:
            vectors = torch.cat([vectors, torch.ones_like(vectors[:, :1])], 1)
            rows = torch.cat([rows - rows.mean(1, keepdim=True), rows.sum(1, keepdim=True)], 1)
        if rows.shape[1] > vectors.shape[1]:  # a convolution: the stream, and then the places of its kernel
            kernel = _numbers(f"row {label}", EACH, 1, rows.shape[1] // vectors.shape[1], like=rows)
            vectors = (vectors[:, :, None] * kernel).flatten(1)
        seen[move] += vectors @ rows.mT
        sizes[move] += rows.square().sum(1)
        gated |= move == "permuted"
    gate = seen["permuted"] if gated else torch.ones_like(seen["dual"])
    more = 1.0 if gated and not space.scales else 0.0  # what is multiplied with a gate may be more than up
    terms = gate * (seen["primal"] + more) * seen["dual"]
    size = ((sizes["primal"] + more) * sizes["dual"] * (sizes["permuted"] if gated else 1)).sum()
    norm = terms.square().sum(1).sqrt()
    found = [_Product("ff", terms.sum(1), norm, size)]
    if gated or space.kind not in ("signed", "scaled"):
        even = terms * (gate if gated else seen["primal"]).sign()
        found.append(_Product(EVEN, even.sum(1), norm, size))
    return found


def _expert_features(
    model: NormalForm, space: str, experts: Sequence[str], sketches: Mapping[str, _Sketch]
) -> tuple[list[_Product], list[Tensor]]:
    """Of the experts of a layer, whose order does not count: the sum of their `ff`; and as vectors, products of their
    rows of the router, the same sum with each expert times its row, the size of the router, and its biases and those
    that experts add to the stream with these rows."""
    router, *biases = router_tensors(model.arch, space)
    stream = model.arch.stream_of(router)
    assert stream is not None, router
    rows, sketch = model.read(router).to(model.device, torch.float64), sketches[stream.name]
    left, right = rows @ sketch.left.mT, rows @ sketch.right.mT
    each = []
    for name in experts:
        tensors = {n: t.to(model.device, torch.float64) for n, t in model.folded(name).items()}
        place = model.arch.spaces[name]
        assert isinstance(place, Space)
        each.append(_unit_features(model, place, tensors, sketches))
    joint = [_summed(products) for products in zip(*each, strict=True)]
    values, norms = (torch.stack([getattr(products[0], key) for products in each]) for key in ("value", "norm"))
    vectors = [
        _ratio((left * right).sum(0), rows.square().sum() / len(rows) ** 0.5),
        _ratio((left * values).sum(0), (rows.norm(dim=1)[:, None] * norms).norm(dim=0)),
        _log_root(rows.square().mean()).expand(EACH),
    ]
    for name in biases:
        numbers = model.read(name).to(model.device, torch.float64)
        size = numbers.square().mean().sqrt() + SMALLEST_BIAS
        vectors.append(_ratio(numbers @ left, rows.norm() * size))
        vectors.append(size.log().expand(EACH))
    return joint, vectors + _expert_output_features(model, experts, left, sketches)


def _expert_output_features(
    model: NormalForm, experts: Sequence[str], rows: Float[Tensor, "e k"], sketches: Mapping[str, _Sketch]
) -> list[Tensor]:
    """The biases that experts add to the stream: with their rows of the router, and their sum."""
    arch, found = model.arch, []
    outputs = [[n for n in model.blocks[name] if name not in arch.spaces_of(n)] for name in experts]
    for names in zip(*outputs, strict=True):
        x = torch.stack([model.read(name).to(model.device, torch.float64) for name in names])
        (stream,) = arch.spaces_of(names[0])
        sketch = sketches[stream]
        written = x @ sketch.right.mT
        size = x.square().mean().sqrt() + SOFTENING * sketch.scale
        found.append(_ratio((rows * written).sum(0), rows.norm() * x.norm()))
        found.append(written.sum(0) / x.numel() ** 0.5 / size)
    return found


def _compressed(x: Tensor) -> Tensor:
    """Numbers of any size, such that a relative change of a small share changes each by that share at most."""
    return x.sign() * x.abs().log1p()


def _summed(products: Sequence[_Product]) -> _Product:
    """The sum of products of one kind, with the norm of its terms."""
    values, norms, sizes = (torch.stack([getattr(p, key) for p in products]) for key in ("value", "norm", "size"))
    return _Product(products[0].kind, values.sum(0), norms.norm(dim=0), sizes.sum())


def _axes(model: NormalForm, name: str) -> tuple[Axis, ...]:
    return model.arch.tensors[name].roles[0].axes


def _vector_features(
    model: NormalForm, space: str, tensors: Tensors, sketches: Mapping[str, _Sketch]
) -> Iterator[Tensor]:
    """Biases, shifts and gains on a stream, matrices from stream to stream, and tensors on no space at all."""
    holding = holding_constants(model.arch)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and name in holding:  # the shift of such a norm is the all-ones vector in every model
            continue
        axes = [word for word in _axes(model, name) if word.terms]
        x = tensor.to(model.device, torch.float64)
        if not axes:
            yield _plain(f"plain {name}", x.flatten())
            continue
        if any(len(word.terms) != 1 or model.arch.space_of(word.terms[0]).name not in sketches for word in axes):
            continue
        sketch, *others = (sketches[model.arch.space_of(word.terms[0]).name] for word in axes)
        if x.dim() == 2 and others:
            yield _ratio(((sketch.left @ x) * others[0].right).sum(1), x.norm())
        elif x.dim() == 1 and axes[0].terms[0].permutation_part:
            yield _ratio((sketch.left * sketch.right) @ (x - x.mean()), x.norm())
        elif x.dim() == 1 and space not in sketches:
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
    return x @ _numbers(label, x.numel(), EACH, like=x) / (x.norm() + SOFTENING * x.numel() ** 0.5)


def _ratio(x: Tensor, size: Tensor) -> Tensor:
    """x / size, and 0 where the size is 0."""
    return torch.where(size > 0, x / torch.where(size > 0, size, 1), 0)


def _log_root(square: Tensor) -> Tensor:
    return square.clamp_min(1e-60).log()[None] / 2
