"""A folder of our own model: config.json beside model.safetensors."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError
from .config import ModelConfig

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


def write_folder(folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write both files aside, then move them into place: a save that fails leaves the old ones alone."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    text = json.dumps(config.to_dict() | {"dtype": dtype}, indent=2) + "\n"
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as aside:
            save_file(contiguous, Path(aside, WEIGHTS_NAME), metadata={"format": "pt"})
            Path(aside, CONFIG_NAME).write_text(text, encoding="utf-8")
            for name in (WEIGHTS_NAME, CONFIG_NAME):
                os.replace(Path(aside, name), folder / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} can not be written ({error}): choose another folder") from error


def read_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    try:
        settings = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = load_file(folder / WEIGHTS_NAME)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} can not be read ({error}), expected {CONFIG_NAME} and {WEIGHTS_NAME} of a saved model"
        ) from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{folder / CONFIG_NAME} holds {settings!r:.40}, expected a JSON object")
    return ModelConfig.from_dict(settings), tensors
