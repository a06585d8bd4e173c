"""A study read back from its JSON alone: its cells, each with its models, its pairs and what was ablated."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.report.fields import strict

from .store import RESULT, read_json

STUDY = "study.json"
NAIVE = "naive"
_SHAPE = ("model", "positions", "layers", "heads", "width")
_ABLATIONS = ("heads", "layers", "control")
_DONE = f"[!.]*/{RESULT}"  # what is being written, or was when its worker was killed, has a hidden name

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """One pair: its seeds, and what the work `pair` gave back."""

    seeds: tuple[int, int]
    facts: Facts

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
    """One setting of the study; `status` is done, failed or not filled, `why` the reason of a failure."""

    about: Facts
    status: str
    why: str | None
    models: tuple[tuple[int, Facts], ...] = ()
    pairs: tuple[Measured, ...] = ()
    baseline: float | None = None
    pretrained: Facts | None = None
    ablations: Mapping[str, tuple[Facts, ...]] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.status == "done" and bool(self.pairs)

    @property
    def labels(self) -> tuple[str, ...]:
        """Every matcher that all of its pairs have."""
        shared = self.pairs[0].labels if self.pairs else ()
        return tuple(label for label in shared if all(label in pair.labels for pair in self.pairs))

    @property
    def metrics(self) -> tuple[str, ...]:
        """What its curves show, the loss first; bits per byte say more of text than accuracy does."""
        found = self.pairs[0].facts["curves"][NAIVE] if self.pairs else {}
        second = "bits_per_byte" if "bits_per_byte" in found else "accuracy"
        return tuple(metric for metric in ("loss", second) if metric in found)


@dataclass(frozen=True)
class Study:
    """All cells of a folder, and the runs that filled it."""

    name: str
    cells: tuple[CellResult, ...]
    runs: tuple[Facts, ...] = ()


def read_study(folder: Path) -> Study:
    """The study of a folder: by its study.json, or without one by what lies in `done`. A folder of such folders is
    read as one study."""
    places = [folder] if _holds_study(folder) else sorted(p for p in _folders(folder) if _holds_study(p))
    if not places:
        raise IsobasinError(f"{folder}: no study in it, expected {STUDY} or done/*/{RESULT}; run `isobasin study run`")
    studies = [_read_one(place) for place in places]
    if len(studies) == 1:
        return studies[0]
    cells = tuple(cell for study in studies for cell in study.cells)
    return Study(folder.absolute().name, cells, tuple(run for study in studies for run in study.runs))


def _folders(folder: Path) -> Iterator[Path]:
    try:
        yield from (path for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise IsobasinError(f"{folder}: can not be read ({error.strerror}); expected the folder of a study") from error


def _holds_study(folder: Path) -> bool:
    return (folder / STUDY).is_file() or any((folder / "done").glob(_DONE))


def _read_one(folder: Path) -> Study:
    done = {path.parent.name: strict(read_json(path)) for path in sorted((folder / "done").glob(_DONE))}
    if (folder / STUDY).is_file():
        table = strict(read_json(folder / STUDY))
        rows, name, runs = table.get("cells") or [], table.get("name"), table.get("runs") or []
    else:
        rows, name, runs = _rows_of(done), None, []
    cells = tuple(_cell(row, done, folder) for row in rows)
    return Study(str(name or folder.absolute().name), cells, tuple(runs))


def _cell(row: Facts, done: Mapping[str, Facts], folder: Path) -> CellResult:
    jobs = row.get("jobs") or {}
    try:
        pairs = tuple(
            Measured((each["seeds"][0], each["seeds"][1]), _checked(done[each["job"]], each["job"]))
            for each in jobs.get("pairs", ())
            if each["job"] in done
        )
        models = tuple((each["seed"], done[each["job"]]) for each in jobs.get("models", ()) if each["job"] in done)
    except (KeyError, IndexError, TypeError) as error:
        raise IsobasinError(f"{folder}: a cell of {STUDY} can not be read ({error!r}); run the study again") from error
    waiting = len(pairs) < len(jobs.get("pairs", ()))
    status = "not filled" if row.get("status") == "done" and waiting else str(row.get("status"))
    return CellResult(
        about=row,
        status=status,
        why=row.get("why"),
        models=models,
        pairs=pairs,
        baseline=(done.get(str(jobs.get("baseline"))) or {}).get("accuracy"),
        pretrained=done.get(str(jobs.get("pretrain"))),
        ablations={kind: tuple(done[n] for n in jobs.get(kind, ()) if n in done) for kind in _ABLATIONS},
    )


def _checked(found: Facts, name: str) -> Facts:
    n = len(found.get("lambdas") or ())
    curves = found.get("curves") or {}
    whole = n >= 2 and NAIVE in curves and all(len(v) == n for curve in curves.values() for v in curve.values())
    if not whole or not isinstance(found.get("barrier"), Mapping):
        raise IsobasinError(f"done/{name}/{RESULT}: not the result of a pair; delete it to have it made again")
    return found


def _rows_of(done: Mapping[str, Facts]) -> list[dict[str, Any]]:
    """Cells from the results alone: pairs whose models differ by nothing but their seed belong together."""
    rows: dict[str, dict[str, Any]] = {}
    for name, found in done.items():
        job = found.get("job") or {}
        if job.get("kind") != "pair" or any(need not in done for need in job["needs"]):
            continue
        ends = [done[need]["job"] for need in job["needs"]]
        about = _about(ends[0], job["settings"], done)
        row = rows.setdefault(json.dumps(about, sort_keys=True), about | _empty_row(ends[0]))
        seeds = [end["settings"]["seed"] for end in ends]
        row["jobs"]["pairs"].append({"seeds": seeds, "job": name})
        for seed, need in zip(seeds, job["needs"]):
            if {"seed": seed, "job": need} not in row["jobs"]["models"]:
                row["jobs"]["models"].append({"seed": seed, "job": need})
    for row in rows.values():
        row["jobs"] = {key: _in_order(jobs) for key, jobs in row["jobs"].items()} | _beside(row, done)
    return list(rows.values())


def _in_order(jobs: Any) -> Any:
    return sorted(jobs, key=lambda job: job.get("seeds") or [job["seed"]]) if isinstance(jobs, list) else jobs


def _about(end: Facts, settings: Facts, done: Mapping[str, Facts]) -> dict[str, Any]:
    """What a pair's models have in common."""
    tuned = end["settings"] if end["kind"] == "finetune" else {}
    first = done[end["needs"][0]]["job"]["settings"] if tuned and end["needs"][0] in done else end["settings"]
    kept = {key: first.get(key) for key in _SHAPE}
    trained = {key: each.get("train") for key, each in (("pretrain", first), ("finetune", tuned)) if each}
    return {
        **kept,
        "dataset": settings.get("dataset"),
        "scope": settings.get("scope"),
        "frozen": bool(tuned.get("frozen")),
        "finetune_heads": tuned.get("heads"),
        "trained": trained,
    }


def _empty_row(end: Facts) -> dict[str, Any]:
    pretrained = end["needs"][0] if end["kind"] == "finetune" else None
    return {"status": "done", "why": None, "jobs": {"pairs": [], "models": [], "pretrain": pretrained}}


def _beside(row: Facts, done: Mapping[str, Facts]) -> dict[str, Any]:
    """The baseline of the cell's data, and the ablations of its models or of what they came from."""
    models = {each["job"] for each in row["jobs"]["models"]} | {row["jobs"]["pretrain"]}
    found: dict[str, Any] = {kind: [] for kind in _ABLATIONS}
    for name, result in done.items():
        job = result.get("job") or {}
        if job.get("kind") in _ABLATIONS and models.issuperset(job["needs"]):
            found[job["kind"]].append(name)
        if job.get("kind") == "baseline" and job["settings"].get("dataset") == row["dataset"]:
            found["baseline"] = name
    return found
