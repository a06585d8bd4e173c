"""A stand-in for an accelerator: tensors that are not on the processor, as far as torch can tell, and hold numbers.

Inside `stand_in()`, tensors moved to the device `DEVICE` become `OnDevice`: torch takes them for tensors of the meta
device, their numbers lie on the processor, and every operation on them is done there. What CUDA refuses is refused: an
operation on tensors of both devices, a tensor of the processor indexed by one of the device, and `numpy()`. So a
mistake that crashes on an accelerator is found without one. Threads that a test starts do not see the stand-in.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class OnDevice(Tensor):
    """A tensor on the stand-in device; `inner` holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    def __getitem__(self, key: Any) -> Tensor:
        return super().__getitem__(_with_numbers(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_with_numbers(key), value)

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, **_: Any) -> NoReturn:
        raise TypeError("a tensor of the device can not become a numpy array: copy it to the processor first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _OnEveryCall(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """An operation on the numbers, with its result on the device that it belongs to."""
    here = [x for x in tree_leaves((args, kwargs)) if isinstance(x, OnDevice)]
    if func is aten.copy_.default:  # the one operation that goes from device to device in place
        func(_inner(args[0]), _inner(args[1]), *args[2:])
        return args[0]
    if here:
        _refuse_mixed(func, args, kwargs)
    device = kwargs.get("device")
    settings = {key: torch.device("cpu") if key == "device" and device is not None else x for key, x in kwargs.items()}
    out = func(*tree_map(_inner, args), **tree_map(_inner, settings))
    if not (here if device is None else torch.device(device) == DEVICE):
        return out
    known = {id(x.inner): x for x in here}
    return tree_map(lambda x: _wrapped(x, known) if isinstance(x, Tensor) else x, out)


def _wrapped(x: Tensor, known: Mapping[int, OnDevice]) -> OnDevice:
    return known[id(x)] if id(x) in known else OnDevice(x.resolve_conj().resolve_neg())


def _with_numbers(key: Any) -> Any:
    """An index, lists in it as tensors: torch would make them on the meta device, without their numbers."""
    if isinstance(key, tuple):
        return tuple(map(_with_numbers, key))
    return torch.tensor(key, dtype=torch.int64) if isinstance(key, list) and not any(map(_is_slice, key)) else key


def _is_slice(key: Any) -> bool:
    return not isinstance(key, int)


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, OnDevice) else x


def _refuse_mixed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    if func in INDEXING:  # an index on the processor is fine everywhere
        if not isinstance(args[0], OnDevice) and any(isinstance(x, OnDevice) for x in args[1]):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        return
    mixed = [
        x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not isinstance(x, OnDevice) and x.dim()
    ]
    if mixed:
        raise RuntimeError(f"Expected all tensors to be on the same device, found a processor's in {func}")


@contextmanager
def stand_in() -> Iterator[torch.device]:
    """The device, as long as the block lasts."""
    makers = [patch.object(torch, name, _made_of_numbers(getattr(torch, name))) for name in ("tensor", "as_tensor")]
    with makers[0], makers[1], _OnEveryCall():
        yield DEVICE


def _made_of_numbers(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """On the meta device torch makes such tensors without their numbers."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        found = (
            make(data, *args, **kwargs) if not isinstance(data, Tensor) else data.to(kwargs.get("dtype", data.dtype))
        )
        return found if device is None else found.to(device)

    return made
