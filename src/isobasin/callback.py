"""Callbacks of training loops: the barrier between the model in training and a reference, measured every few steps.

Training is not disturbed. The live model is only read: its tensors are copied, and another module is moved along the
path. Random numbers that a measurement draws are taken back. In distributed training only the first process measures,
and the others wait for it at their next collective operation.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.utils import logging

from isobasin.alignment.align import Matcher, align
from isobasin.alignment.comparable import check_comparable
from isobasin.alignment.matchers import WeightMatching
from isobasin.arguments import checks_arguments
from isobasin.errors import IsobasinError
from isobasin.files import strict_json
from isobasin.path.barrier import Curve, is_connected
from isobasin.path.evaluation import Loss, evaluate_path
from isobasin.tasks import Task, open_task
from isobasin.weights import ModelSource, Weights, load

Data = Task | Loss | Path | str
Find = Callable[[Any], Any]  # the model inside a LightningModule


@dataclass
class BarrierMeter:
    """Measures the barriers between a reference and snapshots of a model, and keeps what it found.

    Both callbacks are made of one. `history` has one mapping for each measurement: the step and the epoch, the loss of
    both ends, the naive barrier and its λ, the aligned ones, the distances ‖model − reference‖/‖reference‖ before and
    after alignment, and whether the two are linearly connected.
    """

    reference: ModelSource
    task: Data | None = None
    loss: Loss | None = None
    every: int = 500
    align: bool | Matcher = True
    points: int = 11
    path: str | Path | None = None
    device: torch.device | str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.every < 1 or self.points < 3:
            raise IsobasinError(
                f"every={self.every}, points={self.points}: expected a number of steps from 1, and at least 3 points"
            )
        if (self.task is None) == (self.loss is None):
            raise IsobasinError("expected one of a task (or data) and a loss, a function of the module")

    @cached_property
    def target(self) -> Weights:
        """The reference, read once. A model in memory is copied: it may be the one that is trained."""
        return load(self.reference)

    def is_due(self, step: int, *, last: bool = False) -> bool:
        """Whether to measure after this step: every few steps, and after the last one."""
        measured = self.history[-1]["step"] if self.history else None
        return step != measured and (last or step % self.every == 0)

    def measure(self, model: nn.Module, *, step: int, epoch: float | None = None) -> dict[str, float]:
        """Measure a model as it is now; the numbers that are worth a curve."""
        with preserved_state():
            found = {"step": step, "epoch": epoch, **self._measured(unwrapped(model))}
        self.history.append(found)
        if self.path is not None:
            with Path(self.path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(strict_json(found)) + "\n")
        return {key: float(value) for key, value in found.items() if key.startswith(("barrier", "distance"))}

    def _measured(self, model: nn.Module) -> dict[str, Any]:
        if any(hasattr(p, "full_tensor") or p.numel() == 0 for p in model.parameters()):
            raise IsobasinError(
                f"{type(model).__name__}: its parameters are sharded (FSDP, ZeRO-3), expected whole ones; measure "
                "saved checkpoints by `isobasin path` instead"
            )
        device = self.device or next(model.parameters()).device
        target, now = self.target, load(model)  # a copy
        check_comparable(target, now)
        curves = {"naive": self._curve(now, device)}
        distances: dict[str, float] = {}
        if self.align:
            matcher = WeightMatching() if self.align is True else self.align
            found = align(now, to=target, matcher=matcher, device=device)
            curves["aligned"] = self._curve(found.transform.apply(now), device)
            distances = {"distance_naive": found.distance_before, "distance_aligned": found.distance_after}
        heights = {name: curve.barrier.height for name, curve in curves.items()}
        return {
            "loss_reference": curves["naive"].metrics["loss"][0],
            "loss": curves["naive"].metrics["loss"][-1],
            **{f"barrier_{name}": height for name, height in heights.items()},
            **{f"lambda_{name}": curve.barrier.lam for name, curve in curves.items()},
            **distances,
            "connected": is_connected(min(heights.values(), key=_last_if_nan), heights["naive"]),
        }

    def _curve(self, model: Weights, device: torch.device | str) -> Curve:
        """The path from the reference to a model."""
        if isinstance(self.task, str | Path):
            self.task = open_task(self.task, [self.target, model])
        return evaluate_path(self.target, model, self.task, loss=self.loss, n_points=self.points, device=device)


def _last_if_nan(height: float) -> float:
    return float("inf") if height != height else height


@contextmanager
def preserved_state() -> Iterator[None]:
    """Afterwards the generators of random numbers and the logging of transformers are as before."""
    python, numpy = random.getstate(), np.random.get_state()
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


def unwrapped(model: nn.Module) -> Any:
    """The model inside the wrappers of distributed training and of torch.compile."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return unwrapped(inner)
    return model


