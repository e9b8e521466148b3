"""Threads of trainers that have no DataLoader workers: who loads for them inside their process.

Source: /proc/PID/task/TID/{stat,schedstat,wchan} (proc_pid_task(5)). A trainer has hundreds of
threads and most of them sleep for ever: all of them are looked at in turn, and those that ran since
are looked at every time. Threads of libraries that load nothing are known by name and left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData
from whyidle.collect.process_kind import WORKER_COMM
from whyidle.collect.process_text import Stat, parse_schedstat, parse_stat
from whyidle.collect.process_tree import ProcessTree
from whyidle.collect.watched import watched_pids
from whyidle.host import Host
from whyidle.schema import ProcessThread

# Listing a trainer's 300 threads costs 0.1 ms, and who has workers changes rarely.
_LIST_EVERY_NS = 10 * NS_PER_S
# Threads of all trainers that are looked at in turn, at 14 us each: those that are new, and others.
_NEW_BUDGET = 48
_TURN_BUDGET = 12
# Threads of one trainer that are looked at every time, at 12 us each; loaders have some dozen.
_ACTIVE_LIMIT = 16
# One that has not run for so long is looked at in turn again.
_IDLE_NS = 10 * NS_PER_S
# Names of threads that launch, communicate, or serve the driver.
_OTHERS = (
    "NCCL", "nccl", "gloo_", "pt_gloo_", "pt_nccl_", "pt_autograd", "pt_tcpstore", "cuda", "iou-",
    "pt_data_pin", "jemalloc", "OpenBLAS",
)  # fmt: skip


@dataclass(slots=True)
class _Thread:
    """What was seen of a thread last.

    `ran_ns`: when it was seen to have run; `known`: it was looked at twice.
    """

    run_ns: int | None = None
    ran_ns: int | None = None
    known: bool = False


@dataclass(slots=True)
class _Trainer:
    """A trainer, how many threads it has, and those other than the main one.

    `fed`: workers load for it, so that its threads are not looked at.
    """

    start_ns: int
    count: int
    fed: bool = False
    threads: dict[int, _Thread] = field(default_factory=dict)
    active: set[int] = field(default_factory=set)


class _Threads:
    """Which threads are looked at."""

    __slots__ = ("_due_ns", "_new", "_trainers", "_tree", "_turn")

    def __init__(self) -> None:
        self._tree = ProcessTree()
        self._trainers: dict[int, _Trainer] = {}
        self._due_ns = 0
        # At the end are those that are looked at next.
        self._turn: list[tuple[int, int]] = []
        self._new: list[tuple[int, int]] = []

    def collect(self, host: Host) -> Iterator[ProcessThread]:
        """Yield a row for each thread that is active."""
        gpu, commands = watched_pids(host)
        if not gpu and not commands:
            raise NoData("no process is watched: NVML lists none and no command is recorded")
        if host.clock.mono_ns() >= self._due_ns or self._grew(host):
            self._due_ns = host.clock.mono_ns() + _LIST_EVERY_NS
            self._list(host, gpu, commands)
        self._look_in_turn(host)
        for pid, trainer in self._trainers.items():
            for tid in sorted(trainer.active):
                if (row := _row(host, pid, trainer, tid)) is not None:
                    yield row

    def _grew(self, host: Host) -> bool:
        """Whether the number of threads of a trainer has changed, or a trainer ended."""
        for pid, trainer in self._trainers.items():
            if trainer.fed:
                continue
            try:
                if parse_stat(host.read_bytes(f"proc/{pid}/stat")).threads != trainer.count:
                    return True
            except (OSError, ValueError):
                return True
        return False

    def _list(self, host: Host, gpu: tuple[int, ...] | None, commands: tuple[int, ...]) -> None:
        """Find out who trains without workers, and which threads there are."""
        self._tree.scan(host, {*(gpu or ()), *commands})
        watched = self._tree.watched
        # Where the driver lists nobody, anyone may be the trainer.
        pids = [pid for pid in gpu if pid in watched] if gpu else sorted(watched)
        with_workers = self._tree.parents_of(lambda pid: _comm(host, pid) == WORKER_COMM)
        for pid in self._trainers.keys() - set(pids):
            self._drop(host, pid)
        for pid in pids:
            try:
                stat = parse_stat(host.read_bytes(f"proc/{pid}/stat", keep=False))
                # A worker of somebody has threads too, and is one of the processes that are read.
                loads = pid in with_workers or stat.comm == WORKER_COMM
                names = () if loads else host.names(f"proc/{pid}/task")
            except (OSError, ValueError):
                self._drop(host, pid)
                continue
            self._update(host, pid, stat, {int(name) for name in names if name.isdigit()} - {pid})
            self._trainers[pid].fed = loads

    def _update(self, host: Host, pid: int, stat: Stat, tids: set[int]) -> None:
        trainer = self._trainers.get(pid)
        if trainer is not None and trainer.start_ns != stat.start_ns:
            self._drop(host, pid)
            trainer = None
        if trainer is None:
            trainer = self._trainers[pid] = _Trainer(stat.start_ns, stat.threads)
        trainer.count = stat.threads
        for tid in trainer.threads.keys() - tids:
            _forget(host, pid, trainer, tid)
        for tid in sorted(tids - trainer.threads.keys()):
            trainer.threads[tid] = _Thread()
            self._new.append((pid, tid))

    def _drop(self, host: Host, pid: int) -> None:
        if self._trainers.pop(pid, None) is not None:
            host.forget(f"proc/{pid}/task/")

    def _is_new(self, pid: int, tid: int) -> bool:
        trainer = self._trainers.get(pid)
        return trainer is not None and tid in trainer.threads and not trainer.threads[tid].known

    def _look_in_turn(self, host: Host) -> None:
        """Look at some threads that are not active, and find those that are by now."""
        self._turn += self._new
        self._new = []
        budget = _NEW_BUDGET if self._turn and self._is_new(*self._turn[-1]) else _TURN_BUDGET
        if not self._turn:
            self._turn = [
                (pid, tid)
                for pid, trainer in self._trainers.items()
                for tid in trainer.threads.keys() - trainer.active
            ]
        while self._turn and budget:
            pid, tid = self._turn.pop()
            trainer = self._trainers.get(pid)
            if trainer is None or tid not in trainer.threads or tid in trainer.active:
                continue
            budget -= 1
            if trainer.threads[tid].run_ns is None:
                self._new.append((pid, tid))  # whether it runs shows at the second look
            else:
                trainer.threads[tid].known = True
            if len(trainer.active) < _ACTIVE_LIMIT and _runs(host, pid, trainer, tid):
                trainer.active.add(tid)


def _runs(host: Host, pid: int, trainer: _Trainer, tid: int) -> bool:
    """Whether a thread ran since it was looked at last, and may be a loader's."""
    thread = trainer.threads[tid]
    try:
        run_ns, _ = parse_schedstat(host.read_bytes(f"proc/{pid}/task/{tid}/schedstat", keep=False))
        ran = thread.run_ns is not None and run_ns != thread.run_ns
        thread.run_ns = run_ns
        if thread.run_ns is not None and not ran:
            return False
        stat = parse_stat(host.read_bytes(f"proc/{pid}/task/{tid}/stat", keep=False))
    except (OSError, ValueError):
        return False  # it has ended, or the kernel counts no run time
    thread.ran_ns = host.clock.mono_ns()
    return not stat.comm.startswith(_OTHERS)


