"""The kernel of this machine: its own second opinion, taskstats, and pressure that is made here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trees import gather
from whyidle.clock import NS_PER_S, SystemClock
from whyidle.collect.pressure import PRESSURE
from whyidle.collect.process_text import parse_io, parse_schedstat, parse_stat, parse_status
from whyidle.host import LiveHost
from whyidle.schema import Pressure

HOG = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass\n"


@contextmanager
def hogs(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes that all want the same CPU."""
    cpu = min(os.sched_getaffinity(0))
    started = []
    try:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-S", "-c", HOG])
            started.append(process)
            os.sched_setaffinity(process.pid, {cpu})
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def taskstats(pid: int) -> dict[str, Any]:
    """Return what the kernel's taskstats say of a thread; the test is skipped where they do not."""
    from pyroute2 import TaskStats
    from pyroute2.netlink.exceptions import NetlinkError

    asker = TaskStats()
    try:
        asker.bind()
        (answer,) = asker.get_pid_stat(pid)
    except (NetlinkError, OSError, RuntimeError) as error:
        pytest.skip(f"no taskstats here: {error}")
    finally:
        asker.close()
    found: dict[str, Any] = answer.get_nested("TASKSTATS_TYPE_AGGR_PID", "TASKSTATS_TYPE_STATS")
    return found


def test_live_taskstats_say_the_same_of_a_process() -> None:
    """/proc is read instead, since it needs no privilege: both must agree to the nanosecond."""
    if os.geteuid() != 0:
        pytest.skip("only root may ask for taskstats")
    with hogs(2) as (process, _):
        time.sleep(0.6)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        base = Path(f"/proc/{process.pid}")
        told = taskstats(process.pid)
        ran_ns, waited_ns = parse_schedstat((base / "schedstat").read_bytes())
        asked, given, read, written = parse_io((base / "io").read_bytes())
        stat = parse_stat((base / "stat").read_bytes())
        status = parse_status((base / "status").read_bytes())
    assert told["ac_pid"] == process.pid
    assert ran_ns == told["cpu_run_virtual_total"]
    assert ran_ns > 50_000_000
    assert waited_ns == told["cpu_delay_total"]
    # Another one wanted the same CPU all the while.
    assert waited_ns > 50_000_000
    # Taskstats counts whole kilobytes.
    for mine, theirs in (
        (asked, "read_char"), (given, "write_char"), (read, "read_bytes"), (written, "write_bytes"),
    ):  # fmt: skip
        assert mine is not None and mine // 1024 * 1024 == told[theirs]
    assert (stat.minor_faults, stat.major_faults) == (told["ac_minflt"], told["ac_majflt"])
    switches = (status.voluntary_switches, status.involuntary_switches)
    assert switches == (told["nvcsw"], told["nivcsw"])
    assert stat.blkio_delay_ns is not None
    assert abs(stat.blkio_delay_ns - told["blkio_delay_total"]) < 10_000_000


def test_live_processes_that_want_one_cpu_press_on_it() -> None:
    host = LiveHost("/", SystemClock())
    collect = PRESSURE.make()
    try:
        if not Path("/proc/pressure/cpu").exists():
            pytest.skip("this kernel counts no pressure")

        def some() -> Pressure:
            rows, _ = gather(collect, host)
            (row,) = [row for row in rows if row.resource == "cpu" and row.cgroup == ""]
            assert isinstance(row, Pressure)
            return row

        with hogs(3):
            time.sleep(0.2)
            before = some()
            time.sleep(1.0)
            after = some()
    finally:
        host.close()
    assert before.some_ns is not None and after.some_ns is not None
    length = after.mono_ns - before.mono_ns
    # The kernel adds it up every two seconds or when it is read. Each CPU counts as much as it is
    # used, so that others that are busy without anybody waiting bring it down.
    least = 0.7 * length / (os.cpu_count() or 1)
    assert least < after.some_ns - before.some_ns <= length + NS_PER_S // 10
