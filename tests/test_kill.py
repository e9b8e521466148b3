"""Killed at any moment: at most a second is lost, and what is left can always be read.

A quick version of twenty moments runs everywhere, two hundred with the slow tests.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from recording_kit import sample
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.clocks import CLOCKS
from whyidle.collect.gpu_activity import GPU_ACTIVITY
from whyidle.collect.process import PROCESS
from whyidle.host import LiveHost
from whyidle.layout import PIECE, SEGMENT, files, identify
from whyidle.store import Recording
from world.machine import IDENTITY, Machine

SOURCES = (CLOCKS, GPU_ACTIVITY, PROCESS)
TICK_S = 0.125
PYTHON = [sys.executable, "-X", "faulthandler", "-m"]


@pytest.fixture
def child() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def start(child: list[subprocess.Popen[bytes]], *arguments: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([*PYTHON, *arguments], stdin=subprocess.PIPE, cwd="/")
    child.append(process)
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def wait_for(done: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done():
            return
        time.sleep(0.01)
    raise AssertionError(f"still not so after {seconds} s")


def pieces(recording: Path) -> list[Path]:
    return sorted(recording.rglob(f"*{PIECE}"))


def _newer(recording: Path, before: set[Path]) -> set[Path]:
    return set(pieces(recording)) - before


class Metronome:
    """Wakes a hundred times a second, and knows how late it was at most: 0 on a quiet machine."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._late_s = 0.0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Metronome:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def late_s(self) -> float:
        """Return the most since this was last asked."""
        late, self._late_s = self._late_s, 0.0
        return late

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            due += 0.01
            time.sleep(max(0.0, due - time.monotonic()))
            self._late_s = max(self._late_s, time.monotonic() - due)


def kill_samplers(
    child: list[subprocess.Popen[bytes]],
    recording: Path,
    moments: int,
    seed: int,
    *,
    grace_s: float = 0.0,
) -> None:
    generator = random.Random(seed)
    clock = LiveHost("/", VirtualClock())
    boot8 = identify(clock).boot8
    clock.close()
    worst = 0.0
    with Metronome() as metronome:
        for moment in range(moments):
            before = set(pieces(recording))
            sampler = start(child, "whyidle.sampler_process", str(recording), "--node", "n")
            wait_for(partial(_newer, recording, before))
            metronome.late_s()
            time.sleep(generator.uniform(0.0, 1.3 if moment % 4 else 2.6))
            assert sampler.poll() is None
            killed_ns = time.monotonic_ns()
            kill(sampler)
            late_s = metronome.late_s()
            with Recording([recording]) as opened:
                assert opened.damaged == []
                newest = opened.con.execute("SELECT max(mono_ns) FROM tick").fetchone()
            assert newest is not None
            lost_s = (killed_ns - newest[0]) / NS_PER_S
            worst = max(worst, lost_s)
            # A second between flushes, a tick, and what other work of the machine delays both by.
            assert lost_s <= 1.0 + TICK_S + max(grace_s, 3 * late_s), (lost_s, late_s)
    print(f"{moments} kills: at most {worst:.3f} s lost")  # noqa: T201 - shown by -s
    assert len(pieces(recording)) == moments
    assert {path.parent.parent.name for path in pieces(recording)} == {boot8}


