"""Synthetic GPUs for the stand-in library: figures of real boards, identities of nobody's."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 1 << 30
MIB = 1 << 20

# Bus numbers of an eight-GPU board: four on each NUMA node.
_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """What does not change while the driver runs, and the values at rest.

    `gpm`: what nvmlGpmQueryDeviceSupport says; `architecture`: an nvmlDeviceArchitecture_t.
    """

    name: str
    uuid: str
    serial: str
    pci_bus: int
    minor: int
    numa_node: int
    architecture: int
    compute_capability: tuple[int, int]
    gpm: bool
    links: int
    link_speed_mbps: int
    nvlink_version: int
    memory_total_bytes: int
    memory_reserved_bytes: int
    multiprocessors: int
    power_limit_mw: int
    power_min_mw: int
    power_idle_mw: int
    clock_max_mhz: tuple[int, int, int, int]
    pcie_generation: int
    pci_device_id: int
    pci_device: int = 0
    pci_domain: int = 0


def _uuid(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012x}"


def h100(index: int) -> GpuSpec:
    """An H100 SXM: GPM, 18 links."""
    return GpuSpec(
        name="NVIDIA H100 80GB HBM3",
        uuid=_uuid(index),
        serial=f"16500000000{index:02d}",
        pci_bus=_BUSES[index % 8],
        pci_domain=index // 8,
        minor=index,
        numa_node=(index % 8) // 4,
        architecture=9,
        compute_capability=(9, 0),
        gpm=True,
        links=18,
        link_speed_mbps=26562,
        nvlink_version=6,
        memory_total_bytes=81559 * MIB,
        memory_reserved_bytes=546 * MIB,
        multiprocessors=132,
        power_limit_mw=700_000,
        power_min_mw=200_000,
        power_idle_mw=70_000,
        clock_max_mhz=(1980, 1980, 2619, 1545),
        pcie_generation=5,
        pci_device_id=0x233010DE,
    )


def b200(index: int) -> GpuSpec:
    """A B200 SXM: NVLink 5, whose counters are other field values."""
    return replace(
        h100(index),
        name="NVIDIA B200",
        architecture=10,
        compute_capability=(10, 0),
        link_speed_mbps=53125,
        nvlink_version=7,
        memory_total_bytes=183359 * MIB,
        multiprocessors=148,
        power_limit_mw=1_000_000,
        pci_device_id=0x290110DE,
    )


def a100(index: int) -> GpuSpec:
    """An A100 SXM: before GPM, 12 links."""
    return replace(
        h100(index),
        name="NVIDIA A100-SXM4-80GB",
        architecture=7,
        compute_capability=(8, 0),
        gpm=False,
        links=12,
        link_speed_mbps=25000,
        nvlink_version=4,
        memory_total_bytes=81920 * MIB,
        memory_reserved_bytes=600 * MIB,
        multiprocessors=108,
        power_limit_mw=400_000,
        power_min_mw=100_000,
        power_idle_mw=60_000,
        clock_max_mhz=(1410, 1410, 1593, 1275),
        pcie_generation=4,
        pci_device_id=0x20B210DE,
    )


def v100(index: int) -> GpuSpec:
    """A V100 SXM2: before MIG and row remapping, 6 links."""
    return replace(
        a100(index),
        name="Tesla V100-SXM2-32GB",
        architecture=5,
        compute_capability=(7, 0),
        links=6,
        link_speed_mbps=25781,
        nvlink_version=3,
        memory_total_bytes=32768 * MIB,
        multiprocessors=80,
        power_limit_mw=300_000,
        power_idle_mw=40_000,
        clock_max_mhz=(1530, 1530, 877, 1372),
        pcie_generation=3,
        pci_device_id=0x1DB510DE,
    )
