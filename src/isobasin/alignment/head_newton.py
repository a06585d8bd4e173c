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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.shapes import Bool, Float, Int

MAX_INNER = 30  # conjugate gradient steps for one Newton step; more buy nothing far from the minimum
MAX_HALVINGS = 40
FORCING = 0.3  # how far the residual of Newton's equation must fall at first; the gradient's root later
MEMORY = 8  # pairs that L-BFGS remembers
CANCEL = 0.99  # how much of the diagonal blocks the coupling may take away
WELL = 1e3  # condition of the Hessian up to which float32 solves Newton's equation
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

    def kept(self, heads: Bool[Tensor, " batch"]) -> "Grams":
        """The heads that are marked."""
        return self if bool(heads.all()) else Grams(*(block[heads] for block in self.blocks))

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
    """L around a U: its value, R = −½ gradient, the blocks of H, and the size that R is measured by."""

    u: Tensor
    value: Tensor
    rhs: Tensor
    gq: Tensor
    gk: Tensor
    e: Tensor
    size: Tensor

    def __getitem__(self, heads: Bool[Tensor, " batch"]) -> "_Frame":
        return self if bool(heads.all()) else _Frame(*(part[heads] for part in vars(self).values()))

    def with_heads(self, heads: Int[Tensor, " some"], other: "_Frame") -> "_Frame":
        """This, with some heads as in `other`."""
        if len(heads) == len(self.u):
            return other
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Frame(*(x.index_copy(0, heads, y) for x, y in pairs)) if len(heads) else self

    @property
    def gradient(self) -> Tensor:
        """The gradient, relative to the size of its own terms."""
        return _norm(self.rhs) / self.size


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
    frame, floor = _frame(grams, u), 4 * torch.finfo(u.dtype).eps * grams.norm_a
    found_u, value, gradient = u, frame.value, frame.gradient
    done, steps = torch.zeros_like(value, dtype=torch.bool), torch.zeros_like(value, dtype=torch.int64)
    left = torch.arange(len(u), device=u.device)
    kind = _Sylvester if related else _Paired
    model: _Sylvester | _Paired | None = None
    for step in range(max_steps + 1):
        ready = frame.gradient <= tol
        done, left, frame, grams = (
            done.index_fill(0, left[ready], True),
            left[~ready],
            frame[~ready],
            grams.kept(~ready),
        )
        if not len(left):
            break
        model = kind.of(frame) if model is None or step % RENEW == 0 else model[~ready]
        x = _newton_step(frame, model, forcing=frame.gradient.sqrt().clamp(max=FORCING))
        promise = _dot(frame.rhs, x)
        ready = promise <= floor[left]
        done = done.index_fill(0, left[ready], True)
        going = ~ready & (steps[left] < max_steps)
        left, x, promise, model, frame = left[going], x[going], promise[going], model[going], frame[going]
        grams = grams.kept(going)
        if not len(left):
            break
        frame, length = _line_search(grams, frame, x, promise)
        moved = length > 0
        found_u, value = found_u.index_copy(0, left, frame.u), value.index_copy(0, left, frame.value)
        gradient = gradient.index_copy(0, left, frame.gradient)
        steps = steps.index_add(0, left, moved.long())
        # nothing lower along a direction of descent: rounding is in the way
        left, model, frame, grams = left[moved], model[moved], frame[moved], grams.kept(moved)
        if not len(left):
            break
    return HeadDescent(found_u, value, gradient, done, steps)


def approach(grams: Grams, u: Float[Tensor, "batch n n"], *, max_steps: int = 30, tol: float = 1e-3) -> Tensor:
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
    frame = _frame(grams, u)
    model = _Paired.of(frame)
    memory: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(max_steps):
        going = frame.gradient > tol
        if not bool(going.any()):
            break
        if not bool(going.all()):
            left, frame, model, grams = left[going], frame[going], model[going], grams.kept(going)
            memory = [(s[going], y[going], rho[going]) for s, y, rho in memory]
        x = _quasi_newton(frame.rhs, model, memory)
        slope = _dot(frame.rhs, x)
        if bool((slope <= 0).any()):
            x = torch.where(_wide(slope <= 0), model.solve(frame.rhs), x)
            slope = _dot(frame.rhs, x)
        before = frame.rhs
        frame, t = _line_search(grams, frame, x, slope)
        out = out.index_copy(0, left, frame.u)
        if not bool(t.any()):
            break
        s, y = _wide(t) * x, before - frame.rhs
        curvature = _dot(s, y)
        memory = [*memory[1 - MEMORY :], (s, y, torch.where(curvature > 0, 1 / curvature, 0))]
        # a head that found nothing lower is at rest as far as this method can tell
        frame = replace(frame, rhs=torch.where(_wide(t > 0), frame.rhs, 0))
    return out


