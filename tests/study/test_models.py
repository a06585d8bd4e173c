"""Jobs that train: the same numbers for the same settings, also after a kill; heads, classes and vocabularies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from isobasin.errors import IsobasinError
from isobasin.files import strict_json
from isobasin.model import ModelConfig, Transformer
from isobasin.study import models, scope_parameters
from isobasin.study.models import baseline, downsample, finetune, model_config, pretrain, recipe_from_table
from isobasin.study.plan import Context
from isobasin.tasks.datasets import open_dataset
from isobasin.weights import load

TRAIN = {"steps": 12, "batch": 8, "rate": 3e-3, "decay": 0.1, "warmup": 0.1, "smoothing": 0.0, "augment": "shift"}
VIT = {"model": "vit", "positions": "rope", "layers": 1, "heads": 2, "width": 8, "dataset": "digits", "seed": 0}
TUNE = {"scope": "all-attention", "seed": 1, "heads": None, "frozen": False, "dataset": "digits", "train": TRAIN}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(models, "EVALUATION_SAMPLES", 20)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def context(place: Path, data: Path | None = None) -> Context:
    (place / "scratch").mkdir(parents=True, exist_ok=True)
    return Context(data, "cpu", place / "scratch")


def out(place: Path) -> Path:
    (place / "out").mkdir(parents=True, exist_ok=True)
    return place / "out"


def pretrained(place: Path, settings: Mapping[str, Any] = VIT, data: Path | None = None) -> dict[str, Any]:
    return pretrain({"train": TRAIN, "sequence": None, **settings}, [], out(place), context(place, data))


def tuned(place: Path, need: Path, data: Path | None = None, **other: Any) -> dict[str, Any]:
    return finetune(TUNE | other, [out(need)], out(place), context(place, data))


def tensors(place: Path) -> dict[str, torch.Tensor]:
    return dict(Transformer.load(out(place) / "model").state_dict())


def same(a: Path, b: Path) -> bool:
    one, other = tensors(a), tensors(b)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def newspaper(folder: Path, topics: tuple[str, ...]) -> Path:
    """A labelled text of a few words for each topic."""
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        lines = [f'{i + 1},"","{topic} {word} {topic}"' for word in "abcdef" for i, topic in enumerate(topics)]
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_pretraining_says_what_it_did_and_leaves_a_model(tmp_path: Path) -> None:
    found = pretrained(tmp_path)
    assert {"loss", "accuracy", "n_steps", "n_params", "train_losses", "history", "data"} == found.keys()
    assert json.loads(json.dumps(found, allow_nan=False)) == strict_json(found)
    assert (found["n_steps"], len(found["train_losses"])) == (12, 12)
    assert [step for step, _, _ in found["history"]] == [2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    weights = load(out(tmp_path) / "model")
    assert found["n_params"] == sum(t.numel() for t in weights.state_dict().values())
    assert weights.config["n_classes"] == 10
    assert list((tmp_path / "scratch").iterdir()) == []  # the checkpoint is gone


def test_settings_give_one_model_and_other_settings_another(tmp_path: Path) -> None:
    first, second = pretrained(tmp_path / "a"), pretrained(tmp_path / "b")
    assert first == second
    assert same(tmp_path / "a", tmp_path / "b")
    other = pretrained(tmp_path / "c", VIT | {"seed": 1})
    assert other["loss"] != first["loss"]
    assert not same(tmp_path / "a", tmp_path / "c")


class Stop(Exception):
    pass


KILLED = """
import os, signal, sys, torch
from pathlib import Path

sys.path.insert(0, sys.argv[2])
import test_models
from isobasin.study import models

looks, measured = [], models.evaluate

def dying(*given):
    looks.append(1)
    if len(looks) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return measured(*given)

