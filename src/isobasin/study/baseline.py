"""The simple thing that a trained model stands beside: tf-idf of words and pairs of words, logistic regression."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import log_softmax

from isobasin.tasks.source import chosen

from .datasets import rows_of
from .vocabulary import words_in

LARGEST = 200_000  # terms
STRENGTH = 10.0  # C: how much the data weigh against ‖w‖²/2


def accuracy_of_words(name: str, root: Path | None, limits: Mapping[str, int]) -> dict[str, Any]:
    """Accuracy on the test split of a model that knows no order; `limits` may cut `train` and `test`.

    Gives {accuracy, terms, train, test}.
    """
    rows = rows_of(name, root)
    texts, classes = _some(*rows.train, limits.get("train"))
    test_texts, test_classes = _some(*rows.test, limits.get("test"))
    words = {word: i for i, word in enumerate(sorted({word for text in texts for word in words_in(text)}))}
    counted = Terms.of(texts, words)
    terms = counted.frequent(LARGEST)
    x = counted.counts(terms)
    rarity = inverse_frequency(x)
    weights = regression(weighted(x, rarity), classes, len(rows.classes))
    found = said(weights, weighted(Terms.of(test_texts, words).counts(terms), rarity))
    accuracy = float(np.mean(found.argmax(1) == test_classes))
    return {"accuracy": accuracy, "terms": len(terms), "train": len(texts), "test": len(test_texts)}


def _some(texts: Sequence[str], classes: Sequence[int], limit: int | None) -> tuple[list[str], np.ndarray]:
    used = chosen(len(texts), limit, seed=0)
    return [texts[i] for i in used], np.array([classes[i] for i in used])


@dataclass(frozen=True)
class Terms:
    """Every word and every pair of neighbours, as a number, with the text that it stands in."""

    texts: np.ndarray
    terms: np.ndarray
    n_texts: int

    @staticmethod
    def of(texts: Sequence[str], words: Mapping[str, int]) -> "Terms":
        """Words that are not known are left out, with the pairs they are in."""
        ids = [np.array([words.get(word, -1) for word in words_in(text)], dtype=np.int64) for text in texts]
        place = np.repeat(np.arange(len(texts)), [len(one) for one in ids])
        row = np.concatenate(ids)
        pair = (place[1:] == place[:-1]) & (row[1:] >= 0) & (row[:-1] >= 0)
        pairs = (row[:-1] + 1) * len(words) + row[1:]  # behind the words, which are 0 … len(words) − 1
        known = row >= 0
        return Terms(
            np.concatenate([place[known], place[1:][pair]]), np.concatenate([row[known], pairs[pair]]), len(texts)
        )

    def frequent(self, most: int) -> np.ndarray:
        """The terms of two texts or more, those of most texts first if there are too many; in order."""
        span = int(self.terms.max()) + 1
        terms, n_texts = np.unique(np.unique(self.texts * span + self.terms) % span, return_counts=True)
        kept = np.argsort(-n_texts, kind="stable")[: min(most, int((n_texts > 1).sum()))]
        return np.sort(terms[kept])

    def counts(self, terms: np.ndarray) -> csr_matrix:
        """(texts, terms) how often each occurs."""
        column = np.searchsorted(terms, self.terms).clip(max=len(terms) - 1)
        here = terms[column] == self.terms
        ones = np.ones(int(here.sum()))
        return csr_matrix((ones, (self.texts[here], column[here])), shape=(self.n_texts, len(terms)))


def inverse_frequency(counts: csr_matrix) -> np.ndarray:
    """ln((1 + n) / (1 + number of texts with the term)) + 1."""
    holding = np.bincount(counts.indices, minlength=counts.shape[1])
    return np.log((1 + counts.shape[0]) / (1 + holding)) + 1


def weighted(counts: csr_matrix, rarity: np.ndarray) -> csr_matrix:
    """(1 + ln count) · rarity, each row of length 1."""
    found = counts.copy()
    found.data = (1 + np.log(found.data)) * rarity[found.indices]
    lengths = np.sqrt(np.asarray(found.multiply(found).sum(1))).ravel()
    found.data /= np.repeat(lengths.clip(min=1e-12), np.diff(found.indptr))
    return found


def regression(x: csr_matrix, y: np.ndarray, n_classes: int, *, strength: float = STRENGTH) -> np.ndarray:
    """Weights (classes, terms + 1), the last column the intercept: the minimum of ‖w‖²/2 + C Σ cross-entropy."""
    n_terms = x.shape[1]
    right = np.eye(n_classes)[y]

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(n_classes, n_terms + 1)
        log_chance = log_softmax(said(weights, x), axis=1)
        error = np.exp(log_chance) - right  # (texts, classes)
        gradient = np.empty_like(weights)
        gradient[:, :-1] = strength * (x.T @ error).T + weights[:, :-1]
        gradient[:, -1] = strength * error.sum(0)
        loss = 0.5 * float((weights[:, :-1] ** 2).sum()) - strength * float((log_chance * right).sum())
        return loss, gradient.ravel()

    start = np.zeros(n_classes * (n_terms + 1))
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 200, "ftol": 1e-7})
    return found.x.reshape(n_classes, n_terms + 1)


def said(weights: np.ndarray, x: csr_matrix) -> np.ndarray:
    """Scores (texts, classes)."""
    return x @ weights[:, :-1].T + weights[:, -1]
