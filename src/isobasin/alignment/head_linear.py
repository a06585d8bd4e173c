"""Stage 2 for GL(n): the U that brings head B closest to A, `Q_B Uᵀ ≈ Q_A`, `K_B U⁻¹ ≈ K_A` (or V and O).

Starts in closed form, with both signs of det U (which descent can not change), then Newton (`newton`), and the
best of everything seen. All heads are one batch: shapes are (*batch, d, n) and (*batch, n, n).

* Orthogonal start: U = polar(C_Q + C_K). Descended from, as are the starts of the other determinant, only where
  the balanced start leaves more than a quarter of ‖A‖²: unrelated heads have many local minima, related heads
  have one that counts.
* Balanced start: choose coordinates F in which Q and K of a head have the same diagonal Gram Σ. From
  Q = Y_q R_q, K = Y_k R_k and the SVD R_q R_kᵀ = Z Σ Wᵀ, F⁻¹ = R_k⁻¹ W Σ^½ and Fᵀ = R_q⁻¹ Z Σ^½. What is
  left of the group there is O(n), so U = F_A⁻¹ polar(F_A C_Q F_Bᵀ + F_A⁻ᵀ C_K F_B⁻¹) F_B: exact for a
  planted element.

`align_linear` needs Grams only, and loses eps · cond² of the head; `align_linear_factors` has the matrices
and loses eps · cond. `align_matrices` takes the first, and the second for the heads that need it.

Rank-deficient heads. Where a Gram of A or B is singular to rounding, U is not determined. Rule: such a head
is solved with the rows √δ I appended to the deficient side (Q or K) of both A and B, δ = 1e-12 of its largest
eigenvalue: what the weights do not determine is drawn to the identity and stays bounded. The result says so
per head (`deficient`), and its objective is that of the head itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from isobasin.alignment.head_newton import Grams, HeadDescent, approach, descend, linear_objective
from isobasin.errors import IsobasinError
from isobasin.groups.group import polar
from isobasin.shapes import Bool, Float, Int

Method = Literal["full", "orthogonal", "none"]

CLOSE = 0.05  # of ‖A‖²: below this no other start is worth a look
ORTHOGONAL = 0  # the first of the starts
SCREEN = 8  # steps after which only the best start goes on, beside the orthogonal one
WIDE = 64  # columns; from there on all starts end within 1.5e-4 of ‖A‖² on average (drawn heads, d 256, 1024)
AHEAD = 3e-3  # of ‖A‖²: a tenth of what wide heads fall from any start
MARGIN = 3e-4  # of ‖A‖²: ten times what is left to gain most of the way down; a start farther behind can not win
RIDGE = 1e-12
WELL = 1e-2  # diagonal ratio of a Cholesky factor above which a head is well conditioned
BAD = 1e5  # condition of a head, as its Cholesky factor shows it, beyond which Grams lose too many digits
RELATED = 0.25  # of ‖A‖²: what is left between heads that have found each other


@dataclass(frozen=True)
class LinearAlignment:
    """Per head: the element, L there, whether it is stationary, Newton steps, whether its rank was deficient."""

    u: Float[Tensor, "*batch n n"]
    objective: Float[Tensor, "*batch"]
    converged: Bool[Tensor, "*batch"]
    steps: Int[Tensor, "*batch"]
    deficient: Bool[Tensor, "*batch"]


def head_grams(
    q_a: Float[Tensor, "*batch d n"],
    k_a: Float[Tensor, "*batch d_k n"],
    q_b: Float[Tensor, "*batch d n"],
    k_b: Float[Tensor, "*batch d_k n"],
) -> Grams:
    """The Grams of heads given by their matrices, in float64."""
    q_a, k_a, q_b, k_b = (x.to(torch.float64) for x in (q_a, k_a, q_b, k_b))
    return Grams(q_b.mT @ q_b, q_a.mT @ q_b, k_b.mT @ k_b, k_a.mT @ k_b, q_a.mT @ q_a, k_a.mT @ k_a)


def linear_residual(q_a: Tensor, k_a: Tensor, q_b: Tensor, k_b: Tensor, u: Tensor) -> Float[Tensor, "*batch"]:
    """L(U) from the matrices themselves: accurate down to zero."""
    q_a, k_a, q_b, k_b = (x.to(torch.float64) for x in (q_a, k_a, q_b, k_b))
    square = (q_a - q_b @ u.mT).square().sum((-1, -2))
    return square + (k_a - k_b @ torch.linalg.inv_ex(u).inverse).square().sum((-1, -2))


def align_linear(grams: Grams, *, method: Method = "full", max_steps: int = 100, tol: float = 1e-8) -> LinearAlignment:
    """Minimise L over GL(n) ("full") or O(n) ("orthogonal"), or leave B alone ("none"), from Grams.

    Never worse than any of its starts, nor than the identity. `converged`: relative gradient at most `tol`.
    """
    batch = grams.gq.shape[:-2]
    grams = Grams(*(block.reshape(-1, *block.shape[-2:]).to(torch.float64) for block in grams.blocks))
    _require_finite(*grams.blocks)
    threshold = 16 * grams.gq.shape[-1] * torch.finfo(torch.float64).eps
    spectra = [_spectrum(g) for g in (grams.gq_a, grams.gk_a, grams.gq, grams.gk)]
    delta_q, delta_k, deficient = _ridges(spectra, threshold)
    rows_q, rows_k = _multiples(delta_q, grams.gq), _multiples(delta_k, grams.gk)
    q = [block + rows_q for block in (grams.gq, grams.cq, grams.gq_a)]
    k = [block + rows_k for block in (grams.gk, grams.ck, grams.gk_a)]

    def solve() -> _Solved:
        a, b = _balance_grams(q[2], k[2]), _balance_grams(q[0], k[0])
        inside = Grams(_diagonal(b.sigma), q[1] @ b.f.mT, _diagonal(b.sigma), k[1] @ b.inverse, q[2], k[2])
        return _solve(inside, a, b, a.f @ inside.cq + a.inverse.mT @ inside.ck, q[1] + k[1], max_steps, tol)

    def value(u: Tensor) -> Tensor:
        out: Tensor = linear_objective(grams, u).clamp_min(0)
        return out

    return _best(method, solve, value, q[1] + k[1], grams.norm_a, deficient, batch)


def align_linear_factors(
    q_a: Float[Tensor, "*batch d n"],
    k_a: Float[Tensor, "*batch d_k n"],
    q_b: Float[Tensor, "*batch d n"],
    k_b: Float[Tensor, "*batch d_k n"],
    *,
    method: Method = "full",
    max_steps: int = 100,
    tol: float = 1e-8,
) -> LinearAlignment:
    """`align_linear` for badly conditioned heads: balanced by QR and SVD, judged by the matrices."""
    batch = q_a.shape[:-2]
    plain = [x.reshape(-1, *x.shape[-2:]).to(torch.float64) for x in (q_a, k_a, q_b, k_b)]
    _require_finite(*plain)
    threshold = (max(q_a.shape[-2:]) * torch.finfo(torch.float64).eps) ** 2
    squares = [torch.linalg.svdvals(torch.linalg.qr(_with_rows(x, None), mode="r").R).square() for x in plain]
    delta_q, delta_k, deficient = _ridges(squares, threshold)
    qa, ka, qb, kb = (_with_rows(x, delta) for x, delta in zip(plain, (delta_q, delta_k) * 2))
    cross = qa.mT @ qb + ka.mT @ kb
    size = plain[0].square().sum((-1, -2)) + plain[1].square().sum((-1, -2))

    def solve() -> _Solved:
        (yqa, rqa), (yka, rka), (yqb, rqb), (ykb, rkb) = (torch.linalg.qr(x) for x in (qa, ka, qb, kb))
        a, b = _balance(rqa, rka), _balance(rqb, rkb)
        # the balanced matrices themselves, Y Z Σ^½ and Y W Σ^½: no inverse of a bad factor enters the Grams
        qa_flat, ka_flat, qb_flat, kb_flat = yqa @ a.left, yka @ a.right, yqb @ b.left, ykb @ b.right
        sigma = _diagonal(b.sigma)
        inside = Grams(sigma, qa.mT @ qb_flat, sigma, ka.mT @ kb_flat, qa.mT @ qa, ka.mT @ ka)
        return _solve(inside, a, b, qa_flat.mT @ qb_flat + ka_flat.mT @ kb_flat, cross, max_steps, tol)

    def value(u: Tensor) -> Tensor:
        return torch.nan_to_num(linear_residual(plain[0], plain[1], plain[2], plain[3], u), nan=torch.inf)

    return _best(method, solve, value, cross, size, deficient, batch)


def align_matrices(
    q_a: Float[Tensor, "h d n"],
    k_a: Float[Tensor, "h d_k n"],
    q_b: Float[Tensor, "h d n"],
    k_b: Float[Tensor, "h d_k n"],
    *,
    method: Method = "full",
    max_steps: int = 100,
    tol: float = 1e-8,
) -> LinearAlignment:
    """From Grams, and again from the matrices for the heads that Grams could not resolve. The descent runs on the
    processor: matrices of this size are too small for an accelerator.

    Columns that no row of these matrices reaches stay as they are, and where there are such the descent runs on the
    others alone: heads of 256 columns on a stream of 24 have at most 96."""
    reached = [q_a, k_a, q_b, k_b]
    if method == "full" and sum(x.shape[-2] for x in reached) < q_a.shape[-1]:
        basis = torch.linalg.qr(torch.cat([x.to("cpu", torch.float64) for x in reached], -2).mT).Q
        inner = [x.to("cpu", torch.float64) @ basis for x in reached]
        found = align_matrices(*inner, method=method, max_steps=max_steps, tol=tol)
        rest = torch.eye(q_a.shape[-1], dtype=basis.dtype) - basis @ basis.mT
        return replace(found, u=basis @ found.u @ basis.mT + rest, deficient=torch.ones_like(found.deficient))
    grams = Grams(*(block.cpu() for block in head_grams(q_a, k_a, q_b, k_b).blocks))
    found = align_linear(grams, method=method, max_steps=max_steps, tol=tol)
    ratios = [_diagonal_ratio(_cholesky(g)) for g in (grams.gq, grams.gk, grams.gq_a, grams.gk_a)]
    bad = found.deficient | ~(torch.stack(ratios).amin(0) * BAD > 1)
    if method != "full" or not bool(bad.any()):
        return found
    few = (x.cpu()[bad] for x in (q_a, k_a, q_b, k_b))
    some = align_linear_factors(*few, method=method, max_steps=max_steps, tol=tol)
    where = torch.nonzero(bad).flatten()
    pairs = ((found.u, some.u), (found.objective, some.objective), (found.converged, some.converged))
    parts = [
        x.index_copy(0, where, y) for x, y in (*pairs, (found.steps, some.steps), (found.deficient, some.deficient))
    ]
    return LinearAlignment(*parts)


@dataclass(frozen=True)
class _Balance:
    """Coordinates in which Q Fᵀ and K F⁻¹ have the Gram Σ; `left` = Z Σ^½ and `right` = W Σ^½."""

    f: Tensor
    inverse: Tensor
    sigma: Tensor
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class _Solved:
    """Candidates for U, the last of them what the descent reached, with its steps and its convergence."""

    candidates: list[Tensor]
    steps: Tensor
    converged: Tensor


def _balance(r_q: Tensor, r_k: Tensor) -> _Balance:
    z, sigma, w_t = torch.linalg.svd(r_q @ r_k.mT)
    root = sigma.sqrt().unsqueeze(-2)
    left, right = z * root, w_t.mT * root
    f = torch.linalg.solve_triangular(r_q, left, upper=True).mT
    return _Balance(f, torch.linalg.solve_triangular(r_k, right, upper=True), sigma, left, right)


def _balance_grams(gq: Tensor, gk: Tensor) -> _Balance:
    """The same from Grams: R G_k Rᵀ = Z Σ² Zᵀ for G_q = RᵀR, and F⁻¹ = Rᵀ Z Σ^{-½}.

    An eigenproblem instead of an SVD squares the condition number once more, so badly conditioned heads take the SVD.
    """
    r = _cholesky(gq)
    if not bool((_diagonal_ratio(r) > WELL).all() and (_diagonal_ratio(_cholesky(gk)) > WELL).all()):
        return _balance(r, _cholesky(gk))
    squares, z = torch.linalg.eigh(r @ gk @ r.mT)
    sigma = squares.clamp_min(torch.finfo(gq.dtype).tiny).sqrt()
    root = sigma.sqrt().unsqueeze(-2)
    left = z * root
    f = torch.linalg.solve_triangular(r, left, upper=True).mT
    return _Balance(f, r.mT @ (z / root), sigma, left, left)  # `right` serves the factors only


def _turns(matrix: Tensor) -> Tensor:
    """The closest orthogonal matrix, and the closest of the other determinant: (2, batch, n, n)."""
    left, _, right = torch.linalg.svd(matrix)
    other = torch.cat([left[..., :-1], -left[..., -1:]], dim=-1)  # the last singular direction counts least
    return torch.stack([left @ right, other @ right])


def _solve(
    grams: Grams, a: _Balance, b: _Balance, balanced: Tensor, cross: Tensor, max_steps: int, tol: float
) -> _Solved:
    """Descend from the starts, in coordinates where B is balanced: U = U' F_B."""
    start = a.inverse @ polar(balanced, iterate=True)
    related = linear_objective(grams, start) <= RELATED * grams.norm_a
    near, far = torch.nonzero(related).flatten(), torch.nonzero(~related).flatten()
    found = [(near, descend(grams[near], start[near], max_steps=max_steps, tol=tol))] if len(near) else []
    if len(far):
        starts = torch.cat([_turns(cross[far]) @ b.inverse[far], a.inverse[far] @ _turns(balanced[far])])
        solve = _from_leading_starts if start.shape[-1] >= WIDE else _race
        found.append((far, solve(grams[far], starts, max_steps, tol)))
    order = torch.argsort(torch.cat([heads for heads, _ in found]))
    u, steps, converged = (
        torch.cat([getattr(run, part) for _, run in found])[order] for part in ("u", "steps", "converged")
    )
    return _Solved([start @ b.f, u @ b.f], steps, converged)


