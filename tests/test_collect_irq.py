"""Interrupts of devices: which CPUs serve them, how many there were, and what is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric_kit import put, synthetic
from trees import damaged, gather, host_of
from whyidle.clock import SystemClock
from whyidle.collect.collector import NoData
from whyidle.collect.irq import IRQ, parse_list, parse_totals, write_list
from whyidle.host import LiveHost
from whyidle.schema import DeviceIrq

NIC = "0000:1a:00.0"
STAT = "cpu  1 2 3 4 5 6 7\nintr 1000 0 10 20 30 40 50\nctxt 5\n"


def rows_of(root: Path) -> dict[str, DeviceIrq]:
    rows, problems = gather(IRQ.make(), host_of(root))
    assert problems == []
    return {row.pci_bus_id: row for row in rows}


def node(root: Path, affinity: dict[int, str], numa: str = "0\n") -> Path:
    """Return the synthetic node with interrupts for its first card."""
    synthetic(root)
    put(root, "proc/stat", STAT)
    for number, cpus in affinity.items():
        put(root, f"sys/bus/pci/devices/{NIC}/msi_irqs/{number}", "msix\n")
        put(root, f"proc/irq/{number}/effective_affinity_list", f"{cpus}\n")
    put(root, f"sys/bus/pci/devices/{NIC}/numa_node", numa)
    put(root, "sys/devices/system/node/node0/cpulist", "0-3,8-11\n")
    return root


def test_lists_of_cpus() -> None:
    assert parse_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_list("\n") == frozenset()
    assert write_list(frozenset({0, 1, 2, 5, 8, 9})) == "0-2,5,8-9"
    assert write_list(parse_list("0-3,8,10-11")) == "0-3,8,10-11"


def test_totals_are_by_number() -> None:
    assert parse_totals(STAT) == {0: 0, 1: 10, 2: 20, 3: 30, 4: 40, 5: 50}
    assert parse_totals("cpu 1 2\n") == {}


def test_the_cpus_and_the_count_of_a_card(tmp_path: Path) -> None:
    found = rows_of(node(tmp_path, {2: "1", 3: "2", 4: "9"}))
    assert set(found) == {NIC}, "others have asked for no interrupts"
    row = found[NIC]
    assert (row.kind, row.device, row.irqs, row.interrupts) == ("nic", "mlx5_0", 3, 90)
    assert (row.cpus, row.cpus_count, row.numa_node, row.away_irqs) == ("1-2,9", 3, 0, 0)


def test_vectors_that_another_numa_node_serves(tmp_path: Path) -> None:
    assert rows_of(node(tmp_path, {2: "1", 3: "4-5", 4: "12"}))[NIC].away_irqs == 2


def test_what_is_not_known_is_not_zero(tmp_path: Path) -> None:
    root = node(tmp_path, {2: "1", 99: "2"}, numa="-1\n")
    put(root, f"sys/bus/pci/devices/{NIC}/msi_irqs/7", "msix\n")  # it was never set up
    row = rows_of(root)[NIC]
    assert (row.numa_node, row.away_irqs) == (None, None)
    assert (row.irqs, row.cpus, row.interrupts) == (3, "1-2", 20)
    put(root, "proc/stat", "cpu 1 2 3 4\n")
    assert rows_of(root)[NIC].interrupts is None


def test_damage_costs_its_device(tmp_path: Path) -> None:
    root = node(tmp_path, {2: "1"})
    for text in damaged(b"0-3,8\n"):
        (root / "proc/irq/2/effective_affinity_list").write_bytes(text)
        rows, problems = gather(IRQ.make(), host_of(root))
        assert len(rows) + len(problems) == 1


def test_without_devices_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no PCI devices"):
        gather(IRQ.make(), host_of(tmp_path))


def test_live() -> None:
    host = LiveHost("/", SystemClock())
    try:
        rows, _ = gather(IRQ.make(), host)
    except NoData as why:
        assert "PCI" in str(why)
    else:
        assert all(row.irqs is not None for row in rows)
    finally:
        host.close()
