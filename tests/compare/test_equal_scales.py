"""Parts of very different size: what a norm or a large factor follows matters however small it is, and a copy of such a
model is still a copy. And the limit of a residual: what chance and the transform explain is no difference."""

import pytest
import torch
from compared_models import (
    output_difference,
    own_model,
    scrambled_file,
    small_model,
    stored,
    tiny_model,
    with_tensors,
)
from torch import Tensor

import isobasin as ib
from isobasin.compare import residual
from isobasin.compare.degenerate import remove_degeneracies
from isobasin.compare.limits import Entries, Judged, log_odds
from isobasin.compare.outputs import ComparedInput, Probe, find_witness
from isobasin.symmetries.transform import Transform

pytestmark = pytest.mark.hf

ROPE = {"positions": "rope", "norm": "rms", "feed_forward": "swiglu", "bias": False}
TOKENS, UP, DOWN = "embed.tokens.weight", "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"
Q, K, V, O = (f"blocks.0.attn.{x}.weight" for x in "qkvo")  # noqa: E741
N = 4  # columns of a head


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scaled(weights: ib.Weights, rows: dict[str, tuple[int, slice, float]]) -> ib.Weights:
    """Some rows (axis 0) or columns (axis 1) of some tensors times a number."""
    tensors = {name: weights[name].double().clone() for name in rows}
    for name, (axis, at, factor) in rows.items():
        tensors[name].movedim(axis, 0)[at] *= factor
    return with_tensors(weights, tensors)


def turned(weights: ib.Weights, name: str, at: slice) -> ib.Weights:
    """Rows of a tensor with another direction and the same size."""
    t = weights[name].double().clone()
    noise = drawn(*t[at].shape)
    t[at] = noise * t[at].norm() / noise.norm()
    return with_tensors(weights, {name: t})


def small_row(size: float, **settings: object) -> tuple[ib.Weights, ib.Weights]:
    """A model with one small row of its embedding, and the same with another direction in that row."""
    a = scaled(small_model(**ROPE, norm_eps=1e-38, **settings), {TOKENS: (0, slice(5, 6), size)})
    return a, turned(a, TOKENS, slice(5, 6))


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 1e-12), (torch.float32, 1e-17), (torch.bfloat16, 1e-7), (torch.bfloat16, 1e-12)]
)
def test_a_small_row_behind_a_norm_is_compared_by_its_own_size(dtype: torch.dtype, size: float) -> None:
    a, b = (stored(w, dtype) for w in small_row(size, d_vocab=300))
    assert output_difference(a, b, {"input_ids": torch.tensor([[5, 5, 5]])}) > 0.3
    found = ib.equivalent(a, b)
    assert found.answer == "different", str(found)
    assert found.witness is not None
    assert 5 in found.witness.inputs["input_ids"]
    assert found.largest_residual is not None
    assert found.largest_residual.tensor == TOKENS
    copy = ib.equivalent(a, scrambled_file(a, dtype))
    assert copy.answer == "same", str(copy)


def test_a_table_of_small_rows() -> None:
    a = scaled(small_model(**ROPE, norm_eps=1e-38), {TOKENS: (0, slice(None), 1e-17)})
    assert ib.equivalent(a, turned(a, TOKENS, slice(5, 6))).answer == "different"
    assert ib.equivalent(a, scrambled_file(a)).answer == "same"


def test_a_row_that_the_type_can_not_hold_is_undecided() -> None:
    """float16 has no numbers below 6e-8: the row is lost in the copy, which is neither the same nor shown different."""
    a, _ = small_row(1e-9)
    found = ib.equivalent(a, stored(a, torch.float16))
    assert found.answer == "undecided", str(found)
    whole, _ = small_row(1.0)
    assert ib.equivalent(whole, stored(whole, torch.float16)).answer == "same"


@pytest.mark.parametrize(
    ("small", "large", "at", "columns", "size"),
    [
        (UP, DOWN, slice(3, 4), True, 1e-12),
        (Q, K, slice(0, N), False, 1e-4),
        (K, Q, slice(0, N), False, 1e-4),
        (V, O, slice(0, N), True, 1e-4),
        (V, O, slice(0, N), True, 1e-12),
    ],
)
def test_a_small_factor_beside_a_large_one(small: str, large: str, at: slice, columns: bool, size: float) -> None:
    a = scaled(small_model(**ROPE), {small: (0, at, size), large: (1 if columns else 0, at, 1 / size)})
    b = turned(a, small, at)
    assert output_difference(a, b, {"input_ids": torch.arange(9)[None]}) > 1e-2
    assert ib.equivalent(a, b).answer == "different"
    copy = ib.equivalent(a, scrambled_file(a))
    assert copy.answer == "same", str(copy)


def test_one_small_gain_before_a_large_column() -> None:
    a = small_model(**ROPE)
    norm = a.arch.norms["a0"]
    readers = {r.weight: (r.axis, slice(2, 3), 1e12) for r in a.arch.readers("a0")}
    a = scaled(a, {norm.gain: (0, slice(2, 3), 1e-12), **readers})
    b = scaled(a, {norm.gain: (0, slice(2, 3), 1.5)})
    assert ib.equivalent(a, b).answer == "different"
    # No column of the copy is divided by a gain of 1e-12, so that none is brought to A's.
    assert ib.equivalent(a, scrambled_file(a)).answer == "undecided"


def test_a_position_beyond_the_usual_inputs_is_tried() -> None:
    a = small_model(positions="learned", n_positions=400)
    name = next(n for n in a if a.arch.shapes[n][0] == 400)
    b = turned(a, name, slice(390, 391))
    found = ib.equivalent(a, b)
    assert found.answer == "different", str(found)
    assert found.witness is not None
    assert found.witness.inputs["input_ids"].shape[1] > 390


