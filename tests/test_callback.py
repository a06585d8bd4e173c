"""Callbacks of training loops: what they measure, where it is logged, and that training does not notice them."""

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import isobasin as ib
import tiny
from isobasin import callback as callbacks
from isobasin.errors import IsobasinError

transformers = pytest.importorskip("transformers")
CASE = tiny.case("gpt2-lm-tied")  # with dropout: training draws random numbers
STEPS = 6
IDS = torch.randint(1, tiny.VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": ids, "labels": ids} for ids in IDS]


def loss(model: Any) -> Tensor:
    """The loss on fixed data; it draws random numbers, as a loss may."""
    torch.rand(3), random.random(), np.random.rand()
    found: Tensor = model(input_ids=IDS, labels=IDS).loss
    return found


class Recorder(transformers.TrainerCallback):  # type: ignore[misc]
    """A reporter such as TensorBoard, which transformers calls before the callbacks of users."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        self.seen.append({**(logs or {}), "step": state.global_step})


def trained(folder: Path, *more: Any, **settings: Any) -> tuple[dict[str, Tensor], Any]:
    """The weights after a few steps of transformers' own trainer, and the trainer."""
    transformers.set_seed(0)
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=2,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=0, **settings,
    )  # fmt: skip
    model = CASE.build(seed=1)
    trainer = transformers.Trainer(model, args, train_dataset=ROWS, callbacks=list(more))
    trainer.train()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, trainer


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[dict[str, Any]], Any]:
    """Training without the callback: its weights, its log and the model."""
    weights, trainer = trained(tmp_path_factory.mktemp("plain"))
    return weights, trainer.state.log_history, trainer.model


