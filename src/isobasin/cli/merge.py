"""The command `merge`."""

import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from isobasin.cli.align import AlignSetup, learning_facts, learning_lines
from isobasin.cli.options import (
    SELF,
    VERIFY,
    DataOptions,
    DeviceOptions,
    LearnOptions,
    LearnSetup,
    MatchData,
    MatchOptions,
    PrintOptions,
    SaveOptions,
    Seed,
    Verify,
    check_choice,
    choice,
    with_options,
)
from isobasin.cli.output import (
    check_outputs,
    companion_facts,
    counted,
    emit,
    existing,
    measured_cost,
    not_copied_lines,
    note,
    progress,
    verified_change,
)
from isobasin.errors import IsobasinError

if TYPE_CHECKING:
    import torch

    from isobasin.merging import MergeRecipe, MergeResult
    from isobasin.weights import Weights

RECIPES = (".yml", ".yaml")


@dataclass(frozen=True, kw_only=True)
class MergeSaveOptions(SaveOptions):
    dtype: Annotated[str, choice("keep, float32, bfloat16, float16", "Type: keep, float32, bfloat16 or float16.")] = (
        "keep"
    )


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What a YAML file can say instead; None where an option was not given."""

    panel: ClassVar[str] = "Alignment"
    weights: Annotated[
        str | None, typer.Option(metavar="X,Y,…", help="Such as 0.7,0.3; equal by default.", rich_help_panel="Options")
    ] = None
    method: Annotated[
        str | None, choice("linear, slerp, svd", "linear (default), slerp; svd for LoRA.", rich_help_panel="Options")
    ] = None
    no_align: Annotated[bool, typer.Option("--no-align", help="Average the weights as they are.")] = False
    to: Annotated[str | None, typer.Option(metavar="X", help="Align to this model (0), or to the mean.")] = None
    scope: Annotated[
        str | None, choice("model, all-attention, first-attention, first-block", "As for `isobasin align`.")
    ] = None
    matcher: Annotated[
        str | None,
        choice("weights, activations, learned, reference", "weights (default), activations, learned, reference."),
    ] = None


@with_options
def merge_command(
    *,
    models: Annotated[
        list[str], typer.Argument(metavar="A B [C …] | FILE.yml", help="Models of one trunk, or a YAML file.")
    ],
    save: MergeSaveOptions,
    options: RecipeOptions,
    data: MatchData = None,
    verify: Verify = "auto",
    learn: LearnOptions,
    reading: DataOptions,
    seed: Seed = 0,
    device: DeviceOptions,
    show: PrintOptions,
) -> None:
    """Align models and average them into one; writes a complete folder with a model card. LoRA adapters of one base are
    merged into one adapter."""
    if _are_adapters(models):
        facts = _merge_adapters(models, save, options)
        emit(facts, [facts["summary"], f"{facts['output']}: an adapter for the base of the first"], show.json)
        return
    from isobasin.merging import merge
    from isobasin.weights import load

    check_choice("--verify", verify, VERIFY)
    with measured_cost() as cost, ExitStack() as until_written:
        recipe = _recipe(models, save, options)
        place = device.find()
        setup = None
        if recipe.align:
            match = MatchOptions(scope=recipe.scope, matcher=recipe.matcher or "weights")
            learning = LearnSetup(learn, reading, data) if match.matcher == "learned" else None
            setup = AlignSetup(match, data, seed, learning)
            setup.check("merge")
        loaded = [load(name) for name in recipe.models]
        if setup and setup.learning:  # the loss between heads that differ says nothing
            from isobasin.alignment.comparable import check_comparable

            for other in loaded[1:]:
                check_comparable(loaded[0], other)
        companions = None if recipe.tokenizer_source is None else _companions(recipe.tokenizer_source, loaded[0])
        folders = [folder for folder in (*(model.path for model in loaded), companions) if folder]
        check_outputs(save, [*folders, *existing(data)])
        with progress(quiet=show.silent) as on_progress:
            how: dict[str, Any] = {"align": recipe.align}
            if setup and setup.learning:
                labels = {str(number): model for number, model in enumerate(loaded)}
                running: dict[str, Any] = {"dtype": "float32", "device": place, "quiet": show.silent}
                how |= {"aligner": setup.aligner(labels, save.output.resolve(), until_written, on_progress, **running)}
            elif setup:
                how |= {"matcher": setup.matcher(), "watch": partial(on_progress, setup.title)}
            merged = merge(
                loaded,
                weights=recipe.weights,
                method=recipe.method,
                normalize=recipe.normalize,
                t=recipe.t,
                dtype=recipe.dtype,
                to=recipe.to,
                device=place,
                names=recipe.models,
                matcher_name=recipe.matcher or "weights",
                tokenizer_source=recipe.tokenizer_source,
                **how,
            )
        measured = _measured(merged, loaded, data, reading, seed=seed, device=place)
        warnings = [text for text in (merged.warning if not measured else "", measured.get("warning", "")) if text]
        if warnings and not show.silent:
            note("\n".join(warnings))
        moved = [(before, after) for before, after in zip(loaded, merged.models) if after is not before]
        changes = [verified_change(*pair, verify, seed=seed, quiet=show.silent).largest for pair in moved]
        if setup:
            merged = replace(merged, recipe=replace(merged.recipe, scope=setup.scope))
        with progress(quiet=show.silent) as on_progress:
            first = merged.models[0]
            merged.save(
                save.output,
                force=save.force,
                max_shard_size=save.max_shard_size,
                companions=companions,
                trust_remote_code=save.trust_remote_code,
                watch=counted(on_progress, "writing", len(first) + len(first.names.copies)),
            )
    largest = max((change for change in changes if change is not None), default=None)
    facts = merge_facts(merged, save.output) | {"max_output_change": largest} | cost
    if copied := len(merged.weights.arch.copied_tensors):
        facts["copied"] = copied
    facts |= measured | {"warning": "; ".join(warnings) or None}
    facts |= companion_facts(companions or loaded[0].path, save)
    emit(facts, merge_lines(facts), show.json)


def _measured(
    merged: "MergeResult",
    models: "list[Weights]",
    data: Path | None,
    reading: DataOptions,
    *,
    seed: int,
    device: "torch.device",
) -> dict[str, Any]:
    """The loss of each model and of the average, where data are given that can be measured on; otherwise nothing."""
    from isobasin.path.barrier import CONNECTED_NATS
    from isobasin.path.evaluation import evaluate_models

    if data is None or data == SELF or merged.shared is not None:
        return {}
    try:
        task = reading.open(data, models, seed=seed, split="test")
        *losses, loss = (row["loss"] for row in evaluate_models([*models, merged.weights], task, device=device))
    except IsobasinError:  # inputs without labels, or models without a head
        return {}
    found: dict[str, Any] = {"loss": {"models": losses, "merged": loss, "data": task.name}}
    if not loss <= max(losses) + CONNECTED_NATS:
        shown = ", ".join(f"{each:.4g}" for each in losses)
        found["warning"] = (
            f"the average is worse than the models: its loss on {task.name} is {loss:.4g}, theirs are {shown}"
        )
    return found


def _are_adapters(models: list[str]) -> bool:
    """Whether all of these are folders of adapters."""
    from isobasin.checkpoint.folder import is_adapter

    return len(models) > 1 and all(Path(model).is_dir() and is_adapter(Path(model)) for model in models)


def _merge_adapters(models: list[str], save: SaveOptions, options: RecipeOptions) -> dict[str, Any]:
    from isobasin.checkpoint.adapter import check_adapter_output
    from isobasin.merging.adapters import merge_adapters

    for name in ("scope", "matcher"):
        if getattr(options, name):
            raise IsobasinError(f"--{name}: adapters are aligned in the group of their factors, leave it out")
    to, out = options.to or "0", save.output.resolve()
    if not re.fullmatch(r"[0-9]{1,9}", to):
        raise IsobasinError(f"--to {to!r}: adapters are aligned to one of them, expected its number")
    check_adapter_output(out, force=save.force, inputs=list(map(Path, models)))
    weights = None if options.weights is None else _numbers(options.weights)
    method = options.method or "linear"
    found = merge_adapters(models, weights=weights, method=method, align=not options.no_align, to=int(to))
    found.save(out, force=save.force)
    facts: dict[str, Any] = {"output": str(save.output), "adapters": models, "method": method, "summary": str(found)}
    return facts | {"error": found.error, "naive_error": found.naive_error, "modules": dict(found.errors)}


def _recipe(models: list[str], save: SaveOptions, options: RecipeOptions) -> "MergeRecipe":
    """The recipe of a YAML file, or that of the options."""
    from isobasin.merging import read_recipe
    from isobasin.merging.recipe import MergeRecipe

    dtype = None if save.dtype in ("keep", "auto") else save.dtype
    if len(models) == 1 and (models[0].lower().endswith(RECIPES) or Path(models[0]).is_file()):
        file = models[0]
        for name, value in vars(options).items():
            if value:
                raise IsobasinError(f"--{name.replace('_', '-')} together with {file}: say it in the file")
        recipe = read_recipe(file)
        if dtype and recipe.dtype not in (None, dtype):
            raise IsobasinError(f"--dtype {dtype}, but {file} says {recipe.dtype}: give one of them")
        return replace(recipe, dtype=recipe.dtype or dtype)
    if options.no_align and (options.to or options.scope or options.matcher):
        raise IsobasinError("--no-align: nothing is aligned, so --to, --scope and --matcher have no meaning")
    to = options.to or "0"
    return MergeRecipe(
        models=tuple(models),
        weights=None if options.weights is None else _numbers(options.weights),
        method=options.method or "linear",
        dtype=dtype,
        align=not options.no_align,
        to=int(to) if re.fullmatch(r"[0-9]{1,9}", to) else to,
        scope=options.scope,
        matcher=options.matcher,
    )


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise IsobasinError(f"--weights {text!r}: expected numbers with commas, such as 0.7,0.3") from error


def _companions(source: str, model: "Weights") -> Path:
    """The folder of tokenizer_source. Its vocabulary must be that of the models: embeddings are not converted."""
    from isobasin.checkpoint.folder import find_folder, read_object

    folder = find_folder(source)
    if (folder / "config.json").is_file():
        theirs, ours = (config.get("vocab_size") for config in (read_object(folder / "config.json"), model.config))
        if theirs is not None and theirs != ours:
            raise IsobasinError(
                f"tokenizer_source {source} has a vocabulary of {theirs}, the models one of {ours}: "
                "take the tokenizer of one of them; to change vocabularies align first, then mergekit"
            )
    return folder


def merge_facts(merged: "MergeResult", output: Path) -> dict[str, Any]:
    from isobasin.checkpoint import dtype_name

    recipe = merged.recipe
    distances: list[dict[str, Any]] = [{"before": d.before, "after": d.after} for d in merged.distances]
    unknown: list[dict[str, Any]] = [{"before": None, "after": None} for _ in recipe.models]
    learned = recipe.matcher == "learned"
    return {
        "output": str(output),
        "method": recipe.method,
        "weights": list(recipe.shares),
        "dtype": dtype_name(merged.weights.dtype),
        "aligned": recipe.align,
        "scope": recipe.scope,
        "matcher": recipe.matcher,
        "to": recipe.to if recipe.align else None,
        "rounds": merged.rounds,
        "distances": [{"model": name, **row} for name, row in zip(recipe.models, distances or unknown)],
        **_left_out(merged),
        **({"learning": [learning_facts(found) or None for found in merged.alignments]} if learned else {}),
    }


def _left_out(merged: "MergeResult") -> dict[str, Any]:
    """What JSON adds where heads or vocabularies differ: what was not averaged, by model."""
    if merged.shared is None:
        return {}
    names = [list(each) for each in merged.shared.left_out]
    return {"trunk": True, "left_out": names, "notes": list(merged.shared.lines)}


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
    learned = [
        f"  model {i}: {line}"
        for i, found in enumerate(facts.get("learning", []))
        for line in learning_lines(found or {})
    ]
    other = f"  {facts.get('copied')} tensors outside the language model are averaged as they are, not aligned"
    return [
        f"{facts['method']} merge of {len(rows)} models, {how}",
        *rows,
        *([other] if facts.get("copied") else []),
        *learned,
        *(f"  {line}" for line in facts.get("notes", [])),
        *(f"  {line}" for line in not_copied_lines(facts)),
        *([f"  {facts['warning']}"] if facts.get("warning") else []),
        f"{facts['output']}: written as {facts['dtype']} in {facts['seconds']:.1f} s, "
        f"{facts['peak_anon_mb'] or facts['peak_rss_mb']} MB of memory",
    ]
