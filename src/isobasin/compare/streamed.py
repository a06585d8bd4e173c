"""A model that is run without being held: each module's weights are read when it is called, and dropped after."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isobasin.arch.fields import Fields
from isobasin.errors import ArchitectureError
from isobasin.running import DEFAULT_CLASSES, places
from isobasin.weights import Weights


class _Unfilled(TorchFunctionMode):
    """`torch.empty` gives tensors without storage: weights stay unfilled, tables that are computed do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = dict(kwargs or {})
        if func is torch.empty:
            settings["device"] = "meta"
        return func(*args, **settings)


def streamed_module(weights: Weights) -> nn.Module:
    """The class of transformers that config.json names, in float32, with weights that come and go."""
    model = _skeleton(weights)
    model.requires_grad_(False)
    origin = _origins(weights, model)
    for prefix, module in model.named_modules():
        mine = {
            key: origin[f"{prefix}.{key}" if prefix else key] for key, p in module._parameters.items() if p is not None
        }
        if mine:
            module.register_forward_pre_hook(_fill(weights, mine))
            module.register_forward_hook(_empty(mine))
    return model.eval()


def _skeleton(weights: Weights) -> nn.Module:
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    name = Fields(weights.config).architecture or DEFAULT_CLASSES[weights.arch.family]
    kind: Any = getattr(transformers, name, None)
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not known:
        raise ArchitectureError(f"config.json: architectures names {name!r}, which transformers does not have")
    settings = {k: v for k, v in weights.config.items() if k not in ("auto_map", "dtype", "torch_dtype")}
    options: dict[str, Any] = {}
    if name in ("BertModel", "ViTModel"):  # config.json does not say whether there is a pooler
        options["add_pooling_layer"] = any("pooler" in tensor for tensor in weights)
    with _Unfilled(), torch.random.fork_rng(devices=[]):
        model: nn.Module = kind._from_config(
            transformers.AutoConfig.for_model(**settings),
            attn_implementation="eager",
            dtype=torch.float32,
            **options,
        )
    model.config.use_cache = False  # type: ignore[union-attr]
    return model


def _origins(weights: Weights, model: nn.Module) -> dict[str, str]:
    """The tensor of the checkpoint behind every parameter of the module; tied ones have one origin."""
    known = {memory: name for name, memory in places(weights, model).items()}
    named = dict(model.named_parameters(remove_duplicate=False))
    by_identity = {id(named[memory]): name for memory, name in known.items() if memory in named}
    found = {}
    for memory, parameter in named.items():
        name = known.get(memory) or by_identity.get(id(parameter)) or weights.arch.aliases.get(memory)
        if name is None:
            raise ArchitectureError(f"{memory}: transformers expects this tensor, the checkpoint does not have it")
        found[memory] = name
    return found


def _fill(weights: Weights, mine: dict[str, str]) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, _: Any) -> None:
        for key, name in mine.items():
            module._parameters[key] = _parameter(weights[name].to(torch.float32))

    return hook


def _empty(mine: dict[str, str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, _: Any, __: Any) -> None:
        for key in mine:
            held = module._parameters[key]
            assert held is not None
            module._parameters[key] = _parameter(torch.empty_like(held, device="meta"))

    return hook


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
