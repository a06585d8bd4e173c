"""Fuzzing of every file that isobasin reads: damaged files give an `IsobasinError`, in bounded time and memory.

    python tests/campaigns/fuzzing.py --inputs 100000 -o results/reliability/fuzzing.json

Each reader has sound files. An input is one of them, changed by a few mutations: of bytes (flips, cuts, copies, hostile
tokens, extreme lengths), or of the JSON inside it. Input `number` of a reader depends on nothing but the two and the
seed, so `--reader NAME --number N` repeats one. A failure is an exception other than `IsobasinError`, more than
MAX_SECONDS, or more memory than `budget` gives to a file of its size.
"""

# ruff: noqa: E402

import argparse
import faulthandler
import gzip
import json
import logging
import math
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "tasks")]

import numpy as np
import torch
from task_subjects import write_idx, write_picture

import path_documents
import tiny
from isobasin.cli.distance import _read_fingerprint
from isobasin.cli.options import MemoryOptions
from isobasin.compare.fingerprint import fingerprint
from isobasin.errors import IsobasinError, one_line
from isobasin.files import ResumeFile
from isobasin.merging.recipe import read_recipe
from isobasin.model import ModelConfig, Transformer
from isobasin.report import read_result, verdict
from isobasin.runtime import CPU, image_shape, max_length, vocabulary_size
from isobasin.study.config import read_grid
from isobasin.study.store import stored_studies
from isobasin.symmetries import symmetry
from isobasin.symmetries.transform import scramble
from isobasin.symmetries.transform_file import load_transform, save_transform
from isobasin.tasks.images import PictureFiles, read_cifar, read_idx_pair
from isobasin.tasks.task import label_names
from isobasin.tasks.text import class_numbers, read_ids, read_table, read_text
from isobasin.tasks.tokenizer import Vocabulary, make_vocabulary
from isobasin.weights import load

MAX_SECONDS = 5.0
MEGABYTE = 2**20
FIXED_BYTES, BYTES_PER_BYTE = 64 * MEGABYTE, 256  # of memory: for any file, and for each of its bytes
ADDRESS_SPACE = 4 * 2**30  # that a reader may reserve: more is what a header promises, not what the file holds

Read = Callable[[Path], object]


@dataclass(frozen=True)
class Reader:
    """A function that reads one file, sound files for it, and the folder with whatever must lie beside the file."""

    name: str
    file: Path
    read: Read
    sound: tuple[bytes, ...]


# -- readers ---------------------------------------------------------------------------------------------------------

TOML = """name = "x"
[[cells]]
model = "vit"
layers = [1, 2]
heads = 2
width = 8
dataset = "digits"
scope = "first-attention"
seeds = [1, 2, 3]
matchers = ["weights", {matcher = "learned", steps = 3, rate = 0.1}]
require = {accuracy = 0.5}
[cells.pretrain]
epochs = 0.5
[cells.finetune]
steps = 3
rate = [1e-3, 2e-3]
"""
YAML = """models:
- model: a
  parameters: {weight: 0.3}
- model: "b\\u00e4"
  parameters: {weight: 1e-1}
merge_method: linear
base_model: a
parameters: {normalize: true}
dtype: float32
align: {scope: model, matcher: weights, to: 0}
"""
CSV = 'label,text\n1,the heads\n0,"a ""model"", and\nmore"\n'
JSONL = '{"label": 1, "text": "the heads"}\n{"label": 0, "title": "\\u00e4\\ud83d\\ude00", "text": "x"}\n'
KEY = {"models": ["a"], "seed": 0}


def readers(root: Path) -> tuple[Reader, ...]:
    """All readers; their files lie in folders of their own under `root`."""
    made = (
        *_checkpoint_readers(root / "checkpoint"),
        *_table_readers(root / "tables"),
        *_image_readers(root / "images"),
        *_document_readers(root / "documents"),
        *_resume_readers(root / "resume"),
    )
    for reader in made:
        for content in reader.sound:  # imports and caches are no memory of an input
            reader.file.write_bytes(content)
            reader.read(reader.file)
    return made


def _reader(name: str, folder: Path, file: str, read: Read, *sound: bytes | str) -> Reader:
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    return Reader(name, place / file, read, tuple(s.encode() if isinstance(s, str) else s for s in sound))


