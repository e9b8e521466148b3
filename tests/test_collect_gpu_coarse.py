"""GPUs without GPM: the driver's rings as windows, rings that run dry, byte counters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_agent import GpuAgent
from vgpu import Standin, a100, standin, v100
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import Problem
from whyidle.collect.gpu_coarse import Coarse, parse_samples, stamp_offset_ns
from whyidle.collect.gpu_list import Gpu
from whyidle.collect.gpu_units import Notes
from whyidle.host import Answer, Argument, LiveHost, NvmlError
from whyidle.schema import GpuActivity

GPU = Gpu(uuid="GPU-1", index=0, parent=None)
BEGIN_NS = 1000 * NS_PER_S
PERIOD_US = 166_667


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=1, profile=a100) as made:
        yield made


@pytest.fixture
def agent(node: Standin) -> Iterator[GpuAgent]:
    with GpuAgent(node) as made:
        yield made


def watch(agent: GpuAgent, seconds: float) -> list[dict[str, Any]]:
    """Run as the fast lane does; return the rows of activity."""
    rows = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rows += agent.run("gpu_activity", table="gpu_activity")[0]
        time.sleep(0.125)
    return rows


def test_answers() -> None:
    assert parse_samples(((7, 50), (8, 60))) == ((7, 50.0), (8, 60.0))
    assert parse_samples(()) == parse_samples(None) == ()
    with pytest.raises(ValueError, match="samples"):
        parse_samples(((7,),))


def test_the_clock_of_a_stamp_is_found() -> None:
    clock = VirtualClock(BEGIN_NS)
    wall_us = clock.wall_ns() // 1000
    assert stamp_offset_ns(wall_us - 500_000, clock) == clock.mono_ns() - clock.wall_ns()
    assert stamp_offset_ns(BEGIN_NS // 1000 - 500_000, clock) == 0
    assert stamp_offset_ns(wall_us - 3_600_000_000, clock) is None


def test_windows_are_as_fine_as_the_driver_samples(node: Standin, agent: GpuAgent) -> None:
    """A burst of half a second shows as such, which a reading once a second averages away."""
    gpu = node.state.gpus[0]
    gpu.run(gr=0.2, mem=0.1)
    gpu.steady()
    watch(agent, 0.8)
    gpu.run(gr=0.9, mem=0.3)
    rows = watch(agent, 1.6)
    assert {row["source"] for row in rows} == {"nvml"}
    assert all(row["gr_active_ratio"] is None and row["sm_active_ratio"] is None for row in rows)
    for before, after in itertools.pairwise(rows):
        assert before["t1_ns"] == after["t0_ns"] and after["mono_ns"] == after["t1_ns"]
    lengths = [(row["t1_ns"] - row["t0_ns"]) / NS_PER_S for row in rows]
    assert lengths == pytest.approx([1 / 6] * len(rows), abs=0.002)
    assert [row["utilization_ratio"] for row in rows][-4:] == [0.9] * 4
    assert [row["memory_utilization_ratio"] for row in rows][-4:] == [0.3] * 4
    assert rows[0]["utilization_ratio"] == 0.2
    busy = sum(r["utilization_ratio"] * (r["t1_ns"] - r["t0_ns"]) for r in rows)
    truth = gpu.value("gr", rows[-1]["t1_ns"]) - gpu.value("gr", rows[0]["t0_ns"])
    # The writer's history is exact at the slots; the change of rate is a round away from one.
    assert busy == pytest.approx(truth, rel=0.12)


def test_what_was_before_the_recording_makes_no_rows(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].run(gr=0.5)
    node.state.gpus[0].steady()  # the ring is full
    begin = time.monotonic_ns()
    rows = watch(agent, 1.2)
    assert rows and rows[0]["t0_ns"] > begin - NS_PER_S // 4


def test_it_is_said_once_that_there_is_no_gpm(node: Standin, agent: GpuAgent) -> None:
    watch(agent, 0.4)
    told = [text for subject, text in agent.notes() if subject == node.state.gpus[0].uuid]
    assert len(told) == 1
    assert told[0].startswith("no GPM: Hopper and newer")


def test_a_ring_that_runs_dry_is_stood_in_for(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].run(gr=0.5)
    node.state.gpus[0].steady()
    watch(agent, 0.9)
    node.state.fail("nvmlDeviceGetSamples", 6)
    rows = watch(agent, 4.2)
    assert rows, "utilization stands in after a while"
    assert rows[-1]["utilization_ratio"] == 0.5
    for before, after in itertools.pairwise(rows):
        assert before["t1_ns"] == after["t0_ns"]
    node.state.clear()
    more = watch(agent, 1.5)
    for before, after in itertools.pairwise([rows[-1], *more]):
        assert before["t1_ns"] == after["t0_ns"], "nothing twice, nothing left out"


def test_a_ring_that_is_refused_is_a_problem_and_utilization_serves(
    node: Standin, agent: GpuAgent
) -> None:
    node.state.gpus[0].run(gr=0.7)
    node.state.gpus[0].steady()
    node.state.fail("nvmlDeviceGetSamples", 4)
    rows, problems = agent.run("gpu_activity", table="gpu_activity")
    ((subject, message),) = problems
    assert subject.endswith("Samples") and "(4)" in message
    assert (rows[0]["utilization_ratio"], rows[0]["t0_ns"]) == (0.7, None)
    time.sleep(0.13)
    (after,), problems = agent.run("gpu_activity", table="gpu_activity")
    assert problems == [], "not asked again for a while"
    assert (after["t0_ns"], after["utilization_ratio"]) == (rows[0]["t1_ns"], 0.7)


def test_an_old_driver_without_rings(tmp_path: Path) -> None:
    without = ["nvmlDeviceGetSamples", "nvmlGpmQueryDeviceSupport"]
    with standin(tmp_path, gpus=1, profile=v100, without=without) as node, GpuAgent(node) as agent:
        node.state.gpus[0].run(gr=0.4)
        node.state.gpus[0].steady()
        (row,), problems = agent.run("gpu_activity", table="gpu_activity")
        assert (row["utilization_ratio"], problems) == (0.4, [])
        assert [subject for subject, _ in agent.notes() if subject.endswith("Samples")] == [
            "GPU-00000000-0000-4000-8000-000000000000 Samples"
        ]


def test_bytes_of_links_are_the_drivers_totals(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].run(pcie_tx=1e9, nvlink_tx=1e9)
    (first,), _ = agent.run("gpu_activity", table="gpu_traffic")
    time.sleep(0.3)
    (second,), _ = agent.run("gpu_activity", table="gpu_traffic")
    dt = (second["mono_ns"] - first["mono_ns"]) / NS_PER_S
    pcie = (second["pcie_tx_bytes"] - first["pcie_tx_bytes"]) % (1 << 32)
    assert pcie == pytest.approx(1e9 * dt, rel=0.1)
    nvlink = second["nvlink_tx_bytes"] - first["nvlink_tx_bytes"]
    assert nvlink == pytest.approx(12e9 * dt, rel=0.1)


def test_counters_that_nobody_offers_are_not_asked_for_ever(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=1, profile=a100) as node, GpuAgent(node) as agent:
        node.state.gpus[0].fields(without=[138, 139, 197, 198])
        for _ in range(4):
            assert agent.run("gpu_activity", table="gpu_traffic")[0] == []
        assert node.state.calls()["nvmlDeviceGetFieldValues"] == 1
        assert [s for s, _ in agent.notes() if s.endswith("traffic")] == [
            f"{node.state.gpus[0].uuid} traffic"
        ]


class _Scripted:
    """NVML with a ring of this test's making."""

    def __init__(self) -> None:
        self.samples: tuple[tuple[int, int], ...] = ()
        self.rates: Answer = (25, 5)

    def answer(self, call: str, *args: Argument) -> Answer:
        if call == "Samples":
            return tuple(s for s in self.samples if s[0] > int(args[2])) if args[1] == 1 else ()
        if call == "UtilizationRates":
            return self.rates
        raise NvmlError(3, call, "Not Supported")

    def close(self) -> None:
        """Hold nothing."""


