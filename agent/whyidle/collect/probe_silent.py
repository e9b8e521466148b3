"""Trainers that asked for the probe and publish nothing: a folder that is missing, full, read-only.

The probe keeps its troubles to itself, so that no trainer is hurt by them; the agent tells them.
Source: /proc/PID/environ of the processes that have a context on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Problem
from whyidle.collect.probe_folder import SERVICE_FOLDER
from whyidle.collect.watched import watched_pids
from whyidle.host import Host

# A page is made with the first DataLoader or step; importing and loading come before.
_PATIENCE_NS = 60 * NS_PER_S


def parse_environ(data: bytes) -> str | None:
    """Return the folder that a process publishes into; None if it did not ask for the probe."""
    wanted = False
    folder = "/" + SERVICE_FOLDER
    for entry in data.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == b"WHYIDLE_PROBE":
            wanted = value == b"1"
        elif name == b"WHYIDLE_PROBE_DIR" and value:
            folder = value[:512].decode("utf-8", "replace")
    return folder if wanted else None


class Silent:
    """Remembers who asked, and since when it has been silent."""

    __slots__ = ("_asked",)

    def __init__(self) -> None:
        # By pid: since when, and where to; None: it did not ask, or may not be looked at.
        self._asked: dict[int, tuple[int, str | None]] = {}

    def problems(
        self, host: Host, now_ns: int, publishing: set[int], folders: tuple[str, ...]
    ) -> Iterator[Problem]:
        """Yield a problem for each process that has been silent for long."""
        gpu, _ = watched_pids(host)
        pids = gpu or ()
        self._asked = {pid: self._asked.get(pid) or _ask(host, pid, now_ns) for pid in pids}
        yield from _silent(self._asked, now_ns, publishing, folders)


def _ask(host: Host, pid: int, now_ns: int) -> tuple[int, str | None]:
    try:
        return now_ns, parse_environ(host.read_bytes(f"proc/{pid}/environ", keep=False))
    except OSError:
        return now_ns, None


def _silent(
    asked: Mapping[int, tuple[int, str | None]],
    now_ns: int,
    publishing: set[int],
    folders: tuple[str, ...],
) -> Iterator[Problem]:
    for pid, (since_ns, folder) in asked.items():
        if folder is None or pid in publishing or now_ns - since_ns < _PATIENCE_NS:
            continue
        if folder.strip("/") not in folders:
            yield Problem(
                subject=f"pid {pid}",
                message=f"publishes its counters into {folder}, which is not there or not read: "
                f"start the agent with --probe-dir {folder}, or make the folder",
            )
        else:
            yield Problem(
                subject=f"pid {pid}",
                message="asked for the probe and has published nothing in a minute: it uses no "
                f"DataLoader and no torch optimizer, or {folder} is full or not writable to it",
            )
