"""What RDMA ports are: transport, interfaces, bonds, functions."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fabric_kit import SpoiledHost, put, recorded, synthetic
from trees import BEGIN_NS, damaged, gather, host_of, shared, write
from whyidle.clock import VirtualClock
from whyidle.collect.collector import NoData
from whyidle.collect.rdma_device import interfaces, pci_address
from whyidle.collect.rdma_info import RDMA_INFO, transport
from whyidle.schema import RdmaInfo


def by_device(found: list[Any]) -> dict[str, RdmaInfo]:
    return {f"{row.device}/{row.port}": row for row in found}


def test_the_synthetic_node(tmp_path: Path) -> None:
    found, problems = gather(RDMA_INFO.make(), host_of(synthetic(tmp_path)))
    assert problems == []
    infos = by_device(found)
    assert {name: row.transport for name, row in infos.items()} == {
        "bnxt_re0/1": "roce",
        "hfi1_0/1": "opa",
        "irdma0/1": "iwarp",
        "mlx5_0/1": "infiniband",
        "mlx5_1/1": "roce",
        "mlx5_2/1": "infiniband",
        "rdmap161s0/1": "efa",
    }
    row = infos["mlx5_0/1"]
    assert (row.driver, row.firmware, row.hca_type) == ("mlx5_core", "28.41.1000", "MT4129")
    assert (row.pci_bus_id, row.numa_node, row.interfaces) == ("0000:1a:00.0", 0, "ib0")
    assert (row.virtual_function, row.bond) == (False, False)
    assert infos["rdmap161s0/1"].link_layer is None
    assert infos["rdmap161s0/1"].interfaces is None
    # What a link that is down prints is no rate.
    assert (infos["mlx5_2/1"].rate_bits_per_s, row.rate_bits_per_s) == (None, 400_000_000_000)


def test_transports() -> None:
    assert transport("ethernet", "ca", "mlx5_core") == "roce"
    assert transport("ethernet", "rnic", "ice") == "iwarp"
    assert transport("ethernet", "usnic udp", "usnic_verbs") == "usnic"
    assert transport(None, "unspecified", None) is None
    assert transport("infiniband", None, None) == "infiniband"


def test_virtual_functions_and_bonds(tmp_path: Path) -> None:
    synthetic(tmp_path)
    function = tmp_path / "sys/class/infiniband/mlx5_1/device"
    (function.resolve() / "physfn").symlink_to("../0000:3c:00.0")
    put(tmp_path, "sys/class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0", "bond0\n")
    write(tmp_path, {"sys/class/net/bond0/bonding/slaves": "eth1 eth9\n"})
    row = by_device(gather(RDMA_INFO.make(), host_of(tmp_path))[0])["mlx5_1/1"]
    assert (row.virtual_function, row.bond, row.interfaces) == (True, True, "bond0,eth1")


def test_a_device_in_software_is_on_no_pci(tmp_path: Path) -> None:
    base = "sys/class/infiniband/rxe0"
    write(tmp_path, {f"{base}/ports/1/state": "4: ACTIVE\n", f"{base}/ports/1/rate": "x\n"})
    write(tmp_path, {f"{base}/ports/1/link_layer": "Ethernet\n"})
    write(tmp_path, {f"{base}/ports/1/gid_attrs/ndevs/0": "eth0\n"})
    found, problems = gather(RDMA_INFO.make(), host_of(tmp_path))
    assert (found, [problem.subject for problem in problems]) == ([], ["rxe0"])
    write(tmp_path, {f"{base}/ports/1/rate": "100 Gb/sec (4X EDR)\n"})
    ((row,), problems) = gather(RDMA_INFO.make(), host_of(tmp_path))
    assert problems == []
    assert (row.pci_bus_id, row.numa_node, row.virtual_function) == (None, None, None)
    assert (row.transport, row.interfaces) == ("roce", "eth0")


def test_two_ports_of_one_function_have_each_their_interface(tmp_path: Path) -> None:
    device = tmp_path / "sys/devices/pci0000:00/0000:01:00.0"
    base = device / "infiniband/mlx4_0"
    for port in (1, 2):
        (base / f"ports/{port}").mkdir(parents=True)
    (base / "device").symlink_to("../..")
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx4_0").symlink_to(base)
    for name, dev_port, dev_id in (("ib0", "0", "0x0"), ("ib1", "0", "0x1"), ("eth7", "1", "0x0")):
        write(device, {f"net/{name}/dev_port": f"{dev_port}\n", f"net/{name}/dev_id": dev_id})
    host = host_of(tmp_path)
    assert interfaces(host, "mlx4_0", 1, 2) == ("ib0",)
    assert interfaces(host, "mlx4_0", 2, 2) == ("eth7", "ib1")
    assert pci_address(host, "mlx4_0") == "0000:01:00.0"


def test_a_device_that_fails_does_not_hide_the_others(tmp_path: Path) -> None:
    host = SpoiledHost(synthetic(tmp_path), VirtualClock(BEGIN_NS))
    for data in damaged(b"4: ACTIVE\n"):
        put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", data.decode("latin-1"))
        found, _ = gather(RDMA_INFO.make(), host)
        assert "mlx5_1/1" in by_device(found)
    host.errors["mlx5_1"] = errno.EIO
    found, _ = gather(RDMA_INFO.make(), host)
    assert by_device(found)["mlx5_1/1"].firmware is None
    with pytest.raises(NoData, match="no RDMA device"):
        gather(RDMA_INFO.make(), host_of(tmp_path / "proc"))


def of_json(root: Path, name: str) -> None:
    """Lay a recorded node out, which is a map from paths to texts, with its class links."""
    node: dict[str, str | None] = json.loads(shared(f"meta-gcm/{name}").read_text())
    write(root, {path.lstrip("/"): text for path, text in node.items() if text is not None})
    (root / "sys/class/infiniband").mkdir(parents=True)
    for path in sorted((root / "sys/bus/pci/devices").glob("*/infiniband/*")):
        (root / "sys/class/infiniband" / path.name).symlink_to(path)
        (path / "device").symlink_to(os.path.relpath(path.parents[1], path))


@pytest.mark.shared
def test_recorded_a100_node(tmp_path: Path) -> None:
    of_json(tmp_path, "learn_ib_intf_bad_rate.json")
    found, problems = gather(RDMA_INFO.make(), host_of(tmp_path))
    assert problems == []
    infos = by_device(found)
    row = infos["mlx5_8/1"]
    assert (row.interfaces, row.pci_bus_id) == ("ib6", "0000:ba:00.0")
    # Its fault: the link runs at half of what the interface could.
    assert row.rate_bits_per_s == 100_000_000_000
    assert len(infos) >= 8


@pytest.mark.shared
def test_recorded_node_whose_devices_are_named_out_of_order(tmp_path: Path) -> None:
    of_json(tmp_path, "learn_ib_misbound_if.json")
    infos = by_device(gather(RDMA_INFO.make(), host_of(tmp_path))[0])
    # Names do not tell where a device sits: the first is not at the lowest address.
    places = {row.device: (row.pci_bus_id, row.interfaces) for row in infos.values()}
    assert places["mlx5_0"] == ("0000:12:00.0", "ib0")
    assert places["mlx5_1"] == ("0000:0c:00.0", "ib1")
    assert places["mlx5_12"] == ("0000:4b:00.0", "ib2")


@pytest.mark.shared
def test_recorded_h100_node_has_a_bond(tmp_path: Path) -> None:
    infos = by_device(gather(RDMA_INFO.make(), host_of(recorded(tmp_path, "gpud-h100")))[0])
    assert len(infos) == 9
    bond = infos["mlx5_bond_0/1"]
    assert (bond.bond, bond.transport, bond.hca_type) == (True, "roce", "MT41692")
    assert (infos["mlx5_0/1"].bond, infos["mlx5_0/1"].transport) == (False, "infiniband")
    assert infos["mlx5_0/1"].firmware == "28.41.1000"
