"""The command `equal`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save

from isobasin.cli.measuring import Cost
from isobasin.cli.moving import device_named
from isobasin.cli.printing import note
from isobasin.equivalence import Verdict, equivalent
from isobasin.equivalence.witness import Witness
from isobasin.files import check_place, write_whole
from isobasin.transform_file import save_transform
from isobasin.weights import Weights, load

SHOWN = 5  # conditions and steps that are printed


@dataclass(frozen=True)
class Keeping:
    """Files to write beside the answer."""

    transform: Path | None
    witness: Path | None
    force: bool

    def check(self, *models: Weights) -> None:
        """Nothing is overwritten unasked, and nothing is written into a model."""
        folders = tuple(m.path for m in models if m.path is not None)
        for place in (self.transform, self.witness):
            if place is not None:
                check_place(place, force=self.force, inputs=folders)


def equal_facts(
    a: str, b: str, keeping: Keeping, precision: str, seed: int, device: str, *, quiet: bool
) -> dict[str, Any]:
    """The verdict on two models, with its evidence and what it cost."""
    watch = None if quiet else note
    with Cost() as cost:
        first, second = load(a), load(b)
        keeping.check(first, second)
        found = equivalent(first, second, precision=precision, seed=seed, device=device_named(device), watch=watch)
    saved = _saved(found, keeping)
    return {
        **found.facts,
        **saved,
        "seconds": round(cost.seconds, 2),
        "peak_rss_mb": cost.peak_rss_mb,
        "peak_anon_mb": cost.peak_anon_mb,
    }


def _saved(found: Verdict, keeping: Keeping) -> dict[str, str]:
    saved = {}
    if keeping.transform and found.transform:
        save_transform(found.transform, keeping.transform, force=keeping.force)
        saved["transform"] = str(keeping.transform)
    if keeping.witness and found.witness:
        _save_witness(found.witness, keeping.witness)
        saved["witness_file"] = str(keeping.witness)
    return saved


def _save_witness(witness: Witness, place: Path) -> None:
    tensors = {**witness.inputs, "output_a": witness.a, "output_b": witness.b}
    write_whole(place, save({key: t.contiguous() for key, t in tensors.items()}))


def equal_lines(facts: dict[str, Any]) -> list[str]:
    """The answer for a person: what, why, where."""
    evidence = facts["evidence"]
    lines = [f"{facts['verdict']}: {facts['reason']}"]
    lines += [f"  {step}" for step in _some(evidence["steps"])]
    if facts["verdict"] == "same":
        lines += _residual_lines(evidence)
    if witness := evidence["witness"]:
        lines += _witness_lines(witness)
    lines += [f"  condition: {_condition(c)}" for c in _some(evidence["conditions"])]
    if evidence["near"]:
        lines.append(f"  --precision {evidence['near']} would pass over this")
    for key, word in (("transform", "element"), ("witness_file", "witness")):
        if key in facts:
            lines.append(f"{word} saved: {facts[key]}")
    return lines


def _residual_lines(evidence: dict[str, Any]) -> list[str]:
    worst = sorted(evidence["residuals"], key=lambda r: -r["ratio"])[:SHOWN]
    return [
        f"  {_space(r):14} residual {r['distance']:.1e}, rounding {r['rounding']:.1e}, worst tensor {r['ratio']:.2g} ×"
        for r in worst
    ]


def _witness_lines(witness: dict[str, Any]) -> list[str]:
    shown = {key: x for key, x in witness["input"].items() if isinstance(x, list) and len(str(x)) <= 200}
    said = "; ".join(f"{key} {x}" for key, x in shown.items()) or "--save-witness keeps it"
    return [
        f"  witness: {witness['kind']}; {said}",
        f"  output {witness['place']}: A says {witness['output_a']:.6g}, B says {witness['output_b']:.6g}",
    ]


def _condition(found: dict[str, Any]) -> str:
    heads = " and ".join(map(str, found["heads"]))
    return f"{found['model']}, layer {found['layer']}, head {heads}: {found['condition']}"


def _space(row: dict[str, Any]) -> str:
    return f"layer {row['layer']} {row['space']}" if row["layer"] is not None else str(row["space"])


def _some(items: list[Any]) -> list[Any]:
    return items[:SHOWN]
