"""Wrong descriptions, made from right ones: one word, norm, sum, size or switch of a family changed at a time.

A family hands strings and sizes to `build`. `described` catches them, `mutants` changes them one by one, and
inside `bent` the family describes its models with such a change.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock

from isobasin.arch import FAMILIES, Architecture, HeadSpace, Space, Sum

Parts = Mapping[str, Any]
Labelled = Iterator[tuple[str, Any]]  # what was done, and the result; None: left out
PARTS = ("modules", "tensors", "norms", "biases", "aliases", "sums", "spaces", "heads")
KINDS = ("fixed", "permutation", "permutation±", "signed", "positive", "scaled", "orthogonal", "orthogonal1")

_TERM = re.compile(r"(\|?)([^|:*]+)(:q)?\|?(\*?)")
_NAME = re.compile(r"(?<![:\w}])[A-Za-z_](?:\w|\{[^}]*\})*")
_NORM = re.compile(r"(layer|rms)\(([^,]+), ([^,)]+)(?:, ([^)]+))?\)")


@dataclass(frozen=True)
class Mutant:
    """One change, by name: `part` is the argument of `build` that becomes `value`."""

    name: str
    part: str
    value: Any


def described(family: str, config: Mapping[str, Any]) -> Parts:
    """What the family hands to `build` for this config."""
    caught: list[Parts] = []
    real = _module(family).build

    def build(**parts: Any) -> Architecture:
        caught.append(parts)
        return real(**parts)

    with mock.patch.object(_module(family), "build", build):
        FAMILIES[family].describe(config)
    return caught[0]


@contextmanager
def bent(family: str, mutant: Mutant) -> Iterator[None]:
    """Inside, the family describes its models with this change."""
    real = _module(family).build

    def build(**parts: Any) -> Architecture:
        return real(**{**parts, mutant.part: mutant.value})

    with mock.patch.object(_module(family), "build", build):
        yield


def _module(family: str) -> ModuleType:
    """The file that builds a family's architecture."""
    builders = dict.fromkeys(("mistral", "qwen2", "phi3"), "llama")
    return import_module(f"isobasin.arch.families.{builders.get(family, family)}")


def mutants(parts: Parts) -> Iterator[Mutant]:
    """Every change of one thing."""
    words = Words(parts)
    changes = {"modules": words.pattern, "tensors": words.pattern, "norms": words.norm}
    for part in ("modules", "tensors", "norms", "biases", "aliases"):
        yield from _in_table(parts, part, changes.get(part, lambda text: iter(())))
    yield from _in_list(parts, "sums", sums)
    yield from _in_list(parts, "spaces", spaces)
    for label, value in heads(parts["heads"]):
        yield Mutant(f"heads: {label}", "heads", value)


def _in_table(parts: Parts, part: str, change: Callable[[str], Labelled]) -> Iterator[Mutant]:
    table = parts.get(part) or {}
    for key, text in table.items():
        where = f"{part}: {key.rpartition('{i}.')[2]}"
        yield Mutant(f"{where} left out", part, {k: v for k, v in table.items() if k != key})
        for label, other in change(text):
            if other != text:
                yield Mutant(f"{where} = {label}", part, {**table, key: other})


def _in_list(parts: Parts, part: str, change: Callable[[Any], Labelled]) -> Iterator[Mutant]:
    items = list(parts.get(part, ()))
    for k, item in enumerate(items):
        for label, other in change(item):
            changed = [*items[:k], *([] if other is None else [other]), *items[k + 1 :]]
            yield Mutant(f"{part}: {item.name}, {label}", part, type(parts[part])(changed))


