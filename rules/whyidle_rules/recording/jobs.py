"""The jobs of a recording: ranks on one grid of wall time, for what only all of them can tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.ledger import UNATTRIBUTED
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.series import Array, Floats, Truths
from whyidle_rules.recording.spans import Machine, wall_offsets
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
    bubbles: tuple[Floats, Floats] | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What a job needs of a GPU; `seconds` are those of columns in each of its `bins`."""

    number: int
    machine: Machine
    bins: Ints
    seconds: Mapping[str, Floats]
    told: bool
    rank: int | None
    world: int | None
    place: tuple[int | None, int | None, int | None]
    gpipe: bool

    def on(self, name: str, first: int, size: int) -> Floats:
        """Return seconds of a column on the grid of a job."""
        out = np.zeros(size)
        out[self.bins - first] = self.seconds[name]
        return out


def find(con: duckdb.DuckDBPyConnection, gpus: Sequence[Gpu], told: Iterable[Columns]) -> Waits:
    """Return the jobs of which all ranks are there; `told` are the outlines of all GPUs."""
    offsets = wall_offsets(con)
    waits = Waits(jobs=[], bins=[], clashes=[])
    groups: dict[int, list[_Rank]] = defaultdict(list)
    for number, (gpu, columns) in enumerate(zip(gpus, told, strict=True)):
        waits.bins.append(((gpu.t0 + gpu.t1) // 2 + offsets.get(gpu.machine, 0)) // BIN_NS)
        one = _rank(number, gpu, waits.bins[-1], columns)
        if one.told and one.rank is not None and one.world is not None and one.world > 1:
            groups[one.world].append(one)
    for world, members in groups.items():
        ranks = sorted(members, key=lambda one: (one.rank, one.number))
        machines = {one.machine for one in ranks}
        if len(machines) > 1 and not machines <= set(offsets):
            waits.clashes.append("nodes without clock readings cannot be set side by side")
            continue
        if len({one.rank for one in ranks}) < len(ranks):
            waits.clashes.append(f"several GPUs say that they are the same rank of {world}")
        elif len(ranks) == world:
            waits.jobs.append(_job(ranks))
    return waits


def _rank(number: int, gpu: Gpu, bins: Ints, columns: Columns) -> _Rank:
    new = np.diff(bins, prepend=bins[0] - 1) != 0
    at = np.cumsum(new) - 1

    def mode(name: str) -> int | None:
        return _mode(columns[name]) if name in columns else None

    return _Rank(
        number=number,
        machine=gpu.machine,
        bins=bins[new],
        seconds={
            name: np.bincount(at, weights=np.nan_to_num(columns[name])).astype(np.float64)
            for name in ("spinning_s", "d_s", "working_s", "no_process_s")
        },
        told="comm_s" in columns and not np.isnan(columns["comm_s"]).any(),
        rank=mode("rank"),
        world=mode("world_size"),
        place=(mode("pipeline_stage"), mode("pipeline_stages"), mode("pipeline_batches")),
        gpipe="pipeline_schedule" in columns and "gpipe" in columns["pipeline_schedule"].tolist(),
    )


def _mode(values: Array) -> int | None:
    # What does not fit the column is no rank; false for NaN.
    known = values[np.abs(values) < 1 << 31].astype(np.int64)
    if len(known) == 0 or known.min() < 0:
        return None
    if known.min() == known.max():
        return int(known[0])
    each, count = np.unique(known, return_counts=True)
    return int(each[count.argmax()])


def _job(ranks: Sequence[_Rank]) -> Job:
    first = min(int(one.bins[0]) for one in ranks)
    size = max(int(one.bins[-1]) for one in ranks) - first + 1
    spin, covered, nobody, working = (
        np.array([one.on(name, first, size) for one in ranks])
        for name in ("spinning_s", "d_s", "no_process_s", "working_s")
    )
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
        members=[one.number for one in ranks],
        ranks=[one.rank or 0 for one in ranks],
        first_bin=first,
        spin=spin,
        covered=covered,
        late=late,
        wait=wait,
        working=working,
        pipeline=_pipeline(ranks),
        gone=(late >= 0) & absent[late, np.arange(size)],
    )


def _pipeline(ranks: Sequence[_Rank]) -> Pipeline | None:
    """Return the pipeline that all members tell of, alike; else None."""
    if len({one.place[1:] for one in ranks}) != 1:
        return None
    stages, batches = ranks[0].place[1:]
    places = [one.place[0] for one in ranks if one.place[0] is not None]
    if not stages or not batches or set(places) != set(range(stages)):
        return None
    return Pipeline(
        stage=np.array(places, dtype=np.int64),
        stages=stages,
        batches=batches,
        gpipe=ranks[0].gpipe,
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
