"""Which CPUs serve the interrupts of GPUs, NICs and NVMe drives, and how many there were; rare.

Source: /sys/bus/pci/devices/*/msi_irqs, /proc/irq/N/effective_affinity_list and the line `intr` of
/proc/stat. /proc/interrupts says the same by CPU: half a megabyte on a large node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whyidle.collect import pcie_tree
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.pcie_tree import PCI, Function
from whyidle.host import Host
from whyidle.schema import DeviceIrq

_NODES = "sys/devices/system/node"


def parse_list(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as 0-3,8; raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, dash, last = part.partition("-")
            found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def write_list(cpus: frozenset[int]) -> str:
    """Return CPUs as the kernel writes them."""
    parts: list[str] = []
    ordered = sorted(cpus)
    for at, cpu in enumerate(ordered):
        if at and ordered[at - 1] == cpu - 1:
            parts[-1] = f"{parts[-1].partition('-')[0]}-{cpu}"
        else:
            parts.append(str(cpu))
    return ",".join(parts)


def parse_totals(stat: str) -> dict[int, int]:
    """Return how many interrupts each number had since boot, of /proc/stat; {} without the line."""
    for line in stat.splitlines():
        if line.startswith("intr "):
            # The first number is the sum of all.
            return {number: int(word) for number, word in enumerate(line.split()[2:])}
    return {}


def collect(host: Host) -> Iterator[DeviceIrq | Problem]:
    """Yield a row for each function that has interrupts; raises NoData, OSError."""
    try:
        functions = pcie_tree.look(host)
    except FileNotFoundError:
        raise NoData("no PCI devices here (no /sys/bus/pci)") from None
    served = [function for function in functions.values() if function.kind != "bridge"]
    if not served:
        raise NoData("no NVIDIA GPU, no RDMA NIC and no NVMe drive on the PCI bus")
    totals = parse_totals(host.read("proc/stat"))
    near: dict[int, frozenset[int]] = {}
    for function in served:
        try:
            found = _row(host, function, totals, near)
        except (OSError, ValueError) as error:
            yield Problem(subject=function.address, message=str(error))
            continue
        if found is not None:
            yield found


def _row(
    host: Host,
    function: Function,
    totals: Mapping[int, int],
    near: dict[int, frozenset[int]],
) -> DeviceIrq | None:
    try:
        names = host.names(f"{PCI}/{function.address}/msi_irqs")
    except FileNotFoundError:
        return None  # its driver has asked for none
    numbers = [int(name) for name in names if name.isdecimal()]
    node = function.place.numa_node
    local = None if node is None else _cpus_of(host, node, near)
    cpus: set[int] = set()
    away = 0
    for number in numbers:
        own = _affinity(host, number)
        cpus |= own
        away += bool(own) and local is not None and not own <= local
    counts = [totals[number] for number in numbers if number in totals]
    return DeviceIrq(
        mono_ns=host.clock.mono_ns(),
        pci_bus_id=function.address,
        kind=function.kind,
        device=function.device or None,
        irqs=len(numbers),
        interrupts=sum(counts) if counts else None,
        cpus=write_list(frozenset(cpus)) if cpus else None,
        cpus_count=len(cpus) if cpus else None,
        numa_node=node,
        away_irqs=None if local is None or not cpus else away,
    )


def _affinity(host: Host, number: int) -> frozenset[int]:
    """Return the CPUs that serve an interrupt; none where it was never set up, or has gone."""
    try:
        path = f"proc/irq/{number}/effective_affinity_list"
        return parse_list(host.read_bytes(path, keep=False).decode("ascii", "replace"))
    except FileNotFoundError:
        return frozenset()


def _cpus_of(host: Host, node: int, near: dict[int, frozenset[int]]) -> frozenset[int] | None:
    if node not in near:
        try:
            near[node] = parse_list(host.read(f"{_NODES}/node{node}/cpulist"))
        except FileNotFoundError:
            return None
    return near[node]


def make() -> Collect:
    """Return the collector."""
    return collect


# A thousand small files on a large node, and somebody moves interrupts once a day at most.
IRQ = Collector(name="irq", lane="slow", make=make, thread="pcie", deadline_s=5.0, every_s=600.0)
