"""Residuals of weights: the same numbers whether perturbed copies are kept or drawn again; few copies where few do."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import isobasin.rounding
import model_types as mt
from isobasin.compare import residual
from isobasin.compare.residual import DRAWS, FIRST_DRAWS, residuals
from isobasin.symmetries.transform import scramble

pytestmark = pytest.mark.hf


def test_copies_that_fit_in_memory_are_drawn_once_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    a = mt.weights("roberta-masked-lm")
    transform = scramble(a, seed=1)
    b = transform.apply(a)
    calls = []
    seed_of = isobasin.rounding.crc32

    def counted(text: bytes) -> int:
        calls.append(text)
        return seed_of(text)

    monkeypatch.setattr(isobasin.rounding, "crc32", counted)
    found, counts = [], []
    for memory in (a.memory, 0):
        options = {"precision": "stored", "seed": 0, "device": torch.device("cpu")}
        found.append(residuals(replace(a, memory=memory), b, transform.inverse(), **options))  # type: ignore[arg-type]
        counts.append(len(calls))
        calls.clear()
    assert found[0] == found[1]
    # A tensor is drawn for its own block and for those that depend on it.
    assert counts[0] <= 4 * DRAWS * len(a)
    assert counts[1] > 8 * DRAWS * len(a)


@pytest.mark.parametrize("name", ["qwen3-tied", "roberta-masked-lm", "mixtral-untied", "t5-relu"])
def test_two_perturbed_copies_of_a_matrix_accept_nothing_that_more_do_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy needs two for nearly every matrix. A changed entry, row or matrix is seen as from all of them."""
    a = mt.weights(name)
    transform = scramble(a, seed=1)
    b = transform.apply(a)
    b = replace(b, tensors={n: b[n].float() for n in b})
    options = {"precision": "stored", "seed": 0, "device": torch.device("cpu")}
    measured = partial(residuals, a, transform=transform.inverse(), **options)  # type: ignore[arg-type]
    first = residual._tensor_residual
    calls: list[int | None] = []

    def counted(pair: residual._AlignedPair, tensor: str, n_draws: int | None = None) -> residual._TensorResidual:
        calls.append(n_draws if len(a.arch.shapes[tensor]) > 1 else FIRST_DRAWS)
        return first(pair, tensor, n_draws)

    def worst(found: tuple[residual.Residual, ...]) -> float:
        return max(each.excess for each in found)

    monkeypatch.setattr(residual, "_tensor_residual", counted)
    assert worst(measured(b)) <= 1
    assert calls.count(None) <= len(calls) / 8
    matrix = next(n for n in a.arch.shapes if "layers.1" in n.replace("layer.1", "layers.1") and b[n].ndim > 1)
    for size in (1, 10, 30, 100, 1000):
        for where in ((0, 0), (1,), ()):
            changed = b[matrix].double()
            changed[where] *= 1 + size * 2**-24 if size < 1000 else 1.1
            moved = replace(b, tensors={n: changed.float() if n == matrix else b[n] for n in b})
            few = worst(measured(moved))
            with monkeypatch.context() as patched:
                patched.setattr(residual, "FIRST_DRAWS", None)
                every = worst(measured(moved))
            assert (few <= 1) == (every <= 1), (size, where)
            assert size < 1000 or few > 1
