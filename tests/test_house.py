"""The rules of the house that no linter knows, read off the source by its syntax tree."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "bench", "examples")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
COMPARISONS = {"allclose", "equal", "isclose", "array_equal", "is_close"}
VAGUE_NAMES = {"utils", "common", "helpers"}
MAX_LINES = 400

Function = ast.FunctionDef | ast.AsyncFunctionDef


def called(node: ast.AST) -> str:
    """The last name of what a call calls: `torch.allclose(…)` calls allclose."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def is_comparison(node: ast.AST) -> bool:
    """Whether an expression is a comparison, also negated, joined by and/or, or reduced by all/any."""
    if isinstance(node, ast.UnaryOp):
        return is_comparison(node.operand)
    if isinstance(node, ast.BoolOp):
        return any(map(is_comparison, node.values))
    if isinstance(node, ast.Call) and called(node) in {"all", "any"}:
        receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return any(map(is_comparison, [*receiver, *node.args]))
    return isinstance(node, ast.Compare) or called(node) in COMPARISONS


def asserts(function: Function) -> bool:
    """Whether something in the body can make a test fail."""
    body = [node for statement in function.body for node in ast.walk(statement)]
    return any(
        isinstance(node, ast.Assert | ast.Raise)
        or called(node) in {"raises", "warns", "fail"}
        or called(node).startswith(("assert_", "check_"))
        for node in body
    )


def offences(source: str, *, is_test: bool) -> Iterator[tuple[int, str]]:
    """Line and name of each offence in a source text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and is_comparison(node.value):
            yield node.lineno, "comparison thrown away"
        if not is_test:
            continue
        if isinstance(node, Function) and node.name.startswith(("test_", "check_")) and not asserts(node):
            yield node.lineno, f"{node.name} asserts nothing"
        if called(node) == "raises" and all(keyword.arg != "match" for keyword in node.keywords):
            yield node.lineno, "raises without match="


def version_in(source: str) -> list[str]:
    """The literal values given to `__version__` at the top of a module."""
    return [
        node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id == "__version__"
    ]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_comparison_is_thrown_away_and_every_test_asserts() -> None:
    found = [
        f"{relative(path)}:{line}: {what}"
        for path in SOURCES
        for line, what in offences(path.read_text("utf-8"), is_test=ROOT / "tests" in path.parents)
    ]
    assert found == []


@pytest.mark.parametrize(
    "statement",
    [
        "torch.allclose(a, b)",
        "torch.equal(a, b)",
        "equal(a, b)",
        "np.array_equal(a, b)",
        "math.isclose(a, b)",
        "g.is_close(h)",
        "a == b",
        "a < b < c",
        "not torch.equal(a, b)",
        "torch.equal(a, b) and torch.equal(b, c)",
        "(a == b).all()",
        "torch.isclose(a, b).all()",
        "any([1]) or all(torch.isclose(a, b))",
    ],
)
def test_a_planted_comparison_is_found(statement: str) -> None:
    source = f"def work(a, b):\n    {statement}\n    assert {statement}\n    same = {statement}\n"
    assert list(offences(source, is_test=False)) == [(2, "comparison thrown away")]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("print(1)", ["test_x asserts nothing"]),
        ("x = torch.equal(a, b)", ["test_x asserts nothing"]),
        ("with pytest.raises(ValueError): f()", ["raises without match="]),
        ("assert f()", []),
        ("for a in b: check_a(a)", []),
        ("torch.testing.assert_close(a, b)", []),
        ("with pytest.raises(ValueError, match='no'): f()", []),
        ("with pytest.warns(UserWarning): f()", []),
    ],
)
def test_a_planted_test_without_an_assertion_is_found(body: str, found: list[str]) -> None:
    source = f"@decorated(check_this())\ndef test_x(a, b):\n    {body}\n"
    assert [what for _, what in offences(source, is_test=True)] == found
    assert list(offences(source, is_test=False)) == []


def test_a_check_without_an_assertion_is_found() -> None:
    source = "def check_it(a):\n    print(a)\n\ndef test_it():\n    check_it(1)\n"
    assert list(offences(source, is_test=True)) == [(1, "check_it asserts nothing")]


def test_the_sources_were_read() -> None:
    names = set(map(relative, SOURCES))
    assert {"src/isobasin/errors.py", "tests/test_house.py"} <= names


def vague(path: Path) -> bool:
    """Whether a module, or a package it lies in, has a name that says nothing."""
    return bool(VAGUE_NAMES & {*path.parts[:-1], path.stem})


def test_module_names_say_something() -> None:
    inside = [path.relative_to(ROOT / "src") for path in SOURCES if ROOT / "src" in path.parents]
    assert [path for path in inside if vague(path)] == []
    assert vague(Path("isobasin/utils.py"))
    assert vague(Path("isobasin/common/shapes.py"))
    assert not vague(Path("isobasin/shapes.py"))


def test_the_version_is_the_same_everywhere() -> None:
    (version,) = version_in((ROOT / "src/isobasin/__init__.py").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert "version" in project["dynamic"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert version in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert version_in('__version__ = "9.9"\nother = "1"') == ["9.9"]
