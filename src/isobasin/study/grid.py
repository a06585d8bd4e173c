"""A grid file, `GRID.toml`, and the cells that it spans."""

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.match.heads import HEAD_DISTANCES, STAGES
from isobasin.model.presets import preset_settings

from .aligning import Choice
from .gridfile import ABLATIONS, CELL, GRID, PRETRAIN, RECIPE, REQUIRE, checked

_TABLES = ("pretrain", "finetune", "whole")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting of the study: a few models that differ by their seed, and the pairs of them."""

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
    matchers: tuple[Choice, ...]
    ablations: tuple[str, ...]
    pretrain: Mapping[str, Any]  # a recipe, and dataset, checkpoint, seed
    finetune: Mapping[str, Any]
    whole: Mapping[str, Any]  # of scope `model`: independent training
    sequence: int | None = None
    patch: int | None = None
    notes: tuple[str, ...] = ()  # what else tells it from its neighbours, such as finetune.epochs=3

    @property
    def label(self) -> str:
        """`vit rope 2×4×64 digits first-attention`: model, positions, layers × heads × width, dataset, scope."""
        heads = f"{self.heads}→{self.finetune_heads}" if self.finetune_heads else f"{self.heads}"
        source = self.pretrain["dataset"]
        data = f"{source}→{self.dataset}" if source not in (None, self.dataset) else self.dataset
        size = f"{self.layers}×{heads}×{self.width}"
        return " ".join([self.model, self.positions, size, data, self.scope, *self._asides(), *self.notes])

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Places in `seeds`: 1–2, 1–3, 2–3."""
        return tuple(itertools.combinations(range(len(self.seeds)), 2))

    def _asides(self) -> Iterator[str]:
        if self.frozen:
            yield "frozen"


@dataclass(frozen=True)
class Grid:
    name: str
    cells: tuple[Cell, ...]
    text: str  # the file, as it was

    def only(self, text: str | None) -> tuple[Cell, ...]:
        """The cells whose label holds the text."""
        found = tuple(cell for cell in self.cells if text is None or text in cell.label)
        if not found:
            labels = "; ".join(cell.label for cell in self.cells[:3])
            raise IsobasinError(f"--only {text!r} fits none of {len(self.cells)} cells, such as {labels}")
        return found


