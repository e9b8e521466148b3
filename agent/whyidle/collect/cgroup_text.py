"""What the kernel's text says of a cgroup's CPU: membership, quota, throttling.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (CPU interface files), cgroups(7), and
https://docs.kernel.org/scheduler/sched-bwc.html for version 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from whyidle.collect.numbers import whole

US = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Where a process's CPU is accounted. `controllers` names the v1 hierarchy, '' for v2."""

    version: int
    controllers: str
    path: str
    usage_path: str | None
    """Path in the v1 hierarchy cpuacct, None where there is none or for v2."""


def parse_membership(text: str) -> Membership | None:
    """Return the cgroup of /proc/PID/cgroup that rules its CPU; None where no line names one.

    Where version 1 has the controller cpu, version 2 of a hybrid system has it not.
    """
    unified: str | None = None
    cpu: tuple[str, str] | None = None
    usage: str | None = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        names = controllers.split(",")
        if number == "0" and not controllers:
            unified = path
        if "cpu" in names:
            cpu = (controllers, path)
        if "cpuacct" in names:
            usage = path
    if cpu is not None:
        return Membership(version=1, controllers=cpu[0], path=cpu[1], usage_path=usage)
    if unified is not None:
        return Membership(version=2, controllers="", path=unified, usage_path=None)
    return None


def levels(path: str) -> tuple[str, ...]:
    """Return a cgroup's path and those of its parents, the root last."""
    parts = [part for part in path.split("/") if part]
    return tuple("/" + "/".join(parts[:depth]) for depth in range(len(parts), -1, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuStat:
    """cpu.stat in ns; None: not counted at this level."""

    usage_ns: int | None
    periods: int | None
    throttled_periods: int | None
    throttled_ns: int | None


def parse_cpu_stat(text: str) -> CpuStat:
    """Return cpu.stat of either version."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in ("usage_usec", "nr_periods", "nr_throttled", "throttled_usec", "throttled_time"):
            found[name] = whole(value, f"cpu.stat: {name}")
    usage, cut = found.get("usage_usec"), found.get("throttled_usec")
    return CpuStat(
        usage_ns=None if usage is None else usage * US,
        periods=found.get("nr_periods"),
        throttled_periods=found.get("nr_throttled"),
        # Version 1 counts in ns already.
        throttled_ns=found.get("throttled_time") if cut is None else cut * US,
    )


def parse_cpu_max(text: str) -> tuple[int | None, int | None]:
    """Return quota and period of cpu.max in ns; a quota of "max" is None."""
    words = text.split()
    if len(words) != 2:
        raise ValueError(f"cpu.max is {text[:40]!r}, not two words")
    quota = None if words[0] == "max" else whole(words[0], "cpu.max: quota") * US
    return quota, whole(words[1], "cpu.max: period") * US


def parse_cfs(quota: str, period: str) -> tuple[int | None, int | None]:
    """Return quota and period of cpu.cfs_quota_us and cpu.cfs_period_us in ns; -1 is None."""
    limit = whole(quota, "cpu.cfs_quota_us")
    return (limit * US if limit >= 0 else None), whole(period, "cpu.cfs_period_us") * US