def test_training_is_bitwise_the_same(plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback, recorder = ib.BarrierCallback(CASE.build(seed=0), loss=loss, every=3, points=3), Recorder()
    level = transformers.utils.logging.get_verbosity()
    weights, trainer = trained(tmp_path, recorder, callback)
    assert same(weights, plain[0])
    assert transformers.utils.logging.get_verbosity() == level
    own = [row for row in trainer.state.log_history if "barrier_naive" not in row]
    timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    assert [{k: v for k, v in row.items() if k not in timed} for row in own] == [
        {k: v for k, v in row.items() if k not in timed} for row in plain[1]
    ]
    steps = [0, 3, 6]
    assert [row["step"] for row in callback.history] == steps
    for rows in (trainer.state.log_history, recorder.seen):
        found = [row for row in rows if "barrier_naive" in row]
        assert [row["step"] for row in found] == steps
        assert [row["barrier_aligned"] for row in found] == [row["barrier_aligned"] for row in callback.history]
    assert sum("loss" in row for row in recorder.seen) == STEPS // 2, "the trainer's own log is complete"

    monkeypatch.setattr(callbacks, "preserved_state", nullcontext)
    careless, _ = trained(tmp_path, ib.BarrierCallback(CASE.build(seed=0), loss=loss, every=2, points=3, align=False))
    assert not same(careless, plain[0]), "the check finds nothing"


def test_it_measures_what_evaluate_path_measures(tmp_path: Path) -> None:
    reference, file = CASE.build(seed=0), tmp_path / "barriers.jsonl"
    callback = ib.BarrierCallback(reference, loss=loss, every=9, points=5, path=file)
    _, trainer = trained(tmp_path, callback)
    assert [row["step"] for row in callback.history] == [0, 6], "before the first step, and after the last"
    last = callback.history[-1]
    naive = ib.evaluate_path(reference, trainer.model, loss=loss, n_points=5)
    found = ib.align(trainer.model, to=reference)
    aligned = ib.evaluate_path(reference, found.transform.apply(ib.load(trainer.model)), loss=loss, n_points=5)
    assert last["barrier_naive"] == naive.barrier.height
    assert last["lambda_naive"] == naive.barrier.lam
    assert last["barrier_aligned"] == aligned.barrier.height
    assert (last["loss_reference"], last["loss"]) == (naive.metrics["loss"][0], naive.metrics["loss"][-1])
    assert last["distance_aligned"] == found.distance_after < last["distance_naive"]
    assert last["loss"] < callback.history[0]["loss"], "it was trained meanwhile"
    assert [json.loads(line) for line in file.read_text("utf-8").splitlines()] == callback.history


def test_a_scrambled_copy_is_connected_after_alignment(plain: Any) -> None:
    copy = ib.scramble(plain[2], seed=3).apply(ib.load(plain[2]))
    meter = callbacks.BarrierMeter(copy, loss=loss, points=5)
    numbers = meter.measure(plain[2], step=0)
    (found,) = meter.history
    assert found["barrier_naive"] > 0.05 > 1e-5 > found["barrier_aligned"]
    assert numbers["distance_naive"] > 0.5 > 1e-3 > numbers["distance_aligned"]
    assert found["connected"] is True
    assert callbacks.BarrierMeter(copy, loss=loss, points=5, align=False).measure(plain[2], step=0)["barrier_naive"]


def test_the_naive_barrier_alone_and_data_as_task(tmp_path: Path) -> None:
    task = ib.Task.from_dataloader([{"input_ids": IDS, "labels": IDS}])
    callback = ib.BarrierCallback(CASE.build(seed=0), task, align=False, points=3)
    trained(tmp_path, callback)
    assert set(callback.history[0]) == {
        "step", "epoch", "loss", "loss_reference", "barrier_naive", "lambda_naive", "connected",
    }  # fmt: skip


def test_only_the_first_process_measures() -> None:
    meter = callbacks.BarrierCallback("nowhere", loss=loss)
    state = SimpleNamespace(is_world_process_zero=False, global_step=0, epoch=0.0, log_history=[])
    meter.on_train_begin(None, state, None, model=nn.Linear(1, 1))
    assert (meter.history, state.log_history) == ([], [])
    state.is_world_process_zero = True
    with pytest.raises(IsobasinError, match="nowhere"):
        meter.on_train_begin(None, state, None, model=nn.Linear(1, 1))


def test_gradients_modes_and_generators_stay(tmp_path: Path) -> None:
    model = CASE.build(seed=1).train()
    model.transformer.h[0].eval()
    model(input_ids=IDS, labels=IDS).loss.backward()
    before = {name: (p.grad.clone(), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    meter = callbacks.BarrierMeter(CASE.build(seed=0), loss=loss, points=3)
    wrapped = nn.ModuleDict({"module": nn.Identity()})
    wrapped.module = model  # as DistributedDataParallel holds it
    meter.measure(wrapped, step=1)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, before[name][0])
        assert (p.data_ptr(), p.requires_grad) == before[name][1:]
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2])


