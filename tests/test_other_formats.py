"""Models in formats of other programs: GGUF files are read; timm and open_clip are refused with the way out."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import isobasin as ib
import tiny
from isobasin.cli import run
from isobasin.errors import IsobasinError
from isobasin.runtime import module_of, output_difference

pytestmark = pytest.mark.hf
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(file: Path, model: Any, kind: str, quantised: str | None = None) -> Path:
    """A file as llama.cpp writes it: its names, and for Llama its order of rotary columns."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(str(file), kind)
    writer.add_context_length(16)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for name, tensor in model.state_dict().items():
        x, place = tensor.numpy(), WHOLE.get(name, "")
        if not place:
            _, _, layer, rest = name.split(".", 3)
            part, end = rest.rsplit(".", 1)
            place = f"blk.{layer}.{PARTS[part]}.{end}"
        if kind == "llama" and ("attn_q." in place or "attn_k." in place):
            n = config.num_attention_heads if "attn_q." in place else config.num_key_value_heads
            x = x.reshape(n, 2, len(x) // n // 2, -1).swapaxes(1, 2).reshape(x.shape)
        if quantised and x.ndim == 2:
            to = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(place, gguf.quants.quantize(x, to), raw_dtype=to)
        else:
            writer.add_tensor(place, x.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(("name", "kind"), [("llama-gqa", "llama"), ("qwen2-gqa", "qwen2")])
def test_a_gguf_file_is_the_model_it_was_made_of(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = tiny.case(name)
    model = case.build(seed=0)
    file = write_gguf(tmp_path / "m.gguf", model, kind)
    inputs, found = case.inputs(0), ib.load(file)
    assert output_difference(tiny.logits(model, inputs), tiny.logits(module_of(found), inputs)) < 1e-5
    assert "F32" in found.note
    assert "GGUF" in repr(found)
    moved = ib.scramble(found).apply(found)
    moved.save(tmp_path / "moved")
    assert ib.equivalent(file, tmp_path / "moved").answer == "same"
    assert run(["info", str(file)]) == 0
    assert "note        from GGUF (F32)" in capsys.readouterr().out


def test_a_rounded_gguf_file_is_dequantised_and_coarser_ones_are_refused(tmp_path: Path) -> None:
    model = tiny.case("llama-untied").build(seed=0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}  # rows of whole blocks of 32 numbers
    wide = type(model)(type(model.config)(**(model.config.to_dict() | sizes)))
    tiny.randomize(wide, 0)
    found = ib.load(write_gguf(tmp_path / "q8.gguf", wide, "llama", "Q8_0"))
    name = "model.layers.0.mlp.up_proj.weight"
    exact = wide.state_dict()[name]
    assert 0 < float((found[name] - exact).abs().max()) < 0.02 * float(exact.abs().max())
    assert "Q8_0), dequantised" in found.note
    with pytest.raises(IsobasinError, match=r"is quantised to Q4_0, .*expected F32, F16, BF16, Q8_0"):
        ib.load(write_gguf(tmp_path / "q4.gguf", wide, "llama", "Q4_0"))
    with pytest.raises(IsobasinError, match="holds a 'mamba' model, expected one of llama, qwen2, gpt2"):
        ib.load(write_gguf(tmp_path / "mamba.gguf", model, "mamba"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(IsobasinError, match="can not be read as GGUF"):
        ib.load(tmp_path / "bad.gguf")
    with pytest.raises(IsobasinError, match="is not there"):
        ib.load(tmp_path / "none.gguf")


def test_a_gguf_file_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(IsobasinError, match=r"needs the package gguf: pip install 'isobasin\[gguf\]'"):
        ib.load(tmp_path / "m.gguf")


def test_timm_and_open_clip_are_refused_with_the_way_out(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {}}))
    save_file({"blocks.0.attn.qkv.weight": torch.ones(6, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(IsobasinError, match=r"is that of timm, .*ViTModel"):
        ib.load(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "open_clip_config.json")
    with pytest.raises(IsobasinError, match=r"is a model of open_clip, .*CLIPModel"):
        ib.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_base_patch16_224", "a name of timm, .*google/vit-"),
        ("vit_small_patch14_dinov2.lvd142m", "a name of timm"),
        ("hf-hub:timm/vit_base_patch16_224.augreg", "a name of timm"),
        ("ViT-B-32", "a name of open_clip, .*openai/clip-"),
        ("hf-hub:laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "a name of open_clip"),
        ("org/ViT-B-32", r"check the path, or download it first \(hf download"),
        ("llama_patch", "check the path"),
    ],
)
def test_names_of_timm_and_open_clip_are_told_from_ids(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(IsobasinError, match=rf"is neither a folder .* can not be downloaded \(.*\): .*{message}"):
        ib.load(name)


@pytest.mark.parametrize(
    ("name", "message"), [("model.onnx", "ONNX is a graph of operations"), ("model.pt", "give the folder it lies in")]
)
def test_a_file_of_another_format_is_refused_with_its_reason(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(IsobasinError, match=rf"{name} is a file, expected a checkpoint folder: {message}"):
        ib.load(tmp_path / name)
