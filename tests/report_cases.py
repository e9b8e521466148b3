"""Diagnoses built by hand, one for each screen of the report."""

from __future__ import annotations

import math

from report_build import diagnosis, finding, gpu, row
from whyidle_rules.diagnosis import Diagnosis, GpuLedger, Grade, LedgerRow, NotSeen, Quality


def healthy() -> Diagnosis:
    """One rank that is 98.8 % busy."""
    return diagnosis(
        [gpu(0, 0.996, empty_s=0.012, causes={"unattributed": 0.012})],
        [row("unattributed", "kernel_gap", 0.012, rank=0, grade=None)],
    )


def sleeper() -> Diagnosis:
    """Rank 2 sleeps on its host for a second in each of three steps; the others wait for it."""
    others = [0, 1, 3]
    gpus = [
        gpu(
            rank,
            3.295,
            empty_s=0.140,
            spinning_s=3.036,
            causes={"collective": 3.036, "host_pause": 0.140},
            waited_for={"2": 3.035},
        )
        for rank in others
    ]
    gpus.insert(2, gpu(2, 3.294, empty_s=3.145, spinning_s=0.012, causes={"host_pause": 3.145}))
    late = ("host_pause", "main_thread")
    ledger = [
        row("collective", "late_rank", 0.0, 9.105, where="rank", rank=2, root=late),
        row("host_pause", "main_thread", 3.031, rank=2, grade="observed"),
        row("collective", "transfer", 0.0, 0.015, node=None),
        *(row("host_pause", "launch_bound", 0.140, rank=rank) for rank in others),
        row("host_pause", "launch_bound", 0.114, rank=2),
    ]
    return diagnosis(
        gpus,
        ledger,
        source=[f"sst_long_a2a_optimizer/rank-{rank}.json.gz" for rank in range(4)],
        findings=[
            finding(
                "main_thread",
                *late,
                3.031,
                title="The launching thread paused and nothing recorded says why",
                says="On rank 2 the launching thread left no record for 3.03 s in 3 long gaps.",
                advice="Look at what rank 2 does between its steps: a sleep, a lock, a file.",
                returned_s=12.136,
                evidence={"host_silent_s": 3.031, "long_gap_s": 0.005, "gaps": 3},
                grade="observed",
                ranks=[2],
                why="While the host launches nothing the GPU runs dry, and every peer waits.",
            ),
            finding(
                "launch_bound",
                "host_pause",
                "launch_bound",
                0.534,
                title="The host launches kernels too slowly",
                severity="warning",
                says="The GPU was empty for 0.534 s while the host was busy launching.",
                advice="Capture the step in a CUDA graph or compile the model.",
                returned_s=0.534,
                evidence={"launch_late_s": 0.534, "host_busy_s": 0.411, "queue_ratio": 0.0},
                ranks=[0, 1, 2, 3],
            ),
        ],
        not_seen=[
            NotSeen(
                what="CPU of the nodes",
                why="a trace holds no host counters",
                rules=["worker_cpu", "affinity", "cgroup_throttle", "oversubscription", "nfs_read"],
            )
        ],
    )


