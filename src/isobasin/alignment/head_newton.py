"""Newton's method inside GL(n): minimise the distance between two heads over U, from their Grams alone.

    L(U) = ‖Q_A − Q_B Uᵀ‖² + ‖K_A − K_B U⁻¹‖²
         = ‖A‖² + tr(U G_Q Uᵀ) + tr(U⁻ᵀ G_K U⁻¹) − 2 tr(C_Q Uᵀ) − 2 tr(C_K U⁻¹)

A step multiplies from the left, U ← (I + X) U. With V = U⁻¹, g_q = U G_Q Uᵀ, g_k = Vᵀ G_K V, c_q = C_Q Uᵀ,
c_k = C_K V and E = c_kᵀ − g_k:

    −½ gradient     R    = c_q − c_kᵀ − g_q + g_k
    ½ Hessian       H(X) = X g_q + g_k X − E Xᵀ − Xᵀ E
    Gauss–Newton    X g_q + g_k X = R, a Sylvester equation: one division in the eigenbases of g_k and g_q

Newton's equation H(X) = R is solved by conjugate gradients preconditioned by the Sylvester solve at an earlier U
(its eigenbases are renewed every few steps: they cost more than anything else). The first
iterate points along the Gauss–Newton step, and related heads need little more; unrelated heads, where
Gauss–Newton alone crawls for hundreds of steps, get true Newton steps. Each iteration costs n³ per head,
whatever d is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.shapes import Bool, Float, Int

MAX_INNER = 30  # conjugate gradient steps for one Newton step; more buy nothing far from the minimum
MAX_HALVINGS = 40
FORCING = 0.3  # how far the residual of Newton's equation must fall at first; the gradient's root later
MEMORY = 8  # pairs that L-BFGS remembers
CANCEL = 0.99  # how much of the diagonal blocks the coupling may take away
RENEW = 3  # Newton steps that share one pair of eigenbases


@dataclass(frozen=True)
class Grams:
    """What L and its starts know of a head: G = XᵀX of B (`_a`: of A) and C = X_AᵀX_B, for X = Q and K."""

    gq: Float[Tensor, "*batch n n"]
    cq: Float[Tensor, "*batch n n"]
    gk: Float[Tensor, "*batch n n"]
    ck: Float[Tensor, "*batch n n"]
    gq_a: Float[Tensor, "*batch n n"]
    gk_a: Float[Tensor, "*batch n n"]

    @property
    def norm_a(self) -> Float[Tensor, "*batch"]:
        """‖Q_A‖² + ‖K_A‖²: what L would be if B were zero."""
        return (self.gq_a + self.gk_a).diagonal(dim1=-2, dim2=-1).sum(-1)

    def __getitem__(self, heads: Tensor) -> "Grams":
        """Some heads of a batch, by ascending index; all of them are the batch itself, not a copy."""
        return self if len(heads) == len(self.gq) else Grams(*(block[heads] for block in self.blocks))

    @property
    def blocks(self) -> tuple[Tensor, ...]:
        return self.gq, self.cq, self.gk, self.ck, self.gq_a, self.gk_a


@dataclass(frozen=True)
class HeadDescent:
    """Where the descent ended, per head; `gradient` is relative to the size of the gradient's own terms."""

    u: Float[Tensor, "batch n n"]
    objective: Float[Tensor, " batch"]
    gradient: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]
    steps: Int[Tensor, " batch"]

    def replaced(self, heads: Tensor, other: "HeadDescent", which: Bool[Tensor, " some"]) -> "HeadDescent":
        """This, with some heads as another run left them."""
        return HeadDescent(
            self.u.index_copy(0, heads, other.u[which]),
            self.objective.index_copy(0, heads, other.objective[which]),
            self.gradient.index_copy(0, heads, other.gradient[which]),
            self.converged.index_copy(0, heads, other.converged[which]),
            self.steps.index_copy(0, heads, other.steps[which]),
        )


