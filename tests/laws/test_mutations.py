"""Change any word of any family, and a check goes red; what survives is listed here with its reason.

A mutant is dead when, for some model of its family, loading refuses it, the symmetry has another dimension (the
right one is measured in test_whole_dimension), a scrambled model says something else, or a step outside a
group that it declares is not seen (the group is then too small).
"""

import os
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Any
from zlib import crc32

import pytest
import torch
from mutants import PARTS, Mutant, Words, bent, described, mutants
from outside import act, step_outside
from subjects import moved, on_disk, said, subject
from survivors import (
    NO_GROUPS,
    NO_MEAN,
    NO_ROTARY,
    NO_SCALES,
    NO_SHIFT,
    ONE_ROW,
    OPTIONAL,
    SELF_DUAL,
    SIDES,
    SURVIVORS_OF_TYPES,
    TIED,
    TIED_RMS,
    UNREAD,
    UNUSED,
    WHOLE,
)
from torch import Tensor

import model_types as mt
import tiny
from isobasin.arch import FAMILIES, Architecture, HeadSpace, Space
from isobasin.errors import IsobasinError
from isobasin.groups import Element, HeadsElement
from isobasin.model import ModelConfig, Transformer
from isobasin.symmetries import group_of, symmetry
from isobasin.symmetries.normal_form import normalize
from isobasin.symmetries.transform import scramble
from isobasin.weights import Weights, load

pytestmark = pytest.mark.hf

UNSEEN, SEEN = 1e-6, 1e-3


@dataclass(frozen=True)
class Trial:
    """A model that judges mutants of its family: its file, and what it says."""

    weights: Weights
    tensors: Mapping[str, Tensor]
    say: Callable[[Weights], Tensor]

    @cached_property
    def output(self) -> Tensor:
        return self.say(self.weights)

    @cached_property
    def dim(self) -> int:
        return symmetry(self.weights.arch).dim

    @cached_property
    def groups(self) -> Set[str]:
        return symmetry(self.weights.arch).groups.keys()

    @property
    def family(self) -> str:
        return self.weights.arch.family

    def error(self, weights: Weights) -> float:
        """The change of the outputs. Copies in the file must stay copies, whichever of them transformers reads."""
        for copy, target in self.weights.names.copies.items():
            if copy in weights and not torch.equal(weights[copy], weights[target]):
                return float("inf")
        return float((self.say(weights) - self.output).abs().max() / self.output.abs().max())

    def loaded(self, mutant: Mutant) -> Weights | str | None:
        """The file as the mutant describes it, or why it refuses the file; None: it says the same of this file."""
        try:
            with bent(mutant):
                weights = load(self.tensors, self.weights.config)
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
        return None if said_of_file(weights.arch) == said_of_file(self.weights.arch) else weights

    def verdict(self, weights: Weights | str | None, check: "Check") -> str | None:
        """Why the mutant that describes the file so is dead, or None."""
        if not isinstance(weights, Weights):
            return weights
        try:
            return check(self, weights)
        except REFUSALS as error:  # a crash is red as well
            return f"{type(error).__name__}: {error}"


REFUSALS = (IsobasinError, RuntimeError, ValueError, LookupError, AssertionError, StopIteration)


def said_of_file(arch: Architecture) -> dict[str, Any]:
    """All that an architecture says of its file."""
    said = {field.name: getattr(arch, field.name) for field in fields(arch)}
    spaces = {name: vars(space) for name, space in arch.spaces.items()}  # with what is no part of their identity
    return said | {"spaces": spaces, "tensors": {name: pattern.roles for name, pattern in arch.tensors.items()}}


Check = Callable[[Trial, Weights], str | None]


def dimension(trial: Trial, weights: Weights) -> str | None:
    found = symmetry(weights.arch)
    still = trial.groups - found.groups.keys()
    if still:
        return f"nothing moves {', '.join(sorted(still))}"
    return None if found.dim == trial.dim else f"dimension {found.dim} for {trial.dim}"


