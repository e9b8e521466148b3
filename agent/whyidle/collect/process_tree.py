"""Which processes are watched: those with a GPU context, a command under watch, and all below.

A scan lists /proc (0.3 us an entry) and reads the parent of what is new only, so a node of 1,000
processes costs 0.3 ms where reading them all costs 5 ms. It is left out for a few seconds while the
last pid that was given out (/proc/loadavg) is the same: nothing has begun since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from whyidle.clock import NS_PER_S
from whyidle.collect.process_text import parse_stat
from whyidle.host import Host, NotRecordedError

# A pid that was used again between two scans, a second or two apart, looks old; a full scan finds
# it. Kernels give all other pids out first, so that this is rare, and it reads every process.
_FULL_EVERY_NS = 600 * NS_PER_S
# The last pid is that of the reader's own namespace, and /proc may be of another.
_LIST_EVERY_NS = 5 * NS_PER_S
# More processes than any node's job has: a fork bomb must not blind or fill the recording.
WATCHED_LIMIT = 1024


class ProcessTree:
    """The processes of a node and which of them are watched.

    Once watched, a process stays so until it ends: losing its parent or its GPU context does not
    end its part in the job.
    """

    __slots__ = (
        *("_asked", "_full_ns", "_last_pid", "_listed_ns", "_names", "_parents", "_roots"),
        *("overflow", "watched"),
    )

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._roots: frozenset[int] = frozenset()
        self._full_ns: int | None = None
        # When /proc was listed last, and the last pid that had been given out before that.
        self._listed_ns = 0
        self._last_pid: bytes | None = None
        self._names: tuple[str, ...] = ()
        self._asked: frozenset[int] = frozenset()
        self.watched: set[int] = set()
        self.overflow = 0

    def scan(self, host: Host, roots: Iterable[int]) -> set[int]:
        """Bring the tree up to date; return the watched pids that have gone."""
        now_ns = host.clock.mono_ns()
        roots = frozenset(roots)
        last_pid = _last_pid(host)
        same = last_pid is not None and last_pid == self._last_pid
        same = same and bool(self._names) and roots == self._asked
        if same and now_ns - self._listed_ns < _LIST_EVERY_NS:
            return set()
        self._last_pid, self._listed_ns = last_pid, now_ns
        names = host.names("proc")
        full = self._full_ns is None or now_ns - self._full_ns >= _FULL_EVERY_NS
        if not full and names == self._names and roots == self._asked:
            return set()
        self._names, self._asked = names, roots
        alive = {int(name) for name in names if name.isdigit()}
        if full:
            self._full_ns = now_ns
            # Watched processes keep their place: their parents may have gone since.
            self._parents = {p: up for p, up in self._parents.items() if p in self.watched}
        for pid in self._parents.keys() - alive:
            del self._parents[pid]
        new = alive - self._parents.keys()
        for pid in new:
            parent = _parent(host, pid)
            if parent is not None:
                self._parents[pid] = parent
            else:
                self._names = ()  # it is asked again at the next scan
        wanted = roots & alive
        # A new root may have children that were seen before it became one.
        candidates = new if wanted <= self._roots else alive
        self._roots = wanted
        gone = self.watched - alive
        self.watched -= gone
        self._admit(wanted | {pid for pid in candidates if self._descends(pid)})
        return gone

    def parents_of(self, chosen: Callable[[int], bool]) -> set[int]:
        """Return the parents of those watched pids that are chosen, up to the first of each."""
        found: set[int] = set()
        for pid in sorted(self.watched):
            parent = self._parents.get(pid)
            if parent is not None and parent not in found and chosen(pid):
                found.add(parent)
        return found

    def drop(self, pid: int) -> None:
        """Forget a process that ended after the scan; its number is free for another."""
        self.watched.discard(pid)
        self._parents.pop(pid, None)
        # Its number may be there still, or again, and with it the way from others to a root.
        self._names, self._roots = (), frozenset()

    def _admit(self, pids: frozenset[int]) -> None:
        self.overflow = 0
        for pid in sorted(pids - self.watched):
            if len(self.watched) >= WATCHED_LIMIT:
                self.overflow += 1
            else:
                self.watched.add(pid)

    def _descends(self, pid: int) -> bool:
        seen = set()
        while pid not in seen:
            if pid in self._roots or pid in self.watched:
                return True
            seen.add(pid)
            pid = self._parents.get(pid, 0)
        return False


def _last_pid(host: Host) -> bytes | None:
    """Return the pid that was given out last, None where the kernel does not say."""
    try:
        words = host.read_bytes("proc/loadavg").split()
    except (OSError, NotRecordedError):
        return None
    return words[4] if len(words) > 4 else None


def _parent(host: Host, pid: int) -> int | None:
    try:
        return parse_stat(host.read_bytes(f"proc/{pid}/stat", keep=False)).parent_pid
    except (OSError, ValueError):
        return None  # it ended meanwhile; what is unreadable is reported where it is watched
