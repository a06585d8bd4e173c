"""The verb: several models into one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobasin.checkpoint import CheckpointWriter, dtype_name, output_dtype, with_dtype
from isobasin.errors import IsobasinError
from isobasin.match.comparable import check_comparable
from isobasin.merging.card import model_card
from isobasin.merging.mixing import Method
from isobasin.merging.recipe import Recipe
from isobasin.merging.sources import Source
from isobasin.merging.writing import BLOCK_BYTES, write_mixed
from isobasin.weights import Weights

# Matching needs scipy; a plain merge does without, and starts sooner.
if TYPE_CHECKING:
    from isobasin.match.alignment import Alignment
    from isobasin.match.matchers import Matcher
    from isobasin.merging.many import Aligner, Distance, MatcherFor


@dataclass(frozen=True)
class Merged:
    """A merge that is computed when it is read or saved.

    `models` are the inputs as they are mixed (moved, where they were aligned), `distances` how far each was from what
    it was aligned to, before and after; empty without alignment.
    """

    models: tuple[Weights, ...]
    recipe: Recipe
    method: Method
    dtypes: Mapping[str, torch.dtype]
    alignments: "tuple[Alignment | None, ...]" = ()
    distances: "tuple[Distance, ...]" = ()
    rounds: int = 0

    def __str__(self) -> str:
        how = f"{self.method.name} merge of {len(self.models)} models, {dtype_name(self.weights.dtype)}"
        if not self.distances:
            return f"{how}, not aligned"
        pairs = ", ".join(f"{d.before:.4g} → {d.after:.4g}" for d in self.distances)
        return f"{how}, distances {pairs}"

    @cached_property
    def weights(self) -> Weights:
        """The merged model, tensor by tensor when asked for."""
        first = self.models[0]
        # `exact`: its tensors have their types already, and saving them again rounds nothing.
        return replace(
            first,
            config=self._config(),
            tensors=_Mixed(self),
            dtypes=self.dtypes,
            changed=frozenset(name for name in first if not first.arch.tensors[name].buffer),
            exact=True,
        )

    def source(self, name: str) -> Source:
        return Source(name, self.models, self.dtypes[name])

    def _config(self) -> dict[str, Any]:
        first = self.models[0]
        kept = self.recipe.dtype is None and replace(first, dtypes=self.dtypes).dtype == first.dtype
        return dict(first.config) if kept else with_dtype(first.config, replace(first, dtypes=self.dtypes).dtype)

    def save(
        self,
        out: str | Path,
        *,
        force: bool = False,
        max_shard_size: int | str = "5GB",
        companions: Path | None = None,
        block_bytes: int = BLOCK_BYTES,
        watch: Callable[[str], None] | None = None,
    ) -> None:
        """Write a complete folder with a model card, a few blocks in memory at a time.

        `companions` is the folder that tokenizer and licence come from, the first model's if not given. `watch` is told
        of each tensor that is done.
        """
        first = self.models[0]
        names = {disk: name for name, disk in first.names.on_disk.items()} | dict(first.names.copies)
        sources = {disk: self.source(name) for disk, name in names.items()}
        with CheckpointWriter(
            out,
            {disk: (source.dtype, source.shape) for disk, source in sources.items()},
            config=self._config(),
            companions=companions or first.path,
            documents={"README.md": model_card(Path(out).resolve().name, self.recipe, self.distances, self.rounds)},
            inputs=[model.path for model in self.models if model.path],
            force=force,
            max_shard_size=max_shard_size,
        ) as writer:
            write_mixed(writer, sources, self.method, block_bytes=block_bytes, watch=watch)


class _Mixed(Mapping[str, Tensor]):
    """The merged tensors under the names of the patterns."""

    def __init__(self, merged: Merged) -> None:
        self._merged = merged

    def __getitem__(self, name: str) -> Tensor:
        return self._merged.source(name).whole(self._merged.method)

    def __iter__(self) -> Iterator[str]:
        return iter(self._merged.models[0])

    def __len__(self) -> int:
        return len(self._merged.models[0])


def merge(
    models: Sequence[Weights],
    *,
    weights: Sequence[float] | None = None,
    method: str = "linear",
    normalize: bool = True,
    t: float | None = None,
    dtype: str | None = None,
    matcher: "Matcher | MatcherFor | None" = None,
    aligner: "Aligner | None" = None,
    to: int | str = 0,
    rounds: int = 10,
    device: torch.device | None = None,
    names: Sequence[str] | None = None,
    matcher_name: str | None = None,
    tokenizer_source: str | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Merged:
    """Average models of one architecture (`linear`), or go from one to another along the great circle (`slerp`).

    With a `matcher` every model is first aligned to model `to`, or to the common mean (`to="mean"`, at most `rounds`
    times), as `align_many` does it; an `aligner`, a function of (moving, reference), can stand in its place. Without
    either they are mixed as they are. `weights` are equal if not given and are divided by their sum;
    slerp takes `t`, or the share of the second weight. `dtype` is the type stored numbers are first rounded to and the
    merge is written in; without it each tensor keeps the widest of its types. A matcher that depends on the pair is
    given as a function of (reference, moving); `names` are what the model card calls the models.

    >>> merge([a, b]).save("runs/merged")  # doctest: +SKIP
    """
    models = tuple(models)
    recipe = Recipe.checked(
        models=tuple(names or (str(model.path or f"model {i}, in memory") for i, model in enumerate(models))),
        weights=None if weights is None else tuple(map(float, weights)),
        method=method,
        t=t,
        normalize=normalize,
        dtype=None if dtype == "keep" else dtype,
        to=to,
        align=matcher is not None or aligner is not None,
        tokenizer_source=tokenizer_source,
    )
    if len(recipe.models) != len(models):
        raise IsobasinError(f"{len(models)} models and {len(recipe.models)} names: expected one name for each model")
    for model in models[1:]:
        check_comparable(models[0], model)
    merged = Merged(models, recipe, recipe.arithmetic(), _dtypes(models, recipe.dtype))
    if not recipe.align:
        return merged
    return _aligned(merged, matcher, aligner, matcher_name, rounds, device, watch)


def _aligned(
    merged: Merged,
    matcher: "Matcher | MatcherFor | None",
    aligner: "Aligner | None",
    matcher_name: str | None,
    rounds: int,
    device: torch.device | None,
    watch: Callable[[int, int], None] | None,
) -> Merged:
    from isobasin.merging.many import align_many

    scopes: list[str] = []

    def noted(a: Weights, b: Weights) -> "Matcher":
        assert matcher is not None
        made = matcher(a, b) if callable(matcher) else matcher
        scopes.append(made.scope)
        return made

    found = align_many(
        merged.models,
        matcher=None if matcher is None else noted,
        to=merged.recipe.to,
        rounds=rounds,
        aligner=aligner,
        device=device,
        watch=watch,
    )
    name = matcher_name or ("given" if matcher is None or callable(matcher) else type(matcher).__name__)
    return replace(
        merged,
        models=found.moved,
        recipe=replace(merged.recipe, scope=next(iter(scopes), None), matcher=name),
        alignments=found.alignments,
        distances=found.distances,
        rounds=found.rounds,
    )


def _dtypes(models: Sequence[Weights], dtype: str | None) -> dict[str, torch.dtype]:
    """The type of each merged tensor: the one asked for, or the widest it has; buffers keep the first model's."""
    found = {}
    for name, pattern in models[0].arch.tensors.items():
        widest = models[0].dtypes[name]
        if not pattern.buffer:
            widest = reduce(torch.promote_types, (model.dtypes[name] for model in models))
            widest = output_dtype(dtype or "keep", widest)
        found[name] = widest
    return found
