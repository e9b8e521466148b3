"""Open files: by mount, for reading or writing, in turn; what is no data; containers; damage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trees import BEGIN_NS, damaged, host_of, write
from whyidle.clock import NS_PER_S, SystemClock, VirtualClock
from whyidle.collect.collector import Collect, NoData, Problem
from whyidle.collect.file_use import FILE_USE, is_data, parse_fdinfo
from whyidle.host import Answer, Argument, LiveHost
from whyidle.live import Watched, live_host
from whyidle.schema import FileUse

MOUNTS = "40 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n41 40 0:50 / /data rw - nfs4 srv:/d rw\n"
READ, WRITE, BOTH, DIRECTORY, PATH_ONLY = 0o100000, 0o100001, 0o100002, 0o300000, 0o10000000


def fdinfo(flags: int, mount_id: int) -> str:
    return f"pos:\t4096\nflags:\t0{flags:o}\nmnt_id:\t{mount_id}\nino:\t12\n"


class Node:
    """Processes with open files in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = VirtualClock(BEGIN_NS)
        self.files: dict[int, list[tuple[int, str]]] = {}
        self.collect: Collect = FILE_USE.make()
        self.host = LiveHost(
            str(root), self.clock, askers={"watched": self._watched, "open_files": self._files}
        )
        write(root, {"proc/self/mountinfo": MOUNTS})

    def _watched(self) -> Answer:
        return {"gpu": tuple(self.files), "commands": ()}

    def _files(self, pid: Argument) -> Answer:
        assert isinstance(pid, int)
        return tuple(self.files[pid])

    def process(
        self,
        pid: int,
        *files: tuple[str, int, int],
        start: int = 5,
        mounts: str = MOUNTS,
    ) -> None:
        """A process and its open files as (path, flags, mount id)."""
        own = f"proc/{pid}"
        fields = ["0"] * 50
        fields[18] = str(start)
        write(
            self.root,
            {f"{own}/stat": f"{pid} (p) S {' '.join(fields)}\n", f"{own}/mountinfo": mounts},
        )
        self.files[pid] = [(number, path) for number, (path, _, _) in enumerate(files, 3)]
        for number, (_, flags, mount) in enumerate(files, 3):
            write(self.root, {f"{own}/fdinfo/{number}": fdinfo(flags, mount)})

    def look(self) -> tuple[list[FileUse], list[Problem]]:
        """Run once, a second later."""
        self.clock.advance(NS_PER_S)
        found = list(self.collect(self.host))
        rows = [item for item in found if isinstance(item, FileUse)]
        return rows, [item for item in found if isinstance(item, Problem)]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_files_by_mount(node: Node) -> None:
    node.process(
        7,
        ("/data/a.tar", READ, 41),
        ("/data/b.tar", READ, 41),
        ("/data/ckpt.pt", WRITE, 41),
        ("/home/me/index.db", BOTH, 40),
        start=300,
    )
    rows, problems = node.look()
    assert problems == []
    nfs, disk = rows
    assert (nfs.pid, nfs.start_ns, nfs.mount_id, nfs.mount_point) == (7, 3 * NS_PER_S, 41, "/data")
    assert (nfs.kind, nfs.device, nfs.read_files, nfs.write_files) == ("nfs", "0:50", 2, 1)
    assert (disk.kind, disk.read_files, disk.write_files) == ("block", 1, 1)


def test_a_look_that_found_nothing_says_so(node: Node) -> None:
    node.process(7)
    ((row,), _) = node.look()
    assert (row.mount_id, row.kind, row.mount_point) == (None, None, None)
    assert (row.read_files, row.write_files) == (0, 0)


def test_directories_paths_and_code_are_no_data(node: Node) -> None:
    node.process(
        7,
        ("/data", DIRECTORY, 41),
        ("/data/x", PATH_ONLY, 41),
        ("/venv/lib/python3.11/site-packages/torch/a.txt", READ, 40),
        ("/usr/lib/libc.so", READ, 40),
        ("/dev/shm/torch_1", READ, 30),
    )
    assert [row.mount_id for row in node.look()[0]] == [None]
    assert is_data("/data/train.bin")
    for path in ("socket:[1]", "pipe:[2]", "/memfd:x (deleted)", "/proc/1/stat", "/sys/x"):
        assert not is_data(path)


def test_many_processes_take_turns(node: Node) -> None:
    for pid in range(100, 150):
        node.process(pid, ("/data/a", READ, 41))
    looks = [[row.pid for row in node.look()[0]] for _ in range(13)]
    assert max(map(len, looks)) < 20, "one run stays short"
    assert {pid for look in looks for pid in look} == set(range(100, 150))


