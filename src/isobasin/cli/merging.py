"""The command `merge`."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isobasin.checkpoint import dtype_name
from isobasin.checkpoint.documents import read_object
from isobasin.checkpoint.location import find_folder
from isobasin.checkpoint.sharding import parse_size
from isobasin.checkpoint.workspace import check_output
from isobasin.cli.measuring import Cost
from isobasin.cli.moving import Saving, device_named
from isobasin.cli.printing import progress
from isobasin.errors import IsobasinError
from isobasin.match.comparable import check_comparable
from isobasin.merging import Merged, Recipe, merge, read_recipe
from isobasin.weights import Weights, load

RECIPES = (".yml", ".yaml")


@dataclass(frozen=True)
class Flags:
    """How to merge, as given on the command line; None where a flag was not given."""

    weights: str | None = None
    method: str | None = None
    no_align: bool = False
    to: str | None = None
    scope: str | None = None
    matcher: str | None = None
    data: Path | None = None
    seed: int = 0

    def recipe(self, models: list[str], dtype: str | None) -> Recipe:
        to = self.to or "0"
        if self.no_align and (self.to or self.scope or self.matcher):
            raise IsobasinError("--no-align: nothing is aligned, so --to, --scope and --matcher have no meaning")
        return Recipe.checked(
            models=tuple(models),
            weights=None if self.weights is None else _numbers(self.weights),
            method=self.method or "linear",
            dtype=dtype,
            align=not self.no_align,
            to=int(to) if to.isdecimal() and to.isascii() else to,
            scope=self.scope,
            matcher=self.matcher,
        )

    def check_alone(self, file: str) -> None:
        """A file says everything itself."""
        given = {
            "--weights": self.weights,
            "--method": self.method,
            "--no-align": self.no_align,
            "--to": self.to,
            "--scope": self.scope,
            "--matcher": self.matcher,
        }
        for flag, value in given.items():
            if value:
                raise IsobasinError(f"{flag} together with {file}: say it in the file")


def merge_models(models: list[str], saving: Saving, flags: Flags) -> dict[str, Any]:
    """Merge folders, or what a YAML file says; report distances and cost."""
    with Cost() as cost:
        recipe = _recipe(models, saving, flags)
        device = device_named(saving.device)
        matcher = _matcher(recipe, flags) if recipe.align else None
        loaded = [load(name) for name in recipe.models]
        companions = _check_places(recipe, loaded, saving)
        with progress("aligning layers", loaded[0].arch.sizes.n_layers, quiet=saving.quiet or not recipe.align) as step:
            merged = merge(
                loaded,
                weights=recipe.weights,
                method=recipe.method,
                normalize=recipe.normalize,
                t=recipe.t,
                dtype=recipe.dtype,
                matcher=matcher,
                to=recipe.to,
                device=device,
                names=recipe.models,
                matcher_name=recipe.matcher or "weights",
                tokenizer_source=recipe.tokenizer_source,
                watch=lambda done, of: step(done),
            )
        _save(merged, saving, companions)
    return _facts(merged, saving, cost)


def _recipe(models: list[str], saving: Saving, flags: Flags) -> Recipe:
    dtype = None if saving.dtype in ("keep", "auto") else saving.dtype
    if len(models) != 1 or not (models[0].lower().endswith(RECIPES) or Path(models[0]).is_file()):
        return flags.recipe(models, dtype)
    flags.check_alone(models[0])
    recipe = read_recipe(models[0])
    if dtype and recipe.dtype not in (None, dtype):
        raise IsobasinError(f"--dtype {dtype}, but {models[0]} says {recipe.dtype}: give one of them")
    return replace(recipe, dtype=recipe.dtype or dtype)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise IsobasinError(f"--weights {text!r}: expected numbers with commas, such as 0.7,0.3") from error


def _check_places(recipe: Recipe, models: list[Weights], saving: Saving) -> Path | None:
    """Refuse models that do not fit, and an output in the way or inside an input, before anything is computed."""
    for model in models[1:]:
        check_comparable(models[0], model)
    companions = None if recipe.tokenizer_source is None else _companions(recipe.tokenizer_source, models[0])
    inputs = [folder for folder in (*(model.path for model in models), companions) if folder]
    with suppress(OSError):  # a place that can not be looked at is for the writer to tell
        check_output(saving.output.resolve(), inputs, force=saving.force)
    parse_size(saving.max_shard_size)
    return companions


def _companions(source: str, model: Weights) -> Path:
    """The folder of tokenizer_source; its words must be those of the models, as nothing is translated here."""
    folder = find_folder(source)
    if (folder / "config.json").is_file():
        theirs, ours = (config.get("vocab_size") for config in (read_object(folder / "config.json"), model.config))
        if theirs is not None and theirs != ours:
            raise IsobasinError(
                f"tokenizer_source {source} has a vocabulary of {theirs}, the models one of {ours}: "
                "take the tokenizer of one of them; to change vocabularies align first, then mergekit"
            )
    return folder


def _matcher(recipe: Recipe, flags: Flags) -> Callable[[Weights, Weights], Any]:
    from isobasin.cli.aligning import Choices, matcher_of

    choices = Choices(
        scope=recipe.scope,
        matcher=recipe.matcher or "weights",
        stage2="full",
        head_distance=None,
        data=flags.data,
        verify="layer",
        workers=1,
        seed=flags.seed,
    )
    choices.check()
    return lambda a, b: matcher_of(choices, a, b)


def _save(merged: Merged, saving: Saving, companions: Path | None) -> None:
    done = 0
    first = merged.models[0]
    with progress("writing", len(first) + len(first.names.copies), quiet=saving.quiet) as step:

        def watch(name: str) -> None:
            nonlocal done
            done += 1
            step(done)

        merged.save(
            saving.output,
            force=saving.force,
            max_shard_size=saving.max_shard_size,
            companions=companions,
            watch=watch,
        )


def _facts(merged: Merged, saving: Saving, cost: Cost) -> dict[str, Any]:
    recipe = merged.recipe
    measured: list[dict[str, float | None]] = [{"before": d.before, "after": d.after} for d in merged.distances]
    unknown: list[dict[str, float | None]] = [{"before": None, "after": None} for _ in recipe.models]
    return {
        "output": str(saving.output),
        "method": recipe.method,
        "weights": list(recipe.shares),
        "dtype": dtype_name(merged.weights.dtype),
        "aligned": recipe.align,
        "scope": recipe.scope,
        "matcher": recipe.matcher,
        "to": recipe.to if recipe.align else None,
        "rounds": merged.rounds,
        "distances": [{"model": name, **far} for name, far in zip(recipe.models, measured or unknown)],
        "seconds": round(cost.seconds, 3),
        "peak_rss_mb": cost.peak_rss_mb,
        "peak_anon_mb": cost.peak_anon_mb,
    }


def merge_lines(facts: dict[str, Any]) -> list[str]:
    rows = [
        f"  {weight:6.4g} × {row['model']}"
        + ("" if row["before"] is None else f"  distance {row['before']:.4g} → {row['after']:.4g}")
        for weight, row in zip(facts["weights"], facts["distances"])
    ]
    if not facts["aligned"]:
        how = "not aligned"
    elif facts["to"] == "mean":
        how = f"aligned to the common mean in {facts['rounds']} rounds, scope {facts['scope']}"
    else:
        how = f"aligned to model {facts['to']}, scope {facts['scope']}"
    return [
        f"{facts['method']} merge of {len(rows)} models, {how}",
        *rows,
        f"{facts['output']}: written as {facts['dtype']} in {facts['seconds']:.1f} s, "
        f"{facts['peak_anon_mb'] or facts['peak_rss_mb']} MB",
    ]
