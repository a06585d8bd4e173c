"""The linear assignment problem: which unit, head or kv group of B goes to which of A.

Three solvers, each for its sizes. `assign` is exact, for a table of costs. `assign_grouped` permutes kv groups and
query heads inside them. `assign_certified` is for thousands of units, and every answer has a proven bound:

    maximise Σᵢ b[i, index(i)]   ≤   Σⱼ pⱼ + Σᵢ maxⱼ (b[i, j] − pⱼ)   for any prices p   (weak duality)

The right side costs one pass over the table, so each call says how far from the best it can be at most.
A large table is solved on few of its pairs: a short auction finds prices at which every row sees the columns
it can hope for, those pairs make a sparse problem that is solved exactly, its own prices are put to all pairs,
and pairs that beat them join. No pair beats them: the answer is optimal for the whole table. Passes over the
table run where it lives, in blocks of rows; the sparse part runs on the CPU in float64.

Rows are the reference A, columns the moving model B: an answer `p` says that B's unit `p[i]` lands on A's unit `i`.
Where the identity is among the best answers `assign` returns it, so equal heads stay where they are; any other exact
tie is broken by scipy, the same way every time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.shapes import Float, Int

EXACT_BELOW = 1024  # bench/assignment.py: the certified solver takes as long at this size, and scipy less below it


@dataclass(frozen=True)
class GroupedAssignment:
    """`groups[i]`: B's kv group that lands on A's group i. `heads[i]`: B's query head that lands on A's i."""

    groups: Int[Tensor, " g"]
    heads: Int[Tensor, " h"]
    cost: float


def assign(cost: Float[Tensor, "rows columns"]) -> Int[Tensor, " rows"]:
    """The permutation p that minimises Σᵢ cost[i, p(i)].

    >>> assign(torch.tensor([[4.0, 1.0], [2.0, 3.0]])).tolist()
    [1, 0]
    """
    if cost.ndim != 2 or cost.shape[0] != cost.shape[1]:
        raise IsobasinError(f"head costs have shape {tuple(cost.shape)}: expected a square table, one row per head")
    if not bool(torch.isfinite(cost).all()):
        raise IsobasinError("head costs hold NaN or infinity: look for non-finite weights in A and B")
    table = cost.detach().to("cpu", torch.float64)
    best = torch.as_tensor(_dense(table.numpy()))
    identity = torch.arange(len(best))
    if bool(table.diagonal().sum() <= table[identity, best].sum()):
        best = identity
    return best.to(cost.device)


def _dense(table: NDArray[Any], *, maximize: bool = False) -> NDArray[np.int64]:
    """scipy's solver for a dense table; scipy is imported when something is assigned, as a plain merge needs none."""
    from scipy.optimize import linear_sum_assignment

    return np.asarray(linear_sum_assignment(table, maximize=maximize)[1], dtype=np.int64)


def assign_grouped(cost: Float[Tensor, "rows columns"], n_groups: int) -> GroupedAssignment:
    """Permute kv groups, and query heads inside each group, at the least total cost.

    Query heads i of A and j of B may meet only if their whole groups do. For every pair of groups the best
    inner assignment is one number; the outer assignment over groups adds them up. Exact, since the inner
    problems do not touch each other. `n_groups = h` is plain `assign`, `n_groups = 1` is one shared kv head.
    """
    n_heads = cost.shape[0]
    if n_groups < 1 or n_heads % n_groups:
        raise IsobasinError(f"{n_heads} query heads in {n_groups} kv groups: expected a divisor of {n_heads}")
    size = n_heads // n_groups
    device, cost = cost.device, cost.detach().to("cpu", torch.float64)
    # blocks[g, k] holds the costs between the query heads of A's group g and of B's group k
    blocks = cost.reshape(n_groups, size, n_groups, size).transpose(1, 2)
    if size == 1:
        inner = torch.zeros(n_groups, n_groups, 1, dtype=torch.int64)
    else:
        inner = torch.stack([torch.stack([assign(block) for block in row]) for row in blocks])
    # gather, then sum: the total of each inner problem at its own optimum
    totals = blocks.gather(-1, inner.unsqueeze(-1)).sum((-1, -2))
    groups = assign(totals)
    rows = torch.arange(n_groups)
    heads = groups.unsqueeze(-1) * size + inner[rows, groups]
    return GroupedAssignment(groups.to(device), heads.reshape(-1).to(device), float(totals[rows, groups].sum()))


