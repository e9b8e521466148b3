"""CPU quota, throttling and pressure of the cgroups of a job's processes, versions 1 and 2.

A quota may sit on any level above a process, such as its pod: every level with a quota gets a row,
and the process's own cgroup always does.
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle.clock import NS_PER_S
from whyidle.collect.cgroup_text import (
    CpuStat,
    Membership,
    levels,
    parse_cfs,
    parse_cpu_max,
    parse_cpu_stat,
    parse_membership,
)
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.numbers import whole
from whyidle.collect.pressure import read_cgroup
from whyidle.collect.watched import watched_pids
from whyidle.host import Host
from whyidle.schema import CgroupCpu, Pressure

_MOUNTS = "sys/fs/cgroup"
# Quotas and cgroups are set when a job starts: looked at again this often.
_AGAIN_NS = 10 * NS_PER_S
_OUTSIDE = "lies outside the agent's own cgroup namespace: run the agent in that of the host"


class _Kept:
    """What rarely changes, kept for ten seconds: quotas, memberships by pid, mounts."""

    __slots__ = ("_asked_ns", "_members", "_mounts", "_quotas")

    def __init__(self) -> None:
        self._asked_ns: int | None = None
        self._quotas: dict[str, tuple[int | None, int | None]] = {}
        self._members: dict[int, Membership] = {}
        self._mounts: dict[Membership, str] = {}

    def begin(self, now_ns: int) -> None:
        """Let go of what is too old."""
        if self._asked_ns is None or now_ns - self._asked_ns >= _AGAIN_NS:
            self._asked_ns = now_ns
            self._quotas.clear()
            self._members.clear()
            self._mounts.clear()

    def quota(self, host: Host, directory: str, version: int) -> tuple[int | None, int | None]:
        """Return quota and period in ns; the root has neither."""
        if directory not in self._quotas:
            self._quotas[directory] = _read_quota(host, directory, version)
        return self._quotas[directory]

    def mount(self, host: Host, member: Membership) -> str:
        """Return the directory that a hierarchy is mounted at."""
        if member not in self._mounts:
            self._mounts[member] = _mount(host, member)
        return self._mounts[member]

    def members(self, host: Host, pids: set[int]) -> set[Membership]:
        """Return the cgroups of processes; one that ended has none."""
        for pid in pids - self._members.keys():
            member = _membership(host, pid)
            if member is not None:
                self._members[pid] = member
        return {self._members[pid] for pid in pids & self._members.keys()}


def _read_quota(host: Host, directory: str, version: int) -> tuple[int | None, int | None]:
    try:
        if version == 2:
            return parse_cpu_max(host.read(f"{directory}/cpu.max"))
        return parse_cfs(
            host.read(f"{directory}/cpu.cfs_quota_us"), host.read(f"{directory}/cpu.cfs_period_us")
        )
    except FileNotFoundError:
        return None, None  # the root, or a level at which the controller is not enabled


def make() -> Collect:
    """Return the collector."""
    kept = _Kept()

    def collect(host: Host) -> Iterator[CgroupCpu | Pressure | Problem]:
        gpu, commands = watched_pids(host)
        if gpu is None and not commands:
            raise NoData("no process is watched: NVML lists none and no command is recorded")
        kept.begin(host.clock.mono_ns())
        told: set[tuple[int, str]] = set()
        for member in sorted(kept.members(host, {*(gpu or ()), *commands}), key=_order):
            if ".." in member.path.split("/"):
                yield Problem(subject=member.path, message=_OUTSIDE)
                continue
            mount = kept.mount(host, member)
            for level in levels(member.path):
                if (member.version, level) in told:
                    continue
                try:
                    rows = _rows(host, kept, member, mount, level)
                except (OSError, ValueError) as error:
                    yield Problem(subject=level, message=str(error))
                    continue
                if rows:
                    told.add((member.version, level))
                yield from rows

    return collect


def _order(member: Membership) -> tuple[int, str]:
    return member.version, member.path


def _membership(host: Host, pid: int) -> Membership | None:
    try:
        data = host.read_bytes(f"proc/{pid}/cgroup", keep=False)
        return parse_membership(data.decode("utf-8", "surrogateescape"))
    except (FileNotFoundError, ProcessLookupError):
        return None  # it ended; who watches it has noticed or will


def _mount(host: Host, member: Membership) -> str:
    """Return the directory that a hierarchy is mounted at."""
    names = (member.controllers, "cpu") if member.version == 1 else ("", "unified")
    for name in names:
        directory = f"{_MOUNTS}/{name}".rstrip("/")
        probe = "cgroup.procs"
        try:
            host.stat(f"{directory}/{probe}")
        except OSError:
            continue
        return directory
    return f"{_MOUNTS}/{names[0]}".rstrip("/")


def _rows(
    host: Host, kept: _Kept, member: Membership, mount: str, level: str
) -> list[CgroupCpu | Pressure]:
    directory = f"{mount}{level}".rstrip("/")
    own = level == member.path
    quota_ns, period_ns = kept.quota(host, directory, member.version)
    if quota_ns is None and not own:
        return []
    stat = parse_cpu_stat(host.read(f"{directory}/cpu.stat"))
    row = CgroupCpu(
        mono_ns=host.clock.mono_ns(),
        cgroup=level,
        version=member.version,
        quota_ns=quota_ns,
        period_ns=period_ns,
        usage_ns=_usage(host, member, level, stat),
        periods=stat.periods,
        throttled_periods=stat.throttled_periods,
        throttled_ns=stat.throttled_ns,
    )
    # The pressure of the root is that of the node.
    pressure = read_cgroup(host, directory, level) if member.version == 2 and level != "/" else ()
    return [row, *pressure]


def _usage(host: Host, member: Membership, level: str, stat: CpuStat) -> int | None:
    """Return CPU time used: version 1 counts it in cpuacct, which may have another tree."""
    if member.version == 2 or member.usage_path != member.path:
        return stat.usage_ns
    for name in (member.controllers, "cpuacct"):
        try:
            text = host.read(f"{_MOUNTS}/{name}{level}/cpuacct.usage")
        except FileNotFoundError:
            continue
        return whole(text, "cpuacct.usage")
    return None


CGROUP_CPU = Collector(name="cgroup_cpu", lane="normal", make=make, thread="process")
