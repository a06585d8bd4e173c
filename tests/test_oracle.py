"""The measuring instruments are measured: `oracle` against transformers, and both against planted errors."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import tiny

pytestmark = pytest.mark.hf

TOLERANCE = 1e-5  # float32 against float64
SEEN = 1e-4  # a difference that the comparison with transformers would catch ten times over
EXACT = 1e-12

every_case = pytest.mark.parametrize("case", tiny.CASES, ids=lambda case: case.name)
Read = Callable[[str], tuple[dict[str, Tensor], dict[str, Any]]]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Tensors and config of a case, as its folder holds them."""

    @cache
    def of(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        folder = tmp_path_factory.mktemp(name)
        tiny.save(tiny.case(name), folder)
        return tiny.read(folder)

    return of


def distance(found: Tensor, expected: Tensor) -> float:
    """max |difference| / max |expected|."""
    assert found.shape == expected.shape
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@every_case
def test_agrees_with_transformers(case: tiny.Case, tmp_path: Path) -> None:
    tiny.save(case, tmp_path)
    model, (tensors, config) = tiny.load(tmp_path), tiny.read(tmp_path)
    for seed in (0, 1):
        said = oracle.forward(tensors, config, case.inputs(seed))
        assert said.dtype == torch.float64
        assert distance(tiny.logits(model, case.inputs(seed)), said) < TOLERANCE
    assert distance(oracle.forward(tensors, config, case.inputs(0)), said) > SEEN


# Parts of tensors that the function does not see, with the reason. Everything else has to matter.
FREE = re.compile(
    # What all keys share adds one number to a query's scores, which the softmax cancels.
    r".*\.c_attn\.bias\[key\]"
    r"|.*\.attention\.(self|attention)\.key\.bias"
    # The same for the columns of a key that no rotary angle turns.
    r"|.*\.query_key_value\.bias\[key, unturned\]"
    # transformers keeps this bias beside the decoder's own in an untied BERT, and never adds it.
    r"|cls\.predictions\.bias"
)


def parts(name: str, tensor: Tensor, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensor, or query, key and value of a fused one: a label, and a mask that picks the part."""
    if ".c_attn." in name:
        masks = _third(tensor.shape[-1], torch.arange(3 * config["n_embd"]) // config["n_embd"])
    elif ".query_key_value." in name:
        d_head = config["hidden_size"] // config["num_attention_heads"]
        column = torch.arange(tensor.shape[0]) % (3 * d_head)
        masks = _third(tensor.shape[0], column // d_head)
        turned = column % d_head < d_head * config["rope_parameters"]["partial_rotary_factor"]
        key = masks.pop("key")
        masks |= {"key, turned": key & turned, "key, unturned": key & ~turned}
        masks = {label: mask.view(-1, *[1] * (tensor.ndim - 1)) for label, mask in masks.items() if mask.any()}
    else:
        masks = {"": torch.tensor(True)}
    for label, mask in masks.items():
        yield f"{name}[{label}]" if label else name, mask.expand_as(tensor)


def _third(n: int, which: Tensor) -> dict[str, Tensor]:
    assert len(which) == n
    return {label: which == i for i, label in enumerate(("query", "key", "value"))}


@pytest.mark.parametrize(
    ("name", "n_free"),
    [
        ("gpt2-lm-tied", 2),
        ("gpt2-lm-untied", 2),
        ("gpt2-classifier", 2),
        ("bert-classifier", 2),
        ("bert-masked-lm-untied", 3),
        ("bert-pretraining", 2),
        ("bert-bare", 2),
        ("vit-classifier", 2),
        ("vit-no-qkv-bias", 0),
        ("vit-bare", 2),
        ("vit-masked-image", 2),
        ("llama-biases", 0),
        ("llama-one-kv-head", 0),
        ("llama-classifier", 0),
        ("mistral-gqa", 0),
        ("mistral-window", 0),
        ("qwen2-gqa", 0),
        ("phi3-half-rotary", 0),
        ("gpt_neox-quarter-rotary", 2),
        ("gpt_neox-full-rotary", 0),
        ("gpt_neox-sequential", 2),
        ("gpt_neox-no-attention-bias", 0),
    ],
)
def test_every_parameter_matters(name: str, n_free: int, read: Read) -> None:
    (tensors, config), inputs = read(name), tiny.case(name).inputs(0)
    before = oracle.forward(tensors, config, inputs)
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for key, tensor in tensors.items():
        noise = 0.1 * torch.randn(tensor.shape, generator=generator)
        for label, mask in parts(key, tensor, config):
            after = oracle.forward(tensors | {key: tensor + noise * mask}, config, inputs)
            moved[label] = distance(after, before)
    # Of two biases only one is dead, and only where both are there: tied, it is the one that counts.
    tied = "cls.predictions.decoder.bias" not in tensors
    free = {label for label in moved if FREE.fullmatch(label) and not (tied and label == "cls.predictions.bias")}
    assert len(free) == n_free
    assert {label: move for label, move in moved.items() if label in free and move > EXACT} == {}
    assert {label: move for label, move in moved.items() if label not in free and move < SEEN} == {}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2-lm-untied", {"activation_function": "gelu"}),
        ("gpt2-lm-tied", {"layer_norm_epsilon": 1e-5}),
        ("gpt2-lm-tied", {"n_head": 2}),
        ("gpt2-lm-tied", {"scale_attn_weights": False}),
        ("gpt2-inverse-layer-scale", {"scale_attn_by_inverse_layer_idx": False}),
        ("gpt2-classifier", {"pad_token_id": None}),
        ("bert-classifier", {"hidden_act": "relu"}),
        ("bert-classifier", {"layer_norm_eps": 1e-5}),
        ("vit-classifier", {"hidden_act": "relu"}),
        ("vit-classifier", {"layer_norm_eps": 1e-5}),
        ("vit-bare", {"pooler_act": "relu"}),
        ("llama-untied", {"rms_norm_eps": 1e-5}),
        ("llama-untied", {"hidden_act": "gelu"}),
        ("llama-rope-theta", {"rope_parameters": {}}),
        ("llama-rope-linear", {"rope_parameters": {}}),
        ("llama-rope-llama3", {"rope_parameters": {}}),
        ("llama-rope-yarn", {"rope_parameters": {}}),
        ("mistral-window", {"sliding_window": None}),
        ("mistral-window", {"sliding_window": 4}),
        ("gpt_neox-half-rotary", {"rope_parameters": {"partial_rotary_factor": 1.0}}),
        ("gpt_neox-half-rotary", {"rope_parameters": {"partial_rotary_factor": 0.25}}),
        ("gpt_neox-half-rotary", {"use_parallel_residual": False}),
        ("gpt_neox-sequential", {"use_parallel_residual": True}),
        ("gpt_neox-sequential", {"layer_norm_eps": 1e-5}),
    ],
)
def test_every_setting_matters(name: str, change: dict[str, Any], read: Read) -> None:
    (tensors, config), inputs = read(name), tiny.case(name).inputs(0)
    before = oracle.forward(tensors, config, inputs)
    assert distance(oracle.forward(tensors, config | change, inputs), before) > SEEN


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("bert-classifier", "token_type_ids"),
        ("bert-classifier", "attention_mask"),
        ("vit-masked-image", "bool_masked_pos"),
    ],
)
def test_every_input_matters(name: str, key: str, read: Read) -> None:
    (tensors, config), inputs = read(name), tiny.case(name).inputs(0)
    fewer = {name: value for name, value in inputs.items() if name != key}
    before = oracle.forward(tensors, config, inputs)
    assert distance(oracle.forward(tensors, config, fewer), before) > SEEN


YARN_EXTRAS: list[dict[str, Any]] = [
    {"attention_factor": 1.5},
    {"mscale": 0.7, "mscale_all_dim": 0.3},
    {"beta_fast": 8.0, "beta_slow": 2.0},
    {"truncate": False},
]


@pytest.mark.parametrize("extra", YARN_EXTRAS, ids=lambda extra: next(iter(extra)))
def test_yarn_options(extra: dict[str, Any], tmp_path: Path) -> None:
    case = tiny.case("llama-rope-yarn")
    tiny.save(case, tmp_path)
    tensors, config = tiny.read(tmp_path)
    changed = config | {"rope_parameters": config["rope_parameters"] | extra}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    said = oracle.forward(tensors, changed, case.inputs(0))
    assert distance(tiny.logits(tiny.load(tmp_path), case.inputs(0)), said) < TOLERANCE
    assert distance(oracle.forward(tensors, config, case.inputs(0)), said) > SEEN


def _older_llama(rope: dict[str, Any], word: str) -> dict[str, Any]:
    scaling = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    scaling |= {word: rope["rope_type"]}
    plain = rope["rope_type"] == "default"
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling}


def _older_neox(rope: dict[str, Any], word: str) -> dict[str, Any]:
    return {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}


@pytest.mark.parametrize(
    ("name", "older", "word"),
    [
        ("llama-rope-theta", _older_llama, "rope_type"),
        ("llama-rope-linear", _older_llama, "type"),
        ("llama-rope-llama3", _older_llama, "rope_type"),
        ("llama-rope-yarn", _older_llama, "rope_type"),
        ("gpt_neox-half-rotary", _older_neox, ""),
        ("gpt_neox-full-rotary", _older_neox, ""),
    ],
)
def test_older_spellings_of_rotary_settings(name: str, older: Any, word: str, tmp_path: Path) -> None:
    case = tiny.case(name)
    tiny.save(case, tmp_path)
    tensors, config = tiny.read(tmp_path)
    rope = config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(config | older(rope, word)))
    said = oracle.forward(tensors, config | older(rope, word), case.inputs(0))
    assert torch.equal(said, oracle.forward(tensors, config | {"rope_parameters": rope}, case.inputs(0)))
    assert distance(tiny.logits(tiny.load(tmp_path), case.inputs(0)), said) < TOLERANCE
    assert distance(oracle.forward(tensors, config, case.inputs(0)), said) > SEEN


def slopes(function: Callable[[dict[str, Tensor]], Tensor], tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The derivative in one direction, from a step of 1e-4 and from one that float32 can not see, 1e-9."""
    generator = torch.Generator().manual_seed(0)
    way = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}

    def slope(step: float) -> Tensor:
        ahead, back = ({n: t.double() + s * way[n] for n, t in tensors.items()} for s in (step, -step))
        return (function(ahead) - function(back)) / (2 * step)

    return slope(1e-4), slope(1e-9)


@pytest.mark.parametrize(
    "name",
    ["gpt2-lm-untied", "bert-pretraining", "vit-bare", "llama-biases", "mistral-window", "gpt_neox-tied"],
)
def test_nothing_is_rounded_to_float32(name: str, read: Read) -> None:
    (tensors, config), inputs = read(name), tiny.case(name).inputs(0)
    coarse, fine = slopes(lambda changed: oracle.forward(changed, config, inputs), tensors)
    assert distance(fine, coarse) < 1e-3


def test_transformers_in_float64_still_rounds_to_float32(read: Read) -> None:
    """The control of the test above, and the reason for the oracle."""
    (tensors, _), case = read("llama-biases"), tiny.case("llama-biases")
    model = case.build().double()

    def through_transformers(changed: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, changed, kwargs=case.inputs(0)).logits.detach().flatten(1)

    coarse, fine = slopes(through_transformers, tensors)
    assert distance(fine, coarse) > 0.1


HEADS = [
    ("gpt2-lm-tied", "lm_head.weight", "transformer.wte.weight"),
    ("bert-masked-lm-tied", "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ("llama-tied", "lm_head.weight", "model.embed_tokens.weight"),
    ("gpt_neox-tied", "embed_out.weight", "gpt_neox.embed_in.weight"),
]


@pytest.mark.parametrize(("name", "own", "shared"), HEADS)
@pytest.mark.parametrize("stretch", [1.0, 1.5])
def test_a_tied_file_with_a_head_of_its_own(name: str, own: str, shared: str, stretch: float, tmp_path: Path) -> None:
    """Older files hold the tied tensor twice; where the two differ transformers takes the head's own."""
    case = tiny.case(name)
    tiny.save(case, tmp_path, legacy_bin=True)
    tensors, config = tiny.read(tmp_path)
    before = oracle.forward(tensors, config, case.inputs(0))
    tensors |= {own: tensors[shared] * stretch}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    said = oracle.forward(tensors, config, case.inputs(0))
    assert distance(tiny.logits(tiny.load(tmp_path), case.inputs(0)), said) < TOLERANCE
    assert torch.equal(said, before) == (stretch == 1.0)


@pytest.mark.parametrize(("name", "own", "shared"), HEADS)
def test_an_untied_file_needs_its_head(name: str, own: str, shared: str, read: Read) -> None:
    tensors, config = read(name)
    with pytest.raises(KeyError, match=r"(lm_head|embed_out|decoder)\.weight"):
        oracle.forward(tensors, config | {"tie_word_embeddings": False}, tiny.case(name).inputs(0))


@every_case
def test_only_known_tensors_and_inputs(case: tiny.Case, read: Read) -> None:
    (tensors, config), inputs = read(case.name), case.inputs(0)
    with pytest.raises(AssertionError, match=r"no formula of the oracle reads \['stale\.weight'\]"):
        oracle.forward(tensors | {"stale.weight": torch.ones(1)}, config, inputs)
    with pytest.raises(AssertionError, match="does not know"):
        oracle.forward(tensors, config, inputs | {"position_ids": torch.zeros(1)})


@every_case
def test_no_parameter_is_left_at_its_first_value(case: tiny.Case) -> None:
    one, other = (dict(case.build(seed=seed).named_parameters()) for seed in (0, 1))
    for name, parameter in one.items():
        assert ((parameter != 0) & (parameter != 1) & (parameter != other[name])).all(), name
    said, same, else_ = (tiny.logits(case.build(seed=seed), case.inputs(0)) for seed in (0, 0, 1))
    assert torch.equal(said, same)
    assert distance(said, else_.double()) > SEEN


def test_a_fresh_model_would_hide_errors() -> None:
    """The control of the test above: what transformers starts with."""
    model = tiny.case("gpt2-lm-tied").build()
    fresh = type(model)(model.config).transformer.h[0]
    assert (fresh.ln_1.weight == 1).all()
    assert (fresh.attn.c_attn.bias == 0).all()


def test_signed_gains() -> None:
    signed, plain = (tiny.case(f"llama-{name}").build() for name in ("signed-gains", "untied"))
    assert (signed.model.norm.weight < 0).any()
    assert (plain.model.norm.weight > 0).all()


BUFFERS = {
    "gpt2-lm-tied": ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"),
    "gpt_neox-half-rotary": ("gpt_neox.layers.0.attention.rotary_emb.inv_freq",),
    "llama-untied": ("model.layers.1.self_attn.rotary_emb.inv_freq",),
    "bert-classifier": ("bert.embeddings.position_ids",),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_older_files_are_harmless(name: str, tmp_path: Path) -> None:
    case = tiny.case(name)
    tiny.save(case, tmp_path, legacy_bin=True)
    tensors, config = tiny.read(tmp_path)
    tensors |= {buffer: torch.ones(1) for buffer in BUFFERS[name]}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    said = oracle.forward(tensors, config, case.inputs(0))
    assert distance(tiny.logits(tiny.load(tmp_path), case.inputs(0)), said) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model.norm.weight": None}, "missing .*model.norm.weight"),
        ({"stale.weight": torch.ones(2)}, "unexpected .*stale.weight"),
        ({"model.layers.0.mlp.up_proj.bias": torch.ones(40)}, "unexpected .*up_proj.bias"),
        ({"model.norm.weight": torch.ones(7)}, "mismatched .*model.norm.weight"),
    ],
)
def test_load_refuses_what_does_not_fit(changes: dict[str, Tensor | None], complaint: str, tmp_path: Path) -> None:
    tiny.save(tiny.case("llama-untied"), tmp_path, legacy_bin=True)
    tensors, _ = tiny.read(tmp_path)
    kept = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    torch.save(kept, tmp_path / "pytorch_model.bin")
    with pytest.raises(AssertionError, match=complaint):
        tiny.load(tmp_path)


@pytest.mark.parametrize("legacy_bin", [False, True])
@pytest.mark.parametrize("max_shard_size", [None, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_save(legacy_bin: bool, max_shard_size: int | None, dtype: torch.dtype, tmp_path: Path) -> None:
    case = tiny.case("gpt2-lm-untied")
    tiny.save(case, tmp_path, seed=3, dtype=dtype, max_shard_size=max_shard_size, legacy_bin=legacy_bin)
    files = list(tmp_path.glob("*.bin" if legacy_bin else "*.safetensors"))
    assert (len(files) > 1) == (max_shard_size is not None)
    assert len(list(tmp_path.glob("*.safetensors"))) == (0 if legacy_bin else len(files))
    tensors, config = tiny.read(tmp_path)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    said = oracle.forward(tensors, config, case.inputs(0))
    assert distance(tiny.logits(tiny.load(tmp_path), case.inputs(0)), said) < TOLERANCE
