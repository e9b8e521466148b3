"""Memory of the cgroups of a job's processes, versions 1 and 2: limits, page cache, troubles.

A limit that is near makes the kernel throw the page cache of the data set away, and a loader reads
it again and again: refaults tell. A limit may sit on any level above a process: each level with one
gets a row, and the process's own cgroup always does.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (Memory Interface Files), and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from whyidle.clock import NS_PER_S
from whyidle.collect.cgroup_text import levels
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.numbers import whole
from whyidle.collect.watched import watched_pids
from whyidle.host import Host
from whyidle.schema import CgroupMemory

_MOUNTS = "sys/fs/cgroup"
# Cgroups are made when a job starts: who is in which is looked at again this often.
_AGAIN_NS = 30 * NS_PER_S
# Version 1 writes "unlimited" as the largest multiple of a page, of any page size below 2^63.
_UNLIMITED = 1 << 62
_OUTSIDE = "lies outside the agent's own cgroup namespace: run the agent in that of the host"


class Member(NamedTuple):
    """Where a process's memory is accounted; `controllers` names the v1 hierarchy, '' for v2."""

    version: int
    controllers: str
    path: str


def parse_member(text: str) -> Member | None:
    """Return the cgroup of /proc/PID/cgroup that is charged its memory; None if no line names one.

    Where version 1 has the controller memory, version 2 of a hybrid system has it not.
    """
    unified: Member | None = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        if "memory" in controllers.split(","):
            return Member(1, controllers, path)
        if number == "0" and not controllers:
            unified = Member(2, "", path)
    return unified


