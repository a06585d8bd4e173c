"""The provenance of a result: hashes of the models (also used as cache keys), versions, the source commit."""

import hashlib
import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from isobasin import __version__
from isobasin.checkpoint import dtype_name
from isobasin.symmetries import symmetry
from isobasin.weights import Weights

# Keys of config.json that do not change what the model computes.
_IGNORED_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def model_hash(weights: Weights) -> str:
    """sha256 of the configuration and of every tensor (name, type, shape, bytes)."""
    config = {k: v for k, v in weights.config.items() if k not in _IGNORED_KEYS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {dtype_name(tensor.dtype)} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_provenance(weights: Weights) -> dict[str, Any]:
    """One entry of `models` in a result file."""
    return {
        "name": weights.path.name if weights.path else weights.arch.family,
        "path": str(weights.path) if weights.path else None,
        "sha256": model_hash(weights),
        "family": weights.arch.family,
        "positions": weights.arch.positions,
        "group": str(symmetry(weights.arch)),
        "n_params": weights.n_params,
        "dtype": dtype_name(weights.dtype),
    }


def provenance(*, command: str, seed: int, device: str, seconds: float) -> dict[str, Any]:
    """The entry `provenance` of a result file: what is needed to compute the result again."""
    return {
        "version": __version__,
        "git": source_commit(),
        "command": command,
        "seed": seed,
        "device": device,
        "dtype": "float32",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "seconds": round(seconds, 3),
    }


def source_commit() -> str | None:
    """The git commit of this package, with a + if its files have changed since; None outside a checkout."""
    here = Path(__file__).parent
    try:
        top = _git(here, "rev-parse", "--show-toplevel")
        if not (here.is_relative_to(top) and _git(here, "ls-files", "--", Path(__file__).name)):
            return None
        changed = _git(here, "status", "--porcelain", "--", str(here.parent))
        return _git(here, "rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()
