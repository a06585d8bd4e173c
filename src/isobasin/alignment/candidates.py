"""From elements to an alignment: candidate transforms, evaluated as they will be stored, and the closest is taken.

B with A's gains and free values is usually closest, but behind a gain of A that is close to zero B's weights grow
large; then B keeps its own. Where nothing comes closer, B stays as it is, bit for bit.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from isobasin.alignment.descent import SWEEPS
from isobasin.alignment.experts import solve_with_experts
from isobasin.alignment.gauge import with_reference_gauge
from isobasin.alignment.heads import HeadMatcher, NoHeadMatcher
from isobasin.alignment.problem import AlignmentProblem
from isobasin.alignment.result import Alignment
from isobasin.alignment.verification import Evaluation, combined, evaluate_transform, unmoved
from isobasin.arch import Architecture
from isobasin.arguments import check_fields
from isobasin.errors import IsobasinError, VerificationError
from isobasin.groups import Element
from isobasin.symmetries.symmetry import symmetry
from isobasin.symmetries.transform import Transform
from isobasin.weights import Weights, load


@dataclass(frozen=True)
class AlignOptions:
    """How an alignment is carried out, whatever the matcher.

    `dtype` is the type the result will be stored in: distances are those of the stored weights. `workers` processes
    share the layers of attention scopes (both models must then be folders). `only_if_closer`: keep B as it is where
    nothing comes closer; otherwise what was found is applied in A's gauge, whatever the distance.
    `on_progress(done, of)` is called for each layer, or for each sweep of at most `of`.
    """

    dtype: str = "auto"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    workers: int = 1
    verify: bool = True
    only_if_closer: bool = True
    on_progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.workers < 1:
            raise IsobasinError(f"{self.workers} workers: expected at least 1")


def align_by_descent(b: Weights, a: Weights, scope: str, matcher: HeadMatcher, options: AlignOptions) -> Alignment:
    """Solve every independent part of the problem, and join what was found."""
    problem = AlignmentProblem(a, b, symmetry(b.arch).scoped(scope), matcher, options.device)
    dtypes = replace(b, exact=False).output_dtypes(options.dtype)
    n_parts = 1 if problem.moves_stream else len(problem.layers)
    if options.workers > 1 and n_parts > 1:
        results = _in_processes(problem, dtypes, options)
    else:
        results = (align_part(part, dtypes, options) for part in problem.independent_parts())
    evaluations: list[Evaluation] = []
    for result in results:
        evaluations.append(result)
        if options.on_progress and not problem.moves_stream:
            options.on_progress(len(evaluations), n_parts)
    return combined(problem, evaluations)


def transforms_by_descent(b: Weights, a: Weights, matcher: HeadMatcher, device: torch.device) -> Iterator[Transform]:
    """The candidates for a whole model, of which none is evaluated."""
    problem = AlignmentProblem(a, b, symmetry(b.arch).scoped("model"), matcher, device)
    _, elements = solve_with_experts(problem)
    yield from candidates(problem, elements)


def align_by_transform(b: Weights, a: Weights, scope: str, transform: Transform, options: AlignOptions) -> Alignment:
    """The alignment that a given transform makes, verified; whatever the distance."""
    part = symmetry(b.arch).scoped(scope)
    problem = AlignmentProblem(a, b, part, NoHeadMatcher(), options.device)
    dtypes = replace(b, exact=False).output_dtypes(options.dtype)
    return combined(problem, [evaluate_transform(problem, transform, dtypes, verify=options.verify)])


def align_part(problem: AlignmentProblem, dtypes: Mapping[str, torch.dtype], options: AlignOptions) -> Evaluation:
    """One problem: match, make candidates, take the one that comes closest."""
    tell = options.on_progress if problem.moves_stream else None
    state, elements = solve_with_experts(problem, on_sweep=(lambda done, _: tell(done, SWEEPS)) if tell else None)
    if not options.only_if_closer:
        transform = with_reference_gauge(problem.a, problem.b, problem.part, elements, problem.device)
        return evaluate_transform(problem, transform, dtypes, verify=options.verify, state=state)
    best: Evaluation | None = None
    refused: VerificationError | None = None
    for transform in candidates(problem, elements):
        try:
            found = evaluate_transform(problem, transform, dtypes, verify=options.verify, state=state)
        except VerificationError as error:  # A's gains may be too small to divide by; B can keep its own
            refused = error
            continue
        best = found if best is None or found.totals[1] < best.totals[1] else best
        if best.closer and problem.moves_stream and rotates_stream(transform, problem.arch):
            break
    if best is None:  # A's free values may be so large that B's weights are lost beside them; B can keep its own
        assert refused is not None
        a, b, part, device = problem.a, problem.b, problem.part, problem.device
        transform = with_reference_gauge(a, b, part, elements, device, fold_norms=True, own_values=True)
        try:
            best = evaluate_transform(problem, transform, dtypes, verify=options.verify, state=state)
        except VerificationError:
            raise refused from None
    return best if best.closer else unmoved(best, problem)


def candidates(problem: AlignmentProblem, elements: Mapping[str, Element]) -> Iterator[Transform]:
    """With A's gains and free values; and without. A rotated stream needs its gains folded: where A's do not bring it
    closer, they stay so."""
    transform = with_reference_gauge(problem.a, problem.b, problem.part, elements, problem.device)
    if rotates_stream(transform, problem.arch):
        yield transform
        yield with_reference_gauge(problem.a, problem.b, problem.part, elements, problem.device, fold_norms=True)
        return
    if transform.gauge:
        yield replace(transform, gauge={})
    yield transform


def rotates_stream(transform: Transform, arch: Architecture) -> bool:
    """Whether it mixes the coordinates of a stream, so that gains must be folded."""
    return any(transform.elements[name].rotates for name in arch.streams if name in transform.elements)


def _in_processes(
    problem: AlignmentProblem, dtypes: Mapping[str, torch.dtype], options: AlignOptions
) -> Iterator[Evaluation]:
    """The same problems, spread over processes that each open the two folders for themselves."""
    a, b = problem.a.path, problem.b.path
    if a is None or b is None:
        raise IsobasinError("workers need both models as folders on disk; save them first, or use one worker")
    threads = max(1, torch.get_num_threads() // options.workers)
    context = multiprocessing.get_context("spawn")
    plain = replace(options, on_progress=None)
    with ProcessPoolExecutor(options.workers, context, torch.set_num_threads, (threads,)) as pool:
        tasks = [
            pool.submit(_align_in_process, a, b, tuple(names), problem.matcher, dict(dtypes), plain)
            for names in problem.layers.values()
        ]
        try:
            for task in tasks:
                yield task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _align_in_process(
    a: Path,
    b: Path,
    spaces: tuple[str, ...],
    matcher: HeadMatcher,
    dtypes: Mapping[str, torch.dtype],
    options: AlignOptions,
) -> Evaluation:
    first, second = load(a), load(b)
    part = symmetry(second.arch).restricted(spaces)
    return align_part(AlignmentProblem(first, second, part, matcher, options.device), dtypes, options)
