"""Threads of trainers: which ones are read, and what is said of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from job import RANK0, RANK1, Proc, put, worker
from trees import BEGIN_NS, gather, host_of, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import NoData
from whyidle.collect.process_thread import PROCESS_THREAD
from whyidle.host import Answer
from whyidle.schema import ProcessThread

LOADER, IDLE, NCCL = 201, 202, 203


class Trainer:
    """A trainer in a folder, with three threads beside its main one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gpu: tuple[int, ...] = (RANK0,)
        self.clock = VirtualClock(BEGIN_NS)
        self.host = host_of(root, watched=self.watched, clock=self.clock)
        self.collect = PROCESS_THREAD.make()
        self.ran = dict.fromkeys((LOADER, IDLE, NCCL), 0)
        put(root, [Proc(pid=RANK0, parent=1, comm="python3", threads=("a", "b", "c"))])
        for tid, comm in ((LOADER, "python3"), (IDLE, "python3"), (NCCL, "NCCL Progress 1")):
            self.thread(tid, comm)

    def watched(self) -> Answer:
        return {"gpu": self.gpu, "commands": ()}

    def thread(self, tid: int, comm: str, state: str = "D", channel: str = "folio_wait") -> None:
        own = f"proc/{RANK0}/task/{tid}"
        stat = Proc(pid=tid, parent=1, comm=comm, state=state).stat()
        write(
            self.root,
            {
                f"{own}/stat": stat,
                f"{own}/schedstat": f"{self.ran.get(tid, 0)} 5 1\n",
                f"{own}/wchan": channel,
                f"{own}/comm": comm + "\n",
            },
        )

    def run(self, tid: int, ns: int = 1000) -> None:
        self.ran[tid] = self.ran.get(tid, 0) + ns
        path = self.root / f"proc/{RANK0}/task/{tid}/schedstat"
        path.write_text(f"{self.ran[tid]} 5 1\n", encoding="ascii")

    def step(self, *run: int) -> list[ProcessThread]:
        """Some threads run for a second, then all are looked at."""
        for tid in run:
            self.run(tid)
        self.clock.advance(NS_PER_S)
        rows, problems = gather(self.collect, self.host)
        assert problems == []
        return [row for row in rows if isinstance(row, ProcessThread)]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_a_thread_that_runs_is_told_and_others_are_not(trainer: Trainer) -> None:
    assert trainer.step() == []  # whether it runs shows at the second look
    rows = trainer.step(LOADER, NCCL)
    assert [row.tid for row in rows] == [LOADER]
    (row,) = trainer.step(LOADER)
    assert (row.pid, row.start_ns, row.name) == (RANK0, 5_000 * 10_000_000, "python3")
    assert (row.state, row.wait_channel) == ("D", "folio_wait")
    assert (row.run_ns, row.run_delay_ns) == (2000, 5)


def test_a_thread_that_is_blocked_for_long_stays(trainer: Trainer) -> None:
    trainer.step()
    trainer.step(LOADER)
    for _ in range(30):
        assert [row.tid for row in trainer.step()] == [LOADER]


def test_a_thread_that_sleeps_for_long_is_left_out_until_it_runs(trainer: Trainer) -> None:
    trainer.step()
    trainer.step(LOADER)
    trainer.thread(LOADER, "python3", state="S", channel="futex_do_wait")
    told = [len(trainer.step()) for _ in range(15)]
    assert told[0] == 1
    assert told[-1] == 0
    assert any([row.tid for row in trainer.step(LOADER)] == [LOADER] for _ in range(3))


def test_new_threads_are_found_at_once(trainer: Trainer) -> None:
    trainer.step()
    put(trainer.root, [Proc(pid=RANK0, parent=1, comm="python3", threads=("a", "b", "c", "d"))])
    trainer.thread(204, "python3")
    trainer.step()
    assert [row.tid for row in trainer.step(204)] == [204]


def test_of_a_trainer_with_workers_no_thread_is_read(trainer: Trainer) -> None:
    put(trainer.root, [worker(260, RANK0)])
    for _ in range(4):
        assert trainer.step(LOADER) == []


def test_threads_that_end_and_pids_that_are_used_again(trainer: Trainer) -> None:
    trainer.step()
    trainer.step(LOADER, IDLE)
    shutil.rmtree(trainer.root / f"proc/{RANK0}/task/{LOADER}")
    trainer.host.forget(f"proc/{RANK0}/task/{LOADER}/")
    assert [row.tid for row in trainer.step(IDLE)] == [IDLE]
    put(trainer.root, [Proc(pid=RANK0, parent=1, comm="python3", start=7_000, threads=("a",))])
    told = [row for _ in range(12) for row in trainer.step(IDLE)]
    assert told[-1].start_ns == 7_000 * 10_000_000


def test_where_nobody_is_watched_there_is_nothing(trainer: Trainer) -> None:
    trainer.gpu = ()
    with pytest.raises(NoData, match="no process is watched"):
        gather(trainer.collect, trainer.host)


def test_garbage_is_no_thread(trainer: Trainer) -> None:
    trainer.step()
    own = trainer.root / f"proc/{RANK0}/task/{LOADER}"
    (own / "schedstat").write_bytes(b"\xff\xfe")
    assert trainer.step(IDLE)[0].tid == IDLE
    (trainer.root / f"proc/{RANK0}/stat").write_text("nothing", encoding="ascii")
    assert trainer.step() == []


def test_many_threads_are_looked_at_in_turn(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.gpu = (RANK1,)
    put(tmp_path, [Proc(pid=RANK1, parent=1, comm="python3", threads=("x",) * 400)])
    for tid in range(RANK1 + 1, RANK1 + 401):
        own = f"proc/{RANK1}/task/{tid}"
        stat = Proc(pid=tid, parent=1, comm="python3").stat()
        write(tmp_path, {f"{own}/stat": stat, f"{own}/schedstat": "0 0 0\n", f"{own}/wchan": "x"})
    busy = RANK1 + 7
    for second in range(40):
        path = tmp_path / f"proc/{RANK1}/task/{busy}/schedstat"
        path.write_text(f"{second} 0 0\n", encoding="ascii")
        rows = trainer.step()
    assert [row.tid for row in rows] == [busy]
