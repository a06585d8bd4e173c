"""Campaign: canonical points and fingerprints of copies of random models, and every command behind gains of zero.

    python tests/campaigns/canonical.py -o results/reliability/canonical.json

Random models of our own (every switch) and the tiny models of every family are scrambled. The canonical point of a copy
must be that of the model, or be reported as not unique; its fingerprint must not compare as different. Models with
gains of exactly zero, or far below the others, must come through every operation with their function.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "compare")]

import torch  # noqa: E402
from compared_models import held, noisy, outputs, own_model, scrambled, scrambled_file, stored, tiny_model  # noqa: E402

import isobasin as ib  # noqa: E402
import tiny  # noqa: E402
from isobasin.compare.canonical import canonical_point  # noqa: E402
from isobasin.compare.fingerprint import compare_fingerprints, entry_errors, fingerprint  # noqa: E402
from isobasin.errors import ArchitectureError  # noqa: E402
from isobasin.model import ModelConfig  # noqa: E402
from isobasin.weights import Weights  # noqa: E402

SAME = {torch.float64: 1e-7, torch.float32: 1e-3}  # relative difference of two canonical points
FUNCTION = 1e-5  # relative change of the outputs by a transform whose result is stored in float32


# -- models -----------------------------------------------------------------------------------------------------------


def random_config(seed: int) -> ModelConfig:
    """Any switches; heads as wide as the stream, one head, few tokens."""
    rng = random.Random(seed)
    while True:
        try:
            return ModelConfig(**_settings(rng))
        except ArchitectureError:  # switches that do not go together
            continue


def _settings(rng: random.Random) -> dict[str, Any]:
    width, n_heads = rng.choice([8, 12, 15]), rng.choice([1, 1, 2, 3, 4])
    positions = rng.choice(["none", "sinusoidal", "learned", "rope", "alibi"])
    d_head = rng.choice([2, 4, 6, width // n_heads // 2 * 2, width]) or 2
    rotary = {"rotary_dims": rng.choice([r for r in (2, 4, 6) if r <= d_head])} if positions == "rope" else {}
    ends = rng.choice([{}, {"tied": True}, {"n_classes": 3}])
    return {
        "d_model": width,
        "n_layers": rng.choice([1, 2]),
        "n_heads": n_heads,
        "n_kv_heads": rng.choice([k for k in range(1, n_heads + 1) if n_heads % k == 0]),
        "d_head": d_head,
        "d_ff": rng.randint(1, 14),
        "n_positions": rng.randint(4, 12),
        "positions": positions,
        "norm": rng.choice(["layer", "rms"]),
        "post_norm": rng.random() < 0.5,
        "feed_forward": rng.choice(["gelu", "swiglu"]),
        "causal": rng.random() < 0.5,
        "bias": rng.random() < 0.5,
        "d_vocab": rng.choice([19, 19, 19, 5]),
        "norm_eps": rng.choice([1e-3, 1e-5]),
        "rotary_layout": rng.choice(["half", "interleaved"]),
        **rotary,
        **ends,
    }


def inputs_of(weights: Weights, name: str = "") -> dict[str, torch.Tensor]:
    if weights.arch.family != "isobasin":
        return tiny.case(name).inputs(0)
    size, length = weights.config["d_vocab"], weights.config["n_positions"]
    return {"input_ids": torch.arange(2 * length).reshape(2, length) * 7 % size}


def output_change(a: Weights, b: Weights, inputs: dict[str, torch.Tensor]) -> float:
    """Relative to the largest output of A; absolute where A has no outputs but rounding."""
    x, y = outputs(a, inputs), outputs(b, inputs)
    largest = float(x.abs().max())
    change = float((x - y).abs().max()) / (largest if largest > FUNCTION else 1.0)
    return change if math.isfinite(change) else math.inf


# -- canonical points and fingerprints --------------------------------------------------------------------------------


def point_difference(found: Weights, expected: Weights) -> float:
    """The largest ‖found − expected‖ / ‖expected‖ over tensors; below a thousandth of the usual size, of that."""
    floating = [name for name in expected if expected[name].is_floating_point()]
    total = sum(float(expected[n].double().square().sum()) for n in floating)
    usual = (total / sum(expected[n].numel() for n in floating)) ** 0.5
    return max(
        float((found[n].double() - expected[n].double()).norm())
        / max(float(expected[n].double().norm()), 1e-3 * usual * expected[n].numel() ** 0.5)
        for n in floating
    )


@dataclass(frozen=True)
class PointResult:
    """One model: the largest difference of a copy's canonical point, and what was said about it."""

    name: str
    dtype: str
    difference: float
    function: float
    fingerprint_steps: int
    fingerprint_different: bool
    doubts: tuple[str, ...]
    control: float  # difference of another model's point
    control_different: bool

    @property
    def wrong(self) -> bool:
        """Another point without a word, a copy with another fingerprint, or a change of the function."""
        moved = self.difference > SAME[getattr(torch, self.dtype)] and not self.doubts
        return moved or self.fingerprint_different or self.function > FUNCTION


