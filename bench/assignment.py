"""Units of a wide layer assigned by scipy and by isobasin on the same table: time, memory and gaps, side by side.

python bench/assignment.py [--device cuda] [--n 14336] [--d 4096] [--kind related|half|unrelated] [--noise 0.5]
    [--tolerance 0.001] [--seed 0] [--repeat 3] [--no-scipy] [--json FILE]

The table holds ⟨a_in,i, b_in,j⟩ + ⟨a_out,i, b_out,j⟩ of two layers of n units on a stream of d: `related`, B is A
shuffled with noise of that share; `half`, only half its units are; `unrelated`, both are independent.
"""

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scipy
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from isobasin.groups.assignment import assign_certified

MIB = 2**20


def layers(n: int, d: int, kind: str, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Input and output weights of every unit, side by side: n × 2d for A and for B, of length √2."""
    rng = torch.Generator().manual_seed(seed)
    a, fresh = (torch.randn(n, 2 * d, generator=rng) / d**0.5 for _ in range(2))
    kept = {"related": n, "half": n // 2, "unrelated": 0}[kind]
    fresh[:kept] = (1 - noise**2) ** 0.5 * a[:kept] + noise * fresh[:kept]
    return a, fresh[torch.randperm(n, generator=rng)]


class PeakMemory:
    """The most memory this process held above what it held at first, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.first = self.peak = self._resident()
        self.done = threading.Event()
        self.watch = threading.Thread(target=self._look, daemon=True)

    @staticmethod
    def _resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _look(self) -> None:
        while not self.done.wait(0.005):
            self.peak = max(self.peak, self._resident())

    def __enter__(self) -> "PeakMemory":
        self.watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.watch.join()
        self.extra_mib = (max(self.peak, self._resident()) - self.first) / MIB


def measured(work: Callable[[], Any], device: torch.device) -> tuple[Any, dict[str, float]]:
    """What the work returned, its seconds, and the memory it took beyond the table: the host's, the device's."""
    on_device = device.type == "cuda"
    if on_device:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if on_device else 0
    with PeakMemory() as memory:
        start, used = time.perf_counter(), time.process_time()
        found = work()
        if on_device:
            torch.cuda.synchronize()
        seconds, used = time.perf_counter() - start, time.process_time() - used
    device_mib = (torch.cuda.max_memory_allocated() - held) / MIB if on_device else 0.0
    facts = {"seconds": seconds, "cpu_seconds": used, "extra_host_mib": memory.extra_mib}
    return found, {**facts, "extra_device_mib": device_mib}


def by_scipy(benefit: Tensor) -> dict[str, float]:
    table = benefit.cpu().numpy()
    (rows, columns), facts = measured(lambda: linear_sum_assignment(table, maximize=True), torch.device("cpu"))
    return {"value": float(table[rows, columns].astype("float64").sum()), **facts}


def by_isobasin(benefit: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """The median run of several, after a small one that warms the device up."""
    if benefit.device.type == "cuda":
        assign_certified(benefit[:600, :600].contiguous(), tolerance=arguments.tolerance)
    runs = []
    for _ in range(arguments.repeat):
        found, facts = measured(lambda: assign_certified(benefit, tolerance=arguments.tolerance), benefit.device)
        runs.append({"value": found.value, "certified_gap": found.gap, "rounds": found.rounds, **facts})
    again = measured(
        lambda: assign_certified(benefit, start=found.index, tolerance=arguments.tolerance), benefit.device
    )[1]
    middle = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
    # what one run leaves allocated the next one finds: the most of all runs is what it takes
    memory = {name: max(run[name] for run in runs) for name in ("extra_host_mib", "extra_device_mib")}
    times = {"seconds_all": [run["seconds"] for run in runs], "seconds_warm_start": again["seconds"]}
    return {**middle, **memory, **times}


def compared(arguments: argparse.Namespace) -> dict[str, Any]:
    a, b = layers(arguments.n, arguments.d, arguments.kind, arguments.noise, arguments.seed)
    device = torch.device(arguments.device)
    benefit = a.to(device) @ b.to(device).T
    del a, b
    facts: dict[str, Any] = {"table_mib": benefit.nbytes / MIB, "isobasin": by_isobasin(benefit, arguments)}
    if not arguments.no_scipy:
        facts["scipy"] = by_scipy(benefit)
        facts["ratio"] = facts["scipy"]["seconds"] / facts["isobasin"]["seconds"]
        facts["gap"] = 1 - facts["isobasin"]["value"] / facts["scipy"]["value"]
    return facts


def report(kind: str, facts: dict[str, Any]) -> None:
    for name in ("scipy", "isobasin"):
        if name in facts:
            one = facts[name]
            time_taken = f"{one['seconds']:8.3f} s ({one['cpu_seconds']:.3f} s of CPU)"
            memory = f"{one['extra_host_mib']:.0f} MiB host, {one['extra_device_mib']:.0f} MiB device"
            print(
                f"{kind:10s} {name:9s} {time_taken}   {memory} in addition to the table's {facts['table_mib']:.0f} MiB"
            )
    ours = facts["isobasin"]
    print(f"{kind:10s} certified gap {ours['certified_gap']:.1e}, rounds {ours['rounds']}", end="")
    print(f", from its own answer {ours['seconds_warm_start']:.3f} s")
    if "ratio" in facts:
        print(f"{kind:10s} {facts['ratio']:.1f} × faster, gap to scipy's optimum {facts['gap']:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Assignment of wide layers: scipy and isobasin on the same table.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, default=14336)
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--kind", choices=["related", "half", "unrelated"], default="unrelated")
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-scipy", action="store_true", help="ours alone: where scipy's copies do not fit")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    facts = compared(arguments)
    report(arguments.kind, facts)
    if arguments.json:
        asked = {name: value for name, value in vars(arguments).items() if name != "json"}
        place = {
            "command": " ".join(["python", "bench/assignment.py", *sys.argv[1:]]),
            "torch_version": torch.__version__,
            "scipy_version": scipy.__version__,
            "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        }
        arguments.json.write_text(json.dumps({**place, "asked": asked, **facts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
