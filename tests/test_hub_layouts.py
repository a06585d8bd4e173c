"""How hub folders lie on disk, what their configs are called, and models that are only in memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import tiny
from hub_imitations import (
    LAYERS,
    NOTHING,
    SEEN,
    Config,
    check_survives,
    described,
    distance,
    largest_change,
    make,
    said,
)
from isobasin.errors import CheckpointError
from isobasin.symmetries.transform import scramble
from isobasin.weights import load

pytestmark = pytest.mark.hf

RUN = "from isobasin.cli import main; main()"


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy_bin", [False, True])
@pytest.mark.parametrize("max_shard_size", [None, "8KB"])
def test_every_layout_of_weight_files(tmp_path: Path, max_shard_size: str | None, legacy_bin: bool) -> None:
    folder = tmp_path / "m"
    tiny.save(tiny.case("gpt2-lm-tied"), folder, max_shard_size=max_shard_size, legacy_bin=legacy_bin)
    kinds = "*.bin" if legacy_bin else "*.safetensors"
    assert (len(list(folder.glob(kinds))) > 2) == (max_shard_size is not None)
    out = check_survives(folder, "gpt2-lm-tied")
    assert [file.name for file in out.glob("*.bin")] == []


def cached(cache: Path, case: str) -> Path:
    """A model as the Hugging Face cache keeps it: blobs by their hash, a snapshot of links, a ref."""
    plain = make(cache / "plain", case)
    repository = cache / "models--someone--small"
    snapshot = repository / "snapshots" / ("ab" * 20)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    for file in plain.iterdir():
        blob = repository / "blobs" / sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs" / "main").write_text(snapshot.name)
    return snapshot


def test_a_snapshot_of_links(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "llama-gqa")
    blobs = {file: file.read_bytes() for file in (snapshot.parent.parent / "blobs").iterdir()}
    out = check_survives(snapshot, "llama-gqa")
    assert not any(file.is_symlink() for file in out.iterdir())
    assert {file: file.read_bytes() for file in blobs} == blobs
    weights = load(snapshot)
    with pytest.raises(CheckpointError, match="blobs"):  # where the links of the snapshot lead to
        weights.save(snapshot.parent.parent / "blobs", force=True)


@pytest.mark.parametrize(("variable", "place"), [("HF_HOME", "hub"), ("HF_HUB_CACHE", ".")])
def test_a_hub_id_through_the_local_cache(tmp_path: Path, variable: str, place: str) -> None:
    cache = tmp_path / "cache"
    snapshot = cached(cache / place, "llama-gqa")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    names = {"someone/small": 0} | ({"someone/other": 2} if variable == "HF_HOME" else {})
    for name, code in names.items():
        done = subprocess.run(
            [sys.executable, "-c", RUN, "scramble", name, "-o", str(tmp_path / "out" / name)],
            env=environment | {variable: str(cache), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert ("'someone/other' is neither a folder nor a model in the local" in done.stderr) == bool(code)
    out = tmp_path / "out" / "someone" / "small"
    assert distance(said(out, "llama-gqa"), said(snapshot, "llama-gqa")) <= 1e-5 * LAYERS
    assert not (tmp_path / "out" / "someone" / "other").exists()


# -- older configurations --------------------------------------------------------------------------------------------

OLDER: Mapping[str, tuple[str, Config]] = {
    "rope_theta": ("llama-rope-theta", {"rope_theta": 50.0, "rope_scaling": None}),
    "rope_scaling": ("llama-rope-linear", {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "rotary_pct": ("gpt_neox-half-rotary", {"rotary_pct": 0.5, "rotary_emb_base": 10000}),
    "nulls": ("llama-untied", {"num_key_value_heads": None, "head_dim": None, "rope_theta": 10000.0}),
    "no-tie": ("gpt2-lm-tied", {"n_inner": None, "tie_word_embeddings": True}),
}


def older(settings: Config) -> Callable[[Config], Config]:
    """Without what 5.x writes, with the settings' older names; unknown types and no dtype, as in old files."""
    new = ("rope_parameters", "partial_rotary_factor", "dtype")
    return lambda config: {k: v for k, v in config.items() if k not in new} | settings


@pytest.mark.parametrize("name", list(OLDER))
def test_older_spellings_of_a_config(tmp_path: Path, name: str) -> None:
    case, settings = OLDER[name]
    plain = make(tmp_path / "plain", case)
    folder = make(tmp_path / "m", case, config=older(settings))
    assert distance(said(folder, case), said(plain, case)) <= 1e-6
    assert described(folder) == described(plain)
    out = check_survives(folder, case)
    written = json.loads((out / "config.json").read_text())
    assert {key: written[key] for key in settings} == settings


def test_rotary_settings_are_seen(tmp_path: Path) -> None:
    """The negative control of the test above: another fraction is another group, and other logits."""
    case = "gpt_neox-half-rotary"
    plain = make(tmp_path / "plain", case)
    folder = make(tmp_path / "m", case, config=older({"rotary_pct": 0.25, "rotary_emb_base": 10000}))
    assert described(folder) != described(plain)
    assert distance(said(folder, case), said(plain, case)) > SEEN


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_names_the_type_that_was_written(tmp_path: Path, key: str) -> None:
    def spelled(config: Config) -> Config:
        return {k: v for k, v in config.items() if k != "dtype"} | {key: "bfloat16"}

    folder = make(tmp_path / "m", "llama-gqa", dtype=torch.bfloat16, config=spelled)
    _, config = tiny.read(check_survives(folder, "llama-gqa"))
    assert [config.get(k) for k in ("dtype", "torch_dtype") if k in config] == ["float32"]
    assert config[key] == "float32"
    weights = load(folder)
    weights.save(tmp_path / "same")
    assert tiny.read(tmp_path / "same")[1][key] == "bfloat16"


# -- in memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case.name for case in tiny.CASES])
def test_a_model_in_memory(case: str) -> None:
    """A fresh model does not name its class in its config, and ViT and NeoX have other names than on disk."""
    made = tiny.case(case)
    model, inputs = made.build(), made.inputs(0)
    before = tiny.logits(model, inputs)
    assert model.config.architectures is None
    weights = load(model)
    moved = scramble(weights, seed=1).apply(weights).state_dict()
    assert moved.keys() == model.state_dict().keys()
    assert largest_change(moved, model.state_dict()) > 0.1
    assert distance(tiny.logits(model, inputs), before) == 0  # untouched
    other = made.build(seed=1)
    assert distance(tiny.logits(other, inputs), before) > SEEN
    other.load_state_dict(moved)
    assert distance(tiny.logits(other, inputs), before) <= 1e-5 * weights.arch.sizes.n_layers


@pytest.mark.parametrize("case", ["gpt2-bare", "bert-classifier", "vit-classifier", "gpt_neox-tied", "llama-tied"])
def test_a_model_in_memory_is_the_one_on_disk(tmp_path: Path, case: str) -> None:
    """The same architecture, and what is saved from memory transformers reads too."""
    folder, model = make(tmp_path / "m", case), tiny.case(case).build()
    assert described(model) == described(folder)
    load(model).save(tmp_path / "out")
    assert distance(said(tmp_path / "out", case, leftovers=NOTHING), said(folder, case)) == 0


def test_a_state_dict_needs_a_config() -> None:
    with pytest.raises(CheckpointError, match=r"needs its config beside it: load\(tensors, config\)"):
        load(tiny.case("llama-gqa").build().state_dict())
