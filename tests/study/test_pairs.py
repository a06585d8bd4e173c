"""The job `pair`: a reparametrisation is reverted, labels name the matcher, each kind of data has its metrics."""

from pathlib import Path
from typing import Any

import pytest
import torch
from study_subjects import MEASURED, context, folder_of, reparametrised

from isobasin.errors import IsobasinError
from isobasin.files import strict_json
from isobasin.model import ModelConfig, Transformer
from isobasin.study import pairs
from isobasin.study.config import MatcherConfig
from isobasin.study.pairs import pair, unlabeled_inputs
from isobasin.symmetries import symmetry
from isobasin.symmetries.mean_coordinates import ReaderMean
from isobasin.tasks import Batch, Task
from isobasin.weights import load


def measured(
    folder: Path, needs: list[Path], scope: str, matchers: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    settings = MEASURED | {"scope": scope, "matchers": matchers} | more
    return pair(settings, needs, folder, context(folder))


@pytest.mark.parametrize("positions", ["sinusoidal", "rope"])
def test_a_reparametrisation_is_reverted(tmp_path: Path, positions: str) -> None:
    a = folder_of(positions)
    b = reparametrised(a, tmp_path / "b", "all-attention")
    ways = [{"matcher": "weights"}, {"matcher": "weights", "stage2": "none"}, {"matcher": "activations"}]
    ways += [{"matcher": "reference"}] if positions == "rope" else []  # without rotary positions it takes long
    found = measured(tmp_path, [a, b], "all-attention", ways)
    barrier = {label: each["loss"] for label, each in found["barrier"].items()}
    assert list(barrier)[:4] == ["naive", "weights", "weights/none", "activations"]
    assert barrier["naive"] > 0.5
    assert barrier["weights"] < 1e-5
    assert barrier["activations"] < 1e-4
    assert barrier["weights/none"] > 0.1, "without Stage 2 it is not reverted"
    assert found["distance"]["weights"][0] > 0.3
    assert found["distance"]["weights"][1] < 1e-5
    assert max(found["output_change"].values()) < 1e-4
    assert strict_json(found) == found, "plain data"


@pytest.mark.parametrize("gain", [1e-4, 0.0])
def test_a_small_gain_in_front_of_attention_leads_no_matcher_astray(tmp_path: Path, gain: float) -> None:
    needs = [small_gained(folder_of("sinusoidal", seed), tmp_path / f"{seed}", gain) for seed in (0, 1)]
    ways = [
        {"matcher": "weights"},
        {"matcher": "weights", "stage2": "orthogonal"},
        {"matcher": "weights", "stage2": "none"},
        {"matcher": "learned", "steps": 10},
    ]
    found = measured(tmp_path, needs, "first-attention", ways)
    distance = {label: after for label, (_, after) in found["distance"].items()}
    assert distance["weights"] <= distance["weights/orthogonal"] <= distance["weights/none"]
    assert distance["learned"] < 1.5, "learning begins in the same form, in which all is finite"


def small_gained(folder: Path, out: Path, gain: float) -> Path:
    """The same model but for one gain of the norm that the first attention reads."""
    model = load(folder / "model")
    (norm,) = {
        c.norm.gain for c in symmetry(model).scoped("first-attention").coordinates.values() if isinstance(c, ReaderMean)
    }
    changed = model[norm].clone()
    changed[3] = gain
    load({name: model[name] for name in model} | {norm: changed}, model.config).save(out / "model")
    return out


def test_products_are_in_tf32_on_lines_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def note(name: str, function: Any) -> Any:
        def noted(*args: Any, **named: Any) -> Any:
            seen.setdefault(name, set()).add(torch.backends.cuda.matmul.allow_tf32)
            return function(*args, **named)

        return noted

    for name in ("evaluate_line", "logits"):  # the points of a line; how far alignment moved the outputs
        monkeypatch.setattr(pairs, name, note(name, getattr(pairs, name)))
    measured(tmp_path, [folder_of("rope"), folder_of("rope", 1)], "all-attention", [{"matcher": "weights"}])
    assert seen == {"evaluate_line": {True}, "logits": {False}}
    assert not torch.backends.cuda.matmul.allow_tf32


def test_curves_have_the_points_and_metrics_that_were_asked_for(tmp_path: Path) -> None:
    found = measured(tmp_path, [folder_of("rope"), folder_of("rope", 1)], "model", [{"matcher": "weights"}])
    assert found["lambdas"] == [0, 0.25, 0.5, 0.75, 1]
    assert found["n_samples"] == 60
    assert {len(v) for curve in found["curves"].values() for v in curve.values()} == {5}
    assert set(found["curves"]["weights"]) == {"loss", "accuracy"}
    ends = [(found["curves"][label]["loss"][0], found["curves"][label]["loss"][-1]) for label in ("naive", "weights")]
    assert ends[0] == pytest.approx(ends[1], rel=1e-4), "alignment moves no end"
    assert found["barrier"]["weights"]["loss"] < found["barrier"]["naive"]["loss"]


def test_learning_starts_where_its_start_ends_and_says_what_it_kept(tmp_path: Path) -> None:
    a = folder_of("rope", split="train")
    b = reparametrised(a, tmp_path / "b", "first-attention")
    way = {"matcher": "learned", "stage2": "none", "steps": 3, "rate": 0.01, "augment": "shift"}
    found = measured(tmp_path, [a, b], "first-attention", [way])
    learning = found["learning"]["learned/none"]
    assert set(learning["held_out"]) == {"naive", "start", "learned"}
    assert [step for step, _ in learning["history"]] == [0, 1, 2, 3]
    assert learning["kept"] != "naive"
    assert min(learning["held_out"].values()) == learning["held_out"][learning["kept"]]
    assert list((tmp_path / "scratch").iterdir()) == [], "its state is not needed any more"


def test_text_is_measured_in_bits(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 32, "n_positions": 32}
    for seed in (0, 1):
        Transformer(ModelConfig.preset("llama", **sizes), seed=seed).save(tmp_path / str(seed) / "model")
    needs = [tmp_path / "0", tmp_path / "1"]
    ways = [{"matcher": "activations"}]
    found = measured(tmp_path, needs, "all-attention", ways, dataset="shakespeare", samples=8)
    assert set(found["curves"]["naive"]) == {"loss", "accuracy", "perplexity", "bits_per_byte"}
    assert found["curves"]["naive"]["bits_per_byte"][0] == pytest.approx(8, abs=0.3), "an untrained model of bytes"


@pytest.mark.parametrize(
    ("matchers", "scope", "message"),
    [
        ([{"matcher": "weights"}, {"matcher": "weights"}], "model", "weights is asked for twice"),
        ([{"matcher": "wieghts"}], "model", "matcher is 'wieghts', expected one of weights"),
        ([{"matcher": "weights", "stage3": "full"}], "model", "unknown key 'stage3'"),
        ([{"matcher": "weights", "head_distance": "far"}], "model", "head_distance is 'far'"),
        ([{"matcher": "learned", "augment": "blur"}], "model", "augment is 'blur'"),
        ([{"matcher": "reference"}], "model", "reference aligns attention only, but the scope is model"),
    ],
)
def test_a_mistake_in_the_matchers_is_named(tmp_path: Path, matchers: Any, scope: str, message: str) -> None:
    with pytest.raises(IsobasinError, match=message):
        measured(tmp_path, [folder_of("rope"), folder_of("rope", 1)], scope, matchers)


@pytest.mark.parametrize(
    ("table", "label"),
    [
        ({}, "weights"),
        ({"stage2": "full"}, "weights"),
        ({"stage2": "orthogonal"}, "weights/orthogonal"),
        ({"stage2": "none", "head_distance": "cosine"}, "weights/none/cosine"),
        ({"matcher": "learned", "start": "activations"}, "learned/activations"),
        ({"matcher": "activations", "start": "activations"}, "activations"),
    ],
)
def test_labels_leave_out_what_is_usual(table: dict[str, Any], label: str) -> None:
    assert MatcherConfig.from_table(table).label == label


def test_padding_is_not_looked_at() -> None:
    ids = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]])
    padded = Batch({"input_ids": ids, "attention_mask": ids != 0}, torch.tensor([0, 1]))
    found = list(unlabeled_inputs(_task([padded])))
    assert [one["input_ids"].tolist() for one in found] == [[[5, 6]], [[7, 8, 9]]]
    plain = Batch({"input_ids": ids}, torch.tensor([0, 1]))
    assert [one["input_ids"].tolist() for one in unlabeled_inputs(_task([plain]))] == [ids.tolist()]


def test_activations_of_enough_pictures_are_enough() -> None:
    pictures = Batch({"pixel_values": torch.zeros(300, 1, 2, 2)}, torch.zeros(300, dtype=torch.int64))
    assert len(list(unlabeled_inputs(_task([pictures] * 5)))) == 2


def _task(batches: list[Batch]) -> Task:
    return Task("text", "name", "name", sum(map(len, batches)), {}, "", lambda: iter(batches))
