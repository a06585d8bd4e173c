"""Numbers of a model that no symmetry of it changes, each of size about one, part by part.

Fixed numbers over tokens, positions and outputs give vectors of the stream that turn with it: `left` and `right`.
Between them every part says something: left (V Oᵀ) right summed over heads, left (Q Kᵀ) right with a fixed phase for
each rotary pair, gate·up·down summed over units. Beside them stand the logarithms of sizes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.arch import Axis, HeadSpace, Space
from isobasin.compare.balanced import rotary_pairs
from isobasin.compare.fixed import fixed
from isobasin.compare.frame import tables
from isobasin.compare.normal_form import Form, unit_rows
from isobasin.compare.places import pair_weights
from isobasin.match.attention import AttentionMatrices
from isobasin.match.canonical import ENDS, STREAM
from isobasin.shapes import Float
from isobasin.views import Tensors

EACH = 8  # numbers per part
LITTLE = 0.1  # of the largest table: smaller ones count less, so that rounding in an empty one is not blown up


@dataclass(frozen=True)
class Sketch:
    """Vectors of the stream that turn with it, of norm √d each, and the size of the largest table."""

    left: Float[Tensor, "k d"]
    right: Float[Tensor, "k d"]
    scale: float
    size: float  # logarithm of the size of all tables together

    @staticmethod
    def of(form: Form) -> "Sketch":
        """From every table of the ends; each counts about the same, whatever its size."""
        ends, found, heights = form.flat(ENDS), [], []
        for name, axis, gain in tables(form.arch, form.parts[ENDS]):
            if not gain:
                rows = ends[name].movedim(axis, -1).reshape(-1, ends[name].shape[axis]).to("cpu", torch.float64)
                found.append(fixed(f"sketch {name}", 2 * EACH, len(rows)) @ rows / len(rows) ** 0.5)
                heights.append(len(rows))
        sizes = [float(x.square().mean().sqrt()) for x in found]
        most = max(sizes)
        weights = [1 / (s**2 + (LITTLE * most) ** 2) ** 0.5 if h > 1 else 1 / most for s, h in zip(sizes, heights)]
        total = torch.stack([w * x for w, x in zip(weights, found)]).sum(0)
        total = total / total.square().mean(-1, keepdim=True).sqrt()
        return Sketch(total[:EACH], total[EACH:], most, math.log(math.hypot(*sizes)))


def head_features(m: AttentionMatrices, heads: HeadSpace, sketch: Sketch) -> dict[str, Tensor]:
    """`vo` and `qk`: what the sketch sees of a layer, over the size of the heads' products."""
    q, k, v, o, r = m.q, m.k, m.v, m.o, heads.rotary
    left, right = (_with_one(s, q.shape[1]) for s in (sketch.left, sketch.right))
    k, v = (x.repeat_interleave(heads.group_size, 0) for x in (k, v))
    # Heads that can not change places are told apart, so that swapping two of them shows.
    weight = torch.ones(len(q)) if heads.permutable else fixed("head", len(q))
    values = ((left @ v) * (sketch.right @ o)).sum(-1)
    scores = ((left @ q[..., r:]) * (right @ k[..., r:])).sum(-1)
    value_size, score_size = _product_size(v, o), _product_size(q[..., r:], k[..., r:])
    if r:
        turning_q, turning_k = (rotary_pairs(x[..., :r], heads) for x in (q, k))
        seen_q, seen_k = left.to(turning_q) @ turning_q, right.to(turning_k) @ turning_k
        scores = scores + (seen_q * seen_k.conj() * pair_weights(r // 2)).sum(-1).real
        sizes = [x.abs().square().sum(-2) for x in (turning_q, turning_k)]
        score_size = score_size + (sizes[0] * sizes[1]).sum()
    return {
        "vo": _over(weight.to(values) @ values, value_size.sqrt()),
        "qk": _over(weight.to(scores) @ scores, score_size.sqrt()),
        "size vo": _log(value_size),
        "size qk": _log(score_size),
    }


def _with_one(s: Tensor, rows: int) -> Tensor:
    return torch.cat([s, torch.ones_like(s[:, :1])], 1) if rows > s.shape[1] else s


def _product_size(x: Tensor, y: Tensor) -> Tensor:
    """Σ_h ‖X_h Y_hᵀ‖², from Grams."""
    return ((x.mT @ x) * (y.mT @ y)).sum()


def unit_features(form: Form, space: Space, tensors: Tensors, sketch: Sketch) -> dict[str, Tensor]:
    """`ff`: the sum over units of (gate·) up · down as the sketch sees them, over the size of its terms."""
    seen = {kind: torch.zeros(EACH, space.size, dtype=torch.float64) for kind in ("primal", "dual", "magnitude")}
    sizes = {kind: torch.zeros(space.size, dtype=torch.float64) for kind in seen}
    gated = False
    for name, rows, term in unit_rows(form.arch, space.name, tensors):
        kind = "magnitude" if term.magnitude else "dual" if term.dual else "primal"
        on_stream = any(w.terms and form.arch.space_of(w.terms[0]).name == STREAM for w in _words(form, name))
        vectors = {"primal": sketch.left, "dual": sketch.right, "magnitude": sketch.left.roll(1, 0)}[kind]
        seen[kind] += (vectors if on_stream else fixed(f"row {name}", EACH, rows.shape[1])) @ rows.mT
        sizes[kind] += rows.square().sum(1)
        gated |= term.magnitude
    gate = seen["magnitude"] if gated else torch.ones_like(seen["dual"])
    terms = gate * seen["primal"] * seen["dual"]
    size = (sizes["primal"] * sizes["dual"] * (sizes["magnitude"] if gated else 1)).sum()
    return {"ff": _over(terms.sum(1), terms.square().sum(1).sqrt()), "size ff": _log(size)}


def _words(form: Form, name: str) -> tuple[Axis, ...]:
    return form.arch.tensors[name].roles[0].axes


def vector_features(form: Form, space: str, tensors: Tensors, sketch: Sketch) -> Iterator[Tensor]:
    """Biases, shifts and gains of the stream, matrices from the stream to itself, and what lies on no space at all."""
    for name, tensor in tensors.items():
        axes = [word for word in _words(form, name) if word.terms]
        x = tensor.to("cpu", torch.float64)
        if not axes:
            yield x.flatten() @ fixed(f"plain {name}", x.numel(), EACH) / (x.norm() + LITTLE * x.numel() ** 0.5)
        elif any(len(word.terms) != 1 or form.arch.space_of(word.terms[0]).name != STREAM for word in axes):
            continue
        elif x.dim() == 2 and len(axes) == 2:
            yield _over(((sketch.left @ x) * sketch.right).sum(1), x.norm())
        elif x.dim() == 1 and axes[0].terms[0].magnitude:
            yield _over((sketch.left * sketch.right) @ (x - x.mean()), x.norm())
        elif x.dim() == 1 and space != ENDS:
            yield sketch.left @ x / len(x) ** 0.5 / (x.square().mean().sqrt() + LITTLE * sketch.scale)


def end_features(sketch: Sketch) -> Tensor:
    return (sketch.left * sketch.right).mean(1) * sketch.left.shape[1] ** 0.5


def _over(x: Tensor, size: Tensor) -> Tensor:
    return torch.where(size > 0, x / torch.where(size > 0, size, 1), 0)


def _log(square: Tensor) -> Tensor:
    return square.clamp_min(1e-60).log()[None] / 2
