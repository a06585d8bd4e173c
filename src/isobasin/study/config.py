"""Grid files, `GRID.toml`: every key with the values it takes, and the cells that a grid spans."""

import difflib
import itertools
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from isobasin.alignment.heads import HEAD_DISTANCES, STAGES
from isobasin.errors import IsobasinError, brief, printable
from isobasin.learn.path_loss import OBJECTIVES
from isobasin.model.config import preset_settings
from isobasin.symmetries import SCOPES
from isobasin.tasks.datasets import AUGMENTATIONS as AUGMENTATIONS

DATA_KINDS = {"vit": "image", "bert": "text", "gpt2": "lm", "llama": "lm"}  # the data that each model reads
POSITIONS = ("absolute", "sinusoidal", "learned", "rope", "alibi", "none")
MATCHERS = ("weights", "activations", "learned", "reference")
STARTS = ("weights", "activations")
ABLATIONS = ("stage2", "distances", "heads", "layers", "control")
_RECIPES = ("pretrain", "finetune", "whole")
MAX_BYTES = 2**16  # of a grid file
MAX_DOTS = 300  # in a line: tomllib needs quadratic time and memory for a key of many parts
MAX_CELLS = 10_000  # of a block
MAX_SEEDS = 1000
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Field:
    """One key: its valid values (as a test and in words), its default, and whether a list of values spans the grid."""

    valid: Callable[[Any], bool]
    expected: str
    default: Any = None
    required: bool = False
    spans: bool = False


def _is_whole(value: Any, low: int = 0, high: int = MAX_SEED) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _one_of(words: tuple[str, ...], **more: Any) -> Field:
    return Field(lambda value: value in words, f"one of {', '.join(words)}", **more)


def _count(high: int, low: int = 1, **more: Any) -> Field:
    return Field(lambda value: _is_whole(value, low, high), f"a whole number from {low} to {high}", **more)