def _read_model(file: Path) -> None:
    """All that commands ask of a checkpoint folder."""
    weights = load(file.parent)
    symmetry(weights.arch)
    image_shape(weights), max_length(weights), vocabulary_size(weights), label_names([weights])
    for name in weights:
        weights[name]


def _load_own(file: Path) -> None:
    Transformer.load(file.parent)


def _checkpoint_readers(root: Path) -> Iterator[Reader]:
    own = Transformer(ModelConfig(d_model=8, n_layers=1, n_heads=2, d_ff=8, d_vocab=16, n_positions=8))
    root.mkdir(parents=True)
    own.save(root / "own")
    shutil.copytree(root / "own", root / "safetensors")
    yield _reader(
        "safetensors", root, "model.safetensors", _read_model, (root / "own" / "model.safetensors").read_bytes()
    )
    for case in ("llama-gqa", "gpt2-lm-tied", "bert-classifier", "vit-classifier", "gpt_neox-half-rotary"):
        tiny.save(tiny.case(case), root / f"config-{case}")
        config = (root / f"config-{case}" / "config.json").read_bytes()
        yield _reader(f"config-{case}", root, "config.json", _read_model, config)
    for file, read in (("config.json", _read_model), ("config.json", _load_own), ("model.safetensors", _load_own)):
        name = f"{'own' if read is _load_own else 'config-own'}-{Path(file).suffix[1:]}"
        shutil.copytree(root / "own", root / name)
        yield _reader(name, root, file, read, (root / "own" / file).read_bytes())
    tiny.save(tiny.case("llama-gqa"), root / "index", max_shard_size="8KB")
    index = "model.safetensors.index.json"
    yield _reader("index", root, index, _read_model, (root / "index" / index).read_bytes())
    yield from _pickled(root)
    llama = load(root / "config-llama-gqa")
    yield _reader(
        "fingerprint",
        root,
        "f.txt",
        lambda file: _read_fingerprint(str(file), CPU, MemoryOptions()),
        str(fingerprint(llama)),
    )
    files = []
    for seed, model in enumerate((llama, load(root / "own"), load(root / "config-gpt2-lm-tied"))):
        save_transform(scramble(model, seed=seed), root / f"t{seed}.safetensors")
        files.append((root / f"t{seed}.safetensors").read_bytes())
    yield _reader("transform", root, "t.safetensors", load_transform, *files)


def _pickled(root: Path) -> Iterator[Reader]:
    state = load(root / "own").state_dict("float32")
    files = []
    for zipped in (True, False):
        torch.save(state, root / "state.bin", _use_new_zipfile_serialization=zipped)
        files.append((root / "state.bin").read_bytes())
    place = root / "bin"
    place.mkdir()
    shutil.copyfile(root / "own" / "config.json", place / "config.json")
    yield _reader("bin", root, "pytorch_model.bin", _read_model, *files)


def _read_labelled(file: Path) -> None:
    read_text(file, 1000)
    class_numbers(read_table(file).labels, 2, {}, file)


def _table_readers(root: Path) -> Iterator[Reader]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    yield _reader("csv", root, "x.csv", _read_labelled, CSV, "1,the heads\n2,of a model\n")
    yield _reader("jsonl", root, "x.jsonl", _read_labelled, JSONL)
    pq.write_table(pa.table({"text": ["a", "b"] * 9, "label": [0, 1] * 9}), root / "x.parquet")
    yield _reader("parquet", root, "x.parquet", _read_labelled, (root / "x.parquet").read_bytes())
    arrays = []
    for array in (np.arange(24), np.arange(24, dtype=">u2").reshape(4, 6)):
        np.save(root / "x.npy", array)
        arrays.append((root / "x.npy").read_bytes())
    yield _reader("npy", root, "x.npy", partial(read_ids, d_vocab=32), *arrays)
    yield _reader("ids", root, "x.bin", partial(read_ids, d_vocab=32), np.arange(24, dtype="<u2").tobytes())
    make_vocabulary("words-300", ["the heads of the heads"]).save(root)
    words = (root / "tokenizer.json").read_bytes()
    yield _reader("tokenizer", root, "tokenizer.json", lambda file: Vocabulary.read(file.parent, 300), words)


