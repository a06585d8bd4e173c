"""A checkpoint folder on disk: where it lies, its weight files, its JSON documents and its companion files.

The content is untrusted: documents have a bounded size, file names and links stay inside the folder, and code is copied
only where the user trusts it.
"""

import filecmp
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
    }
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_NOT_DOWNLOADED = ["*.onnx", "onnx/*", "*.h5", "*.msgpack", "*.gguf", "*.ot", "original/*", "coreml/*", "openvino/*"]
_MODULE_CONFIG = re.compile(r"\d+_[A-Za-z]+/config\.json")  # of sentence-transformers: 1_Pooling/config.json
_OTHER_FORMATS = {
    ".onnx": "ONNX is a graph of operations, whose weights have lost their names and places; give the model from which "
    "it was exported",
    ".gguf": "give the path of this file itself, not that of its folder",
    ".h5": "these are weights for TensorFlow; load them in transformers 4 (from_tf=True) and save_pretrained",
    ".msgpack": "these are weights for Flax; load them in transformers 4 (from_flax=True) and save_pretrained",
    ".ckpt": "this is a training checkpoint; load it where it was made and save_pretrained",
}
# Names of models of other libraries, which are no ids of the hub.
_FOREIGN_NAMES = (
    (
        re.compile(r"(hf[-_]hub:)?timm/.*|[a-z0-9]+(_[a-z0-9]+)*_patch\d+(_.*)?"),
        "this is a name of timm, whose models are not read; take the same weights for transformers (google/vit-…, "
        "facebook/deit-…, facebook/dinov2-…)",
    ),
    (
        re.compile(r"(open_clip:|hf[-_]hub:).*|(ViT|EVA\d*|RN\d+|convnext|coca)[-_][\w-]*"),
        "this is a name of open_clip, whose models are not read; take the same weights for transformers "
        "(openai/clip-…, laion/CLIP-…)",
    ),
)
_NOT_THERE = "check the path, or download it first (hf download ORG/NAME)"
MAX_LEVELS = 8  # sub-folders inside each other
_SILENT = frozenset({".DS_Store", ".git", ".gitattributes", ".gitignore", ".cache", "__pycache__"})
_STALE_FOLDERS = re.compile(r"checkpoint-\d+|global_step\d+|runs|onnx|openvino|coreml", re.IGNORECASE)
_TRAINING = re.compile(r"trainer_state\.json$|training_args\.|optimizer|scheduler\.|rng_state|events\.out\.tfevents")
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".gguf",
    ".ggml",
    ".tflite",
    ".npz",
    ".ot",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill")
_PROGRAMS = (".sh", ".bat", ".cmd", ".ps1", ".exe", ".dll", ".so", ".dylib", ".jar", ".js", ".pyc", ".pyd", ".whl")
# What the writer adds; .DS_Store is the work of macOS.
_WRITTEN = frozenset({"config.json", "model.safetensors", "model.safetensors.index.json", ".DS_Store"})
MODEL_CARD, MADE_WITH = "README.md", "made with isobasin"
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_TEXT_SUFFIXES = frozenset({"", ".txt", ".md", ".rst", ".html", ".pdf"})


# -- location ---------------------------------------------------------------------------------------------------------


def find_folder(path: str | Path) -> Path:
    """The folder `path`, or the snapshot of the hub id `path` (`ORG/NAME` or `ORG/NAME@REVISION`) in the local Hugging
    Face cache; it is downloaded where it is not there, unless HF_HUB_OFFLINE is set."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        advice = _OTHER_FORMATS.get(folder.suffix, "give the folder it lies in")
        raise CheckpointError(f"{path} is a file, expected a checkpoint folder: {advice}")
    name, _, revision = str(path).partition("@")
    try:
        from huggingface_hub import constants, snapshot_download  # half a second to import, and rarely needed

        try:
            return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
        except (OSError, ValueError):
            if constants.HF_HUB_OFFLINE or _HUB_ID.fullmatch(name) is None:
                raise
        return Path(snapshot_download(name, revision=revision or None, ignore_patterns=_NOT_DOWNLOADED))
    except (ImportError, OSError, ValueError) as error:  # not in the cache; not a hub id; no network; no such model
        at = f" at revision {revision}" if revision else ""
        advice = next((advice for known, advice in _FOREIGN_NAMES if known.fullmatch(name)), _NOT_THERE)
        raise CheckpointError(
            f"{name!r}{at} is neither a folder nor a model in the local Hugging Face cache, and can not be downloaded "
            f"({_why_not(name, error)}): {advice}"
        ) from error


def _why_not(name: str, error: Exception) -> str:
    """Why a model was not downloaded."""
    if _HUB_ID.fullmatch(name) is None:
        return "not of the form ORG/NAME"
    if getattr(sys.modules.get("huggingface_hub.constants"), "HF_HUB_OFFLINE", False):
        return "HF_HUB_OFFLINE is set"
    kind = type(error).__name__
    return "the hub can not be reached" if kind == "LocalEntryNotFoundError" else kind


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT, and no model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def find_weights(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The weight files of `folder`, and the file in which its index (if sharded) puts each tensor."""
    for name in _WEIGHTS:
        file = folder / name
        if file.is_file():
            return _read_index(file) if name.endswith(".json") else ([file], {})
    _refuse_other_formats(folder)
    raise CheckpointError(f"{folder} holds no weights: expected one of {', '.join(_WEIGHTS)}")


