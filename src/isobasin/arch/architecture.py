"""What a family of models looks like: spaces, norms, and one pattern per tensor. No torch, no files.

A family builds an `Architecture` from its configuration; `bind` then ties it to the tensors that a checkpoint
really has, and everything later works on the bound one. Both are strict: what does not fit is an error.
"""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from isobasin.arch.pattern import Axis, Pattern, Role, Term, parse
from isobasin.errors import ArchitectureError

Kind = Literal[
    "fixed",  # nothing acts
    "permutation",
    "permutation±",  # permutations, and one sign for the whole space
    "signed",  # a sign per coordinate
    "positive",  # a positive scale per coordinate (ReLU units)
    "scaled",  # a nonzero scale per coordinate (gated units)
    "orthogonal",
    "orthogonal1",  # orthogonal maps that fix the all-ones vector
]
ROTATED = ("orthogonal", "orthogonal1")
SELF_DUAL = ("fixed", "permutation", "permutation±", "signed", *ROTATED)
SpaceRole = Literal["stream", "units", "heads", "experts"]
Side = Literal["qk", "vo", "shared"]


@dataclass(frozen=True)
class Space:
    """A vector space inside the model: the residual stream, the units of a layer, or the experts of a layer.

    `members` are the units of each expert, one space for each place of a space of experts: when experts are permuted,
    the tensors of their units go along, and what acts on units acts after that. `groups`: experts are chosen by groups
    of neighbours, which stay together (0: they are not). `latent`: a stream inside a layer, which one linear map from
    another stream writes and heads read. `layer` is the layer it belongs to (None: to no single one), `stack` the
    encoder or decoder it belongs to, and `label` its name without the number of the layer.
    """

    name: str
    size: int
    kind: Kind
    stream: bool = False
    members: tuple[str, ...] = ()
    groups: int = 0
    latent: bool = field(default=False, compare=False)
    layer: int | None = field(default=None, compare=False)
    stack: str = field(default="", compare=False)
    label: str = field(default="", compare=False)

    @property
    def role(self) -> SpaceRole:
        return "stream" if self.stream else "experts" if self.members else "units"

    @property
    def rotates(self) -> bool:
        """Whether its group holds rotations: gains of its norms are then folded before anything acts."""
        return self.kind in ROTATED

    @property
    def scales(self) -> bool:
        """Whether its group scales coordinates one by one."""
        return self.kind in ("positive", "scaled")

    @property
    def signs(self) -> bool:
        """Whether its group has a sign for each coordinate."""
        return self.kind in ("signed", "scaled")

    @property
    def permutes(self) -> bool:
        """Whether its group permutes coordinates one by one."""
        return self.signs or self.kind in ("permutation", "positive")


