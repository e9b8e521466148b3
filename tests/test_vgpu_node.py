"""The virtual GPU node as trainers meet it: launches that return, waits that block, deaths."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from vgpu.client import GpuLost, VirtualGpu
from vgpu.device.serve import VirtualNode, virtual_gpus
from vgpu.device.truth import Interval, Truth
from vgpu.device.wire import ENVIRONMENT, QUEUE_DEPTH

MS = 1_000_000
MIB = 1 << 20
DEADLINE_S = 10.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[VirtualNode]:
    with virtual_gpus(tmp_path, gpus=2) as made:
        yield made


def use(node: VirtualNode, index: int = 0, memory_bytes: int = 0) -> VirtualGpu:
    return VirtualGpu(node.env[ENVIRONMENT], index, memory_bytes)


def trainer(node: VirtualNode, code: str) -> subprocess.Popen[str]:
    """A process that runs `code` with a `gpu` of its own, and says when it is there."""
    text = "import os, sys, time\nfrom vgpu.client import connect\n" + code
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env={**os.environ, **node.env},
        stdout=subprocess.PIPE,
        text=True,
    )


def say(figure: str) -> None:
    """A measured figure, for whoever reads the test's output."""
    sys.stdout.write(f"\n{figure}\n")


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def gone(truth: Truth, pid: int) -> int | None:
    (row,) = (row for row in truth.processes if row.pid == pid)
    return row.end_ns


def in_order(rows: list[Interval]) -> None:
    """Each begins when it was launched or when the one before it ends, to the nanosecond."""
    for before, row in pairwise(rows):
        assert row.begin_ns == max(row.launch_ns, before.end_ns)


def test_work_takes_its_time_and_a_wait_ends_soon_after_it(node: VirtualNode) -> None:
    late_ms = []
    with use(node) as gpu:
        for length in (0.2, 1.0, 3.3, 10.0) * 10:
            gpu.launch(length)
            gpu.synchronize()
            late_ms.append((time.monotonic_ns(), length))
    rows = node.truth().intervals()
    assert [row.end_ns - row.begin_ns for row in rows] == [
        round(length * MS) for _, length in late_ms
    ]
    overshoot = sorted(
        (at_ns - row.end_ns) / MS for (at_ns, _), row in zip(late_ms, rows, strict=True)
    )
    say(
        f"synchronize returns after the end by {statistics.median(overshoot):.3f} ms median, "
        f"{overshoot[-1]:.3f} ms at most, of {len(overshoot)}"
    )
    assert overshoot[0] >= 0
    assert statistics.median(overshoot) < 5


def test_launches_return_at_once_until_the_queue_is_full(node: VirtualNode) -> None:
    count = QUEUE_DEPTH + 200
    with use(node) as gpu:
        begin_ns = time.monotonic_ns()
        for _ in range(QUEUE_DEPTH):
            gpu.launch(0.5)
        free_ns = time.monotonic_ns() - begin_ns
        for _ in range(count - QUEUE_DEPTH):
            gpu.launch(0.5)
        gpu.synchronize()
    say(f"{free_ns / QUEUE_DEPTH / 1000:.1f} us a launch")
    rows = node.truth().intervals()
    assert len(rows) == count
    in_order(rows)
    assert free_ns < QUEUE_DEPTH * 0.5 * MS / 2
    for row, earlier in zip(rows[QUEUE_DEPTH:], rows, strict=False):
        assert row.launch_ns >= earlier.end_ns
    # The GPU never noticed.
    assert rows[-1].end_ns - rows[0].begin_ns == count * 0.5 * MS


def _steps(gpu: VirtualGpu, count: int, *, host_ms: float) -> None:
    """A training loop that reads its loss once a step, one step late, as good ones do."""
    last = None
    for _ in range(count):
        time.sleep(host_ms / 1000)
        for kind in ("gemm", "elementwise", "gemm", "attention", "optimizer"):
            gpu.launch(2.0, kind=kind)
        if last is not None:
            last.synchronize()
        last = gpu.event()
    gpu.synchronize()


def _busy(truth: Truth) -> float:
    rows = truth.intervals()
    begin_ns, end_ns = rows[0].begin_ns, rows[-1].end_ns
    split = truth.split(gpu=0, begin_ns=begin_ns, end_ns=end_ns)
    assert split.working_ns + split.spinning_ns + split.empty_ns == end_ns - begin_ns
    return split.working_ns / (end_ns - begin_ns)


