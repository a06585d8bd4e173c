"""The trunk of two models: what they share where only their heads, or rows of their vocabulary, differ.

The trunk consists of the tensors of the base class of transformers: embeddings and layers up to the last norm,
without a pooler; where one model has an encoder and no decoder, of the encoder alone. Alignments also use poolers,
and the parts of two heads of one class that have the same shape. Both models are written in one architecture, the
*frame*: shared tensors are their own, all others are zero on both sides (gains: one constant), so that they take no
part in any distance. The frame has the symmetry of a whole model. What is found for B in the frame is a transform of
B with its own head, which does not change its function.

Row i of two vocabularies is taken as the same token; tokenizers are not read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isobasin.alignment.comparable import check_comparable, weight_names
from isobasin.alignment.result import LeftOut
from isobasin.arch import Architecture, Pattern, describe, identity_fields
from isobasin.errors import ArchitectureError
from isobasin.symmetries.coordinate import negligible
from isobasin.symmetries.symmetry import symmetry
from isobasin.symmetries.transform import Transform
from isobasin.views import AsFloat64, Change, Tensors, View
from isobasin.weights import Weights, is_tied, untied

BASE = "Model"  # the end of the name of a base class
VOCABULARY_KEY = "vocab_size"
_OPTIONAL_PARTS = re.compile(r"\bpooler\b|\bmask_token$")  # of a base class, beside the trunk
_FILL = 2.0**-20  # gains of norms that only one model has: a constant that adds nothing to a norm of all weights


@dataclass(frozen=True)
class TrunkPair:
    """A and B in one frame. `shared` are the tensors that both have; `rows`, by tensor, how many rows both have where
    that is not all of them. `owner` is the model (0: A, 1: B) whose architecture the frame has. `heads`: whether heads
    are left out, and not only rows; `hidden` are then both models without a head, for a comparison of hidden states."""

    a: Weights
    b: Weights
    shared: frozenset[str]
    rows: Mapping[str, int]
    left_out: LeftOut
    owner: int = 1
    heads: bool = True
    hidden: tuple[Weights, Weights] | None = field(default=None, repr=False)

    def of_whole(self, transform: Transform, b: Weights) -> Transform:
        """A transform that was found in the frame, for B with its own head: without what concerns the head alone."""
        coordinates, blocks = symmetry(b.arch).coordinates, b.arch.blocks
        free = {name for name, coordinate in coordinates.items() if coordinate.touches & self.shared}
        return Transform(
            b.arch.family,
            dict(b.arch.spaces),
            {name: g for name, g in transform.elements.items() if self.shared & set(blocks[name])},
            {name: value for name, value in transform.gauge.items() if name in free},
        )


def lost_gain(pair: TrunkPair) -> str | None:
    """The gain of a norm that heads alone read, if it is zero in other places of A than of B: heads can absorb any gain
    but zero."""
    arch = pair.b.arch
    for norm in arch.norms.values():
        absorbed = not any(reader.weight in pair.shared for reader in arch.readers(norm.name))
        if norm.gain in pair.shared and absorbed:
            zero_a, zero_b = (negligible(AsFloat64(model)[norm.gain]) for model in (pair.a, pair.b))
            if not torch.equal(zero_a, zero_b):
                return norm.gain
    return None


def trunk_pair(a: Weights, b: Weights, *, largest_group: bool = False) -> TrunkPair | None:
    """The trunk of two models that differ in heads or rows of the vocabulary only; None if they are comparable as they
    are. Anything else is refused, as by `check_comparable`.

    The frame is B's, with all its rows. For comparisons (`largest_group`) the vocabulary is cut to the rows that both
    have, the trunk alone is shared where heads differ, tied heads are untied, and the frame is A's where B is a bare
    model, or can not be untied, and A is not.
    """
    try:
        check_comparable(a, b)
    except ArchitectureError:
        found = _shared(a, b, trunk_only=largest_group)
        if found is None:
            raise
        return _compared(a, b, found) if largest_group else _aligned(a, b, found)
    return None


@dataclass(frozen=True)
class _Shared:
    """The names of shared tensors, the rows both have where some have more, and the vocabulary of both."""

    names: frozenset[str]
    rows: Mapping[str, int]
    vocabulary: int | None
    base: frozenset[str]
    left_out: LeftOut

    @property
    def heads(self) -> bool:
        return any("[" not in name for name in (*self.left_out.a, *self.left_out.b))


def _shared(a: Weights, b: Weights, *, trunk_only: bool) -> _Shared | None:
    """What two models share; None if they differ in more than heads and rows of the vocabulary."""
    encoder = any(w.family.is_encoder(w.config) for w in (a, b))
    if not _has_trunk(a) or not _has_trunk(b) or not _same_trunk_settings(a, b, encoder=encoder):
        return None
    vocabulary = _smaller_vocabulary(a, b)
    base = frozenset(_base_tensors(a, encoder=encoder) | _base_tensors(b, encoder=encoder))
    names = _shared_names(a, b, base, cut_rows=vocabulary is not None)
    if not base <= names or not _same_spaces(a, b, names):
        return None
    found = _of_names(a, b, names, vocabulary, base)
    if trunk_only and found.heads:
        found = _of_names(a, b, base, vocabulary, base)
    return found if found.left_out.a or found.left_out.b else None


def _has_trunk(model: Weights) -> bool:
    """Whether a base class is known whose last hidden states are those of the one stream, or of one for each stack."""
    family = model.family
    known = not family.own and family.text is None and BASE in family.heads
    return known and (len(model.arch.streams) == 1 or family.inputs.decoder)


def _same_trunk_settings(a: Weights, b: Weights, *, encoder: bool) -> bool:
    """Whether family, sizes, positions and settings agree; those of heads only where both heads are of one class, and
    not those of a decoder for the trunk of an encoder."""
    sizes = [replace(w.arch.sizes, n_layers=0) if encoder else w.arch.sizes for w in (a, b)]
    if a.arch.family != b.arch.family or sizes[0] != sizes[1] or a.arch.rotary != b.arch.rotary:
        return False
    if _same_class(a, b) and (is_tied(a) != is_tied(b) or a.settings != b.settings):
        return False
    return _trunk_settings(a, encoder=encoder) == _trunk_settings(b, encoder=encoder)


def is_fixed(model: Weights) -> bool:
    """Whether the streams of a model can not move, as they are outputs."""
    return any(stream.kind == "fixed" for stream in model.arch.streams.values())


def _same_class(a: Weights, b: Weights) -> bool:
    return a.family.class_of(a.config) == b.family.class_of(b.config)


def _smaller_vocabulary(a: Weights, b: Weights) -> int | None:
    """The number of tokens that both have; None where neither has more."""
    sizes = [int(w.config[VOCABULARY_KEY]) for w in (a, b) if w.config.get(VOCABULARY_KEY) is not None]
    return min(sizes) if len(set(sizes)) == 2 else None


def _shared_names(a: Weights, b: Weights, base: frozenset[str], *, cut_rows: bool) -> frozenset[str]:
    """The tensors that both have, apart from further rows of the vocabulary. Heads of two classes share nothing but a
    pooler, whatever their tensors are called."""
    tables = [_vocabulary_tables(w) if cut_rows else {} for w in (a, b)]

    def same(name: str) -> bool:
        of_a, of_b = a.arch.shapes[name], b.arch.shapes[name]
        cut = tables[0].get(name) == tables[1].get(name) == 0 and of_a[1:] == of_b[1:]
        return (of_a == of_b or cut) and _words(a, name) == _words(b, name)

    in_both = weight_names(a) & weight_names(b)
    if not _same_class(a, b):
        in_both = {name for name in in_both if name in base or _OPTIONAL_PARTS.search(name)}
    return frozenset(filter(same, in_both))


def _of_names(a: Weights, b: Weights, names: frozenset[str], vocabulary: int | None, base: frozenset[str]) -> _Shared:
    shapes = {name: (a.arch.shapes[name], b.arch.shapes[name]) for name in a.arch.tensors if name in names}
    rows = {name: min(of_a[0], of_b[0]) for name, (of_a, of_b) in shapes.items() if of_a != of_b}
    left_out = LeftOut(_names_left_out(a, b, names, rows), _names_left_out(b, a, names, rows))
    return _Shared(names, rows, vocabulary, base, left_out)


def _words(model: Weights, name: str) -> list[Any]:
    """The words of a tensor's pattern, whatever its sizes are and whether it is tied."""
    return [axis.terms for axis in model.arch.tensors[name].roles[0].axes]


