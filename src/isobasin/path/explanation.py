"""Which components cause a barrier: how far it falls when a component's outputs are mixed instead of its weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from isobasin.arch import Architecture
from isobasin.files import ResumeStore
from isobasin.path.barrier import Curve, finite_or_none
from isobasin.path.evaluation import FlatModel, Watch, curve_of, evaluate_points
from isobasin.tasks import Task

MAX_POINTS = 9  # of an explained path, apart from its highest point


@dataclass(frozen=True)
class Component:
    """One attention or feed-forward layer: its tensors, and the tensor that writes its output to the stream."""

    kind: str  # "attention" or "feed-forward"
    layer: int
    tensors: tuple[str, ...]
    writer: str


def components(arch: Architecture) -> tuple[Component, ...]:
    """Every component of this architecture, layer by layer."""
    written = {writer.weight for stream in arch.streams for writer in arch.writers(stream)}
    layered = [space for space in arch.spaces.values() if space.layer is not None and space.role != "experts"]
    found = []
    for space in sorted(layered, key=lambda space: (space.layer, space.role)):
        carried = set(arch.blocks[space.name])
        weights = sorted(name for name in carried if len(arch.shapes[name]) > 1)
        biases = {bias for bias in map(arch.bias_of, weights) if bias}
        (writer,) = (name for name in weights if name in written)
        kind = "attention" if space.role == "heads" else "feed-forward"
        assert space.layer is not None
        found.append(Component(kind, space.layer, tuple(sorted(carried | biases)), writer))
    return tuple(found)


@dataclass(frozen=True)
class Explanation:
    """The barrier of the plain path on these points, and with the outputs of each part (see `explain`) mixed."""

    lambdas: tuple[float, ...]
    barrier: float
    parts: Mapping[str, float]

    def share(self, part: str) -> float:
        """The share of the barrier that vanishes."""
        return (self.barrier - self.parts[part]) / self.barrier if self.barrier > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """One entry of `explain` in `path.json`."""
        rows = [
            {"name": part, "barrier": finite_or_none(height), "share": finite_or_none(self.share(part))}
            for part, height in self.parts.items()
        ]
        return {"barrier": finite_or_none(self.barrier), "lambdas": list(self.lambdas), "components": rows}


def explain(
    model: FlatModel,
    start: Tensor,
    end: Tensor,
    task: Task,
    curve: Curve,
    *,
    name: str,
    cache: ResumeStore | None = None,
    watch: Watch | None = None,
) -> Explanation:
    """Evaluate the path again for each part of the model, with the outputs of that part mixed.

    The parts are all attention layers, all feed-forward layers, both, and the components of each layer.
    """
    lambdas = explained_lambdas(curve)
    every = components(model.weights.arch)
    parts = {kind: [c for c in every if c.kind == kind] for kind in ("attention", "feed-forward")}
    parts["attention and feed-forward"] = list(every)
    parts |= {f"layer {i}": [c for c in every if c.layer == i] for i in range(model.weights.arch.sizes.n_layers)}
    found: dict[str, float] = {}
    for number, (part, chosen) in enumerate(parts.items(), 1):
        with mixed_outputs(model, chosen, start, end) as move_to:
            points = {f"{name}/{part}/{lam!r}": partial(move_to, lam) for lam in lambdas}
            sums = evaluate_points(model, points, task, cache=cache)
        found[part] = curve_of(lambdas, sums.values(), task).barrier.height
        if watch:
            watch(number, len(parts))
    return Explanation(lambdas, curve.at(lambdas).barrier.height, found)


def explained_lambdas(curve: Curve) -> tuple[float, ...]:
    """Both ends, the highest point, and evenly spaced others: a point with mixed outputs costs two forward passes."""
    step = max(1, -(-(len(curve.lambdas) - 1) // (MAX_POINTS - 1)))
    return tuple(sorted({*curve.lambdas[::step], curve.lambdas[-1], curve.barrier.lam}))


@contextmanager
def mixed_outputs(
    model: FlatModel, chosen: Sequence[Component], start: Tensor, end: Tensor
) -> Iterator[Callable[[float], None]]:
    """Inside, every chosen component computes (1−λ)·f_A(x) + λ·f_B(x) on its input x; yields the function to set λ."""
    lam = 0.0

    def move_to(value: float) -> None:
        nonlocal lam
        lam = value
        torch.lerp(start, end, lam, out=model.buffer)

    with ExitStack() as stack:
        for component in chosen:
            stack.enter_context(_mixed(model, component, start, end, lambda: lam))
        yield move_to


@contextmanager
def _mixed(
    model: FlatModel, component: Component, start: Tensor, end: Tensor, lam: Callable[[], float]
) -> Iterator[None]:
    names = [model.places[name] for name in component.tensors]
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*(name.split(".")[:-1] for name in names)))
    owner = model.module.get_submodule(".".join(level[0] for level in levels))  # holds all of the component
    writer = model.module.get_submodule(model.places[component.writer].rpartition(".")[0])
    parameters = {name: model.module.get_parameter(name) for name in names}
    plain = owner.forward

    def point_to(vector: Tensor) -> None:
        for name, parameter in parameters.items():
            parameter.data = model.part(vector, name)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # The smallest module that holds the component runs twice: with the component of A, whose output is recorded,
        # then with that of B, whose output is replaced by the mixture. Other tensors in that module (of a norm after
        # the skip connection) keep the interpolated weights.
        recorded: list[Tensor] = []
        point_to(start)
        with writer.register_forward_hook(lambda _, args, out: recorded.append(out)):
            plain(*args, **kwargs)
        point_to(end)
        with writer.register_forward_hook(lambda _, args, out: recorded[0].lerp(out, lam())):
            result = plain(*args, **kwargs)
        point_to(model.buffer)
        return result

    owner.forward = forward
    try:
        yield
    finally:
        owner.forward = plain
        point_to(model.buffer)
