"""The evidence view: what rules read. One row per GPU window, one declared list of columns.

A window is a stretch [t0, t1) of one GPU's time. On recordings it is the GPU's own sampling window,
and `working`, `empty` and `spinning` share it; on traces it is an exact piece of the timeline, and
just one of them fills it. Columns in seconds say how much of the window a thing lasted, so that a
claim can never exceed what it cites. NULL means that nothing recorded the thing; it is never 0.

`exclusive` columns never share a second: what the launching thread did while the GPU was empty is
given to the most specific of them when the view is filled. So a second whose column goes missing
cannot turn up in another one, and a rule that abstains for it blocks no other rule. A column that
is `part_of` another one shares that one's seconds and nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SqlType = Literal["BIGINT", "INTEGER", "DOUBLE", "VARCHAR", "BOOLEAN"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the evidence view: name, SQL type, unit ('' where it has none), meaning."""

    name: str
    type: SqlType
    unit: str
    meaning: str
    exclusive: bool = False
    part_of: str = ""


def _seconds(name: str, meaning: str, part_of: str = "") -> Column:
    return Column(name=name, type="DOUBLE", unit="s", meaning=meaning, part_of=part_of)


def _ratio(name: str, meaning: str) -> Column:
    return Column(name=name, type="DOUBLE", unit="ratio", meaning=meaning)


def _number(name: str, unit: str, meaning: str) -> Column:
    return Column(name=name, type="DOUBLE", unit=unit, meaning=meaning)


def _count(name: str, meaning: str) -> Column:
    return Column(name=name, type="INTEGER", unit="", meaning=meaning)


def _text(name: str, meaning: str) -> Column:
    return Column(name=name, type="VARCHAR", unit="", meaning=meaning)


def _truth(name: str, meaning: str) -> Column:
    return Column(name=name, type="BOOLEAN", unit="", meaning=meaning)


def _share_of_spinning(name: str, meaning: str) -> Column:
    return Column(name=name, type="DOUBLE", unit="s", meaning=meaning, exclusive=True)


def _share_of_empty(name: str, meaning: str) -> Column:
    return Column(name=name, type="DOUBLE", unit="s", meaning=meaning, exclusive=True)


KEYS: tuple[Column, ...] = (
    Column(name="window_id", type="BIGINT", unit="", meaning="Number of the window in this run."),
    Column(name="node", type="VARCHAR", unit="", meaning="Node that holds the GPU."),
    Column(name="gpu", type="INTEGER", unit="", meaning="Index of the GPU on its node."),
    Column(name="uuid", type="VARCHAR", unit="", meaning="Identity of the GPU."),
    Column(
        name="rank", type="INTEGER", unit="", meaning="Global rank of the process that used it."
    ),
    Column(name="t0_ns", type="BIGINT", unit="ns", meaning="Start of the window."),
    Column(name="t1_ns", type="BIGINT", unit="ns", meaning="End of the window."),
)

TRACED: tuple[Column, ...] = (
    _seconds("d_s", "Length of the window."),
    _seconds("working_s", "Kernels computed."),
    _seconds("empty_s", "No kernel was resident; copies alone are not work."),
    _seconds("spinning_s", "Kernels were resident and none computed."),
    _seconds("gap_s", "Whole stretch without a kernel that the window is a piece of."),
    _share_of_empty("data_wait_s", "The launching thread waited in its DataLoader."),
    Column(
        name="data_workers",
        type="INTEGER",
        unit="",
        meaning="Worker processes of that DataLoader; 0 when the trainer loads its data itself.",
    ),
    _share_of_empty("checkpoint_save_s", "The launching thread was saving a checkpoint."),
    _share_of_empty("checkpoint_load_s", "The launching thread was loading a checkpoint."),
    _share_of_empty("evaluation_s", "The launching thread was inside an evaluation phase."),
    _share_of_empty("compile_s", "The launching thread was compiling or loading kernels."),
    _share_of_empty("gc_s", "Python was collecting garbage."),
    _share_of_empty(
        "allocator_s", "The launching thread was allocating or freeing memory in the driver."
    ),
    _share_of_empty("logging_s", "The launching thread was logging."),
    _share_of_empty("profiler_s", "The profiler held up the launching thread."),
    _share_of_empty(
        "sync_s",
        "The GPU ran dry while the host waited for it, and the host had not launched anew.",
    ),
    _seconds("launch_late_s", "The GPU was empty and the host had not begun its next launch call."),
    _share_of_empty("host_busy_s", "Part of launch_late_s in framework operators or driver calls."),
    _share_of_empty(
        "host_silent_s", "Part of launch_late_s in which the launching thread left no record."
    ),
    _share_of_empty(
        "launch_latency_s", "The next launch call was under way, or its kernel about to start."
    ),
    _share_of_empty(
        "queued_s", "The launch call of the next kernel had ended before the GPU ran empty."
    ),
    _share_of_empty("copy_h2d_s", "Only copies from the host ran."),
    _seconds("copy_h2d_pageable_s", "Part of copy_h2d_s out of pageable memory.", "copy_h2d_s"),
    _share_of_empty("copy_d2h_s", "Only copies to the host ran, none from it."),
    _share_of_empty("copy_device_s", "Only copies or sets inside devices ran."),
    _share_of_spinning("coll_s", "Only collectives ran."),
    _seconds("coll_wait_s", "Part of coll_s spent waiting for the last rank to come.", "coll_s"),
    _seconds("coll_gone_s", "Part of coll_s spent waiting for a rank that was gone.", "coll_s"),
    _seconds("coll_transfer_s", "Part of coll_s after the last rank had come.", "coll_s"),
    Column(
        name="coll_transport",
        type="VARCHAR",
        unit="",
        meaning="What carried the collective: nvlink, ib, roce or tcp.",
    ),
    Column(name="late_rank", type="INTEGER", unit="", meaning="Rank that was waited for."),
    _share_of_spinning("p2p_s", "Only sends or receives between two ranks ran."),
    Column(name="world_size", type="INTEGER", unit="", meaning="Ranks of the job."),
)

