"""Ours against the published recipe, kernel by kernel, side by side in one run: a table of ratios.

    python bench/kernels.py [--threads 2] [--quick]

* GL: Stage 2 for 32 heads, d = 1024, n = 64. The recipe (Adam on the full matrices, head by head) runs with
  each of four learning rates, a head stopped as soon as it is within 1e-4 of our objective; the fastest
  rate that brings all heads there counts. Ours includes its Grams and runs to its own end.
* H: 65,536 rotary pairs. Brent's method runs on a subsample, and its time is scaled up; as the table states.
* Stage 1: peak memory of the costs of a layer of width 4096 with 32 heads of 128.
"""

import argparse
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor

from isobasin.alignment.head_cost import product_cost
from isobasin.alignment.head_linear import align_linear, head_grams
from isobasin.alignment.head_rotary import align_rotary, rotary_objective
from isobasin.alignment.reference import align_linear_recipe, align_rotary_recipe
from isobasin.groups.assignment import assign

RATES = (1e-2, 3e-2, 3e-3, 1e-3)  # the likeliest first: a slower one need not run to its end
CLOSE = 1e-4
PATIENCE = 40.0  # seconds for a learning rate, where none has brought all heads to the goal yet


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seconds(work: Callable[[], object], repeat: int = 1) -> float:
    """The shortest of `repeat` runs."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def head_pairs(kind: str, h: int, d: int, n: int) -> list[Tensor]:
    """Entries of size d^-½; B unrelated, or A with 10 % noise moved by an element of the condition named."""
    q, k, q2, k2 = (normal(h, d, n, seed=i) / d**0.5 for i in range(4))
    if kind == "unrelated":
        return [q, k, q2, k2]
    left, right = (torch.linalg.qr(normal(h, n, n, seed=s)).Q for s in (4, 5))
    u = left * torch.logspace(-0.5, 0.5, n, base=float(kind.split()[-1]), dtype=torch.float64) @ right
    return [q, k, (q + 0.1 * q2) @ u.mT, (k + 0.1 * k2) @ torch.linalg.inv(u)]


def bench_linear(kind: str, h: int, d: int, n: int) -> None:
    heads = head_pairs(kind, h, d, n)
    ours = align_linear(head_grams(*heads))
    time_ours = seconds(lambda: align_linear(head_grams(*heads)), repeat=3)
    goal, best = ours.objective * (1 + CLOSE), (0, -PATIENCE, 0.0)
    for rate in RATES:
        reached, took = run_recipe(heads, rate, goal, limit=-best[1] if best[0] == h else PATIENCE)
        print(f"  recipe, rate {rate:g}: {took:.1f} s, {reached} of {h} heads within {CLOSE:g}", flush=True)
        best = max(best, (reached, -took, rate))
    reached, minus, rate = best
    words = f"rate {rate:g}" if reached == h else f"at least: no rate brought all heads there, the best {reached}"
    row(f"GL, {kind}, h={h} d={d} n={n}", time_ours, -minus, -minus / time_ours, words)
    print(f"  ours: {int(ours.steps.max())} steps at most, converged: {bool(ours.converged.all())}", flush=True)


def run_recipe(heads: list[Tensor], rate: float, goal: Tensor, limit: float) -> tuple[int, float]:
    """Heads that reached their goal, and the time; given up between heads after `limit` seconds."""
    start, reached = time.perf_counter(), 0
    for i in range(len(goal)):
        one = [x[i : i + 1] for x in heads]
        found = align_linear_recipe(*one, learning_rate=rate, target=goal[i : i + 1])
        reached += int((found.objective <= goal[i]).sum())
        if time.perf_counter() - start > limit:
            break
    return reached, time.perf_counter() - start


def bench_rotary(pairs: int, sample: int) -> None:
    q_a, k_a, q_b, k_b = (torch.complex(normal(pairs, 64, seed=i), normal(pairs, 64, seed=9 + i)) for i in range(4))
    q_b, k_b = q_a * (1 + 1j) + q_b, k_a * (0.5 + 0.5j) + k_b
    square = [x.abs().square().sum(-1) for x in (q_b, k_b)]
    constants = square[0], square[1], (q_a.conj() * q_b).sum(-1), (k_a.conj() * k_b).sum(-1)
    found = align_rotary(*constants)
    ours = seconds(lambda: align_rotary(*constants), repeat=5)
    some = tuple(x[:sample] for x in constants)
    brent = seconds(lambda: align_rotary_recipe(*some)) * pairs / sample
    excess = rotary_objective(align_rotary_recipe(*some), *some) - found.objective[:sample]
    words = f"Brent on {sample} pairs, time scaled; its worst excess {float(excess.max()):.1e}"
    row(f"H, {pairs} pairs", ours, brent, brent / ours, words)


def bench_stage_one(h: int, d: int, n: int) -> None:
    heads = [normal(h, d, n, seed=i, dtype=torch.float32) for i in range(4)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took = seconds(lambda: assign(product_cost(*heads)))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inputs = sum(x.numel() * 4 for x in heads) / 2**20
    print(f"Stage 1, h={h} d={d} n={n}: {took:.1f} s, peak resident {after / 1024:.0f} MB in all")
    risen = (after - before) / 1024
    print(f"  ({inputs:.0f} MB are Q and K of A and B in float32; the peak rose by {risen:.0f} MB)")


def row(name: str, ours: float, recipe: float, ratio: float, words: str) -> None:
    print(f"{name:44s} {ours:9.3f} s {recipe:9.2f} s {ratio:8.1f} x   {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratios of our kernels to the published recipe's.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"threads {arguments.threads}, torch {torch.__version__}, float64")
    h, d, n = (4, 128, 16) if arguments.quick else (32, 1024, 64)
    bench_stage_one(*((4, 256, 16) if arguments.quick else (32, 4096, 128)))
    print(f"{'kernel':44s} {'ours':>11s} {'recipe':>11s} {'ratio':>10s}")
    bench_rotary(2048 if arguments.quick else 65536, 500 if arguments.quick else 2000)
    for kind in ("noise 10 %, condition 4", "noise 10 %, condition 30", "unrelated"):
        bench_linear(kind, h, d, n)


if __name__ == "__main__":
    main()
