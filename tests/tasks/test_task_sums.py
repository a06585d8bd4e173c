"""MetricSums: exact means whatever the batches are, and NaN that is never averaged away."""

import math
from pathlib import Path

import pytest
import torch
from task_subjects import TEXT, own

from isobasin.errors import IsobasinError
from isobasin.runtime import module_of
from isobasin.tasks import IGNORED, Batch, MetricSums, open_task


def batch(targets: list[int]) -> Batch:
    return Batch({}, torch.tensor(targets), None)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_means_are_weighted_by_tokens_whatever_the_batches(batch_size: int, tmp_path: Path) -> None:
    """Against a loop over windows and tokens in float64: the last window is shorter than the others."""
    (tmp_path / "x.txt").write_text(TEXT, encoding="utf-8")
    model = own(causal=True)
    module, content = module_of(model).double(), TEXT.encode()
    losses, hits = [], []
    module.requires_grad_(False)
    for start in range(0, len(content), 20):
        ids = torch.tensor(list(content[start : start + 20]))
        said = module(ids[None])[0].log_softmax(-1)
        losses += [-float(said[i, ids[i + 1]]) for i in range(len(ids) - 1)]
        hits += [int(said[i].argmax() == ids[i + 1]) for i in range(len(ids) - 1)]
    assert len(content) % 20 > 1  # negative control below: the mean of window means is another number

    task = open_task(tmp_path / "x.txt", [model], seq_len=20, batch_size=batch_size)
    single = [MetricSums.of(module(b.inputs["input_ids"]), b) for b in task]
    total = sum(single, MetricSums())
    found = total.metrics("lm")
    mean = sum(losses) / len(losses)
    assert found["loss"] == pytest.approx(mean, rel=1e-6)
    assert found["accuracy"] == pytest.approx(sum(hits) / len(hits), abs=1e-12)
    assert found["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(mean / math.log(2), rel=1e-6)  # one byte a token
    assert total.count == len(losses) == total.n_bytes
    unweighted = sum(s.loss / s.count for s in single) / len(single)
    assert abs(unweighted - mean) > 1e-4


def test_ignored_positions_count_for_nothing() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0], [5.0, 1.0]])
    found = MetricSums.of(logits, batch([0, IGNORED, 1]))
    expected = -logits[0].log_softmax(0)[0] - logits[2].log_softmax(0)[1]
    assert (found.count, found.correct) == (2, 1.0)
    assert found.loss == pytest.approx(float(expected), rel=1e-6)
    assert MetricSums.of(logits, batch([0, 1, 1])).count == 3


def test_a_logit_that_is_not_a_number_spoils_loss_and_accuracy() -> None:
    logits = torch.tensor([[math.nan, 0.0], [0.0, 3.0]])
    found = (MetricSums.of(logits, batch([1, 1])) + MetricSums.of(logits[1:], batch([1]))).metrics("text")
    assert math.isnan(found["loss"])
    assert math.isnan(found["accuracy"])
    ignored = MetricSums.of(logits, batch([IGNORED, 1])).metrics("text")  # where nothing is scored it does no harm
    assert ignored["accuracy"] == 1.0
    assert math.isfinite(ignored["loss"])


def test_half_precision_logits_are_measured_in_float32() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    targets = list(range(7)) * 7 + [0]
    assert MetricSums.of(logits, batch(targets)) == MetricSums.of(logits.float(), batch(targets))
    assert MetricSums.of(logits, batch(targets)) != MetricSums.of(
        logits.float() + 1e-2 * torch.eye(50, 7), batch(targets)
    )


def test_what_each_kind_is_told() -> None:
    sums = MetricSums(6.0, 1.0, 3, 4)
    assert sums.metrics("lm").keys() == {"loss", "accuracy", "perplexity", "bits_per_byte"}
    assert (sums + MetricSums(0.0, 0.0, 1, None)).metrics("lm").keys() == {"loss", "accuracy", "perplexity"}
    assert sums.metrics("mlm").keys() == {"loss", "accuracy", "perplexity"}
    assert sums.metrics("image") == {"loss": 2.0, "accuracy": 1 / 3}
    assert sums.metrics("lm")["bits_per_byte"] == pytest.approx(6 / math.log(2) / 4)
    assert MetricSums(1e6, 0.0, 1, None).metrics("lm")["perplexity"] == math.inf
    with pytest.raises(IsobasinError, match="nothing was scored"):
        MetricSums().metrics("lm")
