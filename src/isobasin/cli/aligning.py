"""The command `align`."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isobasin.checkpoint.sharding import parse_size
from isobasin.checkpoint.workspace import check_output
from isobasin.cli.learning import Learning, learned, learning_facts, learning_lines
from isobasin.cli.measuring import Cost
from isobasin.cli.moving import Saving, device_named
from isobasin.cli.printing import progress
from isobasin.errors import IsobasinError, TransformError, VerificationError
from isobasin.match.align import align
from isobasin.match.align_whole import WHOLE
from isobasin.match.alignment import Alignment
from isobasin.match.comparable import check_comparable
from isobasin.match.heads import HEAD_DISTANCES, STAGES
from isobasin.match.matchers import ActivationMatching, Matcher, WeightMatching
from isobasin.match.reference import ReferenceMatching
from isobasin.match.untying import untied
from isobasin.match.whole import SWEEPS
from isobasin.moments import agreements, reading_roots
from isobasin.running import change, outputs, random_inputs
from isobasin.symmetries import SCOPES
from isobasin.tasks import unlabeled
from isobasin.transform_file import check_free, save_transform
from isobasin.weights import Weights, load

MATCHERS = ("weights", "activations", "learned", "reference")
VERIFY = ("layer", "model", "none")
TOLERANCE_PER_LAYER = 1e-5


@dataclass(frozen=True)
class Choices:
    """How to match, as given on the command line."""

    scope: str | None
    matcher: str
    stage2: str
    head_distance: str | None
    data: Path | None
    verify: str
    workers: int
    seed: int
    untie: bool = False

    @property
    def scope_used(self) -> str:
        """Everything, unless told otherwise; the published recipe knows attention only."""
        return self.scope or ("all-attention" if self.matcher == "reference" else "model")

    def check(self) -> None:
        for flag, value, allowed in (
            ("--scope", self.scope_used, SCOPES),
            ("--matcher", self.matcher, MATCHERS),
            ("--stage2", self.stage2, STAGES),
            ("--head-distance", self.head_distance or "complete", HEAD_DISTANCES),
            ("--verify", self.verify, VERIFY),
        ):
            if value not in allowed:
                raise IsobasinError(f"{flag} {value!r} is not available, expected one of {', '.join(allowed)}")
        if self.scope_used in WHOLE and self.matcher == "reference":
            raise IsobasinError("--matcher reference aligns attention only: use --scope all-attention")
        if self.workers < 1:
            raise IsobasinError(f"--workers {self.workers}: expected 1 or more")
        if self.workers > 1 and self.scope_used in WHOLE:
            raise IsobasinError(
                f"--workers {self.workers} with scope {self.scope_used}: sweeps go block after block and can not be "
                "shared; use --scope all-attention, or one worker"
            )
        if self.matcher == "activations" and self.data is None:
            raise IsobasinError("--matcher activations needs --data: text, or a .npy file of token ids or pixels")


def align_model(b: str, to: str, saving: Saving, choices: Choices, keep: Path | None) -> dict[str, Any]:
    """Align B to A, write the result, and report what it cost and what it changed."""
    choices.check()
    with Cost() as cost:
        reference, moving = _pair(to, b, choices)
        _check_places(saving, keep, reference, moving)
        matcher = matcher_of(choices, reference, moving)
        title, total = _progress_of(choices, moving)
        with progress(title, total, quiet=saving.quiet) as step:
            found = align(
                moving,
                to=reference,
                matcher=matcher,
                dtype=saving.dtype,
                device=device_named(saving.device),
                workers=choices.workers,
                verify=choices.verify != "none",
                watch=lambda done, of: step(done),
            )
        largest = _finished(found, moving, reference, saving, choices, keep)
    return _facts(found, saving, largest, cost) | ({"transform": str(keep)} if keep else {})


def learn_model(
    b: str, to: str, saving: Saving, choices: Choices, learning: Learning, keep: Path | None
) -> dict[str, Any]:
    """The same with the matcher `learned`: the held-out barrier decides, and an interrupted run goes on."""
    choices.check()
    learning.check()
    with Cost() as cost:
        reference, moving = _pair(to, b, choices)
        _check_places(saving, keep, reference, moving)
        start = matcher_of(replace(choices, matcher=learning.start), reference, moving)
        with learned(
            moving,
            reference,
            learning,
            start,
            saving.output,
            dtype=saving.dtype,
            device=device_named(saving.device),
            verify=choices.verify != "none",
            seed=choices.seed,
            quiet=saving.quiet,
        ) as lesson:
            found, largest = lesson.alignment, lesson.alignment.max_output_change
            if lesson.writes:
                largest = _finished(found, moving, reference, saving, choices, keep)
    facts = _facts(found, saving, largest, cost) | learning_facts(found)
    return facts | ({"transform": str(keep)} if keep else {})


def _pair(to: str, b: str, choices: Choices) -> tuple[Weights, Weights]:
    """A and B, comparable; with --untie both with a head of their own, as only like can be compared with like."""
    reference, moving = load(to), load(b)
    if choices.untie:
        reference, moving = untied(reference), untied(moving)
    check_comparable(reference, moving)
    return reference, moving


def _finished(
    found: Alignment, b: Weights, a: Weights, saving: Saving, choices: Choices, keep: Path | None
) -> float | None:
    """Run the whole model if asked for, and write; the largest change of outputs that is known."""
    largest = _whole_model(found, b, choices) if choices.verify == "model" else found.max_output_change
    _write(found, b, a, saving, keep)
    return largest


def _progress_of(choices: Choices, model: Weights) -> tuple[str, int]:
    """What a bar counts: sweeps over a whole model, or layers of attention."""
    if choices.scope_used in WHOLE:
        return "sweeps (at most)", SWEEPS
    return "aligning layers", 1 if choices.scope_used == "first-attention" else model.arch.sizes.n_layers


def _check_places(saving: Saving, keep: Path | None, a: Weights, b: Weights) -> None:
    """Refuse outputs in the way or inside an input, unknown types and sizes, before anything is computed."""
    inputs = [model.path for model in (a, b) if model.path]
    with suppress(OSError):  # a place that can not be looked at is for the writer to tell
        check_output(saving.output.resolve(), inputs, force=saving.force)
    b.output_dtypes(saving.dtype)
    parse_size(saving.max_shard_size)
    if keep is None:
        return
    check_free(keep, force=saving.force)
    for folder in (saving.output, *inputs):
        if keep.resolve().is_relative_to(folder.resolve()):
            raise TransformError(f"--save-transform {keep}: lies inside {folder}; choose a place beside it")


def check_matcher(choices: Choices) -> None:
    """Learning needs data of its own and a place to go on from: only `align` has both."""
    if choices.matcher == "learned":
        raise IsobasinError("--matcher learned belongs to `isobasin align`: learn there, then go on with what it wrote")


def matcher_of(choices: Choices, a: Weights, b: Weights) -> Matcher:
    common: dict[str, Any] = {"scope": choices.scope_used, "stage2": choices.stage2}
    if choices.head_distance:
        common["head_distance"] = choices.head_distance
    check_matcher(choices)
    if choices.matcher == "reference":
        return ReferenceMatching(**common)
    if choices.matcher == "activations":
        assert choices.data is not None
        if choices.scope_used in WHOLE:
            return ActivationMatching(agreements=agreements(a, b, unlabeled(choices.data, a)), **common)
        return ActivationMatching(roots=reading_roots(a, b, choices.data, seed=choices.seed), **common)
    return WeightMatching(**common)


def _whole_model(found: Alignment, b: Weights, choices: Choices) -> float:
    """Run both models, as they are before anything is rounded to the output's type."""
    inputs = random_inputs(b, seed=choices.seed)
    largest = change(outputs(b, inputs), outputs(found.transform.apply(b), inputs))
    if not largest <= TOLERANCE_PER_LAYER * b.arch.sizes.n_layers:
        raise VerificationError(
            f"the alignment found would change the model's outputs by {largest:.1e}; nothing written"
        )
    return largest


