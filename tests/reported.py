"""Idle GPUs that people reported in public, as evidence, and what has to be said of each.

Each was found in a public thread or pull request, and its cause by those who were there. The
evidence is ours: what a recording (or a trace) of such a run shows in a second of its GPU's time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from whyidle_rules.rule import Value

Row = dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report: where to read it, what was seen, and what is to be said of it.

    `says` is "cause/subcause"; "" where nothing may be blamed.
    Of slow work it is told beside the ledger. `not_told` says why it is not told
    yet; such a report has no evidence.
    """

    id: str
    title: str
    url: str
    says: str = ""
    row: Row = field(default_factory=dict)
    not_told: str = ""


_GITHUB = "https://github.com/"
# A loader with the probe: the trainer waits, its four workers compute, read, or want a CPU.
_WAITS: Row = {
    "data_wait_s": 1.0, "loader_workers": 4, "loader_cpu_ratio": 0.0, "loader_runq_ratio": 0.0,
    "loader_io_ratio": 0.0, "loader_thrash_ratio": 0.0, "probed": True, "loaders": 1,
    "world_size": 1, "cpus_allowed": 8, "node_cpus": 8, "node_cpu_busy_ratio": 0.3,
    "cgroup_throttled_ratio": 0.0, "data_ready_ratio": 0.0,
}  # fmt: skip
# The trainer's own thread: it does not wait for data.
_OWN: Row = {
    "data_wait_s": 0.0, "probed": True, "loaders": 1, "world_size": 1, "loader_workers": 4,
    "loader_cpu_ratio": 0.1, "loader_runq_ratio": 0.0, "loader_io_ratio": 0.0,
    "main_run_s": 0.0, "main_ready_s": 0.0, "main_blocked_s": 0.0, "main_asleep_s": 0.0,
}  # fmt: skip
# A second in which only communication kernels were resident.
_SPINS: Row = {
    "coll_s": 1.0, "coll_wait_s": 0.0, "coll_gone_s": 0.0, "coll_transfer_s": 0.0,
    "coll_detour_s": 0.0, "coll_degraded_s": 0.0, "coll_congested_s": 0.0, "world_size": 16,
}  # fmt: skip


def _reads(fs: str) -> Row:
    return {**_WAITS, "loader_io_ratio": 0.95, "loader_cpu_ratio": 0.05, "read_fs": fs}


def _empty(row: Row) -> Row:
    return {"d_s": 1.0, "empty_s": 1.0, **row}


def _spinning(row: Row) -> Row:
    return {"d_s": 1.0, "spinning_s": 1.0, **row}


# A card at a third of its clock.
_SLOWED: Row = {
    "sm_clock_megahertz": 660.0, "sm_clock_max_megahertz": 1980.0, "power_slowed_s": 0.0,
    "power_lost_s": 0.0, "heat_slowed_s": 0.0, "heat_lost_s": 0.0,
}  # fmt: skip


def _working(row: Row) -> Row:
    return {"d_s": 1.0, "working_s": 1.0, **row}


