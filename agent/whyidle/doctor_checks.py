"""Switches of the kernel, the driver and the container that no single source tells of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from whyidle.host import Host
from whyidle.schema import ClockReading, Gds, GpuActivity
from whyidle.table import Row

Rows = Mapping[str, Sequence[Row]]
_PCI = "sys/bus/pci/devices"
_NVIDIA = "0x10de"
# Display controllers and 3D controllers of the PCI class codes.
_GPU_CLASSES = ("0x0300", "0x0302")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """How a switch stands."""

    state: Literal["works", "off", "refused", "partly"]
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A switch; `look` returns None where it means nothing on this machine."""

    name: str
    section: str
    shows: str
    look: Callable[[Host, Rows], Told | None]


def _driver(host: Host, rows: Rows) -> Told | None:
    """A GPU on the bus that no driver has."""
    if rows.get("gpu_info"):
        return None
    try:
        names = host.names(_PCI)
    except OSError:
        return None
    for name in names:
        try:
            vendor = host.read(f"{_PCI}/{name}/vendor").strip()
            kind = host.read(f"{_PCI}/{name}/class").strip()
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_GPU_CLASSES):
            return Told(
                state="refused",
                why=f"an NVIDIA GPU is on the PCI bus ({name}), and its driver does not answer",
                fix="sudo modprobe nvidia && nvidia-smi    # or install the driver",
            )
    return None


def _gpm(host: Host, rows: Rows) -> Told | None:
    """GPUs whose activity is known by utilization alone."""
    sources: dict[str, set[str]] = {}
    for row in rows.get("gpu_activity", ()):
        if isinstance(row, GpuActivity):
            sources.setdefault(row.uuid, set()).add(row.source)
    coarse = [uuid for uuid, names in sources.items() if names == {"nvml"}]
    if not coarse:
        return None if not sources else Told(state="works", why=f"{len(sources)} GPUs")
    return Told(
        state="partly",
        why=f"{len(coarse)} of {len(sources)} GPUs have no GPM (before Hopper): a kernel that "
        "polls looks like one that computes",
        fix="export WHYIDLE_DCGM_URL=http://localhost:9400/metrics    # if a DCGM exporter runs "
        "here",
    )


def _delays(host: Host, rows: Rows) -> Told | None:
    try:
        switch = host.read("proc/sys/kernel/task_delayacct").strip()
    except OSError:
        return None  # kernels before 5.14 count always, or never were built to
    if switch == "1":
        return Told(state="works")
    return Told(
        state="off",
        why="the kernel does not count how long processes wait for disks",
        fix="sudo sysctl kernel.task_delayacct=1    # for processes that start from then on",
    )


def _strangers(host: Host, rows: Rows) -> Told | None:
    """Processes of other users: their I/O, their environment and their open files."""
    try:
        own = host.stat("proc/self").user_id
        pids = [name for name in host.names("proc") if name.isdigit()]
    except OSError:
        return None
    for pid in pids:
        try:
            # A kernel thread has no command line, and nobody may read its I/O.
            if host.stat(f"proc/{pid}").user_id == own or not host.read(f"proc/{pid}/cmdline"):
                continue
            host.read_bytes(f"proc/{pid}/io", keep=False)
        except PermissionError:
            return Told(
                state="refused",
                why="I/O, ranks and open files of other users' processes may not be read",
                fix="systemctl start whyidle-agent    # it has CAP_SYS_PTRACE; or run with sudo",
            )
        except OSError:
            continue  # it ended, or the kernel counts no I/O
        return Told(state="works")
    return None


def _process_ids(host: Host, rows: Rows) -> Told | None:
    """Whether the process ids are those of the machine: NVML lists no others."""
    if not rows.get("gpu_info"):
        return None
    try:
        if host.read("proc/2/comm").strip() == "kthreadd":
            return Told(state="works")
    except OSError:
        pass
    return Told(
        state="refused",
        why="a container with process ids of its own: NVML lists none of the GPUs' processes",
        fix="docker run --pid=host ...    # in Kubernetes hostPID: true",
    )


def _clock(host: Host, rows: Rows) -> Told | None:
    readings = [row for row in rows.get("clock", ()) if isinstance(row, ClockReading)]
    if not readings or readings[-1].synchronised is None:
        return None
    if readings[-1].synchronised:
        return Told(state="works")
    return Told(
        state="off",
        why="no time service sets the clock: waits for ranks on other nodes cannot be compared",
        fix="sudo systemctl enable --now chrony    # or systemd-timesyncd",
    )


def _gds(host: Host, rows: Rows) -> Told | None:
    found = [row for row in rows.get("gds", ()) if isinstance(row, Gds)]
    if not found or found[-1].io_stats is None:
        return None
    if found[-1].io_stats:
        return Told(state="works")
    return Told(
        state="off",
        why="GPUDirect Storage counts no I/O",
        fix="echo 1 | sudo tee /sys/module/nvidia_fs/parameters/rw_stats_enabled",
    )


_HIDEPID = re.compile(r" /proc [^\n]* - proc [^\n]*hidepid=(?!0|off)(\w+)")


def _hidden(host: Host, rows: Rows) -> Told | None:
    try:
        mounts = host.read("proc/self/mountinfo")
        if host.stat("proc/self").user_id == 0:
            return None
    except OSError:
        return None
    if _HIDEPID.search(mounts) is None:
        return None
    return Told(
        state="refused",
        why="/proc hides the processes of other users (hidepid)",
        fix="sudo mount -o remount,hidepid=0 /proc    # or gid= of the agent's group",
    )


CHECKS: tuple[Check, ...] = (
    Check(name="driver", section="GPUs", shows="the NVIDIA driver", look=_driver),
    Check(name="gpm", section="GPUs", shows="how full GPUs are (GPM)", look=_gpm),
    Check(
        name="process_ids",
        section="Job",
        shows="process ids of the machine",
        look=_process_ids,
    ),
    Check(name="other_users", section="Job", shows="processes of other users", look=_strangers),
    Check(name="hidden_processes", section="Job", shows="processes in /proc", look=_hidden),
    Check(
        name="delay_accounting",
        section="Job",
        shows="waits for disks, by process",
        look=_delays,
    ),
    Check(name="gds_statistics", section="Storage", shows="I/O counts of GDS", look=_gds),
    Check(name="time_service", section="Node", shows="clocks of nodes that agree", look=_clock),
)