@dataclass(frozen=True)
class HeadSpace:
    """The heads of one attention layer. Patterns name its two faces: `qk` (queries, keys) and `vo` (values, outputs),
    or the space itself for an axis with one place for each query head.

    `d_value` is the size of a value, where it is not that of a key, `d_head`. `shared_rotary`: the rotary columns of
    keys exist once, for all heads. They are a face of their own, `rope`, and `qk` is that of the other columns.
    `rotary` columns of each head rotate (0: none), in pairs (j, j + rotary/2) or, interleaved, (2j, 2j + 1).
    `qk_norm`: queries and keys of each head pass an RMSNorm before they rotate; all heads share its gains, which are
    called `q_gain` and `k_gain`. `whole_norm`: that norm is over all heads together, with a gain for every column.
    `layer_norm`: it is a LayerNorm of each head, with gains of its own, in one tensor or, with `{h}` in its name, in
    one for each head. `plus_one`: these gains are stored less 1. `sinks` is the tensor with a number for each query
    head that takes part in its softmax beside the scores: attention weights then do not sum to one.
    """

    name: str
    n_heads: int
    n_kv_heads: int
    d_head: int
    rotary: int = 0
    interleaved: bool = False
    permutable: bool = True
    qk_norm: bool = False
    whole_norm: bool = False
    layer_norm: bool = False
    d_value: int = 0
    shared_rotary: bool = False
    layer: int | None = field(default=None, compare=False)
    stack: str = field(default="", compare=False)
    label: str = field(default="heads", compare=False)
    qk: str = field(default="", compare=False)
    vo: str = field(default="", compare=False)
    rope: str = field(default="", compare=False)
    q_gain: str = field(default="", compare=False)
    k_gain: str = field(default="", compare=False)
    plus_one: bool = field(default=False, compare=False)
    sinks: str = field(default="", compare=False)
    role: ClassVar[SpaceRole] = "heads"
    # Heads move as a whole: none of what a plain space may do to single coordinates.
    rotates: ClassVar[bool] = False
    scales: ClassVar[bool] = False
    signs: ClassVar[bool] = False
    permutes: ClassVar[bool] = False

    @property
    def group_size(self) -> int:
        return self.n_heads // self.n_kv_heads

    @property
    def own_gains(self) -> bool:
        """Whether every head has gains of its own behind a norm on queries and keys."""
        return self.whole_norm or self.layer_norm

    @property
    def gain_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tensors that hold the gains of queries, and those of keys, head by head."""
        q, k = (
            tuple(dict.fromkeys(name.replace("{h}", str(h)) for h in range(count)))
            for name, count in ((self.q_gain, self.n_heads), (self.k_gain, self.n_kv_heads))
        )
        return q, k

    @property
    def gain_patterns(self) -> dict[str, str]:
        """The patterns of these tensors."""
        words = (f".{self.d_head}",) * 2
        if self.whole_norm:
            words = (f"|{self.qk}:q|", f"|{self.qk}|")
        elif self.layer_norm and "{h}" not in self.q_gain:
            words = (f"{self.name} .{self.d_head}", f"{self.name}:kv .{self.d_head}")
        return {name: text for names, text in zip(self.gain_names, words) for name in names}

    @property
    def value_size(self) -> int:
        return self.d_value or self.d_head

    def face_size(self, face: str, *, queries: bool) -> int:
        """How long an axis of one of its faces is."""
        heads = self.n_heads if queries else self.n_kv_heads
        if face == self.vo:
            return heads * self.value_size
        if face == self.rope:
            return self.rotary * (heads if queries else 1)
        return heads * (self.d_head - self.rotary if self.shared_rotary else self.d_head)


_LATER_FIELDS = ("qk_norm", "whole_norm", "layer_norm", "members", "groups", "d_value", "shared_rotary")


def identity_fields(space: Space | HeadSpace) -> dict[str, Any]:
    """The fields that tell two spaces apart; where a space lies in its model is not among them. Nor is a norm that a
    space does not have, nor members and the like: files that were written before there were any stay the same."""
    found = {f.name: getattr(space, f.name) for f in fields(space) if f.compare}
    return {name: value for name, value in found.items() if name not in _LATER_FIELDS or value}


@dataclass(frozen=True)
class Norm:
    """A norm over a space. `skip` is the module that writes beside it where the norm sits on the skip path
    (post-norm); `exposed` says that its output is an output of the model; `plus_one`, that its gain is stored less 1
    (Gemma); `plain`, that it has no parameters (OLMo): its gain is then read as ones."""

    name: str
    kind: Literal["layer", "rms"]
    space: str
    module: str
    skip: str | None = None
    exposed: bool = False
    plus_one: bool = False
    plain: bool = False

    @property
    def gain(self) -> str:
        return f"{self.module}.weight"

    @property
    def shift(self) -> str:
        return f"{self.module}.bias"


@dataclass(frozen=True)
class Sum:
    """Vectors of the stream that matter only as a sum: what all `give` lose, all `take` may gain.

    Each entry is a tensor and its rows, from the first to the last (None: to the end). `along` names a norm
    whose head is tied to the giving tensor: then only the direction 1/γ of that norm is free.
    """

    name: str
    give: tuple[tuple[str, int, int | None], ...]
    take: tuple[tuple[str, int, int | None], ...]
    along: str | None = None


@dataclass(frozen=True)
class Sizes:
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_ff: int


@dataclass(frozen=True)
class Linear:
    """A present weight that reads a norm or writes a stream, its axes, and its bias if there is one."""

    weight: str
    axis: int
    out_axis: int | None
    bias: str | None


@dataclass(frozen=True)
class Placement:
    """Where a space lies on an axis of a tensor: `size` places from `start` on, which move as `term` says."""

    axis: int
    start: int
    size: int
    term: Term


Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Stack:
    """A tensor of a file that holds several tensors of the architecture: its shape, and where each of them lies."""

    shape: tuple[int, ...]
    slices: Mapping[str, Index]


@dataclass(frozen=True, eq=False)
class Architecture:
    """Spaces, norms and patterns of one model. `tensors` is what a checkpoint may hold, by full name.

    Compared by identity, so that what follows from one can be remembered.
    """

    family: str
    positions: str
    sizes: Sizes
    spaces: Mapping[str, Space | HeadSpace]
    norms: Mapping[str, Norm]
    tensors: Mapping[str, Pattern]
    sums: tuple[Sum, ...] = ()
    biases: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    rotary: Mapping[str, Any] = field(default_factory=dict)  # base, type and scaling of rotary positions
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of a bound one
    routers: tuple[str, ...] = ()  # weights whose outputs, one per row, pass a softmax: experts are chosen by them
    choice_biases: tuple[str, ...] = ()  # what is added to scores of experts for the choice alone
    # Relative positions: a number for every distance and head that is added to scores. Rows that one query reads
    # together form a group; none given: every query reads all of them.
    tables: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)  # LayerScale: the weight whose outputs each one multiplies
    stacks: Mapping[str, Stack] = field(default_factory=dict)  # tensors of files that hold several of `tensors`
    copied: tuple[str, ...] = ()  # beginnings of names: whatever else is called so (a vision tower), nothing moves
    # What no input reaches: rows of a table, or (None) a tensor that the class does not read. It moves, and does not
    # count in comparisons. `copied_unread`: beginnings of names of copied tensors that are not read.
    unread: Mapping[str, Sequence[int] | None] = field(default_factory=dict)
    copied_unread: tuple[str, ...] = ()

    # -- looking things up ---------------------------------------------------------------------------------

    def space_of(self, term: Term) -> Space | HeadSpace:
        """The space that moves a term: itself, the heads behind a face, or the space a norm reads."""
        if term.name in self.norms:
            return self.spaces[self.norms[term.name].space]
        return self.spaces[term.name] if term.name in self.spaces else self.faces[term.name][0]

    @cached_property
    def faces(self) -> Mapping[str, tuple[HeadSpace, Side]]:
        """The heads behind every face, and which of their two faces it is."""
        found: dict[str, tuple[HeadSpace, Side]] = {}
        for heads in self.heads():
            found |= {heads.qk: (heads, "qk"), heads.vo: (heads, "vo")}
            found |= {heads.rope: (heads, "shared")} if heads.shared_rotary else {}
        return found

    @cached_property
    def streams(self) -> Mapping[str, Space]:
        """The residual streams by name: the spaces that layers read from and write to. Most models have one; a model
        with an encoder of another kind of input has one for each stack."""
        return {name: space for name, space in self.spaces.items() if isinstance(space, Space) and space.stream}

    @cached_property
    def blocks(self) -> Mapping[str, tuple[str, ...]]:
        """Tensors by the one space they touch beside streams; those of streams alone under the name of the stream, and
        those between streams under that of the last.

        Streams (embeddings, head, their biases) come first, then the layers in their order.
        """
        order = (*self.streams, *(name for name in self.spaces if name not in self.streams))
        found: dict[str, list[str]] = {name: [] for name in order}
        for name in self.tensors:
            spaces = self.spaces_of(name)
            others = [space for space in spaces if space not in self.streams]
            assert len(others) <= 1, f"{name} joins {others}"
            if spaces:
                found[others[0] if others else [stream for stream in self.streams if stream in spaces][-1]].append(name)
        return {space: tuple(names) for space, names in found.items()}

    @cached_property
    def touching(self) -> Mapping[str, tuple[str, ...]]:
        """By space, every tensor that touches it."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            for space in self.spaces_of(name):
                found.setdefault(space, []).append(name)
        return {space: tuple(names) for space, names in found.items()}

    def spaces_of(self, tensor: str) -> list[str]:
        """The names of the spaces that a tensor touches."""
        roles = self.tensors[tensor].roles
        return sorted({self.space_of(term).name for role in roles for axis in role.axes for term in axis.terms})

    def stream_of(self, tensor: str) -> Space | None:
        """The stream that a tensor touches; of several, the one that it writes to."""
        axes = self.tensors[tensor].roles[0].axes
        terms = sorted((term for axis in axes for term in axis.terms), key=lambda term: term.dual)
        found = (self.space_of(term) for term in terms)
        return next((space for space in found if isinstance(space, Space) and space.stream), None)

    def head_streams(self, heads: HeadSpace) -> tuple[tuple[Space, ...], ...]:
        """The streams that Q, K, V and O lie on; in cross attention these may be two. Keys with columns of their own
        and columns that all heads share lie on the two streams that these read, one after the other."""

        def of(face: str, dual: bool) -> Space:
            weights = (n for n, _, _, term in self.carriers(face) if term.dual is dual and len(self.shapes[n]) > 1)
            found = self.stream_of(next(weights))
            assert found is not None, face
            return found

        shared = (of(heads.rope, False),) if heads.shared_rotary else ()
        keys = (*shared, of(heads.qk, False))
        return (of(heads.qk, True),), keys, (of(heads.vo, False),), (of(heads.vo, True),)

    def norm_of(self, space: Space | HeadSpace, *, source: bool = False) -> Norm | None:
        """The norm that a block of heads or units reads; None where it reads the stream itself.

        `source`: that of keys and values, which in cross attention is not that of the queries.
        """
        if isinstance(space, HeadSpace):
            weights = [name for name, _, _, term in self.carriers(space.qk) if term.dual != source]
        else:
            weights = [name for name, *_ in self.carriers(space.name)]
        return next((norm for norm in map(self.norm_read_by, weights) if norm), None)

    def norm_read_by(self, tensor: str) -> Norm | None:
        """The norm that a tensor reads, if it reads one."""
        words = (axis.name for axis in self.tensors[tensor].roles[0].axes)
        return next((self.norms[word] for word in words if word is not None and word in self.norms), None)

    def size_of(self, axis: Axis) -> int | None:
        """How long this axis must be; None where any length is right."""
        return sum(self.term_size(term) for term in axis.terms) if axis.terms else axis.size

    def term_size(self, term: Term) -> int:
        space = self.space_of(term)
        if isinstance(space, Space):
            return space.size
        if term.name == space.name:
            return space.n_kv_heads if term.kv else space.n_heads
        return space.face_size(term.name, queries=term.queries)

    @cached_property
    def expert_spaces(self) -> Mapping[str, Space]:
        """The spaces of experts by name."""
        return {name: space for name, space in self.spaces.items() if isinstance(space, Space) and space.members}

    @cached_property
    def expert_tensors(self) -> Mapping[str, tuple[tuple[str, ...], ...]]:
        """By space of experts, the tensors of each expert; those at one place correspond to each other."""
        return {name: tuple(map(self._with_biases, space.members)) for name, space in self.expert_spaces.items()}

    def _with_biases(self, space: str) -> tuple[str, ...]:
        biases = [bias for bias in map(self.bias_of, self.blocks[space]) if bias]
        return tuple(dict.fromkeys((*self.blocks[space], *biases)))

    @cached_property
    def expert_places(self) -> Mapping[str, tuple[str, int, int]]:
        """By tensor of an expert: the space of experts, the number of the expert, and the place among its tensors."""
        return {
            tensor: (space, e, k)
            for space, experts in self.expert_tensors.items()
            for e, tensors in enumerate(experts)
            for k, tensor in enumerate(tensors)
        }

    def of_expert(self, tensor: str, expert: int) -> str:
        """The tensor of another expert that corresponds to this tensor of one."""
        space, _, k = self.expert_places[tensor]
        return self.expert_tensors[space][expert][k]

    def without_expert(self, tensor: str) -> str:
        """A name that does not depend on the expert a tensor belongs to: that of the first expert's tensor."""
        return self.of_expert(tensor, 0) if tensor in self.expert_places else tensor

    def router_of(self, experts: str) -> str:
        """The weight that chooses among the experts of a space."""
        return next(name for name in self.blocks[experts] if len(self.shapes[name]) > 1)

    def heads(self) -> Iterator[HeadSpace]:
        return (space for space in self.spaces.values() if isinstance(space, HeadSpace))

    def readers(self, norm: str) -> tuple[Linear, ...]:
        """Every tensor with an axis that reads this norm."""
        return tuple(
            Linear(name, axis, out_axis(role, self._sources), self.bias_of(name))
            for name, role, axis, _ in self._axes_named(norm)
        )

    def writers(self, space: str) -> tuple[Linear, ...]:
        """Every tensor with an axis that lives in this stream: embeddings, output projections, their biases."""
        return tuple(
            Linear(name, axis, axis, self.bias_of(name))
            for name, _, axis, word in self._axes_named(space)
            if not word.terms[0].dual and not word.terms[0].permutation_part
        )

    def placements(self, tensor: str, space: str) -> Iterator[Placement]:
        """Every place of a tensor that a plain space moves: a whole axis, or one block of a fused one.

        A tied tensor counts once: its roles agree.
        """
        for axis, word in enumerate(self.tensors[tensor].roles[0].axes):
            start = 0
            for term in word.terms:
                if self.space_of(term).name == space:
                    yield Placement(axis, start, self.term_size(term), term)
                start += self.term_size(term)

    def carriers(self, face: str) -> Iterator[tuple[str, int, Axis, Term]]:
        """Every (tensor, axis) on which this face of a heads space appears, with the block's term."""
        for name, _, axis, word in self._axes_with.get(face, ()):
            for term in word.terms:
                if term.name == face:
                    yield name, axis, word, term

    def _axes_named(self, word: str) -> list[tuple[str, Role, int, Axis]]:
        """Every axis that is one word and nothing else."""
        return [each for each in self._axes_with.get(word, ()) if each[3].name == word]

    @cached_property
    def _axes_with(self) -> Mapping[str, list[tuple[str, Role, int, Axis]]]:
        """Every axis of every tensor, by the words that appear on it. Models with experts have thousands of spaces."""
        found: dict[str, list[tuple[str, Role, int, Axis]]] = {}
        for name, pattern in self.tensors.items():
            for role in pattern.roles:
                for axis, word in enumerate(role.axes):
                    for term in dict.fromkeys(term.name for term in word.terms):
                        found.setdefault(term, []).append((name, role, axis, word))
        return found

    @cached_property
    def _sources(self) -> frozenset[str]:
        """What a linear map may read: norms and streams."""
        return frozenset({*self.norms, *self.streams})

    def bias_of(self, weight: str) -> str | None:
        """The bias beside a weight, if this checkpoint has one."""
        bias = self.biases.get(weight) or f"{weight.removesuffix('.weight')}.bias"
        return bias if bias in self.tensors and bias != weight else None

    def offset(self, name: str) -> float:
        """What is added to a stored tensor: 1 for gains that are stored less 1."""
        return float(name in self._gains_less_one)

    @cached_property
    def _gains_less_one(self) -> frozenset[str]:
        heads = (gain for heads in self.heads() if heads.plus_one for names in heads.gain_names for gain in names)
        return frozenset([*(norm.gain for norm in self.norms.values() if norm.plus_one), *heads])

    @cached_property
    def plain_gains(self) -> Mapping[str, int]:
        """The gains that norms without parameters would have, and their sizes: whoever asks for one gets ones."""
        return {norm.gain: self.term_size(Term(norm.space)) for norm in self.norms.values() if norm.plain}

    def scale_of(self, weight: str) -> str | None:
        """The LayerScale behind a weight, if this checkpoint has one."""
        return next((name for name, of in self.scales.items() if of == weight and name in self.tensors), None)

    @cached_property
    def copied_tensors(self) -> tuple[str, ...]:
        """The weights of parts that are not described: nothing moves them, and they are compared as they are."""
        return tuple(n for n, p in self.tensors.items() if n.startswith(self.copied) and not p.buffer and not _moves(p))

    def tied(self, name: str) -> bool:
        return len(self.tensors[name].roles) > 1

    @cached_property
    def unread_rows(self) -> Mapping[str, list[int]]:
        """The rows of present tables that no input reaches."""
        found = {n: rows for n, rows in self.unread.items() if n in self.tensors and rows is not None}
        return {n: [row for row in rows[: self.shapes[n][0]] if row < self.shapes[n][0]] for n, rows in found.items()}

    @cached_property
    def read_part(self) -> "Architecture":
        """The same without the tensors that the class does not read."""
        unread = {name for name, rows in self.unread.items() if rows is None and name in self.tensors}
        if not unread:
            return self
        kept = {name: pattern for name, pattern in self.tensors.items() if name not in unread}
        shapes = {name: shape for name, shape in self.shapes.items() if name not in unread}
        sums = tuple(s for s in (_present(s, kept) for s in self.sums) if s is not None)
        return replace(self, tensors=kept, sums=sums, shapes=shapes)

    def with_unread(self, patterns: Mapping[str, Pattern]) -> "Architecture":
        """The same with tensors of other classes, which this one does not read. They follow the streams and norms that
        they read; nothing else moves them."""
        adopted = {name: self._adopted(pattern) for name, pattern in patterns.items()}
        return replace(self, tensors={**self.tensors, **adopted}, unread={**self.unread, **dict.fromkeys(adopted)})

    def _adopted(self, pattern: Pattern) -> Pattern:
        def axis(word: Axis) -> Axis:
            term = word.terms[0] if len(word.terms) == 1 else None
            known = term is not None and term.dual and (term.name in self.norms or term.name in self.streams)
            return word if known else Axis()

        roles = tuple(Role(tuple(map(axis, role.axes))) for role in pattern.roles[-1:])
        return replace(pattern, roles=roles, optional=True)

    # -- the checkpoint's side -----------------------------------------------------------------------------

    def bind(self, shapes: Mapping[str, tuple[int, ...]]) -> "Architecture":
        """This architecture with only the tensors that are there; every name and every shape is checked."""
        copied = {name: _untouched(name, len(shape)) for name, shape in shapes.items() if name.startswith(self.copied)}
        if not copied.keys() <= self.tensors.keys():
            unread = dict.fromkeys(name for name in copied if name.startswith(self.copied_unread))
            return replace(self, tensors={**copied, **self.tensors}, unread={**self.unread, **unread}).bind(shapes)
        for name in shapes:
            if name not in self.tensors:
                raise ArchitectureError(
                    f"{name}: no pattern of family {self.family} covers this tensor; expected the tensors of a "
                    f"{self.family} model: remove it, or add it to the family if it is part of the model"
                )
        for name, pattern in self.tensors.items():
            if name in shapes:
                self._check_shape(name, pattern, shapes[name])
            elif not pattern.optional and not pattern.buffer:
                raise ArchitectureError(
                    f"{name}: missing from the checkpoint, expected by family {self.family} and its config.json: "
                    "complete the folder or correct the config"
                )
        present = {name: pattern for name, pattern in self.tensors.items() if name in shapes}
        sums = tuple(s for s in (_present(s, present) for s in self.sums) if s is not None)
        bound = replace(self, tensors=present, sums=sums, shapes=dict(shapes))
        bound._check_experts()
        return bound

    def _check_experts(self) -> None:
        """Refuse experts of one layer with different tensors."""
        for name, experts in self.expert_tensors.items():
            shapes = [[self.shapes[tensor] for tensor in tensors] for tensors in experts]
            other = next((e for e, each in enumerate(shapes) if each != shapes[0]), None)
            if other is not None:
                raise ArchitectureError(
                    f"{name}: expert {other} has tensors of shapes {shapes[other]}, expected those of expert 0, "
                    f"{shapes[0]}: complete the checkpoint"
                )

    def prefixed(self, prefix: str) -> "Architecture":
        """The same architecture with a prefix before the name of every tensor."""

        def named(table: Mapping[str, Any]) -> dict[str, Any]:
            return {prefix + name: value for name, value in table.items()}

        def both(table: Mapping[str, str]) -> dict[str, str]:
            return {prefix + name: prefix + other for name, other in table.items()}

        def parts(sides: tuple[tuple[str, int, int | None], ...]) -> tuple[tuple[str, int, int | None], ...]:
            return tuple((prefix + name, *rows) for name, *rows in sides)  # type: ignore[misc]

        gains = ("q_gain", "k_gain", "sinks")
        return replace(
            self,
            spaces={
                name: replace(space, **{key: prefix + getattr(space, key) for key in gains if getattr(space, key)})
                if isinstance(space, HeadSpace)
                else space
                for name, space in self.spaces.items()
            },
            norms={
                name: replace(norm, module=prefix + norm.module, skip=norm.skip and prefix + norm.skip)
                for name, norm in self.norms.items()
            },
            tensors=named(self.tensors),
            sums=tuple(replace(each, give=parts(each.give), take=parts(each.take)) for each in self.sums),
            biases=both(self.biases),
            aliases=both(self.aliases),
            routers=tuple(prefix + name for name in self.routers),
            choice_biases=tuple(prefix + name for name in self.choice_biases),
            tables=named(self.tables),
            scales=both(self.scales),
            stacks={prefix + name: replace(stack, slices=named(stack.slices)) for name, stack in self.stacks.items()},
            unread=named(self.unread),
        )

    @cached_property
    def stack_of(self) -> Mapping[str, Stack]:
        """For every tensor that files hold together with others, what holds it."""
        return {name: stack for stack in self.stacks.values() for name in stack.slices}

    def stored_shapes(self, names: Container[str] | None = None) -> dict[str, tuple[int, ...]]:
        """The shapes of these tensors of a bound architecture (by default of all), under the names that files have."""
        known = {name for name in self.tensors if names is None or name in names}
        found = {name: self.shapes[name] for name in self.tensors if name in known and name not in self.stack_of}
        held = {name: stack for name, stack in self.stacks.items() if any(each in known for each in stack.slices)}
        return found | {name: stack.shape for name, stack in held.items()}

    def _check_shape(self, name: str, pattern: Pattern, shape: tuple[int, ...]) -> None:
        for role in pattern.roles:
            expected = [self.size_of(axis) for axis in role.axes]
            fits = len(expected) == len(shape) and all(e in (None, s) for e, s in zip(expected, shape))
            if not fits:
                words = "×".join("any" if e is None else str(e) for e in expected)
                raise ArchitectureError(
                    f"{name}: found shape {'×'.join(map(str, shape)) or 'scalar'}, expected {words} from config.json "
                    f"({pattern.text!r}): the config and the weights belong to different models"
                )


