"""The trainer's own stopwatches, for the truth alone: nothing that is recorded reads them."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORKERS_MAX = 16
_FIELDS = ("read_s", "decode_s", "samples")


class Marks:
    """Phases of the main thread and the ends of its steps, in ns of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int, int]] = []
        self.steps: list[int] = []
        self.launches: list[int] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Notes how long something took."""
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.phases.append((name, begin_ns, time.monotonic_ns()))

    def write(self, path: Path, workers: WorkerMarks) -> None:
        """Leaves everything in a file."""
        told = {
            "phases": self.phases,
            "steps": self.steps,
            "launches": self.launches,
            "workers": workers.totals(),
        }
        path.write_text(json.dumps(told), encoding="utf-8")


class WorkerMarks:
    """What loader workers spend on a sample, in memory that they share with the trainer."""

    def __init__(self) -> None:
        self._shared: Any = multiprocessing.Array("d", WORKERS_MAX * len(_FIELDS), lock=False)

    def add(self, worker: int, read_s: float, decode_s: float) -> None:
        """Called by the worker: only it writes its own numbers."""
        base = (worker % WORKERS_MAX) * len(_FIELDS)
        self._shared[base] += read_s
        self._shared[base + 1] += decode_s
        self._shared[base + 2] += 1

    def totals(self) -> dict[str, float]:
        """The sums over all workers."""
        return {name: sum(self._shared[at :: len(_FIELDS)]) for at, name in enumerate(_FIELDS)}
