"""The model card of a merge: base models, licence and tags from the cards of the merged models."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import isobasin as ib
from isobasin.merging.card import ParentCard, model_card, read_card
from isobasin.merging.recipe import MergeRecipe

FRONT = {"license": "mit", "tags": ["text-generation", "llama"], "language": "en", "base_model": "org/base"}


def folder(path: Path, front: dict[str, Any] | str | None, *, body: str = "# A model\n") -> Path:
    path.mkdir(parents=True)
    if front is not None:
        text = front if isinstance(front, str) else yaml.safe_dump(front)
        (path / "README.md").write_text(f"---\n{text}---\n{body}", encoding="utf-8")
    return path


def card_of(*parents: Path, names: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """The front matter of the merge of these folders, and the whole card."""
    recipe = MergeRecipe(models=names or tuple(map(str, parents)), align=False)
    text = model_card("merged", recipe, [read_card(parent) for parent in parents], (), 0)
    return yaml.safe_load(text.split("---\n")[1]), text


def test_what_parents_share_is_kept(tmp_path: Path) -> None:
    other = FRONT | {"tags": ["llama", "tuned"], "base_model": ["org/base", "org/second"]}
    front, text = card_of(folder(tmp_path / "a", FRONT), folder(tmp_path / "b", other))
    assert front == {
        "base_model": ["org/base", "org/second"],
        "license": "mit",
        "language": "en",
        "library_name": "transformers",
        "tags": ["merge", "isobasin", "text-generation", "llama", "tuned"],
    }
    assert "licences" not in text


@pytest.mark.parametrize(
    ("second", "stated"),
    [
        (FRONT | {"license": "apache-2.0"}, "model 0: mit, model 1: apache"),
        ({"tags": ["x"]}, "model 0: mit, model 1: not stated"),
        (None, "model 0: mit, model 1: not stated"),
        ("license: [mit\n", "model 0: mit, model 1: not stated"),  # no YAML
        ("- mit\n", "model 0: mit, model 1: not stated"),  # no mapping
        (FRONT | {"license": "other", "license_name": "house-rules"}, "model 0: mit, model 1: house"),
    ],
)
def test_licences_that_differ_are_named_and_none_is_claimed(second: Any, stated: str, tmp_path: Path) -> None:
    front, text = card_of(folder(tmp_path / "a", FRONT), folder(tmp_path / "b", second))
    assert not {"license", "license_name", "license_link"} & front.keys()
    assert f"The licences of the models differ \\({stated}" in text


def test_a_licence_with_a_name_and_an_address_is_kept_whole(tmp_path: Path) -> None:
    named = {"license": "other", "license_name": "house-rules", "license_link": "https://example.org/rules"}
    front, _ = card_of(folder(tmp_path / "a", named), folder(tmp_path / "b", named))
    assert {key: front[key] for key in named} == named


def test_models_of_the_hub_are_the_base_models(tmp_path: Path) -> None:
    """An id that was given, and the id of a snapshot in the cache, come before what their cards name."""
    cached = folder(tmp_path / "models--org--tuned/snapshots/0a1b", FRONT)
    front, _ = card_of(cached, folder(tmp_path / "x", FRONT), names=(str(cached), "org/other"))
    assert front["base_model"] == ["org/tuned", "org/other"]
    unknown = folder(tmp_path / "y", None)
    assert card_of(unknown, unknown)[0]["base_model"] == []


def test_nothing_in_a_card_can_break_the_front_matter(tmp_path: Path) -> None:
    evil = {"license": "mit\n---\n# x", "tags": ["a: b\n---", "plain: words", 3, None]}
    evil |= {"base_model": "../../etc", "language": {"a": 1}}
    parent = folder(tmp_path / "a", evil)
    front, _ = card_of(parent, parent)
    assert "license" not in front
    assert front["tags"] == ["merge", "isobasin", "plain: words"]
    assert front["base_model"] == []
    assert "language" not in front


def test_a_folder_without_a_card_says_nothing(tmp_path: Path) -> None:
    assert read_card(None) == read_card(tmp_path) == ParentCard()
    (tmp_path / "README.md").write_bytes(b"\xff\xfe---\n")
    assert read_card(tmp_path) == ParentCard()


def test_a_merge_writes_the_card(tmp_path: Path) -> None:
    config = ib.ModelConfig.preset("llama", d_model=8, n_layers=1, n_heads=2, d_ff=12, d_vocab=11, n_positions=8)
    for seed, name in enumerate("ab"):
        ib.Transformer(config, seed=seed).save(tmp_path / name)
        (tmp_path / name / "README.md").write_text(f"---\n{yaml.safe_dump(FRONT)}---\n# {name}\n")
    models = [ib.load(tmp_path / name) for name in "ab"]
    ib.merge(models, align=False).save(tmp_path / "merged")
    front = yaml.safe_load((tmp_path / "merged/README.md").read_text().split("---\n")[1])
    assert (front["license"], front["base_model"]) == ("mit", ["org/base"])