def _refuse_other_formats(folder: Path) -> None:
    """An error for weights in a format that is not read, with the reason and the way out."""
    for file in sorted(folder.iterdir()):
        for suffix, advice in _OTHER_FORMATS.items():
            if file.name.endswith(suffix):
                raise CheckpointError(f"{folder} has its weights as {file.name}: {advice}")


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
    file.write_text(_json(value), encoding="utf-8")


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


@dataclass(frozen=True)
class Companions:
    """What lies beside the weights of a folder: the files that go with the model, by their path in the folder, and the
    others, each with the reason why it is not copied."""

    folder: Path
    files: tuple[str, ...]
    left_out: Mapping[str, str]
    trust_remote_code: bool = False

    @property
    def sizes(self) -> list[int]:
        """The bytes of each file."""
        return [(self.folder / name).stat().st_size for name in self.files]

    def content(self, name: str) -> str | None:
        """What is written for a file: a configuration without the keys that name code; None for the file itself."""
        is_known = name in _CONFIGURATIONS
        if self.trust_remote_code or name in _VERBATIM or not (is_known or name.endswith("config.json")):
            return None
        try:
            found = read_object(self.folder / name)
        except CheckpointError:
            if is_known:
                raise
            return None  # not JSON, whatever its name says
        cleaned = without_code(found)
        return None if cleaned == found else _json(cleaned)


def find_companions(folder: Path, *, trust_remote_code: bool = False) -> Companions:
    """The files that are copied with a model: all of the folder but weights, and what is stale or dangerous.

    Weights in other files are stale as soon as the model is moved; so are the state of a training and indices. Pickles
    and programs may run code when they are used; Python files are copied only where their author is trusted. Weights of
    the modules that sentence-transformers runs behind the model (`modules.json`) stay as they are, and are copied.
    Links are followed inside the folder, into the blobs of the Hugging Face cache, and for the usual names.
    """
    rewritten, modules = _WRITTEN | _own_weights(folder), _module_folders(folder)
    names = [name for name in _entries(folder) if name not in rewritten]
    reasons = {name: _reason_to_leave(folder, name, modules, trust_remote_code) for name in sorted(names)}
    copied = tuple(name for name, reason in reasons.items() if reason is None)
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    return Companions(folder, copied, left_out, trust_remote_code)


def _own_weights(folder: Path) -> frozenset[str]:
    """The files of the model's own weights, and their index; none in a folder with a tokenizer alone."""
    try:
        first = next((name for name in _WEIGHTS if (folder / name).is_file()), "")
        return frozenset({first, *(file.name for file in find_weights(folder)[0])})
    except CheckpointError:
        return frozenset()


