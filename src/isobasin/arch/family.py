"""A family of models as one record: everything that is special about a `model_type`, in one place.

A file under `arch/families` describes one group of relatives: a function from a config.json to an `Architecture`, and
a `Family` for each `model_type` that it covers. Nothing else in the package names a family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isobasin.arch.architecture import Architecture


@dataclass(frozen=True)
class ModelInputs:
    """What a model of this family reads. `image_size` is the default of its config; None: it reads tokens.

    `token_types`: it also reads a segment id per token. `bidirectional`: a text stands between special tokens, and
    padding is masked, so any token serves for it.
    """

    image_size: int | None = None
    token_types: bool = False
    bidirectional: bool = False


@dataclass(frozen=True)
class Family:
    """A supported `model_type`.

    * `describe`: its architecture, from a config.json.
    * `model_class`: the class of transformers to build where config.json names none; empty for the project's own model.
    * `prefix`: the base prefix of tensor names on disk; `spellings`: other spellings of names, as (pattern, name).
    * `settings`: config keys that change the function without changing a shape, with the default of transformers.
      Two models are comparable only where they agree.
    * `optional_pooler`: classes whose config does not say whether they have a pooler.
    * `tied_key`: the config key that ties the head to the embedding.
    * `example`: a title and the sizes of a well-known model, for `isobasin families`.
    """

    name: str
    describe: Callable[[Mapping[str, Any]], Architecture]
    model_class: str = ""
    prefix: str = ""
    spellings: tuple[tuple[str, str], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: ModelInputs = ModelInputs()
    optional_pooler: tuple[str, ...] = ()
    tied_key: str = "tie_word_embeddings"
    example: tuple[str, Mapping[str, Any]] = ("", {})

    @property
    def own(self) -> bool:
        """Whether this is the project's own Transformer, which transformers does not know."""
        return not self.model_class

    def example_architecture(self) -> Architecture:
        """The architecture of the well-known model."""
        classes = {"architectures": [self.model_class]} if self.model_class else {}
        return self.describe({"model_type": self.name, **classes, **self.example[1]})
