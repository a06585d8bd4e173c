"""The algebra: groups and their elements, torch only, no tensor names."""

from isobasin.groups.group import Element, Group, Overlap
from isobasin.groups.heads import Face, Heads, HeadsElement
from isobasin.groups.linear import GL, Matrix, Orthogonal, OrthogonalFixingOnes
from isobasin.groups.monomial import Monomial, MonomialGroup, Permutation, SignedPermutation, Trivial
from isobasin.groups.product import Blocks, Product
from isobasin.groups.rotary import PairSigns, Phases, RotaryCommutant

__all__ = [
    "GL",
    "Blocks",
    "Element",
    "Face",
    "Group",
    "Heads",
    "HeadsElement",
    "Matrix",
    "Monomial",
    "MonomialGroup",
    "Orthogonal",
    "OrthogonalFixingOnes",
    "Overlap",
    "PairSigns",
    "Permutation",
    "Phases",
    "Product",
    "RotaryCommutant",
    "SignedPermutation",
    "Trivial",
]