@pytest.mark.parametrize("sharded", ["full_tensor", "empty"])
def test_sharded_parameters_are_refused(sharded: str) -> None:
    model = CASE.build(seed=1)
    if sharded == "empty":  # ZeRO-3
        model.transformer.wte.weight = nn.Parameter(torch.empty(0))
    else:  # FSDP
        model.transformer.wte.weight.full_tensor = lambda: None
    with pytest.raises(IsobasinError, match="parameters are sharded"):
        callbacks.BarrierMeter(CASE.build(seed=0), loss=loss, points=3).measure(model, step=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": loss, "every": 0}, "every=0, points=11: expected a number of steps from 1"),
        ({"loss": loss, "points": 2}, "at least 3 points"),
        ({}, "expected one of a task"),
        ({"loss": loss, "task": "test.txt"}, "expected one of a task"),
    ],
)
def test_mistakes_are_told_before_training(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(IsobasinError, match=message):
        ib.BarrierCallback("reference", **settings)


def test_another_architecture_is_refused_before_the_first_step(tmp_path: Path) -> None:
    other = tiny.case("gpt2-three-heads").build(seed=0)
    with pytest.raises(IsobasinError, match=r"n_head|heads|config"):
        trained(tmp_path, ib.BarrierCallback(other, loss=loss, every=1))


# Lightning.


def fit(module: Any, *callbacks_: Any) -> Any:
    """Training with Lightning itself."""
    import lightning.pytorch as lightning

    lightning.seed_everything(0)
    logger = lightning.loggers.CSVLogger(os.environ["OUT"], flush_logs_every_n_steps=1)
    trainer = lightning.Trainer(
        max_steps=STEPS, callbacks=list(callbacks_), logger=logger, accelerator="cpu", log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(ROWS, batch_size=2, shuffle=True))
    return trainer


def lightning_module() -> Any:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = CASE.build(seed=1).train(), nn.Linear(2, 2)

        def training_step(self, batch: Any, _: int) -> Tensor:
            found: Tensor = self.net(**batch).loss
            return found

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    return Module()


@pytest.mark.slow
def test_lightning_trains_bitwise_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real package, where it is installed."""
    pytest.importorskip("lightning")
    monkeypatch.setenv("OUT", str(tmp_path))
    alone, watched = lightning_module(), lightning_module()
    fit(alone)
    callback = ib.lightning_barrier_callback(CASE.build(seed=0), loss=loss, every=4, points=3)
    trainer = fit(watched, callback)
    assert same(alone.net.state_dict(), watched.net.state_dict())
    assert not same(alone.net.state_dict(), lightning_module().net.state_dict()), "it was not trained"
    assert [row["step"] for row in callback.history] == [0, 4, 6]
    logged = (Path(trainer.logger.log_dir) / "metrics.csv").read_text("utf-8")
    assert "barrier_aligned" in logged.splitlines()[0]
    assert str(callback.history[-1]["barrier_naive"])[:8] in logged


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `lightning` with the base class of callbacks alone."""
    package = ModuleType("lightning.pytorch.callbacks")
    package.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    callbacks._lightning_class.cache_clear()


class Steps:
    """A trainer of Lightning as its hooks see it."""

    def __init__(self, logged: list[tuple[int, dict[str, float]]], *, first: bool = True) -> None:
        self.global_step, self.current_epoch, self.is_global_zero = 0, 0, first
        self.loggers = [SimpleNamespace(log_metrics=lambda numbers, step: logged.append((step, numbers)))]

    def fit(self, module: Any, callback: Any, train: Callable[[], None] = lambda: None) -> None:
        callback.on_train_start(self, module)
        for batch in range(2 * STEPS):  # two batches for each step
            self.global_step = (batch + 1) // 2
            train()
            callback.on_train_batch_end(self, module, None, None, batch)
        callback.on_train_end(self, module)


def test_the_hooks_of_lightning(stand_in: None) -> None:
    module, logged = nn.Module(), []
    module.net, module.head = CASE.build(seed=1), nn.Linear(2, 2)
    callback = ib.lightning_barrier_callback(CASE.build(seed=0), loss=loss, every=4, points=3, align=False)
    Steps(logged).fit(module, callback)
    assert [row["step"] for row in callback.history] == [0, 4, 6], "once at each step"
    assert [step for step, _ in logged] == [0, 4, 6]
    assert logged[0][1] == {"barrier_naive": callback.history[0]["barrier_naive"]}
    second = ib.lightning_barrier_callback(CASE.build(seed=0), loss=loss)
    Steps(logged, first=False).fit(module, second)
    assert second.history == []
    module.other = CASE.build(seed=2)
    with pytest.raises(IsobasinError, match="Module holds net, other, expected one model with a config; name it"):
        Steps(logged).fit(module, second)
    named = ib.lightning_barrier_callback(CASE.build(seed=0), loss=loss, model=lambda m: m.other, align=False, points=3)
    Steps(logged).fit(module, named)
    assert named.history[0]["loss"] != callback.history[0]["loss"]


def test_lightning_is_imported_when_it_is_used_and_its_lack_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks._lightning_class.cache_clear()
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
        monkeypatch.setitem(sys.modules, name, None)
    assert ib.BarrierCallback("x", loss=loss).history == []
    with pytest.raises(IsobasinError, match="pip install lightning"):
        ib.lightning_barrier_callback("x", loss=loss)
