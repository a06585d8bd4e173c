"""Writer of checkpoint folders: headers first, then tensors (whole or by blocks), then an atomic rename."""

import errno
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from isobasin.checkpoint.folder import (
    copy_companions,
    find_companions,
    find_unknown,
    is_checkpoint,
    without_code,
    write_object,
)
from isobasin.checkpoint.header import SAFETENSORS_NAMES, check_finite, encode_header, nbytes
from isobasin.errors import CheckpointError
from isobasin.files import AtomicOutput, Content, commit_with, recover, remove_obsolete

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

_MAX_SHOWN = 3  # names in a message
_BLOCK, _FRAME = 4096, 8 * 4096  # bytes: files take whole blocks; the temporary folder, its marker and the file system
_INDEX_LINE = 50  # bytes of the index for a tensor, beside its name
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class CheckpointWriter:
    """Writes the tensors `infos` (name -> dtype, shape) as a Hugging Face folder at `out`.

    `with CheckpointWriter(...) as writer:` creates a temporary folder. At the end of the block it is renamed to `out`;
    an exception removes it. Tensors are written in any order, each once; `order` is that on disk. All offsets are
    known from the start, so that memory is bounded by the tensor (or block) that is written.

    `companions`: a folder whose other files (tokenizer, licence, ...) are copied, Python files and keys that name code
    only with `trust_remote_code`. `documents`: further text files, by name.
    `files`: files elsewhere that appear together with the folder, by path; such as the transform that made it.
    `inputs`: folders that the output must not overlap. `force`: replace a checkpoint that exists at `out`.
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
        files: Mapping[Path, Content] | None = None,
        inputs: Sequence[Path] = (),
        force: bool = False,
        max_shard_size: int | str = "5GB",
        trust_remote_code: bool = False,
    ) -> None:
        # A link to a folder stays, and the folder it leads to is replaced.
        self.path = Path(out).resolve()
        if not self.path.name:
            raise CheckpointError(f"output {out} is the root of the file system: choose a folder")
        self._infos = {name: (dtype, tuple(shape)) for name, (dtype, shape) in infos.items()}
        self._shards = plan_shards(self._infos, parse_size(max_shard_size))
        self._places = {name: (s.file, start) for s in self._shards for name, start in s.offsets.items()}
        self.order = tuple(self._places)
        self._documents, self._files = dict(documents or {}), dict(files or {})
        self._written = dict.fromkeys(self._infos, 0)  # numbers
        self._unwritten = set(self._infos)
        self._config = dict(config) if trust_remote_code else without_code(dict(config))
        self._inputs = [*inputs, *([companions] if companions is not None else [])]
        self._force = force
        self._folder: AtomicOutput | None = None
        with self._disk_errors():
            self._companions = None
            if companions is not None:
                self._companions = find_companions(companions, trust_remote_code=trust_remote_code)
            check_output(self.path, self._inputs, force=force)

    def __enter__(self) -> Self:
        with self._disk_errors():
            check_output(self.path, self._inputs, force=self._force)
            try:
                self._folder = AtomicOutput(self.path, folder=True)
                self._check_space()
                self._write_frame(self._folder.new)
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
        """Write a whole tensor. NaN or infinite values are an error unless `finite` is False."""
        shape = self._infos[name][1]
        if tuple(tensor.shape) != shape or self._written[name] or name not in self._unwritten:
            raise ValueError(f"{name!r} of shape {tuple(tensor.shape)}: expected {shape}, once, at one go")
        self._put(name, 0, tensor, finite=finite)

    def write_flat(self, name: str, start: int, tensor: torch.Tensor) -> None:
        """Write the next numbers of a flattened tensor; the caller has checked that they are finite."""
        size, stop = math.prod(self._infos[name][1]), start + tensor.numel()
        fits = tensor.ndim == 1 and stop <= size and start == self._written[name]
        if not fits or name not in self._unwritten:
            raise ValueError(
                f"numbers {start}:{stop} of {name!r}: expected those of {size} from {self._written[name]} on"
            )
        self._put(name, start, tensor, finite=False)

    def _put(self, name: str, start: int, tensor: torch.Tensor, *, finite: bool) -> None:
        """Write numbers of a flattened tensor from `start` on."""
        dtype, shape = self._infos[name]
        if self._folder is None or tensor.dtype != dtype:
            raise ValueError(f"{name!r} as {tensor.dtype}: expected {dtype}, inside the `with` block")
        data = tensor.detach().cpu().contiguous().reshape(-1)
        if finite:
            overflow = "float16 ends at 65504, choose bfloat16 or float32"
            check_finite(data, name, overflow if dtype == torch.float16 else "nothing is written")
        file, offset = self._places[name]
        with self._disk_errors():
            write_at(self._folder.new / file, offset + start * dtype.itemsize, data.view(torch.uint8))
        self._written[name] = start + data.numel()
        if self._written[name] == math.prod(shape):
            self._unwritten.remove(name)

    def _write_frame(self, folder: Path) -> None:
        """All but the data: headers in files of their final size, index, configuration, companions."""
        for shard in self._shards:
            with (folder / shard.file).open("xb") as stream:
                stream.write(shard.header)
                stream.truncate(shard.size)
        if len(self._shards) > 1:
            total = sum(nbytes(*tensor) for tensor in self._infos.values())
            weight_map = {name: file for name, (file, _) in sorted(self._places.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_object(folder / "model.safetensors.index.json", index)
        write_object(folder / "config.json", self._config)
        if self._companions is not None:
            copy_companions(self._companions, folder)
        for name, text in self._documents.items():
            (folder / name).write_text(text, encoding="utf-8")

    def _check_space(self) -> None:
        sizes = [shard.size for shard in self._shards] + [len(text.encode()) for text in self._documents.values()]
        sizes += [2 * len(str(self._config)), sum(len(name) + _INDEX_LINE for name in self._infos)]
        sizes += self._companions.sizes if self._companions is not None else []
        needed = sum(_BLOCK * math.ceil(size / _BLOCK) for size in sizes) + _FRAME
        free = shutil.disk_usage(self.path.parent).free
        if free < needed:
            raise CheckpointError(
                f"output {self.path} needs {needed / 1e6:.3g} MB, the disk has {free / 1e6:.3g} MB free: "
                "make room or choose another disk"
            )

    def _commit(self) -> None:
        if self._unwritten:
            names = [name for name in self.order if name in self._unwritten]
            raise ValueError(f"{len(names)} tensors were not written, the first {names[0]!r}")
        assert self._folder is not None
        with self._disk_errors():
            self._folder.flush()
            check_output(self.path, self._inputs, force=self._force)
            commit_with(self._folder, self._files)

    def _discard(self) -> None:
        if self._folder is not None:
            self._folder.discard()
            self._folder = None

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


def check_output(out: Path, inputs: list[Path], *, force: bool) -> None:
    """Raise if the output would overwrite an input, a file, or (without `force`) a folder that is not empty."""
    for folder in inputs:
        resolved = folder.resolve()
        if out == resolved or out.is_relative_to(resolved):
            raise CheckpointError(f"output {out} is the input {folder} or inside it: choose another folder")
        links = (file.resolve() for file in folder.iterdir()) if folder.is_dir() else ()
        if any(path.is_relative_to(out) for path in (resolved, *links)):
            raise CheckpointError(f"input {folder} lies inside the output {out}: choose another folder")
    recover(out)
    remove_obsolete(out)
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"output {out} is a file, expected a folder: choose another name")
    if any(out.iterdir()) and not force:
        raise CheckpointError(
            f"output {out} exists and is not empty: choose another name, or use --force to replace it"
        )
    copied = [find_companions(folder, trust_remote_code=True) for folder in inputs if folder.is_dir()]
    if unknown := find_unknown(out, copied):
        # A typing error (`-o ~ --force`) must not delete a home folder.
        shown = ", ".join(unknown[:_MAX_SHOWN]) + (f" and {n} more" if (n := len(unknown) - _MAX_SHOWN) > 0 else "")
        raise CheckpointError(
            f"output {out} holds {shown}, which no checkpoint of isobasin has, so it is not replaced: "
            "move or delete that, or choose another folder"
        )
    if any(out.iterdir()) and not is_checkpoint(out):
        raise CheckpointError(
            f"output {out} holds no config.json with weights, so it is no checkpoint: remove it yourself, or choose "
            "another folder"
        )


# -- shards ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """The plan of one file: its header, its size, and the offset of each tensor, in the order on disk."""

    file: str
    header: bytes
    size: int
    offsets: Mapping[str, int]


def parse_size(size: int | str, name: str = "max_shard_size") -> int:
    """A number of bytes, given as a number or with a unit, as in Hugging Face."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Z]*)", str(size).strip().upper())
    if match is None or match[2] not in _UNITS or (n_bytes := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise CheckpointError(f"{name} {size!r} is not a size: give bytes, or words such as 5GB or 200MB")
    return n_bytes


def plan_shards(tensors: Tensors, max_size: int) -> tuple[Shard, ...]:
    """Fill shards of at most `max_size` bytes of data in the given order; a larger tensor gets its own."""
    if not tensors:
        raise ValueError("a checkpoint without tensors")
    for name, (dtype, _) in tensors.items():
        if not name or name == "__metadata__" or dtype not in SAFETENSORS_NAMES:
            raise ValueError(f"tensor {name!r} of {dtype} has no place in a safetensors file")
    groups: list[list[str]] = [[]]
    room = max_size
    for name, tensor in tensors.items():
        size = nbytes(*tensor)
        if size > room and groups[-1]:
            groups.append([])
            room = max_size
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return (_shard("model.safetensors", groups[0], tensors),)
    return tuple(
        _shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", names, tensors)
        for i, names in enumerate(groups, start=1)
    )


def _shard(file: str, names: list[str], tensors: Tensors) -> Shard:
    # Wide formats first: each tensor then begins at a multiple of its item size, which memory mapping needs.
    placed = sorted(names, key=lambda name: -tensors[name][0].itemsize)
    header, offsets = encode_header({name: tensors[name] for name in placed})
    return Shard(file, header, len(header) + sum(nbytes(*tensors[name]) for name in names), offsets)
