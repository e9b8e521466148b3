"""Mounts: every kind of storage, the disks below, containers, secrets, damage."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trees import BEGIN_NS, damaged, gather, host_of, shared, write
from whyidle.clock import NS_PER_S, SystemClock, VirtualClock
from whyidle.collect.collector import NoData, Problem
from whyidle.collect.mount import MOUNT, MOUNTS_LIMIT
from whyidle.collect.mount_text import MountText, kind_of, parse, parse_line, redact, unescape
from whyidle.live import Watched, live_host
from whyidle.schema import Mount

ROOT = "40 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw"


def put_link(root: Path, name: str, target: str) -> None:
    """Write a link below `root` to another place below it."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(root / target, path.parent))


def disk(root: Path, number: str, place: str, *, partition: bool = False) -> None:
    """A block device in sysfs, by its number and its name."""
    write(root, {f"{place}/dev": number + "\n"})
    if partition:
        write(root, {f"{place}/partition": "1\n"})
    put_link(root, f"sys/dev/block/{number}", place)
    put_link(root, f"sys/class/block/{place.rpartition('/')[2]}", place)


def rows_of(root: Path, mountinfo: str) -> dict[str, Mount]:
    write(root, {"proc/self/mountinfo": mountinfo})
    rows, problems = gather(MOUNT.make(), host_of(root))
    assert problems == []
    return {row.mount_point: row for row in rows}


def test_a_line() -> None:
    mount = parse_line(
        r"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 x:2 - ext3 /dev/root rw,e=1"
    )
    assert mount == MountText(
        mount_id=36,
        device="98:0",
        root="/mnt1",
        mount_point="/mnt 2",
        fs_type="ext3",
        source="/dev/root",
        kind="block",
        below=None,
    )


@pytest.mark.parametrize(
    ("fs_type", "source", "kind"),
    [
        ("nfs4", "srv:/x", "nfs"),
        ("lustre", "10.0.0.1@o2ib:/fs", "lustre"),
        ("beegfs", "beegfs_nodev", "beegfs"),
        ("gpfs", "gpfs0", "gpfs"),
        ("ceph", "10.0.0.1:6789:/", "ceph"),
        ("fuse.ceph-fuse", "ceph-fuse", "ceph"),
        ("wekafs", "backend/default", "weka"),
        ("cifs", "//nas/share", "smb"),
        ("fuse.sshfs", "me@host:/x", "fuse"),
        ("virtiofs", "myfs", "fuse"),
        ("fuse.s3fs", "s3fs", "object"),
        ("fuse.gcsfuse", "bucket", "object"),
        ("fuse", "mountpoint-s3", "object"),
        ("fuse.rclone", "remote:bucket", "object"),
        ("fuse", "s3://bucket", "object"),
        ("fuse.juicefs", "JuiceFS:data", "object"),
        ("tmpfs", "tmpfs", "tmpfs"),
        ("overlay", "overlay", "overlay"),
        ("zfs", "tank/data", "block"),
        ("btrfs", "/dev/nvme0n1p3", "block"),
        ("9p", "hostshare", "other"),
    ],
)
def test_kinds_of_file_systems_without_a_device(fs_type: str, source: str, kind: str) -> None:
    assert kind_of(fs_type, source, "0:50") == kind


def test_secrets_in_a_source_are_not_stored() -> None:
    assert redact("//bob:hunter2@nas/share") == "//***@nas/share"
    assert redact("https://u:p%40x@dav.example/f") == "https://***@dav.example/f"
    remote = ":s3,access_key_id=AKIA1,secret_access_key=abc/+=,endpoint=e.example:bucket"
    assert redact(remote) == ":s3,access_key_id=***,secret_access_key=***,endpoint=e.example:bucket"
    assert redact("me@host:/data") == "me@host:/data", "a name is no secret"
    assert redact("10.0.0.1@o2ib:10.0.0.2@o2ib:/fs") == "10.0.0.1@o2ib:10.0.0.2@o2ib:/fs"


def test_escapes() -> None:
    assert unescape(r"a\040b\011c\134d\043") == "a b\tc\\d#"
    assert unescape(r"no\9end\\") == r"no\9end\\"


def test_a_partition_of_a_local_nvme_drive(tmp_path: Path) -> None:
    place = "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1"
    disk(tmp_path, "259:0", place)
    disk(tmp_path, "259:2", f"{place}/nvme0n1p2", partition=True)
    write(tmp_path, {f"{place}/../transport": "pcie\n"})
    row = rows_of(tmp_path, ROOT + "\n")["/"]
    assert (row.kind, row.block_device, row.nvme_transport) == ("block", "nvme0n1", "pcie")
    assert (row.mount_id, row.device, row.own_namespace) == (40, "259:2", True)