def _number(low: float, high: float, **more: Any) -> Field:
    def valid(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

    return Field(valid, f"a number from {low:g} to {high:g}", **more)


def _text(**more: Any) -> Field:
    def valid(value: Any) -> bool:
        return isinstance(value, str) and bool(value) and printable(value) == value

    return Field(valid, "a name in quotes", **more)


def _list(expected: str = "a list", **more: Any) -> Field:
    return Field(lambda value: isinstance(value, list), expected, **more)


def _table() -> Field:
    return Field(lambda value: isinstance(value, Mapping), "a table")


RECIPE: Mapping[str, Field] = {
    "epochs": _number(0, 1e6, spans=True),
    "steps": _count(10**9, 0, spans=True),
    "batch": _count(10**6, default=128, spans=True),
    "rate": _number(1e-9, 10, default=1e-3, spans=True),
    "decay": _number(0, 10, default=0.05, spans=True),
    "warmup": _number(0, 1, default=0.1, spans=True),
    "smoothing": _number(0, 0.99, default=0.0, spans=True),
    "augment": _one_of(AUGMENTATIONS, default="none", spans=True),
}
PRETRAIN: Mapping[str, Field] = {
    **RECIPE,
    "dataset": _text(),
    "checkpoint": _text(),
    "seed": _count(MAX_SEED, 0, default=0),
}
CELL: Mapping[str, Field] = {
    "model": _one_of(tuple(DATA_KINDS), required=True, spans=True),
    "positions": _one_of(POSITIONS, spans=True),
    "layers": _count(1000, required=True, spans=True),
    "heads": _count(10**5, required=True, spans=True),
    "width": _count(10**5, required=True, spans=True),
    "dataset": _text(required=True, spans=True),
    "scope": _one_of(SCOPES, required=True, spans=True),
    "sequence": _count(10**6, spans=True),
    "patch": _count(10**4, spans=True),
    "frozen": Field(lambda value: isinstance(value, bool), "true or false", default=False, spans=True),
    "finetune_heads": _count(10**5, spans=True),
    "seeds": Field(
        lambda value: isinstance(value, list) and 1 < len(value) <= MAX_SEEDS and all(map(_is_whole, value)),
        f"a list of at least two whole numbers from 0 to {MAX_SEED}, at most {MAX_SEEDS}",
        default=(1, 2, 3),
    ),
    "points": _count(10_000, 3, default=25),
    "samples": _count(10**9),
    "matchers": _list(default=("weights",)),
    "ablations": Field(
        lambda value: isinstance(value, list) and all(name in ABLATIONS for name in value),
        f"a list of some of {', '.join(ABLATIONS)}",
        default=(),
    ),
    "require": _table(),
    "pretrain": _table(),
    "finetune": _table(),
    "whole": _table(),
}
GRID: Mapping[str, Field] = {"name": _text(required=True), "title": _text(), "cells": _list("[[cells]] blocks")}
REQUIRE: Mapping[str, Field] = dict.fromkeys(("accuracy", "bits_per_byte", "perplexity", "loss"), _number(0, 1e9))


def checked(table: Mapping[str, Any], known: Mapping[str, Field], where: str) -> dict[str, Any]:
    """The table with its defaults. In a list that spans the grid every value is checked by itself."""
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise IsobasinError(f"{where}: unknown key {brief(key)}; the nearest that is known is {near!r}")
    missing = [key for key, field in known.items() if field.required and key not in table]
    if missing:
        raise IsobasinError(f"{where}: {missing[0]} is missing, expected {known[missing[0]].expected}")
    for key, value in table.items():
        expected, is_span = known[key].expected, known[key].spans and isinstance(value, list)
        if is_span and not value:
            raise IsobasinError(f"{where}: {key} is an empty list; name at least one value, {expected}")
        for one in value if is_span else [value]:
            if not known[key].valid(one):
                raise IsobasinError(f"{where}: {key} is {brief(one)}, expected {expected}")
    return {key: table.get(key, field.default) for key, field in known.items()}


@dataclass(frozen=True, kw_only=True)
class MatcherConfig:
    """One way to align a pair, as a table of the grid gives it. The last five keys are for `learned` only."""

    matcher: str = "weights"
    stage2: str = "full"
    head_distance: str | None = None
    start: str = "weights"
    steps: int = 500
    rate: float = 3e-3
    augment: str = "none"  # of the images that are learned from
    objective: str = "labels"

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "MatcherConfig":
        """The table, checked: an unknown key or word is an error."""
        known, shown = [f.name for f in fields(cls)], brief(dict(table), 200)
        for key in table:
            if key not in known:
                raise IsobasinError(f"matcher {shown}: unknown key {brief(key)}, expected {', '.join(known)}")
        config = cls(**table)
        for key, field in (("steps", RECIPE["steps"]), ("rate", RECIPE["rate"])):
            if not field.valid(getattr(config, key)):
                found = brief(getattr(config, key))
                raise IsobasinError(f"matcher {shown}: {key} is {found}, expected {field.expected}")
        words = {
            "matcher": MATCHERS,
            "stage2": STAGES,
            "start": STARTS,
            "augment": AUGMENTATIONS,
            "objective": OBJECTIVES,
        }
        if config.head_distance is not None:
            words["head_distance"] = HEAD_DISTANCES
        for key, allowed in words.items():
            if getattr(config, key) not in allowed:
                found = brief(getattr(config, key))
                raise IsobasinError(f"matcher {shown}: {key} is {found}, expected one of {', '.join(allowed)}")
        return config

    @property
    def label(self) -> str:
        """`weights`, `weights/none`, `weights/cosine`, `learned/activations`: defaults are left out."""
        words = [
            self.stage2 if self.stage2 != "full" else "",
            self.head_distance or "",
            self.start if self.matcher == "learned" and self.start != "weights" else "",
            self.objective if self.matcher == "learned" and self.objective != "labels" else "",
        ]
        return "/".join([self.matcher, *filter(None, words)])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration of the study: a few models that differ by their seed, and the pairs of them."""

    model: str
    positions: str
    layers: int
    heads: int
    width: int
    dataset: str
    scope: str
    seeds: tuple[int, ...]
    points: int
    samples: int | None
    require: Mapping[str, float]
    frozen: bool
    finetune_heads: int | None
    matchers: tuple[MatcherConfig, ...]
    ablations: tuple[str, ...]
    pretrain: Mapping[str, Any]  # a recipe, and dataset, checkpoint, seed
    finetune: Mapping[str, Any]
    whole: Mapping[str, Any]  # for scope `model`: independent training
    sequence: int | None = None
    patch: int | None = None
    notes: tuple[str, ...] = ()  # varied keys of recipes, such as finetune.epochs=3

    @property
    def label(self) -> str:
        """`vit rope 2×4×64 digits first-attention`: model, positions, layers × heads × width, dataset, scope."""
        heads = f"{self.heads}→{self.finetune_heads}" if self.finetune_heads else f"{self.heads}"
        source = self.pretrain["dataset"]
        data = f"{source}→{self.dataset}" if source not in (None, self.dataset) else self.dataset
        size = f"{self.layers}×{heads}×{self.width}"
        frozen = ["frozen"] if self.frozen else []
        return " ".join([self.model, self.positions, size, data, self.scope, *frozen, *self.notes])

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Places in `seeds`: 1–2, 1–3, 2–3."""
        return tuple(itertools.combinations(range(len(self.seeds)), 2))


@dataclass(frozen=True)
class Grid:
    """All cells of a grid file, and its text."""

    name: str
    cells: tuple[Cell, ...]
    text: str
    title: str | None = None

    def only(self, text: str | None) -> tuple[Cell, ...]:
        """The cells whose label contains the text."""
        found = tuple(cell for cell in self.cells if text is None or text in cell.label)
        if not found:
            labels = "; ".join(cell.label for cell in self.cells[:3])
            raise IsobasinError(f"--only {text!r} fits none of {len(self.cells)} cells, such as {labels}")
        return found


def read_grid(path: str | Path) -> Grid:
    """Read a grid file. The error for a mistake names its place in the file."""
    path = Path(path)
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise IsobasinError(f"grid {path} has {size} bytes, expected a TOML file of at most {MAX_BYTES}")
        text = path.read_text(encoding="utf-8")
        _check_dots(text, path)
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise IsobasinError(f"grid {path} can not be read ({reason}); expected a TOML file") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError; a number of 5,000 digits; 1,000 levels
        raise IsobasinError(f"grid {path} is not TOML: {error}") from error
    given = checked(table, GRID, str(path))
    if not given["cells"]:
        raise IsobasinError(f"{path}: no cells; add a [[cells]] block")
    found: dict[str, Cell] = {}  # blocks may overlap: equal cells are kept once
    for n, block in enumerate(given["cells"], 1):
        for cell in _expand(block, f"{path}: cells {n}"):
            if found.setdefault(cell.label, cell) != cell:
                raise IsobasinError(
                    f"two cells are called {cell.label!r} but differ in settings that the name does not show; "
                    "put them into two grid files"
                )
    return Grid(given["name"], tuple(found.values()), text, given["title"])


def _check_dots(text: str, path: Path) -> None:
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DOTS:
            raise IsobasinError(f"grid {path}: line {number} has more than {MAX_DOTS} dots; break it into lines")


def _expand(block: Any, where: str) -> Iterator[Cell]:
    """All combinations of the lists of a block and of its recipes."""
    if not isinstance(block, Mapping):
        raise IsobasinError(f"{where} is {brief(block)}, expected a [[cells]] block")
    table = checked(block, CELL, where)
    flat: dict[tuple[str, ...], Any] = {(key,): value for key, value in table.items() if key not in _RECIPES}
    for name in _RECIPES:
        if table[name] is not None:
            inside = checked(table[name], PRETRAIN if name == "pretrain" else RECIPE, f"{where}: {name}")
            flat |= {(name, key): value for key, value in inside.items()}
    known = {key: CELL[key[0]] if len(key) == 1 else PRETRAIN[key[1]] for key in flat}
    axes = [key for key, value in flat.items() if known[key].spans and isinstance(value, list)]
    if (n_cells := math.prod(len(flat[key]) for key in axes)) > MAX_CELLS:
        raise IsobasinError(f"{where}: its lists span {n_cells} cells, expected at most {MAX_CELLS}: shorten them")
    for values in itertools.product(*(flat[key] for key in axes)):
        varied = {key: value for key, value in zip(axes, values) if len(key) > 1 and len(flat[key]) > 1}
        yield _cell(flat | dict(zip(axes, values)), varied, where)


def _cell(flat: Mapping[tuple[str, ...], Any], varied: Mapping[tuple[str, ...], Any], where: str) -> Cell:
    """A cell of single values. Settings that its scope does not use are left out, so that equal cells compare equal."""
    own = {key[0]: value for key, value in flat.items() if len(key) == 1}
    nested = {key: value for key, value in flat.items() if len(key) > 1}
    tables = {name: {key[1]: value for key, value in nested.items() if key[0] == name} for name in _RECIPES}
    own["positions"] = preset_settings(own["model"], own["positions"])["positions"]
    _check_sizes(own, where)
    _check_seeds(own, tables["pretrain"], where)
    ablations = tuple(own["ablations"])
    recipes = _recipes(own["scope"], tables, where)
    used = [name for name in _RECIPES if recipes[name].get("batch")]
    used = ["pretrain"] if used == ["whole"] and not tables["whole"] else used
    return Cell(
        **own
        | {
            "seeds": tuple(own["seeds"]),
            "require": checked(own["require"] or {}, REQUIRE, f"{where}: require"),
            "ablations": ablations,
            "matchers": _matchers(own["matchers"], ablations, f"{where}: matchers"),
            "frozen": own["frozen"] and own["scope"] != "model",
            "notes": tuple(f"{name}.{key}={value}" for (name, key), value in varied.items() if name in used),
        },
        **recipes,
    )


def _recipes(scope: str, tables: Mapping[str, Mapping[str, Any]], where: str) -> dict[str, Any]:
    """The three recipes. Without `whole`, scope `model` uses `pretrain`, which must then have a length."""
    pretrain, finetune, whole = (dict(tables[name]) for name in _RECIPES)
    extra = {key: pretrain.pop(key, None) for key in ("dataset", "checkpoint", "seed")}
    whole = whole or pretrain
    needed = {"whole" if tables["whole"] else "pretrain": whole} if scope == "model" else {"finetune": finetune}
    if scope != "model" and extra["checkpoint"] is None:
        needed["pretrain"] = pretrain
    for name, recipe in needed.items():
        if not recipe:
            raise IsobasinError(f"{where}: scope {scope!r} needs a recipe [cells.{name}]; add one with epochs or steps")
        if (recipe["epochs"] is None) == (recipe["steps"] is None):
            raise IsobasinError(f"{where}: {name}: expected exactly one of epochs and steps")
    if scope == "model":
        return {"pretrain": dict.fromkeys(extra), "finetune": {}, "whole": whole}
    return {"pretrain": pretrain | extra, "finetune": finetune, "whole": {}}


def _check_sizes(own: Mapping[str, Any], where: str) -> None:
    for key in ("heads", "finetune_heads"):
        heads, width = own[key], own["width"]
        if heads is None:
            continue
        if width % heads or (own["positions"] == "rope" and width // heads % 2):
            even = ", and an even size of each for rope" if own["positions"] == "rope" else ""
            raise IsobasinError(f"{where}: width {width} can not be cut into {heads} {key}: expected a divisor{even}")
    if own["finetune_heads"] is not None and own["scope"] != "all-attention":
        raise IsobasinError(
            f"{where}: finetune_heads with scope {own['scope']!r}: only all-attention re-initialises the heads of "
            "every layer; give the other scopes a block of their own"
        )


def _check_seeds(own: Mapping[str, Any], pretrain: Mapping[str, Any], where: str) -> None:
    seeds = own["seeds"]
    if len(set(seeds)) < len(seeds):
        raise IsobasinError(f"{where}: seeds {brief(seeds)} hold one twice; a model would be compared with itself")
    if own["scope"] != "model" and pretrain.get("seed", 0) in seeds:
        # The re-initialised part would get the same values as before pretraining.
        raise IsobasinError(
            f"{where}: seed {pretrain.get('seed', 0)} is both pretraining's and fine-tuning's; "
            "take it out of seeds or set pretrain.seed"
        )


def _matchers(given: Any, ablations: tuple[str, ...], where: str) -> tuple[MatcherConfig, ...]:
    """A configuration for each name or table. The ablations `stage2` and `distances` add theirs."""
    tables = [{"matcher": one} if isinstance(one, str) else one for one in given]
    if "stage2" in ablations:
        tables += [{"matcher": "weights", "stage2": stage2} for stage2 in STAGES]
    if "distances" in ablations:
        tables += [{"matcher": "weights"}]  # its distance is `complete`
        tables += [{"matcher": "weights", "head_distance": name} for name in HEAD_DISTANCES if name != "complete"]
    if not tables:
        raise IsobasinError(f'{where} is an empty list; name at least one, such as "weights"')
    found: dict[str, MatcherConfig] = {}
    for table in tables:
        if not isinstance(table, Mapping):
            raise IsobasinError(f"{where}: {brief(table)}, expected a name or a table")
        try:
            config = MatcherConfig.from_table(table)
        except IsobasinError as error:
            raise IsobasinError(f"{where}: {error}") from error
        found.setdefault(config.label, config)
    return tuple(found.values())
