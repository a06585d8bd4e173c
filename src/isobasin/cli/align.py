"""The command `align`, and the alignment that `path` and `merge` share with it."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from isobasin.cli.options import (
    DataOptions,
    DeviceOptions,
    LearnOptions,
    LearnSetup,
    MatchData,
    MatchOptions,
    MemoryOptions,
    PrintOptions,
    SaveOptions,
    Seed,
    check_choice,
    choice,
    with_options,
)
from isobasin.cli.output import (
    OnProgress,
    check_outputs,
    companion_facts,
    emit,
    existing,
    is_first_process,
    left_out_lines,
    measured_cost,
    n_processes,
    not_copied_lines,
    note,
    progress,
    space_label,
    transform_files,
    verified_change,
    write_model,
)
from isobasin.errors import IsobasinError

if TYPE_CHECKING:
    from isobasin.alignment.align import Matcher
    from isobasin.alignment.result import Alignment
    from isobasin.learn.matching import LearnedMatching
    from isobasin.learn.path_loss import Objective
    from isobasin.path.pairs import Aligner
    from isobasin.weights import Weights

MATCHERS = ("weights", "activations", "learned", "reference")
VERIFY = ("auto", "layer", "model", "none")


@with_options
def align_command(
    *,
    b: Annotated[str, typer.Argument(metavar="B", help="The model that moves.")],
    to: Annotated[str, typer.Option("--to", metavar="A", help="The reference.")],
    save: SaveOptions,
    match: MatchOptions,
    data: MatchData = None,
    verify: Annotated[
        str, choice("auto, layer, model, none", "Compare outputs: {}.", rich_help_panel="Output")
    ] = "auto",
    save_transform: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the transform too.", rich_help_panel="Output")
    ] = None,
    untie: Annotated[
        bool, typer.Option("--untie", help="Store a tied head as a tensor of its own.", rich_help_panel="Alignment")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(max=1024, metavar="N", help="Processes that share layers.", rich_help_panel="Alignment"),
    ] = 1,
    learn: LearnOptions,
    reading: DataOptions,
    seed: Seed = 0,
    device: DeviceOptions,
    memory: MemoryOptions,
    show: PrintOptions,
) -> None:
    """Move B next to A without changing what it computes, in A's own gauge."""
    from isobasin.alignment.comparable import check_comparable
    from isobasin.alignment.trunk import trunk_pair
    from isobasin.weights import untied

    learning = LearnSetup(learn, reading, data) if match.matcher == "learned" else None
    setup = AlignSetup(match, data, seed, learning, workers)
    setup.check("align")
    check_choice("--verify", verify, VERIFY)
    with measured_cost() as cost, ExitStack() as until_written:
        place = device.find()
        # Both are untied, since only models of one architecture can be compared.
        reference, moving = (untied(model) if untie else model for model in map(memory.load, (to, b)))
        if workers == 1 and learning is None:  # other processes read for themselves
            reference, moving = reference.resident(place), moving.resident(place)
        # Before data are read. The loss between heads that differ says nothing, so learning needs the same ones.
        if trunk_pair(reference, moving) is None or match.matcher == "learned":
            check_comparable(reference, moving)
        folders = [model.path for model in (reference, moving) if model.path]
        check_outputs(save, [*folders, *existing(data)], save_transform)
        moving.output_dtypes(save.dtype)
        quiet = show.silent or not is_first_process()
        with progress(quiet=quiet) as on_progress:
            models = {"A": reference, "B": moving}
            running: dict[str, Any] = {"dtype": save.dtype, "device": place, "verify": verify != "none", "quiet": quiet}
            found = setup.aligner(models, save.output.resolve(), until_written, on_progress, **running)(
                moving, reference
            )
        model_change = None
        if learning is None or is_first_process():
            moved = found.transform.apply(moving, device=place)
            run = "none" if verify == "layer" else verify
            model_change = verified_change(moving, moved, run, seed=seed, device=place, quiet=show.silent).largest
            files = transform_files(found.transform, save_transform)
            write_model(moved, save, quiet=show.silent, inputs=folders, files=files)
    facts = {
        "output": str(save.output),
        **found.to_dict(),
        "head_permutation": [list(p) for p in found.head_permutation],
        "kv_head_permutation": [list(p) for p in found.kv_head_permutation],
        "max_output_change": model_change if verify == "model" else found.max_output_change,
        "model_output_change": model_change,
        **cost,
        **learning_facts(found),
        **companion_facts(moving.path, save),
        **({"transform": str(save_transform)} if save_transform else {}),
    }
    emit(facts, align_lines(facts), show.json)