def read_grid(path: str | Path) -> Grid:
    """The grid of a file; a mistake in it is an error that says where."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise IsobasinError(f"grid {path} can not be read ({reason}); expected a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise IsobasinError(f"grid {path} is not TOML: {error}") from error
    given = checked(table, GRID, str(path))
    if not given["cells"]:
        raise IsobasinError(f"{path}: no cells; add a [[cells]] block")
    cells = [cell for n, block in enumerate(given["cells"], 1) for cell in _spanned(block, f"{path}: cells {n}")]
    return Grid(given["name"], _once(cells), text)


def _once(cells: list[Cell]) -> tuple[Cell, ...]:
    """Blocks may overlap: a cell that was named before is left out; two with one label must be told apart."""
    found: dict[str, Cell] = {}
    for cell in cells:
        if found.setdefault(cell.label, cell) != cell:
            raise IsobasinError(
                f"two cells are called {cell.label!r} but differ in settings that the name does not show; "
                "put them into two grid files"
            )
    return tuple(found.values())


def _spanned(block: Any, where: str) -> Iterator[Cell]:
    """All combinations of a block's lists, its recipes' included."""
    if not isinstance(block, Mapping):
        raise IsobasinError(f"{where} is {block!r}, expected a [[cells]] block")
    table = checked(block, CELL, where)
    flat: dict[tuple[str, ...], Any] = {(key,): value for key, value in table.items() if key not in _TABLES}
    for name in _TABLES:
        if table[name] is not None:
            inside = checked(table[name], PRETRAIN if name == "pretrain" else RECIPE, f"{where}: {name}")
            flat |= {(name, key): value for key, value in inside.items()}
    axes = [key for key, value in flat.items() if _field(key).spans and isinstance(value, list)]
    for values in itertools.product(*(flat[key] for key in axes)):
        varied = {key: value for key, value in zip(axes, values) if len(key) > 1 and len(flat[key]) > 1}
        yield _cell(flat | dict(zip(axes, values)), varied, where)


def _field(key: tuple[str, ...]) -> Any:
    return CELL[key[0]] if len(key) == 1 else PRETRAIN[key[1]]


def _cell(flat: Mapping[tuple[str, ...], Any], varied: Mapping[tuple[str, ...], Any], where: str) -> Cell:
    """A cell of single values. What its scope makes no use of is left out, so that equal cells are one."""
    own = {key[0]: value for key, value in flat.items() if len(key) == 1}
    tables = {
        name: {key[1]: value for key, value in flat.items() if key[0] == name and len(key) > 1} for name in _TABLES
    }
    own["positions"] = preset_settings(own["model"], own["positions"])["positions"]
    _check_sizes(own, where)
    _check_seeds(own, tables["pretrain"], where)
    ablations = _checked_ablations(own["ablations"], where)
    recipes = _recipes(own["scope"], tables, where)
    used = [name for name in _TABLES if recipes[name].get("batch")]
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
    """The three recipes; `whole` is `pretrain` where it is not given, and must then have a length."""
    pretrain, finetune, whole = (dict(tables[name]) for name in _TABLES)
    extra = {key: pretrain.pop(key, None) for key in ("dataset", "checkpoint", "seed")}
    whole = whole or pretrain
    asked = {"whole" if tables["whole"] else "pretrain": whole} if scope == "model" else {"finetune": finetune}
    if scope != "model" and extra["checkpoint"] is None:
        asked["pretrain"] = pretrain
    for name, recipe in asked.items():
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
            f"{where}: finetune_heads with scope {own['scope']!r}: only all-attention draws every layer's heads anew; "
            "give the other scopes a block of their own"
        )


def _check_seeds(own: Mapping[str, Any], pretrain: Mapping[str, Any], where: str) -> None:
    seeds = own["seeds"]
    if len(set(seeds)) < len(seeds):
        raise IsobasinError(f"{where}: seeds {seeds} hold one twice; a model would be compared with itself")
    if own["scope"] != "model" and pretrain.get("seed", 0) in seeds:
        # The part that is drawn anew would be drawn as it was before pretraining.
        raise IsobasinError(
            f"{where}: seed {pretrain.get('seed', 0)} is both pretraining's and fine-tuning's; "
            "take it out of seeds or set pretrain.seed"
        )


def _checked_ablations(names: Any, where: str) -> tuple[str, ...]:
    for name in names:
        if name not in ABLATIONS:
            raise IsobasinError(f"{where}: ablations: {name!r} is unknown, expected one of {', '.join(ABLATIONS)}")
    return tuple(names)


def _matchers(given: Any, ablations: tuple[str, ...], where: str) -> tuple[Choice, ...]:
    """Each name or table as a choice; `stage2` and `distances` among the ablations add theirs."""
    tables = [{"matcher": one} if isinstance(one, str) else one for one in given]
    if "stage2" in ablations:
        tables += [{"matcher": "weights", "stage2": stage2} for stage2 in STAGES]
    if "distances" in ablations:
        tables += [{"matcher": "weights"}]  # with `complete`, the usual distance
        tables += [{"matcher": "weights", "head_distance": name} for name in HEAD_DISTANCES if name != "complete"]
    if not tables:
        raise IsobasinError(f'{where} is an empty list; name at least one, such as "weights"')
    found: dict[str, Choice] = {}
    for table in tables:
        if not isinstance(table, Mapping):
            raise IsobasinError(f"{where}: {table!r}, expected a name or a table")
        choice = _choice(table, where)
        found.setdefault(choice.label, choice)
    return tuple(found.values())


def _choice(table: Mapping[str, Any], where: str) -> Choice:
    try:
        return Choice.of(table)
    except IsobasinError as error:
        raise IsobasinError(f"{where}: {error}") from error
