"""Block devices: every form of /proc/diskstats, partitions, hidden paths, damage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trees import SHARED, damaged, gather, host_of, series, shared, write
from whyidle.clock import SystemClock, VirtualClock
from whyidle.collect.block_device import BLOCK_DEVICE, parse, parse_line, role_of
from whyidle.collect.collector import NoData, Problem
from whyidle.live import live_host
from whyidle.schema import BlockDevice

FULL = "259 0 nvme0n1 10 1 80 5 20 2 160 6 3 7 8 1 0 8 1 4 9"


def rows_of(text: str, *disks: str) -> list[BlockDevice]:
    found = list(parse(text, 1, disks))
    assert not any(isinstance(item, Problem) for item in found), found
    return [item for item in found if isinstance(item, BlockDevice)]


def test_all_seventeen_numbers() -> None:
    row = parse_line(FULL, 1)
    assert (row.device, row.major, row.minor) == ("nvme0n1", 259, 0)
    assert (row.reads, row.read_bytes, row.read_ms) == (10, 80 * 512, 5)
    assert (row.writes, row.write_bytes, row.write_ms) == (20, 160 * 512, 6)
    assert (row.in_flight, row.busy_ms, row.queue_ms) == (3, 7, 8)
    assert (row.flushes, row.flush_ms) == (4, 9)


def test_older_kernels_count_no_flushes() -> None:
    words = FULL.split()
    for count in (14, 18):
        row = parse_line(" ".join(words[:count]), 1)
        assert row.flushes is row.flush_ms is None
        assert row.queue_ms == 8


def test_partitions_are_left_out_where_sysfs_names_the_disks() -> None:
    text = f"{FULL}\n{FULL.replace('nvme0n1', 'nvme0n1p1')}\n"
    assert [row.device for row in rows_of(text, "nvme0n1")] == ["nvme0n1"]
    assert len(rows_of(text)) == 2


@pytest.mark.parametrize(
    ("device", "role", "head"),
    [
        ("nvme0n1", "disk", None),
        ("nvme3c33n1", "path", "nvme3n1"),
        ("sda", "disk", None),
        ("nbd0", "disk", None),
        ("dm-0", "stacked", None),
        ("md127", "stacked", None),
        ("loop0", "virtual", None),
        ("zram0", "virtual", None),
    ],
)
def test_what_counts_the_same_again_is_told_from_disks(
    device: str, role: str, head: str | None
) -> None:
    row = parse_line(FULL.replace("nvme0n1", device), 1)
    assert (row.role, row.head) == (role, head)
    assert role_of(device) == role


def test_devices_that_are_often_unused_show_once_used() -> None:
    idle = "7 0 loop0 0 0 0 0 0 0 0 0 0 0 0"
    hung = "7 1 loop1 0 0 0 0 0 0 0 0 1 0 0"
    fresh = "8 0 sda 0 0 0 0 0 0 0 0 0 0 0"
    assert [row.device for row in rows_of(f"{idle}\n{hung}\n{fresh}\n")] == ["loop1", "sda"]


def test_one_bad_line_is_a_problem_of_that_device() -> None:
    found = list(parse(f"8 0 sda 1 2 3\n8 16 sdb {'x ' * 17}\n{FULL}\n", 1))
    assert [item.subject for item in found if isinstance(item, Problem)] == ["sda", "sdb"]
    assert [item.device for item in found if isinstance(item, BlockDevice)] == ["nvme0n1"]


def test_damage_never_ends_the_run() -> None:
    for text in damaged((FULL + "\n").encode() * 3):
        list(parse(text.decode("utf-8", "replace"), 1))


def test_a_new_disk_shows_at_once(tmp_path: Path) -> None:
    write(tmp_path, {"proc/diskstats": FULL + "\n", "sys/block/nvme0n1/stat": ""})
    clock = VirtualClock(10)
    host, collect = host_of(tmp_path, clock=clock), BLOCK_DEVICE.make()
    assert [row.device for row in gather(collect, host)[0]] == ["nvme0n1"]
    more = FULL.replace("nvme0n1", "nvme1n1")
    write(tmp_path, {"proc/diskstats": f"{FULL}\n{more}\n", "sys/block/nvme1n1/stat": ""})
    clock.advance(1)
    assert [row.device for row in gather(collect, host)[0]] == ["nvme0n1", "nvme1n1"]


def test_no_block_devices_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no block devices"):
        gather(BLOCK_DEVICE.make(), host_of(tmp_path))


RECORDED = sorted(
    str(path.relative_to(SHARED)) for path in SHARED.rglob("diskstats") if path.is_file()
)


@pytest.mark.shared
@pytest.mark.parametrize("path", RECORDED or ["missing"])
def test_every_recorded_file(path: str) -> None:
    text = shared(path).read_text()
    rows = rows_of(text)
    assert rows
    for row in rows:
        line = next(line for line in text.splitlines() if line.split()[2] == row.device)
        words = line.split()
        assert row.reads == int(words[3])
        assert row.write_bytes == int(words[9]) * 512
        assert (row.flushes is not None) == (len(words) >= 20)


@pytest.mark.shared
def test_hidden_paths_of_a_multipath_namespace_are_kept() -> None:
    """Their numbers are 0:0; on old kernels the head counts nothing and only the path does."""
    text = "0 0 nvme0c0n1 1 0 8 1 0 0 0 0 0 1 1\n259 1 nvme0n1 0 0 0 0 0 0 0 0 0 0 0\n"
    hidden, head = rows_of(text)
    assert (hidden.device, hidden.major, hidden.minor, hidden.reads) == ("nvme0c0n1", 0, 0, 1)
    assert head.reads == 0


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "path", "head", "reads"),
    [
        ("atop-pr157", "nvme0c0n1", "nvme0n1", 34_706_049),
        ("lxcfs-667", "nvme0c0n1", "nvme0n1", 162),
        ("netdata-5744", "nvme3c33n1", "nvme3n1", 682),
    ],
)
def test_recorded_paths_beside_a_head_that_counts_nothing(
    name: str, path: str, head: str, reads: int
) -> None:
    rows = rows_of(shared(f"docs-samples/nvme-multipath-diskstats/{name}.txt").read_text())
    by_device = {row.device: row for row in rows}
    assert (by_device[path].role, by_device[path].head) == ("path", head)
    assert (by_device[path].major, by_device[path].minor) == (0, 0)
    assert (by_device[path].reads, by_device[head].reads) == (reads, 0)


@pytest.mark.shared
def test_recorded_partitions_add_up_to_their_disk() -> None:
    name = "docs-samples/nvme-multipath-diskstats/dool-32-partitions.txt"
    text = shared(name).read_text()
    assert [row.device for row in rows_of(text, "nvme0n1")] == ["nvme0n1"]


@pytest.mark.shared
def test_the_recorded_readers_read_at_three_gigabytes_a_second() -> None:
    moments = [moment for moment in series() if "read" in moment["phase"]]
    ends = []
    for moment in (moments[0], moments[-1]):
        rows = rows_of(moment["files"]["/proc/diskstats"], "vda")
        ends.append((moment["t"], rows[0]))
    (t0, before), (t1, after) = ends
    rate = (after.read_bytes - before.read_bytes) / (t1 - t0)
    assert rate == pytest.approx(3.3e9, rel=0.1)
    wait_ms = (after.read_ms - before.read_ms) / (after.reads - before.reads)
    assert wait_ms == pytest.approx(1.1, abs=0.2)


def test_live_writes_are_counted(tmp_path: Path) -> None:
    host, collect = live_host("/", SystemClock()), BLOCK_DEVICE.make()
    before = {row.device: row for row in gather(collect, host)[0]}
    if not before:
        pytest.skip("this machine shows no disk")
    with (tmp_path / "data").open("wb") as file:
        file.write(os.urandom(4 << 20))
        file.flush()
        os.fsync(file.fileno())
    after = {row.device: row for row in gather(collect, host)[0]}
    host.close()
    written = sum(
        after[name].write_bytes - row.write_bytes for name, row in before.items() if name in after
    )
    if written == 0:
        pytest.skip("temporary files are not on a disk here")
    assert written >= 4 << 20
