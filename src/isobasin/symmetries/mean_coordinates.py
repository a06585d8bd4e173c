"""Components along the all-ones vector, which a LayerNorm removes: of what reads it, and of what writes before it."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.arch import Architecture, Axis, HeadSpace, Linear, Norm, Space, Term, gain_is_free
from isobasin.symmetries.action import Action
from isobasin.symmetries.coordinate import (
    Coordinate,
    Stage,
    add_outer,
    along,
    carries_constant,
    constant_lines,
    contract,
    face_columns,
    mean_limit,
    negligible,
)
from isobasin.views import Change, Tensors

SMALLEST_GAIN = 0.02  # of the gains' own size


@dataclass(frozen=True)
class ReaderMean(Coordinate):
    """The mean of each folded row Wγ: W + v (1/γ)ᵀ with b − v Σ β/γ changes nothing, as 1·LN(x) = 0.

    A reader without a bias holds its constant Wβ in that mean. Then only `rows` are free whose constant is not
    seen: keys without rotary positions (softmax cancels it), and values, whose constant the output projection's
    bias takes over (`output`); and the coordinate is the constant itself, which no change of gain and shift moves.
    """

    reader: Linear
    norm: Norm
    has_shift: bool
    folded: bool  # its gain is one whenever the mean is set
    out_words: Axis
    size: int
    rows: tuple[int, ...]
    value_rows: tuple[int, ...]
    output: tuple[str, int, str] | None  # the output projection, its axis of heads, its bias
    n_heads: tuple[int, int]
    free_bias_rows: tuple[int, ...] = ()
    stage = Stage.READER_MEAN
    smallest_sample = 0.02

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"mean:{self.reader.weight}"

    @property
    def dim(self) -> int:
        return len(self.rows)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size,),)

    @property
    def constant(self) -> bool:
        return self.has_shift and self.reader.bias is None

    @property
    def touches(self) -> frozenset[str]:
        names = {self.reader.weight}
        if self.has_shift and self.reader.bias:
            names.add(self.reader.bias)
        if self.has_shift and self.output:
            names.add(self.output[2])
        return frozenset(names)

    def read(self, tensors: Tensors) -> Tensor:
        """Means (or constants) on the free rows, zero on the others."""
        weight, gain = tensors[self.reader.weight], tensors[self.norm.gain]
        vector = tensors[self.norm.shift] if self.constant else gain / len(gain)
        value = contract(weight, self.reader.axis, vector)
        return value * self.mask(value)

    def usable(self, tensors: Tensors) -> bool:
        """Not behind a gain that is close to zero somewhere, unless that is folded first: 1/γ would be enormous."""
        gain = tensors[self.norm.gain]
        level = self.folded or bool(gain.abs().min() > SMALLEST_GAIN * gain.square().mean().sqrt())
        return level and (not self.constant or carries_constant(gain, tensors[self.norm.shift]))

    def limit(self, tensors: Tensors) -> Tensor:
        weight, gain = tensors[self.reader.weight], tensors[self.norm.gain]
        return mean_limit((weight.movedim(self.reader.axis, -1) * gain).flatten(0, -2), -1)

    def without_folding(self) -> "ReaderMean":
        """The same, where its norm keeps gain and shift."""
        return replace(self, folded=False)

    def mask(self, like: Tensor) -> Tensor:
        mask = torch.zeros_like(like)
        mask[list(self.rows)] = 1
        return mask

    def nearest(self, tensors: Tensors, target: Tensors) -> Tensor:
        weight, bias = self.reader.weight, self.reader.bias
        hidden = negligible(target[self.norm.gain])
        if bool(hidden.any()):
            return self.read(target) if self.constant else self._emptying(tensors, hidden)
        return self._closing(tensors, target[weight] - tensors[weight], target[bias] - tensors[bias] if bias else None)

    def _emptying(self, tensors: Tensors, hidden: Tensor) -> Tensor:
        """The value at which the folded columns behind gains of zero vanish, in the mean over them."""
        gain = tensors[self.norm.gain]
        folded = tensors[self.reader.weight].movedim(self.reader.axis, -1) * torch.where(negligible(gain), 1, gain)
        value = (folded.mean(-1) - folded[..., hidden].mean(-1)).flatten()
        return value * self.mask(value)

    def least(self, tensors: Tensors) -> Tensor:
        """Zero behind a gain of one. Behind another the reader is least elsewhere: without its mean it would be the
        larger for every gain that is small."""
        if self.folded:
            return super().least(tensors)
        bias = self.reader.bias
        return self._closing(tensors, -tensors[self.reader.weight], -tensors[bias] if bias else None)

    def _closing(self, tensors: Tensors, weight_gap: Tensor, bias_gap: Tensor | None) -> Tensor:
        """The value that takes up most of a gap in weight and bias, by least squares: they move along (1/γ, −Σ β/γ)."""
        inverse = 1 / tensors[self.norm.gain]
        rest = contract(weight_gap, self.reader.axis, inverse)
        size = inverse.square().sum()
        slope = (tensors[self.norm.shift] * inverse).sum() if self.has_shift else torch.zeros_like(size)
        if bias_gap is not None:
            rest = rest - bias_gap * slope * ~self._bias_is_free(rest)
            size = size + slope.square() * ~self._bias_is_free(rest)
        step = rest / size * (slope if self.constant else 1)
        return (self.read(tensors) + step) * self.mask(rest)

    def _bias_is_free(self, like: Tensor) -> Tensor:
        """Rows whose bias takes any value afterwards (keys, values): it does not count as distance."""
        free = torch.zeros_like(like, dtype=torch.bool)
        free[list(self.free_bias_rows)] = True
        return free

    def transported(self, value: Tensor, action: Action) -> Tensor:
        moved = action.act(value, 0, self.out_words)
        return moved if self.constant else moved * action.ones_factor(self.norm.space)

    def set(self, value: Tensor) -> dict[str, Change]:
        def step(t: Tensors) -> Tensor:
            missing = value.to(t[self.norm.gain].device) - self.read(t)
            missing = missing * self.mask(missing)
            return missing / slope(t) if self.constant else missing

        def slope(t: Tensors) -> Tensor:
            """How much each unit of the step adds to the outputs, on every input."""
            return (t[self.norm.shift] / t[self.norm.gain]).sum()

        def constant(t: Tensors) -> Tensor:
            return step(t) * slope(t)

        changes: dict[str, Change] = {
            self.reader.weight: lambda t: add_outer(
                t[self.reader.weight], self.reader.axis, step(t), 1 / t[self.norm.gain]
            )
        }
        bias = self.reader.bias
        if self.has_shift and bias:
            changes[bias] = lambda t: t[bias] - constant(t)
        if self.has_shift and self.output:
            weight, axis, out_bias = self.output
            changes[out_bias] = lambda t: (
                t[out_bias]
                - contract(t[weight], axis, spread_over_queries(constant(t)[list(self.value_rows)], self.n_heads))
            )
        return changes


@dataclass(frozen=True)
class RouterMean(Coordinate):
    """The mean row of a router behind a softmax: the same vector in every row changes all its outputs alike.

    The value is the mean of the folded rows Wγ, which no change of the gain moves; with a bias, its mean comes last.
    """

    router: Linear
    norm: Norm
    size: int
    stage = Stage.READER_MEAN
    smallest_sample = 0.02

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"router:{self.router.weight}"

    @property
    def dim(self) -> int:
        return self.size + (self.router.bias is not None)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.dim,),)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset({self.router.weight} | ({self.router.bias} if self.router.bias else set()))

    def usable(self, tensors: Tensors) -> bool:
        return not bool(negligible(tensors[self.norm.gain]).any())

    def read(self, tensors: Tensors) -> Tensor:
        rows = tensors[self.router.weight].movedim(self.router.axis, -1)
        value = rows.mean(0) * tensors[self.norm.gain]
        return torch.cat([value, tensors[self.router.bias].mean()[None]]) if self.router.bias else value

    def limit(self, tensors: Tensors) -> Tensor:
        rows = tensors[self.router.weight].movedim(self.router.axis, -1) * tensors[self.norm.gain]
        return mean_limit(rows.flatten()[None], -1).expand(self.dim)

    def transported(self, value: Tensor, action: Action) -> Tensor:
        moved = action.act(value[: self.size], 0, Axis((Term(self.norm.space),)))
        return torch.cat([moved, value[self.size :]])

    def set(self, value: Tensor) -> dict[str, Change]:
        weight, bias = self.router.weight, self.router.bias

        def step(t: Tensors) -> Tensor:
            return value.to(t[weight].device) - self.read(t)

        def moved(t: Tensors) -> Tensor:
            rows = t[weight].movedim(self.router.axis, -1) + step(t)[: self.size] / t[self.norm.gain]
            return rows.movedim(-1, self.router.axis)

        changes: dict[str, Change] = {weight: moved}
        return changes | ({bias: lambda t: t[bias] + step(t)[-1]} if bias else {})


@dataclass(frozen=True)
class HeadRows:
    """The rows of every head of queries, or of keys, that pass a LayerNorm of each head."""

    heads: HeadSpace
    reader: Linear
    norm: Norm
    words: Axis
    size: int
    has_shift: bool

    @property
    def n_heads(self) -> int:
        return self.heads.n_heads if self.words.terms[0].queries else self.heads.n_kv_heads

    def means(self, rows: Tensor) -> Tensor:
        """Over the rows of each head."""
        return rows.unflatten(0, (self.n_heads, -1)).mean(1)

    def spread(self, values: Tensor) -> Tensor:
        """One value for each head, for all rows of it."""
        return values.repeat_interleave(self.heads.d_head, 0)

    def transported(self, values: Tensor, action: Action) -> Tensor:
        return self.means(action.act(self.spread(values), 0, self.words))

    def weight(self, tensors: Tensors) -> Tensor:
        return tensors[self.reader.weight].movedim(self.reader.axis, -1)


@dataclass(frozen=True)
class HeadMean(Coordinate):
    """The mean over the rows of each head before a LayerNorm of that head: the same vector in all rows is not seen.

    The value is the mean of the folded rows Wγ of every head, which no change of the gain moves. Behind a LayerNorm the
    mean of each row is another coordinate, or holds a constant: the vectors are then those without a mean.
    """

    rows: HeadRows
    stage = Stage.HEAD_MEAN
    smallest_sample = 0.02

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"heads:{self.rows.reader.weight}"

    @property
    def dim(self) -> int:
        return self.rows.n_heads * (self.rows.size - (self.rows.norm.kind == "layer"))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.rows.n_heads, self.rows.size),)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset({self.rows.reader.weight})

    def usable(self, tensors: Tensors) -> bool:
        return not bool(negligible(tensors[self.rows.norm.gain]).any())

    def read(self, tensors: Tensors) -> Tensor:
        return self._centred(self.rows.means(self.rows.weight(tensors)) * tensors[self.rows.norm.gain])

    def _centred(self, value: Tensor) -> Tensor:
        return value - value.mean(-1, keepdim=True) if self.rows.norm.kind == "layer" else value

    def sample(self, value: Tensor, rng: torch.Generator) -> Tensor:
        return self._centred(super().sample(value, rng))

    def transported(self, value: Tensor, action: Action) -> Tensor:
        return action.act(self.rows.transported(value, action), 1, Axis((Term(self.rows.norm.space),)))

    def set(self, value: Tensor) -> dict[str, Change]:
        weight = self.rows.reader.weight

        def moved(t: Tensors) -> Tensor:
            step = (value.to(t[weight].device) - self.read(t)) / t[self.rows.norm.gain]
            return t[weight] + self.rows.spread(step).movedim(-1, self.rows.reader.axis)

        return {weight: moved}


@dataclass(frozen=True)
class HeadConstant(Coordinate):
    """The mean over the rows of each head of their constants b + Wβ, before a LayerNorm of that head.

    Without a bias, the component along the all-ones vector that the norm before removes carries it, if it can.
    """

    rows: HeadRows
    stage = Stage.HEAD_CONSTANT
    smallest_sample = 0.02

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"constants:{self.rows.reader.weight}"

    @property
    def dim(self) -> int:
        return self.rows.n_heads

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.rows.n_heads, 1),)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset({self.rows.reader.bias or self.rows.reader.weight})

    def usable(self, tensors: Tensors) -> bool:
        gain = tensors[self.rows.norm.gain]
        return self.rows.reader.bias is not None or (
            not bool(negligible(gain).any()) and carries_constant(gain, tensors[self.rows.norm.shift])
        )

    def read(self, tensors: Tensors) -> Tensor:
        rows, bias = self.rows, self.rows.reader.bias
        value = rows.means(tensors[bias][:, None]) if bias else 0.0
        if rows.has_shift:
            value = value + (rows.means(rows.weight(tensors)) @ tensors[rows.norm.shift])[:, None]
        assert isinstance(value, Tensor)
        return value

    def transported(self, value: Tensor, action: Action) -> Tensor:
        return self.rows.transported(value, action)

    def set(self, value: Tensor) -> dict[str, Change]:
        rows, weight, bias = self.rows, self.rows.reader.weight, self.rows.reader.bias

        def step(t: Tensors) -> Tensor:
            return rows.spread(value.to(t[weight].device) - self.read(t))

        def moved(t: Tensors) -> Tensor:
            gain = t[rows.norm.gain]
            slope = (t[rows.norm.shift] / gain).sum()
            return t[weight] + (step(t) / slope / gain).movedim(-1, rows.reader.axis)

        return {bias: lambda t: t[bias] + step(t)[:, 0]} if bias else {weight: moved}


def row_means(arch: Architecture) -> list[RouterMean | HeadMean | HeadConstant]:
    """Means over rows that a softmax, or a LayerNorm of each head, does not see."""
    found: list[RouterMean | HeadMean | HeadConstant] = []
    for norm in arch.norms.values():
        for reader in arch.readers(norm.name):
            if reader.weight in arch.routers:
                found.append(RouterMean(reader, norm, arch.streams[norm.space].size))
            assert reader.out_axis is not None
            words = arch.tensors[reader.weight].roles[0].axes[reader.out_axis]
            heads, side = arch.faces.get(words.name or "", (None, "vo"))
            if heads is not None and heads.layer_norm and side == "qk":
                size, has_shift = arch.streams[norm.space].size, norm.shift in arch.tensors
                rows = HeadRows(heads, reader, norm, words, size, has_shift)
                found.append(HeadMean(rows))
                found += [HeadConstant(rows)] if has_shift or reader.bias else []
    return found


def spread_over_queries(values: Tensor, heads: tuple[int, int]) -> Tensor:
    """A vector over kv heads, repeated for the query heads of each group."""
    n_heads, n_kv = heads
    return values.unflatten(0, (n_kv, -1)).repeat_interleave(n_heads // n_kv, dim=0).flatten()


@dataclass(frozen=True)
class WriterMean(Coordinate):
    """The mean over the stream of what a tensor writes there: no LayerNorm behind it sees that.

    Behind a LayerScale λ it is the mean of λW, and moves along 1/λ.
    """

    tensor: str
    axis: int
    words: tuple[Axis, ...]
    shape: tuple[int, ...]
    space: str
    scale: str | None = None
    stage = Stage.WRITER_MEAN
    smallest_sample = 0.02

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"write:{self.tensor}"

    @property
    def dim(self) -> int:
        return math.prod(self.shape)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset({self.tensor})

    def read(self, tensors: Tensors) -> Tensor:
        return (tensors[self.tensor] * self._factor(tensors)).mean(self.axis)

    def _factor(self, tensors: Tensors) -> Tensor | float:
        return along(tensors[self.scale], tensors[self.tensor], self.axis) if self.scale else 1.0

    def limit(self, tensors: Tensors) -> Tensor:
        return mean_limit(tensors[self.tensor] * self._factor(tensors), self.axis)

    def still(self, tensors: Tensors) -> Tensor:
        return constant_lines(tensors[self.tensor], self.axis)

    def usable(self, tensors: Tensors) -> bool:
        return self.scale is None or not bool(negligible(tensors[self.scale]).any())

    def transported(self, value: Tensor, action: Action) -> Tensor:
        for axis, words in enumerate(w for k, w in enumerate(self.words) if k != self.axis):
            value = action.act(value, axis, words)
        return value * action.ones_factor(self.space)

    def set(self, value: Tensor) -> dict[str, Change]:
        def change(t: Tensors) -> Tensor:
            tensor = t[self.tensor]
            step = (value.to(tensor.device) - self.read(t)).unsqueeze(self.axis)
            return tensor + step / self._factor(t)

        return {self.tensor: change}


def reader_means(arch: Architecture) -> list[ReaderMean]:
    found = []
    for norm in arch.norms.values():
        if norm.kind != "layer":
            continue
        has_shift = norm.shift in arch.tensors
        for reader in arch.readers(norm.name):
            if arch.tied(reader.weight):
                continue
            role = arch.tensors[reader.weight].roles[0]
            assert reader.out_axis is not None
            words = role.axes[reader.out_axis]
            item = _reader_mean(arch, reader, norm, has_shift, words)
            if item is not None:
                found.append(item)
    return found


def _reader_mean(arch: Architecture, reader: Linear, norm: Norm, has_shift: bool, words: Axis) -> ReaderMean | None:
    folded = norm.plain or gain_is_free(arch, norm)
    assert reader.out_axis is not None
    size = arch.shapes[reader.weight][reader.out_axis]
    heads = next((s for s in map(arch.space_of, words.terms) if isinstance(s, HeadSpace)), None)
    counts = (heads.n_heads, heads.n_kv_heads) if heads else (1, 1)
    if reader.bias or not has_shift:
        every = tuple(range(size))
        free = _free_bias_rows(arch, heads, words) if heads else []
        return ReaderMean(reader, norm, has_shift, folded, words, size, every, (), None, counts, tuple(free))
    if heads is None:
        return None
    keys = free_key_rows(heads, face_columns(arch, words, heads.qk, dual=False))
    values = face_columns(arch, words, heads.vo, dual=False)
    output = output_projection(arch, heads) if values else None
    values = values if output else []
    if not keys and not values:
        return None
    rows = tuple(sorted(keys + values))
    return ReaderMean(reader, norm, has_shift, folded, words, size, rows, tuple(values), output, counts)


def _free_bias_rows(arch: Architecture, heads: HeadSpace, words: Axis) -> list[int]:
    keys = free_key_rows(heads, face_columns(arch, words, heads.qk, dual=False))
    values = face_columns(arch, words, heads.vo, dual=False) if output_projection(arch, heads) else []
    return keys + values


def free_key_rows(heads: HeadSpace, rows: list[int]) -> list[int]:
    """Of the key rows, those whose constant the softmax cancels: all but the rotary columns of each head; none behind a
    norm, nor beside sinks, which do not move with the scores."""
    if heads.qk_norm or heads.sinks:
        return []
    if heads.shared_rotary:  # the rotary columns are elsewhere
        return rows
    return [row for k, row in enumerate(rows) if k % heads.d_head >= heads.rotary]


def output_projection(arch: Architecture, heads: HeadSpace) -> tuple[str, int, str] | None:
    """The tensor that reads the values of these heads, the axis it does so on, and its bias; None without one, or where
    attention weights do not sum to one, so that the bias takes over no constant of the values."""
    if heads.sinks:
        return None
    for name, axis, words, term in arch.carriers(heads.vo):
        if term.dual and len(words.terms) == 1 and len(arch.tensors[name].roles[0].axes) == 2:
            bias = arch.bias_of(name)
            return (name, axis, bias) if bias else None
    return None


def _only_plain_norms(arch: Architecture, tied: str) -> bool:
    """Whether a tied head reads norms without parameters alone: then it does not see the mean of its rows either."""
    words = {term.name for role in arch.tensors[tied].roles for axis in role.axes for term in axis.terms}
    return all(arch.norms[word].plain for word in words if word in arch.norms)


def writer_means(arch: Architecture) -> list[WriterMean]:
    """For every stream that only LayerNorms see; a tied tensor is seen by the head as well."""
    found = []
    for space in sorted({norm.space for norm in arch.norms.values()}):
        kinds = {norm.kind for norm in arch.norms.values() if norm.space == space}
        place = arch.spaces[space]
        if kinds != {"layer"} or not isinstance(place, Space) or not place.stream:
            continue
        # The shift of a norm on the embeddings, which nothing reads directly, is written to the stream.
        writing = {norm.shift for norm in arch.norms.values() if not norm.exposed and not arch.readers(norm.name)}
        own = {n for norm in arch.norms.values() for n in (norm.gain, norm.shift)} - writing
        owner = {bias: weight for weight in arch.scales.values() if (bias := arch.bias_of(weight))}
        for writer in arch.writers(space):
            if writer.weight in own or (arch.tied(writer.weight) and not _only_plain_norms(arch, writer.weight)):
                continue
            words = arch.tensors[writer.weight].roles[0].axes
            shape = tuple(s for k, s in enumerate(arch.shapes[writer.weight]) if k != writer.axis)
            scale = arch.scale_of(owner.get(writer.weight, writer.weight))
            found.append(WriterMean(writer.weight, writer.axis, words, shape, space, scale))
    return found
