"""Images: every layout read back, refused pickles, and pixels as the model wants them."""

import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_subjects import own, pixels, saved, write_cifar_python, write_idx, write_picture

from isobasin.errors import IsobasinError
from isobasin.tasks import open_task, read_images, scaled
from isobasin.tasks.images import load_pickle

pytestmark = pytest.mark.hf

LABELS = np.array([2, 0, 1, 1, 2], dtype=np.uint8)


def vit(size: int = 6, channels: int = 1, classes: int = 3) -> Any:
    return own(image_size=size, patch_size=size // 2, n_channels=channels, n_classes=classes)


# -- MNIST -----------------------------------------------------------------------------------------------------------


def write_mnist(folder: Path, end: str = "", prefix: str = "t10k", joint: str = "-", seed: int = 0) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    array = pixels(5, 6, 6, seed=seed)
    write_idx(folder / f"{prefix}-images{joint}idx3-ubyte{end}", array)
    write_idx(folder / f"{prefix}-labels{joint}idx1-ubyte{end}", LABELS)
    return array


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("joint", ["-", "."])
def test_mnist(end: str, joint: str, tmp_path: Path) -> None:
    test = write_mnist(tmp_path / "MNIST" / "raw", end, joint=joint)
    train = write_mnist(tmp_path / "MNIST" / "raw", end, "train", joint, seed=1)
    for place in (tmp_path, tmp_path / "MNIST", tmp_path / "MNIST" / "raw"):
        assert np.array_equal(read_images(place).pixels, test[..., None])
        assert np.array_equal(read_images(place, "train").pixels, train[..., None])
    one = read_images(tmp_path / "MNIST" / "raw" / f"train-images{joint}idx3-ubyte{end}")
    assert np.array_equal(one.pixels, train[..., None])
    assert one.labels.tolist() == LABELS.tolist()
    assert one.classes is None


def test_pixels_for_our_own_model(tmp_path: Path) -> None:
    array = write_mnist(tmp_path)
    task = open_task(tmp_path, [vit()], batch_size=2)
    assert [len(batch) for batch in task] == [2, 2, 1]
    found = torch.cat([batch.inputs["pixel_values"] for batch in task])
    expected = (array.astype(np.float64) / 255 - 0.5) / 0.5
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found[:, 0].numpy(), expected, atol=1e-7)
    assert torch.cat([batch.targets for batch in task]).tolist() == LABELS.tolist()
    colour = torch.cat([batch.inputs["pixel_values"] for batch in open_task(tmp_path, [vit(channels=3)])])
    assert torch.equal(colour, found.repeat(1, 3, 1, 1))
    assert float(scaled(np.array([0, 255], np.uint8).reshape(1, 1, 2, 1)).sum()) == 0.0


