"""CephFS and WekaFS: both forms of Ceph's metrics, a recorded table of Weka, damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_tree import node
from trees import BEGIN_NS, damaged, gather, host_of, shared, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import NoData
from whyidle.collect.parallel_fs import PARALLEL_FS, parse_ceph, parse_weka
from whyidle.schema import ParallelFsOp

CLIENT = "0f923fe5-00e6-4866-bf01-2027cb75e94b.client4150"
PLACE = f"sys/kernel/debug/ceph/{CLIENT}/metrics"
LATENCY = """\
item          total       avg_lat(us)     min_lat(us)     max_lat(us)     stdev(us)
-----------------------------------------------------------------------------------
read          2312        9000            1000            100000          607.4
write         5           914013          824797          1092343         103476
metadata      0           0               0               0               0
"""
SIZE = """\
item          total       avg_sz(bytes)   min_sz(bytes)   max_sz(bytes)  total_sz(bytes)
----------------------------------------------------------------------------------------
read          2312        4096            4096            4096            9469952
write         5           4194304         4194304         4194304         20971520
"""
CAPS = """\
item          total           miss            hit
-------------------------------------------------
d_lease       2               0               11
caps          2               14              398418
"""


def rows_of(root: Path) -> list[ParallelFsOp]:
    rows, problems = gather(PARALLEL_FS.make(), host_of(root))
    assert problems == []
    return rows


@pytest.mark.parametrize(
    "files",
    [
        {PLACE: f"{LATENCY}\n{SIZE}\n{CAPS}"},
        {f"{PLACE}/latency": LATENCY, f"{PLACE}/size": SIZE, f"{PLACE}/caps": CAPS},
    ],
    ids=["one-file", "folder"],
)
def test_ceph(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    read, written = rows_of(tmp_path)
    assert (read.file_system, read.op, read.ops) == (f"ceph {CLIENT}", "read", 2312)
    assert (read.mean_us, read.longest_us, read.total_bytes) == (9000, 100_000, 9_469_952)
    assert (written.op, written.ops, written.mean_us) == ("write", 5, 914_013)


def test_ceph_before_sizes_were_counted(tmp_path: Path) -> None:
    write(tmp_path, {PLACE: f"{LATENCY}\n{CAPS}"})
    assert [row.total_bytes for row in rows_of(tmp_path)] == [None, None]


def test_the_made_up_node_has_both(tmp_path: Path) -> None:
    node().put(tmp_path)
    assert {row.file_system.split()[0] for row in rows_of(tmp_path)} == {"weka", "ceph"}


def test_neither_is_no_data_until_one_comes(tmp_path: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(tmp_path, clock=clock), PARALLEL_FS.make()
    with pytest.raises(NoData, match="CephFS or WekaFS"):
        gather(collect, host)
    write(tmp_path, {PLACE: LATENCY, "sys/kernel/debug/ceph/other.client1/osdc": "REQUESTS 0\n"})
    with pytest.raises(NoData):
        gather(collect, host)
    clock.advance(31 * NS_PER_S)
    assert len(gather(collect, host)[0]) == 2


def test_damage_is_a_problem_of_its_file_system(tmp_path: Path) -> None:
    for text in damaged(f"{LATENCY}\n{SIZE}".encode()):
        try:
            parse_ceph(text.decode("utf-8", "replace"))
        except ValueError as error:
            assert "ceph" in str(error)
    write(tmp_path, {PLACE: LATENCY.replace("9000 ", "many "), "proc/wekafs/stat": "a: 1 s" * 9})
    rows, problems = gather(PARALLEL_FS.make(), host_of(tmp_path))
    assert rows == []
    assert {problem.subject for problem in problems} == {f"ceph {CLIENT}", "weka"}


@pytest.mark.shared
def test_the_recorded_table_of_weka() -> None:
    text = shared("docs-samples/wekafs/proc-wekafs-stat.txt").read_text()
    found = {op: numbers for op, *numbers in parse_weka(text)}
    assert found["total"] == [718_319_292, 812, 563_448]
    assert found["write"] == [983_137, 18_957, 563_448], "a rate in brackets follows the count"
    assert "read" not in found, "never used"
    for bad in damaged(text.encode()):
        try:
            list(parse_weka(bad.decode("utf-8", "replace")))
        except ValueError as error:
            assert "weka" in str(error)
