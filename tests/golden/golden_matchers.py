"""The part `matchers`: two trained ViT checkpoints, aligned by each matcher and measured on the line between them.

The checkpoints and 200 + 200 digits are in tests/golden/pair: models that `isobasin study run` trained for 1500 steps.
"""

from pathlib import Path
from typing import Any

import numpy as np
from golden_command import Commands, align_record, chosen
from golden_models import VOCABULARY, projections, write_model

PAIR = Path(__file__).resolve().parent / "pair"
DIGITS = PAIR / "digits"
MODEL, ATTENTION = ("--scope", "model"), ("--scope", "all-attention")
LEARNED = ("--matcher", "learned", "--data", DIGITS, "--steps", 10, "--batch-size", 32)
ACTIVATIONS = ("--matcher", "activations", "--data", DIGITS)

ALIGNMENTS: dict[str, tuple[object, ...]] = {
    "weights model": MODEL,
    "weights all-attention": ATTENTION,
    "weights all-attention stage2 none": (*ATTENTION, "--stage2", "none"),
    "weights all-attention stage2 orthogonal": (*ATTENTION, "--stage2", "orthogonal"),
    "weights all-attention frobenius": (*ATTENTION, "--head-distance", "frobenius"),
    "weights all-attention singular": (*ATTENTION, "--head-distance", "singular"),
    "weights all-attention cosine": (*ATTENTION, "--head-distance", "cosine"),
    "activations model": (*ACTIVATIONS, *MODEL),
    "activations all-attention": (*ACTIVATIONS, *ATTENTION),
    "learned model": (*LEARNED, *MODEL),
    "learned model free": (*LEARNED, *MODEL, "--permutations", "free"),
    "learned all-attention": (*LEARNED, *ATTENTION),
    "reference all-attention": ("--matcher", "reference", *ATTENTION),
    "reference first-attention": ("--matcher", "reference", "--scope", "first-attention"),
    "reference model": ("--matcher", "reference", *MODEL),  # refused: exit code 2
}
LANGUAGE = ("gpt2-tied", "llama")
MATCHER_ITEMS = ("path", *(f"align {name}" for name in ALIGNMENTS), *(f"tokens {name}" for name in LANGUAGE))


def record_matcher(item: str, root: Path) -> dict[str, Any]:
    kind, _, name = item.partition(" ")
    commands = Commands(root)
    if kind == "path":
        found = _path(commands)
    elif kind == "align":
        found = _alignment(commands, ALIGNMENTS[name])
    else:
        found = _tokens(commands, name)
    return found | {"json_keys": commands.keys}


def _path(commands: Commands) -> dict[str, Any]:
    """The line between the two checkpoints, as they are and aligned, where the barrier lies, and a plane."""
    asked = ("--data", DIGITS, "--points", 5, "--align", "--explain", "--plane", 3)
    facts = commands.write("path.json", "path", PAIR / "a", PAIR / "b", *asked)
    names = ("kind", "schema", "lambdas", "curves", "barrier", "barrier_lambda", "not_finite", "explain", "plane")
    report = commands.write("report.html", "report", commands.root / "path.json")
    task, models = facts.get("task", {}), facts.get("models", {})
    return chosen(facts, *names) | {
        "task": {name: task.get(name) for name in ("kind", "n_samples", "fingerprint", "settings")},
        "models": {
            label: {name: model[name] for name in ("sha256", "family", "group", "n_params")}
            for label, model in models.items()
        },
        "report_exit_code": report["exit_code"],
    }


def _alignment(commands: Commands, arguments: tuple[object, ...]) -> dict[str, Any]:
    """Align B to A, then measure the line from A to the result."""
    aligned = commands.root / "aligned"
    facts = commands.write(aligned.name, "align", PAIR / "b", "--to", PAIR / "a", *arguments)
    found = align_record(facts) | chosen(facts, "kept", "steps", "held_out_barrier", "held_out_history")
    found["tensors"] = projections(aligned)
    if aligned.is_dir():
        asked = ("--data", DIGITS, "--points", 3)
        found["path"] = chosen(commands.write("path.json", "path", PAIR / "a", aligned, *asked), "curves", "barrier")
    return found


def _tokens(commands: Commands, case: str) -> dict[str, Any]:
    """Two language models with random weights on a file of token ids: path, activations, learning from own text."""
    root = commands.root
    a, b, ids = root / "a", root / "b", root / "ids.npy"
    write_model(case, a, seed=0)
    write_model(case, b, seed=1)
    np.save(ids, np.random.Generator(np.random.PCG64(7)).integers(0, VOCABULARY, (400,)))
    line = commands.write("path.json", "path", a, b, "--data", ids, "--points", 3, "--align", "--seq-len", 8)
    seen = commands.write("seen", "align", b, "--to", a, "--matcher", "activations", "--data", ids)
    asked = ("--matcher", "learned", "--data", "self", "--steps", 4, "--max-samples", 16, "--seq-len", 8)
    learned = commands.write("learned", "align", b, "--to", a, *asked)
    return {
        "path": chosen(line, "curves", "barrier"),
        "activations": align_record(seen),
        "own text": align_record(learned) | chosen(learned, "kept", "steps", "held_out_barrier", "held_out_history"),
    }
