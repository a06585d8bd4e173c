"""Activations of two models on unlabeled data.

`reading_roots`: the metric of what each attention layer reads. `correlations`: which coordinates of A and B go
together, for every space of a model, both run on the same inputs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Norm, Space
from isobasin.errors import IsobasinError
from isobasin.runtime import Inputs, module_of, module_reading, places, record_reads, run_module
from isobasin.shapes import Float
from isobasin.tasks import unlabeled
from isobasin.weights import Weights


def unlabeled_inputs(
    data: "str | Path | Sequence[Mapping[str, Tensor]]", model: Weights, *, seed: int = 0
) -> Iterable[Inputs]:
    """The inputs of a data file for this model, or the inputs given."""
    if isinstance(data, str | Path):
        return unlabeled(Path(data), model, seed=seed)
    return [dict(one) for one in data]


def reading_roots(
    a: Weights, b: Weights, inputs_a: Iterable[Inputs], inputs_b: Iterable[Inputs]
) -> dict[str, Float[Tensor, "rows rows"]]:
    """Σ^½ per attention layer, Σ the mean of both models' second moments of (what it reads, 1)."""
    first, second = second_moments(a, inputs_a), second_moments(b, inputs_b)
    return {name: _root((first[name] + second[name]) / 2) for name in first}


def second_moments(weights: Weights, inputs: Iterable[Inputs]) -> dict[str, Float[Tensor, "rows rows"]]:
    """E[(y, 1)(y, 1)ᵀ] over all tokens, y what the layer's projections read; accumulated in float64."""
    totals: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(name: str, reads: Tensor) -> None:
        y = reads.flatten(0, -2).to(torch.float64)
        y = torch.cat([y, torch.ones_like(y[:, :1])], -1)
        totals[name] = totals.get(name, 0) + y.mT @ y
        counts[name] = counts.get(name, 0) + len(y)

    if any(heads.shared_rotary for heads in weights.arch.heads()):
        raise IsobasinError(
            "--matcher activations: attention scopes are not supported for latent attention, whose keys read two "
            "inputs; expected --scope model or --matcher weights"
        )
    wanted = {_key_weight(weights, heads): heads.name for heads in weights.arch.heads()}
    record_reads(weights, inputs, wanted, add)
    if not totals:
        raise IsobasinError("--data holds no inputs: expected at least one text, image or row of token ids")
    return {name: total / counts[name] for name, total in totals.items()}


def _key_weight(weights: Weights, heads: HeadSpace) -> str:
    return next(
        name
        for name, _, _, term in weights.arch.carriers(heads.qk)
        if not term.dual and len(weights.arch.tensors[name].roles[0].axes) > 1
    )


def _root(moment: Tensor) -> Tensor:
    values, basis = torch.linalg.eigh(moment)
    return (basis * values.clamp_min(0).sqrt()) @ basis.mT


def correlations(a: Weights, b: Weights, inputs: Iterable[Inputs]) -> dict[str, Float[Tensor, "n n"]]:
    """How far the coordinates of A (rows) and B (columns) go together over the same inputs, for every space.

    Stream: E[x_A x_Bᵀ] of what its norms normalise, the mean over norms. Units: correlations. Heads: the mean
    canonical correlation of what two heads hand to the output projection, which no change of basis inside a head moves.
    Two models that are the same up to g have 1 wherever g has an entry.
    """
    readers = [_Reader.of(model) for model in (a, b)]
    totals: dict[str, _Joint] = {}
    for one in inputs:
        reads = [reader.read(one) for reader in readers]
        for label in reads[0]:
            seen = _Joint.of(*(r[label] for r in reads))
            totals[label] = totals[label] + seen if label in totals else seen
    if not totals:
        raise IsobasinError("--data holds no inputs: expected at least one text, image or row of token ids")
    return _tables(a.arch, totals)


