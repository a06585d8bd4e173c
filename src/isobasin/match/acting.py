"""Elements acting on the tensors of a sweep, in the tensors' own type.

`Action` computes in float64 whatever it is given. A sweep over a wide model holds float32, decides which unit goes
where, and is measured again by the next one: there float32 is enough, and half the memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from isobasin.action import Action
from isobasin.arch import Architecture, Axis
from isobasin.groups import Element, Matrix, Monomial


@dataclass(frozen=True)
class Acting:
    """The elements of some spaces; those of stream and units act in the type of the tensor, heads as ever."""

    arch: Architecture
    elements: Mapping[str, Element]

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """One tensor after the elements have acted; the tensor itself where none of them touches it."""
        for axis, words in enumerate(self.arch.tensors[name].roles[0].axes):
            tensor = self.act(tensor, axis, words)
        return tensor

    def act(self, tensor: Tensor, axis: int, words: Axis) -> Tensor:
        if len(words.terms) != 1:
            return Action(self.arch, self.elements).act(tensor, axis, words)
        term = words.terms[0]
        element = self.elements.get(self.arch.space_of(term).name)
        if element is None or element.is_identity:
            return tensor
        if isinstance(element, Matrix) and element.orthogonal and not term.magnitude:
            value = element.value.to(tensor)  # orthogonal: its own dual
            return (
                tensor @ value.mT
                if axis == tensor.dim() - 1
                else (tensor.movedim(axis, -1) @ value.mT).movedim(-1, axis)
            )
        if isinstance(element, Monomial):
            moved = tensor.index_select(axis, element.index.to(tensor.device))
            scale = element.scale.to(tensor).reshape([-1 if k == axis else 1 for k in range(tensor.dim())])
            return moved if term.magnitude else moved.div_(scale) if term.dual else moved.mul_(scale)
        return Action(self.arch, self.elements).act(tensor, axis, words)
