"""The question "open_files": the paths behind a process's descriptors.

Source: the links of /proc/PID/fd (proc_pid_fd(5)). A link costs 2.6 us, and most descriptors of a
trainer are sockets, pipes and devices that stay what they are: those are skipped for some looks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from whyidle.host import Answer, Argument

# After so many looks every link is read again: a number may have been closed and used for a file.
_SKIPS = 8
# Processes that are remembered; the oldest is read in full again.
_PROCESSES_LIMIT = 2048


@dataclass(slots=True)
class _Memory:
    """What is known of a process: the inode of its directory tells it from another of its pid."""

    inode: int
    looks: int = 0
    no_files: set[str] = field(default_factory=set)


class OpenFiles:
    """Answers for the machine, or tree, below `root`."""

    __slots__ = ("_known", "_root")

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")
        self._known: dict[Argument, _Memory] = {}

    def __call__(self, pid: Argument) -> Answer:
        """Return (descriptor, path) of those that have a path outside /dev; raises OSError."""
        directory = os.open(f"{self._root}/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY)
        try:
            memory = self._memory(pid, os.fstat(directory).st_ino)
            names = os.listdir(directory)  # noqa: PTH208 - Path knows no descriptor
            found = []
            for name in memory.no_files.symmetric_difference(names) if memory.looks else names:
                if name in memory.no_files:
                    memory.no_files.discard(name)  # closed: it may come again as a file
                    continue
                try:
                    # Relative to the directory: the whole path costs 3.3 us.
                    path = os.readlink(name, dir_fd=directory)
                except FileNotFoundError:
                    continue  # closed in between
                if path.startswith("/") and not path.startswith("/dev/"):
                    found.append((int(name), path))
                else:
                    memory.no_files.add(name)
        finally:
            os.close(directory)
        memory.looks += 1
        return tuple(sorted(found))

    def _memory(self, pid: Argument, inode: int) -> _Memory:
        memory = self._known.get(pid)
        if memory is None or memory.inode != inode or memory.looks >= _SKIPS:
            while len(self._known) >= _PROCESSES_LIMIT:
                self._known.pop(next(iter(self._known)))
            self._known.pop(pid, None)  # so that the oldest comes first
            memory = self._known[pid] = _Memory(inode=inode)
        return memory
