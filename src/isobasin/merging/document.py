"""A recipe from a YAML file: mergekit's words where ours mean the same, and an error for every other word."""

import reprlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from isobasin.errors import IsobasinError
from isobasin.merging.recipe import THEN_MERGEKIT, Recipe

MAX_BYTES = 2**20
TOP = ("models", "merge_method", "base_model", "parameters", "dtype", "tokenizer_source", "align")


def read_recipe(file: str | Path) -> Recipe:
    """The recipe in a YAML file.

    >>> read_recipe("merge.yml").method  # doctest: +SKIP
    'linear'
    """
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


def parse_recipe(text: str, where: str) -> Recipe:
    """The recipe in a YAML text; `where` is what messages call it."""
    found = _object(_parsed(text, where), where)
    _check_keys(found, TOP, where)
    names, weights = _models(found, where)
    base = _word(found, "base_model", where)
    if base is not None and base not in names:
        if weights[0] is not None and _default_weight(found, where) is None:
            raise IsobasinError(f"{where}: base_model {base} is not among the models; list it there, with its weight")
        names, weights = [*names, base], [*weights, _default_weight(found, where)]
    method = _word(found, "merge_method", where)
    if method is None:
        raise IsobasinError(f"{where}: merge_method is missing: expected linear or slerp")
    shared = _section(found, "parameters", ("weight", "normalize", "t"), where)
    aligning = _aligning(found, where)
    try:
        return Recipe.checked(
            models=tuple(names),
            weights=_all_or_none(weights, where),
            method=method,
            t=_slerp_t(method, shared, weights, where),
            normalize=_switch(shared, "normalize", where),
            dtype=_word(found, "dtype", where),
            tokenizer_source=_tokenizer(found, base, names, where),
            **aligning | {"to": _reference(aligning, base, names, where)},
        )
    except IsobasinError as error:
        raise IsobasinError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error


def _models(found: Mapping[str, Any], where: str) -> tuple[list[str], list[float | None]]:
    listed = found.get("models")
    if not isinstance(listed, list) or not listed:
        raise IsobasinError(f"{where}: models holds {_brief(listed)}, expected a list of `- model: PATH`")
    default = _default_weight(found, where)
    names, weights = [], []
    for number, entry in enumerate(listed):
        at = f"models[{number}]"
        entry = _object(entry, f"{where}: {at}")
        _check_keys(entry, ("model", "parameters"), where, f"{at}.")
        name = _word(entry, "model", where, f"{at}.")
        if name is None:
            raise IsobasinError(f"{where}: {at} names no model: expected `model: PATH`")
        own = _section(entry, "parameters", ("weight",), where, f"{at}.")
        weight = _number(own["weight"], f"{at}.parameters.weight", where) if "weight" in own else default
        names.append(name)
        weights.append(weight)
    return names, weights


def _default_weight(found: Mapping[str, Any], where: str) -> float | None:
    shared = _section(found, "parameters", ("weight", "normalize", "t"), where)
    return _number(shared["weight"], "parameters.weight", where) if "weight" in shared else None


def _all_or_none(weights: list[float | None], where: str) -> tuple[float, ...] | None:
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        number = weights.index(None)
        raise IsobasinError(f"{where}: models[{number}] has no parameters.weight, others have: give all or none")
    return tuple(given) or None


def _slerp_t(method: str, shared: Mapping[str, Any], weights: list[float | None], where: str) -> float | None:
    if method != "slerp":
        return _number(shared["t"], "parameters.t", where) if "t" in shared else None
    for key, given in (("weight", any(w is not None for w in weights)), ("normalize", "normalize" in shared)):
        if given:
            raise IsobasinError(f"{where}: parameters.{key} belongs to linear, slerp takes parameters.t")
    if "t" not in shared:
        raise IsobasinError(f"{where}: parameters.t is missing: slerp goes from base_model (0) to the other (1)")
    return _number(shared["t"], "parameters.t", where)


def _aligning(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    value = found.get("align", True)
    if isinstance(value, bool):
        return {"align": value}
    chosen = _section(found, "align", ("scope", "matcher", "to"), where)
    to = chosen.get("to")
    if not (to is None or isinstance(to, str) or type(to) is int):
        raise IsobasinError(f"{where}: align.to holds {_brief(to)}, expected mean or the number of a model")
    scope, matcher = (_word(chosen, key, where, "align.") for key in ("scope", "matcher"))
    return {"align": True, "scope": scope, "matcher": matcher} | ({} if to is None else {"to": to})


def _reference(aligning: Mapping[str, Any], base: str | None, names: list[str], where: str) -> int | str:
    """The number of base_model, or what `align.to` says; where both speak they must agree."""
    to = aligning.get("to", 0 if base is None else names.index(base))
    agrees = base is None or (isinstance(to, int) and to in range(len(names)) and names[to] == base)
    if not agrees:
        raise IsobasinError(f"{where}: align.to is {to}, but base_model is {base}: others can be aligned to one only")
    return to


def _tokenizer(found: Mapping[str, Any], base: str | None, names: list[str], where: str) -> str | None:
    source = _word(found, "tokenizer_source", where)
    if source == "union":
        raise IsobasinError(f"{where}: tokenizer_source union is not available; {THEN_MERGEKIT}")
    return (base or names[0]) if source == "base" else source


class _Strict(yaml.SafeLoader):
    """A key that occurs twice is an error, and so is an alias: a few of them can stand for gigabytes."""

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
        return yaml.load(text, Loader=_Strict)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise IsobasinError(f"{where}{line}: not the YAML expected ({error.problem})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise IsobasinError(f"{where}: not the YAML expected ({str(error) or type(error).__name__:.200})") from error


def _check_keys(found: Mapping[Any, Any], allowed: tuple[str, ...], where: str, at: str = "") -> None:
    for key in found:
        if key not in allowed:
            raise IsobasinError(
                f"{where}: the key {at}{_brief(key)} is not one of {', '.join(allowed)}; for more, {THEN_MERGEKIT}"
            )


def _section(found: Mapping[str, Any], key: str, allowed: tuple[str, ...], where: str, at: str = "") -> dict[str, Any]:
    value = found.get(key)
    if value is None:
        return {}
    value = _object(value, f"{where}: {at}{key}")
    _check_keys(value, allowed, where, f"{at}{key}.")
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise IsobasinError(f"{where} holds {_brief(value)}, expected keys with values")
    return value


def _word(found: Mapping[str, Any], key: str, where: str, at: str = "") -> str | None:
    value = found.get(key)
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise IsobasinError(f"{where}: {at}{key} holds {_brief(value)}, expected a word")
    return value


def _number(value: Any, at: str, where: str) -> float:
    if isinstance(value, list | dict):
        raise IsobasinError(
            f"{where}: {at} holds {_brief(value)}, expected one number; for gradients and filters {THEN_MERGEKIT}"
        )
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)  # a word too: to YAML 1e-3 is one
    except (TypeError, ValueError, OverflowError) as error:
        raise IsobasinError(f"{where}: {at} holds {_brief(value)}, expected a number") from error


def _switch(found: Mapping[str, Any], key: str, where: str) -> bool:
    value = found.get(key, True)
    if not isinstance(value, bool):
        raise IsobasinError(f"{where}: parameters.{key} holds {_brief(value)}, expected true or false")
    return value


def _brief(value: Any) -> str:
    return "nothing" if value is None else reprlib.repr(value)
