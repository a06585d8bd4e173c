"""Config keys, asked of transformers itself: what changes the outputs must count, and what it ignores must not.

For every class, each key of its config, each attribute that building and running it reads, and keys of other families
get other values. The truth is transformers with and without the change, in two implementations of attention.
"""

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import isobasin as ib
import model_types as mt
import tiny
from isobasin.arch import FAMILIES, HeadSpace
from isobasin.arch.family import NEUTRAL_KEYS
from isobasin.compare.fingerprint import _digest
from isobasin.config_keys import attributes_read, differing_settings, keys_that_matter
from isobasin.errors import IsobasinError, VerificationError
from isobasin.model import ModelConfig, Transformer
from isobasin.runtime import module_of
from isobasin.symmetries.check import require_same_outputs
from isobasin.symmetries.transform import scramble

pytestmark = pytest.mark.hf

SHORT = ("gpt2-classifier", "bert-masked-lm-tied", "vit-bare", "llama-classifier", "gpt_neox-quarter-rotary")
FULL = (
    "gpt2-lm-tied",
    "gpt2-bare",
    "bert-classifier",
    "bert-bare",
    "bert-pretraining",
    "bert-tokens",
    "vit-classifier",
)
FULL += ("vit-masked-image", "llama-gqa", "llama-bare", "llama-rope-yarn", "llama-rope-llama3", "mistral-window")
FULL += ("qwen2-classifier", "gpt_neox-classifier", "gpt_neox-bare", "gpt_neox-half-rotary")
FULL += ("mistral-gqa", "qwen2-gqa", "phi3-half-rotary")
FULL += tuple(each.name for each in mt.MODEL_TYPES if each.name not in (*SHORT, "t5-own-head"))  # its config says tied
CASES = SHORT + (FULL if os.environ.get("ISOBASIN_SLOW") == "1" else ())
SEEN = 1e-4  # relative to the largest output: far above rounding

# Values by key where the type alone says too little; keys that other families or other versions read.
VALUES: dict[str, list[Any]] = {
    "hidden_act": ["relu", "gelu_new"],
    "activation_function": ["relu", "silu"],
    "pooler_act": ["relu"],
    "is_causal": [True, False],
    "is_decoder": [True],
    "pad_token_id": [None, 3],
    "sliding_window": [None, 2],
    "use_sliding_window": [True],
    "max_window_layers": [0],
    "attention_chunk_size": [2],
    "sliding_window_size": [2],
    "layer_types": [["sliding_attention"] * 2, ["full_attention"] * 2],
    "num_kv_shared_layers": [1],
    "partial_rotary_factor": [0.5],
    "rotary_pct": [0.5],
    "head_dim": [4, 8],
    "rope_theta": [500.0],
    "rotary_emb_base": [500.0],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}],
    "rope_parameters": [
        {"rope_theta": 500.0, "rope_type": "default"},
        {"rope_theta": 10000.0, "rope_type": "linear", "factor": 3.0},
        {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_theta": 10000.0, "rope_type": "default", "factor": 3.0},
    ],
    "original_max_position_embeddings": [4],
    "max_position_embeddings": [64],
    "position_embedding_type": ["relative_key"],
    "logit_scale": [2.0],
    "logits_scaling": [2.0],
    "embedding_multiplier": [2.0],
    "attention_multiplier": [2.0],
    "residual_multiplier": [2.0],
    "final_logit_softcapping": [1.0],
    "attn_logit_softcapping": [1.0],
    "query_pre_attn_scalar": [4],
    "use_qk_norm": [True],
    "rope_interleaved": [True],
    "no_rope_layers": [[0, 0]],
    "gradient_checkpointing": [True],
    "torchscript": [True],
    "problem_type": ["regression"],
    "return_dict": [False],
    "chunk_size_feed_forward": [1, 2, 4],  # 7 tokens are no multiple of the last two
    "some_other_program": [{"version": 3}],
}
SHAPES = ("max_position_embeddings", "n_positions", "vocab_size", "tie_word_embeddings")
NOT_A_KEY = {"architectures", "model_type", "dtype", "torch_dtype", "id2label", "label2id", "transformers_version"}


