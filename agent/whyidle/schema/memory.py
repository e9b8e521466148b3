"""Tables of memory and interrupts: cgroups, the node's NUMA nodes, who serves which device."""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import counter, gauge, key, label, table


@table
class CgroupMemory:
    """Memory of the cgroup of a watched process, and of each level above it that has a limit."""

    TABLE: ClassVar[str] = "cgroup_memory"

    mono_ns: int = key("When it was read.", unit="ns")
    cgroup: str = key("Path of the cgroup of the memory controller.")
    version: int = label("1 or 2.")
    current_bytes: int | None = gauge("Memory charged to it, page cache in it.", unit="bytes")
    max_bytes: int | None = gauge("Limit (memory.max); NULL if unlimited.", unit="bytes")
    high_bytes: int | None = gauge(
        "Bound above which its tasks are slowed (memory.high, v2); NULL if none.", unit="bytes"
    )
    swap_bytes: int | None = gauge("Swap charged to it.", unit="bytes")
    anon_bytes: int | None = gauge("Of it anonymous memory.", unit="bytes")
    file_bytes: int | None = gauge("Of it page cache, shared memory in it.", unit="bytes")
    dirty_bytes: int | None = gauge("Of it waiting to be written back.", unit="bytes")
    writeback_bytes: int | None = gauge("Of it being written back.", unit="bytes")
    refault_file_pages: int | None = counter(
        "Page cache that its limit evicted and it read again (workingset_refault_file).",
        unit="pages",
    )
    refault_anon_pages: int | None = counter("The same of anonymous memory.", unit="pages")
    major_faults: int | None = counter("Faults that read from disk (pgmajfault).")
    high_events: int | None = counter("Times it was above memory.high and slowed (v2).")
    max_events: int | None = counter("Times it met its limit (memory.events max, failcnt).")
    oom_kills: int | None = counter("Its processes that were killed for memory.")


@table
class NumaNode:
    """A NUMA node: memory, and allocations that had to go elsewhere; every 10 s."""

    TABLE: ClassVar[str] = "numa_node"

    mono_ns: int = key("When it was read.", unit="ns")
    numa_node: int = key("Number of the node.")
    cpus: str | None = label("Its CPUs, as a list such as 0-3,8.")
    total_bytes: int | None = gauge("Memory of the node.", unit="bytes")
    free_bytes: int | None = gauge("Of it free.", unit="bytes")
    file_bytes: int | None = gauge("Of it page cache.", unit="bytes")
    anon_bytes: int | None = gauge("Of it anonymous.", unit="bytes")
    dirty_bytes: int | None = gauge("Of it waiting to be written back.", unit="bytes")
    hit_pages: int | None = counter("Allocated here as wanted (numa_hit).", unit="pages")
    miss_pages: int | None = counter("Allocated here, wanted elsewhere (numa_miss).", unit="pages")
    foreign_pages: int | None = counter(
        "Wanted here, allocated elsewhere (numa_foreign).", unit="pages"
    )
    local_pages: int | None = counter("Allocated by a CPU of the node (local_node).", unit="pages")
    other_pages: int | None = counter("Allocated by a CPU of another (other_node).", unit="pages")


@table
class DeviceIrq:
    """Interrupts of a GPU, NIC or NVMe drive, and the CPUs that serve them; every ten minutes."""

    TABLE: ClassVar[str] = "device_irq"

    mono_ns: int = key("When it was read.", unit="ns")
    pci_bus_id: str = key("PCI address, such as 0000:1a:00.0.")
    kind: str = label("gpu, nic or nvme.")
    device: str | None = label("Name of the device; NULL for GPUs.")
    irqs: int | None = gauge("Interrupt vectors that its driver has.")
    interrupts: int | None = counter("Interrupts of all of them since boot.")
    cpus: str | None = label("CPUs that serve them, as a list such as 0-3,8.")
    cpus_count: int | None = gauge("How many CPUs that are.")
    numa_node: int | None = label("NUMA node of the device.")
    away_irqs: int | None = gauge(
        "Vectors that a CPU of another NUMA node serves; NULL where that is not known."
    )
