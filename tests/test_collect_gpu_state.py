"""State, identity and processes of GPUs through the stand-in library."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_agent import GpuAgent
from trees import write
from vgpu import MigDevice, Process, Standin, a100, standin
from vgpu.ask import Asker, Failed
from whyidle.collect.gpu_info import parse_bus_id, parse_numa_node
from whyidle.collect.gpu_process import parse_processes, parse_utilization
from whyidle.collect.gpu_state import Reading, state_row

GIB = 1 << 30


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=3) as made:
        yield made


@pytest.fixture
def agent(node: Standin) -> Iterator[GpuAgent]:
    with GpuAgent(node) as made:
        yield made


def test_state(node: Standin, agent: GpuAgent) -> None:
    gpu = node.state.gpus[0]
    gpu.set(
        power_mw=631_950,
        clock_mhz=(1980, 1755, 2619, 1500),
        temperature_celsius=61.0,
        memory_temperature_celsius=72.0,
        event_reasons=0x4,
        memory_used_bytes=20 * GIB,
        pcie_generation=4,
        pcie_width=8,
    )
    gpu.run(throttle_power=0.5)
    time.sleep(0.3)
    rows, problems = agent.run("gpu_state")
    assert problems == []
    row = rows[0]
    assert row["nvml_return"] == 0
    assert row["power_instant_milliwatts"] == pytest.approx(631_950, rel=0.01)
    assert row["power_limit_milliwatts"] == 700_000
    assert row["memory_used_bytes"] == 20 * GIB
    assert row["sm_clock_megahertz"] == 1755
    assert row["memory_clock_megahertz"] == 2619
    assert (row["temperature_celsius"], row["memory_temperature_celsius"]) == (61, 72)
    assert row["event_reasons"] == 0x4
    assert (row["pcie_generation"], row["pcie_width"]) == (4, 8)
    assert (row["remap_pending"], row["remap_failed"]) == (False, False)
    time.sleep(0.3)
    after = agent.run("gpu_state")[0][0]
    dt = after["mono_ns"] - row["mono_ns"]
    slowed = after["sw_power_cap_ns"] - row["sw_power_cap_ns"]
    assert slowed == pytest.approx(0.5 * dt, abs=60_000_000), "the driver refreshes every 100 ms"
    energy = after["energy_millijoules"] - row["energy_millijoules"]
    assert energy == pytest.approx(631.95 * dt / 1e6, rel=0.5)
    assert after["sync_boost_ns"] == after["hw_thermal_ns"] == 0


def test_fields_that_a_driver_does_not_know_are_none(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].fields(without=[82, 230, 269, 270, 271])
    rows, problems = agent.run("gpu_state")
    assert problems == []
    row = rows[0]
    names = ("memory_temperature_celsius", "recovery_action", "sw_thermal_ns", "hw_thermal_ns")
    assert [row[name] for name in (*names, "hw_power_brake_ns")] == [None] * 5
    assert row["sw_power_cap_ns"] == 0, "zero where the driver counts and there was none"


def test_an_old_driver_lacks_whole_functions(tmp_path: Path) -> None:
    without = ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetMemoryInfo_v2"]
    with standin(tmp_path, gpus=1, profile=a100, without=without) as node, GpuAgent(node) as agent:
        node.state.gpus[0].set(event_reasons=0x20)
        time.sleep(0.2)
        (row,), problems = agent.run("gpu_state")
        assert problems == []
        assert row["event_reasons"] == 0x20, "by its older name"
        assert row["memory_free_bytes"] > 0


def test_one_refused_value_is_a_problem_of_that_value(node: Standin, agent: GpuAgent) -> None:
    node.state.fail("nvmlDeviceGetPowerUsage", 4, gpu=1)
    rows, problems = agent.run("gpu_state")
    uuid = node.state.gpus[1].uuid
    assert problems == [[f"{uuid} PowerUsage", "NVML PowerUsage: Insufficient Permissions (4)"]]
    assert rows[1]["power_milliwatts"] is None
    assert rows[1]["temperature_celsius"] is not None
    assert rows[1]["nvml_return"] == 0


def test_a_lost_gpu_stays_in_the_list_as_lost(node: Standin, agent: GpuAgent) -> None:
    agent.run("gpu_state")
    node.state.gpus[1].lose()
    for _ in range(2):
        rows, problems = agent.run("gpu_state")
        assert [row["nvml_return"] for row in rows] == [0, 15, 0]
        lost = rows[1]
        assert lost["uuid"] == node.state.gpus[1].uuid
        assert [lost[name] for name in lost if name not in ("mono_ns", "uuid", "nvml_return")] == [
            None
        ] * (len(lost) - 3)
        assert [subject.split()[0] for subject, _ in problems] == [lost["uuid"]]


def test_identity_survives_a_shuffled_enumeration(node: Standin, agent: GpuAgent) -> None:
    before = {row["uuid"]: row["serial"] for row in agent.run("gpu_info")[0]}
    node.state.order([2, 0, 1])
    agent.ask.do("host.close()")
    rows, _ = agent.run("gpu_info")
    assert {row["uuid"]: row["serial"] for row in rows} == before
    assert {row["uuid"]: row["gpu"] for row in rows} == {
        node.state.gpus[2].uuid: 0,
        node.state.gpus[0].uuid: 1,
        node.state.gpus[1].uuid: 2,
    }


def test_what_a_gpu_is(node: Standin, tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root, {"sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n"})
    node.state.gpus[0].link(3, active=0)
    with GpuAgent(node, root=str(root)) as agent:
        agent.window()
        rows, problems = agent.run("gpu_info")
    assert problems == []
    row = rows[0]
    assert row["name"] == "NVIDIA H100 80GB HBM3"
    assert (row["architecture"], row["compute_capability"]) == ("hopper", "9.0")
    assert (row["pci_bus_id"], row["numa_node"], rows[1]["numa_node"]) == ("0000:1b:00.0", 1, None)
    assert (row["nvlinks"], row["nvlinks_active"], rows[1]["nvlinks_active"]) == (18, 17, 18)
    assert (row["gpm"], row["mig"], row["parent_uuid"]) == (True, False, None)
    assert row["driver_version"] == "595.45.04"
    assert (row["max_pcie_generation"], row["max_pcie_width"]) == (5, 16)


def test_a_split_gpu_and_its_parts(node: Standin, agent: GpuAgent) -> None:
    gpu = node.state.gpus[0]
    gpu.mig([MigDevice(uuid="MIG-x", gpu_instance=7, memory_total_bytes=10 * GIB)])
    rows, _ = agent.run("gpu_info")
    found = {row["uuid"]: row for row in rows}
    assert found[gpu.uuid]["mig"] is True
    assert found["MIG-x"]["parent_uuid"] == gpu.uuid
    assert found["MIG-x"]["memory_total_bytes"] == 10 * GIB
    assert "MIG-x" not in {row["uuid"] for row in agent.run("gpu_state")[0]}


def test_processes(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].processes(
        [
            Process(pid=os.getpid(), used_bytes=5 * GIB, sm_percent=40),
            Process(pid=4_190_000, used_bytes=None, kind=2),
        ]
    )
    time.sleep(0.4)
    rows, problems = agent.run("gpu_process")
    assert problems == []
    own, gone = sorted(rows, key=lambda row: int(row["pid"]))
    assert (own["pid"], own["context"], own["memory_bytes"]) == (os.getpid(), "compute", 5 * GIB)
    assert own["start_ns"] > 0
    assert own["sm_utilization_ratio"] == pytest.approx(0.4)
    assert (gone["context"], gone["memory_bytes"], gone["start_ns"]) == ("mps", None, None)
    assert agent.ask("watched.answer()")["gpu"] == [os.getpid(), 4_190_000]
    rows, problems = agent.run("process")
    assert os.getpid() in {row["pid"] for row in rows}
    node.state.gpus[0].processes([])
    assert agent.run("gpu_process") == ([], [])
    assert agent.ask("watched.answer()")["gpu"] == []


def test_utilization_by_process() -> None:
    answer = ((7, 30, 100), (7, 50, 200), (8, 250, 300), (9, 10, 150))
    assert parse_utilization(answer, 90) == ({7: 0.5, 9: 0.1}, 300)
    assert parse_utilization((), 90) == ({}, 90)
    assert parse_utilization(None, 90) == ({}, 90)
    with pytest.raises(ValueError, match="process utilization"):
        parse_utilization(((1, 2),), 0)


def test_a_process_listed_twice_is_added_up() -> None:
    assert parse_processes(((7, 10), (7, 5), (8, None))) == {7: 15, 8: None}
    assert parse_processes(None) == {}
    with pytest.raises(ValueError, match="processes"):
        parse_processes((("x", 1),))


def test_addresses() -> None:
    assert parse_bus_id("00000000:19:00.0") == "0000:19:00.0"
    assert parse_bus_id("00010000:AB:00.0") == "10000:ab:00.0"
    assert parse_bus_id("\x7fgarbage") is None
    assert parse_numa_node("-1\n") is None
    assert parse_numa_node("1\n") == 1


def test_an_unknown_p_state_is_none() -> None:
    row = state_row("GPU-1", 1, 0, Reading(answers={"pstate": 32}))
    assert row.performance_state is None


def test_a_driver_reload_is_survived(node: Standin, agent: GpuAgent) -> None:
    agent.run("gpu_state")
    node.state.fail("nvmlDeviceGetPowerUsage", 1, times=1)  # uninitialised
    rows, problems = agent.run("gpu_state")
    assert problems != []
    assert rows[0]["power_milliwatts"] is None
    agent.ask.do("host._nvml._failed = None")  # do not wait for the pause of ten seconds
    rows, problems = agent.run("gpu_state")
    assert problems == []
    assert rows[0]["power_milliwatts"] is not None


def test_a_replaced_driver_says_restart(node: Standin, agent: GpuAgent) -> None:
    node.state.fail("nvmlDeviceGetCount_v2", 18)
    with pytest.raises(Failed, match="restart the agent"):
        agent.run("gpu_state")


def test_a_driver_that_is_not_loaded_is_a_failure(node: Standin, agent: GpuAgent) -> None:
    node.state.fail("nvmlInitWithFlags", 9)
    with pytest.raises(Failed, match=r"\(9\)"):
        agent.run("gpu_state")


def test_without_the_library_there_is_no_data() -> None:
    # In a process of its own: in this one another test may have loaded the stand-in.
    with Asker({}, init=False) as ask:
        try:
            ask("__import__('ctypes').CDLL('libnvidia-ml.so.1')")
        except Failed:
            pass
        else:
            pytest.skip("this machine has an NVIDIA driver")
        ask.do("from whyidle.clock import SystemClock\nfrom whyidle.live import live_host")
        ask.do("from whyidle.collect.gpu_state import GPU_STATE")
        with pytest.raises(
            Failed, match=r"NoData: no NVIDIA driver: libnvidia-ml\.so\.1 not found"
        ):
            ask("list(GPU_STATE.make()(live_host('/', SystemClock())))")
