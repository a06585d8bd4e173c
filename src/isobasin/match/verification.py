"""Does an alignment leave an attention layer's outputs alone? Measured by running the layer, in float64."""

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Norm
from isobasin.errors import VerificationError
from isobasin.gauge.means import output_projection
from isobasin.groups import HeadsElement
from isobasin.match.attention import attend, attention_matrices
from isobasin.shapes import Float
from isobasin.symmetries import symmetry
from isobasin.transform import Transform
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


def verify_layer(b: Weights, heads: HeadSpace, transform: Transform, device: torch.device) -> None:
    """Refuse a transform that would change the layer's function by more than rounding, before it is stored."""
    if not transform.elements and not transform.gauge:
        return
    change = layer_change(b, heads, transform.apply(b, device=device), device)
    if not change <= EXACT:
        raise VerificationError(
            f"{heads.name}: the alignment found would change the outputs of this layer by {change:.1e} (allowed "
            f"{EXACT:.0e}); nothing was written: try --stage2 orthogonal, and please report the models"
        )


def layer_change(b: Weights, heads: HeadSpace, tensors: Tensors, device: torch.device) -> float:
    """How far the layer's outputs are from B's, on random inputs behind its own norm, relative to the largest.

    Behind LayerNorms the mean of what is written to the stream is not seen, and does not count.
    """
    original = Doubled(b, device)
    inputs = _inputs(b.arch, heads, original)
    before = _outputs(b.arch, heads, original, inputs)
    after = _outputs(b.arch, heads, Doubled(tensors, device), inputs)
    difference = after - before
    if all(norm.kind == "layer" for norm in b.arch.norms.values() if norm.space == "resid"):
        difference = difference - difference.mean(-1, keepdim=True)
    return float(difference.abs().max() / before.abs().max().clamp(min=1e-300))


def _outputs(arch: Architecture, heads: HeadSpace, tensors: Tensors, inputs: Tensor) -> Float[Tensor, "t d"]:
    matrices = attention_matrices(arch, heads, tensors)
    outputs = attend(matrices, inputs[:, : matrices.q.shape[-2]], heads)
    projection = output_projection(arch, heads)
    return outputs + tensors[projection[2]] if projection else outputs


def _inputs(arch: Architecture, heads: HeadSpace, tensors: Tensors) -> Float[Tensor, "t d+1"]:
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
