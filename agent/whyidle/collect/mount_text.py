"""Mounts in the kernel's text: what is mounted where, and what kind of storage it is.

Source: /proc/PID/mountinfo (proc_pid_mountinfo(5)).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from whyidle.collect.collector import Problem
from whyidle.collect.numbers import whole

# File systems of the kernel's own state: they hold no data of anybody.
# fmt: off
_NO_DATA = frozenset((
    "autofs", "binder", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "cpuset",
    "debugfs", "devpts", "devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nfsd",
    "nsfs", "pipefs", "proc", "pstore", "resctrl", "rpc_pipefs", "securityfs", "selinuxfs",
    "smackfs", "sockfs", "sysfs", "tracefs", "usbfs", "fuse.lxcfs", "fuse.portal",
))
# fmt: on
# A tmpfs there holds the mounts of cgroups or hides a file from a container.
_KERNELS_OWN = ("/proc/", "/sys/")
_KINDS = {
    "beegfs": "beegfs",
    "beegfs_nodev": "beegfs",
    "ceph": "ceph",
    "cifs": "smb",
    "gpfs": "gpfs",
    "lustre": "lustre",
    "nfs": "nfs",
    "nfs4": "nfs",
    "overlay": "overlay",
    "ramfs": "tmpfs",
    "smb3": "smb",
    "tmpfs": "tmpfs",
    "virtiofs": "fuse",
    "wekafs": "weka",
    "zfs": "block",
}
# What stands in front of an object store, in the subtype (fuse.s3fs) or in the source.
_OBJECT = re.compile(
    r"s3fs|gcsfuse|mountpoint-s3|rclone|goofys|geesefs|blobfuse|juicefs|ossfs|cosfs|tigrisfs|"
    r"yas3fs|riofs|alluxio|seaweedfs|s3ql|^(s3|gs|gcs|az|abfss?|oss|cos|obs)://",
    re.IGNORECASE,
)
# user:password@ of a URL or of //user:password@server/share.
_PASSWORD = re.compile(r"(?<=//)[^/@\s]*:[^/@\s]*@")
_SECRET = re.compile(
    r"([\w-]*(?:key|secret|token|passw(?:or)?d|pass|sig|signature|credentials?)[\w-]*)=[^,&:;\s]*",
    re.IGNORECASE,
)
_ESCAPED = re.compile(r"\\([0-7]{3})")
_UPPER = re.compile(r"(?:^|,)(?:upperdir|lowerdir)=(/[^,:]*)")
# mount id, parent id, device, root, mount point, options; then tags, a dash, type, source, options.
_BEFORE, _AFTER = 6, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MountText:
    """A line of mountinfo; `below` is a directory whose mount holds the data of an overlay."""

    mount_id: int
    device: str
    root: str
    mount_point: str
    fs_type: str
    source: str
    kind: str
    below: str | None


def parse_line(line: str) -> MountText:
    """Return a mount; raises ValueError."""
    before, dash, after = line.partition(" - ")
    head, tail = before.split(" "), after.split(" ")
    if not dash or len(head) < _BEFORE or len(tail) < _AFTER:
        raise ValueError(f"mountinfo: {line[:60]!r} is no mount")
    major, colon, minor = head[2].partition(":")
    if not colon:
        raise ValueError(f"mountinfo: {head[2][:40]!r} is no device")
    device = f"{whole(major, 'mountinfo: major')}:{whole(minor, 'mountinfo: minor')}"
    fs_type, source = unescape(tail[0]), unescape(tail[1])
    overlay = _UPPER.search(tail[2]) if fs_type == "overlay" and len(tail) > _AFTER else None
    return MountText(
        mount_id=whole(head[0], "mountinfo: mount id"),
        device=device,
        root=unescape(head[3]),
        mount_point=unescape(head[4]),
        fs_type=fs_type,
        source=redact(source),
        kind=kind_of(fs_type, source, device),
        below=None if overlay is None else unescape(overlay[1]),
    )


def parse(text: str) -> Iterator[MountText | Problem]:
    """Yield the mounts that hold data, and a problem for each line that is none."""
    for line in text.splitlines():
        try:
            mount = parse_line(line)
        except ValueError as error:
            yield Problem(subject="mountinfo", message=str(error))
            continue
        if mount.fs_type not in _NO_DATA and not mount.mount_point.startswith(_KERNELS_OWN):
            yield mount


def kind_of(fs_type: str, source: str, device: str) -> str:
    """Return the kind of a mount, as far as its line tells: NVMe-oF is told from the device."""
    known = _KINDS.get(fs_type)
    if known is not None:
        return known
    if fs_type == "fuse" or fs_type.startswith("fuse."):
        subtype = fs_type.partition(".")[2]
        if subtype in ("ceph", "ceph-fuse") or source == "ceph-fuse":
            return "ceph"
        return "object" if _OBJECT.search(subtype) or _OBJECT.search(source) else "fuse"
    # btrfs and its like have no block device number of their own, and name a device as the source.
    return "block" if not device.startswith("0:") or source.startswith("/dev/") else "other"


def unescape(word: str) -> str:
    """Return a word with its octal escapes undone: space, tab, newline, backslash, hash."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), word) if "\\" in word else word


def redact(source: str) -> str:
    """Return a source without passwords and keys; who and where stay."""
    return _SECRET.sub(r"\1=***", _PASSWORD.sub("***@", source))