def _quasi_newton(rhs: Tensor, model: "_Paired", memory: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The two-loop recursion of L-BFGS; a pair without curvature has weight zero and drops out. The model is scaled to
    the curvature that the last step met."""
    q, weights = rhs, []
    for s, y, rho in reversed(memory):
        weights.append(rho * _dot(s, q))
        q = q - _wide(weights[-1]) * y
    x = model.solve(q)
    if memory:
        s, y, rho = memory[-1]
        x = _wide(torch.where(rho > 0, 1 / (rho * _dot(y, model.solve(y))), 1)) * x
    for (s, y, rho), weight in zip(memory, reversed(weights)):
        x = x + _wide(weight - rho * _dot(y, x)) * s
    return x


def _frame(grams: Grams, u: Tensor) -> _Frame:
    v = torch.linalg.inv_ex(u).inverse
    gq, gk = u @ grams.gq @ u.mT, v.mT @ grams.gk @ v
    cq, ck = grams.cq @ u.mT, (grams.ck @ v).mT
    value = grams.norm_a + _trace(gq) + _trace(gk) - 2 * (_trace(cq) + _trace(ck))
    size = _norm(gq) + _norm(gk) + _norm(cq) + _norm(ck)
    return _Frame(
        u,
        torch.nan_to_num(value, nan=torch.inf, posinf=torch.inf),
        cq - ck - gq + gk,
        gq,
        gk,
        ck - gk,
        size.clamp_min(torch.finfo(u.dtype).tiny),
    )


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

    @property
    def condition(self) -> float:
        """The largest over the smallest curvature."""
        return float((self.divisor.amax((-1, -2)) / self.divisor.amin((-1, -2))).max())

    def to(self, dtype: torch.dtype) -> "_Sylvester":
        return _Sylvester(*(part.to(dtype) for part in vars(self).values()))

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

    @property
    def condition(self) -> float:
        """The largest over the smallest curvature."""
        least = (self.own * self.own.mT - self.cross.square()) / (self.own + self.own.mT)
        return float((self.own.amax((-1, -2)) / least.amin((-1, -2))).max())

    def to(self, dtype: torch.dtype) -> "_Paired":
        return _Paired(*(part.to(dtype) for part in vars(self).values()))

    def __getitem__(self, heads: Tensor) -> "_Paired":
        return self if bool(heads.all()) else _Paired(self.basis[heads], self.own[heads], self.cross[heads])


def _newton_step(frame: _Frame, model: "_Sylvester | _Paired", forcing: Tensor) -> Tensor:
    """H(X) = R by preconditioned conjugate gradients; in float32 where the Hessian is well conditioned, since the next
    gradient is computed in full again."""
    dtype = torch.float32 if model.condition < WELL else frame.rhs.dtype
    gq, gk, e, rhs = (part.to(dtype) for part in (frame.gq, frame.gk, frame.e, frame.rhs))

    def hessian(x: Tensor) -> Tensor:
        out: Tensor = x @ gq + gk @ x - e @ x.mT - x.mT @ e
        return out

    x = _conjugate_gradients(hessian, model.to(dtype).solve, rhs, forcing.to(dtype))
    return x.to(frame.rhs.dtype)


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


def _line_search(grams: Grams, frame: _Frame, x: Tensor, slope: Tensor) -> tuple[_Frame, Tensor]:
    """(I + tX) U with the largest t = 1, ½, ¼ … that lowers L enough and keeps the sign of the determinant, and t;
    a head for which there is none stays, with t = 0.

    Along X the slope of L is −2 ⟨R, X⟩; enough is a ten-thousandth of it (Armijo).
    """
    out, length, t = frame, torch.zeros_like(frame.value), 1.0
    size, waiting = _norm(x), torch.ones_like(frame.value, dtype=torch.bool)
    for _ in range(MAX_HALVINGS):
        some = torch.nonzero(waiting).flatten()
        before, step = frame[waiting], t * x[some]
        trial = _frame(grams.kept(waiting), before.u + step @ before.u)
        accept = trial.value < before.value - 2e-4 * t * slope[some]
        if bool((far := accept & (t * size[some] >= 1)).any()):  # a shorter step can not reach a singular factor
            identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
            accept[far] = torch.linalg.slogdet(identity + step[far]).sign > 0
        out = out.with_heads(some[accept], trial[accept])
        length = length.index_fill(0, some[accept], t)
        waiting, t = waiting.index_fill(0, some[accept], False), t / 2
        if not bool(waiting.any()):
            break
    return out, length


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum((-1, -2))


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _norm(x: Tensor) -> Tensor:
    return x.square().sum((-1, -2)).sqrt()


def _wide(x: Tensor) -> Tensor:
    return x.unsqueeze(-1).unsqueeze(-1)