def broken_idx(folder: Path, change: str) -> None:
    images, labels = folder / "t10k-images-idx3-ubyte", folder / "t10k-labels-idx1-ubyte"
    content = images.read_bytes()
    if change == "no labels":
        labels.unlink()
    elif change == "fewer labels":
        write_idx(labels, LABELS[:3])
    elif change == "label outside":
        write_idx(labels, LABELS + 1)
    elif change == "not idx":
        images.write_bytes(b"text" + content)
    elif change == "short":
        images.write_bytes(content[:-1])
    elif change == "long":
        images.write_bytes(content + b"x")
    elif change == "huge":
        images.write_bytes(content[:4] + b"\xff" * 12)
    elif change == "empty":
        images.write_bytes(b"")
    else:
        images.rename(folder / "t10k-images-idx3-ubyte.gz")


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ("no labels", r"t10k-labels-idx1-ubyte: can not be read"),
        ("fewer labels", r"5 images, but 3 labels"),
        ("label outside", r"image 1 has the label 3; the model's classes are 0 to 2"),
        ("not idx", r"starts with b'text'; expected an IDX file"),
        ("short", r"179 bytes or more, its head says 180"),
        ("long", r"181 bytes or more, its head says 180"),
        ("huge", r"which it does not hold"),
        ("empty", r"expected an IDX file"),
        ("not gzipped", r"gz: can not be read \(Not a gzipped file"),
    ],
)
def test_a_damaged_idx_file(change: str, pattern: str, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    assert len(open_task(tmp_path, [vit()]).fingerprint) == 64
    broken_idx(tmp_path, change)
    with pytest.raises(IsobasinError, match=pattern):
        open_task(tmp_path, [vit()])


# -- CIFAR -----------------------------------------------------------------------------------------------------------


def cifar(n: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 32, 32, 3), and the same as the files hold them."""
    array = pixels(n, 32, 32, 3, seed=seed)
    return array, array.transpose(0, 3, 1, 2).reshape(n, -1)


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_cifar_10(layout: str, tmp_path: Path) -> None:
    test, planes = cifar()
    parts = [cifar(seed=seed) for seed in (1, 2)]
    if layout == "binary":
        for name, rows in {"test_batch": planes, "data_batch_1": parts[0][1], "data_batch_2": parts[1][1]}.items():
            (tmp_path / f"{name}.bin").write_bytes(np.concatenate([LABELS[:, None], rows], 1).tobytes())
        (tmp_path / "batches.meta.txt").write_text("plane\ncar\nbird\n\n")
    else:
        for name, rows in {"test_batch": planes, "data_batch_1": parts[0][1], "data_batch_2": parts[1][1]}.items():
            write_cifar_python(tmp_path, name, rows, LABELS.tolist())
        (tmp_path / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"plane", b"car", b"bird"]}))
    found = read_images(tmp_path)
    assert np.array_equal(found.pixels, test)
    assert found.labels.tolist() == LABELS.tolist()
    assert found.classes == ("plane", "car", "bird")
    assert np.array_equal(read_images(tmp_path, "train").pixels, np.concatenate([part for part, _ in parts]))


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_cifar_100_is_read_with_its_fine_labels(layout: str, tmp_path: Path) -> None:
    test, planes = cifar()
    if layout == "binary":
        coarse = np.full((5, 1), 9, np.uint8)
        (tmp_path / "test.bin").write_bytes(np.concatenate([coarse, LABELS[:, None], planes], 1).tobytes())
    else:
        write_cifar_python(tmp_path, "test", planes, LABELS.tolist(), key=b"fine_labels")
    found = read_images(tmp_path)
    assert np.array_equal(found.pixels, test)
    assert found.labels.tolist() == LABELS.tolist()


class Payload:
    """What a pickle can do to whoever trusts it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_pickle_that_runs_commands_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    content = pickle.dumps({b"data": Payload(f"touch {marker}"), b"labels": [0]}, protocol=2)
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(IsobasinError, match=r"a pickle that is refused .*system, which is no array"):
        read_images(tmp_path)
    assert not marker.exists()
    pickle.loads(content)  # negative control: trusted, it does run
    assert marker.exists()


@pytest.mark.parametrize("wanted", [eval, getattr, np.load, zlib.decompress, Path])
def test_nothing_but_arrays_is_made_from_a_pickle(wanted: Any, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps([wanted]))
    with pytest.raises(IsobasinError, match=r"which is no array"):
        load_pickle(tmp_path / "x")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_honest_pickles_of_every_protocol(protocol: int, tmp_path: Path) -> None:
    content = {"a": np.arange(6).reshape(2, 3), "b": [b"x", {1, 2}, (3.5, None, True)]}
    (tmp_path / "x").write_bytes(pickle.dumps(content, protocol=protocol))
    found = load_pickle(tmp_path / "x")
    assert np.array_equal(found["a"], content["a"])
    assert found["b"] == content["b"]


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (pickle.dumps([1]), r"expected a CIFAR batch"),
        (pickle.dumps({b"data": b"x" * 3072, b"labels": [1]}), r"expected a CIFAR batch"),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, protocol=2), r"2 images with 1 labels"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["a"]}, protocol=2), r"a whole number for"),
        (b"", r"a pickle that is refused \(EOFError"),
        (b"garbage", r"a pickle that is refused"),
    ],
)
def test_a_damaged_cifar_pickle(content: bytes, pattern: str, tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(IsobasinError, match=pattern):
        read_images(tmp_path)


def test_a_damaged_cifar_record(tmp_path: Path) -> None:
    (tmp_path / "test_batch.bin").write_bytes(b"x" * 3074)
    with pytest.raises(IsobasinError, match=r"3,074 bytes, expected records of 3073 bytes"):
        read_images(tmp_path)


# -- pictures --------------------------------------------------------------------------------------------------------


def write_pictures(folder: Path, *classes: str, size: int = 6, n: int = 2) -> dict[str, np.ndarray]:
    found = {name: pixels(n, size, size, 3, seed=i) for i, name in enumerate(classes)}
    for name, arrays in found.items():
        for i, array in enumerate(arrays):
            write_picture(folder / name / f"{i}.png", array)
    return found


def targets(data: Path, *models: Any) -> list[int]:
    return torch.cat([batch.targets for batch in open_task(data, models)]).tolist()


def test_a_folder_per_class(tmp_path: Path) -> None:
    arrays = write_pictures(tmp_path / "train", "dog", "cat")
    arrays = write_pictures(tmp_path / "test", "fox", "cat", "dog")
    (tmp_path / "test" / "cat" / "notes.txt").write_text("no picture")
    (tmp_path / "test" / "empty").mkdir()
    found = read_images(tmp_path)
    assert found.classes == ("cat", "dog", "fox")
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2]
    expected = np.concatenate([arrays[name] for name in found.classes])
    assert np.array_equal(np.stack(list(found.pixels)), expected)
    assert read_images(tmp_path, "train").classes == ("cat", "dog")
    assert targets(tmp_path, vit(channels=3)) == [0, 0, 1, 1, 2, 2]


