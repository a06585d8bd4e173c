"""The fuzzing campaign in short, its reproducibility, and readers that must make it fail."""

import json
import math
import random
import time
from pathlib import Path

import fuzzing
import pytest
from fuzzing import Campaign, Reader, input_of, judge, mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobasin.errors import IsobasinError

pytestmark = pytest.mark.hf

INPUTS = 27  # for each reader; about a thousand in all
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reader, ...]:
    return fuzzing.readers(tmp_path_factory.mktemp("fuzzing"))


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_give_our_errors_in_bounded_time_and_memory(readers: tuple[Reader, ...]) -> None:
    campaign = Campaign(seed=1)
    for number in range(INPUTS):
        for reader in readers:
            campaign.run(reader, number)
    found = campaign.to_dict(0.0)
    assert found["failures"] == []
    assert found["inputs"] >= 900
    assert sum(row["refused"] for row in found["readers"].values()) > 500
    assert sum(row["accepted"] for row in found["readers"].values()) > 100


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_bytes_and_any_json_give_our_errors(readers: tuple[Reader, ...], data: st.DataObject) -> None:
    reader = data.draw(st.sampled_from(readers))
    content = data.draw(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
    outcome = judge(reader.read, reader.file, content)
    assert not outcome.failed, outcome


def test_an_input_depends_on_reader_number_and_seed(readers: tuple[Reader, ...]) -> None:
    reader, other = readers[0], readers[1]
    assert input_of(reader, 3, seed=0) == input_of(reader, 3, seed=0)
    assert len({input_of(r, n, seed) for r in (reader, other) for n in range(3) for seed in range(3)}) > 10
    sound = (b'{"a": [1, "{\\"b\\": 2}"]}',)
    changed = {mutated(random.Random(seed), sound) for seed in range(300)}
    assert len(changed) > 150


# -- negative controls -----------------------------------------------------------------------------------------------


def lets_a_key_error_through(file: Path) -> None:
    json.loads(file.read_bytes())["weight_map"]


def runs_forever(file: Path) -> None:
    while True:
        pass


def waits_forever(file: Path) -> None:
    time.sleep(60)


def allocates_what_the_header_promises(file: Path) -> None:
    b"x" * json.loads(file.read_bytes())["size"]


def refuses(file: Path) -> None:
    raise IsobasinError("not today")


@pytest.mark.parametrize(
    ("read", "content", "verdict"),
    [
        (lets_a_key_error_through, {}, "KeyError"),
        (lets_a_key_error_through, {"weight_map": 1}, "accepted"),
        (runs_forever, {}, "hang"),
        (waits_forever, {}, "hang"),
        (allocates_what_the_header_promises, {"size": 2**28}, "memory"),
        (allocates_what_the_header_promises, {"size": 2**45}, "memory"),
        (allocates_what_the_header_promises, {"size": 2**10}, "accepted"),
        (refuses, {}, "refused"),
    ],
)
def test_a_bad_reader_is_found(read: fuzzing.Read, content: object, verdict: str, tmp_path: Path) -> None:
    outcome = judge(
        read, tmp_path / "x.json", json.dumps(content).encode(), max_seconds=0.3 if verdict == "hang" else 30
    )
    assert outcome.verdict == verdict
    assert outcome.failed == (verdict not in ("accepted", "refused"))


def test_a_failure_is_in_the_table(tmp_path: Path) -> None:
    campaign = Campaign(seed=0)
    reader = Reader("bad", tmp_path / "x.json", lets_a_key_error_through, (b"{}",))
    while not campaign.failures:
        campaign.run(reader, campaign.rows["bad"].inputs if campaign.rows else 0)
    found = campaign.to_dict(1.0)
    assert found["readers"]["bad"]["failed"] == 1
    assert found["failures"][0].keys() == {"reader", "number", "failure", "detail"}
    assert math.isfinite(found["readers"]["bad"]["longest_seconds"])
