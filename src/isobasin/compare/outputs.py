"""What two models say on the same inputs, beside how much of a difference rounding alone would make."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from isobasin.compare.probes import Probe
from isobasin.compare.rounding import disturbed, units
from isobasin.compare.streamed import streamed_module
from isobasin.match.memory import give_back
from isobasin.running import OUTPUTS, Inputs, module_of
from isobasin.weights import Weights

HELD = 40_000_000  # weights up to which a model is held while it runs; larger ones are streamed
DRAWS = 2  # disturbed copies of each model


@dataclass(frozen=True)
class Comparison:
    """One input: both outputs, their largest difference and the largest that rounding made, relative to A's size."""

    probe: Probe
    a: Tensor
    b: Tensor
    difference: float
    rounding: float

    @property
    def ratio(self) -> float:
        return self.difference / max(self.rounding, 1e-30)


@dataclass(frozen=True)
class Runner:
    """A model, ready to be run: held, or streamed where it is large."""

    weights: Weights

    @property
    def streams(self) -> bool:
        return self.weights.n_params > HELD and self.weights.arch.family != "isobasin"

    @cached_property
    def module(self) -> nn.Module:
        return streamed_module(self.weights) if self.streams else module_of(self.weights)

    def say(self, inputs: Sequence[Inputs]) -> list[Tensor]:
        """Everything the model puts out, flat, per input. A streamed model takes inputs of one shape together."""
        with torch.no_grad():
            if not self.streams or self._alone:
                return [self._run(one)[0] for one in inputs]
            said: dict[int, Tensor] = {}
            for chosen in _alike(inputs):
                joined = {key: torch.cat([inputs[i][key] for i in chosen]) for key in inputs[chosen[0]]}
                said |= dict(zip(chosen, self._run(joined)))
                give_back()
        return [said[i] for i in range(len(inputs))]

    @property
    def _alone(self) -> bool:
        """A classifier without a padding token refuses several inputs at once."""
        return (
            any(name.startswith("score") for name in self.weights) and self.weights.config.get("pad_token_id") is None
        )

    def _run(self, inputs: Inputs) -> Tensor:
        if self.weights.arch.family == "isobasin":
            logits: Tensor = self.module(*inputs.values())
            return logits.flatten(1)
        said = self.module(**inputs)
        return torch.cat([said[name].flatten(1) for name in OUTPUTS if said.get(name) is not None], dim=1)


def _alike(inputs: Sequence[Inputs]) -> list[list[int]]:
    groups: dict[tuple[tuple[str, torch.Size], ...], list[int]] = {}
    for number, one in enumerate(inputs):
        groups.setdefault(tuple((key, x.shape) for key, x in one.items()), []).append(number)
    return list(groups.values())


@dataclass(frozen=True)
class Bench:
    """A and B, and copies of each disturbed by the rounding of its type."""

    a: Runner
    b: Runner
    shaken_a: tuple[Runner, ...]
    shaken_b: tuple[Runner, ...]

    @staticmethod
    def of(a: Weights, b: Weights, *, precision: str, seed: int) -> "Bench":
        def shaken(runner: Runner) -> tuple[Runner, ...]:
            sizes, dtype = units(runner.weights, precision), torch.float32 if runner.streams else None
            return tuple(
                Runner(disturbed(runner.weights, sizes, seed=seed + 1 + draw, dtype=dtype)) for draw in range(DRAWS)
            )

        return Bench(Runner(a), Runner(b), shaken(Runner(a)), shaken(Runner(b)))

    @property
    def streams(self) -> bool:
        return self.a.streams or self.b.streams

    def differences(self, probes: Sequence[Probe]) -> list[float]:
        inputs = [probe.inputs for probe in probes]
        return [_apart(x, y, x) for x, y in zip(self.a.say(inputs), self.b.say(inputs))]

    def compare(self, probes: Sequence[Probe]) -> list[Comparison]:
        """Differences and floors; an input that happens to hide rounding is held against the usual floor."""
        inputs = [probe.inputs for probe in probes]
        said_a, said_b = self.a.say(inputs), self.b.say(inputs)
        floors = [0.0] * len(inputs)
        for said, runners in ((said_a, self.shaken_a), (said_b, self.shaken_b)):
            for runner in runners:
                moved = (_apart(x, y, z) for x, y, z in zip(said, runner.say(inputs), said_a))
                floors = [max(floor, far) for floor, far in zip(floors, moved)]
        usual = _median(floor for floor in floors)
        return [
            Comparison(probe, x, y, _apart(x, y, x), max(floor, usual))
            for probe, x, y, floor in zip(probes, said_a, said_b, floors)
        ]


def _apart(x: Tensor, y: Tensor, scale: Tensor) -> float:
    """max |x − y| / max |scale|; infinite where only one of the two is a number."""
    finite = torch.isfinite(x) & torch.isfinite(y)
    if bool((torch.isfinite(x) != torch.isfinite(y)).any()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    size = scale[torch.isfinite(scale)].abs().max() if bool(torch.isfinite(scale).any()) else torch.ones(())
    return float((x - y)[finite].abs().max() / size.clamp(min=1e-30))


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
