"""What a study says, as plain values: a row for each cell, and the rows of every ablation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from isobasin.report.wording import NBSP

from .reinitialising import SCOPES
from .results import NAIVE, CellResult, Facts, Measured
from .rows import is_connected

SCOPE_TITLES = {
    "first-attention": "First attention layer",
    "all-attention": "All attention layers",
    "first-block": "First Transformer layer",
    "model": "Entire model",
}
STAGES = {"weights/none": "none", "weights/orthogonal": "orthogonal", "weights": "full"}
UNCHANGED = 1e-3  # outputs that alignment moved by more are no longer those of the same function
_MODELS = {"vit": "ViT", "bert": "BERT", "gpt2": "GPT-2", "llama": "Llama"}
_DATA = {
    "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100",
    "tiny-imagenet": "Tiny ImageNet", "imagenet": "ImageNet", "ag_news": "AG News", "imdb": "IMDB",
    "dbpedia": "DBPedia", "wikitext-103": "WikiText-103", "one-billion-word": "One Billion Word",
    "shakespeare": "Shakespeare", "tinyshakespeare": "Shakespeare",
}  # fmt: skip


def model_name(cell: CellResult) -> str:
    name = str(cell.about.get("model"))
    return _MODELS.get(name, name)


def data_name(cell: CellResult) -> str:
    """The data set as people write it; a path is known by its last part, a vocabulary is left out."""
    name = str(cell.about.get("dataset")).partition(":")[0].rpartition("/")[2]
    return _DATA.get(name, name)


def size_name(cell: CellResult, *, but: str = "") -> str:
    """`6 layers, 4 heads, d = 192`, and whether only the scope was trained; without what varies in a sweep."""
    about = cell.about
    heads = f"{about.get('heads')} → {about['finetune_heads']}" if about.get("finetune_heads") else about.get("heads")
    words = {
        "layers": f"{about.get('layers')} layer{'' if about.get('layers') == 1 else 's'}",
        "heads": f"{heads} heads",
        "width": f"d{NBSP}={NBSP}{about.get('width')}",
        "frozen": "rest frozen" if about.get("frozen") else "",
    }
    return ", ".join(word for what, word in words.items() if word and what != but)


def positions_name(cell: CellResult) -> str:
    """`RoPE`, `learned positions`: the bare word would be taken for the matcher."""
    name = str(cell.about.get("positions"))
    return {"rope": "RoPE", "alibi": "ALiBi", "none": "no positions"}.get(name, f"{name} positions")


def title(cell: CellResult) -> str:
    """`ViT on CIFAR-10, RoPE`."""
    return f"{model_name(cell)} on {data_name(cell)}, {positions_name(cell)}"


def n_heads(cell: CellResult) -> int:
    """Heads of the models that are compared."""
    return int(cell.about.get("finetune_heads") or cell.about.get("heads") or 0)


def by_scope(cells: Iterable[CellResult]) -> dict[str, list[CellResult]]:
    """Cells by scope, in the order of the paper."""
    found: dict[str, list[CellResult]] = {}
    for cell in sorted(cells, key=lambda c: SCOPES.index(s) if (s := c.about.get("scope")) in SCOPES else len(SCOPES)):
        found.setdefault(str(cell.about.get("scope")), []).append(cell)
    return found


@dataclass(frozen=True)
class Score:
    """One matcher in one cell: barriers by pair, their mean, its share of the naive mean, how many are connected."""

    label: str
    each: tuple[float | None, ...]
    naive: tuple[float | None, ...]
    output_change: float | None
    half: float | None  # mean loss half-way: it tells apart what leaves no barrier at all

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
        """Whether every pair is, and alignment left the function alone."""
        return self.n_connected == len(self.each) > 0 and self.same_function

    @property
    def same_function(self) -> bool:
        return self.output_change is None or self.output_change <= UNCHANGED


def mean(values: Sequence[float | None]) -> float | None:
    """The mean, if all are known: one that is not finite is not left out of an average, it forbids it."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def scores(cell: CellResult, metric: str = "loss") -> dict[str, Score]:
    """Every matcher of a cell that is done, the naive path first; of others nothing is averaged."""
    if not cell.done:
        return {}
    naive = tuple(pair.barrier(NAIVE, metric) for pair in cell.pairs)
    return {
        label: Score(
            label,
            tuple(pair.barrier(label, metric) for pair in cell.pairs),
            naive,
            _moved(cell.pairs, label),
            mean([_middle(pair.curve(label, metric)) for pair in cell.pairs]),
        )
        for label in (NAIVE, *cell.labels)
    }


