"""Counters of the processes of a job: the GPUs' processes and all that descend from them.

Source: /proc/PID/{stat,schedstat,io,status,wchan}, kept open: a kept descriptor never answers for
another process that got the same number. Identity is (pid, start time). The kernel adds the I/O and
CPU time of children that ended to their parent's when it waits for them: `read_bytes` of a trainer
jumps by all that its workers read, and adding both counts twice. Where a trainer has many workers,
some of them are read each second, in turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.process_known import Known, Profile
from whyidle.collect.process_text import (
    NO_IO,
    NO_STATUS,
    Io,
    Stat,
    Status,
    parse_io,
    parse_schedstat,
    parse_status,
)
from whyidle.collect.process_tree import WATCHED_LIMIT, ProcessTree
from whyidle.collect.watched import watched_pids
from whyidle.host import Host
from whyidle.schema import Process, ProcessInfo

# Memory, switches and affinity move slowly, and status is the dearest file: 7 us of 15 a process.
_STATUS_EVERY_NS = 5 * NS_PER_S
# A refusal costs an open each time, and rights change rarely.
_DENIED_NS = 60 * NS_PER_S
_NO_IO = (
    "not permitted to read /proc/PID/io of other users: needs CAP_SYS_PTRACE and "
    "CAP_DAC_READ_SEARCH"
)


def make() -> Collect:
    """Return the collector, with the processes that it knows."""
    tree = ProcessTree()
    known = Known()

    def collect(host: Host) -> Iterator[Process | ProcessInfo | Problem]:
        gpu, commands = watched_pids(host)
        if gpu is None and not commands:
            raise NoData("no process is watched: NVML lists none and no command is recorded")
        for pid in tree.scan(host, {*(gpu or ()), *commands}):
            known.drop(host, pid)
        known.begin(host, frozenset(gpu or ()))
        for pid in sorted(tree.watched):
            if known.rests(pid):
                continue
            try:
                process, info = _read(host, known, pid)
            except (FileNotFoundError, ProcessLookupError):
                tree.drop(pid)
                known.drop(host, pid)
                continue
            except (OSError, ValueError) as error:
                yield Problem(subject=f"pid {pid}", message=str(error))
                continue
            yield process
            if info is not None:
                yield info
        if known.io_denied:
            yield Problem(subject="io", message=_NO_IO)
        if tree.overflow:
            yield Problem(
                subject="processes",
                message=f"more than {WATCHED_LIMIT} processes; the others are not recorded",
            )

    return collect


def _read(host: Host, known: Known, pid: int) -> tuple[Process, ProcessInfo | None]:
    """Return the rows of a process; raises FileNotFoundError, ProcessLookupError when it ended."""
    profile, stat = known.stat_of(host, pid)
    run_ns, delay_ns = _schedstat(host, profile)
    rchar, wchar, read, write = _io(host, profile, stat, run_ns)
    mono_ns = host.clock.mono_ns()
    status = NO_STATUS if mono_ns < profile.status_due_ns else _status(host, profile, mono_ns)
    info = profile.learn(host, known, stat, mono_ns)
    process = Process(
        mono_ns=mono_ns,
        pid=pid,
        start_ns=stat.start_ns,
        parent_pid=stat.parent_pid,
        kind=profile.kind,
        state=stat.state,
        wait_channel=_wait_channel(host, profile, stat.state, run_ns),
        user_ns=stat.user_ns,
        system_ns=stat.system_ns,
        main_run_ns=run_ns,
        main_run_delay_ns=delay_ns,
        blkio_delay_ns=known.blkio_delay_ns(stat),
        reaped_user_ns=stat.reaped_user_ns,
        reaped_system_ns=stat.reaped_system_ns,
        minor_faults=stat.minor_faults,
        major_faults=stat.major_faults,
        threads=stat.threads,
        last_cpu=stat.last_cpu,
        rss_bytes=status.rss_bytes,
        voluntary_switches=status.voluntary_switches,
        involuntary_switches=status.involuntary_switches,
        read_bytes=read,
        write_bytes=write,
        rchar_bytes=rchar,
        wchar_bytes=wchar,
    )
    return process, info


def _status(host: Host, profile: Profile, now_ns: int) -> Status:
    """Return status, which costs as much as the other files together, and say when it is due."""
    # Processes that were met together are not all due together.
    wait_ns = _STATUS_EVERY_NS if profile.status_due_ns else profile.pid % 5 * NS_PER_S + 1
    profile.status_due_ns = now_ns + wait_ns
    try:
        found = parse_status(host.read_bytes(profile.paths.status), profile.status)
    except FileNotFoundError:
        return NO_STATUS  # it ended just now, or a recorded tree is without it
    profile.status = found
    return found


def _schedstat(host: Host, profile: Profile) -> tuple[int | None, int | None]:
    try:
        return parse_schedstat(host.read_bytes(profile.paths.schedstat))
    except FileNotFoundError:
        return None, None  # CONFIG_SCHED_INFO is off


def _io(host: Host, profile: Profile, stat: Stat, run_ns: int | None) -> Io:
    """Return what a process read and wrote.

    One of a single thread that sleeps, and has not run since it was asked, has done neither.
    """
    ran_ns, io = profile.io
    if run_ns is not None and run_ns == ran_ns and stat.threads == 1 and stat.state != "R":
        return io
    denied_ns = profile.io_denied_ns
    if denied_ns is not None and host.clock.mono_ns() - denied_ns < _DENIED_NS:
        return NO_IO
    try:
        found = parse_io(host.read_bytes(profile.paths.io))
    except PermissionError:
        profile.io_denied_ns = host.clock.mono_ns()
        return NO_IO
    except FileNotFoundError:
        return NO_IO  # CONFIG_TASK_IO_ACCOUNTING is off
    profile.io_denied_ns = None
    profile.io = (None if None in found else run_ns, found)
    return found


def _wait_channel(host: Host, profile: Profile, state: str, run_ns: int | None) -> str | None:
    """Return where the main thread sleeps.

    The kernel unwinds its stack for that, so that it is asked only if the thread ran since: one
    that did not, sleeps where it did.
    """
    if state == "R":
        return None
    ran_ns, slept_in = profile.asleep
    if run_ns is not None and run_ns == ran_ns:
        return slept_in
    try:
        name = host.read(profile.paths.wchan)
    except OSError:
        return None  # refused by some hardened kernels
    # The kernel prints 0 for a task that runs, and for one that we may not look at.
    channel = name if name not in ("", "0") else None
    profile.asleep = (run_ns if channel else None, channel)
    return channel


PROCESS = Collector(name="process", lane="normal", make=make, thread="process")
