"""Tables of storage: mounts and who reads from them, NVMe, network file systems, FUSE, GDS."""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import gauge, key, label, table


@table
class Mount:
    """A mounted file system that holds data; written when it changes and once a minute."""

    TABLE: ClassVar[str] = "mount"

    mono_ns: int = key("When it was read.", unit="ns")
    mount_id: int = key("Number of the mount, of one kind for all mount namespaces (mountinfo).")
    device: str = label("major:minor of its files (st_dev); 0:N where no block device is below.")
    fs_type: str = label("Type of the kernel, such as ext4, nfs4 or fuse.gcsfuse.")
    kind: str = label(
        "block, nvmeof, nfs, lustre, beegfs, gpfs, ceph, weka, smb, fuse, object, tmpfs, overlay "
        "or other; object is FUSE in front of an object store."
    )
    source: str = label("What is mounted; passwords and keys in it are replaced by ***.")
    mount_point: str = label("Where, as its users see it.")
    root: str = label("Directory of the file system that is mounted there; not / for a bind.")
    block_device: str | None = label(
        "Whole disks below, through partitions, dm and md, comma-separated; for an overlay those "
        "of its upper directory."
    )
    nvme_transport: str | None = label("pcie, tcp, rdma, fc ... of those disks; NULL if no NVMe.")
    own_namespace: bool = gauge("Whether the agent sees it; else only processes of a job do.")


@table
class FileUse:
    """A look at the open regular files of a watched process: one row for each mount in use.

    Processes are looked at in turn, and files that are open for a millisecond are caught by chance:
    add rows up. A look that found no file leaves a row without a mount. Mapped files count while
    their descriptor is open; devices, shared memory and program code do not.
    """

    TABLE: ClassVar[str] = "file_use"

    mono_ns: int = key("When it was read.", unit="ns")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int = key("When it started, boot clock (/proc/PID/stat, starttime).", unit="ns")
    mount_id: int | None = key("As in mount; NULL where no file was open.")
    device: str | None = label("As in mount; NULL also for a mount that nobody lists.")
    kind: str | None = label("As in mount.")
    mount_point: str | None = label("As in mount.")
    block_device: str | None = label("As in mount.")
    nvme_transport: str | None = label("As in mount.")
    read_files: int = gauge("Regular files open for reading there.")
    write_files: int = gauge("Regular files open for writing there; for both count in both.")
