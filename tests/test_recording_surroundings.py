"""What surrounds processes: quotas, the node's CPUs, and where data comes from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.testing import assert_allclose

from recording_kit import make_row
from recording_rows import BOOT, Act, cgroup, connect, cpu, process, s, start_of
from recording_stories import memory, reads_from
from whyidle.schema.machine import CgroupCpu, Cpu, Pressure, Vmstat
from whyidle.schema.storage import FileUse
from whyidle.table import Row
from whyidle_rules.recording import processes, surroundings
from whyidle_rules.recording.surroundings import Reads, Surroundings

JOB = "/job"


def load(rows: Sequence[Row]) -> Surroundings:
    with connect(rows) as con:
        return surroundings.load(con, "n0", BOOT, s(-100), s(1000))


def at(*seconds: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([s(second) for second in seconds], dtype=np.int64)


def reads(rows: Sequence[Row], *seconds: float) -> Reads:
    """Return where all processes of these rows read from."""
    with connect(rows) as con:
        around = surroundings.load(con, "n0", BOOT, s(-100), s(1000))
        known = processes.load(con, "n0", BOOT).procs
        procs = list(processes.read(con, ("n0", BOOT), 0, s(1000), known.values()).values())
    return around.reads(procs, at(*seconds))


def test_a_quota_is_told_by_the_periods_that_were_cut_short() -> None:
    around = load(cgroup(0, 20, JOB, quota_ns=80_000_000, throttled=0.4))
    assert_allclose(around.throttled(JOB, at(5, 10)), 0.4)


def test_a_quota_that_begins_to_bind_is_mixed_for_two_seconds() -> None:
    rows = cgroup(0, 10, JOB, quota_ns=80_000_000, throttled=0.0)
    rows += [
        make_row(
            CgroupCpu,
            mono_ns=s(second),
            cgroup=JOB,
            quota_ns=80_000_000,
            periods=second * 10,
            throttled_periods=(second - 10) * 10,
        )
        for second in range(11, 21)
    ]
    assert_allclose(load(rows).throttled(JOB, at(7.9, 10, 12.1)), [0, 0.5, 1])


def test_without_a_quota_nothing_is_cut() -> None:
    rows = [
        make_row(CgroupCpu, mono_ns=s(second), cgroup=JOB, quota_ns=None, periods=0)
        for second in range(10)
    ]
    assert load(rows).throttled(JOB, at(5)).tolist() == [0]


def test_a_quota_whose_size_is_missing_shows_by_its_periods() -> None:
    around = load(cgroup(0, 20, JOB, quota_ns=None, throttled=0.4))
    assert_allclose(around.throttled(JOB, at(5)), 0.4)


@pytest.mark.parametrize("name", [None, "/other"])
def test_an_unknown_cgroup_is_unknown(name: str | None) -> None:
    around = load(cgroup(0, 20, JOB, quota_ns=80_000_000, throttled=0.4))
    assert np.isnan(around.throttled(name, at(5))).all()


def test_a_quota_is_unknown_where_it_was_not_read() -> None:
    around = load(cgroup(0, 20, JOB, quota_ns=80_000_000, throttled=0.4))
    assert np.isnan(around.throttled(JOB, at(-50, 60))).all()
    around = load(cgroup(0, 20, JOB, quota_ns=80_000_000, throttled=None))
    assert np.isnan(around.throttled(JOB, at(5))).all()


def test_the_share_of_the_cpus_that_was_used() -> None:
    around = load(cpu(0, 20, cpus=8, used=6))
    assert around.cpus == 8
    assert_allclose(around.cpu_busy(at(5)), 0.75)
    assert np.isnan(around.cpu_busy(at(40))).all()


def test_interrupts_and_what_a_hypervisor_takes_are_used_too() -> None:
    rows = [
        make_row(
            Cpu,
            mono_ns=s(second),
            cpus=2,
            user_ns=round(second * 0.5e9),
            system_ns=round(second * 0.25e9),
            interrupt_ns=round(second * 0.125e9),
            steal_ns=round(second * 0.125e9),
        )
        for second in range(10)
    ]
    assert_allclose(load(rows).cpu_busy(at(5)), 0.5)


def test_a_node_without_readings_of_its_cpus_is_unknown() -> None:
    around = load([])
    assert around.cpus is None
    assert np.isnan(around.cpu_busy(at(5))).all()


def test_what_comes_from_a_block_device_grows_what_was_read_from_storage() -> None:
    found = reads(process(10, [(10, Act(read=1e6, asked=2e6))]), 5)
    assert (found.kind.tolist(), found.mount.tolist()) == (["block"], [None])
    assert_allclose(found.device_per_s, 1e6)
    assert_allclose(found.asked_per_s, 2e6)


@pytest.mark.parametrize(
    "act",
    [Act(read=1e5, asked=1e6), Act(read=10e3, asked=10e3), Act(read=None, asked=1e6), Act()],
    ids=["page cache", "next to nothing", "not told", "nothing told"],
)
def test_otherwise_it_is_not_known_where_data_comes_from(act: Act) -> None:
    found = reads(process(10, [(10, act)]), 5)
    assert (found.kind.tolist(), found.mount.tolist()) == ([None], [None])


def test_a_thread_that_waits_for_fuse_reads_from_one() -> None:
    act = Act(read=0, asked=1e6, state="S", channel="request_wait_answer")
    found = reads(process(10, [(10, act), (40, Act(read=0, asked=1e6))]), 5, 24, 27)
    # It is looked for in 15 s on each side: the last reading in a wait was at 10 s.
    assert found.kind.tolist() == ["fuse", "fuse", None]


@pytest.mark.parametrize("kind", ["nfs", "lustre", "fuse", "ceph", "object"])
def test_open_files_say_which_file_system_it_is(kind: str) -> None:
    rows = [*process(10, [(10, Act(read=0, asked=1e6))]), *reads_from(10, kind, "/data", 2, 8)]
    found = reads(rows, 5)
    assert (found.kind.tolist(), found.mount.tolist()) == ([kind], ["/data"])


def test_of_several_the_one_that_is_open_most() -> None:
    rows = [
        *process(10, [(10, Act(read=0, asked=1e6))]),
        *reads_from(10, "nfs", "/home", 2, 4),
        *reads_from(10, "lustre", "/scratch", 4, 9),
    ]
    assert reads(rows, 5).mount.tolist() == ["/scratch"]


def test_files_of_a_block_device_are_what_is_read_while_it_is_read() -> None:
    """Its data lies on NFS, and its code on the disk; then it reads from the disk."""
    looks = [*reads_from(10, "nfs", "/data", 0, 3), *reads_from(10, "block", "/", 0, 9)]
    remote = reads([*process(10, [(10, Act(read=0, asked=1e6))]), *looks], 5)
    assert remote.mount.tolist() == ["/data"]
    local = reads([*process(10, [(10, Act(read=1e6, asked=1e6))]), *looks], 5)
    assert local.mount.tolist() == ["/"]


@pytest.mark.parametrize("kind", ["overlay", "tmpfs", "other", None])
def test_what_lies_below_an_overlay_is_not_known(kind: str | None) -> None:
    rows = [*process(10, [(10, Act(read=0, asked=1e6))]), *reads_from(10, kind, "/", 2, 8)]
    assert reads(rows, 5).kind.tolist() == [None]


def test_files_that_are_written_are_not_read() -> None:
    look = make_row(
        FileUse,
        mono_ns=s(5),
        pid=10,
        start_ns=start_of(0),
        kind="nfs",
        mount_point="/out",
        read_files=0,
        write_files=3,
    )
    assert reads([*process(10, [(10, Act(read=0, asked=1e6))]), look], 5).kind.tolist() == [None]


def thrashing(stalled: float, again: float) -> Surroundings:
    """Return memory that tasks wait for, and so many bytes a second that are read again."""
    rows: list[Row] = []
    for second in range(20):
        stall = round(second * stalled * 1e9)
        rows.append(
            make_row(Pressure, mono_ns=s(second), resource="memory", cgroup="", some_ns=stall)
        )
        pages = round(second * again / 4096)
        rows.append(make_row(Vmstat, mono_ns=s(second), refault_file_pages=pages, page_bytes=4096))
    return load(rows)


def test_what_has_to_be_read_again_for_want_of_memory() -> None:
    device = np.array([8 * 4096e3])
    around = thrashing(0.2, 4096e3)
    assert_allclose(around.thrashing(device, at(10)), 1 / 8)
    # A full page cache alone makes nobody wait, and more is read again than from devices.
    assert thrashing(0.01, 4096e3).thrashing(device, at(10)).tolist() == [0]
    assert_allclose(thrashing(0.2, 4096e6).thrashing(device, at(10)), 1)
    assert np.isnan(load([]).thrashing(device, at(10))).all()
    assert np.isnan(around.thrashing(device, at(100))).all()


def test_memory_that_nobody_waits_for_is_no_thrashing() -> None:
    assert load(memory(0, 20)).thrashing(np.array([1e6]), at(10)).tolist() == [0]
