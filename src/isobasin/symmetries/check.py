"""`check`: does the claimed group really leave this model's outputs alone, and is it as large as it can be?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from isobasin.display import Shown, Summary
from isobasin.errors import VerificationError
from isobasin.rounding import perturbed, rounding
from isobasin.runtime import output_difference, outputs, random_inputs
from isobasin.symmetries.dimension import Nullity, measured_nullity, predicted_nullity, small_block
from isobasin.symmetries.symmetry import symmetry
from isobasin.symmetries.transform import Transform, Value, scramble
from isobasin.views import AsFloat64
from isobasin.weights import ModelSource, Weights, load

TOLERANCE_PER_LAYER = 1e-5  # float32
ROUNDING_FACTOR = 30.0  # multiples of the change that rounding every weight to float32 makes, where that is larger
EACH_SPACE_UP_TO = 100_000_000  # parameters; larger models draw all spaces of a kind at once


@dataclass(frozen=True, repr=False)
class Check(Shown):
    """How far random elements moved the outputs, by space, and the dimension test of one attention block."""

    per_space: Mapping[str, float]
    tolerance: float
    nullity: Nullity | None  # None: attention that the small block does not have
    nullity_predicted: int | None

    @property
    def max_error(self) -> float:
        return max(self.per_space.values(), default=0.0)

    @property
    def ok(self) -> bool:
        complete = self.nullity is None or self.nullity.agrees_with(self.nullity_predicted or 0)
        return self.max_error <= self.tolerance and complete

    def __str__(self) -> str:
        claim = "the claimed symmetries hold" if self.ok else "the claimed symmetries are not those of this model"
        return f"{claim}: outputs moved by at most {self.max_error:.1e} (allowed {self.tolerance:.1e})"

    def summary(self) -> Summary:
        """How far outputs moved, space by space."""
        rows = [(name, f"{error:.1e}") for name, error in self.per_space.items()]
        facts = {}
        if self.nullity is not None:
            facts["dimension of one attention block"] = f"{self.nullity.dim}, predicted {self.nullity_predicted}"
        return Summary(str(self), facts, ("space", "outputs moved by"), rows)


def check(model: ModelSource, *, seed: int = 0) -> Check:
    """Draw an element of every space, and values for every free coordinate; run the model before and after."""
    weights = load(model)
    inputs = random_inputs(weights, seed=seed)
    before = outputs(weights, inputs)
    drawn = scramble(weights, seed=seed)
    per_space = {
        label: output_difference(before, outputs(part.apply(weights), inputs))
        for label, part in _parts(drawn, weights).items()
    }
    tolerance = TOLERANCE_PER_LAYER * weights.arch.sizes.n_layers
    if any(heads.qk_norm or heads.shared_rotary for heads in weights.arch.heads()):
        return Check(per_space, tolerance, None, None)
    predicted, measured = attention_nullity(weights, seed=seed)
    return Check(per_space, tolerance, measured, predicted)


def require_same_outputs(
    before: Weights, after: Weights, *, seed: int = 0, device: torch.device | None = None
) -> float:
    """Run a model and its moved copy on random inputs, before the copy is rounded to be stored.

    Returns the largest change of the outputs, relative to the largest output. Raises VerificationError if it is more
    than rounding: more than the tolerance, and more than outputs change when every weight is rounded to float32.
    """
    inputs = random_inputs(before, seed=seed)
    place = device or torch.device("cpu")
    reference = outputs(before, inputs, place)
    largest = output_difference(reference, outputs(after, inputs, place))
    allowed = TOLERANCE_PER_LAYER * before.arch.sizes.n_layers
    if not largest <= allowed:
        rounded = perturbed(before, dict.fromkeys(before, rounding(torch.float32)), seed=seed, dtype=torch.float32)
        allowed = max(allowed, ROUNDING_FACTOR * output_difference(reference, outputs(rounded, inputs, place)))
    if not largest <= allowed:
        raise VerificationError(
            f"the moved model's outputs would differ by {largest:.1e} (allowed {allowed:.1e}): its symmetry group is "
            "not what isobasin expects; nothing written: please report config.json and the tensors' shapes"
        )
    return largest


def _parts(drawn: Transform, weights: Weights) -> dict[str, Transform]:
    """The drawn transform space by space (or kind by kind), and its free coordinates on their own."""
    kinds: dict[str, list[str]] = {}
    for name in drawn.elements:
        label = name if weights.n_params <= EACH_SPACE_UP_TO else weights.arch.spaces[name].label
        kinds.setdefault(label, []).append(name)
    still = _own_gains(weights)
    parts = {
        label: replace(
            drawn,
            elements={n: drawn.elements[n] for n in names},
            gauge=still if set(names) & set(weights.arch.streams) else {},
        )
        for label, names in kinds.items()
    }
    return parts | ({"free": replace(drawn, elements={})} if drawn.gauge else {})


def _own_gains(weights: Weights) -> dict[str, Value]:
    """Every factor (gain and shift of a norm, LayerScale) with its own value as the target, as a rotation needs it."""
    tensors = AsFloat64(weights)
    norms = [c for c in symmetry(weights.arch).coordinates.values() if c.folds]
    return {c.name: Value(c.read(tensors), c.read(tensors)) for c in norms}


def attention_nullity(weights: Weights, *, seed: int = 0) -> tuple[int, Nullity]:
    """Predicted and measured nullity of a small attention block of this model's structure."""
    heads = next(iter(weights.arch.heads()))
    biased = [
        any(weights.arch.bias_of(n) for n, *_, t in weights.arch.carriers(face) if t.dual is dual)
        for face, dual in ((heads.qk, False), (heads.vo, True))
    ]
    block = small_block(
        n_heads=heads.n_heads,
        n_kv_heads=heads.n_kv_heads,
        d_head=heads.d_head,
        positions=weights.arch.positions,
        rotary_dims=heads.rotary or None,
        bias=biased[0],
        out_bias=biased[1],
        layout="interleaved" if heads.interleaved else "half",
        sinks=bool(heads.sinks),
    )
    return predicted_nullity(block), measured_nullity(block, seed=seed)