def function(*seeds: int) -> Check:
    def check(trial: Trial, weights: Weights) -> str | None:
        for seed in seeds:
            error = trial.error(moved(scramble(weights, seed=seed), weights))
            if not error <= UNSEEN:
                return f"the output moves by {error}"
        return None

    return check


def maximal(trial: Trial, weights: Weights) -> str | None:
    """Every group is as large as it may be: one step outside it is seen."""
    flat = moved(normalize(weights), weights)
    for name in symmetry(weights.arch).groups:
        outside = _outside(weights.arch.spaces[name])
        if outside is not None and not trial.error(act(flat, {name: outside})) > SEEN:
            return f"a step outside the group of {name} is not seen"
    return None


def _outside(space: Space | HeadSpace) -> Element | None:
    if isinstance(space, Space):
        return step_outside(space.kind, space.size)
    still = group_of(space).identity()
    assert isinstance(still, HeadsElement)
    return replace(still, kv=still.kv.roll(1)) if not space.permutable and space.n_kv_heads > 1 else None


# Cheap ones first; a global sign is drawn by each seed with even odds. Only a space can declare too small a group.
CHECKS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (dimension, PARTS),
    (function(0), PARTS),
    (function(1), ("modules", "tensors", "norms")),
    (function(1, 2, 3, 4, 5), ("spaces",)),
    (maximal, ("spaces", "heads")),
)


SLOW = os.environ.get("ISOBASIN_SLOW") == "1"
SHARE, SHARE_OF_TYPES = 16, 96  # of which `make test` looks at one


