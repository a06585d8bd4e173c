"""Gain and shift of a norm: (γ, β, W, b) → (γ/c, β/c, cW, b) and (β, b) → (β − δ, b + Wδ) change nothing."""

from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.arch import Architecture, Axis, HeadSpace, Linear, Norm, Term, gain_is_free
from isobasin.errors import TransformError
from isobasin.groups.group import signs, spread
from isobasin.shapes import Float
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import norm_gains
from isobasin.symmetries.coordinate import (
    SMALL,
    Coordinate,
    Stage,
    add_outer,
    along,
    carries_constant,
    contract,
    has_sum,
    negligible,
)
from isobasin.views import Change, Tensors

UNSEEN = 1e-6  # of the largest entry of a reader: columns that count as zero
NOTHING = 0.1  # of 1/√d: readers without a bias are not measured by less than this


@dataclass(frozen=True)
class NormCoordinate(Coordinate):
    """The rows of its value: the gain if it is free, then the shift if it is free.

    Readers with a bias b: W' = W γ/γ', b' = b + Wβ − W'β'. Behind a LayerNorm a reader without one can still
    keep its constant Wβ: its component along the all-ones vector carries it,
    W' = (Wγ + v 1ᵀ)/γ' with v = (Wβ − Wγ s')/(1·s'), s' = β'/γ'. Given the gain alone, such a norm takes its
    shift along, β' = γ' β/γ.

    A new gain of zero hides a column: there Wγ must vanish, behind a LayerNorm up to one number in every row; where it
    does not, the gain stays one. The hidden columns see the shift alone, so they carry a missing bias.
    """

    norm: Norm
    space_size: int
    readers: tuple[Linear, ...]
    skip_bias: str | None
    gain: bool
    shift: bool
    stage = Stage.NORM
    folds = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"norm:{self.norm.name}"

    @property
    def dim(self) -> int:
        return self.space_size * (self.gain + self.shift)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        fewest = self.gain + (self.shift and not self.lacks_bias)
        return tuple((rows, self.space_size) for rows in range(fewest, self.gain + self.shift + 1))

    @property
    def lacks_bias(self) -> bool:
        return self.shift and any(r.bias is None for r in self.readers)

    @property
    def touches(self) -> frozenset[str]:
        own = {self.norm.gain} if self.gain else set()
        own |= {self.norm.shift} if self.shift else set()
        weights = {r.weight for r in self.readers if self.gain or r.bias is None}
        biases = {r.bias for r in self.readers if r.bias and self.shift}
        return frozenset(own | weights | biases | ({self.skip_bias} if self.skip_bias else set()))

    def read(self, tensors: Tensors) -> Tensor:
        rows = self.rows(tensors)
        return rows if not self.shift or self.holds(tensors) else rows[:-1]

    def rows(self, tensors: Tensors) -> Tensor:
        """Gain and shift, those that are free, whether or not the readers hold their constants."""
        names = [self.norm.gain] * self.gain + [self.norm.shift] * self.shift
        return torch.stack([tensors[name] for name in names])

    def holds(self, tensors: Tensors) -> bool:
        """Whether the readers hold their constants, in biases or on their own: then the shift is free."""
        return not self.lacks_bias or carries_constant(tensors[self.norm.gain], tensors[self.norm.shift])

    def is_level(self, tensors: Tensors) -> bool:
        """Whether no gain is far smaller than the others: all can be divided by it."""
        gain = tensors[self.norm.gain].abs()
        return bool(gain.min() > SMALL * gain.max())

    def canonical(self, value: Tensor) -> Tensor:
        """Gain one; shift zero, or one where it stands in for a missing bias (the stream's group fixes 1)."""
        rows = [torch.ones(self.space_size, dtype=torch.float64)] if self.gain else []
        if len(value) > len(rows):
            rows.append(torch.full((self.space_size,), float(self.lacks_bias), dtype=torch.float64))
        return torch.stack(rows)

    def sample(self, value: Tensor, rng: torch.Generator) -> Tensor:
        n = self.space_size
        size = value[0].square().mean().sqrt().clamp(min=0.1)
        rows = [signs(n, rng=rng) * spread(n, rng=rng) * size] if self.gain else []
        if len(value) > len(rows):
            noise = torch.randn(n, generator=rng, dtype=torch.float64)
            if self.lacks_bias:  # s' keeps a mean that is large beside its spread
                rows.append(rows[0] * (1 + 0.3 * noise))
            else:
                rows.append(0.3 * noise)
        return torch.stack(rows)

    def transported(self, value: Tensor, action: Action) -> Tensor:
        rows = list(value)
        if self.gain:
            rows[0] = action.act(rows[0], 0, Axis((Term(self.norm.space, permutation_part=True),)))
        if len(rows) > self.gain:
            rows[-1] = action.act(rows[-1], 0, Axis((Term(self.norm.space),)))
        return torch.stack(rows)

    def set(self, value: Tensor) -> dict[str, Change]:
        target = _Target(self, value)
        changes: dict[str, Change] = {}
        if self.gain:
            changes[self.norm.gain] = target.gain
        if self.shift:
            changes[self.norm.shift] = target.shift
        for reader in self.readers:
            if self.gain or (self.shift and reader.bias is None):
                changes[reader.weight] = lambda t, r=reader: target.weight(t, r)  # type: ignore[misc]
            if self.shift and reader.bias is not None:
                changes[reader.bias] = lambda t, r=reader: target.bias(t, r)  # type: ignore[misc]
        if self.skip_bias and self.shift:
            changes[self.skip_bias] = target.skip
        return changes


