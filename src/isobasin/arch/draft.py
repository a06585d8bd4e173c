"""A first draft of a family file, from a checkpoint's tensor names, shapes and config. `isobasin check` then tells
whether it is right; what could not be recognised is marked in the draft."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from isobasin.arch.config import Fields
from isobasin.arch.family import DECODER_HEADS

Shapes = Mapping[str, tuple[int, ...]]
_NUMBER = re.compile(r"\.(\d+)\.")
# The last words of a module's name, and the pattern that they suggest.
_MODULES = (
    (r"(qkv|query_key_value|Wqkv|c_attn|in_proj|qkv_proj)", "qk{i}:q*+qk{i}+vo{i} a{i}*"),
    (r"(q|q_proj|query|wq|q_lin|query_proj|to_q)", "qk{i}:q* a{i}*"),
    (r"(k|k_proj|key|wk|k_lin|key_proj|to_k)", "qk{i} a{i}*"),
    (r"(v|v_proj|value|wv|v_lin|value_proj|to_v)", "vo{i} a{i}*"),
    (r"(o|o_proj|out_proj|wo|out_lin|attention\.dense|attn\.Wo|self_attention\.dense|to_out)", "resid vo{i}:q*"),
    (r"(gate_up_proj|weights_in|Wi)", "|ff{i}|+ff{i} m{i}*"),
    (r"(gate_proj|w1|wi_0|gate|fc12)", "|ff{i}| m{i}*"),
    (r"(up_proj|w3|wi_1|wi|fc1|c_fc|fc_in|dense_h_to_4h|intermediate\.dense|lin1|fc11)", "ff{i} m{i}*"),
    (r"(down_proj|w2|fc2|c_proj|fc_out|dense_4h_to_h|output\.dense|lin2|weights_out|mlp\.Wo)", "resid ff{i}*"),
)
BASE = "Model"
_WIDTH = ("hidden_size", "d_model", "n_embd", "dim")
_NORM = re.compile(r"(norm|ln|layer_?norm|ln_\d|ln_f|norm_\d|norm_f)(\w*)$", re.IGNORECASE)


def draft_family(config: Mapping[str, Any], shapes: Shapes) -> str:
    """The text of a family file."""
    c, templates = Fields(config), _templates(shapes)
    name, model_class = c.word("model_type", "my_model"), c.architecture
    norms = _norms(templates, config.get(_key(config, *_WIDTH)))
    modules, tensors, unknown = _patterns(templates, shapes, norms, config)
    gains = _head_gains(unknown)
    unknown = [(tensor, shape) for tensor, shape in unknown if tensor not in gains.values()]
    more = f", qk_norm=True, q_gain={gains['q']!r}, k_gain={gains['k']!r}" if gains else ""
    kind = "layer" if any(f"{module}.bias" in templates for module in norms.values()) else "rms"
    function = re.sub(r"\W", "_", name)
    lines = [
        f'"""A draft of the family {name}. Check it with `isobasin check MODEL --family FILE`."""',
        "",
        "from isobasin.arch import Family, HeadSpace, Sizes, Space",
        "from isobasin.arch.architecture import build, stream_kind",
        "from isobasin.arch.config import Fields",
        "",
        "",
        f"def {function}(config):",
        "    c = Fields(config)",
        *_sizes(config),
        "    # A tied head, a norm on the skip path or behind a sublayer keep the stream from rotating.",
        f"    tied = c.flag('tie_word_embeddings', {not any('lm_head' in n for n in shapes)})",
        "    return build(",
        f"        family={name!r},",
        f"        positions={_positions(config, templates)!r},",
        "        sizes=Sizes(n_layers, n_heads, n_kv_heads, d, d_head, d_ff),",
        "        spaces=[",
        f"            Space('resid', d, stream_kind({kind!r}, tied=tied), stream=True),",
        f"            Space('ff{{i}}', d_ff, {_units(modules)!r}),",
        "        ],",
        f"        heads=HeadSpace('heads', n_heads, n_kv_heads, d_head, {_rotary(config)}{more}),",
        "        norms={",
        *(f"            {label!r}: '{kind}(resid, {module})'," for label, module in norms.items()),
        "        },",
        "        modules={",
        *(f"            {module!r}: {text!r}," for module, text in modules.items()),
        "        },",
        "        tensors={",
        *(f"            {tensor!r}: {text}," for tensor, text in tensors.items()),
        *(
            f"            {tensor!r}: '-',  # not recognised, shape {shape}: write its pattern"
            for tensor, shape in unknown
        ),
        "        },",
        f"        aliases={_aliases(shapes)},",
        "        rotary=c.rotary()," if _rotary(config) != "0" else "        rotary={},",
        "    )",
        "",
        "",
        "FAMILIES = (",
        f"    Family({name!r}, {function}, {model_class!r}{_heads(model_class)}),",
        ")",
    ]
    return "\n".join(lines) + "\n"


def _head_gains(unknown: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, str]:
    """The gains of norms on queries and keys, which all heads of a layer share: `q` and `k`, or none."""
    found = {}
    for tensor, shape in unknown:
        part = re.search(r"\.(q|k)(uery|ey)?_?(layer)?norm\.weight$", tensor)
        if part and "{i}" in tensor and len(shape) == 1:
            found[part[1]] = tensor
    return found if len(found) == 2 else {}


def _heads(model_class: str) -> str:
    """The heads of the family where the usual ones, those of a decoder, do not include that of this class."""
    head = model_class[model_class.find("For") :] if "For" in model_class else BASE
    return "" if head in DECODER_HEADS else f", heads=({head!r}, {BASE!r})"


def _key(config: Mapping[str, Any], *keys: str) -> str:
    """The one of some names of a size that a config has."""
    return next((key for key in keys if isinstance(config.get(key), int)), keys[0])


def _templates(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Names with `{i}` for the number of a layer."""
    return {_NUMBER.sub(".{i}.", name, count=1): shape for name, shape in shapes.items()}


