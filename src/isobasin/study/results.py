"""The results of a study read from its JSON alone: its cells with their models, pairs and ablations, and the values
that tables, figures and summary.json show."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.path.barrier import grid, is_connected, midpoint
from isobasin.study.store import PACKED, RESULT, STUDY, StoredStudy, stored_studies
from isobasin.symmetries import SCOPES

NAIVE = "naive"
MAX_OUTPUT_CHANGE = 1e-3  # relative: alignment that changes the outputs by more has changed the function
SCOPE_TITLES = {
    "first-attention": "First attention layer",
    "all-attention": "All attention layers",
    "first-block": "First Transformer layer",
    "model": "Entire model",
}
STAGES = {"weights/none": "none", "weights/orthogonal": "orthogonal", "weights": "full"}
_KEYS = ("model", "dataset", "positions", "layers", "heads", "width", "finetune_heads", "frozen", "scope")
_MODEL_KEYS = ("loss", "accuracy", "bits_per_byte", "perplexity", "n_steps", "n_params", "seconds")
_ABLATIONS = ("heads", "layers", "control")
_MODELS = {"vit": "ViT", "bert": "BERT", "gpt2": "GPT-2", "llama": "Llama"}
_DATASETS = {
    "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100",
    "tiny-imagenet": "Tiny ImageNet", "imagenet": "ImageNet", "ag_news": "AG News", "imdb": "IMDB",
    "dbpedia": "DBPedia", "wikitext-103": "WikiText-103", "one-billion-word": "One Billion Word",
    "shakespeare": "Shakespeare", "tinyshakespeare": "Shakespeare",
}  # fmt: skip

JsonObject = Mapping[str, Any]


@dataclass(frozen=True)
class PairResult:
    """One pair: its seeds, and the result of its job `pair`."""

    seeds: tuple[int, int]
    facts: JsonObject

    @property
    def name(self) -> str:
        return f"{self.seeds[0]}–{self.seeds[1]}"

    @property
    def labels(self) -> tuple[str, ...]:
        """The matchers."""
        return tuple(label for label in self.facts["curves"] if label != NAIVE)

    def barrier(self, label: str, metric: str = "loss") -> float | None:
        found: float | None = self.facts["barrier"].get(label, {}).get(metric)
        return found

    def curve(self, label: str, metric: str) -> Sequence[float | None]:
        return self.facts["curves"].get(label, {}).get(metric) or ()


@dataclass(frozen=True)
class CellResult:
    """One cell of the study; `status` is done, failed or not filled, `why` the reason of a failure."""

    about: JsonObject
    status: str
    why: str | None
    models: tuple[tuple[int, JsonObject], ...]
    pairs: tuple[PairResult, ...]
    baseline: float | None
    ablations: Mapping[str, tuple[JsonObject, ...]]  # by kind

    @property
    def done(self) -> bool:
        return self.status == "done" and bool(self.pairs)

    @property
    def labels(self) -> tuple[str, ...]:
        """The matchers that all of its pairs have."""
        shared = self.pairs[0].labels if self.pairs else ()
        return tuple(label for label in shared if all(label in pair.labels for pair in self.pairs))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that are drawn: the loss, and bits per byte for text, otherwise accuracy."""
        found = self.pairs[0].facts["curves"][NAIVE] if self.pairs else {}
        second = "bits_per_byte" if "bits_per_byte" in found else "accuracy"
        return tuple(metric for metric in ("loss", second) if metric in found)


@dataclass(frozen=True)
class Study:
    """All cells of a folder, and the runs that filled it."""

    name: str
    cells: tuple[CellResult, ...]
    runs: tuple[JsonObject, ...] = ()
    title: str | None = None  # of the grid


