"""Imitations of real, messy hub folders: read, scrambled, written, and read again by transformers."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import model_types as mt
import tiny
from hub_imitations import (
    NOTHING,
    SEEN,
    Tensors,
    check_kept,
    check_survives,
    described,
    distance,
    largest_change,
    make,
    renamed,
    said,
    with_buffers,
)
from isobasin.errors import ArchitectureError, CheckpointError
from isobasin.symmetries.transform import scramble
from isobasin.weights import load

pytestmark = pytest.mark.hf

POSITIONS = 16
MASKS = r"\.attn\.(masked_)?bias$"


def test_the_judge_sees_a_wrong_weight(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "llama-gqa")
    out = check_survives(folder, "llama-gqa")
    tensors, _ = tiny.read(out)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].flip(0)
    save_file(tensors, out / "model.safetensors")
    assert distance(said(out, "llama-gqa"), said(folder, "llama-gqa")) > SEEN


# -- GPT-2 ----------------------------------------------------------------------------------------------------------


def causal(dtype: torch.dtype) -> Tensor:
    return torch.ones(POSITIONS, POSITIONS).tril().reshape(1, 1, POSITIONS, POSITIONS).to(dtype)


def as_on_the_hub(mask: torch.dtype, value: Tensor) -> Callable[[Tensors], Tensors]:
    """GPT-2 as the hub has it: the bare model's names, a causal mask and its value in every layer."""
    buffers = with_buffers({"h.{i}.attn.bias": causal(mask), "h.{i}.attn.masked_bias": value})
    return lambda tensors: buffers(renamed((r"^transformer\.", ""))(tensors))


@pytest.mark.parametrize("mask", [torch.float32, torch.uint8, torch.bool], ids=str)
def test_gpt2_without_prefix_and_with_masks(tmp_path: Path, mask: torch.dtype) -> None:
    folder = make(tmp_path / "m", "gpt2-lm-tied", as_on_the_hub(mask, torch.tensor(-1e4)))
    out = check_survives(folder, "gpt2-lm-tied")
    check_kept(out, folder, MASKS)


def test_gpt2_in_float16_whose_mask_value_is_infinite(tmp_path: Path) -> None:
    value = torch.tensor(-1e9, dtype=torch.float16)
    assert value.isinf()
    messy = as_on_the_hub(torch.float16, value)
    folder = make(tmp_path / "m", "gpt2-lm-tied", messy, dtype=torch.float16)
    out = check_survives(folder, "gpt2-lm-tied")
    check_kept(out, folder, MASKS)
    tensors, config = tiny.read(out)
    assert tensors["wte.weight"].dtype == torch.float32
    assert config["dtype"] == "float32"


# -- rotary families -------------------------------------------------------------------------------------------------


def frequencies(n: int) -> Tensor:
    return 10_000.0 ** (-torch.arange(0, n, 2) / n)


