"""Tensors computed on demand: a change to a few of them is a view over the rest, and nothing is copied.

A whole transform is a short stack of views, so that a checkpoint larger than memory is rewritten one tensor at a
time: asking for a tensor pulls just what it depends on through the stack.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Change = Callable[[Tensors], Tensor]


class View(Mapping[str, Tensor]):
    """`base`, with some tensors replaced by functions of `base`, or added to it."""

    def __init__(self, base: Tensors, changes: Mapping[str, Change]) -> None:
        self._base = base
        self._changes = changes

    def __getitem__(self, name: str) -> Tensor:
        change = self._changes.get(name)
        return self._base[name] if change is None else change(self._base)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._base, *self._changes)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ReadOnce(Mapping[str, Tensor]):
    """The same tensors, each read when it is first asked for and kept in the type it has, on a device if one is
    given."""

    def __init__(self, base: Tensors, device: torch.device | None = None) -> None:
        self._base = base
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._kept:
            self._kept[name] = self._base[name].to(self._device)
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def room(device: torch.device, memory: int) -> int:
    """The bytes that one model may take on a device while others lie there too: `memory` of the host, or a third of
    what is free on an accelerator."""
    return torch.cuda.mem_get_info(device)[0] // 3 if device.type == "cuda" else memory


class AsFloat64(Mapping[str, Tensor]):
    """The same tensors in float64, or in another type, where all arithmetic on them happens; others (buffers) as they
    are."""

    def __init__(self, base: Tensors, device: torch.device | None = None, dtype: torch.dtype = torch.float64) -> None:
        self._base = base
        self._device, self._dtype = device, dtype

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._base[name]
        return tensor.to(self._device, self._dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def chain(*changes: Mapping[str, Change]) -> dict[str, Change]:
    """Several sets of changes as one; where two touch the same tensor the later acts on what the earlier made.

    Only for changes of which none reads what another one writes, except the tensor they share.
    """
    joined: dict[str, Change] = {}
    for part in changes:
        for name, change in part.items():
            before = joined.get(name)
            joined[name] = change if before is None else _then(name, before, change)
    return joined


def _then(name: str, first: Change, second: Change) -> Change:
    return lambda tensors: second(View(tensors, {name: first}))


def trim_heap() -> None:
    """Return the free pages of the C library's heap to the system, where it is glibc; elsewhere do nothing.

    Tensors of up to 32 MB come from the heap. Those of a sweep have many sizes and lifetimes, and without this the
    holes between them add up to as much as the sweep itself needs.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
