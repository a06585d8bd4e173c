"""Random models, scrambled or changed: no wrong verdict. 300 cases in `make test-all`, a few in `make test`."""

import os
from dataclasses import dataclass

import pytest
import torch
from compared_models import (
    matrices,
    output_difference,
    own_model,
    perturbed,
    scrambled_file,
    stored,
    tiny_model,
    with_tensors,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import isobasin as ib
import tiny
from isobasin.errors import ArchitectureError

pytestmark = [pytest.mark.hf, pytest.mark.slow]

FULL = os.environ.get("ISOBASIN_SLOW", "0") == "1"
EXAMPLES = int(os.environ.get("ISOBASIN_CASES", "300" if FULL else "12"))
SAME = ("scrambled", "scrambled bfloat16", "scrambled float16", "bfloat16", "float16")
DIFFERENT = ("changed", "changed and scrambled", "gain", "unrelated", "values without outputs", "units")
KINDS = (*SAME, *DIFFERENT, "changed bfloat16")


@dataclass(frozen=True)
class Drawn:
    """A model by name and seed, and what is done to a copy of it."""

    weights: ib.Weights
    other: ib.Weights
    kind: str
    seed: int


@st.composite
def own_settings(draw: st.DrawFn) -> dict[str, object]:
    n_heads = draw(st.integers(1, 4))
    gated, norm = draw(st.booleans()), draw(st.sampled_from(["layer", "rms"]))
    chosen: dict[str, object] = {
        "d_model": draw(st.sampled_from([8, 12, 15])),
        "n_layers": draw(st.integers(1, 2)),
        "n_heads": n_heads,
        "n_kv_heads": draw(st.sampled_from([k for k in range(1, n_heads + 1) if n_heads % k == 0])),
        "d_head": draw(st.sampled_from([2, 4, 6])),
        "d_ff": draw(st.integers(1, 14)),
        "n_positions": draw(st.integers(4, 12)),
        "positions": draw(st.sampled_from(["none", "sinusoidal", "learned", "rope", "alibi"])),
        "norm": norm,
        "post_norm": draw(st.booleans()),
        "feed_forward": "swiglu" if gated else "gelu",
        "causal": draw(st.booleans()),
        "bias": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return chosen | {"d_vocab": 19, "tied": draw(st.booleans())}
    return chosen | {"d_vocab": 19, "n_classes": 3}


@st.composite
def cases(draw: st.DrawFn) -> Drawn:
    seed = draw(st.integers(0, 10_000))
    kind = draw(st.sampled_from(KINDS))
    if draw(st.booleans()):
        config = _config(draw(own_settings()))
        return Drawn(own_model(config, seed), own_model(config, seed + 1), kind, seed)
    name = draw(st.sampled_from([c.name for c in tiny.CASES if FULL or c.name.endswith(("bare", "no-pooler"))]))
    return Drawn(tiny_model(name, seed % 5), tiny_model(name, seed % 5 + 5), kind, seed)


def _config(chosen: dict[str, object]) -> ib.ModelConfig:
    try:
        return ib.ModelConfig(**chosen)  # type: ignore[arg-type]
    except ArchitectureError:  # switches that do not go together
        assume(False)
        raise


def compared_with(case: Drawn) -> ib.Weights:
    """The copy, or the changed model, that this case compares with."""
    a, seed = case.weights, case.seed
    kind, _, last = case.kind.rpartition(" ")
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(last, torch.float32)
    if case.kind in ("bfloat16", "float16"):
        return stored(a, dtype)
    if case.kind.startswith("scrambled"):
        return scrambled_file(a, dtype, seed)
    if case.kind == "unrelated":
        return case.other
    if case.kind == "gain":
        gains = sorted({norm.gain for norm in a.arch.norms.values()})
        return perturbed(a, gains[seed % len(gains)], 1e-2, seed)
    if case.kind == "values without outputs":
        return _permuted(a, "vo0")
    if case.kind == "units":
        return _permuted(a, "ff0")
    chosen = matrices(a)[seed % len(matrices(a))]
    if kind == "changed":
        return stored(perturbed(a, chosen, 0.3, seed), dtype)
    changed = perturbed(a, chosen, 1e-3, seed)
    return scrambled_file(changed, seed=seed) if case.kind.endswith("scrambled") else changed


def _permuted(a: ib.Weights, space: str) -> ib.Weights:
    """The columns of what this space writes, shifted by one: outside every group, unless there is only one."""
    name, axis = next((n, k) for n, k, _, t in a.arch.carriers(space) if t.dual and len(a.arch.shapes[n]) > 1)
    assume(a.arch.shapes[name][axis] > 1)
    return with_tensors(a, {name: a[name].roll(1, dims=axis)})


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_no_wrong_verdict(case: Drawn) -> None:
    a, b = case.weights, compared_with(case)
    found = ib.equivalent(a, b, seed=case.seed)
    words = f"{a.arch.family} {dict(a.config)} {case.kind}: {found}"
    if case.kind in SAME:
        assert found.answer == "same", words
        narrow = next((n for n in ("bfloat16", "float16") if n == case.kind.split()[-1]), "float32")
        assert found.precision == narrow, words
        assert found.transform is not None
    elif case.kind == "changed bfloat16":  # what rounding hides may stay undecided, but is not the same
        assert found.answer != "same", words
    else:
        assert found.answer == "different", words
    if found.answer == "different":
        assert found.witness is not None
        assert output_difference(a, b, found.witness.inputs) >= 0.5 * found.witness.difference, words
