"""Does an alignment leave an attention layer's outputs alone? Measured by running the layer, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Norm
from isobasin.errors import VerificationError
from isobasin.gauge.means import output_projection
from isobasin.groups import HeadsElement
from isobasin.match.attention import attend, attention_matrices
from isobasin.shapes import Float
from isobasin.symmetries import symmetry
from isobasin.views import Doubled, Tensors
from isobasin.weights import Weights

EXACT = 1e-6  # the largest relative change of a layer's outputs that counts as rounding
LENGTH = 24  # tokens of random input


def check_element(b: Weights, heads: HeadSpace, element: HeadsElement) -> None:
    """Refuse an element outside the group of these heads: it would change the function, whatever it is near to."""
    group = symmetry(b.arch).groups[heads.name]
    if not group.contains(element):
        raise VerificationError(
            f"{heads.name}: the element found is not in {group}, so it would change the function; nothing was written: "
            "try --stage2 orthogonal, and please report the models"
        )


@dataclass(frozen=True)
class Probe:
    """One attention layer of B run on random inputs behind its own norm: what it said, to compare others with."""

    arch: Architecture
    heads: HeadSpace
    inputs: Float[Tensor, "t rows"]
    before: Float[Tensor, "t d"]
    device: torch.device

    @staticmethod
    def of(b: Weights, heads: HeadSpace, device: torch.device) -> "Probe":
        original = Doubled(b, device)
        inputs = _inputs(b.arch, heads, original)
        return Probe(b.arch, heads, inputs, _outputs(b.arch, heads, original, inputs), device)

    def change(self, tensors: Tensors) -> float:
        """How far the layer's outputs are from B's with these projections, relative to the largest.

        Behind LayerNorms the mean of what is written to the stream is not seen, and does not count.
        """
        difference = _outputs(self.arch, self.heads, Doubled(tensors, self.device), self.inputs) - self.before
        if all(norm.kind == "layer" for norm in self.arch.norms.values() if norm.space == "resid"):
            difference = difference - difference.mean(-1, keepdim=True)
        return float(difference.abs().max() / self.before.abs().max().clamp(min=1e-300))

    def require_unchanged(self, tensors: Tensors) -> None:
        """Refuse projections that change the layer's function by more than rounding, before they are stored."""
        change = self.change(tensors)
        if not change <= EXACT:
            raise VerificationError(
                f"{self.heads.name}: the alignment found would change the outputs of this layer by {change:.1e} "
                f"(allowed {EXACT:.0e}); nothing was written: try --stage2 orthogonal, and please report the models"
            )


def _outputs(arch: Architecture, heads: HeadSpace, tensors: Tensors, inputs: Tensor) -> Float[Tensor, "t d"]:
    matrices = attention_matrices(arch, heads, tensors)
    outputs = attend(matrices, inputs[:, : matrices.q.shape[-2]], heads)
    projection = output_projection(arch, heads)
    return outputs + tensors[projection[2]] if projection else outputs


def _inputs(arch: Architecture, heads: HeadSpace, tensors: Tensors) -> Float[Tensor, "t rows"]:
    """What the layer may read: normalised noise through the norm in front of it, and a one for the biases."""
    norm = norm_before(arch, heads)
    gain = tensors[norm.gain]
    noise = torch.randn(LENGTH, len(gain), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = noise.to(gain.device)
    if norm.kind == "layer":
        z = z - z.mean(-1, keepdim=True)
    z = z / z.square().mean(-1, keepdim=True).sqrt() * gain
    if norm.shift in arch.tensors:
        z = z + tensors[norm.shift]
    return torch.cat([z, torch.ones_like(z[:, :1])], -1)


def norm_before(arch: Architecture, heads: HeadSpace) -> Norm:
    """The norm that this layer's projections read."""
    face = f"qk{heads.name.removeprefix('heads')}"
    words = (axis.name for name, *_ in arch.carriers(face) for axis in arch.tensors[name].roles[0].axes)
    return next(arch.norms[word] for word in words if word is not None and word in arch.norms)
