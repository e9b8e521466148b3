"""What /proc says of a process, read from text: real processes, odd names, damage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from job import Proc
from trees import SHARED, damaged, shared
from whyidle.collect.process_text import (
    count_list,
    parse_command,
    parse_io,
    parse_schedstat,
    parse_stat,
    parse_status,
)

TICK = 10_000_000


def test_stat() -> None:
    stat = parse_stat(Proc(pid=7, parent=3, comm="python3", blkio=4).stat().encode())
    assert (stat.parent_pid, stat.comm, stat.state) == (3, "python3", "S")
    assert (stat.minor_faults, stat.major_faults) == (7, 3)
    assert (stat.user_ns, stat.system_ns) == (10 * TICK, 5 * TICK)
    assert (stat.reaped_user_ns, stat.reaped_system_ns) == (2 * TICK, 1 * TICK)
    assert (stat.threads, stat.last_cpu) == (1, 2)
    assert stat.start_ns == 5_000 * TICK
    assert stat.blkio_delay_ns == 4 * TICK


@pytest.mark.parametrize("comm", ["a b", "a) R 1", "((", ")", "x\ny"])
def test_names_may_hold_anything(comm: str) -> None:
    stat = parse_stat(Proc(pid=7, parent=3, comm=comm).stat().encode())
    assert (stat.comm, stat.parent_pid) == (comm, 3)


def test_short_stat_of_an_old_kernel_leaves_unknown_what_it_lacks() -> None:
    words = Proc(pid=7, parent=3, comm="x").stat().split()[:22]
    stat = parse_stat(" ".join(words).encode())
    assert stat.last_cpu is stat.blkio_delay_ns is None
    with pytest.raises(ValueError, match="stat: 19 fields"):
        parse_stat(" ".join(words[:21]).encode())


def test_status() -> None:
    status = parse_status(Proc(pid=7, parent=3, comm="x").status().encode())
    assert status.user_id == 1001, "the effective one"
    assert status.rss_bytes == 2 << 20
    assert (status.cpus_allowed, status.numa_allowed) == ("0-3,8", "0-1")
    assert (status.voluntary_switches, status.involuntary_switches) == (11, 12)


def test_what_rarely_changes_is_taken_over_only_while_it_is_the_same() -> None:
    process = Proc(pid=7, parent=3, comm="x")
    first = parse_status(process.status().encode())
    again = parse_status(process.status().replace("\t11", "\t13").encode(), first)
    assert again.voluntary_switches == 13
    assert again.cpus_allowed is first.cpus_allowed
    process.cpus = "0"
    assert parse_status(process.status().encode(), again).cpus_allowed == "0"
    changed = process.status().replace("1001", "0").encode()
    assert parse_status(changed, again).user_id == 0


def test_a_zombies_status_has_no_memory() -> None:
    assert parse_status(b"Name:\tx\nState:\tZ (zombie)\n").rss_bytes is None


def test_io_and_schedstat() -> None:
    assert parse_io(b"rchar: 1\nwchar: 2\nread_bytes: 3\nwrite_bytes: 4\n") == (1, 2, 3, 4)
    usual = "rchar: 1\nwchar: 2\nsyscr: 9\nsyscw: 8\nread_bytes: 3\nwrite_bytes: 4\nx: 5\n"
    assert parse_io(usual.encode()) == (1, 2, 3, 4)
    assert parse_io(b"rchar: 1\n") == (1, None, None, None)
    assert parse_schedstat(b"10 20 30\n") == (10, 20)
    with pytest.raises(ValueError, match="schedstat"):
        parse_schedstat(b"10\n")


def test_damage_is_an_error_or_a_value() -> None:
    process = Proc(pid=7, parent=3, comm="x")
    for text, parse in (
        (process.stat(), parse_stat),
        (process.status(), parse_status),
        (str(process.files()["proc/7/io"]), parse_io),
        ("123456 7890123 55\n", parse_schedstat),
    ):
        for variant in damaged(text.encode()):
            try:
                parse(variant)
            except ValueError:
                continue


def test_command_lines() -> None:
    assert parse_command(b"python\0train.py\0--lr\0") == "python train.py --lr"
    assert parse_command(b"") is None, "a kernel thread"
    assert len(parse_command(b"x" * 10_000) or "") == 512
    assert parse_command(b"\xff\xfe\0") == "��"


@pytest.mark.parametrize(
    ("text", "count"), [("0-3,8", 5), ("0", 1), ("0-255", 256), ("", None), ("a-b", None)]
)
def test_lists_of_cpus(text: str, count: int | None) -> None:
    assert count_list(text) == count


def recorded(name: str) -> list[str]:
    return sorted(
        str(path.relative_to(SHARED))
        for path in SHARED.rglob(name)
        if path.is_file() and path.parent.name.isdigit()
    )


@pytest.mark.shared
@pytest.mark.parametrize("path", recorded("stat") or ["missing"])
def test_every_recorded_stat(path: str) -> None:
    text = shared(path).read_bytes()
    stat = parse_stat(text)
    assert stat.comm in text.decode()
    assert stat.start_ns == int(text.rpartition(b")")[2].split()[19]) * TICK
    assert stat.threads >= 1


@pytest.mark.shared
@pytest.mark.parametrize("path", recorded("status") or ["missing"])
def test_every_recorded_status(path: str) -> None:
    status = parse_status(shared(path).read_bytes())
    assert status.user_id is not None


@pytest.mark.shared
@pytest.mark.parametrize("path", recorded("io") or ["missing"])
def test_every_recorded_io(path: str) -> None:
    assert all(value is not None for value in parse_io(shared(path).read_bytes()))


def test_own_process_is_read() -> None:
    stat = parse_stat(Path("/proc/self/stat").read_bytes())
    status = parse_status(Path("/proc/self/status").read_bytes())
    assert stat.parent_pid == os.getppid()
    assert status.rss_bytes is not None and status.rss_bytes > 1 << 20
    assert count_list(status.cpus_allowed or "") is not None
