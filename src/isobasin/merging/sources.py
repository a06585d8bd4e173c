"""Where the numbers of a merge come from: blocks of a file, or a whole tensor that something has moved."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.checkpoint.finite import check_finite
from isobasin.errors import CheckpointError
from isobasin.merging.mixing import Method, Mixture, mixed
from isobasin.weights import Weights


@dataclass(frozen=True)
class Source:
    """One tensor of all models, and the type it is written in.

    What is stored is first rounded to that type, as mergekit does; what was moved (and is in float64) is mixed as it
    is, and rounded once.
    """

    name: str
    models: tuple[Weights, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.models[0].arch.shapes[self.name]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def buffer(self) -> bool:
        return self.models[0].arch.tensors[self.name].buffer

    @property
    def in_blocks(self) -> bool:
        """Whether every model has it unchanged in a file that can be read in parts."""
        return not self.buffer and all(self._stored(model) for model in self.models)

    @property
    def via(self) -> torch.dtype:
        moved = any(self.name in model.changed for model in self.models)
        return torch.float64 if moved else self.dtype

    def _stored(self, model: Weights) -> bool:
        if model.checkpoint is None or self.name in model.changed:
            return False
        return model.checkpoint.infos[model.names.on_disk[self.name]].offset is not None

    def block(self, start: int, stop: int) -> list[Tensor]:
        """The numbers start:stop of every model."""
        return [_stored_block(model, self.name, start, stop) for model in self.models]

    def mixture(self, method: Method) -> Mixture:
        return method.prepared(self.block, self.size, self.via)

    def mixed(self, mixture: Mixture, parts: Sequence[Tensor]) -> Tensor:
        """The mixture of flat parts; one that is not finite is an error that says whose fault it is."""
        result, finite = mixed(mixture, parts, self.via, self.dtype)
        if not finite:
            self._explain(parts, result)
        return result

    def whole(self, method: Method) -> Tensor:
        """The merged tensor, at one go. A buffer is the first model's, as it is."""
        if self.buffer:
            return self.models[0][self.name]
        parts = [model[self.name].detach().cpu().reshape(-1) for model in self.models]
        mixture = method.prepared(lambda start, stop: [p[start:stop] for p in parts], self.size, self.via)
        return self.mixed(mixture, parts).reshape(self.shape)

    def _explain(self, parts: Sequence[Tensor], result: Tensor) -> None:
        for number, (model, part) in enumerate(zip(self.models, parts)):
            disk = model.names.on_disk[self.name]
            if model.checkpoint is not None:
                model.checkpoint.check(disk, part)
            check_finite(part, disk, f"found in model {number}, repair it")
        narrow = self.dtype == torch.float16
        advice = "float16 ends at 65504, choose bfloat16 or float32" if narrow else "choose smaller weights"
        check_finite(result, self.name, f"the merge overflows: {advice}")


def _stored_block(model: Weights, name: str, start: int, stop: int) -> Tensor:
    assert model.checkpoint is not None
    disk = model.names.on_disk[name]
    block = model.checkpoint.flat(disk, start, stop)
    for copy, target in model.names.copies.items():
        if target == name and not torch.equal(model.checkpoint.flat(copy, start, stop), block):
            raise CheckpointError(
                f"{copy}: config.json ties it to {disk}, but the two differ; "
                "set tie_word_embeddings to false, or remove one of them"
            )
    return block
