"""CephFS and WekaFS: how often and how long each operation took.

Source: /sys/kernel/debug/ceph/CLIENT/metrics (kernel client; one file up to 5.15, a folder since;
for root only) and /proc/wekafs/stat. BeeGFS and Spectrum Scale count nothing in files.
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.numbers import whole
from whyidle.host import Host
from whyidle.schema import ParallelFsOp

_CEPH = "sys/kernel/debug/ceph"
_WEKA = "proc/wekafs/stat"
_EVERY_S = 5.0
_NONE_AGAIN_NS = 30 * NS_PER_S
_SIGNED_LIMIT = 1 << 63
# Columns of Weka's table after the name: user-mode average and longest, each with its unit.
_WEKA_AVERAGE, _WEKA_LONGEST, _WEKA_COUNT = 0, 2, 8


def parse_weka(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield (operation, operations, mean us, longest us) of used ones; raises ValueError."""
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if not colon or name == "IO type" or len(words) <= _WEKA_COUNT:
            continue
        if words[1] != "us":
            raise ValueError(f"weka: {name[:40]} is in {words[1][:10]}, not in us")
        numbers = [
            _stored(words[place], f"weka: {name[:40]}")
            for place in (_WEKA_COUNT, _WEKA_AVERAGE, _WEKA_LONGEST)
        ]
        if numbers[0]:
            yield name, numbers[0], numbers[1], numbers[2]


def parse_ceph(text: str) -> dict[str, dict[str, int]]:
    """Return {operation: {column: number}} of the tables of latencies and sizes.

    Raises ValueError that names the column. Other tables and columns are left out.
    """
    found: dict[str, dict[str, int]] = {}
    heads: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if words[:2] == ["item", "total"]:
            heads = words if any("(" in word for word in words) else []
        elif not words:
            heads = []
        elif heads and len(words) == len(heads):
            row = found.setdefault(words[0], {})
            for head, word in zip(heads[1:], words[1:], strict=True):
                # A standard deviation may have a point, and nobody needs it.
                if not head.startswith("stdev"):
                    row[head] = _stored(word, f"ceph: {words[0][:40]} {head}")
    return found


def _stored(word: str, field: str) -> int:
    number = whole(word, field)
    if not 0 <= number < _SIGNED_LIMIT:
        raise ValueError(f"{field} has a number out of range")
    return number


def make() -> Collect:
    """Return the collector."""
    none_until_ns = 0

    def collect(host: Host) -> Iterator[ParallelFsOp | Problem]:
        nonlocal none_until_ns
        now_ns = host.clock.mono_ns()
        if now_ns < none_until_ns:
            raise NoData("no CephFS or WekaFS is mounted that this agent may look at")
        found = False
        for item in (*_weka(host), *_ceph(host)):
            found = True
            yield item
        if not found:
            none_until_ns = now_ns + _NONE_AGAIN_NS
            raise NoData("no CephFS or WekaFS is mounted that this agent may look at")

    return collect


def _weka(host: Host) -> Iterator[ParallelFsOp | Problem]:
    try:
        text = host.read(_WEKA)
    except OSError:
        return  # no Weka here
    mono_ns = host.clock.mono_ns()
    try:
        for op, count, mean_us, longest_us in parse_weka(text):
            yield ParallelFsOp(
                mono_ns=mono_ns,
                file_system="weka",
                op=op,
                ops=count,
                mean_us=mean_us,
                longest_us=longest_us,
                total_bytes=None,
            )
    except ValueError as error:
        yield Problem(subject="weka", message=str(error))


def _ceph(host: Host) -> Iterator[ParallelFsOp | Problem]:
    try:
        clients = host.names(_CEPH)
    except OSError:
        return  # no Ceph here, or only root may look
    for client in clients:
        try:
            text = _metrics(host, f"{_CEPH}/{client}/metrics")
            tables = parse_ceph(text)
        except FileNotFoundError:
            continue  # a client of block devices has none
        except (OSError, ValueError) as error:
            yield Problem(subject=f"ceph {client}", message=str(error))
            continue
        mono_ns = host.clock.mono_ns()
        for op, row in tables.items():
            if row.get("total"):
                yield ParallelFsOp(
                    mono_ns=mono_ns,
                    file_system=f"ceph {client}",
                    op=op,
                    ops=row["total"],
                    mean_us=row.get("avg_lat(us)"),
                    longest_us=row.get("max_lat(us)"),
                    total_bytes=row.get("total_sz(bytes)"),
                )


def _metrics(host: Host, place: str) -> str:
    try:
        return host.read(place)
    except IsADirectoryError:
        # An empty line ends a table, as it does in the one file of older kernels.
        return f"{host.read(f'{place}/latency')}\n\n{host.read(f'{place}/size')}"


PARALLEL_FS = Collector(
    name="parallel_fs", lane="normal", make=make, thread="storage", every_s=_EVERY_S
)