def _moves(pattern: Pattern) -> bool:
    return any(axis.terms for role in pattern.roles for axis in role.axes)


def _untouched(name: str, n_axes: int) -> Pattern:
    """The pattern of a weight that nothing moves, or of a buffer."""
    if name.endswith((".position_ids", ".inv_freq")):
        return parse("-")
    if not n_axes:
        raise ArchitectureError(f"{name}: a single number, expected a tensor with axes; this model is not supported")
    return parse(" ".join("." * n_axes))


def _present(item: Sum, tensors: Mapping[str, Pattern]) -> Sum | None:
    """The part of a sum that this checkpoint has; nothing is free unless both sides have a tensor.

    The taking side must be whole (it is what compensates); of the giving side what is there gives together.
    """
    give = tuple(part for part in item.give if part[0] in tensors)
    if not give or not all(name in tensors for name, _, _ in item.take):
        return None
    return replace(item, give=give)


def out_axis(role: Role, sources: Container[str]) -> int | None:
    """The axis of a linear map's outputs: the first beside its input, which reads one of these norms and streams, or
    else is a dual."""
    reads = [k for k, axis in enumerate(role.axes) if axis.name in sources and axis.terms[0].dual]
    duals = [k for k, axis in enumerate(role.axes) if axis.terms and all(t.dual for t in axis.terms)]
    inputs = (reads or duals)[:1]
    return next((k for k in range(len(role.axes)) if k not in inputs), None)