def _trunk_settings(model: Weights, *, encoder: bool) -> dict[str, Any]:
    """The settings of the family, without those that only a head or, for an encoder, a decoder reads."""
    found = model.family.settings_of(dict(model.config) | {"architectures": [model.family.model_class]})
    return {key: value for key, value in found.items() if not (encoder and "decoder" in key)}


def _base_tensors(model: Weights, *, encoder: bool) -> set[str]:
    """The weights of the trunk of one model."""
    family, config = model.family, _base_config(model)
    known = set(family.architecture(config).tensors)
    if encoder:
        kind = f"{family.stem}{family.encoder_heads[0]}"
        known &= set(family.architecture({**config, "architectures": [kind]}).tensors)
    return {name for name in weight_names(model) if name in known and not _OPTIONAL_PARTS.search(name)}


def _base_config(model: Weights) -> dict[str, Any]:
    text = f"{model.family.stem}Text"  # the language model of a family that has others beside it
    stem = text if model.family.class_of(model.config).startswith(text) else model.family.stem
    return dict(model.config) | {"architectures": [f"{stem}{BASE}"]}


def _same_spaces(a: Weights, b: Weights, shared: frozenset[str]) -> bool:
    """Whether heads and units of the shared layers have the same groups; the stream's may depend on the head."""
    for name, space in a.arch.spaces.items():
        if space.role != "stream" and shared & set(a.arch.blocks[name]):
            other = b.arch.spaces.get(name)
            if other is None or type(other) is not type(space) or identity_fields(space) != identity_fields(other):
                return False
    return True


