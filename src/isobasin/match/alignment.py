"""What an alignment found, as it is reported."""

from dataclasses import dataclass, field

from isobasin.transform import Transform


@dataclass(frozen=True)
class Alignment:
    """A transform for B, and what it does to the distance from A: whole, and by layer and space."""

    transform: Transform
    per_layer: tuple[dict[str, object], ...]
    distance_before: float
    distance_after: float
    head_permutation: tuple[tuple[int, ...], ...]
    kv_head_permutation: tuple[tuple[int, ...], ...]
    max_output_change: float | None
    history: tuple[float, ...] = field(default=(), repr=False)

    @property
    def facts(self) -> dict[str, object]:
        """Distances and exactness, as a result file holds them."""
        return {
            "distance_before": self.distance_before,
            "distance_after": self.distance_after,
            "max_output_change": self.max_output_change,
            "per_layer": list(self.per_layer),
        }

    def __str__(self) -> str:
        moved = self.max_output_change
        checked = "not verified" if moved is None else f"outputs moved by at most {moved:.1e}"
        parts = "attention layers" if not self.history else "parts"
        return (
            f"distance {self.distance_before:.4g} → {self.distance_after:.4g} of ‖A‖ over {len(self.per_layer)} "
            f"{parts}; {checked}"
        )
