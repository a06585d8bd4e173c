"""Language modelling and masked language modelling: which tokens, in which windows, for how many bytes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_subjects import TEXT, WORDS, byte_level_tokenizer, own, saved, word_tokenizer
from torch import Tensor

import isobasin.tasks.loader as loader
from isobasin.errors import IsobasinError
from isobasin.tasks import IGNORED, Batch, Task, open_task
from isobasin.tasks.tokenizer import ModelTokenizer
from isobasin.weights import Weights

pytestmark = pytest.mark.hf


def text(folder: Path, content: str = TEXT, name: str = "x.txt") -> Path:
    (folder / name).write_bytes(content.encode())
    return folder / name


def rows(batches: Iterable[Batch]) -> list[Tensor]:
    return [row for batch in batches for row in batch.inputs["input_ids"]]


def same(a: Task, b: Task) -> bool:
    def flat(task: Task) -> list[Tensor]:
        return [x for batch in task for x in (*batch.inputs.values(), batch.targets)]

    return len(flat(a)) == len(flat(b)) and all(map(torch.equal, flat(a), flat(b)))


# -- windows ---------------------------------------------------------------------------------------------------------


def test_bytes_are_cut_into_windows_that_do_not_overlap(tmp_path: Path) -> None:
    task = open_task(text(tmp_path), [own(causal=True)], seq_len=25, batch_size=4)
    content = TEXT.encode()
    expected = [list(content[i : i + 25]) for i in range(0, len(content), 25)]
    assert [row.tolist() for row in rows(task)] == expected
    assert task.n_samples == len(expected)
    last = list(task)[-1]
    assert last.inputs["input_ids"].shape == (1, len(content) % 25)  # the shorter one alone
    for batch in task:
        ids = batch.inputs["input_ids"]
        assert torch.equal(batch.targets[:, :-1], ids[:, 1:])
        assert (batch.targets[:, -1] == IGNORED).all()
        assert batch.n_bytes == ids.numel() - len(ids)


def test_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, content in {"b.txt": "B\r\n", "a.md": "A", "sub/c.txt": "C", ".hidden.txt": "no", "x.png": "no"}.items():
        (tmp_path / name).write_bytes(content.encode())
    (row,) = rows(open_task(tmp_path, [own(causal=True)]))
    assert bytes(row.tolist()) == b"A\nB\r\n\nC"  # line ends as they are


def test_the_first_windows_are_the_same_however_much_is_read(tmp_path: Path) -> None:
    byte_level_tokenizer(tmp_path / "m", merges=30)
    model, place = own(causal=True, d_vocab=400), text(tmp_path, TEXT * 20)
    whole = open_task(place, [model], seq_len=16, tokenizer=tmp_path / "m")
    part = open_task(place, [model], seq_len=16, tokenizer=tmp_path / "m" / "tokenizer.json", max_samples=7)
    assert [x.tolist() for x in rows(part)] == [x.tolist() for x in rows(whole)[:7]]
    assert part.n_samples == 7 < whole.n_samples
    assert part.settings["characters"] < whole.settings["characters"] == len(TEXT) * 20
    assert part.fingerprint != whole.fingerprint


def test_blanks_at_the_start_are_no_empty_file(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "m")
    model = saved("llama-untied", tmp_path / "m")
    task = open_task(text(tmp_path, " " * 5000 + " ".join(WORDS)), [model], seq_len=4, max_samples=2)
    assert len(rows(task)) == 2


def test_a_long_text_is_read_up_to_a_limit_that_the_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "MAX_CHARACTERS", 50)
    task = open_task(text(tmp_path, "a" * 200), [own(causal=True)], seq_len=10)
    assert (task.n_samples, task.settings["characters"]) == (5, 50)
    assert open_task(tmp_path / "x.txt", [own(causal=True)], seq_len=10, max_samples=15).n_samples == 15


# -- token ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["1-D", "2-D", "uint16", "big-endian", "bin"])
def test_files_of_token_ids(kind: str, tmp_path: Path) -> None:
    ids = np.arange(22) % 30
    file = tmp_path / ("x.bin" if kind == "bin" else "x.npy")
    if kind == "bin":
        ids.astype("<u2").tofile(file)
    else:
        shaped = ids.reshape(2, 11) if kind == "2-D" else ids
        np.save(file, shaped.astype({"uint16": np.uint16, "big-endian": ">i4"}.get(kind, np.int64)))
    task = open_task(file, [saved("gpt2-lm-tied", tmp_path / "m")], seq_len=5)
    cuts = [(0, 5), (5, 10), (11, 16), (16, 21)] if kind == "2-D" else [(i, min(i + 5, 22)) for i in range(0, 22, 5)]
    assert [row.tolist() for row in rows(task)] == [ids[slice(*cut)].tolist() for cut in cuts]  # one token: nothing
    assert all(batch.n_bytes is None for batch in task)


# -- special tokens and bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [True, False])
def test_every_window_starts_with_the_token_that_the_tokenizer_puts_in_front(bos: bool, tmp_path: Path) -> None:
    made = word_tokenizer(tmp_path / "m", frame="[CLS] $A [SEP]" if bos else "", bos_token="[CLS]")
    task = open_task(text(tmp_path, " ".join(WORDS * 3)), [saved("llama-untied", tmp_path / "m")], seq_len=8)
    plain = made.convert_tokens_to_ids(WORDS * 3)
    step, front = (7, [1]) if bos else (8, [])
    cuts = [plain[i : i + step] for i in range(0, len(plain), step)]
    assert [row.tolist() for row in rows(task)] == [front + cut for cut in cuts if len(cut) + len(front) > 1]
    scored = sum(int((batch.targets != IGNORED).sum()) for batch in task)
    assert scored == sum(len(cut) - (0 if bos else 1) for cut in cuts)  # with it, every word is predicted


@pytest.mark.parametrize("bos", [True, False])
def test_bytes_covered_by_words(bos: bool, tmp_path: Path) -> None:
    """A blank that no token covers goes to the word behind it; ä and 你 are two and three bytes."""
    words = ["ä", "bb", "你好", "d", "e"]
    word_tokenizer(tmp_path / "m", frame="[CLS] $A" if bos else "", words=words)
    model = saved("llama-untied", tmp_path / "m")
    task = open_task(text(tmp_path, "ä bb  你好 d\ne "), [model], seq_len=4 if bos else 3)
    sizes = [2, 3, 8, 2, 2]
    expected = [sum(sizes[:3]) + 0, sum(sizes[3:])] if bos else [sizes[1] + sizes[2], sizes[4]]
    assert [batch.n_bytes for batch in task] == expected


@pytest.mark.parametrize("merges", [0, 40])
def test_bytes_covered_by_byte_level_tokens(merges: int, tmp_path: Path) -> None:
    """Windows end inside characters: what was cut must be counted once, and only once."""
    byte_level_tokenizer(tmp_path / "plain", merges)
    byte_level_tokenizer(tmp_path / "bos", merges, frame="<s> $A")
    model, place, size = own(causal=True, d_vocab=400), text(tmp_path), len(TEXT.encode())
    with_bos = open_task(place, [model], tokenizer=tmp_path / "bos", seq_len=7)
    assert sum(batch.n_bytes or 0 for batch in with_bos) == size  # everything is predicted
    plain = open_task(place, [model], tokenizer=str(tmp_path / "plain"), seq_len=7)
    found = sum(batch.n_bytes or 0 for batch in plain)
    assert found < size
    if not merges:  # a token is a byte
        assert found == sum(int((batch.targets != IGNORED).sum()) for batch in plain)


def test_offsets_alone_would_miscount_the_bytes(tmp_path: Path) -> None:
    """Negative control for the test above: without the spelling of the tokens, the halves of a character differ."""
    made = ModelTokenizer(byte_level_tokenizer(tmp_path), "x", "")
    exact = made.encode("你a")[1]
    made.tokenizer.backend_tokenizer.decoder = None
    by_offsets = made.encode("你a")[1]
    assert exact is not None
    assert by_offsets is not None
    assert exact.tolist() == [1, 1, 1, 1]
    assert by_offsets.tolist() == [3, 0, 0, 1]


def test_a_slow_tokenizer_does_not_know_its_bytes() -> None:
    class Slow:
        is_fast = False

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text.split())}

    ids, n_bytes = ModelTokenizer(Slow(), "x", "").encode("a b c")
    assert ids.tolist() == [1, 1, 1]
    assert n_bytes is None


# -- masking ---------------------------------------------------------------------------------------------------------


def masked_model(folder: Path) -> Weights:
    word_tokenizer(folder, frame="[CLS] $A [SEP]", mask_token="[MASK]", cls_token="[CLS]", sep_token="[SEP]")
    return saved("bert-masked-lm-tied", folder)


def test_masked_windows(tmp_path: Path) -> None:
    model = masked_model(tmp_path / "m")
    place = text(tmp_path, " ".join(WORDS * 400))
    plain = [5 + list(dict.fromkeys(WORDS)).index(word) for word in WORDS * 400]
    seen, targets = [], []
    for batch in open_task(place, [model], seq_len=16, seed=3):
        assert batch.n_bytes is None
        seen += batch.inputs["input_ids"].tolist()
        targets += batch.targets.tolist()
    assert all(row[0] == 1 and row[-1] == 2 for row in seen)
    assert all(row[0] == row[-1] == IGNORED for row in targets)
    pairs = [(s, t) for a, b in zip(seen, targets) for s, t in zip(a[1:-1], b[1:-1])]
    assert [s if t == IGNORED else t for s, t in pairs] == plain  # nothing else was touched, and targets are the text
    scored = [(s, t) for s, t in pairs if t != IGNORED]
    assert len(scored) / len(pairs) == pytest.approx(2 / 14, abs=0.01)  # 15 % of 14, in whole tokens
    hidden = sum(s == 3 for s, _ in scored) / len(scored)
    kept = sum(s == t for s, t in scored) / len(scored)
    assert hidden == pytest.approx(0.8, abs=0.05)
    assert kept == pytest.approx(0.1, abs=0.05)


def test_masking_depends_on_the_seed_alone(tmp_path: Path) -> None:
    model = masked_model(tmp_path / "m")
    place = text(tmp_path, " ".join(WORDS * 20))
    a, b, other = (open_task(place, [model], seq_len=16, seed=seed) for seed in (0, 0, 1))
    assert same(a, b)
    assert same(a, a)
    assert a.fingerprint == b.fingerprint
    assert not same(a, other)
    assert a.fingerprint != other.fingerprint
    one = open_task(place, [model], seq_len=16, batch_size=1)
    assert all(map(torch.equal, rows(a), rows(one)))  # whatever the batches


def test_our_own_model_masks_bytes(tmp_path: Path) -> None:
    model = own(d_vocab=257)
    (batch, *_) = open_task(text(tmp_path, "abcdefghij" * 3), [model], seq_len=20)
    ids, targets = batch.inputs["input_ids"], batch.targets
    assert 256 in ids
    assert set(targets[ids == 256].tolist()) <= set(range(97, 107))
    assert int((targets != IGNORED).sum()) == 3  # 15 % of 20
    with pytest.raises(IsobasinError, match=r"bytes without a mask token \(of bytes: d_vocab ≥ 257\)"):
        open_task(tmp_path / "x.txt", [own()])


def test_token_ids_are_masked_with_the_tokenizers_mask(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.full((3, 10), 7))
    with pytest.raises(IsobasinError, match="no tokenizer, so nothing can be masked"):
        open_task(tmp_path / "x.npy", [saved("bert-masked-lm-tied", tmp_path / "bare")])
    (batch,) = open_task(tmp_path / "x.npy", [masked_model(tmp_path / "m")], seq_len=10)
    scored = batch.targets != IGNORED
    assert (batch.targets[scored] == 7).all()
    assert (batch.inputs["input_ids"][~scored] == 7).all()
    assert scored.sum(1).tolist() == [2, 2, 2]
