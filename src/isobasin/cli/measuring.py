"""What a command cost: seconds, and its peak of memory."""

import resource
import sys
import threading
import time
from types import TracebackType
from typing import Self


class Cost:
    """Measures the body of a `with`. Anonymous memory is sampled where the system tells it (Linux), else None.

    The peak that counts is the anonymous one: pages of mapped files go away by themselves when memory is short.
    """

    def __init__(self, interval: float = 0.01) -> None:
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._peak_kb = 0
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._start
        self._stop.set()
        self._thread.join()

    @property
    def peak_anon_mb(self) -> float | None:
        return round(self._peak_kb / 1024, 1) if self._peak_kb else None

    @property
    def peak_rss_mb(self) -> float:
        unit = 1024 if sys.platform == "darwin" else 1  # bytes there, kilobytes elsewhere
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit / 1024, 1)

    def _watch(self) -> None:
        while True:
            self._peak_kb = max(self._peak_kb, _anonymous_kb())
            if self._stop.wait(self._interval):
                return


def _anonymous_kb() -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return 0
