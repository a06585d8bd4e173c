"""The supported families, and how the names of a checkpoint find their patterns.

A new family is one file under `arch/families` and its name in the list below.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from isobasin.arch.architecture import Architecture, Index
from isobasin.arch.families import (
    bart,
    bert,
    clip,
    cohere,
    deepseek,
    dinov2,
    experts,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    isobasin,
    llama,
    modernbert,
    multimodal,
    nomic_bert,
    olmo,
    other_decoders,
    phi,
    phi3,
    qwen2,
    siglip,
    stablelm,
    starcoder2,
    t5,
    vit,
    whisper,
)
from isobasin.arch.family import Family
from isobasin.arch.pattern import Pattern
from isobasin.errors import ArchitectureError

_FILES = (
    *(gpt2, bert, modernbert, nomic_bert, vit, dinov2, llama, qwen2, phi3, gemma, glm, experts, gpt_oss, deepseek),
    *(cohere, stablelm, olmo, starcoder2, phi, falcon, gpt_neo, gpt_neox, t5, bart, whisper, clip, siglip),
    *(other_decoders,),
    *(multimodal, isobasin),
)
FAMILIES: dict[str, Family] = {family.name: family for file in _FILES for family in file.FAMILIES}


# Known model types that have no family here, and why.
_NOT_IMPLEMENTED = "is not implemented"
_REASONS: tuple[tuple[str, str], ...] = (
    ("mamba mamba2 falcon_mamba rwkv xlstm", "a state-space model has no attention, and its symmetries are others"),
    (
        "jamba bamba zamba zamba2 qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe kimi_linear granitemoehybrid nemotron_h "
        "falcon_h1 recurrent_gemma minimax lfm2 lfm2_moe olmo_hybrid",
        "some of its layers are state-space, convolution or linear-attention layers, whose symmetries are not derived",
    ),
    (
        "swin swinv2 donut-swin hiera",
        "its windows and merged patches have symmetries that are measured but not derived",
    ),
    (
        "deberta deberta-v2 sew-d",
        "its attention reads relative positions through the same projections: not implemented",
    ),
    (
        "albert",
        "one layer is applied several times, so its symmetries are not those of separate layers: not implemented",
    ),
    (
        "electra",
        "its embeddings enter the stream without a norm on it: not implemented",
    ),
    ("convbert mobilebert squeezebert funnel", "its layers differ from those of BERT: not implemented"),
    (
        "dbrx llama4 llama4_text glm4_moe ernie4_5_moe granitemoe phimoe minimax_m2 dots1 hunyuan_v1_moe "
        "switch_transformers nllb-moe",
        f"its mixture of experts {_NOT_IMPLEMENTED}",
    ),
    ("deepseek_v32 glm_moe_dsa", "its attention chooses keys by scores of their own: not implemented"),
    (
        "pegasus marian m2m_100 blenderbot blenderbot-small plbart fsmt led longt5 prophetnet pegasus_x "
        "bigbird_pegasus t5gemma",
        f"this encoder-decoder {_NOT_IMPLEMENTED}",
    ),
    (
        "gemma4 gemma4_text",
        "norms of values, and layers that share keys and values, are not implemented",
    ),
    (
        "gemma3n gemma3n_text",
        "its layers mix several streams and share keys and values: not implemented",
    ),
    ("siglip2 siglip2_vision_model", "images of any size in one batch are not implemented"),
    (
        "llava_next llava_onevision qwen3_vl qwen3_vl_moe paligemma mllama idefics2 idefics3 smolvlm mistral3 "
        "internvl blip blip-2 instructblip git florence2 phi4_multimodal kosmos-2 glm4v glm4v_moe voxtral aya_vision "
        "video_llava vipllava fuyu",
        "this multimodal model is not implemented; a folder with the language model alone may be",
    ),
    (
        "wav2vec2 wav2vec2-bert wav2vec2-conformer hubert wavlm unispeech unispeech-sat data2vec-audio sew speecht5 "
        "speech_to_text clap vits bark musicgen encodec mimi seamless_m4t seamless_m4t_v2 parakeet_ctc moonshine",
        "of models of audio only Whisper is implemented",
    ),
    (
        "resnet convnext convnextv2 mobilenet_v1 mobilenet_v2 mobilevit efficientnet regnet bit poolformer focalnet",
        "a convolutional network has no attention, and its symmetries are others",
    ),
    (
        "detr conditional_detr deformable_detr rt_detr rt_detr_v2 d_fine table-transformer yolos owlvit owlv2 "
        "grounding-dino sam sam2 segformer mask2former maskformer oneformer dpt clipseg",
        f"this model for detection, segmentation or depth {_NOT_IMPLEMENTED}",
    ),
    (
        "vit_mae vit_msn dinov2_with_registers dinov3_vit data2vec-vision ijepa videomae pvt levit cvt timesformer "
        "vivit",
        f"this vision model {_NOT_IMPLEMENTED}",
    ),
    ("timm_wrapper timm_backbone", "names and fused projections of timm are not read"),
    (
        "vision-encoder-decoder encoder-decoder vision-text-dual-encoder trocr",
        "a model made of two others is not implemented; a folder with one of them alone may be",
    ),
    (
        "longformer big_bird reformer xlnet nystromformer yoso fnet perceiver canine",
        "its attention is not that of a plain encoder: not implemented",
    ),
    (
        "layoutlm layoutlmv2 layoutlmv3 lilt bros markuplm tapas luke",
        "its embeddings of layouts, tables or entities are not implemented",
    ),
)
REFUSED: dict[str, str] = {name: reason for names, reason in _REASONS for name in names.split()}

# Keys by which transformers loads other weights than those of the folder, or changes them.
_LOADED_ELSEWHERE = {
    "transformers_weights": "rename the file that it names to model.safetensors, and remove the key",
    "quantization_config": "dequantise the model first, and remove the key",
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family a config.json names by its `model_type`."""
    name = config.get("model_type")
    if isinstance(name, str) and name in REFUSED:
        raise ArchitectureError(f"config.json: model_type is {name!r}, which is not supported: {REFUSED[name]}")
    if name is None and "pretrained_cfg" in config:
        raise ArchitectureError(
            "config.json: is that of timm, whose names and fused projections are not read; take the same weights for "
            "transformers (google/vit-…, facebook/deit-…, facebook/dinov2-…), or rename the tensors and give them with "
            "the config of a ViTModel: ib.load(tensors, config)"
        )
    if not isinstance(name, str) or name not in FAMILIES:
        near = get_close_matches(name, FAMILIES, cutoff=0.8) if isinstance(name, str) else []
        raise ArchitectureError(
            f"config.json: model_type is {name!r:.80}, expected one of the {len(FAMILIES)} that `isobasin families` "
            f"lists{' (' + ', '.join(near) + '?)' if near else ''}; for another, draft a family with "
            "`isobasin families --draft` and give it with --family"
        )
    return FAMILIES[name]


