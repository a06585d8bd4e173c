"""Building and running the model of a checkpoint: Hugging Face families through transformers, our own directly.

This is how a symmetry claim is checked: the outputs before and after, on inputs that use every part of the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isobasin.arch import resolve
from isobasin.arch.config import Fields
from isobasin.errors import ArchitectureError, IsobasinError, brief
from isobasin.live import EmptyOnMeta
from isobasin.shapes import Float
from isobasin.views import trim_heap
from isobasin.weights import Weights

Inputs = dict[str, Tensor]
CPU = torch.device("cpu")
MAX_LOADED_PARAMETERS = 40_000_000  # larger models are streamed: each module's weights are read when it runs
# Config keys that say how a model is run, and change no output: nothing is generated, and outputs have names.
PLAIN_RUN = {
    "return_dict": True,
    "use_cache": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
}
USUAL_LENGTH = 16  # tokens of an input
MAX_OPERATIONS = 2.0e11  # multiplications that one long input may cost
CHUNKS = "chunk_size_feed_forward"  # changes no output, but texts whose length is no multiple of it are refused
_CHOICES = 2  # answers to one question of a multiple-choice model
OUTPUTS = (
    "logits",
    "prediction_logits",
    "seq_relationship_logits",
    "start_logits",
    "end_logits",
    "reconstruction",
    "last_hidden_state",
    "pooler_output",
    "cls_logits",
    "distillation_logits",
    "logits_per_image",
    "text_embeds",
    "image_embeds",
)
# Of multimodal models: the stream, counts of positions, and the logits of images once more.
INNER_OUTPUTS = ("image_hidden_states", "rope_deltas", "logits_per_text")
ENCODER_OUTPUTS = ("encoder_last_hidden_state",)  # of a model whose outputs are states; a head does not show them


def random_inputs(weights: Weights, *, n: int = 3, length: int = USUAL_LENGTH, seed: int = 0) -> list[Inputs]:
    """Single inputs for this model: token ids (and types), pixels (and masked patches), or a text with an image."""
    rng = torch.Generator().manual_seed(seed)
    return [_one_input(weights, length, rng) for _ in range(n)]


def vocabulary_inputs(weights: Weights, *, seed: int = 0) -> list[Inputs]:
    """Texts that together hold every token once, in random order, or as many as `affordable_length` allows."""
    length = min(USUAL_LENGTH, max_length(weights) or USUAL_LENGTH)
    order = torch.randperm(vocabulary_size(weights) or 2, generator=torch.Generator().manual_seed(seed))
    drawn = random_inputs(weights, n=1, length=length, seed=seed)[0]
    some = order[: max(length, affordable_length(weights))].split(length)
    return [with_tokens(weights, drawn, torch.cat([ids, order[: length - len(ids)]])) for ids in some]


def affordable_length(weights: Weights) -> int:
    """Tokens that can be run in the time that a long input may cost."""
    return max(USUAL_LENGTH, int(MAX_OPERATIONS / max(1, weights.n_params) / 2))


def _one_input(weights: Weights, length: int, rng: torch.Generator) -> Inputs:
    image = image_shape(weights)
    if image is not None and not weights.family.parts:
        inputs = {"pixel_values": torch.randn(1, *image, generator=rng)}
        masks = weights.family.class_of(weights.config).endswith(("Model", "ForMaskedImageModeling"))
        if masks and any(name.endswith("mask_token") for name in weights):
            rows = next(s[1] for n, s in weights.arch.shapes.items() if n.endswith("position_embeddings"))
            n_patches = rows - 1 - weights.family.inputs.extra_tokens
            inputs["bool_masked_pos"] = torch.rand(1, n_patches, generator=rng) < 0.5
        return inputs
    shape: tuple[int, ...] = (1, min(length, max_length(weights) or length))
    if (spectrogram := feature_shape(weights)) is not None:
        features = torch.randn(1, *spectrogram, generator=rng)
        if not reads_targets(weights):
            return {"input_features": features}
        ids = torch.randint(vocabulary_size(weights) or 2, shape, generator=rng)
        return {"input_features": features, "decoder_input_ids": ids}
    if weights.family.class_of(weights.config).endswith("ForMultipleChoice"):
        shape = (1, _CHOICES, shape[1])
    inputs = {"input_ids": torch.randint(vocabulary_size(weights) or 2, shape, generator=rng)}
    if weights.family.inputs.token_types:
        types = Fields(weights.config).size("type_vocab_size", 2)
        inputs["token_type_ids"] = torch.randint(types, shape, generator=rng)
    if reads_targets(weights):
        inputs["decoder_input_ids"] = torch.randint(vocabulary_size(weights) or 2, shape, generator=rng)
    inputs = with_tokens(weights, inputs, inputs["input_ids"])
    if image is not None:
        inputs["pixel_values"] = torch.randn(1, *image, generator=rng)
    return inputs if weights.family.text is None else _with_image(weights, inputs, rng)


def _with_image(weights: Weights, inputs: Inputs, rng: torch.Generator) -> Inputs:
    """A text with a random image in its middle, for a multimodal model."""
    assert weights.family.text is not None
    images, (_, config, _) = weights.family.text.images, pretrained_class(weights)
    vision = config.vision_config
    if images.patches:
        side, patch = 2 * vision.spatial_merge_size, int(vision.patch_size)
        n_tokens, n_numbers = 4, int(vision.in_channels * vision.temporal_patch_size) * patch**2
        pixels: Inputs = {
            "pixel_values": torch.randn(side**2, n_numbers, generator=rng),
            "image_grid_thw": torch.tensor([[1, side, side]]),
        }
    else:
        size, channels = int(vision.image_size), int(vision.num_channels)
        pixels = {"pixel_values": torch.randn(1, channels, size, size, generator=rng)}
        n_tokens = (size // int(vision.patch_size)) ** 2
        if images.tokens:
            n_tokens = int(getattr(config, images.tokens))
        elif hasattr(config, "vision_feature_select_strategy"):
            n_tokens += (vision.model_type == "clip_vision_model") - (
                config.vision_feature_select_strategy == "default"
            )
    ids, token = inputs["input_ids"], int(config.image_token_id)
    text = torch.where(ids == token, (token + 1) % max(2, vocabulary_size(weights)), ids)
    start, end = text.tensor_split(2, dim=-1)
    ids = torch.cat([start, torch.full((1, n_tokens), token), end], dim=-1)
    marks = {images.marks: (ids == token).long()} if images.marks else {}
    return {"input_ids": ids, **marks, **pixels}


def reads_targets(weights: Weights) -> bool:
    """Whether the model has a decoder beside an encoder, and is given the tokens of both."""
    family, config = weights.family, weights.config
    classifier = family.class_of(config).endswith("ForSequenceClassification")
    return family.inputs.decoder and not classifier and not family.is_encoder(config)


def with_tokens(weights: Weights, inputs: Inputs, ids: Tensor) -> Inputs:
    """The same inputs with other tokens: those of one text, for every answer of a multiple-choice model. An image that
    stands between tokens is left out."""
    key = token_key(inputs)
    assert key is not None
    ids = ids.expand(*inputs[key].shape[:-1], -1).clone()
    if weights.family.text is not None:
        return {key: ids}
    if (end := _end_token(weights)) is not None:
        ids[ids == end] = (end + 1) % max(2, vocabulary_size(weights))
        ids[..., -1] = end
    return inputs | {key: ids}


def _end_token(weights: Weights) -> int | None:
    """The token at which a text is read that must have exactly one of them, at its end; None where there is none."""
    family, config = weights.family.language_model(weights.config)
    if family.inputs.decoder and family.class_of(config).endswith("ForSequenceClassification"):
        return int(family.settings_of(config)["eos_token_id"])
    if not family.inputs.ends:
        return None
    end, n_tokens = family.settings_of(config)["eos_token_id"], vocabulary_size(weights)
    end = n_tokens - 1 if end == 2 else end
    return end if type(end) is int and 0 <= end < n_tokens else None


def token_key(inputs: Inputs) -> str | None:
    """The name of the tokens that a model reads: of the encoder, if it reads any; None for a model of images."""
    return next((key for key in ("input_ids", "decoder_input_ids") if key in inputs), None)


def vocabulary_size(weights: Weights) -> int:
    """The number n of token ids that the model accepts: 0 … n − 1."""
    config = weights.text_config
    return max((Fields(config).size(k) for k in ("vocab_size", "d_vocab") if config.get(k)), default=0)


def max_length(weights: Weights) -> int | None:
    """The longest sequence that the model accepts; None if its config does not say."""
    keys = ("n_positions", "max_position_embeddings", "max_seq_len", "max_target_positions")
    config, ignored = weights.text_config, weights.family.ignored
    longest = min((Fields(config).size(k) for k in keys if config.get(k) and k not in ignored), default=None)
    if longest is None or not weights.family.inputs.padded_positions:
        return longest
    return longest - 1 - int(weights.settings.get("pad_token_id", 1))


def feature_shape(weights: Weights) -> tuple[int, int] | None:
    """Bins and steps of the spectrograms that the model reads; None for a model that reads no audio."""
    if not weights.family.inputs.features:
        return None
    fields = Fields(weights.config)
    return fields.size("num_mel_bins", 80), 2 * fields.size("max_source_positions", 1500)


def image_shape(weights: Weights) -> tuple[int, int, int] | None:
    """Channels, height and width of the images that the model reads; None for a model of tokens."""
    family, given = weights.family.part("vision_config", weights.config)
    if family.inputs.image_size is None and not family.own:
        return None
    config = {key: value for key, value in given.items() if value is not None}
    size = config.get("image_size", family.inputs.image_size)
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise ArchitectureError(f"config.json: image_size is {brief(size)}, expected one or two positive whole numbers")
    fields = Fields(config)
    return fields.size("num_channels", fields.size("n_channels", 3)), *sides


def outputs(
    weights: Weights, inputs: Sequence[Inputs], device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Everything the model puts out on these inputs, flat, computed in this type; a large model runs on the device."""
    return torch.cat([each.flatten() for each in Runner(weights, device=device, dtype=dtype).run(inputs)])


