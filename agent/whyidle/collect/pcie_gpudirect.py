"""Whether NICs and drives can reach GPU memory by themselves: modules, driver, IOMMU; slow.

Source: /sys/module, /proc/driver/nvidia/version and /sys/class/iommu. With the open GPU driver
NICs reach GPU memory by dma-buf and need no peer memory module.
"""

from __future__ import annotations

from collections.abc import Iterable

from whyidle.collect.collector import Collector, NoData
from whyidle.collect.topology import parse_hypervisor
from whyidle.host import Host
from whyidle.schema import GpudirectInfo

_PEER_MEMORY = frozenset({"nvidia_peermem", "nv_peer_mem"})
_OPEN = "Open Kernel Module"
_VERSION = "proc/driver/nvidia/version"


def parse_open(text: str) -> bool | None:
    """Return whether the GPU driver is the open one; None for what is no version text."""
    return _OPEN in text if "NVRM" in text else None


def collect(host: Host) -> Iterable[GpudirectInfo]:
    """Return one row; raises NoData without modules of the kernel, OSError."""
    try:
        modules = frozenset(host.names("sys/module"))
    except FileNotFoundError:
        raise NoData("the kernel shows no modules (no /sys/module)") from None
    if "nvidia" not in modules:
        raise NoData("the NVIDIA driver is not loaded")
    try:
        opened = parse_open(host.read_bytes(_VERSION, keep=False).decode("utf-8", "replace"))
    except FileNotFoundError:
        opened = None
    try:
        iommu = bool(host.names("sys/class/iommu"))
    except FileNotFoundError:
        iommu = False  # a kernel without any
    try:
        virtual = parse_hypervisor(host.read_bytes("proc/cpuinfo", keep=False))
    except FileNotFoundError:
        virtual = None
    return (
        GpudirectInfo(
            mono_ns=host.clock.mono_ns(),
            peer_memory=bool(modules & _PEER_MEMORY),
            open_kernel_module=opened,
            storage="nvidia_fs" in modules,
            copy="gdrdrv" in modules,
            iommu=iommu,
            virtual=virtual,
        ),
    )


# Reading /proc/cpuinfo of hundreds of CPUs takes milliseconds, and none of this changes often.
GPUDIRECT = Collector(
    name="pcie_gpudirect",
    lane="slow",
    make=lambda: collect,
    thread="pcie",
    deadline_s=5.0,
    every_s=600.0,
)
