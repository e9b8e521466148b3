"""Ranks that wait for each other: how much of a collective is waiting, for whom, and for what.

Samples do not show single collectives. But ranks of a job communicate together, so what all of them
spend in communication at a time is transfer, and what one spends more than the one that spends
least is waiting for that one. Half a second is longer than the sampling windows, and shorter than
most stalls. Why the late rank was late is what it spent more than the waiting one, by cause:
charging by what it did while others waited would name its computing, since it waits for its data at
the start of a step, and the others for it at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import duckdb
import numpy as np

from whyidle_rules.intervals import Ints
from whyidle_rules.ledger import UNATTRIBUTED
from whyidle_rules.recording import fabric
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.jobs import Job, Waits
from whyidle_rules.recording.series import Array, Floats, Truths, numbered, runs
from whyidle_rules.recording.windows import Gpu

# How far back an excess may lie: a step starts with its data and ends with its collectives.
BACK_BINS = 4
# Collectives move bytes, in steps of seconds at most; after so long without any they hang.
STUCK_S = 10.0
STUCK_RATIO = 0.9


def tell(
    con: duckdb.DuckDBPyConnection,
    job: Job,
    row: int,
    at: Ints,
    gpus: Sequence[Gpu],
    columns: Columns,
) -> None:
    """Fill coll_wait_s, coll_transfer_s and what goes with them in the evidence of a job's member.

    `at` is the bin of each window; of those in which some rank is unknown, nothing is told.
    """
    gpu = gpus[job.members[row]].at(job.own[row])
    apart = len({gpus[number].machine for number in job.members}) > 1
    own = columns["spinning_s"]
    wait = own * job.wait[row][at]
    moved = own - wait
    way = fabric.load(con, gpu)
    rdma = (way.transport == "ib") | (way.transport == "roce")
    # On one node, bytes over TCP are of something else: data, metrics.
    detour = (way.transport == "tcp") & (way.rdma_ports > 0) & apart
    degraded = rdma & way.degraded
    congested = rdma & way.congested & ~degraded
    # Whoever waits for a late rank moves no bytes either: all have to poll.
    stuck = _stuck(way, own, gpu) & (job.late[at] < 0)
    wait, moved = np.where(stuck, 0.0, wait), np.where(stuck, 0.0, moved)
    # What is spun beside each other and moves too little for that is waiting in turns.
    rest = np.maximum(0.0, moved - np.where(np.isnan(way.most_s), np.inf, way.most_s))
    moved = moved - rest
    late = np.array([*job.ranks, np.nan])[job.late[at]]
    gone = np.where(stuck, own, np.where(job.gone[at], wait, wait * 0.0))
    kept = np.where(job.gone[at], wait * 0.0, wait)
    host = columns["host_coll_s"]
    host_wait = host * job.wait[row][at]
    waited = kept + gone + np.nan_to_num(host_wait)
    told: dict[str, Array] = {
        "coll_s": own - rest,
        "comm_s": rest,
        "coll_wait_s": kept,
        "coll_gone_s": gone,
        "coll_transfer_s": np.where(detour | degraded | congested, moved * 0.0, moved),
        "coll_detour_s": np.where(way.known, moved * detour, np.nan),
        "coll_degraded_s": np.where(way.known, moved * degraded, np.nan),
        "coll_congested_s": np.where(way.known, moved * congested, np.nan),
        "coll_transport": way.transport,
        "rdma_ports": np.full(len(at), float(way.rdma_ports)),
        "late_rank": np.where(waited > 0, late, np.nan),
        "host_coll_wait_s": np.where(job.gone[at], 0.0 * host_wait, host_wait),
        "host_coll_gone_s": np.where(job.gone[at], host_wait, 0.0 * host_wait),
        "host_coll_transfer_s": host - host_wait,
    }
    known = ~np.isnan(wait)
    for name, values in told.items():
        columns[name] = values if known.all() else np.where(known, values, columns[name])


def _stuck(way: fabric.Fabric, own: Floats, gpu: Gpu) -> Truths:
    """Return in which windows a GPU had only communicated for long, and no byte went anywhere."""
    length = gpu.length / 1e9
    numbers, kinds = numbered(way.transport)
    nothing = np.array([kind is None for kind in kinds], dtype=bool)[numbers]
    silent = way.links_known & nothing & (own >= STUCK_RATIO * length)
    out = np.zeros(len(silent), dtype=bool)
    for first, last in zip(*runs(silent), strict=True):
        part = slice(first, last + 1)
        out[part] = length[part].sum() >= STUCK_S
    return out


def roots(job: Job) -> dict[int, dict[tuple[int, str, str], float]]:
    """Return, by GPU, the weights of what its waits arose from: (GPU, cause, subcause).

    To be called once the job's causes are filled in.
    """
    return {number: _roots_of(job, row) for row, number in enumerate(job.members)}


def _roots_of(job: Job, row: int) -> dict[tuple[int, str, str], float]:
    """Split each wait of a member by what the late one had spent more, lately."""
    weights: dict[tuple[int, str, str], float] = defaultdict(float)
    waited = job.spin[row] * np.nan_to_num(job.wait[row])
    sums = {cause: lately(values) for cause, values in job.causes.items()}
    for place in np.flatnonzero((waited > 0) & (job.late >= 0)):
        late = int(job.late[place])
        if job.gone[place]:
            continue
        excess = {
            cause: float(max(0.0, values[late, place] - values[row, place]))
            for cause, values in sums.items()
        }
        whole = sum(excess.values())
        if whole <= 0:
            weights[job.members[late], UNATTRIBUTED, "unexplained"] += float(waited[place])
            continue
        for (cause, subcause), value in excess.items():
            if value > 0:
                share = float(waited[place]) * value / whole
                weights[job.members[late], cause, subcause] += share
    return dict(weights)


def lately(values: Floats) -> Floats:
    """Return for each bin the sum over it and those just before it."""
    summed = np.cumsum(values, axis=1)
    before = np.zeros_like(summed)
    before[:, BACK_BINS:] = summed[:, :-BACK_BINS]
    return np.asarray(summed - before)


def gone(job: Job, row: int) -> dict[int, float]:
    """Return how long a member waited for GPUs whose rank was gone, by their number."""
    waited = job.spin[row] * np.nan_to_num(job.wait[row])
    by_gpu: dict[int, float] = defaultdict(float)
    for place in np.flatnonzero((waited > 0) & job.gone):
        by_gpu[job.members[int(job.late[place])]] += float(waited[place])
    return dict(by_gpu)


def waited_for(waits: Waits, gpu: int) -> Mapping[str, float]:
    """Return how many seconds a GPU waited for each rank, in all jobs that it was in."""
    by_rank: dict[str, float] = defaultdict(float)
    for job, row in waits.of(gpu):
        waited = job.spin[row] * np.nan_to_num(job.wait[row])
        for place in np.flatnonzero((waited > 0) & (job.late >= 0)):
            by_rank[str(job.ranks[int(job.late[place])])] += float(waited[place])
    return dict(sorted(by_rank.items(), key=lambda item: -item[1]))