def test_a_host_that_runs_ahead_keeps_the_gpu_busy(node: VirtualNode) -> None:
    with use(node) as gpu:
        _steps(gpu, 60, host_ms=2.0)
    assert _busy(node.truth()) > 0.97


def test_a_slow_host_starves_the_gpu(node: VirtualNode) -> None:
    with use(node) as gpu:
        _steps(gpu, 15, host_ms=40.0)
    assert _busy(node.truth()) < 0.28


def test_members_wait_for_the_last_one(node: VirtualNode) -> None:
    with use(node, 0) as early, use(node, 1) as late:
        groups = [early.group("world", 0, 2), late.group("world", 1, 2)]
        for _ in range(4):
            early.launch(1.0)
            early.all_reduce(2.0, groups[0], size_bytes=8 * MIB)
            time.sleep(0.04)
            late.launch(1.0)
            late.all_reduce(2.0, groups[1], size_bytes=8 * MIB)
            early.synchronize()
            late.synchronize()
    truth = node.truth()
    first, second = (truth.intervals(gpu=gpu, what="all_reduce") for gpu in (0, 1))
    for a, b in zip(first, second, strict=True):
        assert (a.group, a.sequence) == (b.group, b.sequence)
        assert a.ready_ns == b.ready_ns == max(a.begin_ns, b.begin_ns)
        assert a.end_ns == b.end_ns == a.ready_ns + 2 * MS
        assert b.begin_ns == b.ready_ns
        assert b.begin_ns - a.begin_ns >= 40 * MS
    assert [row.sequence for row in first] == [0, 1, 2, 3]


def test_a_copy_from_pageable_memory_blocks_and_from_pinned_does_not(node: VirtualNode) -> None:
    with use(node) as gpu:
        begin_ns = time.monotonic_ns()
        gpu.copy(520_000_000)  # 10 ms at generation 5
        pinned_ns = time.monotonic_ns() - begin_ns
        gpu.copy(90_000_000, pinned=False)  # 10 ms as well
        back_ns = time.monotonic_ns()
    rows = node.truth().intervals(what="copy_to_device")
    assert pinned_ns < 8 * MS
    assert [round((row.end_ns - row.begin_ns) / MS, 1) for row in rows] == [10.0, 10.0]
    assert back_ns >= rows[1].end_ns


def test_events_order_streams_and_can_be_asked(node: VirtualNode) -> None:
    with use(node) as gpu:
        gpu.launch(100.0, stream=0)
        done = gpu.event(stream=0)
        gpu.wait(done, stream=7)
        gpu.launch(1.0, stream=7)
        assert not done.query()
        done.synchronize()
        assert done.query()
        gpu.synchronize(7)
    rows = node.truth().intervals()
    assert rows[1].begin_ns == rows[0].end_ns


def test_a_killed_trainer_vanishes_with_its_queue(node: VirtualNode) -> None:
    code = (
        "gpu = connect(0, memory_bytes=1 << 30)\n"
        "for _ in range(500): gpu.launch(10.0)\n"
        "if os.fork() == 0: time.sleep(3); os._exit(0)\n"  # a loader's worker outlives it
        "print('there', flush=True); gpu.synchronize()"
    )
    process = trainer(node, code)
    assert line(process) == "there"
    # The end of the worker closes its copy of the pipe only later: do not read to the end.
    time.sleep(0.1)
    killed_ns = time.monotonic_ns()
    process.kill()
    process.wait()
    reaped_ns = time.monotonic_ns()
    until_s = time.monotonic() + DEADLINE_S
    while (left_ns := gone(node.truth(), process.pid)) is None:
        assert time.monotonic() < until_s
    say(f"noticed {(left_ns - reaped_ns) / MS:+.1f} ms from when it was reaped")
    end(process)
    truth = node.truth()
    assert killed_ns <= left_ns <= reaped_ns + 1000 * MS
    rows = truth.intervals(pid=process.pid)
    assert [row.cut for row in rows] == [False] * (len(rows) - 1) + [True]
    assert rows[-1].end_ns == left_ns
    assert len(rows) < 450
    assert int(node.standin.state.gpus[0]._raw.process_count) == 0
    assert int(node.standin.state.gpus[0]._raw.memory_used_bytes) == 0