@dataclass(frozen=True)
class _Joint:
    """Sums over tokens: of products between A and B, and within each; of each; and how many there were."""

    ab: Tensor
    aa: Tensor
    bb: Tensor
    a: Tensor
    b: Tensor
    n: int

    @staticmethod
    def of(x: Tensor, y: Tensor) -> "_Joint":
        return _Joint(x.mT @ y, x.mT @ x, y.mT @ y, x.sum(0), y.sum(0), len(x))

    def __add__(self, other: "_Joint") -> "_Joint":
        return _Joint(*(p + q for p, q in zip(vars(self).values(), vars(other).values(), strict=True)))

    def covariances(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of A with B, of A, of B. What a bias adds to every token is gone."""
        a, b = self.a / self.n, self.b / self.n
        pairs = ((self.ab, a, b), (self.aa, a, a), (self.bb, b, b))
        ab, aa, bb = (total / self.n - torch.outer(x, y) for total, x, y in pairs)
        return ab, aa, bb


@dataclass(frozen=True)
class _Reader:
    """A model with hooks on the modules that show its spaces; each pass leaves what they were given."""

    weights: Weights
    module: torch.nn.Module
    _seen: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(weights: Weights) -> "_Reader":
        reader = _Reader(weights, module_of(weights))
        held = places(weights, reader.module)
        for tensor, label, norm in _shown(weights.arch):
            module = module_reading(reader.module, held, tensor)
            module.register_forward_pre_hook(lambda _, args, at=(label, norm): reader._keep(args[0], *at))
        return reader

    def _keep(self, x: Tensor, label: str, norm: Norm | None) -> None:
        x = x.flatten(0, -2).to(torch.float64)
        if norm is not None:
            x = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
            x = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
        self._seen[label] = x

    def read(self, one: Inputs) -> dict[str, Tensor]:
        self._seen.clear()
        with torch.no_grad():
            run_module(self.weights, self.module, one)
        return dict(self._seen)


def _shown(arch: Architecture) -> Iterator[tuple[str, str, Norm | None]]:
    """Where spaces show (tensor, label, norm): the stream at its norms, others at the tensor that reads them."""
    for norm in arch.norms.values():
        if norm.space in arch.streams:
            yield norm.gain, f"norm:{norm.name}", norm
    # Experts of a layer run together, so their units do not show.
    found = {*arch.streams, *(unit for space in arch.expert_spaces.values() for unit in space.members)}
    for name, pattern in arch.tensors.items():
        if pattern.buffer or len(arch.shapes[name]) != 2:
            continue
        for term in (axis.terms[0] for axis in pattern.roles[0].axes if len(axis.terms) == 1):
            space = arch.space_of(term)
            queries = isinstance(space, HeadSpace) and term.name == space.qk
            if term.dual and not queries and space.name not in found:
                found.add(space.name)
                yield name, space.name, None


def _tables(arch: Architecture, totals: dict[str, _Joint]) -> dict[str, Tensor]:
    on_streams: dict[str, list[Tensor]] = {}
    for label, total in totals.items():
        if label.startswith("norm:"):
            norm = arch.norms[label.removeprefix("norm:")]
            on_streams.setdefault(norm.space, []).append(total.ab / total.n)
    tables = {stream: torch.stack(each).mean(0) for stream, each in on_streams.items()}
    for label, total in totals.items():
        space = arch.spaces.get(label)
        if isinstance(space, HeadSpace):
            tables[label] = _between_heads(space, *total.covariances())
        elif isinstance(space, Space):
            ab, aa, bb = total.covariances()
            tables[label] = ab / torch.outer(_deviations(aa), _deviations(bb))
    return tables


def _deviations(covariance: Tensor) -> Tensor:
    """Of each coordinate; infinite for one that never moves, so that it agrees with nothing."""
    variance = covariance.diagonal()
    return torch.where(variance > 1e-12 * variance.max(), variance.sqrt(), torch.inf)


def _between_heads(heads: HeadSpace, ab: Tensor, aa: Tensor, bb: Tensor) -> Float[Tensor, "h h"]:
    """The mean canonical correlation of every pair: that of Σ_ii^{-½} Σ_ij Σ_jj^{-½}, singular values averaged."""
    h, n = heads.n_heads, heads.value_size
    each = torch.arange(h)
    roots = [_inverse_root(m.reshape(h, n, h, n)[each, :, each]) for m in (aa, bb)]
    cross = ab.reshape(h, n, h, n).transpose(1, 2)
    return torch.linalg.svdvals(roots[0][:, None] @ cross @ roots[1]).mean(-1)


def _inverse_root(moment: Tensor) -> Tensor:
    """Σ^{-½}, zero along directions in which nothing moves."""
    values, basis = torch.linalg.eigh(moment)
    moving = values > 1e-9 * values[..., -1:].clamp_min(1e-300)
    inverse = torch.where(moving, values.clamp_min(1e-300).rsqrt(), 0.0)
    return (basis * inverse.unsqueeze(-2)) @ basis.mT
