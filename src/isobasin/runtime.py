"""Building and running the model of a checkpoint: Hugging Face families through transformers, our own directly.

This is how a symmetry claim is checked: the outputs before and after, on inputs that use every part of the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isobasin.arch.config import Fields
from isobasin.errors import ArchitectureError
from isobasin.shapes import Float
from isobasin.weights import Weights, load

Inputs = dict[str, Tensor]
OUTPUTS = (
    "logits",
    "prediction_logits",
    "seq_relationship_logits",
    "start_logits",
    "end_logits",
    "reconstruction",
    "last_hidden_state",
    "pooler_output",
)


def random_inputs(weights: Weights, *, n: int = 3, length: int = 16, seed: int = 0) -> list[Inputs]:
    """Single inputs for this model: token ids (and types), or pixels (and masked patches)."""
    rng = torch.Generator().manual_seed(seed)
    return [_one_input(weights, length, rng) for _ in range(n)]


def _one_input(weights: Weights, length: int, rng: torch.Generator) -> Inputs:
    if (image := image_shape(weights)) is not None:
        inputs = {"pixel_values": torch.randn(1, *image, generator=rng)}
        if any(name.endswith("mask_token") for name in weights):
            n_patches = next(s[1] for n, s in weights.arch.shapes.items() if n.endswith("position_embeddings")) - 1
            inputs["bool_masked_pos"] = torch.rand(1, n_patches, generator=rng) < 0.5
        return inputs
    shape = (1, min(length, max_length(weights) or length))
    inputs = {"input_ids": torch.randint(vocabulary_size(weights) or 2, shape, generator=rng)}
    if weights.family.inputs.token_types:
        types = weights.config.get("type_vocab_size")
        inputs["token_type_ids"] = torch.randint(2 if types is None else int(types), shape, generator=rng)
    return inputs


def vocabulary_size(weights: Weights) -> int:
    """The number n of token ids that the model accepts: 0 … n − 1."""
    return int(weights.config.get("vocab_size") or weights.config.get("d_vocab") or 0)


def max_length(weights: Weights) -> int | None:
    """The longest sequence that the model accepts; None if its config does not say."""
    limits = [weights.config[k] for k in ("n_positions", "max_position_embeddings") if weights.config.get(k)]
    return min(map(int, limits), default=None)


def image_shape(weights: Weights) -> tuple[int, int, int] | None:
    """Channels, height and width of the images that the model reads; None for a model of tokens."""
    config = {key: value for key, value in weights.config.items() if value is not None}
    size = config.get("image_size", weights.family.inputs.image_size)
    if size is None:
        return None
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(config.get("num_channels", config.get("n_channels", 3))), int(height), int(width)


def outputs(weights: Weights, inputs: Sequence[Inputs]) -> Tensor:
    """Everything the model puts out on these inputs, flat, computed in float32."""
    model = module_of(weights)
    with torch.no_grad():
        return torch.cat([run_module(weights, model, one).flatten() for one in inputs])


def record_reads(
    weights: Weights, inputs: Iterable[Inputs], wanted: Mapping[str, str], add: Callable[[str, Tensor], None]
) -> None:
    """Run the model and hand over what some of its weights read: `wanted` maps a weight's name to a label."""
    model = module_of(weights)
    held = places(weights, model)
    for weight, label in wanted.items():
        module = model.get_submodule(held[weight].rpartition(".")[0])
        module.register_forward_pre_hook(lambda _, args, label=label: add(label, args[0]))
    with torch.no_grad():
        for one in inputs:
            run_module(weights, model, one)


def change(before: Tensor, after: Tensor) -> float:
    """The largest change of outputs, relative to the largest output; infinite if anything is not a number."""
    if not bool(torch.isfinite(after).all()):
        return float("inf")
    return float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))


def run_module(weights: Weights, module: torch.nn.Module, inputs: Inputs) -> Float[Tensor, "n outputs"]:
    """Everything a module puts out on a batch, one row per input."""
    if weights.family.own:
        return module(*inputs.values()).flatten(1)
    found = module(**inputs)
    return torch.cat([found[name].flatten(1) for name in OUTPUTS if found.get(name) is not None], dim=1)


def logits(weights: Weights, model: torch.nn.Module, inputs: Inputs) -> Tensor:
    """The logits of a model, for a loss: (N, classes), or (N, T, vocabulary)."""
    if weights.family.own:
        x = inputs.get("input_ids", inputs.get("pixel_values"))
        mask = inputs.get("attention_mask")
        return model(x, None if mask is None else mask.bool())
    found = model(**inputs)
    for name in ("logits", "prediction_logits"):
        if found.get(name) is not None:
            return found[name]
    raise ArchitectureError(f"{type(model).__name__} has no logits, so there is nothing to measure: give it a head")


def places(weights: Weights, model: torch.nn.Module) -> dict[str, str]:
    """The parameter of `model` that holds each tensor: names in memory may differ from those on disk."""
    return dict(load(model, dict(weights.config)).names.on_disk)


def module_of(weights: Weights, *, attention: str = "eager") -> torch.nn.Module:
    """The model itself, in float32, ready to run: ours, or the class of transformers that config.json names.

    `attention` is how transformers computes it: `eager` is the plain formula, `sdpa` is faster.
    """
    if not weights.family.own:
        return _pretrained(weights, attention)
    from isobasin.model import ModelConfig, Transformer

    with torch.device("meta"):  # no random initialisation that is replaced at once
        model = Transformer(ModelConfig.from_dict(dict(weights.config)))
    model.to_empty(device="cpu").load_state_dict(weights.state_dict("float32"))
    return model.eval()


def quiet_transformers() -> Any:
    """The module transformers, which takes seconds to import, without its warnings and progress bars."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def pretrained_class(weights: Weights) -> tuple[Any, Any, dict[str, Any]]:
    """The class of transformers that config.json names, its config, and options that the config does not hold."""
    transformers = quiet_transformers()
    name = Fields(weights.config).architecture or weights.family.model_class
    kind: Any = getattr(transformers, name, None)
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not known:
        raise ArchitectureError(
            f"config.json: architectures names {name!r}, which transformers does not have; expected a class such as "
            f"{weights.family.model_class}"
        )
    settings = {k: v for k, v in weights.config.items() if k not in ("auto_map", "dtype", "torch_dtype")}
    options: dict[str, Any] = {}
    if name in weights.family.optional_pooler:  # config.json does not say whether there is a pooler
        options["add_pooling_layer"] = any("pooler" in tensor for tensor in weights)
    try:
        return kind, transformers.AutoConfig.for_model(**settings), options
    except Exception as error:  # an odd configuration can make transformers raise anything
        raise _no_model(name, error) from error


def _no_model(name: str, error: Exception) -> ArchitectureError:
    return ArchitectureError(
        f"config.json: transformers makes no {name} of it ({type(error).__name__}: {error!s:.160}); correct it"
    )


def _pretrained(weights: Weights, attention: str) -> torch.nn.Module:
    kind, config, options = pretrained_class(weights)
    state = weights.state_dict("float32")
    try:
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=torch.float32,
            attn_implementation=attention,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        raise _no_model(kind.__name__, error) from error
    if report["missing_keys"]:  # initialised at random, they would be measured in place of the checkpoint
        raise ArchitectureError(
            f"{min(report['missing_keys'])}: transformers expects this tensor in a {kind.__name__}, the checkpoint "
            "does not have it: complete the folder or correct architectures in config.json"
        )
    model.config.use_cache = False  # nothing is generated here, and a component that runs twice would fill it twice
    return model.eval()
