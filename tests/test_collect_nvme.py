"""NVMe: local drives, TCP and RDMA, multipath, states that change, recorded trees, damage."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest

from storage_tree import FOLDER, Tree, node
from sysfs_links import relinked
from trees import BEGIN_NS, damaged, gather, host_of, shared, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import Collect, NoData
from whyidle.collect.nvme import NVME
from whyidle.collect.nvme_text import head_of, parse_address, parse_number, parse_seconds
from whyidle.collect.nvme_tree import look
from whyidle.host import LiveHost
from whyidle.schema import NvmeController, NvmeNamespace, NvmePath

_T = TypeVar("_T")


class Watch:
    """The collector over time on a tree."""

    def __init__(self, root: Path, tree: Tree | None = None) -> None:
        self.root = root
        self.clock = VirtualClock(BEGIN_NS)
        self.host: LiveHost = host_of(root, clock=self.clock)
        self.collect: Collect = NVME.make()
        if tree is not None:
            tree.put(root)

    def run(self, seconds: float = 1.0) -> list[object]:
        self.clock.advance(round(seconds * NS_PER_S))
        rows, problems = gather(self.collect, self.host)
        assert problems == []
        return rows


def of(kind: type[_T], rows: list[object]) -> list[_T]:
    return [row for row in rows if isinstance(row, kind)]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path, node())


def test_a_local_drive(watch: Watch) -> None:
    rows = watch.run()
    row = of(NvmeController, rows)[0]
    assert (row.controller, row.state, row.transport) == ("nvme0", "live", "pcie")
    assert (row.address, row.service, row.host_address) == ("0000:01:00.0", None, None)
    assert (row.model, row.serial, row.firmware) == ("Synthetic NVMe drive", "SYN00000", "1.0")
    assert (row.queues, row.queue_entries, row.numa_node, row.controller_id) == (33, 1024, 1, 1)
    assert (row.keep_alive_ns, row.io_timeout_ns) == (0, 30 * NS_PER_S)
    assert row.give_up_ns is row.never_gives_up is row.reconnect_delay_ns is None
    assert row.resets is row.reconnects is row.command_errors is None
    disk = next(row for row in of(NvmeNamespace, rows) if row.device == "nvme0n1")
    assert (disk.namespace_id, disk.size_bytes) == (1, 7_501_476_528 * 512)
    assert (disk.controllers, disk.transport, disk.paths, disk.io_policy) == (
        "nvme0",
        "pcie",
        0,
        None,
    )


def test_a_target_over_tcp_with_two_paths(watch: Watch) -> None:
    rows = watch.run()
    live, lost = of(NvmeController, rows)[1:3]
    assert (live.address, live.service, live.host_address) == ("10.0.1.1", "4420", "10.0.1.9")
    assert (lost.state, lost.numa_node) == ("connecting", None)
    assert (live.give_up_ns, live.never_gives_up) == (600 * NS_PER_S, False)
    assert (live.reconnect_delay_ns, live.fast_io_fail_ns) == (10 * NS_PER_S, None)
    paths = of(NvmePath, rows)
    assert [(p.device, p.namespace, p.controller, p.ana_state, p.ana_group) for p in paths] == [
        ("nvme1c1n1", "nvme1n1", "nvme1", "optimized", 1),
        ("nvme1c2n1", "nvme1n1", "nvme2", "inaccessible", 2),
        ("nvme2c3n1", "nvme2n1", "nvme3", "optimized", 1),
    ]
    disk = next(row for row in of(NvmeNamespace, rows) if row.device == "nvme1n1")
    assert (disk.controllers, disk.transport, disk.paths) == ("nvme1,nvme2", "tcp", 2)
    assert disk.io_policy == "numa"
    assert disk.requeued is disk.failed is None, "not counted is not zero"


def test_errors_where_the_kernel_counts_them(watch: Watch) -> None:
    rows = watch.run()
    row = of(NvmeController, rows)[3]
    assert (row.transport, row.resets, row.reconnects, row.command_errors) == ("rdma", 1, 4, 3)
    assert (row.give_up_ns, row.never_gives_up) == (None, True)
    path = of(NvmePath, rows)[2]
    assert (path.retries, path.command_errors, path.failovers) == (5, 2, 1)
    disk = next(row for row in of(NvmeNamespace, rows) if row.device == "nvme2n1")
    assert (disk.requeued, disk.failed) == (12, 0)


def test_a_connection_that_is_lost_shows_within_a_second(watch: Watch) -> None:
    assert len(watch.run()) == 10
    assert watch.run() == []
    write(watch.root, {"sys/class/nvme/nvme1/state": "connecting\n"})
    write(watch.root, {"sys/class/nvme/nvme1/nvme1c1n1/ana_state": "change\n"})
    rows = watch.run()
    assert [(row.controller, row.state) for row in of(NvmeController, rows)] == [
        ("nvme1", "connecting")
    ]
    assert [(row.device, row.ana_state) for row in of(NvmePath, rows)] == [("nvme1c1n1", "change")]
    assert watch.run() == []
    write(watch.root, {"sys/class/nvme/nvme1/state": "live\n"})
    assert [row.state for row in of(NvmeController, watch.run())] == ["live"]


def test_all_is_told_again_once_a_minute_and_when_a_device_comes(watch: Watch) -> None:
    assert len(watch.run()) == 10
    assert sum(len(watch.run()) for _ in range(59)) == 0
    assert len(watch.run()) == 10
    place = "sys/devices/pci0000:00/0000:00:09.0/nvme/nvme9"
    write(watch.root, {f"{place}/state": "new\n"})
    (watch.root / "sys/class/nvme/nvme9").symlink_to(f"../../../{place}")
    found = [watch.run() for _ in range(6)]
    assert sorted(map(len, found)) == [0] * 5 + [11]


def test_counted_errors_are_read_every_ten_seconds(watch: Watch) -> None:
    watch.run()
    write(watch.root, {"sys/class/nvme/nvme3/diag/reconnect_count": "5\n"})
    found = [row for _ in range(12) for row in watch.run()]
    assert [(row.controller, row.reconnects) for row in of(NvmeController, found)] == [("nvme3", 5)]


def test_a_controller_that_goes_ends_nothing(watch: Watch) -> None:
    watch.run()
    (watch.root / "sys/class/nvme/nvme0").unlink()
    (watch.root / "sys/class/nvme-subsystem/nvme-subsys0/nvme0").unlink()
    watch.host.forget("sys/class/nvme/nvme0")
    rows = watch.run()
    assert [(row.controller, row.state) for row in of(NvmeController, rows)] == [("nvme0", None)]
    later = [row for _ in range(6) for row in watch.run()]
    assert {row.controller for row in of(NvmeController, later)} == {"nvme1", "nvme2", "nvme3"}


def test_no_nvme_is_no_data(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    for _ in range(3):
        with pytest.raises(NoData, match="no NVMe device"):
            watch.run()


def test_one_bad_attribute_is_a_problem_of_its_device(watch: Watch) -> None:
    write(watch.root, {"sys/class/nvme/nvme0/queue_count": "many\n"})
    rows, problems = gather(watch.collect, watch.host)
    assert [problem.subject for problem in problems] == ["nvme0"]
    assert "queue_count" in problems[0].message
    assert [row.controller for row in of(NvmeController, rows)] == ["nvme1", "nvme2", "nvme3"]


def test_addresses() -> None:
    tcp = parse_address("traddr=10.0.0.1,trsvcid=4420,host_iface=eth0,src_addr=10.0.0.9\n")
    assert (tcp.target, tcp.service, tcp.host) == ("10.0.0.1", "4420", "eth0")
    old = parse_address("traddr=10.161.8.24 trsvcid=4421")
    assert (old.target, old.service, old.host) == ("10.161.8.24", "4421", None)
    six = parse_address("traddr=fe80::1,trsvcid=4420")
    assert six.target == "fe80::1"
    fc = parse_address("nn-0x200000109b123456:pn-0x100000109b123456\n")
    assert (fc.target, fc.service) == ("nn-0x200000109b123456:pn-0x100000109b123456", None)
    assert parse_address("\n").target is None


def test_numbers_that_are_none() -> None:
    assert [parse_number(text, "x") for text in ("5\n", "-1", "", "N/A")] == [5, None, None, None]
    assert [parse_seconds(text, "x") for text in ("5\n", "-1", "off")] == [
        5 * NS_PER_S,
        None,
        None,
    ]
    for text in damaged(b"600\n"):
        try:
            number = parse_number(text.decode("utf-8", "replace"), "ctrl_loss_tmo")
        except ValueError as error:
            assert "ctrl_loss_tmo" in str(error)
        else:
            assert number is None or number >= 0
    assert head_of("nvme3c33n1") == "nvme3n1"
    with pytest.raises(ValueError, match="no path"):
        head_of("nvme3n1")


def test_the_fixture_is_what_its_generator_makes(tmp_path: Path) -> None:
    node().put(tmp_path / "made")
    relinked(FOLDER, tmp_path / "kept")

    def listing(root: Path) -> dict[str, str]:
        return {
            str(path.relative_to(root)): (
                str(path.readlink()) if path.is_symlink() else path.read_text()
            )
            for path in root.rglob("*")
            if path.is_symlink() or path.is_file()
        }

    kept, made = listing(tmp_path / "kept"), listing(tmp_path / "made")
    assert kept == made, "run: PYTHONPATH=tests python -m storage_tree"


@pytest.mark.shared
def test_the_recorded_dual_ported_drive(tmp_path: Path) -> None:
    relinked(shared("libnvme/tree-pcie"), tmp_path / "root")
    rows = Watch(tmp_path / "root").run()
    controllers = {row.controller: row for row in of(NvmeController, rows)}
    assert set(controllers) == {"nvme0", "nvme1", "nvme2"}
    one = controllers["nvme1"]
    assert (one.address, one.queues, one.queue_entries) == ("052e:78:00.0", 65, 1024)
    assert (one.model, one.serial) == ("3.2TB NVMe Gen4 U.2 SSD III", "S6RTNE0R900057")
    disks = {row.device: row for row in of(NvmeNamespace, rows)}
    assert set(disks) == {"nvme0n1", "nvme1n1"}
    assert (disks["nvme1n1"].controllers, disks["nvme1n1"].paths) == ("nvme1,nvme2", 2)
    assert (disks["nvme0n1"].controllers, disks["nvme0n1"].paths) == ("nvme0", 0)
    paths = [(row.device, row.namespace, row.controller) for row in of(NvmePath, rows)]
    assert paths == [("nvme1c1n1", "nvme1n1", "nvme1"), ("nvme1c2n1", "nvme1n1", "nvme2")]
    assert all(row.ana_state is None for row in of(NvmePath, rows)), "a drive without ANA"


@pytest.mark.shared
def test_the_recorded_virtual_machine(tmp_path: Path) -> None:
    relinked(shared("libnvme/config-pcie"), tmp_path / "root")
    rows = Watch(tmp_path / "root").run()
    assert [(row.device, row.paths) for row in of(NvmeNamespace, rows)] == [
        ("nvme0n1", 1),
        ("nvme1n1", 0),
    ]
    assert all(row.numa_node is None for row in of(NvmeController, rows))


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "prometheus-node_exporter",
            {
                ("nvme1", "live", "fc", "nn-0x200000109b123457:pn-0x100000109b123457"),
                ("nvme2", "live", "fc", "nn-0x200000109b123458:pn-0x100000109b123458"),
                ("nvme3", "dead", "fc", "nn-0x200000109b123459:pn-0x100000109b123459"),
            },
        ),
        (
            "prometheus-procfs",
            {
                ("nvme1", "live", "fc", "nn-0x200400a0986b4322:pn-0x210400a0986b4322"),
                ("nvme2", "dead", "fc", "nn-0x200400a0986b4323:pn-0x210400a0986b4323"),
                ("nvme3", "live", "tcp", "10.0.0.1"),
                ("nvme4", "connecting", "rdma", "10.0.0.2"),
            },
        ),
    ],
)
def test_recorded_subsystems(tmp_path: Path, name: str, expected: set[tuple[str, ...]]) -> None:
    relinked(shared(f"{name}/sys/class"), tmp_path / "root/sys/class")
    rows = of(NvmeController, Watch(tmp_path / "root").run())
    found = {(row.controller, row.state, row.transport, row.address) for row in rows}
    # nvme0 is there twice, as a class device without a transport and in its subsystem.
    assert found - {one for one in found if one[0] == "nvme0"} == expected


@pytest.mark.shared
def test_recorded_addresses_of_list_subsys() -> None:
    text = shared("docs-samples/nvme-list-subsys/nvme-cli-1540-powerstore-tcp-ana.txt").read_text()
    found = [parse_address(line.split()[3]) for line in text.splitlines() if " tcp " in line]
    assert [(one.target, one.service) for one in found] == [
        ("10.162.198.42", "4420"),
        ("10.162.198.45", "4420"),
    ]


def test_a_container_that_shows_only_subsystems(tmp_path: Path) -> None:
    place = "sys/class/nvme-subsystem/nvme-subsys0"
    write(tmp_path, {f"{place}/nvme0/state": "live\n", f"{place}/nvme0/transport": "fc\n"})
    assert look(host_of(tmp_path)).controllers == {"nvme0": f"{place}/nvme0"}
