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
        "or other; object is FUSE in front of an object store; an image has the kind of what its "
        "file lies on."
    )
    source: str = label("What is mounted; passwords and keys in it are replaced by ***.")
    mount_point: str = label("Where, as its users see it.")
    root: str = label("Directory of the file system that is mounted there; not / for a bind.")
    block_device: str | None = label(
        "Whole disks below, through partitions, dm and md, comma-separated; for an overlay those "
        "of its first directory."
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


@table
class NfsMount:
    """An NFS mount (/proc/self/mountstats), once a second; its connections are added up.

    Bind mounts of one file system have one row. What is in flight is sends - receives: a server
    that hangs completes nothing, so that no operation of nfs_op counts it.
    """

    TABLE: ClassVar[str] = "nfs_mount"

    mono_ns: int = key("When it was read.", unit="ns")
    mount_point: str = key("Where it is mounted, as in mount.")
    device: str | None = label("As in mount; NULL where mountinfo does not list it.")
    server: str = label("Host before the colon of the source.")
    export: str = label("Path after it.")
    version: str | None = label("3, 4.0, 4.1 or 4.2.")
    protocol: str | None = label("tcp, udp or rdma.")
    security: str | None = label("sys, krb5, krb5i, krb5p ...")
    hard: bool | None = gauge("Whether requests are tried for ever; else they fail (soft).")
    transfer_read_bytes: int | None = gauge("Largest read (rsize).", unit="bytes")
    transfer_write_bytes: int | None = gauge("Largest write (wsize).", unit="bytes")
    timeout_ms: int | None = gauge("When a request is sent again (timeo).", unit="ms")
    age_ns: int | None = gauge("Time since it was mounted; counters begin there.", unit="ns")
    connections: int = gauge("Connections (nconnect).")
    shares_with: str | None = label("Another mount point that has the very same connections.")
    read_bytes: int | None = counter("Asked of read() and found, page cache too.", unit="bytes")
    write_bytes: int | None = counter("Given to write().", unit="bytes")
    direct_read_bytes: int | None = counter("The same with O_DIRECT.", unit="bytes")
    direct_write_bytes: int | None = counter("The same with O_DIRECT.", unit="bytes")
    server_read_bytes: int | None = counter("Read from the server.", unit="bytes")
    server_write_bytes: int | None = counter("Written to the server.", unit="bytes")
    opens: int | None = counter("Files opened.")
    lookups: int | None = counter("Names looked up.")
    attribute_checks: int | None = counter("Cached attributes checked (inode_revalidates).")
    cache_drops: int | None = counter("Cached pages of a file dropped (data_invalidates).")
    delays: int | None = counter("Times that the server said: later (JUKEBOX, DELAY).")
    pnfs_reads: int | None = counter("Reads sent to pNFS data servers.")
    connects: int | None = counter("Connections made, the first ones too.")
    sends: int | None = counter("Requests sent.")
    receives: int | None = counter("Replies received.")
    bad_replies: int | None = counter("Replies to no known request (bad XIDs).")
    outstanding_sum: int | None = counter(
        "Requests in flight, added up over sends: per send, their mean (req_u)."
    )
    backlog_sum: int | None = counter(
        "Requests without a slot, added up over sends: per send, their mean (bklog_u)."
    )
    slots: int | None = gauge("Most slots that a connection used; NULL for RDMA.")


@table
class NfsTransport:
    """A connection of an NFS mount (xprt of mountstats), every ten seconds."""

    TABLE: ClassVar[str] = "nfs_transport"

    mono_ns: int = key("When it was read.", unit="ns")
    mount_point: str = key("As in nfs_mount.")
    number: int = key("Which connection of the mount, from 0.")
    protocol: str = label("tcp, udp, rdma or local.")
    port: int | None = label("Port of this side; NULL for RDMA.")
    connects: int | None = counter("Times that it was made.")
    connecting_ns: int | None = counter("Time that making it took.", unit="ns")
    idle_ns: int | None = gauge("Time since it was used.", unit="ns")
    sends: int | None = counter("Requests sent.")
    receives: int | None = counter("Replies received.")
    bad_replies: int | None = counter("Replies to no known request (bad XIDs).")
    outstanding_sum: int | None = counter("As in nfs_mount.")
    backlog_sum: int | None = counter("As in nfs_mount.")
    slots: int | None = gauge("Most slots used; NULL for RDMA and old kernels.")
    rdma_request_bytes: int | None = counter("Moved by RDMA with requests.", unit="bytes")
    rdma_reply_bytes: int | None = counter("Moved by RDMA with replies.", unit="bytes")
    rdma_registrations: int | None = counter("Buffers registered (hardway).")
    rdma_failures: int | None = counter("Requests or replies of RDMA that failed.")


@table
class NfsOp:
    """An operation of an NFS mount, once a second, if it was ever used (mountstats, per-op).

    Times are sums over completed operations: queue is waiting on this side for a slot, rtt is
    network and server, execute is all of it.
    """

    TABLE: ClassVar[str] = "nfs_op"

    mono_ns: int = key("When it was read.", unit="ns")
    mount_point: str = key("As in nfs_mount.")
    op: str = key("Name of the protocol, such as READ.")
    ops: int | None = counter("Operations completed.")
    transmissions: int | None = counter("Times sent: more than ops means sent again.")
    timeouts: int | None = counter("Major time-outs.")
    sent_bytes: int | None = counter("Bytes sent.", unit="bytes")
    received_bytes: int | None = counter("Bytes received.", unit="bytes")
    queue_ms: int | None = counter("Waited to be sent.", unit="ms")
    rtt_ms: int | None = counter("From being sent to the reply.", unit="ms")
    execute_ms: int | None = counter("From the request to its end.", unit="ms")
    errors: int | None = counter("Ended with an error; NULL before RPC iostats 1.1.")


@table
class LustreMount:
    """A Lustre client mount, once a second (llite stats). Times are NULL before Lustre 2.13."""

    TABLE: ClassVar[str] = "lustre_mount"

    mono_ns: int = key("When it was read.", unit="ns")
    instance: str = key("Name of the client, such as lustre-ffff88105db50000.")
    file_system: str = label("Name of the file system.")
    mount_point: str | None = label("As in mount; NULL if mounts are not listed.")
    reads: int | None = counter("Calls of read().")
    read_bytes: int | None = counter("Read, page cache too.", unit="bytes")
    read_us: int | None = counter("Time of reads, summed over them.", unit="us")
    writes: int | None = counter("Calls of write().")
    write_bytes: int | None = counter("Written.", unit="bytes")
    write_us: int | None = counter("Time of writes, summed over them.", unit="us")
    opens: int | None = counter("Files opened.")
    open_us: int | None = counter("Time of opening, summed over them.", unit="us")
    getattrs: int | None = counter("Attributes asked for.")
    getattr_us: int | None = counter("Time of that, summed over them.", unit="us")


@table
class LustreTarget:
    """A server target of a Lustre client (osc and mdc stats, import), every ten seconds."""

    TABLE: ClassVar[str] = "lustre_target"

    mono_ns: int = key("When it was read.", unit="ns")
    instance: str = key("Name of the device, such as lustre-OST0000-osc-ffff88105db50000.")
    target: str = label("Target, such as lustre-OST0000.")
    kind: str = label("ost (data) or mdt (names and attributes).")
    state: str | None = label("State of the import: FULL works, IDLE rests, others wait.")
    connection: str | None = label("Server in use (NID).")
    connects: int | None = counter("Attempts to connect.")
    timeouts: int | None = counter("Requests that timed out.")
    in_flight: int | None = gauge("Requests in flight.")
    requests: int | None = counter("Requests completed (req_waittime).")
    request_us: int | None = counter("Their time, summed over them.", unit="us")
    read_bytes: int | None = counter("Read from the target.", unit="bytes")
    write_bytes: int | None = counter("Written to it.", unit="bytes")
    reads: int | None = counter("Read requests (ost_read).")
    read_us: int | None = counter("Their time.", unit="us")
    writes: int | None = counter("Write requests (ost_write).")
    write_us: int | None = counter("Their time.", unit="us")


@table
class FuseConnection:
    """A FUSE file system (/sys/fs/fuse/connections), once a second."""

    TABLE: ClassVar[str] = "fuse_connection"

    mono_ns: int = key("When it was read.", unit="ns")
    device: str = key("As in mount; its minor number is the name of the connection.")
    mount_point: str | None = label("As in mount; NULL if no mount of it is listed.")
    fs_type: str | None = label("As in mount.")
    kind: str | None = label("As in mount: fuse or object.")
    waiting: int | None = gauge("Requests queued or being served by its daemon.")
    max_background: int | None = gauge("Requests in the background (read-ahead) at most.")
    congestion_threshold: int | None = gauge("From how many on it counts as congested.")


@table
class Gds:
    """GPUDirect Storage (/proc/driver/nvidia-fs/stats), every five seconds.

    I/O is counted only while statistics are on (rw_stats_enabled); else those columns are NULL. A
    file that is absent is no proof that GDS is not used: newer drivers do without nvidia-fs.
    """

    TABLE: ClassVar[str] = "gds"

    mono_ns: int = key("When it was read.", unit="ns")
    version: str | None = label("Version of GDS.")
    driver: str | None = label("Version of the nvidia-fs module.")
    io_stats: bool | None = gauge("Whether I/O is counted; NULL where it is not said.")
    peer_stats: bool | None = gauge("Whether I/O is counted by peer.")
    processes: int | None = gauge("Processes that use it.")
    shadow_buffer_bytes: int | None = gauge(
        "Buffers of processes; without growing reads a sign of the compatibility mode.",
        unit="bytes",
    )
    reads: int | None = counter("Reads begun.")
    reads_done: int | None = counter("Reads that succeeded.")
    read_errors: int | None = counter("Reads that failed.")
    read_bytes: int | None = counter("Read (in steps of 1 MiB).", unit="bytes")
    read_state_errors: int | None = counter("Reads refused for their state (io_state_err).")
    writes: int | None = counter("Writes begun.")
    writes_done: int | None = counter("Writes that succeeded.")
    write_errors: int | None = counter("Writes that failed.")
    write_bytes: int | None = counter("Written (in steps of 1 MiB).", unit="bytes")
    write_state_errors: int | None = counter("Writes refused for their state.")
    batches: int | None = counter("Batches submitted.")
    batch_errors: int | None = counter("Batches that failed.")
    page_cache_writes: int | None = counter("Writes that met pages in the cache (pg-cache).")
    map_errors: int | None = counter("Failures to map GPU memory for DMA.")
    in_progress: int | None = gauge("Reads, writes and batches in progress.")


@table
class GdsGpu:
    """A GPU in GPUDirect Storage, every 5 s while processes use it, else once a minute."""

    TABLE: ClassVar[str] = "gds_gpu"

    mono_ns: int = key("When it was read.", unit="ns")
    gpu: str = key("UUID, as in gpu_info.")
    pci: str = label("PCI function.")
    registered_bytes: int | None = gauge("GPU memory registered.", unit="bytes")
    cache_bytes: int | None = gauge("Of the cache of bounce buffers.", unit="bytes")
    max_pinned_bytes: int | None = gauge("Most that was pinned.", unit="bytes")
    cross_root_port_ratio: float | None = gauge(
        "Share of its I/O that crossed root ports.", unit="ratio"
    )


@table
class GdsPeer:
    """How far a device is from a GPU for GPUDirect (peer_distance), once a minute."""

    TABLE: ClassVar[str] = "gds_peer"

    mono_ns: int = key("When it was read.", unit="ns")
    gpu_pci: str = key("PCI function of the GPU.")
    peer_pci: str = key("PCI function of the drive or of the network card.")
    peer_class: str | None = label("nvme, network ...")
    rank: int | None = gauge("Rank of the peer: smaller is nearer (peerrank).")
    distance: int | None = gauge("Distance over PCI bridges (p2pdist).")
    link_width: int | None = gauge("Lanes of its link.")
    link_generation: int | None = gauge("PCIe generation of its link.")
    numa_node: int | None = label("Its memory node.")


@table
class ParallelFsOp:
    """An operation of CephFS or WekaFS, every five seconds, if it was ever used."""

    TABLE: ClassVar[str] = "parallel_fs_op"

    mono_ns: int = key("When it was read.", unit="ns")
    file_system: str = key("weka, or ceph with the cluster and the number of the client.")
    op: str = key("read, write, metadata ... as the file system calls it.")
    ops: int | None = counter("Operations completed.")
    mean_us: int | None = gauge("Their mean time since the counters began.", unit="us")
    longest_us: int | None = gauge("The longest.", unit="us")
    total_bytes: int | None = counter("Bytes moved; NULL where not counted.", unit="bytes")
