"""Tables of the node: CPUs, pressure, memory, cgroups, disks, links."""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import counter, gauge, key, label, table


@table
class Cpu:
    """All CPUs of the node together (/proc/stat, first line, in ns; its own step is 10 ms)."""

    TABLE: ClassVar[str] = "cpu"

    mono_ns: int = key("When it was read.", unit="ns")
    cpus: int = gauge("CPUs that were online.")
    user_ns: int = counter("User mode, nice and guests in it.", unit="ns")
    system_ns: int = counter("Kernel.", unit="ns")
    interrupt_ns: int | None = counter("Hard and soft interrupts.", unit="ns")
    steal_ns: int | None = counter("Taken by the hypervisor.", unit="ns")
    iowait_ns: int | None = counter("Idle with I/O outstanding; unreliable.", unit="ns")
    idle_ns: int = counter("Idle.", unit="ns")
    running: int | None = gauge("Tasks running or ready (procs_running).")
    blocked: int | None = gauge("Tasks blocked in I/O (procs_blocked).")


@table
class Pressure:
    """Pressure stall information (kernel: accounting/psi), of the node or of a cgroup."""

    TABLE: ClassVar[str] = "pressure"

    mono_ns: int = key("When it was read.", unit="ns")
    resource: str = key("cpu, io, memory or irq.")
    cgroup: str = key("Path of the cgroup; empty for the whole node.")
    some_ns: int | None = counter("Some task was stalled (total, us of the kernel).", unit="ns")
    full_ns: int | None = counter("All tasks were stalled; NULL where not counted.", unit="ns")


@table
class Vmstat:
    """Memory events of the node (/proc/vmstat)."""

    TABLE: ClassVar[str] = "vmstat"

    mono_ns: int = key("When it was read.", unit="ns")
    major_faults: int | None = counter("Faults that read from disk (pgmajfault).")
    refault_file_pages: int | None = counter(
        "Page cache evicted and read again (workingset_refault_file).", unit="pages"
    )
    refault_anon_pages: int | None = counter("The same of anonymous memory.", unit="pages")
    swap_in_pages: int | None = counter("Swapped in (pswpin).", unit="pages")
    swap_out_pages: int | None = counter("Swapped out (pswpout).", unit="pages")
    reclaim_stalls: int | None = counter("Allocations that reclaimed themselves (allocstall_*).")
    scan_direct_pages: int | None = counter("Scanned by such (pgscan_direct).", unit="pages")
    dirty_pages: int | None = gauge("Waiting to be written back (nr_dirty).", unit="pages")
    writeback_pages: int | None = gauge("Being written back (nr_writeback).", unit="pages")
    oom_kills: int | None = counter("Processes killed for memory (oom_kill).")
    page_bytes: int | None = gauge("Size of a page.", unit="bytes")


@table
class CgroupCpu:
    """CPU quota and throttling of the cgroup of a watched process (cpu.stat, v1 and v2)."""

    TABLE: ClassVar[str] = "cgroup_cpu"

    mono_ns: int = key("When it was read.", unit="ns")
    cgroup: str = key("Path of the cgroup, as in process_info.")
    version: int = label("1 or 2.")
    quota_ns: int | None = gauge("CPU time per period; NULL if unlimited.", unit="ns")
    period_ns: int | None = gauge("Length of the period.", unit="ns")
    usage_ns: int | None = counter("CPU time used.", unit="ns")
    periods: int | None = counter("Periods in which a task was ready (nr_periods).")
    throttled_periods: int | None = counter("Periods cut short (nr_throttled).")
    throttled_ns: int | None = counter("Time cut, summed over CPUs (throttled_time).", unit="ns")


@table
class BlockDevice:
    """A block device (/proc/diskstats; kernel: admin-guide/iostats). Milliseconds wrap at 2^32."""

    TABLE: ClassVar[str] = "block_device"

    mono_ns: int = key("When it was read.", unit="ns")
    device: str = key("Name of the kernel, such as nvme0n1.")
    major: int = label("Major number; 0 with minor 0 for a hidden NVMe path.")
    minor: int = label("Minor number.")
    role: str = label(
        "disk, path (hidden, of an NVMe namespace), stacked (dm, md: its members count the same "
        "I/O again) or virtual (loop, zram ...); only disks add up."
    )
    head: str | None = label("Of a path: the namespace that may count the same I/O again.")
    reads: int = counter("Reads completed.")
    read_bytes: int = counter("Bytes read (sectors of 512).", unit="bytes")
    read_ms: int = counter("Time of reads, summed over them.", unit="ms", bits=32)
    writes: int = counter("Writes completed.")
    write_bytes: int = counter("Bytes written.", unit="bytes")
    write_ms: int = counter("Time of writes, summed over them.", unit="ms", bits=32)
    in_flight: int = gauge("Requests in flight.")
    busy_ms: int = counter("Time with a request in flight (io_ticks).", unit="ms", bits=32)
    queue_ms: int = counter("Requests in flight times time.", unit="ms", bits=32)
    flushes: int | None = counter("Flushes completed (since 5.5).")
    flush_ms: int | None = counter("Time of flushes.", unit="ms", bits=32)


@table
class NetLink:
    """A network interface, of the agent's network namespace or of a rank's (/proc/PID/net/dev)."""

    TABLE: ClassVar[str] = "net_link"

    mono_ns: int = key("When it was read.", unit="ns")
    namespace: str = key("Network namespace, as in process_info; empty for the agent's own.")
    interface: str = key("Name of the interface.")
    up: bool | None = gauge("Whether it is operational.")
    speed_bits_per_s: int | None = gauge("Speed that the link negotiated.", unit="bits_per_s")
    rx_bytes: int = counter("Bytes received.", unit="bytes")
    tx_bytes: int = counter("Bytes sent.", unit="bytes")
    rx_packets: int | None = counter("Packets received.")
    tx_packets: int | None = counter("Packets sent.")
    rx_errors: int | None = counter("Bad packets received.")
    tx_errors: int | None = counter("Packets that failed to be sent.")
    rx_drops: int | None = counter("Packets received and dropped.")
    tx_drops: int | None = counter("Packets dropped instead of sent.")
