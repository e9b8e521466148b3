"""GPUDirect Storage: statistics on and off, every recorded form, peers, damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_tree import node
from trees import BEGIN_NS, damaged, gather, host_of, shared, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import NoData
from whyidle.collect.gds import GDS
from whyidle.collect.gds_text import parse_peers, parse_stats
from whyidle.schema import Gds, GdsGpu, GdsPeer

STATS = "proc/driver/nvidia-fs/stats"
OFF = (
    "GDS Version: 1.14.0.31\nNVFS Driver(version: 2.25.7)\n"
    "IO stats: Disabled, peer IO stats: Disabled\nActive Shadow-Buffer (MiB): 0\n"
    "Active Process: 0\nReads                : err=2 io_state_err=1\n"
)
MIB = 1 << 20


def test_statistics_on(tmp_path: Path) -> None:
    node().put(tmp_path)
    rows, problems = gather(GDS.make(), host_of(tmp_path))
    assert problems == []
    row = rows[0]
    assert isinstance(row, Gds)
    assert (row.version, row.driver) == ("1.11.0.15", "2.22.3")
    assert (row.io_stats, row.peer_stats) == (True, False)
    assert (row.processes, row.shadow_buffer_bytes) == (2, 128 * MIB)
    assert (row.reads, row.reads_done, row.read_errors) == (4096, 4095, 1)
    assert (row.read_bytes, row.read_state_errors) == (4095 * MIB, 0)
    assert (row.writes, row.writes_done, row.write_bytes) == (64, 64, 64 * MIB)
    assert (row.batches, row.batch_errors, row.page_cache_writes) == (10, 1, 3)
    assert (row.map_errors, row.in_progress) == (2, 4)
    gpu = rows[1]
    assert isinstance(gpu, GdsGpu)
    assert (gpu.gpu, gpu.pci) == ("GPU-12a86a5e-3002-108f-ee49-4b51266cdc07", "0000:19:00.0")
    assert (gpu.registered_bytes, gpu.cache_bytes) == (32 * MIB, 16 * MIB)
    assert (gpu.max_pinned_bytes, gpu.cross_root_port_ratio) == (64 * MIB, 0.25)
    near, far = rows[2:]
    assert isinstance(near, GdsPeer) and isinstance(far, GdsPeer)
    assert (near.peer_pci, near.peer_class, near.distance) == ("0000:1a:00.0", "nvme", 2)
    assert (near.rank, near.link_width, near.link_generation, near.numa_node) == (0x20008, 4, 4, 0)
    assert (far.peer_class, far.distance, far.link_width) == ("network", 0x82, 16)


def test_statistics_that_are_off_count_nothing_rather_than_zero(tmp_path: Path) -> None:
    write(tmp_path, {STATS: OFF})
    ((row,), _) = gather(GDS.make(), host_of(tmp_path))
    assert row.io_stats is False
    assert row.reads is row.reads_done is row.read_bytes is row.batches is None
    assert (row.read_errors, row.read_state_errors) == (2, 1), "errors are counted in any case"
    assert (row.processes, row.shadow_buffer_bytes) == (0, 0)


def test_totals_left_from_when_statistics_were_on_do_not_stand_for_now(tmp_path: Path) -> None:
    write(tmp_path, {STATS: OFF.replace("err=2", "n=5 ok=5 err=2 readMiB=9")})
    ((row,), _) = gather(GDS.make(), host_of(tmp_path))
    assert row.reads is row.read_bytes is None


def test_gpus_and_peers_are_told_once_a_minute_while_nobody_uses_it(tmp_path: Path) -> None:
    tree = node()
    tree.files[STATS] = tree.files[STATS].replace("Active Process: 2", "Active Process: 0")
    tree.put(tmp_path)
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(tmp_path, clock=clock), GDS.make()
    counts = []
    for _ in range(61):
        counts.append(len(gather(collect, host)[0]))
        clock.advance(NS_PER_S)
    assert counts == [4] + [1] * 59 + [4]


def test_without_the_module_there_is_no_data(tmp_path: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(tmp_path, clock=clock), GDS.make()
    with pytest.raises(NoData, match="not loaded"):
        gather(collect, host)
    write(tmp_path, {STATS: OFF})
    clock.advance(11 * NS_PER_S)
    assert len(gather(collect, host)[0]) == 1


def test_damage_names_the_line() -> None:
    text = node().files[STATS]
    for bad in damaged(text.encode()):
        try:
            parse_stats(bad.decode("utf-8", "replace"))
        except ValueError as error:
            assert "nvidia-fs" in str(error)
    with pytest.raises(ValueError, match="Reads readMiB"):
        parse_stats(text.replace("readMiB=4095", "readMiB=x4"))
    with pytest.raises(ValueError, match="Active Process"):
        parse_stats("Active Process: none")
    with pytest.raises(ValueError, match="out of range"):
        parse_stats("Active Process: 99999999999999999999")


def test_peers_with_other_columns_and_damage(tmp_path: Path) -> None:
    (peer,) = parse_peers("gpu peer peerrank numa class\n0:1 0:2 5 -1 nvme\n")
    assert (peer.rank, peer.distance, peer.numa_node) == (5, None, None)
    assert parse_peers("") == ()
    for bad in ("x y\n1 2\n", "gpu peer numa\n1 2\n", "gpu peer numa\n1 2 x\n"):
        with pytest.raises(ValueError, match="nvidia-fs"):
            parse_peers(bad)
    write(tmp_path, {STATS: OFF, "proc/driver/nvidia-fs/peer_distance": "what is this\n"})
    rows, problems = gather(GDS.make(), host_of(tmp_path))
    assert len(rows) == 1
    assert [problem.subject for problem in problems] == ["peer_distance"]


@pytest.mark.shared
def test_the_recorded_statistics_that_are_off() -> None:
    name = "docs-samples/nvidia-fs/stats.nvfs-2.25.7.iostats-disabled.txt"
    stats = parse_stats(shared(name).read_text())
    assert (stats.driver, stats.io_stats, stats.peer_stats) == ("2.25.7", False, False)
    assert stats.io("Reads", "n") is None and stats.number("Reads", "err") == 0
    assert stats.number("Mmap", "munmap") == 2
    (gpu,) = stats.gpus
    assert gpu.uuid == "GPU-fb1e6550-2a78-d767-1f0d-7512eb8c552d"
    assert (gpu.registered_bytes, gpu.max_pinned_bytes) == (0, MIB)
    assert gpu.cross_root_port_ratio is None


@pytest.mark.shared
def test_the_recorded_older_driver_with_other_units() -> None:
    stats = parse_stats(
        shared("docs-samples/nvidia-fs/stats.nvfs-2.7.49.weka-excerpt.txt").read_text()
    )
    assert (stats.version, stats.driver, stats.io_stats) == ("1.0.0.80", "2.7.49", None)
    assert (stats.shadow_buffer_bytes, stats.processes) == (256 * MIB, 1)
    assert [gpu.max_pinned_bytes for gpu in stats.gpus] == [1977 * MIB] + [32 * MIB] * 3
    assert stats.number("Bar1-map", "active") == 256
