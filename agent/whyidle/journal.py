"""The journal: what a machine answered, below the parsers, so that a run can be had again.

One gzipped JSON line for each run of a collector: its clock readings, and the answers - and
errors - that differ from those it got before. A question never asked is "not recorded", which is
not the same as a file that is not there. Off unless asked for, and bounded.
"""

from __future__ import annotations

import base64
import itertools
import json
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from whyidle.clock import NS_PER_S, Clock
from whyidle.host import (
    Answer,
    Argument,
    Event,
    Host,
    NotRecordedError,
    NvmlError,
    NvmlUnavailableError,
    Stat,
)
from whyidle.layout import Identity
from whyidle.runner import Due
from whyidle.schema import VERSION

FORMAT = "whyidle.journal/1"
# Some hours of a busy node; whoever debugs for longer says so.
LIMIT_BYTES = 64 << 20
# Clock readings by the method that gave them.
CLOCKS = ("mono_ns", "boot_ns", "wall_ns", "process_cpu_ns", "thread_cpu_ns")

_T = TypeVar("_T")
# Plain JSON: {"a": answer}, {"b": base64}, {"s": stat}, {"n": names}, {"v": events}, {"e": error}.
Outcome = dict[str, Any]


def question(kind: str, *args: Argument) -> str:
    """Return the key of a question."""
    return json.dumps([kind, *args], separators=(",", ":"))


