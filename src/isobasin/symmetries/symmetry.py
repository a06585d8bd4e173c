"""The symmetry group of a model: its group elements and its free coordinates, with a scope, printable."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeGuard

from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.arguments import checks_arguments
from isobasin.display import Shown, Summary
from isobasin.errors import IsobasinError, with_article
from isobasin.groups import (
    GL,
    Group,
    Heads,
    MonomialGroup,
    Orthogonal,
    OrthogonalFixingOnes,
    PairSigns,
    Product,
    RotaryCommutant,
    Trivial,
)
from isobasin.symmetries.bias_coordinates import choice_means, key_biases, sum_shares, table_means, value_biases
from isobasin.symmetries.coordinate import Coordinate
from isobasin.symmetries.hidden_coordinates import hidden_columns
from isobasin.symmetries.mean_coordinates import ReaderMean, reader_means, row_means, writer_means
from isobasin.symmetries.norm_coordinates import layer_scales, norm_coordinates, query_key_gains
from isobasin.weights import ModelSource, load

# Which spaces a scope lets move. A scope other than `model` holds the stream fixed.
SCOPES = ("first-attention", "all-attention", "first-block", "model")
ATTENTION_SCOPES = ("first-attention", "all-attention")


@dataclass(frozen=True, repr=False)
class Symmetry(Shown):
    """All changes of a model's weights, of this scope, that leave its function as it is.

    >>> print(symmetry(load("runs/seed0")))  # doctest: +SKIP
    O(256) × 6·[S8 ≀ (H32 × GL32)] × 6·ℝ*≀S1024, dimension 89,472 + 3,328 free directions
    """

    arch: Architecture
    groups: Mapping[str, Group]
    coordinates: Mapping[str, Coordinate]

    def summary(self) -> Summary:
        """The group of every space."""
        facts = {"group": self.formula, "dimension": f"{self.element_dim:,} + {self.free_dim:,} free directions"}
        rows = [(name, str(group), f"{group.dim:,}") for name, group in self.groups.items()]
        return Summary(
            f"symmetry of {with_article(self.arch.family)} model", facts, ("space", "group", "dimension"), rows
        )

    @property
    def element_dim(self) -> int:
        return sum(group.dim for group in self.groups.values())

    @property
    def free_dim(self) -> int:
        return sum(coordinate.dim for coordinate in self.coordinates.values())

    @property
    def dim(self) -> int:
        """How many directions of the weights the function does not see."""
        return self.element_dim + self.free_dim

    @property
    def formula(self) -> str:
        """The product of the groups, equal factors counted: `O(256) × 6·[S8 ≀ (H32 × GL32)]`."""
        counted = Counter(self._text(name) for name in self.groups if name not in self._members)
        terms = [_times(n, text) for text, n in counted.items() if text != "1"]
        return " × ".join(terms) or "1"

    @cached_property
    def _members(self) -> frozenset[str]:
        """The units of experts that can be permuted."""
        spaces = [self.arch.expert_spaces[name] for name in self.groups if name in self.arch.expert_spaces]
        return frozenset(member for space in spaces for member in space.members)

    def _text(self, name: str) -> str:
        """The group of a space; that of experts together with the groups of their units."""
        experts = self.arch.expert_spaces.get(name)
        inside = self.groups.get(experts.members[0]) if experts else None
        return f"{self.groups[name]} ≀ ({inside})" if inside else str(self.groups[name])

    def __str__(self) -> str:
        return f"{self.formula}, dimension {self.element_dim:,} + {self.free_dim:,} free directions"

    @checks_arguments
    def scoped(self, scope: str) -> "Symmetry":
        """The part of this symmetry that changes only the tensors of a scope."""
        check_scope(scope)
        return self if scope == "model" else self.restricted(self._spaces(scope))

    @checks_arguments
    def restricted(self, spaces: Collection[str]) -> "Symmetry":
        """The part that moves these spaces, and the free coordinates that touch nothing beyond them."""
        tensors = self._tensors(spaces)
        chosen = {name: c for name, c in self.coordinates.items() if c.touches <= tensors}
        return Symmetry(
            self.arch,
            {name: group for name, group in self.groups.items() if name in spaces},
            {name: c.without_folding() if _reads_unfolded(c, chosen) else c for name, c in chosen.items()},
        )

    @property
    def moves_stream(self) -> bool:
        return any(stream in self.groups for stream in self.arch.streams)

    @property
    def tensors(self) -> frozenset[str]:
        """Every tensor that an element or a free coordinate of it may change."""
        touched = (self.arch.touching[space] for space in self.groups)
        return frozenset().union(*touched, *(c.touches for c in self.coordinates.values()))

    def _spaces(self, scope: str) -> set[str]:
        layered = [space for space in self.arch.spaces.values() if space.layer is not None]
        first = min((space.layer for space in layered if space.layer is not None), default=0)
        if scope == "first-block":
            return {space.name for space in layered if space.layer == first}
        heads = [space for space in layered if space.role == "heads"]
        return {space.name for space in heads if scope == "all-attention" or space.layer == first}

    def _tensors(self, spaces: Collection[str]) -> set[str]:
        """Tensors with an axis in one of these spaces, their biases, and for a block the norms only it reads."""
        arch = self.arch
        weights = {name for space in spaces for name in arch.touching.get(space, ())}
        biases = {bias for bias in map(arch.bias_of, weights) if bias}
        block = any(arch.spaces[name].role == "units" for name in spaces)
        norms = [n for n in arch.norms.values() if block and all(r.weight in weights for r in arch.readers(n.name))]
        return weights | biases | {t for n in norms for t in (n.gain, n.shift)}


def check_scope(scope: object) -> None:
    """Refuse what is no scope."""
    if scope not in SCOPES:
        raise IsobasinError(f"scope {scope!r} is unknown, expected one of {', '.join(SCOPES)}")


def symmetry(model: Architecture | ModelSource) -> Symmetry:
    """The whole symmetry of a model, or of a bound architecture."""
    return _symmetry(model if isinstance(model, Architecture) else load(model).arch)


@lru_cache(maxsize=16)
def _symmetry(arch: Architecture) -> Symmetry:
    groups = {name: group_of(space) for name, space in arch.spaces.items() if name in arch.touching}
    return Symmetry(arch, groups, coordinates(arch))


def coordinates(arch: Architecture) -> dict[str, Coordinate]:
    """Every free coordinate of a bound architecture, by name, in the order in which they are set."""
    found: list[Coordinate] = [
        *reader_means(arch),
        *row_means(arch),
        *norm_coordinates(arch),
        *layer_scales(arch),
        *hidden_columns(arch),
        *key_biases(arch),
        *table_means(arch),
        *choice_means(arch),
        *value_biases(arch),
        *query_key_gains(arch),
        *sum_shares(arch),
        *writer_means(arch),
    ]
    return {c.name: c for c in sorted(found, key=lambda c: c.stage)}


def _times(n: int, text: str) -> str:
    if n == 1:
        return text
    return f"{n}·[{text}]" if " " in text else f"{n}·{text}"


def _reads_unfolded(coordinate: Coordinate, chosen: Mapping[str, Coordinate]) -> TypeGuard[ReaderMean]:
    """A reader's mean in a scope that leaves the norm in front of it as it is."""
    return isinstance(coordinate, ReaderMean) and f"norm:{coordinate.norm.name}" not in chosen


