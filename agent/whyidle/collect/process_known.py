"""What is known of watched processes, and when it is told again.

Command line, environment, cgroup and thread names change rarely and cost more than the counters, so
they are read when a process is met, when its name changes, and once a minute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from whyidle.clock import NS_PER_S
from whyidle.collect.cgroup_text import parse_membership
from whyidle.collect.namespace import net_namespace
from whyidle.collect.process_job import Job, job_of_cgroup, parse_environ
from whyidle.collect.process_kind import (
    DATA_WORKER,
    Facts,
    families,
    kind_of,
)
from whyidle.collect.process_layout import parse_layout
from whyidle.collect.process_text import (
    NO_IO,
    NO_STATUS,
    Io,
    Stat,
    count_list,
    parse_command,
    parse_stat,
)
from whyidle.host import Host
from whyidle.schema import ProcessInfo

_AGAIN_NS = 60 * NS_PER_S
# Reading the names of a rank's 300 threads costs 1.5 ms: only when their number has changed, and
# not more often than this.
_THREADS_EVERY_NS = 5 * NS_PER_S
_THREADS_LIMIT = 512
_DELAY_EVERY_NS = 10 * NS_PER_S
# Workers of a trainer that are all read each second: of a loader with more they take turns, each at
# least every third. What they did is told of six seconds and of all together, so that two or three
# readings a second serve as well as eight; those cost 0.2 % of a core more, on a node of 64.
_WORKERS_ALL = 4
_WORKERS_EACH = 3
_TURNS_MOST = 3
# Readings of a new worker before it takes turns: it may live no longer than an epoch.
_FIRST_LOOKS = 10


class Paths(NamedTuple):
    """The files of a process that are read each time, spelled once."""

    stat: str
    schedstat: str
    io: str
    status: str
    wchan: str


class Profile:
    """A watched process: identity, facts, and the last row that told of them."""

    __slots__ = (
        "_again_ns",
        "_cgroup",
        "_facts",
        "_job",
        "_layout",
        "_namespace",
        "_seen",
        "_settled",
        "_threads_count",
        "_threads_ns",
        "_told",
        "asleep",
        "io",
        "io_denied_ns",
        "kind",
        "kind_seen",
        "looks",
        "parent_pid",
        "paths",
        "pid",
        "start_ns",
        "stat",
        "stat_text",
        "status",
        "status_due_ns",
    )

    def __init__(self, pid: int, stat: Stat) -> None:
        self.pid = pid
        self.paths = Paths(*(f"proc/{pid}/{name}" for name in Paths._fields))
        self.start_ns = stat.start_ns
        self.parent_pid = stat.parent_pid
        self.kind: str | None = None
        # How often it was read.
        self.looks = 0
        # What the kind was told from.
        self.kind_seen: tuple[object, ...] = ()
        # When its I/O was refused last; None: it was not.
        self.io_denied_ns: int | None = None
        # How long its main thread had run when its wait channel was read, and the channel.
        self.asleep: tuple[int | None, str | None] = (None, None)
        # The same of the numbers of io.
        self.io: tuple[int | None, Io] = (None, NO_IO)
        # The last stat, as text and as read from it: that of one who sleeps stays the same.
        self.stat_text = b""
        self.stat = stat
        self.status = NO_STATUS
        self.status_due_ns = 0
        self._facts = Facts(comm="", command=None, has_gpu=False)
        self._cgroup: str | None = None
        self._namespace: str | None = None
        self._job = Job()
        self._layout: str | None = None
        self._again_ns: int | None = None
        self._settled = False
        self._threads_ns: int | None = None
        self._threads_count = 1
        self._told: tuple[object, ...] = ()
        # What the last look at all this was made for, () if it is not done with it.
        self._seen: tuple[object, ...] = ()

    @property
    def facts(self) -> Facts:
        """What its kind is told from."""
        return self._facts

    def learn(self, host: Host, known: Known, stat: Stat, mono_ns: int) -> ProcessInfo | None:
        """Bring the facts up to date; return a row when they changed or a minute has passed."""
        has_gpu = self.pid in known.gpu
        seen = (stat.comm, stat.threads, stat.parent_pid, has_gpu, self.status, known.version)
        if seen == self._seen and self._again_ns is not None and mono_ns < self._again_ns:
            return None
        self.parent_pid = stat.parent_pid
        again = self._again_ns is None or mono_ns >= self._again_ns
        if again or stat.comm != self._facts.comm or not self._settled:
            # Read twice at first: met between fork and exec, it looks like another of its parent.
            self._settled = self._again_ns is not None
            self._read(host)
        threads, waits = self._families(host, stat, mono_ns)
        facts, kind = self._facts, self.kind
        if (stat.comm, has_gpu, threads) != (facts.comm, facts.has_gpu, facts.threads):
            self._facts = Facts(
                comm=stat.comm, command=facts.command, has_gpu=has_gpu, threads=threads
            )
        self.kind = known.kind_of(self)
        if self.kind != kind or self._facts is not facts:
            known.version += 1  # its kin may be of another kind by that
        self._seen = seen if self._settled and not waits else ()
        tells = (self.kind, self._facts, self._cgroup, self._job, self.status.cpus_allowed)
        if not again and tells == self._told:
            return None
        self._told = tells
        self._again_ns = mono_ns + _AGAIN_NS if again else self._again_ns
        return self._row(mono_ns)

    def _read(self, host: Host) -> None:
        self.asleep, self.io = (None, None), (None, NO_IO)
        directory = f"proc/{self.pid}"
        command = _read(host, f"{directory}/cmdline")
        self._facts = Facts(
            comm=self._facts.comm,
            command=None if command is None else parse_command(command),
            has_gpu=self._facts.has_gpu,
            threads=self._facts.threads,
        )
        self._layout = None if command is None else parse_layout(command)
        environ = _read(host, f"{directory}/environ")
        self._job = Job() if environ is None else parse_environ(environ)
        cgroup = _read(host, f"{directory}/cgroup")
        member = None if cgroup is None else parse_membership(cgroup.decode("utf-8", "replace"))
        self._cgroup = None if member is None else member.path
        try:
            self._namespace = net_namespace(host, self.pid)
        except OSError:
            self._namespace = None  # not permitted, or it has just ended: as NULL

    def _families(self, host: Host, stat: Stat, mono_ns: int) -> tuple[frozenset[str], bool]:
        """Return the families of its threads, and whether to look for others before long."""
        if stat.threads < 2 or self.kind == DATA_WORKER or stat.threads == self._threads_count:
            return self._facts.threads, False
        if self._threads_ns is not None and mono_ns - self._threads_ns < _THREADS_EVERY_NS:
            return self._facts.threads, True
        self._threads_ns = mono_ns
        self._threads_count = stat.threads
        return self._facts.threads | families(_thread_names(host, self.pid)), False

    def _row(self, mono_ns: int) -> ProcessInfo:
        cpus = self.status.cpus_allowed
        job = self._job.job
        if job is None and self._cgroup is not None:
            job = job_of_cgroup(self._cgroup)
        return ProcessInfo(
            mono_ns=mono_ns,
            pid=self.pid,
            start_ns=self.start_ns,
            parent_pid=self.parent_pid,
            kind=self.kind,
            comm=self._facts.comm,
            command=self._facts.command,
            parallel_options=self._layout,
            rank=self._job.rank,
            local_rank=self._job.local_rank,
            world_size=self._job.world_size,
            local_world_size=self._job.local_world_size,
            node_rank=self._job.node_rank,
            restarts=self._job.restarts,
            job=job,
            job_name=self._job.job_name,
            job_step=self._job.job_step,
            pod=self._job.pod,
            pod_namespace=self._job.pod_namespace,
            user_id=self.status.user_id,
            cgroup=self._cgroup,
            cpus_allowed=cpus,
            cpus_allowed_count=None if cpus is None else count_list(cpus),
            numa_allowed=self.status.numa_allowed,
            net_namespace=self._namespace,
            thread_kinds=",".join(sorted(self._facts.threads)) or None,
        )


class Known:
    """The profiles of all watched processes, by pid."""

    __slots__ = (
        *("_delay_ns", "_named", "_naming_parents", "_profiles", "_run", "_turns"),
        *("delay_accounting", "gpu", "version"),
    )

    def __init__(self) -> None:
        self._profiles: dict[int, Profile] = {}
        self._naming_parents: frozenset[int] = frozenset()
        self._run = 0
        # Of workers that take turns: in which runs each is read, as (every so many, the first).
        self._turns: dict[int, tuple[int, int]] = {}
        # Counts what may change the kind of another: who is known, and of what kind.
        self.version = 0
        self._named = -1
        self._delay_ns: int | None = None
        self.gpu: frozenset[int] = frozenset()
        # None: this kernel does not say whether it is on.
        self.delay_accounting: bool | None = None

    def begin(self, host: Host, gpu: frozenset[int]) -> None:
        """Begin a run: `gpu` are the pids with a GPU context."""
        self.gpu = gpu
        self._run += 1
        if self._named != self.version:
            self._named = self.version
            self._naming_parents = frozenset(
                profile.parent_pid
                for profile in self._profiles.values()
                if profile.facts.comm == "pt_data_worker"
            )
            self._turns = _turns(self._profiles.values())
        now_ns = host.clock.mono_ns()
        if self._delay_ns is None or now_ns - self._delay_ns >= _DELAY_EVERY_NS:
            self._delay_ns = now_ns
            switch = _read(host, "proc/sys/kernel/task_delayacct")
            self.delay_accounting = None if switch is None else switch.strip() == b"1"

    def rests(self, pid: int) -> bool:
        """Whether a process is not to be read in this run: it is a worker, and others' turn."""
        turn = self._turns.get(pid)
        if turn is None or self._profiles[pid].looks < _FIRST_LOOKS:
            return False
        return self._run % turn[0] != turn[1]

    def stat_of(self, host: Host, pid: int) -> tuple[Profile, Stat]:
        """Return a process's profile and its stat.

        Raises OSError, ValueError; ProcessLookupError if its pid was used again.
        """
        profile = self._profiles.get(pid)
        if profile is not None:
            profile.looks += 1
        if profile is None:
            text = host.read_bytes(f"proc/{pid}/stat")
            stat = parse_stat(text)
            profile = self._profiles[pid] = Profile(pid, stat)
            self.version += 1
        else:
            text = host.read_bytes(profile.paths.stat)
            if text == profile.stat_text:
                return profile, profile.stat
            stat = parse_stat(text)
            if profile.start_ns != stat.start_ns:
                raise ProcessLookupError(3, "the pid belongs to another process now", str(pid))
        profile.stat_text, profile.stat = text, stat
        return profile, stat

    @property
    def io_denied(self) -> bool:
        """Whether the I/O of some process was refused."""
        return any(profile.io_denied_ns is not None for profile in self._profiles.values())

    def drop(self, host: Host, pid: int) -> None:
        """Forget a process that ended."""
        if self._profiles.pop(pid, None) is not None:
            self.version += 1
            self._turns.pop(pid, None)
        host.forget(f"proc/{pid}/")

    def kind_of(self, profile: Profile) -> str | None:
        """Return the kind of a process among its kin."""
        parent = self._profiles.get(profile.parent_pid)
        facts = None if parent is None else parent.facts
        parent_kind = None if parent is None else parent.kind
        named = profile.parent_pid in self._naming_parents
        seen = (profile.facts, facts, parent_kind, named)
        if seen != profile.kind_seen:
            profile.kind_seen = seen
            profile.kind = kind_of(
                profile.facts, parent=facts, parent_kind=parent_kind, named_sibling=named
            )
        return profile.kind

    def blkio_delay_ns(self, stat: Stat) -> int | None:
        """Return the wait for block I/O, None where nothing counts it.

        The field is printed as 0 where delay accounting is off; where the kernel does not say, a 0
        is taken for that.
        """
        if self.delay_accounting is None:
            return stat.blkio_delay_ns or None
        return stat.blkio_delay_ns if self.delay_accounting else None


def _turns(profiles: Iterable[Profile]) -> dict[int, tuple[int, int]]:
    """Return in which runs workers are read, of trainers that have many."""
    families: dict[int, list[int]] = defaultdict(list)
    for profile in profiles:
        if profile.kind == DATA_WORKER:
            families[profile.parent_pid].append(profile.pid)
    found: dict[int, tuple[int, int]] = {}
    for pids in families.values():
        if len(pids) > _WORKERS_ALL:
            every = min(_TURNS_MOST, -(-len(pids) // _WORKERS_EACH))
            found.update({pid: (every, place % every) for place, pid in enumerate(sorted(pids))})
    return found


def _read(host: Host, path: str) -> bytes | None:
    try:
        return host.read_bytes(path, keep=False)
    except OSError:
        # Not permitted, or the process has just ended: its profile stays without it, as NULL.
        return None


def _thread_names(host: Host, pid: int) -> list[str]:
    directory = f"proc/{pid}/task"
    try:
        threads = host.names(directory)
    except OSError:
        return []
    names = (_read(host, f"{directory}/{thread}/comm") for thread in threads[:_THREADS_LIMIT])
    return [name.decode("utf-8", "replace").rstrip("\n") for name in names if name is not None]
