"""NVLink by link, totals of GPM, the NVLink domain, MIG layout and Xids through the stand-in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_agent import GpuAgent
from vgpu import MigDevice, Standin, a100, b200, standin
from vgpu.ask import Failed
from whyidle.collect.gpu_info import parse_fabric
from whyidle.collect.gpu_nvlink import link_count

ERRORS = ("replays", "recoveries", "crc_errors")
BLACKWELL = ("recoveries_failed", "rx_errors", "effective_errors", "symbol_errors")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=2) as made:
        yield made


@pytest.fixture
def agent(node: Standin) -> Iterator[GpuAgent]:
    with GpuAgent(node) as made:
        yield made


def by_link(rows: list[dict[str, Any]], uuid: str) -> dict[int, dict[str, Any]]:
    return {row["link"]: row for row in rows if row["uuid"] == uuid}


def test_each_link(node: Standin, agent: GpuAgent) -> None:
    gpu = node.state.gpus[0]
    gpu.link(3, replays=5, recoveries=2, crc_errors=9)
    gpu.link(4, active=0)
    gpu.run_link(7, tx=3e9, rx=1e9)
    time.sleep(0.2)
    rows, problems = agent.run("gpu_nvlink")
    assert (len(rows), problems) == (36, [])
    links = by_link(rows, gpu.uuid)
    assert sorted(links) == list(range(18))
    assert [links[3][name] for name in ERRORS] == [5, 2, 9]
    assert [links[2][name] for name in ERRORS] == [0, 0, 0]
    assert [links[3][name] for name in BLACKWELL] == [None] * 4, "not counted on Hopper: not 0"
    assert (links[4]["up"], links[4]["speed_bytes_per_s"]) == (False, None)
    assert links[3]["up"] is True and links[3]["speed_bytes_per_s"] > 20e9
    assert (links[3]["remote"], links[3]["remote_pci"]) == ("switch", "0000:06:00.0")
    assert (links[4]["remote"], links[4]["remote_pci"]) == ("switch", None)
    time.sleep(0.3)
    later = by_link(agent.run("gpu_nvlink")[0], gpu.uuid)
    dt = (later[7]["mono_ns"] - links[7]["mono_ns"]) / 1e9
    assert later[7]["tx_bytes"] - links[7]["tx_bytes"] == pytest.approx(3e9 * dt, rel=0.05)
    assert later[7]["rx_bytes"] - links[7]["rx_bytes"] == pytest.approx(1e9 * dt, rel=0.05)
    assert later[8]["tx_bytes"] == links[8]["tx_bytes"]


def test_blackwell_counts_under_other_numbers(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=1, profile=b200) as node, GpuAgent(node) as agent:
        gpu = node.state.gpus[0]
        gpu.fields(without=[138, 139])
        gpu.link(0, recoveries=4, recoveries_failed=1, rx_errors=6, effective_errors=7)
        gpu.link(0, symbol_errors=8, replays=3)
        gpu.run_link(0, tx=1e9)
        time.sleep(0.2)
        row = agent.run("gpu_nvlink")[0][0]
        assert (row["replays"], row["crc_errors"]) == (None, None)
        assert [row[name] for name in ("recoveries", *BLACKWELL)] == [4, 1, 6, 7, 8]
        assert row["tx_bytes"] > 100_000_000


def test_what_is_at_the_other_end_is_asked_rarely(node: Standin, agent: GpuAgent) -> None:
    for _ in range(3):
        agent.run("gpu_nvlink")
    assert node.state.calls()["nvmlDeviceGetNvLinkRemoteDeviceType"] == 36


def test_a_gpu_without_links_says_so_once(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[1].fields(without=[91])
    for _ in range(2):
        rows, problems = agent.run("gpu_nvlink")
        assert (len(rows), problems) == (18, [])
    assert agent.notes() == [[node.state.gpus[1].uuid, "it has no NVLink"]]


def test_a_lost_gpu_takes_no_other_along(node: Standin, agent: GpuAgent) -> None:
    agent.run("gpu_nvlink")
    node.state.gpus[0].lose()
    rows, problems = agent.run("gpu_nvlink")
    assert {row["uuid"] for row in rows} == {node.state.gpus[1].uuid}
    ((subject, message),) = problems
    assert subject == node.state.gpus[0].uuid and "lost" in message


def test_counts_that_are_garbage() -> None:
    assert link_count((18,)) == 18
    assert link_count((10**9,)) is link_count((-1,)) is link_count((None,)) is None
    assert link_count(None) is link_count(()) is None


def test_totals_since_boot(node: Standin, agent: GpuAgent) -> None:
    gpu = node.state.gpus[0]
    gpu.run(sm=0.5, tensor=0.25, fp32=0.1, pcie_tx=1e9, pcie_rx=2e9)
    assert agent.run("gpu_total") == ([], []), "no pair of samples yet"
    agent.window()
    first = agent.run("gpu_total")[0][0]
    time.sleep(0.3)
    agent.run("gpu_activity")
    second = agent.run("gpu_total")[0][0]
    grown = {
        name: second[name] - first[name]
        for name in first
        if name.endswith(("_cycles", "_bytes")) and first[name] is not None
    }
    elapsed = grown.pop("sm_elapsed_cycles")
    assert elapsed > 200_000_000
    assert grown == {
        "sm_active_cycles": pytest.approx(0.5 * elapsed, rel=0.01),
        "tensor_active_cycles": pytest.approx(0.25 * elapsed, rel=0.01),
        "fp32_active_cycles": pytest.approx(0.1 * elapsed, rel=0.01),
        "pcie_tx_bytes": pytest.approx(elapsed, rel=0.01),
        "pcie_rx_bytes": pytest.approx(2 * elapsed, rel=0.01),
    }


def test_totals_that_are_not_offered_are_said_once(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].gpm(without=range(248, 261))
    for _ in range(2):
        agent.window()
        rows, problems = agent.run("gpu_total")
        assert ([row["uuid"] for row in rows], problems) == ([node.state.gpus[1].uuid], [])
    told = [text for _, text in agent.notes() if "totals" in text]
    assert told == ["totals since boot are not offered by this GPU or driver (GPM 248 to 260)"]


def test_totals_wait_for_gpm(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=1, profile=a100) as node, GpuAgent(node) as agent:
        agent.run("gpu_activity")
        assert agent.run("gpu_total") == ([], [])


def test_the_nvlink_domain(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].fabric(state=3, clique=7, health_mask=0x5, summary=2)
    node.state.gpus[1].fabric(state=2, clique=7, health_mask=0, summary=0)
    first, second = agent.run("gpu_info")[0]
    names = ("state", "clique", "status", "health", "health_mask")
    assert [first[f"fabric_{name}"] for name in names] == ["completed", 7, 0, "unhealthy", 5]
    assert [second[f"fabric_{name}"] for name in names] == ["in_progress", *[None] * 4]


def test_an_older_library_has_no_health_summary(node: Standin, agent: GpuAgent) -> None:
    uuid = node.state.gpus[0].uuid
    assert agent.nvml("FabricInfo", uuid)[2:] == [0, 3, 0, 1]
    node.state.fail("nvmlDeviceGetGpuFabricInfoV", 25, times=1)
    assert agent.nvml("FabricInfo", uuid)[2:] == [0, 3, 0, None]
    node.state.fail("nvmlDeviceGetGpuFabricInfoV", 25, times=2)
    assert agent.nvml("FabricInfo", uuid)["code"] == 25


def test_a_gpu_without_a_domain_has_none(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=1, profile=a100) as node, GpuAgent(node) as agent:
        (row,), problems = agent.run("gpu_info")
        assert problems == []
        assert {row[name] for name in row if name.startswith("fabric_")} == {None}


def test_answers_of_the_domain() -> None:
    cluster = "6d2f5c1e-0000-4000-8000-000000000001"
    found = parse_fabric((cluster, 0, 3, 3, 1, 3))
    assert (found.cluster, found.clique, found.health) == (cluster, 3, "limited_capacity")
    assert parse_fabric((cluster, 0, 3, 9, 1, 3)) == parse_fabric(7) == parse_fabric(None)


def test_mig_layout(node: Standin, agent: GpuAgent) -> None:
    node.state.gpus[0].mig(
        [
            MigDevice(uuid="MIG-a", gpu_instance=7, memory_total_bytes=10 << 30, slices=1),
            MigDevice(
                uuid="MIG-b",
                gpu_instance=1,
                compute_instance=2,
                memory_total_bytes=40 << 30,
                slices=4,
                multiprocessors=60,
            ),
        ]
    )
    rows = {row["uuid"]: row for row in agent.run("gpu_info")[0]}
    names = ("gpu_instance", "compute_instance", "gpu_slices", "compute_slices", "multiprocessors")
    assert [rows["MIG-a"][name] for name in names] == [7, 0, 1, 1, 16]
    assert [rows["MIG-b"][name] for name in names] == [1, 2, 4, 4, 60]
    whole = rows[node.state.gpus[0].uuid]
    assert [whole[name] for name in names[:4]] == [None] * 4
    assert rows["MIG-b"]["parent_uuid"] == whole["uuid"]


def test_xids_of_the_event_set(node: Standin, agent: GpuAgent) -> None:
    assert agent.run("gpu_event") == ([], [])
    node.state.gpus[1].xid(79)
    node.state.gpus[0].xid(31)
    node.state.event(2, 5, 0)  # a double-bit ECC error: not asked for
    rows, problems = agent.run("gpu_event")
    assert problems == []
    assert [(row["uuid"], row["xid"]) for row in rows] == [
        (node.state.gpus[1].uuid, 79),
        (node.state.gpus[0].uuid, 31),
    ]
    assert {(row["kind"], row["source"], row["gpu_instance"]) for row in rows} == {
        ("xid", "nvml", None)
    }
    assert rows[0]["pci_bus_id"] == "0000:43:00.0"
    assert agent.run("gpu_event") == ([], []), "each is told once"


def test_a_lost_gpu_leaves_the_others_listened_to(node: Standin, agent: GpuAgent) -> None:
    agent.run("gpu_event")
    node.state.gpus[1].xid(79)
    node.state.gpus[1].lose()
    rows, _ = agent.run("gpu_event")
    assert [row["xid"] for row in rows] == [79], "what came before is told"
    assert agent.run("gpu_event") == ([], []), "gpu_state says that it is lost"
    node.state.gpus[0].xid(31)
    rows, problems = agent.run("gpu_event")
    assert ([row["uuid"] for row in rows], problems) == ([node.state.gpus[0].uuid], [])


def test_a_gpu_that_takes_no_events_takes_no_other_along(node: Standin, agent: GpuAgent) -> None:
    node.state.fail("nvmlDeviceRegisterEvents", 3, gpu=0)
    agent.run("gpu_event")
    node.state.gpus[0].xid(13)
    node.state.gpus[1].xid(79)
    assert [row["xid"] for row in agent.run("gpu_event")[0]] == [79]


def test_a_driver_without_event_sets_is_no_data(tmp_path: Path) -> None:
    with (
        standin(tmp_path, gpus=1, without=["nvmlEventSetCreate"]) as node,
        GpuAgent(node) as agent,
        pytest.raises(Failed, match="no event sets"),
    ):
        agent.run("gpu_event")


def test_a_driver_that_is_reloaded_is_listened_to_anew(node: Standin, agent: GpuAgent) -> None:
    agent.run("gpu_event")
    agent.ask.do("host.close()")
    assert agent.run("gpu_event") == ([], [])
    node.state.gpus[0].xid(48)
    assert [row["xid"] for row in agent.run("gpu_event")[0]] == [48]
    assert node.state.calls()["nvmlEventSetFree"] == 1
