"""Which models can be aligned: those of one architecture with the same settings."""

from isobasin.arch import HeadSpace, Space, identity_fields
from isobasin.config_keys import part_settings
from isobasin.errors import ArchitectureError
from isobasin.weights import Weights


def check_comparable(a: Weights, b: Weights) -> None:
    """The same family, sizes, tensors, positions and settings; anything else is the user's mistake."""
    if a.arch.family != b.arch.family:
        _refuse("family", a.arch.family, b.arch.family)
    sizes_a, sizes_b = vars(a.arch.sizes), vars(b.arch.sizes)
    for key, value in sizes_a.items():
        if value != sizes_b[key]:
            _refuse(key, value, sizes_b[key])
    if a.arch.rotary != b.arch.rotary and any(heads.rotary for heads in a.arch.heads()):
        _refuse("rotary positions", a.arch.rotary, b.arch.rotary)
    for name in a.arch.spaces:
        if a.arch.spaces[name] != b.arch.spaces.get(name):
            _refuse(f"space {name}", *_differing_fields(a.arch.spaces[name], b.arch.spaces.get(name)))
    for name in sorted(weight_names(a) | weight_names(b)):
        if a.arch.shapes.get(name) != b.arch.shapes.get(name):
            _refuse(f"tensor {name}", a.arch.shapes.get(name, "absent"), b.arch.shapes.get(name, "absent"))
    for key, value in a.settings.items():
        if value != b.settings.get(key):
            _refuse(f"config.json: {key}", value, b.settings.get(key))
    parts_a, parts_b = part_settings(a), part_settings(b)
    for key in sorted({**parts_a, **parts_b}):
        if parts_a.get(key) != parts_b.get(key):
            _refuse(f"config.json: {key}", parts_a.get(key), parts_b.get(key))


def weight_names(model: Weights) -> set[str]:
    """The tensors of a model that are no buffers."""
    return {name for name, pattern in model.arch.tensors.items() if not pattern.buffer}


def _differing_fields(a: Space | HeadSpace, b: Space | HeadSpace | None) -> tuple[str, str]:
    """What tells two spaces of a name apart, for a message."""
    if b is None or type(a) is not type(b):
        return str(a.size if isinstance(a, Space) else a.n_heads), "none"
    of_a, of_b = identity_fields(a), identity_fields(b)
    keys = [key for key in {**of_a, **of_b} if of_a.get(key) != of_b.get(key)]
    return ", ".join(f"{k}={of_a.get(k)}" for k in keys), ", ".join(f"{k}={of_b.get(k)}" for k in keys)


def _refuse(what: str, a: object, b: object) -> None:
    raise ArchitectureError(f"{what}: A has {a}, B has {b}; only models of the same architecture can be aligned")
