"""Lustre clients: old and new forms of their statistics, targets that are cut off, damage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage_tree import node
from trees import BEGIN_NS, damaged, gather, host_of, shared, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import NoData
from whyidle.collect.lustre import LUSTRE, TARGETS_LIMIT
from whyidle.collect.lustre_text import file_system_of, parse_import, parse_stats, target_of
from whyidle.schema import LustreMount, LustreTarget

STATS = "snapshot_time 1.2 secs.nsecs\nread_bytes 2 samples [bytes] 1 9 10 82\n"


def run(root: Path) -> tuple[list[LustreMount], list[LustreTarget]]:
    rows, problems = gather(LUSTRE.make(), host_of(root))
    assert problems == []
    return (
        [row for row in rows if isinstance(row, LustreMount)],
        [row for row in rows if isinstance(row, LustreTarget)],
    )


def test_a_client_of_debugfs(tmp_path: Path) -> None:
    node().put(tmp_path)
    ((row,), targets) = run(tmp_path)
    assert (row.instance, row.file_system, row.mount_point) == (
        "syn-ffff9f0000000000",
        "syn",
        "/lustre",
    )
    assert (row.reads, row.read_bytes, row.read_us) == (1000, 900_000_000, 4_000_000)
    assert (row.writes, row.write_bytes, row.write_us) == (50, 50_000_000, 60_000)
    assert (row.opens, row.open_us, row.getattrs, row.getattr_us) == (200, 100_000, 400, 20_000)
    full, lost, names = targets
    assert (full.target, full.kind, full.state) == ("syn-OST0001", "ost", "FULL")
    assert (full.connection, full.in_flight) == ("10.2.0.1@o2ib", 8)
    assert (full.requests, full.request_us) == (900, 3_600_000)
    assert (full.reads, full.read_us, full.read_bytes) == (700, 3_000_000, 700_000_000)
    assert full.writes is full.write_us is full.write_bytes is None, "never written is not counted"
    assert (lost.state, lost.timeouts, lost.connects) == ("DISCONN", 2, 2)
    assert (names.target, names.kind, names.state) == ("syn-MDT0000", "mdt", None)


def test_targets_are_told_every_ten_seconds(tmp_path: Path) -> None:
    node().put(tmp_path)
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(tmp_path, clock=clock), LUSTRE.make()
    counts = []
    for _ in range(12):
        clock.advance(NS_PER_S)
        counts.append(len(gather(collect, host)[0]))
    assert counts == [4] + [1] * 9 + [4, 1]


def test_hundreds_of_targets_are_cut_and_said(tmp_path: Path) -> None:
    base = "proc/fs/lustre"
    write(tmp_path, {f"{base}/llite/fs-1/stats": STATS})
    write(tmp_path, {f"{base}/osc/fs-OST{n:04x}-osc-1/stats": STATS for n in range(300)})
    rows, problems = gather(LUSTRE.make(), host_of(tmp_path))
    assert len(rows) == 1 + TARGETS_LIMIT
    assert [problem.subject for problem in problems] == ["targets"]


def test_no_lustre_and_no_permission_are_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no Lustre is mounted"):
        gather(LUSTRE.make(), host_of(tmp_path))
    host = host_of(tmp_path)

    class Refusing:
        def __getattr__(self, name: str) -> object:
            return getattr(host, name)

        def names(self, path: str) -> tuple[str, ...]:
            if "debug" in path:
                raise PermissionError(13, "Permission denied", path)
            return host.names(path)

    with pytest.raises(NoData, match="CAP_DAC_READ_SEARCH"):
        gather(LUSTRE.make(), Refusing())  # type: ignore[arg-type]


def test_names() -> None:
    assert file_system_of("my-fs-ffff88105db50000") == "my-fs"
    assert target_of("my-fs-OST0001-osc-ffff88105db50000") == "my-fs-OST0001"
    assert target_of("my-fs-MDT0000-mdc-ffff88105db50000") == "my-fs-MDT0000"


def test_counters_without_sums_units_that_differ_and_wraps() -> None:
    stats = parse_stats(
        "open 136 samples [regs]\nread 5 samples [usecs] 1 2 8\nold 3 samples [usec] 1 2 4 6\n"
        "req_qdepth 7 samples [reqs] 0 7 9 9\nbig 1 samples [bytes] 1 1 99999999999999999999\n"
    )
    assert (stats["open"].count, stats["open"].total) == (136, None)
    assert (stats["read"].total_us, stats["old"].total_us) == (8, 4)
    assert stats["req_qdepth"].total_us is None
    assert stats["big"].total is None


def test_damage_names_the_counter(tmp_path: Path) -> None:
    for text in damaged(STATS.encode()):
        try:
            parse_stats(text.decode("utf-8", "replace"))
        except ValueError as error:
            assert "lustre" in str(error)
    with pytest.raises(ValueError, match="read_bytes"):
        parse_stats("read_bytes x samples [bytes] 1 9 10")
    for text in damaged(b'import:\n  state: FULL\n  current_connection: "a@o2ib"\n  inflight: 8\n'):
        try:
            found = parse_import(text.decode("utf-8", "replace"))
        except ValueError as error:
            assert "lustre" in str(error)
        else:
            assert found.state != ""
    assert parse_import('inflight: ""').in_flight is None
    with pytest.raises(ValueError, match="inflight"):
        parse_import("rpcs:\n   inflight: many\n")
    base = "proc/fs/lustre"
    good, bad = f"{base}/llite/good-1/stats", f"{base}/llite/bad-1/stats"
    write(tmp_path, {good: STATS, bad: STATS.replace(" 2 ", " x ")})
    rows, problems = gather(LUSTRE.make(), host_of(tmp_path))
    assert [row.instance for row in rows] == ["good-1"]
    assert [problem.subject for problem in problems] == ["bad-1"]


@pytest.mark.shared
def test_the_recorded_client_of_2_10() -> None:
    ((row,), targets) = run(shared("hpe-lustre"))
    assert (row.file_system, row.reads, row.read_bytes) == ("lustrefs", 1, 4_194_304)
    assert (row.writes, row.write_bytes) == (89_467_810, 93_813_797_294_080)
    assert (row.opens, row.getattrs) == (136, 41)
    assert row.read_us is row.open_us is None, "2.10 counts without times"
    by_target = {one.target: one for one in targets}
    assert set(by_target) == {
        "lustrefs-OST0000",
        "lustrefs-OST0001",
        "lustrefs-OST0002",
        "lustrefs-MDT0000",
    }
    first = by_target["lustrefs-OST0000"]
    assert (first.state, first.connection) == ("FULL", "172.20.20.5@o2ib")
    assert (first.in_flight, first.timeouts, first.connects) == (8, 0, 1)
    assert (first.requests, first.request_us) == (18_215_581, 110_282_569_237)
    assert (first.writes, first.write_us) == (18_210_286, 110_277_857_878)
    assert first.reads is first.read_bytes is None
    names = by_target["lustrefs-MDT0000"]
    assert (names.kind, names.requests, names.request_us) == ("mdt", 7604, 3_103_430)


@pytest.mark.shared
def test_the_recorded_client_without_sums_of_squares() -> None:
    ((row,), targets) = run(shared("pcp/lustre"))
    assert (row.reads, row.read_bytes, row.writes, row.write_bytes) == (34, 1003, 5, 203_517)
    assert targets == []


@pytest.mark.shared
def test_the_recorded_text_of_2_14() -> None:
    text = shared("whamcloud-lustre/llite_client.txt").read_text()
    stats = parse_stats(text.partition("llite.ai400x2-ff47bce9ca35d800.stats=")[2])
    assert (stats["open"].count, stats["open"].total_us) == (35_955_554, 3_393_651_645)
    assert (stats["ioctl"].count, stats["ioctl"].total) == (114, None)


@pytest.mark.shared
def test_every_recorded_statistics_file_parses() -> None:
    root = shared("hpe-lustre")
    found = [Path(folder) / "stats" for folder, _, names in os.walk(root) if "stats" in names]
    assert len(found) >= 5
    for path in found:
        if "lnet" not in str(path):
            assert parse_stats(path.read_text())
