"""Golden results of the command line: record them, or compare what it gives now with what was recorded.

python tests/golden/record.py                     record all parts into tests/golden/golden.json
python tests/golden/record.py --check             recompute and compare; exit 1 and a line for each deviation
python tests/golden/record.py --check --part study --only digits

Only `isobasin.cli.main` is called; no other module of isobasin is imported. golden.json says which floats have a
wider tolerance than 1e-9 and why. On another machine or with another torch than recorded, floats are compared with
a relative tolerance of 1e-4 and hashes of files made now are left out.
"""

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from golden_compare import Comparison, Tolerance  # noqa: E402
from golden_families import record_family  # noqa: E402
from golden_matchers import MATCHER_ITEMS, record_matcher  # noqa: E402
from golden_models import CASES  # noqa: E402
from golden_study import STUDY_ITEMS, record_study  # noqa: E402

GOLDEN = HERE / "golden.json"
TRANSFORMS = HERE / "transforms"

# Seen when recorded with one thread and recomputed with two; everything else was the same to 1e-9.
_THREADS = "sums of matrix products depend on the number of threads, and tensors are rounded to float32 after them"
TOLERANCES: Sequence[Tolerance] = (
    Tolerance(
        "families/*/equal/*/witness/*", 1e-6, 1e-6, "outputs of a model in float32: " + _THREADS + "; seen: 2.4e-7"
    ),
    Tolerance("matchers/path/*", 1e-6, 1e-6, _THREADS + "; seen: 1.5e-7"),
    Tolerance("matchers/align weights model/*", 1e-6, 1e-6, _THREADS + "; seen: 4e-8"),
    Tolerance("matchers/align activations model/*", 1e-6, 1e-6, _THREADS + "; seen: 1e-7"),
    Tolerance("matchers/align learned *", 1e-4, 1e-5, "gradient descent in float32 amplifies that; seen: 1e-6"),
)

# Part -> its items; each item is computed in a temporary folder of its own.
PARTS: Mapping[str, Sequence[str]] = {"families": CASES, "matchers": MATCHER_ITEMS, "study": STUDY_ITEMS}


def record_item(part: str, item: str, *, keep: bool = False) -> dict[str, Any]:
    """The results of one item, as plain JSON data."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "families": lambda: record_family(item, Path(folder), transforms=TRANSFORMS, keep=keep),
            "matchers": lambda: record_matcher(item, Path(folder)),
            "study": lambda: record_study(item, Path(folder)),
        }
        return json.loads(json.dumps(makers[part](), allow_nan=False))


def environment() -> dict[str, str]:
    """What the last digits of floats depend on."""
    import numpy
    import torch
    import transformers

    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return {
        "processor": names[0] if names else platform.processor(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "transformers": transformers.__version__,
    }


def comparison_for(golden: dict[str, Any], *, relative: float = 0.0) -> Comparison:
    """How to compare with a golden file on this machine."""
    tolerances = tuple(Tolerance(**each) for each in golden["tolerances"])
    same = golden["environment"] == environment()
    if same:
        return Comparison(tolerances, least_relative=relative, least_absolute=relative)
    wide = max(relative, 1e-4)
    return Comparison(tolerances, least_relative=wide, least_absolute=wide, hashes=False)


def dumped(value: Any) -> str:
    """JSON that a line-by-line difference can show: short values on one line, without indentation."""
    return _lines(value) + "\n"


def _lines(value: Any) -> str:
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if len(flat) <= 110 or not inside or (isinstance(value, list) and not any(isinstance(x, dict) for x in inside)):
        return flat
    if isinstance(value, dict):
        rows = [f"{json.dumps(key, ensure_ascii=False)}: {_lines(value[key])}" for key in sorted(value)]
        return "{\n" + ",\n".join(rows) + "\n}"
    return "[\n" + ",\n".join(map(_lines, value)) + "\n]"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=GOLDEN, help="the file to write, or with --check to compare with")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--only", help="only items whose name holds this text")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the items")
    parser.add_argument("--relative", type=float, default=0.0, help="with --check: the least tolerance of any float")
    asked = parser.parse_args(arguments)
    items = [(part, item) for part in asked.part for item in PARTS[part] if (asked.only or "") in item]
    golden = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.is_file() else None
    if asked.check and golden is None:
        parser.error(f"{asked.out}: no such file to compare with")
    began, keep = time.perf_counter(), not asked.check and asked.out.resolve() == GOLDEN
    computed = _computed(items, keep=keep, workers=asked.workers)
    status = _check(computed, golden or {}, asked.relative) if asked.check else _record(computed, asked.out, golden)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return status


def _computed(
    items: Sequence[tuple[str, str]], *, keep: bool, workers: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Part, item and results of each in order, with a line of progress; its seconds are wall and processor time."""
    seconds = dict.fromkeys((part for part, _ in items), 0.0)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_timed, part, item, keep) for part, item in items]
        for (part, item), future in zip(items, futures):
            found, wall, processor = future.result()
            seconds[part] += wall
            print(f"{part}/{item}: {wall:.1f} s, processor {processor:.1f} s", flush=True)
            yield part, item, found
    print(", ".join(f"{part} {total:.0f} s" for part, total in seconds.items()), f"over {workers} processes")


def _timed(part: str, item: str, keep: bool) -> tuple[dict[str, Any], float, float]:
    times = os.times()
    found = record_item(part, item, keep=keep)
    now = os.times()
    spent = sum(getattr(now, n) - getattr(times, n) for n in ("user", "system", "children_user", "children_system"))
    return found, now.elapsed - times.elapsed, spent


def _record(computed: Iterator[tuple[str, str, dict[str, Any]]], out: Path, earlier: dict[str, Any] | None) -> int:
    """Write the items; other items of an earlier file stay."""
    parts: dict[str, Any] = earlier["parts"] if earlier else {}
    for part, item, found in computed:
        parts.setdefault(part, {})[item] = found
    tolerances = [asdict(each) for each in TOLERANCES]
    golden = {"format": 1, "environment": environment(), "tolerances": tolerances, "parts": parts}
    out.write_text(dumped(golden), encoding="utf-8")
    print(f"{out}: {sum(map(len, parts.values()))} items, {out.stat().st_size // 1000} kB")
    return 0


def _check(computed: Iterator[tuple[str, str, dict[str, Any]]], golden: dict[str, Any], relative: float) -> int:
    comparison = comparison_for(golden, relative=relative)
    if not comparison.hashes:
        print("this is not the machine or not the torch of the record: wide tolerances, no hashes of new files")
    n_items = n_deviations = 0
    for part, item, found in computed:
        expected = golden["parts"].get(part, {}).get(item)
        lines = sorted(comparison.deviations(expected, found, f"{part}/{item}"))
        for line in lines:
            print(f"  {line}", flush=True)
        n_items, n_deviations = n_items + 1, n_deviations + len(lines)
    print(f"{n_items} items compared, {n_deviations} deviations")
    return 1 if n_deviations else 0


if __name__ == "__main__":
    sys.exit(main())
