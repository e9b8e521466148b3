"""Statistics of network drivers: which are chosen, pauses by priority, bonds, changed queues."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fabric_kit import put, synthetic
from trees import BEGIN_NS, gather, shared, write
from whyidle.clock import NS_PER_S, SystemClock, VirtualClock
from whyidle.collect.collector import NoData
from whyidle.collect.ethtool_names import GLOBAL, PORT, by_priority, wanted
from whyidle.collect.ethtool_port import ETHTOOL_PORT, parse_names, parse_values, rows
from whyidle.ethtool import Ethtool
from whyidle.host import Answer, Argument, LiveHost
from whyidle.live import live_host
from whyidle.schema import EthtoolPause, EthtoolPort
from whyidle.table import table_of

# As a ConnectX with PFC on priority 3 shows them; the values are made up.
MLX5 = {
    "rx_packets": 1,
    "rx0_packets": 2,
    "rx_out_of_buffer": 3,
    "rx_discards_phy": 4,
    "rx_vport_rdma_unicast_bytes": 5_000,
    "tx_vport_rdma_unicast_bytes": 6_000,
    "link_down_events_phy": 7,
    "rx_pcs_symbol_err_phy": 8,
    "rx_pci_signal_integrity": 9,
    "tx_pci_signal_integrity": 10,
    "outbound_pci_stalled_rd": 11,
    "outbound_pci_stalled_wr": 25,
    "outbound_pci_stalled_wr_events": 12,
    "outbound_pci_buffer_overflow": 13,
    "rx_prio0_bytes": 14,
    "rx_prio0_discards": 15,
    "rx_prio3_discards": 16,
    "rx_prio3_pause": 17,
    "rx_prio3_pause_duration": 18,
    "tx_prio3_pause": 19,
    "tx_prio3_pause_duration": 20,
    "rx_prio3_pause_transition": 21,
    "tx_pause_storm_warning_events": 22,
}


class Driver:
    """Answers as Ethtool does, for interfaces with statistics of their own."""

    def __init__(self, interfaces: dict[str, dict[str, int]]) -> None:
        self.interfaces = interfaces
        self.named = 0
        self.errors: dict[str, int] = {}

    def _of(self, interface: Argument) -> dict[str, int]:
        code = self.errors.get(str(interface))
        if code is not None or interface not in self.interfaces:
            raise OSError(code or errno.ENODEV, os.strerror(code or errno.ENODEV), interface)
        return self.interfaces[str(interface)]

    def names(self, interface: Argument) -> Answer:
        """The names."""
        self.named += 1
        return tuple(self._of(interface))

    def values(self, interface: Argument, count: Argument, *indices: Argument) -> Answer:
        """Some of the values."""
        values = list(self._of(interface).values())
        if len(values) != count:
            raise OSError(errno.ESTALE, "other statistics than before", interface)
        return tuple(values[int(index)] for index in indices)


def node(root: Path, driver: Driver, clock: VirtualClock | None = None) -> LiveHost:
    """The synthetic node with a driver."""
    askers: dict[str, Callable[..., Answer]] = {
        "ethtool_names": driver.names,
        "ethtool_values": driver.values,
    }
    return LiveHost(str(root), clock or VirtualClock(BEGIN_NS), askers=askers)


def split(found: list[Any]) -> tuple[dict[str, EthtoolPort], dict[tuple[str, str], EthtoolPause]]:
    ports = {row.interface: row for row in found if isinstance(row, EthtoolPort)}
    pauses = {(row.interface, row.priority): row for row in found if isinstance(row, EthtoolPause)}
    return ports, pauses


def test_only_rdma_interfaces_are_asked(tmp_path: Path) -> None:
    driver = Driver(
        {
            "ib0": {"rx_packets": 1},
            "eth1": MLX5,
            "eth2": {"rx_pause_frames": 31, "tx_pause_frames": 32},
            "eth3": {},
            "eth99": MLX5,
        }
    )
    found, problems = gather(ETHTOOL_PORT.make(), node(synthetic(tmp_path), driver))
    assert problems == []
    ports, pauses = split(found)
    assert set(ports) == {"eth1"}
    assert set(pauses) == {("eth1", "3"), ("eth2", GLOBAL)}
    row = ports["eth1"]
    assert (row.rx_rdma_bytes, row.tx_rdma_bytes) == (5_000, 6_000)
    assert (row.rx_no_buffer, row.rx_discards, row.link_downs) == (3, 4, 7)
    # Both directions add up; percent become a ratio; what it does not count is unknown.
    assert (row.pci_signal_errors, row.pci_write_stalled_ratio) == (9 + 10, 0.25)
    assert (row.pci_read_stalled_ratio, row.pci_write_stalls, row.pci_overflows) == (0.11, 12, 13)
    assert (row.tx_discards, row.pause_storm_errors, row.pause_storm_warnings) == (None, None, 22)
    pause = pauses["eth1", "3"]
    assert (pause.rx_pauses, pause.tx_pauses) == (17, 19)
    assert (pause.rx_pause_us, pause.tx_pause_us, pause.rx_discards) == (18, 20, 16)
    assert pauses["eth2", GLOBAL].rx_pause_us is None


def test_every_column_is_some_drivers() -> None:
    columns = {c.name for c in table_of(EthtoolPort).columns if c.kind != "key"}
    assert set(PORT.values()) == columns


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rx_prio7_pause", ("7", "rx_pauses")),
        ("tx_prio0_pause_duration", ("0", "tx_pause_us")),
        ("rx_prio0_pause_transition", None),
        ("rx_pfc_ena_frames_pri5", ("5", "rx_pauses")),
        ("pfc_pri5_tx_duration_us", ("5", "tx_pause_us")),
        ("rx_priority_2_xoff.nic", ("2", "rx_pauses")),
        ("rx_priority_2_xon.nic", None),
        ("rx_global_pause_duration", (GLOBAL, "rx_pause_us")),
        ("rx_prio0_bytes", None),
        ("rx_prio12_pause", None),
    ],
)
def test_names_of_pauses(name: str, found: tuple[str, str] | None) -> None:
    assert by_priority(name) == found


def test_of_a_name_that_comes_twice_the_first_counts() -> None:
    plan = wanted(["rx_discards_phy", "rx_prio1_pause", "rx_discards_phy", "rx_prio1_pause"])
    assert (plan.count, plan.indices) == (4, (0, 1))
    assert wanted([]).indices == ()


def test_names_are_asked_once_and_again_when_queues_change(tmp_path: Path) -> None:
    driver = Driver({"eth1": dict(MLX5), "eth2": {}, "eth3": {}, "ib0": {}})
    clock = VirtualClock(BEGIN_NS)
    host, collect = node(synthetic(tmp_path), driver, clock), ETHTOOL_PORT.make()
    named = 0
    for _ in range(20):
        gather(collect, host)
        named = named or driver.named
        assert driver.named == named
        clock.advance(2 * NS_PER_S)
    driver.interfaces["eth1"] = {"rx9_packets": 1, **MLX5}
    assert split(gather(collect, host)[0])[0] == {}
    clock.advance(2 * NS_PER_S)
    assert split(gather(collect, host)[0])[0]["eth1"].rx_no_buffer == 3


def test_the_legs_of_a_bond_are_asked_in_its_place(tmp_path: Path) -> None:
    synthetic(tmp_path)
    put(tmp_path, "sys/class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0", "bond0\n")
    write(tmp_path, {"sys/class/net/bond0/bonding/slaves": "eth1 eth9\n"})
    driver = Driver({"eth1": MLX5, "eth9": MLX5, "bond0": MLX5})
    found, _ = gather(ETHTOOL_PORT.make(), node(tmp_path, driver))
    assert set(split(found)[0]) == {"eth1", "eth9"}


def test_an_interface_that_fails_is_a_problem(tmp_path: Path) -> None:
    driver = Driver({"eth1": MLX5, "eth2": MLX5})
    clock = VirtualClock(BEGIN_NS)
    host, collect = node(synthetic(tmp_path), driver, clock), ETHTOOL_PORT.make()
    driver.errors = {"eth1": errno.EOPNOTSUPP, "ib0": errno.EOPNOTSUPP, "eth3": errno.EIO}
    found, problems = gather(collect, host)
    assert [problem.subject for problem in problems] == ["eth3"]
    assert set(split(found)[0]) == {"eth2"}
    clock.advance(2 * NS_PER_S)
    driver.errors["eth2"] = errno.EIO
    found, problems = gather(collect, host)
    assert (found, [problem.subject for problem in problems]) == ([], ["eth2"])
    driver.errors = {}
    clock.advance(20 * NS_PER_S)
    assert set(split(gather(collect, host)[0])[0]) == {"eth1", "eth2"}


def test_a_counter_of_minus_one_is_unknown() -> None:
    assert parse_values((1, 2**64 - 1), 2) == (1, None)
    answers: tuple[Answer, ...] = ((1,), "12", (1, "2"), None, {})
    for answer in answers:
        with pytest.raises(ValueError, match="ethtool_values"):
            parse_values(answer, 2)
    for names in (("a", 1), None, "ab"):
        with pytest.raises(ValueError, match="ethtool_names"):
            parse_names(names)
    assert list(rows("eth0", wanted(["x"]), (), 1)) == []


def test_nothing_to_tell(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no RDMA device"):
        gather(ETHTOOL_PORT.make(), node(tmp_path, Driver({})))
    write(tmp_path, {"sys/class/infiniband/rdmap0/ports/1/state": "4: ACTIVE\n"})
    with pytest.raises(NoData, match="has a network interface"):
        gather(ETHTOOL_PORT.make(), node(tmp_path, Driver({})))
    recorded = LiveHost(str(synthetic(tmp_path / "x")), VirtualClock(BEGIN_NS))
    with pytest.raises(NoData, match="statistics"):
        gather(ETHTOOL_PORT.make(), recorded)


def statistics(path: str) -> dict[str, int]:
    """The names and values of a recorded `ethtool -S`; of a name that comes twice the last."""
    found = {}
    for line in shared(path).read_text().splitlines():
        name, colon, value = line.rpartition(":")
        if colon and value.strip().isdecimal():
            found[name.strip()] = int(value)
    return found


def told(path: str) -> tuple[EthtoolPort | None, dict[str, EthtoolPause]]:
    """The rows of a recorded interface."""
    recorded = statistics(path)
    plan = wanted(recorded)
    values = list(recorded.values())
    found = list(rows("x", plan, tuple(values[index] for index in plan.indices), 1))
    ports, pauses = split(found)
    return ports.get("x"), {priority: row for (_, priority), row in pauses.items()}


@pytest.mark.shared
def test_recorded_mlx5() -> None:
    assert len(statistics("ethq/ethtool-S/mlx5_core.txt")) > 700
    port, pauses = told("ethq/ethtool-S/mlx5_core.txt")
    assert port is not None
    assert (port.rx_no_buffer, port.rx_discards, port.tx_rdma_bytes) == (0, 0, 0)
    assert (port.pci_signal_errors, port.pci_write_stalled_ratio) == (34, 0.0)
    # Without PFC there are no counters by priority.
    assert set(pauses) == {GLOBAL}
    assert (pauses[GLOBAL].rx_pauses, pauses[GLOBAL].tx_pause_us) == (0, 0)


@pytest.mark.shared
def test_recorded_bnxt() -> None:
    port, pauses = told("ethq/ethtool-S/bnxt_en.txt")
    assert port is not None
    assert (port.rx_discards, port.rx_buffer_passed) == (49_337, 417)
    assert port.pci_write_stalled_ratio is None
    assert set(pauses) == {GLOBAL, *"01234567"}
    assert (pauses["3"].rx_pauses, pauses["3"].rx_pause_us) == (0, 0)
    assert pauses[GLOBAL].rx_pause_us is None


@pytest.mark.shared
def test_recorded_ice() -> None:
    port, pauses = told("ethq/ethtool-S/ice.txt")
    assert port is not None
    assert (port.rx_discards, port.rx_crc_errors) == (0, 0)
    assert {GLOBAL, *"01234567"} == set(pauses)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["ena", "virtio_net", "iavf", "sfc"])
def test_recorded_drivers_that_count_none_of_it(name: str) -> None:
    port, pauses = told(f"ethq/ethtool-S/{name}.txt")
    assert (port, pauses) == (None, {}) or name == "sfc"


@pytest.mark.shared
def test_a_recorded_error_is_no_statistic() -> None:
    assert statistics("prometheus-node_exporter/ethtool/bond0/statistics") == {"ERROR": 1}
    assert told("prometheus-node_exporter/ethtool/bond0/statistics") == (None, {})


def with_statistics() -> str | None:
    """An interface of this machine whose driver has statistics."""
    ethtool = Ethtool()
    for name in sorted(os.listdir("/sys/class/net")):  # noqa: PTH208 - names alone
        try:
            if ethtool.names(name):
                return name
        except OSError:
            continue
    return None


def test_live_driver() -> None:
    interface = with_statistics()
    if interface is None:
        pytest.skip("no interface of this machine has statistics")
    host = live_host("/", SystemClock())
    names = parse_names(host.ask("ethtool_names", interface))
    assert all(name and name.isprintable() for name in names)
    every = host.ask("ethtool_values", interface, len(names), *range(len(names)))
    assert len(parse_values(every, len(names))) == len(names)
    packets = next((at for at, name in enumerate(names) if "packets" in name), 0)
    (one,) = parse_values(host.ask("ethtool_values", interface, len(names), packets), 1)
    assert isinstance(every, tuple)
    before = every[packets]
    assert one is not None and isinstance(before, int) and one >= before
    with pytest.raises(OSError, match="other statistics"):
        host.ask("ethtool_values", interface, len(names) + 1, 0)
    with pytest.raises(OSError, match="not supported"):
        host.ask("ethtool_names", "lo")
    with pytest.raises(OSError, match="No such device"):
        host.ask("ethtool_names", "no-such-link")
    with pytest.raises(OSError, match="No such device"):
        host.ask("ethtool_names", "a-name-that-is-too-long")
    host.close()
