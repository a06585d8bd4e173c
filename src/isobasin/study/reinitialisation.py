"""A trained model with one part re-initialised: the start of the paper's fine-tuning runs."""

import dataclasses

import torch

from isobasin.errors import ArchitectureError
from isobasin.model import ModelConfig, Transformer
from isobasin.symmetries import SCOPES


def scope_parameters(model: Transformer, scope: str) -> frozenset[str]:
    """Names of the parameters in a scope. Attention is q, k, v and o, without the norm before it.

    >>> config = ModelConfig(d_model=8, n_layers=2, n_heads=2, d_ff=16, d_vocab=5, n_positions=4, bias=False)
    >>> sorted(scope_parameters(Transformer(config), "first-attention"))[:2]
    ['blocks.0.attn.k.weight', 'blocks.0.attn.o.weight']
    """
    if scope not in SCOPES:
        raise ArchitectureError(f"scope {scope!r} is unknown, expected one of {', '.join(SCOPES)}")
    names = [name for name, _ in model.named_parameters()]
    inside = {
        "first-attention": lambda name: name.startswith("blocks.0.attn."),
        "all-attention": lambda name: ".attn." in name,
        "first-block": lambda name: name.startswith("blocks.0."),
        "model": lambda name: True,
    }[scope]
    return frozenset(filter(inside, names))


@torch.no_grad()
def reinitialise(model: Transformer, scope: str, *, seed: int, n_heads: int | None = None) -> Transformer:
    """A new model: the scope as `Transformer(config, seed=seed)` initialises it, the rest bitwise unchanged.

    `n_heads` splits the same width into another number of heads. A configuration has one number of heads for all
    layers, so this needs a scope that contains all attention layers.
    """
    replaced = scope_parameters(model, scope)
    if n_heads is not None and scope not in ("all-attention", "model"):
        raise ArchitectureError(
            f"n_heads={n_heads} with scope {scope!r}: the layers that stay keep {model.config.n_heads} heads; "
            "use scope all-attention or model"
        )
    config = model.config if n_heads is None else _with_heads(model.config, n_heads)
    like = next(model.parameters())
    made = Transformer(config, seed=seed).to(like).train(model.training)
    before = dict(model.named_parameters())
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(before[name].requires_grad)
        if name not in replaced:
            parameter.copy_(before[name])
    return made


def _with_heads(config: ModelConfig, n_heads: int) -> ModelConfig:
    """The same widths of queries and keys, split into other heads; the rotary share of a head stays."""
    width, kv_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    d_head = width // n_heads if n_heads > 0 else 0
    if d_head < 1 or width % n_heads or kv_width % d_head:
        raise ArchitectureError(
            f"n_heads={n_heads}: queries of width {width} and keys of width {kv_width} can not be cut so; "
            "choose a number that divides both"
        )
    rotary_dims = config.rotary_dims * d_head // config.d_head
    return dataclasses.replace(
        config, n_heads=n_heads, n_kv_heads=kv_width // d_head, d_head=d_head, rotary_dims=rotary_dims
    )
