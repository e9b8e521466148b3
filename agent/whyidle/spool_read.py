"""Reads pieces of the spool, whole, torn or damaged, into columns.

What a crash leaves - half a frame at the end - is normal and not worth a word. Damage inside a
piece costs the frames that it hits: reading goes on at the next marker whose checksum is right.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whyidle.layout import Identity
from whyidle.schema import TABLES, VERSION
from whyidle.spool import (
    ALL_NULL,
    BLOCK_MARK,
    COUNT,
    FRAME,
    FRAME_LIMIT_BYTES,
    HEADER_MARK,
    NO_NULLS,
    SOME_NULL,
    TABLE_HEAD,
    Encoder,
    schema_hash,
    schema_text,
)
from whyidle.table import Row, table_of

# A frame grows by at most this when unpacked, so that a damaged or hostile one cannot fill memory.
UNPACKED_LIMIT_BYTES = 256 << 20
_TYPECODES = {"BIGINT": "q", "DOUBLE": "d", "BOOLEAN": "B", "VARCHAR": "I"}


class NewerSchemaError(Exception):
    """The piece was written by a newer version of this program; holds that schema's version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"schema {version} is newer than {VERSION}, the newest that is known here")
        self.version = version


class UnreadableError(Exception):
    """Nothing of the piece can be used; the message says why."""


@dataclass(slots=True, kw_only=True)
class ColumnValues:
    """The values of one column: `present` has a 1 for each that is not NULL.

    Strings are indices into `words`. A NULL's place in `values` holds 0.
    """

    type: str
    values: array[Any]
    present: bytearray = field(default_factory=bytearray)
    words: dict[str, int] = field(default_factory=dict)

    def extend_null(self, count: int) -> None:
        """Append NULLs."""
        self.values.extend([0] * count)
        self.present.extend(bytes(count))


Columns = dict[str, ColumnValues]


@dataclass(slots=True, kw_only=True)
class Piece:
    """What a piece holds, by table and column of the schema that it was written with."""

    path: Path
    identity: Identity | None
    schema_version: int
    tables: dict[str, Columns] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    blocks: int = 0
    damaged_bytes: int = 0
    torn_bytes: int = 0


def read_piece(path: Path) -> Piece:
    """Read a piece. Raises NewerSchemaError, UnreadableError or OSError."""
    data = path.read_bytes()
    frames = list(_frames(data))
    header = next((payload for mark, _, payload in frames if mark == HEADER_MARK), None)
    if not any(mark == BLOCK_MARK for mark, _, _ in frames) and header is None:
        raise UnreadableError("holds no whole frame of a spool")
    piece, layout, layout_hash = _open(path, header)
    end = 0
    for mark, span, payload in frames:
        piece.damaged_bytes += span.start - end
        end = span.stop
        if mark == HEADER_MARK:
            continue
        if span.hash != layout_hash:
            raise UnreadableError(
                "a block was written by another schema than its header, or than today's, says"
            )
        try:
            _decode(payload, layout, piece)
        except (IndexError, ValueError, KeyError, OverflowError, struct.error) as error:
            raise UnreadableError(f"a block cannot be decoded ({error})") from error
        piece.blocks += 1
    piece.torn_bytes = len(data) - end
    return piece


