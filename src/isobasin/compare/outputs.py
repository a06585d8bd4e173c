"""Comparison of outputs: both models run on the same inputs, and the differences that rounding alone causes.

Inputs are random ones, ones with a structure that random inputs never have, and variants found by a search. An input on
which the outputs differ by far more than rounding explains is a witness that the functions differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import torch
from torch import Tensor

from isobasin.checkpoint import dtype_name
from isobasin.errors import ArchitectureError
from isobasin.rounding import perturbed, rounding_units
from isobasin.runtime import (
    CPU,
    SMALLEST_SIZE,
    USUAL_LENGTH,
    Inputs,
    Runner,
    affordable_length,
    max_length,
    output_difference,
    random_inputs,
    token_key,
    vocabulary_inputs,
    vocabulary_size,
    with_tokens,
)
from isobasin.weights import Weights

WITNESS_THRESHOLD = 10.0  # multiples of the noise floor of the outputs; measured: copies stay below 3
SAME_THRESHOLD = 5.0  # the same; above it outputs do not confirm that two models are the same
CERTAIN_THRESHOLD = 30.0  # the same; above it unrelated models are not aligned
AGREED = 1.0  # the same; where all inputs are below it, further perturbed copies are not run: they only lower it
MAX_ROUNDING = 0.5  # of outputs, relative to the largest; above it rounding leaves nothing to compare
PERTURBED_COPIES = 2  # per model
CONFIRMING_COPIES = 8  # the same, for an input with a ratio between WITNESS_THRESHOLD and CONFIRMED
CONFIRMED = 300.0
EXPERT_COPIES = 8  # the same with experts: rounding exchanges one of them on few inputs only, and then changes much
SEARCH_ROUNDS, SEARCH_VARIANTS = 12, 4
MAX_PRINTED = 4096  # numbers of an input in JSON
MAX_LENGTH = 256  # tokens
NUMBERS = ("pixel_values", "input_features")  # inputs that are no tokens


@dataclass(frozen=True)
class Probe:
    """One input and a label that describes it."""

    label: str
    inputs: Inputs


def probes(a: Weights, b: Weights, *, seed: int, brief: bool = False) -> list[Probe]:
    """The inputs on which both models are run; `brief` uses a single sequence length."""
    shorter = min(a, b, key=_max_length)
    drawn = random_inputs(shorter, n=3, length=min(USUAL_LENGTH, _max_length(shorter)), seed=seed)
    structured: dict[str, Inputs] = {}
    tokens = token_key(drawn[0])
    for key in (key for key in NUMBERS if key in drawn[0] and shorter.family.text is None):
        structured |= {label: drawn[0] | {key: x} for label, x in _images(drawn[0][key]).items()}
    if tokens is not None:
        ids_by_label = _token_ids(shorter, seed, brief) | _padded_ids(a, b, drawn[0][tokens].flatten(0, -2)[0])
        structured |= {label: _with_tokens(shorter, ids, seed) for label, ids in ids_by_label.items()}
    return [*(Probe("random", each) for each in drawn), *(Probe(label, each) for label, each in structured.items())]


def _variant(probe: Probe, weights: Weights, rng: torch.Generator) -> Probe:
    """The same input with a quarter of its tokens replaced, or with another contrast and noise."""
    inputs = dict(probe.inputs)
    for key in (key for key in NUMBERS if key in inputs):
        x = inputs[key]
        scale = float(torch.exp2(2 * torch.rand((), generator=rng) - 1))
        inputs[key] = scale * x + 0.3 * torch.randn(x.shape, generator=rng)
    if (tokens := token_key(inputs)) is not None:
        ids = inputs[tokens].clone()
        places = torch.randint(ids.shape[-1], (max(1, ids.shape[-1] // 4),), generator=rng)
        ids[..., places] = torch.randint(vocabulary_size(weights) or 2, places.shape, generator=rng)
        inputs = with_tokens(weights, inputs, ids)
    return Probe(f"{probe.label.removesuffix(', varied')}, varied", inputs)


def _max_length(weights: Weights) -> int:
    return min(MAX_LENGTH, max_length(weights) or MAX_LENGTH)


def _token_ids(weights: Weights, seed: int, brief: bool) -> dict[str, Tensor]:
    """Tokens with a structure, by label."""
    usual, long = min(USUAL_LENGTH, _max_length(weights)), min(_max_length(weights), affordable_length(weights))
    n = vocabulary_size(weights) or 2
    rng = torch.Generator().manual_seed(seed)
    one, two = torch.randint(n, (2,), generator=rng).tolist()
    structured = {
        "one token repeated": torch.full((usual,), one),
        "two tokens by turns": torch.tensor([one, two]).repeat(usual)[:usual],
        "ascending ids": torch.arange(usual) % n,
        "first and last of the vocabulary": torch.tensor([0, n - 1]).repeat(usual)[:usual],
    }
    if not brief:
        structured |= {
            "a single token": torch.tensor([one]),
            "three tokens": torch.randint(n, (min(3, usual),), generator=rng),
            "every position": torch.randint(n, (long,), generator=rng),
        }
    return structured


def _padded_ids(a: Weights, b: Weights, ids: Tensor) -> dict[str, Tensor]:
    """Tokens that end in padding, for classifiers, which read the last token that is none."""
    found = {pad for w in (a, b) if isinstance(pad := w.settings.get("pad_token_id"), int)}
    valid = sorted(pad for pad in found if 0 <= pad < vocabulary_size(a))
    return {f"padded with {pad}": torch.cat([ids[:-1], torch.tensor([pad])]) for pad in valid if len(ids) > 1}


def _with_tokens(weights: Weights, ids: Tensor, seed: int) -> Inputs:
    """These tokens, with random token types where the model has them."""
    return with_tokens(weights, random_inputs(weights, n=1, length=len(ids), seed=seed)[0], ids)


def _images(x: Tensor) -> dict[str, Tensor]:
    """Images with a structure, by label; x is a random one."""
    rows, columns = torch.meshgrid(torch.arange(x.shape[-2]), torch.arange(x.shape[-1]), indexing="ij")
    spot = torch.zeros_like(x)
    spot[..., x.shape[-2] // 2, x.shape[-1] // 2] = 5.0
    return {
        "black": torch.zeros_like(x),
        "white": torch.ones_like(x),
        "extreme pixels": 8.0 * x.sign(),
        "checkerboard": ((rows + columns) % 2 * 2.0 - 1.0).expand_as(x).clone(),
        "one bright pixel": spot,
        "ramp": (columns / columns.max().clamp(min=1) * 2 - 1).expand_as(x).clone(),
    }


@dataclass(frozen=True)
class ComparedInput:
    """One input: both outputs (flat), their largest difference and the noise floor, both relative to A's largest.

    `dtype` is the type in which both models were run: float64 where float32 gives numbers that are not finite.
    `overflow` says where the outputs of exactly one are finite, in float32 or in the types that the configs name.
    """

    probe: Probe
    a: Tensor = field(repr=False)
    b: Tensor = field(repr=False)
    difference: float
    rounding: float
    dtype: str = "float32"
    overflow: str = ""

    @property
    def ratio(self) -> float:
        return self.difference / max(self.rounding, 1e-30)

    @property
    def lost(self) -> float:
        """The share of the larger outputs of the two that rounding causes."""
        a, b = (float(x[x.isfinite()].abs().max()) if bool(x.isfinite().any()) else 0.0 for x in (self.a, self.b))
        return self.rounding * max(a, SMALLEST_SIZE) / max(a, b, SMALLEST_SIZE)

    @property
    def inputs(self) -> Inputs:
        return self.probe.inputs

    @property
    def output_index(self) -> int:
        """The index, among all outputs, at which the two differ most."""
        apart = (self.a - self.b).abs()
        return int(torch.where(torch.isnan(apart), torch.inf, apart).argmax())

    def to_dict(self) -> dict[str, object]:
        inputs = {
            key: x.tolist() if x.numel() <= MAX_PRINTED else {"shape": list(x.shape), "shown": "with --save-witness"}
            for key, x in self.inputs.items()
        }
        return {
            "input": inputs,
            "kind": self.probe.label,
            "place": self.output_index,
            "output_a": float(self.a[self.output_index]),
            "output_b": float(self.b[self.output_index]),
            "difference": self.difference,
            "rounding": self.rounding,
            "run_in": self.dtype,
        }

    @property
    def finite(self) -> tuple[bool, bool]:
        a, b = (bool(x.isfinite().all()) for x in (self.a, self.b))
        return a, b


@dataclass(frozen=True)
class OutputComparison:
    """Two models and the precision whose rounding gives the noise floor. Models are loaded for each comparison, so
    that none is in memory between them.

    `products_of`: outputs are hidden states of this size, which are known up to a map of the stream only; what is
    compared are their inner products, which no permutation, sign or rotation of the stream changes.
    """

    a: Weights
    b: Weights
    precision: str
    seed: int
    attention: str = "eager"
    cache: bool = False
    products_of: int = 0
    device: torch.device = CPU  # where large models run
    dtype: torch.dtype = torch.float32

    @property
    def streamed(self) -> bool:
        return Runner(self.a).streamed or Runner(self.b).streamed

    def _runner(self, weights: Weights) -> Runner:
        return Runner(weights, self.attention, self.cache, self.device, self.dtype)

    def _run(self, runner: Runner, inputs: Sequence[Inputs]) -> list[Tensor]:
        found = runner.run(inputs)
        if not self.products_of:
            return found
        return [self._inner_products(x, each) for x, each in zip(found, inputs, strict=True)]

    def _inner_products(self, states: Tensor, inputs: Inputs) -> Tensor:
        """The inner products of all states of one stream, flat. Those of a decoder come first."""
        rows = states.reshape(-1, self.products_of)
        n_first = inputs["decoder_input_ids"].shape[-1] if len(self.a.arch.streams) > 1 else len(rows)
        return torch.cat([(each @ each.mT).flatten() for each in rows.tensor_split([n_first])])

    def compare(self, probes: Sequence[Probe]) -> list[ComparedInput]:
        """Differences and noise floors. Inputs on which something is not finite are run again in float64: only there
        an overflow of a re-scaled copy and a difference can be told apart."""
        found = self._compare(probes)
        odd = [k for k, each in enumerate(found) if not (all(each.finite) and isfinite(each.rounding))]
        try:
            exact = replace(self, dtype=torch.float64)._compare([probes[k] for k in odd]) if odd else []
        except ArchitectureError:  # transformers can not run every model in float64
            exact = [found[k] for k in odd]
        for k, each in zip(odd, exact):
            found[k] = replace(each, overflow=_overflow(found[k].finite, (torch.float32, torch.float32)))
        return found if self.streamed else self._confirmed(found)

    def _confirmed(self, compared: list[ComparedInput]) -> list[ComparedInput]:
        """The same, with the noise floors of inputs that might be witnesses from more perturbed copies: where large
        numbers cancel, most copies change the outputs far less than a few do."""
        close = [k for k, each in enumerate(compared) if WITNESS_THRESHOLD < each.ratio <= CONFIRMED]
        if close:
            again = self._compare([compared[k].probe for k in close], first=EXPERT_COPIES, copies=CONFIRMING_COPIES)
            for k, each in zip(close, again):
                compared[k] = replace(compared[k], rounding=max(compared[k].rounding, each.rounding))
        return compared

    def as_named(self, compared: list[ComparedInput]) -> list[ComparedInput]:
        """The same comparisons, with the overflows of float16 where a config names it: it ends at 65504."""
        models, inputs = (self.a, self.b), [each.inputs for each in compared]
        types = self.a.dtype_run, self.b.dtype_run
        finite = [[each.finite[k] for each in compared] for k in range(2)]
        for k in range(2):
            if types[k] == torch.float16:
                runner = replace(self, dtype=types[k])._runner(models[k])
                finite[k] = [bool(x.isfinite().all()) for x in runner.run(inputs)]
        pairs = zip(compared, zip(*finite))
        return [each if each.overflow else replace(each, overflow=_overflow(pair, types)) for each, pair in pairs]

    def _compare(
        self, probes: Sequence[Probe], *, first: int = 0, copies: int = PERTURBED_COPIES
    ) -> list[ComparedInput]:
        """Differences and noise floors; the floor of an input is at least the median over these inputs, because some
        inputs hide rounding by chance. `first` is the number of the first perturbed copy, `copies` how many there are
        at most of each model."""
        inputs = [probe.inputs for probe in probes]
        outputs_a, outputs_b = (self._run(self._runner(w), inputs) for w in (self.a, self.b))
        apart = [output_difference(x, y, x) for x, y in zip(outputs_a, outputs_b)]
        floors = [0.0] * len(inputs)
        wide = None if self.dtype == torch.float64 else torch.float32
        for weights, outputs in ((self.a, outputs_a), (self.b, outputs_b)):
            units, dtype = rounding_units(weights, self.precision), wide if Runner(weights).streamed else None
            count = max(copies, EXPERT_COPIES) if weights.arch.expert_spaces else copies
            for copy in range(first, first + count):
                if any(floors) and all(d <= AGREED * floor for d, floor in zip(apart, _usual(floors))):
                    break
                runner = self._runner(perturbed(weights, units, seed=self.seed + 1 + copy, dtype=dtype))
                changed = self._run(runner, inputs)
                moved = (output_difference(x, y, z) for x, y, z in zip(outputs, changed, outputs_a))
                floors = [max(floor, each) for floor, each in zip(floors, moved)]
        name = dtype_name(self.dtype)
        return [
            ComparedInput(probe, x, y, difference, floor, name)
            for probe, x, y, difference, floor in zip(probes, outputs_a, outputs_b, apart, _usual(floors))
        ]

    def compare_as_generated(self, probes: Sequence[Probe]) -> list[ComparedInput]:
        """The same inputs in the other implementation of attention and with a cache of keys and values: some config
        keys act there alone. Without a cache, or empty, where transformers can not run both models so."""
        for cache in (True, False):
            try:
                return replace(self, attention="sdpa", cache=cache).compare(probes)
            except ArchitectureError:
                continue
        return []

    def with_row_probes(
        self, compared: list[ComparedInput], rows: Mapping[str, tuple[int, ...]]
    ) -> list[ComparedInput]:
        """The comparisons and more on the tokens and positions of these rows (by tensor, worst first): on all of the
        tokens, and on the worst alone, as others may hide it. Unchanged without rows, or where no tokens are read."""
        key = token_key(compared[0].inputs)
        if not rows or key is None:
            return compared
        shorter = min(self.a, self.b, key=_max_length)
        tokens, positions = (
            [row for name, each in rows.items() if self.a.arch.shapes.get(name, (None,))[0] == size for row in each]
            for size in (vocabulary_size(shorter), max_length(shorter))
        )
        usual = min(USUAL_LENGTH, _max_length(shorter))
        length = max(usual, min(max(positions, default=0) + 1, affordable_length(shorter)))
        drawn = random_inputs(shorter, n=1, length=length, seed=self.seed)[0]
        for chosen in (tokens, tokens[:1]) if tokens else (drawn[key].flatten(0, -2)[0].tolist(),):
            inputs = with_tokens(shorter, drawn, torch.tensor(chosen).repeat(length)[:length])
            compared = self._with_probe(compared, Probe("tokens whose rows differ most", inputs))
        return compared

    def with_vocabulary(self, compared: list[ComparedInput]) -> list[ComparedInput]:
        """The comparisons and one more: the worst of texts that together hold every token, or as many as can be run in
        the time of one long text. A change may be seen by a single token."""
        if token_key(compared[0].inputs) is None:
            return compared
        texts = vocabulary_inputs(min(self.a, self.b, key=_max_length), seed=self.seed)
        found = [Probe("tokens of the whole vocabulary", inputs) for inputs in texts]
        outputs = [self._run(self._runner(w), [probe.inputs for probe in found]) for w in (self.a, self.b)]
        differences = [output_difference(x, y, x) for x, y in zip(*outputs)]
        return self._with_probe(compared, found[max(range(len(found)), key=differences.__getitem__)])

    def with_search(self, compared: list[ComparedInput]) -> list[ComparedInput]:
        """The comparisons and one more: the best of many variants; each round starts from the best input so far."""
        rng = torch.Generator().manual_seed(self.seed)
        runners, start = (self._runner(self.a), self._runner(self.b)), worst_input(compared)
        most, best = start.difference, start.probe
        for _ in range(1 if self.streamed else SEARCH_ROUNDS):
            variants = [_variant(best, self.a, rng) for _ in range(SEARCH_VARIANTS)]
            outputs = [self._run(runner, [variant.inputs for variant in variants]) for runner in runners]
            for variant, x, y in zip(variants, *outputs):
                if (difference := output_difference(x, y, x)) > most:
                    most, best = difference, variant
        return compared if best is start.probe else self._with_probe(compared, best)

    def _with_probe(self, compared: list[ComparedInput], probe: Probe) -> list[ComparedInput]:
        """One more comparison. The noise floor is estimated on a second input, the reference input, as well."""
        reference = worst_input(compared).probe
        return [*compared, *self.compare([probe, reference])[:1]]


def _usual(floors: Sequence[float]) -> list[float]:
    """The floors, of which none is below their median."""
    known = sorted(filter(isfinite, floors)) or [0.0]
    return [max(floor, known[len(known) // 2]) for floor in floors]


def _overflow(finite: tuple[bool, bool], types: tuple[torch.dtype, torch.dtype]) -> str:
    """Which model has outputs that are not finite where those of the other are; empty where both or none has."""
    if finite[0] == finite[1]:
        return ""
    lost, kept = (f"{'AB'[finite.index(each)]} in {dtype_name(types[finite.index(each)])}" for each in (False, True))
    return f"the outputs of {lost} are not finite, where those of {kept} are"


def worst_input(compared: list[ComparedInput]) -> ComparedInput:
    """The input on which the outputs differ most relative to the noise floor."""
    return max(compared, key=lambda c: c.ratio)


def find_witness(compared: list[ComparedInput]) -> ComparedInput | None:
    """The worst input, if its difference is far above the noise floor. Where rounding destroys the outputs, none; and
    none where outputs of one model are not finite in float32 alone: the other may be the same function with another
    scale inside."""
    usable = [c for c in compared if c.lost <= MAX_ROUNDING and (isfinite(c.difference) or c.dtype == "float64")]
    worst = worst_input(usable) if usable else None
    return worst if worst and worst.ratio > WITNESS_THRESHOLD else None
