"""What a model's class does not read: heads of other classes in a file, and rows of tables that no input reaches.

The truth is transformers: where the gradient of the outputs is zero on every input, nothing is read. Such numbers may
be any, so they change no verdict, fingerprint or distance; they move with what they read, and are not lost.
"""

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from subjects import held
from torch import Tensor, nn

import isobasin as ib
import model_types as mt
import tiny
from isobasin.arch import FAMILIES
from isobasin.compare.distance import distance
from isobasin.compare.fingerprint import fingerprint
from isobasin.errors import IsobasinError
from isobasin.runtime import max_length, outputs, random_inputs, run_module
from isobasin.symmetries.transform import scramble

pytestmark = pytest.mark.hf

UNREAD = {
    "opt-untied": ["model.decoder.embed_positions.weight"],
    "roberta-masked-lm": ["roberta.embeddings.position_embeddings.weight"],
    "t5-gated": ["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
    "bart-classifier": [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")],
    "mpnet-masked-lm": [
        "mpnet.embeddings.position_embeddings.weight",
        "mpnet.encoder.relative_attention_bias.weight",
    ],
    "dinov2-classifier": ["dinov2.embeddings.mask_token"],
    "beit-classifier": ["beit.encoder.layer.1.attention.attention.relative_position_bias.relative_position_bias_table"],
    "biogpt-tied": ["biogpt.embed_positions.weight"],
    "llava-untied": ["vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight"],
}
FULL = os.environ.get("ISOBASIN_SLOW") == "1"
SHORT = ("opt-untied", "t5-gated", "dinov2-classifier", "beit-positions", "gpt2-classifier")
NAMES = [case.name for case in (*tiny.CASES, *mt.MODEL_TYPES)]
CASES = NAMES if FULL else SHORT


def case(name: str) -> Any:
    return tiny.case(name) if name in {each.name for each in tiny.CASES} else mt.case(name)


def gradients(model: Any, weights: ib.Weights) -> dict[str, Tensor]:
    """The sum over inputs of the sizes of all gradients of random combinations of the outputs."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # torch leaves the gradient of that row out
    found = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    model.requires_grad_(True)
    for one in some_inputs(weights):
        model.zero_grad()
        said = run_module(weights, model, one)
        (said * torch.randn(said.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
        for name, parameter in model.named_parameters():
            found[name] += 0 if parameter.grad is None else parameter.grad.abs()
    return found


def some_inputs(weights: ib.Weights) -> Iterator[dict[str, Tensor]]:
    length = min(max_length(weights) or 200, 200)
    for seed in range(8):
        yield random_inputs(weights, n=1, length=length, seed=seed)[0]
    if weights.arch.family == "mpnet":  # padding takes no position, so texts may be longer than the table
        one = random_inputs(weights, n=1, length=length, seed=9)[0]
        padding = torch.ones(1, 200, dtype=torch.long)
        yield {key: torch.cat([ids[:, :-2], padding, ids[:, -2:]], 1) for key, ids in one.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_has_no_gradient_is_declared_and_nothing_else(name: str) -> None:
    model = case(name).build(seed=0)
    weights = ib.load(model)
    places = ib.load(model).names.on_disk
    found, arch = gradients(model, weights), weights.arch
    for n, disk in places.items():
        g = found.get(disk)
        if g is None or arch.tensors[n].buffer:
            continue
        declared = arch.unread.get(n, ())
        assert (float(g.max()) == 0) == (declared is None), n
        if declared is None or g.dim() != 2 or not (n in arch.unread_rows or n in arch.tables):
            continue
        unread = (g.amax(1) == 0).nonzero().flatten().tolist()
        assert unread == arch.unread_rows.get(n, []), n


def changed(weights: ib.Weights, name: str) -> ib.Weights:
    """Other numbers where nothing is read."""
    tensor = weights[name].clone()
    rows = weights.arch.unread[name]
    at = slice(None) if rows is None else weights.arch.unread_rows[name]
    tensor[at] = torch.randn(tensor[at].shape, generator=torch.Generator().manual_seed(3))
    return held(weights, {name: tensor})


@pytest.mark.parametrize("name", UNREAD if FULL else ("roberta-masked-lm", "beit-classifier"))
def test_what_is_not_read_changes_no_answer(name: str) -> None:
    a = ib.load(case(name).build(seed=0))
    b = a
    for tensor in UNREAD[name]:
        b = changed(b, tensor)
    moved = held(scramble(b, seed=1).apply(b))
    assert all(not torch.equal(a[tensor], b[tensor]) for tensor in UNREAD[name])
    for other in (b, moved):
        verdict = ib.equivalent(a, other)
        assert verdict.answer == "same", str(verdict)
        assert fingerprint(a).matches(fingerprint(other))
    assert str(fingerprint(a)) == str(fingerprint(b))
    assert distance(a, b, null_samples=1).distance < 1e-12
    assert distance(a, moved, null_samples=1).distance < 1e-5


@pytest.mark.parametrize("name", ["opt-untied", "t5-gated"])
def test_a_row_that_is_read_counts(name: str) -> None:
    """The control: the row beside those that no input reaches."""
    a = ib.load(case(name).build(seed=0))
    table = UNREAD[name][0]
    tensor = a[table].clone()
    row = max(a.arch.unread_rows[table]) + 1
    tensor[row] += torch.randn(tensor.shape[1], generator=torch.Generator().manual_seed(3))
    b = held(a, {table: tensor})
    assert ib.equivalent(a, b).answer == "different"
    assert not fingerprint(a).matches(fingerprint(b))


# -- heads of other classes -------------------------------------------------------------------------------------------


def with_other_heads(name: str) -> Iterator[tuple[ib.Weights, ib.Weights, str]]:
    """A model, the same whose file still has the head of another class, and the name of that class; for each class."""
    import transformers

    model = case(name).build(seed=0)
    weights = ib.load(model)
    family, own = weights.family, type(model).__name__
    for head in family.heads:
        kind = getattr(transformers, f"{family.stem}{head}", None)
        if kind is None or kind.__name__ == own:
            continue
        try:
            other = ib.load(tiny.randomize(kind._from_config(copy.deepcopy(model.config)), 5))
        except (IsobasinError, ValueError, AttributeError):  # the class has no model of this config
            continue
        read = weights.arch.tensors.keys() | weights.arch.aliases.keys()
        extra = {n: other[n] for n in other if n not in read}
        if extra and not any(n.removesuffix(".bias") + ".weight" in read for n in extra):  # else it is refused
            tensors = {weights.names.on_disk[n]: weights.stored(n) for n in weights}
            yield weights, ib.load(tensors | extra, {**model.config.to_dict(), "architectures": [own]}), kind.__name__


SHORT_HEADS = (
    "bert-bare",
    "distilbert-classifier",
    "llama-classifier",
    "vit-classifier",
    "gpt2-bare",
    "bart-classifier",
)
FIRST = {c.family: c.name for c in reversed((*tiny.CASES, *mt.MODEL_TYPES)) if len(FAMILIES[c.family].heads) > 1}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*FIRST.values(), *SHORT_HEADS}) if FULL else SHORT_HEADS[:3])
def test_a_head_of_another_class_changes_no_answer(name: str) -> None:
    kinds = []
    for weights, both, kind in with_other_heads(name):
        left = set(both) - set(weights)
        assert left == {n for n, rows in both.arch.unread.items() if rows is None and n in both} - set(weights)
        assert str(fingerprint(both)) == str(fingerprint(weights)), kind
        inputs = random_inputs(weights, n=2)
        moved = held(scramble(both, seed=1).apply(both))
        assert set(moved) == set(both)
        before, after = outputs(both, inputs), outputs(moved, inputs)
        assert float((before - after).abs().max() / before.abs().max()) < 1e-5 * weights.arch.sizes.n_layers, kind
        kinds.append(kind)
    assert kinds


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHORT_HEADS if FULL else ("distilbert-classifier", "llama-classifier"))
def test_a_verdict_does_not_see_the_head_of_another_class(name: str) -> None:
    for weights, both, kind in with_other_heads(name):
        moved = held(scramble(both, seed=2).apply(both))
        for one, two in ((weights, both), (both, weights), (weights, moved)):
            verdict = ib.equivalent(one, two)
            assert verdict.answer == "same", f"{kind}: {verdict}"
            assert not verdict.left_out.a
            assert not verdict.left_out.b


def test_a_head_of_another_class_moves_with_the_stream() -> None:
    """A classifier with its old language model head, moved, and then read as a language model."""
    both = next(both for _, both, kind in with_other_heads("llama-classifier") if kind == "LlamaForCausalLM")
    moved = held(scramble(both, seed=1).apply(both))
    models = []
    for w in (both, moved):
        tensors = {disk: w.stored(n) for n, disk in w.names.on_disk.items() if not n.startswith("score")}
        models.append(ib.load(tensors, {**w.config, "architectures": ["LlamaForCausalLM"]}))
    inputs = random_inputs(models[0], n=2)
    before, after = (outputs(w, inputs) for w in models)
    assert float((before - after).abs().max() / before.abs().max()) < 1e-5


def test_canonical_points_of_copies_share_the_head_of_another_class() -> None:
    both = next(both for _, both, kind in with_other_heads("distilbert-classifier") if kind.endswith("MaskedLM"))
    moved = held(scramble(both, seed=3).apply(both))
    one, two = (ib.canonical(w).apply(w) for w in (both, moved))
    assert max(float((one[n].double() - two[n].double()).abs().max()) for n in both) < 1e-9


def test_an_unknown_tensor_is_still_an_error() -> None:
    weights = ib.load(case("llama-classifier").build(seed=0))
    tensors = {weights.names.on_disk[n]: weights[n] for n in weights} | {"model.adapter.weight": torch.ones(3, 3)}
    with pytest.raises(IsobasinError, match=r"model\.adapter\.weight: no pattern"):
        ib.load(tensors, weights.config)