torch.set_num_threads(1)
models.EVALUATION_SAMPLES, models.CHECKPOINT_SECONDS, models.evaluate = 20, 0.0, dying
test_models.pretrained(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("stop", [5, 11])
def test_a_run_that_was_stopped_goes_on_with_identical_numbers(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is kept here; the batches draw on, so that epochs and augmentation must be restored too."""
    monkeypatch.setattr(models, "CHECKPOINT_SECONDS", 0.0)
    settings = VIT | {"train": TRAIN | {"batch": 700}}  # the last steps reach into a second epoch
    whole = pretrained(tmp_path / "whole", settings)
    measured, seen = models.evaluate, []

    def failing(model: Transformer, *more: Any) -> dict[str, float]:
        seen.append(1)
        if len(seen) == stop - 1:  # a look at every step but the first and the seventh
            raise Stop("stopped")
        return measured(model, *more)

    monkeypatch.setattr(models, "evaluate", failing)
    with pytest.raises(Stop, match="stopped"):
        pretrained(tmp_path / "cut", settings)
    assert len(list((tmp_path / "cut" / "scratch").iterdir())) == 1
    calls: list[int] = []
    monkeypatch.setattr(models, "evaluate", lambda *all_of: (calls.append(1), measured(*all_of))[1])
    assert pretrained(tmp_path / "cut", settings) == whole
    assert same(tmp_path / "whole", tmp_path / "cut")
    assert len(calls) <= 12 - stop + 2  # it did not begin again


def test_a_kill_is_survived(tmp_path: Path) -> None:
    """The same by SIGKILL of a process, and what it left is used."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "cut"), str(Path(__file__).parent)]
    died = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (out(tmp_path / "cut") / "model").exists()
    assert len(list((tmp_path / "cut" / "scratch").iterdir())) == 1
    assert pretrained(tmp_path / "cut") == pretrained(tmp_path / "whole")
    assert same(tmp_path / "whole", tmp_path / "cut")


def test_finetuning_draws_the_scope_and_moves_what_it_may(tmp_path: Path) -> None:
    pretrained(tmp_path / "base")
    tuned(tmp_path / "free", tmp_path / "base")
    tuned(tmp_path / "frozen", tmp_path / "base", frozen=True)
    tuned(tmp_path / "heads", tmp_path / "base", heads=4)
    before = tensors(tmp_path / "base")
    inside = scope_parameters(Transformer.load(out(tmp_path / "base") / "model"), "all-attention")
    moved = {n for n, t in tensors(tmp_path / "frozen").items() if not torch.equal(t, before[n])}
    assert moved == inside
    assert {n for n, t in tensors(tmp_path / "free").items() if not torch.equal(t, before[n])} > inside
    assert load(out(tmp_path / "heads") / "model").config["n_heads"] == 4


def test_a_new_classifier_for_other_classes_and_a_refusal_for_other_words(tmp_path: Path) -> None:
    newspaper(tmp_path / "data" / "two", ("stock", "goal"))
    newspaper(tmp_path / "data" / "three", ("stock", "goal", "vote"))
    bert = {"model": "bert", "positions": "learned", "layers": 1, "heads": 2, "width": 8, "seed": 0, "sequence": 20}
    words = TRAIN | {"augment": "drop-words"}
    pretrained(tmp_path / "words", bert | {"dataset": "two", "train": words}, tmp_path / "data")
    assert (out(tmp_path / "words") / "model" / "tokenizer.json").is_file()
    again = tuned(tmp_path / "again", tmp_path / "words", tmp_path / "data", dataset="two", train=words)
    assert again["n_steps"] == 12
    with pytest.raises(IsobasinError, match=r"'three': its vocabulary is not that of the pretrained.*three:bytes"):
        tuned(tmp_path / "no", tmp_path / "words", tmp_path / "data", dataset="three", train=words)
    pretrained(tmp_path / "bytes", bert | {"dataset": "two:bytes", "train": words}, tmp_path / "data")
    options = {"dataset": "three:bytes", "frozen": True, "train": words}
    for seed in (1, 2):
        tuned(tmp_path / f"tuned{seed}", tmp_path / "bytes", tmp_path / "data", seed=seed, **options)
    before, after = tensors(tmp_path / "bytes"), tensors(tmp_path / "tuned1")
    assert after["head.weight"].shape == (3, 8)
    kept = {n for n in before if n in after and torch.equal(before[n], after[n])}
    assert kept == {n for n in before if ".attn." not in n and not n.startswith("head.")}
    zero = words | {"steps": 0}
    for seed in (1, 2):
        tuned(tmp_path / f"start{seed}", tmp_path / "bytes", tmp_path / "data", seed=seed, **options | {"train": zero})
    starts = [tensors(tmp_path / f"start{seed}") for seed in (1, 2)]
    assert torch.equal(starts[0]["head.weight"], starts[1]["head.weight"])  # one new head for all seeds
    assert not torch.equal(starts[0]["blocks.0.attn.q.weight"], starts[1]["blocks.0.attn.q.weight"])


def test_a_language_model_is_measured_in_bits(tmp_path: Path) -> None:
    llama = {
        "model": "llama",
        "positions": "rope",
        "layers": 1,
        "heads": 2,
        "width": 8,
        "dataset": "small.txt",
        "seed": 0,
    }
    (tmp_path / "small.txt").write_text("abcd" * 300)
    found = pretrained(tmp_path, llama | {"sequence": 16, "train": TRAIN | {"augment": "none"}}, tmp_path)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / 0.6931472, rel=1e-6)
    assert found["perplexity"] > 1
    assert load(out(tmp_path) / "model").config["d_ff"] == 32  # 8/3 of 8, up to a multiple of 16


def test_the_baseline_is_a_job(tmp_path: Path) -> None:
    newspaper(tmp_path / "data" / "two", ("stock", "goal"))
    found = baseline({"dataset": "two", "limits": {"test": 4}}, [], out(tmp_path), context(tmp_path, tmp_path / "data"))
    assert (found["accuracy"], found["test"]) == (1.0, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "bert"}, "model 'bert' on data set 'digits', which is image: expected text data"),
        ({"train": TRAIN | {"augment": "blur"}}, "augment 'blur' is unknown, expected one of none, shift, flip-crop"),
        ({"train": {"batch": 8}}, "exactly one"),
    ],
)
def test_settings_that_can_not_be_are_refused(settings: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(IsobasinError, match=message):
        pretrained(tmp_path, VIT | settings)


def test_a_table_is_a_recipe_and_a_cell_a_model() -> None:
    recipe = recipe_from_table({"epochs": 2, "batch": 64, "rate": 1e-4, "decay": 0.2, "warmup": 0.3, "smoothing": 0.1})
    assert (recipe.epochs, recipe.batch_size, recipe.peak_lr) == (2, 64, 1e-4)
    assert (recipe.weight_decay, recipe.warmup, recipe.label_smoothing) == (0.2, 0.3, 0.1)
    config = model_config(VIT | {"patch": 4}, open_dataset("digits", None))
    assert config == ModelConfig.preset(
        "vit", positions="rope", n_layers=1, n_heads=2, d_model=8, d_ff=32, image_size=28, patch_size=4, n_channels=1,
        n_classes=10, rope_theta=100.0,
    )  # fmt: skip
    assert downsample([1.0] * 250, 100) == [1.0] * 84
    assert downsample([1.0, 3.0, 5.0, 7.0, 9.0], 3) == [2.0, 6.0, 9.0]
