"""What a checkpoint computes, in float64 from end to end: one plain function over the tensors of the file.

    forward(tensors, config, inputs) -> (batch, everything the function says), float64

`tensors` have their on-disk names, `config` is the dictionary of config.json, `inputs` is what the model of
transformers would be called with. Nothing is cast to float32 on the way (transformers does so inside norms,
softmax and rotary angles), so a change of weights that keeps the function is seen to keep it to about 1e-13.
Differentiable. A tensor that no formula reads is an error: a stale name must not pass as "unchanged".
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Config = Mapping[str, Any]
Inputs = Mapping[str, Tensor]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}

# Masks and tables that older files carry and the function does not read.
BUFFERS = re.compile(
    r"h\.\d+\.attn\.(masked_)?bias"
    r"|layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"
    r"|layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    r"|embeddings\.position_ids"
)


class Weights:
    """Tensors in float64 under their names without the base model's prefix; remembers what was read."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self._tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        self._unread = set(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        self._unread.discard(name)
        return self._tensors[name].double()

    def head(self, own: str, shared: str, config: Config) -> Tensor:
        """A head's own tensor, which transformers prefers even in a tied model, else the one it shares."""
        tied = config.get("tie_word_embeddings", config["model_type"] in ("gpt2", "bert"))
        self._unread.discard(shared)  # an untied BERT still holds the bias that it would share, unused
        return self[shared if tied and own not in self else own]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x Wᵀ + b, W stored as (out, in); no bias where the file has none."""
        y = x @ self[f"{name}.weight"].mT
        return y + self[f"{name}.bias"] if f"{name}.bias" in self else y

    def conv1d(self, name: str, x: Tensor) -> Tensor:
        """x W + b: GPT-2 stores W as (in, out)."""
        return x @ self[f"{name}.weight"] + self[f"{name}.bias"]

    def layer_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return normed * self[f"{name}.weight"] + self[f"{name}.bias"]

    def rms_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self[f"{name}.weight"]

    def assert_all_read(self) -> None:
        unread = sorted(name for name in self._unread if not BUFFERS.fullmatch(name))
        assert not unread, f"no formula of the oracle reads {unread}"


def heads(x: Tensor, n_heads: int) -> Tensor:
    """(batch, T, n_heads · d_head) -> (batch, head, T, d_head)."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q kᵀ · scale) v, heads side by side again, scale 1/√d_head unless given, grouped queries."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def visible(inputs: Inputs, n: int, *, causal: bool, window: int | None = None) -> Tensor:
    """Which key a query sees, (batch or 1, 1, n, n); padding on the right, else a row would see nothing."""
    behind = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    seen = (behind >= 0) & (behind < (window or n)) if causal else torch.ones_like(behind).bool()
    padding = inputs.get("attention_mask")
    return seen[None, None] if padding is None else seen & padding.bool()[:, None, None, :]


