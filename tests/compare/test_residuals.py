"""Residuals of weights: the same numbers whether perturbed copies are kept in memory or drawn again."""

from dataclasses import replace

import pytest
import torch

import isobasin.rounding
import model_types as mt
from isobasin.compare.residual import DRAWS, residuals
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
