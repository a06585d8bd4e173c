"""Arcee, ERNIE 4.5, Helium, Seed-OSS: Llama with one thing changed. BioGPT: OPT with other names."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, build, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import decoder_head
from isobasin.arch.families.llama import ATTENTION, BASE_NAMES, FEED_FORWARD, gated_decoder
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family


def arcee(config: Mapping[str, Any]) -> Architecture:
    """Squared ReLU units without gates; their scales are not used."""
    units = {name: text for name, text in FEED_FORWARD.items() if not name.endswith("gate_proj")}
    kind = units_kind(Fields(config).word("hidden_act", "relu2"))
    return gated_decoder(config, ATTENTION | units, units=kind)


def ernie4_5(config: Mapping[str, Any]) -> Architecture:
    """Rotary pairs are neighbours."""
    defaults = {"head_dim": 128, "num_key_value_heads": 2}
    layer = ATTENTION | FEED_FORWARD
    return gated_decoder(config, layer, defaults=defaults, interleaved=True, tied_default=True, rope_theta=500000.0)


def helium(config: Mapping[str, Any]) -> Architecture:
    """Rotary pairs are neighbours."""
    defaults = {"head_dim": 128, "num_key_value_heads": 20}
    return gated_decoder(config, ATTENTION | FEED_FORWARD, defaults=defaults, interleaved=True, rope_theta=100000.0)


def seed_oss(config: Mapping[str, Any]) -> Architecture:
    defaults = {"head_dim": 128, "num_key_value_heads": 8}
    return gated_decoder(config, ATTENTION | FEED_FORWARD, defaults=defaults)


def biogpt(config: Mapping[str, Any]) -> Architecture:
    c, layer = Fields(config), "biogpt.layers.{i}"
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    d_ff, d_head = c.size("intermediate_size"), c.d_head(n_heads, d, key=None)
    head = decoder_head(c, "biogpt.embed_tokens.weight", lm_head="output_projection", tied_default=True)
    positions, n_positions = "biogpt.embed_positions.weight", c.size("max_position_embeddings", 1024) + 2
    return build(
        family="biogpt",
        positions="learned",
        sizes=Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff),
        spaces=[
            Space("resid", d, stream_kind("layer", tied=head.tied, bare=head.bare), stream=True),
            Space("ff{i}", d_ff, units_kind(c.word("hidden_act", "gelu"))),
        ],
        heads=HeadSpace("heads", n_heads, n_heads, d_head),
        norms={
            "a{i}": f"layer(resid, {layer}.self_attn_layer_norm)",
            "m{i}": f"layer(resid, {layer}.final_layer_norm)",
            "f": f"layer(resid, biogpt.layer_norm{head.exposed})",
        },
        modules={
            f"{layer}.self_attn.q_proj": "qk{i}* a{i}*",
            f"{layer}.self_attn.k_proj": "qk{i} a{i}*",
            f"{layer}.self_attn.v_proj": "vo{i} a{i}*",
            f"{layer}.self_attn.out_proj": "resid vo{i}*",
            f"{layer}.fc1": "ff{i} m{i}*",
            f"{layer}.fc2": "resid ff{i}*",
        }
        | head.modules,
        tensors=head.tensors | {positions: f".{n_positions} resid"},
        aliases=head.aliases,
        unread={positions: range(2)},
    )


_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}

FAMILIES = (
    Family(
        "arcee",
        arcee,
        "ArceeForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(
            BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"),
            BiasFlag("mlp_bias", False, r"\bmlp\.\w+\.bias$"),
        ),
        unused=("scales of squared ReLU units",),
        example=("AFM 4.5B", _8B | {"intermediate_size": 18432, "vocab_size": 128004}),
    ),
    Family(
        "ernie4_5",
        ernie4_5,
        "Ernie4_5ForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-5},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("use_bias", False, r"\b(self_attn|mlp)\.\w+\.bias$"),),
        example=(
            "ERNIE 4.5 0.3B",
            {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 18}
            | {"intermediate_size": 3072, "vocab_size": 103424},
        ),
    ),
    Family(
        "helium",
        helium,
        "HeliumForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-8},
        rare_settings=CAUSAL,
        head_settings={"ForSequenceClassification": {"pad_token_id": 3}},
        bias_flags=(
            BiasFlag("attention_bias", False, r"\bself_attn\.[qkv]_proj\.bias$"),
            BiasFlag("", False, r"\bself_attn\.o_proj\.bias$"),
            BiasFlag("mlp_bias", False, r"\bmlp\.\w+\.bias$"),
        ),
        example=(
            "Helium 2B",
            {"hidden_size": 2560, "num_attention_heads": 20, "num_hidden_layers": 24}
            | {"intermediate_size": 7040, "vocab_size": 48000},
        ),
    ),
    Family(
        "seed_oss",
        seed_oss,
        "SeedOssForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-6},
        rare_settings=CAUSAL,
        head_settings={"ForSequenceClassification": {"pad_token_id": 1}},
        bias_flags=(
            BiasFlag("attention_bias", True, r"\bself_attn\.[qkv]_proj\.bias$"),
            BiasFlag("attention_out_bias", False, r"\bself_attn\.o_proj\.bias$"),
            BiasFlag("mlp_bias", False, r"\bmlp\.\w+\.bias$"),
        ),
        example=(
            "Seed-OSS 36B",
            {"hidden_size": 5120, "num_attention_heads": 80, "num_hidden_layers": 64}
            | {"intermediate_size": 27648, "vocab_size": 155136},
        ),
    ),
    Family(
        "biogpt",
        biogpt,
        "BioGptForCausalLM",
        ("ForCausalLM", "Model", "ForSequenceClassification", "ForTokenClassification"),
        prefix="biogpt.",
        settings={"hidden_act": "gelu", "scale_embedding": True},
        rare_settings=CAUSAL,
        head_settings={"ForSequenceClassification": {"pad_token_id": 1}},
        ignored=("activation_dropout", "layerdrop", "layer_norm_eps"),
        example=(
            "BioGPT",
            {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24}
            | {"intermediate_size": 4096, "vocab_size": 42384},
        ),
    ),
)