class JournalWriter:
    """Appends lines to a gzip file; a killed process loses about the last second."""

    __slots__ = ("_clock", "_file", "_flushed_ns", "_limit", "_lock", "_packer", "full", "size")

    def __init__(
        self, path: Path, identity: Identity, clock: Clock, *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._clock = clock
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._packer = zlib.compressobj(6, zlib.DEFLATED, 31)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)
        self._flushed_ns = clock.mono_ns()
        self.size = 0
        self.full = False
        head = {
            "format": FORMAT,
            "schema_version": VERSION,
            "node": identity.node,
            "boot_id": identity.boot_id,
            "begin_ns": self._flushed_ns,
            "begin_wall_ns": clock.wall_ns(),
        }
        self.add(head)

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line; from the first that does not fit on, nothing more is taken."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self.full:
                return
            packed = self._packer.compress(data)
            now = self._clock.mono_ns()
            if now - self._flushed_ns >= NS_PER_S:
                packed += self._packer.flush(zlib.Z_SYNC_FLUSH)
                self._flushed_ns = now
            try:
                self._put(packed)
            except OSError:
                self.full = True  # a disk without room ends the journal, never the sampler
                return
            if self.size >= self._limit:
                self._end()

    def close(self) -> None:
        """Finish the file."""
        with self._lock:
            if not self.full:
                self._end()
            self._file.close()

    def _end(self) -> None:
        self.full = True
        try:
            self._put(self._packer.flush())
        except OSError:
            return  # readers take a file that is cut off

    def _put(self, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += self._file.write(data[done:]) or 0
        self.size += len(data)


class _RecordingClock:
    """A clock whose readings are written down."""

    __slots__ = ("_inner", "readings")

    def __init__(self, inner: Clock) -> None:
        self._inner = inner
        self.readings: dict[str, list[int]] = {name: [] for name in CLOCKS}

    def _read(self, name: str, value: int) -> int:
        self.readings[name].append(value)
        return value

    def mono_ns(self) -> int:
        """Return the inner clock's value."""
        return self._read("mono_ns", self._inner.mono_ns())

    def boot_ns(self) -> int:
        """Return the inner clock's value."""
        return self._read("boot_ns", self._inner.boot_ns())

    def wall_ns(self) -> int:
        """Return the inner clock's value."""
        return self._read("wall_ns", self._inner.wall_ns())

    def process_cpu_ns(self) -> int:
        """Return the inner clock's value."""
        return self._read("process_cpu_ns", self._inner.process_cpu_ns())

    def thread_cpu_ns(self) -> int:
        """Return the inner clock's value."""
        return self._read("thread_cpu_ns", self._inner.thread_cpu_ns())

    def sleep_until(self, mono_ns: int) -> None:
        """Pass the wait on."""
        self._inner.sleep_until(mono_ns)


class RecordingHost:
    """Passes the questions of one collector on to a host, and writes the answers down.

    It is the run's observer as well: a line is written when the run ends.
    """

    __slots__ = ("_asked", "_clock", "_inner", "_known", "_run", "_writer")

    def __init__(self, inner: Host, writer: JournalWriter) -> None:
        self._inner = inner
        self._writer = writer
        self._clock = _RecordingClock(inner.clock)
        self._known: dict[str, Outcome] = {}
        self._asked: dict[str, list[Outcome]] = {}
        self._run: dict[str, Any] = {}

    @property
    def clock(self) -> Clock:
        """The inner clock, written down."""
        return self._clock

    def begin(self, collector: str, due: Due) -> None:
        """Begin a line."""
        self._run = {"collector": collector, **due._asdict()}
        self._asked = {}
        for readings in self._clock.readings.values():
            readings.clear()

    def end(self) -> None:
        """Write the line: what changed, and every answer to a question asked more than once."""
        changed = {
            key: outcomes
            for key, outcomes in self._asked.items()
            if len(outcomes) > 1 or self._known.get(key) != outcomes[0] or "v" in outcomes[0]
        }
        self._known.update({key: outcomes[-1] for key, outcomes in self._asked.items()})
        clocks = {name: _deltas(values) for name, values in self._clock.readings.items() if values}
        self._writer.add({**self._run, "clocks": clocks, "answers": changed})

    def read(self, path: str) -> str:
        """Pass the question on."""
        return self._note(question("read", path), lambda: self._inner.read(path), _plain)

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        """Pass the question on."""
        return self._note(
            question("read_bytes", path),
            lambda: self._inner.read_bytes(path, keep=keep),
            lambda data: {"b": base64.b64encode(data).decode()},
        )

    def names(self, path: str) -> tuple[str, ...]:
        """Pass the question on."""
        return self._note(question("names", path), lambda: self._inner.names(path), _plain)

    def link(self, path: str) -> str:
        """Pass the question on."""
        return self._note(question("link", path), lambda: self._inner.link(path), _plain)

    def stat(self, path: str) -> Stat:
        """Pass the question on."""
        return self._note(
            question("stat", path),
            lambda: self._inner.stat(path),
            lambda s: {"s": [s.mode, s.size_bytes, s.user_id, s.device, s.inode]},
        )

    def nvml(self, call: str, *args: Argument) -> Answer:
        """Pass the question on."""
        key = question("nvml", call, *args)
        return self._note(key, lambda: self._inner.nvml(call, *args), _plain)

    def ask(self, question_: str, *args: Argument) -> Answer:
        """Pass the question on."""
        key = question("ask", question_, *args)
        return self._note(key, lambda: self._inner.ask(question_, *args), _plain)

    def events(self, source: str) -> tuple[Event, ...]:
        """Pass the question on."""
        return self._note(
            question("events", source),
            lambda: self._inner.events(source),
            lambda events: {"v": [[event.mono_ns, event.text] for event in events]},
        )

    def forget(self, prefix: str) -> None:
        """Forget the answers below `prefix` too: a journal of a month must not grow in memory."""
        begin = question("read", prefix)[:-2].split(",", 1)[1]
        for key in [key for key in self._known if key.split(",", 1)[1].startswith(begin)]:
            del self._known[key]
        self._inner.forget(prefix)

    def close(self) -> None:
        """Close the inner host."""
        self._inner.close()

    def _note(self, key: str, ask: Callable[[], _T], encode: Callable[[_T], Outcome]) -> _T:
        try:
            answer = ask()
        except Exception as error:
            self._asked.setdefault(key, []).append({"e": _error_out(error)})
            raise
        self._asked.setdefault(key, []).append(encode(answer))
        return answer


def _plain(answer: object) -> Outcome:
    return {"a": _listed(answer)}


def _listed(answer: Any) -> Any:
    """Return an answer as JSON gives it back, so that comparing it with the last one is right."""
    if isinstance(answer, list | tuple):
        return [_listed(item) for item in answer]
    if isinstance(answer, Mapping):
        return {str(key): _listed(item) for key, item in answer.items()}
    return answer


def _deltas(values: list[int]) -> list[int]:
    """Return the first value and then differences: they are shorter."""
    return values[:1] + [after - before for before, after in itertools.pairwise(values)]


def _error_out(error: Exception) -> list[Any]:
    if isinstance(error, OSError):
        return ["os", error.errno, error.strerror, error.filename]
    if isinstance(error, NvmlError):
        return ["nvml", error.code, error.call, error.text]
    if isinstance(error, NvmlUnavailableError):
        return ["no_nvml", str(error)]
    if isinstance(error, NotRecordedError):
        return ["not_recorded", str(error)]
    if isinstance(error, KeyError):
        return ["key", str(error.args[0]) if error.args else ""]
    return ["other", f"{type(error).__name__}: {error}"]
