"""Which mounts watched processes have files open on: what their loaders read from.

Source: the links of /proc/PID/fd and, for regular files, `mnt_id` and `flags` of /proc/PID/fdinfo
(proc_pid_fdinfo(5)); neither asks the file system, so that a hung server hangs nobody here.
Looking at all files of all processes would cost more than all else that is read of them, so that
they are looked at in turn. Maps are not read: those of a trainer have thousands of lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.mount_table import MountTable, Place
from whyidle.collect.process_text import parse_stat
from whyidle.collect.process_tree import ProcessTree
from whyidle.collect.watched import watched_pids
from whyidle.host import Answer, Host, NotRecordedError
from whyidle.schema import FileUse

# A run ends after so many open files or processes: about 0.4 ms.
_FILES_BUDGET = 96
_PROCESSES_BUDGET = 4
# Once all have been looked at: who has a file open now and then has it open again.
_SEEN_BUDGET = 2
# A process that holds thousands of files open is sampled from its newest.
_FILES_OF_ONE = 64
# New workers are found this late at most; listing /proc costs 0.3 us a process.
_SCAN_EVERY_NS = 2 * NS_PER_S
# A mount id that nobody lists makes its process's mounts be read again, not more often than this.
_MOUNTS_EVERY_NS = 5 * NS_PER_S
_MOUNTS_OLD_NS = 60 * NS_PER_S
_DENIED = (
    "not permitted to look at open files of other users' processes: needs CAP_SYS_PTRACE and "
    "CAP_DAC_READ_SEARCH"
)
# Open while a program starts, and no data.
_CODE = (".py", ".pyc", ".so", ".egg", ".whl")
_CODE_FOLDERS = ("/site-packages/", "/dist-packages/", "/lib/python")
_NO_DATA = ("/dev/", "/proc/", "/sys/", "/memfd:")
_ACCESS, _WRITE_ONLY = 0o3, 0o1
_PATH_ONLY, _DIRECTORY = 0o10000000, 0o200000


def parse_fdinfo(data: bytes) -> tuple[int, int]:
    """Return (flags, mount id) of an open file; raises ValueError."""
    found: dict[bytes, bytes] = {}
    for line in data.split(b"\n", 6)[:6]:
        name, _, value = line.partition(b":")
        found[name] = value.strip()
    try:
        return int(found[b"flags"], 8), int(found[b"mnt_id"])
    except (KeyError, ValueError):
        raise ValueError(f"fdinfo: {data[:60]!r} has no flags and mnt_id") from None


def is_data(path: str) -> bool:
    """Whether the link of a descriptor may lead to a file of data: a path, and not of code."""
    if not path.startswith("/") or path.startswith(_NO_DATA):
        return False
    return not path.endswith(_CODE) and not any(folder in path for folder in _CODE_FOLDERS)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What is kept of a process: its identity and its mounts."""

    start_ns: int
    mounts: dict[int, Place]
    mounts_ns: int
    # Flags and mount id of the files that were open at the last look, by (descriptor, path).
    files: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)


class _Looks:
    """Who is looked at next, and what is known of them."""

    __slots__ = ("_scanned_ns", "_seen", "_table", "_tree", "_turn")

    def __init__(self) -> None:
        self._tree = ProcessTree()
        self._table = MountTable()
        self._seen: dict[int, _Seen] = {}
        self._scanned_ns: int | None = None
        self._turn = 0

    def scan(self, host: Host, roots: set[int]) -> None:
        """Bring the list of watched processes up to date."""
        now_ns = host.clock.mono_ns()
        if self._scanned_ns is not None and now_ns - self._scanned_ns < _SCAN_EVERY_NS:
            return
        self._scanned_ns = now_ns
        for pid in self._tree.scan(host, roots):
            self._seen.pop(pid, None)

    def turn(self) -> list[int]:
        """Return the pids that are looked at now, beginning after the one that was last."""
        pids = sorted(self._tree.watched)
        later = [pid for pid in pids if pid > self._turn]
        budget = _SEEN_BUDGET if len(self._seen) >= len(pids) else _PROCESSES_BUDGET
        return [*later, *pids[: len(pids) - len(later)]][:budget]

    def begin(self, host: Host, pid: int) -> _Seen:
        """Return what is known of a process; raises OSError, ValueError."""
        self._turn = pid
        # The collector of processes keeps this open on the same thread.
        start_ns = parse_stat(host.read_bytes(f"proc/{pid}/stat")).start_ns
        seen = self._seen.get(pid)
        now_ns = host.clock.mono_ns()
        if seen is None or seen.start_ns != start_ns or now_ns - seen.mounts_ns > _MOUNTS_OLD_NS:
            seen = _Seen(start_ns=start_ns, mounts=self._mounts(host, pid), mounts_ns=now_ns)
            self._seen[pid] = seen
        return seen

    def place(self, host: Host, pid: int, seen: _Seen, mount_id: int) -> Place | None:
        """Return a mount; one that is not known was mounted since, or nobody lists it."""
        found = seen.mounts.get(mount_id)
        now_ns = host.clock.mono_ns()
        if found is None and now_ns - seen.mounts_ns >= _MOUNTS_EVERY_NS:
            seen.mounts, seen.mounts_ns = self._mounts(host, pid), now_ns
            found = seen.mounts.get(mount_id)
        return found

    def drop(self, pid: int) -> None:
        """Forget a process that ended."""
        self._tree.drop(pid)
        self._seen.pop(pid, None)
        self._scanned_ns = None

    def _mounts(self, host: Host, pid: int) -> dict[int, Place]:
        try:
            # First, so that the directories of overlays are looked for among the host's mounts.
            self._table.begin(host)
            return dict(self._table.read(host, str(pid)).places)
        except OSError:
            return {}  # not permitted or ended: its files come without a place