def read_study(folder: Path) -> Study:
    """The study of a folder: by its study.json, or without one by the results alone.

    A folder that holds several studies, as folders or as packed files, is read as one study.
    """
    stored = stored_studies(folder)
    if not stored:
        raise IsobasinError(f"{folder}: no study in it, expected {STUDY} or done/*/{RESULT}; run `isobasin study run`")
    studies = [_study(each) for each in stored]
    if len(studies) == 1:
        return studies[0]
    cells = tuple(cell for study in studies for cell in study.cells)
    return Study(folder.absolute().name, cells, tuple(run for study in studies for run in study.runs))


def _study(stored: StoredStudy) -> Study:
    if stored.table is not None:
        rows, name, runs, title = (stored.table.get(key) for key in ("cells", "name", "runs", "title"))
    else:
        rows, name, runs, title = _rows_from_results(stored.results), None, None, None
    cells = tuple(_cell(row, stored.results, stored.path) for row in rows or ())
    return Study(str(name or stored.path.absolute().name.removesuffix(PACKED)), cells, tuple(runs or ()), title)


def _cell(row: JsonObject, done: Mapping[str, JsonObject], path: Path) -> CellResult:
    jobs = row.get("jobs") or {}
    try:
        pairs = tuple(
            PairResult((each["seeds"][0], each["seeds"][1]), _checked_pair(done[each["job"]], each["job"]))
            for each in jobs.get("pairs", ())
            if each["job"] in done
        )
        models = tuple((each["seed"], done[each["job"]]) for each in jobs.get("models", ()) if each["job"] in done)
    except (KeyError, IndexError, TypeError) as error:
        raise IsobasinError(f"{path}: a cell of {STUDY} can not be read ({error!r}); run the study again") from error
    missing = len(pairs) < len(jobs.get("pairs", ()))
    status = "not filled" if row.get("status") == "done" and missing else str(row.get("status"))
    return CellResult(
        about=row,
        status=status,
        why=row.get("why"),
        models=models,
        pairs=pairs,
        baseline=(done.get(str(jobs.get("baseline"))) or {}).get("accuracy"),
        ablations={kind: tuple(done[n] for n in jobs.get(kind, ()) if n in done) for kind in _ABLATIONS},
    )


def _checked_pair(found: JsonObject, name: str) -> JsonObject:
    n = len(found.get("lambdas") or ())
    curves = found.get("curves") or {}
    complete = n >= 2 and NAIVE in curves and all(len(v) == n for curve in curves.values() for v in curve.values())
    if not complete or not isinstance(found.get("barrier"), Mapping):
        raise IsobasinError(f"done/{name}/{RESULT}: not the result of a pair; delete it to have it made again")
    return found


def _rows_from_results(done: Mapping[str, JsonObject]) -> list[dict[str, Any]]:
    """Cells from the results alone: pairs whose models differ only by their seed belong together."""
    rows: dict[str, dict[str, Any]] = {}
    for name, found in done.items():
        job = found.get("job") or {}
        if job.get("kind") != "pair" or any(need not in done for need in job["needs"]):
            continue
        ends = [done[need]["job"] for need in job["needs"]]
        about = _about(ends[0], job["settings"], done)
        pretrained = ends[0]["needs"][0] if ends[0]["kind"] == "finetune" else None
        empty: JsonObject = {"status": "done", "why": None, "jobs": {"pairs": [], "models": [], "pretrain": pretrained}}
        row = rows.setdefault(json.dumps(about, sort_keys=True), {**about, **empty})
        seeds = [end["settings"]["seed"] for end in ends]
        row["jobs"]["pairs"].append({"seeds": seeds, "job": name})
        for seed, need in zip(seeds, job["needs"]):
            if {"seed": seed, "job": need} not in row["jobs"]["models"]:
                row["jobs"]["models"].append({"seed": seed, "job": need})
    for row in rows.values():
        row["jobs"]["pairs"].sort(key=lambda job: job["seeds"])
        row["jobs"]["models"].sort(key=lambda job: job["seed"])
        row["jobs"] |= _baseline_and_ablations(row, done)
    return list(rows.values())


