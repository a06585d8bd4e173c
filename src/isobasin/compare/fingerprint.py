"""A short string that all members of an orbit share, and other models do not.

Its entries are invariants of the weights (`features`), mixed over the layers with fixed signs and rounded to a quantum.
Two fingerprints match if no entry differs by more than one quantum: wherever rounding falls, numbers closer than a
quantum are never two apart.
"""

import hashlib
import json
import string
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.arch import HeadSpace
from isobasin.compare.features import EACH, Sketch, end_features, head_features, unit_features, vector_features
from isobasin.compare.fixed import fixed
from isobasin.compare.normal_form import Form
from isobasin.errors import IsobasinError
from isobasin.match.attention import attention_matrices
from isobasin.match.canonical import ENDS
from isobasin.match.comparable import SETTINGS, rope
from isobasin.weights import Weights

VERSION = "ib1"
QUANTUM = 0.03  # twice what a cast to bfloat16 moves an entry; see docs/likeness.md
KINDS = ("ends", "qk", "vo", "ff", "vectors")
SIZES = ("size qk", "size vo", "size ff")
COUNT = EACH * len(KINDS) + 2 * len(SIZES) + 1
_DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
_HALF = len(_DIGITS) ** 2 // 2


@dataclass(frozen=True)
class Fingerprint:
    """Family, a digest of shapes and settings, and quantised invariants. `str` writes it, `read` reads it back."""

    family: str
    digest: str
    entries: tuple[int, ...]

    def __str__(self) -> str:
        return ".".join((VERSION, self.family, self.digest, "".join(map(_written, self.entries))))

    @staticmethod
    def read(text: str) -> "Fingerprint":
        """The way back; an error says what is wrong with the string."""
        parts = text.strip().split(".")
        if len(parts) != 4 or parts[0] != VERSION:
            raise IsobasinError(
                f"{text.strip()[:60]!r} is no fingerprint of this version, expected {VERSION}.family.digest.entries; "
                "make it again with `isobasin fingerprint`"
            )
        body = parts[3]
        if len(body) != 2 * COUNT or not set(body) <= set(_DIGITS):
            raise IsobasinError(
                f"fingerprint {text.strip()[:40]}…: found {len(body)} characters of entries, expected {2 * COUNT} "
                "letters, digits, - or _; it was cut or changed: make it again"
            )
        pairs = (body[k : k + 2] for k in range(0, len(body), 2))
        return Fingerprint(parts[1], parts[2], tuple(_read(pair) for pair in pairs))

    def steps(self, other: "Fingerprint") -> tuple[int, ...]:
        """How many quanta each entry is away from the other's; empty if the two are of different shapes."""
        if (self.family, self.digest) != (other.family, other.digest):
            return ()
        return tuple(abs(x - y) for x, y in zip(self.entries, other.entries, strict=True))

    def matches(self, other: "Fingerprint") -> bool:
        """Whether both can belong to one orbit: the same shape, and no entry more than one quantum away."""
        steps = self.steps(other)
        return bool(steps) and max(steps) <= 1


def _written(entry: int) -> str:
    high, low = divmod(entry + _HALF, len(_DIGITS))
    return _DIGITS[high] + _DIGITS[low]


def _read(pair: str) -> int:
    return _DIGITS.index(pair[0]) * len(_DIGITS) + _DIGITS.index(pair[1]) - _HALF


def fingerprint(weights: Weights) -> Fingerprint:
    """Of a model, from its weights alone, one part in memory at a time; sums are in float64.

    >>> fingerprint(model).matches(fingerprint(scrambled))  # doctest: +SKIP
    True
    """
    found = (invariants(weights) / QUANTUM).round().clamp(-_HALF, _HALF - 1)
    return Fingerprint(weights.arch.family, _digest(weights), tuple(int(x) for x in found))


def invariants(weights: Weights) -> Tensor:
    """The entries before they are rounded."""
    form = Form(weights)
    sketch = Sketch.of(form)
    found: dict[str, list[Tensor]] = {kind: [] for kind in (*KINDS, *SIZES)}
    found["ends"].append(end_features(sketch))
    found["vectors"] += vector_features(form, ENDS, form.loose() | form.flat(ENDS), sketch)
    for space in form.spaces:
        place = weights.arch.spaces[space]
        tensors = {name: t.to("cpu", torch.float64) for name, t in form.flat(space).items()}
        if isinstance(place, HeadSpace):
            said = head_features(attention_matrices(weights.arch, place, tensors), place, sketch)
        else:
            said = unit_features(form, place, tensors, sketch)
        for kind, value in said.items():
            found[kind].append(value)
        found["vectors"] += vector_features(form, space, tensors, sketch)
    mixed = [_mixed(kind, found[kind]) for kind in KINDS]
    sizes = [_level_and_slope(kind, found[kind]) for kind in SIZES]
    return torch.cat([*mixed, *sizes, torch.tensor([sketch.size], dtype=torch.float64)])


def _mixed(kind: str, values: Sequence[Tensor]) -> Tensor:
    """Σ_l ± f_l / √L with fixed signs: layers do not change places, so their order counts."""
    if not values:
        return torch.zeros(EACH, dtype=torch.float64)
    signs = fixed(f"signs {kind}", len(values), EACH).sign()
    return (signs * torch.stack(list(values))).sum(0) / len(values) ** 0.5


def _level_and_slope(kind: str, values: Sequence[Tensor]) -> Tensor:
    """The mean over the layers, and how they differ, by fixed signs."""
    logs = torch.cat(list(values))
    slope = (fixed(f"slope {kind}", len(logs)).sign() * (logs - logs.mean())).sum() / len(logs) ** 0.5
    return torch.stack([logs.mean(), slope])


def _digest(weights: Weights) -> str:
    """Eight hexadecimal digits of everything that must agree before entries can be compared."""
    arch = weights.arch
    shapes = {name: arch.shapes[name] for name, pattern in arch.tensors.items() if not pattern.buffer}
    settings = {key: weights.config.get(key, default) for key, default in SETTINGS.get(arch.family, {}).items()}
    turning = rope(weights.config) if any(heads.rotary for heads in arch.heads()) else {}
    text = json.dumps([arch.family, vars(arch.sizes), shapes, settings, turning], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
