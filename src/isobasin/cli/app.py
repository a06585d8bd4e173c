"""The commands and their flags. Nothing heavy is imported before a command runs."""

from pathlib import Path
from typing import Annotated

import typer

from isobasin.cli.printing import emit

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Do two Transformers compute the same function? Do they lie in the same basin?",
)

Model = Annotated[str, typer.Argument(help="A Hugging Face folder, or a hub id in the local cache.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]
Out = Annotated[Path, typer.Option("-o", "--output", help="Where to write; must not exist yet.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of everything random.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output, once the new one is whole.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …")]
Cuda = Annotated[bool, typer.Option("--cuda", help="The same as --device cuda.")]
Dtype = Annotated[
    str,
    typer.Option(help="Type to write: auto (float32 where rounding would show), keep, float32, bfloat16, float16."),
]
Shard = Annotated[str, typer.Option("--max-shard-size", help="Largest file to write, such as 5GB or 200MB.")]
Scope = Annotated[str, typer.Option(help="first-attention, all-attention, first-block or model.")]
HeldOut = Annotated[Path | None, typer.Option(help="learned: data that decide; by default a tenth of what is learned.")]
Start = Annotated[str, typer.Option(help="learned: where to start, weights or activations.")]
Steps = Annotated[int, typer.Option(help="learned: steps of descent.")]
Rate = Annotated[float, typer.Option(help="learned: largest learning rate.")]
Permutations = Annotated[str, typer.Option(help="learned: units stay matched (fixed), or may change (free).")]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from isobasin import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def info(model: Model, json: Json = False) -> None:
    """Family, positions, spaces, the symmetry group and its dimension, what is tied."""
    from isobasin.cli.describing import describe, describe_lines

    facts = describe(model)
    emit(facts, describe_lines(facts), json)


@app.command()
def check(model: Model, seed: Seed = 0, json: Json = False) -> None:
    """Draw random symmetries, run the model before and after, and measure the group's dimension. Exit 1 if not ok."""
    from isobasin.cli.describing import check_facts, check_lines

    facts = check_facts(model, seed)
    emit(facts, check_lines(facts), json)
    if not facts["ok"]:
        raise typer.Exit(1)


@app.command()
def scramble(
    model: Model,
    output: Out,
    scope: Scope = "model",
    save_transform: Annotated[Path | None, typer.Option(help="Also save the transform, to invert or reuse.")] = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    max_shard_size: Shard = "5GB",
    device: Device = "cpu",
    cuda: Cuda = False,
    force: Force = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write a functionally identical model elsewhere on its orbit."""
    from isobasin.cli.moving import Saving, moved_lines, scramble_model

    saving = Saving(output, dtype, max_shard_size, force, "cuda" if cuda else device, quiet or json)
    facts = scramble_model(model, saving, scope, seed, save_transform)
    emit(facts, moved_lines(facts), json)


@app.command()
def align(
    b: Annotated[str, typer.Argument(metavar="B", help="The model that moves.")],
    to: Annotated[str, typer.Option("--to", metavar="A", help="The reference; it is only read.")],
    output: Out,
    scope: Annotated[
        str | None, typer.Option(help="model (default), all-attention, first-attention or first-block.")
    ] = None,
    matcher: Annotated[
        str, typer.Option(help="weights, activations or learned (with --data), or reference.")
    ] = "weights",
    stage2: Annotated[str, typer.Option(help="Inside each head: none, orthogonal or full.")] = "full",
    head_distance: Annotated[
        str | None, typer.Option(help="Which head is which: complete, frobenius, singular or cosine.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Text, or a .npy file of token ids or pixels; learned: or labelled data, or self."),
    ] = None,
    verify: Annotated[str, typer.Option(help="layer, model (runs it whole) or none.")] = "layer",
    save_transform: Annotated[Path | None, typer.Option(help="Also save the transform that was found.")] = None,
    untie: Annotated[
        bool, typer.Option("--untie", help="Give a tied head a tensor of its own: a larger group.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes to share the layers.")] = 1,
    held_out: Annotated[
        Path | None, typer.Option(help="learned: data that decide what is kept; by default a tenth of --data.")
    ] = None,
    start: Annotated[str, typer.Option(help="learned: where to start, weights or activations.")] = "weights",
    steps: Annotated[int, typer.Option(help="learned: steps of descent.")] = 500,
    rate: Annotated[float, typer.Option(help="learned: largest learning rate.")] = 3e-3,
    permutations: Annotated[
        str, typer.Option(help="learned: units stay matched (fixed), or may change (free).")
    ] = "fixed",
    task: Annotated[str, typer.Option(help="learned: auto, lm, mlm, text or image.")] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="learned: a folder with a tokenizer; by default A's.")] = None,
    max_samples: Annotated[int | None, typer.Option(help="learned: use at most this many samples.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="learned: samples a step.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="learned: tokens a window of text.")] = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    max_shard_size: Shard = "5GB",
    device: Device = "cpu",
    cuda: Cuda = False,
    force: Force = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Move B next to A without changing what it computes, in A's own gauge."""
    from isobasin.cli.aligning import Choices, align_lines, align_model, learn_model
    from isobasin.cli.learning import Learning
    from isobasin.cli.moving import Saving

    saving = Saving(output, dtype, max_shard_size, force, "cuda" if cuda else device, quiet or json)
    choices = Choices(scope, matcher, stage2, head_distance, data, verify, workers, seed, untie)
    if matcher == "learned":
        learning = Learning(
            data,
            held_out,
            start,
            steps,
            rate,
            permutations=permutations,
            task=task,
            tokenizer=tokenizer,
            max_samples=max_samples,
            batch_size=batch_size,
            seq_len=seq_len,
        )
        facts = learn_model(b, to, saving, choices, learning, save_transform)
    else:
        facts = align_model(b, to, saving, choices, save_transform)
    emit(facts, align_lines(facts), json)


@app.command()
def apply(
    transform: Annotated[Path, typer.Argument(help="A file written by --save-transform or invert.")],
    model: Model,
    output: Out,
    dtype: Dtype = "auto",
    max_shard_size: Shard = "5GB",
    device: Device = "cpu",
    cuda: Cuda = False,
    force: Force = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Move a model by a saved transform (a base and its fine-tune by the same one, for instance)."""
    from isobasin.cli.moving import Saving, apply_transform, moved_lines

    saving = Saving(output, dtype, max_shard_size, force, "cuda" if cuda else device, quiet or json)
    facts = apply_transform(transform, model, saving)
    emit(facts, moved_lines(facts), json)


@app.command()
def invert(
    transform: Annotated[Path, typer.Argument(help="A file written by --save-transform.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    force: Force = False,
    json: Json = False,
) -> None:
    """Turn a saved transform around."""
    from isobasin.cli.moving import invert_transform

    facts = invert_transform(transform, output, force)
    emit(facts, [f"{facts['output']}: the way back"], json)


@app.command()
def path(
    models: Annotated[list[str], typer.Argument(metavar="A B [C]", help="Two or three models of one architecture.")],
    data: Annotated[Path, typer.Option(help="Text, token ids, labelled text or images, in a file or folder.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The result file, path.json for instance.")],
    points: Annotated[int, typer.Option(help="Points of the line, both ends among them.")] = 25,
    align: Annotated[bool, typer.Option("--align", help="Also align B to A, and measure that path beside.")] = False,
    task: Annotated[str, typer.Option(help="auto, lm, mlm, text or image.")] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="A folder with a tokenizer; by default that of A.")] = None,
    max_samples: Annotated[int | None, typer.Option(help="Measure on at most this many samples.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples at a time.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens a window of text.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Where the barrier sits, part by part.")] = False,
    plane: Annotated[int, typer.Option(help="Also the loss on a plane, with this many points a side.")] = 0,
    scope: Annotated[str | None, typer.Option(help="With --align: as for `isobasin align`.")] = None,
    matcher: Annotated[str, typer.Option(help="With --align: as for `isobasin align`.")] = "weights",
    stage2: Annotated[str, typer.Option(help="With --align: none, orthogonal or full.")] = "full",
    head_distance: Annotated[str | None, typer.Option(help="With --align: as for `isobasin align`.")] = None,
    align_data: Annotated[
        Path | None, typer.Option(help="Unlabeled data for --matcher activations; by default --data itself.")
    ] = None,
    learn_data: Annotated[
        Path | None,
        typer.Option(help="learned: data of its own, or self; by default the train split of --data, where it has one."),
    ] = None,
    learn_samples: Annotated[int | None, typer.Option(help="learned: learn from at most this many samples.")] = None,
    held_out: HeldOut = None,
    start: Start = "weights",
    steps: Steps = 500,
    rate: Rate = 3e-3,
    permutations: Permutations = "fixed",
    seed: Seed = 0,
    device: Device = "cpu",
    cuda: Cuda = False,
    force: Force = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Losses along the straight line between models, naive beside aligned, and the barrier."""
    from isobasin.cli.aligning import Choices
    from isobasin.cli.learning import Learning
    from isobasin.cli.pathing import Measuring, path_facts, path_lines

    place = "cuda" if cuda else device
    measuring = Measuring(data, task, tokenizer, points, max_samples, batch_size, seq_len, explain, plane, place, seed)
    learning = None
    if align and matcher == "learned":
        learning = Learning(
            learn_data or data,
            held_out,
            start,
            steps,
            rate,
            permutations=permutations,
            task=task,
            tokenizer=tokenizer,
            max_samples=learn_samples,
            batch_size=batch_size,
            seq_len=seq_len,
            flag="--learn-data",
        )
    seen = align_data or (learning.data if learning else data)
    choices = Choices(scope, matcher, stage2, head_distance, seen, "layer", 1, seed) if align else None
    facts = path_facts(models, output, measuring, choices, learning=learning, force=force, quiet=quiet or json)
    emit(facts, path_lines(facts), json)


@app.command()
def merge(
    models: Annotated[
        list[str], typer.Argument(metavar="A B [C …] | FILE.yml", help="Models of one architecture, or a recipe.")
    ],
    output: Out,
    weights: Annotated[
        str | None, typer.Option(help="One number per model, such as 0.7,0.3; equal if left out.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="linear (default) or slerp.")] = None,
    no_align: Annotated[bool, typer.Option("--no-align", help="Mix the weights as they are.")] = False,
    to: Annotated[str | None, typer.Option(help="Align to the model of this number (0), or to their mean.")] = None,
    scope: Annotated[str | None, typer.Option(help="As for `isobasin align`.")] = None,
    matcher: Annotated[
        str | None, typer.Option(help="weights (default), activations or learned (with --data), reference.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Text, or a .npy file of token ids or pixels; learned: or labelled data, or self."),
    ] = None,
    held_out: HeldOut = None,
    start: Start = "weights",
    steps: Steps = 500,
    rate: Rate = 3e-3,
    permutations: Permutations = "fixed",
    task: Annotated[str, typer.Option(help="learned: auto, lm, mlm, text or image.")] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="learned: a folder with a tokenizer; by default A's.")] = None,
    max_samples: Annotated[int | None, typer.Option(help="learned: use at most this many samples.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="learned: samples a step.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="learned: tokens a window of text.")] = None,
    seed: Seed = 0,
    dtype: Annotated[str, typer.Option(help="Type to write: keep, float32, bfloat16 or float16.")] = "keep",
    max_shard_size: Shard = "5GB",
    device: Device = "cpu",
    cuda: Cuda = False,
    force: Force = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Average models into one, aligned first; writes a complete folder with a model card."""
    from isobasin.cli.merging import Flags, merge_lines, merge_models
    from isobasin.cli.moving import Saving

    saving = Saving(output, dtype, max_shard_size, force, "cuda" if cuda else device, quiet or json)
    learning = {
        "held_out": held_out,
        "start": start,
        "steps": steps,
        "rate": rate,
        "permutations": permutations,
        "task": task,
        "tokenizer": tokenizer,
        "max_samples": max_samples,
        "batch_size": batch_size,
        "seq_len": seq_len,
    }
    facts = merge_models(models, saving, Flags(weights, method, no_align, to, scope, matcher, data, seed, learning))
    emit(facts, merge_lines(facts), json)


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH.json…", help="Results of `isobasin path`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write, report.html for instance.")],
    force: Force = False,
    json: Json = False,
) -> None:
    """One page that opens anywhere: verdict, table, curves, where the barrier sits, provenance."""
    from isobasin.cli.reporting import report_facts, report_lines

    facts = report_facts(paths, output, force)
    emit(facts, report_lines(facts), json)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="A folder for models, figures and the page.")] = Path(
        "isobasin-demo"
    ),
    seed: Seed = 0,
    force: Force = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """The whole chain on digits that ship with the package: train, align, measure, merge, report. About a minute."""
    from isobasin.cli.showing import demo_facts, demo_lines

    facts = demo_facts(output, seed=seed, force=force, quiet=quiet or json)
    emit(facts, demo_lines(facts), json)


@app.command()
def families(json: Json = False) -> None:
    """What is supported, with the symmetry group of a well-known model of each family."""
    from isobasin.cli.describing import families_facts, families_lines

    facts = families_facts()
    emit(facts, families_lines(facts), json)
