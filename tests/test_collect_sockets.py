"""TCP connections: what the kernel says of them, who holds them, and sums that outlive them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fabric_wire import connection
from job import RANK0, RANK1, job, put
from trees import BEGIN_NS, damaged, gather, shared
from whyidle.clock import NS_PER_S, SystemClock, VirtualClock
from whyidle.collect.collector import Collect, NoData
from whyidle.collect.socket_tcp import TCP_SOCKET, parse_inodes, service_of
from whyidle.collect.socket_text import TOTALS, parse, parse_answer, parse_info
from whyidle.host import Answer, Argument, LiveHost
from whyidle.live import Watched, live_host
from whyidle.schema import TcpSocket
from whyidle.table import table_of


class Kernel:
    """Answers about connections and about who holds them."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.held: dict[int, tuple[int, ...]] = {}
        self.asked: list[int] = []
        self.denied = False

    def connections(self) -> Answer:
        """The messages."""
        return tuple(one.hex() for one in self.messages)

    def inodes(self, pid: Argument) -> Answer:
        """Who holds what."""
        self.asked.append(int(pid))
        if self.denied:
            raise PermissionError(13, "Permission denied")
        return self.held.get(int(pid), ())


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def host(tmp_path: Path, kernel: Kernel) -> Iterator[LiveHost]:
    put(tmp_path, job())
    made = LiveHost(
        str(tmp_path),
        VirtualClock(BEGIN_NS),
        askers={
            "connections": kernel.connections,
            "socket_inodes": kernel.inodes,
            "watched": lambda: {"gpu": (RANK0, RANK1), "commands": ()},
        },
    )
    yield made
    made.close()


def advance(host: LiveHost, seconds: float) -> None:
    assert isinstance(host.clock, VirtualClock)
    host.clock.advance(int(seconds * NS_PER_S))


def once(collect: Collect, host: LiveHost) -> dict[tuple[str, int | None], TcpSocket]:
    """Run once, without problems; rows by service and pid."""
    found, problems = gather(collect, host)
    assert problems == []
    rows: list[Any] = found
    return {(row.service, row.pid): row for row in rows}


def info(data: bytes) -> tuple[int | None, dict[str, int | None]]:
    """What the only message says."""
    (one,) = parse(data)
    rtt_us, totals = parse_info(data, one)
    return rtt_us, dict(zip(TOTALS, totals, strict=True))


def test_a_connection() -> None:
    data = connection(7, inode=9, port=4420, rx=10, tx=20, queues=(3, 4), rtt=55)
    ((one),) = list(parse(data))
    assert (one.cookie, one.inode, one.peer_port) == (7, 9, 4420)
    assert (one.rx_queue_bytes, one.tx_queue_bytes) == (3, 4)
    rtt_us, named = info(data)
    assert rtt_us == 55
    assert (named["rx_bytes"], named["tx_bytes"], named["busy_us"]) == (10, 20, 9)
    assert (named["receiver_limited_us"], named["sender_limited_us"]) == (8, 7)


def test_older_kernels_say_less() -> None:
    _, named = info(connection(7, rx=10, tx=20, info_bytes=192))
    assert (named["rx_bytes"], named["busy_us"]) == (10, 9)
    assert (named["tx_bytes"], named["out_of_order"]) == (None, None)
    assert info(connection(7, info_bytes=0)) == (None, dict.fromkeys(TOTALS))


def test_totals_are_the_columns() -> None:
    counters = {c.name for c in table_of(TcpSocket).columns if c.kind == "counter"}
    assert set(TOTALS) == counters


def test_services() -> None:
    assert service_of(4420, kernel=True) == service_of(8009, kernel=True) == "nvme"
    assert service_of(2049, kernel=True) == "nfs"
    assert service_of(22, kernel=True) is None
    assert service_of(443, kernel=True) is None
    assert service_of(443, kernel=False) == "http"
    assert service_of(29_500, kernel=False) == "peer"


