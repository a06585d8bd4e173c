"""The parts of learning: schedules and orders, data held out, elements with parameters, held-out evaluation."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import learn_subjects as subjects
import pytest
import torch

import isobasin as ib
from isobasin.errors import IsobasinError
from isobasin.groups import (
    GL,
    Element,
    Group,
    Heads,
    HeadsElement,
    Monomial,
    MonomialGroup,
    Orthogonal,
    OrthogonalFixingOnes,
    Product,
    RotaryCommutant,
)
from isobasin.learn.data import BatchSampler, regroup, split_held_out
from isobasin.learn.parameters import GroupParameters, compose
from isobasin.learn.path_loss import SINGLE_PROCESS, HeldOutEvaluator, LinearPath
from isobasin.learn.trainer import CapturedStep, Step, TrainConfig
from isobasin.path.evaluation import FlatModel, evaluate_path
from isobasin.symmetries import symmetry
from isobasin.symmetries.action import Action
from isobasin.tasks import Batch, Task

CPU = torch.device("cpu")


def numbered(kind: str, n: int, batch: int = 4) -> Task:
    """Samples that are their own numbers."""

    def batches() -> Iterator[Batch]:
        for rows in torch.arange(n).split(batch):
            yield Batch({"input_ids": rows[:, None]}, rows, 1)

    return Task(kind, "numbers", "memory", n, {}, "numbers", batches)


def numbers(task: Task) -> list[int]:
    return [number for batch in task for number in batch.targets.tolist()]


def test_points_fill_the_middle_of_the_path_evenly() -> None:
    config = TrainConfig(lambdas=(0.2, 0.8))
    for step in range(20):
        points = sorted(config.points(step, 3, seed=0))
        assert all(0.2 + 0.2 * k <= lam < 0.4 + 0.2 * k for k, lam in enumerate(points))
    assert config.points(3, 3, seed=0) == config.points(3, 3, seed=0) != config.points(4, 3, seed=0)
    assert config.points(3, 3, seed=0) != config.points(3, 3, seed=1)


def test_checks_come_at_intervals_and_at_the_end() -> None:
    config = TrainConfig(steps=25, check_every=10)
    assert [step for step in range(25) if config.is_check(step)] == [9, 19, 24]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": -1}, "steps is -1, expected 0 or more"),
        ({"lr": 0.0}, "lr is 0.0, expected more than 0"),
        ({"lambdas": (0.8, 0.2)}, r"lambdas is \(0.8, 0.2\), expected two points"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"check_points": 2}, "check_points is 2, expected 3 or more"),
        ({"permutations": "some"}, "permutations is some, expected fixed or free"),
    ],
)
def test_numbers_that_make_no_lesson_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(IsobasinError, match=message):
        TrainConfig(**wrong)  # type: ignore[arg-type]


def test_the_last_windows_of_a_text_are_held_out() -> None:
    task, held_out = split_held_out(numbered("lm", 43))
    assert numbers(task) == list(range(39))
    assert numbers(held_out) == [39, 40, 41, 42]
    assert (task.n_samples, held_out.n_samples) == (39, 4)
    assert len({task.fingerprint, held_out.fingerprint, "numbers"}) == 3


def test_labelled_samples_are_held_out_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    task, held_out = split_held_out(numbered("image", 43))
    assert sorted(numbers(task) + numbers(held_out)) == list(range(43))
    assert len(numbers(held_out)) == 4
    assert {number // 11 for number in numbers(held_out)} == {0, 1, 2, 3}
    monkeypatch.setattr("isobasin.learn.data.MAX_HELD_OUT", 2)
    assert len(numbers(split_held_out(numbered("image", 43))[1])) == 2


def test_samples_held_out_from_everywhere_come_in_whole_batches() -> None:
    """One of each batch would be measured in as many batches as the task has."""
    task = numbered("image", 400, batch=8)
    rest, held_out = split_held_out(task)
    assert [len(batch) for batch in held_out] == [8, 8, 8, 8, 8]
    assert [len(batch) for batch in held_out] == [8, 8, 8, 8, 8], "also the second time"
    assert numbers(held_out) == [10 * k + 9 for k in range(40)]
    assert sum(1 for _ in rest) == 50, "what is learned from keeps its batches"


def test_only_samples_of_one_shape_come_together() -> None:
    def batch(first: int, n: int, width: int) -> Batch:
        rows = torch.arange(first, first + n)
        return Batch({"input_ids": rows[:, None].expand(n, width)}, rows, 3)

    found = list(regroup([batch(0, 1, 5), batch(1, 1, 7), batch(2, 2, 5), batch(4, 1, 5)], size=3))
    assert [(each.targets.tolist(), each.inputs["input_ids"].shape[1], each.n_bytes) for each in found] == [
        ([0, 2, 3], 5, 6),
        ([1], 7, 3),
        ([4], 5, 3),
    ]
    for each in found:
        assert each.inputs["input_ids"][:, 0].tolist() == each.targets.tolist(), "inputs stay with their targets"


def test_steps_are_captured_once_for_each_shape_and_the_rest_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device: the replay of a fake graph adds up what it was given."""
    done: list[tuple[str, int]] = []

    class FakeGraph:
        def __init__(self, here: list[Batch], total: torch.Tensor) -> None:
            self.here, self.total = here, total

        def replay(self) -> None:
            done.append(("replayed", len(self.here[0])))
            self.total.fill_(float(self.here[0].targets.sum()))

    def capture(self: Step, points: Sequence[float], batches: Sequence[Batch]) -> CapturedStep:
        done.append(("captured", len(batches[0])))
        held = [Batch({k: t.clone() for k, t in b.inputs.items()}, b.targets.clone()) for b in batches]
        total = torch.zeros(())
        return CapturedStep(torch.tensor(points), held, FakeGraph(held, total), total)  # type: ignore[arg-type]

    def eager(self: Step, points: Sequence[float], batches: Sequence[Batch]) -> torch.Tensor:
        done.append(("eager", len(batches[0])))
        return torch.tensor(float(batches[0].targets.sum()))

    monkeypatch.setattr(Step, "_capture", capture)
    monkeypatch.setattr(Step, "_set_rate", lambda self, rate: None)
    monkeypatch.setattr(Step, "_update", eager)
    step = Step.__new__(Step)
    step._captured, step._max_graphs = {}, 2
    sizes = [3, 4, 3, 5, 4, 5]
    totals = []
    for k, n in enumerate(sizes):
        rows = torch.arange(n) + 10 * k
        totals.append(float(step([0.5], [Batch({"input_ids": rows[:, None]}, rows)], 0.1)))
    assert totals == [float((torch.arange(n) + 10 * k).sum()) for k, n in enumerate(sizes)]
    assert done == [
        ("captured", 3), ("replayed", 3), ("captured", 4), ("replayed", 4), ("replayed", 3),
        ("eager", 5), ("replayed", 4), ("eager", 5),
    ]  # fmt: skip
    step.set_path(None)  # type: ignore[arg-type]
    assert step._captured == {}, "another path makes them stale"


