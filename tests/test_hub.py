"""The Hugging Face hub: revisions, downloads, uploads, and folders in formats that are not read."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

import isobasin as ib
from isobasin.cli import run
from isobasin.errors import CheckpointError, IsobasinError
from isobasin.model import ModelConfig, Transformer

SIZES = {"d_model": 8, "n_heads": 2, "d_ff": 8, "d_vocab": 9, "n_positions": 4, "n_layers": 1}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A hub with two revisions of one model; only `main` is in the cache. What was asked for is kept."""
    import huggingface_hub

    for seed, revision in enumerate(("main", "v2")):
        Transformer(ModelConfig.preset("llama", **SIZES), seed=seed).save(tmp_path / revision)
    found: list[tuple[Any, ...]] = []

    def snapshot_download(name: str, *, revision: str | None, local_files_only: bool = False, **_: Any) -> str:
        found.append((name, revision, local_files_only))
        place = tmp_path / (revision or "main")
        if name != "org/name" or not place.exists() or (local_files_only and revision):
            raise OSError("not there")
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return found


def test_an_id_may_name_a_revision_and_is_downloaded_where_it_is_not_there(asked: list[Any]) -> None:
    main, other = ib.load("org/name"), ib.load("org/name@v2")
    assert not ib.fingerprint(main).matches(ib.fingerprint(other))
    assert asked == [("org/name", None, True), ("org/name", "v2", True), ("org/name", "v2", False)]
    with pytest.raises(CheckpointError, match="'org/name' at revision v3 is neither a folder"):
        ib.load("org/name@v3")


def test_nothing_is_downloaded_offline_or_for_what_is_no_id(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    with pytest.raises(CheckpointError, match="'nowhere' is neither a folder"):
        ib.load("nowhere")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="at revision v2"):
        ib.load("org/name@v2")
    assert [local for *_, local in asked] == [True, True]


def test_the_option_is_for_ids_only(asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fingerprint", "org/name", "--revision", "v2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["fingerprint"]
    assert found == str(ib.fingerprint(tmp_path / "v2"))
    assert run(["distance", str(tmp_path / "main"), "org/name", "--revision=v2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "unrelated"
    assert run(["equal", "org/name@main", "org/name", "--revision", "v2", "--json"]) == 1
    assert run(["info", "org/name", "--revision"]) == 2
    assert "--revision needs a branch, tag or commit" in capsys.readouterr().err


def test_what_can_be_saved_can_be_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[Any] = []

    class HfApi:
        def __init__(self, token: str | None) -> None:
            calls.append(token)

        def create_repo(self, name: str, **options: Any) -> None:
            if "/" not in name:
                raise huggingface_hub.errors.HFValidationError("no such name")
            calls.append((name, options["private"], options["exist_ok"]))

        def upload_folder(self, **options: Any) -> Any:
            calls.append(sorted(path.name for path in Path(options["folder_path"]).iterdir()))
            return f"https://hub/{options['repo_id']}"

    monkeypatch.setattr(huggingface_hub, "HfApi", HfApi)
    Transformer(ModelConfig.preset("llama", **SIZES), seed=0).save(tmp_path / "a")
    a = ib.load(tmp_path / "a")
    assert ib.push_to_hub(ib.merge([a, a]), "me/merged", private=True, token="t") == "https://hub/me/merged"
    assert calls == ["t", ("me/merged", True, True), ["README.md", "config.json", "model.safetensors"]]
    calls.clear()
    ib.push_to_hub(ib.scramble(a).apply(a), "me/copy", max_shard_size="1KB")
    assert "model.safetensors.index.json" in calls[-1]
    with pytest.raises(IsobasinError, match=r"merged: can not be uploaded .*hf auth login"):
        ib.push_to_hub(a, "merged")


def test_an_upload_asks_the_hub_for_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the signatures of the real client: a call that the hub would refuse is an error."""
    import huggingface_hub

    api = create_autospec(huggingface_hub.HfApi, instance=True)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: api)
    Transformer(ModelConfig.preset("llama", **SIZES), seed=0).save(tmp_path / "a")
    ib.push_to_hub(ib.load(tmp_path / "a"), "me/a", revision="v2")
    assert [name for name, *_ in api.method_calls] == ["create_repo", "create_branch", "upload_folder"]
    assert api.create_branch.call_args.kwargs == {"branch": "v2", "exist_ok": True}
    assert api.upload_folder.call_args.kwargs["revision"] == "v2"
    ib.push_to_hub(ib.load(tmp_path / "a"), "me/a")
    assert api.create_branch.call_count == 1, "no branch was asked for"


class LostConnection(Exception):
    """As HTTP libraries raise it: no OSError."""


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (LostConnection("Name or service not known"), r"\(Name or service not known\); check the network"),
        (LostConnection(), r"\(LostConnection\); check the network"),
        ("offline", r"\(offline mode is enabled.\); or save it with"),
    ],
)
def test_an_upload_without_network_is_one_line(
    error: Any, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    api = create_autospec(huggingface_hub.HfApi, instance=True)
    if error == "offline":
        error = huggingface_hub.errors.OfflineModeIsEnabled("offline mode is enabled.")
    api.create_repo.side_effect = error
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: api)
    Transformer(ModelConfig.preset("llama", **SIZES), seed=0).save(tmp_path / "a")
    with pytest.raises(IsobasinError, match=rf"me/a: can not be uploaded {advice}"):
        ib.push_to_hub(ib.load(tmp_path / "a"), "me/a")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.onnx", "ONNX is a graph of operations, .*give the model from which it was exported"),
        ("tf_model.h5", "weights for TensorFlow; load them in transformers"),
        ("flax_model.msgpack", "weights for Flax"),
        ("model-q8.gguf", "give the path of this file itself"),
        ("last.ckpt", "a training checkpoint"),
    ],
)
def test_folders_in_other_formats_say_what_to_do(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"has its weights as {name}: .*{message}"):
        ib.load(tmp_path)
