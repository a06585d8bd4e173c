"""Never worse than the recipe on heads that were trained, not drawn: two small models of different seeds."""

import pytest
import torch
from torch import Tensor

from isobasin.alignment.head_linear import align_matrices
from isobasin.alignment.head_rotary import align_rotary, pair_constants, rotary_objective
from isobasin.alignment.reference import align_rotary_recipe, descend_linear
from isobasin.model import ModelConfig, Transformer
from isobasin.symmetries.attention import AttentionMatrices, attention_matrices
from isobasin.views import AsFloat64
from isobasin.weights import load


def trained(positions: str, seed: int) -> list[AttentionMatrices]:
    """Attention of a model that has learned to copy what it saw three tokens ago."""
    config = ModelConfig.preset(
        "llama", positions=positions, d_model=32, n_layers=3, n_heads=4, d_ff=48, d_vocab=17, n_positions=24
    )
    model = Transformer(config, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(80):
        tokens = torch.randint(17, (32, 24), generator=rng)
        loss = torch.nn.functional.cross_entropy(model(tokens)[:, 3:].flatten(0, 1), tokens[:, :-3].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = load({k: v.detach() for k, v in model.state_dict().items()}, config.to_dict())
    return [attention_matrices(weights.arch, heads, AsFloat64(weights)) for heads in weights.arch.heads()]


def pairs(positions: str) -> tuple[list[Tensor], list[Tensor]]:
    """(Q, K) and (V, O) of both models, all layers side by side: 12 heads each."""
    sides = [trained(positions, seed) for seed in (0, 1)]
    qk = [torch.cat([getattr(m, part) for m in side]) for side in sides for part in ("q", "k")]
    vo = [torch.cat([getattr(m, part) for m in side]) for side in sides for part in ("v", "o")]
    return qk, vo


def test_gl_on_24_trained_head_pairs() -> None:
    for heads in pairs("none"):
        ours = align_matrices(*heads)
        recipe = descend_linear(*heads, max_steps=6000, tol=1e-8)
        assert int(recipe.converged.sum()) >= 9  # of 12: what is not at rest after 6000 steps can only be higher
        assert bool((ours.objective <= recipe.objective * (1 + 1e-9)).all())
        start = descend_linear(*heads, max_steps=0)
        assert bool((ours.objective < 0.999 * start.objective).any())  # the orthogonal start alone is not enough


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_h_on_trained_rotary_pairs(factor: float) -> None:
    heads, _ = pairs("rope")
    c = pair_constants(*heads, layout="half")
    constants = (c.eta_q, c.eta_k, c.gamma_q, c.gamma_k)
    ours = align_rotary(*constants)
    brent = rotary_objective(align_rotary_recipe(*constants, factor=factor), *constants)
    size = c.norm_a
    assert bool((ours.objective <= brent + 1e-9 * size).all())
    if factor == 4.0:  # the factor the paper prints does not minimise the distance as we define its terms
        assert bool((ours.objective < brent - 1e-3 * size).any())
