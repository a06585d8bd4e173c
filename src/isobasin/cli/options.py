"""Options that several commands share, and the records in which commands receive them.

A command names a record among its parameters, and `with_options` gives the command one option for each field of the
record: name, type, default and help text are declared once. Nothing heavy is imported before a command runs, so
`isobasin --help` loads no torch.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from isobasin.errors import IsobasinError

if TYPE_CHECKING:
    import torch

    from isobasin.tasks import Task
    from isobasin.weights import Weights


def choice(names: str, words: str = "{}", **more: Any) -> Any:
    """An option that takes one of these names, which a shell completes; in the help `{}` stands for them."""
    return typer.Option(metavar="NAME", help=words.format(names), autocompletion=lambda: names.split(", "), **more)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, or a hub id in the local cache.")]
Seed = Annotated[
    int,
    typer.Option(min=0, max=2**63 - 1, metavar="N", help="Seed of all random numbers.", rich_help_panel="General"),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace an output, once the new one is complete.", rich_help_panel="Output"),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel="General")
]
Verify = Annotated[str, choice("auto, model, none", "Compare outputs: auto, model or none.", rich_help_panel="Output")]
VERIFY = ("auto", "model", "none")
MIN_MEMORY = 10**6  # bytes
MAX_SAMPLES = 10**9
INITS = ("weights", "activations")
SELF = Path("self")  # in place of data: text that the two models generate
MatchData = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Data to match by, or to learn from (or self).",
        rich_help_panel="Alignment",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Where and how a checkpoint folder is written."""

    panel: ClassVar[str] = "Output"
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder to write.")]
    dtype: Annotated[str, choice("auto, keep, float32, bfloat16, float16", "Type: {}.")] = "auto"
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file, such as 200MB.")] = "5GB"
    force: Force = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Also copy Python files and their config keys.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where to compute."""

    panel: ClassVar[str] = "General"
    device: Annotated[str, choice("cpu, cuda", "{}, cuda:1, …")] = "cpu"
    cuda: Annotated[bool, typer.Option("--cuda", help="The same as --device cuda.")] = False

    @property
    def name(self) -> str:
        return "cuda" if self.cuda else self.device

    def find(self) -> "torch.device":
        """The device, or an error where this machine has no such device."""
        import torch

        if re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.name) is None:
            raise IsobasinError(f"--device {self.name!r} is no device; expected cpu, cuda or cuda:N")
        device = torch.device(self.name)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise IsobasinError(
                f"--device {self.name}: this machine has no such CUDA device; leave it out to use the CPU"
            )
        return device


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """How much of a model may stay in memory."""

    memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Host memory for a model; else read again."),
    ] = "512MiB"

    def load(self, source: str) -> "Weights":
        """A model of which at most this much is kept."""
        from isobasin.checkpoint import parse_size
        from isobasin.weights import load

        n_bytes = parse_size(self.memory, "--memory")
        if n_bytes < MIN_MEMORY:
            raise IsobasinError(f"--memory {self.memory}: expected at least 1MB, the largest part of a model at a time")
        return replace(load(source), memory=n_bytes)


@dataclass(frozen=True, kw_only=True)
class PrintOptions:
    """What is printed."""

    panel: ClassVar[str] = "General"
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False
    json: Json = False

    @property
    def silent(self) -> bool:
        """Whether nothing but the result is printed."""
        return self.quiet or self.json


@dataclass(frozen=True, kw_only=True)
class MatchOptions:
    """How to find the alignment."""

    panel: ClassVar[str] = "Alignment"
    scope: Annotated[str | None, choice("model, all-attention, first-attention, first-block")] = None
    matcher: Annotated[str, choice("weights, activations, learned, reference", "{}.")] = "weights"
    stage2: Annotated[str, choice("none, orthogonal, full", "Inside each head: none, orthogonal or full.")] = "full"
    head_distance: Annotated[
        str | None, choice("complete, frobenius, singular, cosine", "complete, frobenius, singular or cosine.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """How `--matcher learned` learns."""

    panel: ClassVar[str] = "Learning (--matcher learned)"
    held_out: Annotated[Path | None, typer.Option(metavar="PATH", help="Data that select the result [a tenth].")] = None
    init: Annotated[str, choice("weights, activations", "Start from: weights or activations.")] = "weights"
    steps: Annotated[int, typer.Option(max=10**7, metavar="N", help="Gradient steps.")] = 500
    lr: Annotated[float, typer.Option(metavar="X", help="Largest learning rate.")] = 0.01
    objective: Annotated[str, choice("auto, ends, labels", "ends (their mean prediction), labels, auto.")] = "auto"
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="Do not read labels of a classifier's data.")] = False
    permutations: Annotated[str, choice("fixed, free", "The matching of units: fixed or free.")] = "fixed"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How data are read: for measuring in `path`, for `--matcher learned` in `align` and `merge`."""

    panel: ClassVar[str] = "Data"
    task: Annotated[str, choice("auto, lm, mlm, seq2seq, text, image", "auto, lm, mlm, seq2seq, text or image.")] = (
        "auto"
    )
    tokenizer: Annotated[str | None, typer.Option(metavar="FOLDER", help="A tokenizer; that of A by default.")] = None
    max_samples: Annotated[
        int | None, typer.Option(max=MAX_SAMPLES, metavar="N", help="Use at most so many samples.")
    ] = None
    batch_size: Annotated[int | None, typer.Option(max=10**6, metavar="N", help="Samples in a batch.")] = None
    seq_len: Annotated[int | None, typer.Option(max=10**6, metavar="N", help="Tokens in a window of text.")] = None

    def open(self, data: Path, models: "list[Weights]", *, seed: int, split: str, labelled: bool = True) -> "Task":
        from isobasin.tasks import open_task

        options = asdict(self)
        kind = options.pop("task")
        return open_task(data, models, kind=kind, seed=seed, split=split, labelled=labelled, **options)


