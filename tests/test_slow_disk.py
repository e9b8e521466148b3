"""A disk that does not answer for seconds: no sample is late for it, what is lost is told.

The disk is real: an ext4 file system on a loop device that is frozen (FIFREEZE), so that the kernel
holds every write up until it is thawed.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from recording_kit import make_row, unaccounted
from whyidle import sampler as sampler_module
from whyidle.clock import SystemClock
from whyidle.collect.collector import Collector
from whyidle.host import Host, LiveHost
from whyidle.sampler import Sampler
from whyidle.schema import Cpu
from whyidle.spool import SpoolWriter
from whyidle.store import Recording
from whyidle.table import Row
from world.machine import IDENTITY

_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878
FROZEN_S = 4.0


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Disk:
    """A mounted file system that can be frozen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held_up_s = 0.0
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def freeze_for(self, seconds: float) -> None:
        """Freeze it; measures how long a write was held up meanwhile."""
        fcntl.ioctl(self._fd, _FIFREEZE, 0)
        write = threading.Thread(target=self._write)
        try:
            write.start()
            time.sleep(seconds)
        finally:
            self.thaw()
        write.join()

    def thaw(self) -> None:
        fcntl.ioctl(self._fd, _FITHAW, 0)

    def close(self) -> None:
        with suppress(OSError):
            self.thaw()  # a frozen file system cannot be unmounted
        os.close(self._fd)

    def _write(self) -> None:
        begin = time.monotonic()
        (self.folder / "canary").write_bytes(b"x")
        self.held_up_s = time.monotonic() - begin


@contextmanager
def mounted(folder: Path) -> Iterator[Disk]:
    image, point = folder / "image", folder / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    with ExitStack() as stack:
        run("mkfs.ext4", "-q", "-F", str(image))
        device = run("losetup", "--find", "--show", str(image))
        stack.callback(run, "losetup", "--detach", device)
        run("mount", device, str(point))
        stack.callback(run, "umount", str(point))
        disk = Disk(point)
        stack.callback(disk.close)
        yield disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("injecting stalls needs root and CAP_SYS_ADMIN")
    if not Path("/dev/loop-control").exists():
        pytest.skip("no loop devices")
    with mounted(tmp_path) as disk:
        yield disk


class Steady:
    """A collector that counts its rows."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, host: Host) -> Iterator[Row]:
        self.rows += 1
        yield make_row(Cpu, mono_ns=host.clock.mono_ns(), user_ns=self.rows)


def record(disk: Disk, steady: Steady, seconds: float) -> tuple[Collector, ...]:
    """Sample to the disk in real time, in the loop and in a thread; freeze it for a while."""
    clock = SystemClock()
    host = LiveHost("/", clock)
    collectors = (
        Collector(name="loop", lane="fast", make=lambda: steady),
        Collector(name="thread", lane="fast", make=Steady, thread="thread"),
    )
    spool = SpoolWriter(IDENTITY.folder(disk.folder / "r") / "spool", IDENTITY, clock)
    sampler = Sampler(collectors, lambda collector: host, host, spool, pid=1)
    begin = time.monotonic()
    freezer = threading.Timer(1.5, disk.freeze_for, (FROZEN_S,))
    freezer.start()
    try:
        assert sampler.run(lambda: time.monotonic() > begin + seconds) == []
    finally:
        freezer.join()
        host.close()
    assert disk.held_up_s > FROZEN_S - 0.5
    return collectors


def test_no_sample_waits_for_a_disk_and_none_is_lost(disk: Disk) -> None:
    steady = Steady()
    collectors = record(disk, steady, FROZEN_S + 3.5)
    with Recording([disk.folder / "r"]) as recording:
        assert unaccounted(recording, collectors) == {}
        rows = recording.con.execute("SELECT count(*) FROM cpu WHERE user_ns > 0").fetchone()
        late = recording.con.execute(
            "SELECT max(began_ns - due_ns) / 1e9, sum(missed) FROM tick"
        ).fetchone()
        lost = recording.con.execute("SELECT max(rows_lost) FROM agent_self").fetchone()
    assert rows is not None
    assert rows[0] >= 2 * steady.rows - 2
    assert late is not None
    assert late[0] < FROZEN_S / 4  # other work of the machine may delay a run, the disk does not
    assert late[1] <= 8
    assert lost == (0,)


def test_what_there_is_no_room_for_is_lost_counted_and_told(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampler_module, "QUEUE_LIMIT", 1)
    steady = Steady()
    collectors = record(disk, steady, FROZEN_S + 3.5)
    with Recording([disk.folder / "r"]) as recording:
        rows = recording.con.execute("SELECT count(*) FROM cpu").fetchone()
        ticks = recording.con.execute("SELECT count(*), sum(missed) FROM tick").fetchone()
        lost = recording.con.execute("SELECT max(rows_lost) FROM agent_self").fetchone()
        said = recording.con.execute(
            "SELECT DISTINCT message FROM collector_error WHERE subject = 'spool'"
        ).fetchall()
        assert set(unaccounted(recording, collectors)) == {"loop", "thread"}  # their ticks are gone
    assert rows is not None and ticks is not None and lost is not None
    assert said == [("the disk does not answer: rows are lost after 1 s",)]
    assert lost[0] > 0
    # A run leaves a row and a tick, and what was told of itself is among what was lost.
    gone = 2 * 2 * steady.rows - rows[0] - ticks[0]
    assert gone - 8 <= lost[0] <= gone + 8
    told = [record.getMessage() for record in caplog.records if record.name == "whyidle.sampler"]
    assert told == ["the disk has not taken a row for 1 s: rows are lost until it does"]
