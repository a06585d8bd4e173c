"""Change any word of any family, and a check goes red; what survives is listed here with its reason.

A mutant is dead when, for some model of its family, loading refuses it, the symmetry has another dimension (the
right one is measured in test_whole_dimension), a scrambled model says something else, or a step outside a
group that it declares is not seen (the group is then too small).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from zlib import crc32

import pytest
import torch
from mutants import PARTS, Mutant, Words, bent, described, mutants
from outside import act, step_outside
from subjects import moved, on_disk, said, subject
from torch import Tensor

import tiny
from isobasin.arch import HeadSpace, Space
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

    @property
    def family(self) -> str:
        return self.weights.arch.family

    def error(self, weights: Weights) -> float:
        return float((self.say(weights) - self.output).abs().max() / self.output.abs().max())

    def verdict(self, mutant: Mutant, check: "Check") -> str | None:
        """Why the mutant is dead, or None."""
        try:
            with bent(self.family, mutant):
                weights = load(self.tensors, self.weights.config)
            if weights.arch == self.weights.arch:  # the change is in nothing that this file has
                return None
            return check(self, weights)
        except (IsobasinError, RuntimeError) as error:  # a crash over sizes is red as well
            return f"{type(error).__name__}: {error}"


Check = Callable[[Trial, Weights], str | None]


def dimension(trial: Trial, weights: Weights) -> str | None:
    found = symmetry(weights.arch).dim
    return None if found == trial.dim else f"dimension {found} for {trial.dim}"


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


def chosen(name: str) -> bool:
    """All mutants in `make test-all`; the same eighth of them each time in `make test`."""
    return os.environ.get("ISOBASIN_SLOW") == "1" or crc32(name.encode()) % 8 == 0


def survivors(trials: list[Trial]) -> tuple[set[str], int]:
    """The chosen mutants that no check of any trial kills, by name, and how many were looked at."""
    every = [(t, m) for t in trials for m in mutants(described(t.family, t.weights.config)) if chosen(m.name)]
    alive = {mutant.name for _, mutant in every}
    for check, parts in CHECKS:
        for trial, mutant in every:
            if mutant.name in alive and mutant.part in parts and trial.verdict(mutant, check) is not None:
                alive.remove(mutant.name)
    return alive, len({mutant.name for _, mutant in every})


def from_transformers(name: str, **config: Any) -> Trial:
    """A tiny case, with other settings that leave its tensors as they are; buffers and copies of old files added."""
    s = subject(name)
    settings = {**s.weights.config, **config}
    parts = described(s.weights.arch.family, settings)
    tensors, disk = on_disk(s.weights), s.weights.names.on_disk
    buffers = [key.replace("{i}", "0") for key, text in parts["tensors"].items() if text == "-"]
    tensors |= {key: torch.zeros(1) for key in buffers if key not in disk}
    tensors |= {copy: tensors[disk[target]] for copy, target in parts.get("aliases", {}).items()}
    return Trial(load(tensors, settings), tensors, lambda weights: said(weights, s.inputs))


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
TRIALS: Mapping[str, Callable[[], list[Trial]]] = {
    "gpt2": lambda: [
        from_transformers("gpt2-lm-untied", activation_function="relu"),
        from_transformers("gpt2-lm-tied"),
        from_transformers("gpt2-classifier"),
        from_transformers("gpt2-bare"),
    ],
    "bert": lambda: [
        from_transformers("bert-relu"),
        from_transformers("bert-masked-lm-untied", hidden_act="relu"),
        from_transformers("bert-masked-lm-tied"),
        from_transformers("bert-pretraining"),
        from_transformers("bert-bare"),
    ],
    "vit": lambda: [
        from_transformers("vit-classifier", hidden_act="relu"),
        from_transformers("vit-no-qkv-bias"),
        from_transformers("vit-masked-image"),
        from_transformers("vit-bare"),
    ],
    "llama": lambda: [
        from_transformers("llama-biases"),
        from_transformers("llama-gqa"),
        from_transformers("llama-tied"),
        from_transformers("llama-classifier"),
        from_transformers("llama-bare"),
        from_transformers("mistral-gqa"),
    ],
    "phi3": lambda: [from_transformers("phi3-gqa"), from_transformers("phi3-half-rotary")],
    "gpt_neox": lambda: [
        from_transformers("gpt_neox-sequential", hidden_act="relu"),
        from_transformers("gpt_neox-quarter-rotary"),
        from_transformers("gpt_neox-no-attention-bias"),
        from_transformers("gpt_neox-tied"),
        from_transformers("gpt_neox-classifier"),
        from_transformers("gpt_neox-bare"),
    ],
    "isobasin": lambda: [
        own(**_TOKENS | {"d_head": 6}, positions="rope", feed_forward="swiglu", rotary_dims=4, causal=True),
        own(**_TOKENS, positions="rope", feed_forward="swiglu", norm="rms", rotary_layout="interleaved"),
        own(**_TOKENS, positions="learned", post_norm=True, feed_forward="swiglu"),
        own(**_TOKENS, positions="sinusoidal", tied=True, bias=False),
        own(**_TOKENS, positions="none", norm="rms", tied=True),
        own(**_TOKENS, positions="alibi", norm="rms", post_norm=True, n_classes=5),
        own(**_PATCHES, positions="learned", norm="layer"),
    ],
}


# -- survivors ------------------------------------------------------------------------------------------------

NO_GROUPS = "as many kv heads as query heads: the copies for queries are the heads themselves"
NO_ROTARY = "no column rotates, so there are no pairs"
SELF_DUAL = "permutations, signs and rotations are their own duals"
NO_SCALES = "a permutation has no scale or sign to leave out"
NO_MEAN = "only a stream that LayerNorms read has a mean that nobody sees"
SIDES = "what one side gives the other takes: both name the same free vectors"
ONE_ROW = "the tensor is one vector of the stream"
WHOLE = "a tied embedding moves as a whole, and its rows are not asked for"
TIED = "tied, nothing behind the last norm is free: it is enough that the tensor has a second role"
TIED_RMS = "behind RMSNorm the stream of a tied model has signed permutations and no free mean: the role adds nothing"
UNREAD = "nothing reads the last norm of a bare model, and its stream does not move"
UNUSED = "a head that the class does not run and hub folders carry: no output depends on it"
OPTIONAL = "every file here has it"
NO_SHIFT = "an RMSNorm has no shift to pass on: that its gain stays, any of these says"

_C_ATTN = "modules: attn.c_attn = a{i}* qk{i}*+qk{i}+vo{i} → a{i}*"
_FUSED = "modules: attention.query_key_value = (qk{i}*+qk{i}+vo{i}) a{i}* →"
_WORDS = "tensors: bert.embeddings.word_embeddings.weight = .30 resid & .30 t* →"
_TOKENS_TIED = "tensors: embed.tokens.weight = .15 resid & .15 f* →"

SURVIVORS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        f"{_C_ATTN} qk{{i}}:q*+qk{{i}}+vo{{i}}": NO_GROUPS,
        f"{_C_ATTN} qk{{i}}*+qk{{i}}:q+vo{{i}}": NO_GROUPS,
        f"{_C_ATTN} qk{{i}}*+qk{{i}}+vo{{i}}:q": NO_GROUPS,
        "modules: attn.c_proj = vo{i}* resid → vo{i}:q* resid": NO_GROUPS,
        "tensors: transformer.wte.weight = .30 resid & .30 f* → .30 resid* & .30 f*": SELF_DUAL,
        "norms: f = layer(resid, exposed) → nothing": UNREAD,
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


@pytest.mark.slow
@pytest.mark.parametrize("family", TRIALS)
def test_every_mutant_dies_but_those_listed_with_their_reason(family: str) -> None:
    found, n_mutants = survivors(TRIALS[family]())
    listed = set(filter(chosen, SURVIVORS[family]))
    assert n_mutants > 15
    assert found - listed == set(), "these changes turn no check red"
    assert listed - found == set(), "listed as survivors, but dead"


@pytest.mark.parametrize("family", TRIALS)
def test_the_unchanged_family_passes_every_check(family: str) -> None:
    for trial in TRIALS[family]():
        for check in (dimension, function(0), maximal):
            assert check(trial, trial.weights) is None


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
        told = [trial.verdict(every[name], check) for check, _ in CHECKS]
        assert any(words in (reason or "") for reason in told), (name, told)


def test_mutants_have_names_of_their_own_and_change_what_they_say() -> None:
    for family, make in TRIALS.items():
        parts = described(family, make()[0].weights.config)
        found = list(mutants(parts))
        assert len({m.name for m in found}) == len(found)
        assert all(m.value != parts[m.part] for m in found)
        assert {"modules", "tensors", "norms", "spaces", "heads"} <= {m.part for m in found}


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
