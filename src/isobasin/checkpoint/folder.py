"""A checkpoint folder on disk: where it lies, its weight files, its JSON documents and its companion files.

The content is untrusted: documents have a bounded size, file names stay inside the folder, code is never copied.
"""

import filecmp
import json
import re
import shutil
from pathlib import Path
from typing import Any

from isobasin.errors import CheckpointError

# In the order of preference, which is that of transformers.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# The safetensors library refuses headers over 100 MB; no index or configuration comes near.
MAX_BYTES = 100_000_000
MAX_DEPTH = 64  # levels of a JSON document; at about 1,000 Python refuses to walk through it
# Keys by which a configuration makes transformers run Python code from a repository.
_CODE_KEYS = frozenset({"auto_map", "custom_pipelines"})
# Copied without the keys that name code.
_CONFIGURATIONS = frozenset(
    {"generation_config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"}
)
# Copied byte for byte: in a vocabulary "auto_map" may be a token.
_VERBATIM = frozenset(
    {
        "tokenizer.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "chat_template.json",
        "chat_template.jinja",
    }
)
# What the writer adds; .DS_Store is the work of macOS.
_WRITTEN = frozenset({"config.json", "model.safetensors", "model.safetensors.index.json", ".DS_Store"})
MODEL_CARD, MADE_WITH = "README.md", "made with isobasin"
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_TEXT_SUFFIXES = frozenset({"", ".txt", ".md", ".rst", ".html", ".pdf"})


# -- location ---------------------------------------------------------------------------------------------------------


def find_folder(path: str | Path) -> Path:
    """The folder `path`, or the snapshot of the hub id `path` in the local Hugging Face cache."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{path} is a file, expected a checkpoint folder: give the folder it lies in")
    try:
        from huggingface_hub import snapshot_download  # half a second to import, and rarely needed

        return Path(snapshot_download(str(path), local_files_only=True))
    except (ImportError, OSError, ValueError) as error:  # not in the cache; not a hub id
        raise CheckpointError(
            f"{str(path)!r} is neither a folder nor a model in the local Hugging Face cache: "
            "check the path, or download it first (hf download ORG/NAME)"
        ) from error


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
    for name in weight_map.values():
        if not isinstance(name, str) or not name.isprintable() or set(name) & set("/\\:") or name in ("", ".", ".."):
            raise CheckpointError(
                f"{index} names the file {name!r:.80}, expected a plain name in the same folder: do not trust it"
            )
    files = {name: index.parent / name for name in sorted(set(weight_map.values()))}
    for file in files.values():
        if not file.is_file():
            raise CheckpointError(f"{file} is named in {index.name} but is not there: download the missing shard")
    return list(files.values()), {tensor: files[name] for tensor, name in weight_map.items()}


# -- documents --------------------------------------------------------------------------------------------------------


def read_object(file: Path, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in `file`; see `parse_object`."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing or not a regular file: is this a whole checkpoint folder?")
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{file} has {size} bytes, expected at most {MAX_BYTES}: it is damaged")
        return parse_object(file.read_bytes(), str(file), unique=unique)
    except OSError as error:
        raise CheckpointError(f"{file} can not be read: {error.strerror}") from error


def parse_object(text: bytes, source: str, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in `text`; `unique`: a key that occurs twice is an error."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique if unique else None)
        _check_depth(value)
        if b"\\ud" in text.lower():  # half a character, which can be escaped in JSON but not written as UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not valid JSON ({error}): re-download it") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} holds a JSON {type(value).__name__}, expected an object")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def write_object(file: Path, value: dict[str, Any]) -> None:
    """Write `value` as JSON in the layout of Hugging Face (two spaces, newline at the end)."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def without_code(value: Any) -> Any:
    """A copy of a configuration, at every depth without the keys that name code to run."""
    if isinstance(value, dict):
        return {key: without_code(item) for key, item in value.items() if key not in _CODE_KEYS}
    if isinstance(value, list):
        return [without_code(item) for item in value]
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} occurs twice")
        found[key] = value
    return found


# -- companion files --------------------------------------------------------------------------------------------------


def find_companions(folder: Path) -> list[Path]:
    """The files beside the weights that are copied with a model, sorted: an allow-list without code and pickles."""
    return sorted(file for file in folder.iterdir() if _is_allowed(file.name) and file.is_file())


def copy_companions(files: list[Path], target: Path) -> None:
    """Copy `files` into `target`: links are followed, and configurations lose the keys that name code."""
    for file in files:
        found = read_object(file) if file.name in _CONFIGURATIONS else {}
        cleaned = without_code(found)
        if cleaned == found:
            shutil.copyfile(file, target / file.name)
        else:
            write_object(target / file.name, cleaned)


def _is_allowed(name: str) -> bool:
    return _is_legal(name) or name in _CONFIGURATIONS or name in _VERBATIM


def _is_legal(name: str) -> bool:
    return name.upper().startswith(("LICENSE", "NOTICE")) and Path(name).suffix.lower() in _TEXT_SUFFIXES


# -- folders that an output may replace -------------------------------------------------------------------------------


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder holds a configuration and weights, under the names that the writer gives them."""
    names = {file.name for file in folder.iterdir()}
    return "config.json" in names and any(name == "model.safetensors" or _SHARD.fullmatch(name) for name in names)


def find_unknown(folder: Path, companions: list[Path]) -> list[str]:
    """What lies in the folder and the writer would not have put there, sorted: other names, folders, links, and texts
    that are neither its model card nor the same as one of the `companions` of its inputs."""
    return sorted(entry.name for entry in folder.iterdir() if not _is_written(entry, companions))


def _is_written(entry: Path, companions: list[Path]) -> bool:
    if not entry.is_file() or entry.is_symlink():
        return False
    if entry.name == MODEL_CARD:
        return MADE_WITH.encode() in entry.read_bytes()
    if _is_legal(entry.name):
        return any(file.name == entry.name and filecmp.cmp(file, entry, shallow=False) for file in companions)
    return entry.name in _WRITTEN or _SHARD.fullmatch(entry.name) is not None or _is_allowed(entry.name)
