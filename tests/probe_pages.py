"""Counter pages as bytes, made up by tests through the probe's own description of them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence

from whyidle_probe import layout as at

BEGAN_NS = 990_000_000_000


def put(page: bytearray, slot: int, value: int) -> None:
    """Store a number in a slot."""
    struct.pack_into("<q", page, slot * at.SLOT_BYTES, value)


def put_text(page: bytearray, field: tuple[int, int], text: str) -> None:
    """Store a text in its field."""
    offset, size = field
    page[offset : offset + size] = text.encode()[:size].ljust(size, b"\0")


def seal(page: bytearray) -> bytearray:
    """Make the header's checksum right."""
    end = at.HEADER_CRC * at.SLOT_BYTES
    put(page, at.HEADER_CRC, zlib.crc32(page[8:end]))
    return page


def put_record(page: bytearray, sequence: int, kind: int, *values: int) -> None:
    """Store a whole ring record: begin, end and three values."""
    data = struct.pack("<7q", sequence, kind, *values)
    place = at.RING_AT_BYTES + sequence % at.RING_RECORDS * at.RING_BYTES
    page[place : place + at.RING_BYTES] = data + struct.pack("<q", zlib.crc32(data))
    put(page, at.SEQUENCE, sequence)


def page_of(
    *,
    pid: int,
    start_ns: int,
    opened_ns: int = BEGAN_NS,
    process: Mapping[int, int] | None = None,
    loaders: Sequence[Mapping[int, int]] = (),
) -> bytearray:
    """Return a sealed page; `process` and `loaders` are numbers by slot."""
    page = bytearray(at.PAGE_BYTES)
    page[:8] = at.MAGIC
    for slot, value in {
        at.HEADER_VERSION: at.VERSION,
        at.HEADER_SIZE: at.PAGE_BYTES,
        at.HEADER_PID: pid,
        at.HEADER_PID_NAMESPACE: 4026531836,
        at.HEADER_START_NS: start_ns,
        at.HEADER_USER_ID: 0,
        at.HEADER_OPENED_NS: opened_ns,
        at.HEADER_RANK: 3,
        at.HEADER_WORLD_SIZE: 8,
        at.HEADER_LOCAL_RANK: at.UNKNOWN,
        **(process or {}),
    }.items():
        put(page, slot, value)
    for block, slots in enumerate(loaders):
        for slot, value in slots.items():
            put(page, at.LOADERS_AT + block * at.LOADER_SLOTS + slot, value)
    put_text(page, at.TEXT_PYTHON, "3.11.7")
    return seal(page)


def make_page(*, pid: int, start_ns: int) -> bytes:
    """Return a page of a trainer with one DataLoader, one step and nothing unusual."""
    page = page_of(
        pid=pid,
        start_ns=start_ns,
        process={at.STEPS: 1, at.OPTIMIZER_STEPS: 1, at.LAST_STEP_NS: BEGAN_NS + 9},
        loaders=[
            {
                at.LOADER_SERIAL: 1,
                at.LOADER_FLAGS: at.FLAG_WORKERS,
                at.LOADER_WORKERS: 2,
                at.LOADER_CAPACITY: 4,
                at.LOADER_READY: 3,
                at.LOADER_OUTSTANDING: 1,
                at.LOADER_BATCHES: 1,
                at.LOADER_WAIT_NS: 5,
            }
        ],
    )
    put_record(page, 1, at.EVENT_STEP, BEGAN_NS, BEGAN_NS + 9, 1, 5, 1)
    return bytes(page)


def with_group(page: bytes) -> bytes:
    """Return a page that tells of a process group as well, and of one call on it."""
    more = bytearray(page)
    for slot, value in {
        at.GROUP_SERIAL: 1,
        at.GROUP_KEY: 7,
        at.GROUP_SIZE: 8,
        at.GROUP_RANK: 3,
        at.GROUP_BACKEND: at.BACKENDS.index("nccl"),
        at.GROUP_CALLS: 1,
        at.GROUP_ARRIVED_NS: BEGAN_NS,
        at.GROUP_OPERATION: at.OPERATIONS.index("all_reduce"),
    }.items():
        put(more, at.GROUPS_AT + slot, value)
    kind = at.OPERATIONS.index("all_reduce") | 1 << 8
    data = struct.pack("<7q", 1, kind, BEGAN_NS, BEGAN_NS + 9, 1, 5, 4000)
    place = at.CALLS_AT_BYTES + 1 % at.CALL_RECORDS * at.RING_BYTES
    more[place : place + at.RING_BYTES] = data + struct.pack("<q", zlib.crc32(data))
    put(more, at.CALL_SEQUENCE, 1)
    return bytes(more)
