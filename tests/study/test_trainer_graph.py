"""Steps as one graph, and compiled: the same training as step by step, only faster."""

import os
import shutil

import pytest
import torch

from isobasin.model import ModelConfig, Transformer
from isobasin.study import TrainingRecipe, train
from isobasin.study.trainer import compile_forward

LANGUAGE = ModelConfig.preset("llama", d_model=16, n_layers=1, n_heads=2, d_ff=16, d_vocab=7, n_positions=8)
POST_NORM = ModelConfig(
    d_model=16, n_layers=2, n_heads=2, d_ff=16, d_vocab=6, n_positions=5, n_classes=2, positions="learned",
    post_norm=True,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("ISOBASIN_SLOW") != "1", reason="compiling takes half a minute; ISOBASIN_SLOW=1")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for this processor with g++")
def test_a_compiled_model_says_and_learns_the_same_in_one_graph() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = Transformer(POST_NORM, seed=0)
    tokens = torch.arange(15).reshape(3, 5) % 6
    mask = tokens != 0
    expected = torch.autograd.grad(model(tokens, mask).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(compile_forward(model)(tokens, mask).square().sum(), list(model.parameters()))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    compile_forward(Transformer(POST_NORM, seed=1))(tokens, mask)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "another seed was compiled anew"


def test_where_torch_can_not_compile_it_says_so_and_the_model_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernels today")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    torch.compiler.reset()
    model = Transformer(POST_NORM, seed=0)
    tokens = torch.arange(15).reshape(3, 5) % 6
    assert torch.equal(compile_forward(model)(tokens, None), model(tokens, None))
    assert "no kernels today" in caplog.text
    assert not torch._dynamo.config.suppress_errors, "errors of others would be hidden too"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_trains_as_single_steps_do(compiled: bool) -> None:
    text = torch.randint(7, (400,), generator=torch.Generator().manual_seed(0))
    recipe = TrainingRecipe(steps=20, batch_size=8, peak_lr=1e-2)
    options = {"seed": 3, "device": "cuda"}
    expected = train(Transformer(LANGUAGE, seed=0), text, None, recipe, **options)
    found = train(Transformer(LANGUAGE, seed=0), text, None, recipe, graphed=True, compiled=compiled, **options)
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    other = train(Transformer(LANGUAGE, seed=1), text, None, recipe, graphed=True, compiled=compiled, **options)
    assert found.losses != pytest.approx(other.losses, rel=1e-3)