def _race(grams: Grams, starts: Float[Tensor, "s batch n n"], max_steps: int, tol: float) -> HeadDescent:
    """A few steps from every start; most of the way from the best and the orthogonal one; then to the end.

    The latter is where the published recipe starts, so its minimum is never missed.
    """
    heads = torch.arange(starts.shape[1], device=starts.device)
    u, values = _approached(grams, starts, SCREEN)
    u, values = _approached(grams, torch.stack([u[ORTHOGONAL], u[values.argmin(0), heads]]), 30)
    best = values.argmin(0)
    first = descend(grams, u[best, heads], max_steps=max_steps, tol=tol, related=False)
    again = torch.nonzero(
        (best != ORTHOGONAL) & (values[ORTHOGONAL] <= first.objective + MARGIN * grams.norm_a)
    ).flatten()
    if not len(again):
        return first
    second = descend(grams[again], u[ORTHOGONAL, again], max_steps=max_steps, tol=tol, related=False)
    better = second.objective < first.objective[again]
    return first.replaced(again[better], second, better)


def _from_leading_starts(grams: Grams, starts: Float[Tensor, "s batch n n"], max_steps: int, tol: float) -> HeadDescent:
    """From the orthogonal start, and from the best of the others where that is clearly ahead: for wide heads, whose
    starts lead to minima within 1e-4 of ‖A‖² of each other."""
    values = torch.stack([linear_objective(grams, start) for start in starts])
    best = values.argmin(0)
    ahead = torch.nonzero(values.amin(0) < values[ORTHOGONAL] - AHEAD * grams.norm_a).flatten()
    run = _descended(grams, starts[ORTHOGONAL], max_steps, tol)
    if not len(ahead):
        return run
    other = _descended(grams[ahead], starts[best[ahead], ahead], max_steps, tol)
    better = other.objective < run.objective[ahead]
    return run.replaced(ahead[better], other, better)


