"""Descriptions of models: patterns, spaces and norms. This room knows neither torch nor files."""

from isobasin.arch.architecture import (
    ROTATED,
    Architecture,
    HeadSpace,
    Index,
    Linear,
    Norm,
    Placement,
    Sizes,
    Space,
    Stack,
    Sum,
    gain_is_free,
    identity_fields,
)
from isobasin.arch.family import Family, ModelInputs
from isobasin.arch.pattern import Axis, Pattern, Role, Term, parse
from isobasin.arch.registry import FAMILIES, Names, describe, family_of, of_stored_class, resolve

__all__ = [
    "FAMILIES",
    "ROTATED",
    "Architecture",
    "Axis",
    "Family",
    "HeadSpace",
    "Index",
    "Linear",
    "ModelInputs",
    "Names",
    "Norm",
    "Pattern",
    "Placement",
    "Role",
    "Sizes",
    "Space",
    "Stack",
    "Sum",
    "Term",
    "describe",
    "family_of",
    "gain_is_free",
    "identity_fields",
    "of_stored_class",
    "parse",
    "resolve",
]