def read_on(path: Path, offset: int) -> tuple[Piece, int]:
    """Return what was appended to a piece from `offset` on, and where the next look begins.

    Only blocks of today's schema are decoded: it is for those who follow a piece that is being
    written. Half a frame at the end is left for the next look. Raises OSError.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    piece, layout, layout_hash = _open(path, None)
    end = 0
    for mark, span, payload in _frames(data):
        end = span.stop
        if mark == BLOCK_MARK and span.hash == layout_hash:
            try:
                _decode(payload, layout, piece)
            except (IndexError, ValueError, KeyError, OverflowError, struct.error):
                continue
            piece.blocks += 1
    return piece, offset + end


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    stop: int
    hash: int


def _frames(data: bytes) -> Iterator[tuple[bytes, _Span, bytes]]:
    """Yield each whole frame, looking for the next marker wherever one is broken."""
    at = 0
    while at + FRAME.size <= len(data):
        got = _frame_at(data, at)
        if got is None:
            marks = (data.find(mark, at + 1) for mark in (BLOCK_MARK, HEADER_MARK))
            found = [position for position in marks if position >= 0]
            if not found:
                return
            at = min(found)
            continue
        mark, span, payload = got
        yield mark, span, payload
        at = span.stop


def _frame_at(data: bytes, at: int) -> tuple[bytes, _Span, bytes] | None:
    mark, length, crc, hash_, flags = FRAME.unpack_from(data, at)
    start = at + FRAME.size
    if mark not in (BLOCK_MARK, HEADER_MARK) or length > FRAME_LIMIT_BYTES:
        return None
    packed = data[start : start + length]
    head = FRAME.pack(mark, length, 0, hash_, flags)
    if len(packed) < length or zlib.crc32(packed, zlib.crc32(head)) != crc:
        return None
    unpacker = zlib.decompressobj()
    try:
        payload = unpacker.decompress(packed, UNPACKED_LIMIT_BYTES)
    except zlib.error:
        return None
    if unpacker.unconsumed_tail or not unpacker.eof:
        return None
    return mark, _Span(at, start + length, hash_), payload


_Layout = Sequence[tuple[str, Sequence[tuple[str, str]]]]


def _open(path: Path, header: bytes | None) -> tuple[Piece, _Layout, int]:
    if header is None:
        # Blocks carry the hash of their schema, so that a lost header costs a piece nothing while
        # the schema is today's; node and boot are then those of its folder.
        text = schema_text([table_of(row) for row in TABLES])
        piece = Piece(path=path, identity=None, schema_version=VERSION)
        return piece, json.loads(text), schema_hash(text)
    try:
        said = json.loads(header)
        version = int(said["schema_version"])
        if version > VERSION:
            raise NewerSchemaError(version)
        identity = Identity(node=str(said["node"]), boot_id=str(said["boot_id"]))
        text = json.dumps(said["tables"], separators=(",", ":"))
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError(f"its header cannot be read ({error})") from error
    piece = Piece(path=path, identity=identity, schema_version=version)
    return piece, said["tables"], schema_hash(text)


def _decode(payload: bytes, layout: _Layout, piece: Piece) -> None:
    at = 0
    while at < len(payload):
        number, count = TABLE_HEAD.unpack_from(payload, at)
        at += TABLE_HEAD.size
        name, columns = layout[number]
        into = piece.tables.get(name)
        if into is None:
            into = piece.tables[name] = {
                column: ColumnValues(type=type_, values=array(_TYPECODES[type_]))
                for column, type_ in columns
            }
        for column, _ in columns:
            at = _decode_column(payload, at, count, into[column])
        piece.counts[name] = piece.counts.get(name, 0) + count


def _decode_column(payload: bytes, at: int, count: int, into: ColumnValues) -> int:
    nulls = payload[at]
    at += 1
    if nulls == ALL_NULL:
        into.extend_null(count)
        return at
    if nulls == SOME_NULL:
        width = (count + 7) // 8
        bits = int.from_bytes(payload[at : at + width], "little")
        present = bytearray(1 - (bits >> index & 1) for index in range(count))
        at += width
    elif nulls == NO_NULLS:
        present = bytearray(b"\1") * count
    else:
        raise ValueError(f"null map {nulls}")
    into.present.extend(present)
    if into.type == "VARCHAR":
        return _decode_strings(payload, at, count, into)
    width = count * into.values.itemsize
    if at + width > len(payload):
        raise ValueError("ends early")
    into.values.frombytes(payload[at : at + width])
    return at + width


def _decode_strings(payload: bytes, at: int, count: int, into: ColumnValues) -> int:
    (words,) = COUNT.unpack_from(payload, at)
    at += COUNT.size
    numbers: list[int] = []
    for _ in range(words):
        (length,) = COUNT.unpack_from(payload, at)
        at += COUNT.size
        word = payload[at : at + length].decode("utf-8", "replace")
        numbers.append(into.words.setdefault(word, len(into.words)))
        at += length
    indices = array("B" if words <= 256 else "I")
    width = count * indices.itemsize
    if at + width > len(payload):
        raise ValueError("ends early")
    indices.frombytes(payload[at : at + width])
    into.values.extend([numbers[index] for index in indices])
    return at + width


def piece_of(rows: Sequence[Row]) -> Piece:
    """Return rows as a piece, by way of the spool's own encoding. Raises ValueError if refused."""
    groups: dict[type[Row], list[Row]] = {}
    for row in rows:
        groups.setdefault(type(row), []).append(row)
    encoder = Encoder()
    payload, refused = encoder.encode(groups)
    if refused:
        raise ValueError(refused[0])
    piece = Piece(path=Path(), identity=None, schema_version=VERSION, blocks=1)
    _decode(payload, json.loads(encoder.text), piece)
    return piece