def parse_table(text: str, file: str) -> dict[str, int]:
    """Return lines of "name number", as memory.stat and memory.events have; others are skipped."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, space, value = line.partition(" ")
        if space:
            found[name] = whole(value, f"{file}: {name}")
    return found


def parse_limit(text: str, file: str) -> int | None:
    """Return a limit in bytes; None for "max" and for what version 1 writes instead."""
    word = text.strip()
    if word == "max":
        return None
    limit = whole(word, file)
    return None if limit >= _UNLIMITED else limit


class _Files:
    """Reads the files of one cgroup; what is not there is None, as at the root."""

    __slots__ = ("_directory", "_host")

    def __init__(self, host: Host, directory: str) -> None:
        self._host = host
        self._directory = directory

    def _text(self, name: str) -> str | None:
        try:
            return self._host.read(f"{self._directory}/{name}")
        except FileNotFoundError:
            return None

    def number(self, name: str) -> int | None:
        """Return a file of one number."""
        text = self._text(name)
        return None if text is None else whole(text.strip(), name)

    def limit(self, name: str) -> int | None:
        """Return a file of a limit in bytes."""
        text = self._text(name)
        return None if text is None else parse_limit(text, name)

    def table(self, name: str) -> Mapping[str, int]:
        """Return a file of lines "name number"; empty if it is not there."""
        text = self._text(name)
        return {} if text is None else parse_table(text, name)


def row_v2(files: _Files, cgroup: str, mono_ns: int) -> CgroupMemory:
    """Return the row of a cgroup of version 2."""
    stat, events = files.table("memory.stat"), files.table("memory.events")
    return CgroupMemory(
        mono_ns=mono_ns,
        cgroup=cgroup,
        version=2,
        current_bytes=files.number("memory.current"),
        max_bytes=files.limit("memory.max"),
        high_bytes=files.limit("memory.high"),
        swap_bytes=files.number("memory.swap.current"),
        anon_bytes=stat.get("anon"),
        file_bytes=stat.get("file"),
        dirty_bytes=stat.get("file_dirty"),
        writeback_bytes=stat.get("file_writeback"),
        # Before 5.9 there was one counter, of files only.
        refault_file_pages=stat.get("workingset_refault_file", stat.get("workingset_refault")),
        refault_anon_pages=stat.get("workingset_refault_anon"),
        major_faults=stat.get("pgmajfault"),
        high_events=events.get("high"),
        max_events=events.get("max"),
        oom_kills=events.get("oom_kill"),
    )


def row_v1(files: _Files, cgroup: str, mono_ns: int) -> CgroupMemory:
    """Return the row of a cgroup of version 1: `total_` counts those below it too."""
    stat = files.table("memory.stat")

    def told(*names: str) -> int | None:
        for name in names:
            for spelled in (f"total_{name}", name):
                if spelled in stat:
                    return stat[spelled]
        return None

    oom = files.table("memory.oom_control")
    return CgroupMemory(
        mono_ns=mono_ns,
        cgroup=cgroup,
        version=1,
        current_bytes=files.number("memory.usage_in_bytes"),
        max_bytes=files.limit("memory.limit_in_bytes"),
        high_bytes=None,
        swap_bytes=told("swap"),
        anon_bytes=told("rss"),
        file_bytes=told("cache"),
        dirty_bytes=told("dirty"),
        writeback_bytes=told("writeback"),
        refault_file_pages=told("workingset_refault_file", "workingset_refault"),
        refault_anon_pages=told("workingset_refault_anon"),
        major_faults=told("pgmajfault"),
        high_events=None,
        max_events=files.number("memory.failcnt"),
        oom_kills=oom.get("oom_kill"),
    )


class _Memory:
    """The collector; it keeps who is in which cgroup."""

    __slots__ = ("_asked_ns", "_members")

    def __init__(self) -> None:
        self._asked_ns: int | None = None
        self._members: dict[int, Member] = {}

    def __call__(self, host: Host) -> Iterator[CgroupMemory | Problem]:
        gpu, commands = watched_pids(host)
        if gpu is None and not commands:
            raise NoData("no process is watched: NVML lists none and no command is recorded")
        told: set[tuple[int, str]] = set()
        for member in sorted(self._found(host, {*(gpu or ()), *commands})):
            if ".." in member.path.split("/"):
                yield Problem(subject=member.path, message=_OUTSIDE)
                continue
            mount = _mount(host, member)
            for level in levels(member.path):
                if (member.version, level) in told:
                    continue
                try:
                    row = _row(host, member, mount, level)
                except (OSError, ValueError) as error:
                    yield Problem(subject=level, message=str(error))
                    continue
                if row is not None:
                    told.add((member.version, level))
                    yield row

    def _found(self, host: Host, pids: set[int]) -> set[Member]:
        now_ns = host.clock.mono_ns()
        if self._asked_ns is None or now_ns - self._asked_ns >= _AGAIN_NS:
            self._asked_ns = now_ns
            self._members.clear()
        for pid in pids - self._members.keys():
            try:
                data = host.read_bytes(f"proc/{pid}/cgroup", keep=False)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended; who watches it has noticed or will
            member = parse_member(data.decode("utf-8", "surrogateescape"))
            if member is not None:
                self._members[pid] = member
        return {self._members[pid] for pid in pids & self._members.keys()}


def _mount(host: Host, member: Member) -> str:
    """Return the directory that a hierarchy is mounted at."""
    names = (member.controllers, "memory") if member.version == 1 else ("", "unified")
    for name in names:
        directory = f"{_MOUNTS}/{name}".rstrip("/")
        try:
            host.stat(f"{directory}/cgroup.procs")
        except OSError:
            continue
        return directory
    return f"{_MOUNTS}/{names[0]}".rstrip("/")


def _row(host: Host, member: Member, mount: str, level: str) -> CgroupMemory | None:
    """Return the row of a level; None for one above the process's own that limits nothing."""
    files = _Files(host, f"{mount}{level}".rstrip("/"))
    if level != member.path:
        names = ("memory.max", "memory.high") if member.version == 2 else ("memory.limit_in_bytes",)
        if all(files.limit(name) is None for name in names):
            return None
    make_row = row_v2 if member.version == 2 else row_v1
    row = make_row(files, level, host.clock.mono_ns())
    # The root of version 2, and a level where the controller is off, tell nothing.
    return row if row.current_bytes is not None or row.anon_bytes is not None else None


def make() -> Collect:
    """Return the collector."""
    return _Memory()


CGROUP_MEMORY = Collector(
    name="cgroup_memory", lane="slow", make=make, thread="process", every_s=5.0
)
