"""The project's own Transformer (`isobasin.model`): every switch of it, as patterns."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, Sum, build, stream_kind
from isobasin.arch.config import Fields
from isobasin.arch.family import Family
from isobasin.errors import ArchitectureError

_BLOCK = "blocks.{i}"
_KEYS = {
    *("model_type", "architectures", "dtype", "torch_dtype", "isobasin_version", "transformers_version"),
    *("d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "d_vocab", "n_classes", "n_positions"),
    *("image_size", "patch_size", "n_channels", "positions", "norm", "post_norm", "feed_forward", "causal", "bias"),
    *("tied", "position_scale", "rope_theta", "rotary_dims", "rotary_layout", "norm_eps"),
}


def own(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("d_model"), c.size("n_heads"), c.size("n_layers")
    d_head, d_ff = c.d_head(n_heads, d, key="d_head"), c.size("d_ff")
    sizes = Sizes(n_layers, n_heads, c.size("n_kv_heads", n_heads), d, d_head, d_ff)
    positions = c.choice("positions", "none", "sinusoidal", "learned", "rope", "alibi")
    norm, gated = c.choice("norm", "layer", "rms"), c.choice("feed_forward", "gelu", "swiglu") == "swiglu"
    post, tied = c.flag("post_norm", False), c.flag("tied", False)
    _check_keys(config)
    last = f"n{2 * n_layers}" if post else "f"
    return build(
        family="isobasin",
        positions=positions,
        sizes=sizes,
        spaces=[
            Space("resid", d, stream_kind(norm, tied=tied, post_norm=post), stream=True),
            Space("ff{i}", d_ff, "scaled" if gated else "permutation"),
        ],
        heads=HeadSpace(
            "heads",
            n_heads,
            sizes.n_kv_heads,
            d_head,
            c.size("rotary_dims", d_head) if positions == "rope" else 0,
            interleaved=c.choice("rotary_layout", "half", "interleaved") == "interleaved",
            permutable=positions != "alibi",  # each head has a slope of its own
        ),
        norms=_post_norms(norm, n_layers) if post else _pre_norms(norm),
        modules=_blocks(post, gated) | _ends(c, last, tied),
        tensors=_embeddings(c, last, tied),
        sums=_sums(c, positions, tied),
        aliases={"head.weight": "embed.tokens.weight"} if tied else {},
        rotary=c.rotary(),
    )


def _check_keys(config: Mapping[str, Any]) -> None:
    """A setting nobody knows may change the function: refuse it."""
    unknown = sorted(set(config) - _KEYS)
    if unknown:
        raise ArchitectureError(f"config.json: {unknown[0]!r} is no setting of an isobasin model; remove it")


def _pre_norms(norm: str) -> dict[str, str]:
    return {
        "a{i}": f"{norm}(resid, {_BLOCK}.norm1)",
        "m{i}": f"{norm}(resid, {_BLOCK}.norm2)",
        "f": f"{norm}(resid, norm)",
    }


def _post_norms(norm: str, n_layers: int) -> dict[str, str]:
    return {
        "n0": f"{norm}(resid, embed.norm, skip=blocks.0.attn.o)",
        "n{2i+1}": f"{norm}(resid, {_BLOCK}.norm1, skip={_BLOCK}.mlp.down)",
        "n{2i+2}": f"{norm}(resid, {_BLOCK}.norm2, skip=blocks.{{i+1}}.attn.o)",
        f"n{2 * n_layers}": f"{norm}(resid, blocks.{n_layers - 1}.norm2)",
    }


def _blocks(post: bool, gated: bool) -> dict[str, str]:
    a, m = ("n{2i}*", "n{2i+1}*") if post else ("a{i}*", "m{i}*")
    gate = {f"{_BLOCK}.mlp.gate": f"|ff{{i}}| {m}"} if gated else {}
    return gate | {
        f"{_BLOCK}.attn.q": f"qk{{i}}:q* {a}",
        f"{_BLOCK}.attn.k": f"qk{{i}} {a}",
        f"{_BLOCK}.attn.v": f"vo{{i}} {a}",
        f"{_BLOCK}.attn.o": "resid vo{i}:q*",
        f"{_BLOCK}.mlp.up": f"ff{{i}} {m}",
        f"{_BLOCK}.mlp.down": "resid ff{i}*",
    }


def _ends(c: Fields, last: str, tied: bool) -> dict[str, str]:
    out = c.size("n_classes") if c.has("n_classes") else c.size("d_vocab")
    ends = {} if tied else {"head": f".{out} {last}*"}
    if c.has("image_size"):
        ends["embed.patches"] = f"resid .{c.size('n_channels', 3) * c.size('patch_size') ** 2}"
    return ends


def _embeddings(c: Fields, last: str, tied: bool) -> dict[str, str]:
    tensors = {}
    if c.has("d_vocab") and not c.has("image_size"):
        vocab = c.size("d_vocab")
        tensors["embed.tokens.weight"] = f".{vocab} resid & .{vocab} {last}*" if tied else f".{vocab} resid"
    if c.word("positions", "none") in ("learned", "sinusoidal"):
        rows = c.size("n_positions") if c.has("n_positions") else ""
        tensors["embed.positions.weight"] = f".{rows} resid"
    return tensors


def _sums(c: Fields, positions: str, tied: bool) -> tuple[Sum, ...]:
    if positions not in ("learned", "sinusoidal") or tied:
        return ()
    inputs = "embed.patches.bias" if c.has("image_size") else "embed.tokens.weight"
    return (Sum("positions", (("embed.positions.weight", 0, None),), ((inputs, 0, None),)),)


FAMILIES = (
    Family(
        "isobasin",
        own,
        settings={
            "positions": "none",
            "norm": "layer",
            "post_norm": False,
            "feed_forward": "gelu",
            "causal": False,
            "norm_eps": 1e-5,
            "image_size": None,
            "patch_size": None,
        },
        tied_key="tied",
        example=(
            "our Llama preset",
            {"d_model": 256, "n_heads": 8, "n_layers": 6, "d_ff": 688, "d_vocab": 256}
            | {"positions": "rope", "norm": "rms", "feed_forward": "swiglu"},
        ),
    ),
)