# -- building one from strings --------------------------------------------------------------------------------

_PLACE = re.compile(r"\{(\d*)i(?:\+(\d+))?\}")
_NORM = re.compile(r"(layer|rms)\(([^,()]+),\s*([^,()]+?)((?:,\s*(?:skip=[^,()]+|exposed|plus_one|plain))*)\)")


def per_layer(entries: Mapping[str, str], n_layers: int) -> dict[str, str]:
    """Repeat every entry that mentions a layer: `{i}`, `{2i}`, `{2i+1}` become numbers."""

    def fill(text: str, i: int) -> str:
        return _PLACE.sub(lambda m: str(int(m[1] or 1) * i + int(m[2] or 0)), text)

    out: dict[str, str] = {}
    for name, text in entries.items():
        layers = range(n_layers) if _PLACE.search(name) else range(1)
        out.update({fill(name, i): fill(text, i) for i in layers})
    return out


def build(
    *,
    family: str,
    positions: str,
    sizes: Sizes,
    spaces: list[Space],
    heads: HeadSpace | Sequence[HeadSpace],
    norms: Mapping[str, str],
    modules: Mapping[str, str],
    tensors: Mapping[str, str],
    sums: tuple[Sum, ...] = (),
    biases: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    rotary: Mapping[str, Any] | None = None,
    routers: tuple[str, ...] = (),
    choice_biases: tuple[str, ...] = (),
    tables: Mapping[str, tuple[tuple[int, ...], ...]] | None = None,
    scales: Mapping[str, str] | None = None,
    stacks: Mapping[str, Stack] | None = None,
    unread: Mapping[str, Sequence[int] | None] | None = None,
) -> Architecture:
    """Put an architecture together from a family's strings, and check that it makes sense.

    `modules` are weights that may have a bias beside them; `tensors` are listed by their whole name; `heads`
    is repeated for every layer, or given for each, and whatever mentions `{i}` is repeated too.
    """
    n = sizes.n_layers
    table = {s.name: s for s in spaces}
    every: dict[str, Space | HeadSpace] = {
        k: replace(s, label=s.label or k) for k, s in table.items() if "{i}" not in k
    }
    by_layer = [heads] * n if isinstance(heads, HeadSpace) else list(heads)
    for i, each in enumerate(by_layer):
        if each.qk:  # it has its names already
            every[each.name] = each
            continue
        gains = {key: getattr(each, key).replace("{i}", str(i)) for key in ("q_gain", "k_gain", "sinks")}
        rope = f"rope{i}" if each.shared_rotary else ""
        every[f"heads{i}"] = replace(each, name=f"heads{i}", layer=i, qk=f"qk{i}", vo=f"vo{i}", rope=rope, **gains)
    for i in range(n):
        for s in (s for s in spaces if "{i}" in s.name):
            name = s.name.format(i=i)
            every[name] = replace(s, name=name, layer=i, label=s.name.replace("{i}", ""))
    parsed = {name: _norm(name, text) for name, text in per_layer(norms, n).items()}
    sources = {*parsed, *(space.name for space in spaces if space.stream)}
    patterns: dict[str, Pattern] = {}
    for module, text in per_layer(modules, n).items():
        pattern = parse(text)
        patterns[f"{module}.weight"] = pattern
        patterns[f"{module}.bias"] = _bias(pattern, sources)
    for name, text in per_layer(tensors, n).items():
        patterns[name] = parse(text)
    for each in (space for space in every.values() if isinstance(space, HeadSpace) and space.qk_norm):
        patterns |= {name: parse(text) for name, text in each.gain_patterns.items()}
    sinks = {heads.sinks: heads.name for heads in every.values() if isinstance(heads, HeadSpace) and heads.sinks}
    patterns |= {name: parse(text) for name, text in sinks.items()}
    for name, weight in per_layer(scales or {}, n).items():
        patterns[name] = parse(f"?|{_written(patterns[weight], sources)}|")
    for norm in (norm for norm in parsed.values() if not norm.plain):
        patterns[norm.gain] = parse(f"|{norm.space}|")
        if norm.kind == "layer":
            patterns[norm.shift] = parse(f"?{norm.space}")
    arch = Architecture(
        *(family, positions, sizes, every, parsed, patterns, sums),
        biases=dict(biases or {}),
        aliases=dict(aliases or {}),
        rotary=dict(rotary or {}),
        routers=routers,
        choice_biases=choice_biases,
        tables=dict(tables or {}),
        scales=per_layer(scales or {}, n),
        stacks=dict(stacks or {}),
        unread=dict(unread or {}),
    )
    _validate(arch)
    return arch


