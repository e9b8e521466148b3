"""The stand-in NVML library under valgrind, the sanitizers, and readers racing a writer."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from vgpu import Process, Standin, library, standin
from vgpu.ask import Asker

EXERCISE = Path(__file__).parent / "vgpu" / "check" / "exercise.c"
RACE = EXERCISE.with_name("race.c")
TIMEOUT_S = 120


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    # A short refresh period: the copies of gauges and samples are replaced while others read them.
    with standin(tmp_path, gpus=3, refresh_s=0.001) as made:
        for gpu in made.state.gpus:
            gpu.run(gr=0.5, sm=0.25, nvlink_rx=1e9)
            gpu.processes([Process(pid=1, used_bytes=1 << 30, sm_percent=50)])
        yield made


def _compile(program: Path, flags: Sequence[str], sources: Sequence[Path]) -> None:
    command = [
        library.compiler(), "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", *flags,
        f"-I{library.header()}", *map(str, sources), "-o", str(program), "-lm", "-lpthread",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0 and "cannot find" in done.stderr:
        pytest.skip(f"this compiler has no {' '.join(flags)}")
    assert done.returncode == 0, done.stderr


def _run(command: Sequence[str], env: dict[str, str]) -> str:
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_valgrind_finds_no_error_and_no_leak(node: Standin, tmp_path: Path) -> None:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("valgrind is not installed")
    program = tmp_path / "exercise"
    _compile(program, [], [EXERCISE, node.library / library.SONAME])
    _run([valgrind, "--quiet", "--leak-check=full", "--error-exitcode=9", str(program)], node.env)


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_sanitizers_find_nothing(node: Standin, tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "exercise"
    sources = [EXERCISE, *sorted(library.SOURCES.glob("*.c"))]
    # gcc warns that it does not model fences; what they order is another process's writing.
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-Wno-tsan"]
    _compile(program, flags, sources)
    _run([str(program)], {**node.env, "TSAN_OPTIONS": "halt_on_error=1"})


def test_readers_never_see_half_a_change_of_a_fast_writer(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=1, refresh_s=0.0) as node:
        program = tmp_path / "race"
        flags = [f"-I{library.SOURCES}"]
        _compile(program, flags, [RACE, node.library / library.SONAME])
        moved, torn = _run([str(program), str(node.state.path)], node.env).split()
    assert int(moved) > 100
    assert int(torn) == 0


READERS = """
import threading

def read(rounds):
    a, b = nvmlGpmSampleAlloc(), nvmlGpmSampleAlloc()
    get = c_nvmlGpmMetricsGet_t()
    get.version, get.numMetrics, get.sample1, get.sample2 = 1, 3, a, b
    for i, metric in enumerate((1, 2, 10)):
        get.metrics[i].metricId = metric
    out = []
    for _ in range(rounds):
        nvmlGpmSampleGet(h, a)
        nvmlGpmSampleGet(h, b)
        nvmlGpmMetricsGet(get)
        out.append([get.metrics[i].value for i in range(3)])
    return out

def race(threads, rounds):
    results = [None] * threads
    def one(i):
        results[i] = read(rounds)
    running = [threading.Thread(target=one, args=(i,)) for i in range(threads)]
    for thread in running: thread.start()
    for thread in running: thread.join()
    return sum(results, [])
"""


def test_readers_never_see_half_a_change(tmp_path: Path) -> None:
    """Three counters always change together, so each window must show three equal values."""
    # A refresh period of zero: every sample is taken anew.
    with standin(tmp_path, gpus=1, refresh_s=0.0) as node, Asker(node.env) as ask:
        gpu = node.state.gpus[0]
        stop = threading.Event()
        changes = 0

        def write() -> None:
            nonlocal changes
            while not stop.is_set():
                changes += 1
                gpu.add(gr=1_000_000, sm=1_000_000, dram=1_000_000)

        writer = threading.Thread(target=write)
        ask.do("h = nvmlDeviceGetHandleByIndex(0)\n" + READERS)
        writer.start()
        try:
            rows = ask("race(4, 2000)")
        finally:
            stop.set()
            writer.join()
    windows = [row for row in rows if not math.isnan(row[0])]
    assert len(windows) > 1000 and changes > 100
    assert any(row[0] > 0 for row in windows), "no window saw a change"
    assert [row for row in windows if not row[0] == row[1] == row[2]] == []


def test_writers_of_two_processes_lose_nothing(node: Standin) -> None:
    code = (
        "import sys; from pathlib import Path; from vgpu import StateFile\n"
        "gpu = StateFile(Path(sys.argv[1])).gpus[0]\n"
        "for _ in range(1000): gpu.add(pcie_tx=3)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code, str(node.state.path)]
    others = [subprocess.Popen(command, env=env) for _ in range(2)]
    for _ in range(1000):
        node.state.gpus[0].add(pcie_tx=5)
    assert [other.wait(TIMEOUT_S) for other in others] == [0, 0]
    assert node.state.gpus[0].value("pcie_tx") == 1000 * (3 + 3 + 5)


def test_a_writer_that_died_inside_does_not_hang_the_readers(node: Standin) -> None:
    node.state._state.gpus[0].seq += 1  # odd: as if it were inside a change
    with Asker(node.env) as ask:
        ask.do("h = nvmlDeviceGetHandleByIndex(0)")
        assert ask.code("nvmlDeviceGetTotalEnergyConsumption(h)") == 0
