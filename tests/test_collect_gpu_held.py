"""GPM windows that are evaluated together: the same rows, and none lost on the way."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_agent import GpuAgent
from vgpu import Standin, standin
from whyidle.clock import NS_PER_S
from whyidle.nvml_fast import _RING_SAMPLES

PERIOD_S = 0.125


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=2) as made:
        yield made


@pytest.fixture
def agent(node: Standin) -> Iterator[GpuAgent]:
    with GpuAgent(node) as made:
        made.ask.do("hold()")
        yield made


def run(agent: GpuAgent, times: int) -> list[list[dict[str, Any]]]:
    """Return the rows of runs at the pace of the fast lane."""
    found = []
    for _ in range(times):
        found.append(agent.run("gpu_activity", table="gpu_activity")[0])
        time.sleep(PERIOD_S)
    return found


def check_chain(rows: list[dict[str, Any]]) -> None:
    """Fail unless the windows of a GPU touch."""
    for before, after in itertools.pairwise(rows):
        assert before["t1_ns"] == after["t0_ns"]


def test_rows_come_together_at_the_turn_of_a_second(node: Standin, agent: GpuAgent) -> None:
    busy = node.state.gpus[0]
    busy.run(gr=0.5, sm=0.25)
    runs = run(agent, 20)
    told = [number for number, rows in enumerate(runs) if rows]
    assert len(told) == 2, "nothing at the first second, which ended no window"
    rows = [row for one in runs for row in one if row["uuid"] == busy.uuid]
    assert len(rows) >= 12
    check_chain(rows)
    for row in rows[1:]:
        assert row["gr_active_ratio"] == pytest.approx(0.5, abs=0.02)
        assert row["t1_ns"] - row["t0_ns"] >= 0.1 * NS_PER_S
        assert row["mono_ns"] == row["t1_ns"]
    of_now = [row["utilization_ratio"] is not None for row in rows]
    assert sum(of_now) == 2, "what other tools show is asked once a second"


def test_what_is_held_back_is_given_at_the_end(node: Standin, agent: GpuAgent) -> None:
    run(agent, 4)
    rows = [row for row in agent.ask("release()") if row["uuid"] == node.state.gpus[1].uuid]
    assert len(rows) == 3
    check_chain(rows)
    assert agent.ask("release()") == []


def test_a_gpu_that_is_lost_leaves_the_windows_before(node: Standin, agent: GpuAgent) -> None:
    run(agent, 4)
    lost = node.state.gpus[1]
    lost.lose()
    rows, problems = agent.run("gpu_activity", table="gpu_activity")
    assert [row["uuid"] for row in rows] == [lost.uuid] * 3
    assert [subject for subject, _ in problems] == [lost.uuid]
    check_chain(rows)
    calls = node.state.calls()
    assert calls["nvmlGpmSampleFree"] == _RING_SAMPLES


def test_windows_that_nobody_asks_for_are_kept(node: Standin, agent: GpuAgent) -> None:
    """A run at the turn of a second that fails must not cost what came before it."""
    uuid = node.state.gpus[0].uuid
    ended = 0
    for _ in range(_RING_SAMPLES + 3):
        ended += agent.nvml("gpm_sample", uuid)[0]
        time.sleep(0.105)
    assert ended == _RING_SAMPLES + 2
    windows = agent.nvml("gpm_windows", uuid)
    assert len(windows) == ended
    assert all(before[1] == after[0] for before, after in itertools.pairwise(windows))
    assert agent.nvml("gpm_windows", uuid) == []


def test_a_gpu_without_gpm_is_told_at_each_run(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].gpm(supported=False)
    runs = run(agent, 12)
    uuid = node.state.gpus[0].uuid
    told = [[row["source"] for row in rows if row["uuid"] == uuid] for rows in runs]
    assert {source for sources in told for source in sources} == {"nvml"}
    assert sum(map(bool, told)) > 1
