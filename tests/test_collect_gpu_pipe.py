"""Which pipes work: windows of some seconds, with samples of their own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpu_agent import GpuAgent
from vgpu import Standin, standin
from whyidle.clock import NS_PER_S
from whyidle.collect.gpu_pipe import row
from whyidle.collect.gpu_units import MIB

_WORDS = ("integer_active", "tensor_hmma", "tensor_imma", "tensor_dfma", "tensor_dmma")


def test_a_row_of_a_window() -> None:
    values = (1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 9.0, 12.0, 14.0)
    found = row("GPU-1", (0, NS_PER_S, values))
    assert (found.mono_ns, found.t0_ns, found.t1_ns, found.source) == (NS_PER_S, 0, NS_PER_S, "gpm")
    assert (found.integer_active_ratio, found.tensor_hmma_ratio) == (0.01, 0.02)
    tensor = (found.tensor_imma_ratio, found.tensor_dfma_ratio, found.tensor_dmma_ratio)
    assert tensor == (0.03, 0.04, 0.06)
    assert (found.fp64_active_ratio, found.fp16_active_ratio) == (0.07, 0.09)
    assert (found.c2c_tx_bytes, found.c2c_rx_bytes) == (12 * MIB, 14 * MIB)
    refused = row("GPU-1", (0, 1, ((4,), *[None] * 8)))
    assert refused.integer_active_ratio is refused.tensor_hmma_ratio is refused.c2c_tx_bytes is None


def test_what_the_gpu_does_is_what_the_row_says(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=2) as node, GpuAgent(node) as agent:
        _all_pipes(node)
        assert agent.run("gpu_pipe") == ([], []), "whether GPM works is not known yet"
        agent.window()
        assert agent.run("gpu_pipe") == ([], []), "the first sample"
        time.sleep(0.3)
        agent.run("gpu_activity")
        rows, problems = agent.run("gpu_pipe")
        assert problems == []
        assert [one["uuid"] for one in rows] == [gpu.uuid for gpu in node.state.gpus]
        one = rows[1]
        window_s = (one["t1_ns"] - one["t0_ns"]) / NS_PER_S
        assert window_s >= 0.3
        found = [one[f"{name}_ratio"] for name in (*_WORDS, *("fp64_active", "fp16_active"))]
        assert found == pytest.approx([0.11, 0.12, 0.13, 0.14, 0.15, 0.16, 0.18], abs=0.001)
        assert one["c2c_tx_bytes"] == pytest.approx(5e9 * window_s, rel=0.02)
        assert one["c2c_rx_bytes"] == pytest.approx(6e9 * window_s, rel=0.02)
        assert rows[0]["c2c_tx_bytes"] is None, "no such link: not 0"
        uuid = node.state.gpus[0].uuid
        told = [text for subject, text in agent.notes() if subject == f"{uuid} GPM"]
        assert told == ["some metrics are not offered: 100, 101"]
        time.sleep(0.15)
        again = agent.run("gpu_pipe")[0][1]
        assert again["t0_ns"] == one["t1_ns"], "windows touch"


def test_a_gpu_that_is_lost_does_not_hide_the_others(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=2) as node, GpuAgent(node) as agent:
        agent.window()
        agent.run("gpu_pipe")
        node.state.gpus[0].lose()
        time.sleep(0.15)
        rows, problems = agent.run("gpu_pipe")
        assert [one["uuid"] for one in rows] == [node.state.gpus[1].uuid]
        assert [subject for subject, _ in problems] == [node.state.gpus[0].uuid]


def _all_pipes(node: Standin) -> None:
    gpu = node.state.gpus[1]
    gpu.run(integer=0.11, hmma=0.12, imma=0.13, dfma=0.14, dmma=0.15, fp64=0.16, fp16=0.18)
    gpu.run(c2c_tx=5e9, c2c_rx=6e9)
    gpu.c2c()
