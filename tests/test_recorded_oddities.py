"""Oddities of recorded machines that reach past one collector.

Those of single parsers are tested beside them (test_collect_rdma_port): counters at their end,
words that the kernel never prints, a device without counters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recording_kit import make_row
from recording_rows import HERE, connect, s
from sysfs_links import relinked
from trees import gather, host_of, series, shared, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.block_device import BLOCK_DEVICE
from whyidle.collect.process_text import parse_schedstat, parse_stat
from whyidle.schema import BlockDevice, Mount, Process
from whyidle.storage_sql import create_view
from whyidle.table import Row
from whyidle_rules.recording import processes
from whyidle_rules.recording.threads import shares

READS, SECTORS = 49, 5728


@pytest.mark.shared
def test_what_a_multipath_disk_and_its_path_both_count_is_counted_once(tmp_path: Path) -> None:
    """The recorded drive has two ports: its disk and one of two paths show the same 49 reads."""
    root = tmp_path / "root"
    relinked(shared("libnvme/tree-pcie"), root)
    (root / "proc").mkdir(exist_ok=True)
    stats = {path.parent.name: path.read_text() for path in root.rglob("nvme*/stat")}
    assert {name for name, text in stats.items() if text.split()[0] == str(READS)} == {
        "nvme1n1",
        "nvme1c2n1",
    }
    clock = VirtualClock(s(0))
    collect = BLOCK_DEVICE.make()
    rows: list[Row] = []
    for used in (False, True):
        lines = [
            f" 259 {n} {name} {text if used else ' '.join('0' * 17)}"
            for n, (name, text) in enumerate(sorted(stats.items()))
        ]
        write(root, {"proc/diskstats": "\n".join(line.rstrip() for line in lines) + "\n"})
        found, problems = gather(collect, host_of(root, clock=clock))
        assert problems == []
        rows += found
        clock.advance(NS_PER_S)
    last = {row.device: row for row in rows if isinstance(row, BlockDevice)}
    assert (last["nvme1n1"].role, last["nvme1n1"].reads) == ("disk", READS)
    if "nvme1c2n1" in last:
        assert (last["nvme1c2n1"].role, last["nvme1c2n1"].head) == ("path", "nvme1n1")
    mount = make_row(
        Mount, mono_ns=s(0), mount_id=1, mount_point="/data", kind="block", device="259:1",
        block_device="nvme1n1",
    )  # fmt: skip
    con = connect([mount, *rows])
    create_view(con)
    (served,) = con.execute("SELECT sum(served_bytes) FROM storage_second").fetchall()[0]
    assert served == SECTORS * 512


@pytest.mark.shared
def test_waits_for_disks_that_jump_by_the_uptime_are_no_wait_of_hours() -> None:
    """One of four readers shows 2394 s of waiting 0.2 s after it began, and more than its time."""
    rows: list[Row] = []
    pid = 28_857
    jump = 0
    before = None
    for moment in series():
        files = moment["files"]
        stat = files.get(f"/proc/{pid}/stat")
        if stat is None:
            continue
        at = s(float(moment["t"]))
        told = parse_stat(stat.encode())
        ran = files.get(f"/proc/{pid}/schedstat")
        run_ns, delay_ns = parse_schedstat(ran.encode()) if ran else (None, None)
        assert told.blkio_delay_ns is not None
        if before is not None:
            jump = max(jump, told.blkio_delay_ns - before)
        before = told.blkio_delay_ns
        rows.append(
            make_row(
                Process, mono_ns=at, pid=pid, start_ns=told.start_ns, state=told.state,
                main_run_ns=run_ns, main_run_delay_ns=delay_ns, blkio_delay_ns=told.blkio_delay_ns,
            )
        )  # fmt: skip
    assert jump > 2_000 * NS_PER_S
    con = connect(rows)
    node = processes.load(con, *HERE, s(-100), s(1000))
    known = processes.read(con, HERE, s(-100), s(1000), node.procs.values())
    (proc,) = known.values()
    first, last = int(proc.rows["mono_ns"][0]), int(proc.rows["mono_ns"][-1])
    centres = np.arange(first, last, NS_PER_S // 8)
    found = shares([proc], centres)
    blocked_s = float(np.nansum(found.io)) / 8
    # At most all of its time, whatever was counted.
    assert 0 < blocked_s <= (last - first) / NS_PER_S
    assert np.nanmax(found.run + found.ready + found.io) <= 1.0 + 1e-9
