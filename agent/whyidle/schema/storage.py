"""Tables of storage: mounts and who reads from them, NVMe, network file systems, FUSE, GDS."""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import counter, gauge, key, label, table


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


@table
class NvmeController:
    """An NVMe controller, of a local drive or of a path to a target; on change and once a minute.

    Its state is read once a second. The reads of sysfs send no command to the device.
    """

    TABLE: ClassVar[str] = "nvme_controller"

    mono_ns: int = key("When it was read.", unit="ns")
    controller: str = key("Name of the kernel, such as nvme0.")
    state: str | None = label(
        "new, live, resetting, connecting, deleting, deleting (no IO) or dead; I/O waits while "
        "it is resetting or connecting."
    )
    transport: str | None = label("pcie, tcp, rdma, fc or loop.")
    address: str | None = label("Address of the target (traddr), or of the PCI function.")
    service: str | None = label("Port of the target (trsvcid), such as 4420.")
    host_address: str | None = label("Address or interface of this side, where one was chosen.")
    subsystem: str | None = label("Name of the subsystem (subsysnqn).")
    model: str | None = label("Model of the drive or of the target.")
    serial: str | None = label("Serial number.")
    firmware: str | None = label("Firmware revision.")
    controller_id: int | None = label("Number that the subsystem gave it (cntlid).")
    numa_node: int | None = label("Memory node near it; NULL for fabrics and where unknown.")
    queues: int | None = gauge("I/O queues and the admin queue (queue_count).")
    queue_entries: int | None = gauge("Commands that a queue holds (sqsize + 1).")
    keep_alive_ns: int | None = gauge("Keep-alive time (kato); 0 if off.", unit="ns")
    give_up_ns: int | None = gauge(
        "How long a lost connection is tried again (ctrl_loss_tmo); NULL if for ever.", unit="ns"
    )
    never_gives_up: bool | None = gauge("Whether it is tried again for ever (off).")
    reconnect_delay_ns: int | None = gauge("Pause between two tries.", unit="ns")
    fast_io_fail_ns: int | None = gauge(
        "How long I/O waits for a lost connection before it fails; NULL if off.", unit="ns"
    )
    io_timeout_ns: int | None = gauge("When a command counts as lost (nvme_core).", unit="ns")
    resets: int | None = counter("Resets (diag/reset_count; kernels after 6.12).")
    reconnects: int | None = counter("Tries to connect again (diag/reconnect_count).")
    command_errors: int | None = counter("Commands that failed (diag/command_error_count).")


@table
class NvmeNamespace:
    """An NVMe namespace as a disk; on change and once a minute. Its I/O is in block_device.

    With `paths`, head and paths may both count the same I/O: take the head, and the sum of its
    paths only where the head never counts any, as on kernels before 5.14 or so.
    """

    TABLE: ClassVar[str] = "nvme_namespace"

    mono_ns: int = key("When it was read.", unit="ns")
    device: str = key("Name of the disk, such as nvme0n1.")
    namespace_id: int | None = label("Number in its subsystem (nsid).")
    size_bytes: int | None = gauge("Size.", unit="bytes")
    controllers: str = label("Controllers that lead to it, comma-separated.")
    transport: str | None = label("Their transports, comma-separated.")
    paths: int = gauge("Hidden path disks below it; 0 without native multipath.")
    io_policy: str | None = label("How paths are chosen: numa, round-robin or queue-depth.")
    requeued: int | None = counter("I/O that waited for a usable path (diag; after 6.12).")
    failed: int | None = counter("I/O that failed for lack of a path (diag; after 6.12).")


@table
class NvmePath:
    """A path to a multipath namespace; on change and once a minute. Its I/O is in block_device."""

    TABLE: ClassVar[str] = "nvme_path"

    mono_ns: int = key("When it was read.", unit="ns")
    device: str = key("Name of the hidden disk, such as nvme0c1n1.")
    namespace: str = label("Disk that it is a path of.")
    controller: str = label("Controller that it goes through.")
    ana_state: str | None = label(
        "optimized, non-optimized, inaccessible, persistent-loss or change; NULL without ANA."
    )
    ana_group: int | None = label("ANA group (ana_grpid).")
    retries: int | None = counter("Commands sent again (diag/command_retry_count).")
    command_errors: int | None = counter("Commands that failed (diag/command_error_count).")
    failovers: int | None = counter("I/O moved to another path (diag/multipath_failover_count).")
