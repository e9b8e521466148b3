"""Wall time and memory of whole process trees, by one method for every program.

Time and memory are taken in different runs: reading memory every 10 ms costs time on a small
machine. Memory of a tree is the sum over its processes, of RSS (pages that they share count once
for each) and of PSS (shared pages count once in all); the peak of each sum is kept.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

EVERY_S = 0.01
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, minimum and maximum of repeated measurements."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peaks over the life of a process tree; `samples` says how often it was looked at."""

    rss_bytes: int
    pss_bytes: int
    processes: int
    samples: int


def spread(values: Sequence[float]) -> Spread:
    """Summarise repeated measurements."""
    return Spread(median=median(values), min=min(values), max=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Seconds of wall, and of CPU over all processes; CPU bears a busy machine better."""

    wall_s: float
    cpu_s: float


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(command: Sequence[str], out: Path) -> Time:
    """Run a command with its output in a file; raises if it could not run."""
    begin, cpu_s = time.perf_counter(), _cpu_s()
    with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        ).returncode
    wall_s = time.perf_counter() - begin
    _check(command, code, out)
    return Time(wall_s=wall_s, cpu_s=_cpu_s() - cpu_s)


def _check(command: Sequence[str], code: int, out: Path) -> None:
    # `diagnose` ends with 1 where it found something.
    if code not in (0, 1):
        message = out.with_suffix(".err").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{command[0]} ended with {code}: {message}")


def _tree(root: int) -> list[int]:
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - it runs every 10 ms
                with open(f"/proc/{pid}/task/{task}/children", "rb") as children:  # noqa: PTH123
                    todo.extend(map(int, children.read().split()))
        except OSError:
            continue
    return found


def _rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", "rb") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * _PAGE


def _pss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:  # noqa: PTH123
        for line in rollup:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _sums(root: int) -> tuple[int, int, int]:
    rss = pss = count = 0
    for pid in _tree(root):
        try:
            rss += _rss_bytes(pid)
            pss += _pss_bytes(pid)
        except OSError:
            continue
        count += 1
    return rss, pss, count


def memory(command: Sequence[str], out: Path) -> Memory:
    """Run a command and return the peaks of its tree's memory; raises if it could not run."""
    rss = pss = processes = samples = 0
    with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        while running.poll() is None:
            now = _sums(running.pid)
            rss, pss, processes = max(rss, now[0]), max(pss, now[1]), max(processes, now[2])
            samples += 1
            time.sleep(EVERY_S)
    _check(command, running.returncode, out)
    return Memory(rss_bytes=rss, pss_bytes=pss, processes=processes, samples=samples)
