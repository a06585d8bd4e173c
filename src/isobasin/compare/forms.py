"""Two models in one form, before they are compared: the same outputs, tied or untied alike."""

from isobasin.arch.fields import Fields
from isobasin.errors import ArchitectureError
from isobasin.match.untying import untied
from isobasin.running import DEFAULT_CLASSES
from isobasin.weights import Weights

_INPUTS = (
    ("vocabulary", ("vocab_size", "d_vocab")),
    ("image size", ("image_size",)),
    ("channels", ("num_channels", "n_channels")),
)


def check_same_task(a: Weights, b: Weights) -> None:
    """Refuse two models that do not map the same inputs to the same kind of output: that is a user's mistake."""
    if a.arch.family != b.arch.family:
        _refuse("family", a.arch.family, b.arch.family)
    for what, keys in _INPUTS:
        found = [next((w.config[k] for k in keys if w.config.get(k) is not None), None) for w in (a, b)]
        if found[0] != found[1]:
            _refuse(what, *found)
    said = [_class(w) for w in (a, b)]
    if said[0] != said[1]:
        _refuse("class", *said)
    for name in a.arch.tensors:
        sizes = [_open_sizes(w, name) for w in (a, b)]
        if None not in sizes and sizes[0] != sizes[1]:
            _refuse(f"tensor {name}: open axes", *sizes)


def one_form(a: Weights, b: Weights) -> tuple[Weights, Weights]:
    """The same two functions; where only one of them ties its head to the embedding, that one is untied."""
    if is_tied(a) == is_tied(b):
        return a, b
    return (untied(a), b) if is_tied(a) else (a, untied(b))


def is_tied(weights: Weights) -> bool:
    return any(weights.arch.tied(name) for name in weights.arch.tensors)


def _class(weights: Weights) -> str:
    """What the model says: the class that runs it; our own model says what its head is for."""
    if weights.arch.family == "isobasin":
        return "classifier" if weights.config.get("n_classes") else "language model"
    return Fields(weights.config).architecture or DEFAULT_CLASSES[weights.arch.family]


def _open_sizes(weights: Weights, name: str) -> tuple[int, ...] | None:
    """The lengths of the axes that no space explains: words, labels, positions, pixels."""
    pattern = weights.arch.tensors.get(name)
    if pattern is None or pattern.buffer:
        return None
    return tuple(n for n, axis in zip(weights.arch.shapes[name], pattern.roles[0].axes) if not axis.terms)


def _refuse(what: str, a: object, b: object) -> None:
    raise ArchitectureError(
        f"{what}: A has {a}, B has {b}; only models that map the same inputs to the same outputs can be compared"
    )
