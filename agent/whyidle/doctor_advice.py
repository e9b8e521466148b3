"""What each source shows, and what to type where it does not: from the sentence that it gave."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

SECTIONS = ("GPUs", "Job", "Storage", "Network", "Node")

# Section and what a collector shows, in the order of the screen.
ABOUT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "gpu_activity": ("GPUs", "how busy and how full, 8 times a second"),
        "dcgm": ("GPUs", "the same of older GPUs, by a DCGM exporter"),
        "gpu_state": ("GPUs", "power, clocks, throttling, memory, errors"),
        "gpu_info": ("GPUs", "models, driver, MIG, NVLink domain"),
        "gpu_process": ("GPUs", "which process is on which GPU"),
        "gpu_nvlink": ("GPUs", "NVLink by link: bytes, errors"),
        "gpu_pipe": ("GPUs", "which pipes work: tensor, FP64, integer, C2C"),
        "gpu_total": ("GPUs", "totals since boot, of newer drivers"),
        "gpu_event": ("GPUs", "Xids from the driver"),
        "xid": ("GPUs", "Xids from the kernel log"),
        "pcie_link": ("GPUs", "PCIe speed and width, errors"),
        "topology": ("GPUs", "which NIC and drive is near which GPU"),
        "pcie_gpudirect": ("GPUs", "GPUDirect: modules, IOMMU, ACS"),
        "probe": ("Job", "what trainers wait for, told by the probe"),
        "process": ("Job", "CPU, run queue and I/O of ranks and loaders"),
        "process_thread": ("Job", "trainers that load data in their own threads"),
        "file_use": ("Job", "which file system data is read from"),
        "cgroup_cpu": ("Job", "CPU quota and throttling"),
        "cgroup_memory": ("Job", "memory limits, page cache thrown away"),
        "mount": ("Storage", "file systems and the disks below them"),
        "block_device": ("Storage", "disks: bytes, latency, queue"),
        "nvme": ("Storage", "NVMe and NVMe-oF: controllers, paths"),
        "nfs": ("Storage", "NFS: operations, latency, retransmits"),
        "lustre": ("Storage", "Lustre: targets, latency"),
        "parallel_fs": ("Storage", "CephFS, WekaFS: requests and latency"),
        "fuse": ("Storage", "FUSE: requests that wait"),
        "gds": ("Storage", "GPUDirect Storage"),
        "rdma_traffic": ("Network", "bytes of RDMA ports, 2 times a second"),
        "rdma_port": ("Network", "RDMA ports: state, congestion, errors"),
        "rdma_info": ("Network", "RDMA devices: driver, firmware"),
        "ethtool_port": ("Network", "pauses and discards of RoCE ports"),
        "net_link": ("Network", "bytes and drops of interfaces"),
        "link_event": ("Network", "links that go down"),
        "tcp_socket": ("Network", "TCP to storage and peers: round trips"),
        "cpu": ("Node", "CPUs of the node"),
        "pressure": ("Node", "pressure: stalls for CPU, I/O, memory"),
        "vmstat": ("Node", "page cache, reclaim, swap"),
        "numa": ("Node", "memory of NUMA nodes"),
        "irq": ("Node", "CPUs that serve interrupts of devices"),
        "clock": ("Node", "clocks and how well they are set"),
    }
)


def about(collector: str) -> tuple[str, str]:
    """Return section and what a collector shows."""
    return ABOUT.get(collector, ("Node", collector.replace("_", " ")))


def in_order(collectors: Iterable[str]) -> list[str]:
    """Return names of collectors in the order of the screen, those that have no place last."""
    places = {name: at for at, name in enumerate(ABOUT)}
    return sorted(collectors, key=lambda name: (places.get(name, len(places)), name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a sentence means. `state` and `why` replace what was found where they are not None."""

    pattern: re.Pattern[str]
    fix: str = ""
    state: Literal["works", "partly", "idle", "off", "refused", "broken", "absent"] | None = None
    why: str | None = None
    # Beginning of the names of the collectors that it is for; '' is any.
    collector: str = ""


def _advice(
    pattern: str,
    fix: str = "",
    *,
    state: Literal["works", "partly", "idle", "off", "refused", "broken", "absent"] | None = None,
    why: str | None = None,
    collector: str = "",
) -> Advice:
    return Advice(pattern=re.compile(pattern), fix=fix, state=state, why=why, collector=collector)


# The first that fits is taken.
ADVICE: tuple[Advice, ...] = (
    _advice(r"no process is watched", state="idle", why="no job runs now"),
    _advice(
        r"libnvidia-ml\.so\.1 not found",
        state="absent",
        why="no NVIDIA driver here",
    ),
    _advice(
        r"\((?:9|1)\)$|Driver Not Loaded|DriverNotLoaded",
        "sudo modprobe nvidia && nvidia-smi",
        state="refused",
        collector="gpu",
        why="the NVIDIA driver is not loaded",
    ),
    _advice(
        r"\(18\)$|Driver/library version mismatch|driver was replaced",
        "sudo reboot    # or unload the old nvidia modules; then restart the agent",
        state="broken",
        collector="gpu",
        why="the driver in the kernel and its library are of two versions",
    ),
    _advice(
        r"driver shows no GPU",
        "ls -l /dev/nvidia*    # a service needs DeviceAllow=char-nvidia, a container --gpus all",
        state="refused",
        collector="gpu",
    ),
    _advice(
        r"\(4\)$|Insufficient Permissions|GPM refuses",
        "add a line to /etc/modprobe.d/nvidia.conf: options nvidia "
        "NVreg_RestrictProfilingToAdminUsers=0    # then reload the driver; a container needs "
        "--privileged",
        state="partly",
        collector="gpu",
    ),
    _advice(
        r"\((?:15|16|28)\)$|GPU is lost|requires reset",
        "sudo nvidia-smi --gpu-reset -i N    # once no job is on it; else reboot",
        state="broken",
        collector="gpu",
    ),
    _advice(
        r"kernel log may not be read",
        "sudo sysctl kernel.dmesg_restrict=0    # or CAP_SYSLOG for the agent, as the service has",
        state="refused",
        collector="xid",
    ),
    _advice(
        r"no kernel log here",
        "docker run --device /dev/kmsg ...    # the container sees no kernel log",
        state="refused",
        collector="xid",
    ),
    _advice(
        r"psi=1",
        "add psi=1 to the kernel command line and reboot",
        state="off",
        collector="pressure",
    ),
    _advice(
        r"outside the agent's own cgroup namespace",
        "docker run --cgroupns=host ...",
        state="refused",
        collector="cgroup",
    ),
    _advice(
        r"Lustre's statistics in debugfs",
        "sudo whyidle doctor    # or CAP_DAC_READ_SEARCH for the agent",
        state="refused",
        collector="lustre",
    ),
    _advice(
        r"(?i)operation not permitted|permission denied|not permitted",
        "sudo whyidle doctor    # if it works then, a capability is missing: see the unit file",
    ),
)


def advise(collector: str, why: str) -> Advice | None:
    """Return what is known of a sentence of a collector."""
    if not why:
        return None
    for advice in ADVICE:
        if collector.startswith(advice.collector) and advice.pattern.search(why):
            return advice
    return None
