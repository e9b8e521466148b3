"""The virtual GPU's timeline, on paper: exact, whenever the node happens to wake."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgpu.device.kinds import DRAM, GR, KIND_INDEX, KINDS, SM
from vgpu.device.lane import FAR_NS
from vgpu.device.paper import Paper, PaperProcess
from vgpu.device.truth import Interval, Truth

US = 1000
MIB = 1 << 20
GEMM = KINDS[KIND_INDEX["gemm"]].fill
EAGER, LARGE = 1 * MIB, 64 * MIB


def times(rows: list[Interval]) -> list[tuple[int, int]]:
    """Begin and end in us."""
    return [(row.begin_ns // US, row.end_ns // US) for row in rows]


def test_a_stream_runs_in_order_as_soon_as_it_can(tmp_path: Path) -> None:
    paper = Paper(gpus=1)
    a = paper.process(0)
    a.kernel(at_us=10, us=50)
    a.kernel(at_us=11, us=30)
    a.kernel(at_us=200, us=5)
    paper.round(at_us=1000)
    assert times(paper.truth(tmp_path).intervals()) == [(10, 60), (60, 90), (200, 205)]


def test_streams_run_side_by_side_and_wait_for_events(tmp_path: Path) -> None:
    paper = Paper(gpus=1)
    a = paper.process(0)
    a.kernel(at_us=0, us=100, stream=0)
    done = a.record(at_us=1, stream=0)
    a.kernel(at_us=2, us=10, stream=1)
    a.wait(at_us=3, token=done, stream=1)
    a.kernel(at_us=4, us=10, stream=1)
    paper.round(at_us=500)
    truth = paper.truth(tmp_path)
    assert times([row for row in truth.intervals() if row.stream == 1]) == [(2, 12), (100, 110)]
    # Two matrix kernels share the chip: it is busy once, and no more than whole.
    assert paper.usage[0].shares[GR] == 110 * US
    assert paper.usage[0].shares[SM] == pytest.approx(
        (10 * 1.0 + 90 * GEMM + 10 * GEMM) * US, rel=1e-3
    )


def test_a_wait_for_an_event_that_comes_later_holds_the_stream(tmp_path: Path) -> None:
    paper = Paper(gpus=2)
    a, b = paper.process(0), paper.process(1)
    world = paper.group(a, b)
    a.collective(at_us=0, us=10, group=world, stream=1)
    done = a.record(at_us=1, stream=1)
    a.wait(at_us=2, token=done, stream=0)
    a.kernel(at_us=3, us=20, stream=0)
    paper.round(at_us=50)
    assert a.context.end_ns() is None
    b.collective(at_us=60, us=10, group=world)
    paper.round(at_us=100)
    kernel = paper.truth(tmp_path).intervals(what="gemm")
    assert times(kernel) == [(70, 90)]


def test_copies_of_one_direction_take_turns_and_of_two_do_not(tmp_path: Path) -> None:
    paper = Paper(gpus=1)
    a, b = paper.process(0), paper.process(0)
    a.kernel(at_us=0, us=500, stream=0)
    a.copy(at_us=1, size_bytes=52 * 1000, stream=0)  # its turn comes at 500
    a.copy(at_us=2, size_bytes=52 * 1000 * 100, stream=1)
    b.copy(at_us=10, size_bytes=52 * 1000 * 100)
    b.copy(at_us=11, size_bytes=52 * 1000, to_host=True, stream=1)
    paper.round(at_us=1000)
    down = times(paper.truth(tmp_path).intervals(what="copy_to_device"))
    assert down == [(2, 110), (110, 218), (500, 509)]
    assert times(paper.truth(tmp_path).intervals(what="copy_to_host")) == [(11, 20)]
    assert paper.usage[0].pcie_rx == pytest.approx(52 * 1000 * 201)
    assert paper.usage[0].pcie_tx == pytest.approx(52 * 1000)
    assert paper.usage[0].shares[GR] == 500 * US  # copies alone are not work
    assert paper.usage[0].shares[DRAM] > 0


def test_a_collective_polls_from_its_arrival_until_the_last_one(tmp_path: Path) -> None:
    paper = Paper(gpus=3)
    members = [paper.process(gpu) for gpu in range(3)]
    world = paper.group(*members)
    for at_us, member in zip((10, 300, 40), members, strict=True):
        member.collective(at_us=at_us, us=50, group=world, size_bytes=3 * MIB)
        member.kernel(at_us=at_us, us=5)
    paper.round(at_us=100)
    waiting = paper.truth(tmp_path).intervals(gpu=0)
    assert [(row.ready_ns, row.end_ns // US, row.cut) for row in waiting] == [(None, 100, True)]
    paper.round(at_us=1000)
    truth = paper.truth(tmp_path)
    rows = truth.intervals(what="all_reduce")
    assert times(rows) == [(10, 350), (40, 350), (300, 350)]
    assert {row.ready_ns for row in rows} == {300 * US}
    assert {row.sequence for row in rows} == {0}
    split = truth.split(gpu=0, begin_ns=0, end_ns=1000 * US)
    assert (split.waiting_ns, split.transferring_ns) == (290 * US, 50 * US)
    assert (split.working_ns, split.nothing_ns) == (5 * US, (10 + 645) * US)
    assert paper.usage[0].nvlink_tx == pytest.approx(2 * 3 * MIB * 2 / 3)
    # 16 channels of 132 SMs spin; a utilization counter calls that busy.
    assert paper.usage[0].shares[GR] == (340 + 5) * US
    assert paper.usage[0].shares[SM] == pytest.approx((340 * 16 / 132 + 5 * GEMM) * US, rel=1e-3)


@pytest.mark.parametrize(
    ("size_bytes", "sent"), [(EAGER, (10, 30)), (LARGE, (10, 220))], ids=["eager", "large"]
)
def test_a_sender_leaves_early_if_the_data_fit_the_buffers(
    tmp_path: Path, size_bytes: int, sent: tuple[int, int]
) -> None:
    paper = Paper(gpus=2)
    a, b = paper.process(0), paper.process(1)
    pair = paper.group(a, b)
    a.collective(at_us=10, us=20, group=pair, name="send", peer=1, size_bytes=size_bytes)
    b.collective(at_us=200, us=20, group=pair, name="recv", peer=0, size_bytes=size_bytes)
    paper.round(at_us=1000)
    truth = paper.truth(tmp_path)
    assert times(truth.intervals(what="send")) == [sent]
    assert times(truth.intervals(what="recv")) == [(200, 220)]


def test_a_receiver_waits_for_its_sender_and_nobody_else(tmp_path: Path) -> None:
    paper = Paper(gpus=3)
    a, b, c = (paper.process(gpu) for gpu in range(3))
    group = paper.group(a, b, c)
    c.collective(at_us=0, us=10, group=group, name="recv", peer=1)
    c.collective(at_us=1, us=10, group=group, name="recv", peer=0)
    a.collective(at_us=50, us=10, group=group, name="send", peer=2)
    b.collective(at_us=90, us=10, group=group, name="send", peer=2)
    paper.round(at_us=1000)
    assert times(paper.truth(tmp_path).intervals(gpu=2)) == [(0, 100), (100, 110)]


def test_a_broadcast_has_no_common_end(tmp_path: Path) -> None:
    paper = Paper(gpus=3)
    members = [paper.process(gpu) for gpu in range(3)]
    world = paper.group(*members)
    for at_us, member in zip((0, 100, 500), members, strict=True):
        member.collective(at_us=at_us, us=10, group=world, name="broadcast", peer=1)
    paper.round(at_us=1000)
    rows = paper.truth(tmp_path).intervals()
    assert times(rows) == [(0, 110), (100, 110), (500, 510)]


def test_members_that_disagree_wait_for_ever(tmp_path: Path) -> None:
    paper = Paper(gpus=2)
    a, b = paper.process(0), paper.process(1)
    world = paper.group(a, b)
    a.collective(at_us=0, us=10, group=world, name="all_reduce")
    b.collective(at_us=0, us=10, group=world, name="all_gather")
    paper.round(at_us=10_000)
    rows = paper.truth(tmp_path).intervals()
    assert [(row.ready_ns, row.cut) for row in rows] == [(None, True)] * 2


def test_a_death_takes_the_queue_and_leaves_the_peers_hanging(tmp_path: Path) -> None:
    paper = Paper(gpus=2)
    a, b = paper.process(0), paper.process(1)
    world = paper.group(a, b)
    for process in (a, b):
        process.kernel(at_us=0, us=100)
        process.collective(at_us=1, us=10, group=world)  # would come to it at 100
        process.kernel(at_us=2, us=100)
    paper.round(at_us=50)
    paper.kill(a)
    paper.round(at_us=5000)
    truth = paper.truth(tmp_path)
    assert [(t, row.cut) for row in truth.intervals(gpu=0) for t in times([row])] == [
        ((0, 50), True)
    ]
    assert times(truth.intervals(gpu=1)) == [(0, 100), (100, 5000)]
    assert truth.intervals(gpu=1)[-1].ready_ns is None
    assert [row.end_ns for row in truth.processes] == [50 * US, None]
    assert b.context.end_ns() is None
    assert paper.machine.next_arrival_ns() == FAR_NS


def test_the_dead_have_not_arrived(tmp_path: Path) -> None:
    paper = Paper(gpus=2)
    a, b = paper.process(0), paper.process(1)
    world = paper.group(a, b)
    a.collective(at_us=10, us=5, group=world)
    paper.round(at_us=50)
    paper.kill(a)
    b.collective(at_us=60, us=5, group=world)
    paper.round(at_us=100)
    rows = paper.truth(tmp_path).intervals()
    assert times(rows) == [(10, 50), (60, 100)]
    assert [row.ready_ns for row in rows] == [None, None]


def test_a_death_as_the_last_one_arrives_keeps_the_wait(tmp_path: Path) -> None:
    paper = Paper(gpus=2)
    a, b = paper.process(0), paper.process(1)
    world = paper.group(a, b)
    a.collective(at_us=10, us=5, group=world)
    b.collective(at_us=50, us=5, group=world)
    paper.round(at_us=50)
    paper.kill(a)
    paper.round(at_us=100)
    truth = paper.truth(tmp_path)
    assert [(row.begin_ns, row.ready_ns, row.end_ns) for row in truth.intervals(gpu=0)] == [
        (10 * US, 50 * US, 50 * US)
    ]
    assert times(truth.intervals(gpu=1)) == [(50, 55)]  # its data were under way


def test_a_death_frees_the_copy_engine(tmp_path: Path) -> None:
    paper = Paper(gpus=1)
    a, b = paper.process(0), paper.process(0)
    a.copy(at_us=0, size_bytes=52 * 1000 * 500)
    paper.round(at_us=20)
    paper.kill(a)
    b.copy(at_us=30, size_bytes=52 * 1000)
    paper.round(at_us=100)
    assert times(paper.truth(tmp_path).intervals()) == [(0, 20), (30, 39)]


def test_a_restarted_job_gets_a_new_group_of_the_same_name(tmp_path: Path) -> None:
    paper = Paper(gpus=2)
    first = [paper.process(gpu) for gpu in range(2)]
    old = paper.group(*first)
    paper.round(at_us=10)
    for process in first:
        paper.kill(process)
    second = [paper.process(gpu) for gpu in range(2)]
    new = paper.group(*second)
    assert new != old
    for process in second:
        process.collective(at_us=20, us=5, group=new)
    paper.round(at_us=100)
    assert times(paper.truth(tmp_path).intervals()) == [(20, 25)] * 2


def test_a_stamp_of_the_settled_past_counts_from_now_on(tmp_path: Path) -> None:
    paper = Paper(gpus=1)
    a = paper.process(0)
    paper.round(at_us=100)
    a.kernel(at_us=40, us=10)  # its process was stopped between stamp and launch
    paper.round(at_us=200)
    assert times(paper.truth(tmp_path).intervals()) == [(100, 110)]


def test_forgotten_events_are_past_events(tmp_path: Path) -> None:
    paper = Paper(gpus=1)
    a = paper.process(0)
    tokens = [a.record(at_us=i, stream=1) for i in range(6000)]
    paper.round(at_us=6000)
    assert len(a.context.tokens) < 5000
    a.wait(at_us=6001, token=tokens[0])
    a.kernel(at_us=6002, us=10)
    paper.round(at_us=7000)
    assert times(paper.truth(tmp_path).intervals()) == [(6002, 6012)]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["kernel", "copy", "record", "wait", "all_reduce", "send"]),
        st.integers(0, 1),  # stream
        st.integers(1, 300),  # length in us, or size
        st.integers(0, 200),  # pause of the host before it
    ),
    max_size=12,
)


def _play(
    programs: list[list[tuple[str, int, int, int]]], rounds: list[int]
) -> tuple[Paper, Truth]:
    paper = Paper(gpus=2)
    processes = [paper.process(0), paper.process(1)]
    world = paper.group(*processes)
    for rank, (process, program) in enumerate(zip(processes, programs, strict=True)):
        _write(process, program, world, rank)
    for at_us in rounds:
        paper.round(at_us)
    with tempfile.TemporaryDirectory() as folder:
        return paper, paper.truth(Path(folder))


def _write(
    process: PaperProcess, program: list[tuple[str, int, int, int]], world: int, rank: int
) -> None:
    at_us, tokens = rank * 7, [0]
    for what, stream, length, pause in program:
        at_us += 1 + pause
        if what == "kernel":
            process.kernel(at_us, length, stream=stream)
        elif what == "copy":
            process.copy(at_us, length * 52_000, stream=stream, to_host=bool(length % 2))
        elif what == "record":
            tokens.append(process.record(at_us, stream=stream))
        elif what == "wait":
            process.wait(at_us, tokens[length % len(tokens)], stream=stream)
        elif what == "all_reduce":
            process.collective(at_us, length, world, stream=stream)
        else:
            name = "send" if rank == 0 else "recv"
            process.collective(at_us, length, world, name, peer=1 - rank, stream=stream)


END_US = 12_000


@settings(max_examples=150, deadline=None)
@given(st.tuples(STEPS, STEPS), st.lists(st.integers(1, END_US - 1), max_size=10))
def test_the_timeline_does_not_depend_on_when_the_node_wakes(
    programs: tuple[list[tuple[str, int, int, int]], list[tuple[str, int, int, int]]],
    wakes: list[int],
) -> None:
    seldom, lazy = _play(list(programs), [*sorted(set(wakes)), END_US])
    often, eager = _play(list(programs), list(range(0, END_US + 1, 150)))
    key = lambda row: (row.gpu, row.stream, row.begin_ns, row.end_ns)  # noqa: E731
    assert sorted(lazy.intervals(), key=key) == sorted(eager.intervals(), key=key)
    # What the sweep counted for NVML agrees with the truth, which is computed another way.
    for gpu in range(2):
        split = eager.split(gpu=gpu, begin_ns=0, end_ns=END_US * US)
        resident_ns = split.working_ns + split.spinning_ns
        for paper in (seldom, often):
            assert paper.usage[gpu].shares[GR] == pytest.approx(resident_ns)
        assert split.working_ns + split.spinning_ns + split.empty_ns == END_US * US
