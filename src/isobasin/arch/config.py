"""Reading a config.json: every value checked, with the name of the key in the message."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from isobasin.errors import ArchitectureError

# What transformers reads of a table of rotary positions, by its type; of an unknown type, everything counts.
_PRETRAINED_LENGTH, _LONGEST = "original_max_position_embeddings", "max_position_embeddings"
_ROTARY_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _LONGEST),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _PRETRAINED_LENGTH),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        _PRETRAINED_LENGTH,
    ),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", _PRETRAINED_LENGTH, _LONGEST),
}


@dataclass(frozen=True)
class Fields:
    """A configuration and the questions a family asks of it; a null counts as absent, as in transformers."""

    config: Mapping[str, Any]

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArchitectureError(f"config.json: {key} is {value!r}, expected a positive whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ArchitectureError(f"config.json: {key} is {value!r}, expected true or false")
        return value

    def word(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ArchitectureError(f"config.json: {key} is {value!r}, expected a string")
        return value

    def choice(self, key: str, default: str, *others: str) -> str:
        """One of a few words."""
        value = self.word(key, default)
        if value not in (default, *others):
            raise ArchitectureError(f"config.json: {key} is {value!r}, expected one of {', '.join((default, *others))}")
        return value

    @property
    def rotary_table(self) -> Mapping[str, Any]:
        """`rope_scaling`, the older name, wins over `rope_parameters` where both are given, as in transformers."""
        parameters, scaling = self.table("rope_parameters"), self.table("rope_scaling")
        return scaling or parameters

    def rotary(
        self, base_key: str = "rope_theta", default: float = 10000.0, usual: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Base, type and scaling of rotary positions: whatever transformers reads of them, and nothing it ignores.

        A value inside the table wins over one beside it; `base_key` is where a base stands beside the table,
        `default` the base where there is none, and `usual` the table where there is none; an empty one is one.
        """
        table = self.rotary_table or (usual if usual and not self.has("rope_parameters") else {})
        base = next((v for v in (table.get("rope_theta"), self.config.get(base_key)) if v is not None), default)
        if not isinstance(base, int | float) or isinstance(base, bool) or base <= 0:
            raise ArchitectureError(f"config.json: {base_key} is {base!r}, expected a positive number")
        kind = table.get("rope_type", table.get("type", "default"))
        beside, pretrained = {_LONGEST: self.config.get(_LONGEST)}, self.config.get(_PRETRAINED_LENGTH)
        if kind in ("llama3", "yarn", "longrope"):
            lengths = (pretrained, table.get(_PRETRAINED_LENGTH), beside[_LONGEST])
            beside[_PRETRAINED_LENGTH] = next((length for length in lengths if length is not None), None)
        values = {**table, **beside}
        read = _ROTARY_KEYS.get(kind) if isinstance(kind, str) else None
        keys = set(values) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"} if read is None else read
        if kind == "yarn" and values.get("factor") is None:  # it is then the ratio of the two lengths
            keys = {*keys, _LONGEST}
        return {"base": float(base), "type": kind} | {k: values[k] for k in keys if values.get(k) is not None}

    def rotary_columns(
        self, d_head: int, key: str, default: float, *, rounded: bool = True, head_dim: bool = True
    ) -> int:
        """How many columns of a head rotate: a fraction, from the table or beside it, rounded up to pairs or (not
        `rounded`) an error if it is odd.

        transformers takes the size of a head from `head_dim` here, where a config has it; not so for some families.
        """
        found = (self.rotary_table.get("partial_rotary_factor"), self.config.get(key))
        value = next((v for v in found if v is not None), default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
            raise ArchitectureError(f"config.json: {key} is {value!r}, expected a fraction in (0, 1]")
        wanted = int((self.size("head_dim", d_head) if head_dim else d_head) * value)
        if not rounded and (wanted % 2 or not wanted):
            raise ArchitectureError(
                f"config.json: {key} makes {wanted} of {d_head} columns of a head rotate, expected an even number"
            )
        columns = 2 * ceil(wanted / 2)
        if columns > d_head:
            raise ArchitectureError(
                f"config.json: head_dim and {key} make {columns} rotary columns in heads of {d_head}; correct head_dim"
            )
        return columns

    def table(self, key: str) -> Mapping[str, Any]:
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise ArchitectureError(f"config.json: {key} is {value!r}, expected an object")
        return value

    def has(self, key: str) -> bool:
        return self.config.get(key) is not None

    def layer_types(self, default: Callable[[int], str]) -> list[str]:
        """What kind of attention each layer has: listed in the config, or by the number of the layer, from 0."""
        n_layers, types = self.size("num_hidden_layers"), self._get("layer_types", None)
        if types is None:
            return [default(i) for i in range(n_layers)]
        if not isinstance(types, list) or len(types) != n_layers or not all(isinstance(kind, str) for kind in types):
            found = f"{len(types)} entries" if isinstance(types, list) else repr(types)
            raise ArchitectureError(f"config.json: layer_types is {found}, expected a list of {n_layers} strings")
        return types

    @property
    def architecture(self) -> str:
        """The class that wrote the checkpoint, such as `LlamaForCausalLM`; empty if unknown."""
        names = self._get("architectures", [])
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    def d_head(self, n_heads: int, d_model: int, key: str | None = "head_dim") -> int:
        """The size of a head: given, or the width over the heads, which must then divide it."""
        if key is not None and self.has(key):
            return self.size(key)
        if d_model % n_heads:
            raise ArchitectureError(
                f"config.json: {n_heads} heads do not divide a width of {d_model}; correct one of them"
            )
        return d_model // n_heads

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value
