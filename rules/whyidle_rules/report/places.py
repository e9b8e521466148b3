"""Where a cause arose and who waited for it, in words."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from whyidle_rules.diagnosis import GpuLedger
from whyidle_rules.report.roots import RootGroup
from whyidle_rules.report.words import clean, cut, duration, gpu_time, plural, rank_list

# Waits under this share of the longest one are ordinary jitter.
_NOISE_RATIO = 0.05
# Numbers this close are "each the same" in a sentence.
_SAME_RATIO = 1.1
# More late ranks than this are no culprits: they take turns.
_MAX_LATE = 3
# A cause with this share of the waiting explains it; from the second one on, most of it.
_EXPLAINED_RATIO = 0.9
_MOSTLY_RATIO = 0.5
_NODE_CELLS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Who waited for whom, as a clause, and how far one cause explains it."""

    sentence: str
    pronoun: str
    explained: bool
    mostly: bool


def node_name(node: str, nodes: Collection[str]) -> str:
    """Return a node name that is safe and short: without its domain where that says nothing."""
    host = node.partition(".")[0]
    alike = sum(other.partition(".")[0] == host for other in set(nodes) | {node})
    return cut(clean(node if alike > 1 or host.isdigit() else host), _NODE_CELLS, ellipsis="...")


def who(ranks: Collection[int], nodes: Collection[str], gpus: Sequence[GpuLedger]) -> str:
    """Return "rank 2", "all 8 ranks", "ranks 56-63 (node-7)", "32 ranks"."""
    everyone = {gpu.rank for gpu in gpus if gpu.rank is not None}
    if len(everyone) > 1 and everyone == set(ranks):
        return "both ranks" if len(everyone) == 2 else f"all {len(everyone)} ranks"
    # A single node of a single-node run says nothing new.
    known = {gpu.node for gpu in gpus}
    there = ""
    if len(known) > 1 and len(nodes) == 1:
        there = f" ({node_name(next(iter(nodes)), known)})"
    return rank_list(ranks) + there


def place(group: RootGroup, gpus: Sequence[GpuLedger]) -> str:
    """Return "rank 2", "ranks 56-63 (node-7)", "node-7"; "" where a cause arose on nothing."""
    origins = group.main_origins
    nodes = {row.node for row in origins if row.node is not None}
    ranks = {row.rank for row in origins if row.rank is not None}
    if len(gpus) == 1:
        return ""
    if ranks and all(row.rank is not None for row in origins):
        return who(ranks, nodes, gpus)
    known = {gpu.node for gpu in gpus}
    if len(nodes) == 1 and len(known) > 1:
        return node_name(next(iter(nodes)), known)
    return ""


def waiting(group: RootGroup, gpus: Sequence[GpuLedger]) -> Waiting | None:
    """Say who waited for the ranks on which a cause arose; None where those are not known."""
    origins = group.main_origins
    late = {row.rank for row in origins if row.rank is not None}
    if not late or any(row.rank is None for row in origins):
        return None
    target = who(late, {row.node for row in origins if row.node is not None}, gpus)
    if len(late) > _MAX_LATE:
        target = f"whichever of {target} came last"
    waits = [(gpu, math.fsum(gpu.waited_for.get(str(rank), 0.0) for rank in late)) for gpu in gpus]
    total = math.fsum(seconds for _, seconds in waits)
    longest = max((seconds for _, seconds in waits), default=0.0)
    waits = [(gpu, s) for gpu, s in waits if s > 0 and s >= _NOISE_RATIO * longest]
    in_what = _in_what(group)
    if waits:
        subject = _waiters([gpu for gpu, _ in waits], late, gpus)
        spent = _spent([seconds for _, seconds in waits])
    else:
        subject, spent = "other GPUs", gpu_time(group.waited_s)
    return Waiting(
        sentence=f"{subject} spent {spent} waiting{in_what} for {target}",
        pronoun="which was" if len(late) == 1 or len(late) > _MAX_LATE else "which were",
        explained=not waits or group.waited_s >= _EXPLAINED_RATIO * total,
        mostly=not waits or group.waited_s >= _MOSTLY_RATIO * total,
    )


def _in_what(group: RootGroup) -> str:
    """In what most of the waiting was done: " in collectives", " in the pipeline", or unknown."""
    by_cause: dict[str, float] = {}
    for row in group.felt:
        if row.root.where == "rank":
            by_cause[row.cause] = by_cause.get(row.cause, 0.0) + row.idle_s
    main = max(by_cause, key=lambda cause: (by_cause[cause], cause), default="")
    return {"collective": " in collectives", "pipeline_bubble": " in the pipeline"}.get(main, "")


def _waiters(waiters: Sequence[GpuLedger], late: set[int], gpus: Sequence[GpuLedger]) -> str:
    ranks = {gpu.rank for gpu in waiters if gpu.rank is not None}
    if any(gpu.rank is None for gpu in waiters):
        return plural(len(waiters), "GPU")
    others = {gpu.rank for gpu in gpus if gpu.rank is not None} - late
    if len(others) > 3 and ranks == others:
        return f"all {len(others)} other ranks"
    return rank_list(ranks)


def _spent(seconds: Sequence[float]) -> str:
    """Write "3.04 s", "3.04 s each" or "up to 3.04 s each"."""
    if len(seconds) == 1:
        return duration(seconds[0])
    if max(seconds) <= _SAME_RATIO * min(seconds):
        return f"{duration(math.fsum(seconds) / len(seconds))} each"
    return f"up to {duration(max(seconds))} each"
