"""What learning moves: the parameters of every continuous group of a symmetry.

Each group says how its elements depend on unconstrained parameters (`Group.parametrised`): rotations are the Cayley map
of a skew matrix, GL is I + X, rotary pairs are exp(a + ib), unit scales are exp(x). For all values of the parameters
the element lies in the group, so the moved model computes the same function.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from isobasin.groups import Element
from isobasin.symmetries import Symmetry


class GroupParameters:
    """The parameters of every space of a symmetry that has a continuous group."""

    def __init__(self, part: Symmetry, device: torch.device | None = None) -> None:
        self.part = part
        self._groups = {space: group for space, group in part.groups.items() if group.parameter_shapes()}
        self._parameters = {
            space: {k: torch.zeros(s, device=device, requires_grad=True) for k, s in group.parameter_shapes().items()}
            for space, group in self._groups.items()
        }

    def tensors(self) -> list[Tensor]:
        """All parameters, for an optimizer."""
        return [tensor for tensors in self._parameters.values() for tensor in tensors.values()]

    def differentiable(self) -> dict[str, Element]:
        """The elements by space, for gradients to flow through."""
        return {
            space: group.differentiable(group.parametrised(self._parameters[space]))
            for space, group in self._groups.items()
        }

    @torch.no_grad()
    def elements(self) -> dict[str, Element]:
        """The same as elements of their groups, in float64 on the CPU."""
        found = {}
        for space, group in self._groups.items():
            doubled = {name: tensor.double() for name, tensor in self._parameters[space].items()}
            found[space] = group.element({name: t.cpu() for name, t in group.parametrised(doubled).items()})
        return found

    def state(self) -> dict[str, Tensor]:
        """All parameters by name, as a resume file holds them."""
        return {_state_name(space, k): t.detach() for space, ts in self._parameters.items() for k, t in ts.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for space, tensors in self._parameters.items():
            for name, tensor in tensors.items():
                tensor.copy_(state[_state_name(space, name)])


def _state_name(space: str, name: str) -> str:
    """`factors.ff0.x`, `factors.heads0:vo.x`, `factors.heads0:qk.parts.1.x`."""
    separator = ":" if name.startswith(("qk.", "vo.")) else "."
    return f"factors.{space}{separator}" + re.sub(r"\b(\d+)\.", r"parts.\1.", name)


def compose(learned: Mapping[str, Element], base: Mapping[str, Element]) -> dict[str, Element]:
    """learned ∘ base; spaces without a learned element keep the base."""
    return {name: learned[name] @ g if name in learned else g for name, g in base.items()}
