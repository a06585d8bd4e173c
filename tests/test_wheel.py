"""The package as it is installed: a wheel in an environment of its own, outside the tree; and a plain source folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import isobasin

FULL = os.environ.get("ISOBASIN_SLOW") == "1"
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
# What a person tries first: every command that reads a file of the package, and the data of the demo.
SMOKE = """
import importlib.metadata, sys
from pathlib import Path
import isobasin
from isobasin.cli import run
from isobasin.data import SHIPPED, shipped

assert Path(isobasin.__file__).is_relative_to(sys.argv[1]), isobasin.__file__
if sys.argv[2] == "no metadata":
    known = importlib.metadata.distribution
    def distribution(name):
        if name == "isobasin":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)
    importlib.metadata.distribution = distribution
assert all(shipped(name).exists() for name in SHIPPED)
a, b, data = (str(shipped(name) / part) for name, part in (("digits", "A"), ("digits", "B"), ("mnist", "")))
for words in (
    ["--version"],
    ["info", a],
    ["scramble", a, "-o", "copy"],
    ["equal", a, "copy"],
    ["merge", a, b, "-o", "merged"],
    ["path", a, b, "--data", data, "--points", "3", "--max-samples", "20", "-o", "path.json"],
    ["report", "path.json", "-o", "report.html"],
    ["families"],
    *[["demo"]] * (sys.argv[3] == "demo"),
):
    code = run(words)
    assert code == 0, (words, code)
"""


def smoke(python: str, inside: Path, mode: str, place: Path, demo: bool = False, **environment: str) -> str:
    """Run the smoke test in an empty folder, if asked with the demo, whose table is README's; what it prints."""
    place.mkdir()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | environment
    call = [python, "-c", SMOKE, str(inside), mode, "demo" if demo else ""]
    done = subprocess.run(call, cwd=place, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = re.search(
        r"^the average of A and B.*?(?=^isobasin-demo/)", (ROOT / "README.md").read_text("utf-8"), re.M | re.S
    )
    assert table is not None
    assert (table[0] in done.stdout) == demo, done.stdout
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """The wheel of this tree, built from a copy of its sources in a folder, which is made if it is missing."""
    tree, wheels = folder / "tree", folder / "wheels"
    for old in (tree, wheels):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(tree)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    return wheel


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="what the wheel's test runs, once more; ISOBASIN_SLOW=1 runs it")
def test_a_source_folder_without_metadata_works(tmp_path: Path) -> None:
    source = Path(isobasin.__file__).parents[1]
    printed = smoke(sys.executable, source, "no metadata", tmp_path / "run", PYTHONPATH=str(source))
    assert printed.startswith(f"{isobasin.__version__}\n")


@pytest.mark.slow
def test_a_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """What the package needs is found through a .pth file; of the package itself only the wheel is there."""
    pytest.importorskip("setuptools", reason="builds a wheel: pip install 'isobasin[dev]'")
    wheel = build_wheel(tmp_path)
    assert wheel.name == f"isobasin-{isobasin.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    source = tmp_path / "tree/src"
    files = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()}
    assert files <= names | {name for name in files if ".egg-info/" in name}
    assert wheel.stat().st_size < 4_000_000

    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    subprocess.run([*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    library = next((tmp_path / "env/lib").glob("python*/site-packages"))
    (library / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert smoke(str(python), library, "installed", tmp_path / "run").startswith(f"{isobasin.__version__}\n")
    version = subprocess.run([tmp_path / "env/bin/isobasin", "-v"], capture_output=True, text=True, check=True)
    assert version.stdout == f"{isobasin.__version__}\n"


def test_the_program_needs_no_test_tools_and_no_cluster() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"study", "cluster", "learn", "gguf", "docs", "dev"}
    for name in ("pytest", "ray", "ruff", "mypy", "selenium", "datasets", "pyarrow", "accelerate"):
        assert not any(line.startswith(name) for line in PROJECT["dependencies"]), name
        assert any(line.startswith(name) for extra in extras.values() for line in extra), name


def test_lowest_versions_are_those_of_the_constraints_or_older() -> None:
    """Every dependency has a lowest version, and the version that the checks run with is not below it."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {name.lower(): version for name, version in pinned.items()}
    for line in PROJECT["dependencies"]:
        name, lowest = line.split(">=")
        assert tuple(map(int, pinned[name].split(".")[:2])) >= tuple(map(int, lowest.split(".")[:2])), line


def test_the_version_is_written_once() -> None:
    assert "version" in PROJECT["dynamic"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {isobasin.__version__}\n" in citation
