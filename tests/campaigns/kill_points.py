"""Stop every command that writes at every operation on its files, and look at what is left.

    python tests/campaigns/kill_points.py -o results/reliability/kill_points.json

A command runs in a forked child of this process, in which functions that change files are counted. A first run counts
the operations under the output's folder. Then, for each of them, a fresh child sends itself a signal there: SIGKILL and
SIGTERM directly before the operation, SIGINT directly after it. Checked are

1. the outputs: all old or all new, complete (`split`: the folder is new and its transform is still to come, which only
   SIGKILL may leave; `away`: the old folder is moved aside, only where the system can not exchange two folders);
2. after SIGTERM and SIGINT: exit code 130, no traceback, no temporary file;
3. the same command once more: it finishes (without --force it may find the output complete), the outputs are the new
   ones, and nothing else is left.

A study runs in one process for this; with its own workers and with Ray it is stopped at times spread over a run.
`--control` breaks the program on purpose, and the campaign has to notice. `--system-calls` counts system calls with
strace instead of Python functions.
"""

import argparse
import atexit
import builtins
import fcntl
import hashlib
import importlib
import io
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isobasin as ib
from isobasin import files
from isobasin.cli import main
from isobasin.study import run as study_run
from isobasin.study.executors import RunJob
from isobasin.study.plan import Context, Job
from isobasin.study.store import Store
from isobasin.workers import Outcome, attempt

SIGNALS = {"SIGKILL": False, "SIGTERM": False, "SIGINT": True}  # whether it is sent after the operation
FUNCTIONS = {
    os: ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "open", "write", "fsync", "truncate", "utime"),
    io: ("open",),
    builtins: ("open",),
    fcntl: ("flock",),
    files: ("_exchange",),
}
SYSTEM_CALLS = ("mkdir", "rmdir", "unlink", "unlinkat", "rename", "renameat2", "openat", "write", "fsync", "ftruncate")
SYSTEM_CALLS += ("flock", "sendfile", "lseek", "close")
VOLATILE = {"seconds", "provenance", "command", "runs", "git", "job", "peak_rss_mb", "peak_anon_mb"}
PAGES = (".html", ".log", ".svg", ".png")
MAX_SECONDS = 120
GRID = """
name = "tiny"
[[cells]]
model = "vit"
positions = "rope"
layers = 1
heads = 2
width = 16
dataset = "digits"
scope = "first-attention"
seeds = [1, 2]
points = 3
samples = 60
[cells.pretrain]
steps = 3
batch = 16
[cells.finetune]
steps = 2
batch = 16
"""


# -- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command line and the names of its outputs; words that begin with @ are in the folder of the inputs."""

    words: str
    outputs: tuple[str, ...] = ("out",)
    force: tuple[bool, ...] = (False, True)
    max_points: int = 1000

    def arguments(self, inputs: Path, place: Path, *, force: bool) -> list[str]:
        paths = [str(inputs / word[1:]) if word.startswith("@") else word for word in self.words.split()]
        found = [str(place / word) if word in self.outputs else word for word in paths]
        return found + ["--force"] * force


STUDY = Command("study run @grid.toml -o grid --quiet --workers 1", ("grid",), (False,), 15)
COMMANDS = {
    "scramble": Command("scramble @a -o out --seed 1 --save-transform t.safetensors", ("out", "t.safetensors")),
    "align": Command(
        "align @b --to @a --scope all-attention -o out --save-transform t.safetensors", ("out", "t.safetensors")
    ),
    "apply": Command("apply @t @b -o out"),
    "invert": Command("invert @t -o t.safetensors", ("t.safetensors",)),
    "canonical": Command("canonical @a -o out"),
    "merge": Command("merge @a @b --scope all-attention -o out --max-shard-size 1KB"),
    "path": Command("path @a @b --data @ids.npy --points 3 --align --scope all-attention -o path.json", ("path.json",)),
    "report": Command("report @path.json -o report.html", ("report.html",)),
    "learned align": Command(
        "align @b --to @a --matcher learned --data @ids.npy --steps 4 --scope all-attention -o out "
        "--save-transform t.safetensors",
        ("out", "t.safetensors"),
    ),
    "equal": Command("equal @a @b --save-witness w.safetensors", ("w.safetensors",)),
    "study": STUDY,
    "study, weights dropped": Command(STUDY.words + " --drop-weights", ("grid",), (False,), 15),
    "study unpack": Command("study unpack @study.jsonl -o grid", ("grid",), (False,)),
}
PROCESSES = {"study, local workers": (STUDY, 3), "study, Ray": (Command(STUDY.words + " --engine ray", ("grid",)), 1)}


