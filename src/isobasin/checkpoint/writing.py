"""Writing a checkpoint: headers first, then tensors one at a time or by blocks of rows, then all in place."""

import errno
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from isobasin.checkpoint.companions import copy_companions, find_companions
from isobasin.checkpoint.documents import without_code, write_object
from isobasin.checkpoint.finite import check_finite
from isobasin.checkpoint.header import nbytes
from isobasin.checkpoint.sharding import Tensors, index_of, parse_size, plan_shards
from isobasin.checkpoint.workspace import Workspace, check_output, remove_stale
from isobasin.errors import CheckpointError

_MARGIN = 16 * 2**20  # configuration, index, and what the file system itself needs


class CheckpointWriter:
    """Writes the tensors `infos` (name -> dtype, shape) as a Hugging Face folder at `out`.

    `with CheckpointWriter(...) as writer:` makes a temporary folder; leaving the block puts it in place, an
    exception removes it. Tensors come in any order, each once; `order` is that on disk. Every place is known
    from the start, so memory is bounded by the tensor (or block of rows) being written.

    `companions`: folder whose tokenizer, licence, ... come along. `documents`: texts to write beside, by file name.
    `inputs`: folders the output must avoid. `force`: replace a checkpoint that is already at `out`.
    """

    order: tuple[str, ...]

    def __init__(
        self,
        out: str | Path,
        infos: Tensors,
        *,
        config: Mapping[str, Any],
        companions: Path | None = None,
        documents: Mapping[str, str] | None = None,
        inputs: Sequence[Path] = (),
        force: bool = False,
        max_shard_size: int | str = "5GB",
    ) -> None:
        # Through a link to its folder: the link stays, the folder behind it is replaced.
        self.path = Path(out).resolve()
        if not self.path.name:
            raise CheckpointError(f"output {out} is the root of the file system: choose a folder")
        self._infos = {name: (dtype, tuple(shape)) for name, (dtype, shape) in infos.items()}
        self._shards = plan_shards(self._infos, parse_size(max_shard_size))
        self._places = {name: (s.file, start) for s in self._shards for name, start in s.offsets.items()}
        self.order = tuple(self._places)
        self._documents = dict(documents or {})
        self._rows = dict.fromkeys(self._infos, 0)
        self._numbers = dict.fromkeys(self._infos, 0)
        self._unwritten = set(self._infos)
        self._config = without_code(dict(config))
        self._inputs = [*inputs, *([companions] if companions is not None else [])]
        self._force = force
        self._workspace: Workspace | None = None
        with self._disk_errors():
            self._companions = find_companions(companions) if companions is not None else []
            check_output(self.path, self._inputs, force=force)

    def __enter__(self) -> Self:
        with self._disk_errors():
            remove_stale(self.path)
            check_output(self.path, self._inputs, force=self._force)
            try:
                self._workspace = Workspace(self.path)
                self._check_space()
                self._write_frame(self._workspace.new)
            except BaseException:
                self._discard()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._discard()

    def write(self, name: str, tensor: torch.Tensor, *, finite: bool = True) -> None:
        """Write a whole tensor. NaN or infinite values are an error unless `finite` is False (see `read`)."""
        shape = self._infos[name][1]
        if tuple(tensor.shape) != shape or self._begun(name) or name not in self._unwritten:
            raise ValueError(f"{name!r} of shape {tuple(tensor.shape)}: expected {shape}, once, at one go")
        self._put(name, 0, tensor, finite)
        self._unwritten.remove(name)

    def write_rows(self, name: str, start: int, tensor: torch.Tensor) -> None:
        """Write the next block of rows of a tensor; `start` is where its last block ended."""
        shape = self._infos[name][1]
        stop = start + (tensor.shape[0] if tensor.ndim else 1)
        fits = bool(shape) and tuple(tensor.shape[1:]) == shape[1:] and stop <= shape[0]
        if not fits or start != self._rows[name] or self._numbers[name] or name not in self._unwritten:
            raise ValueError(
                f"rows {start}:{stop} of {name!r}, block of shape {tuple(tensor.shape)}: "
                f"expected rows of {shape} from {self._rows[name]} on"
            )
        self._put(name, start, tensor, True)
        self._rows[name] = stop
        if stop == shape[0]:
            self._unwritten.remove(name)

    def write_flat(self, name: str, start: int, tensor: torch.Tensor) -> None:
        """Write the next numbers of a tensor, its rows one after another; the caller has made sure they are finite."""
        size, stop = math.prod(self._infos[name][1]), start + tensor.numel()
        fits = tensor.ndim == 1 and stop <= size and start == self._numbers[name]
        if not fits or self._rows[name] or name not in self._unwritten:
            raise ValueError(
                f"numbers {start}:{stop} of {name!r}: expected those of {size} from {self._numbers[name]} on"
            )
        self._put(name, start, tensor, False, flat=True)
        self._numbers[name] = stop
        if stop == size:
            self._unwritten.remove(name)

    def _begun(self, name: str) -> bool:
        return bool(self._rows[name] or self._numbers[name])

    def _put(self, name: str, start: int, tensor: torch.Tensor, finite: bool, *, flat: bool = False) -> None:
        dtype, shape = self._infos[name]
        if self._workspace is None or tensor.dtype != dtype:
            raise ValueError(f"{name!r} as {tensor.dtype}: expected {dtype}, inside the `with` block")
        data = tensor.detach().cpu().contiguous().reshape(-1)
        if finite:
            overflow = "float16 ends at 65504, choose bfloat16 or float32"
            check_finite(data, name, overflow if dtype == torch.float16 else "nothing is written")
        file, offset = self._places[name]
        with self._disk_errors():
            step = dtype.itemsize if flat else nbytes(dtype, shape[1:])
            write_at(self._workspace.new / file, offset + start * step, data.view(torch.uint8))

    def _write_frame(self, folder: Path) -> None:
        """All but the data: headers in files of their final size, index, configuration, companions."""
        for shard in self._shards:
            with (folder / shard.file).open("xb") as stream:
                stream.write(shard.header)
                stream.truncate(shard.size)
        if len(self._shards) > 1:
            write_object(folder / "model.safetensors.index.json", index_of(self._shards, self._infos))
        write_object(folder / "config.json", self._config)
        copy_companions(self._companions, folder)
        for name, text in self._documents.items():
            (folder / name).write_text(text, encoding="utf-8")

    def _check_space(self) -> None:
        needed = sum(shard.size for shard in self._shards) + _MARGIN
        needed += sum(file.stat().st_size for file in self._companions)
        free = shutil.disk_usage(self.path.parent).free
        if free < needed:
            raise CheckpointError(
                f"output {self.path} needs {needed / 1e6:.0f} MB, the disk has {free / 1e6:.0f} MB free: "
                "make room or choose another disk"
            )

    def _commit(self) -> None:
        if self._unwritten:
            names = [name for name in self.order if name in self._unwritten]
            raise ValueError(f"{len(names)} tensors were not written, the first {names[0]!r}")
        assert self._workspace is not None
        with self._disk_errors():
            check_output(self.path, self._inputs, force=self._force)
            self._workspace.commit()

    def _discard(self) -> None:
        if self._workspace is not None:
            self._workspace.discard()
            self._workspace = None

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                message = f"output {self.path}: the disk became full, nothing is written: make room and run again"
            else:
                message = f"output {self.path} can not be written: {error}"
            raise CheckpointError(message) from error


def write_at(file: Path, offset: int, data: torch.Tensor) -> None:
    """Write bytes into an existing file at `offset`."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data.numpy().data)
