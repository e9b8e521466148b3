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
from dataclasses import dataclass

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.ledger import UNATTRIBUTED
from whyidle_rules.recording import fabric, transfer
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.inspector import NOTHING, Exact
from whyidle_rules.recording.jobs import BIN_NS, SLOW, Cause, Job, Waits
from whyidle_rules.recording.series import Array, Floats, Truths, numbered, runs
from whyidle_rules.recording.windows import Gpu

# How far back an excess may lie, the nearest first: a step starts with its data and ends with its
# collectives, and large models take half a minute for one.
LOOK_BACK_BINS = (1, 2, 4, 8, 16, 32, 64)
# What a rank did more explains what others waited for it if it is about as long.
LEVEL_RATIO = 0.8
# Where nothing does, two seconds are looked at: longer than most steps and stalls.
USUAL_BINS = 4
# How well a look back explains a wait.
_NOT, _USUAL, _BY_ALL, _BY_EMPTY = range(4)
# Collectives move bytes, in steps of seconds at most; after so long without any they hang.
STUCK_S = 10.0
STUCK_RATIO = 0.9
HANG: Cause = ("collective", "hang")
ENDING: Cause = ("lifecycle", "shutdown")


def tell(
    con: duckdb.DuckDBPyConnection,
    job: Job,
    row: int,
    at: Ints,
    gpus: Sequence[Gpu],
    columns: Columns,
    exact: Exact = NOTHING,
) -> None:
    """Fill coll_wait_s, coll_transfer_s and what goes with them in the evidence of a job's member.

    `at` is the bin of each window; of those in which some rank is unknown, nothing is told. `exact`
    is what NCCL itself told of the GPU's collectives.
    """
    gpu = gpus[job.members[row]].at(job.own[row])
    apart = len({gpus[number].machine for number in job.members}) > 1
    own = columns["spinning_s"]
    wait = own * job.wait[row][at]
    moved = own - wait
    way = fabric.load(con, gpu)
    # Whoever waits for a late rank moves no bytes either: all have to poll.
    stuck = _stuck(way, own, gpu) & (job.late[at] < 0)
    wait, moved = np.where(stuck, 0.0, wait), np.where(stuck, 0.0, moved)
    together = moved
    # What is spun beside each other and moves too little for that is waiting in turns: for ranks
    # that are late in one step each, or for stages of a pipeline.
    rest = np.maximum(0.0, moved - np.where(np.isnan(way.most_s), np.inf, way.most_s))
    moved = moved - rest
    late = np.array([*job.ranks, np.nan])[job.late[at]]
    gone = np.where(stuck, own, np.where(job.gone[at], wait, wait * 0.0))
    kept = np.where(job.gone[at], wait * 0.0, wait)
    waited = kept + gone + np.nan_to_num(columns["host_coll_s"] * job.wait[row][at])
    told: dict[str, Array] = {
        "coll_s": own if job.collective else own - rest,
        "comm_s": 0.0 * rest if job.collective else rest,
        "coll_even_s": rest if job.collective else 0.0 * rest,
        "coll_wait_s": kept,
        "coll_gone_s": gone,
        **transfer.columns(way, gpu, together, moved, apart=apart, exact=exact),
        "late_rank": np.where(waited > 0, late, np.nan),
        **_on_host(job, row, at, columns["host_coll_s"]),
    }
    known = ~np.isnan(wait)
    for name, values in told.items():
        columns[name] = values if known.all() else np.where(known, values, columns[name])


