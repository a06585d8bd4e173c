"""Synthetic Llama-shaped checkpoints, written tensor by tensor."""

from pathlib import Path

import torch

from isobasin.checkpoint import CheckpointWriter

SMALL = {"d": 64, "layers": 2, "heads": 4, "kv": 2, "ff": 128, "vocab": 100}
LARGE = {"d": 2048, "layers": 16, "heads": 32, "kv": 8, "ff": 5632, "vocab": 32000}  # 1.7 GB in bfloat16


def write_llama(
    folder: Path,
    *,
    d: int,
    layers: int,
    heads: int,
    kv: int,
    ff: int,
    vocab: int,
    seed: int,
    noise_of: int | None = None,
    device: str = "cpu",
) -> Path:
    """Random weights of a sensible size; with `noise_of`, those of that seed and 10 % of noise. Drawn on a device."""
    shapes = {"model.embed_tokens.weight": (vocab, d), "lm_head.weight": (vocab, d), "model.norm.weight": (d,)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (d, d),
            f"{layer}.self_attn.k_proj.weight": (d * kv // heads, d),
            f"{layer}.self_attn.v_proj.weight": (d * kv // heads, d),
            f"{layer}.self_attn.o_proj.weight": (d, d),
            f"{layer}.mlp.gate_proj.weight": (ff, d),
            f"{layer}.mlp.up_proj.weight": (ff, d),
            f"{layer}.mlp.down_proj.weight": (d, ff),
            f"{layer}.input_layernorm.weight": (d,),
            f"{layer}.post_attention_layernorm.weight": (d,),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ff,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    infos = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    with CheckpointWriter(folder, infos, config=config, force=True) as writer:
        for number, name in enumerate(writer.order):
            tensor = _random(shapes[name], (noise_of or seed) * 100_003 + number, device)
            if noise_of is not None:
                tensor = tensor + 0.1 * _random(shapes[name], seed * 100_003 + number, device)
            writer.write(name, tensor.to(torch.bfloat16).cpu())
    return folder


def _random(shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    noise = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return 1 + 0.1 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
