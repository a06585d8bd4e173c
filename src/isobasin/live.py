"""Whether a model in memory computes what its tensors and its config say: what `load` can not see is looked at here.

A module may have a forward of its own, hooks, another activation, a table of rotary positions that was changed, or a
setting such as an eps or a number of experts that the config does not name. The class of transformers is built again
from the config, without weights, and compared.
"""

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isobasin.errors import CheckpointError

# Packages whose modules and hooks move weights or compute the same faster.
FASTER = ("accelerate", "deepspeed", "apex", "kernels", "liger_kernel")
SAME_FUNCTION = ("torch", "transformers", "isobasin", *FASTER)
ROUNDING = 0.01  # relative, of a table that was cast to bfloat16
MOVING_TABLES = ("dynamic", "longrope")  # rotary tables that follow the length of the input
# What a module keeps that changes no output outside of training and of losses.
TRAINING = {"training", "p", "gradient_checkpointing", "layerdrop", "name_or_path", "inplace", "num_labels"}
ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
REMEDY = "save it in a folder, or give its tensors with a config"


class EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` gives tensors without storage, so weights take no memory; buffers that are computed do exist."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = dict(kwargs or {})
        if func is torch.empty:
            settings["device"] = "meta"
        return func(*args, **settings)


@dataclass(frozen=True)
class _Built:
    """What a class of transformers makes of a config: the type and the settings of every module, and its tables."""

    kinds: Mapping[str, type]
    settings: Mapping[str, Mapping[str, object]]
    tables: Mapping[str, Tensor]

    @property
    def activations(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind.__module__ in ACTIVATIONS]

    @staticmethod
    def of(model: nn.Module) -> "_Built":
        modules, stored = dict(model.named_modules()), set(model.state_dict())
        kinds = {name: type(module) for name, module in modules.items()}
        settings = {name: _settings(module) for name, module in modules.items()}
        buffers = ((name, x) for name, x in model.named_buffers() if name not in stored)
        tables = {name: x for name, x in buffers if not x.is_meta}
        return _Built(kinds, settings, tables)


def check_live(model: Any) -> None:
    """Refuse a model of transformers in memory whose function is not that of its tensors and its config."""
    kind = next((k for k in type(model).__mro__ if k.__module__.startswith("transformers.models.")), None)
    if not isinstance(model, nn.Module) or kind is None:
        return
    for name, module in model.named_modules():
        _check_code(name or "the model", module)
    config: Any = model.config
    built = _built(kind, config.to_json_string(use_diff=False), _Config(config))
    if built is not None:
        _check_parts(_Built.of(model), built)


def _check_code(name: str, module: nn.Module) -> None:
    """The code of a module and its hooks are those of the packages above."""
    replaced = "forward" in vars(module) and not hasattr(module, "_hf_hook")
    if replaced or not all(_is_known(code) for code in (type(module).forward, type(module).__call__)):
        raise CheckpointError(f"{name} ({type(module).__name__}): has a forward of its own; {REMEDY}")
    computed = [key for key in ("weight", "bias") if isinstance(getattr(type(module), key, None), property)]
    if any(not _is_known(getattr(type(module), key).fget) for key in computed):
        raise CheckpointError(f"{name} ({type(module).__name__}): computes its {computed[0]}; {REMEDY}")
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if any(not _is_known(hook) for hook in hooks):
        raise CheckpointError(f"{name} ({type(module).__name__}): has a forward hook; remove it, or {REMEDY}")


def _is_known(function: Any) -> bool:
    function = getattr(function, "func", function)  # of a partial
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] in SAME_FUNCTION


def _check_parts(live: _Built, built: _Built) -> None:
    inside = [name for name in built.activations if name.rpartition(".")[0] in live.kinds]
    if gone := next((name for name in inside if name not in live.kinds), None):
        raise CheckpointError(f"{gone}: is no module, the config makes {built.kinds[gone].__name__} of it; {REMEDY}")
    for name in live.kinds.keys() & built.kinds.keys():
        kind, expected = live.kinds[name], built.kinds[name]
        if not issubclass(kind, expected) and kind.__module__.partition(".")[0] not in FASTER:
            raise CheckpointError(f"{name}: is {kind.__name__}, the config makes {expected.__name__} of it; {REMEDY}")
        for key, value in built.settings[name].items():
            found = live.settings[name].get(key, value)
            if found != value:
                place = f"{name}.{key}" if name else f"the model's {key}"
                raise CheckpointError(f"{place}: is {found!s:.80}, the config makes {value!s:.80} of it; {REMEDY}")
    for name, table in built.tables.items():
        x = live.tables.get(name)
        if x is not None and x.shape == table.shape and not _is_near(x.detach().cpu(), table):
            raise CheckpointError(f"{name}: is not the table that the config makes; {REMEDY}")


def _is_near(x: Tensor, y: Tensor) -> bool:
    """The same numbers within the rounding of a cast; whole numbers, such as positions, exactly."""
    if not y.is_floating_point():
        return torch.equal(x, y)
    return bool(torch.allclose(x.double(), y.double(), rtol=ROUNDING, atol=1e-30, equal_nan=True))


def _settings(module: nn.Module) -> dict[str, object]:
    """The plain values that a module keeps, but for those that matter in training alone and those of tables that move;
    of embeddings, which may shorten their rows, 0 if they do not."""
    if getattr(module, "rope_type", None) in MOVING_TABLES:
        return {}
    found = {key: _plain(x) for key, x in vars(module).items() if key[0] != "_" and key not in TRAINING}
    if isinstance(module, nn.Embedding):
        found["max_norm"] = module.max_norm or 0.0
        found.pop("padding_idx", None)
    return {key: x for key, x in found.items() if x is not NotImplemented and "drop" not in key}


def _plain(x: object) -> object:
    """A number, a name, a list of those or a tensor with one number; NotImplemented for anything else."""
    if isinstance(x, Tensor):
        return x.item() if x.numel() == 1 and not x.is_meta else NotImplemented
    if isinstance(x, tuple | list):
        parts = [_plain(each) for each in x]
        return NotImplemented if NotImplemented in parts else parts
    return x if x is None or isinstance(x, bool | int | float | str) else NotImplemented


@dataclass(frozen=True)
class _Config:
    """A config that the cache does not look at: its text is the key."""

    value: Any

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config)


@lru_cache(maxsize=16)
def _built(kind: Any, _: str, config: _Config) -> _Built | None:
    """None where transformers can not build it."""
    logging = sys.modules["transformers.utils.logging"]  # the model is one of transformers
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it has said all when the model was made
    try:
        with EmptyOnMeta(), torch.random.fork_rng(devices=[]):
            return _Built.of(kind._from_config(copy.deepcopy(config.value), dtype=torch.float32))
    except Exception:  # an odd config can make transformers raise anything; what runs the model says so
        return None
    finally:
        logging.set_verbosity(level)