def _write(found: Alignment, b: Weights, a: Weights, saving: Saving, keep: Path | None) -> None:
    moved = found.transform.apply(b, device=device_named(saving.device))
    # Beside its place first, so that a failure leaves neither a transform without a model nor the reverse.
    aside = keep and keep.with_name(f".{keep.name}.isobasin-tmp-{os.getpid()}")
    try:
        if aside:
            save_transform(found.transform, aside, force=True)
        with progress("writing", len(moved), quiet=saving.quiet) as step:
            moved.save(
                saving.output,
                dtype=saving.dtype,
                force=saving.force,
                max_shard_size=saving.max_shard_size,
                inputs=[a.path] if a.path else [],
                watch=_counter(step),
            )
        if aside and keep:
            aside.replace(keep)
    finally:
        if aside:
            aside.unlink(missing_ok=True)


def _counter(step: Callable[[int], None]) -> Callable[[str, object], None]:
    done = 0

    def watch(name: str, tensor: object) -> None:
        nonlocal done
        done += 1
        step(done)

    return watch


def _facts(found: Alignment, saving: Saving, largest: float | None, cost: Cost) -> dict[str, Any]:
    return {
        "output": str(saving.output),
        **found.facts,
        "head_permutation": [list(p) for p in found.head_permutation],
        "kv_head_permutation": [list(p) for p in found.kv_head_permutation],
        "max_output_change": largest,
        "seconds": round(cost.seconds, 3),
        "peak_rss_mb": cost.peak_rss_mb,
        "peak_anon_mb": cost.peak_anon_mb,
    }


def _where(row: dict[str, Any]) -> str:
    return str(row["space"]) if row["layer"] is None else f"layer {row['layer']:>3} {row['space']}"


def align_lines(facts: dict[str, Any]) -> list[str]:
    moved = "not verified" if facts["max_output_change"] is None else f"{facts['max_output_change']:.1e}"
    rows = [
        f"  {_where(row):14s}  {row['distance_before']:.4g} → {row['distance_after']:.4g}"
        + ("" if row["converged"] else "  (not converged)")
        + (f"  rank-deficient kv heads {row['rank_deficient_kv_heads']}" if row["rank_deficient_kv_heads"] else "")
        for row in facts["per_layer"]
    ]
    return [
        *rows,
        *(learning_lines(facts) if "held_out_barrier" in facts else []),
        f"distance  {facts['distance_before']:.4g} → {facts['distance_after']:.4g} of ‖A‖",
        f"largest change of outputs  {moved}",
        f"{facts['output']}: written in {facts['seconds']:.1f} s, {facts['peak_anon_mb'] or facts['peak_rss_mb']} MB",
    ]