def copy_companions(companions: Companions, target: Path) -> None:
    """Copy the files into `target`, each as a file of its own; configurations lose the keys that name code."""
    for name in companions.files:
        place, content = target / name, companions.content(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            shutil.copyfile(companions.folder / name, place)
        else:
            place.write_text(content, encoding="utf-8")


def _entries(folder: Path, inside: str = "") -> Iterator[str]:
    """Every file of a folder and its sub-folders by its path, and sub-folders that are left out, with a slash."""
    for entry in (folder / inside).iterdir():
        name = f"{inside}{entry.name}"
        if entry.name in _SILENT:
            continue
        if not entry.is_dir():
            yield name
        elif _reason_to_leave_folder(folder, f"{name}/") is not None:
            yield f"{name}/"
        else:
            yield from _entries(folder, f"{name}/")


def _reason_to_leave_folder(folder: Path, name: str) -> str | None:
    path = folder / name
    if path.is_symlink():
        return "a link to a folder"
    if path.name.startswith("."):
        return "hidden"
    if _STALE_FOLDERS.fullmatch(path.name):
        return "other weights, or the state of a training"
    return "nested too deep" if name.count("/") > MAX_LEVELS else None


def _reason_to_leave(folder: Path, name: str, modules: frozenset[str], trusted: bool) -> str | None:
    """Why an entry is not copied; None if it is."""
    if name.endswith("/"):
        return _reason_to_leave_folder(folder, name)
    path = folder / name
    last, suffix = path.name, path.suffix.lower()
    usual = _is_allowed(name)
    if not path.is_file():
        return "a link that leads nowhere, or no regular file"
    if not usual and not _stays_inside(path, folder):
        return "a link that leads out of the folder"
    if usual or (suffix == ".safetensors" and f"{path.parent.relative_to(folder).as_posix()}/" in modules):
        return None
    if last.startswith("."):
        return "hidden"
    if last.endswith(".index.json") or suffix in _WEIGHT_SUFFIXES:
        return "other weights, which are not changed with the model"
    if _TRAINING.match(last):
        return "state of a training"
    if suffix in _PICKLES:
        return "a pickle, which can run code when it is read; safetensors can not"
    if suffix in _PROGRAMS:
        return "a program"
    if suffix == ".py" and not trusted:
        return "code of its own; --trust-remote-code copies it"
    return None


def _stays_inside(path: Path, folder: Path) -> bool:
    """Whether a file lies in the folder itself, or among the blobs of the cache that the folder is a snapshot of."""
    real, home = path.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    return real.is_relative_to(home) or real.is_relative_to(blobs)


def _module_folders(folder: Path) -> frozenset[str]:
    """The sub-folders, with a slash, that the modules.json of sentence-transformers names."""
    file = folder / "modules.json"
    try:
        modules = json.loads(file.read_bytes()) if file.is_file() and file.stat().st_size <= MAX_BYTES else []
    except (OSError, ValueError, RecursionError):
        return frozenset()
    listed = modules if isinstance(modules, list) else []
    names = [module.get("path") for module in listed if isinstance(module, dict)]
    return frozenset(f"{name.rstrip('/')}/" for name in names if isinstance(name, str) and name)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _is_allowed(name: str) -> bool:
    return _is_legal(name) or name in _CONFIGURATIONS or name in _VERBATIM or _MODULE_CONFIG.fullmatch(name) is not None


def _is_legal(name: str) -> bool:
    return (
        "/" not in name
        and name.upper().startswith(("LICENSE", "NOTICE"))
        and Path(name).suffix.lower() in _TEXT_SUFFIXES
    )


# -- folders that an output may replace -------------------------------------------------------------------------------


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder holds a configuration and weights, under the names that the writer gives them."""
    names = {file.name for file in folder.iterdir()}
    return "config.json" in names and any(name == "model.safetensors" or _SHARD.fullmatch(name) for name in names)


def find_unknown(folder: Path, copied: Sequence[Companions]) -> list[str]:
    """What lies in the folder and the writer would not have put there, sorted: links, empty folders, and files that
    have none of its names and are not the same as one of those that are `copied` from its inputs."""
    return sorted(name for name in _all_entries(folder) if not _is_written(folder, name, copied))


def _all_entries(folder: Path, inside: str = "") -> Iterator[str]:
    """Every file by its path, and every link and empty folder."""
    for entry in (folder / inside).iterdir():
        name = inside + entry.name
        if entry.is_dir() and not entry.is_symlink() and any(entry.iterdir()):
            yield from _all_entries(folder, f"{name}/")
        else:
            yield name


def _is_written(folder: Path, name: str, copied: Sequence[Companions]) -> bool:
    entry = folder / name
    if not entry.is_file() or entry.is_symlink():
        return False
    if any(name in each.files and _is_copy(entry, each, name) for each in copied):
        return True
    if name == MODEL_CARD:
        return is_own_card(entry)
    return name in _WRITTEN or _SHARD.fullmatch(name) is not None or (_is_allowed(name) and not _is_legal(name))


def is_own_card(entry: Path) -> bool:
    """Whether this is a model card that was written here."""
    return entry.is_file() and not entry.is_symlink() and MADE_WITH.encode() in entry.read_bytes()


def _is_copy(entry: Path, companions: Companions, name: str) -> bool:
    """Whether a file is what copying would have made."""
    cleaned = replace(companions, trust_remote_code=False).content(name)
    if cleaned is not None and entry.read_bytes() == cleaned.encode():
        return True
    return filecmp.cmp(companions.folder / name, entry, shallow=False)
