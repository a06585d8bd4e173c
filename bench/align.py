"""`isobasin align` compared with a linear merge of the same checkpoints by mergekit: time and anonymous memory.

    python bench/align.py [--quick] [--deep] [--scope model] [--place FOLDER]

Two Llama-shaped bfloat16 checkpoints of 1.7 GB each (d = 2048, 16 layers, 32 query and 8 kv heads): one pair is
related (10 % of noise between them), one is not. mergekit 0.1.5 lives in an environment of its own, made on the first
run. Everything runs as a process of its own, one after the other; peaks of anonymous memory are sampled from outside.
`--deep` adds the related pair with twice the layers; `--scope model` aligns everything, not attention alone.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from peers import measured, mergekit
from synthetic import LARGE, SMALL, write_llama

RECIPE = """models:
  - model: {a}
    parameters: {{weight: 0.5}}
  - model: {b}
    parameters: {{weight: 0.5}}
merge_method: linear
dtype: bfloat16
"""


def compare(label: str, a: Path, b: Path, place: Path, program: Path, scope: str) -> None:
    out = place / "out"
    isobasin = str(Path(sys.executable).with_name("isobasin"))
    align = [
        isobasin,
        "align",
        str(b),
        "--to",
        str(a),
        "-o",
        str(out),
        "--dtype",
        "bfloat16",
        "--scope",
        scope,
        "--json",
    ]
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
    parser = argparse.ArgumentParser(description="isobasin align compared with a mergekit linear merge.")
    parser.add_argument("--quick", action="store_true", help="tiny checkpoints, to see that it runs")
    parser.add_argument("--deep", action="store_true", help="also a pair with twice the layers")
    parser.add_argument("--scope", default="all-attention", choices=("all-attention", "model"))
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
            compare(label, a, b, place, program, arguments.scope)
        if arguments.deep:
            twice = sizes | {"layers": 2 * sizes["layers"]}
            a = write_llama(place / "a", **twice, seed=1)
            b = write_llama(place / "b", **twice, seed=2, noise_of=1)
            compare("related, twice the layers", a, b, place, program, arguments.scope)


if __name__ == "__main__":
    main()
