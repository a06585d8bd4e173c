"""Components of a model whose outputs can be mixed in place of their weights: attention and feed-forward layers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from isobasin.arch import Architecture
from isobasin.path.mixture import Mixture


@dataclass(frozen=True)
class Component:
    """One attention or feed-forward layer: its tensors, and the one that writes its output to the stream."""

    kind: str  # "attention" or "feed-forward"
    layer: int
    tensors: tuple[str, ...]
    writer: str


def components(arch: Architecture) -> tuple[Component, ...]:
    """Every component of this architecture, layer by layer."""
    streams = {w.weight for s in arch.spaces.values() if getattr(s, "stream", False) for w in arch.writers(s.name)}
    found = []
    for layer in range(arch.sizes.n_layers):
        for kind, faces in (("attention", (f"qk{layer}", f"vo{layer}")), ("feed-forward", (f"ff{layer}",))):
            carried = {name for face in faces for name, *_ in arch.carriers(face)}
            weights = sorted(name for name in carried if len(arch.shapes[name]) > 1)
            biases = {bias for bias in map(arch.bias_of, weights) if bias}
            (writer,) = (name for name in weights if name in streams)
            found.append(Component(kind, layer, tuple(sorted(carried | biases)), writer))
    return tuple(found)


@contextmanager
def mixed_outputs(
    mixture: Mixture, chosen: Sequence[Component], start: Tensor, end: Tensor, where: "Where"
) -> Iterator[None]:
    """Inside, every chosen component gives (1−λ)·f_A(x) + λ·f_B(x) on the input x it gets, λ = `where.lam`."""
    with ExitStack() as stack:
        for component in chosen:
            stack.enter_context(_mixed(mixture, component, start, end, where))
        yield


@dataclass
class Where:
    """The point of the path that is being measured."""

    lam: float = 0.0


@contextmanager
def _mixed(mixture: Mixture, component: Component, start: Tensor, end: Tensor, where: Where) -> Iterator[None]:
    names = [mixture.places[name] for name in component.tensors]
    owners = [name.rpartition(".")[0] for name in names]
    around = mixture.module.get_submodule(_common(owners))
    writer = mixture.module.get_submodule(mixture.places[component.writer].rpartition(".")[0])
    parameters = {name: mixture.module.get_parameter(name) for name in names}
    plain = around.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # The smallest module around the component runs twice: once to hear A, once to hear B and go on with the
        # mixture. What lies in it beside the component (a norm after the skip) keeps the interpolated weights.
        heard: list[Tensor] = []
        _set(mixture, parameters, start)
        with _hook(writer, lambda out: heard.append(out)):
            plain(*args, **kwargs)
        _set(mixture, parameters, end)
        with _hook(writer, lambda out: heard[0].lerp(out, where.lam)):
            result = plain(*args, **kwargs)
        _set(mixture, parameters, mixture.buffer)
        return result

    around.forward = forward
    try:
        yield
    finally:
        around.forward = plain
        _set(mixture, parameters, mixture.buffer)


def _set(mixture: Mixture, parameters: dict[str, nn.Parameter], vector: Tensor) -> None:
    for name, parameter in parameters.items():
        parameter.data = mixture.part(vector, name)


@contextmanager
def _hook(module: nn.Module, heard: Any) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _, args, out: heard(out))
    try:
        yield
    finally:
        handle.remove()


def _common(modules: Sequence[str]) -> str:
    """The innermost module that holds them all."""
    levels = zip(*(name.split(".") for name in modules))
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
