"""JSON documents of a checkpoint folder: untrusted, so of bounded size, and an object or a one-line error."""

import json
from pathlib import Path
from typing import Any

from isobasin.errors import CheckpointError

# The safetensors library refuses headers over 100 MB; no index or configuration comes near.
MAX_BYTES = 100_000_000
# Keys by which a configuration asks transformers to run Python code from a repository.
_CODE_KEYS = frozenset({"auto_map", "custom_pipelines"})


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
    """The JSON object in `text`; `unique`: a key that occurs twice is an error (which one counts?)."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not valid JSON ({error}): re-download it") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} holds a JSON {type(value).__name__}, expected an object")
    return value


def write_object(file: Path, value: dict[str, Any]) -> None:
    """Write `value` as JSON in the layout Hugging Face uses (two spaces, newline at the end)."""
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
