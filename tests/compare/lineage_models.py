"""Models with a known history: a base trained for a while, and copies, fine-tunes, merges, pruned and shortened models.

`Family(kind, folder)` makes them one by one, as folders of transformers. `TRUTH` is what `lineage` may say about each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import isobasin as ib

LENGTH, BATCH, VOCABULARY = 32, 8, 128


def model_of(kind: str, seed: int) -> Any:
    """A random model of a kind: `llama`, `llama-wide`, `gpt2`, `bert`."""
    import transformers as hf

    torch.manual_seed(seed)
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
    if kind.startswith("llama"):
        width = 64 if kind == "llama-wide" else 48
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": kind == "llama-wide"}
        return hf.LlamaForCausalLM(hf.LlamaConfig(**small, **sizes, **heads))
    if kind == "gpt2":
        config = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=48, n_layer=3, n_head=4)
        return hf.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return hf.BertForMaskedLM(hf.BertConfig(**small, **sizes))


def text(start: int) -> Tensor:
    """A part of the text that ships with the package, as bytes; different starts give different parts."""
    raw = resources.files("isobasin.data").joinpath("shakespeare.txt").read_bytes()
    part = raw[start : start + 20_000]
    return torch.tensor([byte % VOCABULARY for byte in part])


def trained(model: Any, steps: int, lr: float, *, seed: int, start: int = 0, freeze: str = "") -> Any:
    """AdamW on windows of the text."""
    ids, rng = text(start), torch.Generator().manual_seed(seed)
    model.train()
    torch.manual_seed(seed)
    parameters = [p for name, p in model.named_parameters() if not freeze or freeze not in name]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
    for _ in range(steps):
        at = torch.randint(len(ids) - LENGTH, (BATCH, 1), generator=rng) + torch.arange(LENGTH)
        loss = model(input_ids=ids[at], labels=ids[at]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def distilled(student: Any, teacher: Any, steps: int, *, seed: int) -> Any:
    """A new model trained on the predictions of another one."""
    ids, rng = text(0), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    for _ in range(steps):
        at = torch.randint(len(ids) - LENGTH, (BATCH, 1), generator=rng) + torch.arange(LENGTH)
        with torch.no_grad():
            wanted = teacher(input_ids=ids[at]).logits.softmax(-1)
        loss = -(wanted * student(input_ids=ids[at]).logits.log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student.eval()


@dataclass(frozen=True)
class Family:
    """Makes models of one kind in a folder. Names are those of the folders."""

    kind: str
    folder: Path
    steps: int = 80  # of the base

    def path(self, name: str) -> Path:
        return self.folder / f"{self.kind}-{name}"

    def load(self, name: str) -> Any:
        import transformers as hf

        kind = hf.AutoModelForMaskedLM if self.kind == "bert" else hf.AutoModelForCausalLM
        return kind.from_pretrained(self.path(name), dtype=torch.float32)

    def save(self, model: Any, name: str, dtype: torch.dtype = torch.float32) -> Path:
        model.to(dtype).save_pretrained(self.path(name))
        return self.path(name)

    @cached_property
    def base(self) -> Path:
        return self.save(trained(model_of(self.kind, 0), self.steps, 3e-3, seed=0), "base")

    def independent(self, name: str, seed: int) -> Path:
        return self.save(trained(model_of(self.kind, seed), self.steps, 3e-3, seed=seed), name)

    def distilled(self, name: str, teacher: str, seed: int) -> Path:
        return self.save(distilled(model_of(self.kind, seed), self.load(teacher), self.steps, seed=seed), name)

    def tuned(self, name: str, of: str, steps: int, lr: float, seed: int, freeze: str = "") -> Path:
        start = 20_000 * (seed % 10)
        return self.save(trained(self.load(of), steps, lr, seed=seed, start=start, freeze=freeze), name)

    def scrambled(self, name: str, of: str, seed: int, dtype: str = "auto") -> Path:
        weights = ib.load(self.path(of))
        ib.scramble(weights, seed=seed).apply(weights).save(self.path(name), dtype=dtype)
        return self.path(name)

    def cast(self, name: str, of: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        return self.save(self.load(of), name, dtype)

    def averaged(self, name: str, weights: Mapping[str, float], dtype: torch.dtype = torch.float32) -> Path:
        """The weighted average of the weights as they are stored."""
        models = {part: self.load(part) for part in weights}
        result = next(iter(models.values()))
        states = {part: {n: t.clone() for n, t in m.state_dict().items()} for part, m in models.items()}
        with torch.no_grad():
            for key, tensor in result.state_dict().items():
                tensor.copy_(sum(w * states[part][key] for part, w in weights.items()))
        return self.save(result, name, dtype)

    def merged(self, name: str, weights: Mapping[str, float]) -> Path:
        """`isobasin merge`, which aligns the others to the first."""
        paths = [self.path(part) for part in weights]
        ib.merge(paths, weights=list(weights.values())).save(self.path(name))
        return self.path(name)

    def pruned(self, name: str, of: str, share: float) -> Path:
        """Without the smallest numbers of every matrix of a layer."""
        model = self.load(of)
        with torch.no_grad():
            for key, p in model.named_parameters():
                if (
                    p.ndim == 2
                    and "embed" not in key
                    and "wte" not in key
                    and "wpe" not in key
                    and "lm_head" not in key
                ):
                    least = p.abs().flatten().kthvalue(max(1, int(share * p.numel()))).values
                    p.mul_(p.abs() > least)
        return self.save(model, name)

    def shortened(self, name: str, of: str, layers: list[int]) -> Path:
        """Only some of the layers."""
        model = self.load(of)
        owner, key = {
            "llama": (getattr(model, "model", None), "layers"),
            "llama-wide": (getattr(model, "model", None), "layers"),
            "gpt2": (getattr(model, "transformer", None), "h"),
            "bert": (getattr(getattr(model, "bert", None), "encoder", None), "layer"),
        }[self.kind]
        kept = torch.nn.ModuleList([getattr(owner, key)[i] for i in layers])
        setattr(owner, key, kept)
        setattr(model.config, "n_layer" if self.kind == "gpt2" else "num_hidden_layers", len(kept))
        return self.save(model, name)