REPORTS: tuple[Report, ...] = (
    Report(
        id="S01",
        title="All workers on one core of eight, the node nearly idle",
        url=_GITHUB + "huggingface/accelerate/issues/3911",
        says="cpu_preprocessing/affinity",
        row=_empty(
            {
                **_WAITS,
                "loader_cpu_ratio": 0.25,
                "loader_runq_ratio": 0.75,
                "cpus_allowed": 1,
                "node_cpu_busy_ratio": 0.12,
            }
        ),
    ),
    Report(
        id="S02",
        title="2048 OpenCV threads on one node",
        url=_GITHUB + "open-mmlab/mmdetection/pull/6867",
        says="cpu_preprocessing/oversubscription",
        row=_empty(
            {
                **_WAITS,
                "loader_cpu_ratio": 0.3,
                "loader_runq_ratio": 0.7,
                "node_cpu_busy_ratio": 1.0,
            }
        ),
    ),
    Report(
        id="S03",
        title="The pin-memory thread holds the interpreter while the queue is full",
        url=_GITHUB + "pytorch/pytorch/issues/77139",
        says="host_pause/main_thread",
        row=_empty({**_OWN, "main_asleep_s": 1.0}),
    ),
    Report(
        id="S04",
        title="The trainer unpickles batches that are ready, without pin_memory",
        url=_GITHUB + "pytorch/pytorch/issues/24984",
        says="cpu_preprocessing/main_thread",
        row=_empty({**_WAITS, "data_ready_ratio": 1.0, "loader_cpu_ratio": 0.05}),
    ),
    Report(
        id="S05",
        title="Copies into pinned memory use all cores",
        url=_GITHUB + "pytorch/pytorch/issues/25010",
        not_told="the threads that copy are OpenMP's and have the name of the trainer: their CPU "
        "time is told as oversubscription where others wait for CPUs",
    ),
    Report(
        id="S06",
        title="Parquet decoding bounds the loader on any storage",
        url=_GITHUB + "mlcommons/storage/issues/364",
        says="cpu_preprocessing/worker_cpu",
        row=_empty({**_WAITS, "loader_cpu_ratio": 1.0, "node_cpu_busy_ratio": 1.0}),
    ),
    Report(
        id="S07",
        title="A CPU quota halves the speed at a moderate CPU use",
        url=_GITHUB + "NVIDIA/nvidia-docker/issues/757",
        says="cpu_preprocessing/cgroup_throttle",
        row=_empty(
            {
                **_WAITS,
                "loader_cpu_ratio": 0.5,
                "loader_runq_ratio": 0.5,
                "cgroup_throttled_ratio": 0.9,
            }
        ),
    ),
    Report(
        id="S08",
        title="Workers start anew for every epoch, minutes each time",
        url=_GITHUB + "open-mmlab/mmpose/issues/923",
        says="cpu_preprocessing/worker_start",
        row=_empty({**_OWN, "data_setup_s": 1.0}),
    ),
    Report(
        id="S09",
        title="A DataLoader 114 times slower than indexing, in context switches",
        url=_GITHUB + "pytorch/pytorch/issues/154318",
        says="cpu_preprocessing/main_thread",
        row=_empty({**_WAITS, "data_ready_ratio": 0.95, "loader_cpu_ratio": 0.1}),
    ),
    Report(
        id="S10",
        title="A cold first epoch from a local disk",
        url=_GITHUB + "NVIDIA/DALI/issues/1415",
        says="storage/nvme_read",
        row=_empty(_reads("block")),
    ),
    Report(
        id="S11",
        title="A data set larger than memory: every epoch reads it again",
        url=_GITHUB + "MIC-DKFZ/nnUNet/issues/239",
        says="storage/nvme_read",
        row=_empty(_reads("block")),
    ),
    Report(
        id="S12",
        title="Memory runs out and the page cache is thrown away",
        url=_GITHUB + "ultralytics/yolov5/issues/9126",
        says="cpu_preprocessing/memory_pressure",
        row=_empty({**_reads("block"), "loader_io_ratio": 0.05, "loader_thrash_ratio": 0.9}),
    ),
    Report(
        id="S13",
        title="LMDB over NFS, by page faults instead of reads",
        url=_GITHUB + "jnwatson/py-lmdb/issues/281",
        says="storage/nfs_read",
        row=_empty(_reads("nfs")),
    ),
    Report(
        id="S14",
        title="A long stall after every num_workers good steps",
        url=_GITHUB + "mlfoundations/open_clip/issues/703",
        says="storage/nvme_read",
        row=_empty(_reads("block")),
    ),
    Report(
        id="S15",
        title="A FUSE mount of an object store starves four nodes",
        url=_GITHUB + "GoogleCloudPlatform/gcsfuse/issues/1830",
        says="storage/object_read",
        row=_empty(_reads("object")),
    ),
    Report(
        id="S16",
        title="All data in the page cache: storage must not be blamed",
        url=_GITHUB + "mlcommons/storage/issues/464",
        row={"d_s": 1.0, "working_s": 0.99, "empty_s": 0.01, **_OWN},
    ),
    Report(
        id="S17",
        title="60 ms for every remote read",
        url="",
        says="storage/object_read",
        row=_empty(_reads("object")),
    ),
    Report(
        id="S18",
        title="Others load the same network mount",
        url="",
        says="storage/nfs_read",
        row=_empty(_reads("nfs")),
    ),
    Report(
        id="S19",
        title="PCIe trained at generation 2",
        url=_GITHUB + "local-inference-lab/rtx6kpro/pull/88",
        says="host_transfer/pcie_degraded",
        row=_empty({**_OWN, "pcie_copy_s": 0.9, "pcie_ratio": 0.9, "pcie_reduced": True}),
    ),
    Report(
        id="S20",
        title="A card on lanes of the chipset, with the same link status",
        url=_GITHUB + "noonghunna/club-3090/pull/895",
        not_told="both cards report the same link, and one that copies from pageable memory is as "
        "slow on a good one; only a test of its bandwidth tells them apart",
    ),
    Report(
        id="S21",
        title="Pageable copies and .item() for every micro-batch",
        url=_GITHUB + "hao-ai-lab/FastVideo/pull/1217",
        says="host_transfer/pageable_copy",
        row=_empty({"copy_h2d_s": 1.0, "copy_h2d_pageable_s": 1.0}),
    ),
    Report(
        id="S22",
        title="Collectives fall back to sockets, InfiniBand idle",
        url=_GITHUB + "areal-project/AReaL/issues/639",
        says="collective/wrong_transport",
        row=_spinning({**_SPINS, "coll_detour_s": 1.0, "coll_transport": "tcp", "rdma_ports": 8}),
    ),
    Report(
        id="S23",
        title="Receives on 10 GbE, sends on 1 GbE",
        url=_GITHUB + "NVIDIA/nccl/issues/1581",
        says="collective/transfer_tcp",
        row=_spinning({**_SPINS, "coll_transfer_s": 1.0, "coll_transport": "tcp"}),
    ),
    Report(
        id="S24",
        title="ACS breaks GPUDirect: it works, and is slow",
        url=_GITHUB + "NVIDIA/nccl/issues/928",
        says="collective/gpudirect_off",
        row=_spinning({**_SPINS, "coll_bounced_s": 1.0, "coll_transport": "ib"}),
    ),
    Report(
        id="S25",
        title="Two pairs of nodes collide on one path",
        url=_GITHUB + "NVIDIA/nccl/issues/325",
        not_told="bytes are recorded by port, not by pair of nodes; only a test by pairs tells it",
    ),
    Report(
        id="S26",
        title="One node is slow with everybody",
        url=_GITHUB + "NVIDIA/nccl-tests/issues/106",
        not_told="as S25, unless the node is late by itself or its port is degraded",
    ),
    Report(
        id="S27",
        title="A link flaps",
        url=_GITHUB + "NVIDIA/nccl/issues/905",
        says="collective/link_degraded",
        row=_spinning({**_SPINS, "coll_degraded_s": 1.0, "coll_transport": "ib"}),
    ),
    Report(
        id="S28",
        title="After a flap traffic stays slow although the link is up",
        url=_GITHUB + "kvcache-ai/Mooncake/issues/3596",
        says="collective/link_degraded",
        row=_spinning({**_SPINS, "coll_degraded_s": 1.0, "coll_transport": "roce"}),
    ),
    Report(
        id="S29",
        title="Receivers are not ready, and senders wait for a timer",
        url=_GITHUB + "autoscriptlabs/nccl-mesh-plugin/issues/58",
        says="collective/receiver_not_ready",
        row=_spinning({**_SPINS, "coll_unready_s": 1.0, "coll_transport": "roce"}),
    ),
    Report(
        id="S30",
        title="Peer-to-peer is missing on consumer cards",
        url=_GITHUB + "NVIDIA/nccl/issues/1309",
        not_told="it is the product, not a fault; transfer over PCIe is told as a transfer",
    ),
    Report(
        id="S31",
        title="Full collections of garbage, at other times on each rank",
        url=_GITHUB + "marin-community/marin/issues/9205",
        says="host_pause/gc",
        row=_empty({**_OWN, "gc_s": 1.0}),
    ),
    Report(
        id="S32",
        title="A collection of 41 s, its peers at 100 % in the collective",
        url=_GITHUB + "sgl-project/sglang/pull/28067",
        says="collective/late_rank",
        row=_spinning({**_SPINS, "coll_wait_s": 1.0, "late_rank": 3}),
    ),
    Report(
        id="S33",
        title="A long last stage of a pipeline",
        url="https://arxiv.org/abs/2505.05713",
        says="pipeline_bubble/stage_imbalance",
        row=_spinning(
            {
                "p2p_s": 1.0,
                "bubble_schedule_s": 0.1,
                "bubble_imbalance_s": 0.9,
                "bubble_late_s": 0.0,
            }
        ),
    ),
    Report(
        id="S34",
        title="A broadcast at every step",
        url=_GITHUB + "Lightning-AI/pytorch-lightning/issues/21487",
        not_told="a broadcast has no common end, so who waits for whom in it is not known; it is "
        "told as communication with nothing beside it",
    ),
    Report(
        id="S35",
        title="29 of 30 pods wait in a collective for a frozen GPU",
        url=_GITHUB + "NVIDIA/nccl/issues/1063",
        says="collective/hang",
        row=_spinning({**_SPINS, "coll_gone_s": 1.0, "late_rank": 7}),
    ),
    Report(
        id="S36",
        title="96 % utilization at 20 W: a kernel that never ends",
        url=_GITHUB + "NVIDIA/nccl/issues/2213",
        says="slow_compute/stuck_kernel",
        row=_working({"stuck_s": 1.0, "power_watts": 20.0, "empty_power_watts": 19.0}),
    ),
    Report(
        id="S37",
        title="A checkpoint takes 394 s on a disk that has time to spare",
        url=_GITHUB + "pytorch/torchtitan/issues/1301",
        says="storage/checkpoint_write",
        row=_empty({**_OWN, "checkpoint_save_s": 1.0}),
    ),
    Report(
        id="S38",
        title="All ranks write their checkpoint over NFS at once",
        url="https://arxiv.org/abs/2605.09370",
        says="storage/checkpoint_write",
        row=_empty({**_OWN, "checkpoint_save_s": 1.0}),
    ),
    Report(
        id="S39",
        title="A logging call blocks every few seconds",
        url=_GITHUB + "wandb/wandb/issues/8666",
        says="host_pause/main_thread",
        row=_empty({**_OWN, "main_asleep_s": 1.0}),
    ),
    Report(
        id="S40",
        title="Evaluation on one CPU thread",
        url=_GITHUB + "m2lines/Samudra/issues/456",
        says="lifecycle/evaluation",
        row=_empty({**_OWN, "evaluation_s": 1.0}),
    ),
    Report(
        id="S41",
        title="The allocator frees and allocates near full memory",
        url=_GITHUB + "pytorch/pytorch/issues/65078",
        says="host_pause/allocator",
        row=_empty({"allocator_s": 1.0}),
    ),
    Report(
        id="S42",
        title="Graphs are recorded anew for each shape",
        url=_GITHUB + "pytorch/pytorch/issues/188150",
        says="host_pause/compile",
        row=_empty({"compile_s": 1.0}),
    ),
    Report(
        id="S43",
        title="A power cap or heat slows the clocks",
        url="https://forums.developer.nvidia.com/t/205097",
        says="slow_compute/power_cap",
        row=_working({**_SLOWED, "power_slowed_s": 1.0, "power_lost_s": 0.67}),
    ),
    Report(
        id="S44",
        title="Affinity was suspected, clocks were it",
        url=_GITHUB + "pytorch/pytorch/issues/107366",
        says="slow_compute/low_clock",
        row=_working({**_SLOWED, **_OWN}),
    ),
)
