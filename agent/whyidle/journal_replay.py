"""Replay: a host that answers from a journal, and the reader of journals."""

from __future__ import annotations

import base64
import errno
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whyidle.clock import Clock, VirtualClock
from whyidle.errors import UserError
from whyidle.host import (
    Answer,
    Argument,
    Event,
    NotRecordedError,
    NvmlError,
    NvmlUnavailableError,
    Stat,
)
from whyidle.journal import FORMAT, Outcome, question

# A line holds one run; mountstats of a big node has a megabyte.
LINE_LIMIT_BYTES = 64 << 20


def _tupled(answer: Any) -> Any:
    if isinstance(answer, list):
        return tuple(_tupled(item) for item in answer)
    if isinstance(answer, dict):
        return {key: _tupled(item) for key, item in answer.items()}
    return answer


def _sums(deltas: list[int]) -> list[int]:
    values: list[int] = []
    for delta in deltas:
        values.append(delta + (values[-1] if values else 0))
    return values


def _error_in(said: list[Any]) -> Exception:
    kind, *args = said
    if kind == "os":
        return OSError(args[0] or errno.EIO, args[1], args[2])
    if kind == "nvml":
        return NvmlError(int(args[0]), str(args[1]), str(args[2]))
    if kind == "no_nvml":
        return NvmlUnavailableError(str(args[0]))
    if kind == "not_recorded":
        return NotRecordedError(str(args[0]))
    if kind == "key":
        return KeyError(str(args[0]))
    return RuntimeError(str(args[0]))


@dataclass(slots=True)
class _Book:
    """What one collector knows at a moment of the replay."""

    known: dict[str, Outcome] = field(default_factory=dict)
    run: dict[str, list[Outcome]] = field(default_factory=dict)


class ReplayClock(VirtualClock):
    """Gives the readings of a run back in their order; then stays at the last."""

    __slots__ = ("_readings",)

    def __init__(self) -> None:
        super().__init__()
        self._readings: dict[str, list[int]] = {}

    def load(self, readings: Mapping[str, list[int]]) -> None:
        """Take the readings of the next run."""
        self._readings = {name: list(values) for name, values in readings.items()}

    def _next(self, name: str, otherwise: int) -> int:
        left = self._readings.get(name)
        if not left:
            return otherwise
        return left[0] if len(left) == 1 else left.pop(0)

    def mono_ns(self) -> int:
        """Return the next reading."""
        self.now_ns = self._next("mono_ns", self.now_ns)
        return self.now_ns

    def boot_ns(self) -> int:
        """Return the next reading."""
        return self._next("boot_ns", super().boot_ns())

    def wall_ns(self) -> int:
        """Return the next reading."""
        return self._next("wall_ns", super().wall_ns())

    def process_cpu_ns(self) -> int:
        """Return the next reading."""
        return self._next("process_cpu_ns", 0)

    def thread_cpu_ns(self) -> int:
        """Return the next reading."""
        return self._next("thread_cpu_ns", 0)


class ReplayHost:
    """Answers one collector from its journal."""

    __slots__ = ("_book", "_clock", "unasked")

    def __init__(self) -> None:
        self._book = _Book()
        self._clock = ReplayClock()
        self.unasked = 0

    @property
    def clock(self) -> Clock:
        """The recorded readings."""
        return self._clock

    def load(self, clocks: Mapping[str, list[int]], answers: Mapping[str, list[Outcome]]) -> None:
        """Take the next run of the journal."""
        self.finish()
        self._clock.load({name: _sums(values) for name, values in clocks.items()})
        self._book.run = {key: list(outcomes) for key, outcomes in answers.items()}

    def finish(self) -> None:
        """End a run: answers that nobody asked for are counted, and known from now on."""
        for key, outcomes in self._book.run.items():
            if outcomes:
                self.unasked += 1
                self._book.known[key] = outcomes[-1]
        self._book.run = {}

    def read(self, path: str) -> str:
        """Answer from the journal."""
        return str(self._answer("read", path)["a"])

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        """Answer from the journal."""
        return base64.b64decode(self._answer("read_bytes", path)["b"])

    def names(self, path: str) -> tuple[str, ...]:
        """Answer from the journal."""
        return tuple(self._answer("names", path)["a"])

    def link(self, path: str) -> str:
        """Answer from the journal."""
        return str(self._answer("link", path)["a"])

    def stat(self, path: str) -> Stat:
        """Answer from the journal."""
        mode, size, user, device, inode = self._answer("stat", path)["s"]
        return Stat(mode=mode, size_bytes=size, user_id=user, device=device, inode=inode)

    def nvml(self, call: str, *args: Argument) -> Answer:
        """Answer from the journal."""
        answer: Answer = _tupled(self._answer("nvml", call, *args)["a"])
        return answer

    def ask(self, question_: str, *args: Argument) -> Answer:
        """Answer from the journal."""
        answer: Answer = _tupled(self._answer("ask", question_, *args)["a"])
        return answer

    def events(self, source: str) -> tuple[Event, ...]:
        """Answer from the journal; what was not reported in this run is not reported again."""
        key = question("events", source)
        if not self._book.run.get(key) and key in self._book.known:
            return ()
        outcome = self._answer("events", source)
        return tuple(Event(mono_ns=mono_ns, text=text) for mono_ns, text in outcome["v"])

    def forget(self, prefix: str) -> None:
        """Keep everything: the journal may come back to it."""

    def close(self) -> None:
        """Hold nothing."""

    def _answer(self, kind: str, *args: Argument) -> Outcome:
        key = question(kind, *args)
        left = self._book.run.get(key)
        outcome = left.pop(0) if left else self._book.known.get(key)
        if outcome is None:
            raise NotRecordedError(
                f"the journal holds no answer to {kind} {' '.join(map(str, args))}"
            )
        self._book.known[key] = outcome
        if "e" in outcome:
            raise _error_in(outcome["e"])
        return outcome


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a journal, its head first; a cut-off end is left out. Raises UserError."""
    head = True
    for data in _lines(path):
        try:
            line = json.loads(data)
        except ValueError:
            break  # the last line of a process that was killed
        if head and (not isinstance(line, dict) or line.get("format") != FORMAT):
            break
        head = False
        yield line
    if head:
        raise UserError(f"{path} is not a journal of whyidle: pass a {FORMAT} file (*.jsonl.gz)")


def _lines(path: Path) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(31)
    rest = b""
    try:
        with path.open("rb") as file:
            while packed := file.read(1 << 16):
                while packed:
                    rest += unpacker.decompress(packed, 1 << 20)
                    packed = unpacker.unconsumed_tail
                    *whole, rest = rest.split(b"\n")
                    yield from whole
                    if len(rest) > LINE_LIMIT_BYTES:
                        return
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except zlib.error:
        return
