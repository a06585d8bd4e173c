"""The files beside the weights that travel with a model: an allow-list, never code and never pickles."""

import shutil
from pathlib import Path

from isobasin.checkpoint.documents import read_object, without_code, write_object

# Copied without their `auto_map`, by which they would ask for code.
_CONFIGURATIONS = frozenset(
    {"generation_config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"}
)
# Copied byte for byte: in a vocabulary "auto_map" is a token like another.
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
_TEXT_SUFFIXES = frozenset({"", ".txt", ".md", ".rst", ".html", ".pdf"})


def find_companions(folder: Path) -> list[Path]:
    """The regular files of `folder` (or links to such) that the allow-list names, sorted."""
    return sorted(file for file in folder.iterdir() if _is_allowed(file.name) and file.is_file())


def copy_companions(files: list[Path], target: Path) -> None:
    """Copy `files` into `target`: links as the files they lead to, configurations without keys for code."""
    for file in files:
        if file.name in _CONFIGURATIONS:
            _copy_configuration(file, target / file.name)
        else:
            shutil.copyfile(file, target / file.name)


def _is_allowed(name: str) -> bool:
    is_legal = name.upper().startswith(("LICENSE", "NOTICE")) and Path(name).suffix.lower() in _TEXT_SUFFIXES
    return is_legal or name in _CONFIGURATIONS or name in _VERBATIM


def _copy_configuration(file: Path, target: Path) -> None:
    found = read_object(file)
    cleaned = without_code(found)
    if cleaned == found:
        shutil.copyfile(file, target)
    else:
        write_object(target, cleaned)