@dataclass(frozen=True)
class Names:
    """Where each tensor of an architecture lies on disk, and which further names are copies of it (ties). `slices`:
    tensors that are only a part of the one on disk, and which part."""

    on_disk: Mapping[str, str]
    copies: Mapping[str, str]
    slices: Mapping[str, Index] = field(default_factory=dict)

    @cached_property
    def by_disk(self) -> Mapping[str, tuple[str, ...]]:
        """By name on disk, the tensors that lie there; copies apart."""
        found: dict[str, tuple[str, ...]] = {}
        for name, disk in self.on_disk.items():
            found[disk] = (*found.get(disk, ()), name)
        return found


def describe(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Architecture, Names]:
    """The architecture of a checkpoint, bound to its tensors, and where they lie."""
    family = family_of(config)
    _check_depth(family.language_model(config)[1], len(shapes))
    _check_loading(family, config)
    _check_head(family, config)
    tied = config if family.own_head not in shapes else family.untied_config(config)
    arch = family.architecture(tied)
    names = resolve(family, arch, shapes)
    unknown = [n for n in names.on_disk if n not in arch.tensors and not n.startswith(arch.copied)]
    if unknown:
        others = _of_other_classes(family, config, unknown)
        _check_partial_heads(family.class_of(config), arch, others)
        arch = arch.with_unread(others)
        names = resolve(family, arch, shapes)
    described = {name: disk for name, disk in names.on_disk.items() if not name.startswith(arch.copied)}
    _check_biases(*family.language_model(config), arch, described)
    family.settings_of(config)  # refuses numbers that are given as text
    bound = arch.bind(_shapes_of(arch, names, shapes))
    for copy, target in names.copies.items():
        if shapes[copy] != shapes[names.on_disk[target]]:
            raise ArchitectureError(
                f"{copy}: config.json ties it to {target}, but the shapes differ: {shapes[copy]} and "
                f"{shapes[names.on_disk[target]]}; set tie_word_embeddings to false or remove one"
            )
    return bound, names