def rotate(x: Tensor, rope: tuple[Tensor, float]) -> Tensor:
    """Turn pair (j, j + r/2) of the first r columns at position t by t · frequency_j; the rest stay."""
    (frequencies, factor), n_pairs = rope, len(rope[0])
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequencies
    cos, sin = angle.cos() * factor, angle.sin() * factor
    a, b, rest = x.split([n_pairs, n_pairs, x.shape[-1] - 2 * n_pairs], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def rope_settings(config: Config) -> dict[str, Any]:
    """The rotary settings in one spelling, from 5.x (`rope_parameters`) or older keys."""
    is_neox = config["model_type"] == "gpt_neox"
    scaling = config.get("rope_scaling") or {}
    older = {
        "rope_type": scaling.get("type", "default"),
        "rope_theta": config.get("rotary_emb_base" if is_neox else "rope_theta", 10_000.0),
        "partial_rotary_factor": config.get("rotary_pct", 0.25) if is_neox else 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }
    return older | scaling | (config.get("rope_parameters") or {})


def rotary(config: Config, d_head: int) -> tuple[Tensor, float]:
    """Angular frequency of each rotary pair, and the factor on their cosine and sine."""
    rope = rope_settings(config)
    n = int(d_head * rope["partial_rotary_factor"])
    frequencies = rope["rope_theta"] ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
    if rope["rope_type"] == "default":
        return frequencies, 1.0
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"], 1.0
    kept, factor = {"llama3": _llama3, "yarn": _yarn}[rope["rope_type"]](rope, frequencies)
    return frequencies * (kept + (1 - kept) / rope["factor"]), factor


def _llama3(rope: Config, frequencies: Tensor) -> tuple[Tensor, float]:
    """How much of a frequency is kept, by how often it turns within the original length."""
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    return ((turns - low) / (high - low)).clamp(0, 1), 1.0


def _yarn(rope: Config, frequencies: Tensor) -> tuple[Tensor, float]:
    """A ramp over the pairs, between those that turn `beta_fast` and `beta_slow` times."""
    n, length = 2 * len(frequencies), rope["original_max_position_embeddings"]
    turns = (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    low, high = (n / 2 * math.log(length / (2 * math.pi * t), rope["rope_theta"]) for t in turns)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    ramp = (torch.arange(n // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)
    return 1 - ramp.clamp(0, 1), _yarn_factor(rope)


def _yarn_factor(rope: Config) -> float:
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    growth = 0.1 * math.log(max(rope["factor"], 1))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return (1 + growth * rope["mscale"]) / (1 + growth * rope["mscale_all_dim"])
    return 1 + growth


def _decoder_outputs(w: Weights, config: Config, inputs: Inputs, x: Tensor, embedding: str) -> list[Tensor]:
    """Logits of a causal model, scores at the last token that is no padding, or the states."""
    architecture = config["architectures"][0]
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        own = "embed_out.weight" if config["model_type"] == "gpt_neox" else "lm_head.weight"
        return [x @ w.head(own, embedding, config).mT]
    if architecture.endswith("ForSequenceClassification"):
        ids, pad = inputs["input_ids"], config.get("pad_token_id")
        position = torch.arange(ids.shape[1])
        last = (position * (ids != pad)).argmax(-1) if pad is not None else position[-1]
        return [w.linear("score", x)[torch.arange(len(ids)), last]]
    return [x]


def gpt2(w: Weights, config: Config, inputs: Inputs) -> list[Tensor]:
    n_heads, eps = config["n_head"], config["layer_norm_epsilon"]
    act = ACTIVATIONS[config["activation_function"]]
    ids = inputs["input_ids"]
    seen = visible(inputs, ids.shape[1], causal=True)
    x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]
    for i in range(config["n_layer"]):
        at = f"h.{i}."
        scale = (x.shape[-1] // n_heads) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
        if config.get("scale_attn_by_inverse_layer_idx", False):
            scale /= i + 1
        fused = w.conv1d(at + "attn.c_attn", w.layer_norm(at + "ln_1", x, eps))
        q, k, v = (heads(part, n_heads) for part in fused.chunk(3, dim=-1))
        x = x + w.conv1d(at + "attn.c_proj", attention(q, k, v, seen, scale))
        units = act(w.conv1d(at + "mlp.c_fc", w.layer_norm(at + "ln_2", x, eps)))
        x = x + w.conv1d(at + "mlp.c_proj", units)
    return _decoder_outputs(w, config, inputs, w.layer_norm("ln_f", x, eps), "wte.weight")


def llama(w: Weights, config: Config, inputs: Inputs) -> list[Tensor]:
    """Llama and its relatives: Mistral adds a sliding window, Phi-3 fuses projections."""
    n_heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    n_kv_heads = config.get("num_key_value_heads") or n_heads
    turn = partial(rotate, rope=rotary(config, config.get("head_dim") or config["hidden_size"] // n_heads))
    act = ACTIVATIONS[config["hidden_act"]]
    ids = inputs["input_ids"]
    seen = visible(inputs, ids.shape[1], causal=True, window=config.get("sliding_window"))
    x = w["embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        normed = w.rms_norm(f"layers.{i}.input_layernorm", x, eps)
        q, k, v = _projections(w, at, normed, config)
        q, k, v = heads(q, n_heads), heads(k, n_kv_heads), heads(v, n_kv_heads)
        x = x + w.linear(at + "o_proj", attention(turn(q), turn(k), v, seen))
        normed = w.rms_norm(f"layers.{i}.post_attention_layernorm", x, eps)
        gate, up = _gate_and_up(w, mlp, normed, config)
        x = x + w.linear(mlp + "down_proj", act(gate) * up)
    return _decoder_outputs(w, config, inputs, w.rms_norm("norm", x, eps), "embed_tokens.weight")


def _projections(w: Weights, at: str, x: Tensor, config: Config) -> tuple[Tensor, ...]:
    """Queries, keys and values: three tensors, or one after the other in one (Phi-3)."""
    if config["model_type"] != "phi3":
        return tuple(w.linear(at + name, x) for name in ("q_proj", "k_proj", "v_proj"))
    fused, group = w.linear(at + "qkv_proj", x), config["num_attention_heads"] // config["num_key_value_heads"]
    n = fused.shape[-1] // (group + 2)
    return fused.split([group * n, n, n], dim=-1)


def _gate_and_up(w: Weights, at: str, x: Tensor, config: Config) -> tuple[Tensor, ...]:
    if config["model_type"] != "phi3":
        return w.linear(at + "gate_proj", x), w.linear(at + "up_proj", x)
    return w.linear(at + "gate_up_proj", x).chunk(2, dim=-1)


def gpt_neox(w: Weights, config: Config, inputs: Inputs) -> list[Tensor]:
    n_heads, eps = config["num_attention_heads"], config["layer_norm_eps"]
    turn = partial(rotate, rope=rotary(config, config["hidden_size"] // n_heads))
    act = ACTIVATIONS[config["hidden_act"]]
    ids = inputs["input_ids"]
    seen = visible(inputs, ids.shape[1], causal=True)
    x = w["embed_in.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        fused = w.linear(at + "attention.query_key_value", w.layer_norm(at + "input_layernorm", x, eps))
        q, k, v = heads(fused, n_heads).chunk(3, dim=-1)  # fused inside each head
        attended = w.linear(at + "attention.dense", attention(turn(q), turn(k), v, seen))
        read = x if config.get("use_parallel_residual", True) else x + attended
        normed = w.layer_norm(at + "post_attention_layernorm", read, eps)
        x = x + attended + w.linear(at + "mlp.dense_4h_to_h", act(w.linear(at + "mlp.dense_h_to_4h", normed)))
    return _decoder_outputs(w, config, inputs, w.layer_norm("final_layer_norm", x, eps), "embed_in.weight")


def bert(w: Weights, config: Config, inputs: Inputs) -> list[Tensor]:
    """Post-norm: each LayerNorm stands behind the sum."""
    n_heads, eps = config["num_attention_heads"], config["layer_norm_eps"]
    act = ACTIVATIONS[config["hidden_act"]]
    ids = inputs["input_ids"]
    types = inputs.get("token_type_ids", torch.zeros_like(ids))
    seen = visible(inputs, ids.shape[1], causal=False)
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][types]
    x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = w.layer_norm("embeddings.LayerNorm", x, eps)
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        q, k, v = (heads(w.linear(f"{at}attention.self.{p}", x), n_heads) for p in ("query", "key", "value"))
        x = x + w.linear(at + "attention.output.dense", attention(q, k, v, seen))
        x = w.layer_norm(at + "attention.output.LayerNorm", x, eps)
        x = x + w.linear(at + "output.dense", act(w.linear(at + "intermediate.dense", x)))
        x = w.layer_norm(at + "output.LayerNorm", x, eps)
    return _bert_outputs(w, config, x)


def _bert_outputs(w: Weights, config: Config, x: Tensor) -> list[Tensor]:
    architecture = config["architectures"][0]
    if architecture.endswith("ForTokenClassification"):
        return [w.linear("classifier", x)]
    if architecture.endswith("ForMaskedLM"):
        return [_bert_predictions(w, config, x)]
    if architecture.endswith("Model") and "pooler.dense.weight" not in w:
        return [x]
    pooled = torch.tanh(w.linear("pooler.dense", x[:, 0]))
    if architecture.endswith("ForSequenceClassification"):
        return [w.linear("classifier", pooled)]
    if architecture.endswith("ForPreTraining"):
        return [_bert_predictions(w, config, x), w.linear("cls.seq_relationship", pooled)]
    return [x, pooled]


def _bert_predictions(w: Weights, config: Config, x: Tensor) -> Tensor:
    at = "cls.predictions."
    h = ACTIVATIONS[config["hidden_act"]](w.linear(at + "transform.dense", x))
    h = w.layer_norm(at + "transform.LayerNorm", h, config["layer_norm_eps"])
    decoder = w.head(at + "decoder.weight", "embeddings.word_embeddings.weight", config)
    return h @ decoder.mT + w.head(at + "decoder.bias", at + "bias", config)


def vit(w: Weights, config: Config, inputs: Inputs) -> list[Tensor]:
    n_heads, eps = config["num_attention_heads"], config["layer_norm_eps"]
    act = ACTIVATIONS[config["hidden_act"]]
    x = _patches(w, inputs)
    first = w["embeddings.cls_token"].expand(len(x), -1, -1)
    x = torch.cat([first, x], dim=1) + w["embeddings.position_embeddings"]
    seen = visible(inputs, x.shape[1], causal=False)
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        normed = w.layer_norm(at + "layernorm_before", x, eps)
        parts = (w.linear(f"{at}attention.attention.{p}", normed) for p in ("query", "key", "value"))
        q, k, v = (heads(part, n_heads) for part in parts)
        x = x + w.linear(at + "attention.output.dense", attention(q, k, v, seen))
        units = act(w.linear(at + "intermediate.dense", w.layer_norm(at + "layernorm_after", x, eps)))
        x = x + w.linear(at + "output.dense", units)
    return _vit_outputs(w, config, w.layer_norm("layernorm", x, eps))


def _patches(w: Weights, inputs: Inputs) -> Tensor:
    """(batch, patch, d): a convolution whose stride is its width; masked patches become the mask token."""
    kernel = w["embeddings.patch_embeddings.projection.weight"]
    bias = w["embeddings.patch_embeddings.projection.bias"]
    x = F.conv2d(inputs["pixel_values"].double(), kernel, bias, stride=kernel.shape[-2:]).flatten(2).mT
    if "embeddings.mask_token" not in w:
        return x
    masked = inputs.get("bool_masked_pos", torch.zeros(x.shape[:2], dtype=torch.bool))
    return torch.where(masked[..., None], w["embeddings.mask_token"], x)


def _vit_outputs(w: Weights, config: Config, x: Tensor) -> list[Tensor]:
    architecture = config["architectures"][0]
    if architecture.endswith("ForImageClassification"):
        return [w.linear("classifier", x[:, 0])]
    if architecture.endswith("ForMaskedImageModeling"):
        side = math.isqrt(x.shape[1] - 1)
        patches = x[:, 1:].mT.unflatten(2, (side, side))
        pixels = F.conv2d(patches, w["decoder.0.weight"], w["decoder.0.bias"])
        return [F.pixel_shuffle(pixels, config["encoder_stride"])]
    if "pooler.dense.weight" not in w:
        return [x]
    return [x, ACTIVATIONS[config.get("pooler_act", "tanh")](w.linear("pooler.dense", x[:, 0]))]


_TEXT = ("input_ids", "attention_mask")
# model type: (formula, the base model's prefix, the inputs it knows)
_FAMILIES: Mapping[str, tuple[Callable[..., list[Tensor]], str, tuple[str, ...]]] = {
    "gpt2": (gpt2, "transformer.", _TEXT),
    "llama": (llama, "model.", _TEXT),
    "mistral": (llama, "model.", _TEXT),
    "qwen2": (llama, "model.", _TEXT),
    "phi3": (llama, "model.", _TEXT),
    "gpt_neox": (gpt_neox, "gpt_neox.", _TEXT),
    "bert": (bert, "bert.", (*_TEXT, "token_type_ids")),
    "vit": (vit, "vit.", ("pixel_values", "bool_masked_pos")),
}


def forward(tensors: Mapping[str, Tensor], config: Config, inputs: Inputs) -> Tensor:
    """Everything the function says about each example, side by side: (batch, n), float64.

    Logits (of both heads for BERT's pretraining), pixels, or a bare model's last states and pooler output.
    """
    formula, prefix, known = _FAMILIES[config["model_type"]]
    assert set(inputs) <= set(known), f"the oracle of {config['model_type']} does not know {sorted(inputs)}"
    weights = Weights(tensors, prefix)
    outputs = formula(weights, config, inputs)
    weights.assert_all_read()
    return torch.cat([output.flatten(1) for output in outputs], dim=1)