def _about(end: JsonObject, settings: JsonObject, done: Mapping[str, JsonObject]) -> dict[str, Any]:
    """What the models of a pair have in common."""
    tuned = end["settings"] if end["kind"] == "finetune" else {}
    first = done[end["needs"][0]]["job"]["settings"] if tuned and end["needs"][0] in done else end["settings"]
    trained = {key: each.get("train") for key, each in (("pretrain", first), ("finetune", tuned)) if each}
    return {
        **{key: first.get(key) for key in ("model", "positions", "layers", "heads", "width")},
        "dataset": settings.get("dataset"),
        "scope": settings.get("scope"),
        "frozen": bool(tuned.get("frozen")),
        "finetune_heads": tuned.get("heads"),
        "trained": trained,
    }


def _baseline_and_ablations(row: JsonObject, done: Mapping[str, JsonObject]) -> dict[str, Any]:
    """The baseline of the cell's data set, and the ablations of its models or of their pretrained model."""
    models = {each["job"] for each in row["jobs"]["models"]} | {row["jobs"]["pretrain"]}
    found: dict[str, Any] = {kind: [] for kind in _ABLATIONS}
    for name, result in done.items():
        job = result.get("job") or {}
        if job.get("kind") in _ABLATIONS and models.issuperset(job["needs"]):
            found[job["kind"]].append(name)
        if job.get("kind") == "baseline" and job["settings"].get("dataset") == row["dataset"]:
            found["baseline"] = name
    return found


