"""What is known of a node, for the evidence of all of its GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from whyidle_rules.recording.gds import Gds
from whyidle_rules.recording.hardware import Facts
from whyidle_rules.recording.phases import Told
from whyidle_rules.recording.power import Power
from whyidle_rules.recording.processes import Identity, Node, Proc
from whyidle_rules.recording.ranks import Rank
from whyidle_rules.recording.surroundings import Surroundings
from whyidle_rules.recording.windows import Gpu
from whyidle_rules.recording.written import Written


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a node: its processes, what they told, what surrounds them."""

    node: Node
    told: Mapping[Identity, Told]
    around: Surroundings
    ranks: Mapping[str, Rank]
    hardware: Facts
    power: Power
    gds: Gds | None
    written: Written

    def with_procs(self, procs: Mapping[Identity, Proc]) -> Known:
        """Return the same with some processes in the place of those that were known."""
        return replace(self, node=replace(self.node, procs={**self.node.procs, **procs}))

    def pids(self, uuid: str) -> list[int]:
        """Return the process ids of who had a GPU, here and in their own namespaces."""
        found: list[int] = []
        for proc in self.node.launchers(uuid):
            told = self.told.get(proc.identity)
            inner = told.info.get("inner_pid") if told else None
            found += [proc.identity[0], *([] if inner is None else [int(inner)])]
        return found

    def stints(self, gpu: Gpu) -> list[tuple[slice, Proc]]:
        """Return which process launched on the GPU in which of its windows.

        Of several at a time, one that publishes a page goes first, then the one that began first.
        """
        owner = np.full(len(gpu.t0), -1)
        launchers = self.node.launchers(gpu.uuid)
        launchers.sort(key=lambda proc: (proc.identity not in self.told, proc.begin_ns))
        for number, proc in enumerate(launchers):
            inside = (gpu.t0 >= proc.begin_ns) & (gpu.t1 <= proc.end_ns) & (owner < 0)
            owner[inside] = number
        edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
        return [
            (slice(begin, end), launchers[owner[begin]])
            for begin, end in itertools.pairwise(edges)
            if begin < end and owner[begin] >= 0
        ]

    def job_of(self, gpu: Gpu) -> int:
        """Return the size of the job that the GPU is seen to communicate in, -1 for none."""
        for proc in self.node.launchers(gpu.uuid):
            told = self.told.get(proc.identity)
            world = (told.info.get("world_size") if told else None) or proc.info.get("world_size")
            kinds = (proc.info.get("thread_kinds") or "").split(",")
            if ("nccl" in kinds and world != 1) or (gpu.linked and (world or 1) > 1):
                return int(world or 0)
        rank = self.ranks.get(gpu.uuid)
        if rank is not None and rank.communicates and rank.world_size != 1:
            return int(rank.world_size or 0)
        return -1