def test_a_mount_inside_a_container(node: Node) -> None:
    node.process(
        7,
        ("/bucket/a", READ, 91),
        mounts="91 90 0:61 / /bucket rw - fuse.s3fs s3fs rw\n",
    )
    ((row,), _) = node.look()
    assert (row.kind, row.mount_point, row.device) == ("object", "/bucket", "0:61")


def test_a_mount_that_comes_later_is_found(node: Node) -> None:
    node.process(7, ("/new/a", READ, 77))
    ((row,), _) = node.look()
    assert (row.mount_id, row.kind) == (77, None), "nobody lists it: not known"
    node.process(
        7, ("/new/a", READ, 77), mounts=MOUNTS + "77 40 0:70 / /new rw - lustre x@o2ib:/fs rw\n"
    )
    kinds = [node.look()[0][0].kind for _ in range(6)]
    assert kinds[-1] == "lustre"


def test_a_pid_that_is_used_again_has_its_own_mounts(node: Node) -> None:
    node.process(7, ("/data/a", READ, 41))
    node.look()
    node.process(7, ("/b/a", READ, 91), start=9, mounts="91 9 0:61 / /b rw - ceph m:/ rw\n")
    ((row,), _) = node.look()
    assert (row.start_ns, row.kind) == (90_000_000, "ceph")


def test_a_file_that_closes_meanwhile_and_a_process_that_ends(node: Node) -> None:
    node.process(7, ("/data/a", READ, 41), ("/data/b", READ, 41))
    node.process(8, ("/data/c", READ, 41))
    (node.root / "proc/7/fdinfo/3").unlink()
    (node.root / "proc/8/stat").unlink()
    rows, problems = node.look()
    assert [(row.pid, row.read_files) for row in rows] == [(7, 1)]
    assert problems == []


def test_refusal_is_said_and_others_go_on(node: Node) -> None:
    node.process(7, ("/data/a", READ, 41))
    node.process(8, ("/data/a", READ, 41))

    def files(pid: Argument) -> Answer:
        if pid == 7:
            raise PermissionError(13, "Permission denied")
        return ((3, "/data/a"),)

    host = LiveHost(
        str(node.root),
        node.clock,
        askers={"watched": lambda: {"gpu": (7, 8), "commands": ()}, "open_files": files},
    )
    found = list(FILE_USE.make()(host))
    assert [item.pid for item in found if isinstance(item, FileUse)] == [8]
    said = [item for item in found if isinstance(item, Problem)]
    assert [item.subject for item in said] == ["open files"]
    assert "CAP_SYS_PTRACE" in said[0].message


def test_nobody_watched_and_a_tree_without_links_are_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no process is watched"):
        list(FILE_USE.make()(host_of(tmp_path)))
    node = Node(tmp_path)
    node.process(7)
    host = host_of(tmp_path, watched=lambda: {"gpu": (7,), "commands": ()})
    with pytest.raises(NoData, match="no list of open files"):
        list(FILE_USE.make()(host))


def test_fdinfo() -> None:
    assert parse_fdinfo(fdinfo(READ, 29).encode()) == (READ, 29)
    long = fdinfo(READ, 29) + "lock:\t1: POSIX ADVISORY READ 5 08:01:3 0 EOF\n" * 40
    assert parse_fdinfo(long.encode()) == (READ, 29)
    for text in damaged(fdinfo(READ, 29).encode()):
        try:
            flags, mount = parse_fdinfo(text)
        except ValueError as error:
            assert "fdinfo" in str(error)
        else:
            assert flags >= 0 and mount >= 0


@pytest.mark.parametrize("answer", [7, ("x",), ((1,),), ((1, 2),), (("3", "/a"),)])
def test_an_answer_that_makes_no_sense_is_a_problem(node: Node, answer: Answer) -> None:
    node.process(7)
    host = LiveHost(
        str(node.root),
        node.clock,
        askers={
            "watched": lambda: {"gpu": (7,), "commands": ()},
            "open_files": lambda pid: answer,
        },
    )
    (problem,) = list(FILE_USE.make()(host))
    assert isinstance(problem, Problem) and problem.subject == "pid 7"


def test_live_a_child_that_reads_and_writes(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        f"a = open({str(tmp_path / 'in')!r}, 'wb'); b = open({str(tmp_path / 'in')!r}, 'rb')\n"
        "r, w = os.pipe(); print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        host = live_host("/", SystemClock(), watched=Watched(commands=(child.pid,)))
        found = list(FILE_USE.make()(host))
        host.close()
    finally:
        child.stdin.close()
        child.wait(timeout=10)
        child.stdout.close()
    (row,) = [item for item in found if isinstance(item, FileUse) and item.pid == child.pid]
    device = tmp_path.stat().st_dev
    assert row.device is not None and row.kind is not None
    assert int(row.device.split(":")[1]) == device & 0xFF | (device >> 12 & ~0xFF)
    assert (row.read_files, row.write_files) == (1, 1)
