"""Processes of a node: what they are, when they lived, whose GPU and whose workers they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from numpy.testing import assert_array_equal

from recording_kit import make_row
from recording_rows import (
    BOOT,
    Act,
    clocks,
    connect,
    gpu,
    holds,
    listed,
    process,
    s,
    start_of,
)
from whyidle.schema.probe import ProbeInfo
from whyidle.schema.process import ProcessInfo
from whyidle.table import Row
from whyidle_rules.recording import processes as loader
from whyidle_rules.recording.processes import Node

BUSY = [(10.0, Act(run=1.0))]


def load(rows: Sequence[Row], since: float | None = None, until: float | None = None) -> Node:
    with connect(rows) as con:
        limits = (-(1 << 62), 1 << 62)
        if since is not None and until is not None:
            limits = (s(since), s(until))
        node = loader.load(con, "n0", BOOT, *limits)
        return replace(node, procs=loader.read(con, ("n0", BOOT), *limits, node.procs.values()))


def about(pid: int, *, started: float = 0.0, at: float = 0.0, **columns: object) -> Row:
    return make_row(ProcessInfo, mono_ns=s(at), pid=pid, start_ns=start_of(started), **columns)


def pids(found: Sequence[loader.Proc]) -> list[int]:
    return [proc.identity[0] for proc in found]


def worker(pid: int, parent: int, *, at: float = 0.0) -> list[Row]:
    return process(pid, BUSY, kind="data_worker", parent=parent, at=at)


def test_the_driver_says_who_has_a_gpu() -> None:
    node = load([*process(10, BUSY), *process(11, BUSY, kind=None), *holds(11), *listed(0, 9)])
    assert pids(node.launchers("GPU-0")) == [11]
    assert node.launchers("GPU-1") == []
    assert node.listed


def test_trainers_on_a_gpu_come_in_order_of_their_beginning() -> None:
    rows = [
        *process(30, BUSY, at=5, started=2),
        *process(20, BUSY, at=3),
        *clocks(0, 20),
        *holds(30, started=2),
        *holds(20, started=3),
    ]
    assert pids(load(rows).launchers("GPU-0")) == [30, 20]


def test_a_process_began_when_the_kernel_says_on_the_clock_of_the_readings() -> None:
    """It was first seen at 5 s and started at 2 s; the boot clock is 7 s ahead."""
    rows = [*process(10, BUSY, at=5, started=2), *clocks(0, 20)]
    proc = load(rows).procs[10, start_of(2)]
    assert proc.begin_ns == s(2)
    # It was read last at 15 s, and lived half a second more on average.
    assert proc.end_ns == s(15.5)


def test_without_clocks_a_process_began_when_it_was_seen() -> None:
    proc = load(process(10, BUSY, at=5, started=2)).procs[10, start_of(2)]
    assert proc.begin_ns == s(5)


def test_a_page_says_when_its_process_ended() -> None:
    closed = make_row(ProbeInfo, mono_ns=s(11), pid=10, start_ns=start_of(0), closed_ns=s(10.2))
    assert load([*process(10, BUSY), closed]).procs[10, start_of(0)].end_ns == s(10.2)
    early = make_row(ProbeInfo, mono_ns=s(11), pid=10, start_ns=start_of(0), closed_ns=s(4))
    assert load([*process(10, BUSY), early]).procs[10, start_of(0)].end_ns == s(10)


def test_the_kind_is_the_one_that_was_known_last() -> None:
    rows = [*process(10, [(2, Act())], kind=None), about(10, kind="helper")]
    assert load(rows).procs[10, start_of(0)].kind == "helper"
    first, second, third = process(10, [(2, Act())], kind=None)
    later = process(10, [(1, Act())], kind="trainer", at=3, started=0)
    node = load([first, second, third, *later, about(10, kind="helper")])
    assert node.procs[10, start_of(0)].kind == "trainer"


def test_workers_are_those_that_descend_from_a_trainer() -> None:
    rows = [
        *process(10, BUSY),
        *process(20, BUSY),
        *worker(11, 10),
        *worker(12, 10),
        *worker(21, 20),
        *process(13, BUSY, kind="helper", parent=10),  # resource tracker, pin thread's process ...
        *worker(99, 98),  # of a trainer that nobody saw
    ]
    node = load(rows)
    assert sorted(pids(node.workers(node.procs[10, start_of(0)]))) == [11, 12]
    assert pids(node.workers(node.procs[20, start_of(0)])) == [21]


def test_workers_of_a_forkserver_are_those_of_the_trainer_above_it() -> None:
    rows = [
        *process(10, BUSY),
        *process(15, BUSY, kind="helper", parent=10),
        *worker(16, 15),
        *worker(17, 15),
    ]
    node = load(rows)
    assert sorted(pids(node.workers(node.procs[10, start_of(0)]))) == [16, 17]


def test_workers_of_the_trainer_before_are_not_those_of_the_next() -> None:
    """The second trainer got the same pid; its workers are told by when they lived."""
    rows = [
        *process(10, BUSY),
        *worker(11, 10),
        *process(10, BUSY, at=20, started=20),
        *worker(12, 10, at=21),
        *clocks(0, 40),
    ]
    node = load(rows)
    assert pids(node.workers(node.procs[10, start_of(20)])) == [12]


def test_a_pid_that_is_used_again_is_another_process() -> None:
    rows = [*process(10, BUSY), *process(10, BUSY, at=20, started=20, kind=None), *clocks(0, 40)]
    node = load(rows)
    assert set(node.procs) == {(10, start_of(0)), (10, start_of(20))}
    assert node.procs[10, start_of(0)].end_ns < node.procs[10, start_of(20)].begin_ns


def test_a_circle_of_parents_ends() -> None:
    """No kernel shows one; a pid that is used again while rows are old can look like it."""
    node = load([*process(10, BUSY), *worker(11, 12), *worker(12, 11)])
    assert node.workers(node.procs[10, start_of(0)]) == []


def test_in_a_container_ranks_say_whose_gpu_it_is() -> None:
    rows = [
        gpu("GPU-a", 0),
        gpu("GPU-b", 1),
        *process(10, BUSY),
        *process(20, BUSY),
        about(10, local_rank=1),
        about(20, local_rank=0),
        *listed(0, 9, rows=0),
    ]
    node = load(rows)
    assert (pids(node.launchers("GPU-a")), pids(node.launchers("GPU-b"))) == ([20], [10])
    assert not node.listed  # the driver lists nobody, and there are trainers


def test_in_a_container_a_trainer_without_a_rank_has_the_first_gpu() -> None:
    node = load([gpu("GPU-a", 0), gpu("GPU-b", 1), *process(10, BUSY), *listed(0, 9, rows=0)])
    assert (pids(node.launchers("GPU-a")), pids(node.launchers("GPU-b"))) == ([10], [])
    # Another one with a rank: then ranks count, and the first one has none.
    rows = [gpu("GPU-a", 0), *process(10, BUSY), *process(20, BUSY), about(20, local_rank=3)]
    assert load(rows).launchers("GPU-a") == []


@pytest.mark.parametrize(
    ("ticks", "known"),
    [(listed(0, 9, rows=0), True), (listed(0, 9, rows=None), False), ([], False)],
    ids=["nobody", "failed", "never asked"],
)
def test_nobody_on_a_gpu_is_known_only_where_the_driver_was_asked(
    ticks: list[Row], known: bool
) -> None:
    assert load([gpu(), *ticks]).listed is known


def test_rows_that_are_lost_do_not_make_a_gpu_free() -> None:
    """The collector returned rows, and the recording has none of them."""
    assert not load([gpu(), *listed(0, 9, rows=1)]).listed


@pytest.mark.parametrize(
    ("state", "channel", "io", "fuse"),
    [
        ("D", None, 1, 0),
        ("D", "wait_on_page_bit", 1, 0),
        ("S", "request_wait_answer", 1, 1),
        ("S", "rpc_wait_bit_killable", 1, 0),
        ("S", "futex_wait_queue", 0, 0),
        ("R", None, 0, 0),
        (None, None, float("nan"), 0),
    ],
)
def test_io_is_told_by_state_or_by_what_a_thread_waits_in(
    state: str | None, channel: str | None, io: float, fuse: int
) -> None:
    act = Act(state=state, channel=channel)
    rows = load(process(10, [(1, act)])).procs[10, start_of(0)].rows
    assert_array_equal(rows["io"], [io, io])
    assert rows["fuse"].tolist() == [fuse, fuse]


def test_only_readings_in_the_range_are_loaded() -> None:
    node = load([*process(10, BUSY), *process(11, [(1, Act())], at=50, started=50)], 3, 6)
    assert set(node.procs) == {(10, start_of(0))}
    assert node.procs[10, start_of(0)].rows["mono_ns"].tolist() == [s(3), s(4), s(5), s(6)]


@pytest.mark.parametrize("column", ["pid", "start_ns", "mono_ns"])
def test_rows_without_a_key_are_left_out(column: str) -> None:
    with connect([*process(10, BUSY), *holds(10), about(10)]) as con:
        for table in ("process", "process_info", "gpu_process"):
            con.execute(f"UPDATE {table} SET {column} = NULL")
        assert loader.load(con, "n0", BOOT).procs == {}


def test_who_has_a_gpu_and_was_never_read_is_not_forgotten() -> None:
    """The driver lists a process from 3 to 6 s; it started at 1 s, on the kernel's word."""
    node = load([*holds(77, started=1, at=3, until=6), *listed(0, 9), *clocks(0, 9)])
    assert node.launchers("GPU-0") == []
    assert node.unread == {"GPU-0": [(s(1), s(6.5))]}
    assert node.listed
    assert load([*process(77, BUSY), *holds(77)]).unread == {}
