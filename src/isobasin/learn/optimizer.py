"""The optimizer of group parameters: Adam, and for rotations a step of the same angle in every plane.

Adam scales each entry of a matrix by itself. In a skew matrix, where an entry turns a plane of two coordinates, the
result depends on the basis, and few planes turn as fast as they could. Here the momentum of a rotation is replaced by
the nearest orthogonal matrix, which for a skew matrix is skew as well: the direction of steepest descent if all planes
may turn by the same angle (Carlson et al. 2015; as Muon does for weights, Jordan et al. 2024). The chart of a rotation
restarts after every step (`GroupParameters.recentre`), so that this angle is the same wherever the element is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from isobasin.learn.parameters import GroupParameters

BETAS = (0.9, 0.95)  # of Adam
MOMENTUM = 0.9  # of rotations
ITERATIONS = 8
# x ← a x + b (x xᵀ) x + c (x xᵀ)² x: brings singular values from 0.002 … 1 into 0.7 … 1.2 in eight iterations.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan et al.
ANGLE_PER_PARAMETER = 4.0  # R = (I − S)⁻¹ (I + S) with S = X − Xᵀ turns by 4 for a small X of norm 1


class GroupOptimizer(torch.optim.Optimizer):
    """A step of learning rate `lr` for scales, angles and matrices, and of `turn` radians for rotations.

    `rate`, a number or a tensor that a CUDA graph reads at every replay, is the share of both that a step takes.
    """

    def __init__(self, parameters: GroupParameters, *, lr: float, turn: float, rate: float | Tensor) -> None:
        rotations = parameters.rotations()
        others = [p for p in parameters.tensors() if p.numel() and not any(p is r for r in rotations)]
        groups = [{"params": rotations, "size": turn / ANGLE_PER_PARAMETER}, {"params": others, "size": lr}]
        super().__init__([group for group in groups if group["params"]], {"lr": rate})
        for p in (*rotations, *others):
            self.state[p]["exp_avg"] = torch.zeros_like(p)
        for p in others:
            self.state[p] |= {"exp_avg_sq": torch.zeros_like(p), "steps": torch.zeros((), device=p.device)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            size = group["lr"] * group["size"]
            if moving and "steps" in self.state[moving[0]]:
                self._adam(moving, size)
            else:
                for p in moving:
                    self._turn(p, size)

    def _turn(self, p: Tensor, size: float | Tensor) -> None:
        average = self.state[p]["exp_avg"]
        average.lerp_(p.grad, 1 - MOMENTUM)
        p.sub_(size * orthogonalized(average.lerp(p.grad, 1 - MOMENTUM)))  # this gradient once more, as Nesterov

    def _adam(self, moving: list[Tensor], size: float | Tensor) -> None:
        states = [self.state[p] for p in moving]
        adam(
            moving,
            [p.grad for p in moving if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["steps"] for state in states],
            foreach=moving[0].is_cuda,
            capturable=moving[0].is_cuda,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=size,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )


def orthogonalized(x: Tensor) -> Tensor:
    """Nearly the orthogonal factor of a matrix, by products alone: its singular values become 0.7 to 1.2.

    Unlike an SVD this runs inside a CUDA graph. Singular values below 1/500 of the largest stay small.
    """
    a, b, c = COEFFICIENTS
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + torch.finfo(x.dtype).tiny)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
