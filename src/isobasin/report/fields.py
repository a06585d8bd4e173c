"""Values out of an untrusted JSON document: each is what it should be, or a one-line error that names its place."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from isobasin.errors import IsobasinError

MAX_SIZE = 1e30  # beyond it the differences that a picture needs overflow: it counts as not finite
MAX_ITEMS = 10_001  # points of a curve, rows of a plane, layers
_MAX_DEPTH = 20
# Invisible or turning text around (bidirectional controls): a name must look like what it is.
_HIDDEN = ((0, 0x20), (0x7F, 0xA0), (0x61C, 0x61D), (0x200B, 0x2010), (0x2028, 0x202F), (0x2060, 0x2070),
           (0xD800, 0xE000), (0xFEFF, 0xFF00))  # fmt: skip
_REPLACEMENTS = {code: "\N{REPLACEMENT CHARACTER}" for span in _HIDDEN for code in range(*span)}


def wrong(place: str, found: object, expected: str) -> IsobasinError:
    """The error for a value that is not what it should be."""
    return unlike(place, text(repr(found))[:60], expected)


def unlike(place: str, found: str, expected: str) -> IsobasinError:
    """The same where the value is better described than shown."""
    return IsobasinError(
        f"path.json: {text(place)} is {found}, expected {expected}; write the file again by `isobasin path`"
    )


def text(value: object) -> str:
    """Any value as visible text: control characters, half surrogates and direction marks are replaced."""
    return str(value).translate(_REPLACEMENTS)


def short(value: object, width: int = 32) -> str:
    """Text of at most `width` characters; a longer one loses its middle, since names differ at both ends."""
    whole = text(value)
    if len(whole) <= width:
        return whole
    head = (width - 1) // 2
    return f"{whole[:head]}…{whole[len(whole) - (width - 1 - head) :]}"


def object_at(parent: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    """The JSON object under `key`; an empty one where it is absent or null."""
    value = parent.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(f"{place}{key}", value, "an object")
    return value


def list_at(parent: Mapping[str, Any], key: str, place: str) -> list[Any]:
    value = parent.get(key)
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise wrong(f"{place}{key}", value, "a list")
    if len(value) > MAX_ITEMS:
        raise unlike(f"{place}{key}", f"a list of {len(value)}", f"at most {MAX_ITEMS} entries")
    return list(value)


def number(value: Any, place: str) -> float | None:
    """A finite number, or None for null and what is not finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(place, value, "a number or null")
    if isinstance(value, int) and abs(value) > MAX_SIZE:
        return None
    return float(value) if math.isfinite(value) and abs(value) <= MAX_SIZE else None


def numbers(values: list[Any], place: str) -> tuple[float | None, ...]:
    return tuple(number(value, f"{place}[{i}]") for i, value in enumerate(values))


def finite(values: list[Any], place: str) -> tuple[float, ...]:
    """Numbers none of which may be missing."""
    found = numbers(values, place)
    for i, value in enumerate(found):
        if value is None:
            raise wrong(f"{place}[{i}]", values[i], "a finite number")
    return tuple(value for value in found if value is not None)


def ascending(values: tuple[float, ...]) -> bool:
    return len(values) >= 2 and all(a < b for a, b in pairwise(values))


def strict(value: Any, depth: int = 0) -> Any:
    """The same document without NaN and infinities (null instead), of bounded depth, with text that is valid UTF-8."""
    if depth > _MAX_DEPTH:
        raise unlike("the document", f"nested deeper than {_MAX_DEPTH}", "a file of `isobasin path`")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {strict(str(key)): strict(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item, depth + 1) for item in value]
    return value if value is None or isinstance(value, bool | int) else str(value)