def test_classes_by_the_models_own_names(tmp_path: Path) -> None:
    write_pictures(tmp_path / "x", "dog", "cat")
    names = {str(i): name for i, name in enumerate(["fox", "dog", "cow", "cat", "hen"])}
    assert targets(tmp_path / "x", saved("vit-classifier", tmp_path / "m", id2label=names)) == [3, 3, 1, 1]
    others = names | {"3": "rat"}
    with pytest.raises(IsobasinError, match=r"class folders cat, dog do not match the model's classes: fox, dog, cow"):
        targets(tmp_path / "x", saved("vit-classifier", tmp_path / "m", id2label=others))


def test_classes_by_number_or_by_order(tmp_path: Path) -> None:
    write_pictures(tmp_path / "numbers", "10", "2", n=1)
    assert targets(tmp_path / "numbers", vit(channels=3, classes=12)) == [10, 2]
    write_pictures(tmp_path / "names", "a", "b")
    assert targets(tmp_path / "names", vit(channels=3, classes=2)) == [0, 0, 1, 1]
    with pytest.raises(IsobasinError, match=r"class folders a, b do not match the model's classes: 3 without names"):
        targets(tmp_path / "names", vit(channels=3))


def test_colour_becomes_grey_for_one_channel(tmp_path: Path) -> None:
    array = write_pictures(tmp_path, "a", "b")["a"][0].astype(np.float64)
    (batch,) = open_task(tmp_path, [vit(classes=2)])
    grey = (array @ [0.299, 0.587, 0.114]) / 127.5 - 1
    np.testing.assert_allclose(batch.inputs["pixel_values"][0, 0].numpy(), grey, atol=0.01)


