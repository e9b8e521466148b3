"""Makes the counter page of this process, and writes into it.

The file is reserved in full before it is mapped: a hole in a full tmpfs would kill the trainer with
SIGBUS on the first write. Nothing here waits for anybody.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from itertools import count

from whyidle_probe import layout as at
from whyidle_probe.identity import Identity, boot_id, start_ns

# How many names a look for left-over pages reads: a folder of a stranger may hold a million.
_SWEEP_LIMIT = 256
# A page that was never filled, because the folder was full, stays as long for the agent to see.
_EMPTY_KEPT_S = 600
_RECORD = struct.Struct("<7q")
_HEADER = struct.Struct("<12q")


class Page:
    """A mapped page. `slots` is the page as 64-bit numbers; storing one is a single store."""

    __slots__ = ("_header", "_map", "_next", "_next_call", "path", "slots")

    def __init__(self, folder: str, identity: Identity, torch_version: str) -> None:
        """Make the file; raises OSError, with nothing left but perhaps an empty file."""
        page_id = os.urandom(16).hex()
        self.path = os.path.join(folder, _uuid(page_id) + at.SUFFIX)  # noqa: PTH118
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path, flags, 0o644)
        try:
            # Left empty where there is no room: that is how the agent learns of it.
            os.posix_fallocate(fd, 0, at.PAGE_BYTES)
            # The agent is another user, whatever the umask of this one.
            os.fchmod(fd, 0o644)
            self._map = mmap.mmap(fd, at.PAGE_BYTES)
        finally:
            os.close(fd)
        self.slots = memoryview(self._map).cast("q")
        self._next = count(1)
        self._next_call = count(1)
        self._header = bytearray(at.HEADER_BYTES)
        self._fill(identity, page_id, torch_version)

    def _fill(self, who: Identity, page_id: str, torch_version: str) -> None:
        numbers = (
            at.VERSION,
            at.PAGE_BYTES,
            who.pid,
            who.pid_namespace,
            who.start_ns,
            who.user_id,
            time.monotonic_ns(),
            _known(who.rank),
            _known(who.world_size),
            _known(who.local_rank),
            who.parent_pid,
        )
        _HEADER.pack_into(self._header, 0, 0, *numbers)
        for field, text in (
            (at.TEXT_BOOT_ID, who.boot_id),
            (at.TEXT_PAGE_ID, page_id),
            (at.TEXT_PYTHON, who.python),
            (at.TEXT_TORCH, torch_version),
        ):
            _put_text(self._header, field, text)
        for slot in (at.STEPS, at.OPTIMIZER_STEPS, at.LAST_STEP_NS):
            self.slots[slot] = at.UNKNOWN
        self._write_header()
        self._map[0:8] = at.MAGIC

    def learn_ranks(self, rank: int | None, world_size: int | None) -> None:
        """Put ranks into the header that became known only now."""
        struct.pack_into("<2q", self._header, at.HEADER_RANK * 8, _known(rank), _known(world_size))
        self._write_header()

    def learn_torch(self, version: str) -> None:
        """Put torch's version into the header."""
        _put_text(self._header, at.TEXT_TORCH, version)
        self._write_header()

    def name_phase(self, kind: int, name: str) -> None:
        """Put the name of a phase into the header."""
        offset = at.TEXT_PHASES[0] + (kind - at.PHASE_TOLD) * at.PHASE_NAME_BYTES
        _put_text(self._header, (offset, at.PHASE_NAME_BYTES), name)
        self._write_header()

    def _write_header(self) -> None:
        end = at.HEADER_CRC * at.SLOT_BYTES
        # Between the two stores a reader sees a wrong checksum, and looks again later.
        self._map[8:end] = bytes(self._header[8:end])
        self.slots[at.HEADER_CRC] = zlib.crc32(self._header[8:end])

    def record(self, kind: int, begin_ns: int, end_ns: int, a: int, b: int, c: int) -> None:
        """Add a record to the ring. Threads that do so at once write in different places."""
        sequence = next(self._next)
        data = _RECORD.pack(sequence, kind, begin_ns, end_ns, a, b, c)
        place = at.RING_AT_BYTES + sequence % at.RING_RECORDS * at.RING_BYTES
        # The last slot is four bytes of checksum and four of zero.
        self._map[place : place + at.RING_BYTES] = data + zlib.crc32(data).to_bytes(8, "little")
        self.slots[at.SEQUENCE] = sequence

    def record_call(
        self, kind: int, begin_ns: int, end_ns: int, number: int, waited_ns: int, size_bytes: int
    ) -> None:
        """Add a record of a call on a process group, in the same way."""
        sequence = next(self._next_call)
        data = _RECORD.pack(sequence, kind, begin_ns, end_ns, number, waited_ns, size_bytes)
        place = at.CALLS_AT_BYTES + sequence % at.CALL_RECORDS * at.RING_BYTES
        self._map[place : place + at.RING_BYTES] = data + zlib.crc32(data).to_bytes(8, "little")
        self.slots[at.CALL_SEQUENCE] = sequence

    def close(self) -> None:
        """Say that the process ends, and take the name away; who has the page open reads on."""
        self.slots[at.CLOSED_NS] = time.monotonic_ns()
        os.unlink(self.path)  # noqa: PTH108

    def let_go(self) -> memoryview:
        """Return slots that nobody reads, for the child of a fork: the page is its parent's."""
        self.slots = memoryview(bytearray(at.PAGE_BYTES)).cast("q")
        return self.slots


def _uuid(digits: str) -> str:
    # Without the uuid module, which every process would import for this line.
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _known(value: int | None) -> int:
    return at.UNKNOWN if value is None else value


def _put_text(header: bytearray, field: tuple[int, int], text: str) -> None:
    offset, size = field
    data = text.encode("utf-8", "replace")[:size]
    header[offset : offset + size] = data.ljust(size, b"\0")


def sweep(folder: str) -> None:
    """Delete pages that dead processes of this user left in a folder; raises OSError."""
    boot, namespace = boot_id(), os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    user_id = os.geteuid()
    with os.scandir(folder) as entries:
        for entry, _ in zip(entries, range(_SWEEP_LIMIT)):  # noqa: B905 - Python 3.9
            if not entry.name.endswith(at.SUFFIX):
                continue
            try:
                found = entry.stat(follow_symlinks=False)
                if found.st_uid == user_id and _left_over(entry.path, found, boot, namespace):
                    os.unlink(entry.path)  # noqa: PTH108
            except (OSError, ValueError, IndexError):
                continue


def _left_over(path: str, found: os.stat_result, boot: str, namespace: int) -> bool:
    if found.st_size == 0:
        return time.time() - found.st_mtime > _EMPTY_KEPT_S
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        header = os.pread(fd, at.HEADER_BYTES, 0)
    finally:
        os.close(fd)
    if len(header) < at.HEADER_BYTES or header[:8] != at.MAGIC:
        return False  # not ours, or being made just now
    offset, size = at.TEXT_BOOT_ID
    if header[offset : offset + size].rstrip(b"\0").decode("ascii", "replace") != boot:
        return True
    numbers: tuple[int, ...] = _HEADER.unpack_from(header)
    if numbers[at.HEADER_PID_NAMESPACE] != namespace:
        return False  # nobody here can tell whether it lives
    try:
        return start_ns(numbers[at.HEADER_PID]) != numbers[at.HEADER_START_NS]
    except FileNotFoundError:
        return True
