"""`isobasin merge --no-align` compared with mergekit on the same two checkpoints: bits, time and anonymous memory.

    python bench/merge.py [--quick] [--slerp] [--repeat N] [--place FOLDER]

Two Llama-shaped bfloat16 checkpoints of 1.7 GB each (see `synthetic.py`), weights 0.7 and 0.3, mergekit 0.1.5 with its
defaults; the two programs run in turn. Then, on small ones: mergekit takes an aligned folder as its input, and
transformers loads the merged folder.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from isobasin.checkpoint import open_checkpoint
from peers import measured, mergekit
from synthetic import LARGE, SMALL, write_llama

LINEAR = """models:
  - model: {a}
    parameters: {{weight: 0.7}}
  - model: {b}
    parameters: {{weight: 0.3}}
merge_method: linear
dtype: bfloat16
"""
SLERP = """models:
  - model: {a}
  - model: {b}
base_model: {a}
parameters: {{t: 0.3}}
merge_method: slerp
dtype: bfloat16
"""


def isobasin() -> str:
    return str(Path(sys.executable).with_name("isobasin"))


def digest(folder: Path) -> dict[str, str]:
    """A hash of the bytes of every tensor, by name."""
    found = open_checkpoint(folder)
    return {name: hashlib.sha256(found[name].reshape(-1).view(torch.uint8).numpy()).hexdigest() for name in found}


def compare(label: str, recipe: str, a: Path, b: Path, place: Path, program: Path) -> bool:
    """One line for one merge by both programs; whether every tensor has the same bytes."""
    theirs, ours = place / "theirs", place / "ours"
    (place / "theirs.yml").write_text(recipe.format(a=a, b=b))
    (place / "ours.yml").write_text(recipe.format(a=a, b=b) + "align: false\n")
    os.sync()  # so that earlier writes do not count against either program
    command = [str(program), str(place / "theirs.yml"), str(theirs), "--quiet"]
    t_s, t_mb = measured("mergekit", command, theirs, keep=True)
    os.sync()
    command = [isobasin(), "merge", str(place / "ours.yml"), "-o", str(ours), "--json"]
    o_s, o_mb = measured("isobasin merge", command, ours, keep=True)
    same = digest(theirs) == digest(ours)
    for folder in (theirs, ours):
        shutil.rmtree(folder)
    print(
        f"{label:8s} {o_s:8.1f} s {o_mb:7.0f} MB   {t_s:8.1f} s {t_mb:7.0f} MB   "
        f"{o_s / t_s:6.2f} × time {o_mb / t_mb:6.2f} × memory   {'same bits' if same else 'OTHER BITS'}",
        flush=True,
    )
    return same


def together(place: Path, program: Path) -> None:
    """Small: align, then mergekit on the aligned folder; merge, then transformers on the merged folder."""
    place.mkdir()
    a, b = write_llama(place / "a", **SMALL, seed=1), write_llama(place / "b", **SMALL, seed=2, noise_of=1)
    aligned, out = place / "aligned", place / "out"
    measured("align", [isobasin(), "align", str(b), "--to", str(a), "-o", str(aligned), "--json"], aligned, keep=True)
    (place / "m.yml").write_text(LINEAR.format(a=a, b=aligned))
    measured("mergekit on an aligned folder", [str(program), str(place / "m.yml"), str(out), "--quiet"], out)
    print("mergekit takes an aligned folder", flush=True)
    measured("merge", [isobasin(), "merge", str(a), str(b), "-o", str(out), "--json"], out, keep=True)
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM as M; "
        "m, info = M.from_pretrained(sys.argv[1], output_loading_info=True); "
        "assert not info['missing_keys'] and not info['unexpected_keys'], info; "
        "assert m(torch.arange(8)[None]).logits.isfinite().all()"
    )
    subprocess.run([sys.executable, "-c", code, str(out)], check=True, stderr=subprocess.DEVNULL)
    print("transformers loads the merged folder", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="isobasin merge compared with mergekit.")
    parser.add_argument("--quick", action="store_true", help="tiny checkpoints, to see that it runs")
    parser.add_argument("--slerp", action="store_true", help="also a slerp")
    parser.add_argument("--repeat", type=int, default=1, help="how often, in turn")
    parser.add_argument("--place", type=Path, default=None, help="where to put the checkpoints (about 8 GB)")
    arguments = parser.parse_args()
    sizes, needed = (SMALL, 10**8) if arguments.quick else (LARGE, 8 * 10**9)
    with tempfile.TemporaryDirectory(dir=arguments.place, prefix="isobasin-bench-") as folder:
        place = Path(folder)
        if shutil.disk_usage(place).free < needed:
            sys.exit(f"{place}: {needed / 1e9:.0f} GB are needed here; name another --place")
        program = mergekit()
        together(place / "small", program)
        a = write_llama(place / "a", **sizes, seed=1)
        b = write_llama(place / "b", **sizes, seed=2, noise_of=1)
        print(f"{'method':8s} {'isobasin merge':>21s}   {'mergekit':>21s}   ratios")
        recipes = {"linear": LINEAR} | ({"slerp": SLERP} if arguments.slerp else {})
        turns = list(recipes.items()) * arguments.repeat
        same = [compare(label, recipe, a, b, place, program) for label, recipe in turns]
    if not all(same):
        sys.exit("the two wrote different bits")


if __name__ == "__main__":
    main()
