"""The lean NVML path: decoding, and buffers that are given back."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_agent import GpuAgent
from vgpu import Standin, standin
from vgpu.ask import Failed
from whyidle import nvml_fast
from whyidle.live import Watched
from whyidle.nvml_fast import _field


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=2) as made:
        yield made


@pytest.fixture
def agent(node: Standin) -> Iterator[GpuAgent]:
    with GpuAgent(node) as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (0, struct.unpack("<Q", struct.pack("<d", 61.5))[0], 61.5),
        (0, struct.unpack("<Q", struct.pack("<d", float("nan")))[0], None),
        (1, 0xAAAAAAAA_00000007, 7),
        (2, 1 << 40, 1 << 40),
        (3, (1 << 64) - 1, (1 << 64) - 1),
        (4, (1 << 64) - 5, -5),
        (5, 0xFFFFFFFB, -5),
        (6, 0xFFFF0003, 3),
        (99, 1, None),
    ],
)
def test_each_type_of_a_field(kind: int, value: int, expected: float | None) -> None:
    assert _field(kind, 0, value) == expected


@pytest.mark.parametrize(("code", "expected"), [(3, None), (2, None), (13, None), (4, (4,))])
def test_what_a_field_answers_instead(code: int, expected: object) -> None:
    assert _field(3, code, 12345) == expected


def test_samples_are_given_back(node: Standin, agent: GpuAgent) -> None:
    for _ in range(3):
        agent.window()
        agent.ask.do("host.close()")
    calls = node.state.calls()
    assert calls["nvmlGpmSampleAlloc"] == 3 * 2 * nvml_fast._RING_SAMPLES
    assert calls["nvmlGpmSampleFree"] == calls["nvmlGpmSampleAlloc"]


def test_a_lost_gpus_samples_are_given_back(node: Standin, agent: GpuAgent) -> None:
    agent.window()
    node.state.gpus[1].lose()
    time.sleep(0.11)
    agent.run("gpu_activity")
    assert node.state.calls()["nvmlGpmSampleFree"] == nvml_fast._RING_SAMPLES


def test_after_a_failed_sample_windows_begin_anew(node: Standin, agent: GpuAgent) -> None:
    agent.window()
    time.sleep(0.11)
    node.state.fail("nvmlGpmSampleGet", 999, gpu=0, times=1)
    rows, problems = agent.run("gpu_activity", table="gpu_activity")
    assert [row["source"] for row in rows] == ["nvml", "gpm"]
    assert len(problems) == 1
    time.sleep(0.11)
    rows, problems = agent.run("gpu_activity")
    assert ([row["uuid"] for row in rows], problems) == ([node.state.gpus[1].uuid], [])
    time.sleep(0.11)
    rows, _ = agent.run("gpu_activity")
    assert [row["source"] for row in rows] == ["gpm", "gpm"]


def test_an_unknown_question_is_a_bug_of_ours(agent: GpuAgent) -> None:
    uuid = agent.nvml("gpus")[0][0]
    with pytest.raises(Failed, match="KeyError"):
        agent.nvml("NoSuchQuestion", uuid)


def test_an_unknown_gpu_says_so(agent: GpuAgent) -> None:
    answer = agent.nvml("PowerUsage", "GPU-none")
    assert answer["call"] == "HandleByUUID"
    assert answer["code"] in (2, 6)


def test_a_question_of_fields_keeps_its_buffer(agent: GpuAgent) -> None:
    uuid = agent.nvml("gpus")[0][0]
    assert agent.nvml("FieldValues", uuid, 74, 186, 99_999) == [0, 70_000, None]
    assert agent.nvml("FieldValues", uuid, 74, 186, 99_999) == [0, 70_000, None]


def test_memory_does_not_grow(agent: GpuAgent) -> None:
    agent.ask.do("import resource, gc")
    agent.ask.do(
        "def turn(n):\n"
        "    for _ in range(n):\n"
        "        for name in ('gpu_state', 'gpu_info', 'gpu_process'):\n"
        "            run(name)\n"
        "    gc.collect()\n"
        "    return int(open('/proc/self/statm').read().split()[1])\n"
    )
    agent.ask("turn(100)")
    before = agent.ask("turn(1)")
    after = agent.ask("turn(300)")
    assert after - before < 256, "pages of 4 KiB"


def test_who_is_watched() -> None:
    watched = Watched(commands=(5,))
    assert watched.answer() == {"gpu": None, "commands": (5,)}
    watched.found("GPU-a compute", [9, 7])
    watched.found("GPU-b compute", [7])
    assert watched.answer() == {"gpu": (7, 9), "commands": (5,)}
    watched.found("GPU-a compute", [])
    assert watched.answer() == {"gpu": (7,), "commands": (5,)}
