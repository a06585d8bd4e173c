"""The program that isobasin is compared with, mergekit in its own environment; time and memory of a command."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
MERGEKIT = HERE / ".venv-mergekit"


def mergekit() -> Path:
    """The program: what ISOBASIN_MERGEKIT names, or our own, installed with pip where it is not there yet."""
    if named := os.environ.get("ISOBASIN_MERGEKIT"):
        return Path(named)
    program = MERGEKIT / "bin/mergekit-yaml"
    if not program.exists():
        print("installing mergekit 0.1.5 in an environment of its own …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(MERGEKIT)], check=True)
        pip = [str(MERGEKIT / "bin/python"), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "-c", str(HERE / "constraints.txt"), "torch"], check=True)
        subprocess.run([*pip, "-c", str(HERE / "constraints.txt"), "mergekit==0.1.5"], check=True)
    return program


def measured(name: str, command: list[str], out: Path, *, keep: bool = False) -> tuple[float, float]:
    """Wall time and peak anonymous memory (MB) of a command; its output folder is removed unless it is to be kept."""
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
    if not keep:
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
