"""What /proc says of one process, read from text.

Source: https://docs.kernel.org/filesystems/proc.html (sections 1.1, 3.3), proc_pid_stat(5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from whyidle.collect.cpu import TICK_NS
from whyidle.collect.numbers import after, whole, wholes

# Fields of stat are numbered from 1 in its manual; the third is the first after the name.
_FIRST = 3
_LEAST_FIELDS = 22
_READ_FIELDS = 42 - _FIRST + 1
# A command line names a program and its options; what follows is file lists.
COMMAND_BYTES = 512

# Variables in the order in which they are believed: torchrun's own before the launcher's, which
# counts the processes that it started, and those may be torchrun.
_RANK = (
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "SLURM_PROCID",
)
_LOCAL_RANK = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
_WORLD_SIZE = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_NTASKS",
)
_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "TORCHELASTIC_RUN_ID")
_SLURM_JOB = re.compile(r"/job_(\d+)(?:/|$)")
_POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{27})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """/proc/PID/stat; times in ns, sizes in pages. None: this kernel does not print it."""

    pid: int
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
    words = data[closing + 1 :].split()
    if len(words) < _LEAST_FIELDS - _FIRST + 1:
        raise ValueError(f"stat: {len(words)} fields after the name, not at least 20")
    n = wholes(words[1:_READ_FIELDS], "stat")
    # n[0] is field 4, so field k is n[k - 4].
    return Stat(
        pid=whole(data[:opening].strip(), "stat: pid"),
        comm=data[opening + 1 : closing].decode("utf-8", "replace"),
        state=words[0].decode("ascii", "replace"),
        parent_pid=n[0],
        minor_faults=n[6],
        major_faults=n[8],
        user_ns=n[10] * TICK_NS,
        system_ns=n[11] * TICK_NS,
        reaped_user_ns=n[12] * TICK_NS,
        reaped_system_ns=n[13] * TICK_NS,
        threads=n[16],
        start_ns=n[18] * TICK_NS,
        last_cpu=n[35] if len(n) > 35 else None,
        blkio_delay_ns=n[38] * TICK_NS if len(n) > 38 else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """/proc/PID/status, the part that is read. None: not printed, as memory of a zombie."""

    user_id: int | None
    rss_bytes: int | None
    cpus_allowed: str | None
    numa_allowed: str | None
    voluntary_switches: int | None
    involuntary_switches: int | None


NO_STATUS = Status(
    user_id=None,
    rss_bytes=None,
    cpus_allowed=None,
    numa_allowed=None,
    voluntary_switches=None,
    involuntary_switches=None,
)


def parse_status(data: bytes) -> Status:
    """Return a process's status; Uid is the effective one."""
    uids = _line(data, b"\nUid:")
    rss = _line(data, b"\nVmRSS:")
    return Status(
        user_id=None if uids is None else whole(_word(uids, 1), "status: Uid"),
        rss_bytes=None if rss is None else whole(_word(rss, 0), "status: VmRSS") * 1024,
        cpus_allowed=_line(data, b"\nCpus_allowed_list:"),
        numa_allowed=_line(data, b"\nMems_allowed_list:"),
        voluntary_switches=after(data, b"voluntary_ctxt_switches:", "status: voluntary switches"),
        involuntary_switches=after(
            data, b"nonvoluntary_ctxt_switches:", "status: involuntary switches"
        ),
    )


def _line(data: bytes, name: bytes) -> str | None:
    at = data.find(name)
    if at < 0:
        return None
    at += len(name)
    end = data.find(b"\n", at)
    return data[at : end if end >= 0 else len(data)].strip().decode("ascii", "replace")


def _word(text: str, index: int) -> str:
    words = text.split()
    return words[index] if index < len(words) else ""


def parse_schedstat(data: bytes) -> tuple[int, int]:
    """Return time on a CPU and time ready without one, in ns, of the main thread."""
    numbers = wholes(data.split()[:2], "schedstat")
    if len(numbers) < 2:
        raise ValueError(f"schedstat: {data[:40]!r} has fewer than two numbers")
    return numbers[0], numbers[1]


def parse_io(data: bytes) -> tuple[int | None, int | None, int | None, int | None]:
    """Return rchar, wchar, read_bytes and write_bytes, in bytes."""
    return (
        after(data, b"rchar: ", "io: rchar"),
        after(data, b"wchar: ", "io: wchar"),
        after(data, b"read_bytes: ", "io: read_bytes"),
        after(data, b"write_bytes: ", "io: write_bytes"),
    )


def parse_command(data: bytes) -> str | None:
    """Return the command line in one line; None for a kernel thread or a zombie."""
    words = data[:COMMAND_BYTES].rstrip(b"\0").replace(b"\0", b" ")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process's environment at its exec says of its job; None where it says nothing."""

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    job: str | None = None


def parse_environ(data: bytes) -> Job:
    """Return the ranks and the job of an environment; values that are no numbers are None."""
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals:
            found[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    job = _first(found, _JOB)
    return Job(
        rank=_number(_first(found, _RANK)),
        local_rank=_number(_first(found, _LOCAL_RANK)),
        world_size=_number(_first(found, _WORLD_SIZE)),
        job=None if job == "none" else job,  # torchrun without --rdzv-id says "none"
    )


def _first(found: dict[str, str], names: tuple[str, ...]) -> str | None:
    return next((found[name] for name in names if found.get(name)), None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def job_of_cgroup(path: str) -> str | None:
    """Return the Slurm job id or the Kubernetes pod uid in the path of a cgroup."""
    if (slurm := _SLURM_JOB.search(path)) is not None:
        return slurm[1]
    if (pod := _POD.search(path)) is not None:
        return pod[1].replace("_", "-")
    return None