def _vocabulary_tables(model: Weights) -> dict[str, int]:
    """The tensors whose size follows from the vocabulary, and on which axis."""
    size = model.config[VOCABULARY_KEY]
    larger = model.family.architecture(_described_config(model) | {VOCABULARY_KEY: size + 1})
    pairs = {n: (_axis_sizes(p), _axis_sizes(larger.tensors[n])) for n, p in model.arch.tensors.items()}
    return {n: k for n, (mine, theirs) in pairs.items() for k in range(len(mine)) if mine[k] != theirs[k]}


def _described_config(model: Weights) -> dict[str, Any]:
    """The config of the architecture: a head that the file holds is not tied, whatever the config says."""
    own = {model.family.tied_key: False} if model.family.own_head in model.arch.tensors else {}
    return dict(model.config) | own


def _axis_sizes(pattern: Pattern) -> list[int | None]:
    return [axis.size for axis in pattern.roles[0].axes] if pattern.roles else []


def _names_left_out(model: Weights, other: Weights, shared: frozenset[str], rows: Mapping[str, int]) -> tuple[str, ...]:
    """The tensors that the other model has not, a head that only here is tied to a shared tensor, and further rows."""
    arch = model.arch
    own = [name for name in arch.tensors if not arch.tensors[name].buffer and name not in shared]
    ties = {alias: name for alias, name in arch.aliases.items() if name in shared and arch.tied(name)}
    heads = [f"{alias} (tied to {name})" for alias, name in ties.items() if alias not in other.arch.aliases]
    more = [f"{name}[{n}:{arch.shapes[name][0]}]" for name, n in rows.items() if n < arch.shapes[name][0]]
    return (*own, *heads, *more)


