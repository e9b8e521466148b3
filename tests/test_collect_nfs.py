"""NFS: every version of mountstats, shared connections, bind mounts, containers, damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trees import BEGIN_NS, damaged, gather, host_of, shared, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import NoData, Problem
from whyidle.collect.nfs import NFS
from whyidle.collect.nfs_text import blocks, parse_block, parse_ops, parse_options, parse_transport
from whyidle.host import Answer
from whyidle.schema import NfsMount, NfsOp, NfsTransport

TCP = "tcp 763 0 2 0 2 39 38 0 42 7 2 0 3"
OPS = "READ: 10 12 1 1000 2000 30 40 75 2"


def mount(
    point: str = "/data",
    *,
    source: str = "srv:/export",
    fs_type: str = "nfs4",
    options: str = "rw,vers=4.1,rsize=1048576,wsize=524288,hard,proto=tcp,timeo=600,sec=sys",
    sizes: str = "1 2 3 4 5 6 7 8",
    transports: tuple[str, ...] = (TCP,),
    ops: tuple[str, ...] = (OPS,),
) -> str:
    """A block of mountstats, in the kernel's format."""
    xprts = "".join(f"\txprt:\t{one}\n" for one in transports)
    lines = "".join(f"\t{line.split(':')[0]:>12}:{line.partition(':')[2]}\n" for line in ops)
    return (
        f"device {source} mounted on {point} with fstype {fs_type} statvers=1.1\n"
        f"\topts:\t{options}\n\tage:\t100\n\tcaps:\tcaps=0x3fe6,wtmult=512\n"
        f"\tevents:\t{' '.join(map(str, range(100, 127)))} \n\tbytes:\t{sizes} \n"
        f"\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)\n{xprts}\tper-op statistics\n"
        f"\t        NULL: 0 0 0 0 0 0 0 0 0\n{lines}\n"
    )