def _descended(grams: Grams, start: Float[Tensor, "batch n n"], max_steps: int, tol: float) -> HeadDescent:
    return descend(grams, approach(grams, start), max_steps=max_steps, tol=tol, related=False)


def _approached(grams: Grams, starts: Float[Tensor, "s batch n n"], steps: int) -> tuple[Tensor, Tensor]:
    """Where some steps lead from every start of every head, and L there."""
    many = Grams(*(block.repeat(len(starts), 1, 1) for block in grams.blocks))
    u = approach(many, starts.flatten(0, 1), max_steps=steps)
    return u.reshape(starts.shape), linear_objective(many, u).reshape(starts.shape[:2])


def _best(
    method: Method,
    solve: Callable[[], _Solved],
    value: Callable[[Tensor], Tensor],
    cross: Tensor,
    size: Tensor,
    deficient: Tensor,
    batch: torch.Size,
) -> LinearAlignment:
    """The candidate of least L per head: the identity, both plain starts, the end of the descent."""
    candidates = [torch.eye(cross.shape[-1], dtype=cross.dtype, device=cross.device).expand_as(cross)]
    steps, converged = torch.zeros_like(deficient, dtype=torch.int64), torch.ones_like(deficient)
    if method not in ("full", "orthogonal", "none"):
        raise IsobasinError(f"method {method!r}: expected 'full', 'orthogonal' or 'none'")
    if method == "full":
        solved = solve()
        candidates, steps, converged = candidates + solved.candidates, solved.steps, solved.converged
    values = [value(u) for u in candidates]
    if method == "orthogonal" or (method == "full" and bool((values[-1] > CLOSE * size).any())):
        candidates.append(polar(cross, iterate=True))
        values.append(value(candidates[-1]))
    least, winner = torch.stack(values).min(0)
    u = torch.stack(candidates)[winner, torch.arange(len(winner), device=winner.device)]
    return LinearAlignment(
        u.reshape(*batch, *u.shape[-2:]), *(x.reshape(batch) for x in (least, converged, steps, deficient))
    )


