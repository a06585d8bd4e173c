"""`check`: does the claimed group really leave this model's outputs alone, and is it as large as it can be?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from math import inf, isfinite

import torch
from torch import Tensor

from isobasin.checkpoint import dtype_name
from isobasin.display import Shown, Summary
from isobasin.errors import ArchitectureError, IsobasinError, VerificationError
from isobasin.rounding import perturbed, rounding
from isobasin.runtime import CPU, Inputs, output_difference, outputs, random_inputs, token_key, vocabulary_inputs
from isobasin.symmetries.dimension import Nullity, measured_nullity, predicted_nullity, small_block
from isobasin.symmetries.symmetry import symmetry
from isobasin.symmetries.transform import Transform, Value, scramble
from isobasin.views import AsFloat64, Tensors, View
from isobasin.weights import ModelSource, Weights, load

TOLERANCE_PER_LAYER = 1e-5  # float32
ROUNDING_FACTOR = 30.0  # multiples of the change that rounding every weight to float32 makes, where that is larger
NOT_FINITE = "the model's own outputs are not finite: nothing was verified"
EXPERT_ORDERS = 4  # random orders of the experts; two that tie keep theirs in half of them
EACH_SPACE_UP_TO = 100_000_000  # parameters; larger models draw all spaces of a kind at once


@dataclass(frozen=True, repr=False)
class Check(Shown):
    """How far random elements moved the outputs, by space, and the dimension test of one attention block.

    `dtype` is the type in which the model was run: float64 where numbers inside it overflow float32.
    """

    per_space: Mapping[str, float]
    tolerance: float
    nullity: Nullity | None  # None: attention that the small block does not have
    nullity_predicted: int | None
    dtype: str = "float32"

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
        facts = {"run in": self.dtype}
        if self.nullity is not None:
            facts["dimension of one attention block"] = f"{self.nullity.dim}, predicted {self.nullity_predicted}"
        return Summary(str(self), facts, ("space", "outputs moved by"), rows)


def check(model: ModelSource, *, seed: int = 0) -> Check:
    """Draw an element of every space, and values for every free coordinate; run the model before and after.

    A model whose outputs are not finite, in float64 either, is refused: nothing would be verified.
    """
    weights = load(model)
    tolerance = TOLERANCE_PER_LAYER * weights.arch.sizes.n_layers
    per_space, dtype = _moved_outputs(weights, seed, torch.float32), torch.float32
    if per_space is None or not 0 < max(per_space.values(), default=0.0) <= tolerance:
        exact = _moved_outputs(weights, seed, torch.float64)
        per_space, dtype = (per_space, dtype) if exact is None else (exact, torch.float64)
    if per_space is None:
        raise IsobasinError(f"{NOT_FINITE}; look for weights that are too large")
    if max(per_space.values(), default=0.0) > tolerance:
        _refuse_ties(weights, random_inputs(weights, seed=seed), CPU, dtype, tolerance, seed)
    if any(heads.qk_norm or heads.shared_rotary for heads in weights.arch.heads()):
        return Check(per_space, tolerance, None, None, dtype_name(dtype))
    predicted, measured = attention_nullity(weights, seed=seed)
    return Check(per_space, tolerance, measured, predicted, dtype_name(dtype))


def _moved_outputs(weights: Weights, seed: int, dtype: torch.dtype) -> dict[str, float] | None:
    """How far an element of each space moves the outputs, computed in this type; None where those of the model itself
    are not finite, or where transformers can not compute in it."""
    inputs, found = random_inputs(weights, seed=seed), dict[str, float]()
    before = _run(weights, inputs, CPU, dtype)
    if before is None or not bool(before.isfinite().all()):
        return None
    for label, part in _parts(scramble(weights, seed=seed), weights).items():
        after = _run(part.apply(weights), inputs, CPU, dtype)
        assert after is not None
        found[label] = output_difference(before, after)
    return found


def _run(weights: Weights, inputs: Sequence[Inputs], device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """The outputs; None where transformers runs the model, but not in float64."""
    try:
        return outputs(weights, inputs, device, dtype)
    except ArchitectureError:
        if dtype == torch.float64:
            return None
        raise


@dataclass(frozen=True)
class OutputChange:
    """The largest change of a moved model's outputs, relative to the largest output; None where the model's own are not
    finite. `dtype` is the type in which both were run; `note` says what the user should know."""

    largest: float | None
    dtype: str = "float32"
    note: str = ""

    @property
    def text(self) -> str:
        """What was found, in words."""
        if self.largest is None:
            return "not finite in the model itself: nothing was verified" if self.note else "not compared"
        return f"changed by at most {self.largest:.1e}, in {self.dtype}"


def require_same_outputs(
    before: Weights, after: Weights, *, seed: int = 0, device: torch.device | None = None
) -> OutputChange:
    """Run a model and its moved copy on random inputs, before the copy is rounded to be stored.

    Raises VerificationError if outputs change by more than rounding: by more than the tolerance, and by more than they
    change when every weight is rounded to float32. Where numbers inside a model overflow float32, this shows nothing,
    and both are run in float64. Raises IsobasinError if experts are tied, so that outputs can not show it.
    """
    inputs, place = random_inputs(before, seed=seed), device or CPU
    reference, moved = (outputs(each, inputs, place) for each in (before, after))
    allowed = TOLERANCE_PER_LAYER * before.arch.sizes.n_layers
    if _ties(before) and token_key(inputs[0]) is not None:  # experts that only a rare token takes
        _refuse_ties(before, vocabulary_inputs(before, seed=seed), place, torch.float32, allowed, seed)
    largest = output_difference(reference, moved) if _all_finite(reference, moved) else inf
    if allowed < largest < inf:
        tied = {name for space in _ties(before) for name in before.arch.blocks[space]}  # noise would make these differ
        noise = {name: rounding(torch.float32) for name in before if name not in tied}
        rounded = perturbed(before, noise, seed=seed, dtype=torch.float32)
        change = ROUNDING_FACTOR * output_difference(reference, outputs(rounded, inputs, place))
        allowed = max(allowed, change if isfinite(change) else 0.0)
    # Nothing at all changes where numbers overflow inside a norm, which then hands on zeros.
    if largest <= allowed and (largest > 0 or not after.changed):
        return OutputChange(largest)
    exact = [_run(each, inputs, place, torch.float64) for each in (before, after)]
    pair, dtype = (reference, moved), "float32"
    if exact[0] is not None and exact[1] is not None:
        pair, dtype = (exact[0], exact[1]), "float64"
    if not bool(pair[0].isfinite().any()):
        return OutputChange(None, dtype, NOT_FINITE)
    finite = pair[0].isfinite() & pair[1].isfinite()
    largest = output_difference(pair[0][finite], pair[1][finite]) if bool(finite.any()) else inf
    if largest <= allowed:
        if _all_finite(reference, moved):  # in float32 they differ: perhaps as the scores of experts tie there
            _refuse_ties(before, inputs, place, torch.float32, allowed, seed)
        if _all_finite(reference, moved, *pair) and dtype == "float64" and largest > 0:
            _require_stored(before, after, inputs, place, exact[0], allowed)
        return OutputChange(largest, dtype, _overflow_text(reference, moved, bool(finite.all())))
    if not _all_finite(*pair):
        raise IsobasinError(
            "numbers inside the moved model overflow: its outputs are not finite where those of the model are; nothing "
            "written: its weights are too large; --verify none writes it all the same"
        )
    for each in (torch.float32, getattr(torch, dtype)):
        _refuse_ties(before, inputs, place, each, allowed, seed)
    raise VerificationError(
        f"the moved model's outputs would differ by {largest:.1e} (allowed {allowed:.1e}): its symmetry group is "
        "not what isobasin expects; nothing written: please report config.json and the tensors' shapes"
    )


def _require_stored(
    before: Weights,
    after: Weights,
    inputs: Sequence[Inputs],
    device: torch.device,
    reference: Tensor | None,
    allowed: float,
) -> None:
    """Raise if the moved model loses its function when it is stored in float32, though the model itself would not."""
    assert reference is not None
    changes = []
    for model in (before, after):
        rounded = _run(_in_float32(model), inputs, device, torch.float64)
        changes.append(inf if rounded is None else output_difference(reference, rounded))
    if changes[1] > max(allowed, ROUNDING_FACTOR * changes[0]) and max(changes) < inf:
        raise IsobasinError(
            f"rounded to float32, the moved weights would change outputs by {changes[1]:.1e} (allowed {allowed:.1e}): "
            "numbers of very different size are added up in them; nothing written; take another --seed, or "
            "--verify none to write it all the same"
        )


def _in_float32(weights: Weights) -> Weights:
    names = [name for name, dtype in weights.dtypes.items() if dtype.is_floating_point]
    return replace(weights, tensors=View(weights, {n: partial(_rounded, n) for n in names}), checkpoint=None)


def _rounded(name: str, tensors: Tensors) -> Tensor:
    return tensors[name].to(torch.float32)


def _refuse_ties(
    weights: Weights, inputs: Sequence[Inputs], device: torch.device, dtype: torch.dtype, allowed: float, seed: int
) -> None:
    """Raise if outputs of the model itself change when its experts change places, with their rows of the router: then
    scores of experts are equal, and their order decides which are taken."""
    if not weights.arch.expert_spaces or (here := _run(weights, inputs, device, dtype)) is None:
        return
    for draw in range(seed, seed + EXPERT_ORDERS):
        drawn = scramble(weights, seed=draw)
        order = {name: element for name, element in drawn.elements.items() if name in weights.arch.expert_spaces}
        there = _run(replace(drawn, elements=order, gauge={}).apply(weights), inputs, device, dtype)
        if there is not None and output_difference(here, there) > allowed:
            break
    else:
        return
    what = f"scores of experts are equal on an input in {dtype_name(dtype)}"
    for space, ((first, second, *_), *_) in _ties(weights).items():
        what = f"router {weights.arch.router_of(space)}: rows {first} and {second} are equal"
    raise IsobasinError(
        f"{what}, so which experts are taken hangs on rounding and on their order: outputs show nothing; make the "
        "scores differ; --verify none writes a model all the same"
    )


def tied_experts(weights: Weights) -> dict[str, str]:
    """By space, in words, experts with equal rows of the router and other weights: their order decides which is
    taken."""
    places, found = weights.arch.expert_tensors, dict[str, str]()
    for space, groups in _ties(weights).items():
        for first, second in chain.from_iterable(map(pairwise, groups)):
            tensors = zip(places[space][first], places[space][second], strict=True)
            if space not in found and not all(torch.equal(weights[x], weights[y]) for x, y in tensors):
                found[space] = f"router {weights.arch.router_of(space)}: rows {first} and {second} are equal"
    return found


def _ties(weights: Weights) -> dict[str, list[list[int]]]:
    """By space of experts, those whose scores are always equal, in groups; without spaces that have none."""
    return {space: groups for space in weights.arch.expert_spaces if (groups := _tied_experts(weights, space))}


def _tied_experts(weights: Weights, space: str) -> list[list[int]]:
    """Groups of experts with equal rows and biases of the router."""
    rows = [weights[name] for name in weights.arch.blocks[space]]
    scores = torch.cat([x.reshape(len(x), -1).to(CPU, torch.float64) for x in rows], 1)
    _, group_of, sizes = scores.unique(dim=0, return_inverse=True, return_counts=True)
    return [(group_of == group).nonzero().flatten().tolist() for group in (sizes > 1).nonzero().flatten()]


def _all_finite(*outputs: Tensor) -> bool:
    return all(bool(each.isfinite().all()) for each in outputs)


def _overflow_text(reference: Tensor, moved: Tensor, everywhere: bool) -> str:
    """What the user should know of a copy whose outputs agree where they can be compared, but not in float32."""
    where = "" if everywhere else ", on those inputs alone on which the outputs of both are finite"
    if not _all_finite(reference):
        return f"the model's own outputs are not finite in float32: compared in float64{where}"
    if torch.equal(reference, moved):
        return "" if everywhere else f"the model's own outputs are not finite: compared{where}"
    what = "differ from those of the model" if _all_finite(moved) else "are not finite"
    return (
        f"in float32 the outputs of the copy {what}, as numbers inside overflow or cancel: compared in float64{where}"
    )


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
