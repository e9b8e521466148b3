"""Memory of NUMA nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from trees import gather, host_of, shared, write
from whyidle.collect.collector import NoData
from whyidle.collect.numa import NUMA, parse_meminfo, parse_numastat

BASE = "sys/devices/system/node"
STAT = "numa_hit 10\nnuma_miss 2\nnuma_foreign 3\ninterleave_hit 1\nlocal_node 9\nother_node 1\n"


def meminfo(node: int) -> str:
    return (
        f"Node {node} MemTotal:       1000 kB\nNode {node} MemFree:        400 kB\n"
        f"Node {node} Dirty:            5 kB\nNode {node} FilePages:      300 kB\n"
        f"Node {node} Active(anon):     7 kB\nNode {node} AnonPages:      200 kB\n"
        f"Node {node} HugePages_Total:  3\n"
    )


def test_nodes(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            f"{BASE}/node0/meminfo": meminfo(0),
            f"{BASE}/node0/numastat": STAT,
            f"{BASE}/node0/cpulist": "0-3,8\n",
            f"{BASE}/node1/meminfo": meminfo(1),
            f"{BASE}/node1/numastat": "numa_hit 4\n",
            f"{BASE}/online": "0-1\n",
        },
    )
    (first, second), problems = gather(NUMA.make(), host_of(tmp_path))
    assert problems == []
    assert (first.numa_node, first.cpus) == (0, "0-3,8")
    assert (first.total_bytes, first.free_bytes) == (1000 << 10, 400 << 10)
    assert (first.file_bytes, first.anon_bytes, first.dirty_bytes) == (
        *(300 << 10, 200 << 10),
        5 << 10,
    )
    assert (first.hit_pages, first.miss_pages, first.foreign_pages) == (10, 2, 3)
    assert (first.local_pages, first.other_pages) == (9, 1)
    assert (second.hit_pages, second.miss_pages, second.cpus) == (4, None, None)


def test_one_bad_node_is_a_problem_of_that_node(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            f"{BASE}/node0/meminfo": "nothing of it\n",
            f"{BASE}/node0/numastat": STAT,
            f"{BASE}/node1/meminfo": meminfo(1),
            f"{BASE}/node1/numastat": STAT,
            f"{BASE}/node2/meminfo": meminfo(2),
            f"{BASE}/node2/numastat": "numa_hit many\n",
        },
    )
    rows, problems = gather(NUMA.make(), host_of(tmp_path))
    assert [row.numa_node for row in rows] == [1]
    assert [problem.subject for problem in problems] == ["node0", "node2"]


def test_a_kernel_without_numa_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="NUMA"):
        gather(NUMA.make(), host_of(tmp_path))


@pytest.mark.shared
def test_a_real_node() -> None:
    node = shared("this-vm-6.18/root") / BASE / "node0"
    memory = parse_meminfo((node / "meminfo").read_text())
    assert memory["MemTotal"] == 15165644 << 10
    assert memory["Active(anon)"] == 1364 << 10
    assert memory["HugePages_Total"] == 0
    assert parse_numastat((node / "numastat").read_text())["local_node"] == 34095232
