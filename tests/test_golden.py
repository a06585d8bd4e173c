"""The golden results of tests/golden: a subset is recomputed here, all of them by `make golden`."""

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).resolve().parent / "golden"
SUBSET = (("families", "own-rope"), ("matchers", "align weights all-attention"))


@pytest.fixture(scope="module")
def record() -> Iterator[Any]:
    """The module of the script, which lies beside the golden file."""
    sys.path.insert(0, str(GOLDEN))
    try:
        import record

        yield record
    finally:
        sys.path.remove(str(GOLDEN))


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((GOLDEN / "golden.json").read_text("utf-8"))


@pytest.mark.hf
@pytest.mark.parametrize(("part", "item"), SUBSET)
def test_the_command_line_gives_what_was_recorded(part: str, item: str, record: Any, golden: dict[str, Any]) -> None:
    expected = golden["parts"][part][item]
    found = record.record_item(part, item)
    assert list(record.comparison_for(golden).deviations(expected, found, f"{part}/{item}")) == []


def test_every_item_is_recorded_and_every_transform_kept(record: Any, golden: dict[str, Any]) -> None:
    assert {part: set(items) for part, items in record.PARTS.items()} == {
        part: set(items) for part, items in golden["parts"].items()
    }
    assert {path.stem for path in record.TRANSFORMS.iterdir()} == set(record.PARTS["families"])


def altered(value: Any) -> Any:
    """Another value of the same type: text, a whole number, a truth value or a float that differs by 1e-3."""
    if isinstance(value, str):
        return value + "x"
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 1.001


@pytest.mark.parametrize(
    "keys",
    [
        ("families", "gpt2-tied", "description", "info", "group"),
        ("families", "gpt2-tied", "scopes", "model", "unrelated", "head_permutation", 0, 0),
        ("families", "bert-mlm", "scopes", "model", "unrelated", "distances", 1),
        ("families", "llama", "equal", "changed", "verdict"),
        ("families", "vit-classifier", "canonical", "tensors", "classifier.weight", 1),
        ("matchers", "align weights model", "outputs_unchanged"),
        ("study", "jobs digits", "cells", 0, "jobs", "pairs", 0),
    ],
)
def test_an_altered_value_is_reported_with_its_key_path(
    keys: tuple[Any, ...], record: Any, golden: dict[str, Any]
) -> None:
    changed = copy.deepcopy(golden["parts"])
    place = changed
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = altered(place[keys[-1]])
    compared = record.comparison_for(golden)
    assert list(compared.deviations(golden["parts"], golden["parts"])) == []
    (line,) = compared.deviations(golden["parts"], changed)
    assert line.startswith("/".join(map(str, keys)) + ": found ")


def test_missing_and_additional_keys_lengths_and_types_are_reported(record: Any) -> None:
    compared = record.Comparison()
    assert list(compared.deviations({"a": 1}, {}, "p")) == ["p/a: missing, recorded 1"]
    assert list(compared.deviations({}, {"a": 1}, "p")) == ["p/a: not recorded, found 1"]
    assert list(compared.deviations([1, 2], [1], "p")) == ["p: 1 entries, recorded 2"]
    assert list(compared.deviations(1, True, "p")) == ["p: found True, recorded 1"]
    assert list(compared.deviations(None, 0.5, "p")) == ["p: found 0.5, recorded None"]


def test_a_stated_tolerance_holds_for_its_key_paths_alone(record: Any) -> None:
    wide = record.Tolerance("p/learned*", relative=1e-3, absolute=0.0, reason="for this test")
    compared = record.Comparison((wide,))
    assert list(compared.deviations(1.0, 1.0001, "p/learned/distance")) == []
    assert list(compared.deviations(1.0, 1.0001, "p/weights")) == ["p/weights: found 1.0001, recorded 1.0"]
    assert list(compared.deviations(1.0, 1.0 + 5e-10, "p/weights")) == []