def _written(pattern: Pattern, sources: Container[str]) -> str:
    """The space to which a weight writes."""
    axis = out_axis(pattern.roles[0], sources)
    assert axis is not None, pattern.text
    return pattern.roles[0].axes[axis].terms[0].name


def _bias(pattern: Pattern, sources: Container[str]) -> Pattern:
    role = pattern.roles[0]
    axis = out_axis(role, sources)
    assert axis is not None, pattern.text
    return Pattern(f"bias of {pattern.text!r}", (Role((role.axes[axis],)),), optional=True)


def _norm(name: str, text: str) -> Norm:
    found = _NORM.fullmatch(text)
    if found is None:
        raise ArchitectureError(
            f"norm {name}: {text!r} is not layer(space, module) or rms(space, module), with skip=module, exposed, "
            "plus_one or plain behind it"
        )
    kind: Literal["layer", "rms"] = "layer" if found[1] == "layer" else "rms"
    words = [word.strip() for word in found[4].split(",")]
    skip = next((word.removeprefix("skip=") for word in words if word.startswith("skip=")), None)
    return Norm(
        name,
        kind,
        found[2].strip(),
        found[3].strip(),
        skip,
        *(key in words for key in ("exposed", "plus_one", "plain")),
    )


def _validate(arch: Architecture) -> None:
    """Refuse what can not be a symmetry: unknown words, odd rotary sizes, rotations behind a gain that stays."""
    if not any(space.role == "stream" for space in arch.spaces.values()):
        raise ArchitectureError(f"family {arch.family}: no space is the stream; declare one with stream=True")
    for heads in arch.heads():
        if heads.rotary % 2 or heads.rotary > heads.d_head:
            raise ArchitectureError(
                f"rotary size {heads.rotary} of d_head {heads.d_head}: expected an even number up to d_head; "
                "check head_dim and the rotary fraction in config.json"
            )
        if heads.n_heads % heads.n_kv_heads:
            raise ArchitectureError(
                f"{heads.n_heads} query heads do not divide over {heads.n_kv_heads} kv heads; "
                "check num_attention_heads and num_key_value_heads in config.json"
            )
        if heads.qk_norm and (heads.d_head % 2 if heads.layer_norm else heads.rotary != heads.d_head):
            raise ArchitectureError(
                f"family {arch.family}: norms on queries and keys are supported where all {heads.d_head} columns of a "
                f"head rotate (of a LayerNorm, where their number is even), here {heads.rotary} do"
            )
    for name, pattern in arch.tensors.items():
        for role in pattern.roles:
            for term in (term for axis in role.axes for term in axis.terms):
                _check_term(arch, name, term)
        if len(pattern.roles) > 1:
            for axis in (axis for role in pattern.roles for axis in role.axes if axis.terms):
                space = arch.space_of(axis.terms[0])
                if not isinstance(space, Space) or space.kind not in SELF_DUAL:
                    raise ArchitectureError(
                        f"{name}: tied in two roles on {space.name}, whose group is not self-dual; untie it"
                    )
    for experts in arch.expert_spaces.values():
        members = [arch.spaces.get(member) for member in experts.members]
        kinds = {(s.size, s.kind) if isinstance(s, Space) and s.role == "units" else None for s in members}
        whole = not experts.groups or experts.size % experts.groups == 0
        if (
            experts.kind != "permutation"
            or len(members) != experts.size
            or len(kinds) != 1
            or None in kinds
            or not whole
        ):
            raise ArchitectureError(
                f"space {experts.name}: expected a permutation of {experts.size} experts, each with a space of units, "
                "all of one size and kind, in groups of one size; correct its members"
            )
    for norm in arch.norms.values():
        place = arch.spaces.get(norm.space)
        if not isinstance(place, Space):
            raise ArchitectureError(f"norm {norm.name}: {norm.space!r} is not a space of this family")
        if place.kind in ROTATED and not norm.plain and not gain_is_free(arch, norm):
            raise ArchitectureError(
                f"norm {norm.name} ({norm.module}): its gain can not be folded, so {norm.space} can not rotate; "
                "declare a permutation kind"
            )