@dataclass(frozen=True)
class AlignSetup:
    """How two models are aligned, as given on the command line. `data` are for matching by activations."""

    match: MatchOptions
    data: Path | None
    seed: int
    learning: LearnSetup | None = None
    workers: int = 1

    @property
    def scope(self) -> str:
        """The whole model by default; the reference implementation aligns attention only."""
        return self.match.scope or ("all-attention" if self.match.matcher == "reference" else "model")

    @property
    def settings(self) -> dict[str, str]:
        """How the models are aligned, as a result file says it."""
        return {"scope": self.scope, "matcher": self.match.matcher, "stage2": self.match.stage2}

    def check(self, command: str) -> None:
        """Refuse options that do not go together; only `align` can learn in several processes."""
        from isobasin.alignment.heads import HEAD_DISTANCES, STAGES
        from isobasin.symmetries import ATTENTION_SCOPES, SCOPES

        match = self.match
        check_choice("--scope", self.scope, SCOPES)
        check_choice("--matcher", match.matcher, MATCHERS)
        check_choice("--stage2", match.stage2, STAGES)
        check_choice("--head-distance", match.head_distance or "complete", HEAD_DISTANCES)
        if self.scope not in ATTENTION_SCOPES and match.matcher == "reference":
            raise IsobasinError("--matcher reference aligns attention only: use --scope all-attention")
        if self.workers < 1:
            raise IsobasinError(f"--workers {self.workers}: expected 1 or more")
        if self.workers > 1 and self.scope not in ATTENTION_SCOPES:
            raise IsobasinError(
                f"--workers {self.workers} with scope {self.scope}: sweeps go block after block and can not be "
                "shared; use --scope all-attention, or one worker"
            )
        if match.matcher == "activations" and self.data is None:
            raise IsobasinError("--matcher activations needs --data: text, or a .npy file of token ids or pixels")
        if self.learning:
            self.learning.check()
            if command != "align" and n_processes() > 1:
                raise IsobasinError(
                    f"--matcher learned: `isobasin {command}` runs in one process; learn in several by `isobasin "
                    "align`, then go on with what it wrote"
                )

    def matcher(self) -> "Matcher":
        """The matcher; with `--matcher learned`, the one that gives the initial alignment."""
        from isobasin.alignment.matchers import ActivationMatching, WeightMatching
        from isobasin.alignment.reference import ReferenceMatching

        name = self.learning.options.init if self.learning else self.match.matcher
        options: dict[str, Any] = {"scope": self.scope, "stage2": self.match.stage2}
        if self.match.head_distance:
            options["head_distance"] = self.match.head_distance
        if name == "reference":
            return ReferenceMatching(**options)
        if name == "activations":
            assert self.data is not None
            return ActivationMatching(self.data, seed=self.seed, **options)
        return WeightMatching(**options)

    @property
    def title(self) -> str:
        """What the progress bar counts."""
        return "sweeps (at most)" if self.scope == "model" else "aligning layers"

    def aligner(
        self,
        models: "Mapping[str, Weights]",
        output: Path,
        until_written: ExitStack,
        on_progress: OnProgress,
        *,
        quiet: bool,
        **options: Any,
    ) -> "Aligner":
        """A function of (moving, reference) for these models; `options` are dtype, device and verify of `align`.

        The state of learning of each pair is a file beside `output`, which stays until `until_written` is closed.
        """
        from isobasin.alignment.align import align

        def aligned(b: "Weights", a: "Weights") -> "Alignment":
            if not self.learning:
                watch = partial(on_progress, self.title)
                return align(b, to=a, matcher=self.matcher(), workers=self.workers, watch=watch, **options)
            pair = "-".join(label for m in (a, b) for label, model in models.items() if model is m)
            beside = output.with_name(f"{output.name}.{pair}")
            matcher = self._learned_matcher(self.learning, b, a, beside, until_written, quiet, options["device"])
            return align(b, to=a, matcher=replace(matcher, on_step=learning_step(on_progress)), **options)

        return aligned

    def _learned_matcher(
        self,
        learning: LearnSetup,
        b: "Weights",
        a: "Weights",
        output: Path,
        until_written: ExitStack,
        quiet: bool,
        device: Any,
    ) -> "LearnedMatching":
        """The matcher `learned`, with its data, the group of processes and a resume file beside the output."""
        from isobasin import __version__
        from isobasin.files import ResumeFile
        from isobasin.learn.matching import LearnedMatching
        from isobasin.learn.path_loss import current_group
        from isobasin.learn.trainer import RESUME_SECTION
        from isobasin.path.provenance import model_hash

        if learning.from_own_text and not quiet:
            note("no data given: learning from text generated by the two models")
        tasks = learning.tasks([a, b], self.seed, device)
        processes = current_group(device)
        matcher = LearnedMatching(
            *tasks,
            scope=self.scope,
            init=self.matcher(),
            steps=learning.options.steps,
            lr=learning.options.lr,
            objective=cast("Objective", learning.options.objective),
            permutations="free" if learning.options.permutations == "free" else "fixed",
            seed=self.seed,
            processes=processes,
        )
        key = {  # everything the result of learning depends on
            "version": __version__,
            "models": [model_hash(a), model_hash(b)],
            "data": [task and task.fingerprint for task in tasks],
            "reading": asdict(learning.reading),
            "matcher": matcher.cache_key(),
            "processes": processes.size,
        }
        resume = ResumeFile(output, "learning", key, tensors=True, writes=is_first_process())
        # After an error the state of learning stays, and the same command continues from it.
        until_written.push(lambda error, *_: None if error else resume.close())
        state = resume.find(RESUME_SECTION)
        if state and not quiet:
            note(f"going on from step {state['step']}")
        return replace(matcher, resume=resume)


