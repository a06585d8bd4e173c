"""Text to tokens: the table in Python is the tokenizer on disk, and nothing is lost or counted twice."""

from pathlib import Path

import pytest
import torch

from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.model import ModelConfig, Transformer
from isobasin.tasks import open_task
from isobasin.tasks.datasets import open_dataset
from isobasin.tasks.tokenizer import Vocabulary, make_vocabulary, split_words
from isobasin.weights import load

ODD = [
    "It's 5 o'clock!<br /><br />ÉTÉ naïve—“quotes”",
    "\tTabs\nand   blanks",
    "ΣΑΣ 漢字 ✓ _under_score_",
    "a" * 300,
    "",
]


def texts() -> list[str]:
    return shipped("shakespeare").read_text("utf-8")[:60_000].split("\n\n")


def test_words_in_python_are_the_tokenizers_words() -> None:
    found = make_vocabulary("words-800", [*texts(), *ODD, *ODD])
    slow = Vocabulary(found.name, found.size, found.tokenizer)  # without the table
    assert torch.equal(found.rows([*texts(), *ODD], 64), slow.rows([*texts(), *ODD], 64))
    assert found.size == 800
    other = make_vocabulary("words-800", texts()[:50])
    assert not torch.equal(found.rows(texts(), 64), other.rows(texts(), 64))
    assert other.content != found.content


@pytest.mark.parametrize("kind", ["words-500", "characters", "bpe-400", "bytes"])
def test_what_is_saved_reads_the_same(kind: str, tmp_path: Path) -> None:
    found = make_vocabulary(kind, texts())
    found.save(tmp_path)
    again = Vocabulary.read(tmp_path, found.size)
    assert again.content == found.content == make_vocabulary(kind, texts()).content
    assert torch.equal(again.rows(ODD, 40), found.rows(ODD, 40))
    assert again.words == found.words
    assert int(found.rows([*texts(), *ODD], 200).max()) < found.size


@pytest.mark.parametrize("kind", ["characters", "bpe-400", "bytes"])
def test_tokens_of_a_long_text_cover_its_bytes(kind: str) -> None:
    content = "\n\n".join(texts()).encode()
    found = make_vocabulary(kind, texts())
    counts = found.n_bytes()
    assert counts is not None
    stream = found.stream(content).long()
    assert int(counts[stream].sum()) == len(content)
    assert (len(stream) == len(content)) == (not kind.startswith("bpe"))
    assert make_vocabulary("words-500", texts()).n_bytes() is None


def test_a_text_of_nothing_is_one_unknown_word() -> None:
    assert make_vocabulary("words", ["a a"]).rows(["", "a b"], 3).tolist() == [[1, 0, 0], [3, 1, 0]]
    assert split_words("") == []


def test_a_saved_model_reads_text_as_it_was_trained(tmp_path: Path) -> None:
    for split in ("train", "test"):
        rows = "".join(f'{i % 2},"{text}"\n' for i, text in enumerate(["It is good.", "It's <br />bad"] * 3))
        (tmp_path / f"{split}.csv").write_text(f"label,text\n{rows}")
    data = open_dataset(str(tmp_path), None, sequence=6)
    assert data.vocabulary is not None
    config = ModelConfig.preset(
        "bert", d_model=8, n_layers=1, n_heads=2, d_ff=8, d_vocab=data.vocabulary.size, n_positions=6
    )
    Transformer(config).save(tmp_path / "model")
    data.vocabulary.save(tmp_path / "model")
    theirs = next(iter(open_task(tmp_path / "test.csv", [load(tmp_path / "model")])))
    ours = next(iter(data.task()))
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(ours.inputs[name], theirs.inputs[name])
    assert torch.equal(ours.targets, theirs.targets)
    assert ours.inputs["input_ids"][0].tolist() != ours.inputs["input_ids"][1].tolist()


def test_a_vocabulary_nobody_knows_is_refused() -> None:
    with pytest.raises(IsobasinError, match="vocabulary 'syllables' is unknown, expected one of bytes, characters"):
        make_vocabulary("syllables", ["a"])
    with pytest.raises(IsobasinError, match="at least 260"):
        make_vocabulary("words-100", ["a"])
