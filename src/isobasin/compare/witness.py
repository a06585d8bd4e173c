"""Looking for an input on which two models differ by more than rounding can explain."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.compare.outputs import Bench, Comparison
from isobasin.compare.probes import Probe, mutated, of_words
from isobasin.running import Inputs

CLEAR = 10.0  # multiples of what rounding does; copies stay below 3
DOUBTLESS = 30.0  # the same, where no element is looked for any further
ROUNDS, VARIANTS = 12, 4
SHOWN = 4096  # numbers of an input that are printed


@dataclass(frozen=True)
class Witness:
    """An input and the two outputs on it; run it through both models and see."""

    label: str
    inputs: Inputs
    a: Tensor
    b: Tensor
    difference: float
    rounding: float

    @property
    def place(self) -> int:
        """The output (all of them, flat) at which the two differ most."""
        apart = (self.a - self.b).abs()
        return int(torch.where(torch.isnan(apart), torch.inf, apart).argmax())

    @property
    def facts(self) -> dict[str, object]:
        shown = {
            key: x.tolist() if x.numel() <= SHOWN else {"shape": list(x.shape), "shown": "with --save-witness"}
            for key, x in self.inputs.items()
        }
        return {
            "input": shown,
            "kind": self.label,
            "place": self.place,
            "output_a": float(self.a[self.place]),
            "output_b": float(self.b[self.place]),
            "difference": self.difference,
            "rounding": self.rounding,
        }


def found_witness(compared: list[Comparison]) -> Witness | None:
    """The input on which the models differ most beyond rounding, if it is clear enough."""
    best = max(compared, key=lambda c: c.ratio)
    if not best.ratio > CLEAR:
        return None
    return Witness(best.probe.label, best.probe.inputs, best.a, best.b, best.difference, best.rounding)


def beyond_doubt(compared: list[Comparison]) -> bool:
    return max(c.ratio for c in compared) > DOUBTLESS


def with_words(bench: Bench, compared: list[Comparison], words: Sequence[int], *, seed: int) -> list[Comparison]:
    """The comparisons, with one more on these words; the same where there are none, or the models read no words."""
    if not words or "input_ids" not in compared[0].probe.inputs:
        return compared
    return _joined(bench, compared, of_words(bench.a.weights, bench.b.weights, words, seed=seed))


def searched(bench: Bench, compared: list[Comparison], *, seed: int) -> list[Comparison]:
    """The comparisons again, with one more: the best of many variants, each round starting from the best so far."""
    rng = torch.Generator().manual_seed(seed)
    start = max(compared, key=lambda c: c.ratio)
    best: tuple[float, Probe] = (start.difference, start.probe)
    for _ in range(1 if bench.streams else ROUNDS):
        tried = [mutated(best[1], bench.a.weights, rng) for _ in range(VARIANTS)]
        for difference, probe in zip(bench.differences(tried), tried):
            if difference > best[0]:
                best = (difference, probe)
    if best[1] is start.probe:
        return compared
    return _joined(bench, compared, best[1])


def _joined(bench: Bench, compared: list[Comparison], probe: Probe) -> list[Comparison]:
    """One more comparison. Floors need company: an input is also held against that of another one."""
    company = max(compared, key=lambda c: c.ratio).probe
    return [*compared, *bench.compare([probe, company])[:1]]
