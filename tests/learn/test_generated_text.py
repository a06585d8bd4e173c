"""Learning without data: text that both models generate."""

import json
from pathlib import Path

import learn_subjects as subjects
import path_subjects
import pytest
import torch
from torch import Tensor

import isobasin as ib
import tiny
from isobasin.cli import run
from isobasin.errors import IsobasinError
from isobasin.learn.data import GeneratedText, generate
from isobasin.learn.trainer import seeded_generator
from isobasin.runtime import module_of, output_difference, outputs, random_inputs
from isobasin.tasks import IGNORED
from isobasin.weights import Weights


def keen() -> Weights:
    """A model that is nearly sure of what comes next, so that a path away from it is steep."""
    state = subjects.sharp().state_dict("float32")
    return ib.load(state | {"head.weight": 3 * state["head.weight"]}, subjects.CONFIG.to_dict())


def plainly(model: Weights, n: int, length: int, prefix: list[int]) -> Tensor:
    """The same text from whole forward passes, without a cache."""
    rng, module = seeded_generator(0, "own text", ""), module_of(model)
    ids = torch.tensor([prefix] * n) if prefix else torch.randint(tiny.VOCABULARY, (n, 1), generator=rng)
    while ids.shape[1] < length:
        with torch.no_grad():
            odds = torch.softmax(module(input_ids=ids).logits[:, -1], -1)
        ids = torch.cat([ids, torch.multinomial(odds, 1, generator=rng)], 1)
    return ids


@pytest.mark.hf
@pytest.mark.parametrize(("name", "prefix"), [("llama-gqa", []), ("gpt2-lm-tied", [2, 3]), ("gpt_neox-tied", [1])])
def test_a_cache_changes_nothing(name: str, prefix: list[int]) -> None:
    model = ib.load(tiny.case(name).build())
    found = generate(model, 3, 9, prefix=prefix, seed=0)
    assert torch.equal(found, plainly(model, 3, 9, prefix))
    assert not torch.equal(found, generate(model, 3, 9, prefix=prefix, seed=1))
    assert found[:, : len(prefix)].tolist() == [prefix] * 3


def test_tokens_come_as_often_as_the_model_says() -> None:
    model = keen()
    rows = generate(model, 2000, 3, prefix=[4], seed=0)
    with torch.no_grad():
        odds = torch.softmax(module_of(model)(torch.tensor([[4]]))[0, -1], -1)
    seen = torch.bincount(rows[:, 1], minlength=len(odds)) / len(rows)
    assert float((seen - odds).abs().max()) < 0.05
    assert float((1 / len(odds) - odds).abs().max()) > 0.1  # equal odds would be far off


def test_both_models_write_half_of_every_batch_and_another_sample_decides() -> None:
    a, b = subjects.sharp(0), subjects.sharp(1)
    settings = GeneratedText(windows=8, batch_size=4, seed=3)
    task, held_out = settings.tasks(a, b)
    rows = torch.cat([batch.inputs["input_ids"] for batch in task])
    own = [generate(m, 4, 8, seed=3, purpose=f"learned {k}") for k, m in enumerate((a, b))]
    assert torch.equal(rows[0::2], own[0])
    assert torch.equal(rows[1::2], own[1])
    assert (task.n_samples, held_out.n_samples) == (8, 2)
    for batch in task:
        assert torch.equal(batch.targets[:, :-1], batch.inputs["input_ids"][:, 1:])
        assert bool((batch.targets[:, -1] == IGNORED).all())
    others = {tuple(row) for batch in held_out for row in batch.inputs["input_ids"].tolist()}
    assert not others & {tuple(row) for row in rows.tolist()}
    assert settings.tasks(a, b)[0].fingerprint == task.fingerprint
    assert GeneratedText(windows=8, seed=4).tasks(a, b)[0].fingerprint != task.fingerprint


@pytest.mark.hf
def test_what_the_tokenizer_puts_in_front_stands_in_front(tmp_path: Path) -> None:
    subject = path_subjects.subject("llama-gqa", "text", tmp_path)
    models = [ib.load(folder) for folder in (subject.a, subject.b)]
    task, _ = GeneratedText(windows=2, length=6).tasks(*models)
    (batch,) = task
    assert batch.inputs["input_ids"][:, 0].tolist() == [2, 2]  # [CLS]
    assert bool((batch.targets[:, 0] != IGNORED).all())


def test_models_that_write_nothing_are_told_so() -> None:
    config = ib.ModelConfig.preset("bert", d_model=8, n_layers=1, n_heads=2, d_vocab=11, n_positions=8)
    reader = ib.load(ib.Transformer(config).state_dict(), config.to_dict())
    with pytest.raises(IsobasinError, match="has a head for text and writes no text; expected language models"):
        GeneratedText().tasks(reader, reader)
    with pytest.raises(IsobasinError, match="1 window, expected 2 or more"):
        GeneratedText(windows=1).tasks(subjects.sharp(), subjects.sharp())


def saved(model: Weights, folder: Path) -> Path:
    model.save(folder)
    return folder


def test_the_command_line_learns_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = keen()
    b = subjects.noisy(subjects.scrambled(a, "all-attention"), 0.05)
    words = ["align", str(saved(b, tmp_path / "b")), "--to", str(saved(a, tmp_path / "a")), "--matcher", "learned"]
    words += ["--data", "self", "--steps", "3", "--rate", "0.01", "--max-samples", "32", "--stage2", "none"]
    words += ["--scope", "all-attention", "-o"]
    assert run([*words, str(tmp_path / "one"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["learned_from"] == facts["decided_by"] == "text that the two models wrote themselves"
    assert run([*words, str(tmp_path / "two")]) == 0
    said = capsys.readouterr()
    assert "no data given: learning from text generated by the two models" in said.err
    assert "text that the two models wrote themselves; no data were used" in said.out
    one, two = (ib.load(tmp_path / name) for name in ("one", "two"))
    assert subjects.same_bits(one, two)
    inputs = random_inputs(b)
    assert output_difference(outputs(b, inputs), outputs(one, inputs)) <= 2e-5
    assert output_difference(outputs(b, inputs), outputs(a, inputs)) > 1e-2
    assert not subjects.same_bits(one, b)
    assert subjects.same_bits(ib.load(tmp_path / "a"), a)
    assert run([*words, str(tmp_path / "x"), "--start", "activations"]) == 2
    assert "--init activations needs data, and --data is self" in capsys.readouterr().err