def many_ranks() -> Diagnosis:
    """A recording of 64 ranks on 8 nodes: rank 12 reads its data over a slow NFS mount."""
    nodes = [f"gpu-{number:02d}.cluster.example" for number in range(8)]
    wall_s, waited_s, read_s = 3600.0, 1080.0, 1116.0
    late = ("storage", "nfs_read")
    gpus: list[GpuLedger] = []
    ledger: list[LedgerRow] = [
        row("storage", "nfs_read", read_s, rank=12, node=nodes[1], grade="observed")
    ]
    for rank in range(64):
        node = nodes[rank // 8]
        if rank == 12:
            gpus.append(
                gpu(rank, wall_s, empty_s=read_s, node=node, index=4, causes={"storage": read_s})
            )
            continue
        waits = waited_s + (rank * 7 % 13) - 6
        gpus.append(
            gpu(
                rank,
                wall_s,
                empty_s=36.0,
                spinning_s=waits + 90.0,
                node=node,
                index=rank % 8,
                causes={"collective": waits + 90.0, "unattributed": 36.0},
                waited_for={"12": waits},
                underfilled_s=18.0,
            )
        )
        ledger += [
            row(
                "collective",
                "late_rank",
                0.0,
                waits,
                where="rank",
                rank=12,
                node=nodes[1],
                root=late,
                grade="inferred",
            ),
            row("collective", "transfer_ib", 0.0, 90.0, node=None, grade="inferred"),
            row("unattributed", "no_evidence", 36.0, rank=rank, node=node, grade=None),
        ]
    return diagnosis(
        gpus,
        ledger,
        kind="recording",
        source=["/shared/recordings/whyidle-20260401T101500Z"],
        job={"name": "llama-70b-sft", "id": "481516", "world_size": 64},
        findings=[
            finding(
                "nfs_read",
                *late,
                read_s,
                title="Data comes slowly over NFS",
                says="Reads from nfs01:/datasets took 212 ms each while rank 12 waited for data.",
                advice="Move the dataset of rank 12 to a local disk, or mount it with nconnect.",
                returned_s=69_000.0,
                owner="infrastructure",
                evidence={"read_latency_ns": 212_000_000, "read_bytes": 9_876_543_210},
                grade="observed",
                ranks=[12],
            )
        ],
        quality=Quality(
            missed_ticks=3, gaps_s=0.4, clock_error_ns=1_200_000, agent_cpu_ratio=0.004
        ),
    )


def no_gpu_events() -> Diagnosis:
    return diagnosis(
        [],
        [],
        source=["cpu_only.pt.trace.json"],
        not_seen=[
            NotSeen(
                what="GPU activity",
                why="cpu_only.pt.trace.json holds no kernel, copy or set",
                rules=[],
            )
        ],
    )


def all_unattributed() -> Diagnosis:
    """A trace without its CPU side: idle, and nothing to say why."""
    return diagnosis(
        [gpu(rank, 10.0, empty_s=6.2, causes={"unattributed": 6.2}) for rank in range(2)],
        [row("unattributed", "no_evidence", 6.2, rank=rank, grade=None) for rank in range(2)],
        not_seen=[
            NotSeen(
                what="CPU activity",
                why="the traces hold GPU events only",
                rules=["main_thread", "launch_bound", "gc", "synchronisation"],
            )
        ],
    )


def own_loading() -> Diagnosis:
    """Two ranks on two nodes that load their data between their own steps."""
    return diagnosis(
        [
            gpu(
                rank,
                0.996,
                empty_s=0.393,
                node=f"node-{rank}",
                causes={"cpu_preprocessing": 0.287, "host_transfer": 0.012, "host_pause": 0.094},
            )
            for rank in range(2)
        ],
        [
            one
            for rank in range(2)
            for one in (
                row("cpu_preprocessing", "main_thread", 0.287, rank=rank, node=f"node-{rank}"),
                row("host_transfer", "pageable_copy", 0.012, rank=rank, node=f"node-{rank}"),
                row(
                    "host_pause",
                    "launch_bound",
                    0.094,
                    rank=rank,
                    node=f"node-{rank}",
                    grade="inferred",
                ),
            )
        ],
        findings=[
            finding(
                "main_thread",
                "cpu_preprocessing",
                "main_thread",
                0.574,
                title="The trainer loads its data itself",
                says="The launching thread spent 0.574 s in a DataLoader without workers.",
                advice="Set num_workers of the DataLoader to 4 or more.",
                returned_s=0.55,
                ranks=[0, 1],
            )
        ],
    )


def mixed() -> Diagnosis:
    """Three late ranks, many causes, more findings than fit, and a good part unknown."""
    late = {1: ("storage", "fuse_read"), 4: ("host_pause", "gc"), 6: ("slow_compute", "more_work")}
    waits = {1: 21.0, 4: 9.0, 6: 4.5}
    own: list[tuple[str, str, float]] = [
        ("unattributed", "unexplained", 14.0),
        ("cpu_preprocessing", "worker_cpu", 11.5),
        ("host_pause", "launch_bound", 3.25),
        ("host_transfer", "pageable_copy", 2.125),
        ("host_pause", "compile", 1.4),
        ("lifecycle", "evaluation", 0.9),
        ("storage", "checkpoint_write", 0.35),
        ("host_pause", "logging", 0.04),
    ]
    gpus: list[GpuLedger] = []
    ledger: list[LedgerRow] = []
    for rank in range(8):
        waited = {one: s for one, s in waits.items() if one != rank}
        parts = list(own)
        if rank in late and late[rank][0] != "slow_compute":
            parts.append((*late[rank], waits[rank]))
        causes: dict[str, float] = {"collective": math.fsum(waited.values())}
        for cause, subcause, seconds in parts:
            causes[cause] = causes.get(cause, 0.0) + seconds
            grade: Grade | None = None if cause == "unattributed" else "observed"
            ledger.append(row(cause, subcause, seconds, rank=rank, grade=grade))
        ledger += [
            row("collective", "late_rank", 0.0, s, where="rank", rank=one, root=late[one])
            for one, s in waited.items()
        ]
        gpus.append(
            gpu(
                rank,
                120.0,
                empty_s=math.fsum(s for _, _, s in parts),
                spinning_s=math.fsum(waited.values()),
                causes=causes,
                waited_for={str(one): s for one, s in waited.items()},
            )
        )
    return diagnosis(
        gpus,
        ledger,
        kind="recording",
        source=["run-7"],
        findings=[
            finding(
                subcause,
                cause,
                subcause,
                8 * seconds,
                title=f"What {subcause.replace('_', ' ')} looks like",
                says=f"It took {seconds} s on every rank.",
                advice="Do less of it.",
                severity="critical" if seconds > 10 else "warning" if seconds > 2 else "info",
                grade="observed",
                ranks=list(range(8)),
            )
            for cause, subcause, seconds in own
            if cause != "unattributed"
        ],
    )


def hostile() -> Diagnosis:
    """Every string that comes out of a recording is an attack or an accident."""
    escape = "\x1b[31mred\x1b]0;title\x07\x1b[2J"
    markup = "[bold red]rank[/bold red] [link=http://x]"
    node = f"北京-机房-{'ü' * 60}-\u202ereversed"
    return diagnosis(
        [
            gpu(0, 10.0, empty_s=4.0, node=node, causes={"storage": 3.0, "[red]evil": 1.0}),
            gpu(
                1,
                10.0,
                spinning_s=4.0,
                node=escape,
                causes={"collective": 4.0},
                waited_for={"0": 3.9, "x\x1b[7m": 0.1},
            ),
        ],
        [
            row("storage", "nfs_read", 3.0, rank=0, node=node),
            row("[red]evil", "sub\x1b[5m_cause", 1.0, rank=0, node=node),
            row(
                "collective",
                "late_rank",
                0.0,
                4.0,
                where="rank",
                rank=0,
                node=node,
                root=("storage", "nfs_read"),
            ),
        ],
        source=[
            f"/data/{'deep/' * 60}{escape}.json",
            "line\nbreak\ttab.json",
            "bad\udc80byte",
            "d",
        ],
        job={"name": markup, "command\x1b[1m": "a\r\nb"},
        findings=[
            finding(
                f"rule{escape}",
                "storage",
                "nfs_read",
                3.0,
                title=f"{markup} title",
                says=f"kernel void at::native::{'x' * 300}<{escape}> Z{chr(0x301) * 50}",
                advice="Do\x00 it\u2028now.",
                evidence={
                    f"k{escape}": escape,
                    "nan_s": math.nan,
                    "big_bytes": 10**400,
                    "list": [escape],
                    "none_ratio": None,
                },
                owner="[blink]mallory",
                ranks=[0],
            )
        ],
        not_seen=[NotSeen(what=markup, why=escape, rules=[escape, markup])],
    )


CASES = {
    "healthy": healthy,
    "sleeper": sleeper,
    "many_ranks": many_ranks,
    "no_gpu_events": no_gpu_events,
    "all_unattributed": all_unattributed,
    "own_loading": own_loading,
    "mixed": mixed,
    "hostile": hostile,
}