def _check_term(arch: Architecture, name: str, term: Term) -> None:
    known = term.name in arch.norms or term.name in arch.spaces or term.name in arch.faces
    if not known:
        raise ArchitectureError(f"{name}: {term.name!r} is no space, face or norm of family {arch.family}")
    if term.name in arch.norms and not term.dual:
        raise ArchitectureError(f"{name}: a norm is read through its dual; write {term.name}*")


def stream_kind(norm: str, *, tied: bool = False, bare: bool = False, post_norm: bool = False) -> Kind:
    """The group of the stream: folded gains leave rotations, a gain that can not fold (tied, post-norm) permutations.

    RMSNorm keeps every sign, LayerNorm one for the whole stream; a bare model outputs the stream itself.
    """
    if bare:
        return "fixed"
    if tied or post_norm:
        return "signed" if norm == "rms" else "permutation±"
    return "orthogonal" if norm == "rms" else "orthogonal1"


def units_kind(activation: str) -> Kind:
    """The group of units: permutations for any elementwise activation, with positive scales for ReLU and signs for odd
    functions."""
    return {"relu": "positive", "tanh": "signed"}.get(activation, "permutation")  # type: ignore[return-value]


def gain_is_free(arch: Architecture, norm: Norm) -> bool:
    """A gain folds into its readers if they are all there is: no skip path, no second role, no output."""
    readers = arch.readers(norm.name)
    return (
        not norm.skip
        and not norm.exposed
        and not norm.plain
        and bool(readers)
        and not any(arch.tied(r.weight) for r in readers)
    )
