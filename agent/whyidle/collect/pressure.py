"""Pressure stall information of the node: time in which tasks waited for CPU, memory or I/O.

Source: /proc/pressure (https://docs.kernel.org/accounting/psi.html). Only the totals are kept: the
averages derive from them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator

from whyidle.collect.collector import Collector, NoData, Problem
from whyidle.collect.numbers import whole
from whyidle.host import Host
from whyidle.schema import Pressure

DIRECTORY = "proc/pressure"
# irq came with 6.1 and has no line "some".
RESOURCES = ("cpu", "io", "memory", "irq")
_OFF = "the kernel counts no pressure: it was built without PSI or needs psi=1 at boot"


def parse(
    text: str, resource: str, mono_ns: int, *, cgroup: str = "", system: bool = True
) -> Pressure:
    """Return the row of a pressure file; its microseconds become nanoseconds.

    Of the whole node, `full` of the CPU is not defined and printed as zero for form's sake (since
    5.13): that is no measurement, so it is None.
    """
    totals: dict[str, int] = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        at = rest.find("total=")
        if kind in ("some", "full"):
            if at < 0:
                raise ValueError(f"pressure/{resource}: the line {kind} has no total")
            word = rest[at + 6 :].partition(" ")[0]
            totals[kind] = whole(word, f"pressure/{resource}: {kind} total") * 1000
    if not totals:
        raise ValueError(f"pressure/{resource}: has neither some nor full")
    full = totals.get("full")
    return Pressure(
        mono_ns=mono_ns,
        resource=resource,
        cgroup=cgroup,
        some_ns=totals.get("some"),
        full_ns=None if resource == "cpu" and system else full,
    )


def collect(host: Host) -> Iterator[Pressure | Problem]:
    """Yield a row for each resource that this kernel counts."""
    missing = 0
    for resource in RESOURCES:
        try:
            text = host.read(f"{DIRECTORY}/{resource}")
        except FileNotFoundError:
            missing += 1
            continue
        except OSError as error:
            # psi=0 leaves the files and refuses to open them.
            if error.errno != errno.EOPNOTSUPP:
                yield Problem(subject=resource, message=str(error))
                continue
            missing += 1
            continue
        yield parse(text, resource, host.clock.mono_ns())
    if missing == len(RESOURCES):
        raise NoData(_OFF)


def read_cgroup(host: Host, directory: str, cgroup: str) -> Iterable[Pressure]:
    """Return the rows of a cgroup v2 at `directory`; none where it counts no pressure."""
    rows: list[Pressure] = []
    for resource in RESOURCES[:3]:
        try:
            text = host.read(f"{directory}/{resource}.pressure")
        except OSError:
            # Old kernels lack the files, cgroup.pressure=0 refuses them: both mean not counted, and
            # the node's own pressure above reports what is wrong with the kernel.
            continue
        rows.append(parse(text, resource, host.clock.mono_ns(), cgroup=cgroup, system=False))
    return rows


PRESSURE = Collector(name="pressure", lane="normal", make=lambda: collect)
