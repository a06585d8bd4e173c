"""What a task needs to know of the models that are measured on it, read off their configurations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isobasin.arch.fields import Fields
from isobasin.errors import IsobasinError
from isobasin.running import DEFAULT_CLASSES
from isobasin.weights import Weights

KINDS = ("lm", "mlm", "text", "image")
_HEADS = {
    "ForCausalLM": "lm",
    "LMHeadModel": "lm",
    "ForMaskedLM": "mlm",
    "ForPreTraining": "mlm",
    "ForSequenceClassification": "text",
    "ForImageClassification": "image",
}
_CLASSIFIERS = ("classifier.weight", "score.weight")


def is_own(weights: Weights) -> bool:
    """Whether it is the project's own model, which `transformers` does not know."""
    return weights.arch.family == "isobasin"


def name_of(weights: Weights) -> str:
    return str(weights.path) if weights.path else f"a {weights.arch.family} model in memory"


def task_kind(models: Sequence[Weights], kind: str = "auto") -> str:
    """What these models can be measured on; a stated kind must be it."""
    if not models:
        raise IsobasinError("no model is given: a task is opened for the models it measures")
    if kind not in ("auto", *KINDS):
        raise IsobasinError(f"--task {kind}: expected one of auto, {', '.join(KINDS)}")
    found = same(models, "task", _kind)
    if kind not in ("auto", found):
        raise IsobasinError(f"--task {kind}: {name_of(models[0])} has a head for {found}; give --task {found} or auto")
    return found


def _kind(weights: Weights) -> str:
    config = Fields(weights.config)
    if is_own(weights):
        if config.has("image_size"):
            return "image"
        if config.has("n_classes"):
            return "text"
        return "lm" if config.flag("causal", False) else "mlm"
    name = config.architecture or DEFAULT_CLASSES[weights.arch.family]
    found = next((kind for suffix, kind in _HEADS.items() if name.endswith(suffix)), None)
    if found is None:
        raise IsobasinError(
            f"{name_of(weights)}: {name} has no head to measure; expected a class that ends in {', '.join(_HEADS)}"
        )
    return found


def same(models: Sequence[Weights], what: str, question: Callable[[Weights], Any]) -> Any:
    """The one answer all models give."""
    answers = [question(weights) for weights in models]
    for weights, answer in zip(models[1:], answers[1:]):
        if answer != answers[0]:
            raise IsobasinError(
                f"{what}: {name_of(models[0])} has {answers[0]}, {name_of(weights)} has {answer}; "
                "expected models with the same"
            )
    return answers[0]


def vocabulary(weights: Weights) -> int:
    """Token ids it takes: 0 … n − 1."""
    return int(weights.config.get("vocab_size") or weights.config.get("d_vocab") or 0)


def longest(weights: Weights) -> int | None:
    """Tokens it takes at once; None if its config does not say."""
    limits = [weights.config[k] for k in ("n_positions", "max_position_embeddings") if weights.config.get(k)]
    return min(map(int, limits), default=None)


def window_length(models: Sequence[Weights], asked: int | None, default: int = 256) -> int:
    """The length asked for, or `default`, or less where a model takes less."""
    limit = min((n for n in map(longest, models) if n is not None), default=None)
    if asked is not None and limit is not None and asked > limit:
        raise IsobasinError(f"--seq-len {asked}: the model takes at most {limit} tokens; give at most that")
    return asked or (default if limit is None else min(default, limit))


def n_classes(weights: Weights) -> int:
    """Rows of the classifier, from the tensor itself: a config may leave the number to a default."""
    if is_own(weights):
        return int(weights.config["n_classes"])
    found = next((weights.arch.shapes[name][0] for name in _CLASSIFIERS if name in weights.arch.shapes), None)
    if found is None:
        raise IsobasinError(
            f"{name_of(weights)}: no classifier among its tensors; expected {' or '.join(_CLASSIFIERS)}"
        )
    if found == 1:
        raise IsobasinError(f"{name_of(weights)}: a classifier with one class is a regression, which is not measured")
    return int(found)


def image_shape(weights: Weights) -> tuple[int, int, int] | None:
    """Channels, height and width of an image for this model; None for a model of tokens."""
    config = {key: value for key, value in weights.config.items() if value is not None}
    size = config.get("image_size", 224 if weights.arch.family == "vit" else None)
    if size is None:
        return None
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(config.get("num_channels", config.get("n_channels", 3))), int(height), int(width)


def label_names(models: Sequence[Weights]) -> Mapping[str, int]:
    """The classes' names, where a config gives them (LABEL_0 says nothing); two models must not contradict."""
    maps = [(weights, found) for weights in models if (found := _names(weights))]
    for weights, found in maps[1:]:
        if found != maps[0][1]:
            here, there = (sorted(m, key=m.__getitem__)[:4] for m in (maps[0][1], found))
            raise IsobasinError(
                f"{name_of(weights)}: its classes are {', '.join(there)}…, those of {name_of(maps[0][0])} "
                f"{', '.join(here)}…; models with different label maps can not be compared"
            )
    return maps[0][1] if maps else {}


def _names(weights: Weights) -> dict[str, int]:
    table = Fields(weights.config).table("id2label")
    try:
        found = {str(name): int(number) for number, name in table.items()}
    except ValueError as error:
        raise IsobasinError(
            f"{name_of(weights)}: config.json: id2label has a key that is no number ({error}); correct it"
        ) from error
    plain = all(name == f"LABEL_{number}" for name, number in found.items())
    return {} if plain else found
