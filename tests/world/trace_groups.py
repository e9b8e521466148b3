"""Runs whose ranks wait for one another in more ways than one all-reduce.

Pipelines, expert exchange, tensor and data parallel groups, broadcasts, and ranks that are late
because they compute.
"""

from __future__ import annotations

from world.trace_scenarios import (
    MS,
    Job,
    Scenario,
    Steps,
    checkpointing,
    collecting_garbage,
    copying_pageable,
    data_parallel,
    healthy,
    launch_bound,
    load_ready,
    loading_itself,
    sleeping,
    starved,
    synchronising,
)
from world.traces import Group, Program, Rank

_GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_cublas"


def _work(rank: Rank, duration_ns: float, kernels: int = 8) -> None:
    for _ in range(kernels):
        rank.kernel(_GEMM, rank.vary(duration_ns / kernels), "aten::mm", 9_000)


def _pipeline(stalled: bool) -> Program:
    """Return a pipeline of four stages; the third one is slower when stalled."""
    everyone = (0, 1, 2, 3)

    def pair(low: int, way: str) -> Group:
        return Group(name="5", members=(low, low + 1), description="pp", pair=f"{low}{way}")

    def program(rank: Rank) -> Steps:
        slow = 2.0 if stalled and rank.index == 2 else 1.0
        for step in range(4):
            with rank.span(f"ProfilerStep#{step + 3}"):
                load_ready(rank)
                for _ in range(4):
                    if rank.index > 0:
                        yield from rank.collective(pair(rank.index - 1, "f"), "recv", 100_000)
                        rank.after(7, 20)
                    _work(rank, 2 * MS * slow)
                    if rank.index < 3:
                        yield from rank.collective(pair(rank.index, "f"), "send", 100_000)
                for _ in range(4):
                    if rank.index < 3:
                        yield from rank.collective(pair(rank.index, "b"), "recv", 100_000)
                        rank.after(7, 20)
                    _work(rank, 4 * MS * slow)
                    if rank.index > 0:
                        yield from rank.collective(pair(rank.index - 1, "b"), "send", 100_000)
                rank.after(7, 20)
                yield from rank.collective(Group(name="0", members=everyone), "allreduce", 300_000)
                rank.after(7, 20)
                _work(rank, MS)
                rank.item()

    return program


def _experts(stalled: bool) -> Program:
    """Return a run whose ranks exchange tokens twice in a row; rank 3 sleeps before that."""
    group = Group(name="2", members=(0, 1, 2, 3), description="ep")

    def program(rank: Rank) -> Steps:
        for step in range(6):
            with rank.span(f"ProfilerStep#{step + 3}"):
                load_ready(rank)
                _work(rank, 4 * MS)
                rank.item()
                if stalled and rank.index == 3:
                    rank.pause(12 * MS)
                for _ in range(2):
                    yield from rank.collective(group, "all_to_allv", 0.8 * MS)
                rank.after(7, 20)
                _work(rank, 6 * MS)
                rank.item()

    return program


def _hybrid(stalled: bool) -> Program:
    """Return two groups of four with tensor parallelism, reduced across; rank 5 sleeps."""

    def program(rank: Rank) -> Steps:
        half, place = divmod(rank.index, 4)
        tensor = Group(
            name=str(1 + half), members=tuple(range(4 * half, 4 * half + 4)), description="tp"
        )
        data = Group(name=str(3 + place), members=(place, place + 4), description="dp")
        for step in range(4):
            with rank.span(f"ProfilerStep#{step + 3}"):
                load_ready(rank)
                for layer in range(4):
                    if stalled and rank.index == 5 and layer == 1:
                        rank.synchronise((7, 20))
                        rank.pause(15 * MS)
                    _work(rank, 2 * MS)
                    yield from rank.collective(tensor, "allreduce", 0.4 * MS)
                    rank.after(7, 20)
                yield from rank.collective(data, "_reduce_scatter_base", 1.2 * MS)
                yield from rank.collective(data, "_allgather_base", 1.2 * MS)
                rank.after(7, 20)
                _work(rank, MS)
                rank.item()

    return program