def record_reads(
    weights: Weights, inputs: Iterable[Inputs], wanted: Mapping[str, str], add: Callable[[str, Tensor], None]
) -> None:
    """Run the model and hand over what some of its weights read: `wanted` maps a weight's name to a label."""
    model = module_of(weights)
    held = places(weights, model)
    for weight, label in wanted.items():
        module = module_reading(model, held, weight)
        module.register_forward_pre_hook(lambda _, args, label=label: add(label, args[0]))
    with torch.no_grad():
        for one in inputs:
            run_module(weights, model, one)


def module_reading(model: torch.nn.Module, held: Mapping[str, str], weight: str) -> torch.nn.Module:
    """The module that reads what a weight reads, given the places of weights; an error where it has none of its own."""
    if weight not in held:
        raise IsobasinError(
            f"{weight}: transformers holds it in one parameter with other tensors, expected a module of its own: what "
            "it reads is not seen; match by weights"
        )
    return model.get_submodule(held[weight].rpartition(".")[0])


SMALLEST_SIZE = 1e-30  # of outputs: differences are relative to it where all outputs are smaller


def output_difference(x: Tensor, y: Tensor, scale: Tensor | None = None) -> float:
    """max |x − y| / max |scale|, by default the size of x; infinite where exactly one of the two is finite, 0 where
    none is."""
    scale = x if scale is None else scale
    finite = torch.isfinite(x) & torch.isfinite(y)
    if bool((torch.isfinite(x) != torch.isfinite(y)).any()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    size = scale[torch.isfinite(scale)].abs().max() if bool(torch.isfinite(scale).any()) else torch.ones(())
    return float((x - y)[finite].abs().max() / size.clamp(min=SMALLEST_SIZE))


def run_module(weights: Weights, module: torch.nn.Module, inputs: Inputs) -> Float[Tensor, "n outputs"]:
    """Everything a module puts out on a batch, one row per input."""
    if weights.family.own:
        return module(*inputs.values()).flatten(1)
    found = _call(module, inputs)
    names = [*OUTPUTS, *(ENCODER_OUTPUTS if found.get("last_hidden_state") is not None else ())]
    others = {name for name, value in found.items() if isinstance(value, Tensor)}
    unknown = sorted(others - {*names, *ENCODER_OUTPUTS, *INNER_OUTPUTS, "loss"})
    if unknown:  # a difference there would not be seen
        raise ArchitectureError(
            f"config.json: a {type(module).__name__} also puts out {', '.join(unknown)}, which is not compared; name a "
            f"class such as {weights.family.model_class} in architectures"
        )
    return torch.cat([found[name].flatten(1) for name in names if found.get(name) is not None], dim=1)


def _call(module: torch.nn.Module, inputs: Inputs) -> Any:
    """The outputs of a module of transformers, by name."""
    try:
        return module(**inputs)
    except (IsobasinError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # an odd configuration can make transformers raise anything
        raise ArchitectureError(
            f"config.json: transformers can not run the {type(module).__name__} that it describes "
            f"({type(error).__name__}: {error!s:.160}); correct it"
        ) from error


def logits(weights: Weights, model: torch.nn.Module, inputs: Inputs) -> Tensor:
    """The logits of a model, for a loss: (N, classes), or (N, T, vocabulary)."""
    if weights.family.own:
        x = inputs.get("input_ids", inputs.get("pixel_values"))
        mask = inputs.get("attention_mask")
        return model(x, None if mask is None else mask.bool())
    found = _call(model, inputs)
    for name in ("logits", "prediction_logits"):
        if found.get(name) is not None:
            return found[name]
    raise ArchitectureError(f"{type(model).__name__} has no logits, so there is nothing to measure: give it a head")


def places(weights: Weights, model: torch.nn.Module) -> dict[str, str]:
    """The parameter of `model` that holds each tensor: names in memory may differ from those on disk. Tensors that
    share a parameter with others are left out."""
    names = resolve(weights.family, weights.arch, model.state_dict())
    found = {name: place for name, place in names.on_disk.items() if name not in names.slices}
    return {name: place for name, place in found.items() if name in weights.arch.tensors}


def separate_places(weights: Weights, model: torch.nn.Module) -> dict[str, str]:
    """As `places`, for work on single parameters: an error where a tensor has none of its own (experts)."""
    found = places(weights, model)
    for name, pattern in weights.arch.tensors.items():
        if not pattern.buffer and name not in found:
            raise IsobasinError(
                f"{name}: transformers holds it under another name or in one parameter with other tensors, expected a "
                f"parameter of its own: learning and --explain are not supported for {weights.arch.family} models"
            )
    return found


def module_of(
    weights: Weights, *, attention: str = "eager", cache: bool = False, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """The model itself, in this type, ready to run: ours, or the class of transformers that config.json names.

    `attention` is how transformers computes it: `eager` is the plain formula, `sdpa` is faster. `cache`: with a cache
    of keys and values, as when text is generated.
    """
    if not weights.family.own:
        return _pretrained(weights, attention, cache, dtype)
    from isobasin.model import ModelConfig, Transformer

    with torch.device("meta"):  # no random initialisation that is replaced at once
        model = Transformer(ModelConfig.from_dict(dict(weights.config)))
    model.to_empty(device="cpu").to(dtype).load_state_dict(weights.state_dict(dtype))
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
    name = weights.family.class_of(weights.config)
    kind: Any = getattr(transformers, name, None)
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not known:
        raise ArchitectureError(
            f"config.json: architectures names {name!r}, which transformers does not have; expected a class such as "
            f"{weights.family.model_class}"
        )
    settings = _without_types(weights.config) | PLAIN_RUN
    if _more_labels_than_rows(weights):  # transformers makes a name for each
        del settings["num_labels"]
    if settings.get(CHUNKS) in (None, 0, 1):
        settings[CHUNKS] = 0
    options: dict[str, Any] = {}
    if name in weights.family.optional_pooler:  # config.json does not say whether there is a pooler
        options["add_pooling_layer"] = any("pooler" in tensor for tensor in weights)
    try:
        made = transformers.AutoConfig.for_model(**settings)
        made._experts_implementation = "eager"  # the plain formula, as of attention; others want sizes they can divide
        return kind, made, options
    except Exception as error:  # an odd configuration can make transformers raise anything
        raise _no_model(name, error) from error


def require_runnable(weights: Weights) -> None:
    """Raise unless transformers makes a model of the config and finds every tensor of it; nothing is read or run."""
    if weights.family.own:
        return
    kind, config, options = pretrained_class(weights)
    try:
        with torch.device("meta"):
            model = kind._from_config(config, dtype=torch.float32, **options)
    except Exception as error:
        raise _no_model(kind.__name__, error) from error
    if not weights.family.fused and not weights.arch.expert_spaces:
        _source_tensors(weights, model)


def _more_labels_than_rows(weights: Weights) -> bool:
    """Whether config.json has more labels than any tensor has rows."""
    labels, shapes = weights.config.get("num_labels"), weights.arch.shapes.values()
    return isinstance(labels, int) and labels > max((max(shape, default=1) for shape in shapes), default=1)


def _without_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and the configs of its parts, without the types of weights: models are run in float32."""
    kept = {key: value for key, value in config.items() if key not in ("auto_map", "dtype", "torch_dtype")}
    return {k: _without_types(v) if k.endswith("_config") and isinstance(v, Mapping) else v for k, v in kept.items()}


def _no_model(name: str, error: Exception) -> ArchitectureError:
    return ArchitectureError(
        f"config.json: transformers makes no {name} of it ({type(error).__name__}: {error!s:.160}); correct it"
    )


def _available(kind: Any, attention: str) -> str:
    """Some classes of transformers have the plain formula only."""
    return attention if attention != "sdpa" or getattr(kind, "_supports_sdpa", False) else "eager"


def _pretrained(weights: Weights, attention: str, cache: bool, dtype: torch.dtype) -> torch.nn.Module:
    kind, config, options = pretrained_class(weights)
    config.use_cache, config.chunk_size_feed_forward = cache, 0
    attention = _available(kind, attention)
    state = weights.state_dict(torch.promote_types(dtype, torch.float32))
    try:
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        raise _no_model(kind.__name__, error) from error
    if report["missing_keys"]:  # initialised at random, they would be measured in place of the checkpoint
        raise _missing_tensor(min(report["missing_keys"]), kind.__name__)
    return model.eval()


def _missing_tensor(name: str, kind: str) -> ArchitectureError:
    return ArchitectureError(
        f"{name}: transformers expects this tensor in a {kind}, the checkpoint does not have it: complete the folder "
        "or correct architectures in config.json"
    )


# -- models of any size ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runner:
    """A model that is ready to run: loaded as a whole, or streamed where it is large, then on `device`. `attention` and
    `cache` as in `module_of`. In float64 nothing is computed in float32, also where transformers asks for it."""

    weights: Weights
    attention: str = "eager"
    cache: bool = False
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    @property
    def streamed(self) -> bool:
        family = self.weights.family
        return self.weights.n_params > MAX_LOADED_PARAMETERS and not family.own and not family.fused

    @cached_property
    def module(self) -> torch.nn.Module:
        if self.streamed:
            how: dict[str, Any] = {"attention": self.attention, "cache": self.cache, "dtype": self.dtype}
            return _streamed_module(self.weights, self.device, **how)
        return module_of(self.weights, attention=self.attention, cache=self.cache, dtype=self.dtype)

    def run(self, inputs: Sequence[Inputs]) -> list[Tensor]:
        """All outputs of the model, flat, per input. A streamed model runs inputs of the same shape as one batch."""
        # transformers refuses several inputs at once for a classifier without a padding token.
        is_classifier = any(name.startswith("score") for name in self.weights)
        single = is_classifier and self.weights.config.get("pad_token_id") is None
        inputs = [{k: x.to(self.dtype) if x.is_floating_point() else x for k, x in each.items()} for each in inputs]
        module = self.module  # built before: files are read in the types that they have
        with torch.no_grad(), _InFloat64() if self.dtype == torch.float64 else nullcontext():
            if not self.streamed or single:
                place = self.device if self.streamed else CPU
                placed = ({key: x.to(place) for key, x in each.items()} for each in inputs)
                return [run_module(self.weights, module, each)[0].cpu() for each in placed]
            found: dict[int, Tensor] = {}
            by_shape: dict[tuple[tuple[str, torch.Size], ...], list[int]] = {}
            for number, each in enumerate(inputs):
                by_shape.setdefault(tuple((key, x.shape) for key, x in each.items()), []).append(number)
            for chosen in by_shape.values():
                batch = {key: torch.cat([inputs[i][key] for i in chosen]) for key in inputs[chosen[0]]}
                batch = {key: x.to(self.device) for key, x in batch.items()}
                found |= dict(zip(chosen, run_module(self.weights, module, batch).cpu()))
                trim_heap()
        return [found[i] for i in range(len(inputs))]


class _InFloat64(TorchFunctionMode):
    """Where transformers asks for float32 (in norms, in softmax), it gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        named = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return func(*args, **named)


def _streamed_module(
    weights: Weights, device: torch.device, *, attention: str, cache: bool, dtype: torch.dtype
) -> torch.nn.Module:
    """The transformers class that config.json names, in this type; hooks read the weights of a module before it runs,
    and drop them afterwards."""
    kind, config, options = pretrained_class(weights)
    config.use_cache, config.chunk_size_feed_forward = cache, 0
    with EmptyOnMeta(), torch.random.fork_rng(devices=[]):
        model: torch.nn.Module = kind._from_config(
            config, attn_implementation=_available(kind, attention), dtype=dtype, **options
        )
    model.requires_grad_(False)
    sources = _source_tensors(weights, model)
    for prefix, module in model.named_modules():
        module._buffers.update({key: x.to(device) for key, x in module._buffers.items() if x is not None})
        keys = [key for key, parameter in module._parameters.items() if parameter is not None]
        names = {key: sources[f"{prefix}.{key}" if prefix else key] for key in keys}
        if names:
            module.register_forward_pre_hook(partial(_load_parameters, weights, names, device))
            module.register_forward_hook(_drop_parameters)
    return model.eval()


def _source_tensors(weights: Weights, model: torch.nn.Module) -> dict[str, str]:
    """The tensor of the checkpoint for every parameter of the module; tied parameters share one."""
    known = {memory: name for name, memory in places(weights, model).items()}
    named = dict(model.named_parameters(remove_duplicate=False))
    by_identity = {id(named[memory]): name for memory, name in known.items() if memory in named}
    found = {}
    for memory, parameter in named.items():
        name = known.get(memory) or by_identity.get(id(parameter)) or weights.arch.aliases.get(memory)
        if name is None:
            raise _missing_tensor(memory, type(model).__name__)
        found[memory] = name
    return found


def _load_parameters(
    weights: Weights, names: dict[str, str], device: torch.device, module: torch.nn.Module, _: Any
) -> None:
    for key, name in names.items():
        empty = module._parameters[key]
        assert empty is not None
        stored = weights.stored(name).to(device, empty.dtype)
        module._parameters[key] = torch.nn.Parameter(stored, requires_grad=False)


def _drop_parameters(module: torch.nn.Module, _: Any, __: Any) -> None:
    for key, loaded in module._parameters.items():
        if loaded is not None:
            module._parameters[key] = torch.nn.Parameter(torch.empty_like(loaded, device="meta"), requires_grad=False)
