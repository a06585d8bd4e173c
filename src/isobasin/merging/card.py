"""The model card of a merge: README.md with front matter for the hub, filled from the cards of the merged models."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import yaml

from isobasin import __version__
from isobasin.checkpoint.folder import MADE_WITH, MODEL_CARD
from isobasin.merging.average import Linear
from isobasin.merging.recipe import MergeRecipe

if TYPE_CHECKING:
    from isobasin.merging.joint_alignment import Distance

LICENCE = ("license", "license_name", "license_link")
COMMON = ("language", "pipeline_tag")  # kept where all models say the same
TAGS = ("merge", "isobasin")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
Folders = Sequence[Path | None]
_MAX_BYTES = 1_000_000
_FRONT = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class ParentCard:
    """What the card of a merged model says; `hub_id` is known for a folder of the local cache of the hub."""

    front: Mapping[str, Any] = field(default_factory=dict)
    hub_id: str | None = None

    @property
    def licence(self) -> dict[str, str]:
        """The licence, with its name and its address where it is none of the hub's list."""
        return {key: value for key in LICENCE if _is_word(value := self.front.get(key))}

    def words(self, key: str) -> list[str]:
        """A key that holds a word or a list of words."""
        value = self.front.get(key)
        return [word for word in (value if isinstance(value, list) else [value]) if _is_word(word)]


def _is_word(value: object) -> TypeGuard[str]:
    """Whether this is a text on one line; others could end the front matter."""
    return isinstance(value, str) and value.isprintable()


def read_card(folder: Path | None) -> ParentCard:
    """The card in a folder; without one, or where it can not be read, one that says nothing."""
    if folder is None:
        return ParentCard()
    cache = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
    hub_id = cache.removeprefix("models--").replace("--", "/") if cache.startswith("models--") else None
    try:
        with open(folder / MODEL_CARD, encoding="utf-8") as file:
            found = _FRONT.match(file.read(_MAX_BYTES))
        front = yaml.safe_load(found[1]) if found else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        front = {}
    return ParentCard(front if isinstance(front, dict) else {}, hub_id)


def model_card(
    title: str,
    recipe: MergeRecipe,
    parents: Sequence[ParentCard],
    distances: "Sequence[Distance]",
    rounds: int,
    notes: Sequence[str] = (),
) -> str:
    """The text of README.md; the names of models may contain any character.

    `base_model` lists the models that are on the hub, and for a folder the base models that its own card names. The
    licence is given where all models have the same; otherwise a sentence says what each has.
    """
    bases = [word for name, parent in zip(recipe.models, parents) for word in _bases(name, parent)]
    front = _front(parents, bases, "transformers")
    text = recipe.to_yaml().strip()
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    configuration = f"Configuration:\n\n{fence}yaml\n{text}\n{fence}"
    lines = [*notes, *_licence_lines(parents)]
    return _document(title, front, _sentence(recipe, rounds), _table(recipe, distances), lines, configuration)


def adapter_card(
    title: str, sentence: str, names: Sequence[str], shares: Sequence[float], bases: Sequence[object], folders: Folders
) -> str:
    """The text of README.md of merged LoRA adapters: their base if the hub knows it, licence and tags as of models.
    `bases`: what the configuration of each names."""
    parents = [read_card(folder) for folder in folders]
    named = [own for own in bases if isinstance(own, str) and _HUB_ID.fullmatch(own) and not Path(own).exists()]
    stated = [word for parent in parents for word in parent.words("base_model") if _HUB_ID.fullmatch(word)]
    front = _front(parents, named or stated, "peft", "lora")
    rows = [f"| {i} | {escaped(name)} | {share:g} |" for i, (name, share) in enumerate(zip(names, shares))]
    return _document(
        title, front, sentence, ["| | adapter | weight |", "|---|---|---|", *rows], _licence_lines(parents)
    )


