"""Who this process is: enough for a reader in another pid namespace to find it.

Source: proc(5), namespaces(7), and the variables that launchers set.
"""

from __future__ import annotations

import os
import sys

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


class Identity:
    """This process at this moment; after a fork it is another."""

    __slots__ = (
        "boot_id",
        "local_rank",
        "parent_pid",
        "pid",
        "pid_namespace",
        "python",
        "rank",
        "start_ns",
        "user_id",
        "world_size",
    )

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.parent_pid = os.getppid()
        self.user_id = os.geteuid()
        self.pid_namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - no pathlib here
        self.start_ns = start_ns(self.pid)
        self.boot_id = boot_id()
        self.python = "{}.{}.{}".format(*sys.version_info[:3])
        self.rank = _number(_RANK)
        self.world_size = _number(_WORLD_SIZE)
        self.local_rank = _number(_LOCAL_RANK)


def boot_id() -> str:
    """Return the kernel's boot id; raises OSError."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:  # noqa: PTH123
        return file.read(64).decode("ascii").strip()


def start_ns(pid: int) -> int:
    """Return when a process started, boot clock; raises OSError, ValueError, IndexError."""
    with open("/proc/%d/stat" % pid, "rb") as file:  # noqa: PTH123, UP031
        data = file.read(4096)
    # The name may hold spaces and parentheses; field 22 is the 20th after it.
    ticks = int(data[data.rindex(b")") + 1 :].split()[19])
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _number(names: tuple[str, ...]) -> int | None:
    for name in names:
        text = os.environ.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return None