class Node:
    """A node whose mounts a test sets."""

    def __init__(self, root: Path, watched: Callable[[], Answer] | None = None) -> None:
        self.root = root
        self.clock = VirtualClock(BEGIN_NS)
        self.host = host_of(root, clock=self.clock, watched=watched)
        self.collect = NFS.make()
        self.problems: list[Problem] = []

    def put(self, mountstats: str, mountinfo: str = "", who: str = "self") -> None:
        own = f"proc/{who}"
        write(self.root, {f"{own}/mountstats": mountstats, f"{own}/mountinfo": mountinfo})

    def run(self) -> tuple[list[NfsMount], list[NfsOp], list[NfsTransport]]:
        self.clock.advance(NS_PER_S)
        rows, self.problems = gather(self.collect, self.host)
        return (
            [row for row in rows if isinstance(row, NfsMount)],
            [row for row in rows if isinstance(row, NfsOp)],
            [row for row in rows if isinstance(row, NfsTransport)],
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_mount(node: Node) -> None:
    node.put("device proc mounted on /proc with fstype proc\n" + mount())
    ((row,), _, _) = node.run()
    assert (row.mount_point, row.server, row.export) == ("/data", "srv", "/export")
    assert (row.version, row.protocol, row.security, row.hard) == ("4.1", "tcp", "sys", True)
    assert (row.transfer_read_bytes, row.transfer_write_bytes) == (1 << 20, 1 << 19)
    assert (row.timeout_ms, row.age_ns) == (60_000, 100 * NS_PER_S)
    assert (row.read_bytes, row.write_bytes) == (1, 2)
    assert (row.direct_read_bytes, row.direct_write_bytes) == (3, 4)
    assert (row.server_read_bytes, row.server_write_bytes) == (5, 6)
    assert (row.attribute_checks, row.cache_drops, row.opens, row.lookups) == (100, 102, 104, 105)
    assert (row.delays, row.pnfs_reads) == (124, 125)
    assert (row.connections, row.connects, row.sends, row.receives) == (1, 2, 39, 38)
    assert (row.outstanding_sum, row.backlog_sum, row.slots) == (42, 7, 2)
    assert row.shares_with is None


def test_an_operation(node: Node) -> None:
    node.put(mount())
    (_, (row,), _) = node.run()
    assert (row.op, row.ops, row.transmissions, row.timeouts) == ("READ", 10, 12, 1)
    assert (row.sent_bytes, row.received_bytes) == (1000, 2000)
    assert (row.queue_ms, row.rtt_ms, row.execute_ms, row.errors) == (30, 40, 75, 2)


def test_operations_that_were_never_used_have_no_rows() -> None:
    ops = parse_ops(b"\n\tNULL: 0 0 0 0 0 0 0 0\n\tREAD: 0 3 0 9 0 0 0 0\n")
    assert [(op.name, op.numbers) for op in ops] == [("READ", (0, 3, 0, 9, 0, 0, 0, 0, None))]


def test_rows_of_operations_follow_the_text(node: Node) -> None:
    node.put(mount())
    node.run()
    node.put(mount(ops=(OPS.replace("READ: 10", "READ: 11"), "WRITE: 1 1 0 9 9 1 2 3 0")))
    (_, ops, _) = node.run()
    assert [(row.op, row.ops) for row in ops] == [("READ", 11), ("WRITE", 1)]


def test_a_time_below_zero_is_not_known() -> None:
    (op,) = parse_ops(b"\n ACCESS: 2927395007 2927394995 0 5 3 18446743919241604546 16 19\n")
    assert op.numbers[:2] == (2_927_395_007, 2_927_394_995)
    assert op.numbers[5] is None and op.numbers[6:8] == (16, 19)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tcp 740 1 2 3 4 5 6 7 8 9", ("tcp", 740, 2, 3, 4, 5, 6, 7, 8, 9, None)),
        ("tcp 740 1 2 3 4 5 6 7 8 9 10 11 12", ("tcp", 740, 2, 3, 4, 5, 6, 7, 8, 9, 10)),
        ("udp 740 1 5 6 7 8 9", ("udp", 740, None, None, None, 5, 6, 7, 8, 9, None)),
        ("udp 740 1 5 6 7 8 9 10 11 12", ("udp", 740, None, None, None, 5, 6, 7, 8, 9, 10)),
        ("local 1 2 3 4 5 6 7 8 9 10 11 12", ("local", None, 2, 3, 4, 5, 6, 7, 8, 9, 10)),
    ],
)
def test_connections_of_every_kind(line: str, expected: tuple[object, ...]) -> None:
    one = parse_transport(line.encode().split())
    seconds = (one.connecting_ns, one.idle_ns)
    assert (
        one.protocol,
        one.port,
        one.connects,
        *(None if ns is None else ns // NS_PER_S for ns in seconds),
        one.sends,
        one.receives,
        one.bad_replies,
        one.outstanding_sum,
        one.backlog_sum,
        one.slots,
    ) == expected
    assert one.rdma_request_bytes is None


def test_a_connection_over_rdma() -> None:
    line = (
        b"rdma 0 0 111 1 28 500 499 0 1646 2446 411 449 24 2164 2163 705 2119 3 610 7 0 0 0 44 4 0"
    )
    one = parse_transport([*line.split(), b"0"])
    assert (one.protocol, one.port, one.connects, one.sends, one.receives) == (
        "rdma",
        None,
        111,
        500,
        499,
    )
    assert (one.rdma_request_bytes, one.rdma_reply_bytes) == (2164, 2163)
    assert (one.rdma_registrations, one.rdma_failures, one.slots) == (3, 617, None)


def test_connections_are_added_up_and_told_every_ten_seconds(node: Node) -> None:
    node.put(mount(transports=(TCP, TCP.replace("763", "764"))))
    seen = [node.run() for _ in range(12)]
    (row,) = seen[0][0]
    assert (row.connections, row.sends, row.receives, row.slots) == (2, 78, 76, 2)
    assert [row.port for row in seen[0][2]] == [763, 764]
    assert [len(transports) for _, _, transports in seen] == [2] + [0] * 9 + [2, 0]


def test_mounts_that_share_connections_say_so(node: Node) -> None:
    node.put(
        mount("/a")
        + mount("/b")
        + mount("/c", source="other:/x")
        + mount("/d", transports=("rdma " + "0 " * 27,))
        + mount("/e", transports=("rdma " + "0 " * 27,))
    )
    rows, _, _ = node.run()
    assert {row.mount_point: row.shares_with for row in rows} == {
        "/a": None,
        "/b": "/a",
        "/c": None,
        "/d": None,
        "/e": None,
    }


def test_a_bind_mount_is_no_second_mount(node: Node) -> None:
    node.put(
        mount("/data") + mount("/bind"),
        "40 1 0:50 / /data rw - nfs4 srv:/export rw\n"
        "41 1 0:50 /sub /bind rw - nfs4 srv:/export rw\n",
    )
    rows, ops, _ = node.run()
    assert [(row.mount_point, row.device) for row in rows] == [("/data", "0:50")]
    assert len(ops) == 1


def test_mounts_of_a_container_are_read_from_its_process(tmp_path: Path) -> None:
    node = Node(tmp_path, lambda: {"gpu": (7, 8), "commands": ()})
    host = "40 1 0:50 / /data rw - nfs4 srv:/export rw\n"
    inside = "90 1 0:50 / /in rw - nfs4 srv:/export rw\n91 1 0:60 / /own rw - nfs s:/o rw\n"
    node.put(mount("/data"), host)
    for who in ("7", "8"):
        node.put(mount("/in") + mount("/own", source="s:/o"), inside, who)
    rows, _, _ = node.run()
    assert [(row.mount_point, row.device) for row in rows] == [("/data", "0:50"), ("/own", "0:60")]


def test_without_nfs_there_is_no_data_until_one_is_mounted(node: Node) -> None:
    node.put("device nfsd mounted on /proc/fs/nfsd with fstype nfsd\n")
    with pytest.raises(NoData, match="no NFS is mounted"):
        node.run()
    node.put(mount())
    for _ in range(8):
        with pytest.raises(NoData):
            node.run()
    node.clock.advance(2 * NS_PER_S)
    assert len(node.run()[0]) == 1


@pytest.mark.parametrize(
    ("options", "version", "hard"),
    [
        ("rw,vers=3,soft", "3", False),
        ("rw,vers=4,minorversion=1,hard", "4.1", True),
        ("rw,vers=4.2", "4.2", None),
        ("rw", None, None),
    ],
)
def test_options(node: Node, options: str, version: str | None, hard: bool | None) -> None:
    node.put(mount(options=options))
    ((row,), _, _) = node.run()
    assert (row.version, row.hard) == (version, hard)
    assert row.transfer_read_bytes is None and row.timeout_ms is None


def test_an_address_of_ipv6_and_a_space(node: Node) -> None:
    node.put(mount(r"/my\040data", source="[fe80::1]:/a:/b"))
    ((row,), _, _) = node.run()
    assert row.mount_point == "/my data"
    assert row.server.startswith("[fe80::1]")
    assert parse_options("a=1, b=2,,c") == {"a": "1", "b": "2", "c": ""}


def test_damage_costs_its_mount_only(tmp_path: Path) -> None:
    good = mount("/good")
    for number, text in enumerate(damaged(mount("/bad").encode())):
        node = Node(tmp_path / str(number))
        write(node.root, {"proc/self/mountstats": text + b"\n" + good.encode()})
        rows, ops, _ = node.run()
        assert "/good" in {row.mount_point for row in rows}
        assert "READ" in {row.op for row in ops}
    for bad in ("bytes:\t1 2", "xprt:\ttcp 1", "xprt:", "age:\tx", "events: 1 x"):
        with pytest.raises(ValueError, match="mountstats"):
            parse_block(mount().replace("caps:\tcaps=0x3fe6,wtmult=512", bad).encode())
    with pytest.raises(ValueError, match="63 bits"):
        parse_block(mount(sizes="9223372036854775808 2 3 4 5 6 7 8").encode())
    with pytest.raises(ValueError, match="READ has 2 numbers"):
        parse_ops(b"READ: 1 2\n")


RECORDED = [
    "telegraf/proc/self/mountstats",
    "prometheus-procfs/proc/26231/mountstats",
    "prometheus-node_exporter/proc/10/mountstats",
    *(
        f"pcp/nfsclient/{name}.qa"
        for name in (
            "mountstats",
            "mountstats3",
            "mountstats42",
            "mountstats-4.18.0-80.el8-rpc-v1.0",
            "mountstats-4.18.0-105.el8.rpc-v1.1",
            "mountstats-el8.7-rdma",
        )
    ),
]


@pytest.mark.shared
@pytest.mark.parametrize("path", RECORDED)
def test_every_recorded_file(path: str) -> None:
    data = shared(path).read_bytes()
    found = [parse_block(text) for text in blocks(data)]
    heads = [line for line in data.split(b"\n") if line.startswith(b"device ")]
    assert len(found) == sum(b"fstype nfs " in head or b"fstype nfs4" in head for head in heads) > 0
    for block in found:
        assert len(block.sizes) == 8 and len(block.events) >= 25
    for text, block in zip(blocks(data), found, strict=True):
        assert len(block.transports) == text.count(b"xprt:") > 0
        with_errors = b"RPC iostats version: 1.1" in text
        for op in parse_ops(block.per_op):
            assert (op.numbers[8] is not None) == with_errors


@pytest.mark.shared
def test_a_file_without_nfs() -> None:
    assert list(blocks(shared("pcp/nfsclient/nonfsmounts.qa").read_bytes())) == []


@pytest.mark.shared
def test_recorded_rdma_with_eight_connections(node: Node) -> None:
    node.put(shared("pcp/nfsclient/mountstats-el8.7-rdma.qa").read_text())
    rows, ops, transports = node.run()
    assert node.problems == []
    home = next(row for row in rows if row.mount_point == "/storage/home")
    assert (home.connections, home.protocol, home.version) == (8, "rdma", "3")
    assert home.connects == 299 + 306 + 305 + 304 + 301 + 300 + 300 + 299
    assert home.sends is not None and home.receives is not None
    assert home.sends - home.receives == 3, "three requests wait for their reply"
    mine = [one for one in transports if one.mount_point == "/storage/home"]
    assert [one.connects for one in mine] == [299, 306, 305, 304, 301, 300, 300, 299]
    assert mine[0].rdma_request_bytes == 2_143_783_391
    assert mine[0].rdma_reply_bytes == 1_741_491_091
    prod = [row for row in ops if row.mount_point == "/storage/prod"]
    lookup = next(row for row in prod if row.op == "LOOKUP")
    assert (lookup.ops, lookup.errors, lookup.execute_ms) == (45, 15, 32), "mounted over another"


@pytest.mark.shared
def test_recorded_mounts_of_one_server_share_a_connection(node: Node) -> None:
    node.put(shared("pcp/nfsclient/mountstats3.qa").read_text())
    rows, _, _ = node.run()
    assert len(rows) == 10
    assert [row.shares_with for row in rows] == [None] + ["/nasbox/music"] * 9
    assert {row.sends for row in rows} == {13563}


@pytest.mark.shared
def test_recorded_remarks_old_versions_and_a_time_below_zero(node: Node) -> None:
    node.put(shared("pcp/nfsclient/mountstats.qa").read_text())
    rows, ops, _ = node.run()
    by_point = {row.mount_point: row for row in rows}
    assert by_point["/mnt/nfsv4"].age_ns == 19 * NS_PER_S, "a remark follows the number"
    assert by_point["/mnt/nfsv4"].version == "4.0"
    assert by_point["/mnt/nfs41"].version == "4.1"
    assert all(row.errors is None for row in ops)
    write_ = next(row for row in ops if row.mount_point == "/ifs" and row.op == "WRITE")
    assert (write_.queue_ms, write_.rtt_ms, write_.execute_ms) == (3_423_263, 57_150, 3_480_542)
    other = Node(node.root / "other")
    other.put(shared("prometheus-node_exporter/proc/10/mountstats").read_text())
    rows, ops, _ = other.run()
    access = [row for row in ops if row.op == "ACCESS"]
    assert access and all(row.queue_ms is None for row in access)
    assert [row.protocol for row in rows if row.mount_point == "/mnt/nfs/test-dupe"] == ["udp"]
