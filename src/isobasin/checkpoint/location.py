"""Where a checkpoint lies: the folder behind a path or a hub id, and the weight files in it."""

from pathlib import Path

from isobasin.checkpoint.documents import read_object
from isobasin.errors import CheckpointError

# In the order of preference, which is that of transformers.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def find_folder(path: str | Path) -> Path:
    """The folder `path`, or the snapshot of the hub id `path` in the local Hugging Face cache."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{path} is a file, expected a checkpoint folder: give the folder it lies in")
    snapshot = _cached_snapshot(str(path))
    if snapshot is None:
        raise CheckpointError(
            f"{str(path)!r} is neither a folder nor a model in the local Hugging Face cache: "
            "check the path, or download it first (hf download ORG/NAME)"
        )
    return snapshot


def _cached_snapshot(hub_id: str) -> Path | None:
    try:
        from huggingface_hub import snapshot_download  # half a second to import, and rarely needed
    except ImportError:
        return None
    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except (OSError, ValueError):  # not in the cache; not a hub id
        return None


def find_weights(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The weight files of `folder`, and the file in which its index (if sharded) puts each tensor."""
    for name in _WEIGHTS:
        file = folder / name
        if file.is_file():
            return _read_index(file) if name.endswith(".json") else ([file], {})
    raise CheckpointError(f"{folder} holds no weights: expected one of {', '.join(_WEIGHTS)}")


def _read_index(index: Path) -> tuple[list[Path], dict[str, Path]]:
    weight_map = read_object(index, unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensors to files: re-download it")
    files = {name: _shard(index, name) for name in sorted(map(_as_name, weight_map.values()))}
    return list(files.values()), {tensor: files[name] for tensor, name in weight_map.items()}


def _as_name(value: object) -> str:
    # Whatever is not a string becomes a name that the check on names refuses.
    return value if isinstance(value, str) else f"/{value!r}"


def _shard(index: Path, name: str) -> Path:
    is_plain = name.isprintable() and not set(name) & set("/\\:") and name not in ("", ".", "..")
    if not is_plain:
        raise CheckpointError(
            f"{index} names the file {name!r:.80}, expected a plain name in the same folder: do not trust it"
        )
    file = index.parent / name
    if not file.is_file():
        raise CheckpointError(f"{file} is named in {index.name} but is not there: download the missing shard")
    return file
