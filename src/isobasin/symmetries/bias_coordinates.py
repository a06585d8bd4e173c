"""Biases that the function does not see, or sees only together with another one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from isobasin.arch import Architecture, Axis, HeadSpace, Sum, Term
from isobasin.symmetries.action import Action
from isobasin.symmetries.coordinate import Coordinate, Stage, constant_lines, contract, face_columns
from isobasin.symmetries.mean_coordinates import free_key_rows, output_projection, spread_over_queries
from isobasin.views import Change, Tensors


@dataclass(frozen=True)
class KeyBias(Coordinate):
    """Adds the same number to all scores of a query: the softmax cancels it, but for rotary columns."""

    heads: HeadSpace
    bias: str
    rows: tuple[int, ...]
    free: tuple[int, ...]
    stage = Stage.KEY

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"key:{self.heads.name}"

    @property
    def dim(self) -> int:
        return len(self.free)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((len(self.rows),),)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset({self.bias})

    def mask(self, like: Tensor) -> Tensor:
        mask = torch.zeros(len(self.rows), dtype=like.dtype, device=like.device)
        mask[[self.rows.index(row) for row in self.free]] = 1
        return mask

    def read(self, tensors: Tensors) -> Tensor:
        bias = tensors[self.bias]
        return bias[list(self.rows)] * self.mask(bias)

    def transported(self, value: Tensor, action: Action) -> Tensor:
        return action.act(value, 0, Axis((Term(self.heads.qk),)))

    def set(self, value: Tensor) -> dict[str, Change]:
        def change(t: Tensors) -> Tensor:
            bias = t[self.bias].clone()
            mask = self.mask(bias)
            bias[list(self.rows)] = bias[list(self.rows)] * (1 - mask) + value.to(bias.device) * mask
            return bias

        return {self.bias: change}


@dataclass(frozen=True)
class TableMean(Coordinate):
    """The mean over all distances of a table of relative positions: one number for all scores of a head.

    `groups` are the rows that one query reads together; the others' mean is another number.
    """

    table: str
    words: Axis
    n_heads: int
    groups: tuple[tuple[int, ...], ...]
    stage = Stage.KEY

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"table:{self.table}"

    @property
    def dim(self) -> int:
        return len(self.groups) * self.n_heads

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((len(self.groups), self.n_heads),)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset({self.table})

    def read(self, tensors: Tensors) -> Tensor:
        return torch.stack([tensors[self.table][list(rows)].mean(0) for rows in self.groups])

    def transported(self, value: Tensor, action: Action) -> Tensor:
        return action.act(value, 1, self.words)

    def set(self, value: Tensor) -> dict[str, Change]:
        def change(t: Tensors) -> Tensor:
            table = t[self.table].clone()
            for rows, step in zip(self.groups, value.to(table.device) - self.read(t)):
                table[list(rows)] += step
            return table

        return {self.table: change}


@dataclass(frozen=True)
class ChoiceMean(Coordinate):
    """The mean of a bias that counts for the choice of experts alone: one number for all of them changes no order."""

    bias: str
    stage = Stage.KEY
    dim = 1
    shapes = ((1,),)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"choice:{self.bias}"

    @property
    def touches(self) -> frozenset[str]:
        return frozenset({self.bias})

    def read(self, tensors: Tensors) -> Tensor:
        return tensors[self.bias].mean()[None]

    def transported(self, value: Tensor, action: Action) -> Tensor:
        return value

    def set(self, value: Tensor) -> dict[str, Change]:
        return {self.bias: lambda t: t[self.bias] + (value.to(t[self.bias].device) - self.read(t))}


@dataclass(frozen=True)
class ValueBias(Coordinate):
    """Attention weights sum to one, so b_V reaches the output as a constant: b_O + O (b_V − b_V') takes it over."""

    heads: HeadSpace
    bias: str
    rows: tuple[int, ...]
    output: tuple[str, int, str]
    stage = Stage.VALUE

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"value:{self.heads.name}"

    @property
    def dim(self) -> int:
        return len(self.rows)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((len(self.rows),),)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset({self.bias, self.output[2]})

    def read(self, tensors: Tensors) -> Tensor:
        return tensors[self.bias][list(self.rows)]

    def transported(self, value: Tensor, action: Action) -> Tensor:
        return action.act(value, 0, Axis((Term(self.heads.vo),)))

    def set(self, value: Tensor) -> dict[str, Change]:
        weight, axis, out_bias = self.output

        def bias(t: Tensors) -> Tensor:
            new = t[self.bias].clone()
            new[list(self.rows)] = value.to(new.device)
            return new

        def output(t: Tensors) -> Tensor:
            step = self.read(t) - value.to(t[self.bias].device)
            counts = (self.heads.n_heads, self.heads.n_kv_heads)
            return t[out_bias] + contract(t[weight], axis, spread_over_queries(step, counts))

        return {self.bias: bias, out_bias: output}


@dataclass(frozen=True)
class SumShare(Coordinate):
    """How a vector of the stream is shared between tensors of which only the sum is seen: the mean row of one."""

    sum: Sum
    space: str
    size: int
    mean_is_free: bool
    stage = Stage.SUM

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"sum:{self.sum.name}"

    @property
    def dim(self) -> int:
        return self.size - self.mean_is_free  # the all-ones component is counted with the writers' means

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size,),)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset(name for name, _, _ in self.sum.give + self.sum.take)

    def read(self, tensors: Tensors) -> Tensor:
        name, start, stop = self.sum.give[0]
        return _rows(tensors[name])[start:stop].mean(0)

    def transported(self, value: Tensor, action: Action) -> Tensor:
        return action.act(value, 0, Axis((Term(self.space),)))

    def still(self, tensors: Tensors) -> Tensor | None:
        """If all of them have a row that a LayerNorm takes for zero, some input may be nothing but such rows."""
        rows = [_rows(tensors[name])[start:stop] for name, start, stop in self.sum.give + self.sum.take]
        together = self.mean_is_free and all(bool(constant_lines(each, -1).any()) for each in rows)
        return torch.ones(self.size, dtype=torch.bool) if together else None

    def set(self, value: Tensor) -> dict[str, Change]:
        def change(part: tuple[str, int, int | None], sign: float) -> Change:
            name, start, stop = part

            def moved(t: Tensors) -> Tensor:
                new = t[name].clone()
                _rows(new)[start:stop] += sign * (value.to(new.device) - self.read(t))
                return new

            return moved

        give = {part[0]: change(part, 1.0) for part in self.sum.give}
        return give | {part[0]: change(part, -1.0) for part in self.sum.take}


