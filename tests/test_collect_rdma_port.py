"""RDMA ports: counters of every driver, links that are down, devices that refuse."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fabric_make
from fabric_kit import FIXTURE, SpoiledHost, put, recorded, synthetic
from trees import BEGIN_NS, SHARED, damaged, gather, host_of, shared, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import Collect, NoData
from whyidle.collect.rdma_counters import (
    HARDWARE,
    PMA,
    SUMS,
    chosen,
    parse_count,
    parse_rate,
    parse_state,
)
from whyidle.collect.rdma_port import RDMA_PORT
from whyidle.host import Host
from whyidle.schema import RdmaPort, RdmaTraffic
from whyidle.table import table_of

TICK_NS = NS_PER_S // 2


def split(rows: list[Any]) -> tuple[dict[str, RdmaTraffic], dict[str, RdmaPort]]:
    """Rows of both tables by device and port."""
    traffic = {f"{r.device}/{r.port}": r for r in rows if isinstance(r, RdmaTraffic)}
    ports = {f"{r.device}/{r.port}": r for r in rows if isinstance(r, RdmaPort)}
    assert len(traffic) + len(ports) == len(rows)
    return traffic, ports


def once(collect: Collect, host: Host) -> tuple[dict[str, RdmaTraffic], dict[str, RdmaPort]]:
    """Run once, without problems."""
    rows, problems = gather(collect, host)
    assert problems == []
    return split(rows)


def told(row: RdmaPort) -> dict[str, Any]:
    """What a row knows beside its keys."""
    columns = [column.name for column in table_of(RdmaPort).columns if column.kind != "key"]
    return {name: getattr(row, name) for name in columns if getattr(row, name) is not None}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return synthetic(tmp_path)


def test_the_fixture_is_what_its_generator_makes() -> None:
    assert json.loads(FIXTURE.read_text()) == fabric_make.machine()


def test_every_column_has_a_counter_and_every_counter_a_column() -> None:
    columns = {column.name for column in table_of(RdmaPort).columns if column.kind == "counter"}
    assert {*PMA.values(), *HARDWARE.values(), *SUMS} == columns


def test_all_counters_of_mlx5(node: Path) -> None:
    _, ports = once(RDMA_PORT.make(), host_of(node))
    row = ports["mlx5_0/1"]
    assert (row.state, row.physical_state) == ("active", "link_up")
    assert row.rate_bits_per_s == 400_000_000_000
    assert (row.rx_bytes, row.tx_bytes) == (1_000 * 4, 2_000 * 4)
    assert (row.rx_packets, row.tx_packets, row.tx_wait) == (30, 40, 4_294_967_295)
    assert (row.symbol_errors, row.link_downs, row.link_integrity_errors) == (65_535, 255, 15)
    assert (row.retransmits, row.ack_timeouts, row.receiver_not_ready) == (11, 12, 13)
    assert (row.ecn_marked_packets, row.cnps_sent, row.cnps_handled) == (22, 23, 24)
    # EFA alone counts impaired connections.
    assert set(told(row)) == {c.name for c in table_of(RdmaPort).columns[3:]} - {
        "impaired_connections"
    }


def test_counters_that_stick_are_declared_so() -> None:
    spec = table_of(RdmaPort)
    sticks = {c.name: c.bits for c in spec.columns if c.at_limit == "sticks"}
    assert sticks["tx_wait"] == 32
    assert sticks["symbol_errors"] == 16
    assert sticks["link_downs"] == 8
    assert sticks["buffer_overruns"] == 4
    assert spec.column("retransmits").at_limit == "wraps"
    assert spec.column("retransmits").bits == 32
    assert spec.column("tx_bytes").bits == 64
    assert len(sticks) == len(PMA)


@pytest.mark.parametrize(
    ("port", "expected"),
    [
        (
            "bnxt_re0/1",
            {
                "rx_bytes": 5_000,
                "tx_bytes": 6_000,
                "retransmits": 61,
                "cnps_sent": 66,
                "implied_naks": 69,
            },
        ),
        ("irdma0/1", {"rx_bytes": 730, "tx_bytes": 840, "rx_packets": 10, "retransmits": 71}),
        (
            "rdmap161s0/1",
            {"rx_bytes": 8_000, "tx_bytes": 9_000, "no_buffer": 81, "impaired_connections": 169},
        ),
        ("hfi1_0/1", {"rx_bytes": 4_000, "retransmits": 91, "ack_timeouts": 92}),
    ],
)
def test_other_drivers(node: Path, port: str, expected: dict[str, int]) -> None:
    traffic, ports = once(RDMA_PORT.make(), host_of(node))
    row = told(ports[port])
    assert {name: row.get(name) for name in expected} == expected
    assert traffic[port].rx_bytes == ports[port].rx_bytes
    # What a driver does not count is unknown, not 0.
    assert 0 not in row.values()


def test_a_link_that_is_down_has_no_rate_and_no_traffic(node: Path) -> None:
    traffic, ports = once(RDMA_PORT.make(), host_of(node))
    assert "mlx5_2/1" not in traffic
    assert len(traffic) == 6
    row = ports["mlx5_2/1"]
    assert (row.state, row.physical_state, row.rate_bits_per_s) == ("down", "disabled", None)
    assert row.rx_bytes == 4_000


def test_bytes_twice_a_second_the_rest_once(node: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(node, clock=clock), RDMA_PORT.make()
    fast, full = 0, 0
    assert RDMA_PORT.every_s == TICK_NS / NS_PER_S
    for _ in range(2 * 10):
        traffic, ports = once(collect, host)
        assert len(traffic) == 6
        fast, full = fast + 1, full + bool(ports)
        clock.advance(TICK_NS)
    assert (fast, full) == (20, 10)


def test_errors_and_the_rate_every_ten_seconds(node: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(node, clock=clock), RDMA_PORT.make()
    for second in range(31):
        row = once(collect, host)[1]["mlx5_0/1"]
        rare = (row.symbol_errors, row.link_downs, row.physical_state, row.rate_bits_per_s)
        if second % 10 == 0:
            assert rare == (65_535, 255, "link_up", 400_000_000_000)
        else:
            assert rare == (None, None, None, None)
        assert (row.state, row.retransmits, row.tx_wait) == ("active", 11, 4_294_967_295)
        clock.advance(NS_PER_S)


def test_a_link_that_comes_up_is_told_from_the_next_second_on(node: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(node, clock=clock), RDMA_PORT.make()
    once(collect, host)
    put(node, "sys/class/infiniband/mlx5_2/ports/1/state", "4: ACTIVE\n")
    clock.advance(NS_PER_S)
    assert "mlx5_2/1" in once(collect, host)[0]
    clock.advance(TICK_NS)
    assert "mlx5_2/1" in once(collect, host)[0]


def test_a_device_that_refuses_a_counter_is_left_alone(node: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host = SpoiledHost(node, clock)
    host.errors["mlx5_0/ports/1/counters/"] = errno.EINVAL
    collect = RDMA_PORT.make()
    rows, problems = gather(collect, host)
    assert [problem.subject for problem in problems] == ["mlx5_0"]
    assert "left alone" in problems[0].message
    assert "mlx5_0/1" not in split(rows)[1]
    assert len(split(rows)[1]) == 6
    # One try in all: each is a line in the kernel log. Other devices go on for minutes.
    assert len([path for path in host.asked if "mlx5_0/" in path]) == 1
    for _ in range(100):
        clock.advance(NS_PER_S)
        traffic, ports = once(collect, host)
        assert len(traffic) == 5 and len(ports) == 6
    assert len([path for path in host.asked if "mlx5_0/" in path]) == 1


def test_a_device_that_refused_is_tried_again_once_it_was_away(node: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host, collect = SpoiledHost(node, clock), RDMA_PORT.make()
    host.errors["mlx5_0/ports/1/counters/"] = errno.EINVAL
    gather(collect, host)
    link = node / "sys/class/infiniband/mlx5_0"
    target = link.readlink()
    link.unlink()
    clock.advance(40 * NS_PER_S)
    once(collect, host)
    link.symlink_to(target)
    host.errors.clear()
    clock.advance(40 * NS_PER_S)
    assert "mlx5_0/1" in once(collect, host)[1]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_counter_that_a_driver_has_not_is_unknown(node: Path, code: int) -> None:
    host = SpoiledHost(node, VirtualClock(BEGIN_NS))
    host.errors["port_xmit_wait"] = code
    row = once(RDMA_PORT.make(), host)[1]["mlx5_0/1"]
    assert (row.tx_wait, row.tx_packets) == (None, 40)


def test_a_counter_that_fails_is_a_problem_and_the_rest_is_told(node: Path) -> None:
    host = SpoiledHost(node, VirtualClock(BEGIN_NS))
    host.errors["mlx5_0/ports/1/hw_counters/out_of_sequence"] = errno.EIO
    rows, problems = gather(RDMA_PORT.make(), host)
    assert [problem.subject for problem in problems] == ["mlx5_0/1"]
    assert "out_of_sequence" in problems[0].message
    row = split(rows)[1]["mlx5_0/1"]
    assert (row.out_of_order, row.retransmits) == (None, 11)


def test_a_link_that_has_not_trained_refuses_its_rate(node: Path) -> None:
    host = SpoiledHost(node, VirtualClock(BEGIN_NS))
    host.errors["mlx5_0/ports/1/rate"] = errno.EINVAL
    row = once(RDMA_PORT.make(), host)[1]["mlx5_0/1"]
    assert (row.rate_bits_per_s, row.rx_bytes) == (None, 4_000)


def test_a_slow_device_is_asked_less(node: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host, collect = SpoiledHost(node, clock), RDMA_PORT.make()
    host.took_ns["rdmap161s0/ports/1/hw_counters/"] = 40_000_000
    seen = {"rdmap161s0/1": 0, "mlx5_0/1": 0}
    for _ in range(80):
        before = clock.mono_ns()
        traffic = once(collect, host)[0]
        for port in seen:
            seen[port] += port in traffic
        clock.advance(max(1, TICK_NS - (clock.mono_ns() - before)))
    # Two counters take 80 ms and are followed by 800 ms of rest.
    assert seen["rdmap161s0/1"] < seen["mlx5_0/1"] * 0.6
    assert seen["rdmap161s0/1"] > 10


def test_a_device_that_goes_away_is_told_once(node: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(node, clock=clock), RDMA_PORT.make()
    once(collect, host)
    (node / "sys/class/infiniband/bnxt_re0").unlink()
    shutil.rmtree(node / fabric_make.directory("0000:40:00.0"))
    host.forget("")
    clock.advance(NS_PER_S)
    _, problems = gather(collect, host)
    assert {problem.subject for problem in problems} == {"bnxt_re0/1"}
    clock.advance(6 * NS_PER_S)
    assert "bnxt_re0/1" not in once(collect, host)[1]


def test_a_new_device_shows_within_half_a_minute(node: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(node, clock=clock), RDMA_PORT.make()
    once(collect, host)
    base = "sys/class/infiniband/mlx5_9/ports/1"
    write(node, {f"{base}/state": "4: ACTIVE\n", f"{base}/phys_state": "5: LinkUp\n"})
    write(node, {f"{base}/rate": "100 Gb/sec (4X EDR)\n", f"{base}/counters/port_rcv_data": "7\n"})
    clock.advance(31 * NS_PER_S)
    row = once(collect, host)[1]["mlx5_9/1"]
    assert told(row) == {
        "state": "active",
        "physical_state": "link_up",
        "rate_bits_per_s": 100_000_000_000,
        "rx_bytes": 28,
    }


def test_no_device_is_no_data_in_each_run(tmp_path: Path) -> None:
    collect, host = RDMA_PORT.make(), host_of(tmp_path)
    for _ in range(3):
        with pytest.raises(NoData, match="no RDMA device"):
            gather(collect, host)


def test_drivers_of_old_count_for_the_whole_device(tmp_path: Path) -> None:
    base = "sys/class/infiniband/i40iw0"
    write(tmp_path, {f"{base}/ports/1/state": "4: ACTIVE\n", f"{base}/ports/1/rate": "10 Gb/sec\n"})
    write(tmp_path, {f"{base}/ports/1/phys_state": "5: LinkUp\n"})
    write(tmp_path, {f"{base}/hw_counters/tcpRetransSegs": "5\n"})
    assert once(RDMA_PORT.make(), host_of(tmp_path))[1]["i40iw0/1"].retransmits == 5


def test_texts() -> None:
    assert parse_state("2: INIT\n") == "init"
    assert parse_state("6: LinkErrorRecovery") == "link_error_recovery"
    assert parse_state("5: ACTIVE_DEFER") == "active_defer"
    assert parse_rate("2.5 Gb/sec (1X SDR)\n") == 2_500_000_000
    assert parse_count(b"18446744073709551615\n", "x") is None
    assert parse_count(b"N/A (no PMA)\n", "x") is None
    for parse, text in ((parse_state, "ACTIVE"), (parse_state, ""), (parse_rate, "Unknown")):
        with pytest.raises(ValueError, match="not"):
            parse(text)
    with pytest.raises(ValueError, match="x is b'seven', not a whole number"):
        parse_count(b"seven", "x")


def test_the_best_byte_counter_is_taken() -> None:
    both = {"counters": ("port_rcv_data",), "hw_counters": ("rx_bytes",)}
    assert chosen(SUMS["rx_bytes"], both) == ("counters", ("port_rcv_data",))
    wide = {**both, "counters_ext": ("port_rcv_data_64",)}
    assert chosen(SUMS["rx_bytes"], wide) == ("counters_ext", ("port_rcv_data_64",))
    assert chosen(SUMS["rx_bytes"], {}) == ("", ())


def test_damage_never_ends_the_run(node: Path) -> None:
    for text in damaged(b"4: ACTIVE\n"):
        put(node, "sys/class/infiniband/mlx5_0/ports/1/state", text.decode("latin-1"))
        put(node, "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "\0\0")
        rows, _ = gather(RDMA_PORT.make(), host_of(node))
        assert split(rows)[1]["mlx5_0/1"].rx_bytes is None
        assert split(rows)[1]["mlx5_1/1"].rx_bytes == 4_000


@pytest.mark.shared
def test_recorded_h100_node(tmp_path: Path) -> None:
    traffic, ports = once(RDMA_PORT.make(), host_of(recorded(tmp_path, "gpud-h100")))
    assert len(ports) == len(traffic) == 9
    row = ports["mlx5_0/1"]
    assert row.rate_bits_per_s == 400_000_000_000
    assert row.rx_bytes == 230_539_874_932_483 * 4
    # A counter of four bits at its end: its column says that it sticks there.
    assert row.buffer_overruns == 15
    assert table_of(RdmaPort).column("buffer_overruns").bits == 4
    assert (row.tx_wait, row.adaptive_retransmits, row.cnps_sent) == (2_489_603_687, 3, None)
    assert ports["mlx5_bond_0/1"].rate_bits_per_s == 200_000_000_000


@pytest.mark.shared
def test_recorded_ports_of_mlx4_and_i40iw(tmp_path: Path) -> None:
    source = shared("prometheus-node_exporter/sys/class/infiniband")
    shutil.copytree(source, tmp_path / "sys/class/infiniband")
    _, ports = once(RDMA_PORT.make(), host_of(tmp_path))
    first, second = ports["mlx4_0/1"], ports["mlx4_0/2"]
    # A counter of 32 bits at its end: saturated.
    assert first.tx_wait == 2**32 - 1
    assert (first.rx_bytes, first.tx_discards) == (4_631_917 * 4, 5)
    # counters_ext is newer and wider, and here differs from counters/.
    assert (second.rx_bytes, second.tx_wait) == (4_631_917 * 4, None)
    without = ports["i40iw0/1"]
    assert without.state == "active"
    assert set(told(without)) == {"state", "physical_state", "rate_bits_per_s"}


@pytest.mark.shared
def test_recorded_ports_of_mlx5_and_hfi1(tmp_path: Path) -> None:
    source = shared("prometheus-procfs/sys/class/infiniband")
    shutil.copytree(source, tmp_path / "sys/class/infiniband")
    traffic, ports = once(RDMA_PORT.make(), host_of(tmp_path))
    row = ports["mlx5_0/1"]
    # It was edited: the kernel never prints this. A word is kept as it is, not made a link_up.
    assert row.physical_state == "active"
    assert row.rate_bits_per_s == 25_000_000_000
    assert (row.retransmits, row.ack_timeouts, row.out_of_order) == (1, 131, 1)
    assert (row.request_errors, row.response_errors) == (3_481, 8_109)
    assert ports["hfi1_0/1"].rx_bytes == 345_091_702_026 * 4
    assert traffic["hfi1_0/1"].tx_bytes == 273_558_326_543 * 4


@pytest.mark.shared
def test_names_of_hfi1_are_the_drivers() -> None:
    text = shared("docs-samples/hfi1-hw_counters/netdata-9091-excerpt.txt").read_text()
    assert [name for name in ("RcResend", "RcTimeOut", "RcSeqNak") if name in text]


def test_recordings_are_found() -> None:
    assert not SHARED.is_dir() or (SHARED / "gpud-h100").is_dir()