def test_too_little_to_hold_out_is_refused() -> None:
    assert [numbers(part) for part in split_held_out(numbered("lm", 2))] == [[0], [1]]
    with pytest.raises(IsobasinError, match="1 sample is too little to hold some out"):
        split_held_out(numbered("lm", 1))


def test_every_batch_comes_once_in_each_round_and_any_step_can_ask_for_its_own() -> None:
    exercises = BatchSampler(numbered("lm", 12), 0, CPU)
    rounds = [[exercises[3 * e + k].targets[0].item() for k in range(3)] for e in range(6)]
    assert all(sorted(one) == [0, 4, 8] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    again = BatchSampler(numbered("lm", 12), 0, CPU)
    assert [again[3 * 5 + k].targets[0].item() for k in range(3)] == rounds[5]
    with pytest.raises(IsobasinError, match="holds nothing to learn from"):
        BatchSampler(numbered("lm", 0), 0, CPU)


def test_pictures_are_changed_by_the_number_of_their_batch_alone() -> None:
    batches = [Batch({"pixel_values": torch.zeros(2, 1, 3, 3)}, torch.zeros(2, dtype=torch.long))]
    task = Task("image", "zeros", "memory", 2, {}, "zeros", lambda: iter(batches))
    exercises = BatchSampler(task, 0, CPU, lambda x, rng: x + torch.rand(x.shape, generator=rng))
    first, second = (exercises[k].inputs["pixel_values"] for k in (0, 1))
    assert torch.equal(first, exercises[0].inputs["pixel_values"])
    assert not torch.equal(first, second)
    assert float(batches[0].inputs["pixel_values"].abs().sum()) == 0


def displaced(scope: str, seed: int = 0) -> GroupParameters:
    """Parameters away from where they begin."""
    parameters = GroupParameters(symmetry(subjects.sharp().arch).scoped(scope))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.tensors():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    return parameters


@pytest.mark.parametrize("scope", ["model", "all-attention"])
def test_parameters_stay_in_the_group_and_act_as_their_elements(scope: str) -> None:
    a = subjects.sharp()
    parameters = displaced(scope)
    elements, differentiable = parameters.elements(), parameters.differentiable()
    assert elements.keys() == differentiable.keys()
    assert all(parameters.part.groups[name].contains(g) for name, g in elements.items())
    exact, moved = Action(a.arch, elements), Action(a.arch, differentiable)
    far = 0.0
    for name in a:
        torch.testing.assert_close(moved.tensor(name, a[name]), exact.tensor(name, a[name]), rtol=1e-4, atol=1e-4)
        far = max(far, float((exact.tensor(name, a[name]) - a[name]).abs().max()))
    assert far > 0.05


GROUPS = (
    Orthogonal(5),
    Orthogonal(1),
    OrthogonalFixingOnes(5),
    GL(4),
    RotaryCommutant(6),
    RotaryCommutant(6, interleaved=True),
    MonomialGroup(5, "positive"),
    MonomialGroup(5, "nonzero"),
    Product((RotaryCommutant(4), GL(2))),
    Heads(2, 3, RotaryCommutant(4), GL(4)),
    Heads(1, 1, Product((RotaryCommutant(2), GL(3))), GL(5)),
)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_every_group_has_parameters_that_are_zero_at_the_identity(group: Group) -> None:
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in group.parameter_shapes().items()}
    found, identity = group.element(group.parametrised(zeros)).tensors(), group.identity().tensors()
    torch.testing.assert_close(found, identity, rtol=0, atol=1e-14)
    rng = torch.Generator().manual_seed(0)
    some = {name: 0.2 * torch.randn(t.shape, generator=rng) for name, t in zeros.items()}
    element = group.element(group.parametrised({name: t.double() for name, t in some.items()}))
    acting = group.differentiable(group.parametrised(some))
    assert group.contains(element)
    assert group.n == 1 or not element.is_identity
    sides = [
        (element, acting),
        (element.dual(), acting.dual()),
        (element.permutation_part(), acting.permutation_part()),
    ]
    heads = (group.n_kv * group.qk.n, group.n_kv * group.vo.n) if isinstance(group, Heads) else ()
    for exact, fast in sides:
        x = torch.randn(3, group.n, generator=rng)
        if isinstance(exact, HeadsElement) and isinstance(fast, HeadsElement):
            keys, values = x.split(heads, dim=-1)
            for side, part in (("qk", keys), ("vo", values)):
                assert_acts_alike(exact.face(side), fast.face(side), part)
        else:
            assert_acts_alike(exact, fast, x)