def test_nvme_of_is_told_through_dm_over_partitions(tmp_path: Path) -> None:
    virtual = "sys/devices/virtual/nvme-subsystem/nvme-subsys1"
    disk(tmp_path, "259:5", f"{virtual}/nvme1n1/nvme1n1p1", partition=True)
    disk(tmp_path, "259:6", f"{virtual}/nvme1n2")
    for controller, transport in (("nvme1", "tcp"), ("nvme2", "tcp")):
        place = f"sys/devices/virtual/nvme-fabrics/ctl/{controller}"
        write(tmp_path, {f"{place}/transport": transport + "\n"})
        put_link(tmp_path, f"{virtual}/{controller}", place)
    disk(tmp_path, "253:1", "sys/devices/virtual/block/dm-1")
    for name in ("nvme1n1/nvme1n1p1", "nvme1n2"):
        last = name.rpartition("/")[2]
        put_link(tmp_path, f"sys/devices/virtual/block/dm-1/slaves/{last}", f"{virtual}/{name}")
    row = rows_of(tmp_path, "50 1 253:1 / /data rw - xfs /dev/mapper/vg-data rw\n")["/data"]
    assert (row.kind, row.nvme_transport) == ("nvmeof", "tcp")
    assert row.block_device == "nvme1n1,nvme1n2", "disks, not partitions, not dm-1"


def test_a_loop_of_slaves_in_a_damaged_tree_ends(tmp_path: Path) -> None:
    disk(tmp_path, "253:1", "sys/devices/virtual/block/dm-1")
    own = "sys/devices/virtual/block/dm-1"
    put_link(tmp_path, f"{own}/slaves/dm-1", own)
    assert rows_of(tmp_path, "50 1 253:1 / /x rw - xfs /dev/dm-1 rw\n")["/x"].block_device == "dm-1"


def test_btrfs_and_overlay_are_on_the_disks_of_what_they_name(tmp_path: Path) -> None:
    disk(tmp_path, "8:0", "sys/devices/pci0000:00/ata1/block/sda")
    disk(tmp_path, "8:1", "sys/devices/pci0000:00/ata1/block/sda/sda1", partition=True)
    rows = rows_of(
        tmp_path,
        "50 1 0:40 /@ / rw - btrfs /dev/sda1 rw,subvol=/@\n"
        "60 50 0:41 / /c rw - overlay overlay rw,lowerdir=/l/1:/l/2,upperdir=/var/up,workdir=/w\n"
        "70 50 0:42 / /mnt rw - nfs4 srv:/x rw\n",
    )
    assert (rows["/"].kind, rows["/"].block_device) == ("block", "sda")
    assert (rows["/c"].kind, rows["/c"].block_device) == ("overlay", "sda")
    assert (rows["/mnt"].kind, rows["/mnt"].block_device) == ("nfs", None)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("/lustre/images/train.sqsh", "lustre"),
        ("/images/train.sqsh", "block"),
        ("/dev/shm/train.sqsh (deleted)", "block"),
    ],
)
def test_an_image_is_of_the_kind_of_what_it_lies_on(tmp_path: Path, file: str, kind: str) -> None:
    disk(tmp_path, "7:3", "sys/devices/virtual/block/loop3")
    write(tmp_path, {"sys/devices/virtual/block/loop3/loop/backing_file": file + "\n"})
    rows = rows_of(
        tmp_path,
        ROOT + "\n63 40 0:52 / /lustre rw - lustre 10.2.0.1@o2ib:/fs rw\n"
        "64 40 0:23 / /dev/shm rw - tmpfs tmpfs rw\n"
        "70 40 7:3 / /data ro - squashfs /dev/loop3 ro\n",
    )
    assert (rows["/data"].kind, rows["/data"].block_device) == (kind, "loop3")


def test_a_disk_that_sysfs_does_not_show_is_unknown(tmp_path: Path) -> None:
    row = rows_of(tmp_path, ROOT + "\n")["/"]
    assert (row.kind, row.block_device, row.nvme_transport) == ("block", None, None)


def test_what_holds_no_data_is_left_out(tmp_path: Path) -> None:
    assert rows_of(
        tmp_path,
        "22 27 0:21 / /proc rw - proc proc rw\n"
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "924 9 0:44 /proc/stat /proc/stat rw - fuse.lxcfs lxcfs rw\n"
        "25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw\n",
    ).keys() == {"/dev/shm"}


