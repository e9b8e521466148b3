"""Processes of a job: who is watched, what is told, pids that are used again."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from job import LAUNCHER, RANK0, RANK1, Proc, job, put, rank, worker
from trees import BEGIN_NS, gather, host_of, shared
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import Collect, NoData
from whyidle.collect.process import PROCESS
from whyidle.host import Answer, LiveHost
from whyidle.schema import Process, ProcessInfo


class Job:
    """A job in a folder, whose watched pids a test sets."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = VirtualClock(BEGIN_NS)
        self.gpu: tuple[int, ...] | None = (RANK0, RANK1)
        self.commands: tuple[int, ...] = ()
        self.host: LiveHost = host_of(root, watched=self.watched, clock=self.clock)
        self.collect: Collect = PROCESS.make()
        put(root, job())

    def watched(self) -> Answer:
        return {"gpu": self.gpu, "commands": self.commands}

    def step(self, seconds: float = 1.0) -> tuple[dict[int, Process], dict[int, ProcessInfo]]:
        """Run once; no problems are expected."""
        self.clock.advance(round(seconds * NS_PER_S))
        rows, problems = gather(self.collect, self.host)
        assert problems == []
        return (
            {row.pid: row for row in rows if isinstance(row, Process)},
            {row.pid: row for row in rows if isinstance(row, ProcessInfo)},
        )

    def end(self, pid: int) -> None:
        shutil.rmtree(self.root / f"proc/{pid}")
        self.host.forget(f"proc/{pid}/")