def _spectrum(gram: Tensor) -> Tensor:
    """Eigenvalues of a Gram, or where none can be small the squares of its Cholesky diagonal, which show as much."""
    factor = torch.linalg.cholesky_ex(gram)
    squares = factor.L.diagonal(dim1=-2, dim2=-1).square()
    healthy = (factor.info == 0) & (_diagonal_ratio(factor.L.mT) > WELL)
    return squares if bool(healthy.all()) else torch.linalg.eigvalsh(gram)


def _diagonal_ratio(r: Tensor) -> Tensor:
    """Smallest over largest entry on the diagonal of a triangular factor: a cheap look at its condition."""
    diagonal = r.diagonal(dim1=-2, dim2=-1).abs()
    return diagonal.amin(-1) / diagonal.amax(-1).clamp_min(torch.finfo(r.dtype).tiny)


def _ridge(values_b: Tensor, values_a: Tensor, threshold: float, other: Tensor) -> tuple[Tensor, Tensor]:
    """δ per head (zero for full rank) and whether it is deficient, from the eigenvalues of its Grams.

    δ is a share of the largest eigenvalue; of the other side's (`other`) where this one is empty.
    """
    top_a, top_b = values_a.amax(-1), values_b.amax(-1)
    deficient = (values_a.amin(-1) <= threshold * top_a) | (values_b.amin(-1) <= threshold * top_b)
    top = torch.maximum(top_a, top_b)
    top = torch.where(top > 0, top, other)
    size = torch.where(top > 0, RIDGE * top, 1.0)
    return torch.where(deficient, size, 0.0), deficient


