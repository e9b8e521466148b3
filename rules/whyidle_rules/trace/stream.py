"""A trace file as a stream of decoded pieces, in bounded memory.

Chrome's trace format is one JSON object with a long array `traceEvents` in it, or that array alone.
The file is read in blocks and the array is cut between two events; a cut is right when the piece
before it parses, because it began at an event. Where it does not, the cut was inside of an event
(in a string or a list of objects) or an event is damaged: then the piece is walked event by event.
So a damaged event costs itself and not the file, and memory stays at a few blocks whatever the size
of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import msgspec

from whyidle_rules.trace.gunzip import MAGIC, Gunzip, GunzipError

BLOCK_BYTES = 1 << 19  # decoded events of a block take about ten times this
HEADER_BYTES_MAX = 64 << 20  # of what stands before the events, or of one event
STEP_BYTES_MAX = 8 << 20
DAMAGED_EVENTS_MAX = 1000  # then the rest of the file is given up

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*\]")
_ARRAY_END = re.compile(rb"\s*(?:,\s*)?\]")
_NEXT = re.compile(rb"\s*,\s*(?=\S)")
_REST_EMPTY = re.compile(rb"\s*,?\s*\Z")
_SPACE = b" \t\r\n"
# Finds where a value ends. Numbers are not converted: Python refuses those of over 4300 digits.
_SCANNER = json.JSONDecoder(strict=False, parse_int=len, parse_float=len)
_TOKEN_BYTES_MAX = 8  # of a literal or an escape that the end of a block may cut

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
        self._lost = False  # after damage, until an event is found again
        self.header: dict[str, Any] = {}
        self.damage = Damage()

    def __iter__(self) -> Iterator[T]:
        """Yield what `decode` made of each piece; raises NotATrace."""
        rest: bytes | None = self._skip_header()
        while rest is not None:
            cut = _last_boundary(rest)
            whole = None if cut is None else self._try(rest[: cut[0]])
            if cut is not None and whole is not None:
                yield whole
                rest = rest[cut[1] :] + self._block()
                continue
            length = len(rest)
            if cut is not None or self._at_end:
                yield from self._mend(rest)
                rest = self._left
            if rest is None:
                break
            if len(rest) > HEADER_BYTES_MAX:
                self.damage.note("one of its events is larger than 64 MiB")
                break
            # An event that no block ends is read on in larger steps, not to walk it often.
            rest += self._block(min(len(rest), STEP_BYTES_MAX) if len(rest) == length else 0)

    def _block(self, size: int = 0) -> bytes:
        try:
            block = self._source.read(max(size, BLOCK_BYTES))
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
        """Decode a piece in which the array ends, an event is damaged, or the cut was wrong.

        Sets `_left` to what must be read on with, or to None where the array ended.
        """
        self._left = None
        for match in _ends(rest) if not self._lost else ():
            decoded = self._try(rest[: match.start() + 1])
            if decoded is not None:
                yield decoded
                self._take_trailer(rest[match.end() :])
                return
        walked = self._walk(rest)
        if walked.good:
            yield from self._decoded(walked.good)
        if self.damage.events > DAMAGED_EVENTS_MAX:
            self.damage.note(f"over {DAMAGED_EVENTS_MAX} of its events are damaged")
        elif walked.ended:
            self._take_trailer(rest[walked.end :])
        elif not self._at_end:
            self._left = rest[walked.end :]
        elif walked.cut or not self._found_trailer(rest[walked.end :]):
            self.damage.note("it is cut off")

    def _walk(self, rest: bytes) -> _Walked:
        """Go through a piece value by value, over what is damaged."""
        text = rest.decode("latin-1")  # one character a byte
        good: list[bytes] = []
        place = len(rest) - len(rest.lstrip(_SPACE))
        if ended := _ARRAY_END.match(rest, place):
            return _Walked(good, ended.end(), ended=True)
        while self.damage.events <= DAMAGED_EVENTS_MAX:
            end = _value_end(text, place, event=self._lost)
            if end is _No.WHOLE:
                return _Walked(good, place, cut=True)
            if isinstance(end, _No):
                follows = None
            else:
                self._lost = False
                if ended := _ARRAY_END.match(rest, end):
                    return _Walked([*good, rest[place:end]], ended.end(), ended=True)
                if _REST_EMPTY.match(rest, end):
                    # What follows tells how to read on, so the value waits for it.
                    last = [rest[place:end]] if self._at_end else []
                    return _Walked(good + last, len(rest) if last else place, cut=True)
                follows = _NEXT.match(rest, end)
            if follows is None:  # damage: on behind the next thing that looks like a boundary
                follows = _BETWEEN.search(rest, place if isinstance(end, _No) else end)
                if follows is None:
                    if self._at_end and not isinstance(end, _No):
                        return _Walked([*good, rest[place:end]], end)
                    return _Walked(good, place)
                self.damage.events += end is not _No.EVENT
                self._lost = True
            if not isinstance(end, _No):
                good.append(rest[place:end])
            place = follows.end()
        return _Walked(good, place)

    def _decoded(self, events: list[bytes]) -> Iterator[Any]:
        together = self._try(b",".join(events))
        if together is not None:
            yield together
            return
        for event in events:
            alone = self._try(event)
            if alone is None:
                self.damage.events += 1
            else:
                yield alone

    def _found_trailer(self, rest: bytes) -> bool:
        """Say whether the array ends behind a damaged last event, and take what follows."""
        for match in _ends(rest):
            if self._take_members(rest[match.end() :]):
                self.damage.events += 1
                return True
        return False

    def _take_trailer(self, rest: bytes) -> None:
        """Take the members after the events: `, "traceName": ... }`."""
        while not self._at_end and len(rest) < HEADER_BYTES_MAX:
            rest += self._block()
        if rest.strip(_SPACE) and not self._take_members(rest):
            self.damage.note("what stands after its events is damaged")

    def _take_members(self, rest: bytes) -> bool:
        text = b"{" + rest.strip(_SPACE).lstrip(b",").lstrip(_SPACE)
        try:
            self.header.update(msgspec.json.decode(text, type=dict[str, Any]))
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


class _No(Enum):
    """Why no value was found where one should begin."""

    WHOLE = "the text ends before it does"
    SOUND = "it is damaged"
    EVENT = "it is sound, but a part of an event"


class _Walked(NamedTuple):
    """The sound values of a piece, where to go on, and whether array or text ended there."""

    good: list[bytes]
    end: int
    ended: bool = False
    cut: bool = False


def _value_end(text: str, begin: int, *, event: bool) -> int | _No:
    """Return where the value that begins there ends; with `event`, it must be an event."""
    try:
        value, end = _SCANNER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        near = len(text) - error.pos <= _TOKEN_BYTES_MAX
        return _No.WHOLE if near or error.msg.startswith("Unterminated string") else _No.SOUND
    except RecursionError:
        return _No.SOUND
    return _No.EVENT if event and not (isinstance(value, dict) and "ph" in value) else end


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
