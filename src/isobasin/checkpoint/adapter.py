"""LoRA adapters of PEFT on disk: adapter_config.json, and two factors for each weight that is changed.

An adapter adds s·B·A to a weight, or its transpose where the weight is stored with its inputs first: A is r × inputs, B
is outputs × r, and the scale s is α/r, or α/√r with rank stabilisation. (B U⁻¹, U A) is the same adapter for every
invertible U. It may also replace biases (PEFT's `bias="all"`). The content is untrusted, as that of any folder.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save
from torch import Tensor

from isobasin.arguments import checks_arguments
from isobasin.checkpoint.folder import MODEL_CARD, find_folder, is_adapter, is_own_card, read_object, write_object
from isobasin.checkpoint.header import TensorInfo, read_header
from isobasin.checkpoint.reader import Checkpoint, PickledFiles
from isobasin.display import Shown, Summary
from isobasin.errors import CheckpointError, brief
from isobasin.files import AtomicOutput, disk_errors

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
_KEY = re.compile(
    r"(?:base_model\.model\.)?(.+?)\.(?:lora_([AB])\.weight|lora_embedding_([AB])|(?:base_layer\.)?(bias)"
    r"|base_layer\.(weight))"
)
MAX_LENGTH = 500  # characters of a pattern, and of what it is matched with
# Keys that change nothing once an adapter is trained; those that are read are in `_READ`. Any other key must be unset.
_NEUTRAL = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out"),
        *("inference_mode", "loftq_config"),
        *("lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size"),
        *("revision", "task_type", "unsloth_fixed"),
    }
)
_READ = frozenset(
    {
        *("alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern"),
        *("layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "use_rslora"),
    }
)
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # others change the base, too
_UNLOAD = "merge it into its base with PEFT (merge_and_unload) first"


@dataclass(frozen=True)
class Factors:
    """s·B·A of one weight: `up` is s·B, `down` is A; `embedding`: the weight is that of an embedding."""

    up: Tensor
    down: Tensor
    embedding: bool = False

    @property
    def rank(self) -> int:
        return len(self.down)

    def product(self, shape: tuple[int, ...], transposed: bool) -> Tensor:
        """What is added to a weight of this shape; `transposed`: its inputs are first. The kind of the module decides
        this, whatever `fan_in_fan_out` says, as in PEFT."""
        found = self.up.double() @ self.down.double()
        found = found.mT if self.embedding or transposed else found
        if shape != tuple(found.shape):
            raise CheckpointError(f"the adapter adds {tuple(found.shape)} to a weight of shape {tuple(shape)}")
        return found


@dataclass(frozen=True, repr=False)
class Adapter(Shown):
    """An adapter: its configuration, and the factors of every module it changes (read when asked for)."""

    config: Mapping[str, Any]
    modules: tuple[str, ...]
    tensors: Mapping[str, Tensor]  # `MODULE.A` and `MODULE.B`, without the scale; `MODULE.bias`
    embeddings: frozenset[str] = frozenset()
    biased: tuple[str, ...] = ()  # modules whose bias is replaced
    stored: tuple[str, ...] = ()  # modules whose weight of the base is stored too: `MODULE.weight`
    path: Path | None = None

    def summary(self) -> Summary:
        """Its base and its rank, and how many modules it changes."""
        facts = {
            "base": self.config.get("base_model_name_or_path") or "not named",
            "rank": self.config.get("r"),
            "modules": f"{len(self.modules)}, with the bias of {len(self.biased)}",
        }
        return Summary("LoRA adapter", facts)

    @classmethod
    @checks_arguments
    def open(cls, path: str | Path) -> "Adapter":
        """The adapter in a folder, or of a hub id in the local cache."""
        folder = find_folder(path)
        if not is_adapter(folder):
            raise CheckpointError(f"{path} has no {CONFIG}, expected the folder of a LoRA adapter of PEFT")
        config = read_object(folder / CONFIG)
        _check_config(config, folder)
        file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
        if file is None:
            raise CheckpointError(f"{folder} holds no {WEIGHTS[0]}: is this a whole adapter?")
        pickles = PickledFiles()
        infos = read_header(file) if file.suffix == ".safetensors" else pickles.infos(file)
        places = _places(infos, folder)
        modules = tuple(sorted({module for module, side in places if side in ("A", "B")}))
        if not modules:
            raise CheckpointError(f"{folder}: the adapter holds no factors")
        for module in modules:
            _check_pair(module, places, infos, folder)
            _check_chosen(module, infos[places[module, "A"]].shape[0], config, folder)
        source = Checkpoint(folder, config, {key: infos[key] for key in places.values()}, pickles)
        tensors = _Renamed(source, {f"{module}.{side}": key for (module, side), key in places.items()})
        embeddings = frozenset(module for (module, _), key in places.items() if "lora_embedding" in key)
        biased, stored = (tuple(sorted(m for m, side in places if side == kind)) for kind in ("bias", "weight"))
        return cls(config, modules, tensors, embeddings, biased, stored, folder)

    @checks_arguments
    def factors(self, module: str) -> Factors:
        """B with the scale and A, in float64."""
        up, down = (self.tensors[f"{module}.{side}"].double() for side in "BA")
        return Factors(self.scale(module) * up, down, module in self.embeddings)

    def scale(self, module: str) -> float:
        """α/r of a module, or α/√r; patterns name the modules whose α is another one."""
        rank = len(self.tensors[f"{module}.A"])
        alpha = _by_pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", 8))
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") is True else rank)

    def with_config(self, changes: Mapping[str, Any]) -> Self:
        """The same adapter with other values of some keys of its configuration."""
        return replace(self, config=dict(self.config) | dict(changes))

    def with_factors(self, found: Mapping[str, Factors], biases: Mapping[str, Tensor]) -> Self:
        """The same adapter with other factors, whose scale is taken out of them, and other biases; in float32."""
        tensors: dict[str, Tensor] = {f"{module}.bias": bias.float().contiguous() for module, bias in biases.items()}
        for module, each in found.items():
            tensors[f"{module}.A"] = each.down.float().contiguous()
            scale = self.scale(module)
            tensors[f"{module}.B"] = (each.up / scale if scale else torch.zeros_like(each.up)).float().contiguous()
        config = dict(self.config) | ({"bias": "all"} if biases else {})
        modules, biased = tuple(sorted(found)), tuple(sorted(biases))
        return replace(self, config=config, modules=modules, tensors=tensors, biased=biased, stored=(), path=None)

    @checks_arguments
    def save(self, out: str | Path, *, force: bool = False, card: str | None = None) -> None:
        """Write an adapter folder, whole or not at all; `card` is the text of its model card."""
        target = Path(out).resolve()
        check_adapter_output(target, force=force, inputs=[self.path] if self.path else [])
        content = {}
        for module in self.modules:
            ending = "lora_embedding_{}" if module in self.embeddings else "lora_{}.weight"
            for side in "AB":
                tensor = self.tensors[f"{module}.{side}"]
                content[f"base_model.model.{module}.{ending.format(side)}"] = tensor.contiguous()
        for module in self.biased:
            inside = ".base_layer" if module in self.modules else ""
            content[f"base_model.model.{module}{inside}.bias"] = self.tensors[f"{module}.bias"].contiguous()
        with disk_errors(target, CheckpointError), AtomicOutput(target, folder=True) as output:
            write_object(output.new / CONFIG, dict(self.config))
            (output.new / WEIGHTS[0]).write_bytes(save(content, {"format": "pt"}))
            if card is not None:
                (output.new / MODEL_CARD).write_text(card, encoding="utf-8")
            output.flush()
            output.commit()


class _Renamed(Mapping[str, Tensor]):
    """Some tensors of a checkpoint under names of their own."""

    def __init__(self, source: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._source, self._names = source, names

    def __getitem__(self, name: str) -> Tensor:
        return self._source[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_adapter_output(out: Path, *, force: bool, inputs: list[Path]) -> None:
    """Raise if the output would overwrite an input, or anything but (with `force`) an adapter."""
    if any(out == folder.resolve() or out.is_relative_to(folder.resolve()) for folder in inputs):
        raise CheckpointError(f"output {out} is an input or inside it: choose another folder")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise CheckpointError(f"output {out} is a file, expected a folder: choose another name")
    if not force:
        raise CheckpointError(f"output {out} exists and is not empty: choose another name, or replace it by force")
    unknown = sorted(entry.name for entry in out.iterdir() if not _is_written(entry))
    if unknown or not is_adapter(out):
        raise CheckpointError(
            f"output {out} holds {', '.join(unknown[:3]) or 'no adapter'}, which no adapter of isobasin has, so it is "
            "not replaced: choose another folder"
        )


def _is_written(entry: Path) -> bool:
    """Whether this is a file of an adapter, or a model card that was written here."""
    return entry.name in (CONFIG, WEIGHTS[0]) or (entry.name == MODEL_CARD and is_own_card(entry))


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse what is no plain LoRA, and every key whose effect is not known."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{folder / CONFIG}: peft_type is {brief(kind, 40)}, expected 'LORA'; {_UNLOAD}")
    for key in sorted(config.keys() - _NEUTRAL - _READ):
        if config[key]:
            raise CheckpointError(f"{folder / CONFIG}: {key:.80} is set, which is not supported; {_UNLOAD}")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{folder / CONFIG}: init_lora_weights is {brief(config['init_lora_weights'], 40)}, which changes the base "
            f"when PEFT loads the adapter, and is not supported; {_UNLOAD}"
        )
    if config.get("r", 8) is None:
        raise CheckpointError(f"{folder / CONFIG}: r is null, expected the rank of the factors")
    _check_types(config, folder)
    alphas = [config.get("lora_alpha", 8), *(config.get("alpha_pattern") or {}).values()]
    if wrong := [each for each in alphas if not _is_number(each)]:
        raise CheckpointError(f"{folder / CONFIG}: lora_alpha is {brief(wrong[0], 40)}, expected a number")


def _check_types(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a value of a type that PEFT would read in another way, or not at all."""
    types: dict[str, tuple[type, ...]] = dict.fromkeys(("alpha_pattern", "rank_pattern"), (dict,))
    types |= dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), (str, list))
    types |= {"use_rslora": (bool,), "layers_to_transform": (int, list), "r": (int,), "bias": (str,)}
    for key, expected in types.items():
        value = config.get(key)
        if value is not None and type(value) not in expected:
            names = " or ".join(each.__name__ for each in expected)
            raise CheckpointError(f"{folder / CONFIG}: {key} is {brief(value, 40)}, expected {names}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def _places(infos: Mapping[str, TensorInfo], folder: Path) -> dict[tuple[str, str], str]:
    """The key of A and of B for each module, of a bias, and of the weight of the base that PEFT stores for heads."""
    found: dict[tuple[str, str], str] = {}
    for key in infos:
        match = _KEY.fullmatch(key)
        if match is None:
            raise CheckpointError(f"{folder}: {key:.120} is no factor of LoRA (lora_A, lora_B); {_UNLOAD}")
        found[match[1], next(kind for kind in match.groups()[1:] if kind)] = key
    return found


def _check_pair(
    module: str, places: Mapping[tuple[str, str], str], infos: Mapping[str, TensorInfo], folder: Path
) -> None:
    shapes = [infos[places[module, side]].shape if (module, side) in places else () for side in "AB"]
    if any(len(shape) != 2 for shape in shapes) or not shapes[0][0] == shapes[1][1] > 0:
        raise CheckpointError(
            f"{folder}: {module} has factors A {shapes[0]} and B {shapes[1]}, expected r × inputs and outputs × r"
        )


def _check_chosen(module: str, rank: int, config: Mapping[str, Any], folder: Path) -> None:
    """Refuse factors that PEFT would not load: of a module that the configuration does not choose, or of another rank
    than it says."""
    expected = _by_pattern(config.get("rank_pattern"), module, config.get("r", 8))
    if expected != rank:
        raise CheckpointError(
            f"{folder}: {module} has factors of rank {rank}, {CONFIG} says {brief(expected, 40)}: PEFT does not load "
            "it; correct one of them"
        )
    if not _is_chosen(module, config):
        raise CheckpointError(
            f"{folder}: {CONFIG} does not choose {module} (target_modules, exclude_modules, layers_to_transform), so "
            "PEFT ignores its factors; correct one of them"
        )


def _is_chosen(module: str, config: Mapping[str, Any]) -> bool:
    """Whether PEFT puts factors beside a module: names are the ends of module names, a string is a pattern."""
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and _is_named(module, excluded):
        return False
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str) or module in targets:
        return _is_named(module, targets)
    return _is_named(module, targets) and _is_in_layers(module, config)


