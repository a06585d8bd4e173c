"""Commands on checkpoints of up to billions of weights: seconds, memory, and the ratio to a plain merge of the pair.

    python bench/scale.py [--shape small|medium|large|7b] [--device cuda] [--rows merge,fingerprint] [-o results.json]

Three Llama-shaped bfloat16 checkpoints are made: A, a scrambled copy of A, and an unrelated model. Every row is a
process of its own, start-up included. On the processor compare the columns `cpu` (user and system time over all
threads) and `M` (its ratio to `merge --no-align` in the same run): wall time depends on what else runs.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from isobasin.symmetries.transform import scramble
from isobasin.weights import load
from synthetic import LARGE, SMALL, write_llama

SHAPES = {
    "tiny": SMALL,
    "small": {"d": 512, "layers": 4, "heads": 8, "kv": 2, "ff": 1408, "vocab": 8000},
    "medium": {"d": 1024, "layers": 8, "heads": 16, "kv": 4, "ff": 2816, "vocab": 16000},  # 123 million
    "large": LARGE,  # 852 million
    "7b": {"d": 4096, "layers": 32, "heads": 32, "kv": 32, "ff": 11008, "vocab": 32000},
}
ROWS = (
    "merge",
    "fingerprint",
    "align copy",
    "equal copy",
    "equal unrelated",
    "distance",
    "align unrelated",
)


def command(row: str, place: Path, device: list[str]) -> list[str]:
    a, copy, other, out = (str(place / name) for name in ("a", "copy", "other", "out"))
    b = copy if row.endswith("copy") else other
    written = ["-o", out, "--force", "--dtype", "bfloat16", "--json"]
    match row.partition(" ")[0]:
        case "merge":
            return ["merge", "--no-align", a, other, *written]
        case "align":
            return ["align", b, "--to", a, *written, *device]
        case "fingerprint":
            return ["fingerprint", a, "--json", *device]
        case name:
            return [name, a, b, "--json", *device]


def run(arguments: list[str], limit: float) -> dict[str, Any]:
    """Wall and processor seconds, peak resident memory in MB, the exit code, and what the command printed."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, "-m", "isobasin", *arguments], stdout=out, stderr=errors)
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.perf_counter() - start > limit:
                process.kill()
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        out.seek(0)
        errors.seek(0)
        text, problem = out.read(), errors.read()
    facts = json.loads(text) if text.strip().startswith("{") else {}
    return {
        "wall_s": round(seconds, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_rss_mb": round(used.ru_maxrss / 1024, 1),
        "peak_anon_mb": facts.get("peak_anon_mb"),
        "peak_device_mb": facts.get("peak_device_mb"),
        "exit": os.waitstatus_to_exitcode(status),
        "result": {key: facts[key] for key in ("distance_after", "verdict", "score", "fingerprint") if key in facts},
        "problem": problem.strip()[-400:] if not facts else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds and memory of the commands on large checkpoints.")
    parser.add_argument("--shape", choices=SHAPES, default="medium")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which a row is given up")
    parser.add_argument("--place", type=Path, default=None, help="where to put the checkpoints")
    parser.add_argument("-o", "--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = [] if arguments.device == "cpu" else ["--device", arguments.device]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.place, prefix="isobasin-bench-") as folder:
        place, start = Path(folder), time.perf_counter()
        for name, seed in (("a", 1), ("other", 2)):
            write_llama(place / name, **SHAPES[arguments.shape], seed=seed, device=arguments.device)
        here = torch.device(arguments.device)
        a = load(place / "a").resident(here)
        scramble(a, seed=3).apply(a, device=here).save(place / "copy", dtype="bfloat16")
        n_params = a.n_params
        del a
        print(f"{n_params / 1e6:.0f} million weights, made in {time.perf_counter() - start:.0f} s", flush=True)
        for row in arguments.rows.split(","):
            found = {"row": row, **run(command(row, place, device), arguments.limit)}
            shutil.rmtree(place / "out", ignore_errors=True)
            rows.append(found)
            base = next((each["cpu_s"] for each in rows if each["row"] == "merge"), None)
            found["ratio_to_merge"] = round(found["cpu_s"] / base, 2) if base else None
            print(
                f"{row:16s} wall {found['wall_s']:7.1f} s  cpu {found['cpu_s']:7.1f} s  {found['ratio_to_merge']} M   "
                f"host {found['peak_rss_mb']:.0f} MB (anonymous {found['peak_anon_mb']})   "
                f"device {found['peak_device_mb']} MB   {found['result']} {found['problem']}",
                flush=True,
            )
            if arguments.output:
                facts = {
                    "command": " ".join(["python", "bench/scale.py", *sys.argv[1:]]),
                    "torch": torch.__version__,
                    "device": torch.cuda.get_device_name() if here.type == "cuda" else platform.processor(),
                    "threads": torch.get_num_threads(),
                    "n_params": n_params,
                    "rows": rows,
                }
                arguments.output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
