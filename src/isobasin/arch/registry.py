"""The supported families, and how the names of a checkpoint find their patterns.

A new family is one file under `arch/families` and its name in the list below.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from isobasin.arch.architecture import Architecture
from isobasin.arch.families import bert, gpt2, gpt_neox, isobasin, llama, phi3, qwen2, vit
from isobasin.arch.family import Family
from isobasin.errors import ArchitectureError

FAMILIES: dict[str, Family] = {
    family.name: family
    for file in (gpt2, bert, vit, llama, qwen2, phi3, gpt_neox, isobasin)
    for family in file.FAMILIES
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family a config.json names by its `model_type`."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ArchitectureError(
            f"config.json: model_type is {name!r}, expected one of {', '.join(FAMILIES)}; "
            "other families need a patterns file of their own"
        )
    return FAMILIES[name]


@dataclass(frozen=True)
class Names:
    """Where each tensor of an architecture lies on disk, and which further names are copies of it (ties)."""

    on_disk: Mapping[str, str]
    copies: Mapping[str, str]


def describe(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Architecture, Names]:
    """The architecture of a checkpoint, bound to its tensors, and where they lie."""
    family = family_of(config)
    _check_depth(config, len(shapes))
    arch = family.describe(config)
    names = resolve(family, arch, shapes)
    bound = arch.bind({name: shapes[disk] for name, disk in names.on_disk.items()})
    for copy, target in names.copies.items():
        if shapes[copy] != shapes[names.on_disk[target]]:
            raise ArchitectureError(
                f"{copy}: config.json ties it to {target}, but the shapes differ: {shapes[copy]} and "
                f"{shapes[names.on_disk[target]]}; set tie_word_embeddings to false or remove one"
            )
    return bound, names


def _check_depth(config: Mapping[str, Any], n_tensors: int) -> None:
    """Patterns are written out layer by layer, so a depth that no tensor backs must not get that far."""
    for key in ("n_layer", "n_layers", "num_hidden_layers"):
        found = config.get(key)
        if isinstance(found, int) and found > n_tensors:
            raise ArchitectureError(
                f"config.json: {key} is {found}, but the checkpoint has {n_tensors} tensors, expected several for each "
                "layer: the config and the weights belong to different models"
            )


def resolve(family: Family, arch: Architecture, names: Iterable[str]) -> Names:
    """Match names on disk to the names of the patterns: old spellings, a missing or an extra base prefix."""
    on_disk: dict[str, str] = {}
    copies: dict[str, str] = {}
    for disk in names:
        found = next((n for n in _spellings(family, disk) if n in arch.aliases or n in arch.tensors), disk)
        target = arch.aliases.get(found)
        if target is not None and found != target:
            copies[disk] = target
        elif found in on_disk:
            raise ArchitectureError(
                f"{disk}: the same tensor as {on_disk[found]} under another spelling; keep one of the two"
            )
        else:
            on_disk[found] = disk
    # Only the copy was saved (transformers keeps one of two tied tensors): it stands for the tensor itself.
    for copy, target in list(copies.items()):
        if target not in on_disk:
            on_disk[target] = copy
            del copies[copy]
    return Names(on_disk, copies)


def _spellings(family: Family, name: str) -> Iterable[str]:
    yield name
    for old, new in family.spellings:
        name = re.sub(old, new, name)
    yield name
    if family.prefix:
        yield family.prefix + name
        yield name.removeprefix(family.prefix)
