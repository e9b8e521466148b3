"""Memory events of the node: faults from disk, page cache read again, reclaim, swap.

Source: /proc/vmstat (mm/vmstat.c). Its names are looked up by search: a dictionary of all 190 of
them costs four times as much.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from whyidle.collect.collector import Collect, Collector
from whyidle.collect.numbers import after
from whyidle.host import Host
from whyidle.schema import Vmstat

# Entry of the auxiliary vector (getauxval(3)) that holds the size of a page.
_AT_PAGESZ = 6
_STALLS = (b"normal", b"movable", b"dma32", b"dma", b"device")


def parse(data: bytes, mono_ns: int, page_bytes: int | None) -> Vmstat:
    """Return the row of /proc/vmstat; what this kernel does not count is None."""
    stalls = [
        count for zone in _STALLS if (count := _count(data, b"allocstall_" + zone)) is not None
    ]
    refaults = _count(data, b"workingset_refault_file")
    return Vmstat(
        mono_ns=mono_ns,
        major_faults=_count(data, b"pgmajfault"),
        # Before 5.9 there was one counter, of files only.
        refault_file_pages=_count(data, b"workingset_refault") if refaults is None else refaults,
        refault_anon_pages=_count(data, b"workingset_refault_anon"),
        swap_in_pages=_count(data, b"pswpin"),
        swap_out_pages=_count(data, b"pswpout"),
        # Before 4.10 all zones were one.
        reclaim_stalls=sum(stalls) if stalls else _count(data, b"allocstall"),
        scan_direct_pages=_count(data, b"pgscan_direct"),
        dirty_pages=_count(data, b"nr_dirty"),
        writeback_pages=_count(data, b"nr_writeback"),
        oom_kills=_count(data, b"oom_kill"),
        page_bytes=page_bytes,
    )


def _count(data: bytes, name: bytes) -> int | None:
    return after(data, name + b" ", f"vmstat: {name.decode()}")


def parse_page_size(auxv: bytes) -> int | None:
    """Return the size of a page, in bytes, from an auxiliary vector of 64-bit words."""
    for kind, value in struct.iter_unpack("<QQ", auxv[: len(auxv) // 16 * 16]):
        if kind == _AT_PAGESZ:
            return int(value)
    return None


def make() -> Collect:
    """Return the collector; it asks for the size of a page once."""
    page_bytes: int | None = None
    asked = False

    def collect(host: Host) -> Iterable[Vmstat]:
        nonlocal page_bytes, asked
        data = host.read_bytes("proc/vmstat")
        mono_ns = host.clock.mono_ns()
        if not asked:
            asked = True
            page_bytes = _read_page_size(host)
        return (parse(data, mono_ns, page_bytes),)

    return collect


def _read_page_size(host: Host) -> int | None:
    try:
        return parse_page_size(host.read_bytes("proc/self/auxv", keep=False))
    except OSError:
        return None  # a recorded tree has none; the counters are in pages all the same


VMSTAT = Collector(name="vmstat", lane="normal", make=make)
