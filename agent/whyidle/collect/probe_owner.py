"""Whose page it is: finds the process that a counter page names, and checks that it may be its.

Source: /proc/PID/{stat,status}. A page names its process by the pid of the process's own namespace
and by its start time on the boot clock, which all namespaces share; NSpid in status has the pids of
all namespaces, the agent's first. A user can put files into the folder, but not of another owner:
page and process must belong to the same user.
"""

from __future__ import annotations

from dataclasses import dataclass

from whyidle.collect.process_text import parse_stat
from whyidle.host import Host

# A node with more processes than this is asked for the first of them.
_PROCESSES_LIMIT = 16_384
_ENDED = ("Z", "X")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process in the agent's namespace; `inner_pid` is what it calls itself."""

    pid: int
    inner_pid: int
    start_ns: int
    user_id: int


def parse_ids(data: bytes) -> tuple[int, tuple[int, ...]]:
    """Return the effective user id and the pids of a process, outermost first; raises ValueError.

    A kernel before 4.1 has no NSpid: then there are none.
    """
    user_id: int | None = None
    pids: tuple[int, ...] = ()
    for line in data.split(b"\n"):
        if line.startswith(b"Uid:"):
            user_id = _whole(line.split()[2:3])
        elif line.startswith(b"NSpid:"):
            pids = tuple(_whole([word]) for word in line.split()[1:])
    if user_id is None:
        raise ValueError("status: there is no Uid")
    return user_id, pids


def _whole(words: list[bytes]) -> int:
    if len(words) == 1 and words[0].isdigit() and len(words[0]) < 12:
        return int(words[0])
    raise ValueError(f"status: {words!r:.60} is no id")


def owner_of(host: Host, pid: int) -> Owner:
    """Return what a process is; raises FileNotFoundError, ProcessLookupError, ValueError.

    A zombie is a process no more: it keeps nothing but its number.
    """
    stat = parse_stat(host.read_bytes(f"proc/{pid}/stat", keep=False))
    if stat.state in _ENDED:
        raise ProcessLookupError(3, "has ended", f"proc/{pid}")
    user_id, pids = parse_ids(host.read_bytes(f"proc/{pid}/status", keep=False))
    return Owner(
        pid=pid, inner_pid=pids[-1] if pids else pid, start_ns=stat.start_ns, user_id=user_id
    )


def is_running(host: Host, owner: Owner) -> bool:
    """Say whether a process still runs."""
    try:
        stat = parse_stat(host.read_bytes(f"proc/{owner.pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.start_ns == owner.start_ns and stat.state not in _ENDED


class Owners:
    """Finds processes; those of other pid namespaces by one look at all, when it is due."""

    __slots__ = ("_inner",)

    def __init__(self) -> None:
        self._inner: dict[tuple[int, int], Owner] | None = None

    def begin(self) -> None:
        """Forget what the last look found."""
        self._inner = None

    def find(self, host: Host, pid: int, start_ns: int) -> Owner | None:
        """Return the process with this pid in its own namespace, None if there is none."""
        try:
            owner = owner_of(host, pid)
        except (FileNotFoundError, ProcessLookupError):
            owner = None
        if owner is not None and (owner.inner_pid, owner.start_ns) == (pid, start_ns):
            return owner
        if self._inner is None:
            self._inner = _contained(host)
        return self._inner.get((pid, start_ns))


def _contained(host: Host) -> dict[tuple[int, int], Owner]:
    """Return the processes of inner pid namespaces, by what they call themselves."""
    found: dict[tuple[int, int], Owner] = {}
    numbers = [int(name) for name in host.names("proc") if name.isdigit()]
    for pid in numbers[:_PROCESSES_LIMIT]:
        try:
            data = host.read_bytes(f"proc/{pid}/status", keep=False)
            if len(parse_ids(data)[1]) < 2:
                continue
            owner = owner_of(host, pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
            continue  # it has ended, or is none that could be told apart
        found[owner.inner_pid, owner.start_ns] = owner
    return found