def mean(values: Sequence[float | None]) -> float | None:
    """The mean, or None if a value is missing: a barrier that is not finite is not left out of an average."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


@dataclass(frozen=True)
class Score:
    """One matcher in one cell: the barrier of each pair, their mean, its share of the naive mean, connected pairs."""

    label: str
    each: tuple[float | None, ...]
    naive: tuple[float | None, ...]
    output_change: float | None
    half: float | None  # mean loss at the midpoint: it also differs between paths without a barrier

    @property
    def mean(self) -> float | None:
        return mean(self.each)

    @property
    def naive_mean(self) -> float | None:
        return mean(self.naive)

    @property
    def share(self) -> float | None:
        """Mean barrier over mean naive barrier."""
        naive, own = self.naive_mean, self.mean
        return own / naive if own is not None and naive else None

    @property
    def n_connected(self) -> int:
        return sum(bool(is_connected(own, naive)) for own, naive in zip(self.each, self.naive))

    @property
    def connected(self) -> bool:
        """Whether every pair is connected and alignment left the function unchanged."""
        return self.n_connected == len(self.each) > 0 and self.same_function

    @property
    def same_function(self) -> bool:
        return self.output_change is None or self.output_change <= MAX_OUTPUT_CHANGE


def scores(cell: CellResult, metric: str = "loss") -> dict[str, Score]:
    """The scores of every matcher of a cell that is done, the naive path first; none for other cells."""
    if not cell.done:
        return {}
    naive, found = tuple(pair.barrier(NAIVE, metric) for pair in cell.pairs), {}
    for label in (NAIVE, *cell.labels):
        each = tuple(pair.barrier(label, metric) for pair in cell.pairs)
        changes = [(pair.facts.get("output_change") or {}).get(label) for pair in cell.pairs]
        largest = max((value for value in changes if value is not None), default=None)
        curves = [pair.curve(label, metric) for pair in cell.pairs]
        half = mean([curve[midpoint(grid(len(curve)))] if curve else None for curve in curves])
        found[label] = Score(label, each, naive, largest, half)
    return found


def quality(cell: CellResult, metric: str) -> float | None:
    """The mean of a metric over the models of a cell."""
    return mean([result.get(metric) for _, result in cell.models])


def summary_row(cell: CellResult) -> dict[str, Any]:
    """A cell as summary.json holds it."""
    found, accuracy = scores(cell), scores(cell, "accuracy")
    return {
        **{key: cell.about.get(key) for key in (*_KEYS, "cell")},
        "status": cell.status,
        "why": cell.why,
        "models": [
            {"seed": seed, **{key: result[key] for key in _MODEL_KEYS if result.get(key) is not None}}
            for seed, result in cell.models
        ],
        "accuracy": quality(cell, "accuracy"),
        "bits_per_byte": quality(cell, "bits_per_byte"),
        "baseline": cell.baseline,
        "pairs": [list(pair.seeds) for pair in cell.pairs],
        "barrier": {
            label: {
                "each": list(score.each),
                "mean": score.mean,
                "share": score.share,
                "half": score.half,
                "accuracy": accuracy[label].mean,
                "n_connected": score.n_connected,
                "connected": score.connected,
                "output_change": score.output_change,
            }
            for label, score in found.items()
        },
        "ablations": {
            "heads": [{key: each.get(key) for key in ("rank", "normalised")} for each in cell.ablations["heads"]],
            "layers": [{key: each.get(key) for key in ("before", "loss")} for each in cell.ablations["layers"]],
        },
    }


def model_name(cell: CellResult) -> str:
    name = str(cell.about.get("model"))
    return _MODELS.get(name, name)


def data_name(cell: CellResult) -> str:
    """The usual spelling of the data set; of a path the last part, without the kind of vocabulary."""
    name = str(cell.about.get("dataset")).partition(":")[0].rpartition("/")[2]
    return _DATASETS.get(name, name)


def size_name(cell: CellResult, *, but: str = "") -> str:
    """`6 layers, 4 heads, d = 192`, and whether only the scope was trained; `but` leaves one of them out."""
    about = cell.about
    heads = f"{about.get('heads')} → {about['finetune_heads']}" if about.get("finetune_heads") else about.get("heads")
    words = {
        "layers": f"{about.get('layers')} layer{'' if about.get('layers') == 1 else 's'}",
        "heads": f"{heads} heads",
        "width": f"d\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{about.get('width')}",
        "frozen": "rest frozen" if about.get("frozen") else "",
    }
    return ", ".join(word for what, word in words.items() if word and what != but)


def positions_name(cell: CellResult) -> str:
    """`RoPE`, `learned positions`: the bare word `learned` could be the matcher."""
    name = str(cell.about.get("positions"))
    return {"rope": "RoPE", "alibi": "ALiBi", "none": "no positions"}.get(name, f"{name} positions")


def title(cell: CellResult) -> str:
    """`ViT on CIFAR-10, RoPE`."""
    return f"{model_name(cell)} on {data_name(cell)}, {positions_name(cell)}"


def study_title(study: Study) -> str:
    """The title of the grid; without one, the models and the data, and what varies if that is all a study does."""
    if study.title:
        return str(study.title)
    models, data = (list(dict.fromkeys(map(name, study.cells))) for name in (model_name, data_name))
    words = [_listed(models, "models"), _listed(data, "data sets")]
    varied, varies = sweeps(study.cells), what_varies(study.cells)
    only_sweeps = varied and all(id(cell) in varies for cell in study.cells)
    against = _listed([sweep.what for sweep in varied], "numbers")
    return " on ".join(words) + (f" against {against}" if only_sweeps else "") if study.cells else study.name


def _listed(names: Sequence[str], noun: str, most: int = 4) -> str:
    """`a, b and c`, or their number."""
    names = list(dict.fromkeys(names))
    if len(names) > most:
        return f"{len(names)} {noun}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def by_scope(cells: Iterable[CellResult]) -> dict[str, list[CellResult]]:
    """Cells by scope, in the order of the paper."""
    found: dict[str, list[CellResult]] = {}
    for cell in sorted(cells, key=lambda c: SCOPES.index(s) if (s := c.about.get("scope")) in SCOPES else len(SCOPES)):
        found.setdefault(str(cell.about.get("scope")), []).append(cell)
    return found


def is_main(label: str) -> bool:
    """Whether a matcher belongs in the main tables: variants of Stage 2 and of head distances have their own."""
    return "/" not in label or label.startswith("learned")


def stage2_cells(cells: Iterable[CellResult]) -> list[tuple[CellResult, dict[str, Score]]]:
    """Cells that were aligned without Stage 2, with rotations only, and in full.

    Attention scopes only: sweeps over a whole model start with rotations inside the heads in all three cases.
    """
    found = [(cell, scores(cell)) for cell in cells if str(cell.about.get("scope")).endswith("attention")]
    return [
        (cell, {name: score[label] for label, name in STAGES.items()})
        for cell, score in found
        if all(label in score for label in STAGES)
    ]


def distance_cells(cells: Iterable[CellResult]) -> list[tuple[CellResult, dict[str, Score]]]:
    """Cells in which heads were paired by several distances."""
    chosen = []
    for cell in cells:
        every = scores(cell)
        labels = [label for label in every if label.startswith("weights/") and label not in STAGES]
        found = {label.removeprefix("weights/"): every[label] for label in labels}
        if found and "weights" in every:
            chosen.append((cell, {"complete": every["weights"]} | found))  # the default distance has no label
    return chosen


def position_comparisons(cells: Sequence[CellResult]) -> list[tuple[CellResult, CellResult]]:
    """Pairs of done cells that differ only in their positions: the first absolute, the second rotary."""
    done = [(cell, _without(cell, "positions"), cell.about.get("positions") == "rope") for cell in cells if cell.done]
    rotary = {key: cell for cell, key, is_rotary in done if is_rotary}
    return [(cell, rotary[key]) for cell, key, is_rotary in done if not is_rotary and key in rotary]


def _without(cell: CellResult, *left_out: str) -> str:
    """A key of everything about a cell except some of it; cells with equal keys agree in the rest."""
    kept = {key: cell.about.get(key) for key in _KEYS if key not in left_out}
    recipes = [result.get("job", {}).get("settings", {}).get("train") or {} for _, result in cell.models]
    lengths = ("epochs", "steps") if "length" in left_out else ()
    return repr(kept | {"trained": [sorted((k, v) for k, v in each.items() if k not in lengths) for each in recipes]})


@dataclass(frozen=True)
class Sweep:
    """Cells that differ in one number only, in ascending order of it."""

    what: str  # heads, width, layers or steps
    cells: tuple[tuple[float, CellResult], ...]

    @property
    def means(self) -> dict[str, list[float | None]]:
        """The mean barrier in each cell, by each main matcher that all of them have."""
        found = [scores(cell) for _, cell in self.cells]
        labels = [label for label in found[0] if is_main(label) and all(label in each for each in found)]
        return {label: [each[label].mean for each in found] for label in labels}


def sweeps(cells: Sequence[CellResult]) -> list[Sweep]:
    """All groups of two cells or more that differ only in the number of heads, width, depth or training steps."""
    found = []
    for what in ("heads", "width", "layers", "steps"):
        left_out = {"heads": ("heads", "finetune_heads"), "steps": ("length",)}.get(what, (what,))
        groups: dict[str, dict[float, CellResult]] = {}
        for cell in cells:
            number = _swept_number(cell, what) if cell.done else None
            if number is not None:
                groups.setdefault(_without(cell, *left_out), {}).setdefault(number, cell)
        found += [Sweep(what, tuple(sorted(group.items()))) for group in groups.values() if len(group) > 1]
    return found


def what_varies(cells: Sequence[CellResult]) -> dict[int, str]:
    """For each cell of a sweep, by its id, the numbers that vary: `steps 704, width 64`."""
    found: dict[str, list[str]] = {}
    for sweep in sweeps(cells):
        for number, cell in sweep.cells:
            found.setdefault(repr(cell.about.get("jobs")), []).append(f"{sweep.what} {number:g}")
    # By its jobs, since a grid can have the same cell twice.
    words = {id(cell): found.get(repr(cell.about.get("jobs"))) for cell in cells if cell.done}
    return {key: ", ".join(dict.fromkeys(each)) for key, each in words.items() if each}


def _swept_number(cell: CellResult, what: str) -> float | None:
    if what == "heads":
        return cell.about.get("finetune_heads") or cell.about.get("heads")
    return quality(cell, "n_steps") if what == "steps" else cell.about.get(what)
