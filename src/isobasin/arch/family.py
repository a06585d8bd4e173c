"""A family of models as one record: everything that is special about a `model_type`, in one place.

A file under `arch/families` describes one group of relatives: a function from a config.json to an `Architecture`, and
a `Family` for each `model_type` that it covers. Nothing else in the package names a family.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from isobasin.arch.architecture import Architecture
from isobasin.arch.config import Fields
from isobasin.errors import ArchitectureError

# Keys that change no output of a model in evaluation mode: what it is called, how it is trained and run, how text is
# generated. A test compares this list with what transformers does.
NEUTRAL_KEYS = frozenset(
    {
        *("_name_or_path", "name_or_path", "architectures", "auto_map", "model_type", "dtype", "torch_dtype"),
        *("transformers_version", "isobasin_version", "tokenizer_class", "language", "finetuning_task"),
        *("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation"),
        *("use_cache", "output_attentions", "output_cross_attentions", "output_hidden_states", "output_scores"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef"),
        *("return_dict", "return_dict_in_generate", "torchscript", "pretraining_tp"),
        *("gradient_checkpointing", "initializer_range", "initializer_factor", "problem_type", "task_specific_params"),
        *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "hidden_dropout_prob"),
        *("attention_probs_dropout_prob", "classifier_dropout", "summary_first_dropout", "dropout", "layerdrop"),
        *("residual_dropout", "embedding_dropout", "resid_dropout", "embed_dropout", "emb_pdrop", "qa_dropout"),
        *("seq_classif_dropout", "init_std"),
        *("id2label", "label2id", "num_labels", "_num_labels", "tie_word_embeddings", "tie_encoder_decoder"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
        *("unk_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"),
        *("suppress_tokens", "begin_suppress_tokens", "max_length", "min_length", "do_sample", "early_stopping"),
        *("num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty", "repetition_penalty"),
        *("length_penalty", "exponential_decay_length_penalty", "temperature", "top_k", "top_p", "typical_p"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "remove_invalid_values", "prefix"),
        *("is_encoder_decoder", "cross_attention_hidden_size", "pruned_heads", "use_bfloat16", "tf_legacy_loss"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "n_ctx"),
        *("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"),
    }
)

# Keys that change which tensors there are, or their shapes, and nothing else: the tensors themselves are compared.
SHAPE_KEYS = frozenset({"attention_bias", "mlp_bias", "qkv_bias", "pooler_output_size", "encoder_stride"})

# Symmetries that are known and not used, in the words of `isobasin families`.
QUARTER_TURNS = "quarter turns of rotary pairs, with their gains exchanged"
NORM_SIGNS = "a sign for every coordinate of a norm behind a sublayer, with that of the weight before it"
HEAD_NORM_SIGNS = "signs and quarter turns of gains behind LayerNorms of each head, with those of the rows before them"
EXPERT_ORDER = "the order of the experts of a layer"
COMMON_HEAD_ORDER = "the order of heads, which all layers with one table of relative positions share"
VALUE_CONSTANTS = "constants of values where heads without an output bias fill the stream"

# Settings of every decoder: a flag that lets it look ahead; and where a classifier reads the class of a text, which is
# the last token that is no padding.
CAUSAL: dict[str, Any] = {"is_causal": True}
DECODER_HEADS = ("ForCausalLM", "Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
LAST_TOKEN: dict[str, dict[str, Any]] = {"ForSequenceClassification": {"pad_token_id": None}}


@dataclass(frozen=True)
class ModelInputs:
    """What a model of this family reads. `image_size` is the default of its config; None: it reads tokens.

    `token_types`: it also reads a segment id per token. `bidirectional`: a text stands between special tokens, and
    padding is masked, so any token serves for it. `padded_positions`: positions are counted from the padding token's id
    on, so that many rows of the table are no positions. `extra_tokens`: tokens beside patches and class token.
    `decoder`: beside an encoder there is a decoder, which reads tokens of its own. `features`: the encoder reads the
    features of audio, a spectrogram of one length, and the decoder alone reads tokens. `decoder_start`: the token that
    the decoder reads before a target where the config names none; "last": the last token of the target. `ends`: a text
    is read at its first end token, or, where the config has 2 for it, at the highest id.
    """

    image_size: int | None = None
    extra_tokens: int = 0
    decoder: bool = False
    decoder_start: int | Literal["last"] | None = None
    features: bool = False
    ends: bool = False
    padded_positions: bool = False
    token_types: bool = False
    bidirectional: bool = False


@dataclass(frozen=True)
class ImageInputs:
    """How images enter a text: their features take the places of a special token.

    `tokens`: the config key for the number of these places; empty: one for every patch. `patches`: pixels are given as
    rows of patches with a grid, and patches are merged. `marks`: the input that marks these places.
    """

    tokens: str = ""
    patches: bool = False
    marks: str = ""


@dataclass(frozen=True)
class TextPart:
    """The language model inside a multimodal model. Its tensors have a prefix, and its config is `text_config`.

    `families`: its family, by the model type of its config; the first is the default. `defaults`: what transformers
    takes where the config has no value, by the name of the family. `flat`: older files have the keys of `text_config`
    beside the others. `tied`: whether the head is tied where no config says it; None: as the text config says.
    `prepared`: the text config with one spelling of what can be said in several ways.
    """

    prefix: str
    families: Mapping[str, "Family"]
    images: ImageInputs
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flat: bool = False
    tied: bool | None = None
    prepared: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config

    def of(self, config: Mapping[str, Any]) -> "tuple[Family, Mapping[str, Any]]":
        """The family of the language model, and its config with the defaults of transformers."""
        nested = config.get("text_config")
        if nested is None:
            nested = {k: v for k, v in config.items() if k != "model_type"} if self.flat else {}
        if not isinstance(nested, Mapping):
            raise ArchitectureError(f"config.json: text_config is {nested!s:.80}, expected an object")
        kind = nested.get("model_type") or next(iter(self.families))
        family = self.families.get(kind) if isinstance(kind, str) else None
        if family is None:
            raise ArchitectureError(
                f"config.json: the model_type of text_config is {kind!r:.80}, expected one of "
                f"{', '.join(self.families)}"
            )
        tied, usual = config.get("tie_word_embeddings"), self.defaults.get(family.name, {})
        if self.tied is None:
            tied = bool(tied) or bool(nested.get("tie_word_embeddings"))
        own: dict[str, Any] = {"model_type": family.name, "architectures": [family.model_class]}
        own["tie_word_embeddings"] = self.tied if tied is None else tied
        given = {key: value for key, value in nested.items() if value is not None or key not in usual}
        return family, ChainMap(own, dict(self.prepared(given)), dict(usual))


@dataclass(frozen=True)
class Part:
    """One tower of a model with several: its family, whose config lies inside that of the model.

    `defaults`: what transformers takes where that config has no value. `older`: a key by which older files give this
    config; where it is there, it wins.
    """

    family: "Family"
    defaults: Mapping[str, Any]
    older: str = ""

    def of(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of the tower inside that of the model, with the defaults of transformers."""
        keys = [key for key in (self.older, self.key) if key and config.get(key) is not None]
        nested = config[keys[0]] if keys else {}
        if not isinstance(nested, Mapping):
            raise ArchitectureError(f"config.json: {keys[0]} is {nested!s:.80}, expected an object")
        given = {key: value for key, value in nested.items() if value is not None or key not in self.defaults}
        own = {"model_type": self.family.name, "architectures": [self.family.model_class]}
        return {**self.defaults, **given, **own}

    @property
    def key(self) -> str:
        return "text_config" if self.family.inputs.image_size is None else "vision_config"