def make() -> Collect:
    """Return the collector."""
    looks = _Looks()

    def collect(host: Host) -> Iterator[FileUse | Problem]:
        gpu, commands = watched_pids(host)
        if gpu is None and not commands:
            raise NoData("no process is watched: NVML lists none and no command is recorded")
        looks.scan(host, {*(gpu or ()), *commands})
        files, denied = 0, False
        for pid in looks.turn():
            try:
                seen = looks.begin(host, pid)
                used = _used(host, pid, seen)
            except PermissionError:
                denied = True
                continue
            except (FileNotFoundError, ProcessLookupError):
                looks.drop(pid)
                continue
            except (OSError, ValueError) as error:
                yield Problem(subject=f"pid {pid}", message=str(error))
                continue
            yield from _rows(host, looks, pid, seen, used)
            files += 1 + sum(reads + writes for reads, writes in used.values())
            if files >= _FILES_BUDGET:
                break
        if denied:
            yield Problem(subject="open files", message=_DENIED)

    return collect


def _used(host: Host, pid: int, seen: _Seen) -> dict[int, tuple[int, int]]:
    """Return, by mount id, how many files of data are open for reading and for writing."""
    try:
        links = _links(host.ask("open_files", pid))
    except (KeyError, NotRecordedError):
        raise NoData("this recording of a machine has no list of open files") from None
    known, seen.files = seen.files, {}
    used: dict[int, tuple[int, int]] = {}
    for link in [link for link in links if is_data(link[1])][-_FILES_OF_ONE:]:
        info = known.get(link)
        if info is None:
            try:
                data = host.read_bytes(f"proc/{pid}/fdinfo/{link[0]}", keep=False)
            except FileNotFoundError:
                continue  # closed in between
            info = parse_fdinfo(data)
        flags, mount_id = seen.files[link] = info
        if flags & (_PATH_ONLY | _DIRECTORY):
            continue
        access = flags & _ACCESS
        reads, writes = used.get(mount_id, (0, 0))
        used[mount_id] = reads + (access != _WRITE_ONLY), writes + (access != 0)
    return used


def _links(answer: Answer) -> list[tuple[int, str]]:
    """Return (descriptor, path) pairs; raises ValueError."""
    if not isinstance(answer, tuple | list):
        raise ValueError(f"open files: {answer!r:.60} is no list")
    pairs = []
    for item in answer:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ValueError(f"open files: {item!r:.60} is no pair")
        number, path = item
        if not isinstance(number, int) or not isinstance(path, str):
            raise ValueError(f"open files: {item!r:.60} is no descriptor and path")
        pairs.append((number, path))
    return pairs


def _rows(
    host: Host, looks: _Looks, pid: int, seen: _Seen, used: dict[int, tuple[int, int]]
) -> Iterator[FileUse]:
    mono_ns = host.clock.mono_ns()
    counted: list[tuple[int | None, tuple[int, int]]] = [*used.items()] or [(None, (0, 0))]
    for mount_id, (reads, writes) in counted:
        place = None if mount_id is None else looks.place(host, pid, seen, mount_id)
        yield FileUse(
            mono_ns=mono_ns,
            pid=pid,
            start_ns=seen.start_ns,
            mount_id=mount_id,
            device=None if place is None else place.device,
            kind=None if place is None else place.kind,
            mount_point=None if place is None else place.mount_point,
            block_device=None if place is None else place.block_device,
            nvme_transport=None if place is None else place.nvme_transport,
            read_files=reads,
            write_files=writes,
        )


FILE_USE = Collector(name="file_use", lane="normal", make=make, thread="process")
