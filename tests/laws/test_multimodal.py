"""Multimodal models: what lies outside the language model is copied, compared as it is, and never ignored."""

import copy
from pathlib import Path

import pytest
import torch
from test_model_types import EXACT, SEEN, error, held

import isobasin as ib
import model_types as mt
from isobasin.arch.families import multimodal
from isobasin.arch.pattern import parse
from isobasin.compare.fingerprint import compare_fingerprints, fingerprint
from isobasin.config_keys import differing_settings
from isobasin.symmetries.transform import scramble
from isobasin.weights import Weights, untied

pytestmark = pytest.mark.hf

NAMES = ["llava-untied", "gemma3-tied", "qwen2_vl-untied", "qwen2_5_vl-untied"]
WRITES = {
    "llava-untied": "multi_modal_projector.linear_2.weight",
    "gemma3-tied": "multi_modal_projector.mm_input_projection_weight",
    "qwen2_vl-untied": "visual.merger.mlp.2.weight",
    "qwen2_5_vl-untied": "visual.merger.mlp.2.weight",
}
every = pytest.mark.parametrize("name", NAMES)


def changed(weights: Weights, name: str, size: float = 0.3) -> Weights:
    rng = torch.Generator().manual_seed(0)
    x = weights[name].double()
    return held(weights, {name: x * (1 + size * torch.randn(x.shape, generator=rng, dtype=torch.float64))})


@every
def test_a_text_without_an_image_keeps_its_outputs(name: str) -> None:
    a, model = mt.weights(name), mt.built(name)
    x = {"input_ids": torch.arange(18).reshape(2, 9)}
    before, after = (mt.outputs(w, model, x) for w in (a, scramble(a, seed=1).apply(a)))
    assert float((after - before).abs().max() / before.abs().max()) <= EXACT


@every
def test_a_projector_that_stays_behind_is_seen(name: str) -> None:
    a = mt.weights(name)
    moved = held(scramble(a, seed=1).apply(a))
    assert error(name, moved) <= EXACT
    assert error(name, held(moved, {WRITES[name]: a[WRITES[name]]})) > SEEN


@every
def test_changes_outside_the_language_model_are_never_the_same(name: str) -> None:
    a = mt.weights(name)
    b = held(scramble(a, seed=3).apply(a))
    assert ib.equivalent(a, b).answer == "same"
    matrix = next(n for n in a.arch.copied_tensors if len(a.arch.shapes[n]) == 2 and "0" in n)
    for tensor in (matrix, WRITES[name]):
        other = changed(b, tensor)
        assert ib.equivalent(a, other).answer == "different", tensor
        assert not compare_fingerprints(fingerprint(a), fingerprint(other)).equal, tensor


@every
def test_settings_of_the_parts_count(name: str) -> None:
    a = mt.weights(name)
    for part, key, value in (("vision_config", "hidden_act", "relu"), ("text_config", "rms_norm_eps", 0.01)):
        config = copy.deepcopy(dict(a.config))
        config[part][key] = value
        b = ib.load(mt.built(name).state_dict(), config)
        assert differing_settings(a, b), key
        assert fingerprint(a).digest != fingerprint(b).digest, key
        assert ib.equivalent(a, b).answer != "same", key
        with pytest.raises(ib.IsobasinError, match=key):
            ib.align(b, to=a)


def test_a_key_by_which_stored_biases_are_not_loaded_counts() -> None:
    a = mt.weights("llava-untied")
    b = ib.load(mt.built("llava-untied").state_dict(), {**a.config, "multimodal_projector_bias": False})
    assert differing_settings(a, b) == {"multimodal_projector_bias": (True, False)}
    assert fingerprint(a).digest != fingerprint(b).digest
    assert ib.equivalent(a, b).answer == "different"


def test_a_key_that_is_called_as_one_of_the_language_model_counts() -> None:
    a = mt.weights("llava-untied")
    b = ib.load(mt.built("llava-untied").state_dict(), {**a.config, "is_causal": True})
    assert differing_settings(a, b)
    assert fingerprint(a).digest != fingerprint(b).digest


def test_a_merge_averages_the_other_parts_as_they_are(tmp_path: Path) -> None:
    name = "llava-untied"
    a, b = (ib.load(mt.save(name, tmp_path / str(seed), seed)) for seed in (0, 1))
    merged = ib.merge([a, b])
    tensor = a.arch.copied_tensors[0]
    merged.save(tmp_path / "merged")
    torch.testing.assert_close(ib.load(tmp_path / "merged")[tensor], (a[tensor] + b[tensor]) / 2)


@pytest.mark.parametrize("name", ["llava-tied", "gemma3-tied", "qwen2_5_vl-tied"])
def test_an_untied_copy_computes_the_same_in_transformers(name: str) -> None:
    from isobasin.runtime import outputs, random_inputs

    a = mt.weights(name)
    x, apart = random_inputs(a), untied(a)
    (stream,) = apart.arch.streams.values()
    assert stream.kind != "signed" or name.startswith("gemma3")
    torch.testing.assert_close(outputs(apart, x), outputs(a, x), rtol=1e-4, atol=1e-4)


def test_the_defaults_of_language_models_are_those_of_transformers() -> None:
    from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

    kinds = {"llama": LlamaConfig, "mistral": MistralConfig, "gemma3_text": Gemma3TextConfig}
    both = [*kinds.items(), ("qwen2_vl_text", Qwen2VLTextConfig), ("qwen2_vl_text", Qwen2_5_VLTextConfig)]
    for name, kind in both:
        made = kind()
        for key, value in multimodal.DEFAULTS[name].items():
            found = made.rope_parameters["rope_theta"] if key == "rope_theta" else getattr(made, key)
            assert found == value, (name, key)


def test_flat_configs_of_qwen_are_read(tmp_path: Path) -> None:
    a = mt.weights("qwen2_5_vl-untied")
    config = {k: v for k, v in a.config.items() if k != "text_config"}
    flat = {k: v for k, v in a.config["text_config"].items() if k not in ("model_type", "tie_word_embeddings")}
    rope = {"type": "mrope", "mrope_section": [1, 1, 1]}
    flat = {k: v for k, v in flat.items() if k != "rope_parameters"} | {"rope_scaling": rope, "rope_theta": 100.0}
    b = ib.load(mt.built("qwen2_5_vl-untied").state_dict(), flat | config)
    assert b.arch.spaces == a.arch.spaces
    assert b.arch.rotary == a.arch.rotary
    assert b.settings == a.settings
    other = ib.load(
        mt.built("qwen2_5_vl-untied").state_dict(),
        flat | config | {"rope_scaling": rope | {"mrope_section": [2, 1, 0]}},
    )
    assert "mrope_section" in differing_settings(a, other)


def test_a_text_model_that_has_no_family_is_refused() -> None:
    a = mt.weights("llava-untied")
    config = {**a.config, "text_config": {**a.config["text_config"], "model_type": "opt"}}
    with pytest.raises(ib.IsobasinError, match="model_type of text_config is 'opt'"):
        ib.load(mt.built("llava-untied").state_dict(), config)


def test_patterns_of_copied_tensors_touch_nothing() -> None:
    a = mt.weights("llava-untied").arch
    assert "vision_tower.vision_model.embeddings.patch_embedding.weight" in a.copied_tensors
    assert a.tensors["vision_tower.vision_model.embeddings.patch_embedding.weight"] == parse(". . . .")
    assert WRITES["llava-untied"] not in a.copied_tensors
