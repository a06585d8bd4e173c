"""A run of learning on disk, so that one that was killed goes on where it last measured."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from isobasin.files import write_whole
from isobasin.groups import Element
from isobasin.symmetries import Symmetry
from isobasin.transform import Transform, Value

State = dict[str, Any]


class Record(Protocol):
    """Remembers the latest state of each section of one run."""

    def find(self, section: str) -> State | None: ...

    def keep(self, section: str, state: State) -> None: ...


class Unrecorded:
    """For whoever will not come back."""

    def find(self, section: str) -> State | None:
        return None

    def keep(self, section: str, state: State) -> None:
        pass


class FileRecord:
    """The state in one file beside the output. It belongs to one question: another one starts afresh.

    `question` is whatever the result depends on: hashes of models and data, flags, the version.
    """

    def __init__(self, output: Path, question: Mapping[str, Any], *, writes: bool = True) -> None:
        self.path = output.with_name(f".{output.name[:100]}.isobasin-learning")
        text = json.dumps(question, sort_keys=True, default=str)
        self._question = hashlib.sha256(text.encode()).hexdigest()
        self._writes = writes
        self._sections = self._read()

    def find(self, section: str) -> State | None:
        return self._sections.get(section)

    def _read(self) -> dict[str, State]:
        try:
            found = torch.load(self.path, weights_only=True, map_location="cpu")
            return dict(found["sections"]) if found["question"] == self._question else {}
        except Exception:  # none there, cut short, or not ours (torch raises whatever it likes): nothing to go on from
            return {}

    def keep(self, section: str, state: State) -> None:
        """Written beside and renamed: a kill at any moment leaves the old state or the new one."""
        self._sections = self._sections | {section: state}
        if not self._writes:
            return
        whole = {"question": self._question, "sections": self._sections}
        write_whole(self.path, lambda stream: torch.save(whole, stream))

    def close(self) -> None:
        """The result is written: the state is no longer needed."""
        if self._writes:
            self.path.unlink(missing_ok=True)


def packed(elements: Mapping[str, Element]) -> State:
    return {name: dict(g.tensors()) for name, g in elements.items()}


def unpacked(state: Mapping[str, Any], part: Symmetry) -> dict[str, Element]:
    return {name: part.groups[name].element(tensors) for name, tensors in state.items()}


def packed_transform(transform: Transform) -> State:
    gauge = {name: {"before": v.before, "after": v.after} for name, v in transform.gauge.items()}
    return {"elements": packed(transform.elements), "gauge": gauge}


def unpacked_transform(state: State, part: Symmetry) -> Transform:
    gauge = {name: Value(**v) for name, v in state["gauge"].items()}
    return Transform(part.arch.family, dict(part.arch.spaces), unpacked(state["elements"], part), gauge)
