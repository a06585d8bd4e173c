"""Merge several models into one folder with a model card."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from isobasin.alignment.trunk import trunk_pair
from isobasin.checkpoint import CheckpointWriter, dtype_name, output_dtype, with_dtype
from isobasin.checkpoint.folder import MODEL_CARD
from isobasin.display import Shown, Summary
from isobasin.errors import IsobasinError
from isobasin.merging.average import BLOCK_BYTES, MergedStack, MergedTensor, write_merged
from isobasin.merging.card import model_card, read_card
from isobasin.merging.recipe import MAX_ROUNDS, MergeRecipe
from isobasin.views import Change, View
from isobasin.weights import ModelSource, Weights, load

# Alignment needs scipy; a merge without alignment does not import it, and starts sooner.
if TYPE_CHECKING:
    from isobasin.alignment.align import Matcher
    from isobasin.alignment.result import Alignment
    from isobasin.merging.joint_alignment import Aligner, Distance

# Distance left in the median layer, relative to its norm; measured: unrelated models 0.95 to 1.3, fine-tunes 0.05.
FAR = 0.9
COMPARED = 8  # layers whose distance is measured where nothing is aligned, in their smallest matrix
REMEDY = "align them first (leave out --no-align or align=False; in a file, `align: true`), or "


@dataclass(frozen=True)
class SharedTensors:
    """What models share that differ in heads or rows of the vocabulary. `rows`: how many rows all have, where some have
    more; `left_out`: by model, the tensors and rows that are not averaged."""

    names: frozenset[str]
    rows: Mapping[str, int]
    left_out: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(models: Sequence[Weights]) -> "SharedTensors | None":
        """None where all models are of one architecture."""
        pairs = [trunk_pair(models[0], model) for model in models[1:]]
        found = [pair for pair in pairs if pair is not None]
        if not found:
            return None
        names = frozenset[str].intersection(*(pair.shared for pair in found))
        rows = {
            name: min(model.arch.shapes[name][0] for model in models)
            for name in sorted(names)
            if any(name in pair.rows for pair in found)
        }
        first = tuple(dict.fromkeys(name for pair in found for name in pair.left_out.a))
        return SharedTensors(names, rows, (first, *(pair.left_out.b if pair else () for pair in pairs)))

    @property
    def lines(self) -> tuple[str, ...]:
        """What was not averaged, in sentences."""
        first, *others = self.left_out
        kept = [f"Taken from model 0 alone: {', '.join(first)}."] if first else []
        return (*kept, *(f"Left out of model {i}: {', '.join(names)}." for i, names in enumerate(others, 1) if names))


@dataclass(frozen=True, repr=False)
class MergeResult(Shown):
    """A merge that is computed when it is read or saved.

    `models` are the inputs as they are combined (after alignment), `distances` the distance of each from its reference
    before and after alignment; empty without alignment. `shared`: what is averaged where heads or vocabularies differ;
    all else is taken from the first model.
    """

    models: tuple[Weights, ...]
    recipe: MergeRecipe
    alignments: "tuple[Alignment | None, ...]" = ()
    distances: "tuple[Distance, ...]" = ()
    rounds: int = 0
    shared: SharedTensors | None = None

    def __str__(self) -> str:
        how = f"{self.recipe.method} merge of {len(self.models)} models, {dtype_name(self.weights.dtype)}"
        if not self.distances:
            return f"{how}, not aligned"
        pairs = ", ".join(f"{d.before:.4g} → {d.after:.4g}" for d in self.distances)
        return f"{how}, distances {pairs}"

    def summary(self) -> Summary:
        """What was mixed, how far apart it was, and what was left out."""
        distances = self.distances or [None] * len(self.models)
        rows = [
            (name, f"{share:.4g}", *(("–", "–") if d is None else (f"{d.before:.4g}", f"{d.after:.4g}")))
            for name, share, d in zip(self.recipe.models, self.recipe.shares, distances)
        ]
        facts = {"not averaged": " ".join(self.shared.lines)} if self.shared else {}
        facts |= {"warning": self.warning} if self.warning else {}
        return Summary(str(self), facts, ("model", "weight", "before", "after"), rows)

    @cached_property
    def warning(self) -> str:
        """Why the average will probably be worse than the models; empty where nothing speaks against it, where
        alignment was learned (a low loss on the path needs no small distance), and for sums of differences."""
        differences = not self.alignments and min(self.recipe.shares) < 0
        if differences or self.recipe.matcher in ("learned", "LearnedMatching"):
            return ""
        reference, left = self._layers_left()
        far = [f"{i} ({distance:.2g})" for i, distance in left.items() if distance >= FAR]
        if not far:
            return ""
        state, still, remedy = ("after alignment, ", "still ", "") if self.alignments else ("", "", REMEDY)
        return (
            f"the average will probably be worse than the models: {state}layers of model {', '.join(far)} are {still}"
            f"about as far from those of model {reference} as unrelated ones (1 and more, as a share of their norm); "
            f"{remedy}measure it with `isobasin path`"
        )

    def _layers_left(self) -> tuple[int, dict[int, float]]:
        """How far layers of the models are from those of a reference, whose number comes first."""
        if not self.alignments:
            first, *others = self.models
            return 0, {i: _layers_apart(first, other) for i, other in enumerate(others, 1)}
        found = {i: _layers_left(each) for i, each in enumerate(self.alignments) if each is not None}
        return self.recipe.to if isinstance(self.recipe.to, int) else 0, found

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type of each merged tensor: that of the recipe, or the widest of the models; for a buffer, the first."""
        found = {}
        for name, pattern in self.models[0].arch.tensors.items():
            found[name] = self.models[0].dtypes[name]
            if not pattern.buffer:
                widest = reduce(torch.promote_types, (model.dtypes[name] for model in self._models(name)))
                found[name] = output_dtype(self.recipe.dtype or "keep", widest)
        return found

    @cached_property
    def weights(self) -> Weights:
        """The merged model; each tensor is computed when it is read."""
        first, method = self.models[0], self.recipe.arithmetic()

        def merged(name: str) -> Change:
            offset = first.arch.offset(name)
            return lambda _: self._tensor(name).whole(method) + offset if offset else self._tensor(name).whole(method)

        # `exact`: the tensors already have their final types, and saving them again rounds nothing.
        return replace(
            first,
            config=self._config(),
            tensors=View(first, {name: merged(name) for name in first}),
            dtypes=self.dtypes,
            changed=frozenset(name for name in first if not first.arch.tensors[name].buffer),
            exact=True,
        )

    def _models(self, name: str) -> tuple[Weights, ...]:
        """The models whose tensors of this name are averaged: all of them, or the first alone."""
        return self.models if self.shared is None or name in self.shared.names else self.models[:1]

    def _tensor(self, name: str) -> MergedTensor:
        models, rows = self._models(name), self.shared.rows.get(name) if self.shared else None
        return MergedTensor(name, models, self.dtypes[name], rows, copied=len(models) == 1)

    def _disk_tensor(self, disk: str, names: Sequence[str]) -> MergedTensor | MergedStack:
        parts = {name: self._tensor(name) for name in names}
        stacked = names[0] in self.models[0].names.slices
        return MergedStack(disk, parts) if stacked else parts[names[0]]

    def _config(self) -> dict[str, Any]:
        first, dtype = self.models[0], replace(self.models[0], dtypes=self.dtypes).dtype
        unchanged = self.recipe.dtype is None and dtype == first.dtype
        return dict(first.config) if unchanged else with_dtype(first.config, dtype)

    def _model_card(self, title: str) -> str:
        lines = self.shared.lines if self.shared else ()
        parents = [read_card(model.path) for model in self.models]
        return model_card(title, self.recipe, parents, self.distances, self.rounds, lines)

    def save(
        self,
        out: str | Path,
        *,
        force: bool = False,
        max_shard_size: int | str = "5GB",
        companions: Path | None = None,
        trust_remote_code: bool = False,
        block_bytes: int = BLOCK_BYTES,
        watch: Callable[[str], None] | None = None,
    ) -> None:
        """Write a complete folder with a model card; a few blocks are in memory at a time.

        `companions` is the folder that all other files are copied from, by default that of the first model; Python
        files and keys that name code only with `trust_remote_code`. `watch` is called after each tensor.
        """
        first = self.models[0]
        names = dict(first.names.by_disk) | {copy: (name,) for copy, name in first.names.copies.items()}
        tensors = {disk: self._disk_tensor(disk, held) for disk, held in names.items()}
        with CheckpointWriter(
            out,
            {disk: (tensor.dtype, tensor.shape) for disk, tensor in tensors.items()},
            config=self._config(),
            companions=companions or first.path,
            documents={MODEL_CARD: self._model_card(Path(out).resolve().name)},
            inputs=[model.path for model in self.models if model.path],
            force=force,
            max_shard_size=max_shard_size,
            trust_remote_code=trust_remote_code,
        ) as writer:
            write_merged(writer, tensors, self.recipe.arithmetic(), block_bytes=block_bytes, watch=watch)