def _image_readers(root: Path) -> Iterator[Reader]:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    for suffix in ("png", "jpg", "gif", "bmp", "webp", "tif", "ppm"):
        write_picture(root / f"x.{suffix}", pixels)
        content = (root / f"x.{suffix}").read_bytes()
        yield _reader(f"picture-{suffix}", root, f"x.{suffix}", lambda file: PictureFiles((file,))[0], content)
    for name in ("images.idx3-ubyte", "images.idx3-ubyte.gz"):
        place = root / f"idx{Path(name).suffix}"
        place.mkdir()
        write_idx(place / name, pixels)
        write_idx(place / "labels.idx1-ubyte", pixels[:, 0, 0])
        read = partial(_read_idx, labels=place / "labels.idx1-ubyte")
        yield _reader(place.name, root, name, read, (place / name).read_bytes())
    planes, labels = np.zeros((2, 3072), np.uint8), [3, 4]
    batches = [pickle.dumps({b"data": planes, b"labels": labels}, protocol=protocol) for protocol in (0, 2, 4)]
    yield _reader("cifar-pickle", root, "test_batch", lambda file: read_cifar([file]), *batches)
    yield _reader("cifar-binary", root, "test_batch.bin", lambda file: read_cifar([file]), bytes(2 * 3073))


def _read_idx(images: Path, labels: Path) -> None:
    read_idx_pair(images, labels)


def _document_readers(root: Path) -> Iterator[Reader]:
    yield _reader("grid", root, "g.toml", read_grid, TOML)
    yield _reader("recipe", root, "r.yml", read_recipe, YAML)
    documents = [json.dumps(found) for found in (path_documents.document(), path_documents.minimal())]
    yield _reader("path", root, "path.json", _read_path, *documents)
    rows = [{"study": {"format": 1, "name": "x", "cells": [], "failed": []}}, {"name": "a-1", "result": {"loss": 1.5}}]
    packed = "\n".join(map(json.dumps, rows))
    yield _reader("packed-study", root, "x.jsonl", lambda file: stored_studies(file.parent), packed)


def _read_path(file: Path) -> None:
    for pair in read_result(file).pairs:
        verdict(pair)


def _resume_readers(root: Path) -> Iterator[Reader]:
    for name, tensors, value in (("resume", False, {"loss": [1.5, 2]}), ("resume-tensors", True, {"w": torch.ones(3)})):
        (root / name).mkdir(parents=True)
        store = ResumeFile(root / name / "out", "partial", KEY, tensors=tensors)
        store.keep("a", value)
        yield _reader(name, root, store.path.name, partial(_read_resume, tensors=tensors), store.path.read_bytes())


def _read_resume(file: Path, tensors: bool) -> None:
    found = ResumeFile(file.parent / "out", "partial", KEY, tensors=tensors)
    if found.find("a") is None:  # a damaged file counts as empty
        raise IsobasinError(f"{file.name}: counts as empty")


# -- mutations -------------------------------------------------------------------------------------------------------

TOKENS = (
    *(
        b"",
        b"\0",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\x1b[31m",
        b"\xe2\x80\xae",
        b"\n",
        b",",
        b":",
        b"{",
        b"}",
        b"[",
        b"]",
    ),
    *(b'"', b"'", b"-1", b"0", b"2", b"1e400", b"NaN", b"true", b"null", b"18446744073709551617", b"9" * 5000, b".."),
    *(b"0x" + b"f" * 5000, b"[" * 2000, b"{'a':" * 500, b'{"a":' * 500, b"\\ud800", b"!!int ''", b"!!bool x", b"&a"),
    *(b"!!timestamp x", b"*a", b"1:" * 500, b"a." * 500, b"<f8", b"|O", b"F64", b"F8_E4M3", b"(1125899906842624,)"),
    *(b"/etc/passwd", b"label"),
)
SIZES = (0, 1, 2, 127, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 10**30, -(10**30), 1.5, 1e300, -1e-300, math.nan, math.inf),
    *("", "x", "\ud800", "\x1b[31m", "1", "a" * 3000, "../x", "F32", "llama"),
    *([], {}, [[]], [1, 2, 3], {"a": 1}),
)
GZIP, PNG = b"\x1f\x8b", b"\x89PNG"


