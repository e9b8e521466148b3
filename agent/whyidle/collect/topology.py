"""How far NICs and NVMe drives are from each GPU on PCIe; every ten minutes.

The classes are those of NCCL (PIX, PXB, PHB, NODE, SYS) in words. In a virtual machine the tree of
sysfs is the hypervisor's invention: what it does not show is unknown, unless a job names the
topology file that its cloud gives it (NCCL_TOPO_FILE).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from whyidle.collect import pcie_tree, topology_file
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.pcie_tree import Function, Place
from whyidle.host import Host
from whyidle.schema import GpuDistance

# Nearest first.
PATHS = ("same_switch", "switches", "same_root", "same_numa", "other")
# A switch is two bridges deep: its upstream port, and the downstream port above the function.
_ONE_SWITCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """`path` is one of PATHS or None; `bridges` lie between, None if not all of them are known."""

    path: str | None
    bridges: int | None

    @property
    def rank(self) -> tuple[int, int] | None:
        """What tells near from far; None where it is unknown."""
        return None if self.path is None else (PATHS.index(self.path), self.bridges or 0)


def distance(gpu: Place, device: Place, *, virtual: bool) -> Distance:
    """Return how far two functions are from each other."""
    if gpu.root is not None and gpu.root == device.root:
        shared = 0
        # Neither function itself is a bridge that they share.
        for one, other in zip(gpu.chain[:-1], device.chain[:-1], strict=False):
            if one != other:
                break
            shared += 1
        below = (len(gpu.chain) - shared, len(device.chain) - shared)
        if shared:
            near = max(below) <= _ONE_SWITCH
            # The shared bridge itself counts once.
            return Distance(path="same_switch" if near else "switches", bridges=sum(below) - 1)
        if not virtual:
            return Distance(path="same_root", bridges=sum(below) - 2)
    elif not virtual and gpu.numa_node is not None and device.numa_node is not None:
        same = gpu.numa_node == device.numa_node
        return Distance(path="same_numa" if same else "other", bridges=None)
    return Distance(path=None, bridges=None)


def rows(
    functions: Iterable[Function], mono_ns: int, *, virtual: bool, source: str
) -> Iterator[GpuDistance]:
    """Yield a row for each pair of a GPU and a device."""
    ordered = sorted(functions, key=lambda function: function.address)
    gpus = [function for function in ordered if function.kind == "gpu"]
    devices = [function for function in ordered if function.kind in ("nic", "nvme")]
    found = {
        (gpu.address, device.device): distance(gpu.place, device.place, virtual=virtual)
        for gpu in gpus
        for device in devices
    }
    for gpu in gpus:
        for device in devices:
            it = found[gpu.address, device.device]
            others = [found[other.address, device.device] for other in gpus]
            peers = [
                found[gpu.address, peer.device] for peer in devices if peer.kind == device.kind
            ]
            yield GpuDistance(
                mono_ns=mono_ns,
                gpu_pci_bus_id=gpu.address,
                device=device.device,
                kind=device.kind,
                pci_bus_id=device.address,
                path=it.path,
                bridges=it.bridges,
                nearest_gpu=_is_nearest(it, others),
                nearest_device=_is_nearest(it, peers),
                source=source,
            )


def _is_nearest(it: Distance, among: Iterable[Distance]) -> bool | None:
    ranks = [one.rank for one in among]
    known = [rank for rank in ranks if rank is not None]
    if it.rank is None or len(known) < len(ranks):
        return None
    return it.rank == min(known)


def parse_hypervisor(cpuinfo: bytes) -> bool | None:
    """Return whether x86 says that a hypervisor is below; None for CPUs that do not tell."""
    begin = cpuinfo.find(b"\nflags")
    if begin < 0:
        return None
    return b"hypervisor" in cpuinfo[begin + 1 : cpuinfo.find(b"\n", begin + 1)].split()


def make() -> Collect:
    """Return the collector; it keeps whether the machine is a virtual one."""
    asked, virtual = False, False

    def collect(host: Host) -> Iterator[GpuDistance | Problem]:
        nonlocal asked, virtual
        try:
            functions = pcie_tree.look(host)
        except FileNotFoundError:
            raise NoData("no PCI devices here (no /sys/bus/pci)") from None
        if not any(function.kind == "gpu" for function in functions.values()):
            raise NoData("no NVIDIA GPU on the PCI bus")
        if not asked:
            # Each CPU repeats the flags; the text of a large node has half a megabyte.
            virtual = parse_hypervisor(host.read_bytes("proc/cpuinfo", keep=False)) is True
            asked = True
        placed: Mapping[str, Function] = functions
        source, guessed = "sysfs", virtual
        if virtual:
            told = topology_file.look(host)
            yield from told.problems
            if told.path is not None:
                placed = topology_file.placed(functions, told.places)
                source, guessed = told.path, False
        yield from rows(placed.values(), host.clock.mono_ns(), virtual=guessed, source=source)

    return collect


TOPOLOGY = Collector(
    name="topology", lane="slow", make=make, thread="pcie", deadline_s=5.0, every_s=600.0
)
