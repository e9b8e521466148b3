"""A trace file as a stream of decoded pieces, in bounded memory.

Chrome's trace format is one JSON object with a long array `traceEvents` in it, or that array alone.
The file is read in blocks and the array is cut between two events; a cut is right when the piece
before it parses, because it began at an event. So no second tokenizer is needed, a damaged event
costs itself and not the file, and memory stays at a few blocks whatever the size of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec

from whyidle_rules.trace.gunzip import MAGIC, Gunzip, GunzipError

BLOCK_BYTES = 1 << 20  # decoded events of a block take about ten times this
HEADER_BYTES_MAX = 64 << 20  # of what stands before the events, or of one event
DAMAGED_EVENTS_MAX = 1000  # then the rest of the file is given up

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*\]")
_SPACE = b" \t\r\n"

T = TypeVar("T")


class NotATrace(Exception):
    """The file holds no events of a trace; the text says what it looks like instead."""


@dataclass(slots=True)
class Damage:
    """What could not be read of a file; `notes` are clauses such as "it is cut off"."""

    events: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a clause once."""
        if text not in self.notes:
            self.notes.append(text)


def open_trace(path: Path) -> IO[bytes]:
    """Open a plain or gzip-compressed file, told apart by its first bytes; raises OSError."""
    raw = path.open("rb")
    compressed = raw.read(len(MAGIC)) == MAGIC
    raw.seek(0)
    return cast("IO[bytes]", Gunzip(raw)) if compressed else raw


class EventStream:
    """Decodes the events of one file piece by piece.

    `decode` turns the bytes of a JSON array into values and raises msgspec.DecodeError. After the
    last piece, `header` holds the other members of the trace's object and `damage` what was lost.
    """

    def __init__(self, source: IO[bytes], decode: Callable[[bytes], T]) -> None:
        self._source = source
        self._decode = decode
        self._at_end = False
        self._left: bytes | None = None
        self.header: dict[str, Any] = {}
        self.damage = Damage()

    def __iter__(self) -> Iterator[T]:
        """Yield what `decode` made of each piece; raises NotATrace."""
        rest: bytes | None = self._skip_header()
        while rest is not None:
            cut = _last_boundary(rest)
            if cut is None:
                if self._at_end:
                    yield from self._mend(rest)
                    break
                if len(rest) > HEADER_BYTES_MAX:
                    self.damage.note("one of its events is larger than 64 MiB")
                    break
                rest += self._block()
                continue
            decoded = self._try(rest[: cut[0]])
            if decoded is None:
                yield from self._mend(rest)
                rest = self._left
            else:
                yield decoded
                rest = rest[cut[1] :]
            if rest is not None:
                rest += self._block()

    def _block(self) -> bytes:
        try:
            block = self._source.read(BLOCK_BYTES)
        except GunzipError as error:
            self.damage.note(str(error))
            block = b""
        except OSError as error:
            self.damage.note(f"reading it failed ({(error.strerror or 'i/o error').lower()})")
            block = b""
        if not block:
            self._at_end = True
        return block

    def _skip_header(self) -> bytes:
        """Read up to the first event; returns what was read beyond it."""
        head = self._block().lstrip(b"\xef\xbb\xbf" + _SPACE)
        while True:
            if head[:1] == b"[":
                return head[1:]
            if head and head[:1] != b"{":
                raise NotATrace("it is not JSON")
            for match in _EVENTS.finditer(head):
                if self._take_header(head[: match.start()]):
                    return head[match.end() :]
            if self._at_end:
                raise NotATrace("it is empty" if not head else self._other(head))
            if len(head) > HEADER_BYTES_MAX:
                raise NotATrace("its first 64 MiB hold no traceEvents")
            head = (head + self._block()).lstrip(_SPACE)

    def _other(self, head: bytes) -> str:
        if self.damage.notes:
            return f"{self.damage.notes[0]} before its first event"
        try:
            msgspec.json.decode(head)
        except (msgspec.DecodeError, RecursionError):
            return "it is not whole JSON and holds no traceEvents"
        return "it is JSON without traceEvents"

    def _take_header(self, text: bytes) -> bool:
        members = text.rstrip(_SPACE).removesuffix(b",") + b"}"
        try:
            self.header.update(msgspec.json.decode(members, type=dict[str, Any]))
        except (msgspec.DecodeError, RecursionError):
            return False
        return True

    def _try(self, piece: bytes) -> Any:
        try:
            return self._decode(b"[" + piece + b"]")
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            pass
        try:
            piece.decode()
        except UnicodeDecodeError:
            # Names in another encoding: their odd characters are lost, the events are not.
            return self._try(piece.decode(errors="replace").encode())
        return None

    def _mend(self, rest: bytes) -> Iterator[Any]:
        """Decode a piece in which the array ends or an event is damaged.

        Sets `_left` to what must be read on with, or to None where the array ended.
        """
        self._left = None
        for match in _ends(rest):
            decoded = self._try(rest[: match.start() + 1])
            if decoded is not None:
                yield decoded
                self._take_trailer(rest[match.end() :])
                return
        if rest.lstrip(_SPACE)[:1] == b"]":
            self._take_trailer(rest.lstrip(_SPACE)[1:])
            return
        begin = 0
        good: list[bytes] = []
        for match in _BETWEEN.finditer(rest):
            event = rest[begin : match.start() + 1]
            begin = match.end()
            if self._try(event) is not None:
                good.append(event)
            else:
                self.damage.events += 1
        if good:
            yield self._try(b",".join(good))
        if self.damage.events > DAMAGED_EVENTS_MAX:
            self.damage.note(f"over {DAMAGED_EVENTS_MAX} of its events are damaged")
            return
        if not self._at_end:
            self._left = rest[begin:]
            return
        last = self._try(rest[begin:])
        if last is not None:
            yield last
        self.damage.note("it is cut off")

    def _take_trailer(self, rest: bytes) -> None:
        """Take the members after the events: `, "traceName": ... }`."""
        while not self._at_end and len(rest) < HEADER_BYTES_MAX:
            rest += self._block()
        members = rest.strip(_SPACE)
        if not members:
            return
        try:
            text = b"{" + members.lstrip(b",").lstrip(_SPACE)
            self.header.update(msgspec.json.decode(text, type=dict[str, Any]))
        except (msgspec.DecodeError, RecursionError):
            self.damage.note("what stands after its events is damaged")


def _last_boundary(rest: bytes) -> tuple[int, int] | None:
    """Return (end of the last event but one, start of the last), searching from the end."""
    window = 1 << 14
    while True:
        offset = max(0, len(rest) - window)
        matches = list(_BETWEEN.finditer(rest, offset))
        if matches:
            return matches[-1].start() + 1, matches[-1].end()
        if offset == 0:
            return None
        window *= 8


def _ends(rest: bytes, most: int = 16) -> Iterator[re.Match[bytes]]:
    """Yield places where the array may end, the first ones."""
    for count, match in enumerate(_END.finditer(rest)):
        if count == most:
            return
        yield match