def _norms(templates: Shapes, d: int | None) -> dict[str, str]:
    """The modules of norms by label: the first of a layer is read by attention, the second by the units, `f` by the
    head."""
    modules = [name.removesuffix(".weight") for name, shape in templates.items() if shape == (d,)]
    modules = [m for m in modules if f"{m}.weight" in templates and _NORM.search(m.rpartition(".")[2])]
    inside = [m for m in modules if "{i}" in m and not re.search(r"\b[qk]_?(layer)?norm", m)]
    order = sorted(inside, key=lambda m: (_rank(m), m))
    outside = sorted((m for m in modules if "{i}" not in m), key=lambda m: "embed" in m)
    return dict(zip(("a{i}", "m{i}", "x{i}", "y{i}"), order)) | dict(zip(("f", "g", "h"), outside))


def _rank(module: str) -> int:
    """Where in its layer a norm stands, by its name."""
    words = ("input", "ln_1", "norm1", "norm_1", "self_attn", "attn_norm", "before", "attention_norm")
    return 0 if any(word in module for word in words) and "post" not in module else 1


def _patterns(
    templates: Shapes, shapes: Shapes, norms: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, str], list[tuple[str, tuple[int, ...]]]]:
    modules: dict[str, str] = {}
    tensors: dict[str, str] = {}
    unknown: list[tuple[str, tuple[int, ...]]] = []
    known = {f"{module}.{part}" for module in norms.values() for part in ("weight", "bias")}
    second = "m{i}" in norms
    for name, shape in templates.items():
        module, _, part = name.rpartition(".")
        if name in known or (part == "bias" and f"{module}.weight" in templates):
            continue
        if "{i}" in name and part == "weight" and len(shape) == 2:
            text = next((text for words, text in _MODULES if re.search(rf"(^|\.){words}$", module)), None)
            if text is not None:
                modules[module] = text if second else text.replace("m{i}", "a{i}")
                continue
        if len(shape) == 2 and shape[0] == config.get("vocab_size") and "{i}" not in name:
            head = re.search(r"(lm_head|embed_out|decoder|output)", name)
            tied = not any("lm_head" in n or "embed_out" in n for n in shapes)
            words = "f'.{vocab} f*'" if head else "f'.{vocab} resid'"
            tensors[name] = words if head or not tied else f"f'.{{vocab}} resid & .{{vocab}} f*' if tied else {words}"
            continue
        if len(shape) == 2 and re.search(r"(wpe|position)", name) and "{i}" not in name:
            tensors[name] = f"'.{shape[0]} resid'"
            continue
        unknown.append((name, shape))
    return modules, tensors, unknown


def _sizes(config: Mapping[str, Any]) -> list[str]:
    keys = {
        "d": _key(config, *_WIDTH),
        "n_layers": _key(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "n_heads": _key(config, "num_attention_heads", "n_head", "n_heads", "num_heads"),
        "d_ff": _key(config, "intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"),
        "vocab": "vocab_size",
    }
    lines = [f"    {name} = c.size({key!r})" for name, key in keys.items()]
    return [
        *lines,
        "    n_kv_heads = c.size('num_key_value_heads', n_heads)",
        "    d_head = c.d_head(n_heads, d)",
    ]


def _positions(config: Mapping[str, Any], templates: Shapes) -> str:
    if _rotary(config) != "0":
        return "rope"
    return "learned" if any(re.search(r"(wpe|position)", name) for name in templates) else "none"


def _rotary(config: Mapping[str, Any]) -> str:
    keys = ("rope_theta", "rope_parameters", "rope_scaling", "rotary_pct", "partial_rotary_factor", "rotary_emb_base")
    if not any(config.get(key) is not None for key in keys):
        return "0"
    key = next((k for k in ("partial_rotary_factor", "rotary_pct") if config.get(k) is not None), "")
    return f"c.rotary_columns(d_head, {key!r}, 1.0)" if key else "d_head"


def _units(modules: Mapping[str, str]) -> str:
    return "scaled" if any(text.startswith("|ff") for text in modules.values()) else "permutation"


def _aliases(shapes: Shapes) -> str:
    if any("lm_head" in name or "embed_out" in name for name in shapes):
        return "{}"
    words = next((n for n in shapes if re.search(r"(wte|embed_tokens|word_embeddings|tok_embeddings)\.weight$", n)), "")
    return f"{{'lm_head.weight': {words!r}}} if tied else {{}}"
