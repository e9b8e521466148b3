"""What surrounds the processes: the node's CPUs, the quota of a cgroup, the files that are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording import network
from whyidle_rules.recording.network import Network
from whyidle_rules.recording.processes import Identity, Proc
from whyidle_rules.recording.series import (
    Array,
    Columns,
    Counter,
    Floats,
    Truths,
    counter,
    fetch,
    numbered,
)
from whyidle_rules.recording.threads import GAP_NS, HALF_NS, LEAST_NS, grown

_QUOTA_HALF_NS = 2 * NS_PER_S
# Files are open for milliseconds, and processes are looked at in turn.
_FILES_HALF_NS = 15 * NS_PER_S
# A process that reads from a block device has read_bytes grow with rchar_bytes, pages of read-ahead
# and metadata beside them; through the page cache or another kind of file system it does not.
_DEVICE_READ_RATIO = 0.2
_DEVICE_BYTES_PER_S = 32 << 10
# What lies below an overlay is not known, and memory blocks nobody.
# Of the time, some task waited for memory (PSI): less is ordinary reclaim beside a full page cache.
MEMORY_STALL_RATIO = 0.05
_LOCAL = frozenset({"block", "nvmeof"})
NOT_FILES = frozenset({"tmpfs", "overlay", "other"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Periods of a cgroup's CPU quota; `limited` is False where it has none."""

    limited: bool
    periods: Counter
    throttled: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """A node's CPUs, quotas by cgroup, and the mounts that each process was seen to read from."""

    cpus: int | None
    cpu_used_ns: Counter
    quotas: Mapping[str, Quota]
    files: Mapping[Identity, Columns]
    memory_stall_ns: Counter
    refault_bytes: Counter
    network: Network

    def thrashing(self, device_per_s: Floats, centres: Ints) -> Floats:
        """Return which share of what is read from devices memory had held shortly before.

        0 while nobody waits for memory; NaN where pressure or refaults are not known.
        """
        stalled, seen = self.memory_stall_ns.around(centres, _QUOTA_HALF_NS, LEAST_NS)
        again, told = self.refault_bytes.around(centres, _QUOTA_HALF_NS, LEAST_NS)
        per_s = again * 1e9 / np.maximum(told, 1.0)
        share = np.clip(per_s / np.maximum(device_per_s, 1.0), 0.0, 1.0)
        pressed = stalled >= MEMORY_STALL_RATIO * np.maximum(seen, 1.0)
        return np.asarray(
            np.where((seen > 0) & (told > 0), np.where(pressed, np.nan_to_num(share), 0.0), np.nan)
        )

    def cpu_busy(self, centres: Ints) -> Floats:
        """Return the share of the node's CPU time that was used around each time."""
        growth, covered = self.cpu_used_ns.around(centres, HALF_NS, LEAST_NS)
        whole = np.where(covered > 0, covered * (self.cpus or np.nan), np.nan)
        return np.asarray(np.clip(growth / whole, 0.0, 1.0))

    def throttled(self, cgroup: str | None, centres: Ints) -> Floats:
        """Return the share of quota periods that were cut short around each time."""
        quota = None if cgroup is None else self.quotas.get(cgroup)
        if quota is None:
            return np.full(len(centres), np.nan)
        if not quota.limited:
            return np.zeros(len(centres))
        periods, covered = quota.periods.around(centres, _QUOTA_HALF_NS, LEAST_NS)
        cut, told = quota.throttled.around(centres, _QUOTA_HALF_NS, LEAST_NS)
        share = np.clip(cut / np.maximum(periods, 1.0), 0.0, 1.0)
        return np.asarray(np.where((covered > 0) & (told > 0), share, np.nan))

    def reads(self, procs: Sequence[Proc], centres: Ints) -> Reads:
        """Return where processes read from."""
        size = len(centres)
        kind = np.full(size, None, dtype=object)
        mount = np.full(size, None, dtype=object)
        device = grown(procs, "read_bytes", centres, 2 * HALF_NS)
        asked = grown(procs, "rchar_bytes", centres, 2 * HALF_NS)
        from_device = (device > _DEVICE_BYTES_PER_S) & (device > _DEVICE_READ_RATIO * asked)
        through_fuse = _fuse(procs, centres)
        kind[from_device] = "block"
        kind[through_fuse] = "fuse"
        seen = [self.files[proc.identity] for proc in procs if proc.identity in self.files]
        remote = through_fuse | ~from_device
        places, kinds, points = _most_read(seen, centres, remote)
        kind[places], mount[places] = kinds, points
        return Reads(kind=kind, mount=mount, device_per_s=device, asked_per_s=asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Kind of file system and mount point, None if unknown; bytes a second, NaN if unknown.

    `device` bytes came from block devices; `asked` ones were asked of read(), cached ones too.
    """

    kind: Array
    mount: Array
    device_per_s: Floats
    asked_per_s: Floats


def _fuse(procs: Sequence[Proc], centres: Ints) -> Array:
    total = np.zeros(len(centres))
    for proc in procs:
        times = proc.rows["mono_ns"].astype(np.int64)
        summed = np.concatenate(([0.0], np.cumsum(proc.rows["fuse"].astype(np.float64))))
        low = np.searchsorted(times, centres - _FILES_HALF_NS)
        high = np.searchsorted(times, centres + _FILES_HALF_NS)
        total += summed[high] - summed[low]
    return np.asarray(total > 0)


def _most_read(seen: Sequence[Columns], centres: Ints, remote: Truths) -> tuple[Ints, Array, Array]:
    """Return windows, and the kind and mount point that most looks found files of open there.

    Any process has files of its own disk open, such as its input or its code. Where nothing comes
    from a block device (`remote`), a mount of another kind is what data comes from; where it does,
    one of a block device is.
    """
    nothing = np.empty(0, dtype=object)
    if not seen:
        return np.empty(0, dtype=np.int64), nothing, nothing
    times = np.concatenate([rows["mono_ns"].astype(np.int64) for rows in seen])
    kinds, names = numbered(np.concatenate([rows["kind"] for rows in seen]))
    points, paths = numbered(np.concatenate([rows["mount_point"] for rows in seen]))
    mounts = kinds * len(paths) + points
    order = np.argsort(times, kind="stable")
    times, mounts = times[order], mounts[order]
    found = {int(m): (names[m // len(paths)], paths[m % len(paths)]) for m in np.unique(mounts)}
    different = sorted(
        (m for m, (kind, _) in found.items() if kind is not None and kind not in NOT_FILES),
        key=lambda m: str(found[m]),
    )
    if not different:
        return np.empty(0, dtype=np.int64), nothing, nothing
    low = np.searchsorted(times, centres - _FILES_HALF_NS)
    high = np.searchsorted(times, centres + _FILES_HALF_NS)
    counts = np.zeros((len(different), len(centres)))
    for row, wanted in enumerate(different):
        summed = np.concatenate(([0.0], np.cumsum(mounts == wanted)))
        counts[row] = summed[high] - summed[low]
    local = np.array([found[m][0] in _LOCAL for m in different])
    fits = np.where(remote[None, :], ~local[:, None], local[:, None])
    chosen = np.where((counts * fits).sum(axis=0) > 0, counts * fits, counts)
    best = chosen.argmax(axis=0)
    places = np.flatnonzero(chosen[best, np.arange(len(centres))] > 0)
    kind, point = (np.array([found[m][at] for m in different], dtype=object) for at in (0, 1))
    return places, kind[best[places]], point[best[places]]


def load(
    con: duckdb.DuckDBPyConnection, node: str, boot_id: str, since_ns: int, until_ns: int
) -> Surroundings:
    """Return what surrounds the processes of a node in [since, until]."""
    at: dict[str, Any] = {"node": node, "boot": boot_id, "since": since_ns, "until": until_ns}
    where = "node = $node AND boot_id = $boot AND mono_ns BETWEEN $since AND $until"
    cpu = fetch(
        con,
        "SELECT mono_ns, cpus, user_ns::DOUBLE + system_ns + coalesce(interrupt_ns, 0)"
        " + coalesce(steal_ns, 0) AS used_ns FROM cpu"
        f" WHERE {where} AND cpus > 0 ORDER BY mono_ns",
        at,
    )
    quotas = {
        cgroup: Quota(
            limited=_limited(rows),
            periods=_counter(rows, "periods"),
            throttled=_counter(rows, "throttled_periods"),
        )
        for (cgroup,), rows in fetch(
            con,
            "SELECT cgroup, mono_ns, quota_ns::DOUBLE AS quota_ns, periods::DOUBLE AS periods,"
            " throttled_periods::DOUBLE AS throttled_periods FROM cgroup_cpu"
            f" WHERE {where} AND cgroup IS NOT NULL ORDER BY cgroup, mono_ns",
            at,
        )
        .groups("cgroup")
        .items()
    }
    files = fetch(
        con,
        f"SELECT pid, start_ns, mono_ns, kind, mount_point FROM file_use WHERE {where}"
        " AND pid IS NOT NULL AND start_ns IS NOT NULL AND read_files > 0"
        " ORDER BY pid, start_ns, mono_ns",
        at,
    ).groups("pid", "start_ns")
    memory = fetch(
        con,
        "SELECT mono_ns, some_ns::DOUBLE AS some_ns FROM pressure WHERE resource = 'memory'"
        f" AND cgroup = '' AND {where} ORDER BY mono_ns",
        at,
    )
    refaults = fetch(
        con,
        "SELECT mono_ns, refault_file_pages::DOUBLE * coalesce(page_bytes, 4096) AS bytes"
        f" FROM vmstat WHERE {where} ORDER BY mono_ns",
        at,
    )
    return Surroundings(
        network=network.load(con, at, where),
        memory_stall_ns=_counter(memory, "some_ns"),
        refault_bytes=_counter(refaults, "bytes"),
        cpus=int(cpu["cpus"][-1]) if len(cpu) else None,
        cpu_used_ns=_counter(cpu, "used_ns"),
        quotas=quotas,
        files={(int(pid), int(start)): rows for (pid, start), rows in files.items()},
    )


def _limited(rows: Columns) -> bool:
    """Say whether a cgroup has a quota; without one the kernel counts no periods (cpu.stat)."""
    return any(
        bool((np.nan_to_num(rows[name].astype(np.float64)) > 0).any())
        for name in ("quota_ns", "periods")
    )


def _counter(rows: Columns, name: str) -> Counter:
    return counter(rows["mono_ns"].astype(np.int64), rows[name].astype(np.float64), gap_ns=GAP_NS)
