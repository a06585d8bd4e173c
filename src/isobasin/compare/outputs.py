"""Comparison of outputs: both models run on the same inputs, and the differences that rounding alone causes.

Inputs are random ones, ones with a structure that random inputs never have, and variants found by a search. An input on
which the outputs differ by far more than rounding explains is a witness that the functions differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isobasin.compare.residual import perturbed, rounding_units
from isobasin.errors import ArchitectureError
from isobasin.runtime import (
    Inputs,
    max_length,
    module_of,
    places,
    pretrained_class,
    random_inputs,
    run_module,
    vocabulary_size,
)
from isobasin.views import trim_heap
from isobasin.weights import Weights

WITNESS_THRESHOLD = 10.0  # multiples of the noise floor of the outputs; measured: copies stay below 3
CERTAIN_THRESHOLD = 30.0  # the same; above it large unrelated models are not aligned
MAX_LOADED_PARAMETERS = 40_000_000  # larger models are streamed: each module's weights are read when it runs
PERTURBED_COPIES = 2  # per model
SEARCH_ROUNDS, SEARCH_VARIANTS = 12, 4
MAX_PRINTED = 4096  # numbers of an input in JSON
USUAL_LENGTH, MAX_LENGTH = 16, 256  # tokens
MAX_OPERATIONS = 2.0e11  # multiplications that one long input may cost


@dataclass(frozen=True)
class Probe:
    """One input and a label that describes it."""

    label: str
    inputs: Inputs


def probes(a: Weights, b: Weights, *, seed: int, brief: bool = False) -> list[Probe]:
    """The inputs on which both models are run; `brief` uses a single sequence length."""
    shorter = min(a, b, key=_max_length)
    drawn = random_inputs(shorter, n=3, length=min(USUAL_LENGTH, _max_length(shorter)), seed=seed)
    if "pixel_values" in drawn[0]:
        structured = {label: drawn[0] | {"pixel_values": x} for label, x in _images(drawn[0]["pixel_values"]).items()}
    else:
        structured = {k: _with_tokens(shorter, ids, seed) for k, ids in _token_ids(shorter, seed, brief).items()}
    return [*(Probe("random", each) for each in drawn), *(Probe(label, each) for label, each in structured.items())]


def _variant(probe: Probe, weights: Weights, rng: torch.Generator) -> Probe:
    """The same input with a quarter of its tokens replaced, or with another contrast and noise."""
    inputs = dict(probe.inputs)
    if "pixel_values" in inputs:
        x = inputs["pixel_values"]
        scale = float(torch.exp2(2 * torch.rand((), generator=rng) - 1))
        inputs["pixel_values"] = scale * x + 0.3 * torch.randn(x.shape, generator=rng)
    else:
        ids = inputs["input_ids"].clone()
        places = torch.randint(ids.shape[1], (max(1, ids.shape[1] // 4),), generator=rng)
        ids[0, places] = torch.randint(vocabulary_size(weights) or 2, places.shape, generator=rng)
        inputs["input_ids"] = ids
    return Probe(f"{probe.label.removesuffix(', varied')}, varied", inputs)


def _max_length(weights: Weights) -> int:
    return min(MAX_LENGTH, max_length(weights) or MAX_LENGTH)


def _token_ids(weights: Weights, seed: int, brief: bool) -> dict[str, Tensor]:
    """Tokens with a structure, by label."""
    most = max(USUAL_LENGTH, int(MAX_OPERATIONS / max(1, weights.n_params) / 2))
    usual, long = min(USUAL_LENGTH, _max_length(weights)), min(_max_length(weights), most)
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


def _with_tokens(weights: Weights, ids: Tensor, seed: int) -> Inputs:
    """These tokens, with random token types where the model has them."""
    return random_inputs(weights, n=1, length=len(ids), seed=seed)[0] | {"input_ids": ids[None]}


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
class Runner:
    """A model that is ready to run: loaded as a whole, or streamed where it is large."""

    weights: Weights

    @property
    def streamed(self) -> bool:
        return self.weights.n_params > MAX_LOADED_PARAMETERS and not self.weights.family.own

    @cached_property
    def module(self) -> nn.Module:
        return _streamed_module(self.weights) if self.streamed else module_of(self.weights)

    def run(self, inputs: Sequence[Inputs]) -> list[Tensor]:
        """All outputs of the model, flat, per input. A streamed model runs inputs of the same shape as one batch."""
        # transformers refuses several inputs at once for a classifier without a padding token.
        is_classifier = any(name.startswith("score") for name in self.weights)
        single = is_classifier and self.weights.config.get("pad_token_id") is None
        with torch.no_grad():
            if not self.streamed or single:
                return [run_module(self.weights, self.module, each)[0] for each in inputs]
            found: dict[int, Tensor] = {}
            by_shape: dict[tuple[tuple[str, torch.Size], ...], list[int]] = {}
            for number, each in enumerate(inputs):
                by_shape.setdefault(tuple((key, x.shape) for key, x in each.items()), []).append(number)
            for chosen in by_shape.values():
                batch = {key: torch.cat([inputs[i][key] for i in chosen]) for key in inputs[chosen[0]]}
                found |= dict(zip(chosen, run_module(self.weights, self.module, batch)))
                trim_heap()
        return [found[i] for i in range(len(inputs))]


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` gives tensors without storage, so weights take no memory; buffers that are computed do exist."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = dict(kwargs or {})
        if func is torch.empty:
            settings["device"] = "meta"
        return func(*args, **settings)


def _streamed_module(weights: Weights) -> nn.Module:
    """The transformers class that config.json names, in float32; hooks read the weights of a module before it runs and
    drop them afterwards."""
    kind, config, options = pretrained_class(weights)
    with _EmptyOnMeta(), torch.random.fork_rng(devices=[]):
        model: nn.Module = kind._from_config(config, attn_implementation="eager", dtype=torch.float32, **options)
    model.config.use_cache = False  # type: ignore[union-attr]
    model.requires_grad_(False)
    sources = _source_tensors(weights, model)
    for prefix, module in model.named_modules():
        keys = [key for key, parameter in module._parameters.items() if parameter is not None]
        names = {key: sources[f"{prefix}.{key}" if prefix else key] for key in keys}
        if names:
            module.register_forward_pre_hook(partial(_load_parameters, weights, names))
            module.register_forward_hook(_drop_parameters)
    return model.eval()


def _source_tensors(weights: Weights, model: nn.Module) -> dict[str, str]:
    """The tensor of the checkpoint for every parameter of the module; tied parameters share one."""
    known = {memory: name for name, memory in places(weights, model).items()}
    named = dict(model.named_parameters(remove_duplicate=False))
    by_identity = {id(named[memory]): name for memory, name in known.items() if memory in named}
    found = {}
    for memory, parameter in named.items():
        name = known.get(memory) or by_identity.get(id(parameter)) or weights.arch.aliases.get(memory)
        if name is None:
            raise ArchitectureError(f"{memory}: transformers expects this tensor, the checkpoint does not have it")
        found[memory] = name
    return found


def _load_parameters(weights: Weights, names: dict[str, str], module: nn.Module, _: Any) -> None:
    for key, name in names.items():
        module._parameters[key] = nn.Parameter(weights[name].to(torch.float32), requires_grad=False)


def _drop_parameters(module: nn.Module, _: Any, __: Any) -> None:
    for key, loaded in module._parameters.items():
        if loaded is not None:
            module._parameters[key] = nn.Parameter(torch.empty_like(loaded, device="meta"), requires_grad=False)


@dataclass(frozen=True)
class ComparedInput:
    """One input: both outputs (flat), their largest difference and the noise floor, both relative to A's largest."""

    probe: Probe
    a: Tensor = field(repr=False)
    b: Tensor = field(repr=False)
    difference: float
    rounding: float

    @property
    def ratio(self) -> float:
        return self.difference / max(self.rounding, 1e-30)

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
        }


