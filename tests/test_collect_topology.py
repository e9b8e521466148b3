"""Distances on PCIe: switches, roots, NUMA nodes, virtual machines, recorded nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fabric_kit import lay, put, synthetic
from fabric_lspci import tree
from trees import BEGIN_NS, damaged, gather, host_of, shared, write
from whyidle.clock import VirtualClock
from whyidle.collect import topology_file
from whyidle.collect.collector import NoData
from whyidle.collect.pcie_tree import Function, Place, parse_place
from whyidle.collect.topology import TOPOLOGY, distance, parse_hypervisor, rows
from whyidle.host import LiveHost, Stat
from whyidle.schema import GpuDistance

ROOT = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0"


def place(path: str, node: int | None = 0) -> Place:
    return parse_place(path, node)


def by_pair(found: list[Any]) -> dict[tuple[str, str], GpuDistance]:
    return {(row.gpu_pci_bus_id, row.device): row for row in found}


def test_places() -> None:
    found = place(f"{ROOT}/0000:17:00.0/0000:19:00.0", 1)
    assert found.root == "pci0000:15"
    assert found.chain == ("0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:19:00.0")
    assert found.upstream == "0000:17:00.0"
    hyper_v = place("sys/devices/LNXSYSTM:00/VMBUS:01/4711/pci0001:00/0001:00:00.0")
    assert (hyper_v.root, hyper_v.chain, hyper_v.upstream) == (
        "pci0001:00",
        ("0001:00:00.0",),
        None,
    )
    # A drive behind Intel VMD has a host bridge of its own below that of the volume device.
    vmd = place("sys/devices/pci0000:64/0000:64:05.5/pci10000:00/10000:00:02.0/10000:01:00.0")
    assert (vmd.root, vmd.upstream) == ("pci10000:00", "10000:00:02.0")
    assert place("sys/devices/virtual/net/lo").root is None


GPU = place(f"{ROOT}/0000:17:00.0/0000:19:00.0")


@pytest.mark.parametrize(
    ("device", "path", "bridges"),
    [
        (place(f"{ROOT}/0000:17:01.0/0000:1a:00.0"), "same_switch", 3),
        (place(f"{ROOT}/0000:17:00.0/0000:19:00.1"), "same_switch", 1),
        (place(f"{ROOT}/0000:17:02.0/0000:20:00.0/0000:21:00.0/0000:22:00.0"), "switches", 5),
        (place("sys/devices/pci0000:15/0000:15:02.0/0000:30:00.0"), "same_root", 4),
        (place("sys/devices/pci0000:15/0000:15:03.0"), "same_root", 3),
        (place("sys/devices/pci0000:37/0000:37:01.0/0000:40:00.0"), "same_numa", None),
        (place("sys/devices/pci0000:97/0000:97:01.0/0000:98:00.0", 1), "other", None),
        (place("sys/devices/pci0000:97/0000:97:01.0/0000:98:00.0", None), None, None),
        (place("sys/devices/virtual/x", None), None, None),
    ],
)
def test_distances(device: Place, path: str | None, bridges: int | None) -> None:
    there = distance(GPU, device, virtual=False)
    back = distance(device, GPU, virtual=False)
    assert there == back
    assert (there.path, there.bridges) == (path, bridges)


def test_a_virtual_machine_tells_only_what_it_shows() -> None:
    flat = [place(f"sys/devices/pci0000:00/0000:00:0{n}.0", None) for n in (5, 6)]
    assert distance(flat[0], flat[1], virtual=True).path is None
    assert distance(flat[0], flat[1], virtual=False).path == "same_root"
    shown = place(f"{ROOT}/0000:17:01.0/0000:1a:00.0")
    assert distance(GPU, shown, virtual=True).path == "same_switch"
    assert parse_hypervisor(b"processor: 0\nflags\t: fpu hypervisor lahf\nbugs: x\n") is True
    assert parse_hypervisor(b"processor: 0\nflags\t: fpu nohypervisor\nhypervisor: x\n") is False
    assert parse_hypervisor(b"processor: 0\nFeatures: fp asimd\n") is None


def test_the_synthetic_node(tmp_path: Path) -> None:
    found, problems = gather(TOPOLOGY.make(), host_of(synthetic(tmp_path)))
    assert problems == []
    pairs = by_pair(found)
    assert len(pairs) == 2 * 9
    paths = {pair: row.path for pair, row in pairs.items()}
    assert paths["0000:19:00.0", "mlx5_0"] == "same_switch"
    assert paths["0000:3b:00.0", "nvme1"] == "switches"
    assert paths["0000:3b:00.0", "bnxt_re0"] == "same_root"
    assert paths["0000:19:00.0", "bnxt_re0"] == "same_numa"
    assert paths["0000:19:00.0", "irdma0"] == "other"
    near = {pair for pair, row in pairs.items() if row.nearest_gpu and row.nearest_device}
    assert near == {
        ("0000:19:00.0", "mlx5_0"),
        ("0000:19:00.0", "nvme0"),
        ("0000:3b:00.0", "mlx5_1"),
        ("0000:3b:00.0", "nvme1"),
    }
    # A drive of fabrics is nowhere on PCIe, and a display of a management controller is no GPU.
    assert not any(row.device == "nvme2" for row in found)


def test_nothing_is_nearest_where_one_distance_is_unknown() -> None:
    known = place(f"{ROOT}/0000:17:01.0/0000:1a:00.0")
    functions = [
        Function(address="0000:19:00.0", kind="gpu", device="", place=GPU),
        Function(address="0000:1a:00.0", kind="nic", device="mlx5_0", place=known),
        Function(
            address="0000:50:00.0",
            kind="nic",
            device="mlx5_1",
            place=place("sys/devices/pci0000:50/0000:50:00.0", None),
        ),
    ]
    found = by_pair(list(rows(functions, 1, virtual=False, source="sysfs")))
    near = found["0000:19:00.0", "mlx5_0"]
    assert (near.path, near.nearest_gpu, near.nearest_device) == ("same_switch", True, None)
    far = found["0000:19:00.0", "mlx5_1"]
    assert (far.path, far.nearest_gpu, far.nearest_device) == (None, None, None)


def test_nothing_to_tell(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no PCI"):
        gather(TOPOLOGY.make(), host_of(tmp_path))
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    with pytest.raises(NoData, match="no NVIDIA GPU"):
        gather(TOPOLOGY.make(), host_of(tmp_path))


class RootHost(LiveHost):
    """A folder whose files all belong to root, but for some."""

    others: tuple[str, ...] = ()

    def stat(self, path: str) -> Stat:
        """Return the stat with another owner."""
        got = super().stat(path)
        owner = 1000 if path in self.others else 0
        return Stat(
            mode=got.mode & ~0o022,
            size_bytes=got.size_bytes,
            user_id=owner,
            device=got.device,
            inode=got.inode,
        )


XML = """<system version="1">
  <cpu numaid="0"><pci busid="ffff:ff:01.0" class="0x060400">
    <pci busid="0000:19:00.0" class="0x030200"/><pci busid="0000:40:00.0" class="0x020700"/>
  </pci></cpu>
  <cpu numaid="1"><pci busid="0000:3b:00.0" class="0x030200"/></cpu>
