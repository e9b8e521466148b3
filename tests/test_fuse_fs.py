"""The late file system that stalls are made with: it is a file system, and it is late."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse_fs import SlowFs, slow_fs, usable

WHY_NOT = usable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")


@pytest.fixture
def fs(tmp_path: Path) -> Iterator[SlowFs]:
    with slow_fs(tmp_path / "mnt", tmp_path / "behind", {}) as mounted:
        yield mounted


def test_files_are_those_behind(fs: SlowFs) -> None:
    data = os.urandom(1_000_000)
    (fs.behind / "folder").mkdir()
    (fs.behind / "folder" / "a").write_bytes(data)
    assert (fs.mountpoint / "folder" / "a").read_bytes() == data
    assert [path.name for path in (fs.mountpoint / "folder").iterdir()] == ["a"]
    with pytest.raises(FileNotFoundError):
        (fs.mountpoint / "missing").read_bytes()


def test_files_are_written_renamed_and_removed(fs: SlowFs) -> None:
    data = os.urandom(500_000)
    (fs.mountpoint / "new").mkdir()
    with (fs.mountpoint / "new" / "b").open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    (fs.mountpoint / "new" / "b").rename(fs.mountpoint / "c")
    assert (fs.behind / "c").read_bytes() == data
    (fs.mountpoint / "c").write_bytes(b"shorter")
    assert (fs.mountpoint / "c").read_bytes() == b"shorter"
    (fs.mountpoint / "c").unlink()
    (fs.mountpoint / "new").rmdir()
    assert list(fs.behind.iterdir()) == []


def test_an_operation_takes_its_delay_every_time(fs: SlowFs) -> None:
    (fs.behind / "a").write_bytes(b"x" * 1000)
    fs.delay(read=0.2)
    time.sleep(0.1)
    began = time.monotonic()
    for _ in range(3):
        (fs.mountpoint / "a").read_bytes()
    assert 0.6 <= time.monotonic() - began < 3
    fs.delay(read=0.0)
    time.sleep(0.1)
    began = time.monotonic()
    (fs.mountpoint / "a").read_bytes()
    assert time.monotonic() - began < 0.2


def test_who_waits_is_in_d_state(fs: SlowFs) -> None:
    (fs.behind / "a").write_bytes(b"x" * 1000)
    fs.delay(read=1.0)
    time.sleep(0.1)
    reader = subprocess.Popen(["cat", str(fs.mountpoint / "a")], stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    state = Path(f"/proc/{reader.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert reader.wait(10) == 0
    assert state == "D"


def test_nothing_is_left_mounted(tmp_path: Path) -> None:
    with slow_fs(tmp_path / "mnt", tmp_path / "behind", {}, kind="other"):
        assert "fuse.other" in Path("/proc/self/mounts").read_text()
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