def assert_acts_alike(exact: Element, fast: Element, x: torch.Tensor) -> None:
    torch.testing.assert_close(fast.act(x), exact.act(x.double()).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [MonomialGroup(4), MonomialGroup(4, "signs"), MonomialGroup(4, "global")], ids=str)
def test_discrete_groups_have_no_parameters(group: Group) -> None:
    assert group.parameter_shapes() == {}


def test_a_resume_file_names_parameters_by_space_and_factor() -> None:
    config = replace(subjects.CONFIG, rotary_dims=4, n_layers=1)
    arch = ib.load(ib.Transformer(config, seed=0).state_dict(), config.to_dict()).arch
    parameters = GroupParameters(symmetry(arch))
    state = {name: torch.full_like(t, k + 1.0) for k, (name, t) in enumerate(parameters.state().items())}
    assert list(state) == [
        "factors.resid.x",
        "factors.heads0:qk.parts.0.size",
        "factors.heads0:qk.parts.0.angle",
        "factors.heads0:qk.parts.1.x",
        "factors.heads0:vo.x",
        "factors.ff0.x",
        "centres.resid",
    ]
    parameters.load_state(state)
    assert [float(t.detach().mean()) for t in parameters.tensors()] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert float(parameters.state()["centres.resid"].mean()) == 7.0


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [TrainConfig(steps=10, warmup=0.2).rate_at(step) for step in range(10)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] == 0
    assert TrainConfig(steps=1).rate_at(0) == 1.0, "a single step is not lost"


