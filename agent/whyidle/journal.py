"""The journal: what a machine answered, below the parsers, so that a run can be had again.

One gzipped JSON line for each run of a collector: its clock readings, and the answers - and
errors - that differ from those it got before. A question never asked is "not recorded", which is
not the same as a file that is not there. Off unless asked for, and bounded: a journal is followed
by the next, which tells everything anew, and the oldest goes. Secrets of processes never reach the
disk: of an environment only what is looked at is written, command lines are masked.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import threading
import zlib
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from whyidle.clock import NS_PER_S, Clock
from whyidle.collect.process_job import listed_variables
from whyidle.collect.process_secrets import mask_command
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
from whyidle.layout import JOURNAL, Identity, files, stem
from whyidle.runner import Due
from whyidle.schema import VERSION

FORMAT = "whyidle.journal/1"
# What the journals of a boot take together: some hours of a busy node.
LIMIT_BYTES = 64 << 20
# How many journals that are: the oldest goes as a whole.
PIECES = 4
LOG = logging.getLogger("whyidle.journal")
# Clock readings by the method that gave them.
CLOCKS = ("mono_ns", "boot_ns", "wall_ns", "process_cpu_ns", "thread_cpu_ns")

_T = TypeVar("_T")
# Plain JSON: {"a": answer}, {"b": base64}, {"s": stat}, {"n": names}, {"v": events}, {"e": error}.
Outcome = dict[str, Any]


def question(kind: str, *args: Argument) -> str:
    """Return the key of a question."""
    return json.dumps([kind, *args], separators=(",", ":"))


class JournalWriter:
    """Appends lines to gzip files of a folder; a killed process loses about the last second.

    `number` counts the files that it began: whoever tells only what changed begins anew with each.
    """

    __slots__ = (
        "_clock",
        "_file",
        "_flushed_ns",
        "_folder",
        "_identity",
        "_limit",
        "_lock",
        "_packer",
        "_size",
        "number",
    )

    def __init__(
        self, folder: Path, identity: Identity, clock: Clock, *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._clock = clock
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._packer = zlib.compressobj(6, zlib.DEFLATED, 31)
        self._flushed_ns = 0
        self._size = 0
        self.number = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._begin()

    @property
    def ended(self) -> bool:
        """Whether nothing more is written, as after a disk was full."""
        return self._file is None

    def add(self, line: Mapping[str, Any], number: int) -> None:
        """Append a line that begins from what file `number` holds; of an older one it is left."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._file is None or number != self.number:
                return
            try:
                self._append(data)
                if self._size >= self._limit // PIECES:
                    self._finish()
                    self._begin()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Finish the file."""
        with self._lock:
            try:
                self._finish()
            except OSError as error:
                self._give_up(error)

    def _append(self, data: bytes) -> None:
        packed = self._packer.compress(data)
        now = self._clock.mono_ns()
        if now - self._flushed_ns >= NS_PER_S:
            packed += self._packer.flush(zlib.Z_SYNC_FLUSH)
            self._flushed_ns = now
        self._put(packed)

    def _begin(self) -> None:
        self._bound()
        now, wall = self._clock.mono_ns(), self._clock.wall_ns()
        for nudge in range(1000):  # a name is taken only if two began in one millisecond
            path = self._folder / (stem(wall, now + nudge * 1_000_000) + JOURNAL)
            try:
                self._file = FileIO(path, "x")
            except FileExistsError:
                continue
            break
        self._packer = zlib.compressobj(6, zlib.DEFLATED, 31)
        self._flushed_ns, self._size = now, 0
        self.number += 1
        head = {
            "format": FORMAT,
            "schema_version": VERSION,
            "node": self._identity.node,
            "boot_id": self._identity.boot_id,
            "begin_ns": now,
            "begin_wall_ns": wall,
        }
        self._append(json.dumps(head, separators=(",", ":")).encode() + b"\n")

    def _bound(self) -> None:
        """Delete the oldest journals, so that with a new one they stay within the limit."""
        sizes = {path: path.stat().st_size for path in files(self._folder, JOURNAL)}
        left = self._limit - self._limit // PIECES
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= left:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _finish(self) -> None:
        if self._file is not None:
            self._put(self._packer.flush())
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        """End for good: a disk without room ends the journal, never the sampler."""
        LOG.warning(
            "the journal in %s ends here (%s); free space and start again to go on with it",
            self._folder,
            error.strerror or error,
        )
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        done = 0
        while done < len(data):
            done += self._file.write(data[done:]) or 0
        self._size += len(data)


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

    __slots__ = ("_asked", "_clock", "_inner", "_known", "_number", "_run", "_writer")

    def __init__(self, inner: Host, writer: JournalWriter) -> None:
        self._inner = inner
        self._writer = writer
        self._clock = _RecordingClock(inner.clock)
        self._known: dict[str, Outcome] = {}
        self._number = writer.number
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
        if self._number != self._writer.number:
            self._number = self._writer.number
            self._known = {}
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
        self._writer.add({**self._run, "clocks": clocks, "answers": changed}, self._number)

    def read(self, path: str) -> str:
        """Pass the question on."""
        return self._note(question("read", path), lambda: self._inner.read(path), _plain)

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        """Pass the question on."""
        return self._note(
            question("read_bytes", path),
            lambda: self._inner.read_bytes(path, keep=keep),
            lambda data: {"b": base64.b64encode(_without_secrets(path, data)).decode()},
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


def _without_secrets(path: str, data: bytes) -> bytes:
    """Return a file as it may be written down: rows are made from the rest all the same."""
    if path.endswith("/environ"):
        return listed_variables(data)
    return mask_command(data) if path.endswith("/cmdline") else data


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