@pytest.fixture
def running(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_gpu_processes_and_their_descendants_are_watched(running: Job) -> None:
    rows, infos = running.step()
    assert set(rows) == {RANK0, RANK1, 250, 251, 350, 351}
    assert set(infos) == set(rows)
    assert {pid: row.kind for pid, row in rows.items()} == {
        RANK0: "trainer",
        RANK1: "trainer",
        **dict.fromkeys((250, 251, 350, 351), "data_worker"),
    }


def test_proc_is_listed_when_a_pid_was_given_out_and_every_five_seconds(running: Job) -> None:
    last = running.root / "proc/loadavg"
    last.write_text("0.10 0.20 0.30 1/100 350\n")
    running.step()
    put(running.root, [worker(252, RANK0)])
    assert 252 not in running.step()[0], "nothing has begun, as the kernel tells it"
    last.write_text("0.10 0.20 0.30 1/100 252\n")
    assert 252 in running.step()[0]
    running.end(250)
    assert 250 not in running.step()[0]
    running.step()
    put(running.root, [worker(253, RANK0)])
    seen = [253 in running.step()[0] for _ in range(6)]
    assert seen[-1] and sum(seen) < 6, "the last pid may be that of another namespace"


def test_the_counters(running: Job) -> None:
    row = running.step()[0][RANK0]
    assert row.start_ns == 5_000 * 10_000_000
    assert row.parent_pid == LAUNCHER
    assert (row.state, row.wait_channel) == ("S", "futex_do_wait")
    assert (row.user_ns, row.system_ns) == (100_000_000, 50_000_000)
    assert (row.main_run_ns, row.main_run_delay_ns) == (1000, 2000)
    assert (row.reaped_user_ns, row.reaped_system_ns) == (20_000_000, 10_000_000)
    assert (row.minor_faults, row.major_faults) == (7, 3)
    assert (row.threads, row.last_cpu, row.rss_bytes) == (6, 2, 2 << 20)
    assert (row.voluntary_switches, row.involuntary_switches) == (11, 12)
    assert (row.read_bytes, row.write_bytes) == (4096, 8192)
    assert (row.rchar_bytes, row.wchar_bytes) == (1, 2)


def test_what_a_rank_is(running: Job) -> None:
    row = running.step()[1][RANK1]
    assert (row.rank, row.local_rank, row.world_size) == (1, 1, 2)
    assert row.job == "4", "from the path of its cgroup"
    assert (row.comm, row.command, row.user_id) == ("python3", "python train.py", 1001)
    assert (row.cpus_allowed, row.cpus_allowed_count, row.numa_allowed) == ("0-3,8", 5, "0-1")
    assert row.thread_kinds == "autograd,data_pin,nccl"


def test_a_profile_is_told_once_a_minute_and_when_it_changes(running: Job) -> None:
    running.step()
    assert running.step()[1] == {}
    put(running.root, [Proc(pid=250, parent=RANK0, comm="pt_data_worker", cpus="0")])
    infos = running.step(5)[1]
    assert set(infos) == {250}
    assert infos[250].cpus_allowed_count == 1
    assert len(running.step(60)[1]) == 6


def test_slow_values_are_read_every_five_seconds_and_null_between(running: Job) -> None:
    seen = [running.step()[0] for _ in range(21)]
    for pid in seen[0]:
        read = [rows[pid].rss_bytes is not None for rows in seen]
        assert read[0]
        assert 4 <= sum(read[1:]) <= 5
    assert len({sum(row.rss_bytes is not None for row in rows.values()) for rows in seen}) > 1


@pytest.mark.parametrize(("count", "every"), [(4, 1), (5, 2), (6, 2), (8, 3), (20, 3)])
def test_many_workers_take_turns_once_they_are_known(running: Job, count: int, every: int) -> None:
    """Two or three of a trainer are read each second, and each at least every third second."""
    workers = range(400, 400 + count)
    for pid in (250, 251):
        running.end(pid)
    put(running.root, [worker(pid, RANK0) for pid in workers])
    first = [set(running.step()[0]) for _ in range(8)]
    assert all(set(workers) <= seen for seen in first)
    for _ in range(5):
        running.step()
    seen = [set(running.step()[0]) for _ in range(12)]
    assert all({RANK0, RANK1, 350, 351} <= each for each in seen)
    assert all(len(each & set(workers)) >= 2 for each in seen)
    assert all(sum(pid in each for each in seen) == 12 // every for pid in workers)
    put(running.root, [worker(500, RANK0)])
    assert all(500 in running.step()[0] for _ in range(8)), "one that is new is read at once"


def test_a_worker_that_names_itself_later_changes_its_kind(running: Job) -> None:
    put(running.root, [Proc(pid=260, parent=RANK0, comm="python3", command="python3")])
    assert running.step()[0][260].kind == "helper"
    put(running.root, [worker(260, RANK0)])
    rows, infos = running.step()
    assert rows[260].kind == "data_worker"
    assert infos[260].comm == "pt_data_worker"


def test_a_process_met_between_fork_and_exec_is_looked_at_again(running: Job) -> None:
    put(
        running.root, [rank(RANK0, 0), worker(250, RANK0, "python3"), worker(251, RANK0, "python3")]
    )
    put(running.root, [Proc(pid=260, parent=RANK0, comm="python3")])
    assert running.step()[0][260].kind == "data_worker", "a copy of its parent so far"
    put(running.root, [Proc(pid=260, parent=RANK0, comm="python3", command="python3 tool.py")])
    rows, infos = running.step()
    assert rows[260].kind == "helper"
    assert infos[260].command == "python3 tool.py"


def test_new_workers_show_at_the_next_run_and_ended_ones_leave(running: Job) -> None:
    running.step()
    running.end(250)
    put(running.root, [worker(450, RANK1)])
    rows, _ = running.step()
    assert 250 not in rows
    assert rows[450].kind == "data_worker"


def test_losing_the_parent_or_the_gpu_context_ends_nothing(running: Job) -> None:
    running.step()
    running.end(RANK0)
    put(running.root, [worker(250, 1)])  # adopted by init
    running.gpu = (RANK1,)
    rows, _ = running.step()
    assert rows[250].parent_pid == 1
    assert RANK0 not in rows
    running.gpu = ()
    assert RANK1 in running.step()[0]


def test_a_pid_that_is_used_again_is_another_process(running: Job) -> None:
    running.step()
    stranger = Proc(pid=250, parent=1, comm="cron", command="cron", start=9_999)
    put(running.root, [stranger])
    assert 250 not in running.step()[0], "it does not descend from a rank"
    again = Proc(pid=251, parent=RANK0, comm="pt_data_worker", start=9_999)
    put(running.root, [again])
    assert 251 not in running.step()[0]
    rows, infos = running.step()
    assert rows[251].start_ns == infos[251].start_ns == 9_999 * 10_000_000


def test_children_of_a_process_that_gets_its_context_later(running: Job) -> None:
    running.gpu = ()
    assert running.step()[0] == {}
    running.gpu = (RANK0,)
    assert set(running.step()[0]) == {RANK0, 250, 251}


def test_a_command_is_followed_where_nvml_lists_nothing(running: Job) -> None:
    running.gpu, running.commands = None, (LAUNCHER,)
    running.step()
    rows, infos = running.step(6)
    assert len(rows) == 7
    assert rows[LAUNCHER].kind == "helper"
    assert rows[RANK0].kind == "trainer", "told by its threads"
    assert rows[250].kind == "data_worker"
    assert infos == {}


def test_nothing_watched_is_no_data(running: Job) -> None:
    running.gpu = None
    with pytest.raises(NoData, match="no process is watched"):
        running.step()


def test_a_host_that_was_never_told_watches_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoData):
        gather(PROCESS.make(), host_of(tmp_path))


def test_delay_accounting_that_is_off_is_not_zero(running: Job) -> None:
    put(running.root, [Proc(pid=250, parent=RANK0, comm="pt_data_worker", blkio=3)])
    rows, _ = running.step()
    assert rows[RANK0].blkio_delay_ns is None, "this kernel does not say whether it counts"
    assert rows[250].blkio_delay_ns == 30_000_000
    switch = running.root / "proc/sys/kernel/task_delayacct"
    switch.parent.mkdir(parents=True)
    switch.write_text("0\n")
    assert running.step(10)[0][250].blkio_delay_ns is None
    switch.write_text("1\n")
    assert running.step(10)[0][RANK0].blkio_delay_ns == 0


def test_a_process_without_a_file_has_null_there(running: Job) -> None:
    for name in ("schedstat", "io", "status", "wchan", "cmdline", "environ", "cgroup"):
        (running.root / f"proc/{RANK0}/{name}").unlink()
    rows, infos = running.step()
    row = rows[RANK0]
    unknown: tuple[object, ...] = (row.main_run_ns, row.read_bytes, row.rss_bytes)
    assert (*unknown, row.wait_channel) == (None,) * 4
    assert row.user_ns == 100_000_000
    info = infos[RANK0]
    assert (info.command, info.rank, info.cpus_allowed) == (None, None, None)


class Denying(LiveHost):
    """A host that may not read the I/O of others, as an agent without capabilities."""

    asked = 0

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        if path.endswith(("/io", "/environ")):
            self.asked += 1
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return super().read_bytes(path, keep=keep)


def test_without_permission_io_is_null_and_said_once_a_run(running: Job) -> None:
    clock = VirtualClock(BEGIN_NS)
    host = Denying(str(running.root), clock, askers={"watched": running.watched})
    for _ in range(3):
        rows, problems = gather(running.collect, host)
        assert [problem.subject for problem in problems] == ["io"]
        assert "CAP_SYS_PTRACE" in problems[0].message
        assert all(row.read_bytes is None for row in rows if isinstance(row, Process))
        clock.advance(NS_PER_S)
    # Of six processes: io once, the environment at the first two meetings.
    assert host.asked == 3 * 6, "a refusal is not asked for again every second"


def test_damage_is_a_problem_of_that_process_only(running: Job) -> None:
    (running.root / "proc/250/schedstat").write_text("garbage\n")
    (running.root / f"proc/{RANK1}/stat").write_text("no name here\n")
    running.clock.advance(NS_PER_S)
    rows, problems = gather(running.collect, running.host)
    assert {problem.subject for problem in problems} == {"pid 250", f"pid {RANK1}"}
    assert {row.pid for row in rows} == {RANK0, 251, 350, 351}


def test_a_fork_bomb_does_not_fill_the_recording(running: Job) -> None:
    files = [Proc(pid=10_000 + index, parent=RANK0, comm="x") for index in range(1100)]
    for process in files:
        directory = running.root / f"proc/{process.pid}"
        directory.mkdir()
        (directory / "stat").write_text(process.stat())
    rows, problems = gather(running.collect, running.host)
    assert len([row for row in rows if isinstance(row, Process)]) == 1024
    assert [problem.subject for problem in problems] == ["processes"]


def test_ranks_without_names_before_pytorch_2_5(running: Job) -> None:
    put(
        running.root, [rank(RANK0, 0), worker(250, RANK0, "python3"), worker(251, RANK0, "python3")]
    )
    rows, _ = running.step()
    assert (rows[250].kind, rows[251].kind) == ("data_worker", "data_worker")


@pytest.mark.shared
@pytest.mark.parametrize(
    ("root", "pid"),
    [
        ("pcp/linux/procpid-4.18.13-root-006", 25951),
        ("pcp/linux/procpid-5.5.7-root-007", 1309),
        ("this-vm-6.18/root", 4242),
        ("prometheus-procfs", 26231),
    ],
)
def test_recorded_processes(root: str, pid: int) -> None:
    host = host_of(shared(root), watched=lambda: {"gpu": None, "commands": (pid,)})
    rows, problems = gather(PROCESS.make(), host)
    assert problems == []
    row = next(row for row in rows if isinstance(row, Process) and row.pid == pid)
    assert row.user_ns is not None
