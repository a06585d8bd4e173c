"""Wrong descriptions, made from right ones: one word, norm, sum, size or switch of a family changed at a time.

A family hands strings and sizes to `build`. `described` catches them, `mutants` changes them one by one, and
inside `bent` the family describes its models with such a change. Where a family writes layers or experts out, the
first of each is changed: names that differ in numbers alone count as one.
"""

import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from typing import Any
from unittest import mock

from isobasin.arch import FAMILIES, Architecture, HeadSpace, Space, Sum, architecture, families

Parts = Mapping[str, Any]
Labelled = Iterator[tuple[str, Any]]  # what was done, and the result; None: left out
PARTS = ("modules", "tensors", "norms", "biases", "aliases", "sums", "spaces", "heads", "routers", "tables", "scales")
PARTS += ("choice_biases",)
KINDS = ("fixed", "permutation", "permutation±", "signed", "positive", "scaled", "orthogonal", "orthogonal1")

_TERM = re.compile(r"(\|?)([^|:*]+)(:q)?\|?(\*?)")
_NAME = re.compile(r"(?<![:\w}])[A-Za-z_](?:\w|\{[^}]*\})*")
_NORM = re.compile(r"(layer|rms)\(([^,]+), ([^,)]+)(?:, ([^)]+))?\)")
_BUILDERS = [
    module
    for each in pkgutil.iter_modules(families.__path__)
    if hasattr(module := import_module(f"{families.__name__}.{each.name}"), "build")
]


@dataclass(frozen=True)
class Mutant:
    """One change, by name: `part` is the argument of `build` that becomes `value`."""

    name: str
    part: str
    value: Any


def described(family: str, config: Mapping[str, Any]) -> Parts:
    """What the family hands to `build` for this config."""
    caught: list[Parts] = []
    with _built(caught.append):
        FAMILIES[family].architecture(config)
    (found,) = caught
    return found


@contextmanager
def bent(mutant: Mutant) -> Iterator[None]:
    """Inside, a family describes its models with this change."""
    with _built(lambda parts: {**parts, mutant.part: mutant.value}):
        yield


@contextmanager
def _built(change: Callable[[Parts], Parts | None]) -> Iterator[None]:
    """Inside, families build what `change` makes of their parts, if it makes something."""

    def build(**parts: Any) -> Architecture:
        return architecture.build(**(change(parts) or parts))

    with ExitStack() as stack:
        for module in _BUILDERS:
            stack.enter_context(mock.patch.object(module, "build", build))
        yield


def mutants(parts: Parts) -> Iterator[Mutant]:
    """Every change of one thing."""
    words = Words(parts)
    changes = {"modules": words.pattern, "tensors": words.pattern, "norms": words.norm, "scales": words.module}
    for part in ("modules", "tensors", "norms", "biases", "aliases", "tables", "scales"):
        yield from _in_table(parts, part, changes.get(part, lambda text: iter(())))
    for part in ("routers", "choice_biases"):
        for name in _first(parts.get(part, ()), str):
            yield Mutant(f"{part}: {name} left out", part, tuple(each for each in parts[part] if each != name))
    yield from _in_list(parts, "sums", sums)
    yield from _in_list(parts, "spaces", spaces)
    if isinstance(parts["heads"], HeadSpace):
        yield from (Mutant(f"heads: {label}", "heads", value) for label, value in heads(parts["heads"]))
    else:
        yield from _in_list(parts, "heads", heads)


def _first(items: Any, key: Callable[[Any], Any]) -> list[Any]:
    """The first of the items that differ in numbers alone."""
    found: dict[str, Any] = {}
    for item in items:
        found.setdefault(re.sub(r"\d+", "#", str(key(item))), item)
    return list(found.values())


def _in_table(parts: Parts, part: str, change: Callable[[str], Labelled]) -> Iterator[Mutant]:
    table = parts.get(part) or {}
    for key, text in _first(table.items(), lambda item: item):
        where = f"{part}: {key.rpartition('{i}.')[2]}"
        yield Mutant(f"{where} left out", part, {k: v for k, v in table.items() if k != key})
        for label, other in change(text):
            if other != text:
                yield Mutant(f"{where} = {label}", part, {**table, key: other})


def _in_list(parts: Parts, part: str, change: Callable[[Any], Labelled]) -> Iterator[Mutant]:
    items = list(parts.get(part, ()))
    names = [item.name for item in items]
    for item in _first(items, lambda item: (item.name, getattr(item, "kind", ""))):
        k = items.index(item)
        for label, other in change(item):
            changed = [*items[:k], *([] if other is None else [other]), *items[k + 1 :]]
            where = item.name if names.count(item.name) == 1 else str(k)
            yield Mutant(f"{part}: {where}, {label}", part, type(parts[part])(changed))


class Words:
    """Changes of patterns and norms, among the names that a description uses."""

    def __init__(self, parts: Parts) -> None:
        texts = " ".join([*parts["modules"].values(), *parts["tensors"].values()])
        names = {name for word in texts.split() for name in _NAME.findall(re.sub(r"\.\d+", "", word))}
        norms = [found for found in map(_NORM.fullmatch, parts["norms"].values()) if found]
        heads = parts["heads"]
        listed = [] if isinstance(heads, HeadSpace) else [each for each in heads if each.qk]
        self._spaces = {space.name for space in parts["spaces"]}
        self._heads = {each.name for each in listed} | {name for name in names if name.startswith("heads")}
        self._faces = {name for name in names if name[:2] in ("qk", "vo")}
        self._faces |= {face for each in listed for face in (each.qk, each.vo)}
        self._norms = names - self._spaces - self._faces - self._heads
        self._modules = {found[3] for found in norms}
        self._weights = {f"{module}.weight" for module in parts["modules"]}
        self._extras = {found[4] for found in norms if found[4]} | {"exposed", "plus_one", "plain", None}

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
        if word.startswith((".", "-", "()")):
            yield from [f".{int(word[1:]) + 1}"] if word[1:].isdecimal() else []
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
        peers = next(each for each in (self._faces, self._spaces, self._heads, self._norms) if name in each)
        yield from (f"{bar}{peer}{queries}{bar}{dual}" for peer in sorted(peers - {name}))

    def norm(self, text: str) -> Labelled:
        found = _NORM.fullmatch(text)
        assert found, text
        kind, space, module, extra = found.groups()
        seen = f"{kind}({space}{'' if not extra else ', skip' if extra.startswith('skip') else f', {extra}'})"
        others = [("layer" if kind == "rms" else "rms", space, module, extra)]
        others += [(kind, other, module, extra) for other in sorted(self._spaces)]
        others += [(kind, space, other, extra) for other in sorted(self._modules)]
        others += [(kind, space, module, other) for other in sorted(self._extras, key=str)]
        for other in others:
            new = next((b or "nothing" for a, b in zip(found.groups(), other) if a != b), "")
            tail = f", {other[3]}" if other[3] else ""
            yield f"{seen} → {new}", f"{other[0]}({other[1]}, {other[2]}{tail})"

    def module(self, weight: str) -> Labelled:
        yield from ((f"of {other}", other) for other in sorted(self._weights - {weight}))


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
    if space.members:
        yield "without members", replace(space, members=())
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
    yield f"qk_norm={not item.qk_norm}", replace(item, qk_norm=not item.qk_norm)
    if item.qk_norm:
        yield f"whole_norm={not item.whole_norm}", replace(item, whole_norm=not item.whole_norm)
        yield f"plus_one={not item.plus_one}", replace(item, plus_one=not item.plus_one)
        yield "gains exchanged", replace(item, q_gain=item.k_gain, k_gain=item.q_gain)