def _shapes_of(arch: Architecture, names: Names, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of the architecture; a tensor on disk that holds several must be as expected."""
    found = {name: shapes[disk] for name, disk in names.on_disk.items() if name not in names.slices}
    for stack in arch.stacks.values():
        held = {name: index for name, index in stack.slices.items() if name in names.slices}
        for disk in {names.on_disk[name] for name in held}:
            if shapes[disk] != stack.shape:
                raise ArchitectureError(
                    f"{disk}: found shape {'×'.join(map(str, shapes[disk]))}, expected "
                    f"{'×'.join(map(str, stack.shape))} from config.json: the config and the weights belong to "
                    "different models"
                )
        found |= {name: _sliced(stack.shape, index) for name, index in held.items()}
    return found


def _sliced(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    places = zip((*index, *[slice(None)] * (len(shape) - len(index))), shape, strict=True)
    return tuple(len(range(size)[place]) for place, size in places if isinstance(place, slice))


def of_stored_class(config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """The config of the class that a folder was saved from.

    Folders of sentence encoders hold a model without a head, and their config may still name the class with a head that
    it was trained as. Such a file has neither a tensor of that head nor the base prefix in its names.
    """
    family, names = family_of(config), list(names)
    bare = {**config, "architectures": [f"{family.stem}Model"]}
    prefixed = not family.prefix or any(name.startswith(family.prefix) for name in names)
    if prefixed or "Model" not in family.heads or family.class_of(config) == family.class_of(bare):
        return config
    if not family.covers(family.class_of(config)) or family.is_encoder(config):
        return config
    _check_depth(config, len(names))
    whole, trunk = family.architecture(config), family.architecture(bare)
    head = whole.tensors.keys() - trunk.tensors.keys()
    needed = any(not whole.tensors[name].optional and not whole.tensors[name].buffer for name in head)
    return config if not needed or head & resolve(family, whole, names).on_disk.keys() else bare


def _of_other_classes(family: Family, config: Mapping[str, Any], unknown: Iterable[str]) -> dict[str, Pattern]:
    """The patterns of heads that a file still has from another class of the family; that of `config` ignores them."""
    found: dict[str, Pattern] = {}
    if family.own:
        return found
    for head in family.heads:
        for other in (family.untied_config(config), config):
            try:
                arch = family.architecture({**other, "architectures": [f"{family.stem}{head}"]})
            except ArchitectureError:
                continue
            known = {**{alias: arch.tensors[name] for alias, name in arch.aliases.items()}, **arch.tensors}
            for name in resolve(family, arch, unknown).on_disk:
                if name in known:
                    found.setdefault(name, known[name])
    return found


def _check_partial_heads(kind: str, arch: Architecture, others: Iterable[str]) -> None:
    """Refuse the bias of another class's head if this class reads the weight beside it: the head would be used without
    its bias."""
    for name in others:
        weight = name.removesuffix(".bias") + ".weight"
        if name.endswith(".bias") and (weight in arch.tensors or weight in arch.aliases):
            raise ArchitectureError(
                f"{name}: {kind} reads {weight} but has no such bias, and transformers ignores it: remove it, or name "
                "the class that it was saved from in architectures of config.json"
            )


def _check_depth(config: Mapping[str, Any], n_tensors: int) -> None:
    """Patterns are written out layer by layer, so a depth that no tensor backs must not get that far."""
    for key in ("n_layer", "n_layers", "num_hidden_layers"):
        found = config.get(key)
        if isinstance(found, int) and found > n_tensors:
            raise ArchitectureError(
                f"config.json: {key} is {found}, but the checkpoint has {n_tensors} tensors, expected several for each "
                "layer: the config and the weights belong to different models"
            )


def _check_head(family: Family, config: Mapping[str, Any]) -> None:
    name = family.class_of(config)
    if not family.covers(name):
        expected = ", ".join(f"{family.stem}{head}" for head in family.heads)
        raise ArchitectureError(
            f"config.json: architectures names {name!r:.80}, whose head is not supported; expected one of {expected}"
        )


def _check_loading(family: Family, config: Mapping[str, Any]) -> None:
    """Refuse keys by which transformers would load something else than what is read here."""
    for key, remedy in _LOADED_ELSEWHERE.items():
        if config.get(key) is not None:
            raise ArchitectureError(f"config.json: {key} is {config[key]!s:.80}, which transformers obeys: {remedy}")
    for alias, key in family.aliases.items():
        if config.get(alias) is not None and config.get(key) is not None and config[alias] != config[key]:
            raise ArchitectureError(
                f"config.json: {key} is {config[key]!s:.80} and {alias}, another name of it, is {config[alias]!s:.80}; "
                "remove one of them"
            )


def _check_biases(family: Family, config: Mapping[str, Any], arch: Architecture, on_disk: Mapping[str, str]) -> None:
    """Refuse a stored bias that the config switches off, or that no model of the family has: it is not loaded; and a
    missing one that the config switches on."""
    for flag in family.bias_flags:
        value = config.get(flag.key)
        found = [name for name in on_disk if re.search(flag.biases, name)]
        if found and not flag.key:
            raise ArchitectureError(
                f"{on_disk[found[0]]}: {family.name} has no such bias, and transformers ignores it: remove it"
            )
        if found and not (flag.default if value is None else value):
            raise ArchitectureError(
                f"{on_disk[found[0]]}: config.json has {flag.key} false, so transformers ignores this bias: remove it, "
                f"or set {flag.key} to true"
            )
        missing = [n for n, p in arch.tensors.items() if p.optional and n not in on_disk and re.search(flag.biases, n)]
        if missing and flag.key and (flag.default if value is None else value):
            raise ArchitectureError(
                f"{missing[0]}: transformers expects this bias ({flag.key} is true), the checkpoint does not have it: "
                f"complete the folder, or set {flag.key} to false in config.json"
            )


def resolve(family: Family, arch: Architecture, names: Iterable[str]) -> Names:
    """Match names on disk to the names of the patterns: old spellings, a missing or an extra base prefix."""
    on_disk: dict[str, str] = {}
    copies: dict[str, str] = {}
    for disk in names:
        spellings = list(_spellings(family, disk))
        copied = next((n for n in reversed(spellings) if n.startswith(arch.copied)), disk)
        found = next((n for n in spellings if n in arch.aliases or n in arch.tensors or n in arch.stacks), copied)
        target = arch.aliases.get(found)
        if target is not None and found != target:
            copies[disk] = target
        elif found in on_disk:
            raise ArchitectureError(
                f"{disk}: the same tensor as {on_disk[found]} under another spelling; keep one of the two"
            )
        else:
            on_disk[found] = disk
    # Only the copy was saved (transformers keeps one of two tied tensors): it stands for the tensor itself.
    for copy, target in list(copies.items()):
        if target not in on_disk:
            on_disk[target] = copy
            del copies[copy]
    stacks = {name: on_disk.pop(name) for name in arch.stacks if name in on_disk}
    slices = {name: index for stack in stacks for name, index in arch.stacks[stack].slices.items()}
    inside = {name: disk for stack, disk in stacks.items() for name in arch.stacks[stack].slices}
    return Names(on_disk | inside, copies, slices)


def _spellings(family: Family, name: str) -> Iterable[str]:
    yield name
    for old, new in family.spellings:
        name = re.sub(old, new, name)
    yield name
    if family.prefix:
        yield family.prefix + name
        yield name.removeprefix(family.prefix)
