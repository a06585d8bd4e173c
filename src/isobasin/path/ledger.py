"""Finished points on disk, so that an interrupted run goes on where it stopped."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isobasin.files import write_text
from isobasin.tasks import Sums


class FileLedger:
    """Sums by key in a small file beside the output. It belongs to one question: another one starts afresh.

    `question` is whatever the answer depends on: hashes of models and data, flags, the version.
    """

    def __init__(self, output: Path, question: Mapping[str, Any]) -> None:
        self.path = output.with_name(f".{output.name}.isobasin-partial")
        text = json.dumps(question, sort_keys=True, default=str)
        self._question = hashlib.sha256(text.encode()).hexdigest()
        self._sums = self._read()

    @property
    def n_found(self) -> int:
        return len(self._sums)

    def find(self, key: str) -> Sums | None:
        return self._sums.get(key)

    def keep(self, key: str, sums: Sums) -> None:
        self._sums[key] = sums
        rows = {name: asdict(one) for name, one in self._sums.items()}
        write_text(self.path, json.dumps({"question": self._question, "sums": rows}))

    def close(self) -> None:
        """The answer is written: the points are no longer needed."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Sums]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["question"] != self._question:
                return {}
            return {name: Sums(**row) for name, row in found["sums"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # none there, or not ours: nothing to go on from