def _late_by_compute(stalled: bool) -> Program:
    """Return a run in which rank 3 computes half as long again as the others."""
    return data_parallel(
        Job(
            sync="previous",
            load=lambda rank, _: load_ready(rank),
            slowness=lambda rank, _: 1.5 if stalled and rank.index == 3 else 1.0,
        )
    )


def _alternating(stalled: bool) -> Program:
    """Return a run in which ranks 0 and 2 take turns at sleeping."""

    def sleep(rank: Rank, step: int) -> None:
        if stalled and rank.index == (0 if step % 2 else 2):
            rank.pause(20 * MS)

    return data_parallel(Job(load=lambda rank, _: load_ready(rank), middle=sleep))


def _broadcasting(stalled: bool) -> Program:
    """Return a run whose root broadcasts every step; rank 2, which only receives, sleeps."""
    group = Group(name="0", members=(0, 1, 2, 3))

    def program(rank: Rank) -> Steps:
        for step in range(6):
            with rank.span(f"ProfilerStep#{step + 3}"):
                load_ready(rank)
                _work(rank, 4 * MS)
                if rank.index == 2 and stalled:
                    rank.item()
                    rank.pause(10 * MS)
                yield from rank.collective(group, "broadcast", MS, root=0)
                rank.after(7, 20)
                _work(rank, 4 * MS)
                rank.item()

    return program


_SILENT = (("host_pause", "main_thread"),)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="healthy", build=healthy),
    Scenario(name="sleep", build=sleeping, roots=_SILENT, culprits=(2,)),
    Scenario(
        name="loads_itself",
        build=loading_itself,
        roots=(("cpu_preprocessing", "main_thread"),),
        culprits=(1,),
    ),
    Scenario(
        name="starved",
        build=starved,
        roots=(("unattributed", "data_wait"),),
        culprits=(0, 1, 2, 3),
    ),
    Scenario(name="gc", build=collecting_garbage, roots=(("host_pause", "gc"),), culprits=(3,)),
    Scenario(
        name="checkpoint",
        build=checkpointing,
        roots=(("storage", "checkpoint_write"),),
        culprits=(0,),
    ),
    Scenario(
        name="pageable",
        build=copying_pageable,
        roots=(("host_transfer", "pageable_copy"),),
        culprits=(0, 1, 2, 3),
    ),
    Scenario(
        name="launch_bound",
        build=launch_bound,
        roots=(("host_pause", "launch_bound"),),
        culprits=(0, 1, 2, 3),
    ),
    Scenario(
        name="sync",
        build=synchronising,
        ranks=1,
        # The gap behind each read is the scalar's copy, the host's return, and the next launch.
        roots=(
            ("host_pause", "synchronisation"),
            ("host_pause", "launch_bound"),
            ("host_transfer", "exposed_copy"),
        ),
        culprits=(0,),
    ),
    Scenario(
        name="pipeline",
        build=_pipeline,
        # Sends have no common end, so that a trace alone does not tell whom a stage waits for.
        roots=(("pipeline_bubble", "exposed"),),
        culprits=(0, 1, 2, 3),
    ),
    Scenario(name="experts", build=_experts, roots=_SILENT, culprits=(3,)),
    Scenario(name="hybrid", build=_hybrid, ranks=8, roots=_SILENT, culprits=(5,)),
    Scenario(
        name="late_by_compute",
        build=_late_by_compute,
        roots=(("slow_compute", "more_work"),),
        culprits=(3,),
    ),
    Scenario(name="alternating", build=_alternating, roots=_SILENT, culprits=(0, 2)),
    Scenario(name="broadcast", build=_broadcasting, roots=_SILENT, culprits=(2,)),
)


def scenario(name: str) -> Scenario:
    """Return the scenario of this name; raises KeyError."""
    return {one.name: one for one in SCENARIOS}[name]
