"""What is known of a node, for the evidence of all of its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from whyidle_rules.recording.gds import Gds
from whyidle_rules.recording.hardware import Facts
from whyidle_rules.recording.mounts import Written
from whyidle_rules.recording.phases import Told
from whyidle_rules.recording.power import Power
from whyidle_rules.recording.processes import Identity, Node, Proc
from whyidle_rules.recording.ranks import Rank
from whyidle_rules.recording.surroundings import Surroundings
from whyidle_rules.recording.windows import Gpu


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
