"""Old `pytorch_model.bin` files: unpickled by torch's restricted loader only, never by pickle itself."""

from pathlib import Path

import torch

from isobasin.checkpoint.dtypes import SAFETENSORS_NAMES, dtype_problem
from isobasin.checkpoint.header import TensorInfo, check_name, nbytes
from isobasin.errors import CheckpointError

_ZIP_MAGIC = b"PK\x03\x04"


class PickledFiles:
    """The state dicts of `.bin` files.

    Files in zip format (torch ≥ 1.6) are mapped: nothing is read before it is used. The older format can
    only be read whole; of those files the last one used is kept, so memory is bounded by one file.
    """

    def __init__(self) -> None:
        self._mapped: dict[Path, dict[str, torch.Tensor]] = {}
        self._whole: dict[Path, dict[str, torch.Tensor]] = {}

    def infos(self, file: Path) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(tensor.dtype, tuple(tensor.shape), file) for name, tensor in self.tensors(file).items()
        }

    def tensors(self, file: Path) -> dict[str, torch.Tensor]:
        """The tensors in `file`. They share memory with this object: clone before handing on."""
        kept = self._mapped if _is_zip(file) else self._whole
        if file not in kept:
            self._whole.clear()
            kept[file] = _load(file)
        return kept[file]


def _is_zip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(str(file), map_location="cpu", weights_only=True, mmap=_is_zip(file))
    except Exception as error:  # a damaged or hostile pickle can raise anything
        raise CheckpointError(
            f"{file} can not be read safely ({_reason(error)}): "
            "re-download it, or convert it to safetensors where it is trusted"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, expected a dictionary of tensors")
    size = file.stat().st_size
    return {name: _checked(name, value, file, size) for name, value in found.items()}


def _reason(error: Exception) -> str:
    """The first telling line of torch's long explanations."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return f"{[*telling, *lines, type(error).__name__][0]:.160}"


def _checked(name: object, value: object, file: Path, size: int) -> torch.Tensor:
    if not isinstance(name, str):
        raise CheckpointError(f"{file} has a key {name!r:.80}, expected names of tensors: is it a state dict?")
    check_name(name, file)
    # Exactly these types: a subclass could bring its own behaviour along.
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(
            f"{name!r} in {file} is a {type(value).__name__}, expected a tensor: save only model.state_dict()"
        )
    assert isinstance(value, torch.Tensor)
    if value.is_quantized or value.dtype not in SAFETENSORS_NAMES:
        raise CheckpointError(f"tensor {name!r} in {file} {dtype_problem(str(value.dtype))}")
    if value.layout is not torch.strided or value.device.type != "cpu":
        raise CheckpointError(f"tensor {name!r} in {file} is {value.layout} on {value.device}: store it densely")
    # Strides of zero let a few bytes claim to be terabytes, for which the copy made on reading would ask.
    if nbytes(value.dtype, tuple(value.shape)) > size:
        raise CheckpointError(f"tensor {name!r} in {file} claims to be larger than its file: re-download it")
    return value.detach()
