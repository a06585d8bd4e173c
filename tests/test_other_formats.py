"""Models in formats of other programs: GGUF files are read; timm and open_clip are refused with the way out."""

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
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


GPT2_PARTS = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}
GPT2_WHOLE = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    file: Path,
    model: Any,
    kind: str,
    quantised: str | None = None,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """A file as llama.cpp writes it: its names, and for Llama its order of rotary columns. `keys` and `tensors` are
    further ones; a key whose value is None is left out."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(str(file), kind)
    values = {
        "context_length": 16,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 4 * config.n_embd if kind == "gpt2" else config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "vocab_size": config.vocab_size,
    }
    if kind == "gpt2":
        values |= {"attention.layer_norm_epsilon": config.layer_norm_epsilon, "context_length": config.n_positions}
    else:
        values |= {"attention.head_count_kv": config.num_key_value_heads, "rope.freq_base": 10_000.0}
        values |= {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    for key, value in (values | dict(keys or {})).items():
        _add_key(writer, key if key.startswith(("general.", "other.", "split.")) else f"{kind}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for name, tensor in model.state_dict().items():
        x, place = tensor.numpy(), (WHOLE | GPT2_WHOLE).get(name, "")
        if not place:
            _, _, layer, rest = name.split(".", 3)
            part, end = rest.rsplit(".", 1)
            place = f"blk.{layer}.{(PARTS | GPT2_PARTS)[part]}.{end}"
            x = x.T if kind == "gpt2" else x
        if kind == "llama" and ("attn_q." in place or "attn_k." in place):
            n = config.num_attention_heads if "attn_q." in place else config.num_key_value_heads
            x = x.reshape(n, 2, len(x) // n // 2, -1).swapaxes(1, 2).reshape(x.shape)
        if quantised and x.ndim == 2:
            to = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(place, gguf.quants.quantize(x, to), raw_dtype=to)
        else:
            writer.add_tensor(place, x.copy())
    for name, x in (tensors or {}).items():
        writer.add_tensor(name, np.array(x, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_key(writer: Any, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        adders[type(value)](key, value)


@pytest.mark.parametrize(("name", "kind"), [("llama-gqa", "llama"), ("qwen2-gqa", "qwen2"), ("gpt2-lm-tied", "gpt2")])
def test_a_gguf_file_is_the_model_it_was_made_of(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = tiny.case(name)
    model = case.build(seed=0)
    tiny.write(model, tmp_path / "folder")
    file = write_gguf(tmp_path / "m.gguf", model, kind)
    inputs, found = case.inputs(0), ib.load(file)
    assert output_difference(tiny.logits(model, inputs), tiny.logits(module_of(found), inputs)) < 1e-5
    assert "F32" in found.note
    assert "GGUF" in repr(found)
    assert ib.equivalent(tmp_path / "folder", file).answer == "same"
    moved = ib.scramble(found).apply(found)
    moved.save(tmp_path / "moved")
    assert ib.equivalent(file, tmp_path / "moved").answer == "same"
    capsys.readouterr()
    assert run(["fingerprint", str(tmp_path / "folder"), "--compare", str(file)]) == 0
    said = capsys.readouterr()
    assert "equal: " in said.out
    assert not said.err
    assert run(["info", str(file)]) == 0
    assert "note        from GGUF (F32)" in capsys.readouterr().out


def test_a_file_of_half_precision_is_the_model_up_to_the_rounding_of_its_type(tmp_path: Path) -> None:
    model = tiny.case("llama-untied").build(seed=0)
    tiny.write(model, tmp_path / "folder")
    file = write_gguf(tmp_path / "m.gguf", model, "llama", "F16")
    found = ib.load(file)
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.float16
    assert found["model.norm.weight"].dtype == torch.float32
    verdict = ib.equivalent(tmp_path / "folder", file)
    assert (verdict.answer, verdict.precision) == ("same", "float16")
    (edge,) = ib.lineage([tmp_path / "folder", file]).edges
    assert (edge.kind, edge.directed) == ("cast", True)
    assert "rounded to float16, or as it was in float32" in edge.evidence


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


@pytest.mark.parametrize(
    ("keys", "tensors", "named"),
    [
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}, r"llama\.rope\.scaling\.type is 'yarn'"),
        ({"rope.scaling.factor": -4.0}, {}, r"llama\.rope\.scaling\.factor is -4.0"),
        ({"rope.scaling.yarn_ext_factor": 1.0}, {}, r"llama\.rope\.scaling\.yarn_ext_factor"),
        ({"rope.dimension_count": 2}, {}, r"llama\.rope\.dimension_count is 2 in heads of 6"),
        ({"attention.value_length": 2}, {}, r"llama\.attention\.value_length is 2"),
        ({"attention.key_length": 4}, {}, r"q_proj\.weight"),
        ({"attention.sliding_window": 4}, {}, r"llama\.attention\.sliding_window is 4"),
        ({"attention.scale": 0.5}, {}, r"llama\.attention\.scale is 0.5"),
        ({"attention.causal": False}, {}, r"llama\.attention\.causal is False"),
        ({"attn_logit_softcapping": 30.0}, {}, r"llama\.attn_logit_softcapping is 30.0"),
        ({"logit_scale": 0.5}, {}, r"llama\.logit_scale is 0.5"),
        ({"residual_scale": 0.5}, {}, r"llama\.residual_scale"),
        ({"expert_count": 4}, {}, r"llama\.expert_count is 4"),
        ({"attention.clamp_kqv": 8.0}, {}, r"llama\.attention\.clamp_kqv"),
        ({"attention.max_alibi_bias": 8.0}, {}, r"llama\.attention\.max_alibi_bias"),
        ({"something_new": 1}, {}, r"llama\.something_new is 1"),
        ({"other.key": 1}, {}, r"the key 'other\.key' is unknown"),
        ({"general.type": "adapter"}, {}, r"general\.type is 'adapter', expected a 'model'"),
        ({"split.count": 3}, {}, r"one of 3 parts of a model"),
        ({"attention.head_count_kv": [2, 1]}, {}, r"head_count_kv is a list, or missing"),
        ({"attention.head_count_kv": 0}, {}, r"head_count_kv is 0, expected one positive number"),
        ({"attention.layer_norm_rms_epsilon": None}, {}, r"layer_norm_rms_epsilon is a list, or missing"),
        ({"vocab_size": 7}, {}, r"m\.gguf: .*embed_tokens"),
        ({}, {"rope_freqs.weight": [1.0, 3.0]}, r"rope_freqs\.weight is not the table of Llama 3"),
        ({}, {"rope_freqs.weight": [1.0]}, r"rope_freqs\.weight is not the table of Llama 3"),
        ({}, {"blk.0.foo.weight": [1.0]}, r"has the tensor 'blk\.0\.foo\.weight'"),
        ({}, {"foo.weight": [1.0]}, r"has the tensor 'foo\.weight'"),
        ({}, {"blk.0.attn_q.bias": [1.0] * 24}, r"attn_k\.bias is missing and blk\.0\.attn_q\.bias is there"),
        ({}, {"blk.9.attn_norm.weight": [1.0] * 24}, r"model\.layers\.9\."),
    ],
)
def test_what_may_change_the_function_of_a_gguf_file_is_refused_by_name(
    keys: dict[str, Any], tensors: dict[str, Any], named: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf_subject(), "llama", keys=keys, tensors=tensors)
    with pytest.raises(IsobasinError, match=named):
        ib.load(file)


@cache
def gguf_subject() -> Any:
    return tiny.case("llama-gqa").build(seed=0)


def test_biases_of_a_llama_of_gguf_are_read(tmp_path: Path) -> None:
    config = type(gguf_subject().config)(
        **(gguf_subject().config.to_dict() | {"attention_bias": True, "mlp_bias": True})
    )
    model = tiny.randomize(type(gguf_subject())(config), 0)
    inputs, found = tiny.case("llama-gqa").inputs(0), ib.load(write_gguf(tmp_path / "m.gguf", model, "llama"))
    assert output_difference(tiny.logits(model, inputs), tiny.logits(module_of(found), inputs)) < 1e-5


def test_keys_of_a_gguf_file_without_effect_are_accepted(tmp_path: Path) -> None:
    keys = {"attention.causal": True, "logit_scale": 1.0, "rope.dimension_count": 6, "attention.key_length": 6}
    keys |= {"rope.scaling.type": "none", "rope.scaling.factor": 2.0, "general.file_type": 0, "expert_count": 0}
    plain, full = (
        ib.load(write_gguf(tmp_path / f"{name}.gguf", gguf_subject(), "llama", keys=more))
        for name, more in (("plain", {}), ("full", keys))
    )
    assert plain.config["rms_norm_eps"] == gguf_subject().config.rms_norm_eps == 1e-3 != float(np.float32(1e-3))
    assert all(torch.equal(plain[name], full[name]) for name in plain)
    assert full.arch.rotary == plain.arch.rotary


@pytest.mark.parametrize("name", ["default", "linear", "llama3"])
def test_scaled_rotary_positions_of_a_gguf_file_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    table = {"rope_type": name, "rope_theta": 500_000.0}
    table |= {"default": {}, "linear": {"factor": 4.0}, "llama3": {"factor": 8.0, **LLAMA3}}[name]
    plain, scaled = (with_rope(each) for each in ({"rope_type": "default", "rope_theta": 500_000.0}, table))
    keys: dict[str, Any] = {"rope.freq_base": 500_000.0, "attention.key_length": 8, "rope.dimension_count": 8}
    keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0} if name == "linear" else {}
    frequencies = [model.model.rotary_emb.inv_freq for model in (plain, scaled)]
    divisors = (frequencies[0] / frequencies[1]).numpy()
    tensors = {} if name == "linear" else {"rope_freqs.weight": divisors}
    found = ib.load(write_gguf(tmp_path / "m.gguf", scaled, "llama", keys=keys, tensors=tensors))
    assert found.config["rope_parameters"] == table
    assert torch.allclose(module_of(found).model.rotary_emb.inv_freq, frequencies[1], rtol=1e-6)  # type: ignore[union-attr]
    assert len(set(divisors.tolist())) == {"default": 1, "linear": 1, "llama3": 3}[name]
    assert (divisors.max() > 1) == (name != "default")


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def with_rope(table: dict[str, Any]) -> Any:
    """The subject with heads of 8 and these rotary positions."""
    config = type(gguf_subject().config)(
        **(gguf_subject().config.to_dict() | {"head_dim": 8, "rope_parameters": table})
    )
    return tiny.randomize(type(gguf_subject())(config), 0)


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