def test_counting_begins_with_the_agent_and_outlives_connections(
    host: LiveHost, kernel: Kernel
) -> None:
    collect = TCP_SOCKET.make()
    kernel.messages = [connection(1, port=2049, rx=1_000, rtt=10), connection(2, port=2049, rx=500)]
    row = once(collect, host)["nfs", None]
    assert (row.sockets, row.rx_bytes, row.start_ns) == (2, 0, None)
    assert (row.rtt_us, row.rtt_max_us) == (55, 100)
    kernel.messages = [connection(1, port=2049, rx=1_700, queues=(30, 40))]
    row = once(collect, host)["nfs", None]
    assert (row.sockets, row.rx_bytes, row.rx_queue_bytes, row.tx_queue_bytes) == (1, 700, 30, 40)
    # A reconnection counts from its beginning; what the old one moved stays.
    kernel.messages = [connection(3, port=2049, rx=200)]
    assert once(collect, host)["nfs", None].rx_bytes == 900
    kernel.messages = []
    row = once(collect, host)["nfs", None]
    assert (row.sockets, row.rx_bytes, row.rtt_us, row.rtt_max_us) == (0, 900, None, None)


def test_connections_of_watched_processes(host: LiveHost, kernel: Kernel) -> None:
    kernel.held = {RANK0: (70, 71), RANK1: (72,)}
    kernel.messages = [
        connection(1, inode=70, port=443, rx=5),
        connection(2, inode=71, port=29_500),
        connection(3, inode=72, port=29_500),
        connection(4, inode=99, port=22),
    ]
    collect = TCP_SOCKET.make()
    rows = once(collect, host)
    assert set(rows) == {("http", RANK0), ("peer", RANK0), ("peer", RANK1)}
    assert rows["http", RANK0].start_ns == 50 * NS_PER_S
    kernel.messages[0] = connection(1, inode=70, port=443, rx=25)
    assert once(collect, host)["http", RANK0].rx_bytes == 20


def test_files_are_looked_through_only_for_what_is_new(host: LiveHost, kernel: Kernel) -> None:
    kernel.held = {RANK0: (70,)}
    kernel.messages = [connection(1, inode=70), connection(2, inode=99, port=22)]
    collect = TCP_SOCKET.make()
    once(collect, host)
    looked = len(kernel.asked)
    assert looked
    for _ in range(20):
        advance(host, 2)
        once(collect, host)
    # That of others is known to be of others.
    assert len(kernel.asked) == looked
    kernel.held[RANK0] = (70, 73)
    kernel.messages.append(connection(3, inode=73, port=443, rx=50))
    once(collect, host)
    assert len(kernel.asked) == 2 * looked
    assert once(collect, host)["http", RANK0].rx_bytes == 50


def test_a_connection_that_is_found_late_counts_from_its_beginning(
    host: LiveHost, kernel: Kernel
) -> None:
    collect = TCP_SOCKET.make()
    kernel.messages = [connection(1, inode=70, port=443, rx=1_000)]
    assert once(collect, host) == {}
    # It was there before the agent: what it had moved by then is not counted, whoever holds it.
    kernel.held = {RANK0: (70, 71)}
    kernel.messages = [
        connection(1, inode=70, port=443, rx=1_100),
        connection(2, inode=71, port=443, rx=10),
    ]
    advance(host, 70)
    assert once(collect, host)["http", RANK0].rx_bytes == 100 + 10


def test_a_process_that_ended_is_forgotten(tmp_path: Path, host: LiveHost, kernel: Kernel) -> None:
    kernel.held = {RANK0: (70,), RANK1: (72,)}
    kernel.messages = [connection(1, inode=70), connection(2, inode=72)]
    collect = TCP_SOCKET.make()
    assert ("http", RANK1) in once(collect, host)
    shutil.rmtree(tmp_path / f"proc/{RANK1}")
    kernel.messages = [connection(1, inode=70), connection(9, inode=90)]
    advance(host, 20)
    once(collect, host)
    assert set(once(collect, host)) == {("http", RANK0)}


def test_files_that_may_not_be_looked_at_are_a_problem(host: LiveHost, kernel: Kernel) -> None:
    kernel.denied = True
    kernel.messages = [connection(1, inode=70), connection(2, port=4420)]
    found, problems = gather(TCP_SOCKET.make(), host)
    assert [row.service for row in found] == ["nvme"]
    assert [problem.subject for problem in problems] == ["processes"]
    assert "CAP_SYS_PTRACE" in problems[0].message