def mutated(rng: random.Random, sound: Sequence[bytes]) -> bytes:
    """A sound file after up to four mutations."""
    content = rng.choice(list(sound))
    if content.startswith(GZIP) and rng.random() < 0.5:
        return gzip.compress(mutated(rng, [gzip.decompress(content)]), mtime=0)
    if rng.random() < 0.5 and (changed := _changed_json(rng, content)) is not None:
        return changed if rng.random() < 0.8 else _changed_bytes(rng, changed, sound)
    for _ in range(rng.choice((1, 1, 2, 4))):
        change = _changed_word if rng.random() < 0.3 else _changed_bytes
        content = change(rng, content, sound)
    return _with_checksums(content) if content.startswith(PNG) and rng.random() < 0.7 else content


def _changed_word(rng: random.Random, content: bytes, sound: Sequence[bytes]) -> bytes:
    """A word or number replaced by another of the file, or by a hostile one."""
    words = list(re.finditer(rb"[\w.+-]+", content))
    if not words:
        return _changed_bytes(rng, content, sound)
    place, other = rng.choice(words), rng.choice(words)[0]
    return content[: place.start()] + rng.choice((other, rng.choice(TOKENS))) + content[place.end() :]


def _with_checksums(content: bytes) -> bytes:
    """A PNG file whose chunks have valid checksums, so that their content is decoded."""
    found, at = bytearray(content[:8]), 8
    while at + 8 <= len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        body = content[at + 4 : at + 8 + length]
        found += content[at : at + 4] + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + length
    return bytes(found)


def _changed_bytes(rng: random.Random, content: bytes, sound: Sequence[bytes]) -> bytes:
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    b = min(b, a + 2 ** rng.randrange(12))
    kind = rng.randrange(8)
    if kind == 0 and content:  # flip a bit
        a = min(a, len(content) - 1)
        return content[:a] + bytes([content[a] ^ 1 << rng.randrange(8)]) + content[a + 1 :]
    if kind == 1:
        return content[:a]
    if kind == 2:
        return content[:a] + content[b:]
    if kind == 3:
        return content[:b] + content[a:b] * rng.randrange(1, 20) + content[b:]
    if kind == 4:
        return content[:a] + rng.randbytes(b - a) + content[b:]
    if kind == 5:
        return content[:a] + rng.choice(TOKENS) + content[rng.choice((a, b)) :]
    if kind == 6:
        size = struct.pack(rng.choice("<>") + "Q", rng.choice(SIZES))
        size = size[: rng.choice((1, 2, 4, 8))] if rng.random() < 0.5 else size[-rng.choice((1, 2, 4, 8)) :]
        a = rng.choice((a, rng.randrange(16)))
        return content[:a] + size + content[a + len(size) :]
    other = rng.choice(list(sound))
    return content[:a] + other[b:]


def _changed_json(rng: random.Random, content: bytes) -> bytes | None:
    """A value of the JSON inside the file replaced, removed or copied; None if there is none."""
    start, end = _json_span(content)
    try:
        document = json.loads(content[start:end])
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.choice((1, 1, 2))):
        document = _changed_value(rng, document)
    text = json.dumps(document).encode()
    if start == 0:
        return text
    text += b" " * (-len(text) % 8)  # the header of a safetensors file, preceded by its length
    return struct.pack("<Q", len(text)) + text + content[end:]


def _json_span(content: bytes) -> tuple[int, int]:
    length = int.from_bytes(content[:8], "little")
    return (8, 8 + length) if content[8:9] == b"{" and length <= len(content) else (0, len(content))


def _changed_value(rng: random.Random, value: Any) -> Any:
    """Go down to a random place, and change it there. A string may hold JSON itself."""
    if isinstance(value, str) and value.startswith("{") and rng.random() < 0.9:
        return json.dumps(_changed_value(rng, json.loads(value)))
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key, copy = rng.choice(keys), value.copy()
        if rng.random() < 0.15:
            del copy[key]
        elif rng.random() < 0.1:
            copy[key] = copy[rng.choice(keys)]
        else:
            copy[key] = _changed_value(rng, copy[key])
        return copy
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 2**20, 2**62))
    return rng.choice(VALUES)


