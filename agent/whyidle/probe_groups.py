"""Reads what a counter page says of process groups, as hostile input; see whyidle.probe_page."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from whyidle.probe_page import PAGE_BYTES, count, known, time_of, word

GROUPS_AT: Final = 8192
_GROUP = struct.Struct("<16q")
_GROUPS = 16
CALLS_AT: Final = 10240
_CALL_RECORDS = 96
_CALL_BACKGROUND = 1 << 16
_BACKENDS = ("", "gloo", "nccl", "mpi", "ucc", "other")
_OPERATIONS = (
    "",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
    "coalesced",
    "backward",
)
_RECORD = struct.Struct("<8q")
_NUMBER = struct.Struct("<q")


class Group(NamedTuple):
    """The block of a process group, in the order of its slots; see schema.ProbeGroup."""

    serial: int | None
    key: int | None
    size: int | None
    rank: int | None
    backend: str | None
    calls: int | None
    messages: int | None
    moved_bytes: int | None
    waits: int | None
    wait_ns: int | None
    message_wait_ns: int | None
    waiting_since_ns: int | None
    arrived_ns: int | None
    operation: str | None
    backwards: int | None


class Call(NamedTuple):
    """A recorded call on a process group."""

    sequence: int
    group: int
    operation: str
    background: bool
    called_ns: int
    ended_ns: int
    number: int
    wait_ns: int
    size_bytes: int | None


def parse_groups(data: bytes, now_ns: int) -> Iterator[Group]:
    """Yield the process groups in use; pages of version 1 have none."""
    if len(data) < CALLS_AT:
        return
    for block in range(_GROUPS):
        slots = _GROUP.unpack_from(data, GROUPS_AT + block * _GROUP.size)
        if slots[0] <= 0:
            return  # blocks are taken in order
        told = Group._make(known(slots)[:15])
        yield told._replace(
            backend=word(_BACKENDS, slots[4]),
            waiting_since_ns=time_of(slots[11], now_ns),
            arrived_ns=time_of(slots[12], now_ns),
            operation=word(_OPERATIONS, slots[13]),
        )


def parse_calls(data: bytes, after: int) -> tuple[int, list[Call]]:
    """Return the newest sequence and the whole records of calls after `after` that are kept."""
    if len(data) < PAGE_BYTES:
        return 0, []
    newest = max(0, _NUMBER.unpack_from(data, CALLS_AT - 8)[0])
    found = []
    for sequence in range(max(after, newest - _CALL_RECORDS) + 1, newest + 1):
        place = CALLS_AT + sequence % _CALL_RECORDS * _RECORD.size
        own, kind, called, ended, number, wait, size, crc = _RECORD.unpack_from(data, place)
        if own != sequence or crc != zlib.crc32(data[place : place + 56]):
            continue  # overwritten meanwhile, or being written
        if not 0 <= called <= ended or wait < 0 or number < 0:
            continue
        operation = word(_OPERATIONS, kind & 0xFF)
        if operation is None:
            continue
        found.append(
            Call(
                sequence=sequence,
                group=kind >> 8 & 0xFF,
                operation=operation,
                background=bool(kind & _CALL_BACKGROUND),
                called_ns=called,
                ended_ns=ended,
                number=number,
                # It has not waited for longer than it lasted.
                wait_ns=min(wait, ended - called),
                size_bytes=count(size),
            )
        )
    return newest, found