def heads_group(space: HeadSpace) -> Heads:
    shared = RotaryCommutant(space.rotary, space.interleaved) if space.shared_rotary else None
    qk, vo = GL(space.d_head - space.rotary) if shared else _qk_group(space), GL(space.value_size)
    return Heads(space.n_kv_heads, space.group_size, qk, vo, space.permutable, shared)


def group_of(space: Space | HeadSpace) -> Group:
    """The group that acts on a space."""
    if isinstance(space, HeadSpace):
        return heads_group(space)
    match space.kind:
        case "fixed":
            return Trivial(space.size)
        case "orthogonal":
            return Orthogonal(space.size)
        case "orthogonal1":
            return OrthogonalFixingOnes(space.size)
        case "permutation":
            return MonomialGroup(space.size, blocks=space.groups)
        case "permutation±":
            return MonomialGroup(space.size, "global")
        case "signed":
            return MonomialGroup(space.size, "signs")
        case "positive":
            return MonomialGroup(space.size, "positive")
        case "scaled":
            return MonomialGroup(space.size, "nonzero")


def norm_group(space: HeadSpace) -> PairSigns:
    """What acts on queries and keys behind norms on them."""
    return PairSigns(space.d_head, space.interleaved, common=space.layer_norm)


def _qk_group(space: HeadSpace) -> Group:
    """Rotary columns leave H, the others GL: the paper's central claim, and both side by side where partial. Behind a
    norm on queries and keys, signs are left."""
    if space.qk_norm:
        return norm_group(space)
    rotary = RotaryCommutant(space.rotary, space.interleaved) if space.rotary else None
    plain = GL(space.d_head - space.rotary) if space.rotary < space.d_head else None
    if rotary and plain:
        return Product((rotary, plain))
    return rotary or plain  # type: ignore[return-value]
