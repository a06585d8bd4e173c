"""Merging tensor by tensor: linear and slerp arithmetic, reading tensors in blocks, and writing the result.

Sums are formed in float32 (float64 for float64 inputs) in the order of the models, by the operations that mergekit
uses, and rounded to the type of the output: the result is bit for bit that of mergekit. Elementwise operations work on
chunks of `CHUNK` numbers: a chunk stays in the processor's cache, and torch starts no threads for so few numbers, which
leaves the cores to the pool of threads that merges blocks.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isobasin.checkpoint import CheckpointWriter, check_finite, check_kept
from isobasin.errors import CheckpointError
from isobasin.weights import Weights

CHUNK = 2**15
PART = 2**20  # slerp sums norms and products in parts of this size; another size would change the last bit
COLLINEAR = 0.9995  # beyond this cosine, in either direction, slerp is linear
TINY = 1e-8  # slerp treats a smaller norm as 1
BLOCK_BYTES = 2**23
WORKERS = 16  # at most; fewer where there are fewer cores

Read = Callable[[int, int], Sequence[Tensor]]  # the numbers start:stop of every model
# (flat numbers of every model in the type of sums, a tensor to write to) → their combination
Combination = Callable[[Sequence[Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Linear:
    """Σ wᵢ xᵢ, divided by Σ wᵢ if `normalize`."""

    weights: tuple[float, ...]
    normalize: bool = True

    def combination(self, read: Read, size: int, via: torch.dtype) -> Combination:
        row = torch.tensor([self.weights], dtype=sum_dtype(via))
        weights, total = row.unbind(1), row.sum(dim=1)

        def combined(parts: Sequence[Tensor], out: Tensor) -> Tensor:
            out.zero_()
            for part, weight in zip(parts, weights):
                out.addcmul_(part, weight)
            return out.div_(total) if self.normalize else out

        return combined


@dataclass(frozen=True)
class Slerp:
    """sin((1−t)θ)/sin θ · x + sin(tθ)/sin θ · y, θ the angle between two whole tensors; x is that of model `base`."""

    t: float
    base: int = 0

    def combination(self, read: Read, size: int, via: torch.dtype) -> Combination:
        """The combination for one tensor, which is read whole to compute the angle."""
        t = torch.tensor([[self.t]], dtype=sum_dtype(via))
        near, far = 1 - t, t
        if size:
            cosine = _cosine(read, size, via)
            straight = cosine.abs() > COLLINEAR
            angle = torch.acos(torch.where(straight, 0, cosine))  # a right angle where it is unused: no division by 0
            near = torch.where(straight, 1 - t, torch.sin((1 - t) * angle) / torch.sin(angle))
            far = torch.where(straight, t, torch.sin(t * angle) / torch.sin(angle))

        def combined(parts: Sequence[Tensor], out: Tensor) -> Tensor:
            torch.mul(parts[self.base], near.reshape(1), out=out)
            return out.add_(parts[1 - self.base] * far.reshape(1))

        return combined


Method = Linear | Slerp


def _cosine(read: Read, size: int, via: torch.dtype) -> Tensor:
    """⟨x, y⟩ / ‖x‖‖y‖ of two tensors, (1, 1); one part of each is in memory at a time."""

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, size, PART):
            blocks = read(start, min(start + PART, size))
            x, y = (block.to(via).to(sum_dtype(via)).reshape(1, -1) for block in blocks)
            yield x, y

    norms = [[torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in pair] for pair in parts()]
    lengths = [torch.linalg.vector_norm(torch.stack(each), dim=0) for each in zip(*norms)]
    a, b = (torch.where(length > TINY, length, 1) for length in lengths)
    # Dividing before multiplying avoids overflow.
    products = [((x / a) * (y / b)).sum(dim=1, keepdim=True) for x, y in parts()]
    return torch.stack(products).sum(dim=0).clamp(-1, 1)


def sum_dtype(via: torch.dtype) -> torch.dtype:
    """The type in which sums of inputs of this type are formed."""
    return torch.float64 if via == torch.float64 else torch.float32


def combine(
    combination: Combination, parts: Sequence[Tensor], via: torch.dtype, out: torch.dtype
) -> tuple[Tensor, bool]:
    """Flat tensors, rounded to `via` and combined, as type `out`; and whether all of the result is finite."""
    work, size = sum_dtype(via), parts[0].numel()
    result = torch.empty(size, dtype=out)
    spare, *held = (torch.empty(min(CHUNK, size), dtype=work) for _ in range(len(parts) + 1))
    extremes = []
    for target, *pieces in zip(result.split(CHUNK), *(part.split(CHUNK) for part in parts)):
        n = target.numel()
        wide = [room[:n].copy_(piece.to(via)) for room, piece in zip(held, pieces)]
        target.copy_(combination(wide, spare[:n]))
        if n:
            extremes += target.aminmax()  # NaN if any number is NaN
    return result, not extremes or bool(torch.stack(extremes).isfinite().all())


@dataclass(frozen=True)
class MergedTensor:
    """One tensor of all models, and the type in which the merge is written.

    Stored tensors are first rounded to that type, as in mergekit; tensors moved by an alignment (in float64) are
    combined as they are, and rounded once. Only the first `rows` rows are combined, if given; the others, and a tensor
    that is `copied`, are those of the first model.
    """

    name: str
    models: tuple[Weights, ...]
    dtype: torch.dtype
    rows: int | None = None
    copied: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.models[0].arch.shapes[self.name]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def is_buffer(self) -> bool:
        return self.models[0].arch.tensors[self.name].buffer

    @property
    def in_blocks(self) -> bool:
        """Whether every model stores the tensor unchanged in a file that can be read in blocks."""
        return not (self.is_buffer or self.copied or self.rows is not None) and all(
            model.checkpoint is not None
            and self.name not in model.changed
            and self.name not in model.names.slices
            and model.checkpoint.infos[model.names.on_disk[self.name]].offset is not None
            for model in self.models
        )

    @property
    def _via(self) -> torch.dtype:
        moved = any(self.name in model.changed for model in self.models)
        return torch.float64 if moved else self.dtype

    def combination(self, method: Method, read: Read | None = None) -> Combination:
        """The combination for this tensor; the numbers are read from the files if no `read` is given."""
        return method.combination(read or self._stored, self.size, self._via)

    def block(self, combination: Combination, start: int, stop: int) -> Tensor:
        """The merged numbers start:stop, from the files."""
        return self._combined(combination, self._stored(start, stop))

    def whole(self, method: Method) -> Tensor:
        """The merged tensor. A buffer is that of the first model, unchanged."""
        if self.is_buffer:
            return self.models[0][self.name]
        if self.copied:
            return self._of_first(self.models[0].stored(self.name))
        tensors = [model.stored(self.name).detach().cpu() for model in self.models]
        parts = [(t if self.rows is None else t[: self.rows]).reshape(-1) for t in tensors]
        read: Read = lambda start, stop: [part[start:stop] for part in parts]  # noqa: E731
        merged = self._combined(method.combination(read, parts[0].numel(), self._via), parts)
        if self.rows is None:
            return merged.reshape(self.shape)
        return torch.cat([merged.reshape(self.rows, *self.shape[1:]), self._of_first(tensors[0][self.rows :])])

    def _of_first(self, part: Tensor) -> Tensor:
        """Numbers of the first model alone, in the type of the output."""
        check_kept(part, self.dtype, self.models[0].names.on_disk[self.name])
        return part.detach().to("cpu", self.dtype)

    def _stored(self, start: int, stop: int) -> list[Tensor]:
        blocks = []
        for model in self.models:
            assert model.checkpoint is not None
            disk = model.names.on_disk[self.name]
            block = model.checkpoint.flat(disk, start, stop)
            for copy, target in model.names.copies.items():
                if target == self.name and not torch.equal(model.checkpoint.flat(copy, start, stop), block):
                    raise CheckpointError(
                        f"{copy}: config.json ties it to {disk}, but the two differ; "
                        "set tie_word_embeddings to false, or remove one of them"
                    )
            blocks.append(block)
        return blocks

    def _combined(self, combination: Combination, parts: Sequence[Tensor]) -> Tensor:
        for model, part in zip(self.models, parts):
            check_kept(part, self.dtype, model.names.on_disk[self.name])
        result, finite = combine(combination, parts, self._via, self.dtype)
        if finite:
            return result
        for number, (model, part) in enumerate(zip(self.models, parts)):
            disk = model.names.on_disk[self.name]
            if model.checkpoint is not None:
                model.checkpoint.check(disk, part)
            check_finite(part, disk, f"found in model {number}, repair it")
        narrow = self.dtype == torch.float16
        advice = "float16 ends at 65504, choose bfloat16 or float32" if narrow else "choose smaller weights"
        check_finite(result, self.name, f"the merge overflows: {advice}")
        return result


@dataclass(frozen=True)
class MergedStack:
    """Merged tensors that a file holds as one, under this name; merged whole."""

    disk: str
    parts: Mapping[str, MergedTensor]
    in_blocks: ClassVar[bool] = False
    is_buffer: ClassVar[bool] = False

    @property
    def _first(self) -> MergedTensor:
        return next(iter(self.parts.values()))

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._first.models[0].disk_shape(self._first.name)

    def whole(self, method: Method) -> Tensor:
        """The merged tensor."""
        return self._first.models[0].assembled(self.disk, lambda name: self.parts[name].whole(method))


def write_merged(
    writer: CheckpointWriter,
    tensors: "Mapping[str, MergedTensor | MergedStack]",
    method: Method,
    *,
    block_bytes: int = BLOCK_BYTES,
    watch: Callable[[str], None] | None = None,
) -> None:
    """Write every tensor (by its name on disk), in the order of the files; `watch` is called after each.

    Stored tensors are merged in blocks by a pool of threads; at most two blocks more than it has threads are in memory.
    A moved tensor is computed whole.
    """
    workers = min(WORKERS, max(2, os.cpu_count() or 1))
    with ThreadPoolExecutor(workers) as pool:
        pending: deque[tuple[str, int, bool, Future[Tensor]]] = deque()

        def drain(down_to: int) -> None:
            while len(pending) > down_to:
                disk, start, is_last, future = pending.popleft()
                writer.write_flat(disk, start, future.result())
                if watch and is_last:
                    watch(disk)

        try:
            for disk in writer.order:
                tensor = tensors[disk]
                if isinstance(tensor, MergedStack) or not tensor.in_blocks or not tensor.size:
                    drain(0)
                    writer.write(disk, tensor.whole(method), finite=not tensor.is_buffer)
                    if watch:
                        watch(disk)
                    continue
                combination, step = tensor.combination(method), max(1, block_bytes // tensor.dtype.itemsize)
                for start in range(0, tensor.size, step):
                    stop = min(start + step, tensor.size)
                    block = pool.submit(tensor.block, combination, start, stop)
                    pending.append((disk, start, stop == tensor.size, block))
                    drain(workers + 2)
            drain(0)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
