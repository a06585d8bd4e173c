"""The matcher `learned`: start from another matcher, train on data, keep what is best on held-out data."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch

from isobasin.alignment.align import Matcher, align
from isobasin.alignment.candidates import AlignOptions, align_by_transform
from isobasin.alignment.gauge import with_reference_gauge
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.result import Alignment
from isobasin.arguments import check_fields
from isobasin.errors import IsobasinError
from isobasin.files import NullResumeStore, ResumeStore
from isobasin.learn.data import Augment, split_held_out
from isobasin.learn.path_loss import SINGLE_PROCESS, HeldOutEvaluator, Objective, ProcessGroup
from isobasin.learn.trainer import OnProgress, TrainConfig, learn
from isobasin.path.evaluation import FlatModel
from isobasin.symmetries import Symmetry, check_scope, symmetry
from isobasin.symmetries.transform import Transform, pack_transform, unpack_transform
from isobasin.tasks import Task
from isobasin.weights import Weights

Kept = Literal["naive", "start", "learned"]
ROUNDING = 1e-6  # relative error of a mean loss in float32: closer losses count as equal


@dataclass(frozen=True, repr=False)
class LearnedAlignment(Alignment):
    """An alignment that was learned: the held-out barriers of the three candidates, and which of them was kept."""

    held_out: Mapping[Kept, float] = field(default_factory=dict)
    kept: Kept = "naive"
    held_out_history: tuple[tuple[int, float], ...] = ()
    objective: Objective = "labels"
    train_source: str = ""
    held_out_source: str = ""
    losses: tuple[float, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        barriers = ", ".join(f"{name} {height:.4g}" for name, height in self.held_out.items())
        steps = self.held_out_history[-1][0] if self.held_out_history else 0
        return f"held-out barrier {barriers} after {steps} steps; kept: {self.kept}; {Alignment.__str__(self)}"


@dataclass(frozen=True)
class LearnedMatching(TrainConfig):
    """Learn the group element by gradient descent on the loss along the path from A to the moved B.

    `task` is the training data. `held_out` decides which element is kept; without it a tenth of the task is held out
    and not trained on. Training starts from the result of the matcher `init`, by default `WeightMatching`. The fields
    of `TrainConfig` are keyword arguments as well. `resume` lets a killed run continue, `processes` share the batches,
    and `on_step(done, of, barrier)` is called after each step.
    """

    fixed_basis: ClassVar[bool] = False
    task: Task
    held_out: Task | None = None
    _: KW_ONLY
    scope: str = "model"
    init: Matcher | None = None
    check_every: int = 50
    augment: Augment | None = None
    seed: int = 0
    resume: ResumeStore | None = field(default=None, repr=False, compare=False)
    processes: ProcessGroup = field(default=SINGLE_PROCESS, repr=False, compare=False)
    on_step: OnProgress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        check_fields(self)
        check_scope(self.scope)
        if self._init.scope != self.scope:
            raise IsobasinError(
                f"learning has the scope {self.scope}, its start {self._init.scope}; expected the same for both"
            )

    @property
    def _init(self) -> Matcher:
        return self.init or WeightMatching(scope=self.scope)

    def cache_key(self) -> dict[str, Any]:
        """Every setting that the result depends on, apart from the data, as plain data."""
        settings = {f.name: getattr(self, f.name) for f in fields(TrainConfig)} | {"autocast": str(self.autocast)}
        settings["rate"] = settings.pop("lr")  # the name in resume files
        return {"scope": self.scope, "start": repr(self._init), "lessons": settings, "seed": self.seed}

    def prepared(self, a: Weights, b: Weights) -> "LearnedMatching":
        return self

    def align(self, b: Weights, a: Weights, options: AlignOptions) -> LearnedAlignment:
        """On held-out data the result is never worse than B as it is, nor than the starting point."""
        device = options.device
        resume = NullResumeStore() if self.resume is None else self.resume
        task, held_out = (self.task, self.held_out) if self.held_out is not None else split_held_out(self.task)
        part, mixture = symmetry(b.arch).scoped(self.scope), FlatModel.of(a, device)
        evaluator = HeldOutEvaluator(
            mixture, mixture.buffer.clone(), mixture.vector(b), held_out, self.check_points, self.processes
        )

        def measured(name: Kept, transform: Transform) -> _Candidate:
            end = mixture.vector(transform.apply(b, device=device))
            return _Candidate(name, transform, *evaluator.barrier_and_mean(end))

        naive = measured("naive", Transform(b.arch.family, dict(b.arch.spaces)))
        start = measured("start", _start(b, a, part, self._init, resume, device))
        first = _best([naive, start]).transform.elements
        learned = learn(
            a,
            b,
            {name: first.get(name, group.identity()) for name, group in part.groups.items()},
            task,
            held_out,
            scope=self.scope,
            config=self,
            seed=self.seed,
            device=device,
            augment=self.augment,
            on_progress=self.on_step,
            resume=resume,
            processes=self.processes,
        )
        # The gauge of A, but not the unit scales that are nearest to A's: they were learned.
        in_gauge = with_reference_gauge(a, b, part, learned.elements, device)
        transform = replace(in_gauge, elements=dict(learned.elements))
        candidates = [naive, start, measured("learned", transform)]
        best = _best(candidates)
        found = align_by_transform(b, a, self.scope, best.transform, options)
        return LearnedAlignment(
            **(vars(found) | {"history": tuple(height for _, height in learned.history)}),
            held_out={candidate.name: candidate.barrier for candidate in candidates},
            kept=best.name,
            held_out_history=learned.history,
            objective=learned.objective,
            train_source=task.source,
            held_out_source=held_out.source,
            losses=learned.losses,
        )


def _start(
    b: Weights, a: Weights, part: Symmetry, init: Matcher, resume: ResumeStore, device: torch.device
) -> Transform:
    """The transform that the first matcher finds; a run that continues has stored it."""
    stored = resume.find("start")
    if stored:
        return unpack_transform(stored, part)
    found = align(b, to=a, matcher=init, dtype="float32", device=device, verify=False).transform
    resume.keep("start", pack_transform(found))
    return found


@dataclass(frozen=True)
class _Candidate:
    name: Kept
    transform: Transform
    barrier: float
    mean: float  # loss over the line


def _best(candidates: Sequence[_Candidate]) -> _Candidate:
    """The lowest barrier; of equal ones the lowest mean loss; of losses equal up to rounding, the first."""
    lowest = min(candidate.barrier for candidate in candidates)
    level = [candidate for candidate in candidates if candidate.barrier == lowest]
    mean = min(candidate.mean for candidate in level)
    return next(candidate for candidate in level if candidate.mean <= mean + ROUNDING * mean)
