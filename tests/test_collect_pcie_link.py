"""PCIe links: generations, widths, errors, ACS, sleep; and what lets devices reach GPU memory."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from fabric_kit import SpoiledHost, lay, put, recorded, synthetic
from fabric_lspci import acs_config, tree
from fabric_make import directory, link_to
from trees import BEGIN_NS, damaged, gather, host_of, shared, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import NoData
from whyidle.collect.pcie_gpudirect import GPUDIRECT, parse_open
from whyidle.collect.pcie_link import (
    PCIE_LINK,
    parse_acs,
    parse_errors,
    parse_generation,
    parse_width,
)
from whyidle.schema import PcieLink

REDIRECTS = "SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+"
NONE = "SrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd-"
BRIDGE = "sys/bus/pci/devices/0000:17:01.0"


def by_address(found: list[Any]) -> dict[str, PcieLink]:
    return {row.pci_bus_id: row for row in found}


@pytest.mark.parametrize(
    ("text", "generation"),
    [
        ("2.5 GT/s PCIe\n", 1),
        ("5.0 GT/s PCIe\n", 2),
        ("8 GT/s\n", 3),
        ("8.0 GT/s PCIe\n", 3),
        ("16.0 GT/s PCIe\n", 4),
        ("32.0 GT/s PCIe\n", 5),
        ("64.0 GT/s PCIe\n", 6),
        ("Unknown\n", None),
        ("Unknown speed\n", None),
        ("", None),
    ],
)
def test_generations(text: str, generation: int | None) -> None:
    assert parse_generation(text) == generation


def test_widths_of_links_that_are_down() -> None:
    assert [parse_width(text) for text in ("16\n", "1", "0\n", "255\n", "63\n")] == [
        16,
        1,
        None,
        None,
        None,
    ]
    with pytest.raises(ValueError, match="link width"):
        parse_width("x16")
    with pytest.raises(ValueError, match="not GT/s"):
        parse_generation("fast")


def test_names_of_errors_may_have_spaces() -> None:
    found = parse_errors("Receiver Error 3\nBad TLP 4\nTOTAL_ERR_COR 7\n")
    assert found == {"Receiver Error": 3, "Bad TLP": 4, "TOTAL_ERR_COR": 7}
    for text in ("RxErr\n", "RxErr many\n"):
        with pytest.raises(ValueError, match="aer"):
            parse_errors(text)


def test_acs_in_configuration_space() -> None:
    assert parse_acs(acs_config(REDIRECTS)) is True
    assert parse_acs(acs_config(NONE)) is False
    assert parse_acs(b"\0" * 64) is None
    assert parse_acs(bytes(4096)) is False
    # Behind another capability, and in a ring that never ends.
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x200 << 20).to_bytes(4, "little")
    config[0x200:0x204] = (0x000D | 1 << 16).to_bytes(4, "little")
    config[0x206] = 1 << 2
    assert parse_acs(bytes(config)) is True
    config[0x200:0x204] = (0x0002 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert parse_acs(bytes(config)) is False
    assert parse_acs(b"\xff" * 4096) is False


def test_the_synthetic_node(tmp_path: Path) -> None:
    found, problems = gather(PCIE_LINK.make(), host_of(synthetic(tmp_path)))
    assert problems == []
    links = by_address(found)
    kinds = [row.kind for row in links.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "gpu": 2,
        "nic": 7,
        "nvme": 2,
        "bridge": 17,
    }
    slow = links["0000:3c:00.0"]
    assert (slow.device, slow.upstream) == ("mlx5_1", "0000:39:01.0")
    assert (slow.generation, slow.width, slow.max_generation, slow.max_width) == (4, 8, 5, 16)
    assert (slow.correctable_errors, slow.receiver_errors) == (18, 3)
    assert (slow.bad_packets, slow.replay_timeouts) == (5 + 7, 2 + 1)
    assert (slow.nonfatal_errors, slow.fatal_errors) == (1, 0)
    assert (slow.iommu, slow.suspended, slow.numa_node) == ("identity", False, 0)
    bridge = links["0000:17:01.0"]
    assert (bridge.device, bridge.upstream) == (None, "0000:16:00.0")
    # Firmware keeps the errors of this one to itself.
    assert (bridge.correctable_errors, bridge.bad_packets, bridge.iommu) == (None, None, None)
    assert links["0000:15:01.0"].upstream is None


def test_acs_is_read_once_an_hour(tmp_path: Path) -> None:
    synthetic(tmp_path)
    (tmp_path / BRIDGE / "config").write_bytes(acs_config(REDIRECTS))
    clock = VirtualClock(BEGIN_NS)
    host, collect = SpoiledHost(tmp_path, clock), PCIE_LINK.make()

    def redirects() -> bool | None:
        return by_address(gather(collect, host)[0])["0000:17:01.0"].acs_redirect

    assert redirects() is True
    (tmp_path / BRIDGE / "config").write_bytes(acs_config(NONE))
    clock.advance(60 * NS_PER_S)
    assert redirects() is True
    assert len([path for path in host.asked if path.endswith("17:01.0/config")]) == 1
    clock.advance(3600 * NS_PER_S)
    assert redirects() is False
    # Only bridges redirect.
    assert by_address(gather(collect, host)[0])["0000:1a:00.0"].acs_redirect is None


def test_what_sleeps_is_not_woken(tmp_path: Path) -> None:
    synthetic(tmp_path)
    put(tmp_path, f"{BRIDGE}/power/runtime_status", "suspended\n")
    host = SpoiledHost(tmp_path, VirtualClock(BEGIN_NS))
    row = by_address(gather(PCIE_LINK.make(), host)[0])["0000:17:01.0"]
    assert (row.suspended, row.generation, row.width) == (True, None, None)
    asked = [path for path in host.asked if path.startswith(f"{BRIDGE}/")]
    assert not any("link" in path or "config" in path for path in asked)


def test_a_function_that_fails_is_a_problem_of_its_own(tmp_path: Path) -> None:
    synthetic(tmp_path)
    host = SpoiledHost(tmp_path, VirtualClock(BEGIN_NS))
    host.errors["0000:3c:00.0/current_link_width"] = errno.EIO
    put(tmp_path, "sys/bus/pci/devices/0000:19:00.0/aer_dev_fatal", "DLP\n")
    found, problems = gather(PCIE_LINK.make(), host)
    assert [problem.subject for problem in problems] == ["0000:19:00.0", "0000:3c:00.0"]
    links = by_address(found)
    assert (links["0000:3c:00.0"].width, links["0000:3c:00.0"].generation) == (None, 4)
    assert (links["0000:19:00.0"].fatal_errors, links["0000:19:00.0"].nonfatal_errors) == (None, 1)


def test_nothing_to_tell(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no PCI"):
        gather(PCIE_LINK.make(), host_of(tmp_path))
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    with pytest.raises(NoData, match="no NVIDIA GPU"):
        gather(PCIE_LINK.make(), host_of(tmp_path))


def test_damage_never_ends_the_run(tmp_path: Path) -> None:
    synthetic(tmp_path)
    path = tmp_path / directory("0000:19:00.0") / "aer_dev_correctable"
    for data in list(damaged(path.read_bytes()))[::10]:
        path.write_bytes(data)
        found, _ = gather(PCIE_LINK.make(), host_of(tmp_path))
        assert by_address(found)["0000:19:00.0"].generation == 5


def test_what_lets_devices_reach_gpu_memory(tmp_path: Path) -> None:
    synthetic(tmp_path)
    ((row,), problems) = gather(GPUDIRECT.make(), host_of(tmp_path))
    assert problems == []
    assert (row.peer_memory, row.open_kernel_module, row.storage, row.copy) == (
        True,
        True,
        False,
        False,
    )
    assert (row.iommu, row.virtual) == (False, False)
    write(tmp_path, {"sys/module/nvidia_fs/x": "", "sys/module/gdrdrv/x": ""})
    write(tmp_path, {"sys/class/iommu/dmar0/x": "", "proc/driver/nvidia/version": "?\n"})
    ((row,), _) = gather(GPUDIRECT.make(), host_of(tmp_path))
    assert (row.storage, row.copy, row.iommu, row.open_kernel_module) == (True, True, True, None)


def test_a_machine_without_the_driver_has_no_gpudirect(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no modules"):
        gather(GPUDIRECT.make(), host_of(tmp_path))
    write(tmp_path, {"sys/module/ext4/initstate": "live\n"})
    with pytest.raises(NoData, match="not loaded"):
        gather(GPUDIRECT.make(), host_of(tmp_path))
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39\n"
    assert parse_open(closed) is False


def exposed(root: Path, nvme: str, function: str) -> None:
    """Show a function as the NVMe drive that it is: the recording lacks the class."""
    place = f"{function}/nvme/{nvme}"
    write(root, {f"{place}/transport": "pcie\n"})
    path = root / f"sys/class/nvme/{nvme}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    lay(root, {f"sys/class/nvme/{nvme}": link_to(f"sys/class/nvme/{nvme}", place)})


@pytest.mark.shared
def test_recorded_drive_under_a_root_port(tmp_path: Path) -> None:
    for part in ("devices", "bus/pci"):
        recorded(tmp_path / "sys" / part, f"prometheus-procfs/sys/{part}")
    exposed(tmp_path, "nvme0", "sys/devices/pci0000:00/0000:00:02.1/0000:01:00.0")
    found, problems = gather(PCIE_LINK.make(), host_of(tmp_path))
    assert problems == []
    links = by_address(found)
    drive, port = links["0000:01:00.0"], links["0000:00:02.1"]
    assert (drive.generation, drive.width, drive.max_width) == (3, 4, 4)
    assert (drive.correctable_errors, drive.fatal_errors) == (0, 0)
    assert (drive.bad_packets, drive.numa_node) == (0, None)
    # The port could carry more than the drive.
    assert (port.width, port.max_width, port.correctable_errors) == (4, 8, None)


@pytest.mark.shared
def test_recorded_drives_of_a_power_node(tmp_path: Path) -> None:
    recorded(tmp_path, "libnvme/tree-pcie")
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    for path in sorted((tmp_path / "sys/devices").glob("pci*/*:*")):
        (devices / path.name).symlink_to(path)
    found, problems = gather(PCIE_LINK.make(), host_of(tmp_path))
    assert problems == []
    assert {row.device for row in found if row.kind == "nvme"} == {"nvme0", "nvme1", "nvme2"}
    # Domains of Power are not 0000.
    assert "0214:90:00.0" in by_address(found)


@pytest.mark.shared
def test_recorded_h100_node(tmp_path: Path) -> None:
    text = shared("gpud-h100/lspci-vvv.txt").read_text()
    lay(tmp_path, tree(text))
    found, problems = gather(PCIE_LINK.make(), host_of(tmp_path))
    assert problems == []
    gpus = [row for row in found if row.kind == "gpu"]
    assert len(gpus) == 8
    assert {(row.generation, row.width, row.max_generation) for row in gpus} == {(5, 16, 5)}
    acs = [line for line in text.splitlines() if "ACSCtl:" in line]
    redirected = [parse_acs(acs_config(line.split("ACSCtl:")[1])) for line in acs]
    assert (redirected.count(True), redirected.count(False)) == (4, 51)
