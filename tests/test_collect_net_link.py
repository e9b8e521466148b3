"""Network interfaces: which of them count, and what a link that is down says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from trees import damaged, gather, host_of, shared, write
from whyidle.clock import SystemClock, VirtualClock
from whyidle.collect.collector import NoData, Problem
from whyidle.collect.net_link import NET_LINK, parse, parse_operstate, parse_speed
from whyidle.host import Asker, LiveHost
from whyidle.live import Watched, live_host

HEAD = "Inter-|   Receive   |  Transmit\n face |bytes ...\n"
ETH = "  eth0: 1000 10 1 2 0 0 0 0 2000 20 3 4 0 0 0 0\n"
VETH = " veth1: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n"
LO = "    lo: 5 5 0 0 0 0 0 0 5 5 0 0 0 0 0 0\n"


def machine(root: Path, text: str, *, physical: tuple[str, ...]) -> None:
    files: dict[str, str | bytes] = {"proc/net/dev": text}
    for name in ("eth0", "lo", "veth1"):
        files[f"sys/class/net/{name}/operstate"] = "unknown\n" if name == "lo" else "up\n"
    for name in physical:
        files[f"sys/class/net/{name}/device/vendor"] = "0x15b3\n"
        files[f"sys/class/net/{name}/speed"] = "400000\n"
    write(root, files)


def test_counters_state_and_speed(tmp_path: Path) -> None:
    machine(tmp_path, HEAD + LO + ETH, physical=("eth0",))
    rows, problems = gather(NET_LINK.make(), host_of(tmp_path))
    assert problems == []
    lo, eth = rows
    assert (eth.rx_bytes, eth.tx_bytes, eth.rx_packets, eth.tx_packets) == (1000, 2000, 10, 20)
    assert (eth.rx_errors, eth.tx_errors, eth.rx_drops, eth.tx_drops) == (1, 3, 2, 4)
    assert (eth.up, eth.speed_bits_per_s) == (True, 400_000_000_000)
    assert lo.up is None, "lo has no carrier: unknown is not down"
    assert lo.speed_bits_per_s is None


def test_virtual_interfaces_repeat_what_a_physical_one_carries(tmp_path: Path) -> None:
    machine(tmp_path, HEAD + LO + ETH + VETH, physical=("eth0",))
    assert [row.interface for row in gather(NET_LINK.make(), host_of(tmp_path))[0]] == [
        "lo",
        "eth0",
    ]


def test_inside_a_container_every_interface_counts(tmp_path: Path) -> None:
    machine(tmp_path, HEAD + LO + ETH + VETH, physical=())
    assert len(gather(NET_LINK.make(), host_of(tmp_path))[0]) == 3


def test_a_new_interface_shows_at_once(tmp_path: Path) -> None:
    machine(tmp_path, HEAD + LO, physical=("eth0",))
    clock = VirtualClock(0)
    host, collect = host_of(tmp_path, clock=clock), NET_LINK.make()
    assert len(gather(collect, host)[0]) == 1
    machine(tmp_path, HEAD + LO + ETH, physical=("eth0",))
    clock.advance(1)
    assert gather(collect, host)[0][1].up is True


@pytest.mark.parametrize(("text", "bits"), [("-1\n", None), ("4294967295\n", None), ("0\n", None)])
def test_the_speed_of_a_link_that_is_down_is_unknown(text: str, bits: int | None) -> None:
    assert parse_speed(text) is bits


def test_operstate() -> None:
    assert parse_operstate("up\n") is True
    assert parse_operstate("lowerlayerdown\n") is False
    assert parse_operstate("unknown\n") is None


def test_a_bad_line_is_a_problem_of_that_interface() -> None:
    found = list(parse(HEAD + "  eth9: 1 2 three\n" + ETH, 1, {}))
    problems = [item for item in found if isinstance(item, Problem)]
    assert [problem.subject for problem in problems] == ["eth9"]
    assert len(found) == 2


def test_damage_never_ends_the_run() -> None:
    for text in damaged((HEAD + LO + ETH).encode()):
        list(parse(text.decode("utf-8", "replace"), 1, {}))


def test_no_network_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no network"):
        gather(NET_LINK.make(), host_of(tmp_path))


def test_a_rank_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    machine(tmp_path, HEAD + LO + ETH, physical=("eth0",))
    write(tmp_path, {"proc/7/net/dev": HEAD + VETH, "proc/8/net/dev": HEAD + VETH})
    inodes = {0: 1, 6: 1, 7: 99, 8: 99}
    host = LiveHost(
        str(tmp_path),
        VirtualClock(0),
        askers={
            "watched": lambda: {"gpu": (6, 7, 8), "commands": ()},
            "net_namespace": lambda pid: inodes[pid],
        },
    )
    rows, problems = gather(NET_LINK.make(), host)
    assert problems == []
    found = [(row.namespace, row.interface, row.up) for row in rows]
    assert found == [("", "lo", None), ("", "eth0", True), ("99", "veth1", None)]


def test_namespaces_that_may_not_be_looked_at_are_a_problem(tmp_path: Path) -> None:
    machine(tmp_path, HEAD + ETH, physical=("eth0",))

    def refuse(pid: int) -> int:
        if pid:
            raise PermissionError(13, "Permission denied")
        return 1

    askers: dict[str, Asker] = {
        "watched": lambda: {"gpu": (7,), "commands": ()},
        "net_namespace": refuse,
    }
    rows, problems = gather(
        NET_LINK.make(), LiveHost(str(tmp_path), VirtualClock(0), askers=askers)
    )
    assert len(rows) == 1
    assert [problem.subject for problem in problems] == ["namespaces"]
    assert "CAP_SYS_PTRACE" in problems[0].message


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_a_real_namespace() -> None:
    command = ["unshare", "--net", "sh", "-c", "ip link set lo up; echo in; sleep 60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        host = live_host("/", SystemClock(), watched=Watched(commands=(process.pid,)))
        rows, problems = gather(NET_LINK.make(), host)
        host.close()
        assert problems == []
        theirs = {row.interface for row in rows if row.namespace}
        assert "lo" in theirs
        assert {row.namespace for row in rows if row.namespace} == {
            str(Path(f"/proc/{process.pid}/ns/net").stat().st_ino)
        }
        assert "eth0" not in theirs
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.shared
@pytest.mark.parametrize(
    "path",
    [
        "this-vm-6.18/root/proc/net/dev",
        "prometheus-procfs/proc/net/dev",
        "pcp/linux/procnet-4.15.14-root-001/proc/net/dev",
    ],
)
def test_recorded_files(path: str) -> None:
    text = shared(path).read_text()
    found = list(parse(text, 1, {}))
    assert len(found) == len(text.splitlines()) - 2
    assert not any(isinstance(item, Problem) for item in found)


def test_live_loopback_counts_what_is_sent() -> None:
    import socket

    host, collect = live_host("/", SystemClock()), NET_LINK.make()
    before = {row.interface: row for row in gather(collect, host)[0]}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(20):
            sender.sendto(b"x" * 10_000, ("127.0.0.1", 9))
    after = {row.interface: row for row in gather(collect, host)[0]}
    host.close()
    assert after["lo"].tx_bytes - before["lo"].tx_bytes >= 200_000
