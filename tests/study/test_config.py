"""Grid files: what they span, what they refuse; the jobs and the rows that follow."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobasin.errors import IsobasinError
from isobasin.study.config import Cell, Grid, read_grid
from isobasin.study.plan import CellPlan, Job, in_order, plan_cell
from isobasin.study.run import cell_row, check_dataset, write_study
from isobasin.study.store import Store

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/study").glob("*.toml"))
BLOCK = """
[[cells]]
model = "vit"
positions = ["absolute", "rope"]
layers = 2
heads = 4
width = 64
dataset = "digits"
scope = ["first-attention", "model"]
require = { accuracy = 0.9 }
[cells.pretrain]
epochs = 2
[cells.finetune]
epochs = 1
"""


def written(tmp_path: Path, text: str, name: str = 'name = "tiny"\n') -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(name + text)
    return path


def grid(tmp_path: Path, text: str = BLOCK) -> Grid:
    return read_grid(written(tmp_path, text))


def test_lists_span_the_grid(tmp_path: Path) -> None:
    found = grid(tmp_path)
    assert [cell.label for cell in found.cells] == [
        "vit sinusoidal 2×4×64 digits first-attention",
        "vit sinusoidal 2×4×64 digits model",
        "vit rope 2×4×64 digits first-attention",
        "vit rope 2×4×64 digits model",
    ]
    cell = found.cells[0]
    assert (cell.seeds, cell.points, cell.samples, cell.frozen) == ((1, 2, 3), 25, None, False)
    assert cell.pairs == ((0, 1), (0, 2), (1, 2))
    assert [choice.label for choice in cell.matchers] == ["weights"]


def test_recipes_span_too_and_the_name_says_so(tmp_path: Path) -> None:
    found = grid(tmp_path, BLOCK.replace("epochs = 1", "epochs = [1, 2]").replace('"absolute", ', ""))
    assert [cell.label for cell in found.cells] == [
        "vit rope 2×4×64 digits first-attention finetune.epochs=1",
        "vit rope 2×4×64 digits first-attention finetune.epochs=2",
        "vit rope 2×4×64 digits model",
    ]
    assert [cell.finetune.get("epochs") for cell in found.cells] == [1, 2, None]
    found = grid(tmp_path, BLOCK.replace("epochs = 2", "epochs = [2, 4]").replace('"absolute", ', ""))
    assert [cell.label for cell in found.cells[2:]] == [
        "vit rope 2×4×64 digits model pretrain.epochs=2",
        "vit rope 2×4×64 digits model pretrain.epochs=4",
    ]
    assert found.cells[3].whole["epochs"] == 4


def test_what_a_scope_makes_no_use_of_makes_no_other_cell(tmp_path: Path) -> None:
    text = BLOCK.replace("layers = 2", "layers = 2\nfrozen = [false, true]").replace('"absolute", ', "")
    text = text.replace("epochs = 2", 'epochs = 2\ndataset = "mnist"')
    assert [cell.label for cell in grid(tmp_path, text).cells] == [
        "vit rope 2×4×64 mnist→digits first-attention",
        "vit rope 2×4×64 mnist→digits first-attention frozen",
        "vit rope 2×4×64 digits model",
    ]


def test_whole_models_may_have_a_recipe_of_their_own(tmp_path: Path) -> None:
    found = grid(tmp_path, BLOCK + "[cells.whole]\nsteps = 7\n")
    whole = plan_cell(found.cells[1])
    assert [job.settings["train"].get("steps") for job in whole.models] == [7, 7, 7]
    assert plan_cell(found.cells[0]) == plan_cell(grid(tmp_path).cells[0])


def test_blocks_are_joined_and_overlap_once(tmp_path: Path) -> None:
    more = BLOCK.replace('["first-attention", "model"]', '["model", "first-block"]')
    assert [cell.scope for cell in grid(tmp_path, BLOCK + more).cells if cell.positions == "rope"] == [
        "first-attention",
        "model",
        "first-block",
    ]
    with pytest.raises(IsobasinError, match="two cells are called 'vit sinusoidal 2×4×64 digits first-attention'"):
        grid(tmp_path, BLOCK + BLOCK.replace("epochs = 1", "epochs = 3"))


def test_ablations_add_matchers_once(tmp_path: Path) -> None:
    found = grid(tmp_path, BLOCK.replace("[cells.pretrain]", 'ablations = ["stage2", "distances"]\n[cells.pretrain]'))
    labels = [choice.label for choice in found.cells[0].matchers]
    stages, distances = ["none", "orthogonal"], ["frobenius", "singular", "cosine"]
    assert labels == ["weights", *(f"weights/{word}" for word in [*stages, *distances])]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("width = 64", "widht = 64", "cells 1: unknown key 'widht'; the nearest that is known is 'width'"),
        ("width = 64\n", "", "cells 1: width is missing, expected a whole number"),
        ("width = 64", "width = []", "cells 1: width is an empty list"),
        ("width = 64", "width = true", "cells 1: width is True, expected a whole number"),
        ("width = 64", "width = 66", "width 66 can not be cut into 4 heads"),
        ("width = 64", "width = 12", "width 12 can not be cut into 4 heads: expected a divisor, and an even size"),
        ('"vit"', '"vitt"', "cells 1: model is 'vitt', expected one of vit, bert"),
        ('["absolute", "rope"]', '"roped"', "positions is 'roped', expected one of absolute"),
        ("layers = 2", "layers = 2\nseeds = [1]", "seeds is .1., expected a list of at least two"),
        ("layers = 2", "layers = 2\nseeds = [1, 1]", "seeds .1, 1. hold one twice"),
        ("layers = 2", "layers = 2\nseeds = [0, 1]", "seed 0 is both pretraining's and fine-tuning's"),
        ("layers = 2", "layers = 2\nmatchers = []", "matchers is an empty list"),
        ("layers = 2", 'layers = 2\nmatchers = ["wieghts"]', "matchers: .*matcher is 'wieghts', expected one of"),
        ("layers = 2", 'layers = 2\nablations = ["head"]', "ablations is .'head'., expected a list of some of stage2"),
        ("layers = 2", "layers = 2\nfinetune_heads = 8", "finetune_heads with scope 'first-attention'"),
        ("accuracy = 0.9", "acuracy = 0.9", "require: unknown key 'acuracy'"),
        ("epochs = 2", "epochs = 2\nsteps = 3", "pretrain: expected exactly one of epochs and steps"),
        ("epochs = 2", "epoch = 2", "pretrain: unknown key 'epoch'; the nearest that is known is 'epochs'"),
        ("[cells.finetune]\nepochs = 1\n", "", r"needs a recipe \[cells.finetune\]"),
        ("epochs = 1", 'epochs = 1\naugment = "flip"', "finetune: augment is 'flip', expected one of none"),
        ("[[cells]]", "[[cell]]", "unknown key 'cell'; the nearest that is known is 'cells'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in BLOCK
    with pytest.raises(IsobasinError, match=message):
        grid(tmp_path, BLOCK.replace(before, after))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "name is missing"), ('name = "x"\n', "no cells"), ("name =", "is not TOML"), ('name = ""', "name is ''")],
)
def test_a_file_that_is_no_grid_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises(IsobasinError, match=message):
        read_grid(path)
    with pytest.raises(IsobasinError, match="can not be read"):
        read_grid(tmp_path / "missing.toml")


def test_only_chooses_by_name(tmp_path: Path) -> None:
    found = grid(tmp_path)
    assert [cell.scope for cell in found.only("rope")] == ["first-attention", "model"]
    assert found.only(None) == found.cells
    with pytest.raises(IsobasinError, match="--only 'llama' fits none of 4 cells"):
        found.only("llama")


def test_data_are_looked_for_and_must_fit_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cell = grid(tmp_path).cells[0]
    check_dataset(cell, None)
    with pytest.raises(IsobasinError, match="data set 'shakespeare' is one long text, vit reads pictures"):
        check_dataset(replace(cell, dataset="shakespeare"), None)
    with pytest.raises(IsobasinError, match="data set 'cifar10'"):
        check_dataset(replace(cell, dataset="cifar10"), tmp_path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_grids(path: Path) -> None:
    found = read_grid(path)
    assert found.name == path.stem
    assert {cell.dataset for cell in found.cells}


def test_the_examples_were_found() -> None:
    assert {"digits", "vit-cifar10", "bert-imdb", "llama-enwik8"} <= {path.stem for path in EXAMPLES}


def plan(tmp_path: Path, **changed: Any) -> CellPlan:
    return plan_cell(replace(grid(tmp_path).cells[0], **changed))


def test_cells_share_what_they_can(tmp_path: Path) -> None:
    first, whole, other, _ = (plan_cell(cell) for cell in grid(tmp_path).cells)
    assert first.pretrained is not None
    assert [job.kind for job in first.jobs] == ["pretrain", *3 * ["finetune"], *3 * ["pair"]]
    assert whole.pretrained is None
    assert [job.settings["seed"] for job in whole.models] == [1, 2, 3]
    assert {job.kind for job in whole.jobs} == {"pretrain", "pair"}
    block = plan(tmp_path, scope="first-block")
    assert block.pretrained == first.pretrained
    assert len(in_order([*first.jobs, *block.jobs])) == 1 + 2 * 6
    assert other.pretrained != first.pretrained
    assert [need.settings["seed"] for need in first.pairs[1].needs] == [1, 3]


def test_a_job_knows_all_that_its_result_depends_on(tmp_path: Path) -> None:
    """Each change of the cell changes the jobs that it bears on, and no others."""
    cell = grid(tmp_path).cells[0]
    before = plan_cell(cell)

    def moved(**changed: Any) -> tuple[bool, bool, bool]:
        after = plan_cell(replace(cell, **changed))
        return after.pretrained != before.pretrained, after.models != before.models, after.pairs != before.pairs

    assert moved() == (False, False, False)
    for name, value in (("width", 32), ("layers", 1), ("heads", 2), ("positions", "learned"), ("model", "bert")):
        assert moved(**{name: value}) == (True, True, True), name
    assert moved(pretrain=cell.pretrain | {"rate": 0.5}) == (True, True, True)
    assert moved(finetune=cell.finetune | {"rate": 0.5}) == (False, True, True)
    assert moved(frozen=True) == (False, True, True)
    assert moved(points=5) == (False, False, True)
    assert moved(samples=5) == (False, False, True)
    assert moved(require={"accuracy": 0.99}) == (False, False, False)


def test_ablations_are_jobs_of_their_own(tmp_path: Path) -> None:
    found = plan(tmp_path, ablations=("heads", "layers", "control"))
    assert {name: len(jobs) for name, jobs in found.ablations.items()} == {"heads": 3, "layers": 1, "control": 1}
    assert found.ablations["layers"][0].needs == (found.pretrained,)
    assert found.ablations["control"][0].needs == found.models[:1]
    assert found.names["heads"] == [job.name for job in found.ablations["heads"]]
    assert len(found.jobs) == 7 + 5


def fill(store: Store, job: Job, **result: Any) -> None:
    with store.writing(job) as place:
        place.commit(result, seconds=1)


def filled(tmp_path: Path, cell: Cell, accuracies: tuple[float, ...] = (0.95, 0.96, 0.97)) -> tuple[CellPlan, Store]:
    found, store = plan_cell(cell), Store(tmp_path / "study")
    assert found.pretrained is not None
    fill(store, found.pretrained, accuracy=0.98, loss=0.1)
    for job, accuracy in zip(found.models, accuracies):
        fill(store, job, accuracy=accuracy, loss=1 - accuracy)
    for job, naive, aligned in zip(found.pairs, (1.0, 2.0, 3.0), (0.03, 0.06, 0.09)):
        weights, poor = {"loss": aligned}, {"loss": naive / 2}
        fill(store, job, barrier={"naive": {"loss": naive}, "weights": weights, "weights/none": poor})
    return found, store


def test_a_row_averages_over_pairs(tmp_path: Path) -> None:
    found = cell_row(*filled(tmp_path, grid(tmp_path).cells[0]))
    assert found["status"] == "done"
    assert found["accuracy"] == {"mean": pytest.approx(0.96), "min": 0.95}
    assert found["loss"] == {"mean": pytest.approx(0.04), "max": pytest.approx(0.05)}
    assert (found["pretrained"], found["baseline"], found["bits_per_byte"], found["n_pairs"]) == (0.98, None, None, 3)
    assert (found["naive"], found["barrier"]) == (2.0, {"weights": pytest.approx(0.06), "weights/none": 1.0})
    assert found["share"] == {"weights": pytest.approx(0.03), "weights/none": 0.5}
    assert found["connected"] == {"weights": True, "weights/none": False}


def test_a_cell_whose_models_miss_what_it_asks_for_is_not_averaged(tmp_path: Path) -> None:
    found = cell_row(*filled(tmp_path, grid(tmp_path).cells[0], accuracies=(0.95, 0.89, 0.97)))
    assert (found["status"], found["why"]) == ("failed", "seed 2: accuracy 0.89, asked for ≥ 0.9")
    assert (found["naive"], found["barrier"], found["n_pairs"]) == (None, {}, 0)
    assert found["accuracy"]["min"] == 0.89


def test_a_cell_without_the_number_it_asks_for_is_failed(tmp_path: Path) -> None:
    cell = replace(grid(tmp_path).cells[0], require={"accuracy": None, "bits_per_byte": 1.6})
    found = cell_row(*filled(tmp_path, cell))
    assert found["why"] == "seed 1: bits_per_byte none, asked for ≤ 1.6"


def test_a_cell_is_failed_where_a_job_failed_and_else_not_filled(tmp_path: Path) -> None:
    empty, store = plan_cell(grid(tmp_path).cells[0]), Store(tmp_path / "study")
    assert cell_row(empty, store)["status"] == "not filled"
    assert empty.pretrained is not None
    store.record_failure(empty.pretrained, "no memory", 2)
    found = cell_row(empty, store)
    assert (found["status"], found["why"], found["accuracy"]) == ("failed", "pretrain: no memory", None)


def test_a_study_may_have_a_title(tmp_path: Path) -> None:
    titled = read_grid(written(tmp_path, BLOCK, 'name = "tiny"\ntitle = "Which positions matter"\n'))
    assert (titled.title, grid(tmp_path).title) == ("Which positions matter", None)
    plans = Store(tmp_path / "study")
    plans.root.mkdir()
    assert write_study(titled, (), plans, ())["title"] == "Which positions matter"
    assert "title" not in write_study(grid(tmp_path), (), plans, ())
    with pytest.raises(IsobasinError, match="title is 3"):
        read_grid(written(tmp_path, BLOCK, 'name = "tiny"\ntitle = 3\n'))
