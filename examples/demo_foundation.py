"""What exists so far, on a small model built here: info, check, scramble, and the way back."""

import sys
import tempfile
from pathlib import Path

import torch

import isobasin as ib
from isobasin.cli import run


def build(folder: Path, positions: str) -> Path:
    """A small Llama of our own with every parameter random: fresh gains of one would hide errors."""
    config = ib.ModelConfig.preset(
        "llama", positions=positions, d_model=64, n_layers=2, n_heads=4, d_ff=128, d_vocab=97
    )
    model = ib.Transformer(config, seed=0)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else noise / parameter.shape[-1] ** 0.5)
    model.save(folder)
    return folder


def command(*arguments: str | Path) -> None:
    words = [str(a) for a in arguments]
    print("\n$ isobasin", *words, flush=True)
    code = run(words)
    if code:
        sys.exit(code)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        plain, rotary = build(here / "plain", "none"), build(here / "rotary", "rope")
        command("info", plain)
        command("info", rotary)
        command("check", rotary)
        command("scramble", rotary, "-o", here / "scrambled", "--save-transform", here / "there.st")
        command("invert", here / "there.st", "-o", here / "back.st")
        command("apply", here / "back.st", here / "scrambled", "-o", here / "restored")

        original, scrambled, restored = (ib.Transformer.load(here / n) for n in ("rotary", "scrambled", "restored"))
        tokens = torch.randint(97, (4, 32), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            outputs = [model(tokens) for model in (original, scrambled, restored)]
        state, moved, again = (model.state_dict() for model in (original, scrambled, restored))
        weights = max(float((moved[k] - state[k]).norm() / state[k].norm()) for k in state)
        back = max(float((again[k] - state[k]).norm() / state[k].norm()) for k in state)
        change = float((outputs[1] - outputs[0]).abs().max() / outputs[0].abs().max())
        print(f"\nscrambled: weights moved by up to {weights:.2f} of their norm, outputs by {change:.1e}")
        print(f"restored:  weights within {back:.1e} of the original")


if __name__ == "__main__":
    main()