@dataclass(frozen=True)
class LearnSetup:
    """`--matcher learned`: its options, and the data it learns from. `flag` is the option that names the data."""

    options: LearnOptions
    reading: DataOptions
    data: Path | None
    flag: str = "--data"

    @property
    def from_own_text(self) -> bool:
        """Whether the models learn from text that they generate."""
        return self.data == SELF

    def check(self) -> None:
        from isobasin.learn.path_loss import OBJECTIVES
        from isobasin.learn.trainer import PERMUTATIONS

        init, held_out = self.options.init, self.options.held_out
        if self.data is None:
            raise IsobasinError(
                f"--matcher learned needs {self.flag}: text, a table of labelled text, images, or self for language "
                "models to learn from their own text"
            )
        if self.from_own_text and init != "weights":
            raise IsobasinError(f"--init {init} needs data, and {self.flag} is self: use --init weights")
        check_choice("--init", init, INITS)
        check_choice("--objective", self.options.objective, OBJECTIVES)
        check_choice("--permutations", self.options.permutations, PERMUTATIONS)
        if self.options.unlabelled and self.options.objective == "labels":
            raise IsobasinError("--unlabelled: --objective labels needs labels; give --objective ends or leave it out")
        if held_out is not None and held_out.resolve() == self.data.resolve():
            raise IsobasinError(
                f"--held-out {held_out} is {self.flag} itself: what is learned from can not decide; leave it out "
                "and a tenth of the data is kept for that"
            )

    def tasks(
        self, models: "list[Weights]", seed: int, device: "torch.device | None" = None
    ) -> "tuple[Task, Task | None]":
        """The data to learn from, and the held-out data if they are given or generated."""
        from isobasin.learn.data import WINDOWS, GeneratedText

        assert self.data is not None
        reading, held_out = self.reading, None
        if self.from_own_text:
            text = GeneratedText(
                windows=WINDOWS if reading.max_samples is None else reading.max_samples,
                length=reading.seq_len,
                batch_size=reading.batch_size or 8,
                seed=seed,
                tokenizer=reading.tokenizer,
            )
            task, held_out = text.tasks(models[0], models[1], device)
        else:
            labelled = not self.options.unlabelled
            task = reading.open(self.data, models, seed=seed, split="train", labelled=labelled)
        if self.options.held_out is not None:
            held_out = reading.open(self.options.held_out, models, seed=seed, split="test")
        return task, held_out


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is an option record by one option for each field of the record."""
    signature = inspect.signature(command)
    records: dict[str, Any] = {
        p.name: p.annotation for p in signature.parameters.values() if is_dataclass(p.annotation)
    }
    options: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name in records:
            record = records[parameter.name]
            options += [_option(field, getattr(record, "panel", None)) for field in fields(record)]
        else:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def flat(**values: Any) -> None:
        read = {name: {f.name: values.pop(f.name) for f in fields(record)} for name, record in records.items()}
        command(**values, **{name: records[name](**found) for name, found in read.items()})

    flat.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    return flat


def _option(field: Any, panel: str | None) -> inspect.Parameter:
    """The option of a field, in the group of its record unless it names another; what is required comes first."""
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    kind, info = field.type.__origin__, copy(field.type.__metadata__[0])
    info.rich_help_panel = info.rich_help_panel or (None if default is inspect.Parameter.empty else panel)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def check_choice(flag: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise IsobasinError(f"{flag} {value!r} is not available, expected one of {', '.join(allowed)}")
