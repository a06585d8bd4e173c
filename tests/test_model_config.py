"""The model around its forward pass: configuration, seed, folder on disk, one-line errors."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobasin.errors import ArchitectureError, CheckpointError
from isobasin.model import ModelConfig, Transformer

POSITIONS = ("none", "sinusoidal", "learned", "rope", "alibi")
FAMILIES = ("vit", "bert", "gpt2", "llama")
TINY = {"d_model": 12, "n_layers": 2, "n_heads": 2, "d_ff": 10}
TOKENS = TINY | {"d_vocab": 11, "n_positions": 8}
IMAGES = TINY | {"image_size": 6, "patch_size": 2, "n_channels": 3, "n_classes": 4}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_are_bitwise(tmp_path, family, dtype):
    config = ModelConfig.preset(family, **(IMAGES if family == "vit" else TOKENS))
    model = Transformer(config, seed=1).to(dtype)
    model.save(tmp_path / "new" / "folder")
    found = Transformer.load(tmp_path / "new" / "folder")
    assert found.config == config
    for (name, a), (other_name, b) in zip(model.named_parameters(), found.named_parameters(), strict=True):
        assert (name, a.dtype, a.requires_grad) == (other_name, b.dtype, b.requires_grad)
        assert torch.equal(a, b)
    found.save(tmp_path / "new" / "folder")  # on top of the files it came from
    again = Transformer.load(tmp_path / "new" / "folder")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert json.loads((tmp_path / "new" / "folder" / "config.json").read_text())["model_type"] == "isobasin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("head.weight"), "missing tensors head.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "unknown tensors extra"),
        (
            lambda w: w.update({"norm.weight": torch.ones(3)}),
            r"norm.weight has shape \(3,\), expected \(12,\)",
        ),
        (
            lambda w: w.update({"norm.weight": torch.ones(12).half()}),
            "torch.float16, torch.float32, expected one",
        ),
        (lambda w: w.update({k: t.long() for k, t in w.items()}), "torch.int64, expected one floating-point"),
    ],
)
def test_load_is_strict_about_tensors(tmp_path, change, message):
    Transformer(ModelConfig.preset("gpt2", **TOKENS)).save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ArchitectureError, match=message):
        Transformer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "can not be read"),
        ("config.json", "[]", "expected a JSON object"),
        ("model.safetensors", "no tensors here", "can not be read"),
        ("config.json", None, "expected config.json and model.safetensors"),
    ],
)
def test_load_explains_a_broken_folder(tmp_path, name, content, message):
    Transformer(ModelConfig.preset("gpt2", **TOKENS)).save(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Transformer.load(tmp_path)


def test_a_save_that_fails_leaves_the_old_model(tmp_path, monkeypatch):
    config = ModelConfig.preset("gpt2", **TOKENS)
    Transformer(config, seed=0).save(tmp_path)

    flushed = []

    def full_disk(handle):
        flushed.append(handle)
        if len(flushed) == 2:  # the weights are on the disk, config.json is not
            raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full_disk)
        with pytest.raises(CheckpointError, match=r"can not be written \(no space left"):
            Transformer(config, seed=1).save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    kept = Transformer.load(tmp_path).head.weight
    assert torch.equal(kept, Transformer(config, seed=0).head.weight)
    assert not torch.equal(kept, Transformer(config, seed=1).head.weight)


def test_save_explains_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(CheckpointError, match="can not be written"):
        Transformer(ModelConfig.preset("gpt2", **TOKENS)).save(tmp_path / "taken")


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_config_round_trip(family, positions):
    config = ModelConfig.preset(family, positions, rotary_dims=2, rotary_layout="interleaved", n_kv_heads=1)
    written = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(written) == config
    extra = {"dtype": "float32", "torch_dtype": "x", "architectures": [], "isobasin_version": "1"}
    assert ModelConfig.from_dict(written | extra | {"transformers_version": "5"}) == config
    assert ModelConfig.from_dict(written | {"d_ff": config.d_ff + 1}) != config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected 'isobasin'"),
        ({"n_layer": 3}, "unknown keys n_layer; known: d_model"),
        ({"d_model": "12"}, "d_model is '12', expected a whole number"),
        ({"d_model": None}, "d_model is None, expected a whole number"),
    ],
)
def test_from_dict_is_strict(change, message):
    settings = ModelConfig.preset("gpt2", **TOKENS).to_dict()
    with pytest.raises(ArchitectureError, match=message):
        ModelConfig.from_dict(settings | change)
    with pytest.raises(ArchitectureError, match="the keys d_ff are missing"):
        ModelConfig.from_dict({key: settings[key] for key in settings if key != "d_ff"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (TOKENS | {"n_heads": 5}, "d_model=12 is not divisible by n_heads=5"),
        (TOKENS | {"n_heads": 4, "n_kv_heads": 3}, "n_heads=4 is not divisible by n_kv_heads=3"),
        (
            TOKENS | {"n_heads": 4, "positions": "rope"},
            r"rotary_dims is 3 \(d_head=3\), expected an even number",
        ),
        (TOKENS | {"positions": "rope", "rotary_dims": 8}, "rotary_dims=8 is more than d_head=6"),
        (
            TOKENS | {"positions": "rotary"},
            "positions is 'rotary', expected one of none, sinusoidal, learned",
        ),
        (TOKENS | {"norm": "batch"}, "norm is 'batch', expected one of layer, rms"),
        (TOKENS | {"feed_forward": "relu"}, "feed_forward is 'relu', expected one of gelu, swiglu"),
        (TOKENS | {"rotary_layout": "neox"}, "rotary_layout is 'neox', expected one of half, interleaved"),
        (TOKENS | {"causal": 1}, "causal is 1, expected true or false"),
        (TOKENS | {"n_layers": 0}, "n_layers is 0, expected a whole number of at least 1"),
        (TOKENS | {"n_layers": True}, "n_layers is True, expected a whole number"),
        (TOKENS | {"n_kv_heads": 0}, "n_kv_heads is 0, expected a whole number"),
        (TOKENS | {"norm_eps": 0.0}, "norm_eps is 0.0, expected a positive finite number"),
        (TOKENS | {"rope_theta": math.nan}, "rope_theta is nan, expected a positive finite number"),
        (TOKENS | {"n_positions": None}, "n_positions is missing"),
        (TOKENS | {"d_vocab": None}, "no input: give d_vocab"),
        (TOKENS | {"image_size": 6}, r"two inputs: d_vocab \(tokens\) and image_size"),
        (TOKENS | {"tied": True, "n_classes": 2}, "tied is true with n_classes=2"),
        (IMAGES | {"tied": True}, "tied is true without tokens"),
        (
            IMAGES | {"n_channels": None},
            "image input needs image_size, patch_size, n_channels: add n_channels",
        ),
        (IMAGES | {"n_classes": None}, "image input without n_classes"),
        (IMAGES | {"patch_size": 4}, "image_size=6 is not divisible by patch_size=4"),
        (IMAGES | {"n_positions": 10}, "n_positions is 10, but an image has 9 patches"),
    ],
)
def test_bad_configs(fields, message):
    with pytest.raises(ArchitectureError, match=message):
        ModelConfig(**fields)


@pytest.mark.parametrize(
    ("family", "absolute", "own", "switches"),
    [
        ("vit", "sinusoidal", "sinusoidal", ("layer", False, "gelu", False, True, 10)),
        ("bert", "learned", "learned", ("layer", True, "gelu", False, True, 2)),
        ("gpt2", "learned", "learned", ("layer", False, "gelu", True, True, None)),
        ("llama", "sinusoidal", "rope", ("rms", False, "swiglu", True, False, None)),
    ],
)
def test_presets(family, absolute, own, switches):
    c = ModelConfig.preset(family)
    assert (c.norm, c.post_norm, c.feed_forward, c.causal, c.bias, c.n_classes) == switches
    assert (c.n_layers, c.n_heads, c.positions) == (6, 4, own)
    assert ModelConfig.preset(family, positions="absolute").positions == absolute
    for positions in POSITIONS:
        assert ModelConfig.preset(family, positions).positions == positions
    assert ModelConfig.preset(family, n_layers=1) == dataclasses.replace(c, n_layers=1)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("t5", {}, "preset 't5' is unknown; there are vit, bert, gpt2, llama"),
        ("vit", {"positions": "rotary"}, "positions is 'rotary', expected one of none"),
        ("vit", {"layers": 2}, "preset 'vit': unknown keys layers"),
    ],
)
def test_bad_presets(name, fields, message):
    with pytest.raises(ArchitectureError, match=message):
        ModelConfig.preset(name, **fields)


@pytest.mark.parametrize(
    ("fields", "inputs", "mask", "message"),
    [
        (TOKENS, torch.zeros(2, 9, dtype=torch.long), None, r"shape \(2, 9\), expected .* n_positions=8"),
        (TOKENS, torch.zeros(9, dtype=torch.long), None, r"shape \(9,\), expected \(batch, time\)"),
        (IMAGES, torch.zeros(2, 1, 6, 6), None, r"shape \(2, 1, 6, 6\), expected \(batch, 3, 6, 6\)"),
        (TOKENS, torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4), "mask is torch.float32 of shape"),
        (
            TOKENS,
            torch.zeros(2, 4, dtype=torch.long),
            torch.ones(2, 1).bool(),
            r"expected bool of shape \(2, 4\)",
        ),
    ],
)
def test_bad_inputs(fields, inputs, mask, message):
    with pytest.raises(ArchitectureError, match=message):
        Transformer(ModelConfig(**fields))(inputs, mask)


def test_a_seed_names_the_weights_and_leaves_the_global_generator_alone():
    config = ModelConfig.preset("gpt2", d_vocab=500, n_layers=2, n_positions=8)
    state = torch.get_rng_state()
    first = Transformer(config, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    second, third = Transformer(config, seed=3).state_dict(), Transformer(config, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    same = {name for name in first if torch.equal(first[name], third[name])}
    assert same == {name for name in first if "norm" in name or name.endswith("bias")}
    assert first["embed.tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert first["blocks.0.attn.o.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert first["blocks.1.mlp.down.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert all((first[name] == 1).all() for name in first if "norm" in name and name.endswith("weight"))
    assert all((first[name] == 0).all() for name in first if name.endswith("bias"))