def _ridges(spectra: list[Tensor], threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """δ of Q and of K, and which heads are deficient in either; spectra of Q_A, K_A, Q_B, K_B."""
    q_a, k_a, q_b, k_b = spectra
    tops = [torch.maximum(x.amax(-1), y.amax(-1)) for x, y in ((q_a, q_b), (k_a, k_b))]
    delta_q, bad_q = _ridge(q_b, q_a, threshold, tops[1])
    delta_k, bad_k = _ridge(k_b, k_a, threshold, tops[0])
    return delta_q, delta_k, bad_q | bad_k


def _with_rows(matrix: Tensor, delta: Tensor | None) -> Tensor:
    """√δ I below the matrix (rows of zeros without δ, so that there are never fewer rows than columns)."""
    rows = torch.zeros_like(matrix[..., :1, 0]) if delta is None else delta.sqrt().unsqueeze(-1)
    return torch.cat([matrix, torch.diag_embed(rows.expand(*rows.shape[:-1], matrix.shape[-1]))], dim=-2)


def _multiples(delta: Tensor, like: Tensor) -> Tensor:
    return _diagonal(delta.unsqueeze(-1).expand(*delta.shape, like.shape[-1]))


def _diagonal(values: Tensor) -> Tensor:
    return torch.diag_embed(values)


def _cholesky(gram: Tensor) -> Tensor:
    """The upper R with RᵀR = G; what keeps G positive definite is the ridge."""
    factor: Tensor = torch.linalg.cholesky_ex(gram).L
    return factor.mT


def _require_finite(*blocks: Tensor) -> None:
    if not all(bool(torch.isfinite(block).all()) for block in blocks):
        raise IsobasinError("head matrices hold NaN or infinity: look for non-finite weights in A and B")
