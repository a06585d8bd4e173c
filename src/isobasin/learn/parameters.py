"""What learning moves: the parameters of every continuous group of a symmetry, and permutations of units.

Each group says how its elements depend on unconstrained parameters (`Group.parametrised`): rotations are the Cayley map
of a skew matrix after the rotation of the step before (`recentre`), GL is I + X, rotary pairs are exp(a + ib), unit
scales are exp(x). For all values of the parameters the element lies in the group, so the moved model computes the same
function.

A permutation is proposed where the loss and the weights both favour it; held-out data decide whether it is applied. For
the permutation matrix P of a space, ∂L/∂P[i, j] = ⟨∂L/∂row i of the moved tensor, its row j⟩, summed over the tensors
that P acts on: a straight-through gradient, accumulated between two checks. A proposal is the assignment of largest
overlap − η · gradient. It repairs units that the start paired wrongly; between models trained from independent seeds it
rarely lowers the barrier (docs/learning.md), so it is not the default.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from isobasin.alignment.problem import overlap
from isobasin.groups import Element, Monomial, Overlap
from isobasin.groups.assignment import best_permutation
from isobasin.learn.path_loss import ProcessGroup
from isobasin.symmetries import Symmetry

ETAS = (0.3, 1.0, 3.0)  # weights of the gradient in a proposal, relative to the overlap
Tensors = Mapping[str, Tensor]


class GroupParameters:
    """The parameters of every space of a symmetry that has a continuous group."""

    def __init__(self, part: Symmetry, device: torch.device | None = None) -> None:
        self.part = part
        self._groups = {space: group for space, group in part.groups.items() if group.parameter_shapes()}
        self._parameters = {
            space: {k: torch.zeros(s, device=device, requires_grad=True) for k, s in group.parameter_shapes().items()}
            for space, group in self._groups.items()
        }
        centres = {space: group.centre() for space, group in self._groups.items()}
        self._centres = {space: t.to(device, torch.float32) for space, t in centres.items() if t is not None}

    def tensors(self) -> list[Tensor]:
        """All parameters, for an optimizer."""
        return [tensor for tensors in self._parameters.values() for tensor in tensors.values()]

    def rotations(self) -> list[Tensor]:
        """The parameters that restart after every step."""
        return [tensor for space in self._centres for tensor in self._parameters[space].values()]

    @torch.no_grad()
    def recentre(self) -> None:
        """Let the parameters of rotations begin, at zero, from where these are now."""
        for space, centre in self._centres.items():
            centre.copy_(self._tensors(space)["matrix"])
            for tensor in self._parameters[space].values():
                tensor.zero_()

    def _tensors(self, space: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The tensors of an element, computed in this type."""
        group, centre = self._groups[space], self._centres.get(space)
        found = group.parametrised({name: tensor.to(dtype) for name, tensor in self._parameters[space].items()})
        return found if centre is None else group.from_centre(found, centre.to(dtype))

    def differentiable(self) -> dict[str, Element]:
        """The elements by space, for gradients to flow through."""
        return {space: group.differentiable(self._tensors(space)) for space, group in self._groups.items()}

    @torch.no_grad()
    def elements(self) -> dict[str, Element]:
        """The same as elements of their groups, in float64 on the CPU."""
        return {
            space: group.settled({name: t.cpu() for name, t in self._tensors(space, torch.float64).items()})
            for space, group in self._groups.items()
        }

    @torch.no_grad()
    def permute(self, moves: Mapping[str, Monomial]) -> None:
        """Permute the units of some spaces together with the scales they have learned."""
        for space, g in moves.items():
            for tensor in self._parameters.get(space, {}).values():
                tensor.copy_(tensor[g.index.to(tensor.device)])

    def state(self) -> dict[str, Tensor]:
        """All parameters and centres by name, as a resume file holds them."""
        held = {_state_name(space, k): t.detach() for space, ts in self._parameters.items() for k, t in ts.items()}
        return held | {f"centres.{space}": tensor for space, tensor in self._centres.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def _state_name(space: str, name: str) -> str:
    """`factors.ff0.x`, `factors.heads0:vo.x`, `factors.heads0:qk.parts.1.x`."""
    separator = ":" if name.startswith(("qk.", "vo.")) else "."
    return f"factors.{space}{separator}" + re.sub(r"\b(\d+)\.", r"parts.\1.", name)


def compose(learned: Mapping[str, Element], base: Mapping[str, Element]) -> dict[str, Element]:
    """learned ∘ base; spaces without a learned element keep the base."""
    return {name: learned[name] @ g if name in learned else g for name, g in base.items()}


class PermutationProposals:
    """Proposals for the spaces of a symmetry whose units can be permuted, from gradients since the last check."""

    def __init__(self, part: Symmetry, processes: ProcessGroup) -> None:
        self._part, self._processes = part, processes
        permuted = [n for n, space in part.arch.spaces.items() if space.permutes and space.role != "experts"]
        self._groups = {name: group for name, group in part.groups.items() if name in permuted}
        self._tensors = {name: _tensors_with(part, name) for name in self._groups}
        self._grads: dict[str, Tensor] = {}

    @property
    def spaces(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def accumulate(self, grads: Tensors) -> None:
        """Add these gradients of the moved tensors, where a permuted space acts on the tensor."""
        for name in {n for names in self._tensors.values() for n in names if n in grads}:
            # In place: a CUDA graph adds to the same memory at every replay.
            self._grads.setdefault(name, torch.zeros_like(grads[name])).add_(grads[name])

    def reset(self) -> None:
        for gradient in self._grads.values():
            gradient.zero_()

    def proposals(self, a: Tensors, moved: Tensors) -> Iterator[dict[str, Monomial]]:
        """Permutations (with signs) of all these spaces together, for each weight of the gradient."""
        # Summed over processes, so that all of them make the same proposals.
        grads = {name: self._processes.all_reduce_sum(self._grads[name]) for name in sorted(self._grads)}
        for eta in ETAS:
            each = {name: self._proposal(name, a, moved, grads, eta) for name in self._groups}
            found = {name: g for name, g in each.items() if g is not None and not g.is_identity}
            if found:
                yield found

    def _proposal(self, space: str, a: Tensors, moved: Tensors, grads: Tensors, eta: float) -> Monomial | None:
        names = [n for n in self._tensors[space] if n in grads]
        if not names:
            return None
        identity, arch = self._groups[space].identity(), self._part.arch
        weights = overlap(arch, space, a, moved, names, identity)
        gradient = overlap(arch, space, grads, moved, names, identity)
        size = eta * _norm(weights) / max(_norm(gradient), 1e-30)
        benefit = {
            sign: weights.permuted + sign * weights.self_dual - size * (gradient.permuted + sign * gradient.self_dual)
            for sign in ((1.0, -1.0) if arch.spaces[space].signs else (1.0,))
        }
        best = torch.stack(list(benefit.values())).amax(0)
        index = best_permutation(best).cpu()
        rows = torch.arange(len(index))
        positive = benefit[1.0].cpu()[rows, index] >= best.cpu()[rows, index]
        return Monomial(index, torch.where(positive, 1.0, -1.0).to(torch.float64))


def _tensors_with(part: Symmetry, space: str) -> tuple[str, ...]:
    """The tensors with an axis in this space."""
    arch = part.arch
    return tuple(
        name
        for name, pattern in arch.tensors.items()
        if not pattern.buffer
        and space in {arch.space_of(term).name for axis in pattern.roles[0].axes for term in axis.terms}
    )


def _norm(found: Overlap) -> float:
    return float((found.self_dual + found.permuted).norm())
