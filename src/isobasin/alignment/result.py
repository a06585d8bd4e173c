"""What an alignment found."""

from dataclasses import dataclass, field

from isobasin.symmetries.transform import Transform


@dataclass(frozen=True)
class Alignment:
    """A transform for B, and what it does to the distance from A: in total, and by layer and space."""

    transform: Transform = field(repr=False)
    per_layer: tuple[dict[str, object], ...] = field(repr=False)
    distance_before: float
    distance_after: float
    head_permutation: tuple[tuple[int, ...], ...] = field(repr=False)
    kv_head_permutation: tuple[tuple[int, ...], ...] = field(repr=False)
    max_output_change: float | None
    history: tuple[float, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, object]:
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
        spaces = {row["space"] for row in self.per_layer}
        parts = "attention layers" if spaces == {"heads"} else "parts"
        return (
            f"distance {self.distance_before:.4g} → {self.distance_after:.4g} of ‖A‖ over {len(self.per_layer)} "
            f"{parts}; {checked}"
        )