@dataclass(frozen=True)
class Subject:
    """A tiny model, its config as JSON, and its outputs in both implementations of attention."""

    case: tiny.Case
    model: Any
    config: dict[str, Any]
    outputs: tuple[Tensor, ...]

    def run(self, config: dict[str, Any]) -> tuple[Tensor, ...] | None:
        """The outputs with another config and the same tensors; None where transformers can not."""
        from transformers import AutoConfig

        settings = {k: v for k, v in copy.deepcopy(config).items() if k not in ("dtype", "torch_dtype")}
        settings |= {"return_dict": True, "use_cache": False}
        experts = {"experts_implementation": "eager"}
        options = {} if "pooler" in dict(self.model.named_children()) else self._options
        try:
            found = []
            for attention in ("eager", "sdpa") if type(self.model)._supports_sdpa else ("eager",):
                parsed = AutoConfig.for_model(**copy.deepcopy(settings))
                model = type(self.model)._from_config(parsed, attn_implementation=attention, **experts, **options)
                result = model.load_state_dict(self.model.state_dict(), strict=False)
                if result.missing_keys:  # tensors that the model does not have any more are ignored by transformers
                    return None
                found.append(tiny.logits(model.eval(), self.case.inputs(0)))
            if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
                found.append(_in_two_steps(model, self.case.inputs(0)["input_ids"]))
            if "decoder_input_ids" in self.case.inputs(0):
                found.append(tiny.logits(model, self.case.inputs(0) | {"use_cache": True}))
                found.append(_with_its_own_decoder_ids(model, self.case.inputs(0)))
            return tuple(found)
        except Exception:
            return None

    @property
    def _options(self) -> dict[str, Any]:
        bare = type(self.model).__name__ in ("BertModel", "ViTModel")
        return {"add_pooling_layer": False} if bare else {}

    def weights(self, config: dict[str, Any]) -> ib.Weights:
        return ib.load(self.model, copy.deepcopy(config))


def _in_two_steps(model: Any, ids: Tensor) -> Tensor:
    """The last logits, computed from a cache of keys and values, as when text is generated."""
    with torch.no_grad():
        start = model(ids[:, :-1], use_cache=True)
        return model(ids[:, -1:], past_key_values=start.past_key_values, use_cache=True).logits.flatten(1)


