"""Which keys of a config.json reach the outputs of a model, asked of transformers itself.

A family knows the keys that change its function (`Family.settings`). A config may hold others, of a newer transformers
or of another program. Those count if the model reads them while it is built or run; the model is then built and run
without its weights, on the device `meta`, and its config records what is read.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isobasin.arch.family import NEUTRAL_KEYS
from isobasin.errors import ArchitectureError
from isobasin.runtime import pretrained_class, random_inputs
from isobasin.weights import Weights

_READ_AS_NUMBERS = (Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.__contains__)
ABSENT = "absent"
_KEPT = 1000
_READ: dict[str, frozenset[str] | None] = {}


def unknown_settings(weights: Weights) -> dict[str, Any]:
    """The keys of config.json that the family does not know but transformers reads, with their values."""
    if weights.family.own:  # its description refuses unknown keys
        return {}
    known = weights.family.known_keys(weights.config)
    unknown = [key for key, value in weights.config.items() if value is not None and key not in known]
    return {key: weights.config[key] for key in keys_that_matter(weights, unknown)} | part_settings(weights)


def part_settings(weights: Weights) -> dict[str, Any]:
    """The values in the configs of the parts of a multimodal model that are not the default of transformers; of parts
    that are described only those that their families do not know and the model reads. Empty for other models."""
    found: dict[str, Any] = {}
    if weights.family.text is None and not weights.family.parts:
        return found
    described = {"text_config": weights.family.language_model(weights.config)}
    described |= {key: weights.family.part(key, weights.config) for key in weights.family.parts}
    whole = _part_attributes(weights, weights.config)
    read = cache(partial(attributes_read, weights))
    for part, config in weights.config.items():
        if not part.endswith("_config") or not isinstance(config, Mapping):
            continue
        family, inner = described.get(part, (None, {}))
        known = NEUTRAL_KEYS if family is None else family.known_keys(inner)
        for key in sorted(set(config) - known):
            others = {k: v for k, v in config.items() if k != key}
            without = _part_attributes(weights, {**weights.config, part: others})
            changed = None if whole is None or without is None else _differing(whole.get(part), without.get(part))
            if changed is None or (changed and (family is None or _reads(read(), part, changed))):
                found[f"{part}: {key}"] = config[key]
    return found


def _differing(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> set[str]:
    one, other = one or {}, other or {}
    return {name for name in {*one, *other} if one.get(name, ABSENT) != other.get(name, ABSENT)}


def _reads(read: Set[str] | None, part: str, names: Iterable[str]) -> bool:
    """Whether the model reads one of these attributes of the config of a part, or can not be asked."""
    return read is None or not read.isdisjoint(f"{part}: {name}" for name in names)


def _part_attributes(weights: Weights, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What transformers makes of the configs of the parts; None if it refuses."""
    try:
        made = pretrained_class(replace(weights, config=config))[1].to_dict()
    except ArchitectureError:
        return None
    return {part: dict(each) for part, each in made.items() if isinstance(each, Mapping)}


def differing_settings(a: Weights, b: Weights) -> dict[str, tuple[Any, Any]]:
    """The keys that reach the outputs of A or B and have different values there, with both values."""
    found = {key: (value, b.settings.get(key)) for key, value in a.settings.items() if value != b.settings.get(key)}
    if any(heads.rotary for heads in a.arch.heads()) and a.arch.rotary != b.arch.rotary:
        found["rotary positions"] = (dict(a.arch.rotary), dict(b.arch.rotary))
    of_a, of_b = unknown_settings(a), unknown_settings(b)
    values = {key: (of_a.get(key, ABSENT), of_b.get(key, ABSENT)) for key in sorted({*of_a, *of_b})}
    return found | {key: (x, y) for key, (x, y) in values.items() if x != y}


def keys_that_matter(weights: Weights, keys: Iterable[str]) -> list[str]:
    """Those among some keys of config.json whose absence changes something that the model reads.

    Where transformers can not run the model without weights, every key counts.
    """
    keys = list(keys)
    if not keys:
        return []
    read, config = attributes_read(weights), _attributes(weights, weights.config)
    if read is None or config is None:
        return keys
    found = []
    for key in keys:
        others = _attributes(weights, {k: v for k, v in weights.config.items() if k != key})
        changed = read if others is None else {n for n in read if config.get(n, ABSENT) != others.get(n, ABSENT)}
        if changed:
            found.append(key)
    return found


def _attributes(weights: Weights, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What transformers makes of a config: defaults filled in, several keys joined in one; None if it refuses."""
    try:
        return copy.deepcopy(vars(pretrained_class(replace(weights, config=config))[1]))
    except ArchitectureError:
        return None


def attributes_read(weights: Weights) -> Set[str] | None:
    """The attributes of the config that are read while the model is built and run, those of the configs of its parts as
    `part: name`; None if it can not be run. Computed once for each config and set of tensors."""
    what = [weights.arch.family, weights.config, sorted(weights.arch.shapes.items())]
    key = json.dumps(what, sort_keys=True, default=repr)
    if key not in _READ:
        if len(_READ) >= _KEPT:
            _READ.clear()
        _READ[key] = _attributes_read(weights)
    return _READ[key]


def _attributes_read(weights: Weights) -> frozenset[str] | None:
    try:
        kind, config, options = pretrained_class(weights)
        config._experts_implementation = "batched_mm"  # the plain formula asks which experts are chosen
        config.chunk_size_feed_forward = 0
        config.use_cache = True  # some keys are read by the cache of keys and values alone, as generation uses it
        parts = {key: inner for key, inner in vars(config).items() if hasattr(inner, "attribute_map")}
        read, of_parts = _recorded(config), {key: _recorded(inner) for key, inner in parts.items()}
        with torch.device("meta"):
            model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32, **options).eval()
        inputs = random_inputs(weights, n=1)[0]
        with torch.no_grad(), _WithoutNumbers():
            model(**{name: x.to("meta") for name, x in inputs.items()})
    except Exception:  # what fails without weights can not be told from what fails with them
        return None
    names = {config.attribute_map.get(name, name) for name in frozenset(read)} - NEUTRAL_KEYS
    for key, inner in parts.items():
        names |= {f"{key}: {inner.attribute_map.get(name, name)}" for name in frozenset(of_parts[key])}
    return frozenset(names)


def _recorded(config: Any) -> set[str]:
    """Make a config record the attributes that are read, also absent ones."""
    read: set[str] = set()
    kind: Any = type(config)

    def get(self: Any, name: str) -> Any:
        if not name.startswith("__"):
            read.add(name)
        return kind.__getattribute__(self, name)

    config.__class__ = type(kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__})
    return read


class _WithoutNumbers(TorchFunctionMode):
    """Tensors on `meta` have no values; where a model asks for one, to choose a kernel or to warn, it gets a zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_AS_NUMBERS and args[0].is_meta:
            return False if args[0].dtype == torch.bool or func is Tensor.__contains__ else 0
        return func(*args, **(kwargs or {}))