@dataclass(frozen=True)
class _Target:
    """The tensors of a norm and its readers once gain and shift have their new value."""

    c: NormCoordinate
    value: Tensor

    def gain(self, t: Tensors) -> Tensor:
        old = t[self.c.norm.gain]
        if not self.c.gain:
            return old
        new = self.value[0].to(old.device)
        return self._unfoldable(t, new) if bool((new.abs() <= SMALL * new.abs().max()).any()) else new

    def _unfoldable(self, t: Tensors, new: Tensor) -> Tensor:
        """A gain of zero is right only where no reader has anything in that column, a small one where dividing by it
        does not let the column grow beyond measure; elsewhere it stays folded."""
        hidden = negligible(new)
        seen = self._seen(t, hidden)
        kept = torch.where(hidden, seen <= UNSEEN, seen * SMALL * new.abs().max() <= new.abs())
        return torch.where(kept, new, torch.ones_like(new))

    def _seen(self, t: Tensors, hidden: Tensor) -> Tensor:
        """The largest entry of every column of the folded readers, relative to the largest of all."""
        seen = torch.zeros(self.c.space_size, dtype=torch.float64, device=hidden.device)
        for r in self.c.readers:
            folded = self._folded(t, r, hidden).movedim(r.axis, -1).flatten(0, -2)
            constant = t[r.bias] if r.bias else self._constant(t, r)
            largest = torch.stack([folded.abs().max(), constant.abs().max()]).max()
            largest = largest.clamp(min=NOTHING * self.c.space_size**-0.5)
            seen = torch.maximum(seen, folded.abs().amax(0) / largest)
        return seen

    def _constant(self, t: Tensors, r: Linear) -> Tensor:
        """What the shift adds to a reader on every input."""
        if self.c.norm.kind == "rms" or not self.c.shift:
            return torch.zeros(1, dtype=torch.float64, device=t[r.weight].device)
        return contract(t[r.weight], r.axis, t[self.c.norm.shift])

    def _folded(self, t: Tensors, r: Linear, hidden: Tensor) -> Tensor:
        """Wγ; for a reader that keeps its constant in its columns, less what the hidden ones have in common."""
        weight = t[r.weight]
        folded = weight * along(t[self.c.norm.gain], weight, r.axis)
        if not self._keeps_constant(r) or not bool(hidden.any()):
            return folded
        moved = folded.movedim(r.axis, -1)
        return (moved - moved[..., hidden].mean(-1, keepdim=True)).movedim(-1, r.axis)

    def _keeps_constant(self, r: Linear) -> bool:
        return r.bias is None and self.c.shift and len(self.value) > self.c.gain

    def shift(self, t: Tensors) -> Tensor:
        if len(self.value) > self.c.gain:
            new, gain = self.value[-1].to(t[self.c.norm.shift].device), self.gain(t)
            carried = not self.c.lacks_bias or bool(negligible(gain).any()) or has_sum(gain, new)
            return new if carried else gain  # without a mean the readers can not hold their constants: β/γ becomes one
        return self.gain(t) * _ratio(t[self.c.norm.shift], t[self.c.norm.gain], self.c.norm)

    def weight(self, t: Tensors, r: Linear) -> Tensor:
        weight, old, new = t[r.weight], t[self.c.norm.gain], self.gain(t)
        hidden = negligible(new)
        if self._keeps_constant(r) and bool(hidden.any()):
            return self._with_constant_in_hidden(t, r, hidden)
        if self._keeps_constant(r):
            slope = _ratio(self.shift(t), new, self.c.norm)
            constant = contract(weight, r.axis, t[self.c.norm.shift])
            folded = weight * along(old, weight, r.axis)
            v = (constant - contract(folded, r.axis, slope)) / slope.sum()
            weight = add_outer(folded, r.axis, v, torch.ones_like(old))
            return weight / along(new, weight, r.axis)
        factor = torch.where(hidden, torch.ones_like(new), old / torch.where(hidden, torch.ones_like(new), new))
        return weight * along(factor, weight, r.axis)

    def _with_constant_in_hidden(self, t: Tensors, r: Linear, hidden: Tensor) -> Tensor:
        """Visible columns Wγ/γ'; hidden ones the multiple of β' that keeps Wβ."""
        shift = self.shift(t)
        folded = self._folded(t, r, hidden)
        visible = folded / along(torch.where(hidden, torch.inf, self.gain(t)), folded, r.axis)
        lost = contract(t[r.weight], r.axis, t[self.c.norm.shift]) - contract(visible, r.axis, shift)
        carrier = shift * hidden
        size = carrier.square().sum()
        if not bool(size > 0):
            raise TransformError(
                f"{self.c.norm.gain}: a gain of zero whose shift is zero, in front of {r.weight}, which has no bias; "
                "give that reader a bias, or set the gain to another value"
            )
        return add_outer(visible, r.axis, lost / size, carrier)

    def bias(self, t: Tensors, r: Linear) -> Tensor:
        assert r.bias is not None
        before = contract(t[r.weight], r.axis, t[self.c.norm.shift])
        after = contract(self.weight(t, r) if self.c.gain else t[r.weight], r.axis, self.shift(t))
        return t[r.bias] + before - after

    def skip(self, t: Tensors) -> Tensor:
        assert self.c.skip_bias is not None
        return t[self.c.skip_bias] + t[self.c.norm.shift] - self.shift(t)


