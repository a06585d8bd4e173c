"""Moves that a symmetry group does not allow, for the negative controls of the laws."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from subjects import held

from isobasin.arch import Term
from isobasin.groups import Element, Matrix, Monomial
from isobasin.symmetries.action import Action
from isobasin.views import AsFloat64
from isobasin.weights import Weights


def act(weights: Weights, elements: Mapping[str, Element], kind: type[Action] = Action) -> Weights:
    """The elements straight on the tensors, whether or not they lie in the group."""
    changes = kind(weights.arch, elements).changes()
    return held(weights, {name: change(AsFloat64(weights)) for name, change in changes.items()})


@dataclass(frozen=True)
class Undual(Action):
    """Forgets every `*`: queries move as keys do."""

    def _element(self, term: Term) -> Element | None:
        return super()._element(replace(term, dual=False))


@dataclass(frozen=True)
class Torn(Action):
    """Moves queries and keys and leaves values and outputs where they are."""

    def _element(self, term: Term) -> Element | None:
        return None if term.name.startswith("vo") else super()._element(term)


def step_outside(kind: str, n: int) -> Element:
    """The smallest move of an n-dimensional space that a kind does not allow."""
    order, ones = torch.arange(n), torch.ones(n, dtype=torch.float64)
    first = (order == 0).double()
    match kind:
        case "fixed":  # two coordinates swapped
            return Monomial(torch.cat([torch.tensor([1, 0]), order[2:]]), ones)
        case "permutation":  # the sign of all
            return Monomial(order, -ones)
        case "permutation±" | "positive":  # one sign
            return Monomial(order, ones - 2 * first)
        case "signed" | "orthogonal":  # one scale
            return Monomial(order, ones + first)
        case "scaled" | "orthogonal1":  # two coordinates turned
            turn = torch.eye(n, dtype=torch.float64)
            turn[:2, :2] = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
            return Matrix(turn, orthogonal=True)
    raise AssertionError(kind)
