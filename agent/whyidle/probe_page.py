"""Reads the counter page of a trainer, as hostile input.

The layout is described where pages are written (whyidle_probe/layout.py) and again here: neither
package imports the other, and a test holds the two together. Whatever a page holds, reading it
gives numbers within bounds, None for what is not known, or ValueError naming the field.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

PAGE_BYTES: Final = 16384
VERSION: Final = 2
# Of each version that is read; the first one ended before process groups.
SIZES: Final = {1: 8192, 2: PAGE_BYTES}
MAGIC: Final = b"WHYIDLE\x01"
SUFFIX: Final = ".page"
_HEADER = struct.Struct("<12q")
_CRC = struct.Struct("<q")
_HEADER_END = 504
_PROCESS = struct.Struct("<64q")
PROCESS_AT: Final = 512
_LOADER = struct.Struct("<24q")
LOADERS_AT: Final = 1024
LOADERS: Final = 8
LOADER_BYTES: Final = 192
_RECORD = struct.Struct("<8q")
_RING_AT = 2560
_RING_RECORDS = 88
_PHASE_KINDS = 16
_PHASES = (
    "",
    "checkpoint_save",
    "checkpoint_load",
    "evaluation",
    "compile",
    "logging",
    "setup",
    "other",
)
_SCHEDULES = ("", "1f1b", "gpipe", "other", "interleaved")
_TOLD = 8
_TOLD_AT = 256
_TOLD_BYTES = 30
_EVENTS = {32: "step", 33: "gc", 34: "data_wait", 35: "data_setup"}
_BACKGROUND = 64
# A pid is at most 2**22, but nothing here depends on that: it only must be one.
_PID_MAX = 1 << 31


class NotReadyError(Exception):
    """The page has no contents yet, or its header is being changed: look again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Who writes a page, in its own words; `pid` is that of its own namespace."""

    crc: int
    pid: int
    pid_namespace: int | None
    start_ns: int
    user_id: int | None
    opened_ns: int
    rank: int | None
    world_size: int | None
    local_rank: int | None
    boot_id: str
    page_id: str
    python: str | None
    torch: str | None
    phases: tuple[str, ...]


class Loader(NamedTuple):
    """The block of a DataLoader, in the order of its slots; see schema.ProbeLoader for meanings.

    A named tuple: making a frozen class of as many fields costs 3 us, 130 times a second.
    """

    serial: int | None
    flags: int | None
    workers: int | None
    capacity: int | None
    batch_size: int | None
    waiting_since_ns: int | None  # 0 or None: it is not waiting
    batches: int | None
    wait_ns: int | None
    outside_batches: int | None
    outside_wait_ns: int | None
    background_batches: int | None
    background_wait_ns: int | None
    ready: int | None
    outstanding: int | None
    unpinned: int | None
    arrived_ns: int | None
    empty_arrivals: int | None
    ready_sum: int | None
    iterators: int | None
    setup_ns: int | None
    end_ns: int | None
    ends: int | None
    unused_22: int | None
    unused_23: int | None


class Process(NamedTuple):
    """The totals of a process; phases are indexed by kind."""

    steps: int | None
    optimizer_steps: int | None
    last_step_ns: int | None
    phase: int
    phase_since_ns: int | None
    gc_ns: int | None
    gc_count: int | None
    gc_full_count: int | None
    hook_errors: int | None
    loaders_seen: int | None
    closed_ns: int | None
    sequence: int
    pipeline_stage: int | None
    pipeline_stages: int | None
    pipeline_batches: int | None
    pipeline_schedule: str | None
    pipeline_virtual: int | None
    phase_ns: Sequence[int | None]
    phase_background_ns: Sequence[int | None]


class Record(NamedTuple):
    """A record of the ring. `kind` is step, gc, data_wait, data_setup or the name of a phase."""

    sequence: int
    kind: str
    background: bool
    begin_ns: int
    end_ns: int
    values: tuple[int | None, int | None, int | None]


def parse_header(data: bytes) -> Header:
    """Return the header of a page; raises NotReadyError, ValueError."""
    if len(data) not in SIZES.values():
        raise ValueError(f"has {len(data)} bytes, not {PAGE_BYTES}: no page of a probe")
    if not any(data[:8]):
        raise NotReadyError
    if data[:8] != MAGIC:
        raise ValueError("does not begin as a page of a probe does")
    _, version, size, pid, namespace, start, user, opened, rank, world, local, _ = (
        _HEADER.unpack_from(data)
    )
    if version not in SIZES:
        raise ValueError(
            f"is a page of version {version}; this agent reads versions up to {VERSION}"
        )
    if size != SIZES[version] or size != len(data):
        raise ValueError(f"says that it has {size} bytes and has {len(data)}, not {SIZES[version]}")
    (crc,) = _CRC.unpack_from(data, _HEADER_END)
    if crc != zlib.crc32(data[8:_HEADER_END]):
        raise NotReadyError
    if not 0 < pid < _PID_MAX or start < 0 or opened < 0:
        raise ValueError(f"names pid {pid}, start {start}, opened {opened}: no such process")
    return Header(
        crc=crc,
        pid=pid,
        pid_namespace=count(namespace),
        start_ns=start,
        user_id=count(user),
        opened_ns=opened,
        rank=count(rank),
        world_size=count(world),
        local_rank=count(local),
        boot_id=_text(data, 128, 40),
        page_id=_text(data, 168, 32),
        python=_text(data, 200, 24) or None,
        torch=_text(data, 224, 32) or None,
        phases=tuple(
            _text(data, _TOLD_AT + n * _TOLD_BYTES, _TOLD_BYTES)
            for n in range(_PHASE_KINDS - _TOLD)
        ),
    )


def same_header(data: bytes, header: Header) -> bool:
    """Say whether a page's header is still the one that was parsed, without parsing it again."""
    crc: int = _CRC.unpack_from(data, _HEADER_END)[0]
    return crc == header.crc and data[:8] == MAGIC


