"""The symmetries of a model: its group, its free coordinates, and the transforms that they make."""

from isobasin.symmetries.symmetry import (
    ATTENTION_SCOPES,
    SCOPES,
    Symmetry,
    check_scope,
    group_of,
    heads_group,
    symmetry,
)

__all__ = ["ATTENTION_SCOPES", "SCOPES", "Symmetry", "check_scope", "group_of", "heads_group", "symmetry"]