# -- the frame --------------------------------------------------------------------------------------------------------


def _aligned(a: Weights, b: Weights, found: _Shared) -> TrunkPair:
    """Both models in B's own architecture, with all rows of B."""
    arch = _frame(b.arch, found.names)
    one, two = (_framed(w, b, arch, found.names, found.rows) for w in (a, b))
    return TrunkPair(one, two, found.names, found.rows, found.left_out, heads=found.heads)


def _compared(a: Weights, b: Weights, found: _Shared) -> TrunkPair:
    """Both models with the vocabulary that both have; where heads are left out, in a frame with the larger group."""
    a, b = (w if found.vocabulary is None else with_vocabulary(w, found.vocabulary) for w in (a, b))
    if not found.heads:
        return TrunkPair(a, b, found.names, {}, found.left_out, heads=False)
    sides = _untied(a), _untied(b)
    less = [(is_fixed(side), is_tied(side)) for side in sides]
    owner = int(less[1] <= less[0])
    arch = _frame(_without_tied_head(sides[owner].arch), found.names)
    one, two = (_framed(w, sides[owner], arch, found.names, {}) for w in (a, b))
    hidden = _hidden((one, two), (a, b), found.base)
    return TrunkPair(one, two, found.names, {}, found.left_out, owner, True, hidden)


def _untied(model: Weights) -> Weights:
    """With a head of its own, where the family has models with one (BART has none)."""
    try:
        return untied(model)
    except ArchitectureError:
        return model


def _without_tied_head(arch: Architecture) -> Architecture:
    """Tables as embeddings alone, where the head could not be taken off; the norm that it read is then an output."""
    tables = {name: replace(p, roles=p.roles[:1]) for name, p in arch.tensors.items() if len(p.roles) > 1}
    if not tables:
        return arch
    found = replace(arch, tensors={**arch.tensors, **tables})
    shown = {n: replace(x, exposed=True) for n, x in arch.norms.items() if arch.readers(n) and not found.readers(n)}
    return replace(found, norms={**arch.norms, **shown})


def _frame(arch: Architecture, shared: frozenset[str]) -> Architecture:
    """The architecture without sums along a norm that is not shared: its gain is not known here."""
    along = {norm.name for norm in arch.norms.values() if norm.gain not in shared and not norm.plain}
    return replace(arch, sums=tuple(s for s in arch.sums if s.along not in along))


def _framed(
    model: Weights, owner: Weights, arch: Architecture, shared: frozenset[str], rows: Mapping[str, int]
) -> Weights:
    """A model in the frame: shared tensors are its own, with rows that are not shared zero; all others are constant."""
    gains = {norm.gain for norm in arch.norms.values()} | set(arch.scales)

    def tensor(name: str) -> Change:
        shape = arch.shapes[name]
        if name not in shared:
            return lambda _: torch.full(shape, _FILL if name in gains else 0.0)
        return lambda t: _with_rows(t[name], rows[name], shape[0]) if name in rows else t[name]

    buffers = {name for name, pattern in arch.tensors.items() if pattern.buffer}
    changes = {name: tensor(name) for name in arch.tensors if name not in buffers}
    changes |= {name: _reader(owner, name) for name in buffers}
    return replace(
        owner,
        arch=arch,
        tensors=View(model, changes),
        dtypes={n: model.dtypes[n] if n in shared and n not in buffers else owner.dtypes[n] for n in arch.tensors},
        checkpoint=None,
        changed=frozenset(arch.tensors),
    )


def _reader(model: Weights, name: str) -> Change:
    return lambda _: model[name]


def _with_rows(tensor: Tensor, kept: int, size: int) -> Tensor:
    """The first `kept` rows, and rows of zeros up to `size`."""
    return torch.cat([tensor[:kept], tensor.new_zeros(size - kept, *tensor.shape[1:])])


