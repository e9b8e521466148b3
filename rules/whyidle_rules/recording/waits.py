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
from dataclasses import dataclass, field

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.ledger import UNATTRIBUTED
from whyidle_rules.recording import fabric
from whyidle_rules.recording.series import Array, Columns, Floats, Truths, fetch
from whyidle_rules.recording.spans import wall_offsets
from whyidle_rules.recording.windows import Gpu

BIN_NS = NS_PER_S // 2
# How far back an excess may lie: a step starts with its data and ends with its collectives.
BACK_BINS = 4
# Ranks differ by this much of a bin without any waiting: fills are told to a few points.
EQUAL_RATIO = 0.05
# A bin that is covered for less than half by some rank says nothing of it.
COVERED_RATIO = 0.5
# For so much of a bin without a process, a rank is gone and not late.
GONE_RATIO = 0.5

Cause = tuple[str, str]
SLOW: Cause = ("slow_compute", "more_work")


@dataclass(slots=True)
class Job:
    """Ranks of one job on a common grid of bins of wall time.

    `members` are numbers of GPUs, in order of their ranks. Arrays have a row for each member and a
    column for each bin: seconds in collectives, seconds of windows. `late` is the member that
    others waited for in each bin, -1 for nobody; `wait` the share of its collectives that each one
    waited, and `gone` says in which bins the late one had no process.
    """

    members: list[int]
    ranks: list[int]
    first_bin: int
    spin: Floats
    covered: Floats
    late: Ints
    wait: Floats
    gone: Truths
    causes: dict[Cause, Floats] = field(default_factory=dict)


@dataclass(slots=True)
class Waits:
    """The jobs of a recording; `bins` holds the bin of each window of each GPU."""

    jobs: list[Job]
    bins: list[Ints]
    clashes: list[str]

    def of(self, gpu: int) -> tuple[Job, int] | None:
        """Return the job of a GPU and its place there."""
        for job in self.jobs:
            if gpu in job.members:
                return job, job.members.index(gpu)
        return None


