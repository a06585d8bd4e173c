"""Models, tokenizers and data files for the tests of tasks, each as small as it can be."""

import gzip
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np

import tiny
from isobasin.model import ModelConfig, Transformer
from isobasin.weights import Weights, load

TEXT = "Äpfel fallen, und der Baum steht — 你好, tree! " * 12
WORDS = ["the", "heads", "of", "a", "model", "may", "be", "shuffled", "and", "turned", "and", "nobody", "sees", "it"]


def own(**settings: Any) -> Weights:
    """The project's own model in memory, every parameter drawn at random."""
    sizes: dict[str, Any] = {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8}
    if "image_size" not in settings:
        sizes |= {"d_vocab": 256, "n_positions": 32}
    config = ModelConfig(**(sizes | settings))
    return load(tiny.randomize(Transformer(config), 0).state_dict(), config.to_dict())


def saved(case: str, folder: Path, **config: Any) -> Weights:
    """A tiny transformers model through its folder, with some keys of config.json changed."""
    tiny.save(tiny.case(case), folder)
    found = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(found))
    return load(folder)


def word_tokenizer(folder: Path, *, frame: str = "", words: list[str] = WORDS, first: int = 5, **special: str) -> Any:
    """A few words by their place; `frame` such as "[CLS] $A [SEP]" puts special tokens around a text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    known = {name: i for i, name in enumerate(["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]"])}
    known |= {word: first + i for i, word in enumerate(dict.fromkeys(words))}
    plain = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    if frame:
        plain.post_processor = TemplateProcessing(single=frame, special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    made = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", **special)
    made.save_pretrained(folder)
    return made


def byte_level_tokenizer(folder: Path, merges: int = 0, frame: str = "") -> Any:
    """Byte-level BPE as GPT-2's, over the bytes and a few merges learned from TEXT."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=257 + merges, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    plain.train_from_iterator([TEXT], trainer)
    if frame:
        plain.post_processor = TemplateProcessing(single=frame, special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>")
    made.save_pretrained(folder)
    return made


def write_idx(file: Path, array: np.ndarray) -> None:
    content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_cifar_python(folder: Path, name: str, planes: np.ndarray, labels: list[int], key: bytes = b"labels") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(pickle.dumps({b"data": planes, key: labels, b"filenames": [b"x"]}, protocol=2))


def write_picture(file: Path, array: np.ndarray) -> None:
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array.squeeze()).save(file)