def test_an_image_processor_does_its_own_resizing(tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    write_pictures(tmp_path / "x", "0", "1", size=9)
    model = saved("vit-classifier", tmp_path / "m")
    with pytest.raises(IsobasinError, match=r"a picture of 9 × 9, but the model reads 6 × 6 and has no preprocessor"):
        open_task(tmp_path / "x", [model])
    settings = (
        '{"image_processor_type": "ViTImageProcessor", "size": {"height": %d, "width": 6}, "image_mean": [0, 0, 0]}'
    )
    (tmp_path / "m" / "preprocessor_config.json").write_text(settings % 6)
    task = open_task(tmp_path / "x", [model])
    (batch,) = task
    processor = AutoImageProcessor.from_pretrained(tmp_path / "m")
    expected = processor(images=list(read_images(tmp_path / "x").pixels), return_tensors="pt")["pixel_values"]
    assert torch.equal(batch.inputs["pixel_values"], expected)
    assert expected.shape == (4, 3, 6, 6)
    (tmp_path / "m" / "preprocessor_config.json").write_text(settings % 7)
    with pytest.raises(IsobasinError, match=r"makes pixels \(3, 7, 6\), the model reads \(3, 6, 6\)"):
        next(iter(open_task(tmp_path / "x", [model])))
    assert open_task(tmp_path / "x", [model]).fingerprint != task.fingerprint
    other = saved("vit-classifier", tmp_path / "n")
    (tmp_path / "n" / "preprocessor_config.json").write_text(settings % 6)
    with pytest.raises(IsobasinError, match=r"its preprocessor_config.json differs from that of"):
        open_task(tmp_path / "x", [model, other])


@pytest.mark.parametrize("layout", ["mnist", "pictures"])
def test_images_of_another_size(layout: str, tmp_path: Path) -> None:
    if layout == "mnist":
        write_mnist(tmp_path)
    else:
        write_pictures(tmp_path, "a", "b", "c")
    with pytest.raises(IsobasinError, match=r"a picture of 6 × 6, but the model reads 8 × 8"):
        open_task(tmp_path, [vit(8, channels=1 if layout == "mnist" else 3)])


def test_an_absurdly_large_picture(tmp_path: Path) -> None:
    """A file of a few bytes whose head says 70,000 × 70,000, and one of 9,000 × 9,000 that Pillow would still take."""
    write_pictures(tmp_path, "a", "b", "c")
    for size in (70_000, 9_000):
        head = b"\x89PNG\r\n\x1a\n"
        for kind, content in ((b"IHDR", size.to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"), (b"IEND", b"")):
            check = zlib.crc32(kind + content).to_bytes(4, "big")
            head += len(content).to_bytes(4, "big") + kind + content + check
        (tmp_path / "a" / "0.png").write_bytes(head)
        with pytest.raises(IsobasinError, match=r"0.png: an absurdly large picture"):
            open_task(tmp_path, [vit(channels=3)])


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path, "a", "b", "c", size=64)
    file = tmp_path / "b" / "1.png"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(IsobasinError, match=r"b/1.png: a damaged picture"):
        list(open_task(tmp_path, [vit(64, channels=3)]))
    file.write_bytes(b"no picture")
    with pytest.raises(IsobasinError, match=r"b/1.png: not a picture that Pillow can read"):
        open_task(tmp_path, [vit(64, channels=3)])
    file.write_bytes(content)
    assert len(list(open_task(tmp_path, [vit(64, channels=3)]))) == 1


def test_a_folder_without_images(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("words")
    np.save(tmp_path / "x.npy", np.zeros((2, 1, 6, 6)))
    with pytest.raises(IsobasinError, match=r"x: no labelled images of the split 'test' in it; expected MNIST's"):
        open_task(tmp_path / "x", [vit()])
    with pytest.raises(IsobasinError, match=r"notes.txt: a file such as text, but this model reads images"):
        open_task(tmp_path / "x" / "notes.txt", [vit()])
    with pytest.raises(IsobasinError, match=r"x.npy: an array has no labels"):
        open_task(tmp_path / "x.npy", [vit()])