class BarrierCallback(TrainerCallback):  # type: ignore[misc]
    """For `transformers.Trainer`: the barrier between the model and a reference run or checkpoint, as training goes.

    >>> callback = BarrierCallback("runs/seed0", loss=lambda model: model(**batch).loss, every=200)  # doctest: +SKIP
    >>> Trainer(model, args, train_dataset=data, callbacks=[callback]).train()  # doctest: +SKIP
    >>> callback.history[-1]["barrier_aligned"]  # doctest: +SKIP

    It measures before the first step, every `every` steps, and after the last. `barrier_naive`, `barrier_aligned` and
    the distances go into the trainer's log history, and to TensorBoard, W&B and other reporters. `history` keeps all
    numbers, and `path` is a file to which each measurement adds a line of JSON.

    `task` and `loss` are those of `evaluate_path`. `align` is a matcher, True for `WeightMatching()`, or False for the
    naive barrier alone. `device` is that of the model unless given.
    """

    @checks_arguments
    def __init__(
        self,
        reference: ModelSource,
        task: Data | None = None,
        *,
        loss: Loss | None = None,
        every: int = 500,
        align: bool | Matcher = True,
        points: int = 11,
        path: str | Path | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.meter = BarrierMeter(reference, task, loss, every, align, points, path, device)

    @property
    def history(self) -> list[dict[str, Any]]:
        """All measurements."""
        return self.meter.history

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._measure(args, state, control, model, last=True)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._measure(args, state, control, model, last=control.should_training_stop)

    def _measure(self, args: Any, state: Any, control: Any, model: Any, *, last: bool) -> None:
        if not state.is_world_process_zero or not self.meter.is_due(state.global_step, last=last):
            return
        numbers = self.meter.measure(model, step=state.global_step, epoch=state.epoch)
        logs = {**numbers, "epoch": state.epoch or 0.0}
        state.log_history.append({**logs, "step": state.global_step})
        if (handler := _handler()) is not None:
            due = control.should_log  # of the trainer's own numbers, which the handler would take for done
            handler.on_log(args, state, control, logs)
            control.should_log = due


def _handler() -> CallbackHandler | None:
    """What calls the callbacks, and knows the reporters: transformers passes neither it nor the trainer to them."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(found := frame.f_locals.get("self"), CallbackHandler):
            return found
    return None


def lightning_barrier_callback(
    reference: ModelSource, task: Data | None = None, *, model: Find | None = None, **more: Any
) -> Any:
    """The same for Lightning, which is imported here; the numbers go to the trainer's loggers.

    >>> callback = lightning_barrier_callback("runs/seed0", "test.txt", every=200)  # doctest: +SKIP
    >>> Trainer(callbacks=[callback]).fit(module, loader)  # doctest: +SKIP

    `model` is a function that gives the model inside the LightningModule; without it, the module's only attribute
    that is a model with a config. `more` are the other arguments of `BarrierCallback`.
    """
    return _lightning_class()(BarrierMeter(reference, task, **more), model or _only_model)


@cache
def _lightning_class() -> type:
    try:
        callbacks = import_module("lightning.pytorch.callbacks")
    except ImportError as error:
        raise IsobasinError("lightning_barrier_callback needs Lightning: pip install lightning") from error

    class LightningBarrierCallback(callbacks.Callback):  # type: ignore[misc]
        def __init__(self, meter: BarrierMeter, find: Find) -> None:
            self.meter, self.find = meter, find

        @property
        def history(self) -> list[dict[str, Any]]:
            """All measurements."""
            return self.meter.history

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._measure(trainer, pl_module, last=True)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            self._measure(trainer, pl_module, last=False)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._measure(trainer, pl_module, last=True)

        def _measure(self, trainer: Any, pl_module: Any, *, last: bool) -> None:
            if not trainer.is_global_zero or not self.meter.is_due(trainer.global_step, last=last):
                return
            model, epoch = self.find(pl_module), float(trainer.current_epoch)
            numbers = self.meter.measure(model, step=trainer.global_step, epoch=epoch)
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

    return LightningBarrierCallback


def _only_model(module: nn.Module) -> Any:
    """The model inside a LightningModule: its only child that has a config, as models of transformers have."""
    found = {name: child for name, child in module.named_children() if hasattr(unwrapped(child), "config")}
    if len(found) != 1:
        raise IsobasinError(
            f"{type(module).__name__} holds {', '.join(found) or 'no models'}, expected one model with a config; "
            "name it: model=lambda module: module.net"
        )
    return next(iter(found.values()))
