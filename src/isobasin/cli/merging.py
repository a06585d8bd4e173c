"""The command `merge`."""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

# Matching needs scipy; a plain merge does without, and starts sooner.
if TYPE_CHECKING:
    from isobasin.cli.aligning import Choices
    from isobasin.merging.many import Aligner

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
    learning: Mapping[str, Any] = field(default_factory=dict)  # as `Learning` takes it, beside data

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
    # What was learned lies beside the output until that is written: the stack closes last.
    with Cost() as cost, ExitStack() as lessons:
        recipe = _recipe(models, saving, flags)
        device = device_named(saving.device)
        choices = _choices(recipe, flags) if recipe.align else None
        loaded = [load(name) for name in recipe.models]
        companions = _check_places(recipe, loaded, saving)
        title, total = _counted(choices, loaded[0])
        with progress(title, total, quiet=saving.quiet or not total) as step:
            merged = merge(
                loaded,
                weights=recipe.weights,
                method=recipe.method,
                normalize=recipe.normalize,
                t=recipe.t,
                dtype=recipe.dtype,
                to=recipe.to,
                device=device,
                names=recipe.models,
                matcher_name=recipe.matcher or "weights",
                tokenizer_source=recipe.tokenizer_source,
                watch=lambda done, of: step(done),
                **(_aligning(choices, flags, loaded, saving, lessons) if choices else {}),
            )
        if choices:
            merged = replace(merged, recipe=replace(merged.recipe, scope=choices.scope_used))
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


def _choices(recipe: Recipe, flags: Flags) -> "Choices":
    from isobasin.cli.aligning import Choices

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
    return choices


def _counted(choices: "Choices | None", model: Weights) -> tuple[str, int]:
    """What a bar counts for each model: layers of attention, or sweeps; learning has a bar of its own."""
    if choices is None or choices.matcher == "learned":
        return "", 0
    from isobasin.match.align_whole import WHOLE
    from isobasin.match.whole import SWEEPS

    if choices.scope_used in WHOLE:
        return "sweeps (at most)", SWEEPS
    return "aligning layers", model.arch.sizes.n_layers


def _aligning(
    choices: "Choices", flags: Flags, models: list[Weights], saving: Saving, lessons: ExitStack
) -> dict[str, Any]:
    """What `merge` is told of it: a matcher for each pair, or whoever learns."""
    from isobasin.cli.aligning import matcher_of

    if choices.matcher == "learned":
        return {"aligner": _learner(choices, flags, models, saving, lessons)}
    return {"matcher": lambda a, b: matcher_of(choices, a, b)}


def _learner(choices: "Choices", flags: Flags, models: list[Weights], saving: Saving, lessons: ExitStack) -> "Aligner":
    from isobasin.cli.aligning import matcher_of
    from isobasin.cli.learning import Learning, check_one_process, learned

    learning = Learning(flags.data, **flags.learning)
    learning.check()
    check_one_process("merge")

    def aligned(b: Weights, a: Weights) -> Any:
        number = next(i for i, model in enumerate(models) if model is b)
        context = learned(
            b,
            a,
            learning,
            matcher_of(replace(choices, matcher=learning.start), a, b),
            saving.output.with_name(f"{saving.output.name}.{number}"),
            dtype="float32",
            device=device_named(saving.device),
            verify=True,
            seed=choices.seed,
            quiet=saving.quiet,
        )
        return lessons.enter_context(context).alignment

    return aligned


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
        **_learned(merged),
        "seconds": round(cost.seconds, 3),
        "peak_rss_mb": cost.peak_rss_mb,
        "peak_anon_mb": cost.peak_anon_mb,
    }


def _learned(merged: Merged) -> dict[str, Any]:
    """What learning says of each model that moved; nothing where nothing was learned."""
    if merged.recipe.matcher != "learned":
        return {}
    from isobasin.cli.learning import learning_facts
    from isobasin.learning.align_learned import LearnedAlignment

    each = [learning_facts(a) if isinstance(a, LearnedAlignment) else None for a in merged.alignments]
    return {"learning": each}


def _lesson_lines(facts: dict[str, Any]) -> list[str]:
    lessons = facts.get("learning", [])
    if not lessons:
        return []
    from isobasin.cli.learning import learning_lines

    return [f"  model {i}: {line}" for i, lesson in enumerate(lessons) if lesson for line in learning_lines(lesson)]


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
        *_lesson_lines(facts),
        f"{facts['output']}: written as {facts['dtype']} in {facts['seconds']:.1f} s, "
        f"{facts['peak_anon_mb'] or facts['peak_rss_mb']} MB",
    ]