def merge(
    models: Sequence[ModelSource],
    *,
    align: bool = True,
    weights: Sequence[float] | None = None,
    method: str = "linear",
    normalize: bool = True,
    t: float | None = None,
    dtype: str | None = None,
    matcher: "Matcher | None" = None,
    aligner: "Aligner | None" = None,
    to: int | str = 0,
    rounds: int = MAX_ROUNDS,
    device: torch.device | str | None = None,
    names: Sequence[str] | None = None,
    matcher_name: str | None = None,
    tokenizer_source: str | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> MergeResult:
    """Average models of one architecture (`linear`), or interpolate between two on the great circle (`slerp`).

    >>> merge([a, b]).save("path/to/merged")  # doctest: +SKIP

    Every model is first aligned to model `to`, or to the common mean (`to="mean"`, at most `rounds` times), by the
    `matcher` (`WeightMatching()` unless given) or the `aligner`, see `align_many`. With `align=False` the models are
    mixed as they are. `weights` are equal if not given
    and are divided by their sum; slerp takes `t`, or the share of the second weight. `dtype` is the type that stored
    numbers are first rounded to and that the merge is written in; without it each tensor has the widest of its types.
    `names` are the names of the models in the model card. Where heads or rows of the vocabulary differ, what all models
    share is averaged, and everything else is that of the first.
    """
    given = tuple(map(load, models))
    if not align and (matcher is not None or aligner is not None):
        raise IsobasinError("merge: align=False, but a matcher or an aligner is given; leave one of them out")
    recipe = MergeRecipe(
        models=tuple(names or (_name_of(source, i) for i, source in enumerate(models))),
        weights=None if weights is None else tuple(map(float, weights)),
        method=method,
        t=t,
        normalize=normalize,
        dtype=None if dtype == "keep" else dtype,
        to=to,
        align=align,
        tokenizer_source=tokenizer_source,
    )
    if len(recipe.models) != len(given):
        raise IsobasinError(f"{len(given)} models and {len(recipe.models)} names: expected one name for each model")
    shared = SharedTensors.of(given)
    if not align:
        return MergeResult(given, recipe, shared=shared)
    from isobasin.merging.joint_alignment import align_many

    found = align_many(given, matcher=matcher, to=to, rounds=rounds, aligner=aligner, device=device, watch=watch)
    default = "weights" if aligner is None else "given"
    name = matcher_name or (default if matcher is None else type(matcher).__name__)
    recipe = replace(recipe, scope=found.scope, matcher=name)
    return MergeResult(found.transported, recipe, found.alignments, found.distances, found.rounds, shared)


def _layers_left(found: "Alignment") -> float:
    """The median distance of the parts in layers: gains and embeddings may be similar in unrelated models."""
    rows = [float(str(row["distance_after"])) for row in found.per_layer if row["layer"] is not None]
    return median(rows) if rows else 0.0


def _layers_apart(a: Weights, b: Weights) -> float:
    """The median distance of layers as they are stored, relative to the norm of those of A."""
    parts = [
        matrices
        for space, names in a.arch.blocks.items()
        if a.arch.spaces[space].layer is not None
        and (
            matrices := [
                n for n in names if len(a.arch.shapes[n]) > 1 and n in b and a.arch.shapes[n] == b.arch.shapes[n]
            ]
        )
    ]
    smallest = [min(names, key=lambda name: prod(a.arch.shapes[name])) for names in parts]
    pairs = ((a[name].double(), b[name].double()) for name in smallest[:: max(1, len(smallest) // COMPARED)])
    found = [float((x - y).norm() / x.norm().clamp(min=1e-300)) for x, y in pairs]
    return median(found) if found else 0.0


def _name_of(source: ModelSource, number: int) -> str:
    """The name of a model in the card: the path or hub id it was given by, or its folder."""
    if isinstance(source, str | Path):
        return str(source)
    path = source.path if isinstance(source, Weights) else None
    return str(path or f"model {number}, in memory")