def try_points(name: str, weights: Weights, copies: int) -> PointResult:
    dtype, inputs = weights.dtype, inputs_of(weights, name)
    point = canonical_point(weights)
    mine, errors = fingerprint(weights), entry_errors(weights)
    expected = held(point.transform.apply(weights))
    difference, steps, different, doubts = 0.0, 0, False, {str(d) for d in point.doubts}
    for seed in range(copies):
        copy = scrambled(weights, seed) if dtype == torch.float64 else scrambled_file(weights, dtype, seed)
        found = canonical_point(copy)
        doubts |= {str(d) for d in found.doubts}
        difference = max(difference, point_difference(held(found.transform.apply(copy)), expected))
        result = compare_fingerprints(mine, fingerprint(copy), errors)
        steps, different = max(steps, *result.steps), different or result.equal is False
    other = noisy(weights, 0.1)
    control = point_difference(held(canonical_point(other).transform.apply(other)), expected)
    apart = compare_fingerprints(mine, fingerprint(other), errors).equal is False
    change = output_change(weights, expected, inputs)
    word = str(dtype).removeprefix("torch.")
    return PointResult(name, word, difference, change, steps, different, tuple(sorted(doubts)), control, apart)


def models(own: int, families: list[str]) -> Iterator[tuple[str, Weights]]:
    for seed in range(own):
        yield f"own {seed}", own_model(random_config(seed), seed, torch.float64 if seed % 2 else torch.float32)
    for name in families:
        yield name, tiny_model(name)


# -- gains of zero ----------------------------------------------------------------------------------------------------

SIZES = {"d_model": 12, "n_layers": 2, "n_heads": 2, "d_head": 4, "d_ff": 10, "d_vocab": 17, "n_positions": 9}
OWN: dict[str, dict[str, Any]] = {
    "rms": {"norm": "rms", "positions": "rope", "feed_forward": "swiglu", "bias": False},
    "rms tied": {"norm": "rms", "positions": "rope", "feed_forward": "swiglu", "bias": False, "tied": True},
    "layer": {"positions": "learned"},
    "layer no biases": {"positions": "learned", "bias": False},
    "layer tied": {"positions": "learned", "tied": True},
    "layer post-norm": {"positions": "learned", "post_norm": True},
    "rms post-norm": {"norm": "rms", "positions": "none", "post_norm": True},
}
FAMILIES = ("gpt2-lm-untied", "gpt2-lm-tied", "bert-masked-lm-tied", "vit-no-qkv-bias", "llama-gqa")
PLACES: dict[str, tuple[str, Any]] = {
    "one": ("first", [3]),
    "two": ("first", [1, 5]),
    "all of a norm": ("first", slice(None)),
    "one of the last norm": ("last", [3]),
    "all of the last norm": ("last", slice(None)),
    "two of every norm": ("all", [2, 7]),
}


def zero_model(name: str, seed: int = 0) -> Weights:
    return own_model(ModelConfig(**SIZES | OWN[name]), seed) if name in OWN else tiny_model(name, seed)


def with_gains(weights: Weights, which: str, places: Any, value: float) -> Weights:
    """A copy with these gains of the first, the last or all norms at this value."""
    norms = list(weights.arch.norms.values())
    chosen = {"first": norms[:1], "last": norms[-1:], "all": norms}[which]
    changes = {}
    for norm in chosen:
        changes[norm.gain] = weights[norm.gain].clone()
        changes[norm.gain][places] = value
    return stored(held(weights, changes), torch.float32)


@dataclass
class ZeroResult:
    """What each operation did on one model: empty where it was right."""

    model: str
    place: str
    value: float
    only: tuple[str, ...] = ()  # operations to try; empty: all
    failures: dict[str, str] = field(default_factory=dict)
    tried: int = 0

    def attempt(self, label: str, action: Callable[[], str]) -> None:
        if self.only and label not in self.only:
            return
        self.tried += 1
        try:
            problem = action()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self.failures[label] = problem[:200]


