"""Transforms on disk: one safetensors file, with the architecture it is for in its metadata."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from isobasin.arch import HeadSpace, Space
from isobasin.arch.architecture import Kind
from isobasin.errors import TransformError
from isobasin.files import SAFETENSORS_MARKS, atomic_write, check_output_file
from isobasin.symmetries.symmetry import group_of
from isobasin.symmetries.transform import Transform, Value

FORMAT = SAFETENSORS_MARKS["transform"]
VERSION = "1"
MAX_CONDITION = 1e6  # as of GL: beyond it float32 could not carry the element
_RANKS = {"index": 1, "scale": 1, "kv": 1, "queries": 2, "matrix": 2, "u": 1}
_ORDERS = ("index", "kv", "queries")


def save_transform(transform: Transform, path: str | Path, *, force: bool = False, inputs: Sequence[Path] = ()) -> None:
    """Write the file whole or not at all; an existing one only with `force`, if it is a transform, and none of the
    `inputs`."""
    path, what = Path(path), "the transform file"
    check_output_file(path, force=force, kind="transform", inputs=inputs, what=what, error=TransformError)
    atomic_write(path, encode_transform(transform), error=TransformError)


def encode_transform(transform: Transform) -> bytes:
    """The content of the file."""
    tensors = {
        f"element/{space}/{part}": _real(t)
        for space, g in transform.elements.items()
        for part, t in g.tensors().items()
    }
    for name, value in transform.gauge.items():
        tensors |= {f"gauge/{name}/before": value.before, f"gauge/{name}/after": value.after}
    # One entry: safetensors writes several in an order that changes from run to run.
    metadata = {FORMAT: json.dumps({"version": VERSION} | transform.header())}
    return save({name: t.contiguous() for name, t in tensors.items()}, metadata)


def load_transform(path: str | Path) -> Transform:
    """Read and check a transform: its format, its parts, its numbers and the groups of its elements."""
    path = Path(path)
    metadata, tensors = _read(path)
    if FORMAT not in metadata:
        raise TransformError(
            f"{path}: not a transform of this program (no entry {FORMAT} in its header); expected what "
            "--save-transform writes"
        )
    try:
        header = json.loads(metadata[FORMAT])
        if header["version"] != VERSION:
            raise ValueError(f"version {header['version']!r:.40}, expected {VERSION!r}")
        spaces = {name: _space(name, entry) for name, entry in header["spaces"].items()}
        _check_members(spaces)
        family = str(header["family"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise TransformError(f"{path}: its architecture can not be read ({error}); make the transform again") from error
    for name in tensors:
        if not name.startswith(("element/", "gauge/")):
            raise TransformError(f"{path}: holds {name!r:.80}, expected only element/… and gauge/…; make it again")
    transform = Transform(family, spaces, _elements(path, spaces, tensors), _gauge(path, tensors))
    try:
        transform.check_elements()
    except TransformError as error:
        raise TransformError(f"{path}: {error}") from error
    except RuntimeError as error:  # numbers of a format that torch does not compute with
        raise TransformError(f"{path}: its elements can not be read ({error!s:.160}); make it again") from error
    return transform


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        if not path.is_file():
            raise TransformError(f"{path}: no such transform file; expected what --save-transform writes")
        with safe_open(path, "pt") as file:
            # Copies, since a file does not promise the 16-byte alignment that complex numbers need.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return dict(file.metadata() or {}), tensors
    except (SafetensorError, OSError) as error:
        raise TransformError(
            f"{path}: not a transform file ({error}); expected what --save-transform writes"
        ) from error


def _space(name: str, entry: Mapping[str, Any]) -> Space | HeadSpace:
    members = {"members": tuple(entry["members"])} if "members" in entry else {}
    space = HeadSpace(**entry) if "n_heads" in entry else Space(**{**entry, **members})
    if isinstance(space, Space):
        sound = _counts(space.size, space.groups + 1) and space.kind in get_args(Kind)
        sound = sound and (not space.groups or space.size % space.groups == 0)
    else:
        sizes = (space.n_heads, space.n_kv_heads, space.d_head, space.rotary + 1, space.d_value + 1)
        sound = _counts(*sizes) and (not space.shared_rotary or 0 < space.rotary < space.d_head)
        sound = sound and (
            space.n_heads % space.n_kv_heads == 0 and space.rotary % 2 == 0 and space.rotary <= space.d_head
        )
    if not sound or space.name != name:
        raise ValueError(f"space {name} is {dict(entry)!r:.160}")
    return space


def _check_members(spaces: Mapping[str, Space | HeadSpace]) -> None:
    """Experts have a space of units each."""
    for space in spaces.values():
        if isinstance(space, Space) and space.members:
            units = [spaces.get(str(name)) for name in space.members]
            sound = all(each is not None and each.role == "units" for each in units)
            if not sound or not len(set(space.members)) == len(units) == space.size or space.kind != "permutation":
                raise ValueError(f"space {space.name} has members {space.members!r:.160}")


def _counts(*values: Any) -> bool:
    return all(type(value) is int and value >= 1 for value in values)


def _elements(path: Path, spaces: Mapping[str, Space | HeadSpace], tensors: dict[str, Tensor]) -> dict[str, Any]:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("element/"):
            _, space, part = name.split("/", 2)
            parts.setdefault(space, {})[part] = _complex(part, tensor)
    found = {}
    for space, pieces in parts.items():
        if space not in spaces:
            raise TransformError(f"{path}: element {space} belongs to no space of its architecture")
        _check_parts(path, space, spaces[space], pieces)
        try:
            found[space] = group_of(spaces[space]).element(pieces)
        except (KeyError, IndexError, RuntimeError) as error:
            raise TransformError(
                f"{path}: element {space} is incomplete ({error}); make the transform again"
            ) from error
    return found


def _check_parts(path: Path, name: str, space: Space | HeadSpace, pieces: Mapping[str, Tensor]) -> None:
    """Each part has as many axes as its kind, square matrices, one factor per kv head, and is well conditioned."""
    for part, tensor in pieces.items():
        head, _, leaf = part.rpartition(".")
        count = space.n_kv_heads if isinstance(space, HeadSpace) and head != "shared" else 1
        batch = (count,) if head and isinstance(space, HeadSpace) else ()
        square = leaf != "matrix" or tensor.shape[-1:] == tensor.shape[-2:-1]
        ranked = tensor.dim() == _RANKS.get(leaf, -1) + len(batch) and tensor.shape[: len(batch)] == batch
        if not (ranked and square and tensor.numel()):
            raise TransformError(
                f"{path}: element {name}: part {part!r:.80} has shape {tuple(tensor.shape)}, which its space does not "
                "have; make the transform again"
            )
        if leaf in _ORDERS and (tensor.is_floating_point() or tensor.is_complex()):
            raise TransformError(
                f"{path}: element {name}: part {part!r:.80} holds {str(tensor.dtype).removeprefix('torch.')} numbers, "
                "expected whole numbers; make the transform again"
            )
        size = tensor.abs() if leaf in ("scale", "u") else torch.ones(1)
        if bool((size > MAX_CONDITION * size.min()).any()):
            raise TransformError(
                f"{path}: element {name}: scales from {float(size.min()):.1e} to {float(size.max()):.1e} are too badly "
                f"conditioned, expected a ratio up to {MAX_CONDITION:.0e}; make the transform again"
            )


def _gauge(path: Path, tensors: dict[str, Tensor]) -> dict[str, Value]:
    names = sorted({n.removeprefix("gauge/").rpartition("/")[0] for n in tensors if n.startswith("gauge/")})
    try:
        return {
            name: Value(
                tensors[f"gauge/{name}/before"].to(torch.float64),
                tensors[f"gauge/{name}/after"].to(torch.float64),
            )
            for name in names
        }
    except KeyError as error:
        raise TransformError(f"{path}: {error} is missing; make the transform again") from error


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _complex(part: str, tensor: Tensor) -> Tensor:
    """A complex number was saved as two real ones; the last part of its name is `u`."""
    is_phase = part.rpartition(".")[2] == "u" and tensor.shape[-1:] == (2,)
    return torch.view_as_complex(tensor.to(torch.float64).contiguous()) if is_phase else tensor