def write_inputs(inputs: Path) -> None:
    """Two small models, data, a transform, a result of `path` and a packed study."""
    sizes = {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 12, "d_vocab": 19, "n_positions": 8}
    for seed, name in enumerate("ab"):
        model = ib.Transformer(ib.ModelConfig.preset("llama", **sizes), seed=seed)
        rng = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=rng) * 0.5)
        model.save(inputs / name)
    np.save(inputs / "ids.npy", np.random.default_rng(0).integers(0, 19, (12, 8)))
    (inputs / "grid.toml").write_text(GRID)
    old = "scramble @a -o old --seed 7 --save-transform t"
    for words in (old, "path @a @b --data @ids.npy --points 3 -o path.json"):
        made = Command(words, ("old", "t", "path.json"))
        assert run_child(made.arguments(inputs, inputs, force=False), inputs / "log") == 0, (inputs / "log").read_text()
    result = {"name": "pair-1", "result": {"loss": 1.0}}
    (inputs / "study.jsonl").write_text(json.dumps({"study": {"cells": []}}) + "\n" + json.dumps(result) + "\n")


def write_old(inputs: Path, place: Path, command: Command) -> None:
    """Outputs of an earlier run, for --force."""
    for name in command.outputs:
        if name == "out":
            shutil.copytree(inputs / "old", place / name)
        else:
            shutil.copyfile(inputs / "t", place / name)


# -- children --------------------------------------------------------------------------------------------------------