# -- judgement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a reader did with one input: accepted, refused, or the name of a failure."""

    verdict: str
    seconds: float
    memory: int
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.verdict not in ("accepted", "refused")


class _TooSlow(BaseException):
    """Raised by the alarm inside a reader that takes too long."""


def budget(n_bytes: int) -> int:
    """Bytes of memory that reading a file of `n_bytes` may take."""
    return FIXED_BYTES + BYTES_PER_BYTE * n_bytes


def judge(read: Read, file: Path, content: bytes, *, max_seconds: float = MAX_SECONDS) -> Outcome:
    """Write the content to the file, read it, and measure time and memory."""
    file.write_bytes(content)
    before, began = _restart_peak(), time.perf_counter()
    verdict, detail = "accepted", ""
    try:
        with _alarm(max_seconds), _limited_address_space():
            read(file)
    except IsobasinError as error:
        verdict, detail = "refused", one_line(str(error))
    except _TooSlow:
        verdict = "hang"
    except MemoryError as error:
        verdict, detail = "memory", f"MemoryError: {error}"
    except BaseException as error:  # pyo3 raises a BaseException for a panic
        if isinstance(error, KeyboardInterrupt):
            raise
        verdict, detail = type(error).__name__, f"{error!s:.300}"
    seconds, memory = time.perf_counter() - began, max(0, _peak() - before)
    if verdict in ("accepted", "refused") and memory > budget(len(content)):
        verdict, detail = "memory", f"{memory:,} bytes for a file of {len(content):,}"
    return Outcome(verdict, seconds, memory, detail)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooSlow

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def _limited_address_space() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _restart_peak() -> int:
    """Set the recorded peak of resident memory to the memory that is resident now, and return it."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


# -- campaign --------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """The sums of one reader."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    longest_seconds: float = 0.0
    largest_memory_mb: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.inputs += 1
        self.accepted += outcome.verdict == "accepted"
        self.refused += outcome.verdict == "refused"
        self.failed += outcome.failed
        self.longest_seconds = max(self.longest_seconds, round(outcome.seconds, 3))
        self.largest_memory_mb = max(self.largest_memory_mb, round(outcome.memory / MEGABYTE, 1))


@dataclass
class Campaign:
    """The table of a run, and its failures with the number that repeats each."""

    seed: int
    rows: dict[str, Row] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def run(self, reader: Reader, number: int) -> Outcome:
        content = input_of(reader, number, self.seed)
        outcome = judge(reader.read, reader.file, content)
        self.rows.setdefault(reader.name, Row()).add(outcome)
        if outcome.failed:
            self.failures.append(
                {"reader": reader.name, "number": number, "failure": outcome.verdict, "detail": outcome.detail}
            )
        return outcome

    def to_dict(self, seconds: float) -> dict[str, Any]:
        return {
            "inputs": sum(row.inputs for row in self.rows.values()),
            "seed": self.seed,
            "seconds": round(seconds, 1),
            "limits": {"seconds": MAX_SECONDS, "bytes": FIXED_BYTES, "bytes_per_byte": BYTES_PER_BYTE},
            "readers": {name: asdict(row) for name, row in self.rows.items()},
            "failures": self.failures,
        }


def input_of(reader: Reader, number: int, seed: int) -> bytes:
    return mutated(random.Random(f"{reader.name} {seed} {number}"), reader.sound)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all, shared by the readers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", help="only this one")
    parser.add_argument("--number", type=int, help="only this input of the reader, with its traceback")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    began, campaign = time.perf_counter(), Campaign(given.seed)
    with tempfile.TemporaryDirectory() as root:
        chosen = [r for r in readers(Path(root)) if given.reader in (None, r.name)]
        if given.number is not None:
            chosen[0].file.write_bytes(input_of(chosen[0], given.number, given.seed))
            print(chosen[0].read(chosen[0].file))
            return 0
        for number in range(given.inputs):
            campaign.run(chosen[number % len(chosen)], number // len(chosen))
    found = campaign.to_dict(time.perf_counter() - began)
    for name, row in found["readers"].items():
        print(name, *row.values(), sep="\t")
    for failure in found["failures"][:50]:
        print(failure)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