@dataclass(frozen=True)
class TiedShare(Coordinate):
    """The one direction in which a tied embedding may move as a whole: E + c 1⊗(1/γ) adds c Σ β/γ to all logits.

    The head's bias takes that back, and the taking tensor gives c/γ back to the stream. The value is the mean of
    all entries of Eγ.
    """

    sum: Sum
    gain: str
    shift: str
    bias: str
    stage = Stage.SUM

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"sum:{self.sum.name}"

    @property
    def dim(self) -> int:
        return 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((1,),)

    @property
    def touches(self) -> frozenset[str]:
        return frozenset({self.bias} | {name for name, _, _ in self.sum.give + self.sum.take})

    def usable(self, tensors: Tensors) -> bool:
        gain = tensors[self.gain].abs()
        return bool(gain.min() > 1e-6 * gain.max())

    def read(self, tensors: Tensors) -> Tensor:
        return (tensors[self.sum.give[0][0]] @ tensors[self.gain]).mean()[None] / len(tensors[self.gain])

    def sample(self, value: Tensor, rng: torch.Generator) -> Tensor:
        return 0.1 * torch.randn(1, generator=rng, dtype=torch.float64)

    def transported(self, value: Tensor, action: Action) -> Tensor:
        return value

    def set(self, value: Tensor) -> dict[str, Change]:
        def step(t: Tensors) -> Tensor:
            return (value.to(t[self.gain].device) - self.read(t)) / t[self.gain]

        ((words, _, _),) = self.sum.give
        changes: dict[str, Change] = {
            words: lambda t: t[words] + step(t),
            self.bias: lambda t: t[self.bias] - step(t) @ t[self.shift],
        }
        return changes | {part[0]: partial(_taken, part, step) for part in self.sum.take}


def _taken(part: tuple[str, int, int | None], step: Callable[[Tensors], Tensor], tensors: Tensors) -> Tensor:
    """The rows of a tensor that take a step back."""
    name, start, stop = part
    new = tensors[name].clone()
    _rows(new)[start:stop] -= step(tensors)
    return new


def _rows(tensor: Tensor) -> Tensor:
    """A tensor of stream vectors as rows (a view): a bias is one row."""
    return tensor.view(-1, tensor.shape[-1])


def key_biases(arch: Architecture) -> list[KeyBias]:
    found = []
    for heads in arch.heads():
        face = heads.qk
        for name, _, words, term in arch.carriers(face):
            if term.dual or term.permutation_part or len(arch.tensors[name].roles[0].axes) != 1:
                continue
            rows = face_columns(arch, words, face, dual=False)
            free = free_key_rows(heads, rows)
            if free:
                found.append(KeyBias(heads, name, tuple(rows), tuple(free)))
    return found


def table_means(arch: Architecture) -> list[TableMean]:
    found = []
    for name, groups in arch.tables.items():
        if name in arch.tensors:
            n_rows, n_heads = arch.shapes[name]
            words = arch.tensors[name].roles[0].axes[1]
            unread = arch.unread_rows.get(name, [])
            read = tuple(row for row in range(n_rows) if row not in unread)
            found.append(TableMean(name, words, n_heads, groups or (read,)))
    return found


def choice_means(arch: Architecture) -> list[ChoiceMean]:
    return [ChoiceMean(name) for name in arch.choice_biases if name in arch.tensors]


def value_biases(arch: Architecture) -> list[ValueBias]:
    found = []
    for heads in arch.heads():
        face, output = heads.vo, output_projection(arch, heads)
        for name, _, words, term in arch.carriers(face):
            if output and not term.dual and len(arch.tensors[name].roles[0].axes) == 1:
                rows = face_columns(arch, words, face, dual=False)
                found.append(ValueBias(heads, name, tuple(rows), output))
    return found


def sum_shares(arch: Architecture) -> list[SumShare | TiedShare]:
    found: list[SumShare | TiedShare] = []
    for item in arch.sums:
        if item.along is None:
            stream = arch.stream_of(item.give[0][0])
            assert stream is not None, item.name
            kinds = {norm.kind for norm in arch.norms.values() if norm.space == stream.name}
            found.append(SumShare(item, stream.name, stream.size, kinds == {"layer"}))
            continue
        norm, bias = arch.norms[item.along], arch.bias_of(item.give[0][0])
        if bias is not None and norm.shift in arch.tensors:
            found.append(TiedShare(item, norm.gain, norm.shift, bias))
    return found