def test_the_peer_of_a_killed_trainer_polls_for_ever(node: VirtualNode) -> None:
    code = (
        "gpu = connect(1)\nworld = gpu.group('world', 1, 2)\n"
        "gpu.all_reduce(1.0, world); gpu.launch(60000.0); gpu.all_reduce(1.0, world)\n"
        "print('there', flush=True); time.sleep(60)"
    )
    process = trainer(node, code)
    with use(node, 0) as gpu:
        world = gpu.group("world", 0, 2)
        gpu.all_reduce(1.0, world)
        gpu.all_reduce(1.0, world)
        assert line(process) == "there"
        end(process)
        hung = gpu.event()
        time.sleep(0.2)
        assert not hung.query()
        rows = node.truth().intervals(gpu=0)
        assert [row.ready_ns is None for row in rows] == [False, True]
        # Another process can use the GPU meanwhile.
        with use(node, 0) as other:
            other.launch(1.0)
            other.synchronize()


def test_a_stopped_trainer_lets_its_queue_run_dry(node: VirtualNode) -> None:
    code = (
        "gpu = connect(0)\nprint('there', flush=True)\n"
        "while True:\n    gpu.launch(5.0); gpu.launch(5.0); gpu.synchronize()"
    )
    process = trainer(node, code)
    assert line(process) == "there"
    time.sleep(0.1)
    process.send_signal(signal.SIGSTOP)
    stopped_ns = time.monotonic_ns()
    time.sleep(0.15)
    rows = node.truth().intervals()
    assert rows[-1].end_ns < stopped_ns + 15 * MS
    process.send_signal(signal.SIGCONT)
    until_s = time.monotonic() + DEADLINE_S
    while node.truth().intervals()[-1].end_ns < stopped_ns + 150 * MS:
        assert time.monotonic() < until_s
    end(process)


@pytest.mark.parametrize("doing", ["wait", "launch"])
def test_a_trainer_learns_of_the_death_of_its_node(node: VirtualNode, doing: str) -> None:
    with use(node) as gpu:
        gpu.launch(3_000.0)
        os.kill(node.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(GpuLost):
            while True:
                if doing == "wait":
                    gpu.synchronize()
                gpu.launch(0.001)
                time.sleep(0.01)
                assert time.monotonic() - begin < 3.0


def test_a_lost_gpu_takes_its_contexts_with_it(node: VirtualNode) -> None:
    with use(node, 0) as gpu, use(node, 1) as other:
        for _ in range(100):
            gpu.launch(20.0)
        time.sleep(0.03)
        node.standin.state.gpus[0].lose()
        with pytest.raises(GpuLost, match="fell off the bus"):
            gpu.synchronize()
        with pytest.raises(ValueError, match="GPU 0 is lost"):
            use(node, 0)
        other.launch(1.0)
        other.synchronize()
        node.standin.state.gpus[0].recover()
        with use(node, 0) as again:
            again.launch(1.0)
            again.synchronize()
    assert [row.cut for row in node.truth().intervals(gpu=0)][-2:] == [True, False]


def test_misuse_is_told_in_a_sentence(node: VirtualNode, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no GPU 9: this node has 2"):
        use(node, 9)
    with pytest.raises(GpuLost, match="no virtual GPU node answers at"):
        VirtualGpu(str(tmp_path / "nothing"), 0, 0)
    code = (
        "gpu = connect(0)\n"
        "if os.fork() == 0:\n"
        "    try: gpu.launch(1.0)\n"
        "    except RuntimeError as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    process = trainer(node, code)
    assert line(process).startswith("a forked process cannot use its parent's GPU")
    end(process)


def test_the_truth_is_written_when_the_node_ends(tmp_path: Path) -> None:
    with virtual_gpus(tmp_path, gpus=1) as node, use(node) as gpu:
        gpu.launch(2.0)
        gpu.synchronize()
        gpu.launch(10_000.0)
        time.sleep(0.02)
    truth = Truth.load(node.truth_path)
    assert [row.cut for row in truth.intervals()] == [False, True]
    assert truth.intervals()[1].end_ns == truth.horizon_ns or truth.processes[0].end_ns
