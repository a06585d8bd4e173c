"""The model of a cell: its sizes from the grid, its inputs and outputs from the data."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.model import ModelConfig, Transformer

from .datasets import Dataset, open_dataset
from .vocabulary import Vocabulary

_PATCH = {28: 7, 32: 4, 64: 8, 224: 16}


def config_of(settings: Mapping[str, Any], data: Dataset) -> ModelConfig:
    """The model of a cell, with the inputs and outputs that its data have; the feed-forward is 4 times the width.

    SwiGLU's is 8/3 of it, up to a multiple of 16, so that three matrices weigh as much as two.
    """
    model, width = settings["model"], settings["width"]
    sizes = {"n_layers": settings["layers"], "n_heads": settings["heads"], "d_model": width}
    other: dict[str, float] = {}
    sizes["d_ff"] = 16 * math.ceil(8 * width / 48) if model == "llama" else 4 * width
    wanted = {"vit": "image", "bert": "text"}.get(model, "lm")
    if data.kind != wanted:
        raise IsobasinError(f"model {model!r} on data set {data.name!r}, which is {data.kind}: expected {wanted} data")
    if data.image is not None:
        channels, side, _ = data.image
        patch = settings.get("patch") or _PATCH.get(side) or math.gcd(side, 4)
        sizes |= {"image_size": side, "patch_size": patch, "n_channels": channels}
        other["rope_theta"] = 100.0  # angles for the few dozen places of a picture, where 10,000 leaves most at rest
    else:
        assert data.vocabulary is not None
        assert data.sequence is not None
        sizes |= {"d_vocab": data.vocabulary.size, "n_positions": data.sequence}
    if data.n_classes is not None:
        sizes["n_classes"] = data.n_classes
    return ModelConfig.preset(model, positions=settings.get("positions"), **sizes, **other)


def open_for(folder: Path, config: ModelConfig, name: str, root: Path | None) -> Dataset:
    """Data for a model that exists, cut to its length of text or its size of pictures; refused if they do not fit."""
    sequence = config.n_positions if config.d_vocab else None
    data = open_dataset(name, root, sequence=sequence, side=config.image_size)
    _check_fits(config, data, Vocabulary.read(folder, config.d_vocab or 0))
    return data


def _check_fits(config: ModelConfig, data: Dataset, vocabulary: Vocabulary) -> None:
    """Refuse data that a model of this configuration can not read."""
    kind = "image" if config.image_size else "text" if config.n_classes else "lm"
    if kind != data.kind:
        raise IsobasinError(f"data set {data.name!r} is {data.kind}, but the pretrained model is for {kind} data")
    if data.image is not None and data.image[0] != config.n_channels:
        raise IsobasinError(
            f"data set {data.name!r} has {data.image[0]} channels, the pretrained model reads {config.n_channels}"
        )
    if data.vocabulary is not None and data.vocabulary.content != vocabulary.content:
        raise IsobasinError(
            f"data set {data.name!r}: its vocabulary is not that of the pretrained model; use bytes for both, "
            f"{data.name.partition(':')[0]}:bytes"
        )


def head_of(model: Transformer) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_parameters() if name.startswith("head."))


def with_classes(model: Transformer, n_classes: int | None, *, seed: int = 0) -> Transformer:
    """The model itself, or one with a new classifier where the number of classes is another."""
    if n_classes == model.config.n_classes:
        return model
    made = Transformer(dataclasses.replace(model.config, n_classes=n_classes), seed=seed)
    kept = {name: tensor for name, tensor in model.state_dict().items() if name not in head_of(model)}
    made.load_state_dict(made.state_dict() | kept)
    return made
