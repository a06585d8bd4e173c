"""tf-idf and logistic regression: the formulas on a few words, order by pairs, chance where nothing can be learned."""

import csv
import random
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from isobasin.errors import IsobasinError
from isobasin.study.models import (
    TermOccurrences,
    class_scores,
    inverse_document_frequency,
    logistic_regression,
    tf_idf,
    tf_idf_accuracy,
)

FILL = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def written(folder: Path, mark: tuple[str, str], *, shuffled: bool = False) -> Path:
    """Sentences of ten words at random; one of two marks somewhere in them says the class."""
    draw = random.Random(0)
    folder.mkdir()
    for split, n in (("train", 200), ("test", 100)):
        rows = []
        for i in range(n):
            words = [draw.choice(FILL) for _ in range(10)]
            words.insert(draw.randrange(10), mark[i % 2])
            rows.append([draw.randrange(2) if shuffled else i % 2, " ".join(words)])
        with (folder / f"{split}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([["label", "text"], *rows])
    return folder


def test_a_word_that_says_the_class_is_found(tmp_path: Path) -> None:
    found = tf_idf_accuracy(str(written(tmp_path / "a", ("good", "bad"))), None, {})
    assert found["accuracy"] == 1.0
    assert (found["train"], found["test"]) == (200, 100)
    blind = tf_idf_accuracy(str(written(tmp_path / "b", ("good", "bad"), shuffled=True)), None, {})
    assert 0.3 < blind["accuracy"] < 0.7
    cut = tf_idf_accuracy(str(tmp_path / "a"), None, {"train": 50, "test": 10})
    assert (cut["train"], cut["test"]) == (50, 10)


def test_pairs_of_words_know_their_order(tmp_path: Path) -> None:
    assert tf_idf_accuracy(str(written(tmp_path / "a", ("not good", "good not"))), None, {})["accuracy"] > 0.95


def test_terms_are_words_and_pairs_inside_a_text() -> None:
    terms = TermOccurrences.of(["a b a", "b new a"], {"a": 0, "b": 1})
    by_text = [sorted(terms.terms[terms.texts == i].tolist()) for i in (0, 1)]
    assert by_text == [[0, 0, 1, (0 + 1) * 2 + 1, (1 + 1) * 2 + 0], [0, 1]]  # nothing reaches over the unknown word
    assert terms.frequent(10).tolist() == [0, 1]
    assert terms.frequent(1).tolist() == [0]
    assert terms.counts(np.array([0, 1])).toarray().tolist() == [[2, 1], [1, 1]]


def test_the_weights_of_terms_are_the_formula() -> None:
    counts = csr_matrix(np.array([[2.0, 1.0], [0.0, 3.0]]))
    rarity = inverse_document_frequency(counts)
    assert rarity == pytest.approx([np.log(3 / 2) + 1, np.log(3 / 3) + 1])
    first = np.array([(1 + np.log(2)) * rarity[0], rarity[1]])
    assert tf_idf(counts, rarity).toarray()[0] == pytest.approx(first / np.linalg.norm(first))
    assert tf_idf(counts, rarity).toarray()[1] == pytest.approx([0, 1])


def test_the_regression_stands_at_its_minimum() -> None:
    draw = np.random.default_rng(0)
    x, y = csr_matrix(draw.normal(size=(30, 4))), draw.integers(0, 3, 30)
    weights = logistic_regression(x, y, 3, strength=2.0)

    def loss(w: np.ndarray) -> float:
        scores = class_scores(w, x)
        chance = scores[np.arange(30), y] - np.log(np.exp(scores).sum(1))
        return float(0.5 * (w[:, :-1] ** 2).sum() - 2.0 * chance.sum())

    around = [loss(weights + 0.05 * draw.normal(size=weights.shape)) for _ in range(20)]
    assert min(around) > loss(weights)
    assert loss(np.zeros_like(weights)) > loss(weights) + 1


def test_only_labelled_text_has_a_baseline() -> None:
    with pytest.raises(IsobasinError, match="'digits' is image, expected labelled text"):
        tf_idf_accuracy("digits", None, {})
