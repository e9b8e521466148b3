"""The spool: what the sampler appends once a second, and loses at most the last of on kill -9.

A piece is a sequence of frames. A frame is 20 bytes of header - marker, payload length, crc32,
schema hash, flags - and the payload. The first frame (marker WSPL) holds the piece's identity and
schema as JSON; every other one (marker WBLK) a second of rows: for each table its number, its row
count and its columns. A column is a null map and its values in one stretch, so that zlib finds the
repeats: level 1 leaves a third of the bytes for 0.1 ms of CPU a second; deltas and byte shuffling
gain another 10 % of them and cost as much again. No fsync: a killed process leaves what it wrote in
the page cache, the keeper syncs its segments, a sampler must not wait for a disk, and syncing 10 KB
each second makes the disk write 30.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isal import isal_zlib

from whyidle.clock import NS_PER_S, Clock
from whyidle.layout import PIECE, Identity, files, stem
from whyidle.schema import TABLES, VERSION
from whyidle.table import Column, Row, Table, table_of, values_of

HEADER_MARK = b"WSPL"
BLOCK_MARK = b"WBLK"
FRAME = struct.Struct("<4sIIIB3x")
TABLE_HEAD = struct.Struct("<HI")
COUNT = struct.Struct("<I")
ZLIB = 1
# A second of rows has about 10 KB; this is what a damaged length may claim at most.
FRAME_LIMIT_BYTES = 64 << 20
# Strings are names, states and paths; a longer one is cut rather than lost.
STRING_LIMIT_BYTES = 4096
# What the spool may hold while no keeper takes pieces over: two days of a busy node. The oldest go.
SPOOL_LIMIT_BYTES = 2 << 30
NO_NULLS, ALL_NULL, SOME_NULL = 0, 1, 2
_NO_NULLS, _ALL_NULL, _SOME_NULL = (bytes([kind]) for kind in (NO_NULLS, ALL_NULL, SOME_NULL))
# Six digits of a ratio are more than any source has, and let DuckDB store 2 bytes, not 8.
_RATIO_STEPS = 1e6
_DIGITS = bytes.maketrans(b"\0\1", b"01")
# What stands in the place of a NULL.
_FILLERS = MappingProxyType({"BIGINT": 0, "DOUBLE": 0.0, "BOOLEAN": False, "VARCHAR": ""})

Rows = Mapping[type[Row], Sequence[Row]]


def schema_text(tables: Sequence[Table]) -> str:
    """Return the tables' names and column types as canonical JSON: what a piece is encoded by."""
    return json.dumps(
        [[spec.name, [[column.name, column.type] for column in spec.columns]] for spec in tables],
        separators=(",", ":"),
    )


def schema_hash(text: str) -> int:
    """Return the crc32 of a schema text."""
    return zlib.crc32(text.encode())


class RefusedError(Exception):
    """A value does not fit its column; the message names both."""


class Encoder:
    """Encodes rows of the declared tables."""

    __slots__ = ("_numbers", "_specs", "hash", "text")

    def __init__(self, tables: Sequence[type[Row]] = TABLES) -> None:
        self._specs = [table_of(row) for row in tables]
        self._numbers = {row: number for number, row in enumerate(tables)}
        self.text = schema_text(self._specs)
        self.hash = schema_hash(self.text)

    def encode(self, rows: Rows) -> tuple[bytes, list[str]]:
        """Return the payload of a block, and a sentence for each row that had to be refused."""
        parts: list[bytes] = []
        refused: list[str] = []
        for row_type, group in rows.items():
            number = self._numbers[row_type]
            spec = self._specs[number]
            values = [values_of(row) for row in group]
            try:
                body = _encode_columns(spec, values)
            except RefusedError:
                values = [row for row in values if not _refuse(spec, row, refused)]
                body = _encode_columns(spec, values)
            if values:
                parts.append(TABLE_HEAD.pack(number, len(values)) + body)
        return b"".join(parts), refused