def test_units_take_their_scales_with_them() -> None:
    a = subjects.sharp()
    parameters = displaced("model")
    before = {name: t.clone() for name, t in _moved(a, parameters, {}).items()}
    turn = Monomial(torch.arange(24).roll(5), torch.ones(24, dtype=torch.float64))
    parameters.permute({"ff0": turn})
    after = _moved(a, parameters, {"ff0": turn})
    action = Action(a.arch, {"ff0": turn})
    changed = 0
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], action.tensor(name, tensor), rtol=1e-5, atol=1e-6)
        changed += int(not torch.equal(after[name], tensor))
    assert changed == 3, "gate, up and down"


def _moved(a: "subjects.Weights", parameters: GroupParameters, base: dict[str, Monomial]) -> dict[str, torch.Tensor]:
    start = {name: g.identity() for name, g in parameters.part.groups.items()}
    with torch.no_grad():
        return LinearPath.between(a, a, parameters.part, start, CPU).rebased(base).moved(parameters.differentiable())


def test_what_was_learned_comes_after_the_base() -> None:
    parameters = displaced("model")
    learned = parameters.elements()
    base = {name: g.sample(seed=1) for name, g in parameters.part.groups.items()}
    both = compose(learned, base)
    x = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = learned["resid"].act(base["resid"].act(x))
    assert torch.allclose(both["resid"].act(x), expected, atol=1e-12)
    assert not torch.allclose(base["resid"].act(learned["resid"].act(x)), expected, atol=1e-3)


def test_the_evaluator_measures_what_a_path_does() -> None:
    a, b = subjects.sharp(0), subjects.sharp(1)
    task = subjects.told(subjects.rows_task(10, seed=1), a)
    mixture = FlatModel.of(a)
    evaluator = HeldOutEvaluator(mixture, mixture.buffer.clone(), mixture.vector(b), task, 5)
    expected = evaluate_path(a, b, task, n_points=5).barrier.height
    assert evaluator.barrier_and_mean(mixture.vector(b))[0] == pytest.approx(expected, abs=1e-6)
    assert evaluator.barrier_and_mean(mixture.vector(subjects.scrambled(a)))[0] != pytest.approx(expected, abs=1e-2)
    assert evaluator.barrier_and_mean(torch.full_like(mixture.buffer, math.nan))[0] == math.inf


def test_data_without_targets_do_not_decide() -> None:
    a = subjects.sharp()
    mixture = FlatModel.of(a)
    blank = [Batch({"input_ids": torch.zeros(1, 4, dtype=torch.long)}, torch.full((1, 4), -100))]
    task = Task("lm", "blank", "memory", 1, {}, "blank", lambda: iter(blank))
    with pytest.raises(IsobasinError, match="held-out data hold nothing that is scored"):
        HeldOutEvaluator(mixture, mixture.buffer.clone(), mixture.buffer, task, 5)


def test_an_optimizer_that_comes_from_cuda_goes_on_at_the_rate_it_is_told() -> None:
    a = subjects.sharp()
    b = subjects.noisy(a)
    part = symmetry(b.arch).scoped("model")
    elements = {name: group.identity() for name, group in part.groups.items()}
    (batch,) = subjects.rows_task(8, seed=1, batch=8)
    ends = []
    for device in ("cpu", "cuda"):
        parameters = GroupParameters(part)
        step = Step(
            LinearPath.between(a, b, part, elements, CPU), parameters, TrainConfig(lr=1e-2), SINGLE_PROCESS, None
        )
        step([0.5], [batch], 1.0)
        state = step.optimizer.state_dict()
        if device == "cuda":  # as a file holds it: the rate of the last step is a tensor on the CPU
            state["param_groups"] = [g | {"lr": torch.zeros(()), "capturable": True} for g in state["param_groups"]]
        step.load_optimizer(state)
        step([0.5], [batch], 1.0)
        ends.append(torch.cat([p.detach().flatten() for p in parameters.tensors()]))
    assert torch.equal(ends[0], ends[1])
    assert float(ends[0].abs().max()) > 0.015, "two steps of Adam"
