"""The data inside the package: small, unchanged, balanced, licensed, readable."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from isobasin.data import SHIPPED, shipped
from isobasin.errors import IsobasinError
from isobasin.tasks import read_images

MOST_BYTES = 2_300_000
SHARES = [0.0987, 0.1124, 0.0993, 0.1022, 0.0974, 0.0904, 0.0986, 0.1044, 0.0975, 0.0992]  # of all 60,000
SUMS = {
    "digits/A/config.json": "3c4efb2c6fa77acbc9cc5942049a5ca69c422e73de34b78d56db539674cab10d",
    "digits/A/model.safetensors": "481c7adb915fc3f797025a4301ec1ee56fb71fdf330b3174109d218c29353c6d",
    "digits/B/config.json": "3c4efb2c6fa77acbc9cc5942049a5ca69c422e73de34b78d56db539674cab10d",
    "digits/B/model.safetensors": "af45a08aeec2b07f4bf612e1aa44996da7b7d54d11a479bcea0e280bcd959b0c",
    "mnist/t10k-images-idx3-ubyte.gz": "9059cadffa1d514790be34d5e8435a289f65a851f2c1b380e98494e256425ffd",
    "mnist/t10k-labels-idx1-ubyte.gz": "9016d84c0ff2a402884fc39ac1dfcb3ec411c5581759174110390192c6e1c7b5",
    "mnist/train-images-idx3-ubyte.gz": "2914b7c2c66f3d172ee7000fac0838fcf23cdd30c17f59a30f1ee76384097790",
    "mnist/train-labels-idx1-ubyte.gz": "7b088c25df9ba9eeebee4af60d0d9d5649e8ad956f41fbcc660deceb44abd89a",
    "shakespeare.txt": "6aa4761d5374d2286ec46687d63f8072d121cae9cac83d94ba0e3e1e13c4bd42",
}


def balanced(labels: np.ndarray) -> bool:
    """Whether every digit occurs about as often as in the whole of MNIST."""
    found = np.bincount(labels, minlength=10) / len(labels)
    return len(found) == 10 and bool(np.abs(found - SHARES).max() < 0.015)


def files_in(folder: Path) -> dict[str, Path]:
    data = (p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc"))
    return {p.relative_to(folder).as_posix(): p for p in data}


def test_every_file_is_the_one_that_was_made_and_all_are_small() -> None:
    found = files_in(shipped("licence").parent)
    assert 1_000_000 < sum(path.stat().st_size for path in found.values()) <= MOST_BYTES
    del found["LICENSE.md"]
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()} == SUMS


@pytest.mark.parametrize(("split", "count"), [("train", 8000), ("test", 2000)])
def test_images_are_readable_and_balanced(split: str, count: int) -> None:
    images = read_images(shipped("mnist"), split)
    pixels = np.asarray(images.pixels)
    assert pixels.shape == (count, 28, 28, 1)
    assert pixels.dtype == np.uint8
    assert (pixels.reshape(count, -1).max(1) > 128).all()  # no empty picture
    assert balanced(images.labels)
    assert not balanced(np.sort(images.labels)[: count // 2])


def test_the_two_splits_share_no_picture() -> None:
    train, test = ({p.tobytes() for p in read_images(shipped("mnist"), split).pixels} for split in ("train", "test"))
    assert len(train) > 7900
    assert len(test) > 1900
    assert train & test == set()


def test_the_text_is_plain_and_whole() -> None:
    text = shipped("shakespeare").read_bytes().decode("ascii")
    assert len(text) == 249_547
    assert text.startswith("First Citizen:\n")
    assert text.endswith("\n")
    assert "CORIOLANUS" in text
    assert "ROMEO" not in text  # from later in the whole


def test_the_licence_names_owners_terms_and_what_was_taken() -> None:
    said = shipped("licence").read_text("utf-8")
    taken = ("the first 8,000", "the first 2,000", "249,547")
    for words in (
        "LeCun",
        "Cortes",
        "Burges",
        "ShareAlike 3.0",
        "public domain",
        "isobasin demo --train --seed 0",
        *taken,
    ):
        assert words in said
    assert "the first 9,000" not in said


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    for name in SHIPPED:
        assert shipped(name).exists()
    with pytest.raises(IsobasinError, match=r"no data named 'cifar'.*mnist, digits, shakespeare, licence"):
        shipped("cifar")