@dataclass(frozen=True)
class _Frame:
    """L around the current U: R = −½ gradient, the blocks of H, and the size that R is measured by."""

    rhs: Tensor
    gq: Tensor
    gk: Tensor
    e: Tensor
    size: Tensor

    def __getitem__(self, heads: Tensor) -> "_Frame":
        if bool(heads.all()):
            return self
        return _Frame(self.rhs[heads], self.gq[heads], self.gk[heads], self.e[heads], self.size[heads])


def linear_objective(grams: Grams, u: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """L(U) from the Grams; infinite where U is singular. Near zero it cancels: see `linear_residual`."""
    v = torch.linalg.inv_ex(u).inverse
    squares = _dot(u @ grams.gq, u) + _dot(grams.gk @ v, v)
    value = grams.norm_a + squares - 2 * (_dot(grams.cq, u) + _dot(grams.ck, v.mT))
    return torch.nan_to_num(value, nan=torch.inf, posinf=torch.inf)


def descend(
    grams: Grams, u: Float[Tensor, "batch n n"], *, max_steps: int, tol: float, related: bool = True
) -> HeadDescent:
    """Descend from `u`, each head for as long as it needs.

    A head has converged when its relative gradient is at most `tol`, or when the fall that its next step promises is
    below the rounding of L. `related` heads take the Sylvester equation as the model of their Hessian, others the
    paired one.
    """
    value, floor = linear_objective(grams, u), 4 * torch.finfo(u.dtype).eps * grams.norm_a
    gradient = torch.full_like(value, torch.inf)
    done, steps = torch.zeros_like(value, dtype=torch.bool), torch.zeros_like(value, dtype=torch.int64)
    left = torch.arange(len(u), device=u.device)
    kind = _Sylvester if related else _Paired
    model: _Sylvester | _Paired | None = None
    for step in range(max_steps + 1):
        frame = _frame(grams[left], u[left])
        gradient = gradient.index_copy(0, left, _norm(frame.rhs) / frame.size)
        ready = gradient[left] <= tol
        done, left, frame = done.index_fill(0, left[ready], True), left[~ready], frame[~ready]
        if not len(left):
            break
        model = kind.of(frame) if model is None or step % RENEW == 0 else model[~ready]
        x = _newton_step(frame, model, forcing=gradient[left].sqrt().clamp(max=FORCING))
        promise = _dot(frame.rhs, x)
        ready = promise <= floor[left]
        done = done.index_fill(0, left[ready], True)
        going = ~ready & (steps[left] < max_steps)
        left, x, promise, model = left[going], x[going], promise[going], model[going]
        if not len(left):
            break
        new, new_value, moved, _ = _line_search(grams[left], u[left], value[left], x, promise)
        u, value = u.index_copy(0, left, new), value.index_copy(0, left, new_value)
        steps = steps.index_add(0, left, moved.long())
        # nothing lower along a direction of descent: rounding is in the way
        left, model = left[moved], model[moved]
        if not len(left):
            break
    return HeadDescent(u, value, gradient, done, steps)


def approach(grams: Grams, u: Float[Tensor, "batch n n"], *, max_steps: int = 30, tol: float = 2e-3) -> Tensor:
    """Go most of the way in float32; where that did not go down (a badly conditioned head), stay at `u`."""
    half = [x.to(torch.float32) for x in (*grams.blocks, u)]
    there = _quasi_newton_descent(Grams(*half[:-1]), half[-1], max_steps, tol).to(u.dtype)
    lower = linear_objective(grams, there) < linear_objective(grams, u)
    return torch.where(_wide(lower), there, u)


def _quasi_newton_descent(grams: Grams, u: Tensor, max_steps: int, tol: float) -> Tensor:
    """Quasi-Newton steps (L-BFGS in the frame of U), which cost a gradient each.

    Far from the minimum the Hessian is not worth solving for; a rough model of it at the start is where the
    quasi-Newton matrices begin.
    """
    out, left = u, torch.arange(len(u), device=u.device)
    value, frame = linear_objective(grams, u), _frame(grams, u)
    model = _Paired.of(frame)
    memory: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(max_steps):
        going = _norm(frame.rhs) > tol * frame.size
        if not bool(going.any()):
            break
        if not bool(going.all()):
            left, u, value, frame, model = left[going], u[going], value[going], frame[going], model[going]
            memory = [(s[going], y[going], rho[going]) for s, y, rho in memory]
        x = _quasi_newton(frame.rhs, model, memory)
        uphill = _dot(frame.rhs, x) <= 0
        x = torch.where(_wide(uphill), model.solve(frame.rhs), x) if bool(uphill.any()) else x
        u, value, moved, t = _line_search(grams[left], u, value, x, _dot(frame.rhs, x))
        out = out.index_copy(0, left, u)
        if not bool(moved.any()):
            break
        new = _frame(grams[left], u)
        s, y = _wide(t) * x, frame.rhs - new.rhs
        curvature = _dot(s, y)
        memory = [*memory[1 - MEMORY :], (s, y, torch.where(curvature > 0, 1 / curvature, 0))]
        # a head that found nothing lower is at rest as far as this method can tell
        frame = _Frame(torch.where(_wide(moved), new.rhs, 0), new.gq, new.gk, new.e, new.size)
    return out


def _quasi_newton(rhs: Tensor, model: "_Paired", memory: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The two-loop recursion of L-BFGS; a pair without curvature has weight zero and drops out."""
    q, weights = rhs, []
    for s, y, rho in reversed(memory):
        weights.append(rho * _dot(s, q))
        q = q - _wide(weights[-1]) * y
    x = model.solve(q)
    for (s, y, rho), weight in zip(memory, reversed(weights)):
        x = x + _wide(weight - rho * _dot(y, x)) * s
    return x


def _frame(grams: Grams, u: Tensor) -> _Frame:
    v = torch.linalg.inv_ex(u).inverse
    gq, gk = u @ grams.gq @ u.mT, v.mT @ grams.gk @ v
    cq, ck = grams.cq @ u.mT, (grams.ck @ v).mT
    size = _norm(gq) + _norm(gk) + _norm(cq) + _norm(ck)
    return _Frame(cq - ck - gq + gk, gq, gk, ck - gk, size.clamp_min(torch.finfo(u.dtype).tiny))


@dataclass(frozen=True)
class _Sylvester:
    """Solves X g_q + g_k X = R by one division in the eigenbases of g_k and g_q."""

    basis_q: Tensor
    basis_k: Tensor
    divisor: Tensor

    @staticmethod
    def of(frame: _Frame) -> "_Sylvester":
        values_q, basis_q = torch.linalg.eigh(frame.gq)
        values_k, basis_k = torch.linalg.eigh(frame.gk)
        divisor: Tensor = values_k.unsqueeze(-1) + values_q.unsqueeze(-2)
        floor = torch.finfo(divisor.dtype).eps * divisor.amax((-1, -2), keepdim=True)
        return _Sylvester(basis_q, basis_k, divisor.clamp_min(floor))

    def solve(self, rhs: Tensor) -> Tensor:
        out: Tensor = self.basis_k @ (self.basis_k.mT @ rhs @ self.basis_q / self.divisor) @ self.basis_q.mT
        return out

    def __getitem__(self, heads: Tensor) -> "_Sylvester":
        if bool(heads.all()):
            return self
        return _Sylvester(self.basis_q[heads], self.basis_k[heads], self.divisor[heads])


@dataclass(frozen=True)
class _Paired:
    """Solves H(X) = R as if g_q, g_k and E were diagonal in one basis: x_ij then meets only x_ji.

    For heads that have little in common E is no small thing: on antisymmetric X it all but cancels g_q and g_k, and
    what is left, c_q and c_k, is far smaller than the Sylvester equation believes. The basis is that of the
    symmetric part of c_q + c_kᵀ, which is all of it where no rotation of U helps any more.
    """

    basis: Tensor
    own: Tensor  # a_j + b_i, for the diagonals a of g_q and b of g_k
    cross: Tensor  # e_i + e_j

    @staticmethod
    def of(frame: _Frame) -> "_Paired":
        c = frame.rhs + 2 * frame.e + frame.gq + frame.gk
        basis = torch.linalg.eigh((c + c.mT) / 2).eigenvectors
        a, b, e = ((basis * (m @ basis)).sum(-2) for m in (frame.gq, frame.gk, frame.e))
        own: Tensor = a.unsqueeze(-2) + b.unsqueeze(-1)
        bound = CANCEL * (own * own.mT).sqrt()
        cross = (e.unsqueeze(-2) + e.unsqueeze(-1)).clamp(-bound, bound)  # what keeps it positive definite
        return _Paired(basis, own, cross)

    def solve(self, rhs: Tensor) -> Tensor:
        r = self.basis.mT @ rhs @ self.basis
        x = (self.own.mT * r + self.cross * r.mT) / (self.own * self.own.mT - self.cross.square())
        out: Tensor = self.basis @ x @ self.basis.mT
        return out

    def __getitem__(self, heads: Tensor) -> "_Paired":
        return self if bool(heads.all()) else _Paired(self.basis[heads], self.own[heads], self.cross[heads])


def _newton_step(frame: _Frame, model: _Sylvester | _Paired, forcing: Tensor) -> Tensor:
    """H(X) = R by preconditioned conjugate gradients."""

    def hessian(x: Tensor) -> Tensor:
        out: Tensor = x @ frame.gq + frame.gk @ x - frame.e @ x.mT - x.mT @ frame.e
        return out

    return _conjugate_gradients(hessian, model.solve, frame.rhs, forcing)


def _conjugate_gradients(
    hessian: Callable[[Tensor], Tensor], solve: Callable[[Tensor], Tensor], rhs: Tensor, forcing: Tensor
) -> Tensor:
    """Per head until the residual has fallen by `forcing`, or up to the first direction without curvature."""
    x, residual, p = torch.zeros_like(rhs), rhs, solve(rhs)
    product = first = _dot(residual, p)
    alive = first > 0
    for inner in range(MAX_INNER):
        hp = hessian(p)
        curvature = _dot(p, hp)
        good = alive & (curvature > 0)
        if inner == 0:  # no curvature to trust along Gauss-Newton's own direction: take that step as it is
            x = torch.where(_wide(alive & ~good), p, x)
        alpha = _wide(torch.where(good, product / curvature, 0))
        x, residual = x + alpha * p, residual - alpha * hp
        z = solve(residual)
        new = _dot(residual, z)
        alive = good & (new > forcing**2 * first)
        if not bool(alive.any()):
            break
        p = z + _wide(torch.where(alive, new / product, 0)) * p
        product = new
    return x


def _line_search(
    grams: Grams, u: Tensor, value: Tensor, x: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Bool[Tensor, " batch"], Tensor]:
    """(I + tX) U with the largest t = 1, ½, ¼ … that lowers L enough and keeps the sign of the determinant.

    Along X the slope of L is −2 ⟨R, X⟩; enough is a ten-thousandth of it (Armijo).
    """
    identity = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    out, out_value, length = u, value, torch.zeros_like(value)
    t, left = 1.0, torch.arange(len(u), device=u.device)
    for _ in range(MAX_HALVINGS):
        factor = identity + t * x[left]
        trial = factor @ u[left]
        trial_value = linear_objective(grams[left], trial)
        accept = (trial_value < value[left] - 2e-4 * t * slope[left]) & (torch.linalg.slogdet(factor).sign > 0)
        done = left[accept]
        out = out.index_copy(0, done, trial[accept])
        out_value = out_value.index_copy(0, done, trial_value[accept])
        length = length.index_fill(0, done, t)
        left, t = left[~accept], t / 2
        if not len(left):
            break
    moved = torch.ones(len(u), dtype=torch.bool, device=u.device).index_fill(0, left, False)
    return out, out_value, moved, length


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum((-1, -2))


def _norm(x: Tensor) -> Tensor:
    return x.square().sum((-1, -2)).sqrt()


def _wide(x: Tensor) -> Tensor:
    return x.unsqueeze(-1).unsqueeze(-1)
