"""Collectors that run one after another on one thread, and the rows of all threads together."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from whyidle.clock import NS_PER_S, Clock
from whyidle.runner import Runner
from whyidle.table import Row

Block = dict[type[Row], list[Row]]


class Buffer:
    """Rows since the last flush, by table; collectors of all threads add to it."""

    __slots__ = ("_block", "_lock")

    def __init__(self) -> None:
        self._block: Block = {}
        self._lock = threading.Lock()

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows of any tables."""
        with self._lock:
            block = self._block
            kind: type[Row] | None = None
            group: list[Row] = []
            for row in rows:
                if type(row) is not kind:
                    kind = type(row)
                    group = block.setdefault(kind, [])
                group.append(row)

    def take(self) -> Block:
        """Return what was added and begin anew."""
        with self._lock:
            block, self._block = self._block, {}
        return block


class Halt:
    """Tells threads to stop. Waiting is one system call; an Event's costs four times as much."""

    __slots__ = ("_gate", "stopped")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.stopped = False

    def wait_s(self, seconds: float) -> None:
        """Wait, and return early when it is time to stop."""
        if self._gate.acquire(timeout=seconds):
            self._gate.release()  # to the next one that waits

    def stop(self) -> None:
        """Wake everyone up; to be called once."""
        self.stopped = True
        self._gate.release()


class Line:
    """Collectors that run one after another: those of the loop, or those of one blocking source."""

    __slots__ = ("_buffer", "_lock", "_running", "_said_late", "clock", "runners")

    def __init__(self, runners: Sequence[Runner], clock: Clock, buffer: Buffer) -> None:
        self.runners = tuple(runners)
        self.clock = clock
        self._buffer = buffer
        self._lock = threading.Lock()
        self._running: tuple[Runner, int] | None = None
        self._said_late = False

    def step(self) -> int:
        """Run everything that is due; return when the next run is due, in ns."""
        now = self.clock.mono_ns()
        for runner in self.runners:
            if now < runner.next_due_ns:
                continue  # without the lock: nobody else makes a run due earlier
            with self._lock:
                claimed = runner.claim(now)
                if claimed is None:
                    continue
                self._running = (runner, now)
                self._said_late = False
            rows = runner.run(claimed)
            began, now = now, self.clock.mono_ns()
            with self._lock:
                self._running = None
                runner.rest()
                if runner.collector.blocking and now - began >= runner.deadline_ns:
                    self._say_late(runner, now)
            self._buffer.add(rows)
        return min([runner.next_due_ns for runner in self.runners])

    def finish(self) -> None:
        """Take the rows that collectors hold back."""
        for runner in self.runners:
            self._buffer.add(runner.release())

    def watch(self, now_ns: int) -> None:
        """If a run is past its deadline, say so and account for what it makes the line miss."""
        with self._lock:
            if self._running is None:
                return
            runner, began = self._running
            if now_ns - began < runner.deadline_ns:
                return
            self._say_late(runner, now_ns)
            for held_up in self.runners:
                self._buffer.add(held_up.skip(now_ns))

    def repeated(self, now_ns: int, *, final: bool = False) -> None:
        """Write down failures that went on."""
        for runner in self.runners:
            self._buffer.add(runner.repeated(now_ns, final=final))

    def _say_late(self, runner: Runner, now_ns: int) -> None:
        if not self._said_late:
            self._said_late = True
            self._buffer.add(runner.late(now_ns))


def drive(line: Line, halt: Halt) -> None:
    """Run a line on its own thread."""
    clock = line.clock
    while not halt.stopped:
        due = line.step()
        left_ns = due - clock.mono_ns()
        if left_ns > 0:
            halt.wait_s(left_ns / NS_PER_S)
    line.finish()
