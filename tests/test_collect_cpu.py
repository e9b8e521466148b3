"""CPU time of the node: /proc/stat as kernels print it, and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from trees import damaged, gather, host_of, shared, write
from whyidle.clock import SystemClock
from whyidle.collect.cpu import CPU, parse
from whyidle.live import live_host

STAT = b"""cpu  100 20 30 4000 50 6 7 8 9 10
cpu0 50 10 15 2000 25 3 3 4 4 5
cpu1 50 10 15 2000 25 3 4 4 5 5
intr 12345 0 1
ctxt 99
btime 1767225600
processes 1000
procs_running 3
procs_blocked 2
softirq 5 1 1 1 1 1
"""


def test_ticks_become_ns_by_mode() -> None:
    row = parse(STAT, 7)
    assert row.mono_ns == 7
    assert row.cpus == 2
    assert row.user_ns == 120 * 10_000_000, "nice is user time; guests are in it already"
    assert row.system_ns == 30 * 10_000_000
    assert row.interrupt_ns == 13 * 10_000_000
    assert row.steal_ns == 8 * 10_000_000
    assert row.iowait_ns == 50 * 10_000_000
    assert row.idle_ns == 4000 * 10_000_000
    assert (row.running, row.blocked) == (3, 2)


def test_an_old_kernel_leaves_unknown_what_it_lacks() -> None:
    row = parse(b"cpu 1 2 3 4\ncpu0 1 2 3 4\n", 0)
    assert row.interrupt_ns is row.steal_ns is row.iowait_ns is None
    assert row.running is row.blocked is None
    assert row.cpus == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin"),
        (b"cpu  1 2\n", "2 numbers"),
        (b"cpu  1 2 x 4\n", "stat: cpu"),
        (b"cpu  1 2 3 4\nprocs_running many\n", "procs_running"),
    ],
)
def test_what_cannot_be_read_names_the_field(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(data, 0)


def test_damage_is_an_error_or_a_row_never_another_exception() -> None:
    refused = 0
    for text in damaged(STAT):
        try:
            parse(text, 0)
        except ValueError:
            refused += 1
    assert refused > 10


def test_from_a_tree(tmp_path: Path) -> None:
    write(tmp_path, {"proc/stat": STAT})
    rows, problems = gather(CPU.make(), host_of(tmp_path))
    assert [row.cpus for row in rows] == [2]
    assert problems == []


@pytest.mark.shared
@pytest.mark.parametrize(
    ("root", "cpus"),
    [("this-vm-6.18/root", 2), ("prometheus-procfs", 8), ("prometheus-node_exporter", 8)],
)
def test_on_recorded_machines(root: str, cpus: int) -> None:
    rows, _ = gather(CPU.make(), host_of(shared(root)))
    assert [row.cpus for row in rows] == [cpus]
    assert rows[0].idle_ns > 0


def test_live_time_passes_at_the_rate_of_the_cpus() -> None:
    clock = SystemClock()
    host = live_host("/", clock)
    collect = CPU.make()
    before = gather(collect, host)[0][0]
    clock.sleep_until(clock.mono_ns() + 400_000_000)
    after = gather(collect, host)[0][0]
    host.close()
    modes = ("user_ns", "system_ns", "interrupt_ns", "steal_ns", "iowait_ns", "idle_ns")
    spent = sum(getattr(after, mode) - getattr(before, mode) for mode in modes)
    wall = after.mono_ns - before.mono_ns
    # Ticks are 10 ms and the idle CPUs' are updated late; steal and iowait may go back a little.
    assert 0.5 * wall * after.cpus < spent < 1.5 * wall * after.cpus