def try_zero(name: str, place: str, value: float, only: tuple[str, ...] = ()) -> ZeroResult:
    """Every operation on a model with such gains, on a scrambled copy, and against models without them."""
    result, base, other = ZeroResult(name, place, value, only), zero_model(name), zero_model(name, 1)
    which, places = PLACES[place]
    a = with_gains(base, which, places, value)
    elsewhere = with_gains(other, which, [4], value)
    inputs = inputs_of(a, name)
    copy = scrambled_file(a)
    exact = value == 0  # far below the others, the weights behind a gain are lost in the rounding of the folded file

    def kept(found: Weights, expected: Weights) -> str:
        large = max(float(found[n].abs().max()) for n in found if found[n].is_floating_point())
        change = output_change(expected, found, inputs)
        return (
            "" if change <= FUNCTION and large < 1e4 else f"outputs change by {change:.1e}, largest weight {large:.1e}"
        )

    def aligned(b: Weights, to: Weights, most: float = math.inf) -> str:
        found = ib.align(b, to=to)
        far = "" if found.distance_after <= most else f"distance {found.distance_after:.1e}"
        return kept(stored(found.transform.apply(b), torch.float32), b) or far

    def there_and_back() -> str:
        drawn = ib.scramble(a, seed=1)
        back = stored(drawn.inverse().apply(drawn.apply(a)), torch.float32)
        return kept(back, a) or ("" if not exact or point_difference(back, a) < 1e-4 else "other weights come back")

    def merged(b: Weights) -> Weights:
        return stored(ib.merge([a, b], matcher=ib.WeightMatching()).weights, torch.float32)

    def verdict(b: Weights, *right: str) -> str:
        found = ib.equivalent(a, b)
        return "" if found.answer in right else str(found)

    def one_point() -> str:
        points = [(canonical_point(m), m) for m in (a, copy)]
        first, second = (stored(p.transform.apply(m), torch.float32) for p, m in points)
        same = point_difference(second, first) <= SAME[torch.float32] or not all(p.unique for p, _ in points)
        return kept(first, a) or ("" if same else f"another point, by {point_difference(second, first):.1e}")

    def one_fingerprint() -> str:
        both = [max(pair) for pair in zip(entry_errors(a), entry_errors(copy), strict=True)]
        return "different" if compare_fingerprints(fingerprint(a), fingerprint(copy), both).equal is False else ""

    result.attempt("scramble", lambda: kept(copy, a))
    result.attempt("inverse", there_and_back)
    result.attempt("align copy", lambda: aligned(copy, a, 1e-4 if exact else math.inf))
    result.attempt("align to copy", lambda: aligned(a, copy))
    result.attempt("align, B without zeros", lambda: aligned(base, a))
    result.attempt("align, A without zeros", lambda: aligned(a, base))
    result.attempt("align, zeros elsewhere", lambda: aligned(elsewhere, a))
    result.attempt("equal, copy", lambda: verdict(copy, "same", *(() if exact else ("undecided",))))
    result.attempt("equal, other", lambda: verdict(elsewhere, "different"))
    result.attempt(
        "distance", lambda: "" if ib.distance(a, copy, null_samples=2).score > 0.999 else "score below 0.999"
    )
    result.attempt("merge copy", lambda: kept(merged(copy), a) if exact else "")
    result.attempt("merge other", lambda: kept(merged(elsewhere), merged(elsewhere)))
    result.attempt("canonical", one_point)
    result.attempt("fingerprint", one_fingerprint)
    result.attempt("check", lambda: "" if ib.check(a).ok else "not ok")
    return result


# -- the campaign -----------------------------------------------------------------------------------------------------


def summary(points: list[PointResult], zeros: list[ZeroResult]) -> dict[str, Any]:
    table = {}
    for kind in ("own float64", "own float32", "families"):
        some = [p for p in points if (f"own {p.dtype}" if p.name.startswith("own") else "families") == kind]
        sure = [p.difference for p in some if not p.doubts]
        table[kind] = {
            "models": len(some),
            "wrong": sum(p.wrong for p in some),
            "reported as not unique": sum(bool(p.doubts) for p in some),
            "of these with another point": sum(p.difference > SAME[getattr(torch, p.dtype)] for p in some if p.doubts),
            "largest difference of the others": max(sure, default=0.0),
            "largest fingerprint step": max((p.fingerprint_steps for p in some), default=0),
            "controls with the same point": sum(p.control <= SAME[getattr(torch, p.dtype)] for p in some),
            "controls with the same fingerprint": sum(not p.control_different for p in some),
        }
    failed = [{"model": z.model, "place": z.place, "gain": z.value, **z.failures} for z in zeros if z.failures]
    return {
        "points": table,
        "wrong": [vars(p) for p in points if p.wrong],
        "gains of zero": {"models": len(zeros), "operations": sum(z.tried for z in zeros), "failures": failed},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=360, help="random models of our own")
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--values", default="0,1e-10,1e-42", help="gains to try")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    families = [case.name for case in tiny.CASES]
    points = [try_points(name, weights, asked.copies) for name, weights in models(asked.models, families)]
    zeros = [
        try_zero(name, place, value)
        for value in map(float, asked.values.split(","))
        for name in (*OWN, *(FAMILIES if value == 0 else ()))
        for place in (PLACES if value == 0 and name in OWN else ("one", "two of every norm"))
    ]
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(summary(points, zeros), indent=1) + "\n")
    print(asked.output.read_text())


if __name__ == "__main__":
    main()
