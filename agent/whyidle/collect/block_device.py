"""Block devices: requests, bytes, time, and what is in flight.

Source: /proc/diskstats (https://docs.kernel.org/admin-guide/iostats.html). 11 numbers a device up
to 4.17, 15 with discards, 17 with flushes since 5.5; all milliseconds are printed in 32 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.numbers import whole, wholes
from whyidle.collect.nvme_text import PATH, head_of
from whyidle.host import Host
from whyidle.schema import BlockDevice

# The kernel counts sectors of 512 bytes whatever the device's own are.
SECTOR_BYTES = 512
# Name, major and minor come before the numbers; kernels before 2.6.25 printed 4 for partitions.
_LEAST = 3 + 11
_WITH_FLUSHES = 3 + 17
# Devices that exist by the dozen and mostly for nothing: shown once they have done something.
_OFTEN_UNUSED = ("loop", "ram", "zram", "fd", "sr")
# What stands on other disks, and what is no disk.
_STACKED = ("dm-", "md", "bcache", "drbd")
_VIRTUAL = ("loop", "ram", "zram")
# How long the names of disks are trusted, unless the number of lines changes before.
_NAMES_EVERY_NS = 10 * NS_PER_S


def role_of(device: str) -> str:
    """Return disk, path, stacked or virtual, as the kernel's name of a device tells."""
    if PATH.fullmatch(device):
        return "path"
    if device.startswith(_STACKED):
        return "stacked"
    return "virtual" if device.startswith(_VIRTUAL) else "disk"


def parse_line(line: str, mono_ns: int) -> BlockDevice:
    """Return the row of one line; raises ValueError."""
    words = line.split()
    if len(words) < _LEAST:
        raise ValueError(f"diskstats: {line.strip()[:60]!r} has fewer than {_LEAST} words")
    n = wholes(words[3:20], f"diskstats: {words[2]}")
    flushes = len(words) >= _WITH_FLUSHES
    role = role_of(words[2])
    return BlockDevice(
        mono_ns=mono_ns,
        device=words[2],
        major=whole(words[0], "diskstats: major"),
        minor=whole(words[1], "diskstats: minor"),
        role=role,
        head=head_of(words[2]) if role == "path" else None,
        reads=n[0],
        read_bytes=n[2] * SECTOR_BYTES,
        read_ms=n[3],
        writes=n[4],
        write_bytes=n[6] * SECTOR_BYTES,
        write_ms=n[7],
        in_flight=n[8],
        busy_ms=n[9],
        queue_ms=n[10],
        flushes=n[15] if flushes else None,
        flush_ms=n[16] if flushes else None,
    )


def parse(text: str, mono_ns: int, disks: Collection[str] = ()) -> Iterator[BlockDevice | Problem]:
    """Yield a row for each disk; `disks` names them, or is empty where nothing tells them apart.

    Partitions repeat what their disk counts, so they are left out. Hidden NVMe paths are disks.
    """
    known = frozenset(disks)
    for line in text.splitlines():
        name = line.split(None, 3)[2:3]
        if name and known and name[0] not in known:
            continue
        try:
            row = parse_line(line, mono_ns)
        except ValueError as error:
            yield Problem(subject=name[0] if name else "", message=str(error))
            continue
        if row.reads or row.writes or row.in_flight or not row.device.startswith(_OFTEN_UNUSED):
            yield row


def make() -> Collect:
    """Return the collector; it keeps the names of the disks while nothing comes or goes."""
    disks: frozenset[str] = frozenset()
    asked_ns: int | None = None
    lines = 0

    def collect(host: Host) -> Iterator[BlockDevice | Problem]:
        nonlocal disks, asked_ns, lines
        try:
            text = host.read("proc/diskstats")
        except FileNotFoundError:
            raise NoData("the kernel has no block devices (no /proc/diskstats)") from None
        mono_ns = host.clock.mono_ns()
        count = text.count("\n")
        if asked_ns is None or count != lines or mono_ns - asked_ns >= _NAMES_EVERY_NS:
            asked_ns, lines = mono_ns, count
            disks = _disks(host)
        yield from parse(text, mono_ns, disks)

    return collect


def _disks(host: Host) -> frozenset[str]:
    try:
        # sysfs writes the slash of a name such as cciss/c0d0 as an exclamation mark.
        return frozenset(name.replace("!", "/") for name in host.names("sys/block"))
    except OSError:
        return frozenset()  # without sysfs partitions stay in, beside their disks


BLOCK_DEVICE = Collector(name="block_device", lane="normal", make=make)
