"""A merge as plain data: checked, read from YAML and written as YAML.

The keys of the YAML file have the same meaning as in mergekit; a key that is not supported is an error.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from isobasin.checkpoint import DTYPE_POLICIES
from isobasin.errors import IsobasinError, brief, printable
from isobasin.merging.average import Linear, Method, Slerp

METHODS = ("linear", "slerp")
DTYPES = tuple(name for name in DTYPE_POLICIES if name != "keep")
MAX_ROUNDS = 10  # of the alignment to a mean
MAX_BYTES = 2**16  # of a YAML file: PyYAML needs quadratic time for some
KEYS = ("models", "merge_method", "base_model", "parameters", "dtype", "tokenizer_source", "align")
THEN_MERGEKIT = "align first (`isobasin align`), then mergekit"


def check_reference(to: int | str, n_models: int) -> None:
    """Refuse a reference that is neither "mean" nor the number of a model."""
    if not (to == "mean" or (type(to) is int and 0 <= to < n_models)):
        raise IsobasinError(f"align to {to!r}: expected mean, or the number of a model from 0 to {n_models - 1}")


@dataclass(frozen=True)
class MergeRecipe:
    """What to merge and how. `to` is the model that others are aligned to (and where slerp starts), or "mean"."""

    models: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    method: str = "linear"
    t: float | None = None
    normalize: bool = True
    dtype: str | None = None
    tokenizer_source: str | None = None
    align: bool = False
    to: int | str = 0
    scope: str | None = None
    matcher: str | None = None

    def __post_init__(self) -> None:
        if len(self.models) < 2:
            raise IsobasinError(f"{len(self.models)} model to merge: expected two or more")
        if self.method == "slerp" and len(self.models) != 2:
            raise IsobasinError(f"slerp goes from one model to another, and there are {len(self.models)}: use linear")
        if self.weights is not None and len(self.weights) != len(self.models):
            raise IsobasinError(
                f"{len(self.weights)} weights for {len(self.models)} models: expected one weight for each model"
            )
        if self.method not in METHODS:
            raise IsobasinError(
                f"merge method {self.method!r} is not one of {', '.join(METHODS)}; for others {THEN_MERGEKIT}"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise IsobasinError(f"dtype {self.dtype!r} is unknown: give one of {', '.join(DTYPES)}")
        check_reference(self.to, len(self.models))
        for number in (*(self.weights or ()), *([] if self.t is None else [self.t])):
            if not math.isfinite(number) or abs(number) > 1e30:
                raise IsobasinError(f"weight {number}: expected an ordinary finite number")
        if self.t is not None and self.method != "slerp":
            raise IsobasinError(f"t belongs to slerp, the method is {self.method}: give weights")
        if self.weights is not None and abs(sum(self.weights)) < 1e-12:
            raise IsobasinError(f"the weights {self.weights} add up to 0, expected another sum: 1 gives an average")

    @property
    def start(self) -> int:
        """The model where slerp starts."""
        return self.to if isinstance(self.to, int) else 0

    def arithmetic(self) -> Method:
        """The merge method with its numbers."""
        n = len(self.models)
        if self.method == "linear":
            equal = (1.0,) * n if self.normalize else (1.0 / n,) * n
            return Linear(self.weights or equal, self.normalize)
        first, second = self.weights or (0.5, 0.5)
        share = (second if self.start == 0 else first) / (first + second)
        return Slerp(share if self.t is None else self.t, self.start)

    @property
    def shares(self) -> tuple[float, ...]:
        """The weight of each model; for slerp (1 − t, t), in the order of the models."""
        method = self.arithmetic()
        if isinstance(method, Linear):
            return method.weights
        return (1 - method.t, method.t) if self.start == 0 else (method.t, 1 - method.t)

    def to_yaml(self) -> str:
        """The recipe as a file that `isobasin merge` reads."""
        method = self.arithmetic()
        models: list[dict[str, Any]] = [{"model": name} for name in self.models]
        if isinstance(method, Linear):
            models = [m | {"parameters": {"weight": weight}} for m, weight in zip(models, method.weights)]
        found: dict[str, Any] = {"models": models, "merge_method": self.method}
        if isinstance(self.to, int):
            found["base_model"] = self.models[self.to]
        found["parameters"] = {"t": method.t} if isinstance(method, Slerp) else {"normalize": self.normalize}
        found |= _given({"dtype": self.dtype, "tokenizer_source": self.tokenizer_source})
        chosen = {"scope": self.scope, "matcher": self.matcher, "to": self.to}
        found["align"] = _given(chosen) if self.align else False
        return yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=1000)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def read_recipe(file: str | Path) -> MergeRecipe:
    """The recipe in a YAML file."""
    path = Path(file)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise IsobasinError(f"{file} has {size} bytes, expected a recipe of at most {MAX_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise IsobasinError(f"{file} can not be read ({error.strerror}): expected a YAML file") from error
    except UnicodeDecodeError as error:
        raise IsobasinError(f"{file} is not UTF-8 text ({error.reason}): expected a YAML file") from error
    return parse_recipe(text, str(file))


def parse_recipe(text: str, where: str) -> MergeRecipe:
    """The recipe in a YAML text; `where` is its name in messages."""
    top = _Section(_parsed(text, where), KEYS, where)
    shared = top.section("parameters", "weight", "normalize", "t")
    default = shared.number("weight")
    names, weights = _models(top, default)
    base = top.word("base_model")
    if base is not None and base not in names:
        if weights[0] is not None and default is None:
            raise IsobasinError(f"{where}: base_model {base} is not among the models; list it there, with its weight")
        names, weights = [*names, base], [*weights, default]
    if None in weights and any(weight is not None for weight in weights):
        number = weights.index(None)
        raise IsobasinError(f"{where}: models[{number}] has no parameters.weight, others have: give all or none")
    given = tuple(weight for weight in weights if weight is not None)
    method = top.word("merge_method")
    if method is None:
        raise IsobasinError(f"{where}: merge_method is missing: expected linear or slerp")
    if method == "slerp":
        for key, wrong in (("weight", given), ("normalize", "normalize" in shared.values)):
            if wrong:
                raise IsobasinError(f"{where}: parameters.{key} belongs to linear, slerp takes parameters.t")
        if "t" not in shared.values:
            raise IsobasinError(f"{where}: parameters.t is missing: slerp goes from base_model (0) to the other (1)")
    tokenizer = top.word("tokenizer_source")
    if tokenizer == "union":
        raise IsobasinError(f"{where}: tokenizer_source union is not available; {THEN_MERGEKIT}")
    fields: dict[str, Any] = {
        "models": tuple(names),
        "weights": given or None,
        "method": method,
        "t": shared.number("t"),
        "normalize": shared.switch("normalize"),
        "dtype": top.word("dtype"),
        "tokenizer_source": (base or names[0]) if tokenizer == "base" else tokenizer,
        **_alignment(top, base, names),
    }
    try:
        return MergeRecipe(**fields)
    except IsobasinError as error:
        raise IsobasinError(f"{where}: {error}") from error


class _Section:
    """A mapping of the file whose keys were checked; `at` is the path to it within the file."""

    def __init__(self, value: Any, allowed: tuple[str, ...], where: str, at: str = "") -> None:
        if not isinstance(value, dict):
            place = f"{where}: {at}" if at else where
            raise IsobasinError(f"{place} holds {_brief(value)}, expected keys with values")
        self.values, self.where, self._prefix = value, where, f"{at}." if at else ""
        for key in value:
            if key not in allowed:
                name = f"{self._prefix}{_brief(key)}"
                raise IsobasinError(
                    f"{where}: the key {name} is not one of {', '.join(allowed)}; for more, {THEN_MERGEKIT}"
                )

    def wrong(self, key: str, expected: str) -> IsobasinError:
        held = _brief(self.values.get(key))
        return IsobasinError(f"{self.where}: {self._prefix}{key} holds {held}, expected {expected}")

    def section(self, key: str, *allowed: str) -> "_Section":
        """The mapping under a key; empty if there is none."""
        value = self.values.get(key)
        return _Section({} if value is None else value, allowed, self.where, f"{self._prefix}{key}")

    def word(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, str) or not value or printable(value) != value):
            raise self.wrong(key, "a word")
        return value

    def number(self, key: str) -> float | None:
        if key not in self.values:
            return None
        value = self.values[key]
        if isinstance(value, list | dict):
            raise self.wrong(key, f"one number; for gradients and filters {THEN_MERGEKIT}")
        try:
            if isinstance(value, bool):
                raise TypeError
            return float(value)  # YAML reads 1e-3 as a word
        except (TypeError, ValueError, OverflowError) as error:
            raise self.wrong(key, "a number") from error

    def switch(self, key: str) -> bool:
        value = self.values.get(key, True)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value


def _models(top: _Section, default: float | None) -> tuple[list[str], list[float | None]]:
    """Names and weights of the listed models."""
    listed = top.values.get("models")
    if not isinstance(listed, list) or not listed:
        raise top.wrong("models", "a list of `- model: PATH`")
    names: list[str] = []
    weights: list[float | None] = []
    for number, value in enumerate(listed):
        entry = _Section(value, ("model", "parameters"), top.where, f"models[{number}]")
        name = entry.word("model")
        if name is None:
            raise IsobasinError(f"{top.where}: models[{number}] names no model: expected `model: PATH`")
        own = entry.section("parameters", "weight").number("weight")
        names.append(name)
        weights.append(default if own is None else own)
    return names, weights


def _alignment(top: _Section, base: str | None, names: list[str]) -> dict[str, Any]:
    """The fields of the recipe about alignment. If `align.to` and `base_model` are both given, they must agree."""
    reference = 0 if base is None else names.index(base)
    switch = top.values.get("align", True)
    if isinstance(switch, bool):
        return {"align": switch, "to": reference}
    chosen = top.section("align", "scope", "matcher", "to")
    to = chosen.values.get("to")
    if to is None:
        to = reference
    elif not (isinstance(to, str) or type(to) is int):
        raise chosen.wrong("to", "mean or the number of a model")
    if base is not None and not (isinstance(to, int) and to in range(len(names)) and names[to] == base):
        raise IsobasinError(
            f"{top.where}: align.to is {to}, but base_model is {base}: others can be aligned to one only"
        )
    return {"align": True, "to": to, "scope": chosen.word("scope"), "matcher": chosen.word("matcher")}


class _StrictLoader(yaml.SafeLoader):
    """A key that occurs twice is an error, and so is an alias: a few of them can expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("anchors and aliases are not accepted")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parsed(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise IsobasinError(f"{where}{line}: not the YAML expected ({error.problem})") from error
    except Exception as error:  # for some values of tags PyYAML raises KeyError, IndexError, AttributeError
        raise IsobasinError(f"{where}: not the YAML expected ({str(error) or type(error).__name__:.200})") from error


def _brief(value: Any) -> str:
    return "nothing" if value is None else brief(value)