def best_permutation(benefit: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """The permutation of largest benefit; for wide layers one that is proven to be within a millionth of it."""
    if len(benefit) <= EXACT_BELOW:
        return assign(-benefit)
    return assign_certified(benefit, tolerance=1e-6, start=torch.arange(len(benefit))).index


# -- thousands of units ------------------------------------------------------------------------------------------

Indices = NDArray[np.int64]
Reals = NDArray[np.float64]

DENSE_BELOW = 512  # measured: here scipy's dense solver with its certificate and ours take the same time
SHORTLIST = 24  # columns a row looks at; a random table's best pairs lie far inside
BIDS = 2000  # rounds of the auction, at most
REST = 64  # one row in so many may end it without a column, fewer if it ends early: contests for the last are long
STEP = 0.005  # of what separates a row's second choice from its last: fine enough to rank, coarse enough to end


@dataclass(frozen=True)
class Assignment:
    """`index[i]`: the column of row i. `value` ≤ the optimum ≤ `bound`. `rounds`: problems solved and priced."""

    index: Int[Tensor, " n"]
    value: float
    bound: float
    rounds: int

    @property
    def gap(self) -> float:
        """At most this share of |value| is missing to the optimum."""
        if self.bound <= self.value:
            return 0.0
        return (self.bound - self.value) / abs(self.value) if self.value else math.inf

    def __str__(self) -> str:
        return (
            f"{len(self.index)} pairs worth {self.value:.6g}, within {self.gap:.1e} of the best, rounds: {self.rounds}"
        )


def assign_certified(
    benefit: Float[Tensor, "n n"],
    *,
    start: Int[Tensor, " n"] | None = None,
    tolerance: float = 1e-3,
    dense_below: int = DENSE_BELOW,
) -> Assignment:
    """The permutation that maximises Σᵢ benefit[i, index(i)], to within a proven `tolerance · |value|`.

    >>> assign_certified(torch.tensor([[4.0, 1.0], [2.0, 3.0]])).index.tolist()
    [0, 1]

    start: a permutation to begin at; the answer is never worse, and it is kept where it is proven good enough.
    tolerance: 0 asks for the optimum, up to the rounding of the table's own type.
    dense_below: tables of at most this many rows go to scipy's dense solver.
    """
    _check(benefit, start, tolerance)
    benefit, n = benefit.detach(), len(benefit)
    nothing = np.zeros(n)
    best, favourite = (found.cpu().numpy() for found in benefit.max(1))
    free = _bound(best.astype(np.float64), nothing, benefit.dtype)
    if np.bincount(favourite).max() == 1:  # nobody wants another's column: optimal, at prices of zero
        return _result(benefit, favourite, free, 0)
    if n <= dense_below:
        match = _dense(benefit.cpu().numpy(), maximize=True)
        prices = _dual_prices(_graph(benefit, np.arange(n * n)), match, nothing)
        return _result(benefit, match, upper_bound(benefit, prices), 1)
    shortlist = _Shortlist.of(benefit, np.arange(n), nothing)
    if start is None:
        return _solve_and_price(benefit, *_auction(benefit, shortlist), free, tolerance)
    begin = start.cpu().numpy()
    kept = _result(benefit, begin, upper_bound(benefit, _trial_prices(benefit, shortlist, begin)), 0)
    if kept.gap <= tolerance:
        return kept
    keys, prices = _auction(benefit, shortlist)
    return _solve_and_price(benefit, _united(keys, np.arange(n) * n + begin), prices, free, tolerance)


def upper_bound(benefit: Float[Tensor, "n n"], prices: Reals) -> float:
    """Σⱼ pⱼ + Σᵢ maxⱼ (b[i, j] − pⱼ): no permutation is worth more, whatever the prices."""
    return _bound(_row_maxima(benefit.detach(), prices), prices, benefit.dtype)


def _bound(best: Reals, prices: Reals, dtype: torch.dtype) -> float:
    """Rounding to the table's type keeps order, so each row's maximum is off by half a last digit at most."""
    charged = torch.as_tensor(prices).to(dtype).double().numpy()
    total = math.fsum([*charged, *best, *(np.abs(best) * torch.finfo(dtype).eps)])
    return math.nextafter(total, math.inf) if total else 0.0  # one rounding, upwards


def _solve_and_price(benefit: Tensor, keys: Indices, prices: Reals, bound: float, tolerance: float) -> Assignment:
    """Solve on the pairs `keys`, price all pairs, let those in that are better, again. Ends: pairs are finite."""
    rounds = 0
    while True:
        rounds += 1
        graph = _graph(benefit, keys)
        match = _match(graph, prices)
        prices = _dual_prices(graph, match, prices)
        best = _row_maxima(benefit, prices)
        bound = min(bound, _bound(best, prices, benefit.dtype))
        found = _result(benefit, match, bound, rounds)
        if found.gap <= tolerance:
            return found
        # twice as many each time: rows with many equally good columns would take them in by drops
        better = _better_pairs(benefit, graph, match, prices, best, SHORTLIST * 2 ** (rounds - 1))
        wider = _united(keys, better)
        if len(wider) == len(keys):
            return found
        keys = wider


def _better_pairs(benefit: Tensor, graph: "_Graph", match: Indices, prices: Reals, best: Reals, k: int) -> Indices:
    """The k best pairs of each row that at these prices prefers another column to its own."""
    own = _gather(benefit, np.arange(graph.n), match) - prices[match]
    rows = np.flatnonzero(best > own)
    if not len(rows):
        return rows
    columns = _best_columns(benefit, rows, prices, k)
    # `best` was rounded: ask again in float64, where no pair of the graph itself is preferred
    gain = _gather(benefit, rows[:, None], columns) - prices[columns]
    truly = gain.max(1) > own[rows] + 4 * _rounding(graph, prices)
    return _pairs(graph.n, rows[truly], columns[truly])


def _trial_prices(benefit: Tensor, shortlist: "_Shortlist", match: Indices) -> Reals:
    """Prices that show a given permutation to be good, if they exist on the shortlists and are found soon."""
    n = len(benefit)
    keys = _united(_pairs(n, np.arange(n), shortlist.columns), np.arange(n) * n + match)
    return _dual_prices(_graph(benefit, keys), match, np.zeros(n), limit=100)


@dataclass
class _Shortlist:
    """Per row its best columns when last looked at, their benefits, and what any other column gave at most.

    Prices only rise in an auction: a column off the list can not give more than `floor` until the row looks again.
    """

    columns: Indices
    weight: Reals
    floor: Reals

    @classmethod
    def of(cls, benefit: Tensor, rows: Indices, prices: Reals) -> "_Shortlist":
        columns = _best_columns(benefit, rows, prices, SHORTLIST)
        weight = _gather(benefit, rows[:, None], columns)
        return cls(columns, weight, (weight - prices[columns]).min(1))

    def look_again(self, benefit: Tensor, rows: Indices, prices: Reals) -> None:
        new = _Shortlist.of(benefit, rows, prices)
        self.columns[rows], self.weight[rows], self.floor[rows] = new.columns, new.weight, new.floor

    def step(self) -> float:
        ranked = np.sort(self.weight, 1)
        # from the second choice on: one planted partner far ahead says nothing about the contest for the others
        spread = float((ranked[:, max(0, ranked.shape[1] - 2)] - ranked[:, 0]).mean())
        return STEP * spread if spread > 0 else float(np.abs(ranked).max()) or 1.0


def _auction(benefit: Tensor, shortlist: _Shortlist) -> tuple[Indices, Reals]:
    """Pairs worth a closer look, and prices: all rows without a column bid at once.

    A row bids for its best column, up to where its second best is as good, plus a step.
    """
    n, prices, step = len(benefit), np.zeros(len(benefit)), shortlist.step()
    owner, match = np.full(n, -1), np.full(n, -1)
    for played in range(BIDS):
        rows = np.flatnonzero(match < 0)
        if len(rows) * BIDS <= n // REST * played:
            break
        gain = shortlist.weight[rows] - prices[shortlist.columns[rows]]
        choice, each = gain.argmax(1), np.arange(len(rows))
        first, floor = gain[each, choice], shortlist.floor[rows]
        if bool((first < floor).any()):
            shortlist.look_again(benefit, rows[first < floor], prices)
            continue
        gain[each, choice] = -np.inf
        column = shortlist.columns[rows, choice]
        bid = prices[column] + first - np.maximum(gain.max(1), floor) + step
        ranked = np.lexsort((-bid, column))  # stable: of equal bids the lowest row's wins
        won = ranked[np.diff(column[ranked], prepend=-1) > 0]
        winner, prize = rows[won], column[won]
        match[owner[prize][owner[prize] >= 0]] = -1
        owner[prize], match[winner], prices[prize] = winner, prize, bid[won]
    match = _completed(benefit, match, np.flatnonzero(owner < 0))
    return _united(_pairs(n, np.arange(n), shortlist.columns), np.arange(n) * n + match), prices


def _completed(benefit: Tensor, match: Indices, free: Indices) -> Indices:
    """The rows left over get the columns left over: exactly if few, in order if many. Some full match must exist."""
    rows = np.flatnonzero(match < 0)
    if 0 < len(rows) <= 2 * EXACT_BELOW:
        free = free[_dense(_gather(benefit, rows[:, None], free), maximize=True)]
    match = match.copy()
    match[rows] = free
    return match


@dataclass(frozen=True)
class _Graph:
    """Pairs (row, column) that may be matched, row by row, each row's columns ascending, and their benefits."""

    n: int
    rows: Indices
    columns: Indices
    weight: Reals


def _graph(benefit: Tensor, keys: Indices) -> _Graph:
    rows, columns = np.divmod(keys, len(benefit))
    return _Graph(len(benefit), rows, columns, _gather(benefit, rows, columns))


def _pairs(n: int, rows: Indices, columns: Indices) -> Indices:
    """Keys row · n + column of every row with each of its columns."""
    return (rows[:, None] * n + columns).ravel()


def _united(x: Indices, y: Indices) -> Indices:
    """The keys of both, ascending; `numpy.union1d` hashes them, which takes several times as long."""
    keys = np.sort(np.concatenate([x, y]))
    return keys[np.diff(keys, prepend=-1) > 0]


def _match(graph: _Graph, prices: Reals) -> Indices:
    """The best full match of the graph, exactly. At good prices most rows are settled before the search begins."""
    start = np.searchsorted(graph.rows, np.arange(graph.n + 1))
    gain = graph.weight - prices[graph.columns]
    cost = np.maximum.reduceat(gain, start[:-1])[graph.rows] - gain
    # the solver drops pairs of cost zero, so none is
    cost += max(float(cost.max()), 1e-300)
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    table = csr_matrix((cost, graph.columns, start), shape=(graph.n, graph.n))
    return np.asarray(min_weight_full_bipartite_matching(table)[1], dtype=np.int64)


def _dual_prices(graph: _Graph, match: Indices, prices: Reals, *, limit: int | None = None) -> Reals:
    """The least prices ≥ `prices` at which no row prefers another column of the graph to its own.

    p[j] ← max(p[j], p[match(i)] + b[i, j] − b[i, match(i)]) over rows i: longest paths, which end within n steps
    if and only if the match is optimal on the graph. Any prices give a valid bound, so stopping early is safe.
    """
    order = np.argsort(graph.columns, kind="stable")
    rows, columns, weight = graph.rows[order], graph.columns[order], graph.weight[order]
    start = np.searchsorted(columns, np.arange(graph.n))
    own = np.empty(graph.n)
    matched = columns == match[rows]
    own[rows[matched]] = weight[matched]
    rounding = _rounding(graph, prices)
    for _ in range(graph.n if limit is None else limit):
        higher = np.maximum(prices, np.maximum.reduceat((prices[match] - own)[rows] + weight, start))
        settled = float((higher - prices).max()) <= rounding
        prices = higher
        if settled:
            break
    return prices


def _rounding(graph: _Graph, prices: Reals) -> float:
    """What sums of a benefit and prices may be off by in float64."""
    return 1e-14 * float(np.abs(graph.weight).max() + np.abs(prices).max())


def _row_maxima(benefit: Tensor, prices: Reals) -> Reals:
    every = torch.arange(len(benefit), device=benefit.device)
    found = [block.amax(1) for block in _reduced(benefit, prices, every)]
    return torch.cat(found).double().cpu().numpy()


def _best_columns(benefit: Tensor, rows: Indices, prices: Reals, k: int) -> Indices:
    """The k columns that give each row most at these prices, best first."""
    k, found = min(k, len(benefit)), []
    asked = torch.as_tensor(rows, device=benefit.device)
    for block, some in zip(_reduced(benefit, prices, asked), _blocks(benefit, asked)):
        best = block.topk(k, 1)
        columns = best.indices
        even = torch.nonzero(best.values[:, 0] == best.values[:, -1])[:, 0]
        if len(even):  # dead units: equally good everywhere, so each looks somewhere else
            columns[even] = _scattered(block[even] == best.values[even, :1], some[even], k)
        found.append(columns.cpu())
    return torch.cat(found).numpy()


def _scattered(allowed: Tensor, rows: Tensor, k: int) -> Tensor:
    """k allowed columns per row; row r begins to look at column r · n/φ, modulo n."""
    n = allowed.shape[1]
    begin = (rows * (0.6180339887 * n)).long()
    away = (torch.arange(n, device=allowed.device) - begin[:, None]) % n
    return torch.where(allowed, away, n).topk(k, 1, largest=False).indices


def _blocks(benefit: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Rows in parts whose block of the table fits a processor's cache, or keeps an accelerator busy."""
    return rows.split(max(1, 2 ** (20 if benefit.device.type == "cpu" else 25) // len(benefit)))


def _reduced(benefit: Tensor, prices: Reals, rows: Tensor) -> Iterator[Tensor]:
    """benefit − prices of some rows, then of the next: each block is written over the one before."""
    charge = torch.as_tensor(prices).to(benefit)
    blocks = _blocks(benefit, rows)
    buffer = benefit.new_empty(len(blocks[0]), len(benefit))
    for some in blocks:
        block = buffer[: len(some)]
        yield torch.index_select(benefit, 0, some, out=block).sub_(charge)


def _gather(benefit: Tensor, rows: Indices, columns: Indices) -> Reals:
    where = torch.as_tensor(rows).to(benefit.device), torch.as_tensor(columns).to(benefit.device)
    return benefit[where].double().cpu().numpy()


def _result(benefit: Tensor, match: Indices, bound: float, rounds: int) -> Assignment:
    value = math.fsum(_gather(benefit, np.arange(len(match)), match))
    return Assignment(torch.as_tensor(match, device=benefit.device), value, max(bound, value), rounds)


def _check(benefit: Tensor, start: Tensor | None, tolerance: float) -> None:
    n = len(benefit)
    if benefit.ndim != 2 or n == 0 or benefit.shape[1] != n:
        raise IsobasinError(
            f"unit benefits have shape {tuple(benefit.shape)}: expected a square table, one row per unit"
        )
    if benefit.dtype not in (torch.float32, torch.float64):
        raise IsobasinError(f"unit benefits are {benefit.dtype}: expected float32 or float64, convert them first")
    if not all(bool(end.isfinite()) for end in torch.aminmax(benefit)):
        raise IsobasinError("unit benefits hold NaN or infinity: look for non-finite weights in A and B")
    if start is not None and not torch.equal(start.cpu().sort().values, torch.arange(n)):
        raise IsobasinError(f"start is not a permutation of {n} units: expected each of 0 … {n - 1} once")
    if not tolerance >= 0:
        raise IsobasinError(f"tolerance is {tolerance}: expected 0 (the optimum) or a small share of the value")
