"""What an alignment found."""

from dataclasses import dataclass, field
from typing import Any

from isobasin.display import Shown, Summary
from isobasin.symmetries.transform import Transform

MAX_NAMES = 3  # tensors that a line names
_DISTANCES = ("distance_before", "distance_after")


@dataclass(frozen=True)
class LeftOut:
    """The tensors, and rows of tensors (`name[first:end]`), that take no part in a comparison, by model."""

    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """What JSON adds about a pair of this kind; nothing for models that are compared as a whole."""
        return {"trunk": True, "left_out": {"a": list(self.a), "b": list(self.b)}} if self.a or self.b else {}

    @property
    def brief(self) -> str:
        """At most a few names of each model, in one line."""
        return " and ".join(f"{_few(names)} of {model}" for model, names in (("A", self.a), ("B", self.b)) if names)


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_NAMES} more tensors" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


@dataclass(frozen=True, repr=False)
class Alignment(Shown):
    """A transform for B, and what it does to the distance from A: in total, and by layer and space."""

    transform: Transform = field(repr=False)
    per_layer: tuple[dict[str, object], ...] = field(repr=False)
    distance_before: float
    distance_after: float
    head_permutation: tuple[tuple[int, ...], ...] = field(repr=False)
    kv_head_permutation: tuple[tuple[int, ...], ...] = field(repr=False)
    max_output_change: float | None
    history: tuple[float, ...] = field(default=(), repr=False)
    left_out: LeftOut = field(default=LeftOut(), repr=False)

    def to_dict(self) -> dict[str, object]:
        """Distances and exactness, as a result file holds them."""
        return {
            "distance_before": self.distance_before,
            "distance_after": self.distance_after,
            "max_output_change": self.max_output_change,
            "per_layer": list(self.per_layer),
            **self.left_out.to_dict(),
        }

    def summary(self) -> Summary:
        """The distances in total and by part."""
        rows = [
            ("" if row["layer"] is None else row["layer"], row["space"], *(f"{row[key]:.4g}" for key in _DISTANCES))
            for row in self.per_layer
        ]
        facts = {"left out": self.left_out.brief} if self.left_out.brief else {}
        return Summary(str(self), facts, ("layer", "part", "before", "after"), rows)

    def __str__(self) -> str:
        moved = self.max_output_change
        checked = "not verified" if moved is None else f"outputs moved by at most {moved:.1e}"
        spaces = {row["space"] for row in self.per_layer}
        parts = "attention layers" if spaces == {"heads"} else "parts"
        return (
            f"distance {self.distance_before:.4g} → {self.distance_after:.4g} of ‖A‖ over {len(self.per_layer)} "
            f"{parts}; {checked}"
        )
