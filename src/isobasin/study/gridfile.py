"""What a grid file may say: every key with what it takes, so that a slip of the pen is an error that names it."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from isobasin.errors import IsobasinError

from .reinitialising import SCOPES

MODELS = ("vit", "bert", "gpt2", "llama")
POSITIONS = ("absolute", "sinusoidal", "learned", "rope", "alibi", "none")
ABLATIONS = ("stage2", "distances", "heads", "layers", "control")
AUGMENTATIONS = ("none", "shift", "flip-crop", "drop-words")
REQUIREMENTS = ("accuracy", "bits_per_byte", "perplexity", "loss")


@dataclass(frozen=True)
class Field:
    """One key: what is a good value, in words too; what it is if left out; whether a list of values spans the grid."""

    good: Callable[[Any], bool]
    expected: str
    default: Any = None
    required: bool = False
    spans: bool = False


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _one_of(words: tuple[str, ...], **more: Any) -> Field:
    return Field(lambda value: value in words, f"one of {', '.join(words)}", **more)


def _count(**more: Any) -> Field:
    return Field(_is_count, "a whole number of at least 1", **more)


def _number(low: float, high: float, **more: Any) -> Field:
    return Field(lambda value: _is_number(value) and low <= value <= high, f"a number from {low:g} to {high:g}", **more)


def _text(**more: Any) -> Field:
    return Field(lambda value: isinstance(value, str) and bool(value), "a name in quotes", **more)


def _table() -> Field:
    return Field(lambda value: isinstance(value, Mapping), "a table")


RECIPE: Mapping[str, Field] = MappingProxyType(
    {
        "epochs": _number(0, 1e6, spans=True),
        "steps": Field(lambda value: _is_count(value) or value == 0, "a whole number", spans=True),
        "batch": _count(default=128, spans=True),
        "rate": _number(1e-9, 10, default=1e-3, spans=True),
        "decay": _number(0, 10, default=0.05, spans=True),
        "warmup": _number(0, 1, default=0.1, spans=True),
        "smoothing": _number(0, 0.99, default=0.0, spans=True),
        "augment": _one_of(AUGMENTATIONS, default="none", spans=True),
    }
)
PRETRAIN: Mapping[str, Field] = MappingProxyType(
    {**RECIPE, "dataset": _text(), "checkpoint": _text(), "seed": Field(_is_seed, "a whole number", default=0)}
)
CELL: Mapping[str, Field] = MappingProxyType(
    {
        "model": _one_of(MODELS, required=True, spans=True),
        "positions": _one_of(POSITIONS, spans=True),
        "layers": _count(required=True, spans=True),
        "heads": _count(required=True, spans=True),
        "width": _count(required=True, spans=True),
        "dataset": _text(required=True, spans=True),
        "scope": _one_of(SCOPES, required=True, spans=True),
        "sequence": _count(spans=True),
        "patch": _count(spans=True),
        "frozen": Field(lambda value: isinstance(value, bool), "true or false", default=False, spans=True),
        "finetune_heads": _count(spans=True),
        "seeds": Field(
            lambda value: isinstance(value, list) and len(value) > 1 and all(map(_is_seed, value)),
            "a list of at least two whole numbers",
            default=(1, 2, 3),
        ),
        "points": Field(lambda value: _is_count(value) and value >= 3, "a whole number of at least 3", default=25),
        "samples": _count(),
        "matchers": Field(lambda value: isinstance(value, list), "a list", default=("weights",)),
        "ablations": Field(lambda value: isinstance(value, list), "a list", default=()),
        "require": _table(),
        "pretrain": _table(),
        "finetune": _table(),
        "whole": _table(),
    }
)
GRID: Mapping[str, Field] = MappingProxyType(
    {"name": _text(required=True), "cells": Field(lambda value: isinstance(value, list), "[[cells]] blocks")}
)
REQUIRE: Mapping[str, Field] = MappingProxyType(dict.fromkeys(REQUIREMENTS, _number(0, 1e9)))


def checked(table: Mapping[str, Any], fields: Mapping[str, Field], where: str) -> dict[str, Any]:
    """The table with what was left out filled in; every value of a list that spans is checked by itself."""
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.0)[0]
            raise IsobasinError(f"{where}: unknown key {key!r}; the nearest that is known is {near!r}")
    missing = [key for key, field in fields.items() if field.required and key not in table]
    if missing:
        raise IsobasinError(f"{where}: {missing[0]} is missing, expected {fields[missing[0]].expected}")
    for key, value in table.items():
        _check_value(value, fields[key], f"{where}: {key}")
    return {key: table.get(key, field.default) for key, field in fields.items()}


def _check_value(value: Any, field: Field, where: str) -> None:
    spanned = field.spans and isinstance(value, list)
    if spanned and not value:
        raise IsobasinError(f"{where} is an empty list; name at least one value, {field.expected}")
    for one in value if spanned else [value]:
        if not field.good(one):
            raise IsobasinError(f"{where} is {one!r}, expected {field.expected}")
