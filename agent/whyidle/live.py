"""Puts the live host together: the machine's files, its kernel questions and its NVML."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from whyidle.ask import askers
from whyidle.clock import Clock
from whyidle.dcgm import Dcgm
from whyidle.ethtool import Ethtool
from whyidle.host import Answer, Argument, LiveHost, NvmlSource
from whyidle.link_events import LinkEvents
from whyidle.nvml import Nvml
from whyidle.open_files import OpenFiles
from whyidle.socket_diag import connections, socket_inodes


@dataclass(slots=True, kw_only=True)
class Watched:
    """The processes that matter, shared by all hosts of one sampler.

    The thread that asks NVML fills `gpus`; the others read it with the question "watched", so a
    driver that hangs does not blind them. Each write replaces one whole value.
    """

    commands: tuple[int, ...] = ()
    probe_folders: tuple[str, ...] = ()
    gpus: dict[str, tuple[int, ...]] = field(default_factory=dict)
    listed: bool = False
    gpm: frozenset[str] = frozenset()

    def found(self, uuid: str, pids: Iterable[int]) -> None:
        """Take note of the processes that have a context on a GPU."""
        self.gpus = {**self.gpus, uuid: tuple(pids)}
        self.listed = True

    def gpm_told(self, uuid: str, works: bool) -> None:
        """Take note of whether GPM tells of a GPU."""
        self.gpm = self.gpm | {uuid} if works else self.gpm - {uuid}

    def answer(self) -> Answer:
        """Return {"gpu": pids or None while NVML has listed none, "commands": pids}."""
        pids = sorted({pid for pids in self.gpus.values() for pid in pids})
        return {"gpu": tuple(pids) if self.listed else None, "commands": self.commands}


def _net_namespace(root: str, pid: Argument) -> Answer:
    """Return the inode number of a process's network namespace; pid 0 is the agent itself."""
    return Path(root, "proc", str(pid or "self"), "ns/net").stat().st_ino


def live_host(
    root: str, clock: Clock, *, watched: Watched | None = None, nvml: NvmlSource | None = None
) -> LiveHost:
    """Return a host for one thread; the hosts of one sampler share `watched` and nothing else.

    `nvml` stands in for the machine's own.
    """
    shared = watched if watched is not None else Watched()
    ethtool = Ethtool()
    return LiveHost(
        root,
        clock,
        nvml=nvml
        if nvml is not None
        else Nvml(clock, on_processes=shared.found, on_gpm=shared.gpm_told),
        askers={
            **askers(clock),
            "connections": connections,
            "dcgm": Dcgm(),
            "ethtool_names": ethtool.names,
            "ethtool_values": ethtool.values,
            "gpm_works": lambda: tuple(sorted(shared.gpm)),
            "net_namespace": partial(_net_namespace, root),
            "open_files": OpenFiles(root),
            "socket_inodes": partial(socket_inodes, root),
            "probe_folders": lambda: shared.probe_folders,
            "watched": shared.answer,
        },
        sources={"links": LinkEvents()},
    )
