"""Mixing a component's outputs against models put together by hand."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from path_subjects import random_ids, token_task, told_task
from torch import Tensor, nn

import isobasin as ib
import tiny
from isobasin.path.barrier import Curve, grid
from isobasin.path.evaluation import FlatModel, evaluate_line
from isobasin.path.explanation import components, explain, explained_lambdas, mixed_outputs
from isobasin.runtime import module_of
from isobasin.weights import Weights

pytestmark = pytest.mark.hf
LAM = 0.3


def pair(name: str, place: Path) -> tuple[Weights, Weights]:
    case = next(c for c in tiny.CASES if c.name == name)
    for seed in (0, 1):
        tiny.save(case, place / str(seed), seed=seed)
    return ib.load(place / "0"), ib.load(place / "1")


def interpolated(a: nn.Module, b: nn.Module) -> nn.Module:
    mixed = copy.deepcopy(a)
    theirs = dict(b.named_parameters())
    for name, p in mixed.named_parameters():
        p.data.lerp_(theirs[name].data, LAM)
    return mixed


def llama_by_hand(a: nn.Module, b: nn.Module, kinds: set[str]) -> nn.Module:
    mixed: Any = interpolated(a, b)
    for layer, layer_a, layer_b in zip(mixed.model.layers, a.model.layers, b.model.layers):  # type: ignore[union-attr]
        if "attention" in kinds:
            both = (layer_a.self_attn, layer_b.self_attn)

            def attention(*args: Any, _both: Any = both, **kwargs: Any) -> Any:
                one, two = (m(*args, **kwargs) for m in _both)
                return (torch.lerp(one[0], two[0], LAM), *one[1:])

            layer.self_attn.forward = attention
        if "feed-forward" in kinds:
            pair_ = (layer_a.mlp, layer_b.mlp)
            layer.mlp.forward = lambda x, p=pair_: torch.lerp(p[0](x), p[1](x), LAM)
    return mixed


def bert_by_hand(a: nn.Module, b: nn.Module, kinds: set[str]) -> nn.Module:
    """Post-norm: the norm and the skip beside a component keep the interpolated weights."""
    mixed: Any = interpolated(a, b)
    layers = zip(mixed.bert.encoder.layer, a.bert.encoder.layer, b.bert.encoder.layer)  # type: ignore[union-attr]
    for layer, layer_a, layer_b in layers:
        if "attention" in kinds:

            def attention(x: Tensor, *args: Any, _l: Any = (layer, layer_a, layer_b), **kwargs: Any) -> Any:
                said = [m.attention.output.dense(m.attention.self(x, *args, **kwargs)[0]) for m in _l[1:]]
                return (_l[0].attention.output.LayerNorm(torch.lerp(*said, LAM) + x), None)

            layer.attention.forward = attention
        if "feed-forward" in kinds:
            layer.feed_forward_chunk = _chunk(layer, layer_a, layer_b)
    return mixed


def _chunk(layer: Any, *ends: Any) -> Callable[[Tensor], Tensor]:
    def chunk(x: Tensor) -> Tensor:
        out: Tensor = layer.output.LayerNorm(torch.lerp(*(m.output.dense(m.intermediate(x)) for m in ends), LAM) + x)
        return out

    return chunk


BY_HAND = {"llama-gqa": llama_by_hand, "bert-masked-lm-tied": bert_by_hand}


@pytest.mark.parametrize("kinds", [{"attention"}, {"feed-forward"}, {"attention", "feed-forward"}])
@pytest.mark.parametrize("name", list(BY_HAND))
def test_outputs_are_mixed_as_by_hand(name: str, kinds: set[str], tmp_path: Path) -> None:
    a, b = pair(name, tmp_path)
    ids = random_ids(tiny.VOCABULARY, 2, tiny.LENGTH)
    by_hand = BY_HAND[name](module_of(a), module_of(b), kinds)
    plain = interpolated(module_of(a), module_of(b))
    model = FlatModel.of(a)
    start, end = model.buffer.clone(), model.vector(b)
    chosen = [c for c in components(a.arch) if c.kind in kinds]
    with torch.no_grad():
        expected, unmixed = by_hand(input_ids=ids).logits, plain(input_ids=ids).logits
        with mixed_outputs(model, chosen, start, end) as move_to:
            move_to(LAM)
            found = model.module(input_ids=ids).logits
        after = model.module(input_ids=ids).logits
    assert torch.allclose(found, expected, atol=2e-5)
    assert not torch.allclose(found, unmixed, atol=1e-2)  # it does make a difference
    assert torch.allclose(after, unmixed, atol=2e-5)  # and everything is put back


@pytest.mark.parametrize("case", tiny.CASES, ids=lambda c: c.name)
def test_every_family_has_its_components(case: tiny.Case, tmp_path: Path) -> None:
    tiny.save(case, tmp_path / "m")
    weights = ib.load(tmp_path / "m")
    found = components(weights.arch)
    assert [c.kind for c in found] == ["attention", "feed-forward"] * weights.arch.sizes.n_layers
    model = FlatModel.of(weights)
    assert all(name in model.places for c in found for name in c.tensors)


def test_shares_add_up_to_what_is_measured(tmp_path: Path) -> None:
    a, _ = pair("llama-gqa", tmp_path)
    b = ib.scramble(a, scope="all-attention", seed=1).apply(a)
    task = told_task(a, random_ids(tiny.VOCABULARY, 3, tiny.LENGTH))
    model = FlatModel.of(a)
    start, end = model.buffer.clone(), model.vector(b)
    curve = evaluate_line(model, start, end, task, grid(5), name="x")
    found = explain(model, start, end, task, curve, name="x")
    assert found.barrier == pytest.approx(curve.barrier.height)
    assert list(found.parts)[:3] == ["attention", "feed-forward", "attention and feed-forward"]
    assert len(found.parts) == 3 + a.arch.sizes.n_layers
    assert found.barrier > 0.01
    assert found.parts["attention"] < 1e-4  # only attention was scrambled, and its outputs are the same
    assert found.share("feed-forward") < 0.9
    assert found.share("attention") == pytest.approx((found.barrier - found.parts["attention"]) / found.barrier)
    again = evaluate_line(model, start, end, task, grid(5), name="x")
    assert again.metrics["loss"] == curve.metrics["loss"]  # the module is left as it was


def test_a_model_with_itself_has_nothing_to_explain(tmp_path: Path) -> None:
    a, _ = pair("llama-gqa", tmp_path)
    model = FlatModel.of(a)
    start = model.buffer.clone()
    task = token_task(random_ids(tiny.VOCABULARY, 3, tiny.LENGTH))
    curve = evaluate_line(model, start, start.clone(), task, grid(3), name="x")
    found = explain(model, start, start.clone(), task, curve, name="x")
    assert all(height <= 1e-6 for height in found.parts.values())


def test_the_highest_point_and_both_ends_are_looked_at() -> None:
    lambdas = grid(25)
    losses = [1.0] * 25
    losses[7] = 2.0
    points = explained_lambdas(Curve(lambdas, {"loss": tuple(losses)}))
    assert {0.0, 1.0, lambdas[7]} <= set(points)
    assert len(points) <= 10
