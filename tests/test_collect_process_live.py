"""Real processes of this machine: found, followed, and let go of."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from trees import gather
from whyidle.clock import SystemClock
from whyidle.collect.process import PROCESS
from whyidle.live import Watched, live_host
from whyidle.schema import Process, ProcessInfo

# A parent forks two workers that take their name as PyTorch's do, say that they run and wait for a
# line. At "end" the workers read a file each and end; the parent waits for them.
PARENT = r"""
import ctypes, os, sys, time
path = sys.argv[1]
go_read, go_write = os.pipe()
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(15, b"pt_data_worker", 0, 0, 0)
        os.close(go_write)
        os.write(1, b"worker\n")
        os.read(go_read, 1)
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
        while time.process_time() < 0.15:
            pass
        os._exit(0)
    pids.append(pid)
os.close(go_read)
os.write(1, b"parent\n")
sys.stdin.readline()
os.close(go_write)
for pid in pids:
    os.waitpid(pid, 0)
os.write(1, b"reaped\n")
sys.stdin.readline()
"""


@contextmanager
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    data = tmp_path / "data"
    data.write_bytes(os.urandom(1 << 20) * 4)
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANK": "3", "WORLD_SIZE": "8"},
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        # Two lines let it end its workers and itself; killed, it would leave them to init.
        with suppress(BrokenPipeError):
            process.stdin.write("end\nend\n")
            process.stdin.flush()
        process.wait(timeout=60)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def lines(process: subprocess.Popen[str], count: int) -> set[str]:
    assert process.stdout is not None
    return {process.stdout.readline().strip() for _ in range(count)}


def test_workers_are_found_and_reaping_shows_in_the_parent(tmp_path: Path) -> None:
    with parent(tmp_path) as process:
        assert lines(process, 3) == {"worker", "parent"}
        host = live_host("/", SystemClock(), watched=Watched(commands=(process.pid,)))
        collect = PROCESS.make()
        rows, problems = gather(collect, host)
        assert problems == []
        processes = {row.pid: row for row in rows if isinstance(row, Process)}
        infos = {row.pid: row for row in rows if isinstance(row, ProcessInfo)}
        assert len(processes) == 3
        workers = [row for row in processes.values() if row.kind == "data_worker"]
        assert len(workers) == 2
        assert all(row.parent_pid == process.pid for row in workers)
        assert infos[process.pid].rank == 3
        assert infos[process.pid].world_size == 8
        assert infos[process.pid].cpus_allowed_count == len(os.sched_getaffinity(process.pid))
        before = processes[process.pid]

        assert process.stdin is not None
        process.stdin.write("end\n")
        process.stdin.flush()
        assert lines(process, 1) == {"reaped"}
        rows, problems = gather(collect, host)
        assert problems == []
        after = next(row for row in rows if isinstance(row, Process))
        assert [row.pid for row in rows if isinstance(row, Process)] == [process.pid]
        # The kernel adds what ended children read and used to their parent's own.
        assert after.rchar_bytes is not None and before.rchar_bytes is not None
        assert after.rchar_bytes - before.rchar_bytes >= 8 << 20
        assert after.reaped_user_ns is not None and before.reaped_user_ns is not None
        assert after.reaped_user_ns > before.reaped_user_ns
        host.close()


def kept() -> int:
    """How many descriptors of /proc/PID this process holds."""
    links = (path.resolve().parts for path in Path("/proc/self/fd").iterdir())
    pids = [parts[2] for parts in links if len(parts) > 3 and parts[1] == "proc"]
    return sum(pid.isdigit() and pid != str(os.getpid()) for pid in pids)


def test_descriptors_of_ended_processes_are_closed(tmp_path: Path) -> None:
    watched = Watched(commands=())
    host = live_host("/", SystemClock(), watched=watched)
    collect = PROCESS.make()
    counts = []
    for _ in range(3):
        with parent(tmp_path) as process:
            lines(process, 3)
            watched.commands = (process.pid,)
            time.sleep(0.03)  # a listing of /proc serves for 20 ms
            rows, _ = gather(collect, host)
            assert len([row for row in rows if isinstance(row, Process)]) == 3
            counts.append(kept())
        gather(collect, host)
        counts.append(kept())
    host.close()
    # Four files of each of three processes, and the wait channel of those that sleep.
    assert all(12 <= count <= 15 for count in counts[::2])
    assert counts[1::2] == [0, 0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_an_agent_without_rights_reads_the_rest(tmp_path: Path) -> None:
    """As nobody: counters of root's processes are there, their I/O and environment are not."""
    script = (
        "import os, sys\n"
        "from trees import gather\n"
        "from whyidle.clock import SystemClock\n"
        "from whyidle.collect.process import PROCESS\n"
        "from whyidle.live import Watched, live_host\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "host = live_host('/', SystemClock(), watched=Watched(commands=(int(sys.argv[1]),)))\n"
        "rows, problems = gather(PROCESS.make(), host)\n"
        "row, info = rows[0], rows[1]\n"
        "print(row.user_ns is not None, row.read_bytes, info.rank, info.comm is not None,"
        " [p.subject for p in problems])\n"
    )
    with parent(tmp_path) as process:
        lines(process, 3)
        out = subprocess.run(
            [sys.executable, "-c", script, str(process.pid)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
    assert out.stdout.strip() == "True None None True ['io']", out.stderr