INV_FREQ = with_buffers({"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies(6)})


def test_llama_with_its_frequencies(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "llama-one-kv-head", INV_FREQ)
    check_kept(check_survives(folder, "llama-one-kv-head"), folder, r"inv_freq$")


def test_a_float32_table_does_not_hide_that_a_model_is_bfloat16(tmp_path: Path) -> None:
    """Kept in bfloat16 the scrambled weights would be another function; only weights decide about the type."""
    case = "llama-one-kv-head"
    folder = make(tmp_path / "m", case, INV_FREQ, dtype=torch.bfloat16)
    assert load(folder).dtype == torch.bfloat16
    tensors, config = tiny.read(check_survives(folder, case))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert config["dtype"] == "float32"
    weights = load(folder)
    scramble(weights, seed=1).apply(weights).save(tmp_path / "kept", dtype="keep")
    assert distance(said(tmp_path / "kept", case), said(folder, case)) > SEEN


def test_a_model_of_mixed_types_widens_what_is_narrow(tmp_path: Path) -> None:
    def mixed(tensors: Tensors) -> Tensors:
        return {name: t.float() if "norm" in name else t.bfloat16() for name, t in tensors.items()}

    tensors, _ = tiny.read(check_survives(make(tmp_path / "m", "llama-one-kv-head", mixed), "llama-one-kv-head"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_neox_with_masks_and_frequencies(tmp_path: Path) -> None:
    buffers = {
        "gpt_neox.layers.{i}.attention.bias": causal(torch.uint8),
        "gpt_neox.layers.{i}.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.{i}.attention.rotary_emb.inv_freq": frequencies(4),
    }
    folder = make(tmp_path / "m", "gpt_neox-quarter-rotary", with_buffers(buffers))
    out = check_survives(folder, "gpt_neox-quarter-rotary")
    check_kept(out, folder, r"attention\.(masked_bias|bias|rotary_emb\.inv_freq)$")


# -- BERT ------------------------------------------------------------------------------------------------------------

OLD_NORMS = renamed((r"LayerNorm\.weight$", "LayerNorm.gamma"), (r"LayerNorm\.bias$", "LayerNorm.beta"))


@pytest.mark.parametrize("case", ["bert-classifier", "bert-masked-lm-tied"])
def test_bert_with_position_ids_and_old_names(tmp_path: Path, case: str) -> None:
    ids = {"bert.embeddings.position_ids": torch.arange(POSITIONS)[None]}
    folder = make(tmp_path / "m", case, lambda tensors: OLD_NORMS(tensors) | ids)
    tensors, _ = tiny.read(check_survives(folder, case))
    assert "bert.embeddings.LayerNorm.gamma" in tensors
    assert torch.equal(tensors["bert.embeddings.position_ids"], ids["bert.embeddings.position_ids"])


@pytest.mark.parametrize("pickled", [False, True])
def test_bert_base_as_on_the_hub(tmp_path: Path, pickled: bool) -> None:
    """Saved by BertForPreTraining, said to be a BertForMaskedLM: a pooler and a head that nobody uses, and the
    tied tensors once more under the decoder's names."""
    names = (
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        (
            "cls.predictions.decoder.bias",
            "cls.predictions.bias",
        ),
    )
    folder = make(
        tmp_path / "m",
        "bert-pretraining",
        lambda tensors: OLD_NORMS(tensors) | {copy: tensors[name].clone() for copy, name in names},
        pickled=pickled,
        config=lambda c: c | {"architectures": ["BertForMaskedLM"]},
    )
    out = check_survives(folder, "bert-masked-lm-tied", leftovers=r"bert\.pooler\..*|cls\.seq_relationship\..*")
    tensors, _ = tiny.read(out)
    for copy, name in names:
        assert torch.equal(tensors[copy], tensors[name])


# -- prefixes and ties -----------------------------------------------------------------------------------------------

BASES = {"gpt2": "transformer", "bert": "bert", "vit": "vit", "llama": "model", "gpt_neox": "gpt_neox"}


@pytest.mark.parametrize("case", ["gpt2-bare", "bert-bare", "vit-bare", "llama-bare", "gpt_neox-bare"])
def test_a_bare_model_saved_with_the_base_prefix(tmp_path: Path, case: str) -> None:
    base = BASES[tiny.case(case).family]
    folder = make(tmp_path / "m", case, renamed((r"^", f"{base}.")))
    out = check_survives(folder, case, leftovers=NOTHING)
    assert all(name.startswith(f"{base}.") for name in tiny.read(out)[0])
    assert described(folder) == described(make(tmp_path / "plain", case))


@pytest.mark.parametrize("case", ["gpt2-lm-untied", "bert-classifier", "vit-classifier", "llama-gqa", "gpt_neox-tied"])
def test_a_head_model_saved_without_the_base_prefix(tmp_path: Path, case: str) -> None:
    """As after `model.base_model.state_dict() | head`: transformers completes the prefix, and so do we."""
    base = BASES[tiny.case(case).family]
    folder = make(tmp_path / "m", case, renamed((rf"^{base}\.", "")))
    assert not any(name.startswith(f"{base}.") for name in tiny.read(check_survives(folder, case))[0])


@pytest.mark.parametrize("kind", ["mpnet", "bert"])
def test_a_sentence_encoder_whose_config_names_the_class_with_the_head_it_was_trained_with(
    tmp_path: Path, kind: str
) -> None:
    """As sentence-transformers writes all-mpnet-base-v2: the tensors of the bare model, without the base prefix."""
    stem = {"mpnet": "MPNet", "bert": "Bert"}[kind]
    model = mt.ModelType("bare", kind, f"{stem}Model", mt._ENCODER).build()
    model.save_pretrained(tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    named = json.loads(config.read_text()) | {"architectures": [f"{stem}ForMaskedLM"]}
    config.write_text(json.dumps(named))
    a = load(tmp_path / "m")
    assert a.config["architectures"] == [f"{stem}Model"]
    scramble(a, seed=1).apply(a).save(tmp_path / "out")
    x = mt.inputs(a)
    after = type(model).from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert distance(tiny.logits(after, x), tiny.logits(model, x)) <= 1e-5 * 2
    tensors, written = tiny.read(tmp_path / "out")
    assert written["architectures"] == [f"{stem}Model"]
    assert largest_change(tensors, tiny.read(tmp_path / "m")[0]) > 0.1
    # Saved from the class with the head (its names have the base prefix), or with a part of it, a head is missing.
    prefixed = {f"{kind}.{name}": tensor for name, tensor in tiny.read(tmp_path / "m")[0].items()}
    part = tiny.read(tmp_path / "m")[0] | {f"{LM_DENSE[kind]}.bias": torch.zeros(24)}
    for tensors in (prefixed, part):
        with pytest.raises(ArchitectureError, match=rf"^{LM_DENSE[kind]}.weight: missing from the checkpoint"):
            load(tensors, named)


LM_DENSE = {"mpnet": "lm_head.dense", "bert": "cls.predictions.transform.dense"}

TIED = {
    "gpt2-lm-tied": ("transformer.wte.weight", "lm_head.weight"),
    "llama-tied": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt_neox-tied": ("gpt_neox.embed_in.weight", "embed_out.weight"),
    "bert-masked-lm-tied": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
}
every_tie = pytest.mark.parametrize(("case", "own", "copy"), [(case, *names) for case, names in TIED.items()])


@every_tie
def test_a_tied_tensor_stored_twice(tmp_path: Path, case: str, own: str, copy: str) -> None:
    folder = make(tmp_path / "m", case, lambda tensors: tensors | {copy: tensors[own].clone()})
    tensors, _ = tiny.read(check_survives(folder, case))
    assert torch.equal(tensors[own], tensors[copy])


@every_tie
def test_a_tied_tensor_stored_twice_and_differently(tmp_path: Path, case: str, own: str, copy: str) -> None:
    folder = make(tmp_path / "m", case, lambda tensors: tensors | {copy: tensors[own] * 1.01})
    weights = load(folder)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(copy)}: config.json ties it to {re.escape(own)}, but the"):
        scramble(weights, seed=1).apply(weights).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_copy_of_another_shape(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "llama-tied", lambda t: t | {"lm_head.weight": torch.ones(29, 24)})
    with pytest.raises(
        ArchitectureError, match=r"^lm_head.weight: config.json ties it .* the shapes differ: \(29, 24\)"
    ):
        load(folder)


@every_tie
def test_only_the_copy_of_a_tied_tensor(tmp_path: Path, case: str, own: str, copy: str) -> None:
    """transformers takes either name for the shared tensor (BERT's and NeoX's heads too)."""
    folder = make(tmp_path / "m", case, renamed((rf"^{re.escape(own)}$", copy)))
    assert own not in tiny.read(folder)[0]
    assert own not in tiny.read(check_survives(folder, case))[0]


def test_two_spellings_of_a_lone_copy_are_both_written(tmp_path: Path) -> None:
    def messy(tensors: Tensors) -> Tensors:
        head = tensors.pop("model.embed_tokens.weight")
        return tensors | {"lm_head.weight": head, "model.lm_head.weight": head}

    folder = make(tmp_path / "m", "llama-tied", messy)
    weights = load(folder)
    moved = scramble(weights, seed=1).apply(weights).state_dict()
    assert moved.keys() == tiny.read(folder)[0].keys()
    assert torch.equal(moved["lm_head.weight"], moved["model.lm_head.weight"])
    assert largest_change(moved, tiny.read(folder)[0]) > 0.1
