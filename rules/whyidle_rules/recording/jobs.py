"""The jobs of a recording: ranks on one grid of wall time, for what only all of them can tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.ledger import UNATTRIBUTED
from whyidle_rules.recording.series import Array, Columns, Floats, Truths, fetch
from whyidle_rules.recording.spans import wall_offsets
from whyidle_rules.recording.windows import Gpu

BIN_NS = NS_PER_S // 2
# Ranks differ by this much of a bin without any waiting: fills are told to a few points.
EQUAL_RATIO = 0.05
# A bin that is covered for less than half by some rank says nothing of it.
COVERED_RATIO = 0.5
# For so much of a bin without a process, a rank is gone and not late.
GONE_RATIO = 0.5

Cause = tuple[str, str]
SLOW: Cause = ("slow_compute", "more_work")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline: the stage of each member, stages, micro-batches of a step, and its schedule."""

    stage: Ints
    stages: int
    batches: int
    gpipe: bool


@dataclass(slots=True)
class Job:
    """Ranks of one job on a common grid of bins of wall time.

    `members` are numbers of GPUs, in order of their ranks. Arrays have a row for each member and a
    column for each bin: seconds in communication, of windows, working. `late` is the member that
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
    working: Floats
    pipeline: Pipeline | None = None
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


def find(con: duckdb.DuckDBPyConnection, gpus: Sequence[Gpu], first: Sequence[int]) -> Waits:
    """Return the jobs of which all ranks are in the evidence."""
    offsets = wall_offsets(con)
    rows = fetch(
        con,
        "SELECT coalesce(spinning_s, 0) AS coll_s, comm_s IS NOT NULL AS told, d_s,"
        " coalesce(no_process_s, 0) AS nobody_s,"
        " coalesce(working_s, 0) AS working_s, rank::DOUBLE AS rank,"
        " world_size::DOUBLE AS world, pipeline_stage::DOUBLE AS stage,"
        " pipeline_stages::DOUBLE AS stages, pipeline_batches::DOUBLE AS batches,"
        " CASE WHEN pipeline_schedule = 'gpipe' THEN 1.0 ELSE 0.0 END AS gpipe"
        " FROM evidence ORDER BY window_id",
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
    spin, covered, nobody, working = (np.zeros((len(members), size)) for _ in range(4))
    for row, number in enumerate(members):
        at, part = bins[number] - first, parts[number]
        spin[row] = np.bincount(at, weights=rows["coll_s"][part], minlength=size)
        covered[row] = np.bincount(at, weights=rows["d_s"][part], minlength=size)
        working[row] = np.bincount(at, weights=rows["working_s"][part], minlength=size)
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
        working=working,
        pipeline=_pipeline(members, parts, rows),
        gone=(late >= 0) & absent[late, np.arange(size)],
    )


def _pipeline(members: Sequence[int], parts: Sequence[slice], rows: Columns) -> Pipeline | None:
    """Return the pipeline that all members tell of, alike; else None."""
    told = [
        tuple(_mode(rows[name][parts[number]]) for name in ("stage", "stages", "batches"))
        for number in members
    ]
    if len({(stages, batches) for _, stages, batches in told}) != 1:
        return None
    stages, batches = told[0][1:]
    places = [stage for stage, _, _ in told if stage is not None]
    if not stages or not batches or set(places) != set(range(stages)):
        return None
    return Pipeline(
        stage=np.array(places, dtype=np.int64),
        stages=stages,
        batches=batches,
        gpipe=bool(np.nanmax(rows["gpipe"][parts[members[0]]])),
    )


def fill_causes(
    con: duckdb.DuckDBPyConnection, job: Job, waits: Waits, parts: Sequence[slice]
) -> None:
    """Add up each member's seconds by cause and bin: idle ones as charged, and working."""
    for row, number in enumerate(job.members):
        part = parts[number]
        con.register(
            "whyidle_bins",
            {
                "window_id": np.arange(part.start, part.stop, dtype=np.int64),
                "bin": waits.bins[number] - job.first_bin,
            },
        )
        try:
            charged = con.execute(
                "SELECT cause, subcause, list(bin), list(s) FROM (SELECT c.cause, c.subcause,"
                " b.bin, sum(c.ns)::DOUBLE / 1e9 AS s FROM (SELECT window_id, cause, subcause, ns"
                " FROM grants WHERE pool = 'empty' UNION ALL SELECT window_id,"
                f" '{UNATTRIBUTED}', subcause, ns FROM leftovers WHERE pool = 'empty') c"
                " JOIN whyidle_bins b USING (window_id) GROUP BY ALL) GROUP BY ALL ORDER BY ALL"
            ).fetchall()
        finally:
            con.unregister("whyidle_bins")
        for cause, subcause, at, seconds in charged:
            into = job.causes.setdefault((cause, subcause), np.zeros_like(job.spin))
            into[row, np.array(at, dtype=np.int64)] += np.array(seconds)
    job.causes[SLOW] = job.working


def spin_of(con: duckdb.DuckDBPyConnection, part: slice) -> Floats:
    """Return seconds in communication of each window of a GPU."""
    rows = fetch(
        con,
        "SELECT coalesce(spinning_s, 0) AS s FROM evidence WHERE window_id >= $first"
        " AND window_id < $end ORDER BY window_id",
        {"first": part.start, "end": part.stop},
    )
    return np.asarray(rows["s"], dtype=np.float64)