</system>"""


def virtual_machine(root: Path, config: str = "NCCL_TOPO_FILE=/opt/cloud/topo.xml\n") -> None:
    synthetic(root)
    put(root, "proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu hypervisor\n")
    write(root, {"etc/nccl.conf": config, "opt/cloud/topo.xml": XML})


def test_a_virtual_machine_with_the_file_of_its_cloud(tmp_path: Path) -> None:
    virtual_machine(tmp_path)
    host = RootHost(str(tmp_path), VirtualClock(BEGIN_NS))
    found, problems = gather(TOPOLOGY.make(), host)
    assert problems == []
    pairs = by_pair(found)
    assert pairs["0000:19:00.0", "bnxt_re0"].path == "same_switch"
    assert pairs["0000:3b:00.0", "bnxt_re0"].path == "other"
    assert pairs["0000:3b:00.0", "mlx5_1"].path is None
    assert {row.source for row in found} == {"/opt/cloud/topo.xml"}


def test_a_file_that_another_user_may_have_made_is_not_read(tmp_path: Path) -> None:
    virtual_machine(tmp_path)
    for others in (("opt/cloud/topo.xml",), ("opt/cloud",), ("opt",)):
        host = RootHost(str(tmp_path), VirtualClock(BEGIN_NS))
        host.others = others
        found, problems = gather(TOPOLOGY.make(), host)
        assert [problem.subject for problem in problems] == ["/opt/cloud/topo.xml"]
        assert {row.source for row in found} == {"sysfs"}
        assert by_pair(found)["0000:3b:00.0", "bnxt_re0"].path is None
    for name in ("/opt/../etc/shadow", "relative.xml", "/opt/cloud", "/no/such"):
        write(tmp_path, {"etc/nccl.conf": f"NCCL_TOPO_FILE={name}\n"})
        host = RootHost(str(tmp_path), VirtualClock(BEGIN_NS))
        assert [p.subject for p in gather(TOPOLOGY.make(), host)[1]] == [name]


def test_a_job_names_the_file(tmp_path: Path) -> None:
    virtual_machine(tmp_path, config="NCCL_DEBUG=INFO\n")
    write(tmp_path, {"proc/7/environ": b"A=1\0NCCL_TOPO_FILE=/opt/cloud/topo.xml\0B=2\0"})
    host = RootHost(
        str(tmp_path),
        VirtualClock(BEGIN_NS),
        askers={"watched": lambda: {"gpu": (6, 7), "commands": ()}},
    )
    found, problems = gather(TOPOLOGY.make(), host)
    assert problems == []
    assert {row.source for row in found} == {"/opt/cloud/topo.xml"}


def test_a_damaged_file_is_a_problem(tmp_path: Path) -> None:
    virtual_machine(tmp_path)
    for text in ("", "<system", "<x/>", "no xml"):
        write(tmp_path, {"opt/cloud/topo.xml": text})
        host = RootHost(str(tmp_path), VirtualClock(BEGIN_NS))
        _, problems = gather(TOPOLOGY.make(), host)
        assert [problem.subject for problem in problems] == ["/opt/cloud/topo.xml"]
    for data in damaged(XML.encode()):
        try:
            topology_file.parse(data.decode("utf-8", "replace"))
        except ValueError as error:
            assert "XML" in str(error) or "begins with" in str(error)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "gpus", "path"),
    [
        ("ndv5-topo.xml", 8, "same_switch"),
        ("ndv4-topo.xml", 8, "same_switch"),
        ("ndv2-topo.xml", 8, None),
        ("ncv4-topo.xml", 4, None),
    ],
)
def test_recorded_files_of_a_cloud(name: str, gpus: int, path: str | None) -> None:
    text = shared(f"azure-topology/{name}").read_text()
    places = topology_file.parse(text)
    leaves = {a: p for a, p in places.items() if not a.startswith("ffff")}
    cards = [a for a in leaves if f'busid="{a}" class="0x0302' in text.lower()]
    assert len(cards) == gpus
    nics = sorted(set(leaves) - set(cards))
    for card in cards:
        near = [
            nic for nic in nics if distance(leaves[card], leaves[nic], virtual=False).path == path
        ]
        assert path is None or near, card


@pytest.mark.shared
def test_the_recorded_h100_node_has_a_nic_and_a_drive_beside_each_gpu(tmp_path: Path) -> None:
    text = shared("gpud-h100/lspci-vvv.txt").read_text()
    found, problems = gather(TOPOLOGY.make(), host_of(lay(tmp_path, tree(text))))
    assert problems == []
    gpus = sorted({row.gpu_pci_bus_id for row in found})
    assert len(gpus) == 8
    for gpu in gpus:
        near = [row for row in found if row.gpu_pci_bus_id == gpu and row.path == "same_switch"]
        assert sorted(row.kind for row in near) == ["nic", "nvme"]
        assert all(row.nearest_gpu and row.nearest_device for row in near)
    pairs = by_pair(found)
    first = next(row.device for row in found if row.pci_bus_id == "0000:1a:00.0")
    assert pairs["0000:19:00.0", first].bridges == 3
    assert pairs["0000:3b:00.0", first].path == "same_numa"
    assert pairs["0000:9b:00.0", first].path == "other"