class Words:
    """Changes of patterns and norms, among the names that a description uses."""

    def __init__(self, parts: Parts) -> None:
        texts = " ".join([*parts["modules"].values(), *parts["tensors"].values()])
        names = {name for word in texts.split() for name in _NAME.findall(re.sub(r"\.\d+", "", word))}
        norms = [found for found in map(_NORM.fullmatch, parts["norms"].values()) if found]
        self._spaces = {space.name for space in parts["spaces"]}
        self._faces = {name for name in names if name[:2] in ("qk", "vo")}
        self._norms = names - self._spaces - self._faces
        self._modules = {found[3] for found in norms}
        self._extras = {found[4] for found in norms if found[4]} | {"exposed", None}

    def pattern(self, text: str) -> Labelled:
        optional, body = ("?", text[1:]) if text.startswith("?") else ("", text)
        if optional:
            yield f"{text} → {body}", body
        roles = [role.split() for role in body.split("&")]
        for r, role in enumerate(roles):
            if len(roles) > 1:
                yield f"{text} → {' '.join(role)}", " ".join(role)
            for w, word in enumerate(role):
                for other in dict.fromkeys(self._word(word)):
                    changed = [*role[:w], other, *role[w + 1 :]]
                    joined = optional + " & ".join(" ".join(x) for x in [*roles[:r], changed, *roles[r + 1 :]])
                    yield f"{text} → {joined}", joined

    def _word(self, word: str) -> Iterator[str]:
        if word.startswith((".", "-")):
            yield from [f".{int(word[1:]) + 1}"] if word[1:] else []
            return
        inner = word.strip("()")
        frame = word.replace(inner, "{}")
        terms = re.split(r"(?<=[}*|])\+", inner)
        yield inner
        yield from ["."] if len(terms) == 1 else []
        for k, term in enumerate(terms):
            for other in self._term(term):
                yield frame.format("+".join([*terms[:k], other, *terms[k + 1 :]]))
            if len(terms) > 1:
                yield frame.format("+".join(terms[:k] + terms[k + 1 :]))
        for k, (a, b) in enumerate(pairwise(terms)):
            yield frame.format("+".join([*terms[:k], b, a, *terms[k + 2 :]]))

    def _term(self, term: str) -> Iterator[str]:
        found = _TERM.fullmatch(term)
        assert found, term
        bar, name, queries, dual = found[1], found[2], found[3] or "", found[4]
        yield f"{bar}{name}{queries}{bar}{'' if dual else '*'}"
        if name in self._faces:
            yield f"{bar}{name}{'' if queries else ':q'}{bar}{dual}"
        if name not in self._norms:
            other = "" if bar else "|"
            yield f"{other}{name}{queries}{other}{dual}"
        peers = next(names for names in (self._faces, self._spaces, self._norms) if name in names)
        yield from (f"{bar}{peer}{queries}{bar}{dual}" for peer in sorted(peers - {name}))

    def norm(self, text: str) -> Labelled:
        found = _NORM.fullmatch(text)
        assert found, text
        kind, space, module, extra = found.groups()
        seen = f"{kind}({space}{', exposed' if extra == 'exposed' else ', skip' if extra else ''})"
        others = [("layer" if kind == "rms" else "rms", space, module, extra)]
        others += [(kind, other, module, extra) for other in sorted(self._spaces)]
        others += [(kind, space, other, extra) for other in sorted(self._modules)]
        others += [(kind, space, module, other) for other in sorted(self._extras, key=str)]
        for other in others:
            new = next((b or "nothing" for a, b in zip(found.groups(), other) if a != b), "")
            tail = f", {other[3]}" if other[3] else ""
            yield f"{seen} → {new}", f"{other[0]}({other[1]}, {other[2]}{tail})"


def sums(item: Sum) -> Labelled:
    yield "left out", None
    yield "turned round", replace(item, give=item.take, take=item.give)
    for side in ("give", "take"):
        entries = getattr(item, side)
        for k, (name, start, stop) in enumerate(entries):
            rest = (*entries[:k], *entries[k + 1 :])
            whole = (name, 0, None if start or stop else 1)
            yield (
                f"{side} {'all rows' if start or stop else 'the first row'} of {name}",
                replace(item, **{side: (*entries[:k], whole, *entries[k + 1 :])}),
            )
            if rest:
                yield f"{side} without {name}", replace(item, **{side: rest})
    if item.along:
        yield f"not along {item.along}", replace(item, along=None)


def spaces(space: Space) -> Labelled:
    yield "left out", None
    yield "one larger", replace(space, size=space.size + 1)
    yield f"stream={not space.stream}", replace(space, stream=not space.stream)
    for kind in KINDS:
        if kind != space.kind:
            yield f"{space.kind} → {kind}", replace(space, kind=kind)  # type: ignore[arg-type]


def heads(item: HeadSpace) -> Labelled:
    yield f"permutable={not item.permutable}", replace(item, permutable=not item.permutable)
    yield f"interleaved={not item.interleaved}", replace(item, interleaved=not item.interleaved)
    for rotary in {0, item.rotary - 2, item.rotary + 2} - {item.rotary, -2}:
        yield f"rotary {item.rotary} → {rotary}", replace(item, rotary=rotary)
    twice = {"n_heads": 2 * item.n_heads, "n_kv_heads": 2 * item.n_kv_heads}
    yield "one query head more", replace(item, n_heads=item.n_heads + 1)
    yield "one kv head more", replace(item, n_kv_heads=item.n_kv_heads + 1)
    yield "twice as many", replace(item, **twice)
    yield "half as wide", replace(item, d_head=item.d_head // 2)
    yield "twice as many, half as wide", replace(item, **twice, d_head=item.d_head // 2)