def phase_name(header: Header, kind: int) -> str:
    """Return the name of a kind of phase."""
    if 0 <= kind < _TOLD:
        return _PHASES[kind]
    told = header.phases[kind - _TOLD] if kind < _PHASE_KINDS else ""
    return told or "other"


def parse_process(data: bytes, now_ns: int) -> Process:
    """Return the totals; times after `now_ns` are not known."""
    slots = known(_PROCESS.unpack_from(data, PROCESS_AT))
    phase = slots[3] or 0
    kind = phase & (_PHASE_KINDS - 1)
    return Process(
        steps=slots[0],
        optimizer_steps=slots[1],
        last_step_ns=time_of(slots[2], now_ns),
        phase=kind,
        phase_since_ns=time_of(phase - kind, now_ns) if kind else None,
        gc_ns=slots[4],
        gc_count=slots[5],
        gc_full_count=slots[6],
        hook_errors=slots[7],
        loaders_seen=slots[8],
        closed_ns=time_of(slots[9], now_ns),
        sequence=slots[10] or 0,
        pipeline_stage=slots[11] if slots[12] else None,
        pipeline_stages=slots[12] or None,
        pipeline_batches=slots[13] or None,
        pipeline_schedule=word(_SCHEDULES, slots[14]) if slots[12] else None,
        pipeline_virtual=(slots[15] or None) if slots[12] else None,
        phase_ns=slots[16:32],
        phase_background_ns=slots[48:64],
    )


def word(words: tuple[str, ...], number: int | None) -> str | None:
    """Return the word in a place, None for the first one and outside of all."""
    return words[number] if number is not None and 0 < number < len(words) else None


def parse_loaders(data: bytes, now_ns: int) -> Iterator[Loader]:
    """Yield the blocks in use."""
    for block in range(LOADERS):
        slots = _LOADER.unpack_from(data, LOADERS_AT + block * LOADER_BYTES)
        if slots[0] <= 0:
            return  # blocks are taken in order
        yield _loader(slots, now_ns)


def _loader(slots: tuple[int, ...], now_ns: int) -> Loader:
    told = Loader._make(known(slots))
    waiting, arrived = told.waiting_since_ns, told.arrived_ns
    # As good as always they are fine: making another tuple costs as much as all the rest.
    if (waiting == 0 or time_of(waiting, now_ns)) and time_of(arrived, now_ns):
        return told
    return told._replace(
        waiting_since_ns=time_of(waiting, now_ns), arrived_ns=time_of(arrived, now_ns)
    )


def parse_records(data: bytes, header: Header, newest: int, after: int) -> Iterator[Record]:
    """Yield the whole records with sequences in (after, newest], as far as they are kept."""
    for sequence in range(max(after, newest - _RING_RECORDS) + 1, newest + 1):
        place = _RING_AT + sequence % _RING_RECORDS * _RECORD.size
        found, kind, begin, end, a, b, c, crc = _RECORD.unpack_from(data, place)
        if found != sequence or crc != zlib.crc32(data[place : place + 56]):
            continue  # overwritten meanwhile, or being written
        if not 0 <= begin <= end:
            continue
        yield Record(
            sequence=sequence,
            kind=_kind(header, kind),
            background=_BACKGROUND < kind < _BACKGROUND + _PHASE_KINDS,
            begin_ns=begin,
            end_ns=end,
            values=(count(a), count(b), count(c)),
        )


def _kind(header: Header, kind: int) -> str:
    if kind in _EVENTS:
        return _EVENTS[kind]
    inner = kind - _BACKGROUND if kind >= _BACKGROUND else kind
    return phase_name(header, inner) if 0 < inner < _PHASE_KINDS else "other"


def known(slots: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return numbers with None for those that are none."""
    if min(slots) >= 0:
        return slots
    return tuple([slot if slot >= 0 else None for slot in slots])


def count(value: int) -> int | None:
    """Return a number, None for a negative one."""
    return value if value >= 0 else None


def time_of(value: int | None, now_ns: int) -> int | None:
    """Return a time that has come, else None."""
    return value if value is not None and 0 < value <= now_ns else None


def _text(data: bytes, offset: int, size: int) -> str:
    text = data[offset : offset + size].partition(b"\0")[0].decode("utf-8", "replace")
    return "".join(sign if sign.isprintable() else "?" for sign in text)