def _with_its_own_decoder_ids(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Some classes make the decoder's tokens from those of the encoder; a large constant where that fails."""
    try:
        return tiny.logits(model, {key: ids for key, ids in inputs.items() if not key.startswith("decoder_")})
    except Exception:
        return torch.tensor(1e9)


@cache
def subject(name: str) -> Subject:
    known = {each.name for each in tiny.CASES}
    case = tiny.case(name) if name in known else mt.case(name)
    model = case.build(seed=0)
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    bare = Subject(case, model, config, ())
    outputs = bare.run(config)
    assert outputs is not None, f"{name}: transformers does not run what it saved"
    return Subject(case, model, config, outputs)


def read_attributes(model: Any, part: str = "") -> set[str]:
    """Every attribute of the config, or of the config of a part, that building the class reads."""
    whole, read = copy.deepcopy(model.config), set()
    config = getattr(whole, part) if part else whole
    kind = type(config)

    def get(self: Any, name: str) -> Any:
        read.add(name)
        return kind.__getattribute__(self, name)

    config.__class__ = type(kind.__name__, (kind,), {"__getattribute__": get})
    type(model)._from_config(whole, attn_implementation="eager")
    return {name for name in read if not name.startswith("_")}


def read_of_parts(name: str, weights: ib.Weights) -> set[str]:
    """The attributes of the configs of the parts that building the class reads, or running it."""
    model, parts = subject(name).model, described_parts(weights.config)
    built = {f"{part}: {key}" for part in parts for key in read_attributes(model, part)}
    both = built | (attributes_read(weights) or set())
    return {key for key in both if key.rpartition(": ")[2] not in NEUTRAL_KEYS}


def other_values(key: str, value: Any) -> list[Any]:
    """Other values of a key: those of the list above, or what its type suggests."""
    if key in VALUES:
        return [other for other in VALUES[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    if isinstance(value, float):
        return [value * 2 + 0.1]
    return []


def mutations(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configs that differ from the case's in one key, also by its absence; rotary keys also without the newer table."""
    config = subject(name).config
    keys = set(config) | read_attributes(subject(name).model) | set(VALUES)
    # Without the config of a part, transformers builds one of billions of weights.
    for key in sorted(key for key in set(config) - NOT_A_KEY if not key.endswith("_config")):
        yield key, {k: v for k, v in config.items() if k != key}
        yield key, config | {key: None}
    for key in sorted(keys - NOT_A_KEY):
        for value in other_values(key, config.get(key)):
            yield key, config | {key: value}
            if key.startswith(("rope_", "rotary", "partial")) and key != "rope_parameters":
                yield key, {k: v for k, v in config.items() if k != "rope_parameters"} | {key: value}
    for part in described_parts(config):
        inner = config[part]
        for key in sorted((set(inner) | set(VALUES)) - NOT_A_KEY):
            for value in other_values(key, inner.get(key)):
                yield f"{part}: {key}", config | {part: inner | {key: value}}


def described_parts(config: dict[str, Any]) -> list[str]:
    """The parts of a multimodal model that are run here: towers that are described, or the language model."""
    family = FAMILIES[config["model_type"]]
    return [*family.parts, *(["text_config"] if family.text is not None else [])]


@dataclass(frozen=True, eq=False)
class Outcome:
    """One changed key: the config, and what transformers makes of it; `weights` is None where isobasin refuses."""

    key: str
    config: dict[str, Any]
    outputs: Tensor
    change: float
    weights: ib.Weights | None

    def __str__(self) -> str:
        return f"{self.key} = {self.config.get(self.key)}, outputs change by {self.change:.1e}"


@cache
def outcomes(name: str) -> list[Outcome]:
    """Every changed key that transformers can run with the same tensors."""
    s, found = subject(name), []
    for key, config in mutations(name):
        outputs = s.run(config)
        if outputs is None or outputs[0].shape != s.outputs[0].shape:
            continue
        size = float(s.outputs[0].abs().max())
        change = max(float((x - y).abs().max()) for x, y in zip(outputs, s.outputs)) / size
        try:
            weights = s.weights(config)
        except IsobasinError:
            weights = None
        found.append(Outcome(key, config, outputs[0], change, weights))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_key_that_changes_the_outputs_counts(name: str) -> None:
    a = subject(name).weights(subject(name).config)
    seen = [o for o in outcomes(name) if o.change > SEEN]
    missed = []
    for o in seen:
        if o.weights is None or a.arch.spaces != o.weights.arch.spaces or a.arch.shapes != o.weights.arch.shapes:
            continue  # refused, or another architecture
        if not differing_settings(a, o.weights):
            missed.append(f"{o}: equal")
        if _digest(a) == _digest(o.weights):
            missed.append(f"{o}: the same fingerprint")
    assert not missed
    assert len({o.key for o in seen}) >= 2, "the mutations reach too little"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_key_that_transformers_ignores_is_ignored(name: str) -> None:
    """No output changes in either implementation, bit for bit, and the model reads nothing that the key changes."""
    a = subject(name).weights(subject(name).config)
    still = [o for o in outcomes(name) if o.change == 0 and o.key.rpartition(": ")[2] not in SHAPES]
    # A key that is read may count on other inputs.
    models = {o: (a, o.weights or a) for o in still if o.key not in NEUTRAL_KEYS}
    read = {o for o, pair in models.items() if any(keys_that_matter(w, [o.key]) for w in pair)}
    of_parts = read_of_parts(name, a)
    read |= {o for o in still if o.key in of_parts}
    still = [o for o in still if o not in read]
    wrong = []
    for o in still:
        b = o.weights
        if b is None or differing_settings(a, b) or _digest(a) != _digest(b) or a.arch.spaces != b.arch.spaces:
            wrong.append(str(o))
    assert not wrong
    # The config of a multimodal model leaves most keys to those of its parts, which are read.
    fewest = 8 if described_parts(subject(name).config) else 10
    assert len({o.key for o in still}) >= fewest, "the mutations reach too little"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_no_key_makes_a_scrambled_model_another_function(name: str) -> None:
    """The group that is read off a config is one of the model that transformers makes of it."""
    spaces = subject(name).weights(subject(name).config).arch.spaces
    loaded = [o for o in outcomes(name) if o.weights is not None and o.key.rpartition(": ")[2] not in SHAPES]
    moving = [o for o in loaded if o.change or o.weights.arch.spaces != spaces]
    wrong = []
    for o in moving:
        assert o.weights is not None
        moved = module_of(scramble(o.weights, seed=1).apply(o.weights))
        after = tiny.logits(moved, subject(name).case.inputs(0))
        change = float((after - o.outputs).abs().max() / o.outputs.abs().max())
        if not change <= 1e-5 * o.weights.arch.sizes.n_layers:
            wrong.append(f"{o}; scrambled {change:.1e}")
    assert not wrong
    assert len({o.key for o in moving}) >= 2, "the mutations reach too little"


@pytest.mark.parametrize("name", ["clip-towers", "siglip-towers"])
def test_a_key_of_a_tower_counts_if_the_tower_reads_it(name: str) -> None:
    s = subject(name)
    a = s.weights(s.config)

    def with_key(key: str, value: Any) -> ib.Weights:
        return s.weights(s.config | {"text_config": s.config["text_config"] | {key: value}})

    ignored, read = with_key("embedding_multiplier", 2.0), with_key("is_causal", not a.config.get("is_causal", False))
    assert not differing_settings(a, ignored)
    assert _digest(a) == _digest(ignored)
    assert "text_config: is_causal" in differing_settings(a, read)
    assert _digest(a) != _digest(read)


def refuses_some_lengths(s: Subject, config: dict[str, Any]) -> bool:
    """Whether transformers makes a model of the config, with the same tensors, that refuses texts of some length."""
    from transformers import AutoConfig

    settings = {k: v for k, v in copy.deepcopy(config).items() if k not in ("dtype", "torch_dtype")}
    try:
        model = type(s.model)._from_config(AutoConfig.for_model(**settings), **s._options).eval()
        missing = model.load_state_dict(s.model.state_dict(), strict=False).missing_keys
        model(torch.arange(4)[None])
    except Exception:  # no model at all, or none of these tensors
        return False
    try:
        model(torch.arange(7)[None])
    except Exception:
        return not missing
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert-masked-lm-tied", "llama-classifier"])
def test_a_key_with_which_transformers_refuses_some_texts_counts(name: str) -> None:
    """The other tests leave out what transformers can not run, so they see no key that refuses inputs."""
    s = subject(name)
    a = s.weights(s.config)
    refusing = [c for key, c in mutations(name) if s.run(c) is None and refuses_some_lengths(s, c)]
    assert all(differing_settings(a, s.weights(c)) and _digest(a) != _digest(s.weights(c)) for c in refusing)
    chunks = {c["chunk_size_feed_forward"] for c in refusing if c.get("chunk_size_feed_forward")}
    assert chunks == ({2, 4} if name.startswith("bert") else set())


def test_the_check_of_scrambled_models_sees_a_wrong_group() -> None:
    """A group for half of the rotary columns is not one of a model that rotates all of them."""
    s = subject("llama-classifier")
    weights = s.weights(s.config)
    spaces = {
        name: replace(space, rotary=2) if isinstance(space, HeadSpace) else space
        for name, space in weights.arch.spaces.items()
    }
    wrong = replace(weights, arch=replace(weights.arch, spaces=spaces))
    moved = scramble(wrong, seed=1).apply(wrong)
    with pytest.raises(VerificationError, match="outputs would differ"):
        require_same_outputs(weights, moved)
    right = scramble(weights, seed=1).apply(weights)
    assert (require_same_outputs(weights, right).largest or 0) <= 1e-5 * weights.arch.sizes.n_layers


def own_config(**settings: Any) -> ModelConfig:
    usual = {
        "d_model": 12,
        "n_layers": 2,
        "n_heads": 2,
        "d_ff": 10,
        "d_vocab": 17,
        "n_positions": 9,
        "positions": "rope",
    }
    return ModelConfig(**(usual | settings))


@pytest.mark.parametrize("positions", ["rope", "learned", "alibi"])
def test_every_setting_of_our_own_model_that_changes_the_outputs_counts(positions: str) -> None:
    model = tiny.randomize(Transformer(own_config(positions=positions)), 0)
    config, tensors = own_config(positions=positions).to_dict(), model.state_dict()
    ids = torch.arange(9)[None]
    others = {
        "positions": ["none", "sinusoidal", "learned", "rope", "alibi"],
        "norm": ["rms"],
        "feed_forward": ["swiglu"],
        "rotary_layout": ["interleaved"],
        "rotary_dims": [2],
        "n_heads": [3],
    }
    a, seen, missed = ib.load(tensors, config), [], []
    for key, value in config.items():
        for other in others.get(key, other_values(key, value)):
            try:
                changed = Transformer(ModelConfig.from_dict(config | {key: other})).eval()
                changed.load_state_dict(tensors)
                b = ib.load(tensors, config | {key: other})
            except (IsobasinError, RuntimeError, ValueError):
                continue
            with torch.no_grad():
                if float((changed(ids) - model.eval()(ids)).abs().max()) <= SEEN:
                    continue
            seen.append(key)
            same_spaces = a.arch.spaces == b.arch.spaces
            if same_spaces and (not differing_settings(a, b) or _digest(a) == _digest(b)):
                missed.append(f"{key} = {other}")
    assert not missed
    assert {"norm_eps", "causal"} <= set(seen)
