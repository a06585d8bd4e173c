"""Commands that move a model run it before and after, and write nothing if its outputs change."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import isobasin as ib
import model_types as mt
import tiny
from isobasin.arch.config import Fields
from isobasin.cli import run
from isobasin.errors import VerificationError
from isobasin.runtime import outputs
from isobasin.symmetries import coordinate
from isobasin.symmetries.check import require_same_outputs

pytestmark = pytest.mark.hf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny.save(tiny.case("phi3-gqa"), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def wrong_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """isobasin believes that only two columns of a head rotate."""
    monkeypatch.setattr(Fields, "rotary_columns", lambda *_, **__: 2)


def commands(model: Path, out: Path) -> dict[str, list[str]]:
    return {
        "scramble": ["scramble", str(model), "-o", str(out)],
        "align": ["align", str(model), "--to", str(model.with_name("other")), "-o", str(out)],
        "canonical": ["canonical", str(model), "-o", str(out)],
        "merge": ["merge", str(model.with_name("other")), str(model), "-o", str(out)],
    }


@pytest.mark.parametrize("command", ["scramble", "align", "canonical", "merge"])
def test_a_group_that_is_not_the_models_is_refused(
    command: str, model: Path, tmp_path: Path, wrong_group: None, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(tiny.case("phi3-gqa"), tmp_path / "other", seed=1)
    arguments = commands(model, tmp_path / "out")[command]
    assert run(arguments) == 4
    assert "outputs would differ" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def with_router(folder: Path, change: Callable[[torch.Tensor], object]) -> Path:
    model = mt.model_type("mixtral-untied").build(3).float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("gate.weight"):
                change(tensor)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("change", [torch.Tensor.zero_, lambda rows: rows[1].copy_(rows[0])], ids=["zero", "one row"])
def test_experts_whose_scores_tie_are_the_cause(
    change: Callable[[torch.Tensor], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_router(tmp_path / "tied", change)
    assert run(["scramble", str(model), "-o", str(tmp_path / "out"), "--seed", "2"]) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"router \S*gate\.weight: rows 0 and 1 are equal, so which experts are taken hangs on rounding", said
    )
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert run(["check", str(model), "--seed", "2"]) == 2
    assert "rows 0 and 1 are equal" in capsys.readouterr().err
    assert run(["scramble", str(model), "-o", str(tmp_path / "out"), "--verify", "none"]) == 0


def test_tied_experts_that_a_single_token_takes_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows 2 and 3 of the router see one coordinate of the stream, which one token alone uses."""
    kind = mt.model_type("mixtral-untied")
    few = {"num_local_experts": 4, "num_experts_per_tok": 1}
    model = replace(kind, config={**kind.config, **few}).build(3).float()
    rare, scale = model.config.vocab_size - 1, 40.0
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "embed_tokens" in name:
                tensor[:, 0] = 0
                tensor[rare] = torch.zeros(tensor.shape[1]).index_fill(0, torch.tensor(0), scale)
            elif name.endswith("o_proj.weight"):
                tensor[0] = 0
            elif "down_proj" in name:
                tensor[:, 0] = 0
            elif name.endswith("gate.weight"):
                tensor[2:] = torch.zeros_like(tensor[2:]).index_fill(1, torch.tensor(0), 5.0)
                tensor[:2, 0] = 0
    model.save_pretrained(tmp_path / "tied")
    assert run(["scramble", str(tmp_path / "tied"), "-o", str(tmp_path / "out")]) == 2
    assert "rows 2 and 3 are equal" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_scores_that_saturate_in_float32_tie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sigmoid of large numbers is one in float32: transformers takes the experts by their order."""
    model = mt.model_type("deepseek_v3-groups").build(3).float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("gate.weight"):
                tensor.mul_(300)
        for name, tensor in model.named_buffers():
            if name.endswith("correction_bias"):
                tensor.zero_()
    model.save_pretrained(tmp_path / "tied")
    assert run(["scramble", str(tmp_path / "tied"), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"scores of experts are equal on an input in float(32|64), so which experts are taken", said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_ties_that_change_nothing_excuse_no_change(tied: bool, tmp_path: Path) -> None:
    """Experts with equal rows are equal themselves, or no rows are equal; then another tensor is changed."""
    before = ib.load(with_router(tmp_path / "a", lambda rows: rows[1].copy_(rows[0]) if tied else None))
    tensors = {name: tensor.clone() for name, tensor in before.items()}
    for name, tensor in tensors.items():
        if tied and ".experts.1." in name:
            tensor.copy_(tensors[name.replace(".experts.1.", ".experts.0.")])
    before = replace(before, tensors=tensors)
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    after = replace(before, tensors=tensors | {name: 1.1 * tensors[name]})
    with pytest.raises(VerificationError, match="outputs would differ"):
        require_same_outputs(before, after)


def test_without_verification_the_wrong_group_is_not_noticed(model: Path, tmp_path: Path, wrong_group: None) -> None:
    assert run(["scramble", str(model), "-o", str(tmp_path / "out"), "--verify", "none"]) == 0
    inputs = tiny.case("phi3-gqa").inputs(0)
    before, after = (tiny.logits(tiny.load(folder), inputs) for folder in (model, tmp_path / "out"))
    assert float((after - before).abs().max()) > 0.01


def test_the_change_of_outputs_is_reported(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.save(tiny.case("phi3-gqa"), tmp_path / "other", seed=1)
    for command, arguments in commands(model, tmp_path / "out").items():
        assert run([*arguments, "--force", "--json"]) == 0, command
        facts = json.loads(capsys.readouterr().out)
        assert 0 <= facts["max_output_change"] <= 2e-5, command
    assert run(["scramble", str(model), "-o", str(tmp_path / "none"), "--json", "--verify", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["max_output_change"] is None


def test_a_model_that_transformers_can_not_run_is_noted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"layer_types": ["no such attention"] * 2}))
    assert run(["scramble", str(model), "-o", str(tmp_path / "out")]) == 0
    assert "the model was not run before and after" in capsys.readouterr().err
    assert run(["scramble", str(model), "-o", str(tmp_path / "again"), "--verify", "model"]) == 2


def test_a_model_that_does_not_fit_in_memory_is_noted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(*_: object, **__: object) -> float:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes")

    monkeypatch.setattr("isobasin.symmetries.check.require_same_outputs", run_out_of_memory)
    assert run(["scramble", str(model), "-o", str(tmp_path / "out")]) == 0
    assert "the model was not run before and after: DefaultCPUAllocator" in capsys.readouterr().err
    assert run(["scramble", str(model), "-o", str(tmp_path / "again"), "--verify", "model"]) == 2


def test_rounding_that_a_model_amplifies_is_no_change(tmp_path: Path) -> None:
    """Gains of very different sizes: float32 itself moves the outputs by more than the tolerance."""
    model = tiny.case("llama-gqa").build(seed=0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 300  # scores of thousands: softmax turns rounding into other tokens
    tiny.write(model, tmp_path / "sharp")
    assert run(["scramble", str(tmp_path / "sharp"), "-o", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("command", ["scramble", "canonical", "merge"])
def test_numbers_too_small_for_the_type_are_not_lost_silently(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built = tiny.case("llama-gqa").build(seed=0)
    with torch.no_grad():
        built.model.embed_tokens.weight.mul_(1e-9)
        built.model.norm.weight.mul_(1e-8)
    built.save_pretrained(tmp_path / "a")
    models = [tmp_path / "a"] * (2 if command == "merge" else 1)
    arguments = [command, *map(str, models), "-o", str(tmp_path / "out"), "--quiet"]
    assert run([*arguments, "--dtype", "float16"]) == 2
    assert "holds numbers too small for float16" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run([*arguments, "--dtype", "bfloat16"]) == 0


def test_rows_that_a_layer_norm_takes_for_zero_stay_so(tmp_path: Path) -> None:
    """Such a row is nothing but rounding behind a LayerNorm with a small eps."""
    built = tiny.case("bert-bare").build(seed=0)
    embeddings = built.embeddings
    with torch.no_grad():
        embeddings.position_embeddings.weight.zero_()
        embeddings.token_type_embeddings.weight.zero_()
        embeddings.word_embeddings.weight[7] = 0.5
    for module in built.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-12
    built.config.layer_norm_eps = 1e-12
    built.save_pretrained(tmp_path / "a")
    assert run(["scramble", str(tmp_path / "a"), "-o", str(tmp_path / "b"), "--quiet"]) == 0
    ids = torch.tensor([[7, 3, 7, 4]])
    before, after = (tiny.load(tmp_path / each).double()(input_ids=ids).last_hidden_state for each in "ab")
    assert float((after - before).abs().max() / before.abs().max().detach()) < 1e-5


def with_weight(folder: Path, suffix: str, factor: float) -> Path:
    """The folder with one tensor scaled."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith(suffix))
    save_file(tensors | {name: tensors[name] * factor}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("case", "tensor", "factor"),
    [
        ("gpt2-lm-tied", "h.1.mlp.c_proj.weight", 1e20),  # NaN: it was called another group
        ("bert-masked-lm-tied", "layer.1.output.dense.weight", 1e20),
        ("llama-gqa", "layers.1.mlp.up_proj.weight", 1e20),  # zeros behind the last norm: it was "at most 0.0e+00"
    ],
)
def test_a_model_that_overflows_float32_is_compared_in_float64(
    case: str, tensor: str, factor: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(tiny.case(case), tmp_path / "model")
    folder = with_weight(tmp_path / "model", tensor, factor)
    assert run(["scramble", str(folder), "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "in float64" in said
    assert "0.0e+00" not in said
    assert run(["check", str(folder)]) == 0
    assert "in float64" in capsys.readouterr().out


def test_a_wrong_group_is_refused_in_float64_too(
    model: Path, tmp_path: Path, wrong_group: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_weight(model, "layers.1.mlp.down_proj.weight", 1e20)
    assert run(["scramble", str(folder), "-o", str(tmp_path / "out")]) == 4
    assert run(["check", str(folder)]) == 1


def test_outputs_that_are_nowhere_finite_verify_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where transformers computes in float32 whatever is asked of it."""
    nothing = torch.full((9,), torch.nan)
    monkeypatch.setattr("isobasin.symmetries.check.outputs", lambda *_, **__: nothing)
    assert run(["scramble", str(model), "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "the model's own outputs are not finite: nothing was verified" in said.err
    assert "changed by at most" not in said.out
    assert run(["check", str(model)]) == 2
    assert "the model's own outputs are not finite: nothing was verified" in capsys.readouterr().err


def test_a_copy_that_is_nowhere_finite_is_not_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([torch.ones(9), torch.full((9,), torch.nan)] * 2)
    monkeypatch.setattr("isobasin.symmetries.check.outputs", lambda *_, **__: next(found))
    assert run(["scramble", str(model), "-o", str(tmp_path / "out")]) == 2
    assert "numbers inside the moved model overflow" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scale", [1e-10, 1e10])
def test_a_scrambled_copy_of_a_model_with_a_small_head_has_its_function_as_it_is_stored(
    scale: float, tmp_path: Path
) -> None:
    """Means of the size of other tensors, added to numbers of 1e-10, left nothing of them when rounded."""
    model = tiny.case("vit-classifier").build(seed=0)
    with torch.no_grad():
        for x in model.classifier.parameters():
            x.mul_(scale)
    tiny.write(model, tmp_path / "model")
    assert run(["scramble", str(tmp_path / "model"), "-o", str(tmp_path / "copy"), "--seed", "3", "--quiet"]) == 0
    inputs = [tiny.case("vit-classifier").inputs(0)]
    found = [outputs(ib.load(tmp_path / n), inputs, torch.device("cpu"), torch.float64) for n in ("model", "copy")]
    assert float((found[0] - found[1]).abs().max() / found[0].abs().max()) < 1e-5


def test_a_copy_that_is_lost_when_it_is_stored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.case("vit-classifier").build(seed=0)
    with torch.no_grad():
        for x in model.classifier.parameters():
            x.mul_(1e-10)
    weights = ib.load(model)
    monkeypatch.setattr(coordinate, "LARGEST_MEAN", 1e30)
    moved = ib.scramble(weights, seed=3).apply(weights)
    with pytest.raises(ib.IsobasinError, match="rounded to float32, the moved weights would change outputs"):
        require_same_outputs(weights, moved)
