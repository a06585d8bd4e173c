"""The resume file of a run: a killed run continues from its last check."""

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


class ResumeStore(Protocol):
    """Holds the latest state of each section of one run."""

    def find(self, section: str) -> State | None: ...

    def keep(self, section: str, state: State) -> None: ...


class NullResumeStore:
    """Stores nothing."""

    def find(self, section: str) -> State | None:
        return None

    def keep(self, section: str, state: State) -> None:
        pass


class ResumeFile:
    """The state in one file beside the output.

    `question` is everything that the result depends on: hashes of models and data, flags, the version. A file that
    was written for another question is ignored.
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
        except Exception:  # missing, cut short or not ours: torch.load raises many types, and all mean a fresh start
            return {}

    def keep(self, section: str, state: State) -> None:
        """Write atomically: a kill at any moment leaves the old state or the new one."""
        self._sections = self._sections | {section: state}
        if not self._writes:
            return
        whole = {"question": self._question, "sections": self._sections}
        write_whole(self.path, lambda stream: torch.save(whole, stream))

    def close(self) -> None:
        """Delete the file; call it once the result has been written."""
        if self._writes:
            self.path.unlink(missing_ok=True)


def pack_elements(elements: Mapping[str, Element]) -> State:
    return {name: dict(g.tensors()) for name, g in elements.items()}


def unpack_elements(state: Mapping[str, Any], part: Symmetry) -> dict[str, Element]:
    return {name: part.groups[name].element(tensors) for name, tensors in state.items()}


def pack_transform(transform: Transform) -> State:
    gauge = {name: {"before": v.before, "after": v.after} for name, v in transform.gauge.items()}
    return {"elements": pack_elements(transform.elements), "gauge": gauge}


def unpack_transform(state: State, part: Symmetry) -> Transform:
    gauge = {name: Value(**v) for name, v in state["gauge"].items()}
    return Transform(part.arch.family, dict(part.arch.spaces), unpack_elements(state["elements"], part), gauge)
