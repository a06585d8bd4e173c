"""The command `equal`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobasin.cli.options import DeviceOptions, Force, MemoryOptions, PrintOptions, Seed, choice, with_options
from isobasin.cli.output import emit, measured_cost, note, reserve_outputs, space_label

if TYPE_CHECKING:
    from isobasin.compare.equivalence import Verdict
    from isobasin.compare.outputs import ComparedInput
    from isobasin.weights import Weights

EXIT_CODES = {"same": 0, "different": 1, "undecided": 3}
MAX_LINES = 5  # conditions, steps and residuals that are printed


@with_options
def equal_command(
    *,
    a: Annotated[str, typer.Argument(metavar="A", help="A Hugging Face folder, or a hub id in the local cache.")],
    b: Annotated[
        str, typer.Argument(metavar="B", help="A model of the same family; heads and added vocabulary rows may differ.")
    ],
    precision: Annotated[str, choice("stored, float32, float16, bfloat16", "Up to the rounding of: {}.")] = "stored",
    save_transform: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Same: save the element that moves B to A.")
    ] = None,
    save_witness: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Different: save the input and both outputs.")
    ] = None,
    seed: Seed = 0,
    device: DeviceOptions,
    memory: MemoryOptions,
    force: Force = False,
    show: PrintOptions,
) -> None:
    """Do A and B compute the same function? Exit 0 same, 1 different, 3 undecided; with the evidence.

    Where only heads or rows of the vocabulary differ, the answer is about what both share, and says so.
    """
    from isobasin.compare.equivalence import equivalent
    from isobasin.files import check_output_file

    with measured_cost() as cost:
        models = memory.load(a), memory.load(b)
        folders = tuple(model.path for model in models if model.path)
        reserve_outputs(save_transform, save_witness)
        if save_transform:
            check_output_file(save_transform, force=force, kind="transform", inputs=folders)
        if save_witness:
            check_output_file(save_witness, force=force, kind="witness", inputs=folders)
        watch = None if show.silent else note
        found = equivalent(*models, precision=precision, seed=seed, device=device.find(), watch=watch)
    files = _write_evidence(found, save_transform, save_witness, force)
    facts: dict[str, Any] = {**found.to_dict(), **files, **cost}
    if found.witness is not None:
        facts["evidence"]["witness"]["text"] = _text_of(found.witness, models[0])
    emit(facts, equal_lines(facts), show.json)
    if code := EXIT_CODES[str(facts["verdict"])]:
        raise typer.Exit(code)


def _write_evidence(found: "Verdict", transform: Path | None, witness: Path | None, force: bool) -> dict[str, str]:
    """Write the files that were asked for and that this verdict has."""
    from safetensors.torch import save

    from isobasin.files import SAFETENSORS_MARKS, atomic_write
    from isobasin.symmetries.transform_file import save_transform

    written = {}
    if transform and found.transform:
        save_transform(found.transform, transform, force=force)
        written["transform"] = str(transform)
    if witness and found.witness:
        tensors = {**found.witness.inputs, "output_a": found.witness.a, "output_b": found.witness.b}
        metadata = {SAFETENSORS_MARKS["witness"]: "1"}
        atomic_write(witness, save({key: t.contiguous() for key, t in tensors.items()}, metadata))
        written["witness_file"] = str(witness)
    return written


def _text_of(witness: "ComparedInput", model: "Weights") -> str | None:
    """The tokens of a witness as text, where the model has a tokenizer."""
    from isobasin.runtime import token_key
    from isobasin.tasks.tokenizer import open_tokenizer

    key = token_key(witness.inputs)
    try:
        tokenizer = None if key is None else open_tokenizer([model])
        return None if tokenizer is None or key is None else tokenizer.decode(witness.inputs[key].flatten().tolist())
    except Exception:  # a damaged tokenizer can raise anything, and the verdict stands without it
        return None


def equal_lines(facts: dict[str, Any]) -> list[str]:
    """The verdict, its reason and the evidence."""
    evidence = facts["evidence"]
    lines = [f"{facts['verdict']}: {facts['reason']}"]
    lines += [f"  {step}" for step in evidence["steps"][:MAX_LINES]]
    if facts["verdict"] == "same":
        for row in sorted(evidence["residuals"], key=lambda r: -r["ratio"])[:MAX_LINES]:
            sizes = f"residual {row['distance']:.1e}, rounding {row['rounding']:.1e}"
            lines.append(f"  {space_label(row):14} {sizes}, worst tensor {row['ratio']:.2g} ×")
    if witness := evidence["witness"]:
        lines += _witness_lines(witness)
    for found in evidence["conditions"][:MAX_LINES]:
        heads = " and ".join(map(str, found["heads"]))
        lines.append(f"  condition: {found['model']}, layer {found['layer']}, head {heads}: {found['condition']}")
    if evidence["near"]:
        lines.append(f"  --precision {evidence['near']} would pass over this")
    for key, word in (("transform", "element"), ("witness_file", "witness")):
        if key in facts:
            lines.append(f"{word} saved: {facts[key]}")
    return lines


def _witness_lines(witness: dict[str, Any]) -> list[str]:
    shown = {key: x for key, x in witness["input"].items() if isinstance(x, list) and len(str(x)) <= 200}
    inputs = "; ".join(f"{key} {x}" for key, x in shown.items()) or "--save-witness keeps it"
    return [
        f"  witness: {witness['kind']}; {inputs}",
        *([f"  its text: {witness['text']!r:.200}"] if witness.get("text") else []),
        f"  output {witness['place']}: {witness['output_a']:.6g} from A, {witness['output_b']:.6g} from B",
    ]