class Jury:
    """The models that judge the mutants of a family; each is built when it is needed."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.trials = [cache(make) for make in TRIALS[family]]
        self.share = SHARE if family in CASES else SHARE_OF_TYPES

    def mutants(self, k: int) -> Mapping[str, Mutant]:
        trial = self.trials[k]()
        return {mutant.name: mutant for mutant in mutants(described(trial.family, trial.weights.config))}

    def survivors(self) -> tuple[set[str], set[str]]:
        """Mutants that no check of any model kills, and those that were looked at, by name: all of them in
        `make test-all`; in `make test` the same part of those of the first model each time."""
        every = [self.mutants(k) for k in (range(len(self.trials)) if SLOW else [0])]
        looked = {name for each in every for name in each}
        looked = {name for name in looked if SLOW or crc32(f"{self.family} {name}".encode()) % self.share == 0}
        alive = looked
        for k in range(len(self.trials)):
            found = (every[k] if SLOW or not k else self.mutants(k)) if alive else {}
            alive = {name for name in alive if name not in found or not self.kills(k, found[name])}
        return alive, looked

    def kills(self, k: int, mutant: Mutant) -> bool:
        trial = self.trials[k]()
        weights = trial.loaded(mutant)
        return any(trial.verdict(weights, check) is not None for check, parts in CHECKS if mutant.part in parts)


def from_transformers(name: str, **config: Any) -> Trial:
    """A tiny case, with other settings that leave its tensors as they are."""
    s = subject(name)
    return _trial(s.weights, {**s.weights.config, **config}, lambda weights: said(weights, s.inputs))


def from_model_type(name: str, model_class: str = "", **config: Any) -> Trial:
    """A configuration of `model_types`, with another class and other settings."""
    found = mt.model_type(name)
    found = replace(found, model=model_class or found.model, config={**found.config, **config})
    model = found.build() if model_class or config else mt.built(name)
    live = load(model)
    x = mt.inputs(live)
    return _trial(live, live.config, lambda weights: mt.outputs(weights, model, x))


def _trial(weights: Weights, config: Mapping[str, Any], say: Callable[[Weights], Tensor]) -> Trial:
    """The file of a model, with buffers and copies that old files have."""
    parts = described(weights.arch.family, config)
    tensors, disk = on_disk(weights), weights.names.on_disk
    prefix = weights.family.text.prefix if weights.family.text else ""
    buffers = [prefix + re.sub(r"\{i\}", "0", key) for key, text in parts["tensors"].items() if text == "-"]
    tensors |= {key: torch.zeros(1) for key in buffers if key not in disk}
    copies = {prefix + copy: prefix + target for copy, target in (parts.get("aliases") or {}).items()}
    copies = {copy: target for copy, target in copies.items() if target in disk}
    tensors |= {copy: tensors[disk[target]] for copy, target in copies.items() if copy != weights.family.own_head}
    return Trial(load(tensors, config), tensors, say)


HALF = {"rope_type": "default", "partial_rotary_factor": 0.5}
_OWN = {"d_model": 12, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_head": 4, "d_ff": 10, "norm_eps": 1e-3}
_TOKENS = _OWN | {"d_vocab": 15, "n_positions": 6}
_PATCHES = _OWN | {"image_size": 4, "patch_size": 2, "n_channels": 2, "n_classes": 5}


def own(**settings: Any) -> Trial:
    config = ModelConfig(**settings)
    model = tiny.randomize(Transformer(config).double(), seed=1).requires_grad_(False)
    rng = torch.Generator().manual_seed(2)
    if config.d_vocab:
        inputs = torch.randint(config.d_vocab, (4, config.n_positions), generator=rng)
    else:
        inputs = torch.randn(4, 2, 4, 4, generator=rng, dtype=torch.float64)

    names = dict(model.named_parameters())
    tensors = model.state_dict() | ({"head.weight": names["embed.tokens.weight"]} if config.tied else {})

    def say(weights: Weights) -> Tensor:
        return torch.func.functional_call(model, {n: t for n, t in on_disk(weights).items() if n in names}, (inputs,))

    return Trial(load(tensors, config.to_dict()), tensors, say)


# The strictest judge of a family first. ReLU units have scales, which tell a space from its dual.
TRIALS: dict[str, list[Callable[[], Trial]]] = {
    "gpt2": [
        partial(from_transformers, "gpt2-lm-untied", activation_function="relu"),
        partial(from_transformers, "gpt2-lm-tied"),
        partial(from_transformers, "gpt2-classifier"),
        partial(from_transformers, "gpt2-bare"),
    ],
    "bert": [
        partial(from_transformers, "bert-relu"),
        partial(from_transformers, "bert-masked-lm-untied", hidden_act="relu"),
        partial(from_transformers, "bert-masked-lm-tied"),
        partial(from_transformers, "bert-pretraining"),
        partial(from_transformers, "bert-bare"),
    ],
    "vit": [
        partial(from_transformers, "vit-classifier", hidden_act="relu"),
        partial(from_transformers, "vit-no-qkv-bias"),
        partial(from_transformers, "vit-masked-image"),
        partial(from_transformers, "vit-bare"),
    ],
    "llama": [
        partial(from_transformers, "llama-biases"),
        partial(from_transformers, "llama-gqa"),
        partial(from_transformers, "llama-tied"),
        partial(from_transformers, "llama-classifier"),
        partial(from_transformers, "llama-bare"),
        partial(from_transformers, "mistral-gqa"),
    ],
    "phi3": [partial(from_transformers, "phi3-gqa"), partial(from_transformers, "phi3-half-rotary")],
    "gpt_neox": [
        partial(from_transformers, "gpt_neox-sequential", hidden_act="relu"),
        partial(from_transformers, "gpt_neox-quarter-rotary"),
        partial(from_transformers, "gpt_neox-no-attention-bias"),
        partial(from_transformers, "gpt_neox-tied"),
        partial(from_transformers, "gpt_neox-classifier"),
        partial(from_transformers, "gpt_neox-bare"),
    ],
    "isobasin": [
        partial(own, **_TOKENS | {"d_head": 6}, positions="rope", feed_forward="swiglu", rotary_dims=4, causal=True),
        partial(own, **_TOKENS, positions="rope", feed_forward="swiglu", norm="rms", rotary_layout="interleaved"),
        partial(own, **_TOKENS, positions="learned", post_norm=True, feed_forward="swiglu"),
        partial(own, **_TOKENS, positions="sinusoidal", tied=True, bias=False),
        partial(own, **_TOKENS, positions="none", norm="rms", tied=True),
        partial(own, **_TOKENS, positions="alibi", norm="rms", post_norm=True, n_classes=5),
        partial(own, **_PATCHES, positions="learned", norm="layer"),
    ],
}
CASES = tuple(TRIALS)

# Beside the configurations of `model_types`, some that are stricter.
_LIKE_BERT = {
    "roberta-masked-lm": "Roberta",
    "xlm-roberta-masked-lm": "XLMRoberta",
    "camembert-tokens": "Camembert",
    "data2vec-text-masked-lm": "Data2VecText",
    "mpnet-masked-lm": "MPNet",
    "ernie-masked-lm": "Ernie",
}
STRICTER: dict[str, list[Callable[[], Trial]]] = {
    mt.model_type(name).family: [
        partial(from_model_type, name, f"{stem}ForMaskedLM", tie_word_embeddings=False, hidden_act="relu"),
        partial(from_model_type, name, f"{stem}ForMaskedLM", hidden_act="relu"),
        partial(from_model_type, name, f"{stem}ForSequenceClassification", num_labels=5),
    ]
    for name, stem in _LIKE_BERT.items()
}
STRICTER |= {
    "distilbert": [partial(from_model_type, "distilbert-masked-lm-untied", activation="relu")],
    "mbart": [partial(from_model_type, "mbart-tied", activation_function="relu")],
    "whisper": [partial(from_model_type, "whisper-untied", activation_function="relu")],
    "deit": [partial(from_model_type, "deit-two-classifiers", hidden_act="relu")],
    "beit": [partial(from_model_type, "beit-positions", hidden_act="relu", use_mask_token=True)],
    "dinov2": [partial(from_model_type, "dinov2-classifier", hidden_act="relu")],
    "modernbert": [
        partial(from_model_type, "modernbert-masked-lm", norm_bias=True),
        partial(from_model_type, "modernbert-bare", norm_bias=True),
    ],
    "siglip_text_model": [partial(from_model_type, "siglip_text_model-bare", hidden_act="relu")],
    "siglip_vision_model": [partial(from_model_type, "siglip_vision_model-bare", hidden_act="relu")],
    "mistral": [partial(from_transformers, f"mistral-{name}") for name in ("gqa", "head-dim")],
    "qwen2": [partial(from_transformers, f"qwen2-{name}") for name in ("gqa", "tied", "classifier")],
    "stablelm": [partial(from_model_type, "stablelm-untied", rope_parameters=HALF)],
    "starcoder2": [partial(from_model_type, "starcoder2-untied", hidden_act="relu")],
}
TRIALS |= {family: list(STRICTER.get(family, ())) for family in FAMILIES if family not in CASES}
for _each in mt.MODEL_TYPES:
    TRIALS[_each.family].append(partial(from_model_type, _each.name))


# -- survivors ------------------------------------------------------------------------------------------------

_C_ATTN = "modules: attn.c_attn = a{i}* qk{i}*+qk{i}+vo{i} → a{i}*"
_FUSED = "modules: attention.query_key_value = (qk{i}*+qk{i}+vo{i}) a{i}* →"
_WORDS = "tensors: bert.embeddings.word_embeddings.weight = .30 resid & .30 t* →"
_TOKENS_TIED = "tensors: embed.tokens.weight = .15 resid & .15 f* →"

SURVIVORS: dict[str, Mapping[str, str]] = {
    "gpt2": {
        f"{_C_ATTN} qk{{i}}:q*+qk{{i}}+vo{{i}}": NO_GROUPS,
        f"{_C_ATTN} qk{{i}}*+qk{{i}}:q+vo{{i}}": NO_GROUPS,
        f"{_C_ATTN} qk{{i}}*+qk{{i}}+vo{{i}}:q": NO_GROUPS,
        "modules: attn.c_proj = vo{i}* resid → vo{i}:q* resid": NO_GROUPS,
        "tensors: transformer.wte.weight = .30 resid & .30 f* → .30 resid* & .30 f*": SELF_DUAL,
        "sums: positions, turned round": SIDES,
        "spaces: ff{i}, stream=True": NO_MEAN,
        "heads: interleaved=True": NO_ROTARY,
    },
    "bert": {
        "modules: attention.self.query = qk{i}* n{2i}* → qk{i}:q* n{2i}*": NO_GROUPS,
        "modules: attention.self.key = qk{i} n{2i}* → qk{i}:q n{2i}*": NO_GROUPS,
        "modules: attention.self.value = vo{i} n{2i}* → vo{i}:q n{2i}*": NO_GROUPS,
        "modules: attention.output.dense = resid vo{i}* → resid vo{i}:q*": NO_GROUPS,
        "modules: bert.pooler.dense = pool n4* → pool* n4*": SELF_DUAL,
        "modules: bert.pooler.dense = ?.24 n4* → ?.24 t*": UNUSED,
        "modules: cls.seq_relationship = ?.2 .24 → ?.3 .24": UNUSED,
        "modules: cls.seq_relationship = ?.2 .24 → ?.2 .25": UNUSED,
        "modules: classifier = . pool* → . pool": SELF_DUAL,
        "modules: cls.seq_relationship = . pool* → . pool": SELF_DUAL,
        "modules: cls.predictions.transform.dense = mlm n4* → mlm* n4*": SELF_DUAL,
        "modules: cls.predictions.transform.dense = |resid| n4* → |resid|* n4*": SELF_DUAL,
        f"{_WORDS} .30 resid* & .30 t*": SELF_DUAL,
        f"{_WORDS} .30 |resid| & .30 t*": NO_SCALES,
        "modules: cls.predictions.transform.dense = mlm n4* → |mlm| n4*": NO_SCALES,
        "tensors: cls.predictions.bias = ?.30 → .30": OPTIONAL,
        "sums: types, turned round": SIDES,
        "sums: words, give the first row of bert.embeddings.word_embeddings.weight": WHOLE,
        "sums: words, take the first row of bert.embeddings.position_embeddings.weight": WHOLE,
        "spaces: ff{i}, stream=True": NO_MEAN,
        "spaces: pool, stream=True": NO_MEAN,
        "heads: interleaved=True": NO_ROTARY,
    },
    "vit": {
        "modules: attention.attention.query = qk{i}* a{i}* → qk{i}:q* a{i}*": NO_GROUPS,
        "modules: attention.attention.key = qk{i} a{i}* → qk{i}:q a{i}*": NO_GROUPS,
        "modules: attention.attention.value = vo{i} a{i}* → vo{i}:q a{i}*": NO_GROUPS,
        "modules: attention.output.dense = resid vo{i}* → resid vo{i}:q*": NO_GROUPS,
        "sums: cls, turned round": SIDES,
        "sums: cls, give the first row of vit.embeddings.cls_token": ONE_ROW,
        "sums: patches, give the first row of vit.embeddings.patch_embeddings.projection.bias": ONE_ROW,
        "sums: patches, give the first row of vit.embeddings.mask_token": ONE_ROW,
        "spaces: ff{i}, stream=True": NO_MEAN,
        "heads: interleaved=True": NO_ROTARY,
    },
    "phi3": {  # its two cases have no biases: nothing else lives on the output axes
        "modules: mlp.down_proj = resid ff{i}* → resid* ff{i}*": SELF_DUAL,
        "modules: mlp.gate_up_proj = |ff{i}|+ff{i} m{i}* → |ff{i}|*+ff{i} m{i}*": SELF_DUAL,
        "modules: self_attn.o_proj = resid vo{i}:q* → resid* vo{i}:q*": SELF_DUAL,
        "tensors: model.embed_tokens.weight = .30 resid → .30 resid*": SELF_DUAL,
        "spaces: ff{i}, stream=True": NO_MEAN,
    },
    "llama": {
        "modules: mlp.gate_proj = |ff{i}| m{i}* → |ff{i}|* m{i}*": SELF_DUAL,
        "tensors: model.embed_tokens.weight = .30 resid → .30 resid*": SELF_DUAL,
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid* & .30 f*": SELF_DUAL,
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid & .30 .": TIED,
        "tensors: model.embed_tokens.weight = .30 resid & .30 f* → .30 resid": TIED_RMS,
        "norms: f = rms(resid, exposed) → layer": UNREAD,
        "norms: f = rms(resid, exposed) → nothing": UNREAD,
        "norms: f = rms(resid, exposed) → plus_one": UNREAD,
        "spaces: ff{i}, stream=True": NO_MEAN,
    },
    "gpt_neox": {
        f"{_FUSED} (qk{{i}}:q*+qk{{i}}+vo{{i}}) a{{i}}*": NO_GROUPS,
        f"{_FUSED} (qk{{i}}*+qk{{i}}:q+vo{{i}}) a{{i}}*": NO_GROUPS,
        f"{_FUSED} (qk{{i}}*+qk{{i}}+vo{{i}}:q) a{{i}}*": NO_GROUPS,
        "modules: attention.dense = resid vo{i}* → resid vo{i}:q*": NO_GROUPS,
        "tensors: gpt_neox.embed_in.weight = .30 resid & .30 f* → .30 resid* & .30 f*": SELF_DUAL,
        "tensors: gpt_neox.embed_in.weight = .30 resid & .30 f* → .30 resid & .30 .": TIED,
        "norms: f = layer(resid, exposed) → nothing": UNREAD,
        **{f"sums: out{i}, turned round": SIDES for i in (0, 1)},
        **{f"sums: out{i}, give the first row of gpt_neox.layers.{i}.attention.dense.bias": ONE_ROW for i in (0, 1)},
        **{f"sums: out{i}, take the first row of gpt_neox.layers.{i}.mlp.dense_4h_to_h.bias": ONE_ROW for i in (0, 1)},
        "spaces: ff{i}, stream=True": NO_MEAN,
    },
    "isobasin": {
        "modules: mlp.gate = |ff{i}| m{i}* → |ff{i}|* m{i}*": SELF_DUAL,
        "modules: mlp.gate = |ff{i}| n{2i+1}* → |ff{i}|* n{2i+1}*": SELF_DUAL,
        f"{_TOKENS_TIED} .15 resid* & .15 f*": SELF_DUAL,
        f"{_TOKENS_TIED} .15 resid & .15 .": TIED,
        "norms: n0 = rms(resid, skip) → exposed": NO_SHIFT,
        "norms: n0 = rms(resid, skip) → skip=blocks.{i+1}.attn.o": NO_SHIFT,
        "norms: n0 = rms(resid, skip) → skip=blocks.{i}.mlp.down": NO_SHIFT,
        "norms: n{2i+1} = rms(resid, skip) → exposed": NO_SHIFT,
        "norms: n{2i+1} = rms(resid, skip) → skip=blocks.0.attn.o": NO_SHIFT,
        "norms: n{2i+1} = rms(resid, skip) → skip=blocks.{i+1}.attn.o": NO_SHIFT,
        "norms: n{2i+2} = rms(resid, skip) → exposed": NO_SHIFT,
        "norms: n{2i+2} = rms(resid, skip) → skip=blocks.0.attn.o": NO_SHIFT,
        "norms: n{2i+2} = rms(resid, skip) → skip=blocks.{i}.mlp.down": NO_SHIFT,
        "sums: positions, turned round": SIDES,
        "sums: positions, take the first row of embed.patches.bias": ONE_ROW,
        "spaces: ff{i}, stream=True": NO_MEAN,
    },
}


def survivors_of(family: str) -> set[str]:
    of_type = {
        name for names in SURVIVORS_OF_TYPES.values() for name, families in names.items() if family in families.split()
    }
    return of_type | set(SURVIVORS.get(family, {}))


@pytest.mark.slow
@pytest.mark.parametrize("family", TRIALS)
def test_every_mutant_dies_but_those_listed_with_their_reason(family: str) -> None:
    found, looked = Jury(family).survivors()
    listed = survivors_of(family) & looked
    assert looked or not SLOW  # a sample may be empty
    assert found - listed == set(), "these changes turn no check red"
    assert listed - found == set(), "listed as survivors, but dead"


@pytest.mark.parametrize("family", CASES)
def test_the_unchanged_family_passes_every_check(family: str) -> None:
    for make in TRIALS[family]:
        for check in (dimension, function(0), maximal):
            assert check(make(), make().weights) is None


def test_the_checks_are_not_deaf() -> None:
    trial = own(**_TOKENS, positions="rope", norm="rms")
    wrong = {
        "modules: attn.q = qk{i}:q* a{i}* → qk{i}:q a{i}*": "the output moves",
        "modules: attn.k left out": "no pattern of family isobasin covers",
        "heads: rotary 4 → 2": "dimension",
        "heads: permutable=False": "a step outside",
    }
    every = {m.name: m for m in mutants(described("isobasin", trial.weights.config))}
    for name, words in wrong.items():
        told = [trial.verdict(trial.loaded(every[name]), check) for check, _ in CHECKS]
        assert any(words in (reason or "") for reason in told), (name, told)


def test_mutants_have_names_of_their_own_and_change_what_they_say() -> None:
    for family in (*CASES, "t5", "clip_text_model", "qwen2_moe"):
        parts = described(family, TRIALS[family][0]().weights.config)
        found = list(mutants(parts))
        assert len({m.name for m in found}) == len(found)
        assert all(m.value != parts[m.part] for m in found)
        assert {"tensors", "norms", "spaces", "heads"} <= {m.part for m in found}


def test_a_change_in_what_a_file_does_not_have_is_no_change() -> None:
    trial = from_transformers("bert-masked-lm-tied")
    every = {m.name: m for m in mutants(described("bert", trial.weights.config))}
    assert trial.loaded(every["tensors: cls.predictions.bias = ?.30 → .30"]) is None
    assert trial.verdict(None, dimension) is None
    assert isinstance(trial.loaded(every["heads: interleaved=True"]), Weights)
    gains = from_model_type("gemma3_text-tied")  # what is no part of a space's identity counts as well
    every = {m.name: m for m in mutants(described("gemma3_text", gains.weights.config))}
    weights = gains.loaded(every["heads: plus_one=False"])
    assert "the output moves" in (gains.verdict(weights, function(0)) or "")


def test_each_word_is_changed_in_every_way() -> None:
    words = Words(described("llama", from_transformers("llama-gqa").weights.config))
    assert {other for _, other in words.pattern("qk{i}:q* a{i}*")} == {
        "qk{i}:q* a{i}*",
        ". a{i}*",
        "qk{i}:q a{i}*",
        "qk{i}* a{i}*",
        "|qk{i}:q|* a{i}*",
        "vo{i}:q* a{i}*",
        "qk{i}:q* .",
        "qk{i}:q* a{i}",
        "qk{i}:q* f*",
        "qk{i}:q* m{i}*",
    }
    assert {other for _, other in words.pattern("?.3 |ff{i}|")} >= {".3 |ff{i}|", "?.4 |ff{i}|", "?.3 ff{i}", "?.3 ."}
    fused = {other for _, other in words.pattern("(qk{i}*+qk{i}+vo{i}) .")}
    assert {"qk{i}*+qk{i}+vo{i} .", "(qk{i}+qk{i}*+vo{i}) .", "(qk{i}*+vo{i}) ."} <= fused
