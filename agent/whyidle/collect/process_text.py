"""What /proc says of one process, read from text.

Source: https://docs.kernel.org/filesystems/proc.html (sections 1.1, 3.3), proc_pid_stat(5).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from whyidle.collect.cpu import TICK_NS
from whyidle.collect.numbers import after, whole
from whyidle.collect.process_secrets import mask_command

# Fields of stat are numbered from 1 in its manual; the third is the first after the name.
_FIRST = 3
_LEAST_FIELDS = 22
# The fields that are kept, of those that every kernel since 2.6.18 prints: parent, faults, times,
# threads, start, CPU, block I/O. All from the fourth on are whole numbers.
_NUMBERS = 4
_KEPT = operator.itemgetter(
    *(field - _NUMBERS for field in (4, 10, 12, 14, 15, 16, 17, 20, 22, 39, 42))
)
# Splitting 50 words and making numbers of eleven takes 5.4 us, this 3.2 for all of them.
_INTEGERS = msgspec.json.Decoder(list[int])
# Of /proc/PID/io, as every kernel since 2.6.20 prints it.
_IO_WORDS = 14
# A command line names a program and its options; what follows is file lists.
COMMAND_BYTES = 512


class Stat(NamedTuple):
    """/proc/PID/stat; times in ns. None: this kernel does not print it.

    A named tuple is made in a third of a frozen dataclass's time, and one is made for each reading.
    """

    comm: str
    state: str
    parent_pid: int
    minor_faults: int
    major_faults: int
    user_ns: int
    system_ns: int
    reaped_user_ns: int
    reaped_system_ns: int
    threads: int
    start_ns: int
    last_cpu: int | None
    blkio_delay_ns: int | None


def parse_stat(data: bytes) -> Stat:
    """Return a process's stat; its name may hold spaces and parentheses."""
    opening, closing = data.find(b"("), data.rfind(b")")
    if opening < 0 or closing < opening:
        raise ValueError(f"stat: {data[:40]!r} has no name in parentheses")
    comm = data[opening + 1 : closing].decode("utf-8", "replace")
    try:
        (up, minor, major, user, system, cuser, csystem, threads, start, cpu, blkio) = _KEPT(
            _INTEGERS.decode(b"[%b]" % data[closing + 4 :].rstrip().replace(b" ", b","))
        )
    except (IndexError, msgspec.MsgspecError):
        return _short_stat(comm, data[closing + 1 :].split())
    return Stat(
        comm,
        data[closing + 2 : closing + 3].decode("ascii", "replace"),
        up,
        minor,
        major,
        user * TICK_NS,
        system * TICK_NS,
        cuser * TICK_NS,
        csystem * TICK_NS,
        threads,
        start * TICK_NS,
        cpu,
        blkio * TICK_NS,
    )


def _short_stat(comm: str, words: list[bytes]) -> Stat:
    """Return the stat of an older kernel, or say what is wrong with it."""
    if len(words) < _LEAST_FIELDS - _FIRST + 1:
        raise ValueError(f"stat: {len(words)} fields after the name, not at least 20")
    try:
        # Field k is words[k - 3]; only those that are kept are turned into numbers.
        return Stat(
            comm=comm,
            state=words[0].decode("ascii", "replace"),
            parent_pid=int(words[1]),
            minor_faults=int(words[7]),
            major_faults=int(words[9]),
            user_ns=int(words[11]) * TICK_NS,
            system_ns=int(words[12]) * TICK_NS,
            reaped_user_ns=int(words[13]) * TICK_NS,
            reaped_system_ns=int(words[14]) * TICK_NS,
            threads=int(words[17]),
            start_ns=int(words[19]) * TICK_NS,
            last_cpu=int(words[36]) if len(words) > 36 else None,
            blkio_delay_ns=int(words[39]) * TICK_NS if len(words) > 39 else None,
        )
    except ValueError:
        raise ValueError(f"stat: {words[:40]!r:.80} are not whole numbers") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """/proc/PID/status, the part that is read. None: not printed, as memory of a zombie."""

    user_id: int | None
    rss_bytes: int | None
    cpus_allowed: str | None
    numa_allowed: str | None
    voluntary_switches: int | None
    involuntary_switches: int | None
    fixed: bytes = b""
    """The text of what rarely changes, to tell whether it has."""


