"""A short version of the campaign of verdicts: a few cases of every kind, and its own checks can fail."""

from dataclasses import replace
from itertools import islice

import pytest
import verdicts

from isobasin.compare import outputs

pytestmark = pytest.mark.hf


@pytest.mark.parametrize(
    ("cases", "first", "step"),
    [
        (lambda: verdicts.copies("isobasin-rope"), 1, 4),
        (lambda: verdicts.changes("isobasin-rope", 1), 1, 4),
        (lambda: verdicts.small_parts("isobasin-rope"), 3, 9),
        (lambda: verdicts.small_parts("llama-gqa"), 15, 30),
        (verdicts.config_changes, 1, 4),
    ],
)
def test_no_wrong_verdict(cases, first, step) -> None:  # type: ignore[no-untyped-def]
    for case in islice(cases(), first, None, step):
        result = verdicts.judge(case)
        assert not result.wrong, result.to_dict()


def test_a_floor_of_few_perturbed_copies_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a model in which numbers of 3e19 cancel is no other model. An input with a small noise floor is run on
    more perturbed copies; the control runs none."""
    wanted = ("copy of a small part", "unit", 1e-20)
    case = next(c for c in verdicts.small_parts("cohere2-tied") if (c.kind, c.what, c.size) == wanted)
    result = verdicts.judge(case)
    assert (result.verdict.answer, result.wrong) == ("undecided", False)
    comparison = outputs.OutputComparison(case.a, case.b, "stored", 0)
    (first, *_) = comparison.compare(outputs.probes(comparison.a, comparison.b, seed=0))
    few = replace(first, rounding=first.difference / 100)
    (confirmed,) = comparison._confirmed([few])
    assert confirmed.ratio < few.ratio
    monkeypatch.setattr(outputs, "CONFIRMED", 0.0)
    assert comparison._confirmed([few]) == [few]


def test_a_wrong_verdict_is_noticed() -> None:
    """The same results with the other answer are wrong, and the measured effect tells a copy from a change."""
    copy = verdicts.judge(next(verdicts.copies("isobasin-rope")))
    change = next(c for c in verdicts.changes("isobasin-rope", 7) if c.size == 1000 and c.what.startswith("tensor"))
    changed = verdicts.judge(change)
    assert copy.effect < verdicts.MIN_DIFFERENT < verdicts.MAX_SAME < changed.effect
    for result, answer in ((copy, "different"), (changed, "same")):
        assert not result.wrong
        assert replace(result, verdict=replace(result.verdict, answer=answer)).wrong
    assert verdicts.table([copy, changed])[0]["wrong"] == 0