def _activity(coarse: Coarse, host: LiveHost) -> list[GpuActivity]:
    return [row for row in coarse.rows(host, GPU) if isinstance(row, GpuActivity)]


def test_wall_time_that_steps_leaves_windows_that_touch(tmp_path: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    nvml = _Scripted()
    host = LiveHost(str(tmp_path), clock, nvml=nvml)
    coarse = Coarse(Notes())
    rows: list[GpuActivity] = []
    for turn in range(40):
        if turn == 20:
            clock.step_wall(-7 * NS_PER_S)
        if turn == 30:
            clock.step_wall(3600 * NS_PER_S)
        now_us = clock.wall_ns() // 1000
        nvml.samples = tuple((now_us - PERIOD_US * back, 10 + turn) for back in range(9, -1, -1))
        rows += _activity(coarse, host)
        clock.advance(NS_PER_S // 2)
    assert len(rows) > 60
    for before, after in itertools.pairwise(rows):
        assert after.t0_ns is not None and before.t1_ns is not None and after.t1_ns is not None
        assert after.t0_ns >= before.t1_ns and after.t1_ns > after.t0_ns
    host.close()


def test_stamps_of_no_clock_are_a_problem(tmp_path: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    nvml = _Scripted()
    nvml.samples = ((5, 10), (6, 10))
    host = LiveHost(str(tmp_path), clock, nvml=nvml)
    found = list(Coarse(Notes()).rows(host, GPU))
    problems = [item.message for item in found if isinstance(item, Problem)]
    assert any("is the time of no clock here" in text for text in problems)
    (row,) = (item for item in found if isinstance(item, GpuActivity))
    assert row.utilization_ratio == 0.25
    host.close()