@dataclass(frozen=True)
class OutputComparison:
    """Two models and the precision whose rounding gives the noise floor. Models are loaded for each comparison, so
    that none is in memory between them."""

    a: Weights
    b: Weights
    precision: str
    seed: int

    @property
    def streamed(self) -> bool:
        return Runner(self.a).streamed or Runner(self.b).streamed

    def compare(self, probes: Sequence[Probe]) -> list[ComparedInput]:
        """Differences and noise floors; the floor of an input is at least the median over these inputs, because some
        inputs hide rounding by chance."""
        inputs = [probe.inputs for probe in probes]
        outputs_a, outputs_b = Runner(self.a).run(inputs), Runner(self.b).run(inputs)
        floors = [0.0] * len(inputs)
        for weights, outputs in ((self.a, outputs_a), (self.b, outputs_b)):
            units, dtype = rounding_units(weights, self.precision), torch.float32 if Runner(weights).streamed else None
            for copy in range(PERTURBED_COPIES):
                runner = Runner(perturbed(weights, units, seed=self.seed + 1 + copy, dtype=dtype))
                moved = (_difference(x, y, z) for x, y, z in zip(outputs, runner.run(inputs), outputs_a))
                floors = [max(floor, each) for floor, each in zip(floors, moved)]
        usual = sorted(floors)[len(floors) // 2]
        return [
            ComparedInput(probe, x, y, _difference(x, y, x), max(floor, usual))
            for probe, x, y, floor in zip(probes, outputs_a, outputs_b, floors)
        ]

    def with_token_probe(self, compared: list[ComparedInput], tokens: Sequence[int]) -> list[ComparedInput]:
        """The comparisons and one more on these tokens; unchanged where there are none or the models read no tokens."""
        if not tokens or "input_ids" not in compared[0].inputs:
            return compared
        shorter = min(self.a, self.b, key=_max_length)
        usual = min(USUAL_LENGTH, _max_length(shorter))
        ids = torch.tensor(list(tokens)).repeat(usual)[:usual] % (vocabulary_size(shorter) or 2)
        probe = Probe("tokens whose rows differ most", _with_tokens(shorter, ids, self.seed))
        return self._with_probe(compared, probe)

    def with_search(self, compared: list[ComparedInput]) -> list[ComparedInput]:
        """The comparisons and one more: the best of many variants; each round starts from the best input so far."""
        rng = torch.Generator().manual_seed(self.seed)
        runners, start = (Runner(self.a), Runner(self.b)), worst_input(compared)
        most, best = start.difference, start.probe
        for _ in range(1 if self.streamed else SEARCH_ROUNDS):
            variants = [_variant(best, self.a, rng) for _ in range(SEARCH_VARIANTS)]
            outputs = [runner.run([variant.inputs for variant in variants]) for runner in runners]
            for variant, x, y in zip(variants, *outputs):
                if (difference := _difference(x, y, x)) > most:
                    most, best = difference, variant
        return compared if best is start.probe else self._with_probe(compared, best)

    def _with_probe(self, compared: list[ComparedInput], probe: Probe) -> list[ComparedInput]:
        """One more comparison. The noise floor is estimated on a second input, the reference input, as well."""
        reference = worst_input(compared).probe
        return [*compared, *self.compare([probe, reference])[:1]]


def _difference(x: Tensor, y: Tensor, scale: Tensor) -> float:
    """max |x − y| / max |scale|; infinite where exactly one of the two is finite."""
    finite = torch.isfinite(x) & torch.isfinite(y)
    if bool((torch.isfinite(x) != torch.isfinite(y)).any()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    size = scale[torch.isfinite(scale)].abs().max() if bool(torch.isfinite(scale).any()) else torch.ones(())
    return float((x - y)[finite].abs().max() / size.clamp(min=1e-30))


def worst_input(compared: list[ComparedInput]) -> ComparedInput:
    """The input on which the outputs differ most relative to the noise floor."""
    return max(compared, key=lambda c: c.ratio)


def find_witness(compared: list[ComparedInput]) -> ComparedInput | None:
    """The worst input, if its difference is far above the noise floor."""
    worst = worst_input(compared)
    return worst if worst.ratio > WITNESS_THRESHOLD else None