def test_damage_is_a_value_error() -> None:
    whole = connection(1, inode=70) * 3
    for data in damaged(whole):
        try:
            for one in parse(data):
                parse_info(data, one)
        except ValueError as error:
            assert "connections" in str(error)
    answers: tuple[Answer, ...] = (None, "00", (1, 2), ("xyz",), {"a": 1})
    for answer in answers:
        with pytest.raises(ValueError, match="connections"):
            parse_answer(answer)
    with pytest.raises(ValueError, match="socket_inodes"):
        parse_inodes((1, "2"))


def test_a_recorded_tree_has_no_connections(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="connections"):
        gather(TCP_SOCKET.make(), LiveHost(str(tmp_path), VirtualClock(BEGIN_NS)))


@pytest.mark.shared
def test_recorded_pair_of_nvme_over_tcp() -> None:
    """The client of the pair: port 4420 is its peer's."""
    replies = json.loads(shared("this-vm-6.18/netlink-replies.json").read_text())
    data = bytes.fromhex(replies["sock_diag_inet_tcpinfo_dport4420"]["hex"])
    assert [each.peer_port for each in parse(data)] == [4420]
    rtt_us, named = info(data)
    assert rtt_us == 0x13
    assert (named["retransmits"], named["rx_bytes"]) == (0, 0)
    assert named["tx_bytes"] == 50_000


SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 4420))
print("ready", flush=True)
while True:
    one, _ = server.accept()
    while one.recv(1 << 16):
        pass
"""
CLIENT = """
import socket, sys
one = socket.create_connection(("127.0.0.1", 4420))
print("connected", flush=True)
for line in sys.stdin:
    one.sendall(b"x" * int(line))
    print("sent", flush=True)
"""
AGENT = """
import json, sys
from whyidle.clock import SystemClock
from whyidle.collect.socket_tcp import TCP_SOCKET
from whyidle.live import Watched, live_host
from whyidle.table import table_of
from whyidle.schema import TcpSocket

host = live_host("/", SystemClock(), watched=Watched(commands=(int(sys.argv[1]),)))
collect = TCP_SOCKET.make()
names = [column.name for column in table_of(TcpSocket).columns]
for line in sys.stdin:
    rows = [{name: getattr(row, name) for name in names} for row in collect(host)]
    print(json.dumps(rows), flush=True)
"""


@contextmanager
def talking(command: list[str], first: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that is told by lines; it is over with the block."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        if first:
            assert process.stdout.readline() == f"{first}\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def say(process: subprocess.Popen[str], line: str) -> str:
    """Tell a process a line and return its answer."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nsenter") is None, reason="needs root and nsenter"
)
def test_live_in_a_namespace() -> None:
    """A network of its own, in which one process sends 3 MB to port 4420."""
    shell = 'ip link set lo up && exec python -c "$0"'.replace("python", sys.executable)
    with talking(["unshare", "--net", "sh", "-c", shell, SERVER], "ready") as server:
        inside = ["nsenter", f"--net=/proc/{server.pid}/ns/net", sys.executable, "-c"]
        with (
            talking([*inside, CLIENT], "connected") as client,
            talking([*inside, AGENT, str(client.pid)]) as agent,
        ):
            (before,) = [r for r in json.loads(say(agent, "")) if r["pid"] == client.pid]
            assert say(client, str(3_000_000)) == "sent\n"
            rows = json.loads(say(agent, ""))
            (after,) = [row for row in rows if row["pid"] == client.pid]
            assert (before["service"], before["sockets"], before["tx_bytes"]) == ("nvme", 1, 0)
            sent = after["tx_bytes"] + after["tx_queue_bytes"]
            assert sent >= 3_000_000
            assert after["busy_us"] is not None
            assert after["rtt_us"] is not None and 0 < after["rtt_us"] < 1_000_000
            # The namespace has that one connection alone; its server is not watched.
            assert sum(row["sockets"] for row in rows) == 1


def test_live_connections_of_this_process() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        accepted, _ = server.accept()
        host = live_host("/", SystemClock(), watched=Watched(commands=(os.getpid(),)))
        collect = TCP_SOCKET.make()
        gather(collect, host)
        client.sendall(b"x" * 100_000)
        left = 100_000
        while left:
            left -= len(accepted.recv(left))
        found, _ = gather(collect, host)
        host.close()
        accepted.close()
    (row,) = [row for row in found if row.pid == os.getpid() and row.service == "peer"]
    assert row.sockets >= 2
    # Both ends are this process.
    assert row.tx_bytes >= 100_000
    assert row.rx_bytes >= 100_000
