"""Where a data set lies under a root: the standard layouts, by name. No torch here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from isobasin.errors import IsobasinError


@dataclass(frozen=True)
class Known:
    """A data set that is known by name: its kind, the places to look at under the root, its id on the hub."""

    kind: str  # image, text or lm
    places: tuple[str, ...]
    hub: str | None = None  # `owner/name`, or `owner/name:configuration`
    vocabulary: str = "bytes"


KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        "mnist": Known("image", ("MNIST", "mnist"), "ylecun/mnist"),
        "fashion-mnist": Known(
            "image", ("FashionMNIST", "fashion-mnist", "fashion_mnist"), "zalando-datasets/fashion_mnist"
        ),
        "cifar10": Known("image", ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10"), "uoft-cs/cifar10"),
        "cifar100": Known("image", ("cifar-100-python", "cifar-100-binary", "cifar100"), "uoft-cs/cifar100"),
        "tiny-imagenet": Known("image", ("tiny-imagenet-200", "tiny-imagenet"), "zh-plus/tiny-imagenet"),
        "imagenet": Known("image", ("imagenet", "ILSVRC/Data/CLS-LOC", "ILSVRC2012"), "ILSVRC/imagenet-1k"),
        "ag_news": Known("text", ("ag_news", "ag_news_csv"), "fancyzhx/ag_news", "words"),
        "imdb": Known("text", ("imdb", "aclImdb"), "stanfordnlp/imdb", "words"),
        "dbpedia": Known("text", ("dbpedia", "dbpedia_csv", "dbpedia_14"), "fancyzhx/dbpedia_14", "words"),
        "enwik8": Known("lm", ("enwik8/enwik8", "enwik8")),
        "wikitext-103": Known(
            "lm", ("wikitext-103-raw", "wikitext-103", "wikitext"), "Salesforce/wikitext:wikitext-103-raw-v1"
        ),
        "one-billion-word": Known(
            "lm",
            ("1-billion-word-language-modeling-benchmark-r13output", "one-billion-word", "lm1b"),
            "billion-word-benchmark/lm1b",
        ),
        "tinyshakespeare": Known("lm", ("tinyshakespeare/input.txt", "tinyshakespeare")),
    }
)
SHIPPED: Mapping[str, Known] = MappingProxyType({"digits": Known("image", ()), "shakespeare": Known("lm", ())})
NAMES = (*SHIPPED, *KNOWN)


def find(name: str, known: Known, root: Path | None) -> Path | str:
    """The first place that is there; else the id on the hub, where there may be a network."""
    for place in known.places:
        if root is not None and (root / place).exists():
            return root / place
    if known.hub is not None and not offline():
        return known.hub
    where = "no data root was given" if root is None else f"not under {root}"
    raise IsobasinError(f"data set {name!r}: {where}; expected {' or '.join(known.places)} there: give --data ROOT")


def offline() -> bool:
    """Whether the hub must not be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
