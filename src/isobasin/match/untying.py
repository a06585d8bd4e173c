"""A tied head as a tensor of its own: the same function, and a larger group.

While embedding and head are one tensor the last gain can not fold into it, and the stream keeps permutations (with
signs for RMSNorm). Apart they leave rotations. The config then says so, and transformers reads the head from the file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from isobasin.arch import Names, describe
from isobasin.weights import Weights

_KEYS = {"isobasin": "tied"}  # every other family: tie_word_embeddings


def untied(weights: Weights) -> Weights:
    """The same model with a head of its own; a model that is not tied as it is.

    Tensors go by their full names, as a folder without prefixes has no place for a head. Nothing is read yet.

    >>> untied(load("gpt2")).arch.spaces["resid"].kind  # doctest: +SKIP
    'orthogonal1'
    """
    twice = {alias: name for alias, name in weights.arch.aliases.items() if name in weights.arch.tensors}
    if not any(weights.arch.tied(name) for name in twice.values()):
        return weights
    config = dict(weights.config) | {_KEYS.get(weights.arch.family, "tie_word_embeddings"): False}
    shapes = {name: weights.arch.shapes[name] for name in weights.arch.tensors}
    arch, names = describe(config, shapes | {alias: shapes[name] for alias, name in twice.items()})
    same = {name for name in arch.tensors if weights.names.on_disk.get(name) == name}
    return replace(
        weights,
        arch=arch,
        config=config,
        names=Names(names.on_disk, {}),
        tensors=_Twice(weights, twice),
        dtypes={name: weights.dtypes[twice.get(name, name)] for name in arch.tensors},
        changed=weights.changed | (set(arch.tensors) - same),  # these can not be copied from file to file
    )


class _Twice(Mapping[str, Tensor]):
    """A model's tensors, some of them under a second name."""

    def __init__(self, source: Weights, twice: Mapping[str, str]) -> None:
        self._source, self._twice = source, twice

    def __getitem__(self, name: str) -> Tensor:
        return self._source[self._twice.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        yield from self._source
        yield from self._twice

    def __len__(self) -> int:
        return len(self._source) + len(self._twice)
