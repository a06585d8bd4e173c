"""Re-initialisation: exactly the scope is replaced, with the values of a fresh model of that seed."""

import copy

import pytest
import torch

from isobasin.errors import ArchitectureError
from isobasin.model import ModelConfig, Transformer
from isobasin.study import SCOPES, reinitialise, scope_parameters

CONFIG = ModelConfig.preset(
    "vit", positions="rope", image_size=8, patch_size=4, n_channels=1, d_model=16, d_ff=24, n_layers=3, n_heads=2
)
PREFIXES = {
    "first-attention": ("blocks.0.attn.",),
    "all-attention": ("blocks.0.attn.", "blocks.1.attn.", "blocks.2.attn."),
    "first-block": ("blocks.0.",),
    "model": ("",),
}


def worn(config: ModelConfig = CONFIG) -> Transformer:
    """A model no parameter of which is as any seed draws it."""
    model = Transformer(config, seed=0)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator) + 0.1)
    return model


@pytest.mark.parametrize("scope", SCOPES)
def test_exactly_the_scope_is_reinitialised(scope: str) -> None:
    model, fresh = worn(), Transformer(CONFIG, seed=7).state_dict()
    before = copy.deepcopy(model.state_dict())
    made = reinitialise(model, scope, seed=7)
    after = made.state_dict()
    inside = {name for name in before if name.startswith(PREFIXES[scope])}
    assert scope_parameters(model, scope) == inside
    assert {name for name in after if torch.equal(after[name], fresh[name])} == inside
    assert {name for name in after if torch.equal(after[name], before[name])} == before.keys() - inside
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)  # the model itself


def test_two_seeds_differ_in_the_matrices_of_the_scope_alone() -> None:
    one, two = (reinitialise(worn(), "first-attention", seed=seed).state_dict() for seed in (1, 2))
    differing = {name for name in one if not torch.equal(one[name], two[name])}
    assert differing == {f"blocks.0.attn.{part}.weight" for part in "qkvo"}


def test_the_type_of_the_model_is_kept() -> None:
    made = reinitialise(worn().double(), "all-attention", seed=1)
    assert {p.dtype for p in made.parameters()} == {torch.float64}
    narrow = reinitialise(worn(), "all-attention", seed=1)
    assert {p.dtype for p in narrow.parameters()} == {torch.float32}


def test_other_heads_are_other_models_of_the_same_shapes() -> None:
    model, images = worn(), torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    made = reinitialise(model, "all-attention", seed=1, n_heads=4)
    assert (made.config.n_heads, made.config.n_kv_heads, made.config.d_head, made.config.rotary_dims) == (4, 4, 4, 4)
    assert (model.config.n_heads, model.blocks[0].attn.config.n_heads) == (2, 2)
    as_saved = Transformer(made.config)  # every part of it must know of the new heads
    as_saved.load_state_dict(made.state_dict())
    assert torch.equal(made(images), as_saved(images))
    assert not torch.equal(made(images), reinitialise(model, "all-attention", seed=1)(images))


def test_grouped_queries_keep_their_width() -> None:
    config = ModelConfig.preset("llama", d_model=16, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=8, n_positions=4)
    made = reinitialise(Transformer(config), "model", seed=1, n_heads=8)
    assert (made.config.n_heads, made.config.n_kv_heads, made.config.d_head) == (8, 4, 2)


@pytest.mark.parametrize(
    ("scope", "n_heads", "message"),
    [
        ("attention", None, "scope 'attention' is unknown, expected one of first-attention, all-attention"),
        ("first-attention", 4, "the layers that stay keep 2 heads"),
        ("first-block", 4, "the layers that stay keep 2 heads"),
        ("all-attention", 3, "n_heads=3: queries of width 16"),
        ("all-attention", 0, "n_heads=0"),
        ("all-attention", 16, "rotary_dims is 1"),
    ],
)
def test_impossible_heads_and_scopes_are_refused(scope: str, n_heads: int | None, message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        reinitialise(worn(), scope, seed=0, n_heads=n_heads)
