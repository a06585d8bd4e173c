"""The same alignment on the CPU and on an accelerator: the same numbers, and how long each took.

python bench/device.py [--device cuda] [--quick] [-o results.json]
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from isobasin.alignment.align import Alignment, align
from isobasin.alignment.matchers import WeightMatching
from isobasin.weights import load
from synthetic import SMALL, write_llama

MEDIUM = {"d": 2048, "layers": 4, "heads": 32, "kv": 8, "ff": 512, "vocab": 1000}


def timed(a: Path, b: Path, device: str) -> tuple[Alignment, float]:
    start = time.perf_counter()
    found = align(load(b), to=load(a), matcher=WeightMatching(scope="all-attention"), device=torch.device(device))
    return found, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Alignment on two devices, side by side.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=None)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place, sizes = Path(folder), SMALL if arguments.quick else MEDIUM
        a = write_llama(place / "a", **sizes, seed=1)
        for label, noise_of in (("related", 1), ("unrelated", None)):
            b = write_llama(place / "b", **sizes, seed=2, noise_of=noise_of)
            timed(a, b, arguments.device)  # warm up
            (there, fast), (here, slow) = timed(a, b, arguments.device), timed(a, b, "cpu")
            same = there.head_permutation == here.head_permutation
            gap = abs(there.distance_after - here.distance_after) / here.distance_after
            rows.append(
                {"pair": label, "cpu_s": slow, "device_s": fast, "ratio": slow / fast, "gap": gap, "same": same}
            )
            print(
                f"{label:10s} cpu {slow:7.2f} s   {arguments.device} {fast:7.2f} s   {slow / fast:6.1f} ×   "
                f"distance differs by {gap:.1e}, permutations equal: {same}",
                flush=True,
            )
    if arguments.output:
        facts = {
            "command": " ".join(["python", "bench/device.py", *sys.argv[1:]]),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
            "threads": torch.get_num_threads(),
            "rows": rows,
        }
        arguments.output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