def _front(parents: Sequence[ParentCard], bases: Sequence[str], library: str, *tags: str) -> dict[str, Any]:
    """The front matter that the cards of the parents give."""
    return {
        "base_model": _distinct(bases),
        **_licence(parents),
        **{key: words for key in COMMON if (words := _agreed(parents, key))},
        "library_name": library,
        "tags": _distinct([*TAGS, *tags, *(word for parent in parents for word in parent.words("tags"))]),
    }


def _document(
    title: str, front: Mapping[str, Any], sentence: str, table: Sequence[str], lines: Sequence[str], *more: str
) -> str:
    shown = yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True).strip()
    parts = [f"# {escaped(title)}", sentence, "\n".join(table), *map(escaped, lines), *more]
    return f"---\n{shown}\n---\n" + "\n\n".join(parts) + "\n"


def _bases(name: str, parent: ParentCard) -> list[str]:
    """The hub refuses a card whose base_model is no repository, so folders are named in the table only."""
    own = parent.hub_id or name.partition("+")[0].partition("@")[0]  # without adapter and revision
    if _HUB_ID.fullmatch(own) and (parent.hub_id or not Path(own).exists()):
        return [own]
    return [word for word in parent.words("base_model") if _HUB_ID.fullmatch(word)]


def _distinct(words: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _agreed(parents: Sequence[ParentCard], key: str) -> Any:
    """The value of a key if all cards have the same, and None otherwise."""
    values = [parent.words(key) for parent in parents]
    same = bool(values) and all(value == values[0] for value in values)
    return (values[0] if len(values[0]) != 1 else values[0][0]) if same else None


def _licence(parents: Sequence[ParentCard]) -> dict[str, str]:
    same = bool(parents) and all(parent.licence == parents[0].licence for parent in parents)
    return parents[0].licence if same else {}


def _licence_lines(parents: Sequence[ParentCard]) -> list[str]:
    """What each model says about its licence, where they differ."""
    if _licence(parents) or not any(parent.licence for parent in parents):
        return []
    stated = (parent.licence.get("license_name") or parent.licence.get("license", "not stated") for parent in parents)
    each = ", ".join(f"model {i}: {licence}" for i, licence in enumerate(stated))
    return [f"The licences of the models differ ({each}); the merge is under the conditions of all of them."]


def _sentence(recipe: MergeRecipe, rounds: int) -> str:
    how = f"A {recipe.method} merge of {len(recipe.models)} models, {MADE_WITH} {__version__}."
    if not recipe.align:
        return f"{how} The models were mixed as they are, without alignment."
    to = "their common mean" if recipe.to == "mean" else f"model {recipe.to}"
    times = f" in {rounds} round{'s' if rounds > 1 else ''}" if recipe.to == "mean" else ""
    return (
        f"{how} Before mixing, each was moved to {to}{times} by symmetries that leave its function unchanged "
        f"(scope `{recipe.scope}`, matcher `{recipe.matcher}`)."
    )


def _table(recipe: MergeRecipe, distances: "Sequence[Distance]") -> list[str]:
    method = recipe.arithmetic()
    if isinstance(method, Linear):
        shares = [f"{weight:g}" for weight in method.weights]
    else:
        shares = ["start" if i == recipe.start else f"t = {method.t:g}" for i in range(len(recipe.models))]
    rows = [f"| {i} | {escaped(name)} | {share} |" for i, (name, share) in enumerate(zip(recipe.models, shares))]
    if not distances:
        return ["| | model | weight |", "|---|---|---|", *rows]
    return [
        "| | model | weight | distance before | distance after |",
        "|---|---|---|---|---|",
        *(f"{row} {d.before:.4g} | {d.after:.4g} |" for row, d in zip(rows, distances)),
        "",
        f"Distances are shares of the norm of what each was aligned to, over the tensors of scope `{recipe.scope}`.",
    ]


def escaped(text: str) -> str:
    """A name as plain text in a Markdown table: no character is markup or ends the line."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return re.sub(r"([\\`*_{}\[\]()<>#+!|&~$-])", r"\\\1", shown)
