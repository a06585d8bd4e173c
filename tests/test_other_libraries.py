"""What other libraries make of our folders: PEFT and sentence-transformers, where they are installed.

    pip install peft sentence-transformers
    pytest tests/test_other_libraries.py

Neither is needed by the package or by the other checks, which read and write the same files without them.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isobasin as ib
import tiny
from isobasin.cli import run

pytestmark = pytest.mark.hf
TARGETS = {
    "llama-untied": ["q_proj", "v_proj", "down_proj", "lm_head"],  # PEFT stores the weight of a head that it adapts
    "gpt2-lm-untied": ["c_attn", "c_proj"],  # inputs first
    "bert-classifier": ["query", "value"],
}


def change(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max() / y.abs().max())


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_are_what_peft_makes_of_them(name: str, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    case = tiny.case(name)
    tiny.save(case, tmp_path / "base")
    inputs = case.inputs(0)

    def based(folder: Path) -> Any:
        return type(case.build(seed=0)).from_pretrained(folder).eval()

    def outputs(base: Path, adapter: Path | None = None) -> Tensor:
        model = based(base) if adapter is None else peft.PeftModel.from_pretrained(based(base), adapter).eval()
        with torch.no_grad():
            return model(**inputs).logits

    adapters = [tmp_path / "zero", tmp_path / "one"]
    for seed, folder in enumerate(adapters):
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS[name], use_rslora=bool(seed))
        model = peft.get_peft_model(based(tmp_path / "base"), config)
        torch.manual_seed(seed)
        for parameter, tensor in model.named_parameters():
            if "lora_" in parameter:
                tensor.data = 0.3 * torch.randn_like(tensor)
        model.save_pretrained(folder)
    expected = outputs(tmp_path / "base", adapters[0])
    assert change(outputs(tmp_path / "base"), expected) > 0.01, "an adapter that does nothing shows nothing"

    ib.load(f"{tmp_path / 'base'}+{adapters[0]}").save(tmp_path / "merged")
    assert change(outputs(tmp_path / "merged"), expected) < 2e-5

    transform = ib.scramble(tmp_path / "base", seed=3)
    transform.apply(tmp_path / "base").save(tmp_path / "copy")
    ib.move_adapter(transform, adapters[0], tmp_path / "base").save(tmp_path / "moved")
    assert change(outputs(tmp_path / "copy", tmp_path / "moved"), expected) < 2e-5
    assert change(outputs(tmp_path / "copy", adapters[0]), expected) > 0.01

    ib.merge_adapters(adapters).save(tmp_path / "mean")
    ib.load(f"{tmp_path / 'base'}+{tmp_path / 'mean'}").save(tmp_path / "merged-mean")
    assert change(outputs(tmp_path / "merged-mean"), outputs(tmp_path / "base", tmp_path / "mean")) < 2e-5


def sentence_encoder(folder: Path, library: Any, *, seed: int = 0) -> Path:
    """A folder of sentence-transformers: an encoder, the mean of its outputs, and lengths of one."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "cat",
        "sat",
        "on",
        "mat",
        "a",
        "dog",
        "ran",
        "far",
        "away",
    ]
    (folder.parent / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=32, **sizes))
    encoder = folder.parent / f"{folder.name}-encoder"
    tiny.write(model, encoder)
    BertTokenizerFast(str(folder.parent / "vocab.txt")).save_pretrained(encoder)
    parts: Any = importlib.import_module("sentence_transformers.models")
    modules = [parts.Transformer(str(encoder), max_seq_length=8), parts.Pooling(16, pooling_mode="mean")]
    modules += [parts.Normalize()]
    library.SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    return folder


def test_folders_of_sentence_transformers_give_the_same_embeddings(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    a, b = (sentence_encoder(tmp_path / name, library, seed=seed) for seed, name in enumerate("ab"))
    sentences = ["the cat sat on the mat", "a dog ran far away", "far far far far far far far far far far"]

    def embeddings(folder: Path) -> Tensor:
        return torch.tensor(library.SentenceTransformer(str(folder), device="cpu").encode(sentences))

    expected = embeddings(a)
    assert run(["scramble", str(a), "-o", str(tmp_path / "copy")]) == 0
    assert change(embeddings(tmp_path / "copy"), expected) < 1e-5
    assert run(["merge", str(a), str(tmp_path / "copy"), "-o", str(tmp_path / "merged")]) == 0
    assert change(embeddings(tmp_path / "merged"), expected) < 1e-5
    assert change(embeddings(b), expected) > 0.1
    assert torch.allclose(embeddings(tmp_path / "merged").norm(dim=1), torch.ones(3), atol=1e-6), "lengths of one"
    (tmp_path / "copy/modules.json").unlink()  # without the other modules, lengths are others
    assert change(embeddings(tmp_path / "copy"), expected) > 0.1