def test_a_sampler_killed_at_any_moment_loses_at_most_a_second(
    child: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    kill_samplers(child, tmp_path, 6, seed=1, grace_s=0.7)


@pytest.mark.slow
def test_a_sampler_killed_at_a_hundred_moments(
    child: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    kill_samplers(child, tmp_path, 100, seed=2, grace_s=0.05)


def test_a_sampler_that_is_told_to_stop_loses_nothing(
    child: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    for number, end in enumerate(("term", "lifeline")):
        recording = tmp_path / end
        sampler = start(child, "whyidle.sampler_process", str(recording), "--node", "n")
        wait_for(partial(pieces, recording))
        time.sleep(0.6 + 0.3 * number)
        stopped_ns = time.monotonic_ns()
        if end == "term":
            sampler.send_signal(signal.SIGTERM)
        else:
            assert sampler.stdin is not None
            sampler.stdin.close()
        assert sampler.wait(10) == 0
        with Recording([recording]) as opened:
            newest, cost = opened.con.execute(
                "SELECT max(mono_ns), (SELECT max(mono_ns) FROM agent_self) FROM tick"
            ).fetchall()[0]
        # The last fast run is an eighth of a second before the end; its own cost is told last.
        assert abs(stopped_ns - newest) < 0.6 * NS_PER_S
        assert cost >= stopped_ns - 0.2 * NS_PER_S


@pytest.fixture(scope="module")
def spooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two minutes of a simulated node of the boot that runs now, all spool, a piece each 10 s."""
    recording = tmp_path_factory.mktemp("spooled")
    clock = VirtualClock(3590 * NS_PER_S)
    machine = Machine(4, clock=clock)
    sample(recording, SOURCES, lambda collector: machine, machine, clock, 100, rotate_s=10)
    return recording


def kill_keepers(
    child: list[subprocess.Popen[bytes]], spooled: Path, folder: Path, moments: int, seed: int
) -> None:
    generator = random.Random(seed)
    with Recording([spooled]) as opened:
        wanted = _counts(opened)
    recording = folder / "r"
    shutil.copytree(spooled, recording)
    seen: set[tuple[int, int]] = set()
    for _ in range(moments):
        for lock in recording.rglob(".keeper.lock"):
            lock.unlink()  # it is made anew when the keeper begins, after a second of imports
        keeper = start(child, "whyidle.keeper_process", str(recording), "--node", IDENTITY.node)
        held = recording / IDENTITY.node / IDENTITY.boot8
        wait_for(lambda: list(recording.rglob(".keeper.lock")))
        time.sleep(generator.uniform(0.0, 0.9))
        kill(keeper)
        with Recording([recording]) as opened:
            assert opened.damaged == []
            assert _counts(opened) == wanted
        state = (len(files(held / "spool", PIECE)), len(files(held, SEGMENT)))
        seen.add(state)
        if state[0] == 0 and state[1] == 1:  # all done: begin anew
            shutil.rmtree(recording)
            shutil.copytree(spooled, recording)
    assert len(seen) > 1  # some were killed in the midst of it


def _counts(recording: Recording) -> list[tuple[object, ...]]:
    return [
        recording.con.execute(f"SELECT count(*), sum(mono_ns) FROM {table}").fetchall()[0]
        for table in ("tick", "gpu_activity", "process", "clock")
    ]


def test_a_keeper_killed_at_any_moment_loses_and_doubles_nothing(
    child: list[subprocess.Popen[bytes]], spooled: Path, tmp_path: Path
) -> None:
    kill_keepers(child, spooled, tmp_path, 14, seed=3)


@pytest.mark.slow
def test_a_keeper_killed_at_a_hundred_moments(
    child: list[subprocess.Popen[bytes]], spooled: Path, tmp_path: Path
) -> None:
    kill_keepers(child, spooled, tmp_path, 100, seed=4)


def test_a_disk_that_fills_up_never_makes_a_recording_unreadable(
    child: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """A file system of one megabyte where one can be mounted, else a limit on file size."""
    recording = tmp_path / "r"
    recording.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(recording)],
            capture_output=True,
            check=False,
        ).returncode
    )
    limit = (resource.RLIM_INFINITY if mounted else 12_000,) * 2
    filler = recording / "filler"
    try:
        sampler = subprocess.Popen(
            [*PYTHON, "whyidle.sampler_process", str(recording), "--node", "n"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
        )
        child.append(sampler)
        wait_for(lambda: pieces(recording))
        time.sleep(1.2)
        if mounted:
            _fill(filler)
        time.sleep(4)
        assert sampler.poll() is None  # it goes on
        with Recording([recording]) as opened:
            assert opened.damaged == []
            before = opened.con.execute("SELECT count(*) FROM tick").fetchone()
        if mounted:
            filler.unlink()
        time.sleep(2.5)
        sampler.send_signal(signal.SIGTERM)
        assert sampler.wait(10) == 0
        assert sampler.stderr is not None
        said = sampler.stderr.read().decode()
        sampler.stderr.close()
        with Recording([recording]) as opened:
            assert opened.damaged == []
            after = opened.con.execute("SELECT count(*) FROM tick").fetchone()
            lost = opened.con.execute("SELECT max(rows_lost) FROM agent_self").fetchone()
    finally:
        if mounted:
            subprocess.run(["umount", str(recording)], check=True)
    assert before is not None
    assert before[0] > 0
    assert "cannot write the spool" in said
    if mounted:
        assert after is not None
        assert after[0] > before[0]
        assert "the spool is written again" in said
        assert lost is not None
        assert lost[0] > 0


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return
