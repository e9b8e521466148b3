"""CPU time of the whole node by mode.

Source: /proc/stat (https://docs.kernel.org/filesystems/proc.html, section 1.7). Its step is one
USER_HZ tick; iowait is a hint at best.
"""

from __future__ import annotations

from collections.abc import Iterable

from whyidle.collect.collector import Collector
from whyidle.collect.numbers import after, wholes
from whyidle.host import Host
from whyidle.schema import Cpu

# The kernel's interface counts in USER_HZ, which is 100 on every architecture that has GPUs.
TICK_NS = 10_000_000
# user nice system idle: what every kernel since 2.4 prints.
_REQUIRED = 4


def parse(data: bytes, mono_ns: int) -> Cpu:
    """Return the row of /proc/stat; counters that an old kernel lacks are None."""
    if not data.startswith(b"cpu "):
        raise ValueError("stat: does not begin with the line cpu")
    first = data[: data.find(b"\n")].split()[1:]
    if len(first) < _REQUIRED:
        raise ValueError(f"stat: cpu has {len(first)} numbers, not at least {_REQUIRED}")
    ticks = wholes(first[:8], "stat: cpu")
    user, nice, system, idle = ticks[:4]
    iowait = ticks[4] if len(ticks) > 4 else None
    interrupts = ticks[5] + ticks[6] if len(ticks) > 6 else None
    steal = ticks[7] if len(ticks) > 7 else None
    return Cpu(
        mono_ns=mono_ns,
        cpus=max(1, data.count(b"\ncpu")),
        # Guests are inside user and nice already (kernel/sched/cputime.c): not added again.
        user_ns=(user + nice) * TICK_NS,
        system_ns=system * TICK_NS,
        interrupt_ns=_ns(interrupts),
        steal_ns=_ns(steal),
        iowait_ns=_ns(iowait),
        idle_ns=idle * TICK_NS,
        running=after(data, b"procs_running ", "stat: procs_running"),
        blocked=after(data, b"procs_blocked ", "stat: procs_blocked"),
    )


def _ns(ticks: int | None) -> int | None:
    return None if ticks is None else ticks * TICK_NS


def collect(host: Host) -> Iterable[Cpu]:
    """Return one row."""
    data = host.read_bytes("proc/stat")
    return (parse(data, host.clock.mono_ns()),)


CPU = Collector(name="cpu", lane="normal", make=lambda: collect)