def learning_step(on_progress: OnProgress) -> "Callable[[int, int, float], None]":
    """Shows the steps of learning, with the last held-out barrier."""
    return lambda done, of, barrier: on_progress(f"learning, held-out barrier {barrier:.4g}", done, of)


def learning_facts(found: "Alignment | None") -> dict[str, Any]:
    """What `--json` adds for a learned alignment; empty for any other."""
    from isobasin.learn.matching import LearnedAlignment

    if not isinstance(found, LearnedAlignment):
        return {}
    return {
        "held_out_barrier": dict(found.held_out),
        "kept": found.kept,
        "objective": found.objective,
        "steps": found.held_out_history[-1][0] if found.held_out_history else 0,
        "held_out_history": [list(row) for row in found.held_out_history],
        "learned_from": found.train_source,
        "decided_by": found.held_out_source,
    }


def learning_lines(facts: dict[str, Any]) -> list[str]:
    if "held_out_barrier" not in facts:
        return []
    from isobasin.learn.data import GENERATED_SOURCE

    barriers = ", ".join(f"{name} {height:.4g}" for name, height in facts["held_out_barrier"].items())
    source, selected_by = facts["learned_from"], facts["decided_by"]
    no_data = "; no data were used" if source == selected_by == GENERATED_SOURCE else ""
    return [
        f"learned from  {source}{no_data}" + ("" if source == selected_by else f", decided by {selected_by}"),
        f"held-out barrier  {barriers}",
        f"kept  {facts['kept']}, after {facts['steps']} steps",
    ]


def align_lines(facts: dict[str, Any]) -> list[str]:
    moved = "not verified" if facts["max_output_change"] is None else f"{facts['max_output_change']:.1e}"
    rows = [
        f"  {space_label(row):14s}  {row['distance_before']:.4g} → {row['distance_after']:.4g}"
        + ("" if row["converged"] else "  (not converged)")
        + (f"  rank-deficient kv heads {row['rank_deficient_kv_heads']}" if row["rank_deficient_kv_heads"] else "")
        for row in facts["per_layer"]
    ]
    return [
        *rows,
        *learning_lines(facts),
        *left_out_lines(facts),
        *not_copied_lines(facts),
        f"distance  {facts['distance_before']:.4g} → {facts['distance_after']:.4g} of ‖A‖",
        f"largest change of outputs  {moved}",
        f"{facts['output']}: written in {facts['seconds']:.1f} s, {facts['peak_anon_mb'] or facts['peak_rss_mb']} MB",
    ]