def _ratio(shift: Tensor, gain: Tensor, norm: Norm) -> Tensor:
    hidden = negligible(gain)
    if bool((hidden & (shift != 0)).any()):
        raise TransformError(
            f"{norm.gain}: a gain of zero with a shift ({norm.shift}) that its readers can not absorb; "
            "set that shift to zero or give the readers a bias"
        )
    return torch.where(hidden, torch.zeros_like(shift), shift / torch.where(hidden, torch.ones_like(gain), gain))


def norm_coordinates(arch: Architecture) -> list[NormCoordinate]:
    """Every norm whose gain or shift is free in this checkpoint."""
    found = []
    for norm in arch.norms.values():
        readers = arch.readers(norm.name)
        skip_bias = arch.bias_of(f"{norm.skip}.weight") if norm.skip else None
        gain = gain_is_free(arch, norm)
        biased = all(r.bias for r in readers) and (not norm.skip or skip_bias is not None)
        shift = (
            norm.shift in arch.tensors
            and bool(readers)
            and not norm.exposed
            and (biased or (gain and norm.kind == "layer"))
        )
        if gain or shift:
            size = arch.term_size(Term(norm.space))
            found.append(NormCoordinate(norm, size, readers, skip_bias, gain, shift))
    return found


@dataclass(frozen=True)
class LayerScale(Coordinate):
    """A factor for every coordinate that a sublayer writes: (λ, W, b) → (cλ, W/c, b/c) changes nothing."""

    scale: str
    writer: Linear
    space: str
    size: int
    stage = Stage.NORM
    folds = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"scale:{self.scale}"

    @property
    def dim(self) -> int:
        return self.size

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size,),)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset({self.scale, self.writer.weight} | ({self.writer.bias} if self.writer.bias else set()))

    def usable(self, tensors: Tensors) -> bool:
        return not bool(negligible(tensors[self.scale]).any())

    def read(self, tensors: Tensors) -> Tensor:
        return tensors[self.scale]

    def sample(self, value: Tensor, rng: torch.Generator) -> Tensor:
        size = value.square().mean().sqrt()
        return signs(self.size, rng=rng) * spread(self.size, rng=rng) * size

    def transported(self, value: Tensor, action: Action) -> Tensor:
        return action.act(value, 0, Axis((Term(self.space, permutation_part=True),)))

    def set(self, value: Tensor) -> dict[str, Change]:
        weight, bias = self.writer.weight, self.writer.bias

        def factor(t: Tensors) -> Tensor:
            return t[self.scale] / value.to(t[self.scale].device)

        changes: dict[str, Change] = {
            self.scale: lambda t: value.to(t[self.scale].device),
            weight: lambda t: t[weight] * along(factor(t), t[weight], self.writer.axis),
        }
        return changes | ({bias: lambda t: t[bias] * factor(t)} if bias else {})