def _refuse(spec: Table, row: tuple[Any, ...], refused: list[str]) -> bool:
    try:
        _encode_columns(spec, [row])
    except RefusedError as error:
        refused.append(str(error))
        return True
    return False


def _encode_columns(spec: Table, rows: Sequence[tuple[Any, ...]]) -> bytes:
    if not rows:
        return b""
    return b"".join(
        [
            _encode_column(spec, column, values)
            for column, values in zip(spec.columns, zip(*rows, strict=True), strict=True)
        ]
    )


def _encode_column(spec: Table, column: Column, values: tuple[Any, ...]) -> bytes:
    plain = _plain(column)
    nulls = values.count(None)
    try:
        if not nulls:
            return _NO_NULLS + plain(values)
        if column.nullable:
            if nulls == len(values):
                return _ALL_NULL
            filler = _FILLERS[column.type]
            filled = tuple([filler if value is None else value for value in values])
            return _SOME_NULL + _null_map(values) + plain(filled)
    except (TypeError, ValueError, OverflowError):
        pass  # something that does not fit
    checked = tuple([_checked(spec, column, value) for value in values])
    if checked.count(None) == len(checked):
        return _ALL_NULL
    filled = tuple([_FILLERS[column.type] if value is None else value for value in checked])
    return _SOME_NULL + _null_map(checked) + plain(filled)