def _plain(value: Any) -> Any:
    """One spelling of values that mean the same: a size for a square, the usual name of an activation."""
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        return value[0]
    return "silu" if value == "swish" else value


class _RecordedConfig(Mapping[str, Any]):
    """A config that remembers which of its keys were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


class _Resolved(Mapping[str, Any]):
    """A config in which a key that is absent or null has the value of another name of it."""

    def __init__(self, config: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        self._config = config
        self._names: dict[str, list[str]] = {}
        for alias, key in aliases.items():
            self._names.setdefault(key, []).append(alias)

    def __getitem__(self, key: str) -> Any:
        if self._config.get(key) is None:
            for alias in self._names.get(key, ()):
                if self._config.get(alias) is not None:
                    return self._config[alias]
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


@dataclass(frozen=True)
class BiasFlag:
    """A config key that says whether there are biases, its default, and a pattern of their names."""

    key: str
    default: bool
    biases: str


@dataclass(frozen=True)
class Family:
    """A supported `model_type`.

    * `describe`: its architecture, from a config.json.
    * `model_class`: the class of transformers to build where config.json names none; empty for the project's own model.
    * `heads`: the ends of the names of its classes that are covered.
    * `encoder_heads`: of these, those of classes that hold an encoder alone, in a family that has decoders.
    * `prefix`: the base prefix of tensor names on disk; `spellings`: other spellings of names, as (pattern, name).
    * `settings`: config keys that change the function without changing a shape, with the default of transformers.
      Two models are comparable only where they agree. `rare_settings` are those that few configs hold: a fingerprint
      names them only where they differ from the default. `head_settings` are read only by classes whose name ends so.
      `derived_settings` computes values that hang on several keys (None: the default). Rotary positions are part of
      the architecture. A test derives from transformers that nothing is missing here.
    * `bias_flags`: keys that switch biases on or off; an empty key: no model of the family has these biases.
      `aliases`: other names of keys, as transformers has them.
    * `ignored`: keys that transformers writes into configs of this family and never reads.
    * `optional_pooler`: classes whose config does not say whether they have a pooler.
    * `own_head`: a tensor that is there only if the head is not tied to the embedding, whatever the config says.
    * `fused`: transformers holds several tensors of a file as one in memory.
    * `tied_key`: the config key that ties the head to the embedding.
    * `text`: the language model of a multimodal model. The other parts are copied as they are.
    * `parts`: the towers of a model with several, by the key of their configs. All of them are described.
    * `unused`: symmetries that are not part of the group used here, in words.
    * `example`: a title and the sizes of a well-known model, for `isobasin families`.
    """

    name: str
    describe: Callable[[Mapping[str, Any]], Architecture]
    model_class: str = ""
    heads: tuple[str, ...] = DECODER_HEADS
    encoder_heads: tuple[str, ...] = ()
    prefix: str = ""
    spellings: tuple[tuple[str, str], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    rare_settings: Mapping[str, Any] = field(default_factory=dict)
    head_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    derived_settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    inputs: ModelInputs = ModelInputs()
    bias_flags: tuple[BiasFlag, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    optional_pooler: tuple[str, ...] = ()
    own_head: str = ""
    fused: bool = False
    tied_key: str = "tie_word_embeddings"
    text: TextPart | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    example: tuple[str, Mapping[str, Any]] = ("", {})

    @property
    def own(self) -> bool:
        """Whether this is the project's own Transformer, which transformers does not know."""
        return not self.model_class

    @property
    def stem(self) -> str:
        """What the names of its classes begin with."""
        return next((self.model_class.removesuffix(head) for head in self.heads if self.model_class.endswith(head)), "")

    def class_of(self, config: Mapping[str, Any]) -> str:
        """The class of transformers that a config names, as transformers spells it (MPTForCausalLM: Mpt…)."""
        name = Fields(config).architecture or self.model_class
        for kind in (f"{stem}{head}" for stem in (self.stem, f"{self.stem}Text") for head in self.heads):
            if kind.lower() == name.lower():
                return kind
        return name

    def covers(self, kind: str) -> bool:
        """Whether the head of a class of transformers is described here."""
        return self.own or any(kind.removesuffix(head) in (self.stem, f"{self.stem}Text") for head in self.heads)

    def is_encoder(self, config: Mapping[str, Any]) -> bool:
        """Whether the class holds an encoder alone, in a family that has decoders."""
        return self.class_of(config) in (f"{self.stem}{head}" for head in self.encoder_heads)

    def language_model(self, config: Mapping[str, Any]) -> "tuple[Family, Mapping[str, Any]]":
        """The family and the config of the language model: of the part that is one, or of the whole."""
        return self.part("text_config", config) if self.text is None else self.text.of(config)

    def part(self, key: str, config: Mapping[str, Any]) -> "tuple[Family, Mapping[str, Any]]":
        """The family and the config of a tower; of the whole where there is only one."""
        found = self.parts.get(key)
        return (self, config) if found is None else (found.family, found.of(config))

    def untied_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config whose head is a tensor of its own."""
        found, nested = {**config, self.tied_key: False}, config.get("text_config")
        if self.text is not None and isinstance(nested, Mapping) and nested.get(self.tied_key):
            found["text_config"] = {**nested, self.tied_key: False}
        return found

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """The architecture of a config, whose keys may go by their other names."""
        return self.describe(_Resolved(config, self.aliases) if self.aliases else config)

    def settings_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every setting. A null is a value of its own: `sliding_window: null` means no window."""
        defaults = dict(self.settings) | self._other_settings(config)
        if self.text is not None:
            config = _Resolved(config, self.aliases)
        found = {key: _plain(config.get(key, default)) for key, default in defaults.items()}
        for key, value in found.items():
            if isinstance(value, str) and isinstance(defaults[key], int | float):
                raise ArchitectureError(f"config.json: {key} is {value!r:.80}, expected a number")
        if self.text is not None:
            family, inner = self.text.of(config)
            found |= family.settings_of(inner)
        for key, part in self.parts.items():
            found |= {f"{key}: {k}": v for k, v in part.family.settings_of(part.of(config)).items()}
        return found | dict(self.derived_settings(config))

    def unusual_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Those outside `settings` whose value is not the default."""
        defaults, found = self._other_settings(config), self.settings_of(config)
        return {k: v for k, v in found.items() if k not in self.settings and v != defaults.get(k)}

    def known_keys(self, config: Mapping[str, Any]) -> frozenset[str]:
        """The keys that the description or the settings read, and those that change no output of any model."""
        always = NEUTRAL_KEYS | SHAPE_KEYS | frozenset(self.ignored) | frozenset(self.aliases)
        if self.text is not None:
            family, inner = self.text.of(config)
            flat = frozenset() if config.get("text_config") is not None else family.known_keys(inner)
            return always | flat | frozenset({**self.settings, **self.rare_settings}) | {"text_config", "vision_config"}
        recorded = _RecordedConfig(config)
        self.architecture(recorded)
        self.settings_of(recorded)
        return frozenset(recorded.read) | always

    def _other_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        name = self.class_of(config)
        heads = [settings for ending, settings in self.head_settings.items() if name.endswith(ending)]
        return {key: value for settings in (self.rare_settings, *heads) for key, value in settings.items()}

    def example_architecture(self) -> Architecture:
        """The architecture of the well-known model."""
        classes = {"architectures": [self.model_class]} if self.model_class else {}
        return self.architecture({"model_type": self.name, **classes, **self.example[1]})
