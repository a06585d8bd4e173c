"""GPT-2: learned positions, LayerNorm, fused QKV in Conv1D layout (inputs first), tied head by default."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, Sum, build, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import decoder_head
from isobasin.arch.family import CAUSAL, DECODER_HEADS, LAST_TOKEN, Family
from isobasin.errors import ArchitectureError


def gpt2(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("n_embd"), c.size("n_head"), c.size("n_layer")
    n_positions = c.size("n_positions", 1024)
    d_ff = c.size("n_inner", 4 * d)
    d_head = c.d_head(n_heads, d, key=None)
    if c.flag("add_cross_attention", False):
        raise ArchitectureError("config.json: add_cross_attention is true; only GPT-2 decoders are supported")
    head = decoder_head(c, "transformer.wte.weight", tied_default=True)
    tensors = head.tensors | {
        "transformer.wpe.weight": f".{n_positions} resid",
        "transformer.h.{i}.attn.bias": "-",
        "transformer.h.{i}.attn.masked_bias": "-",
    }
    modules = head.modules | {
        "transformer.h.{i}.attn.c_attn": "a{i}* qk{i}*+qk{i}+vo{i}",
        "transformer.h.{i}.attn.c_proj": "vo{i}* resid",
        "transformer.h.{i}.mlp.c_fc": "m{i}* ff{i}",
        "transformer.h.{i}.mlp.c_proj": "ff{i}* resid",
    }
    free = Sum("positions", (("transformer.wpe.weight", 0, None),), (("transformer.wte.weight", 0, None),))
    return build(
        family="gpt2",
        positions="learned",
        sizes=Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff),
        spaces=[
            Space("resid", d, stream_kind("layer", tied=head.tied, bare=head.bare), stream=True),
            Space("ff{i}", d_ff, units_kind(c.word("activation_function", "gelu_new"))),
        ],
        heads=HeadSpace("heads", n_heads, n_heads, d_head),
        norms={
            "a{i}": "layer(resid, transformer.h.{i}.ln_1)",
            "m{i}": "layer(resid, transformer.h.{i}.ln_2)",
            "f": f"layer(resid, transformer.ln_f{head.exposed})",
        },
        modules=modules,
        tensors=tensors,
        # Tied, the same vector added to every row would add a constant to all logits.
        sums=() if head.tied else (free,),
        aliases=head.aliases,
    )


FAMILIES = (
    Family(
        "gpt2",
        gpt2,
        "GPT2LMHeadModel",
        ("LMHeadModel", *DECODER_HEADS[1:]),
        prefix="transformer.",
        settings={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        aliases={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
        },
        ignored=("reorder_and_upcast_attn",),  # how half precision is computed
        example=("GPT-2 (tied)", {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}),
    ),
)
