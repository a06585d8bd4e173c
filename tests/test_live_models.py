"""Models in memory: what computes something else than its tensors and its config say is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import isobasin as ib
import model_types as mt
import tiny

pytestmark = pytest.mark.hf


def llama() -> Any:
    return tiny.case("llama-gqa").build()


def with_its_own_forward() -> Any:
    model = llama()

    class Other(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **settings: Any) -> Any:
            return super().forward(*args, **settings)

    model.__class__ = Other
    return model


def changed(change: Callable[[Any], object]) -> Any:
    model = llama()
    change(model)
    return model


def with_short_rows(model: Any) -> None:
    model.model.embed_tokens = nn.Embedding.from_pretrained(model.model.embed_tokens.weight.data, max_norm=0.1)


def with_its_own_call(model: Any) -> None:
    class Other(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().__call__(x)

    model.lm_head.__class__ = Other


def with_a_plain_function(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    del mlp.act_fn
    mlp.act_fn = torch.tanh


def with_other_positions(model: Any) -> Any:
    model.bert.embeddings.position_ids = model.bert.embeddings.position_ids.flip(-1)
    return model


def attention(model: Any) -> Any:
    return model.model.layers[0].self_attn


def router(model: Any) -> Any:
    return model.model.layers[0].mlp.gate


def edited(name: str, place: Callable[[Any], Any], key: str, value: object) -> Any:
    model = mt.case(name).build()
    setattr(place(model), key, value)
    return model


CHANGED = {
    "has a forward of its own": with_its_own_forward,
    "forward of its own; save": lambda: changed(lambda m: setattr(m.lm_head, "forward", lambda x: x)),
    "lm_head .*: has a forward of its own": lambda: changed(with_its_own_call),
    r"act_fn: is no module, the config makes": lambda: changed(with_a_plain_function),
    "has a forward hook": lambda: changed(lambda m: m.lm_head.register_forward_hook(lambda *_: None)),
    "hook; remove it": lambda: changed(lambda m: m.lm_head.register_forward_pre_hook(lambda *_: None)),
    r"rotary_emb\.inv_freq: is not the table": lambda: changed(lambda m: m.model.rotary_emb.inv_freq.mul_(0.5)),
    "is ReLU, the config makes": lambda: changed(lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.ReLU())),
    r"epsilon: is .*, the config makes 0\.5": lambda: changed(lambda m: setattr(m.config, "rms_norm_eps", 0.5)),
    r"position_ids: is not the table": lambda: with_other_positions(tiny.case("bert-masked-lm-tied").build()),
    r"max_norm: is 0\.1": lambda: changed(with_short_rows),
    r"is_causal: is False, the config makes True": lambda: changed(lambda m: setattr(attention(m), "is_causal", False)),
    r"scaling: is 0\.5": lambda: changed(lambda m: setattr(attention(m), "scaling", torch.tensor(0.5))),
    r"top_k: is 1, the config makes 2": lambda: edited(
        "mixtral-untied", lambda m: m.model.layers[0].mlp.gate, "top_k", 1
    ),
    r"num_experts_per_tok: is 2, the config makes 3": lambda: edited(
        "mixtral-untied", lambda m: m.config, "num_experts_per_tok", 3
    ),
    r"offset: is 3": lambda: edited("opt-untied", lambda m: m.model.decoder.embed_positions, "offset", 3),
}


@pytest.mark.parametrize("words", CHANGED)
def test_a_model_that_computes_something_else_is_refused(words: str) -> None:
    assert ib.load(llama()).n_params > 0
    with pytest.raises(ib.IsobasinError, match=words):
        ib.load(CHANGED[words]())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.to(torch.float8_e4m3fn), r"lm_head\.weight: found float8_e4m3fn numbers, expected .* 16 bits"),
        (lambda x: x.to_sparse(), r"lm_head\.weight: has the layout torch\.sparse_coo, expected a dense tensor"),
    ],
)
def test_numbers_that_can_not_be_computed_with_are_refused(change: Callable[[Any], Any], words: str) -> None:
    model = tiny.case("llama-untied").build()
    model.lm_head.weight = nn.Parameter(change(model.lm_head.weight.data), requires_grad=False)
    with pytest.raises(ib.IsobasinError, match=words):
        ib.load(model)
    with pytest.raises(ib.IsobasinError, match=words):
        ib.load(dict(model.state_dict()), model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})


def test_models_in_memory_are_accepted_also_cast_in_training_and_as_a_subclass_without_a_forward() -> None:
    models = [mt.built(name) for name in ("gemma3-tied", "whisper-tied", "beit-classifier", "deepseek_v3-groups")]
    model = llama().train().to(torch.bfloat16)
    model.__class__ = type("Mine", (type(model),), {})
    model.enable_input_require_grads()
    for each in (*models, model):
        assert ib.load(each).n_params > 0
