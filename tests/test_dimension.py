"""The dimension test of MATH section 2: predicted and measured nullity of one attention block."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobasin.errors import ArchitectureError
from isobasin.symmetries.dimension import (
    AttentionBlock,
    Nullity,
    _null_space,
    measured_nullity,
    predicted_nullity,
    small_block,
)

PLAIN = AttentionBlock(n_heads=2, n_kv_heads=2, d_model=6, d_head=4)
ROPE = replace(PLAIN, positions="rope")

TABLE = {
    "no positions": (64, PLAIN),
    "RoPE": (40, ROPE),
    "RoPE on 2 of 4 columns": (44, replace(ROPE, rotary_dims=2)),
    "ALiBi": (64, replace(PLAIN, positions="alibi")),
    "T5 bias": (66, replace(PLAIN, positions="t5")),
    "no positions, with biases": (80, replace(PLAIN, bias=True)),
    "RoPE, with biases": (48, replace(ROPE, bias=True)),
    "RoPE, GQA": (40, replace(ROPE, n_heads=4, d_model=8)),
    "no positions, MQA": (32, replace(PLAIN, n_heads=4, n_kv_heads=1, d_model=8)),
    "QK-norm": (40, replace(PLAIN, qk_norm=True)),
    "QK-norm with RoPE": (38, replace(ROPE, qk_norm=True)),
    "no positions, inputs with zero mean": (88, replace(PLAIN, centred=True)),
}

# Combinations the table leaves out, worked out by hand: h = 2, d = 6, d_h = 4 unless stated.
BEYOND_TABLE = {
    # h (r + (d_h−r)² + d_h²) + h d_h for values + h (d_h−r) for the keys that do not rotate
    "partial RoPE with biases": (56, replace(ROPE, rotary_dims=2, bias=True)),
    # the output bias that would take up b_V is missing; 8 value columns write into 6 features, 2 stay unseen
    "biases without output bias": (74, replace(PLAIN, bias=True, out_bias=False)),
    # 8 value columns, 9 features: every value bias is seen
    "biases without output bias, wide": (72, replace(PLAIN, bias=True, out_bias=False, d_model=9)),
    "only an output bias": (64, replace(PLAIN, out_bias=True)),
    "RoPE, zero mean": (64, replace(ROPE, centred=True)),
    "biases, zero mean": (104, replace(PLAIN, bias=True, centred=True)),
    "QK-norm with biases": (48, replace(PLAIN, qk_norm=True, bias=True)),
    "QK-norm, partial RoPE": (39, replace(ROPE, qk_norm=True, rotary_dims=2)),
    "QK-norm, MQA": (23, replace(PLAIN, qk_norm=True, n_kv_heads=1)),
    "T5 bias, MQA": (34, replace(PLAIN, positions="t5", n_kv_heads=1)),
}


@pytest.mark.parametrize(("expected", "block"), (TABLE | BEYOND_TABLE).values(), ids=TABLE | BEYOND_TABLE)
def test_table(expected: int, block: AttentionBlock) -> None:
    measured = measured_nullity(block)
    assert predicted_nullity(block) == expected
    assert measured.dim == expected
    assert measured.clear


@st.composite
def blocks(draw: st.DrawFn) -> AttentionBlock:
    n_kv_heads, group = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]))
    d_model = draw(st.integers(3, 7))
    centred, qk_norm = draw(st.booleans()), draw(st.booleans())
    d_head = draw(st.integers(2 if qk_norm else 1, min(5, d_model - centred)))
    may_rotate = [None, *range(2, d_head + 1, 2)] if d_head % 2 == 0 else list(range(2, d_head + 1, 2))
    positions = draw(st.sampled_from(["none", "alibi", "t5"] + 2 * ["rope"] * bool(may_rotate)))
    return AttentionBlock(
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        d_model=d_model,
        d_head=d_head,
        positions=positions,
        rotary_dims=draw(st.sampled_from(may_rotate)) if positions == "rope" else None,
        bias=draw(st.booleans()),
        out_bias=draw(st.sampled_from([None, False, True])),
        qk_norm=qk_norm,
        centred=centred,
        causal=draw(st.booleans()),
        layout=draw(st.sampled_from(["half", "interleaved"])),
    )


@settings(max_examples=120, deadline=None)
@given(block=blocks(), seed=st.integers(0, 10_000))
def test_prediction_is_what_is_measured(block: AttentionBlock, seed: int) -> None:
    measured, predicted = measured_nullity(block, seed=seed), predicted_nullity(block)
    assert measured.agrees_with(predicted), f"predicted {predicted}, measured {measured}, {measured.edge}"
    # Negative control: the same comparison refuses a prediction that is off by one.
    assert not measured.agrees_with(predicted + 1)
    assert not measured.agrees_with(predicted - 1)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (ROPE, PLAIN),
        (PLAIN, ROPE),
        (replace(ROPE, rotary_dims=2), ROPE),
        (replace(PLAIN, positions="t5"), PLAIN),
        (replace(PLAIN, centred=True), PLAIN),
        (replace(PLAIN, qk_norm=True), PLAIN),
        (replace(PLAIN, bias=True), replace(ROPE, bias=True)),
        (replace(PLAIN, n_kv_heads=1), PLAIN),
    ],
)
def test_the_group_of_another_block_is_refused(right: AttentionBlock, wrong: AttentionBlock) -> None:
    measured = measured_nullity(right)
    assert measured.agrees_with(predicted_nullity(right))
    assert not measured.agrees_with(predicted_nullity(wrong))


@pytest.mark.parametrize("block", [PLAIN, ROPE, replace(PLAIN, positions="t5"), replace(ROPE, bias=True)])
def test_a_causal_mask_changes_the_outputs_but_not_the_nullity(block: AttentionBlock) -> None:
    causal = replace(block, causal=True)
    x = block.inputs(1, seed=3)[0]
    if block.positions != "t5":  # its table has another size under a mask
        params = block.parameters(seed=3)
        assert not torch.allclose(block.forward(params, x), causal.forward(params, x))
    assert measured_nullity(causal).agrees_with(predicted_nullity(block))


def test_forward_is_attention() -> None:
    block = AttentionBlock(n_heads=4, n_kv_heads=2, d_model=6, d_head=3, bias=True, causal=True)
    params, x = block.parameters(seed=1), block.inputs(1, seed=2)[0]
    q, k, v = (x @ params[name] + params[f"{name}_bias"] for name in "qkv")
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = (heads @ params["o"].mT).sum(0) + params["o_bias"]
    assert torch.allclose(block.forward(params, x), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(replace(block, causal=False).forward(params, x), expected, atol=1e-3)


def _turn(params: dict[str, torch.Tensor], pair: tuple[int, int], u: complex) -> dict[str, torch.Tensor]:
    """q → u q, k → k / conj(u) on one pair of columns of every head."""
    q, k = params["q"].clone(), params["k"].clone()
    i, j = pair
    for matrix, factor in ((q, u), (k, 1 / u.conjugate())):
        turned = torch.complex(matrix[..., i], matrix[..., j]) * factor
        matrix[..., i], matrix[..., j] = turned.real, turned.imag
    return params | {"q": q, "k": k}


@pytest.mark.parametrize(("layout", "own", "other"), [("half", (1, 3), (2, 3)), ("interleaved", (2, 3), (1, 3))])
def test_a_rotary_pair_turns_freely_in_its_own_layout_only(
    layout: str, own: tuple[int, int], other: tuple[int, int]
) -> None:
    block = replace(ROPE, layout=layout)
    params, x = block.parameters(seed=5), block.inputs(1, seed=6)[0]
    before = block.forward(params, x)
    u = complex(0.8, -1.1)
    assert torch.allclose(block.forward(_turn(params, own, u), x), before, rtol=0, atol=1e-12)
    assert not torch.allclose(block.forward(_turn(params, other, u), x), before, atol=1e-3)


def test_parameters_are_random_everywhere_and_follow_the_seed() -> None:
    block = replace(PLAIN, positions="t5", bias=True, qk_norm=True)
    params = block.parameters(seed=7)
    names = {"q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_gain", "k_gain", "table"}
    assert set(params) == names
    for name, value in params.items():
        assert value.dtype == torch.float64
        assert value.unique().numel() == value.numel(), name
        assert torch.equal(value, block.parameters(seed=7)[name])
        assert not torch.equal(value, block.parameters(seed=8)[name])


def test_centred_inputs_have_zero_mean() -> None:
    assert replace(PLAIN, centred=True).inputs(3, seed=1).mean(-1).abs().max() < 1e-15
    assert PLAIN.inputs(3, seed=1).mean(-1).abs().max() > 0.1


def test_the_cut_is_the_widest_gap_and_a_narrow_one_is_unclear() -> None:
    def cut(values: list[float]) -> Nullity:
        return _null_space(torch.tensor(values, dtype=torch.float64))

    assert cut([4.0, 1.0, 0.1, 1e-15, 1e-20, 0.0]).dim == 3
    assert cut([4.0, 1.0, 0.1, 1e-15, 1e-20, 0.0]).clear
    assert cut([4.0, 1.0, 0.1]).dim == 0
    slope = cut([10.0**-n for n in range(16)])
    assert not slope.clear
    assert not slope.agrees_with(slope.dim)
    assert "unclear" in str(slope)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 3}, "2 heads and 3 kv heads, expected the first to be a multiple"),
        ({"n_heads": 0}, "expected all at least 1"),
        ({"d_head": 7}, "d_head 7, expected at most 6"),
        ({"d_head": 6, "centred": True}, "d_head 6, expected at most 5"),
        ({"d_head": 1, "qk_norm": True}, "qk_norm has d_head 1, expected at least 2"),
        ({"positions": "learned"}, "positions 'learned', expected one of none, rope, alibi, t5"),
        ({"layout": "split"}, "rotary layout 'split', expected one of half, interleaved"),
        ({"rotary_dims": 2}, "rotary_dims 2 with positions 'none'"),
        ({"positions": "rope", "d_head": 3}, "rotates 3 of 3 columns, expected an even number"),
        ({"positions": "rope", "rotary_dims": 6}, "rotates 6 of 4 columns, expected an even number"),
        ({"positions": "rope", "rotary_dims": 0}, "rotates 0 of 4 columns, expected an even number"),
    ],
)
def test_sizes_that_make_no_block_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        replace(PLAIN, **change)


@pytest.mark.parametrize(
    ("heads", "small"),
    [
        ((1, 1), (1, 1)),
        ((12, 12), (4, 4)),
        ((3, 3), (3, 3)),
        ((32, 16), (4, 2)),
        ((24, 8), (3, 1)),
        ((32, 8), (4, 1)),
        ((28, 4), (4, 2)),
        ((71, 1), (4, 1)),
    ],
)
def test_a_small_block_keeps_the_grouping(heads: tuple[int, int], small: tuple[int, int]) -> None:
    block = small_block(n_heads=heads[0], n_kv_heads=heads[1], d_head=64)
    assert (block.n_heads, block.n_kv_heads, block.d_head) == (*small, 8)


@pytest.mark.parametrize(
    ("rotary_dims", "d_head", "expected"),
    [(None, 128, None), (128, 128, 8), (32, 128, 2), (64, 128, 4), (120, 128, 6), (2, 128, 2), (2, 6, 2)],
)
def test_a_small_block_keeps_the_rotary_share(rotary_dims: int | None, d_head: int, expected: int | None) -> None:
    block = small_block(n_heads=2, n_kv_heads=2, d_head=d_head, positions="rope", rotary_dims=rotary_dims)
    assert block.rotary_dims == expected


def test_a_small_block_counts_absolute_positions_as_none_and_refuses_real_nonsense() -> None:
    assert small_block(n_heads=2, n_kv_heads=2, d_head=4, positions="learned").positions == "none"
    with pytest.raises(ArchitectureError, match="positions 'sideways'"):
        small_block(n_heads=2, n_kv_heads=2, d_head=4, positions="sideways")
    with pytest.raises(ArchitectureError, match="rotates 33 of 64 columns"):
        small_block(n_heads=2, n_kv_heads=2, d_head=64, positions="rope", rotary_dims=33)


@pytest.mark.parametrize(
    ("expected", "block"),
    [
        # Llama: kv (d_h + d_h²)
        (72, small_block(n_heads=32, n_kv_heads=8, d_head=128, positions="rope", causal=True)),
        (2 * (4 + 16), AttentionBlock(4, 2, 6, 4, positions="rope", bias=True, sinks=True)),
        (2 * (16 + 16), AttentionBlock(4, 2, 6, 4, bias=True, sinks=True)),
        # Qwen2, biases on Q, K, V only: none of them is free, as in the real model, whose stream is wide
        (144, small_block(n_heads=28, n_kv_heads=4, d_head=128, positions="rope", bias=True, out_bias=False)),
        # a BERT of two heads: h (2 d_h² + 2 d_h)
        (288, small_block(n_heads=2, n_kv_heads=2, d_head=64, positions="learned", bias=True)),
    ],
)
def test_small_blocks_measure_as_predicted(expected: int, block: AttentionBlock) -> None:
    assert predicted_nullity(block) == expected
    assert measured_nullity(block).agrees_with(expected)