def test_rows_come_on_change_and_once_a_minute(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/mountinfo": ROOT + "\n"})
    clock = VirtualClock(BEGIN_NS)
    host, collect = host_of(tmp_path, clock=clock), MOUNT.make()

    def told() -> list[int]:
        clock.advance(10 * NS_PER_S)
        return [row.mount_id for row in gather(collect, host)[0]]

    assert told() == [40]
    assert told() == []
    write(tmp_path, {"proc/self/mountinfo": ROOT + "\n60 1 0:9 / /n rw - nfs srv:/x rw\n"})
    assert told() == [60]
    assert [told() for _ in range(4)] == [[], [], [], [40, 60]]


def test_mounts_of_a_container_are_added_once(tmp_path: Path) -> None:
    inside = ROOT.replace("40 1", "90 80") + "\n91 90 0:9 / /data rw - nfs srv:/x rw\n"
    write(
        tmp_path,
        {
            "proc/self/mountinfo": ROOT + "\n",
            "proc/7/mountinfo": inside,
            "proc/8/mountinfo": inside,
            "proc/9/mountinfo": ROOT + "\n",
        },
    )
    host = host_of(tmp_path, watched=lambda: {"gpu": (7, 8, 9, 10), "commands": ()})
    rows, problems = gather(MOUNT.make(), host)
    assert problems == []
    assert [(row.mount_id, row.own_namespace) for row in rows] == [
        (40, True),
        (90, False),
        (91, False),
    ]


def test_a_namespace_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/mountinfo": ROOT + "\n"})
    host = host_of(tmp_path, watched=lambda: {"gpu": (7,), "commands": ()})
    read = host.read_bytes

    class Refusing:
        def __getattr__(self, name: str) -> object:
            return getattr(host, name)

        def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
            if path.startswith("proc/7/"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return read(path, keep=keep)

    rows, problems = gather(MOUNT.make(), Refusing())  # type: ignore[arg-type]
    assert [row.mount_id for row in rows] == [40]
    assert [problem.subject for problem in problems] == ["namespaces"]
    assert "CAP_SYS_PTRACE" in problems[0].message


def test_thousands_of_mounts_are_cut_and_said(tmp_path: Path) -> None:
    lines = [f"{n} 1 0:{n} / /pods/{n} rw - tmpfs tmpfs rw" for n in range(100, 3000)]
    write(tmp_path, {"proc/self/mountinfo": "\n".join(lines) + "\n"})
    rows, problems = gather(MOUNT.make(), host_of(tmp_path))
    assert len(rows) == MOUNTS_LIMIT
    assert problems == [
        Problem(subject="mounts", message="2900 mounts; the last 852 are not recorded")
    ]


def test_without_proc_there_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="lists no mounts"):
        gather(MOUNT.make(), host_of(tmp_path))


def test_damage_is_a_problem_of_its_line_and_ends_nothing(tmp_path: Path) -> None:
    for number, text in enumerate(damaged((ROOT + "\n").encode() * 3)):
        list(parse(text.decode("utf-8", "replace")))
        root = tmp_path / str(number)
        write(root, {"proc/self/mountinfo": text + b"\n" + ROOT.encode() + b"\n"})
        rows, _ = gather(MOUNT.make(), host_of(root))
        assert rows[-1].mount_point == "/"
    found = list(parse(f"{ROOT}\n1 2 3 / /x rw - ext4 s rw\nhalf\n"))
    assert [isinstance(item, Problem) for item in found] == [False, True, True]


@pytest.mark.shared
def test_the_recorded_h100_node(tmp_path: Path) -> None:
    text = shared("gpud-h100/mountinfo.txt").read_text()
    rows = rows_of(tmp_path, text)
    assert rows["/mnt/local-volume/vol-0"].device == "259:7"
    training = rows["/mnt/remote-volume/training"]
    assert (training.kind, training.fs_type) == ("fuse", "fuse.testfs")
    assert training.source == "TestFS:test-us-east-training"
    assert not any(row.fs_type == "fuse.lxcfs" for row in rows.values())
    assert {row.kind for row in rows.values()} == {"block", "fuse", "overlay", "tmpfs"}


@pytest.mark.shared
@pytest.mark.parametrize(
    "path", ["prometheus-procfs/proc/26231/mountinfo", "prometheus-node_exporter/proc/10/mountinfo"]
)
def test_other_recorded_files(path: str) -> None:
    assert not any(isinstance(item, Problem) for item in parse(shared(path).read_text()))


def test_live_the_root_of_this_machine() -> None:
    host = live_host("/", SystemClock())
    rows, problems = gather(MOUNT.make(), host)
    host.close()
    assert problems == []
    device = Path("/").stat().st_dev
    found = [row for row in rows if row.mount_point == "/"]
    assert found and found[-1].device == f"{os.major(device)}:{os.minor(device)}"


def test_live_a_process_in_a_mount_namespace_of_its_own(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        f"subprocess.run(['mount', '-t', 'tmpfs', 'mine', {str(tmp_path)!r}], check=True)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        ["unshare", "-m", sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        if child.stdout.readline() != "ready\n":
            pytest.skip("needs root for a mount namespace")
        host = live_host("/", SystemClock(), watched=Watched(commands=(child.pid,)))
        rows, _ = gather(MOUNT.make(), host)
        host.close()
    finally:
        child.stdin.close()
        child.wait(timeout=10)
        child.stdout.close()
    mine = [row for row in rows if row.source == "mine"]
    assert [(row.mount_point, row.own_namespace) for row in mine] == [(str(tmp_path), False)]