@pytest.mark.parametrize("seed", [22, 47, 53])
def test_gains_of_any_size_in_a_scrambled_copy(seed: int) -> None:
    """Gains near zero amplify a few rounding errors: by chance the noise floor is low there, or the transform off."""
    config = dict(small_model(**ROPE).config)
    a = own_model(ib.ModelConfig.from_dict(config), seed)
    rng = torch.Generator().manual_seed(seed)
    gains = {norm.gain: torch.randn(a[norm.gain].shape, generator=rng) for norm in a.arch.norms.values()}
    a = with_tensors(a, gains)
    found = ib.equivalent(a, scrambled_file(a, torch.bfloat16 if seed % 2 else torch.float32, seed))
    assert found.answer == "same", str(found)


def test_units_of_a_fused_projection_can_be_dead() -> None:
    """Phi-3 keeps gate and up in one tensor."""
    a = tiny_model("phi3-gqa")
    down = next(n for n in a if n.endswith("layers.0.mlp.down_proj.weight"))
    fused = next(n for n in a if n.endswith("layers.0.mlp.gate_up_proj.weight"))
    dead = scaled(a, {down: (1, slice(3, 4), 0.0)})
    lean, notes = remove_degeneracies(dead)
    assert any("1 units are not seen" in note for note in notes)
    assert float(lean[fused][[3, 43]].abs().max()) == 0
    assert output_difference(dead, lean, {"input_ids": torch.arange(7)[None]}) < 1e-9


def test_tables_that_are_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slice is shorter than the others, and smaller than a large tensor."""
    a, b = small_row(1e-12, d_vocab=300)
    monkeypatch.setattr("isobasin.symmetries.normal_form.ROWS", 800)
    monkeypatch.setattr("isobasin.compare.residual.LARGE_TENSOR", 500)
    monkeypatch.setattr("isobasin.compare.residual.CHUNK", 400)
    assert ib.equivalent(a, scrambled_file(a)).answer == "same"
    assert ib.equivalent(a, b).answer == "different"


@pytest.mark.parametrize("rank", [1, 3, 24])
def test_noise_stays_below_its_limit_and_a_change_does_not(rank: int) -> None:
    """Residuals that are one more draw of the noise, in 4,000 rows with few or many independent errors each."""
    mixed, x = drawn(4000, rank, 24), log_odds(4000 * 24)
    rng = torch.Generator().manual_seed(0)
    errors = torch.rand(9, 4000, 1, rank, generator=rng, dtype=torch.float64) * 2 - 1
    noise = (errors @ mixed).transpose(2, 3)
    known = torch.full((4000, 24, 1), 1e-6, dtype=torch.float64)
    entries = Entries(noise[0].square(), known, noise[1:])
    for judged in (entries.lines(0).judged(x), entries.lines(1).judged(x), entries.judged(x)):
        assert float(judged.excess.max()) < 1
    changed = Entries(100**2 * noise[0].square(), known, noise[1:])
    assert float(changed.lines(0).total().judged(x).excess) > 1
    other = Entries(drawn(4000, 24, 1).square() * 1e8, known, noise[1:])
    assert float((other.lines(0).judged(x).excess > 1).double().mean()) > 0.99


def test_few_draws_of_many_entries_raise_no_false_alarm() -> None:
    """A rotated matrix whose original was rounded, too: among millions of entries, four draws are all small in some."""
    rng, n = torch.Generator().manual_seed(0), 1536
    b = torch.randn(n, n, generator=rng, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=torch.float64)).Q

    def noise() -> torch.Tensor:
        return ((b * 2**-9 * (2 * torch.rand(n, n, generator=rng, dtype=torch.float64) - 1)) @ turn)[..., None]

    known, residual = ((b @ turn * 2**-9).square() / 3)[..., None], noise()
    draws = torch.stack([noise() for _ in range(4)])
    x = log_odds(n * n)
    assert float(Entries(residual.square(), known, draws).judged(x).excess.max()) < 0.5
    residual[5, 7] += 60 * float(noise().std())
    judged = Entries(residual.square(), known, draws).judged(x)
    assert int(judged.excess.argmax()) == 5
    assert float(judged.excess.max()) > 1


def test_no_piece_of_a_tensor_has_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of a column is estimated in each piece: a last piece of one row made copies look changed there."""
    a = small_model(**ROPE)
    rows, columns = a.arch.shapes[TOKENS]
    pieces: list[tuple[int, int]] = []
    judged = Entries.judged

    def counted(self: Entries, x: float) -> Judged:
        pieces.append(tuple(self.residual.shape[:2]))
        return judged(self, x)

    monkeypatch.setattr(residual, "CHUNK", (rows - 1) * columns)  # one row too few
    monkeypatch.setattr(Entries, "judged", counted)
    identity = Transform(a.arch.family, dict(a.arch.spaces))
    residual.residuals(a, a, identity, precision="stored", seed=0, device=torch.device("cpu"))
    assert [n for n, width in pieces if width == columns and n < rows][:2] == [9, 8]


def test_an_output_beyond_the_range_of_float32_is_no_witness() -> None:
    """Values scaled by 1e-20 and output projections by 1e20 can overflow in one of two copies only."""

    def compared(difference: float, rounding: float) -> ComparedInput:
        return ComparedInput(Probe("random", {}), torch.zeros(1), torch.ones(1), difference, rounding)

    assert find_witness([compared(float("inf"), 1e-2)]) is None
    assert find_witness([compared(float("inf"), 1e-2), compared(1e-3, 1e-2)]) is None
    assert find_witness([compared(1.0, 0.9)]) is None  # rounding destroys the output
    clear = compared(0.5, 1e-2)
    assert find_witness([compared(float("inf"), 1e-2), clear]) is clear
