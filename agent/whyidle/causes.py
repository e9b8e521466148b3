"""Every cause and subcause that an idle GPU-second can be charged to: the only list of them.

The agent pre-creates its Prometheus series from it, rules are checked against it, the report takes
its words and colours from it, and the documentation is generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A top-level cause.

    `subcauses` maps each slug to one clause that completes "the GPU was idle because ...".
    `beside` are told beside the ledger only: of seconds that work, or that another one is charged.
    `root_only` causes explain why a rank was late; no idle second is ever charged to them directly.
    """

    slug: str
    title: str
    colour: str
    subcauses: dict[str, str]
    root_only: bool = False
    beside: dict[str, str] = field(default_factory=dict)


CAUSES: tuple[Cause, ...] = (
    Cause(
        slug="storage",
        title="Storage",
        colour="#c2410c",
        subcauses={
            "nvme_read": "data came slowly from a local disk",
            "nvmeof_read": "data came slowly from an NVMe-oF device",
            "nfs_read": "data came slowly over NFS",
            "parallel_fs_read": "data came slowly from a parallel file system",
            "fuse_read": "data came slowly through a FUSE file system",
            "object_read": "data came slowly from an object store",
            "file_read": "data came slowly from a file system that was not identified",
            "checkpoint_write": "the trainer was writing a checkpoint",
            "checkpoint_load": "the trainer was loading a checkpoint",
            "offload": "parameters or optimizer state were moved to or from storage",
            "gds_fallback": "GPUDirect Storage fell back to copies through host memory",
        },
        beside={
            "below_demand": "storage gave less than the job would have read",
            "lost_with_node": "checkpoints were written to what is lost with the node",
        },
    ),
    Cause(
        slug="cpu_preprocessing",
        title="CPU preprocessing",
        colour="#b45309",
        subcauses={
            "worker_cpu": "the DataLoader workers were computing",
            "few_workers": "too few DataLoader workers were started for the CPUs at hand",
            "affinity": "the trainer and its workers were pinned to too few CPUs",
            "cgroup_throttle": "the CPU quota of the cgroup was used up",
            "worker_start": "DataLoader workers were started or joined at the turn of an epoch",
            "oversubscription": "more threads wanted to run than there were CPUs",
            "main_thread": "the trainer loaded its data itself, between its own steps",
            "memory_pressure": "the host was short of memory and refetched or swapped pages",
        },
    ),
    Cause(
        slug="collective",
        title="Collective",
        colour="#1d4ed8",
        subcauses={
            "transfer": "data of a collective was moving, over a fabric that was not recorded",
            "transfer_nvlink": "data of a collective was moving over NVLink",
            "transfer_ib": "data of a collective was moving over InfiniBand",
            "transfer_roce": "data of a collective was moving over RoCE",
            "transfer_tcp": "data of a collective was moving over TCP",
            "small_messages": "collectives were so small that each took its latency",
            "congestion": "the fabric was congested",
            "link_degraded": "a link ran below its speed",
            "wrong_transport": "a slower transport than the one at hand was used",
            "gpudirect_off": "network cards could not reach GPU memory and data went by the host",
            "receiver_not_ready": "receivers had posted no buffer and senders waited for a timer",
            "late_rank": "a collective waited for a rank that came late",
            "hang": "a rank was gone, and the others waited for it in collectives",
            "exposed": "a collective ran with nothing beside it; whether it waited or moved data "
            "could not be told",
        },
    ),
    Cause(
        slug="pipeline_bubble",
        title="Pipeline bubble",
        colour="#7c3aed",
        subcauses={
            "schedule": "the pipeline schedule left this stage without work",
            "stage_imbalance": "another pipeline stage was slower",
            "late_upstream": "the pipeline stage before this one came late",
            "exposed": "a send or receive between stages ran with nothing beside it",
        },
    ),
    Cause(
        slug="host_transfer",
        title="Host transfer",
        colour="#0f766e",
        subcauses={
            "pcie_saturated": "copies between host and GPU filled the PCIe link",
            "pcie_degraded": "the PCIe link ran below its width or speed",
            "pageable_copy": "copies came from pageable host memory",
            "exposed_copy": "copies between host and GPU ran with nothing beside them",
        },
    ),
    Cause(
        slug="host_pause",
        title="Host pause",
        colour="#be185d",
        subcauses={
            "gc": "Python collected garbage",
            "launch_bound": "the host launched kernels more slowly than the GPU ran them",
            "cpu_work": "the launching thread was long in operators or driver calls of its own",
            "main_thread": "the launching thread did something that nothing recorded",
            "synchronisation": "the host had waited for the GPU and only then went on launching",
            "logging": "the trainer was logging",
            "stopped": "the trainer was stopped by a signal or a debugger",
            "compile": "the host was compiling or loading kernels",
            "allocator": "the host was allocating or freeing device memory",
            "profiler": "the profiler itself held up the host",
        },
    ),
    Cause(
        slug="lifecycle",
        title="Lifecycle",
        colour="#4d7c0f",
        subcauses={
            "startup": "the job was starting",
            "shutdown": "the job was ending",
            "evaluation": "the job was evaluating",
            "restart": "the job was restarting",
            "no_job": "no job had the GPU",
            "no_demand": "a server had no requests",
        },
    ),
    Cause(
        slug="hardware",
        title="Hardware",
        colour="#b91c1c",
        subcauses={
            "gpu_lost": "the GPU was lost",
            "xid": "the driver reported an Xid error",
            "reset": "the GPU had to be reset",
        },
    ),
    Cause(
        slug="slow_compute",
        title="Slow compute",
        colour="#a16207",
        subcauses={
            "more_work": "a rank computed longer than its peers: a bigger batch, longer sequences "
            "or lower clocks",
            "power_cap": "a rank computed at a clock that its power limit held down",
            "heat": "a rank computed at a clock that heat held down",
            "low_clock": "a rank computed at a lower clock than its peers",
        },
        beside={
            "stuck_kernel": "a kernel was resident and drew no more power than an empty GPU",
        },
        root_only=True,
    ),
    Cause(
        slug="unattributed",
        title="Unattributed",
        colour="#6b7280",
        subcauses={
            "no_evidence": "what would tell the cause was not recorded",
            "unexplained": "nothing that was recorded explains it",
            "data_wait": "the trainer waited for its DataLoader; whether that read or computed was "
            "not recorded",
            "communication": "GPUs only communicated; whether they waited or moved data, and in a "
            "collective or a pipeline, could not be told",
            "kernel_gap": "the next kernel was already queued: the GPU's own gap between kernels",
        },
    ),
)

BY_SLUG: dict[str, Cause] = {cause.slug: cause for cause in CAUSES}


def is_known(cause: str, subcause: str) -> bool:
    """Say whether the pair is in the list."""
    return cause in BY_SLUG and subcause in {**BY_SLUG[cause].subcauses, **BY_SLUG[cause].beside}


def clause(cause: str, subcause: str) -> str:
    """Return the clause of a pair; raises KeyError if it is not in the list."""
    return {**BY_SLUG[cause].subcauses, **BY_SLUG[cause].beside}[subcause]
