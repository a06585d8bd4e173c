"""Commands that take `--device`, on CUDA where there is an accelerator (`make test-cuda`), and else on a stand-in for
one: the same answers as on the processor, and no tensors of two devices."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import isobasin as ib
import tiny
from isobasin.compare.fingerprint import fingerprint_with_errors
from isobasin.groups import monomial
from isobasin.symmetries.transform import scramble
from stand_in import DEVICE, OnDevice, stand_in

pytestmark = pytest.mark.hf
FULL = os.environ.get("ISOBASIN_SLOW") == "1"  # unrelated models take many sweeps, and each operation is slow here
FAMILIES = ("llama-gqa", "bert-masked-lm-tied")


@contextmanager
def accelerator() -> Iterator[torch.device]:
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with stand_in() as device:
        yield device


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ib.Weights, ib.Weights, ib.Weights]]:
    """A model, a scrambled copy and an unrelated model, as folders."""
    place = tmp_path_factory.mktemp("stand_in")
    found = {}
    for name in FAMILIES:
        for seed in (0, 1):
            tiny.save(tiny.case(name), place / f"{name}{seed}", seed=seed)
        a = ib.load(place / f"{name}0")
        scramble(a, seed=3).apply(a).save(place / f"{name}-copy")
        found[name] = (a, ib.load(place / f"{name}-copy"), ib.load(place / f"{name}1"))
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("copy", [True, *([False] if FULL else [])])
def test_align(name: str, copy: bool, pairs: dict[str, tuple[ib.Weights, ...]]) -> None:
    a, scrambled, other = pairs[name]
    b = scrambled if copy else other
    expected = ib.align(b, to=a)
    with accelerator() as device:
        found = ib.align(b, to=a, device=device)
    assert found.head_permutation == expected.head_permutation
    assert found.distance_after == pytest.approx(expected.distance_after, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("copy", [True, *([False] if FULL else [])])
def test_equal_distance_and_fingerprint(copy: bool, pairs: dict[str, tuple[ib.Weights, ...]]) -> None:
    a, scrambled, other = pairs["llama-gqa"]
    b = scrambled if copy else other
    expected, far = ib.equivalent(a, b), ib.distance(a, b, null_samples=2)
    with accelerator() as device:
        found = ib.equivalent(a, b, device=device)
        near = ib.distance(a, b, null_samples=2, device=device)
        mine, _ = fingerprint_with_errors(b, device)
    assert found.answer == expected.answer == ("same" if copy else "different")
    assert near.score == pytest.approx(far.score, abs=1e-6)
    assert mine == ib.fingerprint(b)


def test_scramble_and_apply(pairs: dict[str, tuple[ib.Weights, ...]]) -> None:
    a, _, _ = pairs["bert-masked-lm-tied"]
    moved = scramble(a, seed=5).apply(a)
    with accelerator() as device:
        there = a.resident(device)
        also = scramble(there, seed=5).apply(there, device=device)
        tensors = {name: also[name].cpu() for name in also}
    for name, tensor in tensors.items():
        assert torch.allclose(tensor.double(), moved[name].double(), rtol=1e-9, atol=1e-12), name


def test_tensors_of_two_devices_are_refused() -> None:
    with stand_in():
        there, here = torch.arange(3).to(DEVICE), torch.zeros(3)
        assert isinstance(there, OnDevice)
        assert (there + 1).cpu().tolist() == [1, 2, 3]
        with pytest.raises(RuntimeError, match="same device"):
            there + here
        with pytest.raises(RuntimeError, match="indices should be"):
            here[there]
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()


def test_an_index_on_the_device_into_a_tensor_of_the_processor_is_found(
    pairs: dict[str, tuple[ib.Weights, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake that once made `align --cuda` fail for every wide model."""

    def chosen(table: Tensor, index: Tensor) -> Tensor:
        return table.cpu()[torch.arange(len(index)), index]

    monkeypatch.setattr(monomial, "_chosen", chosen)
    a, copy, _ = pairs["llama-gqa"]
    assert ib.align(copy, to=a).distance_after < 1e-5
    with stand_in() as device, pytest.raises(RuntimeError, match="indices should be"):
        ib.align(copy, to=a, device=device)


@pytest.mark.parametrize("name", FAMILIES if FULL else FAMILIES[-1:])
def test_equal_and_fingerprint_of_16_bit_models(
    name: str, pairs: dict[str, tuple[ib.Weights, ...]], tmp_path: Path
) -> None:
    """Their residuals are computed in float32, and the doubts of their fingerprints from scrambled copies."""
    for place, seed in (("a", None), ("b", 3)):
        a = pairs[name][0] if seed is None else ib.load(tmp_path / "a")
        (a if seed is None else scramble(a, seed=seed).apply(a)).save(tmp_path / place, dtype="bfloat16")
    a, b = (ib.load(tmp_path / place) for place in "ab")
    expected, (mine, errors) = ib.equivalent(a, b), fingerprint_with_errors(b)
    with accelerator() as device:
        found, (other, more) = ib.equivalent(a, b, device=device), fingerprint_with_errors(b, device)
    assert found.answer == expected.answer == "same"
    assert other == mine
    assert more == pytest.approx(errors, rel=0.5, abs=0.05)
