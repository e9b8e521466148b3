"""GPU activity through the stand-in library: values, windows, refusals, lost and split GPUs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_agent import GpuAgent
from vgpu import Count, MigDevice, Standin, standin
from vgpu.ask import Failed
from whyidle.collect.gpu_activity import METRICS, gpm_row
from whyidle.collect.gpu_units import bytes_of_rate, gpm_window, percent
from whyidle.nvml_fast import GPM_METRICS

NS_PER_S = 1_000_000_000
MIB = 1 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=4) as made:
        yield made


@pytest.fixture
def agent(node: Standin) -> Iterator[GpuAgent]:
    with GpuAgent(node) as made:
        yield made


def test_units() -> None:
    assert percent(60.004) == 0.6
    assert percent(None) is percent((4,)) is percent("60") is None
    assert bytes_of_rate(8.0, NS_PER_S // 8) == MIB
    assert bytes_of_rate(None, 1) is None


def test_a_row_of_a_window() -> None:
    values = (50.0, 40.0, 30.0, 20.0, 10.0, 5.0, 8.0, 16.0, 24.0, 32.0)
    row = gpm_row("GPU-1", (0, NS_PER_S, values), (51, 9))
    assert (row.mono_ns, row.t0_ns, row.t1_ns, row.source) == (NS_PER_S, 0, NS_PER_S, "gpm")
    ratios = (row.gr_active_ratio, row.sm_active_ratio, row.sm_occupancy_ratio)
    assert ratios == (0.5, 0.4, 0.3)
    assert (row.tensor_active_ratio, row.dram_active_ratio) == (0.2, 0.1)
    assert row.fp32_active_ratio == 0.05
    assert (row.pcie_tx_bytes, row.pcie_rx_bytes) == (8 * MIB, 16 * MIB)
    assert (row.nvlink_rx_bytes, row.nvlink_tx_bytes) == (24 * MIB, 32 * MIB)
    assert (row.utilization_ratio, row.memory_utilization_ratio) == (0.51, 0.09)


def test_refused_parts_are_none() -> None:
    row = gpm_row("GPU-1", (0, 1, (50.0, (4,), *[None] * 8)), None)
    assert row.gr_active_ratio == 0.5
    assert row.sm_active_ratio is row.utilization_ratio is row.pcie_tx_bytes is None


@pytest.mark.parametrize("answer", [None, (1, 2), (1, 2, (1.0,)), ("a", 2, (1.0,) * 10), 7])
def test_what_is_no_window_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="gpm"):
        gpm_window("gpm", answer, 10)  # type: ignore[arg-type]


def test_the_order_of_metrics_is_that_of_the_answer() -> None:
    assert METRICS == GPM_METRICS


def test_a_journal_of_before_has_more_values() -> None:
    _, _, values = gpm_window("gpm", (1, 2, (1.0,) * 10 + (2.0,) * 9), len(METRICS))
    assert values == (1.0,) * 10


def test_what_the_gpu_does_is_what_the_row_says(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[1].run(
        gr=0.6, sm=0.5, tensor=0.3, dram=0.2, pcie_tx=1e9, pcie_rx=2e9, nvlink_tx=1e9, nvlink_rx=3e9
    )
    node.state.gpus[1].run(fp32=0.17)
    rows, problems = agent.window()
    assert problems == []
    assert [row["uuid"] for row in rows] == [gpu.uuid for gpu in node.state.gpus]
    row = rows[1]
    assert row["source"] == "gpm"
    assert row["gr_active_ratio"] == pytest.approx(0.6, abs=0.001)
    assert row["sm_active_ratio"] == pytest.approx(0.5, abs=0.001)
    assert row["tensor_active_ratio"] == pytest.approx(0.3, abs=0.001)
    assert row["dram_active_ratio"] == pytest.approx(0.2, abs=0.001)
    window_s = (row["t1_ns"] - row["t0_ns"]) / NS_PER_S
    assert window_s >= 0.1
    assert row["pcie_tx_bytes"] == pytest.approx(1e9 * window_s, rel=0.02)
    assert row["pcie_rx_bytes"] == pytest.approx(2e9 * window_s, rel=0.02)
    assert row["nvlink_tx_bytes"] == pytest.approx(18e9 * window_s, rel=0.02)
    assert row["nvlink_rx_bytes"] == pytest.approx(54e9 * window_s, rel=0.02)
    assert row["fp32_active_ratio"] == pytest.approx(0.17, abs=0.001)
    assert rows[0]["gr_active_ratio"] == 0.0


def test_what_is_not_offered_is_said_once(node: Standin, agent: GpuAgent) -> None:
    agent.window()
    uuid = node.state.gpus[0].uuid
    node.state.gpus[0].gpm(without=[3])
    agent.window()
    agent.window()
    told = [text for subject, text in agent.notes() if subject == f"{uuid} GPM"]
    assert told == ["some metrics are not offered: 3"]
    node.state.gpus[0].gpm(without=[3, 5])
    agent.window()
    told = [text for subject, text in agent.notes() if subject == f"{uuid} GPM"]
    assert told[1:] == ["some metrics are not offered: 3, 5"]


def test_the_first_run_has_no_window_and_a_soon_one_neither(agent: GpuAgent) -> None:
    assert agent.run("gpu_activity") == ([], [])
    assert agent.run("gpu_activity") == ([], []), "less than 100 ms after the first"
    time.sleep(0.12)
    assert len(agent.run("gpu_activity")[0]) == 4


def test_windows_touch_and_conserve_work(node: Standin, agent: GpuAgent) -> None:
    """Whatever the sampling, busy time over all windows is what the GPU was busy."""
    gpu = node.state.gpus[0]
    agent.run("gpu_activity")
    rows = []
    for index in range(8):
        gpu.run(gr=0.9 if index % 2 else 0.1)
        time.sleep(0.13)
        rows += [row for row in agent.run("gpu_activity")[0] if row["uuid"] == gpu.uuid]
    assert len(rows) == 8
    for before, after in itertools.pairwise(rows):
        assert before["t1_ns"] == after["t0_ns"]
    found = sum(row["gr_active_ratio"] * (row["t1_ns"] - row["t0_ns"]) for row in rows)
    # It was idle before the first sample. The middle of a sample stands for it, so the error is
    # what the two outer calls took.
    assert found == pytest.approx(gpu.value("gr", rows[-1]["t1_ns"]), rel=0.01)
    assert all(row["t1_ns"] - row["t0_ns"] >= 100_000_000 for row in rows)


def test_no_permission_for_gpm_falls_back_and_says_so(node: Standin, agent: GpuAgent) -> None:
    gpu = node.state.gpus[0]
    gpu.run(gr=0.6)
    gpu.steady()
    gpu.gpm(code=4)
    agent.run("gpu_activity")
    time.sleep(0.6)
    rows, problems = agent.run("gpu_activity", table="gpu_activity")
    own = [row for row in rows if row["uuid"] == gpu.uuid]
    assert {row["source"] for row in own} == {"nvml"}
    assert [row["source"] for row in rows if row["uuid"] != gpu.uuid] == ["gpm"] * 3
    assert own[0]["gr_active_ratio"] is None
    assert own[0]["utilization_ratio"] == pytest.approx(0.6, abs=0.02)
    ((subject, message),) = problems
    assert subject == gpu.uuid
    assert "(4)" in message
    gpu.gpm(code=0)
    rows, problems = agent.window()
    assert (rows[0]["source"], problems) == ("gpm", [])


def test_gpm_that_is_claimed_and_does_not_work_is_told_as_such(
    node: Standin, agent: GpuAgent
) -> None:
    node.state.gpus[0].gpm(code=3)
    agent.window()
    rows, _ = agent.run("gpu_info")
    assert [row["gpm"] for row in rows] == [False, True, True, True]


def test_one_metric_that_is_missing_takes_no_other_along(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].run(gr=0.6, nvlink_tx=1e9)
    node.state.gpus[0].gpm(without=[3, 60, 61])
    rows, problems = agent.window(table="gpu_activity")
    assert problems == []
    assert rows[0]["gr_active_ratio"] == pytest.approx(0.6, abs=0.001)
    assert rows[0]["sm_occupancy_ratio"] is None
    assert rows[0]["nvlink_tx_bytes"] is None
    ((traffic,), _) = agent.window(table="gpu_traffic")
    assert traffic["uuid"] == node.state.gpus[0].uuid
    assert traffic["nvlink_tx_bytes"] > 0, "the counters serve where GPM is silent"
    assert traffic["pcie_tx_bytes"] is None, "GPM tells that"


def test_a_lost_gpu_is_a_problem_of_that_gpu(node: Standin, agent: GpuAgent) -> None:
    agent.window()
    node.state.gpus[2].lose()
    rows, problems = agent.window()
    assert [row["uuid"] for row in rows] == [gpu.uuid for gpu in node.state.gpus if gpu.slot != 2]
    ((subject, message),) = problems
    assert subject == node.state.gpus[2].uuid
    assert "lost" in message


def test_looking_for_a_lost_gpu_is_not_repeated_at_once(node: Standin, agent: GpuAgent) -> None:
    agent.window()
    node.state.gpus[2].lose()
    before = node.state.calls().get("nvmlDeviceGetHandleByUUID", 0)
    for _ in range(5):
        agent.run("gpu_activity")
    assert node.state.calls().get("nvmlDeviceGetHandleByUUID", 0) - before <= 1


def test_the_parts_of_a_split_gpu_are_what_runs(node: Standin, agent: GpuAgent) -> None:
    gpu = node.state.gpus[0]
    parts = [
        MigDevice(uuid=f"MIG-{index}", gpu_instance=index + 7, memory_total_bytes=10 << 30)
        for index in range(2)
    ]
    gpu.mig(parts)
    gpu.run_mig(1, {Count.GR: 0.8})
    rows, problems = agent.window()
    assert problems == []
    found = {row["uuid"]: row["gr_active_ratio"] for row in rows}
    assert gpu.uuid not in found
    assert found["MIG-0"] == 0.0
    assert found["MIG-1"] == pytest.approx(0.8, abs=0.001)


def test_no_gpu_is_a_failure_that_says_what_to_look_at(tmp_path: Path) -> None:
    with (
        standin(tmp_path, gpus=0) as node,
        GpuAgent(node) as agent,
        pytest.raises(Failed, match="the driver shows no GPU"),
    ):
        agent.run("gpu_activity")


def test_utilization_is_asked_once_a_second_beside_gpm(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].run(gr=0.4)
    found = []
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        rows, _ = agent.run("gpu_activity")
        found += [row["utilization_ratio"] for row in rows if row["uuid"].endswith("0")]
        time.sleep(0.13)
    told = [ratio for ratio in found if ratio is not None]
    assert 2 <= len(told) <= 3
    assert told[-1] == pytest.approx(0.4, abs=0.02)


def test_a_window_asks_the_driver_twice_a_gpu(node: Standin, agent: GpuAgent) -> None:
    agent.window()
    before = node.state.calls()
    time.sleep(0.12)
    agent.run("gpu_activity")
    asked = {
        name: count - before.get(name, 0)
        for name, count in node.state.calls().items()
        if count != before.get(name, 0)
    }
    assert asked == {"nvmlGpmSampleGet": 4, "nvmlGpmMetricsGet": 4}