NO_STATUS = Status(
    user_id=None,
    rss_bytes=None,
    cpus_allowed=None,
    numa_allowed=None,
    voluntary_switches=None,
    involuntary_switches=None,
)


def parse_status(data: bytes, before: Status | None = None) -> Status:
    """Return a process's status; Uid is the effective one.

    `before` is what the same process's status was last: what rarely changes is taken over if it is
    the same, which halves the cost of reading a process.
    """
    at_uid = max(0, data.find(b"\nUid:"))
    at_lists = max(0, data.find(b"\nCpus_allowed_list:"))
    at_switches = data.find(b"\nvoluntary_ctxt_switches:", at_lists)
    fixed = data[at_uid : data.find(b"\n", at_uid + 1) + 1] + data[at_lists:at_switches]
    if before is not None and before.fixed == fixed:
        user_id, cpus, numa = before.user_id, before.cpus_allowed, before.numa_allowed
    else:
        uids = _line(fixed, b"Uid:")
        user_id = None if uids is None else whole("".join(uids.split()[1:2]), "status: Uid")
        cpus = _line(fixed, b"Cpus_allowed_list:")
        numa = _line(fixed, b"Mems_allowed_list:")
    voluntary, involuntary = _switches(data[at_switches:]) if at_switches >= 0 else (None, None)
    at_rss = data.find(b"\nVmRSS:")
    rss = None
    if at_rss >= 0:
        rss = whole(data[at_rss + 7 : data.find(b" kB", at_rss)], "status: VmRSS") * 1024
    return Status(
        user_id=user_id,
        rss_bytes=rss,
        cpus_allowed=cpus,
        numa_allowed=numa,
        voluntary_switches=voluntary,
        involuntary_switches=involuntary,
        fixed=fixed,
    )


def _switches(tail: bytes) -> tuple[int | None, int | None]:
    words = tail.split(None, 4)
    voluntary = whole(words[1], "status: voluntary switches") if len(words) > 1 else None
    named = len(words) > 3 and words[2] == b"nonvoluntary_ctxt_switches:"
    return voluntary, whole(words[3], "status: involuntary switches") if named else None


def _line(data: bytes, name: bytes) -> str | None:
    at = data.find(b"\n" + name)
    if at < 0:
        return None
    at += len(name) + 1
    end = data.find(b"\n", at)
    return data[at : end if end >= 0 else len(data)].strip().decode("ascii", "replace")


def parse_schedstat(data: bytes) -> tuple[int, int]:
    """Return time on a CPU and time ready without one, in ns, of the main thread."""
    words = data.split(None, 2)
    if len(words) < 2:
        raise ValueError(f"schedstat: {data[:40]!r} has fewer than two numbers")
    try:
        return int(words[0]), int(words[1])
    except ValueError:
        return whole(words[0], "schedstat"), whole(words[1], "schedstat")


# rchar, wchar, read_bytes and write_bytes of /proc/PID/io; None: not printed.
Io = tuple["int | None", "int | None", "int | None", "int | None"]
NO_IO: Io = (None, None, None, None)


def parse_io(data: bytes) -> Io:
    """Return rchar, wchar, read_bytes and write_bytes, in bytes."""
    words = data.split()
    if len(words) == _IO_WORDS and words[0] == b"rchar:" and words[8] == b"read_bytes:":
        try:
            return int(words[1]), int(words[3]), int(words[9]), int(words[11])
        except ValueError:
            pass  # what follows names the field
    return (
        after(data, b"rchar: ", "io: rchar"),
        after(data, b"wchar: ", "io: wchar"),
        after(data, b"read_bytes: ", "io: read_bytes"),
        after(data, b"write_bytes: ", "io: write_bytes"),
    )


def parse_command(data: bytes) -> str | None:
    """Return the command line without secrets, in one line; None: a kernel thread or a zombie."""
    words = mask_command(data)[:COMMAND_BYTES].rstrip(b"\0").replace(b"\0", b" ")
    return words.decode("utf-8", "replace") or None


def count_list(text: str) -> int | None:
    """Return how many a list such as 0-3,8 names; None if it is no such list."""
    count = 0
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            return None
        count += int(high) - int(low) + 1 if dash else 1
    return count