# What only recordings tell: of the trainer's threads, its loader's processes, and its node.
_RECORDED: tuple[Column, ...] = (
    _share_of_spinning("comm_s", "Only communication ran; of which kind is not known."),
    _seconds("underfilled_s", "Part of working_s in which kernels may have only polled a peer."),
    _truth("probed", "The launching process publishes a counter page."),
    _truth(
        "data_wait_inferred",
        "No counter page tells of data_wait_s: the launching thread slept, and all workers of its "
        "loader were busy.",
    ),
    _share_of_empty(
        "data_setup_s", "The launching thread began or ended an epoch of its DataLoader."
    ),
    _share_of_empty(
        "host_coll_s",
        "The launching thread waited for other ranks in a collective, as gloo's are, or for "
        "gradients that are reduced on CPUs.",
    ),
    _seconds("host_coll_wait_s", "Part of host_coll_s until the last rank came.", "host_coll_s"),
    _seconds("host_coll_gone_s", "Part of host_coll_s for a rank that was gone.", "host_coll_s"),
    _seconds(
        "host_coll_transfer_s", "Part of host_coll_s after the last rank had come.", "host_coll_s"
    ),
    _share_of_empty(
        "host_p2p_s", "The launching thread waited for a send or a receive between two ranks."
    ),
    _seconds(
        "host_schedule_s", "Part of host_p2p_s that the schedule costs by itself.", "host_p2p_s"
    ),
    _seconds("host_imbalance_s", "Part of host_p2p_s waiting for a longer stage.", "host_p2p_s"),
    _seconds("host_upstream_s", "Part of host_p2p_s waiting beyond both.", "host_p2p_s"),
    _ratio("data_ready_ratio", "How often a batch was ready when the launching thread came."),
    _count("loaders", "DataLoaders that feed the steps of the launching process, as it told."),
    _count("loader_workers", "Processes that load its data; 0: it loads its data itself."),
    _ratio("loader_cpu_ratio", "Share of their time on a CPU; of the wait, if it loads itself."),
    _ratio("loader_runq_ratio", "Share of it ready to run, without a CPU."),
    _ratio("loader_io_ratio", "Share of it blocked in reads from a file system."),
    _ratio("loader_network_ratio", "Share of it waiting for the network, through sockets."),
    Column(
        name="loader_read_bytes",
        type="DOUBLE",
        unit="bytes",
        meaning="Read from storage by the processes that load data.",
    ),
    Column(
        name="loader_asked_bytes",
        type="DOUBLE",
        unit="bytes",
        meaning="Asked of read() by them, what the page cache held as well.",
    ),
    _text("read_fs", "Kind of file system that data comes from: block, nvmeof, nfs, fuse ..."),
    _text("read_mount", "Where that is mounted."),
    _count("cpus_allowed", "CPUs that the processes that load data may use."),
    _ratio("cgroup_throttled_ratio", "Share of the quota periods that their cgroup was cut short."),
    _count("node_cpus", "CPUs of the node."),
    _ratio("node_cpu_busy_ratio", "Share of the node's CPU time that was used."),
    _ratio("loader_thrash_ratio", "Share of it blocked in reads of what memory had held before."),
    _share_of_empty("xid_s", "The driver had reported a fatal error; no kernel ran since."),
    _count("xid", "Number of that error (Xid); unknown for a GPU that fell off the bus."),
    _share_of_empty("pcie_copy_s", "Copies filled the PCIe link, and no kernel ran."),
    _ratio("pcie_ratio", "Bytes over PCIe, of what the link carries as it is now."),
    _share_of_empty("lost_s", "The driver had lost the GPU."),
    _share_of_empty("reset_s", "The driver asked for the GPU to be reset."),
    _share_of_empty("gds_bounced_s", "GPUDirect Storage was set up, and files came by the host."),
    _number("sm_clock_megahertz", "megahertz", "Clock of the SMs while the GPU was not idle."),
    _number("sm_clock_max_megahertz", "megahertz", "Highest clock of the SMs."),
    _seconds("power_slowed_s", "Part of working_s with the clock held down by the power limit."),
    _seconds("power_lost_s", "Part of power_slowed_s that the lower clock cost, at most."),
    _seconds("heat_slowed_s", "Part of working_s with the clock held down by heat."),
    _seconds("heat_lost_s", "Part of heat_slowed_s that the lower clock cost, at most."),
    _number("power_watts", "watts", "Power that the GPU drew."),
    _number("empty_power_watts", "watts", "Power that GPUs of its kind drew while empty."),
    _seconds("stuck_s", "Part of working_s, a minute and more, at the power of an empty GPU."),
    _number("loader_megabytes_per_s", "megabytes/s", "What the loader got, over ten seconds."),
    _number(
        "wanted_megabytes_per_s",
        "megabytes/s",
        "What it would have got had its GPU not waited for reads; NULL where it hardly computed.",
    ),
    _seconds(
        "save_lost_s", "Saving a checkpoint, with no file open but on what goes with the node."
    ),
    _text("save_mount", "Where that is mounted."),
    _text("save_lost_with", "With what it is lost: the memory of the node, the container ..."),
    _truth("pcie_reduced", "The PCIe link runs below the generation or width of GPU and slot."),
    _seconds("coll_detour_s", "Part of coll_s moving data over TCP beside RDMA ports.", "coll_s"),
    _seconds("coll_degraded_s", "Part of coll_s moving data with a port that is slow.", "coll_s"),
    _seconds(
        "coll_unready_s",
        "Part of coll_s moving data while peers had no receive posted.",
        "coll_s",
    ),
    _seconds(
        "coll_bounced_s",
        "Part of coll_s moving data through the host, as NICs could not reach GPU memory.",
        "coll_s",
    ),
    _text("gpudirect_why", "Why NICs cannot reach the memory of the GPU."),
    _seconds("coll_congested_s", "Part of coll_s moving data while ports were held up.", "coll_s"),
    _seconds(
        "coll_small_s",
        "Part of coll_s moving data in collectives so small that they take their latency.",
        "coll_s",
    ),
    _seconds(
        "coll_even_s",
        "Part of coll_s that all ranks waited alike, as when another is late in each step.",
        "coll_s",
    ),
    _ratio(
        "coll_line_ratio",
        "Bandwidth while data of collectives moved, of the line rate: as NCCL Inspector tells, "
        "else by the bytes of links.",
    ),
    _number("steps", "", "Training steps that the process ended in the window, as it told."),
    _count("pipeline_stage", "Stage of a pipeline that the process runs, from 0."),
    _count("pipeline_stages", "Stages of that pipeline."),
    _count("pipeline_batches", "Micro-batches of a step."),
    _text("pipeline_schedule", "1f1b, gpipe, interleaved or other."),
    _count("pipeline_virtual", "Stages that the process runs, of an interleaved schedule."),
    _seconds("bubble_schedule_s", "Part of p2p_s that the schedule costs by itself.", "p2p_s"),
    _seconds("bubble_imbalance_s", "Part of p2p_s waiting for a longer stage.", "p2p_s"),
    _seconds("bubble_late_s", "Part of p2p_s waiting beyond both.", "p2p_s"),
    _seconds(
        "bubble_even_s", "Part of p2p_s that all stages of an unknown schedule wait alike.", "p2p_s"
    ),
    _count("rdma_ports", "Active RDMA ports of the node."),
    _share_of_empty("no_process_s", "No process had the GPU."),
    _share_of_empty("startup_s", "A process had started and had run no kernel on the GPU yet."),
    _share_of_empty("startup_read_s", "Then too, and it was blocked in reads of megabytes."),
    _share_of_empty("shutdown_s", "A process ended, and had run its last kernel on the GPU."),
    _share_of_empty("writing_s", "The launching process was writing to storage, in bulk."),
    _share_of_empty("other_phase_s", "The launching thread was in a phase that it named itself."),
    _share_of_empty("main_run_s", "The launching thread ran on a CPU, in none of the above."),
    _share_of_empty("main_ready_s", "The launching thread was ready to run, without a CPU."),
    _share_of_empty("main_blocked_s", "The launching thread was blocked in I/O."),
    _share_of_empty("main_stopped_s", "The launching thread was stopped, as by SIGSTOP."),
    _share_of_empty("main_asleep_s", "The launching thread slept, in none of the above."),
    _seconds(
        "main_maybe_data_s",
        "Part of main_asleep_s spent where a thread sleeps that waits for its DataLoader.",
        "main_asleep_s",
    ),
)

OBSERVED: tuple[Column, ...] = TRACED + _RECORDED
COLUMNS: tuple[Column, ...] = KEYS + OBSERVED
BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}


def ddl(table: str) -> str:
    """Return the CREATE TABLE statement of an evidence table called `table`."""
    body = ", ".join(f'"{column.name}" {column.type}' for column in COLUMNS)
    return f'CREATE TABLE "{table}" ({body})'
