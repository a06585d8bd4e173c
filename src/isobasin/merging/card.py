"""The model card of a merge: what went in, how, and how far apart it was."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from isobasin.merging.mixing import Linear, Slerp
from isobasin.merging.recipe import Recipe

if TYPE_CHECKING:
    from isobasin.merging.many import Distance

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def model_card(title: str, recipe: Recipe, distances: "Sequence[Distance]", rounds: int) -> str:
    """README.md with front matter that the hub understands; names of models may hold any character."""
    front = {
        # The hub refuses a card whose base_model is no repository: folders are named below.
        "base_model": [name for name in dict.fromkeys(recipe.models) if _is_hub_id(name)],
        "library_name": "transformers",
        "tags": ["merge", "isobasin"],
    }
    text = recipe.to_yaml()
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip(),
            "---",
            f"# {plain(title)}",
            "",
            _sentence(recipe, rounds),
            "",
            *_table(recipe, distances),
            "",
            "Configuration:",
            "",
            f"{fence}yaml",
            text.strip(),
            fence,
            "",
        ]
    )


def _sentence(recipe: Recipe, rounds: int) -> str:
    how = f"A {recipe.method} merge of {len(recipe.models)} models, made with isobasin {version('isobasin')}."
    if not recipe.align:
        return f"{how} The models were mixed as they are, without alignment."
    to = "their common mean" if recipe.to == "mean" else f"model {recipe.to}"
    times = f" in {rounds} round{'s' if rounds > 1 else ''}" if recipe.to == "mean" else ""
    return (
        f"{how} Before mixing, each was moved to {to}{times} by symmetries that leave its function unchanged "
        f"(scope `{recipe.scope}`, matcher `{recipe.matcher}`)."
    )


def _table(recipe: Recipe, distances: "Sequence[Distance]") -> list[str]:
    method = recipe.arithmetic()
    shares = [f"{weight:g}" for weight in method.weights] if isinstance(method, Linear) else []
    if isinstance(method, Slerp):
        shares = ["start" if i == recipe.start else f"t = {method.t:g}" for i in range(len(recipe.models))]
    rows = [f"| {i} | {plain(name)} | {share} |" for i, (name, share) in enumerate(zip(recipe.models, shares))]
    if not distances:
        return ["| | model | weight |", "|---|---|---|", *rows]
    measured = [f" {d.before:.4g} | {d.after:.4g} |" for d in distances]
    return [
        "| | model | weight | distance before | distance after |",
        "|---|---|---|---|---|",
        *(row + numbers for row, numbers in zip(rows, measured)),
        "",
        f"Distances are shares of the norm of what each was aligned to, over the tensors of scope `{recipe.scope}`.",
    ]


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def plain(text: str) -> str:
    """A name as text of a Markdown table: nothing in it is markup, and it stays on its line."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return re.sub(r"([\\`*_{}\[\]()<>#+!|&~$-])", r"\\\1", shown)