def witness(con: duckdb.DuckDBPyConnection, gpus: Sequence[Gpu], first: Sequence[int]) -> Waits:
    """Fill coll_wait_s, coll_transfer_s and late_rank of the evidence, where all ranks are seen."""
    offsets = wall_offsets(con)
    rows = fetch(
        con,
        "SELECT coalesce(coll_s, 0) AS coll_s, coll_s IS NOT NULL AS told, d_s,"
        " coalesce(no_process_s, 0) AS nobody_s,"
        " rank::DOUBLE AS rank, world_size::DOUBLE AS world FROM evidence ORDER BY window_id",
    )
    parts = [slice(begin, begin + len(gpu.t0)) for gpu, begin in zip(gpus, first, strict=True)]
    middles = [(gpu.t0 + gpu.t1) // 2 + offsets.get(gpu.machine, 0) for gpu in gpus]
    waits = Waits(jobs=[], bins=[middle // BIN_NS for middle in middles], clashes=[])
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, part in enumerate(parts):
        rank, world = _mode(rows["rank"][part]), _mode(rows["world"][part])
        told = bool(np.asarray(rows["told"][part]).astype(bool).all())
        if told and rank is not None and world is not None and world > 1:
            groups[world].append((rank, number))
    for world, members in groups.items():
        ranks = sorted(members)
        machines = {gpus[number].machine for _, number in ranks}
        if len(machines) > 1 and not machines <= set(offsets):
            waits.clashes.append("nodes without clock readings cannot be set side by side")
            continue
        if len({rank for rank, _ in ranks}) < len(ranks):
            waits.clashes.append(f"several GPUs say that they are the same rank of {world}")
        elif len(ranks) == world:
            waits.jobs.append(_job(ranks, waits.bins, parts, rows))
    for job in waits.jobs:
        _tell(con, job, waits, parts, rows["coll_s"], gpus)
    return waits


def _mode(values: Array) -> int | None:
    known = values[~np.isnan(values.astype(np.float64))].astype(np.int64)
    if len(known) == 0 or known.min() < 0:
        return None
    each, count = np.unique(known, return_counts=True)
    return int(each[count.argmax()])


def _job(
    ranks: Sequence[tuple[int, int]],
    bins: Sequence[Ints],
    parts: Sequence[slice],
    rows: Columns,
) -> Job:
    members = [number for _, number in ranks]
    first = min(int(bins[number].min()) for number in members)
    last = max(int(bins[number].max()) for number in members)
    size = last - first + 1
    spin, covered, nobody = (np.zeros((len(members), size)) for _ in range(3))
    for row, number in enumerate(members):
        at, part = bins[number] - first, parts[number]
        spin[row] = np.bincount(at, weights=rows["coll_s"][part], minlength=size)
        covered[row] = np.bincount(at, weights=rows["d_s"][part], minlength=size)
        nobody[row] = np.bincount(at, weights=rows["nobody_s"][part], minlength=size)
    share = spin / np.maximum(covered, 1e-9)
    least = share.min(axis=0) + EQUAL_RATIO
    whole = (covered >= COVERED_RATIO * BIN_NS / 1e9).all(axis=0)
    wait = np.where(whole, np.maximum(0.0, share - least) / np.maximum(share, 1e-9), np.nan)
    # Of several that do not communicate, one that is gone comes last.
    absent = nobody > GONE_RATIO * covered
    late = np.where(
        np.nan_to_num(wait).max(axis=0) > 0, (share - absent.astype(np.float64)).argmin(axis=0), -1
    )
    return Job(
        members=members,
        ranks=[rank for rank, _ in ranks],
        first_bin=first,
        spin=spin,
        covered=covered,
        late=late,
        wait=wait,
        gone=(late >= 0) & absent[late, np.arange(size)],
    )


def _tell(
    con: duckdb.DuckDBPyConnection,
    job: Job,
    waits: Waits,
    parts: Sequence[slice],
    spin_s: Floats,
    gpus: Sequence[Gpu],
) -> None:
    ranks = np.array([*job.ranks, -1], dtype=np.int64)
    for row, number in enumerate(job.members):
        gpu = gpus[number]
        at = waits.bins[number] - job.first_bin
        own = spin_s[parts[number]]
        wait = own * job.wait[row][at]
        moved = own - wait
        way = fabric.load(con, gpu.node, gpu.boot_id, (gpu.t0 + gpu.t1) // 2)
        rdma = (way.transport == "ib") | (way.transport == "roce")
        detour = (way.transport == "tcp") & (way.rdma_ports > 0)
        degraded = rdma & way.degraded
        congested = rdma & way.congested & ~degraded
        begin = parts[number].start
        told = {
            "window_id": np.arange(begin, begin + len(at), dtype=np.int64),
            "wait": np.where(job.gone[at], wait * 0.0, wait),
            "gone": np.where(job.gone[at], wait, wait * 0.0),
            "moved": np.where(detour | degraded | congested, moved * 0.0, moved),
            "detour": np.where(way.known, moved * detour, np.nan),
            "degraded": np.where(way.known, moved * degraded, np.nan),
            "congested": np.where(way.known, moved * congested, np.nan),
            "transport": way.transport,
            "ports": np.full(len(at), way.rdma_ports, dtype=np.int64),
            "late": ranks[job.late[at]],
        }
        con.register("whyidle_waits", told)
        try:
            con.execute(_TELL)
        finally:
            con.unregister("whyidle_waits")


_TELL = """
UPDATE evidence SET coll_wait_s = w.wait, coll_gone_s = w.gone, coll_transfer_s = w.moved,
  coll_detour_s = if(isnan(w.detour), NULL, w.detour),
  coll_degraded_s = if(isnan(w.degraded), NULL, w.degraded),
  coll_congested_s = if(isnan(w.congested), NULL, w.congested),
  coll_transport = CAST(w.transport AS VARCHAR), rdma_ports = w.ports,
  late_rank = CASE WHEN w.late >= 0 AND w.wait + w.gone > 0 THEN w.late END
FROM whyidle_waits w WHERE evidence.window_id = w.window_id AND NOT isnan(w.wait)
"""


def roots(
    con: duckdb.DuckDBPyConnection, waits: Waits, parts: Sequence[slice]
) -> dict[int, dict[tuple[int, str, str], float]]:
    """Return, by GPU, the weights of what its waits arose from: (GPU, cause, subcause).

    To be called once grants and leftovers are there.
    """
    for job in waits.jobs:
        _fill_causes(con, job, waits, parts)
    found: dict[int, dict[tuple[int, str, str], float]] = {}
    for job in waits.jobs:
        for row, number in enumerate(job.members):
            found[number] = _roots_of(job, row)
    return found


def _fill_causes(
    con: duckdb.DuckDBPyConnection, job: Job, waits: Waits, parts: Sequence[slice]
) -> None:
    """Add up each member's seconds by cause and bin: idle ones as charged, and working."""
    size = job.spin.shape[1]
    for row, number in enumerate(job.members):
        part = parts[number]
        charged = fetch(
            con,
            "SELECT window_id, cause, subcause, sum(ns)::DOUBLE / 1e9 AS s FROM (SELECT window_id,"
            " cause, subcause, ns FROM grants WHERE pool = 'empty' UNION ALL SELECT window_id,"
            f" '{UNATTRIBUTED}', subcause, ns FROM leftovers WHERE pool = 'empty')"
            " WHERE window_id >= $first AND window_id < $end GROUP BY ALL ORDER BY ALL",
            {"first": part.start, "end": part.stop},
        )
        for (cause, subcause), own in charged.groups("cause", "subcause").items():
            at = waits.bins[number][own["window_id"].astype(np.int64) - part.start] - job.first_bin
            into = job.causes.setdefault((cause, subcause), np.zeros_like(job.spin))
            into[row] += np.bincount(at, weights=own["s"], minlength=size)
    empty = np.add.reduce(list(job.causes.values())) if job.causes else np.zeros_like(job.spin)
    job.causes[SLOW] = np.maximum(0.0, job.covered - job.spin - empty)


def _roots_of(job: Job, row: int) -> dict[tuple[int, str, str], float]:
    """Split each wait of a member by what the late one had spent more, lately."""
    weights: dict[tuple[int, str, str], float] = defaultdict(float)
    waited = job.spin[row] * np.nan_to_num(job.wait[row])
    sums = {cause: _lately(values) for cause, values in job.causes.items()}
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


def _lately(values: Floats) -> Floats:
    """Return for each bin the sum over it and those just before it."""
    summed = np.cumsum(values, axis=1)
    before = np.zeros_like(summed)
    before[:, BACK_BINS:] = summed[:, :-BACK_BINS]
    return np.asarray(summed - before)


def gone(waits: Waits, gpu: int) -> dict[int, float]:
    """Return how long a GPU waited for GPUs whose rank was gone, by their number."""
    found = waits.of(gpu)
    if found is None:
        return {}
    job, row = found
    waited = job.spin[row] * np.nan_to_num(job.wait[row])
    by_gpu: dict[int, float] = defaultdict(float)
    for place in np.flatnonzero((waited > 0) & job.gone):
        by_gpu[job.members[int(job.late[place])]] += float(waited[place])
    return dict(by_gpu)


def waited_for(waits: Waits, gpu: int) -> Mapping[str, float]:
    """Return how many seconds a GPU waited for each rank."""
    found = waits.of(gpu)
    if found is None:
        return {}
    job, row = found
    waited = job.spin[row] * np.nan_to_num(job.wait[row])
    by_rank: dict[str, float] = defaultdict(float)
    for place in np.flatnonzero((waited > 0) & (job.late >= 0)):
        by_rank[str(job.ranks[int(job.late[place])])] += float(waited[place])
    return dict(sorted(by_rank.items(), key=lambda item: -item[1]))
