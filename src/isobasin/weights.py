"""A model as this project sees it: an architecture, and its tensors by full name, read when asked for."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from isobasin.arch import FAMILIES, Architecture, Family, Index, Names, describe, family_of, of_stored_class, resolve
from isobasin.arch.user_family import use_family, use_listed_families
from isobasin.arguments import checks_arguments
from isobasin.checkpoint import (
    Adapter,
    Checkpoint,
    CheckpointWriter,
    Companions,
    TensorInfo,
    check_kept,
    dtype_name,
    find_companions,
    open_checkpoint,
    output_dtype,
    with_dtype,
)
from isobasin.checkpoint.gguf import read_gguf
from isobasin.display import Shown, Summary
from isobasin.errors import ArchitectureError, CheckpointError, brief
from isobasin.files import Content
from isobasin.live import check_live
from isobasin.views import Change, ReadOnce, Tensors, View, room

MEMORY = 2**29  # bytes of the host that a model may take to be read only once
READERS = 8  # threads that read a model onto an accelerator


@dataclass(frozen=True, repr=False)
class Weights(Shown, Mapping[str, Tensor]):
    """The tensors of a model by the names of its patterns. Immutable: what changes a model makes a new one.

    `changed` names the tensors that are no longer bitwise those of the source, and `exact` says whether
    changing them rounded nothing. `memory` are the bytes of the host that one copy of the model may take while it is
    worked on; a larger model is read tensor by tensor, several times.
    """

    arch: Architecture
    config: Mapping[str, Any]
    names: Names
    tensors: Tensors
    dtypes: Mapping[str, torch.dtype]
    checkpoint: Checkpoint | None = None
    changed: frozenset[str] = field(default_factory=frozenset)
    exact: bool = True
    memory: int = MEMORY
    note: str = ""  # how the numbers were made, where they are not those of a file

    def __getitem__(self, name: str) -> Tensor:
        plain = self.arch.plain_gains.get(name)
        return self.tensors[name] if plain is None else torch.ones(plain)

    def __iter__(self) -> Iterator[str]:
        return iter(self.arch.tensors)

    def __len__(self) -> int:
        return len(self.arch.tensors)

    def stored(self, name: str) -> Tensor:
        """A tensor as files hold it: gains of some families are stored less 1."""
        offset = self.arch.offset(name)
        return self[name] - offset if offset else self[name]

    def disk_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor on disk that holds this one, which may hold others too."""
        return self.arch.stack_of[name].shape if name in self.names.slices else self.arch.shapes[name]

    def assembled(self, disk: str, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor that a file has under this name, from those of the architecture that it holds."""
        first, *others = self.names.by_disk.get(disk) or (self.names.copies[disk],)
        tensor = read(first)
        if first not in self.names.slices:
            return tensor
        whole = torch.empty(self.disk_shape(first), dtype=tensor.dtype)
        whole[self.names.slices[first]] = tensor
        for name in others:
            whole[self.names.slices[name]] = read(name)
        return whole

    def held(self, names: Iterable[str]) -> "Weights":
        """The same model with some tensors read into memory, once, for whoever needs them often."""
        held = {name: self[name] for name in names}
        return replace(self, tensors=View(self.tensors, {name: lambda _, t=t: t for name, t in held.items()}))  # type: ignore[misc]

    def resident(self, device: torch.device) -> "Weights":
        """The same model, read once, in its stored types, and kept on this device; itself where there is no room."""
        shapes = self.arch.shapes
        n_bytes = sum(torch.Size(shapes.get(name, ())).numel() * t.itemsize for name, t in self.dtypes.items())
        if isinstance(self.tensors, ReadOnce) or n_bytes > room(device, self.memory):
            return self
        source = self.tensors if device.type == "cpu" else _ReadAhead(self.tensors, list(self.dtypes))
        kept = ReadOnce(source, device)
        for name in self.dtypes if device.type != "cpu" else ():
            kept[name]
        return replace(self, tensors=kept)

    def summary(self) -> Summary:
        """Sizes, type, source, and how many tensors were changed."""
        sizes = self.arch.sizes
        facts: dict[str, object] = {
            "sizes": f"{sizes.n_layers} layers, width {sizes.d_model}, {sizes.n_heads} heads",
            "parameters": f"{self.n_params:,}, {dtype_name(self.dtype)}",
            "source": self.path or "memory",
        }
        facts |= {"note": self.note} if self.note else {}
        if self.changed:
            rounded = "nothing rounded" if self.exact else "rounded when they are stored"
            facts["changed"] = f"{len(self.changed)} of {len(self)} tensors, {rounded}"
        return Summary(f"{self.arch.family} model, {self.arch.positions} positions", facts)

    @property
    def family(self) -> Family:
        """The record of its model type."""
        return FAMILIES[self.arch.family]

    @property
    def settings(self) -> dict[str, Any]:
        """The config keys that change the function without changing a shape, with their values here."""
        return self.family.settings_of(self.config)

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The config of the language model: the whole, or that of the part of a multimodal model."""
        return self.family.language_model(self.config)[1]

    @property
    def path(self) -> Path | None:
        """The folder it was read from."""
        return self.checkpoint.path if self.checkpoint else None

    @property
    def companions(self) -> Companions | None:
        """The files beside the weights that `save` copies, and those that it leaves out."""
        return find_companions(self.path) if self.path else None

    @property
    def n_params(self) -> int:
        """Weights of the model: tied ones once, buffers not at all."""
        return sum(
            torch.Size(self.arch.shapes[name]).numel()
            for name, pattern in self.arch.tensors.items()
            if not pattern.buffer
        )

    @property
    def dtype(self) -> torch.dtype:
        """The widest type among the weights; a buffer (a float32 table in a bfloat16 model) has no say."""
        return _widest(self.dtypes, self.arch)

    @property
    def dtype_run(self) -> torch.dtype:
        """The type in which transformers runs the model: the one that its config names, or else that of its weights.
        Our own model runs in float32."""
        if self.family.own:
            return torch.float32
        named = next((each for key in ("dtype", "torch_dtype") if (each := self.config.get(key))), None)
        kinds = {dtype_name(each): each for each in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
        return kinds.get(str(named).removeprefix("torch."), self.dtype)

    @checks_arguments
    def output_dtypes(self, policy: str = "auto") -> dict[str, torch.dtype]:
        """The type each tensor is written in: `keep`, a type's name, or `auto`.

        `auto` keeps the types where nothing was rounded, and otherwise widens to at least float32: a rotated
        bfloat16 weight stored as bfloat16 again is another function.
        """
        return {
            name: dtype if self.arch.tensors[name].buffer else self._output_dtype(policy, dtype)
            for name, dtype in self.dtypes.items()
        }

    def _output_dtype(self, policy: str, dtype: torch.dtype) -> torch.dtype:
        if policy == "auto":
            policy = "keep" if self.exact or torch.finfo(dtype).bits >= 32 else "float32"
        return output_dtype(policy, dtype)

    def _output_config(self, policy: str, written: Mapping[str, torch.dtype]) -> dict[str, Any]:
        """The config; its dtype follows what was written. One that named another type than its weights have
        (transformers then converts on loading) still does, unless they were rounded or a type was asked for."""
        widest = _widest(written, self.arch)
        stays = widest == self.dtype and (policy == "keep" or (policy == "auto" and self.exact))
        unnamed = widest == self.dtype and not any(self.config.get(key) for key in ("dtype", "torch_dtype"))
        return dict(self.config) if stays or unnamed else with_dtype(self.config, widest)

    @checks_arguments
    def state_dict(self, policy: str | torch.dtype = "auto") -> dict[str, Tensor]:
        """Every tensor under its name on disk, in memory; all but buffers in a type, where one is given."""
        if isinstance(policy, torch.dtype):
            buffers = {name for name, pattern in self.arch.tensors.items() if pattern.buffer}
            dtypes = {n: t if n in buffers or not t.is_floating_point else policy for n, t in self.dtypes.items()}
        else:
            dtypes = self.output_dtypes(policy)

        def converted(name: str) -> Tensor:
            return self.stored(name).to("cpu", dtypes[name])

        found = {disk: self.assembled(disk, converted) for disk in self.names.by_disk}
        return found | {copy: found[self.names.on_disk[target]] for copy, target in self.names.copies.items()}

    def _is_plain(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a tensor can be copied from disk to disk, in blocks: unchanged, in its own type, not tied."""
        return (
            self.checkpoint is not None
            and name not in self.changed
            and dtype == self.dtypes[name]
            and 0 not in self.arch.shapes[name]
            and not self.arch.tensors[name].buffer
            and name not in self.names.copies.values()
        )

    def _converted(
        self,
        name: str,
        dtypes: Mapping[str, torch.dtype],
        disk: str,
        watch: Callable[[str, Tensor | None], None] | None,
    ) -> Tensor:
        """A tensor in the type in which it is written."""
        exact = self.stored(name)
        if not self.arch.tensors[name].buffer:
            check_kept(exact, dtypes[name], disk)
        tensor = exact.to(dtypes[name]).cpu().contiguous()
        if watch:
            watch(name, tensor)
        return tensor

    @checks_arguments
    def save(
        self,
        out: str | Path,
        *,
        dtype: str = "auto",
        force: bool = False,
        max_shard_size: int | str = "5GB",
        trust_remote_code: bool = False,
        inputs: Sequence[Path] = (),
        files: Mapping[Path, Content] | None = None,
        watch: Callable[[str, Tensor | None], None] | None = None,
    ) -> dict[str, torch.dtype]:
        """Write a complete folder, one tensor in memory at a time; gives back the types that were written.

        The other files of the model's folder are copied (`companions` lists them, and those that are not copied, with
        their reasons); Python files and keys that name code only with `trust_remote_code`. `inputs` are further folders
        that must not be overwritten. `files` are written elsewhere, by path, and appear together with the folder.
        `watch` is shown every tensor, by the name of its pattern, as it is written; None where it is copied.
        """
        dtypes = self.output_dtypes(dtype)
        source = {disk: names[0] for disk, names in self.names.by_disk.items()} | dict(self.names.copies)
        infos = {disk: (dtypes[name], self.disk_shape(name)) for disk, name in source.items()}
        with CheckpointWriter(
            out,
            infos,
            config=self._output_config(dtype, dtypes),
            companions=self.path,
            files=files,
            inputs=[*([self.path] if self.path else []), *inputs],
            force=force,
            max_shard_size=max_shard_size,
            trust_remote_code=trust_remote_code,
        ) as writer:
            for disk in writer.order:
                held = self.names.by_disk.get(disk, (source[disk],))
                if all(self._is_plain(name, dtypes[name]) for name in held):
                    assert self.checkpoint is not None
                    for start, block in _blocks(self.checkpoint, disk):
                        writer.write_flat(disk, start, block)
                    for name in held:
                        if watch:
                            watch(name, None)
                    continue
                tensor = self.assembled(disk, partial(self._converted, dtypes=dtypes, disk=disk, watch=watch))
                writer.write(disk, tensor, finite=not self.arch.tensors[held[0]].buffer)
        return dtypes


class _ReadAhead(Mapping[str, Tensor]):
    """Tensors that are asked for once and in this order: the next few are being read by threads meanwhile."""

    def __init__(self, base: Tensors, order: list[str]) -> None:
        self._base, self._order = base, iter(order)
        self._pool = ThreadPoolExecutor(READERS)
        self._coming: dict[str, Future[Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        for following in islice(self._order, READERS - len(self._coming)):
            self._coming[following] = self._pool.submit(self._base.__getitem__, following)
        coming = self._coming.pop(name, None)
        return self._base[name] if coming is None else coming.result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def _widest(dtypes: Mapping[str, torch.dtype], arch: Architecture) -> torch.dtype:
    weights = (dtype for name, dtype in dtypes.items() if not arch.tensors[name].buffer)
    return max(weights, key=lambda d: torch.finfo(d).bits)


def _blocks(checkpoint: Checkpoint, disk: str, n_bytes: int = 2**24) -> Iterator[tuple[int, Tensor]]:
    """A stored tensor, flattened, in blocks of this many bytes."""
    info = checkpoint.infos[disk]
    size, step = torch.Size(info.shape).numel(), n_bytes // info.dtype.itemsize
    for start in range(0, size, step):
        block = checkpoint.flat(disk, start, min(start + step, size))
        checkpoint.check(disk, block)
        yield start, block


def _by_pattern(source: Tensors, arch: Architecture, names: Names) -> Tensors:
    """The tensors of a source under the names of the patterns; ties are checked where they are read."""

    def read(name: str, disk: str) -> Tensor:
        if name in names.slices:
            return _sliced(source, disk, names.slices[name])
        if isinstance(source, Checkpoint):
            tensor = source.read(disk, finite=not arch.tensors[name].buffer)
        else:
            tensor = source[disk]
        for copy, target in names.copies.items():
            if target == name and not torch.equal(source[copy], tensor):
                raise CheckpointError(
                    f"{copy}: config.json ties it to {disk}, but the two differ; "
                    "set tie_word_embeddings to false, or remove one of them"
                )
        offset = arch.offset(name)
        return tensor.double() + offset if offset else tensor

    return View({}, {name: lambda _, n=name, disk=disk: read(n, disk) for name, disk in names.on_disk.items()})  # type: ignore[misc]


def _sliced(source: Tensors, disk: str, index: Index) -> Tensor:
    """A part of a tensor; of a file only the rows that hold it are read."""
    if not isinstance(source, Checkpoint):
        return source[disk][index]
    first, *others = index
    size = source.infos[disk].shape[0]
    if isinstance(first, int):
        return source.rows(disk, first, first + 1)[(0, *others)]
    rows = range(size)[first]
    return source.rows(disk, rows.start, rows.stop)[(slice(None, None, rows.step), *others)]


@runtime_checkable
class _PreTrainedModel(Protocol):
    config: Any

    def state_dict(self) -> dict[str, Tensor]: ...


ModelSource = Weights | str | Path | Mapping[str, Tensor] | _PreTrainedModel


def load(
    source: ModelSource, config: Mapping[str, Any] | None = None, *, family: Family | str | Path | None = None
) -> Weights:
    """A model from a Hugging Face folder or cached hub id (lazily), a `PreTrainedModel`, or tensors and a config.
    `base+adapter` is a model with a LoRA adapter of PEFT merged into it; a file NAME.gguf needs the package gguf.

    A folder is read when its tensors are asked for. A model in memory, or a dictionary of tensors, is copied to the
    CPU: what is loaded does not change when training goes on. `family` is one of your own, or a file that defines it;
    it is then known to every later call.
    """
    if isinstance(source, Weights):
        return source
    use_listed_families()
    if family is not None:
        use_family(family)
    if isinstance(source, str | Path) and "+" in str(source) and not Path(source).exists():
        base, _, adapter = str(source).rpartition("+")
        return with_adapter(load(base), Adapter.open(adapter))
    if isinstance(source, str | Path) and is_gguf(source):
        return _from_gguf(Path(source))
    if isinstance(source, str | Path):
        try:
            checkpoint = open_checkpoint(source)
        except OSError as error:  # no permission to look, a name too long, a loop of links
            raise CheckpointError(
                f"{source!s:.200} can not be read ({error.strerror}): expected a checkpoint folder that you may read"
            ) from error
        return _weights(checkpoint, checkpoint.config, checkpoint)
    if isinstance(source, _PreTrainedModel) and not isinstance(source, Mapping):
        config = config or source.config.to_dict() | _class_of(source)
        tensors: Tensors = _file_tensors(source, family_of(config))
        check_live(source)
    else:
        tensors = source
    if not isinstance(tensors, Mapping):
        raise CheckpointError(f"{brief(source)} is no model: expected a folder, a hub id, a PreTrainedModel or tensors")
    if config is None:
        raise CheckpointError("a state dict needs its config beside it: load(tensors, config)")
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{brief(config)} is no config: expected what config.json holds, a dictionary")
    if isinstance(tensors, dict):
        tensors = _copied(tensors)
    return _weights(tensors, deepcopy(dict(config)), None)


def is_gguf(source: str | Path) -> bool:
    """Whether a model is given as the path of a GGUF file."""
    return Path(source).suffix.lower() == ".gguf"


def _from_gguf(file: Path) -> Weights:
    """A language model from a GGUF file, whole."""
    found = read_gguf(file)
    try:
        return replace(_weights(found.tensors, found.config, None), note=found.note)
    except ArchitectureError as error:
        raise ArchitectureError(f"{file}: {error}") from error


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, in memory of their own; names that share a tensor share its copy."""
    copies: dict[tuple[object, ...], Tensor] = {}
    if wrong := next((name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)), None):
        raise CheckpointError(f"{wrong!s:.80}: is {brief(tensors[wrong])}, expected a tensor")
    _require_dense(tensors)
    if empty := next((name for name, tensor in tensors.items() if tensor.is_meta), None):
        raise CheckpointError(
            f"{empty}: is on the device meta and has no numbers; load the weights into the model first"
        )

    def copied(tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return {name: copied(tensor) for name, tensor in tensors.items()}


def _require_dense(tensors: Mapping[str, Tensor]) -> None:
    if odd := next((name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)), None):
        found = type(tensors[odd]).__name__
        raise CheckpointError(f"{odd}: is a {found}, expected a tensor; quantised models are not supported")
    if odd := next((name for name, tensor in tensors.items() if tensor.layout != torch.strided), None):
        raise CheckpointError(f"{odd}: has the layout {tensors[odd].layout}, expected a dense tensor; see to_dense()")


def _file_tensors(model: Any, family: Family) -> dict[str, Tensor]:
    """The tensors of a model of transformers as its files have them: it may hold several of them as one, and lists a
    tied head, which no file has."""
    tensors = dict(model.state_dict())
    _require_dense(tensors)
    if adapter := next((name for name in tensors if ".lora_A." in name), None):
        raise CheckpointError(
            f"{adapter}: the model holds adapters of PEFT beside its weights; merge them first, with "
            "`model.merge_and_unload()`, or save the adapter and give base+adapter"
        )
    head = tensors.get(family.own_head)
    if head is not None and any(t.data_ptr() == head.data_ptr() for n, t in tensors.items() if n != family.own_head):
        del tensors[family.own_head]
    if not family.fused:
        return tensors
    loading = sys.modules["transformers.core_model_loading"]  # the model is one of transformers
    return dict(loading.revert_weight_conversion(model, tensors))


def _class_of(model: object) -> dict[str, list[str]]:
    """`architectures` as `save_pretrained` would write it: a fresh model in memory does not name its class."""
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.")]
    return {"architectures": [kinds[0].__name__]} if kinds else {}


def _weights(tensors: Tensors, config: Mapping[str, Any], checkpoint: Checkpoint | None) -> Weights:
    infos: Mapping[str, TensorInfo] | Tensors = checkpoint.infos if checkpoint else tensors
    config = of_stored_class(config, infos)
    arch, names = describe(config, {name: tuple(info.shape) for name, info in infos.items()})
    dtypes = {name: infos[disk].dtype for name, disk in names.on_disk.items()}
    for name, dtype in dtypes.items():
        if not arch.tensors[name].buffer and (not dtype.is_floating_point or dtype.itemsize < 2):
            raise CheckpointError(
                f"{names.on_disk[name]}: found {dtype_name(dtype)} numbers, expected floating ones of at "
                "least 16 bits: dequantise or convert the model first"
            )
    return Weights(arch, dict(config), names, _by_pattern(tensors, arch, names), dtypes, checkpoint)


def adapted_names(weights: Weights, adapter: Adapter) -> dict[str, str]:
    """The tensor of a model for each tensor that an adapter changes, `MODULE.weight` or `MODULE.bias`."""
    wanted = [f"{module}.weight" for module in sorted({*adapter.modules, *adapter.stored})] + [
        f"{module}.bias" for module in adapter.biased
    ]
    found = resolve(weights.family, weights.arch, wanted)
    places = {disk: name for name, disk in found.on_disk.items() if name not in found.slices}
    for key in wanted:
        name = places.get(key)
        if name is None or name not in weights.arch.tensors or (key != name and weights.arch.tied(name)):
            raise CheckpointError(
                f"{key}: the adapter changes this tensor, which is no weight of its own in the {weights.arch.family} "
                "model; expected an adapter that was made for this architecture"
            )
    return {key: places[key] for key in wanted}


def with_adapter(weights: Weights, adapter: Adapter) -> Weights:
    """The model with the adapter merged into its weights, computed when a tensor is read.

    PEFT stores the weight of a head or an embedding that has an adapter, too. It must be that of the model.
    """
    names = adapted_names(weights, adapter)
    for module in adapter.stored:
        base, stored = weights[names[f"{module}.weight"]], adapter.tensors[f"{module}.weight"]
        if base.shape != stored.shape or not torch.equal(base.double(), stored.double()):
            raise CheckpointError(
                f"{module}: the adapter stores the weight of its base, which is not that of this model; give the base "
                "that it was trained on, or merge it with PEFT (merge_and_unload)"
            )

    def changed(module: str, name: str) -> Change:
        def merged(tensors: Tensors) -> Tensor:
            base = tensors[name].to("cpu", torch.float64)
            try:
                return base + adapter.factors(module).product(
                    tuple(base.shape), weights.arch.tensors[name].inputs_first
                )
            except CheckpointError as error:
                raise CheckpointError(f"{module}: {error}; expected an adapter for this model") from error

        return merged

    def replaced(module: str) -> Change:
        return lambda _: adapter.tensors[f"{module}.bias"].double()

    changes = {names[f"{module}.weight"]: changed(module, names[f"{module}.weight"]) for module in adapter.modules}
    changes |= {names[f"{module}.bias"]: replaced(module) for module in adapter.biased}
    tensors: Tensors = View(weights, changes)
    return replace(weights, tensors=tensors, changed=weights.changed | set(changes), exact=False)


def read_part(weights: Weights) -> Weights:
    """The model as its outputs see it, for comparisons: without tensors that its class does not read, and with zeros
    in rows that no input reaches. It may not run: transformers wants all tensors."""
    arch, rows = weights.arch.read_part, weights.arch.unread_rows
    if arch is weights.arch and not any(rows.values()):
        return weights

    def zeroed(name: str) -> Tensor:
        tensor = weights[name].clone()
        tensor[rows[name]] = 0
        return tensor

    tensors: Tensors = View(weights, {name: lambda _, n=name: zeroed(n) for name in rows if rows[name]})  # type: ignore[misc]
    names = replace(weights.names, on_disk={n: d for n, d in weights.names.on_disk.items() if n in arch.tensors})
    dtypes = {name: weights.dtypes[name] for name in arch.tensors}
    changed = weights.changed | {name for name in rows if rows[name]}
    return replace(weights, arch=arch, names=names, tensors=tensors, dtypes=dtypes, changed=changed)


def is_tied(weights: Weights) -> bool:
    """Whether the head and the embedding are one tensor."""
    return any(weights.arch.tied(name) for name in weights.arch.tensors)


def untied(weights: Weights) -> Weights:
    """The same model with a head of its own; a model that is not tied is returned as it is.

    While embedding and head are one tensor the last gain can not fold into it, and the stream keeps permutations (with
    signs for RMSNorm). Apart they leave rotations: a larger group for the same function. The config then says so, and
    transformers reads the head from the file. Tensors go by their full names, as a folder without prefixes has no place
    for a head. Nothing is read yet.
    """
    aliases = {alias: name for alias, name in weights.arch.aliases.items() if name in weights.arch.tensors}
    if not any(weights.arch.tied(name) for name in aliases.values()):
        return weights
    config = weights.family.untied_config(weights.config)
    shapes = weights.arch.stored_shapes()
    arch, names = describe(config, shapes | {alias: shapes[name] for alias, name in aliases.items()})
    if any(arch.tied(name) for name in arch.tensors):
        raise ArchitectureError(
            f"{weights.family.class_of(weights.config)}: transformers ties the head to the embedding whatever the "
            "config says; a head of its own is not supported"
        )
    same = {name for name in arch.tensors if weights.names.on_disk.get(name) == names.on_disk[name]}
    return replace(
        weights,
        arch=arch,
        config=config,
        names=replace(names, copies={}),
        tensors=View(weights, {alias: lambda t, n=name: t[n] for alias, name in aliases.items()}),  # type: ignore[misc]
        dtypes={name: weights.dtypes[aliases.get(name, name)] for name in arch.tensors},
        changed=weights.changed | (set(arch.tensors) - same),  # these can not be copied from file to file
    )