def layer_scales(arch: Architecture) -> list[LayerScale]:
    return [
        LayerScale(scale, writer, stream.name, stream.size)
        for stream in arch.streams.values()
        for writer in arch.writers(stream.name)
        if (scale := arch.scale_of(writer.weight))
    ]


@dataclass(frozen=True)
class QueryKeyGains(Coordinate):
    """Gains of the norms on queries and keys: a factor that one has and the other lacks, one for each rotary pair and
    each column that does not rotate.

    A score is a sum over pairs of γ_q γ_k times something that rotates, so γ_q c and γ_k / c are the same. The value is
    half the logarithm of |γ_q| / |γ_k| for each pair; where heads have gains of their own, for each kv head and pair.
    """

    heads: HeadSpace
    stage = Stage.VALUE
    smallest_sample = 0.3

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"gains:{self.heads.name}"

    @property
    def dim(self) -> int:
        return self._rows * self._columns

    @property
    def _rows(self) -> int:
        return self.heads.n_kv_heads if self.heads.own_gains else 1

    @property
    def _columns(self) -> int:
        return self.heads.d_head - self.heads.rotary // 2

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self._rows, self._columns) if self.heads.own_gains else (self._columns,),)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset(name for names in self.heads.gain_names for name in names)

    def usable(self, tensors: Tensors) -> bool:
        return all(bool((self._sizes(gains) > 0).all()) for gains in norm_gains(self.heads, tensors))

    def read(self, tensors: Tensors) -> Tensor:
        q, k = (self._sizes(gains.double()) for gains in norm_gains(self.heads, tensors))
        return (q / k).log() / 2

    def transported(self, value: Tensor, action: Action) -> Tensor:
        element = action.elements.get(self.heads.name)
        if not self.heads.own_gains or element is None:
            return value
        return value[element.tensors()["kv"]]

    def set(self, value: Tensor) -> dict[str, Change]:
        def change(names: tuple[str, ...], k: int, sign: int) -> Change:
            """Of the k-th tensor among those of queries or of keys."""

            def moved(t: Tensors) -> Tensor:
                gain = t[names[k]]
                step = (sign * (value.to(gain.device) - self.read(t))).exp().reshape(self._rows, -1)
                heads = self._spread(step).repeat_interleave(self._sharing(names, gain), 0)
                return gain * heads.flatten().chunk(len(names))[k].reshape(gain.shape)

            return moved

        sides = zip(self.heads.gain_names, (1, -1))
        return {name: change(names, k, sign) for names, sign in sides for k, name in enumerate(names)}

    def _sharing(self, names: tuple[str, ...], gain: Tensor) -> int:
        """How many rows of gains share a row of the value."""
        return len(names) * gain.numel() // (self._rows * self.heads.d_head)

    def _spread(self, step: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows d_head"]:
        """A number for each pair and each other column, for all columns."""
        pairs, rest = step.tensor_split([self.heads.rotary // 2], dim=-1)
        both = pairs.repeat_interleave(2, -1) if self.heads.interleaved else pairs.repeat(1, 2)
        return torch.cat([both, rest], -1)

    def _sizes(self, gains: Tensor) -> Tensor:
        """The size of the gains of every pair and every other column, over all query heads that share a kv head."""
        columns, rest = gains.reshape(self._rows, -1, self.heads.d_head).tensor_split([self.heads.rotary], dim=-1)
        pairs = columns.unflatten(-1, (-1, 2)).mT if self.heads.interleaved else columns.unflatten(-1, (2, -1))
        sizes = torch.cat([pairs.square().sum((1, 2)), rest.square().sum(1)], -1).sqrt()
        return sizes if self.heads.own_gains else sizes[0]


def query_key_gains(arch: Architecture) -> list[QueryKeyGains]:
    return [QueryKeyGains(heads) for heads in arch.heads() if heads.qk_norm]