def _row(host: Host, pid: int, trainer: _Trainer, tid: int) -> ProcessThread | None:
    """Return what an active thread does; None if it is active no more."""
    thread, folder = trainer.threads[tid], f"proc/{pid}/task/{tid}"
    try:
        stat = parse_stat(host.read_bytes(f"{folder}/stat"))
        run_ns, delay_ns = parse_schedstat(host.read_bytes(f"{folder}/schedstat"))
    except (OSError, ValueError):
        _forget(host, pid, trainer, tid)
        return None
    mono_ns = host.clock.mono_ns()
    if run_ns != thread.run_ns or stat.state == "D":
        thread.run_ns, thread.ran_ns = run_ns, mono_ns
    elif thread.ran_ns is None or mono_ns - thread.ran_ns > _IDLE_NS:
        trainer.active.discard(tid)
        host.forget(f"{folder}/")
        return None
    return ProcessThread(
        mono_ns=mono_ns,
        pid=pid,
        start_ns=trainer.start_ns,
        tid=tid,
        name=stat.comm,
        state=stat.state,
        wait_channel=None if stat.state == "R" else _wait_channel(host, folder),
        run_ns=run_ns,
        run_delay_ns=delay_ns,
    )


def _wait_channel(host: Host, folder: str) -> str | None:
    try:
        name = host.read(f"{folder}/wchan")
    except OSError:
        return None  # refused by some hardened kernels
    return name if name not in ("", "0") else None


def _forget(host: Host, pid: int, trainer: _Trainer, tid: int) -> None:
    trainer.threads.pop(tid, None)
    trainer.active.discard(tid)
    host.forget(f"proc/{pid}/task/{tid}/")


def _comm(host: Host, pid: int) -> str | None:
    try:
        return parse_stat(host.read_bytes(f"proc/{pid}/stat", keep=False)).comm
    except (OSError, ValueError):
        return None


def make() -> Collect:
    """Return the collector."""
    return _Threads().collect


PROCESS_THREAD = Collector(name="process_thread", lane="normal", make=make, thread="process")