def _is_named(module: str, names: str | list[Any]) -> bool:
    if isinstance(names, str):
        return _matches(names, module, whole=True)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_in_layers(module: str, config: Mapping[str, Any]) -> bool:
    """Whether a module is in one of the layers that the configuration restricts adapters to."""
    wanted, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    if wanted is None or wanted == []:
        return True
    names = [patterns] if isinstance(patterns, str) else patterns or []
    places = re.finditer(r"\.([^.]*)\.(\d+)(?=\.)", module)
    numbers = [int(place[2]) for place in places if not names or place[1] in names]
    return bool(numbers) and numbers[-1] in (wanted if isinstance(wanted, list) else [wanted])


def _by_pattern(patterns: object, module: str, default: Any) -> Any:
    """The value of the first pattern that ends the name of a module, as PEFT looks it up."""
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if _matches(pattern, module, whole=False):
            return value
    return default


def _matches(pattern: str, module: str, *, whole: bool) -> bool:
    """Whether a pattern of PEFT is that of a module: of the whole name, or of its end after a point."""
    allowed, repeated = 3 if whole else 2, len(re.findall(r"[*+{]|(?<!\()\?", pattern))
    if repeated > allowed or re.search(r"\)[*+{?]", pattern) or max(len(pattern), len(module)) > MAX_LENGTH:
        raise CheckpointError(
            f"{CONFIG}: the pattern {pattern:.80} may take for ever to match (expected at most {allowed} repetitions, "
            "and none of a group); name modules instead"
        )
    try:
        return re.fullmatch(pattern if whole else rf"(.*\.)?({pattern})", module) is not None
    except re.error as error:
        raise CheckpointError(f"{CONFIG}: {pattern:.80} is not a pattern ({error}); name modules instead") from error