def _middle(curve: Sequence[float | None]) -> float | None:
    return curve[(len(curve) - 1) // 2] if curve else None


def _moved(pairs: Sequence[Measured], label: str) -> float | None:
    found = [(pair.facts.get("output_change") or {}).get(label) for pair in pairs]
    return max((value for value in found if value is not None), default=None)


def quality(cell: CellResult, metric: str) -> float | None:
    """The mean over its models."""
    return mean([facts.get(metric) for _, facts in cell.models])


def is_main(label: str) -> bool:
    """Whether a matcher belongs in the main tables: variants of Stage 2 and of head distances have their own."""
    return "/" not in label or label.startswith("learned")


def summary_row(cell: CellResult) -> dict[str, Any]:
    """A cell as summary.json holds it."""
    keys = ("model", "dataset", "positions", "layers", "heads", "width", "finetune_heads", "frozen", "scope", "cell")
    found, accuracy = scores(cell), scores(cell, "accuracy")
    return {
        **{key: cell.about.get(key) for key in keys},
        "status": cell.status,
        "why": cell.why,
        "models": [{"seed": seed, **_fitted(facts)} for seed, facts in cell.models],
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
            "heads": [{key: each.get(key) for key in ("rank", "normalised")} for each in ablation(cell, "heads")],
            "layers": [{key: each.get(key) for key in ("before", "loss")} for each in ablation(cell, "layers")],
        },
    }


def _fitted(facts: Facts) -> dict[str, Any]:
    kept = ("loss", "accuracy", "bits_per_byte", "perplexity", "n_steps", "n_params", "seconds")
    return {key: facts[key] for key in kept if facts.get(key) is not None}


def ablation(cell: CellResult, kind: str) -> tuple[Facts, ...]:
    return cell.ablations.get(kind, ())


def stage2_cells(cells: Iterable[CellResult]) -> list[tuple[CellResult, dict[str, Score]]]:
    """Cells that were aligned without Stage 2, with rotations alone, and in full.

    Attention scopes only: sweeps over a whole model begin with rotations inside the heads, whatever is asked for.
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
        found = {label.removeprefix("weights/"): s for label, s in every.items() if _is_distance(label)}
        if found and "weights" in every:
            chosen.append((cell, {"complete": every["weights"]} | found))  # what is usual is not named
    return chosen


def _is_distance(label: str) -> bool:
    return label.startswith("weights/") and label not in STAGES


@dataclass(frozen=True)
class Facing:
    """The same cell with absolute and with rotary positions."""

    absolute: CellResult
    rotary: CellResult


def facing_cells(cells: Sequence[CellResult]) -> list[Facing]:
    """Cells that are done and differ in nothing but their positions."""
    rotary = {_but(cell, "positions"): cell for cell in cells if cell.done and cell.about.get("positions") == "rope"}
    return [
        Facing(cell, rotary[key])
        for cell in cells
        if cell.done and cell.about.get("positions") != "rope" and (key := _but(cell, "positions")) in rotary
    ]


def _but(cell: CellResult, *left_out: str) -> str:
    """Everything about a cell but some of it, to find others that agree."""
    keys = ("model", "dataset", "positions", "layers", "heads", "width", "finetune_heads", "frozen", "scope")
    kept = {key: cell.about.get(key) for key in keys if key not in left_out}
    lengths = ("epochs", "steps") if "length" in left_out else ()
    return repr(kept | {"trained": [_training(facts, lengths) for _, facts in cell.models]})


def _training(facts: Facts, left_out: Sequence[str]) -> Any:
    """How one model was trained."""
    found = facts.get("job", {}).get("settings", {}).get("train") or {}
    return sorted((key, value) for key, value in found.items() if key not in left_out)


@dataclass(frozen=True)
class Sweep:
    """Cells that differ in one number only, in its order."""

    what: str  # heads, width, layers or steps
    cells: tuple[tuple[float, CellResult], ...]


def sweeps(cells: Sequence[CellResult]) -> list[Sweep]:
    """Barrier against the number of heads, width, depth, training time: wherever two cells or more allow it."""
    places = {
        "heads": (("heads", "finetune_heads"), n_heads),
        "width": (("width",), lambda cell: cell.about.get("width")),
        "layers": (("layers",), lambda cell: cell.about.get("layers")),
        "steps": (("length",), _steps),
    }
    found = []
    for what, (left_out, value) in places.items():
        groups: dict[str, dict[float, CellResult]] = {}
        for cell in cells:
            number = value(cell) if cell.done else None
            if number is not None:
                groups.setdefault(_but(cell, *left_out), {}).setdefault(number, cell)
        found += [Sweep(what, tuple(sorted(group.items()))) for group in groups.values() if len(group) > 1]
    return found


def _steps(cell: CellResult) -> float | None:
    """Steps that its models were trained for, after what they share."""
    return mean([facts.get("n_steps") for _, facts in cell.models])


def counts(cells: Sequence[CellResult]) -> Mapping[str, int]:
    return {status: sum(cell.status == status for cell in cells) for status in ("done", "failed", "not filled")}
