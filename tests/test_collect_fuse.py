"""FUSE connections: their mounts, requests that wait, what may not be read, a live file system."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuse_fs import slow_fs, usable
from storage_tree import node
from trees import BEGIN_NS, damaged, gather, host_of, write
from whyidle.clock import NS_PER_S, SystemClock, VirtualClock
from whyidle.collect.collector import NoData
from whyidle.collect.fuse import FUSE
from whyidle.collect.mount import MOUNT
from whyidle.live import live_host
from whyidle.schema import FuseConnection

CONNECTIONS = Path("/sys/fs/fuse/connections")


def test_connections_and_their_mounts(tmp_path: Path) -> None:
    node().put(tmp_path)
    rows, problems = gather(FUSE.make(), host_of(tmp_path))
    assert problems == []
    busy, idle = rows
    assert isinstance(busy, FuseConnection)
    assert (busy.device, busy.mount_point, busy.fs_type) == ("0:60", "/bucket", "fuse.s3fs")
    assert (busy.kind, busy.waiting) == ("object", 7)
    assert (busy.max_background, busy.congestion_threshold) == (12, 9)
    assert (idle.mount_point, idle.kind, idle.waiting) == ("/sshfs", "fuse", 0)


def test_a_connection_that_nobody_lists_as_mounted(tmp_path: Path) -> None:
    write(tmp_path, {"sys/fs/fuse/connections/99/waiting": "1\n"})
    ((row,), problems) = gather(FUSE.make(), host_of(tmp_path))
    assert problems == []
    assert (row.device, row.mount_point, row.kind, row.waiting) == ("0:99", None, None, 1)
    assert row.max_background is None


def test_a_mount_of_a_container_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "sys/fs/fuse/connections/99/waiting": "1\n",
            "proc/self/mountinfo": "",
            "proc/7/mountinfo": "5 1 0:99 / /in rw - fuse.rclone gd:x rw\n",
        },
    )
    host = host_of(tmp_path, watched=lambda: {"gpu": (7,), "commands": ()})
    ((row,), _) = gather(FUSE.make(), host)
    assert (row.mount_point, row.kind) == ("/in", "object")


def test_connections_come_and_go(tmp_path: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(tmp_path, clock=clock), FUSE.make()
    with pytest.raises(NoData, match="no FUSE file system"):
        gather(collect, host)
    place = "sys/fs/fuse/connections"
    write(tmp_path, {f"{place}/50/waiting": "3\n"})
    clock.advance(NS_PER_S)
    assert [row.waiting for row in gather(collect, host)[0]] == [3]
    (tmp_path / place / "50/waiting").unlink()
    (tmp_path / place / "50").rmdir()
    host.forget("")
    clock.advance(NS_PER_S)
    with pytest.raises(NoData):
        gather(collect, host)


def test_waiting_that_may_not_be_read_is_null_and_said(tmp_path: Path) -> None:
    write(tmp_path, {"sys/fs/fuse/connections/50/waiting": "3\n"})
    host = host_of(tmp_path)

    class Refusing:
        def __getattr__(self, name: str) -> object:
            return getattr(host, name)

        def read(self, path: str) -> str:
            raise PermissionError(13, "Permission denied", path)

    ((row,), problems) = gather(FUSE.make(), Refusing())  # type: ignore[arg-type]
    assert row.waiting is None
    assert [problem.subject for problem in problems] == ["waiting"]
    assert "root" in problems[0].message


def test_damage_is_a_problem_of_its_connection(tmp_path: Path) -> None:
    write(tmp_path, {"sys/fs/fuse/connections/60/waiting": "2\n"})
    for text in damaged(b"7\n"):
        write(tmp_path, {"sys/fs/fuse/connections/50/waiting": text})
        rows, problems = gather(FUSE.make(), host_of(tmp_path))
        assert rows[-1].waiting == 2
        assert len(rows) + len(problems) == 2


@contextmanager
def fusectl() -> Iterator[None]:
    """Mount the control file system for the time of a test, unless it is mounted already."""
    if any(CONNECTIONS.iterdir()):
        yield
        return
    subprocess.run(["mount", "-t", "fusectl", "none", str(CONNECTIONS)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(CONNECTIONS)], check=False)


def test_live_requests_wait_for_a_slow_daemon(tmp_path: Path) -> None:
    reason = usable()
    if reason is not None:
        pytest.skip(reason)
    mounted = tmp_path / "mnt"
    (tmp_path / "behind").mkdir()
    (tmp_path / "behind/a").write_bytes(b"x" * 4096)
    with slow_fs(mounted, tmp_path / "behind", {"read": 1.0}, kind="gcsfuse"), fusectl():
        host = live_host("/", SystemClock())
        minor = mounted.stat().st_dev & 0xFF | (mounted.stat().st_dev >> 12 & ~0xFF)
        reader = threading.Thread(target=(mounted / "a").read_bytes)
        reader.start()
        seen: set[int | None] = set()
        collect = FUSE.make()
        while reader.is_alive():
            rows, _ = gather(collect, host)
            row = next(row for row in rows if row.device == f"0:{minor}")
            seen.add(row.waiting)
            time.sleep(0.05)
        reader.join()
        assert any(seen), "a request waited for the daemon while the reader did"
        assert (row.mount_point, row.kind) == (str(mounted), "object")
        mounts, _ = gather(MOUNT.make(), host)
        found = next(one for one in mounts if one.mount_point == str(mounted))
        assert (found.fs_type, found.kind, found.device) == ("fuse.gcsfuse", "object", row.device)
        host.close()
