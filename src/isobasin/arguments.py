"""Types of arguments: a wrong one is an `IsobasinError` in one line, not an error from somewhere inside.

The public functions of the package are checked where the package gives them out, by their annotations; records of
options check their fields when they are made.
"""

import builtins
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from isobasin.errors import IsobasinError, brief

_MAX_INT = 2**63  # what torch and numpy can hold


@cache
def checked(function: Callable[..., Any], name: str, find: Callable[[str], Any]) -> Callable[..., Any]:
    """The same function, which first compares its arguments with its annotations; `find` gives the types, by name, that
    an annotation in quotes may use beside those of its module."""
    signature = inspect.signature(function)
    parameters = {key: p for key, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    types = {key: _resolved(p.annotation, function, find) for key, p in parameters.items()}

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        for key, value in signature.bind(*given, **named).arguments.items():
            _check(f"{name}: {key}", value, types.get(key, Any))
        return function(*given, **named)

    call.__module__, call.__qualname__ = "isobasin", name  # where pickle finds it
    return call


Method = TypeVar("Method", bound=Callable[..., Any])


def checks_arguments(method: Method) -> Method:
    """The same method, which first compares its arguments with its annotations; their types are found when it is first
    called."""

    @wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        return checked(method, method.__qualname__, _nothing)(*given, **named)

    return cast(Method, call)


def _nothing(name: str) -> Any:
    raise AttributeError(name)


def check_fields(record: Any) -> None:
    """Compare the fields of a dataclass with their annotations."""
    for field in fields(record):
        if not isinstance(field.type, str):
            _check(f"{type(record).__name__}: {field.name}", getattr(record, field.name), field.type)


def _resolved(annotation: Any, function: Callable[..., Any], find: Callable[[str], Any]) -> Any:
    """An annotation in quotes as a type; Any where a name is for type checkers alone."""
    if not isinstance(annotation, str):
        return Any if annotation is inspect.Parameter.empty else annotation
    try:
        return eval(annotation, dict(vars(builtins)), _Names(function.__globals__, find))
    except (NameError, TypeError):
        return Any


class _Names(dict[str, Any]):
    """The names of a module, and others that are found when they are asked for."""

    def __init__(self, module: Mapping[str, Any], find: Callable[[str], Any]) -> None:
        super().__init__(module)
        self._find = find

    def __missing__(self, key: str) -> Any:
        try:
            return self._find(key)
        except AttributeError as error:
            raise KeyError(key) from error


def _check(what: str, value: object, annotation: Any) -> None:
    if not _fits(value, annotation):
        raise IsobasinError(f"{what} is {brief(value, 60)}, expected {_words(annotation)}")
    if isinstance(value, str) and any(_is_device(kind) for kind in _kinds(annotation)):
        _check_device(what, value)


def _fits(value: object, annotation: Any) -> bool:
    """Whether a value is of a type. What can not be told counts as fitting."""
    return any(_is(value, kind) for kind in _kinds(annotation))


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is(value: object, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return value in get_args(kind)
    if origin is None or origin is type(None):
        return value is None
    if origin in (int, float):
        return _is_number(value, origin)
    if origin is Sequence:
        return _is_sequence(value, *get_args(kind))
    if origin is Callable:
        return callable(value)
    if not isinstance(origin, type):
        return True
    try:
        return isinstance(value, origin)
    except TypeError:  # a protocol that can not be asked for
        return True


def _is_number(value: Any, kind: type) -> bool:
    """numpy and torch have numbers of their own."""
    if isinstance(value, bool | str):
        return False
    if kind is float:
        return hasattr(value, "__float__") or hasattr(value, "__index__")
    return hasattr(value, "__index__") and (not isinstance(value, int) or abs(value) < _MAX_INT)


def _is_sequence(value: object, item: Any = Any) -> bool:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return False
    return not isinstance(value, list | tuple) or all(_fits(each, item) for each in value)


def _is_device(kind: Any) -> bool:
    return getattr(kind, "__module__", "") == "torch" and getattr(kind, "__name__", "") == "device"


def _check_device(what: str, name: str) -> None:
    import torch

    try:
        place = torch.device(name)
        if place.type != "meta":
            torch.empty(0, device=place)
            return
    except Exception as error:  # each backend raises errors of its own
        raise IsobasinError(f"{what} is {brief(name, 60)}, expected a device of this machine: cpu, cuda, …") from error
    raise IsobasinError(f"{what} is 'meta', which holds no numbers; expected cpu, cuda, …")


def _words(annotation: Any) -> str:
    return " or ".join(dict.fromkeys(_word(kind) for kind in _kinds(annotation)))


def _word(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin is None or origin is type(None):
        return "None"
    if origin is Callable:
        return "a function"
    inside = f" of {_words(get_args(kind)[0])}" if origin is Sequence and get_args(kind) else ""
    return f"{getattr(origin, '__name__', str(origin)).lstrip('_')}{inside}"
