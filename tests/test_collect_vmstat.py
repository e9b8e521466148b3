"""Memory events: names that kernels gave and renamed."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from trees import damaged, gather, host_of, shared, write
from whyidle.clock import SystemClock
from whyidle.collect.vmstat import VMSTAT, parse, parse_page_size
from whyidle.live import live_host
from whyidle.schema import Vmstat
from whyidle.table import table_of

NEW = b"""nr_dirty 17
nr_writeback 3
pswpin 1
pswpout 2
allocstall_dma 0
allocstall_normal 5
allocstall_movable 6
pgmajfault 2908
workingset_refault_anon 8
workingset_refault_file 9
pgscan_direct 10
pgscan_direct_throttle 99
oom_kill 1
"""


def test_names_of_a_new_kernel() -> None:
    row = parse(NEW, 1, 4096)
    assert row.major_faults == 2908
    assert (row.refault_file_pages, row.refault_anon_pages) == (9, 8)
    assert (row.swap_in_pages, row.swap_out_pages) == (1, 2)
    assert row.reclaim_stalls == 11, "zones are added up"
    assert row.scan_direct_pages == 10, "a longer name is another counter"
    assert (row.dirty_pages, row.writeback_pages, row.oom_kills) == (17, 3, 1)
    assert row.page_bytes == 4096


def test_names_of_an_old_kernel() -> None:
    row = parse(b"workingset_refault 7\nallocstall 4\n", 1, None)
    assert row.refault_file_pages == 7
    assert row.refault_anon_pages is None
    assert row.reclaim_stalls == 4


def test_absent_is_not_zero() -> None:
    row = parse(b"nr_free_pages 1\n", 1, None)
    names = [column.name for column in table_of(Vmstat).columns if column.name != "mono_ns"]
    assert [getattr(row, name) for name in names] == [None] * len(names)


def test_a_bad_number_is_named() -> None:
    with pytest.raises(ValueError, match="vmstat: pgmajfault"):
        parse(b"pgmajfault lots\n", 1, None)


def test_damage_is_an_error_or_a_row() -> None:
    for text in damaged(NEW):
        try:
            parse(text, 1, None)
        except ValueError as error:
            assert str(error).startswith("vmstat: ")


def test_page_size_of_the_auxiliary_vector() -> None:
    assert parse_page_size(struct.pack("<6Q", 3, 64, 6, 65536, 0, 0)) == 65536
    assert parse_page_size(struct.pack("<2Q", 3, 64) + b"cut") is None


def test_the_page_size_is_asked_once(tmp_path: Path) -> None:
    write(tmp_path, {"proc/vmstat": NEW, "proc/self/auxv": struct.pack("<4Q", 6, 4096, 0, 0)})
    host, collect = host_of(tmp_path), VMSTAT.make()
    assert gather(collect, host)[0][0].page_bytes == 4096
    (tmp_path / "proc/self/auxv").unlink()
    assert gather(collect, host)[0][0].page_bytes == 4096


@pytest.mark.shared
@pytest.mark.parametrize(
    "root", ["this-vm-6.18/root", "prometheus-node_exporter", "sysstat/root1", "sysstat/root3"]
)
def test_on_recorded_machines(root: str) -> None:
    rows, problems = gather(VMSTAT.make(), host_of(shared(root)))
    assert problems == []
    assert rows[0].major_faults > 0
    assert rows[0].dirty_pages is not None
    assert rows[0].page_bytes is None, "a tree has no auxiliary vector"


def test_live() -> None:
    host = live_host("/", SystemClock())
    row = gather(VMSTAT.make(), host)[0][0]
    host.close()
    assert row.page_bytes in (4096, 16384, 65536)
    assert row.major_faults > 0