def _on_host(job: Job, row: int, at: Ints, host: Floats) -> dict[str, Array]:
    """Split what the launching thread waited for others in collectives, as the GPU's own time."""
    waited = host * job.wait[row][at]
    gone = job.gone[at]
    return {
        "host_coll_wait_s": np.where(gone, 0.0 * waited, waited),
        "host_coll_gone_s": np.where(gone, waited, 0.0 * waited),
        "host_coll_transfer_s": host - waited,
    }


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

    Each wait is split by what the late one had spent more since the two were level. Looked at from
    too near, a rank that stood empty at the start of a long step has computed more: it does so
    while the other waits at the step's end. So one looks back until what it stood empty for makes
    up for the waiting; where nothing does, it had more to compute, and until that makes up for it,
    and no further, since ranks may be late in turns. To be called once the job's causes are filled.
    """
    waiting = [_waiting(job, row) for row in range(len(job.members))]
    for bins in LOOK_BACK_BINS:
        if all((each.told == _BY_EMPTY).all() for each in waiting):
            break
        sums = {cause: lately(values, bins) for cause, values in job.causes.items()}
        for row, each in enumerate(waiting):
            _look_back(each, row, bins, sums)
    never = _never_came(job)
    return {
        number: _weights(job, each, never)
        for number, each in zip(job.members, waiting, strict=True)
    }


def _never_came(job: Job) -> Truths:
    """Return in which bins ranks waited for a member that stood still, and until the end.

    It did nothing that anybody can name, for as long as it takes to call that a hang, and nobody
    computed any more. Only the end of a recording tells that from a long pause.
    """
    found = np.zeros(job.spin.shape[1], dtype=bool)
    waited = (np.nan_to_num(job.wait) * job.spin).max(axis=0)
    places = np.flatnonzero((waited > 0) & (job.late >= 0))
    if not len(places):
        return found
    last = int(places[-1])
    late = int(job.late[last])
    # Who is killed after a while looks as if it had been ending.
    unknown = [
        values[late]
        for cause, values in job.causes.items()
        if cause[0] == UNATTRIBUTED or cause == ENDING
    ]
    still = np.add.reduce([np.zeros(len(found)), *unknown])
    first = last
    while first > 0 and job.late[first - 1] == late:
        first -= 1
    # It computed in the first of these bins, and whoever ended the job took CPUs in the last.
    bins = first + np.flatnonzero(still[first:last] >= STUCK_RATIO * job.covered[late, first:last])
    if not len(bins):
        return found
    first = int(bins[0])
    part = slice(first, last + 1)
    if still[part].sum() < STUCK_RATIO * job.covered[late, part].sum():
        return found
    # A little of what polls counts as working: how full the chip is tells only so much.
    worked, covered = (each[:, first + 1 :].sum(axis=1) for each in (job.working, job.covered))
    nobody = bool((worked <= (1 - STUCK_RATIO) * covered).all())
    if nobody and (last - first) * BIN_NS >= STUCK_S * NS_PER_S:
        found[first : last + 1] = True
    return found


@dataclass(slots=True)
class _Waiting:
    """The bins in which a member waited: for whom, how long, what that one had spent more.

    `waited` is of all bins, the others of those in `places`; `told`: how well that explains it.
    """

    waited: Floats
    places: Ints
    late: Ints
    told: Ints
    excess: dict[Cause, Floats]


def _waiting(job: Job, row: int) -> _Waiting:
    waited = job.spin[row] * np.nan_to_num(job.wait[row])
    places = np.flatnonzero((waited > 0) & (job.late >= 0) & ~job.gone)
    return _Waiting(
        waited=waited,
        places=places,
        late=job.late[places],
        told=np.full(len(places), _NOT),
        excess={},
    )


def _look_back(each: _Waiting, row: int, bins: int, sums: Mapping[Cause, Floats]) -> None:
    """Take the excess over so many bins where it explains the waiting better than nearer ones."""
    here = {
        cause: np.maximum(0.0, values[each.late, each.places] - values[row, each.places])
        for cause, values in sums.items()
    }
    none = np.zeros(len(each.places))
    empty = np.add.reduce([none, *(values for cause, values in here.items() if cause != SLOW)])
    waits = lately(each.waited[None, :], bins)[0][each.places]
    if SLOW in here:  # what is made up for already was not waited for since it computed more
        here[SLOW] = np.minimum(here[SLOW], np.maximum(0.0, waits - empty))
    told = np.full(len(each.places), _USUAL if bins == USUAL_BINS else _NOT)
    told[empty + here.get(SLOW, none) >= LEVEL_RATIO * waits] = _BY_ALL
    told[empty >= LEVEL_RATIO * waits] = _BY_EMPTY
    better = told > each.told
    for cause, values in here.items():
        each.excess[cause] = np.where(better, values, each.excess.get(cause, none))
    each.told = np.maximum(told, each.told)


def _weights(job: Job, each: _Waiting, never: Truths) -> dict[tuple[int, str, str], float]:
    weights: dict[tuple[int, str, str], float] = defaultdict(float)
    missed = never[each.places]
    waited = np.where(missed, 0.0, each.waited[each.places])
    excess = each.excess.values()
    whole = np.add.reduce(list(excess)) if excess else np.zeros(len(each.places))
    parts = {
        cause: waited * values / np.maximum(whole, 1e-12) * (whole > 0)
        for cause, values in each.excess.items()
    }
    parts[UNATTRIBUTED, "unexplained"] = waited * (whole <= 0)
    parts[HANG] = np.where(missed, each.waited[each.places], 0.0)
    for (cause, subcause), seconds in parts.items():
        for late in np.unique(each.late[seconds > 0]):
            who = job.members[int(late)]
            weights[who, cause, subcause] += float(seconds[each.late == late].sum())
    return dict(weights)


def lately(values: Floats, bins: int) -> Floats:
    """Return for each bin the sum over so many bins that end with it."""
    summed = np.cumsum(values, axis=1)
    before = np.zeros_like(summed)
    before[:, bins:] = summed[:, :-bins]
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
