"""Lineage of models with a known history: no edge that is wrong, and the edges that the weights show."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from compared_models import FULL, noisy, perturbed, scrambled_file, small_model, stored, tiny_model, with_tensors
from lineage_models import Family

import isobasin as ib
import model_types as mt
from isobasin.alignment.trunk import with_vocabulary
from isobasin.cli import run
from isobasin.compare import sketch
from isobasin.compare.averages import Average, AverageCheck, combined
from isobasin.compare.derivation import Basis, shows_average
from isobasin.compare.lineage import SAME_FUNCTION, SAME_TRUNK, Lineage
from isobasin.compare.sketch import Moved, MoveTo, in_order, sampled
from isobasin.errors import IsobasinError
from isobasin.report.lineage_page import render
from isobasin.weights import Weights, untied
from isobasin.workers import open_workers


@dataclass(frozen=True)
class History:
    """What is true of the models of one kind: the original of each copy, the parents of what has some, and the rest."""

    copies: Mapping[str, str]
    parents: Mapping[str, tuple[str, Mapping[str, float]]]
    relatives: tuple[Sequence[str], ...]

    def original(self, name: str) -> str:
        return self.copies.get(name, name)

    def check(self, found: Lineage, kind: str) -> None:
        """No wrong edge: every edge with a direction is true, and every other one joins true relatives."""
        groups = [{self.original(n) for n in (*names, *self._descendants(names))} for names in self.relatives]
        for edge in found.edges:
            child, *parents = (n.removeprefix(f"{kind}-") for n in (edge.child, *edge.parents))
            if edge.kind in ("copy", "cast"):
                assert self.original(child) == self.original(parents[0]), edge
                assert not edge.directed or (child, parents) in [("cast", ["base"]), ("cast", ["copy"])], edge
            elif edge.kind in ("relative", "undecided", "descendant"):
                ends = {self.original(child), self.original(parents[0])}
                assert any(ends <= group for group in groups), edge
            else:
                relation, weights = self.parents[self.original(child)]
                assert relation == edge.kind, edge
                assert {self.original(p) for p in parents} == set(weights), edge
                for parent, weight in zip(parents, edge.weights or ()):
                    assert abs(weights[self.original(parent)] - weight) < 0.01, edge

    def check_complete(self, found: Lineage, kind: str) -> None:
        """Every model with known parents has its edge, and every copy is one."""
        seen = {self.original(e.child.removeprefix(f"{kind}-")): e for e in found.edges if e.directed or e.weights}
        for child, (relation, _) in self.parents.items():
            assert child in seen, child
            assert seen[child].kind == relation
        copies = {e.child.removeprefix(f"{kind}-") for e in found.edges_of("copy", "cast")}
        assert copies == set(self.copies)

    def _descendants(self, names: Sequence[str]) -> list[str]:
        found = set(names)
        for _ in self.parents:
            found |= {child for child, (_, parents) in self.parents.items() if set(parents) & found}
        return sorted(found)


SMALL = History(
    copies={"copy": "base", "cast": "base"},
    parents={
        "soup": ("merge", {"long": 0.3, "base": 0.7}),
        "pruned": ("pruned", {"long": 1.0}),
        "short": ("layers", {"long": 1.0}),
    },
    relatives=(("base", "long", "light"), ("other",)),
)
LARGE = History(
    copies={
        "copy": "base",
        "cast": "base",
        "copycast": "base",
        "long-copy": "long",
        "mid-copy": "mid",
        "soup-copy": "soup",
        "merge-copies-copy": "merge-copies",
        "short-copy": "short",
    },
    parents={
        "soup": ("merge", {"long": 0.3, "mid": 0.7}),
        "soup3": ("merge", {"long": 0.5, "mid": 0.3, "light": 0.2}),
        "merge-copies": ("merge", {"long": 0.35, "mid": 0.65}),
        "merge-others": ("merge", {"other": 0.4, "another": 0.6}),
        "pruned": ("pruned", {"long": 1.0}),
        "short": ("layers", {"mid": 1.0}),
    },
    relatives=(("base", "light", "mid", "long", "second", "run5", "run10"), ("other", "another"), ("student",)),
)


def make_small(kind: str, folder: Path) -> list[Path]:
    f = Family(kind, folder, steps=15)
    return [
        f.base,
        f.scrambled("copy", "base", 1),
        f.cast("cast", "base"),
        f.tuned("light", "base", 2, 1e-4, 1),
        f.tuned("long", "base", 8, 2e-3, 2),
        f.averaged("soup", {"long": 0.3, "base": 0.7}),
        f.pruned("pruned", "long", 0.4),
        f.shortened("short", "long", [0, 2]),
        f.independent("other", 1),
    ]


def make_large(kind: str, folder: Path) -> list[Path]:
    f = Family(kind, folder)
    return [
        f.base,
        f.scrambled("copy", "base", 1),
        f.cast("cast", "base"),
        f.scrambled("copycast", "base", 2, "bfloat16"),
        f.tuned("light", "base", 5, 1e-4, 1),
        f.tuned("long", "base", 80, 1e-3, 2),
        f.tuned("mid", "base", 40, 3e-4, 3),
        f.tuned("second", "long", 30, 1e-3, 4),
        f.tuned("run5", "base", 5, 1e-3, 2),
        f.tuned("run10", "base", 10, 1e-3, 2),
        f.scrambled("long-copy", "long", 5),
        f.scrambled("mid-copy", "mid", 6),
        f.averaged("soup", {"long": 0.3, "mid": 0.7}),
        f.averaged("soup3", {"long": 0.5, "mid": 0.3, "light": 0.2}),
        f.scrambled("soup-copy", "soup", 7),
        f.merged("merge-copies", {"long-copy": 0.35, "mid-copy": 0.65}),
        f.scrambled("merge-copies-copy", "merge-copies", 9),
        f.pruned("pruned", "long", 0.4),
        f.shortened("short", "mid", [0, 2]),
        f.scrambled("short-copy", "short", 8),
        f.independent("other", 1),
        f.independent("another", 2),
        f.distilled("student", "base", 3),
        f.merged("merge-others", {"other": 0.4, "another": 0.6}),
    ]


@cache
def small_set() -> tuple[TemporaryDirectory[str], list[Path], Lineage]:
    """Nine models of one kind, as folders, and their lineage."""
    folder = TemporaryDirectory(prefix="isobasin-lineage-test-")
    paths = make_small("gpt2", Path(folder.name))
    return folder, paths, ib.lineage(paths, workers=1)


def test_every_edge_of_a_small_set_is_true_and_none_is_missing() -> None:
    _, _, found = small_set()
    SMALL.check(found, "gpt2")
    SMALL.check_complete(found, "gpt2")
    assert found.trees[-1] == ("gpt2-other",)
    assert [len(tree) for tree in found.trees] == [8, 1]


@pytest.mark.slow
def test_no_edge_is_wrong_among_models_of_several_architectures_and_sizes(tmp_path: Path) -> None:
    """In full 96 models; otherwise three."""
    kinds = ["llama", "llama-wide", "gpt2", "bert"] if FULL else []
    paths = [path for kind in kinds for path in make_large(kind, tmp_path)]
    if not FULL:
        paths = [*small_set()[1][:2], Family("bert", tmp_path, steps=2).base]
    found = ib.lineage(paths, workers=2 if FULL else 1)
    for kind in kinds:
        names = [m.name for m in found.models if m.name.startswith(kind) and (kind != "llama" or "wide" not in m.name)]
        edges = tuple(edge for edge in found.edges if edge.child in names)
        assert all(set(edge.parents) <= set(names) for edge in edges)
        LARGE.check(replace(found, edges=edges), kind)
        LARGE.check_complete(replace(found, edges=edges), kind)
    families = {model.name: model.family for model in found.models}
    assert all(len({families[n] for n in (*edge.parents, edge.child)}) == 1 for edge in found.edges)
    assert len(set(families.values())) == (3 if FULL else 2)


# -- what must not be taken for something else ------------------------------------------------------------------------


def average(models: Sequence[Weights], weights: Sequence[float]) -> Weights:
    return stored(combined(models[0], list(models), weights, sum(weights)), torch.float32)


def kinds_of(found: Lineage) -> set[str]:
    return {edge.kind for edge in found.edges}


def three(n_layers: int = 2) -> tuple[Weights, Weights, Weights]:
    base = stored(small_model(n_layers=n_layers), torch.float32)
    return base, stored(noisy(base, 0.1, 1), torch.float32), stored(noisy(base, 0.1, 2), torch.float32)


def test_an_average_is_found_with_its_weights_and_a_point_beside_the_line_is_not() -> None:
    base, a, b = three()
    found = ib.lineage([a, b, average([a, b], [0.25, 0.75])], names=["a", "b", "m"])
    (edge,) = found.edges_of("merge")
    assert (edge.parents, edge.child, edge.directed) == (("a", "b"), "m", True)
    assert edge.weights == pytest.approx((0.25, 0.75), abs=1e-5)
    beside = stored(noisy(average([a, b], [0.25, 0.75]), 3e-3, 3), torch.float32)  # as a point of a straight run may be
    assert kinds_of(ib.lineage([a, b, beside])) == {"relative"}
    assert kinds_of(ib.lineage([base, a, b])) == {"relative"}


def extrapolated(a: Weights, b: Weights, share: float, dtype: torch.dtype = torch.float32) -> Weights:
    """b + share (a − b)."""
    return stored(combined(a, [a, b], [share, 1 - share], 1.0), dtype)


@pytest.mark.parametrize("share", [2.0, 1.5, 1.1])
def test_an_extrapolation_does_not_make_its_end_an_average(share: float) -> None:
    base, a, _ = three()
    found = ib.lineage([base, a, extrapolated(a, base, share)], names=["base", "a", "x"])
    (edge,) = found.edges_of("merge")
    assert (edge.child, edge.directed) == ("a", False)
    assert edge.evidence.endswith("; or base or x is an extrapolation of the others")
    assert edge.words.endswith("direction not known")
    assert [row.name for row in found.outline if row.edge is edge] == ["a"]


def test_an_extrapolation_that_is_scrambled_shows_no_direction() -> None:
    base, a, _ = three(n_layers=1)
    found = ib.lineage([base, a, scrambled_file(extrapolated(a, base, 2.0))], names=["base", "a", "x"])
    assert all(not edge.directed for edge in found.edges)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_the_rounding_of_an_average_shows_its_direction(dtype: torch.dtype, share: float) -> None:
    _, a, b = three()
    a, b = stored(a, dtype), stored(b, dtype)
    m = stored(combined(a, [a, b], [share, 1 - share], 1.0), dtype)
    numbers = [sampled(each) for each in (m, a, b)]
    assert shows_average(numbers[0], numbers[1:], [share, 1 - share])
    assert not shows_average(numbers[1], [numbers[0], numbers[2]], [1 / share, 1 - 1 / share])
    x = extrapolated(a, b, 1 / share, dtype)
    assert not shows_average(numbers[1], [sampled(x), numbers[2]], [share, 1 - share])


def test_an_average_of_scrambled_parents_is_found_in_a_basis_of_its_own() -> None:
    _, a, b = three(n_layers=1)
    m = scrambled_file(average([a, b], [0.25, 0.75]), seed=3)
    found = ib.lineage([scrambled_file(a, seed=4), scrambled_file(b, seed=5), m], names=["a", "b", "m"])
    (edge,) = found.edges_of("merge")
    assert set(edge.parents) == {"a", "b"}
    weights = dict(zip(edge.parents, edge.weights or (), strict=True))
    assert weights["a"] == pytest.approx(0.25, abs=0.03)


def test_the_parents_of_averages_are_those_that_are_none() -> None:
    _, a, b = three()
    inner, outer = average([a, b], [0.5, 0.5]), average([a, b], [0.2, 0.8])
    found = ib.lineage([a, b, inner, outer], names=["a", "b", "inner", "outer"])
    assert {edge.child: edge.parents for edge in found.edges_of("merge")} == {"inner": ("a", "b"), "outer": ("a", "b")}


def test_a_light_fine_tune_is_no_copy_whatever_its_fingerprint() -> None:
    base, *_ = three()
    (name, *_) = [n for n in base if base[n].ndim == 2]
    for light in (stored(noisy(base, 1e-4), torch.float32), perturbed(base, name, 1e-3)):
        assert ib.fingerprint(base).matches(ib.fingerprint(light))
        assert kinds_of(ib.lineage([base, light])) == {"relative"}
        assert kinds_of(ib.lineage([base, scrambled_file(light)])) == {"relative"}


def test_a_narrower_type_is_the_child_unless_the_numbers_are_the_same() -> None:
    base, *_ = three()
    narrow = stored(base, torch.bfloat16)
    (edge,) = ib.lineage([narrow, base], names=["narrow", "base"]).edges
    assert (edge.kind, edge.parents, edge.child, edge.directed) == ("cast", ("base",), "narrow", True)
    (edge,) = ib.lineage([narrow, stored(narrow, torch.float32)]).edges
    assert (edge.kind, edge.directed) == ("copy", False)


def test_a_cast_of_one_of_two_models_nearer_than_its_rounding_goes_to_the_right_one() -> None:
    base, *_ = three()
    near = stored(noisy(base, 1.5e-3), torch.float32)
    found = ib.lineage([base, near, stored(near, torch.bfloat16)], names=["base", "near", "narrow"])
    assert [(e.parents, e.child) for e in found.edges_of("cast")] == [(("near",), "narrow")]


def test_a_cast_is_found_beside_a_model_whose_sampled_numbers_are_those_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sketch, "MOST", 8)  # numbers of each tensor
    base, *_ = three()
    name, n = next((n, base[n].numel()) for n in base if base[n].ndim == 2 and "mlp" in n)
    seen = set(sampled(with_tensors(base, {name: torch.arange(n).reshape(base[name].shape)}))[name].tolist())
    unseen = next(k for k in range(n) if k not in seen)
    row = base[name].clone()
    row.view(-1)[unseen] *= 2
    models = [base, with_tensors(base, {name: row}), stored(base, torch.bfloat16)]
    found = ib.lineage(models, names=["base", "row", "cast"])
    assert [(e.parents, e.child) for e in found.edges_of("cast")] == [(("base",), "cast")]
    assert not found.edges_of("copy")


def test_a_fine_tune_within_the_rounding_of_a_narrow_base_is_no_copy_and_not_its_origin() -> None:
    base, *_ = three()
    narrow = stored(base, torch.bfloat16)
    tuned = stored(noisy(stored(narrow, torch.float32), 1e-3), torch.float32)
    assert kinds_of(ib.lineage([narrow, tuned])) == {"relative"}


def test_a_wider_copy_of_a_narrow_model_has_no_direction() -> None:
    base, *_ = three()
    narrow = stored(base, torch.bfloat16)
    (edge,) = ib.lineage([narrow, scrambled_file(narrow)]).edges
    assert (edge.kind, edge.directed) == ("copy", False)


def test_a_copy_that_is_scrambled_in_part_is_a_copy() -> None:
    base, *_ = three()
    part = stored(ib.scramble(base, scope="first-attention").apply(base), torch.float32)
    assert kinds_of(ib.lineage([base, part])) == {"copy"}


def nearly_in_its_basis(weights: Weights, seed: int) -> Weights:
    """The same function, with values and outputs of every head multiplied by a matrix near the identity."""
    tensors = {name: weights[name].clone() for name in weights}
    size, generator = weights.arch.sizes.d_head, torch.Generator().manual_seed(seed)
    for name in (name for name in tensors if name.endswith("attn.v.weight")):
        v, o = tensors[name], tensors[name.replace("attn.v", "attn.o")]
        bias = tensors[name.replace("weight", "bias")]
        for rows in torch.arange(len(v)).split(size):
            m = torch.eye(size, dtype=v.dtype) + 0.4 / size**0.5 * torch.randn(size, size, generator=generator)
            v[rows], bias[rows], o[:, rows] = m @ v[rows], m @ bias[rows], o[:, rows] @ torch.linalg.inv(m)
    return with_tensors(weights, tensors)


def test_a_copy_that_seems_to_be_in_the_same_basis_is_a_copy() -> None:
    """Copies of one model that were moved next to another one: their numbers are near each other, and are not alike."""
    base, *_ = three()
    one, two = (stored(nearly_in_its_basis(base, seed), torch.float32) for seed in (0, 1))
    found = ib.lineage([base, one, two, scrambled_file(base)])
    assert [edge.kind for edge in found.edges] == ["copy"] * 3, found
    tuned = nearly_in_its_basis(noisy(base, 1e-3), 0)
    assert kinds_of(ib.lineage([base, stored(tuned, torch.float32)])) == {"relative"}


def pruned(weights: Weights, share: float) -> Weights:
    tensors = {name: weights[name] for name in weights if weights[name].ndim == 2}
    least = {name: t.abs().flatten().kthvalue(int(share * t.numel())).values for name, t in tensors.items()}
    return with_tensors(weights, {name: t * (t.abs() > least[name]) for name, t in tensors.items()})


def test_a_pruned_model_is_the_child_of_the_model_that_has_its_other_numbers() -> None:
    base, a, _ = three()
    less, more = pruned(a, 0.3), pruned(a, 0.6)
    found = ib.lineage([base, a, less, more], names=["base", "a", "less", "more"])
    assert {e.child: e.parents for e in found.edges_of("pruned")} == {"less": ("a",), "more": ("less",)}
    other = ib.lineage([base, less], names=["base", "less"])  # its parent is not there
    assert kinds_of(other) == {"relative"}


def test_a_pruned_model_of_a_scrambled_parent() -> None:
    _, a, _ = three(n_layers=1)
    found = ib.lineage([scrambled_file(a), pruned(a, 0.3)], names=["a", "pruned"])
    assert kinds_of(found) <= {"pruned", "relative"}
    assert all(edge.child == "pruned" for edge in found.edges_of("pruned"))


def test_models_with_other_heads_are_compared_on_their_trunk() -> None:
    models = [tiny_model(name) for name in ("bert-masked-lm-tied", "bert-classifier")]
    same = replace(models[1], tensors={n: models[0][n] if n in models[0] else models[1][n] for n in models[1]})
    (edge,) = ib.lineage([models[0], same]).edges
    assert (edge.kind, edge.distance) == ("relative", 0)
    assert "they differ in heads" in edge.evidence


def test_a_tied_model_and_the_same_with_a_head_of_its_own_are_copies() -> None:
    tied = stored(tiny_model("llama-tied"), torch.float32)
    own = stored(untied(tied), torch.float32)
    for pair in ([tied, own], [tied, scrambled_file(own)], [scrambled_file(tied), own]):
        (edge,) = ib.lineage(pair).edges
        assert edge.kind == "copy"
    changed = with_tensors(own, {"lm_head.weight": own["lm_head.weight"] * (1 + (torch.arange(30) == 7)[:, None])})
    for pair in ([tied, changed], [tied, scrambled_file(changed)]):
        assert kinds_of(ib.lineage(pair)) == {"relative"}


def test_a_canonical_copy_whose_shifts_hold_constants_is_a_copy() -> None:
    """No transform leads from its shifts of one to some of the shifts of the model."""
    model = stored(mt.weights("opt-untied"), torch.float32)
    (edge,) = ib.lineage([model, stored(ib.canonical(model).apply(model), torch.float32)]).edges
    assert (edge.kind, edge.evidence) == ("copy", SAME_FUNCTION)


def with_a_number_that_is_not_sampled(model: Weights) -> Weights:
    """One entry of the largest table changed, which no sketch holds."""
    name = max((n for n in model if model[n].ndim == 2), key=lambda n: model[n].numel())
    table, before = model[name].clone(), sampled(model)
    for place in range(table.numel()):
        changed = table.flatten().clone()
        changed[place] = 3.0
        other = with_tensors(model, {name: changed.reshape(table.shape)})
        if torch.equal(sampled(other)[name], before[name]):
            return stored(other, model.dtype)
    raise AssertionError("every number was sampled")


@pytest.mark.parametrize("kind", ["copy", "cast", "merge", "pruned", "scrambled"])
def test_a_number_that_was_not_sampled_counts(kind: str) -> None:
    base = stored(small_model(d_vocab=3000), torch.float32)
    tuned = stored(noisy(base, 0.1, 1), torch.float32)
    made = {
        "copy": ([base], lambda: base),
        "cast": ([base], lambda: stored(base, torch.bfloat16)),
        "merge": ([base, tuned], lambda: average([base, tuned], [0.25, 0.75])),
        "pruned": ([tuned], lambda: pruned(tuned, 0.3)),
        "scrambled": ([base], lambda: scrambled_file(base)),
    }
    parents, child = made[kind][0], made[kind][1]()
    expected = "copy" if kind == "scrambled" else kind
    assert expected in kinds_of(ib.lineage([*parents, child]))
    assert kinds_of(ib.lineage([*parents, with_a_number_that_is_not_sampled(child)])) == {"relative"}


def test_a_scrambled_model_and_one_with_fewer_tokens_are_compared_on_the_tokens_of_both() -> None:
    model = stored(tiny_model("llama-gqa"), torch.float32)
    fewer = stored(with_vocabulary(model, model.config["vocab_size"] - 3), torch.float32)
    for pair in ([scrambled_file(model), fewer], [model, scrambled_file(fewer)]):
        (edge,) = ib.lineage(pair).edges
        assert (edge.kind, edge.evidence) == ("relative", SAME_TRUNK)


def test_a_scrambled_model_and_one_with_other_heads_are_compared_on_their_trunk() -> None:
    lm, classifier = (tiny_model(name) for name in ("bert-masked-lm-tied", "bert-classifier"))
    same = with_tensors(classifier, {n: lm[n] for n in classifier if n in lm})
    (edge,) = ib.lineage([lm, scrambled_file(same)]).edges
    assert edge.kind == "relative"
    assert edge.distance < 1e-5


def test_the_models_of_a_cluster_may_have_other_heads_than_the_one_that_is_aligned() -> None:
    lm, classifier = (tiny_model(name) for name in ("bert-masked-lm-tied", "bert-classifier"))
    same = with_tensors(classifier, {n: lm[n] for n in classifier if n in lm})
    there = scrambled_file(same)
    head = with_tensors(lm, {n: there[n] for n in lm if n in there})
    for models in ([lm, same, there, head], [same, lm, head, there]):
        found = ib.lineage(models)
        assert len(found.trees) == 1
        assert not found.edges_of("undecided")


def test_a_singular_system_is_no_average() -> None:
    x = {"t": torch.ones(5, dtype=torch.float64)}
    basis = Basis((x, x, x, x))
    gram = torch.zeros(4, 4, dtype=torch.float64)
    gram[1:, 1:] = -(2.0**-60)  # as rounding may leave it of equal models
    vars(basis)["gram"] = gram
    assert basis.residuals(0, torch.tensor([[1, 2], [2, 3]])).isinf().all()
    assert list(basis.mixtures(0, [1, 2, 3], 0.7)) == []


def test_a_pair_that_can_not_be_compared_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    base, a, b = three()
    moves = MoveTo.__call__

    def fails(task: MoveTo) -> Moved | None:
        raise KeyError("no such tensor")

    monkeypatch.setattr(MoveTo, "__call__", fails)
    found = ib.lineage([base, a, scrambled_file(b)], names=["base", "a", "b"], workers=1)
    assert found.edges_of("relative")[0].child == "a"
    (edge,) = found.edges_of("undecided")
    assert {*edge.parents, edge.child} & {"b"}
    assert edge.evidence == "not compared: KeyError: 'no such tensor'"
    assert edge.to_dict()["distance"] is None
    assert "not compared" in render(found)
    monkeypatch.setattr(MoveTo, "__call__", moves)
    assert not ib.lineage([base, a, scrambled_file(b)], workers=1).edges_of("undecided")


def test_layers_that_are_repeated_show_no_direction() -> None:
    base, *_ = three()

    def with_layers(layers: Sequence[int]) -> Weights:
        deep = stored(small_model(n_layers=len(layers)), torch.float32)
        names = {name: name for name in deep}
        for name in deep:
            parts = name.split(".")
            at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
            if at is not None:
                names[name] = ".".join([*parts[:at], str(layers[int(parts[at])]), *parts[at + 1 :]])
        return with_tensors(deep, {name: base[source] for name, source in names.items()})

    stacked = with_layers([0, 0, 1])
    (edge,) = ib.lineage([stacked, base]).edges
    assert (edge.kind, edge.directed, edge.distance) == ("relative", False, 0)
    assert edge.evidence == "equal to layers 1, 2 of 3; the others repeat these: either may be made of the other"
    assert [(e.kind, e.directed) for e in ib.lineage([base, with_layers([1])]).edges] == [("layers", True)]


def test_the_base_that_the_caller_names_gives_a_direction() -> None:
    base, a, b = three()
    found = ib.lineage([a, b, base], names=["a", "b", "base"], base="base")
    assert {(e.kind, e.parents, e.child, e.directed) for e in found.edges} == {
        ("descendant", ("base",), "a", True),
        ("descendant", ("base",), "b", True),
    }
    assert all(not edge.directed for edge in ib.lineage([a, b, base]).edges)


@pytest.mark.parametrize("base", [2, -1])
def test_a_base_that_is_no_number_of_a_model_is_named(base: int) -> None:
    one, two, _ = three()
    with pytest.raises(IsobasinError, match=f"base {base}: expected the number of a model, from 0 to 1, or its name"):
        ib.lineage([one, two], base=base)


def test_the_base_may_be_a_folder_with_a_slash_at_its_end() -> None:
    _, paths, _ = small_set()
    chosen = [paths[0], paths[3]]
    for base in (f"{paths[0].name}/", f"{paths[0]}/", str(paths[0])):
        assert ib.lineage(chosen, base=base, workers=1).base == paths[0].name


def test_models_that_differ_in_vectors_alone_are_not_said_to_be_near() -> None:
    base, *_ = three()
    gain = next(n for n in base if base[n].ndim == 1)
    (edge,) = ib.lineage([base, with_tensors(base, {gain: 1.1 * base[gain]})]).edges
    assert (edge.kind, edge.distance) == ("relative", 0)
    assert "no difference in the numbers of matrices" in edge.evidence


def test_unrelated_models_have_no_edge() -> None:
    models = [stored(small_model(n_layers=2, d_vocab=40), torch.float32)]
    models += [stored(scrambled_file(noisy(models[0], 30.0, seed)), torch.float32) for seed in (1, 2)]
    assert ib.lineage(models).edges == ()


# -- parts ------------------------------------------------------------------------------------------------------------


def test_layers_are_matched_in_their_order() -> None:
    assert in_order([[0.1, 0.9], [0.9, 0.1], [0.2, 0.8]]) == (1, 2)
    assert in_order([[1.0]]) == (0,)


def test_weights_of_an_average_add_up_to_one_and_are_not_negative() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(500, generator=rng, dtype=torch.float64) for _ in range(3))
    rows = [{"t": x} for x in (0.5 * a + 0.5 * b, a, b, c, 2 * a - b)]
    basis = Basis(tuple(rows))
    first = next(basis.mixtures(0, [1, 2, 3], 0.1))
    assert first.parents == (1, 2)
    assert first.weights == pytest.approx((0.5, 0.5))
    assert list(basis.mixtures(4, [1, 2, 3], 0.1)) == []  # beyond both parents
    assert list(basis.mixtures(3, [0, 1, 2], 0.1)) == []


def _squared(number: int) -> int:
    return number**2


@pytest.mark.slow
def test_workers_return_results_in_the_order_of_the_tasks(tmp_path: Path) -> None:
    with open_workers(_squared, size=2 if FULL else 1, log=tmp_path / "log") as run:
        assert run([3, 1, 2]) == [9, 1, 4]


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(IsobasinError, match="expected one of local, ray"),
        open_workers(_squared, engine="none", log=tmp_path / "log"),
    ):
        pass


def test_wrong_calls_say_what_was_expected() -> None:
    base, a, _ = three()
    with pytest.raises(IsobasinError, match="at least two"):
        ib.lineage([base])
    with pytest.raises(IsobasinError, match="base 'x' is none of the models"):
        ib.lineage([base, a], base="x")
    with pytest.raises(IsobasinError, match=r"^/m/a: given twice; name every model once"):
        ib.lineage(["/m/a", "/m/a/"])
    with pytest.raises(IsobasinError, match="1 names for 2 models"):
        ib.lineage([base, a], names=["a"])


# -- command and page -------------------------------------------------------------------------------------------------


def test_the_command_prints_a_tree_and_writes_json_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, paths, _ = small_set()
    models, page = [str(path) for path in (paths[0], paths[4], paths[5])], tmp_path / "page.html"
    assert run(["lineage", *models, "-o", str(page), "--workers", "1"]) == 0
    words = capsys.readouterr().out
    assert "0.7 × gpt2-base + 0.3 × gpt2-long" in words
    assert words.rstrip().endswith("page.html: open it in any browser")
    assert run(["lineage", *models, "--base", models[0], "--workers", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {(e["kind"], e["child"], e["direction"]) for e in facts["edges"]} == {
        ("merge", "gpt2-soup", "known"),
        ("descendant", "gpt2-long", "known"),
    }
    assert run(["lineage", *models, "-o", str(page)]) == 2  # it exists
    assert run(["lineage", models[0]]) == 2


def test_the_page_names_every_model_and_the_weights(tmp_path: Path) -> None:
    _, _, found = small_set()
    page = render(found)
    assert all(model.name in page for model in found.models)
    assert "0.3 × gpt2-long" in page
    assert page.count('class="row"') == 8  # the ninth has no relatives
    assert ib.write_lineage_page(found, tmp_path / "page.html").stat().st_size < 200_000
    with pytest.raises(IsobasinError, match="--force"):
        ib.write_lineage_page(found, tmp_path / "page.html")


def test_json_has_all_that_the_result_has() -> None:
    _, _, found = small_set()
    facts = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(facts) == {"models", "edges", "trees", "similarity", "distance", "base"}
    assert {edge["direction"] for edge in facts["edges"]} == {"known", "unknown"}
    number = {model["name"]: i for i, model in enumerate(facts["models"])}
    similar = facts["similarity"][number["gpt2-base"]]
    assert similar[number["gpt2-copy"]] == pytest.approx(1)
    assert (similar[number["gpt2-other"]] or 0) < 0.6
    assert "9 models in 2 groups" in repr(found)


@pytest.mark.parametrize(
    ("key", "value", "kind"), [("rms_norm_eps", 0.5, "undecided"), ("sliding_window", 3, "relative")]
)
def test_models_of_which_only_a_setting_differs_are_told_which(key: str, value: object, kind: str) -> None:
    model = stored(tiny_model("llama-gqa"), torch.float32)
    other = ib.load({n: model[n] for n in model}, dict(model.config) | {key: value})
    (edge,) = ib.lineage([model, other]).edges
    assert edge.kind == kind
    assert key in edge.evidence


def test_models_that_differ_from_one_another_in_one_row_are_not_checked_as_averages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every pair of them and the base looks like an average that leaves little; aligning parents takes minutes."""
    calls: list[object] = []

    def counted(task: AverageCheck) -> Average:
        calls.append(task)
        return Average(task.weights, float("inf"))

    monkeypatch.setattr(AverageCheck, "__call__", counted)
    base = tiny_model("llama-untied")
    rows = [n for n in base if n.endswith(("q_proj.weight", "up_proj.weight"))]
    models = [base]
    for row, name in enumerate(rows):
        changed = base[name].clone()
        changed[row % len(changed)] = torch.randn(changed.shape[1], generator=torch.Generator().manual_seed(row))
        models.append(with_tensors(base, {name: changed}))
    found = ib.lineage(models)
    assert {edge.kind for edge in found.edges} == {"relative"}
    assert len(found.trees) == 1
    assert not calls
    monkeypatch.setattr("isobasin.compare.lineage._shares_most", lambda *_: False)
    ib.lineage(models)
    assert calls
