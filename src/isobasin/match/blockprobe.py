"""Does a whole-model alignment leave every block's function alone? Measured by running blocks, in float64.

A block of B reads a normalised stream and adds to it; the moved block must read the turned stream and add the turned
sum. Attention and feed-forward of a layer are taken together, as what one of them may give up the other may gain.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.action import Action
from isobasin.arch import Architecture, Axis, Norm, Space, Term
from isobasin.errors import VerificationError
from isobasin.match.attention import attend, attention_matrices
from isobasin.match.canonical import STREAM
from isobasin.match.verification import EXACT, LENGTH, norm_before
from isobasin.shapes import Float
from isobasin.transform import Transform
from isobasin.views import Doubled, Tensors
from isobasin.weights import Weights


@dataclass(frozen=True)
class BlockProbe:
    """The blocks of B and of the moved model on the same random streams, each in its own frame."""

    arch: Architecture
    before: Tensors
    after: Tensors
    turn: Action

    @staticmethod
    def of(b: Weights, transform: Transform, device: torch.device) -> "BlockProbe":
        moved = transform.apply(b, device=device)
        turn = {name: g for name, g in transform.elements.items() if name == STREAM}
        return BlockProbe(b.arch, Doubled(b, device), Doubled(moved, device), Action(b.arch, turn))

    def change(self, layer: int, written: Tensors | None = None) -> float:
        """How far the sum of this layer's attention and feed-forward moved, relative to the largest entry."""
        return self.changes(layer, self.after if written is None else written)[0]

    def changes(self, layer: int, *others: Tensors) -> list[float]:
        """The same for several models in the moved frame, with one run of B's own layer.

        Behind LayerNorms the mean of what is written to the stream is not seen, and does not count.
        """
        expected = self._run(layer, self.before, Action(self.arch, {}))
        expected = self.turn.act(expected, -1, Axis((Term(STREAM),)))
        found = []
        for tensors in others:
            difference = self._run(layer, Doubled(tensors, expected.device), self.turn) - expected
            if all(norm.kind == "layer" for norm in self.arch.norms.values() if norm.space == STREAM):
                difference = difference - difference.mean(-1, keepdim=True)
            found.append(float(difference.abs().max() / expected.abs().max().clamp(min=1e-300)))
        return found

    def _run(self, layer: int, tensors: Tensors, turn: Action) -> Float[Tensor, "t d"]:
        """What a layer adds to random streams, turned as its model is turned."""
        rng = torch.Generator().manual_seed(layer)
        total = torch.zeros(())
        for norm, run in ((self._attention_norm(layer), _attention), (self._units_norm(layer), _units)):
            gain = tensors[norm.gain]
            z = _normalised(torch.randn(LENGTH, len(gain), generator=rng, dtype=torch.float64).to(gain.device), norm)
            turned = turn.act(z, -1, Axis((Term(STREAM),)))
            total = total + run(self.arch, layer, tensors, _read(self.arch, tensors, norm, turned), norm)
        for bias in self._biases(layer):
            total = total + tensors[bias]
        return total

    def require_unchanged(self, layer: int) -> None:
        require_unchanged(layer, self.change(layer))

    def _biases(self, layer: int) -> set[str]:
        """What the layer adds whatever it reads; a parallel attention and feed-forward may share one."""
        writers = [
            name
            for face in (f"vo{layer}", f"ff{layer}")
            for name, *_, term in self.arch.carriers(face)
            if term.dual and len(self.arch.shapes[name]) > 1
        ]
        return {bias for bias in map(self.arch.bias_of, writers) if bias}

    def _attention_norm(self, layer: int) -> Norm:
        return norm_before(self.arch, next(h for h in self.arch.heads() if h.name == f"heads{layer}"))

    def _units_norm(self, layer: int) -> Norm:
        axes = (a for name, *_ in self.arch.carriers(f"ff{layer}") for a in self.arch.tensors[name].roles[0].axes)
        return next(
            self.arch.norms[axis.name] for axis in axes if axis.name is not None and axis.name in self.arch.norms
        )


def require_unchanged(layer: int, change: float) -> None:
    """Refuse an alignment that changes what a layer does by more than rounding, before it is stored."""
    if not change <= EXACT:
        raise VerificationError(
            f"layer {layer}: the alignment found would change what this layer adds to the stream by {change:.1e} "
            f"(allowed {EXACT:.0e}); nothing was written: try --scope all-attention, and please report the models"
        )


def _normalised(z: Tensor, norm: Norm) -> Float[Tensor, "t d"]:
    if norm.kind == "layer":
        z = z - z.mean(-1, keepdim=True)
    return z / z.square().mean(-1, keepdim=True).sqrt()


def _read(arch: Architecture, tensors: Tensors, norm: Norm, z: Tensor) -> Float[Tensor, "t d"]:
    x = z * tensors[norm.gain]
    return x + tensors[norm.shift] if norm.shift in arch.tensors else x


def _attention(arch: Architecture, layer: int, tensors: Tensors, x: Tensor, norm: Norm) -> Float[Tensor, "t d"]:
    heads = next(h for h in arch.heads() if h.name == f"heads{layer}")
    matrices = attention_matrices(arch, heads, tensors)
    ended = torch.cat([x, torch.ones_like(x[:, :1])], -1)
    out = attend(matrices, ended[:, : matrices.q.shape[-2]], heads)
    return out + x if norm.skip else out  # after the norm the stream itself goes on


def _units(arch: Architecture, layer: int, tensors: Tensors, x: Tensor, norm: Norm) -> Float[Tensor, "t d"]:
    """down(φ(up x)), or down(φ(gate x) · up x); which φ makes no difference to what is a symmetry of its kind."""
    space = arch.spaces[f"ff{layer}"]
    assert isinstance(space, Space)
    roles = {
        "down" if term.dual else "gate" if term.magnitude else "up": (name, axis)
        for name, axis, _, term in arch.carriers(space.name)
        if len(arch.shapes[name]) > 1
    }

    def through(role: str, inputs: Tensor) -> Tensor:
        name, axis = roles[role]
        out = inputs @ tensors[name].movedim(axis, 0 if role == "down" else -1)
        bias = arch.bias_of(name) if role != "down" else None  # that of the output is added once for the layer
        return out + tensors[bias] if bias else out

    hidden = F.silu(through("gate", x)) * through("up", x) if "gate" in roles else _bent(space, through("up", x))
    out = through("down", hidden)
    return out + x if norm.skip else out


def _bent(space: Space, x: Tensor) -> Tensor:
    if space.kind == "positive":
        return F.relu(x)
    return torch.tanh(x) if space.kind == "signed" else F.gelu(x)
