"""LoRA adapters: merged into a base, moved with it, aligned in GL(r) and merged with each other."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import isobasin as ib
import tiny
from isobasin.checkpoint import Adapter
from isobasin.cli import run
from isobasin.errors import CheckpointError, IsobasinError
from isobasin.runtime import output_difference, outputs, random_inputs
from isobasin.weights import with_adapter

pytestmark = pytest.mark.hf
TARGETS = {
    "llama-gqa": ("q_proj", "v_proj", "o_proj", "down_proj", "lm_head"),
    "qwen2-gqa": ("q_proj", "k_proj", "v_proj", "gate_proj"),
    "gpt2-lm-untied": ("attn.c_attn", "attn.c_proj", "mlp.c_fc"),
    "gpt_neox-half-rotary": ("query_key_value", "dense_h_to_4h"),
    "bert-classifier": ("query", "value", "output.dense"),
}


def adapter_folder(
    model: Any, folder: Path, *, seed: int = 0, r: int = 3, targets: tuple[str, ...], **config: Any
) -> Path:
    """An adapter as PEFT writes it, with random factors on every module whose name ends in a target."""
    generator = torch.Generator().manual_seed(seed)
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(targets) and getattr(module, "weight", None) is not None:
            n_out, n_in = module.weight.shape[::-1] if type(module).__name__ == "Conv1D" else module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(r, n_in, generator=generator) / n_in**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(n_out, r, generator=generator) / r**0.5
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": r, "lora_alpha": 6, "fan_in_fan_out": transposed, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged_by_hand(model: Any, folder: Path, scale: float) -> Any:
    """The model with s·B·A added to its modules."""
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for key, down in tensors.items():
            if key.endswith("lora_A.weight"):
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                module, added = model.get_submodule(name), scale * tensors[key.replace("lora_A", "lora_B")] @ down
                module.weight.add_(added.T if type(module).__name__ == "Conv1D" else added)
    return model


def change(x: Any, y: Any) -> float:
    inputs = random_inputs(ib.load(x))
    return output_difference(outputs(ib.load(x), inputs), outputs(ib.load(y), inputs))


@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_moves_with_its_base(name: str, tmp_path: Path) -> None:
    model = tiny.case(name).build(seed=0)
    folder = adapter_folder(model, tmp_path / "adapter", targets=TARGETS[name])
    base, adapter = ib.load(model), Adapter.open(folder)
    whole = with_adapter(base, adapter)
    assert change(whole, merged_by_hand(model, folder, 6 / 3)) < 1e-5
    assert change(whole, base) > 0.05
    transform = ib.scramble(base, seed=1)
    elsewhere = transform.apply(base)
    assert change(with_adapter(elsewhere, adapter), whole) > 0.01, "it does not fit the other copy"
    moved = ib.move_adapter(transform, folder, base)
    moved.save(tmp_path / "moved")
    found = Adapter.open(tmp_path / "moved")
    assert found.modules == adapter.modules
    assert all(found.factors(m).rank == 3 for m in found.modules)
    assert change(with_adapter(elsewhere, found), whole) < 2e-5


def test_an_adapter_is_carried_to_an_aligned_copy_and_back(tmp_path: Path) -> None:
    model = tiny.case("llama-untied").build(seed=0)
    a = ib.load(model)
    b = ib.scramble(a, seed=2).apply(a)
    folder = adapter_folder(model, tmp_path / "of-a", targets=("q_proj", "up_proj"))
    transform = ib.align(a, to=b).transform
    moved = ib.move_adapter(transform, folder, a)
    assert change(with_adapter(b, moved), with_adapter(a, Adapter.open(folder))) < 1e-4
    back = ib.move_adapter(transform.inverse(), moved, transform.apply(a))
    for module in back.modules:
        x, y = (each.factors(module) for each in (back, Adapter.open(folder)))
        assert torch.allclose(x.up @ x.down, y.up @ y.down, atol=1e-5)
    assert back.config["base_model_name_or_path"] is None


def test_scales_and_embeddings_are_those_of_peft(tmp_path: Path) -> None:
    model = tiny.case("llama-untied").build(seed=0)
    options: dict[str, Any] = {"use_rslora": True, "alpha_pattern": {".*layers.*.v_proj": 1}}
    folder = adapter_folder(model, tmp_path / "a", targets=("q_proj", "v_proj"), **options)
    found = Adapter.open(folder)
    scales = {found.scale(m) for m in found.modules if m.endswith("q_proj")}
    assert scales == {6 / 3**0.5}
    assert {found.scale(m) for m in found.modules if m.endswith("v_proj")} == {1 / 3**0.5}
    down, up = torch.randn(3, tiny.VOCABULARY), torch.randn(24, 3)
    key = "base_model.model.model.embed_tokens.lora_embedding_"
    save_file({f"{key}A": down, f"{key}B": up}, folder / "adapter_model.safetensors")
    base, adapter = ib.load(model), Adapter.open(folder)
    whole, name = with_adapter(base, adapter), "model.embed_tokens.weight"
    assert torch.allclose(whole[name] - base[name], (6 / 3**0.5) * (up @ down).T.double(), atol=1e-6)
    transform = ib.scramble(base)
    moved = ib.move_adapter(transform, adapter, base)
    assert change(with_adapter(transform.apply(base), moved), whole) < 2e-5
    moved.save(tmp_path / "b")
    assert set(load_file(tmp_path / "b" / "adapter_model.safetensors")) == {f"{key}A", f"{key}B"}


def test_adapters_are_aligned_in_their_own_group_before_they_are_averaged(tmp_path: Path) -> None:
    model = tiny.case("llama-untied").build(seed=0)
    folders = [adapter_folder(model, tmp_path / str(k), seed=k, targets=("q_proj",)) for k in range(2)]
    one, other = map(Adapter.open, folders)
    turned = {}
    for number, module in enumerate(one.modules):
        factors = one.factors(module)
        u = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number)) + torch.eye(3)
        turned[module] = type(factors)(factors.up @ torch.linalg.inv(u), u @ factors.down)
    copy = one.with_factors(turned, {})
    merged = ib.merge_adapters([one, copy])
    assert merged.naive_error > 0.1 > 1e-5 > merged.error
    for module in one.modules:
        x, y = (each.factors(module) for each in (one, merged.adapter))
        assert torch.allclose(x.up @ x.down, y.up @ y.down, atol=1e-4)
    assert ib.merge_adapters([one, copy], align=False).error > 0.1
    related = ib.merge_adapters([one, other])
    closest = ib.merge_adapters([one, other], method="svd")
    assert closest.error < related.error <= related.naive_error + 1e-9
    assert "q_proj" in repr(merged)
    weighted = ib.merge_adapters([one, other], weights=[1, 0], align=False)
    module = one.modules[0]
    assert torch.allclose(
        weighted.adapter.factors(module).up @ weighted.adapter.factors(module).down,
        one.factors(module).up @ one.factors(module).down,
        atol=1e-6,
    )


def test_the_command_line_takes_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = tiny.case("llama-untied")
    tiny.save(case, tmp_path / "base")
    model = case.build(seed=0)
    folders = [adapter_folder(model, tmp_path / f"l{k}", seed=k, targets=("q_proj",)) for k in range(2)]
    both = f"{tmp_path / 'base'}+{folders[0]}"
    assert run(["scramble", both, "-o", str(tmp_path / "s"), "--save-transform", str(tmp_path / "t"), "--json"]) == 0
    assert run(["equal", str(tmp_path / "s"), both]) == 0
    assert run(["equal", str(tmp_path / "s"), str(tmp_path / "base")]) == 1
    base = str(tmp_path / "base")
    assert run(["apply", str(tmp_path / "t"), base, "-o", str(tmp_path / "m"), "--json"]) == 0
    capsys.readouterr()
    words = ["apply", str(tmp_path / "t"), base, "--adapter", str(folders[0]), "-o", str(tmp_path / "l0m")]
    assert run([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["max_output_change"] < 1e-4
    assert (facts["rank"], facts["modules"]) == (3, 2)
    assert run(["equal", f"{tmp_path / 'm'}+{tmp_path / 'l0m'}", str(tmp_path / "s"), "--precision", "float32"]) == 0
    assert run(["merge", *map(str, folders), "-o", str(tmp_path / "lm")]) == 0
    assert "distance from the mean" in capsys.readouterr().out
    assert Adapter.open(tmp_path / "lm").modules == Adapter.open(folders[0]).modules
    assert run(["merge", *map(str, folders), "-o", str(tmp_path / "lm"), "--force"]) == 0  # its card is ours
    capsys.readouterr()
    assert run(words) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert run([*words, "--force"]) == 0
    assert run(["merge", base, str(folders[0]), "-o", str(tmp_path / "x")]) == 2
    assert "base+adapter" in capsys.readouterr().err
    assert run(["info", str(folders[0])]) == 2
    assert "base+adapter" in capsys.readouterr().err


def test_a_head_that_is_stored_with_its_adapter_is_that_of_the_base(tmp_path: Path) -> None:
    """PEFT stores the weight of a head or an embedding beside its factors."""
    model = tiny.case("llama-untied").build(seed=0)
    base = ib.load(model)
    folder = adapter_folder(model, tmp_path / "plain", targets=("q_proj", "lm_head"))
    tensors = load_file(folder / "adapter_model.safetensors")
    head = {"base_model.model.lm_head.base_layer.weight": model.lm_head.weight.detach().clone()}
    stored = adapter_folder(model, tmp_path / "stored", targets=("q_proj", "lm_head"))
    save_file(tensors | head, stored / "adapter_model.safetensors")
    plain, adapter = with_adapter(base, Adapter.open(folder)), Adapter.open(stored)
    assert all(torch.equal(plain[name], with_adapter(base, adapter)[name]) for name in plain)
    transform = ib.scramble(base)
    moved = ib.move_adapter(transform, adapter, base)
    assert change(with_adapter(transform.apply(base), moved), plain) < 2e-5
    assert ib.merge_adapters([adapter, folder]).adapter.modules == adapter.modules
    head["base_model.model.lm_head.base_layer.weight"][0, 0] += 1
    other = adapter_folder(model, tmp_path / "other", targets=("q_proj", "lm_head"))
    save_file(tensors | head, other / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head: the adapter stores the weight of its base, which is not"):
        with_adapter(base, Adapter.open(other))
    with pytest.raises(IsobasinError, match="adapters 0 and 1 store other weights"):
        ib.merge_adapters([stored, other])


def test_merged_adapters_have_a_model_card(tmp_path: Path) -> None:
    """Base, licence and tags from the parents; a card of another hand is not replaced."""
    model = tiny.case("llama-untied").build(seed=0)
    folders = [adapter_folder(model, tmp_path / f"l{k}", seed=k, targets=("q_proj",)) for k in range(2)]
    for folder in folders:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/base"}))
        (folder / "README.md").write_text("---\nlicense: mit\ntags: [code]\n---\n# One\n")
    merged = ib.merge_adapters(folders, weights=[3, 1])
    merged.save(tmp_path / "merged")
    text = (tmp_path / "merged" / "README.md").read_text("utf-8")
    assert yaml.safe_load(text.split("---\n")[1]) == {
        "base_model": ["org/base"],
        "license": "mit",
        "library_name": "peft",
        "tags": ["merge", "isobasin", "lora", "code"],
    }
    assert "# merged\n" in text
    assert "l1 | 0.25 |" in text
    assert "brought close to those of adapter 0" in text
    assert f"{merged.error:.1%} away" in text
    (folders[0] / "README.md").write_text("---\nlicense: other\n---\n")
    plain = ib.merge_adapters(list(map(Adapter.open, folders)), align=False)
    plain.save(tmp_path / "merged", force=True)
    text = (tmp_path / "merged" / "README.md").read_text("utf-8")
    assert "The licences of the models differ" in text
    assert "brought close" not in text
    (tmp_path / "merged" / "README.md").write_text("# By another hand\n")
    with pytest.raises(ib.IsobasinError, match=r"README\.md, which no adapter of isobasin has"):
        plain.save(tmp_path / "merged", force=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'; merge it into its base with PEFT"),
        ({"use_dora": True}, "use_dora is set, which is not supported"),
        ({"lora_alpha": "big"}, "expected a number"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "may take for ever to match"),
    ],
)
def test_adapters_of_other_kinds_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = tiny.case("llama-bare").build(seed=0)
    folder = adapter_folder(model, tmp_path / "a", targets=("q_proj",), **config)
    with pytest.raises(CheckpointError, match=message):
        with_adapter(ib.load(model), Adapter.open(folder))["model.layers.0.self_attn.q_proj.weight"]


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = tiny.case("llama-bare").build(seed=0)
    base, folder = ib.load(model), adapter_folder(model, tmp_path / "a", targets=("q_proj",))
    file = folder / "adapter_model.safetensors"
    written = folder / "adapter_config.json"
    config = json.loads(written.read_text())
    written.write_text(json.dumps(config | {"r": None}))
    with pytest.raises(CheckpointError, match="r is null, expected the rank of the factors"):
        Adapter.open(folder)
    written.write_text(json.dumps(config))
    good = load_file(file)
    (key,) = (key for key in good if "lora_A" in key)
    save_file({key: good[key]}, file)
    with pytest.raises(CheckpointError, match=r"has factors A .* and B \(\)"):
        Adapter.open(folder)
    save_file(good | {"base_model.model.norm.modules_to_save": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match="is no factor of LoRA"):
        Adapter.open(folder)
    save_file({k.replace("q_proj", "x_proj"): t for k, t in good.items()}, file)
    with pytest.raises(CheckpointError, match=r"x_proj\.weight: the adapter changes this tensor, which is no weight"):
        with_adapter(base, Adapter.open(folder))
    save_file({k: t[:, :5].clone() if "lora_A" in k else t for k, t in good.items()}, file)
    with pytest.raises(CheckpointError, match=r"adds \(24, 5\) to a weight of shape \(24, 24\)"):
        with_adapter(base, Adapter.open(folder))["model.layers.0.self_attn.q_proj.weight"]
    with pytest.raises(IsobasinError, match=r"is a LoRA adapter .*base\+adapter"):
        ib.load(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is this a whole adapter"):
        Adapter.open(folder)
    with pytest.raises(CheckpointError, match="expected the folder of a LoRA adapter"):
        Adapter.open(tmp_path)
    many = [adapter_folder(model, tmp_path / f"r{r}", r=r, targets=("q_proj",)) for r in (2, 3)]
    with pytest.raises(IsobasinError, match="of one base and one rank"):
        ib.merge_adapters(many)
    other = adapter_folder(model, tmp_path / "v", targets=("v_proj",))
    with pytest.raises(IsobasinError, match="expected adapters of the same modules"):
        ib.merge_adapters([many[0], other])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_replication": [[0, 1]]}, "layer_replication is set, which is not supported; merge it into its base"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters is set"),
        ({"some_new_key": True}, "some_new_key is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes', expected bool"),
        ({"alpha_pattern": [1]}, r"alpha_pattern is \[1\], expected dict"),
        ({"lora_alpha": True}, "lora_alpha is True, expected a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000.*, expected a number"),
        ({"alpha_pattern": {"q_proj": "x"}}, "lora_alpha is 'x', expected a number"),
        ({"rank_pattern": {"q_proj": 2}}, "has factors of rank 3, adapter_config.json says 2: PEFT does not load it"),
        ({"layers_to_transform": [1]}, r"does not choose model\.layers\.0\.self_attn\.q_proj"),
        ({"layers_to_transform": 1, "layers_pattern": "layers"}, "does not choose"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "blocks"}, "does not choose"),
        ({"target_modules": ["v_proj"]}, "does not choose"),
        ({"target_modules": r".*\.(k|v)_proj"}, "does not choose"),
        ({"target_modules": "(a+)+b"}, "may take for ever to match"),
        ({"target_modules": "("}, "is not a pattern"),
        ({"exclude_modules": ["q_proj"]}, "does not choose"),
        ({"exclude_modules": r".*layers\.1.*"}, "does not choose model.layers.1"),
    ],
)
def test_keys_that_change_what_an_adapter_does_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = {"target_modules": ["q_proj"]} | config
    folder = adapter_folder(llama(), tmp_path / "a", targets=("q_proj",), **settings)
    with pytest.raises(CheckpointError, match=message):
        Adapter.open(folder)


@cache
def llama() -> Any:
    return tiny.case("llama-untied").build(seed=0)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "x"], "layers_to_transform": [0, 1], "layers_pattern": ["layers"]},
        {"target_modules": r".*\.layers\.\d\.self_attn\.(q|k)_proj", "exclude_modules": ["v_proj"]},
        {"target_modules": "all-linear", "layers_to_transform": None, "layer_replication": None, "loftq_config": {}},
        {
            "rank_pattern": {"q_proj": 3, "v_proj": 2},
            "use_dora": False,
            "lora_dropout": 0.5,
            "init_lora_weights": "gaussian",
        },
    ],
)
def test_keys_without_effect_are_accepted(config: dict[str, Any], tmp_path: Path) -> None:
    found = Adapter.open(adapter_folder(llama(), tmp_path / "a", targets=("q_proj",), **config))
    assert len(found.modules) == llama().config.num_hidden_layers


def test_an_adapter_prints_in_a_few_lines(tmp_path: Path) -> None:
    found = Adapter.open(adapter_folder(llama(), tmp_path / "ad", targets=("q_proj", "v_proj")))
    text = repr(found)
    assert text.startswith("LoRA adapter")
    assert f"modules  {len(found.modules)}" in text
    assert len(text.splitlines()) == 4
    assert found._repr_html_().startswith("<div>")


def test_an_adapter_of_scale_zero_is_moved_as_the_nothing_that_it_adds(tmp_path: Path) -> None:
    folder = adapter_folder(llama(), tmp_path / "a", targets=("q_proj",), lora_alpha=0)
    base = ib.load(llama())
    moved = ib.move_adapter(ib.scramble(base), folder, base)
    assert all(bool(tensor.isfinite().all()) for tensor in moved.tensors.values())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(with_adapter(base, moved)[name], base[name].double())


@pytest.mark.parametrize("name", TARGETS)
def test_the_module_says_whether_inputs_are_first_and_not_the_configuration(name: str, tmp_path: Path) -> None:
    model = tiny.case(name).build(seed=0)
    base = ib.load(model)
    kinds = {key: type(module).__name__ for key, module in model.named_modules()}
    for disk, (full, *_) in base.names.by_disk.items():
        kind = kinds.get(disk.removesuffix(".weight"))
        if disk.endswith(".weight") and kind in ("Linear", "Conv1D"):
            assert base.arch.tensors[full].inputs_first == (kind == "Conv1D"), disk
    transposed = any(kind == "Conv1D" for kind in kinds.values())
    folders = [
        adapter_folder(model, tmp_path / str(flag), targets=TARGETS[name], fan_in_fan_out=flag)
        for flag in (transposed, not transposed)
    ]
    right, wrong = (with_adapter(base, Adapter.open(folder)) for folder in folders)
    assert all(torch.equal(right[key], wrong[key]) for key in right)
