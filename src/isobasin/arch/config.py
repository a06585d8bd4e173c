"""Reading a config.json: every value checked, with the name of the key in the message."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobasin.errors import ArchitectureError


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

    def fraction(self, key: str, default: float) -> float:
        """A number in (0, 1]; rotary fractions also sit inside `rope_parameters` or `rope_scaling`."""
        tables = (self.config, self.table("rope_parameters"), self.table("rope_scaling"))
        value = next((t[key] for t in tables if t.get(key) is not None), default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
            raise ArchitectureError(f"config.json: {key} is {value!r}, expected a fraction in (0, 1]")
        return float(value)

    def table(self, key: str) -> Mapping[str, Any]:
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise ArchitectureError(f"config.json: {key} is {value!r}, expected an object")
        return value

    def has(self, key: str) -> bool:
        return self.config.get(key) is not None

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