@dataclass
class Trap:
    """Counts operations on files under `place`, and sends a signal before or after number `at`."""

    place: Path
    at: int = 0
    number: int = 0
    after: bool = False
    operations: list[str] = field(default_factory=list)

    def install(self) -> None:
        for owner, names in FUNCTIONS.items():
            for name in names:
                setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if not self._concerns(name, arguments, options):
                return function(*arguments, **options)
            self.operations.append(name)
            mine = len(self.operations) == self.at
            if mine and not self.after:
                os.kill(os.getpid(), self.number)
            try:
                return function(*arguments, **options)
            finally:
                if mine and self.after:
                    os.kill(os.getpid(), self.number)

        return counted

    def _concerns(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
        if name == "open" and not _for_writing(arguments, options):
            return False
        return _location(arguments[0], options.get("dir_fd")).startswith(str(self.place))


def _for_writing(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    mode = arguments[1] if len(arguments) > 1 else options.get("mode", "r")
    return bool(mode & (os.O_WRONLY | os.O_RDWR)) if isinstance(mode, int) else bool(set(mode) & set("wxa+"))


def _location(path: Any, folder: int | None) -> str:
    path = path.fileno() if hasattr(path, "fileno") else path
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    above = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else "."
    return os.path.abspath(os.path.join(above, os.fsdecode(path)))


class OneProcess:
    """A pool of a study that runs its jobs in this process."""

    size = 1

    def __init__(self, store: Store, context: Context) -> None:
        self._store, self._context = store, context
        self._jobs: list[Job] = []

    def start(self, job: Job) -> None:
        self._jobs.append(job)

    def wait(self) -> list[Outcome]:
        return [attempt(self._jobs.pop(), RunJob(self._store, self._context))]

    def close(self) -> None:
        pass


def run_child(arguments: list[str], log: Path, trap: Trap | None = None, ready: "Ready | None" = None) -> int:
    """Run a command in a forked child, with a trap if there is one; return the exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = _in_child(arguments, log, trap, ready)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if ready:
        ready.attach(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _in_child(arguments: list[str], log: Path, trap: Trap | None, ready: "Ready | None") -> int:
    signal.alarm(MAX_SECONDS)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["isobasin", *arguments]
    if ready:
        ready.wait()
    if trap:
        trap.install()
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except KeyboardInterrupt:  # as at the end of an interpreter: shown, and no exit code of ours
        print("Traceback: KeyboardInterrupt")
        code = 71
    if trap and not trap.at:
        log.with_suffix(".operations").write_text(json.dumps(trap.operations))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code


@dataclass
class Ready:
    """Holds a child back until strace is attached to it."""

    injection: str
    trace: Path
    pipe: tuple[int, int] = field(default_factory=os.pipe)

    def wait(self) -> None:
        os.read(self.pipe[0], 1)

    def attach(self, child: int) -> None:
        words = ["strace", "-f", "-q", "-o", str(self.trace), "-p", str(child), *self.injection.split()]
        tracer = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        while f"TracerPid:\t{tracer.pid}" not in Path(f"/proc/{child}/status").read_text():
            assert tracer.poll() is None, "strace can not attach"
            time.sleep(0.005)
        os.write(self.pipe[1], b"x")
        os.close(self.pipe[0])
        os.close(self.pipe[1])
        self._tracer = tracer

    def close(self) -> None:
        self._tracer.wait()


# -- states ----------------------------------------------------------------------------------------------------------


def content(path: Path) -> Any:
    """What identifies an output: the hash of each file, without times and other facts about the run in JSON.

    The page, the figures and the log of a study hold such facts; that they are written is all that is compared.
    """
    if path.is_dir():
        found = {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}
        return {name: "written" if file.suffix in PAGES else content(file) for name, file in found.items()}
    if not path.exists():
        return None
    data = path.read_bytes()
    if path.suffix == ".json":
        with suppress(ValueError):
            data = json.dumps(_lasting(json.loads(data)), sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key not in VOLATILE}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


def names(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if ".lock" not in path.name)


def temporary(place: Path) -> list[str]:
    return [name for name in names(place) if ".isobasin-tmp-" in name]


@dataclass(frozen=True)
class Expected:
    """The outputs before a run and after a complete one, and all names then."""

    command: Command
    old: Mapping[str, Any]
    new: Mapping[str, Any]
    names: list[str]

    def state(self, place: Path) -> str:
        """old, new, split, away or broken; for a study old is any part of the new one."""
        found = {name: content(place / name) for name in self.command.outputs}
        if found == self.new:
            return "new"
        if found == self.old or ("grid" in found and self._is_part(found["grid"])):
            return "old"
        first, *others = self.command.outputs
        if others and found[first] == self.new[first] and all(found[name] == self.old[name] for name in others):
            return "split"
        if found[first] is None and all(found[name] == self.old[name] for name in others):
            return "away"
        return "broken"

    def _is_part(self, study: Any) -> bool:
        """Whether all results are those of a complete run; temporary files and the table may be any."""
        done = {name: one for name, one in (study or {}).items() if name.endswith("result.json") and "/." not in name}
        return all(self.new["grid"].get(name) == one for name, one in done.items())


# -- trials ----------------------------------------------------------------------------------------------------------


@dataclass
class Campaign:
    """A folder for inputs and outputs, and what was found. The place of the outputs is the same in every trial."""

    root: Path
    max_points: int
    output: Path | None = None
    signals: Sequence[str] = tuple(SIGNALS)
    passing: Sequence[str] = ("split",)  # states that SIGKILL may leave until the next run
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs, self.place, self.log = self.root / "inputs", self.root / "place", self.root / "log"
        self.inputs.mkdir()
        write_inputs(self.inputs)

    def fresh(self, command: Command, *, force: bool) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        if force:
            write_old(self.inputs, self.place, command)

    def expected(self, command: Command, *, force: bool) -> tuple[Expected, list[str]]:
        """The result of an uninterrupted run, the same twice, and its operations."""
        arguments, found = command.arguments(self.inputs, self.place, force=force), []
        for _ in range(2):
            self.fresh(command, force=force)
            old = {name: content(self.place / name) for name in command.outputs}
            code = run_child(arguments, self.log, Trap(self.place))
            assert code in (0, 1), self.log.read_text()
            found.append({name: content(self.place / name) for name in command.outputs})
        assert found[0] == found[1], "the output of two runs differs"
        assert found[0] != old, "the new output is the old one"
        operations: list[str] = json.loads(self.log.with_suffix(".operations").read_text())
        return Expected(command, old, found[0], names(self.place)), operations

    def run(self, name: str, command: Command) -> None:
        for force in command.force:
            expected, operations = self.expected(command, force=force)
            for signal_name in self.signals:
                points = spread(len(operations), min(self.max_points, command.max_points))
                trials = (
                    self.trial(
                        expected, signal_name, f"{k} {operations[k - 1]}", force=force, trap=self._trap(signal_name, k)
                    )
                    for k in points
                )
                self.add(name, signal_name, trials, force=force, n_operations=len(operations))

    def _trap(self, signal_name: str, at: int) -> Trap:
        return Trap(self.place, at, getattr(signal, signal_name), SIGNALS[signal_name])

    def run_system_calls(self, name: str, command: Command) -> None:
        """SIGKILL at system calls, counted by strace."""
        for force in command.force:
            expected, _ = self.expected(command, force=force)
            arguments = command.arguments(self.inputs, self.place, force=force)
            self.fresh(command, force=force)
            ready = Ready(f"-e trace={','.join(SYSTEM_CALLS)}", self.root / "trace")
            assert run_child(arguments, self.log, ready=ready) == 0
            ready.close()
            calls = Counter(line.split()[1].partition("(")[0] for line in ready.trace.read_text().splitlines())
            points = [(call, k) for call in SYSTEM_CALLS for k in spread(calls[call], self.max_points)]
            injections = (f"-e trace={call} -e inject={call}:signal=KILL:when={k}" for call, k in points)
            trials = (
                self.trial(expected, "SIGKILL", one, force=force, ready=Ready(one, self.root / "trace"))
                for one in injections
            )
            self.add(name, "SIGKILL", trials, force=force, n_operations=sum(calls.values()))

    def trial(
        self,
        expected: Expected,
        signal_name: str,
        point: str,
        *,
        force: bool,
        trap: Trap | None = None,
        ready: Ready | None = None,
    ) -> dict[str, Any]:
        """Stop a run at one point, run it again, and list what is wrong."""
        arguments = expected.command.arguments(self.inputs, self.place, force=force)
        self.fresh(expected.command, force=force)
        code = run_child(arguments, self.log, trap, ready)
        if ready:
            ready.close()
        stopped, text = self.inspect(expected, signal_name, code), self.log.read_text()
        again = run_child(arguments, self.log)
        return self.judge(expected, point, stopped, again, signal_name) | {"message": text[-200:]}

    def inspect(self, expected: Expected, signal_name: str, code: int) -> dict[str, Any]:
        """State and problems directly after the signal."""
        state, problems, killed = expected.state(self.place), [], signal_name == "SIGKILL"
        if state not in ("old", "new", *(self.passing if killed else ())):
            problems.append(f"the outputs are {state}")
        if code not in ((-signal.SIGKILL, 0) if killed else (130, 0, 1)) or (code == 1 and state != "new"):
            problems.append(f"exit code {code}")
        if "Traceback" in self.log.read_text():
            problems.append("a traceback")
        if not killed and temporary(self.place):
            problems.append(f"left at once: {temporary(self.place)[0]}")
        return {"state": state, "code": code, "problems": problems}

    def judge(
        self, expected: Expected, point: str, stopped: dict[str, Any], again: int, signal_name: str
    ) -> dict[str, Any]:
        """Add what is wrong after the second run."""
        problems, state, left = list(stopped["problems"]), expected.state(self.place), names(self.place)
        refused = again == 2 and stopped["state"] in ("new", "split")
        if again not in (0, 1) and not refused:
            problems.append(f"the second run ended with {again}: {self.log.read_text()[-300:]}")
        if state != "new":
            problems.append(f"the second run left {state} outputs")
        if left != expected.names:
            problems.append(f"left in the end: {sorted(set(left) ^ set(expected.names))[:3]}")
        return {"point": point, **stopped, "again": again, "problems": problems}

    def run_processes(self, name: str, command: Command, n_times: int) -> None:
        """Stop a study with worker processes at times spread over a run."""
        arguments = command.arguments(self.inputs, self.place, force=False)
        self.fresh(command, force=False)
        began = time.perf_counter()
        assert run_program(arguments, self.log) == 0, self.log.read_text()
        duration = time.perf_counter() - began
        expected = Expected(command, {"grid": None}, {"grid": content(self.place / "grid")}, names(self.place))
        for signal_name in self.signals:
            trials = (
                self.timed_trial(expected, signal_name, duration * (i + 1) / (n_times + 1)) for i in range(n_times)
            )
            self.add(name, signal_name, trials, force=False, n_operations=None)

    def timed_trial(self, expected: Expected, signal_name: str, seconds: float) -> dict[str, Any]:
        arguments = expected.command.arguments(self.inputs, self.place, force=False)
        self.fresh(expected.command, force=False)
        code = run_program(arguments, self.log, getattr(signal, signal_name), seconds)
        stopped = self.inspect(expected, signal_name, code)
        again = run_program(arguments, self.log)
        return self.judge(expected, f"after {seconds:.1f} s", stopped, again, signal_name)

    def add(
        self,
        name: str,
        signal_name: str,
        trials: Iterator[dict[str, Any]],
        *,
        force: bool,
        n_operations: int | None,
    ) -> None:
        """Run the trials of a row of the table, and print it."""
        began, found = time.perf_counter(), list(trials)
        row = {
            "command": name,
            "force": force,
            "signal": signal_name,
            "operations": n_operations,
            "points": len(found),
            "stopped": sum(trial["code"] not in (0, 1) for trial in found),
            "states": dict(sorted(Counter(trial["state"] for trial in found).items())),
            "refused_as_complete": sum(trial["again"] == 2 for trial in found),
            "failures": [trial for trial in found if trial["problems"]],
            "seconds": round(time.perf_counter() - began, 1),
        }
        self.rows.append(row)
        self.write()
        shown = {key: value for key, value in row.items() if key != "failures"}
        print(json.dumps(shown), f"FAILURES {len(row['failures'])}" if row["failures"] else "ok", flush=True)
        for trial in row["failures"][:3]:
            print("   ", trial["point"], trial["problems"], flush=True)

    def write(self) -> None:
        """Write the table after every row; other rows that are there already stay."""
        if self.output is None:
            return
        kept = json.loads(self.output.read_text())["rows"] if self.output.exists() else []
        mine = {_key(row) for row in self.rows}
        rows = [row for row in kept if _key(row) not in mine] + self.rows
        files.atomic_write(self.output, json.dumps({"rows": rows}, indent=1) + "\n")


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["command"], row["signal"], row["force"]


def run_program(arguments: list[str], log: Path, number: int = 0, seconds: float = 0.0) -> int:
    """The program in a process of its own; a signal is sent after some seconds."""
    with log.open("wb") as stream:
        words = [sys.executable, "-m", "isobasin", *arguments]
        with subprocess.Popen(words, stdout=stream, stderr=stream) as process:
            if number:
                try:
                    process.wait(seconds)
                except subprocess.TimeoutExpired:
                    process.send_signal(number)
            return process.wait(MAX_SECONDS)


def spread(n: int, most: int) -> list[int]:
    """1 … n, or `most` of them evenly spread with both ends."""
    return sorted({round(float(k)) for k in np.linspace(1, n, min(n, most))}) if n else []


# -- controls --------------------------------------------------------------------------------------------------------


def _deleted_first(path: Path, begin: Callable[[Path], Any] = files._make_temporary) -> Any:
    if path.is_dir():
        shutil.rmtree(path)
    return begin(path)


CONTROLS: dict[str, tuple[Any, str, Any]] = {
    "deleted-first": (files, "_make_temporary", _deleted_first),
    "no-recovery": (files, "_recover_from", lambda root, path: None),
    "no-unwinding": (signal, "default_int_handler", signal.SIG_DFL),
    "no-exchange": (files, "_exchange", lambda one, other: False),
}


def run_campaign(names: Sequence[str], *, system_calls: bool, **settings: Any) -> Campaign:
    root = Path(tempfile.mkdtemp()).resolve()  # a TemporaryDirectory would be deleted when a child ends
    try:
        campaign = Campaign(root, **settings)
        for name in names:
            if name in PROCESSES:
                campaign.run_processes(name, *PROCESSES[name])
            elif system_calls:
                campaign.run_system_calls(f"{name}, system calls", COMMANDS[name])
            else:
                campaign.run(name, COMMANDS[name])
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return campaign


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="the table as JSON")
    everything = ";".join([*COMMANDS, *PROCESSES])
    parser.add_argument("--commands", help="names with semicolons; all if left out", default=everything)
    parser.add_argument("--signals", default=";".join(SIGNALS), help="names with semicolons; all if left out")
    parser.add_argument("--points", type=int, default=200, help="at most this many points for each row")
    parser.add_argument("--system-calls", action="store_true", help="count system calls with strace")
    parser.add_argument("--control", choices=CONTROLS, action="append", default=[], help="break the program on purpose")
    return parser.parse_args()


def import_everything() -> None:
    """Import what commands import when they run, so that a forked child has it already."""
    for module in pkgutil.walk_packages(ib.__path__, "isobasin."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    importlib.import_module("matplotlib.figure")
    importlib.import_module("matplotlib.backends.backend_agg")


if __name__ == "__main__":
    options = parse()
    import_everything()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    torch.set_num_threads(1)
    study_run._pool = lambda config, store, device: OneProcess(store, Context(config.data, device, store.scratch))
    for control in options.control:
        owner, function, broken = CONTROLS[control]
        setattr(owner, function, broken)
    chosen = options.commands.split(";")
    done = run_campaign(
        chosen,
        system_calls=options.system_calls,
        max_points=options.points,
        output=options.output,
        signals=options.signals.split(";"),
        passing=("split", "away") if "no-exchange" in options.control else ("split",),
    )
    sys.exit(any(row["failures"] for row in done.rows))
