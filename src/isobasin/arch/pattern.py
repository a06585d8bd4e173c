"""The pattern language: one short string per tensor, one word per axis. Parsed once, without torch.

    "qk3:q* a3*"        rows are query copies of the face qk3 and move by its dual; columns read the norm a3
    "a3* qk3*+qk3+vo3"  GPT-2's fused projection: three blocks side by side on one axis
    "(qk3*+qk3+vo3) a3*"  the same three blocks inside each head (GPT-NeoX)
    ".50257 resid & .50257 f*"   one tensor in two roles (tied embedding and head)
    "|ff3| m3*"         only the permutation part of ff3 acts (gates, gains)
    "."  an axis nothing touches (".768": of that size);  "-"  a buffer, copied as it is;  "?…"  may be absent
    "()"  a single number, without axes
    "heads3", "heads3:kv"  one place for every query head, or for every kv head

>>> parse("|ff3| m3*").roles[0].axes[0].terms[0].permutation_part
True
"""

import re
from dataclasses import dataclass

from isobasin.errors import ArchitectureError

_TERM = re.compile(r"(?P<bar>\|?)(?P<name>[A-Za-z_]\w*)(?P<queries>:q)?(?P<kv>:kv)?(?P<close>\|?)(?P<dual>\*?)")


@dataclass(frozen=True)
class Term:
    """One block of an axis: the space, face or norm it belongs to, and how it moves."""

    name: str
    dual: bool = False
    queries: bool = False
    permutation_part: bool = False
    kv: bool = False


@dataclass(frozen=True)
class Axis:
    """The blocks of one axis, side by side or (`per_head`) repeated inside each head. No block: untouched."""

    terms: tuple[Term, ...] = ()
    per_head: bool = False
    size: int | None = None

    @property
    def name(self) -> str | None:
        """The one space, face or norm of this axis, if there is exactly one."""
        return self.terms[0].name if len(self.terms) == 1 else None


@dataclass(frozen=True)
class Role:
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern. A buffer has no roles; a tied tensor has more than one."""

    text: str
    roles: tuple[Role, ...]
    optional: bool = False

    @property
    def buffer(self) -> bool:
        return not self.roles

    @property
    def inputs_first(self) -> bool:
        """Whether a matrix has its inputs on the first axis, as GPT-2: inputs move by the dual, outputs do not."""
        axes = [[term.dual for term in axis.terms] for axis in self.roles[0].axes] if self.roles else []
        return len(axes) == 2 and bool(axes[0]) and all(axes[0]) and not all(axes[1] or [False])


def parse(text: str) -> Pattern:
    """Parse one pattern; anything that is not in the language is an error that shows the word."""
    body = text.removeprefix("?")
    optional = body != text
    if body.strip() == "-":
        return Pattern(text, (), optional)
    if body.strip() == "()":
        return Pattern(text, (Role(()),), optional)
    roles = tuple(Role(tuple(_axis(word, text) for word in role.split())) for role in body.split("&"))
    if any(not role.axes for role in roles):
        raise ArchitectureError(f"pattern {text!r} has an empty role: write one word per axis")
    return Pattern(text, roles, optional)


def _axis(word: str, text: str) -> Axis:
    if word.startswith("."):
        size = word[1:]
        if size and not size.isdecimal():
            raise ArchitectureError(f"pattern {text!r}: {word!r} is no axis; write '.' or '.' and a size")
        return Axis(size=int(size) if size else None)
    per_head = word.startswith("(") and word.endswith(")")
    terms = (word[1:-1] if per_head else word).split("+")
    return Axis(tuple(_term(term, text) for term in terms), per_head)


def _term(word: str, text: str) -> Term:
    found = _TERM.fullmatch(word)
    if found is None or bool(found["bar"]) != bool(found["close"]):
        raise ArchitectureError(
            f"pattern {text!r}: {word!r} is no word; expected name, name*, name:q, name:q*, name:kv, |name| or '.'"
        )
    return Term(found["name"], bool(found["dual"]), bool(found["queries"]), bool(found["bar"]), bool(found["kv"]))