def with_vocabulary(model: Weights, size: int) -> Weights:
    """The same model without the last rows of its vocabulary."""
    if model.config[VOCABULARY_KEY] == size:
        return model
    axes = _vocabulary_tables(model)
    pad = model.config.get("pad_token_id")
    config = dict(model.config) | {VOCABULARY_KEY: size}
    config |= {"pad_token_id": None} if isinstance(pad, int) and pad >= size else {}
    shapes = model.arch.stored_shapes()
    shapes |= {n: tuple(size if k == axis else x for k, x in enumerate(shapes[n])) for n, axis in axes.items()}
    arch, names = describe(config, shapes)

    def cut(name: str, axis: int) -> Change:
        return lambda t: t[name].narrow(axis, 0, size)

    tensors: Tensors = View(model, {name: cut(name, axis) for name, axis in axes.items()})
    return replace(
        model,
        arch=arch,
        config=config,
        names=names,
        tensors=tensors,
        checkpoint=None,
        changed=frozenset(arch.tensors),
    )


# -- hidden states ----------------------------------------------------------------------------------------------------


def _hidden(
    framed: Sequence[Weights], models: tuple[Weights, Weights], base: frozenset[str]
) -> tuple[Weights, Weights]:
    """The base class of both models. The gain and shift of a last norm are folded where its readers can take them up:
    heads, which are left out, or the decoder's cross attention behind the last norm of an encoder. They say nothing
    about the trunk, and only in the base class they are outputs."""
    tensors: list[Tensors] = [AsFloat64(w) for w in framed]
    free = symmetry(framed[0].arch).coordinates
    configs = [_base_config(w) for w in models]
    encoders = [w.family.is_encoder(w.config) for w in models]
    if any(encoders):  # decoders count for nothing, and an encoder may not know them
        both = encoders.index(min(encoders))
        decoder = {key: value for key, value in configs[both].items() if "decoder" in key}
        configs = [{k: v for k, v in config.items() if "decoder" not in k} | decoder for config in configs]
    outputs = models[0].family.architecture(configs[0]).norms
    for norm in framed[0].arch.norms.values():
        c, shown = free.get(f"norm:{norm.name}"), norm.name in outputs and outputs[norm.name].exposed
        inside = any(r.weight in base for r in framed[0].arch.readers(norm.name))
        if c is None or (inside and not shown) or not all(map(c.usable, tensors)):
            continue
        tensors = [View(t, c.set(c.canonical(c.read(t)))) for t in tensors]
    one, two = (_base_model(w, t, base, config) for w, t, config in zip(models, tensors, configs))
    return one, two


def _base_model(model: Weights, tensors: Tensors, base: frozenset[str], config: Mapping[str, Any]) -> Weights:
    """The trunk in its base class. An encoder alone gets a decoder of zeros, whose states are zero."""
    shapes = model.arch.stored_shapes(base)
    decoder = _decoder_shapes(model, config, base)
    arch, names = describe(config, shapes | decoder)
    zeros = {name: lambda _, shape=shape: torch.zeros(()).expand(shape) for name, shape in decoder.items()}
    dtype = next(iter(model.dtypes.values()))
    return replace(
        model,
        arch=arch,
        config=dict(config),
        names=names,
        tensors=View(tensors, zeros) if zeros else tensors,
        dtypes={name: model.dtypes.get(name, dtype) for name in arch.tensors},
        checkpoint=None,
        changed=frozenset(arch.tensors),
    )


def _decoder_shapes(model: Weights, config: Mapping[str, Any], base: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """The tensors of the base class that lie outside an encoder, which is the trunk; none for other trunks."""
    family = model.family
    if not family.encoder_heads:
        return {}
    arch = family.architecture(config)
    others = {
        name: pattern.roles[0].axes
        for name, pattern in arch.tensors.items()
        if name not in base and not any(re.search(flag.biases, name) for flag in family.bias_flags)
    }
    return {name: tuple(arch.size_of(axis) or 1 for axis in axes) for name, axes in others.items()}
