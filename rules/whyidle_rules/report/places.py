"""Where a cause arose and who waited for it, in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from whyidle_rules.diagnosis import GpuLedger
from whyidle_rules.report.roots import RootGroup
from whyidle_rules.report.words import clean, duration, gpu_time, plural, rank_list, shorten

# Waits under this share of the longest one are ordinary jitter.
_NOISE_RATIO = 0.05
# Numbers this close are "each the same" in a sentence.
_SAME_RATIO = 1.1
# More late ranks than this are no culprits: they take turns.
_MAX_LATE = 3
# A cause with this share of the waiting explains it; from the second one on, most of it.
_EXPLAINED_RATIO = 0.9
_MOSTLY_RATIO = 0.5
_NODE_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Who waited for whom, as a clause, and how far one cause explains it."""

    sentence: str
    pronoun: str
    explained: bool
    mostly: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The ranks and nodes of a run, and how to name them; `hosts` counts short host names."""

    ranks: frozenset[int]
    nodes: frozenset[str]
    hosts: Mapping[str, int]
    gpus: int

    def node(self, node: str) -> str:
        """Return a node name that is safe and short: without its domain where that says nothing."""
        host = node.partition(".")[0]
        is_clear = self.hosts.get(host, 0) == 1 and node in self.nodes and not host.isdigit()
        return shorten(clean(host if is_clear else node), _NODE_CHARS)

    def who(self, ranks: Collection[int], nodes: Collection[str]) -> str:
        """Return "rank 2", "all 8 ranks", "ranks 56-63 (node-7)", "32 ranks"."""
        if len(self.ranks) > 1 and self.ranks == set(ranks):
            return "both ranks" if len(self.ranks) == 2 else f"all {len(self.ranks):,} ranks"
        # A single node of a single-node run says nothing new.
        is_news = len(self.nodes) > 1 and len(nodes) == 1
        there = f" ({self.node(next(iter(nodes)))})" if is_news else ""
        return rank_list(ranks) + there

    def origin(self, node: str | None, rank: int | None) -> str:
        """Name one place at which a cause arose."""
        if rank is not None:
            return self.who({rank}, set() if node is None else {node})
        return "no rank of its own" if node is None else self.node(node)

    def place(self, group: RootGroup) -> str:
        """Return "rank 2", "ranks 56-63 (node-7)", "node-7"; "" where it arose on nothing."""
        origins = group.main_origins
        nodes = {row.node for row in origins if row.node is not None}
        ranks = {row.rank for row in origins if row.rank is not None}
        if self.gpus == 1:
            return ""
        if ranks and all(row.rank is not None for row in origins):
            return self.who(ranks, nodes)
        if len(nodes) == 1 and len(self.nodes) > 1:
            return self.node(next(iter(nodes)))
        return ""


def cluster(gpus: Sequence[GpuLedger]) -> Cluster:
    """Gather what there is to name."""
    nodes = frozenset(gpu.node for gpu in gpus if gpu.node is not None)
    return Cluster(
        ranks=frozenset(gpu.rank for gpu in gpus if gpu.rank is not None),
        nodes=nodes,
        hosts=Counter(node.partition(".")[0] for node in nodes),
        gpus=len(gpus),
    )


def waiting(group: RootGroup, gpus: Sequence[GpuLedger]) -> Waiting | None:
    """Say who waited for the ranks on which a cause arose; None where those are not known."""
    origins = group.main_origins
    late = {row.rank for row in origins if row.rank is not None}
    if not late or any(row.rank is None for row in origins):
        return None
    known = cluster(gpus)
    target = known.who(late, {row.node for row in origins if row.node is not None})
    # Many, or all there are, were not late at once: they took turns.
    turns = len(late) > _MAX_LATE or (len(late) > 1 and late == known.ranks)
    if turns:
        target = f"one or another of {target}"
    waits = [(gpu, math.fsum(gpu.waited_for.get(str(rank), 0.0) for rank in late)) for gpu in gpus]
    total = math.fsum(seconds for _, seconds in waits)
    longest = max((seconds for _, seconds in waits), default=0.0)
    waits = [(gpu, s) for gpu, s in waits if s > 0 and s >= _NOISE_RATIO * longest]
    in_what = _in_what(group)
    if waits:
        subject = _waiters([gpu for gpu, _ in waits], known.ranks - late)
        spent = _spent([seconds for _, seconds in waits])
    else:
        subject, spent = "other GPUs", gpu_time(group.waited_s)
    return Waiting(
        sentence=f"{subject} spent {spent} waiting{in_what} for {target}",
        pronoun="which was" if turns or len(late) == 1 else "which were",
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


def _waiters(waiters: Sequence[GpuLedger], others: frozenset[int]) -> str:
    ranks = {gpu.rank for gpu in waiters if gpu.rank is not None}
    if any(gpu.rank is None for gpu in waiters):
        return plural(len(waiters), "GPU")
    if len(others) > 3 and ranks == others:
        return f"all {len(others):,} other ranks"
    return rank_list(ranks)


def _spent(seconds: Sequence[float]) -> str:
    """Write "3.04 s", "3.04 s each" or "up to 3.04 s each"."""
    if len(seconds) == 1:
        return duration(seconds[0])
    if max(seconds) <= _SAME_RATIO * min(seconds):
        return f"{duration(math.fsum(seconds) / len(seconds))} each"
    return f"up to {duration(max(seconds))} each"
