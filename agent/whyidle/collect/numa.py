"""Memory of each NUMA node, and how much of it was allocated for the CPUs of another.

A node that is full makes ranks and loaders allocate on the far one, whose memory is slower for
them and for copies to their GPU. Source: https://docs.kernel.org/admin-guide/numastat.html and
/sys/devices/system/node/nodeN/meminfo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.numbers import whole
from whyidle.host import Host
from whyidle.schema import NumaNode

_NODES = "sys/devices/system/node"
_NODE = re.compile(r"node(\d+)")
_LINE = re.compile(r"Node \d+ (\w+(?:\(\w+\))?):\s+(\d+)( kB)?")


def parse_meminfo(text: str) -> dict[str, int]:
    """Return what a node's meminfo tells, in bytes where it counts in kB."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        told = _LINE.match(line)
        if told is not None:
            found[told[1]] = int(told[2]) * (1024 if told[3] else 1)
    return found


def parse_numastat(text: str) -> dict[str, int]:
    """Return a node's numastat, in pages."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, space, value = line.partition(" ")
        if space:
            found[name] = whole(value, f"numastat: {name}")
    return found


def row(host: Host, node: int) -> NumaNode:
    """Return the row of a node; raises OSError, ValueError."""
    directory = f"{_NODES}/node{node}"
    memory = parse_meminfo(host.read(f"{directory}/meminfo"))
    mono_ns = host.clock.mono_ns()
    if not memory:
        raise ValueError("meminfo has no line of the form 'Node 0 MemTotal: 1 kB'")
    stat = parse_numastat(host.read(f"{directory}/numastat"))
    try:
        cpus: str | None = host.read(f"{directory}/cpulist").strip()
    except OSError:
        cpus = None  # a recorded tree may lack it; the counters stand without
    return NumaNode(
        mono_ns=mono_ns,
        numa_node=node,
        cpus=cpus,
        total_bytes=memory.get("MemTotal"),
        free_bytes=memory.get("MemFree"),
        file_bytes=memory.get("FilePages"),
        anon_bytes=memory.get("AnonPages"),
        dirty_bytes=memory.get("Dirty"),
        hit_pages=stat.get("numa_hit"),
        miss_pages=stat.get("numa_miss"),
        foreign_pages=stat.get("numa_foreign"),
        local_pages=stat.get("local_node"),
        other_pages=stat.get("other_node"),
    )


def collect(host: Host) -> Iterator[NumaNode | Problem]:
    """Yield a row for each node; memory that sits on no node, as of a bare device, has none."""
    try:
        names = host.names(_NODES)
    except FileNotFoundError:
        raise NoData("the kernel knows no NUMA nodes (no /sys/devices/system/node)") from None
    for name in names:
        found = _NODE.fullmatch(name)
        if found is None:
            continue
        try:
            yield row(host, int(found[1]))
        except (OSError, ValueError) as error:
            yield Problem(subject=name, message=str(error))


def make() -> Collect:
    """Return the collector."""
    return collect


NUMA = Collector(name="numa", lane="slow", make=make, every_s=10.0)
