"""Group elements acting on tensors, as their patterns say."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.arch import Architecture, Axis, HeadSpace, Space, Term
from isobasin.groups import Element
from isobasin.views import Change


@dataclass(frozen=True)
class Action:
    """The elements of some spaces of an architecture; spaces without one stay as they are.

    Experts are permuted first: a tensor of an expert is read from where `source` says, and moved by `tensor`.
    Computed in float64. With `in_type`, elements of the stream and of units act in the type of the tensor: a sweep
    over a wide model holds float32, and the next sweep measures what this one did.
    """

    arch: Architecture
    elements: Mapping[str, Element]
    in_type: bool = False

    def changes(self) -> dict[str, Change]:
        """How every tensor moves that a nontrivial element touches."""
        moving = {name for name, element in self.elements.items() if not element.is_identity}
        return {
            name: lambda t, n=name: self.tensor(n, t[self.source(n)])  # type: ignore[misc]
            for name, pattern in self.arch.tensors.items()
            for role in pattern.roles[:1]
            if self.source(name) != name
            or any(self.arch.space_of(term).name in moving for axis in role.axes for term in axis.terms)
        }

    def source(self, name: str) -> str:
        """The tensor that comes to the place of this one when experts are permuted."""
        if name not in self.arch.expert_places:
            return name
        space, expert, _ = self.arch.expert_places[name]
        order = self.elements.get(space)
        return name if order is None else self.arch.of_expert(name, int(order.tensors()["index"][expert]))

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """One tensor after the elements have acted. A tied one acts by its first role: its roles agree."""
        for axis, words in enumerate(self.arch.tensors[name].roles[0].axes):
            tensor = self.act(tensor, axis, words)
        return tensor

    def act(self, tensor: Tensor, axis: int, words: Axis) -> Tensor:
        """Act on one axis: on the whole of it, on its blocks, or on the blocks inside each head."""
        if not words.terms:
            return tensor
        actions = [self._element(term) for term in words.terms]
        if all(g is None or g.is_identity for g in actions):
            return tensor
        if len(words.terms) == 1 and actions[0] is not None:
            if not self.in_type:
                return actions[0].act(tensor, axis)
            (term,) = words.terms
            primal = self._element(replace(term, dual=False))
            assert primal is not None
            return primal.act_in_type(tensor, axis, dual=term.dual)
        if words.per_head:
            return self._act_inside_heads(tensor, axis, words, actions)
        sizes = [self.arch.term_size(term) for term in words.terms]
        blocks = tensor.split(sizes, dim=axis)
        return torch.cat([b if g is None else g.act(b, axis) for g, b in zip(actions, blocks)], dim=axis)

    def _act_inside_heads(self, tensor: Tensor, axis: int, words: Axis, actions: list[Element | None]) -> Tensor:
        """The blocks of each kv head on one axis: gather each block over the heads, act, and put it back."""
        space = self.arch.space_of(words.terms[0])
        assert isinstance(space, HeadSpace)
        n = space.n_kv_heads
        sizes = [self.arch.term_size(term) // n for term in words.terms]
        blocks = [b.flatten(axis, axis + 1) for b in tensor.unflatten(axis, (n, -1)).split(sizes, dim=axis + 1)]
        moved = [b if g is None else g.act(b, axis) for g, b in zip(actions, blocks)]
        return torch.cat([m.unflatten(axis, (n, -1)) for m in moved], dim=axis + 1).flatten(axis, axis + 1)

    def _element(self, term: Term) -> Element | None:
        space = self.arch.space_of(term)
        element = self.elements.get(space.name)
        if element is None:
            return None
        if term.name in self.arch.faces:
            element = element.face(self.arch.faces[term.name][1], queries=term.queries)
        elif term.name == space.name:
            element = element.head_order(kv=term.kv)
        if term.permutation_part:
            element = element.permutation_part()
        return element.dual() if term.dual else element

    def ones_factor(self, space: str) -> float:
        """What happens to the all-ones direction of a stream: permutations may turn it, rotations keep it."""
        element = self.elements.get(space)
        return 1.0 if element is None else element.ones_factor

    def rotates(self, space: str) -> bool:
        element = self.elements.get(space)
        return element is not None and element.rotates


Spaces = Mapping[str, Space | HeadSpace]


def inverse_elements(elements: Mapping[str, Element], spaces: Spaces) -> dict[str, Element]:
    """The elements that undo these: where experts are permuted, the element of a unit space belongs to the expert that
    comes to its place, and its inverse to the place that the expert goes back to."""
    return {name: g.inverse() for name, g in _relabelled(elements, _orders(elements, spaces, inverse=True)).items()}


def composed_elements(
    second: Mapping[str, Element], first: Mapping[str, Element], spaces: Spaces
) -> dict[str, Element]:
    """First the elements `first`, then `second`."""
    found = _relabelled(first, _orders(second, spaces))
    for name, g in second.items():
        found[name] = g @ found[name] if name in found else g
    return found


def _orders(elements: Mapping[str, Element], spaces: Spaces, *, inverse: bool = False) -> dict[str, str]:
    """For the units of experts that these elements permute: those whose place they take (or, inverse, go back to)."""
    found: dict[str, str] = {}
    for name, g in elements.items():
        space = spaces[name]
        if isinstance(space, Space) and space.members:
            index = (g.inverse() if inverse else g).tensors()["index"].tolist()
            found |= {member: space.members[e] for member, e in zip(space.members, index)}
    return found


def _relabelled(elements: Mapping[str, Element], sources: Mapping[str, str]) -> dict[str, Element]:
    """The elements where every unit space takes that of its source."""
    names = [*(n for n in elements if n not in sources), *(n for n, source in sources.items() if source in elements)]
    return {name: elements[sources.get(name, name)] for name in names}
