"""The part `families`: every command that needs no data, on a tiny model of each family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from golden_command import Commands, align_record, chosen, file_hash, level
from golden_models import projections, write_changed, write_model

from isobasin.compare.fingerprint import FIRST_COUNT, Fingerprint

SCOPES = ("first-attention", "all-attention", "first-block", "model")
TIED = ("gpt2-tied", "bert-mlm", "llama-tied-gqa", "own-alibi")


def record_family(case: str, root: Path, *, transforms: Path, keep: bool) -> dict[str, Any]:
    """All results of one case. `transforms` holds saved transforms; with `keep` this case's is put there."""
    commands = Commands(root)
    models = {name: root / name for name in ("original", "unrelated", "changed")}
    write_model(case, models["original"], seed=0)
    write_model(case, models["unrelated"], seed=1)
    write_changed(models["original"], models["changed"])
    saved = transforms / f"{case}.safetensors"
    found: dict[str, Any] = {"scopes": {scope: _scope(commands, models, scope) for scope in SCOPES}}
    models["scrambled"] = root / "scrambled model"
    made = root / "transform model.safetensors"
    if keep:
        transforms.mkdir(parents=True, exist_ok=True)
        saved.write_bytes(made.read_bytes())
    found["transform"] = _transform(commands, models, made, saved)
    found["description"] = _description(commands, models)
    found["equal"] = {
        name: _equal(commands.run("equal", models["original"], other))
        for name, other in (models | {"same": models["original"]}).items()
        if name != "original"
    }
    found["fingerprint"] = _fingerprint(commands, models)
    found["canonical"] = _canonical(commands, models)
    found["distance"] = {
        name: _distance(commands.run("distance", models["original"], models[name]))
        for name in ("scrambled", "unrelated")
    }
    found["merge"] = _merges(commands, models)
    if case in TIED:
        facts = commands.write("untied", "align", models["unrelated"], "--to", models["original"], "--untie")
        found["untied"] = align_record(facts) | _written(root / "untied")
    return found | {"json_keys": commands.keys}


def _scope(commands: Commands, models: dict[str, Path], scope: str) -> dict[str, Any]:
    """Scramble, align the copy back, align an unrelated model."""
    original, root = models["original"], commands.root
    moved, transform = root / f"scrambled {scope}", root / f"transform {scope}.safetensors"
    asked = ("--scope", scope, "--seed", 3, "--save-transform", transform)
    scramble = commands.write(moved.name, "scramble", original, *asked)
    back = commands.write(f"back {scope}", "align", moved, "--to", original, "--scope", scope)
    other = commands.write(f"other {scope}", "align", models["unrelated"], "--to", original, "--scope", scope)
    return {
        "scramble": chosen(scramble, "exact", "dtype", "max_weight_change"),
        "scrambled_copy": align_record(back),
        "unrelated": align_record(other),
    }


def _transform(commands: Commands, models: dict[str, Path], made: Path, saved: Path) -> dict[str, Any]:
    """The transform file: its bytes as they are made now, and what the committed one does."""
    applied = commands.write("applied", "apply", saved, models["original"])
    inverse = commands.root / "inverse.safetensors"
    inverted = commands.run("invert", saved, "-o", inverse)
    undone = commands.write("undone", "apply", inverse, models["scrambled"])
    difference = commands.run("distance", models["original"], commands.root / "undone", "--draws", 1)
    return {
        "sha256": file_hash(made),
        "apply": chosen(applied, "exact", "dtype", "max_weight_change") | _written(commands.root / "applied"),
        "invert": chosen(inverted) | {"tensors": projections(inverse)},
        "undone": chosen(undone) | {"naive_distance": level(difference.get("naive"))},
    }


def _description(commands: Commands, models: dict[str, Path]) -> dict[str, Any]:
    check = commands.run("check", models["original"])
    return {
        "info": commands.run("info", models["original"]),
        "check": chosen(check, "ok", "nullity_measured", "nullity_predicted")
        | {"spaces": sorted(check.get("per_space", {}))},
    }


def _equal(facts: dict[str, Any]) -> dict[str, Any]:
    evidence = facts.get("evidence", {})
    found = chosen(facts, "verdict", "precision") | {
        name: evidence.get(name) for name in ("element", "steps", "obstacle", "conditions", "near")
    }
    found["residuals"] = [[r["layer"], r["space"], level(r["distance"])] for r in evidence.get("residuals", [])]
    for name in ("parts_at", "parts_first_at"):
        place = evidence.get(name)
        found[name] = place and [place["layer"], place["space"], place["tensor"]]
    witness = evidence.get("witness")
    found["witness"] = witness and {
        name: witness[name] for name in ("kind", "place", "output_a", "output_b", "difference")
    }
    return found


def _fingerprint(commands: Commands, models: dict[str, Path]) -> dict[str, Any]:
    """The entries that the first version of the format has, and how they differ from those of the original."""
    facts = commands.run("fingerprint", models["original"])
    original = _first_entries(facts)
    found: dict[str, Any] = {"original": chosen(facts, "fingerprint") | {"fingerprint": str(original)}}
    for name in ("scrambled", "unrelated"):
        facts = commands.run("fingerprint", models[name], "--compare", models["original"])
        own = _first_entries(facts)
        steps = own.steps(original)
        found[name] = chosen(facts, "equal", "same_shape") | {"entries_apart": sum(step > 1 for step in steps)}
        if name == "unrelated":
            found[name] |= {"fingerprint": str(own), "largest_step": max(steps)}
    return found


def _first_entries(facts: dict[str, Any]) -> Fingerprint:
    found = Fingerprint.read(facts["fingerprint"])
    return replace(found, entries=found.entries[:FIRST_COUNT])


def _canonical(commands: Commands, models: dict[str, Path]) -> dict[str, Any]:
    facts = commands.write("canonical", "canonical", models["original"])
    commands.write("canonical copy", "canonical", models["scrambled"])
    apart = commands.run("distance", commands.root / "canonical", commands.root / "canonical copy", "--draws", 1)
    copy = {"distance_of_scrambled_copy": level(apart.get("naive"))}
    return chosen(facts, "dtype") | copy | _written(commands.root / "canonical")


def _distance(facts: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [row["layer"], row["other_layer"], row["space"], *(level(row[n]) for n in ("naive", "distance", "score"))]
        for row in facts.get("per_layer", [])
    ]
    return chosen(facts, "score", "naive", "related", "null") | {
        "distance": level(facts.get("distance")),
        "per_layer": rows,
    }


def _merges(commands: Commands, models: dict[str, Path]) -> dict[str, Any]:
    asked = {
        "linear": (),
        "slerp": ("--method", "slerp"),
        "linear as they are": ("--no-align", "--weights", "0.7,0.3"),
        "slerp as they are": ("--no-align", "--method", "slerp"),
    }
    found = {}
    for name, arguments in asked.items():
        facts = commands.write(f"merge {name}", "merge", models["original"], models["unrelated"], *arguments)
        distances = [[level(each["before"]), level(each["after"])] for each in facts.get("distances", [])]
        found[name] = chosen(facts, "method", "weights", "dtype", "aligned") | {"distances": distances}
        written = _written(commands.root / f"merge {name}")
        # The projection alone: norms would add a tenth to the golden file.
        found[name] |= written | {"tensors": {key: both[1] for key, both in written["tensors"].items()}}
    return found


def _written(folder: Path) -> dict[str, Any]:
    """The files of a folder, and projections of its tensors."""
    files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return {"files": files, "tensors": projections(folder)}