def _null_map(values: tuple[Any, ...]) -> bytes:
    """Return a bit for each value, the first in the lowest bit: 1 where it is None."""
    digits = bytes([value is None for value in reversed(values)]).translate(_DIGITS)
    return int(digits, 2).to_bytes((len(values) + 7) // 8, "little")


def _checked(spec: Table, column: Column, value: Any) -> Any:
    """Return the value or None for NULL; raise RefusedError if the column cannot hold it."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        if not column.nullable:
            raise RefusedError(f"{spec.name}.{column.name} is unknown and may not be")
        return None
    fits = {
        "BIGINT": isinstance(value, int) and -(1 << 63) <= value < 1 << 63,
        "DOUBLE": isinstance(value, int | float),
        "BOOLEAN": isinstance(value, bool),
        "VARCHAR": isinstance(value, str),
    }
    if not fits[column.type]:
        shown = repr(value)[:60]
        raise RefusedError(f"{spec.name}.{column.name} is {column.type} and cannot hold {shown}")
    return value


def _plain(column: Column) -> Callable[[tuple[Any, ...]], bytes]:
    """Return what encodes values of a column, none of which is None.

    It raises TypeError, ValueError or OverflowError if one does not fit.
    """
    if column.unit == "ratio" and column.type == "DOUBLE" and not column.rounded:
        return _ratios
    return _PLAIN[column.type]


def _integers(values: tuple[Any, ...]) -> bytes:
    return array("q", values).tobytes()


def _booleans(values: tuple[Any, ...]) -> bytes:
    if not all(value is True or value is False for value in values):
        raise TypeError
    return bytes(values)


def _numbers(values: tuple[Any, ...]) -> bytes:
    # The sum is finite if all of them are, unless they are huge: then each is looked at.
    if not math.isfinite(sum(values)) and not all(map(math.isfinite, values)):
        raise ValueError
    return array("d", values).tobytes()


def _ratios(values: tuple[Any, ...]) -> bytes:
    # As round(value, 6) does it, in half the time.
    steps = _RATIO_STEPS
    return _numbers(tuple([round(value * steps) / steps for value in values]))


def _strings(values: tuple[Any, ...]) -> bytes:
    """Encode a dictionary of the distinct strings, then an index into it for each row."""
    numbers = {word: number for number, word in enumerate(dict.fromkeys(values))}
    words = [COUNT.pack(len(numbers))]
    for word in numbers:
        if not isinstance(word, str):
            raise TypeError
        text = word.encode("utf-8", "surrogateescape")[:STRING_LIMIT_BYTES]
        words.append(COUNT.pack(len(text)) + text)
    if len(numbers) == 1:
        words.append(bytes(len(values)))
    else:
        indices = map(numbers.__getitem__, values)
        words.append(bytes(indices) if len(numbers) <= 256 else array("I", indices).tobytes())
    return b"".join(words)


_PLAIN: Mapping[str, Callable[[tuple[Any, ...]], bytes]] = MappingProxyType(
    {"BIGINT": _integers, "BOOLEAN": _booleans, "DOUBLE": _numbers, "VARCHAR": _strings}
)


def frame(mark: bytes, payload: bytes, hash_: int) -> bytes:
    """Return a whole frame around a payload."""
    packed = isal_zlib.compress(payload, 1)
    head = FRAME.pack(mark, len(packed), 0, hash_, ZLIB)
    crc = zlib.crc32(packed, zlib.crc32(head))
    return FRAME.pack(mark, len(packed), crc, hash_, ZLIB) + packed


class SpoolWriter:
    """Appends blocks to pieces of a folder and begins a new piece once a minute."""

    __slots__ = (
        "_began_ns",
        "_clock",
        "_encoder",
        "_fd",
        "_folder",
        "_identity",
        "_limit",
        "_rotate_ns",
        "_size",
        "path",
        "refused",
        "written_bytes",
    )

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        clock: Clock,
        *,
        rotate_s: float = 60.0,
        limit_bytes: int = SPOOL_LIMIT_BYTES,
    ) -> None:
        self._limit = limit_bytes
        self._folder = folder
        self._identity = identity
        self._clock = clock
        # Blocks come a second apart, give or take: half of one early is the sixtieth, not the next.
        self._rotate_ns = int((rotate_s - 0.5) * NS_PER_S)
        self._encoder = Encoder()
        self._fd = -1
        self._began_ns = 0
        self._size = 0
        self.path: Path | None = None
        self.written_bytes = 0
        self.refused: list[str] = []

    def write(self, rows: Rows) -> None:
        """Append one block; raises OSError, and then the block is lost but nothing before it."""
        payload, refused = self._encoder.encode(rows)
        self.refused += refused
        if not payload:
            return
        now = self._clock.mono_ns()
        if self._fd < 0 or now - self._began_ns >= self._rotate_ns:
            self._begin(now)
        self._append(frame(BLOCK_MARK, payload, self._encoder.hash))

    def close(self) -> None:
        """Finish the piece."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin(self, now_ns: int) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._bound()
        header = {
            "format": 1,
            "schema_version": VERSION,
            "node": self._identity.node,
            "boot_id": self._identity.boot_id,
            "tables": json.loads(self._encoder.text),
        }
        wall = self._clock.wall_ns()
        for nudge in range(1000):  # a name is taken only if two began in one millisecond
            path = self._folder / (stem(wall, now_ns + nudge * 1_000_000) + PIECE)
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                continue
            break
        self.path, self._began_ns, self._size = path, now_ns, 0
        self._append(frame(HEADER_MARK, json.dumps(header).encode(), self._encoder.hash))

    def _bound(self) -> None:
        """Delete the oldest pieces beyond the limit: a keeper that is down must not fill a disk."""
        sizes: dict[Path, int] = {}
        for path in files(self._folder, PIECE):
            with suppress(FileNotFoundError):  # the keeper took it over just now
                sizes[path] = path.stat().st_size
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= self._limit:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _append(self, data: bytes) -> None:
        try:
            done = 0
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            self._undo()
            raise
        self._size += len(data)
        self.written_bytes += len(data)

    def _undo(self) -> None:
        """Cut half a frame off; the piece is given up if not even that works."""
        try:
            os.ftruncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
        except OSError:
            self.close()  # readers skip to the next whole frame anyway
        if self._size == 0 and self.path is not None:
            self.close()  # without its header a piece is of no use
            self.path.unlink(missing_ok=True)
