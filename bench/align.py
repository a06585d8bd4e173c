"""`isobasin align` beside a plain linear merge of the same two checkpoints by mergekit: time and anonymous memory.

    python bench/align.py [--quick] [--deep] [--place FOLDER]

Two Llama-shaped bfloat16 checkpoints of 1.7 GB each (d = 2048, 16 layers, 32 query and 8 kv heads): one pair is
related (10 % of noise between them), one is not. mergekit 0.1.5 lives in an environment of its own, made on the first
run. Everything runs as a process of its own, one after the other; peaks of anonymous memory are sampled from outside.
`--deep` adds the related pair with twice the layers.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from synthetic import LARGE, SMALL, write_llama

HERE = Path(__file__).resolve().parents[1]
MERGEKIT = HERE / ".venv-mergekit"
RECIPE = """models:
  - model: {a}
    parameters: {{weight: 0.5}}
  - model: {b}
    parameters: {{weight: 0.5}}
merge_method: linear
dtype: bfloat16
"""


def mergekit() -> Path:
    """The program, installed with pip where it is not there yet."""
    program = MERGEKIT / "bin/mergekit-yaml"
    if not program.exists():
        print("installing mergekit 0.1.5 in an environment of its own …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(MERGEKIT)], check=True)
        pip = [str(MERGEKIT / "bin/python"), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "-c", str(HERE / "constraints.txt"), "torch"], check=True)
        subprocess.run([*pip, "-c", str(HERE / "constraints.txt"), "mergekit==0.1.5"], check=True)
    return program


def measured(name: str, command: list[str], out: Path) -> tuple[float, float]:
    """Wall time and peak anonymous memory (MB) of a command; its output folder is removed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = [0]
    watcher = threading.Thread(target=_watch, args=(process, peak))
    watcher.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - start
    watcher.join()
    if process.returncode or not (out / "config.json").exists():
        sys.exit(f"{name} failed:\n{errors}")
    shutil.rmtree(out)
    return seconds, peak[0] / 1024


def _watch(process: "subprocess.Popen[str]", peak: list[int]) -> None:
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        try:
            lines = status.read_text().splitlines()
            peak[0] = max([peak[0], *(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))])
        except OSError:
            return
        time.sleep(0.01)


def compare(label: str, a: Path, b: Path, place: Path, program: Path) -> None:
    out = place / "out"
    isobasin = str(Path(sys.executable).with_name("isobasin"))
    align = [isobasin, "align", str(b), "--to", str(a), "-o", str(out), "--dtype", "bfloat16", "--json"]
    (place / "merge.yml").write_text(RECIPE.format(a=a, b=b))
    merge = [str(program), str(place / "merge.yml"), str(out), "--quiet"]
    theirs, their_peak = measured("mergekit", merge, out)
    ours, our_peak = measured("isobasin align", align, out)
    print(
        f"{label:28s} {ours:8.1f} s {our_peak:7.0f} MB   {theirs:8.1f} s {their_peak:7.0f} MB   "
        f"{ours / theirs:6.2f} × time {our_peak / their_peak:6.2f} × memory",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="isobasin align beside a mergekit linear merge.")
    parser.add_argument("--quick", action="store_true", help="tiny checkpoints, to see that it runs")
    parser.add_argument("--deep", action="store_true", help="also a pair with twice the layers")
    parser.add_argument("--place", type=Path, default=None, help="where to put the checkpoints (about 7 GB)")
    arguments = parser.parse_args()
    sizes = SMALL if arguments.quick else LARGE
    needed = 10**8 if arguments.quick else (13 if arguments.deep else 7) * 10**9
    with tempfile.TemporaryDirectory(dir=arguments.place, prefix="isobasin-bench-") as folder:
        place = Path(folder)
        if shutil.disk_usage(place).free < needed:
            sys.exit(f"{place}: {needed / 1e9:.0f} GB are needed here; name another --place")
        program = mergekit()
        print(f"{'pair':28s} {'isobasin align':>21s}   {'mergekit linear':>21s}   ratios")
        a = write_llama(place / "a", **sizes, seed=1)
        for label, noise_of in (("related (10 % noise)", 1), ("unrelated", None)):
            b = write_llama(place / "b", **sizes, seed=2, noise_of=noise_of)
            compare(label, a, b, place, program)
        if arguments.deep:
            twice = sizes | {"layers": 2 * sizes["layers"]}
            a = write_llama(place / "a", **twice, seed=1)
            b = write_llama(place / "b", **twice, seed=2, noise_of=1)
            compare("related, twice the layers", a, b, place, program)


if __name__ == "__main__":
    main()
