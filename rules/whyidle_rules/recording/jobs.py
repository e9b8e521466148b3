"""The jobs of a recording: ranks on one grid of wall time, for what only all of them can tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.pipeline import Schedule
from whyidle_rules.recording import bubbles as pipelines
from whyidle_rules.recording import linked, spin
from whyidle_rules.recording.bubbles import Pipeline
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.known import Known
from whyidle_rules.recording.meetings import Clocks, Meetings, relate
from whyidle_rules.recording.runs import Run, group, mode, runs
from whyidle_rules.recording.series import Array, Floats, Truths
from whyidle_rules.recording.spans import Machine
from whyidle_rules.recording.windows import Gpu

BIN_NS = NS_PER_S // 2
# Ranks differ by this much of a bin without any waiting: fills are told to a few points.
EQUAL_RATIO = 0.05
# A bin that is covered for less than half by some rank says nothing of it.
COVERED_RATIO = 0.5
# For so much of a bin without a process, a rank is gone and not late.
GONE_RATIO = 0.5
# Of the lateness of all ranks, so much is one's own where calls name who came last.
CLEAR_RATIO = 0.5

Cause = tuple[str, str]
SLOW: Cause = ("slow_compute", "more_work")


@dataclass(slots=True)
class Job:
    """Ranks of one job on a common grid of bins of wall time.

    `members` are numbers of GPUs, in order of their ranks; `own` the windows of each that are the
    job's, `bins` the bin of each of those. Arrays have a row for each member and a column for each
    bin: seconds in communication, of windows, working. Communication is what spins on the GPU and
    what the launching thread waits for with an empty one. `late` is the member that others waited
    for in each bin, -1 for nobody; `raised` the share of what may have been spinning that was, as a
    pipeline's schedule says; `wait` the share of its communication that each one waited, and `gone`
    says in which bins the late one had no process. `chain`: they are stages of a pipeline of which
    no member tells, as the bytes of their links do; `collective`: nothing tells of a pipeline where
    bytes or pages would.
    """

    members: list[int]
    ranks: list[int]
    own: list[slice]
    bins: list[Ints]
    spin: Floats
    covered: Floats
    late: Ints
    wait: Floats
    gone: Truths
    working: Floats
    raised: Floats
    pipeline: Pipeline | None = None
    chain: bool = False
    collective: bool = False
    bubbles: tuple[Floats, Floats] | None = None
    clocks: dict[str, Floats] = field(default_factory=dict)
    causes: dict[Cause, Floats] = field(default_factory=dict)


@dataclass(slots=True)
class Waits:
    """The jobs of a recording, and why there are no more."""

    jobs: list[Job]
    clashes: list[str]
    clocks: Clocks

    def of(self, gpu: int) -> list[tuple[Job, int]]:
        """Return the jobs of a GPU and its place in each; several where ranks were given anew."""
        return [(job, job.members.index(gpu)) for job in self.jobs if gpu in job.members]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What a job needs of a rank; `seconds` are those of columns in each of its `at`, bins once."""

    run: Run
    bins: Ints
    at: Ints
    seconds: Mapping[str, Floats]
    place: tuple[int | None, int | None, int | None, int | None]
    schedule: str | None
    probed: bool

    def on(self, name: str, first: int, size: int) -> Floats:
        """Return seconds of a column on the grid of a job."""
        out = np.zeros(size)
        out[self.at - first] = self.seconds[name]
        return out


def find(
    con: duckdb.DuckDBPyConnection,
    gpus: Sequence[Gpu],
    outlines: Iterable[Columns],
    known: Mapping[Machine, Known],
) -> Waits:
    """Return the jobs of which all ranks are there; `outlines` are of all GPUs."""
    clocks = relate(con, {gpu.machine for gpu in gpus})
    ranks: dict[tuple[int, int], _Rank] = {}
    for number, (gpu, columns) in enumerate(zip(gpus, outlines, strict=True)):
        bins = ((gpu.t0 + gpu.t1) // 2 + clocks.offset(gpu.machine)) // BIN_NS
        for run in runs(number, gpu, known[gpu.machine], columns):
            ranks[number, run.own.start] = _rank(run, bins[run.own], columns, gpu)
    grouped, clashes = group([one.run for one in ranks.values()], gpus)
    waits = Waits(jobs=[], clashes=clashes, clocks=clocks)
    meetings = Meetings(con, clocks) if grouped else None
    if meetings is not None and len(grouped) == 1:  # ranks of several jobs have the same numbers
        meetings.learn(con, {run.rank: min(run.identities) for run in grouped[0] if run.identities})
    for members in grouped:
        machines = {gpus[run.gpu].machine for run in members}
        if len(machines) > 1 and not machines <= clocks.related:
            waits.clashes.append("nodes without clock readings cannot be set side by side")
            continue
        kernels = [gpus[run.gpu].kernels_s for run in members]
        alike = all(spin.same_kernels(kernels[0], other) for other in kernels)
        job = _job([ranks[run.gpu, run.own.start] for run in members], alike=alike)
        if job.pipeline is None:
            told = all(ranks[run.gpu, run.own.start].probed for run in members)
            shape = linked.shape([gpus[run.gpu] for run in members])
            job.chain, job.collective = shape == "chain", shape == "ring" or told
        if meetings is not None:
            _late_by_arrival(job, members, meetings, _first(members, ranks))
        waits.jobs.append(job)
    return waits


def _first(members: Sequence[Run], ranks: Mapping[tuple[int, int], _Rank]) -> int:
    return min(int(ranks[run.gpu, run.own.start].at[0]) for run in members)


def _rank(run: Run, bins: Ints, columns: Columns, gpu: Gpu) -> _Rank:
    new = np.diff(bins, prepend=bins[0] - 1) != 0
    at = np.cumsum(new) - 1
    own = {name: columns[name][run.own] for name in columns}
    nothing = np.full(len(bins), np.nan)
    length = own["d_s"]
    host, message = (own.get(name, nothing) for name in ("host_coll_s", "host_p2p_s"))
    dark = np.isnan(host)
    told = ~np.isnan(own.get("comm_s", nothing)) | ~dark
    windows = {
        name: own.get(name, nothing)
        for name in ("spinning_s", "working_s", "no_process_s", "underfilled_s", "empty_s", "steps")
    }
    windows["host_s"] = np.nan_to_num(host) + np.nan_to_num(message)
    windows["dark_s"], windows["d_s"] = length * dark, length * told
    windows["tensor_s"], windows["memory_s"] = gpu.kernels[:, run.own] * length

    def usual(name: str) -> int | None:
        return mode(own[name]) if name in own else None

    return _Rank(
        run=run,
        bins=bins,
        at=bins[new],
        seconds={
            name: np.bincount(at, weights=np.nan_to_num(values)).astype(np.float64)
            for name, values in windows.items()
        },
        place=(
            usual("pipeline_stage"),
            usual("pipeline_stages"),
            usual("pipeline_batches"),
            usual("pipeline_virtual"),
        ),
        schedule=_word(own.get("pipeline_schedule")),
        probed=usual("probed") == 1,
    )


def _word(values: Array | None) -> str | None:
    """Return the last word of a column that is one."""
    found = [] if values is None else [word for word in values.tolist() if word is not None]
    return found[-1] if found else None


def _job(ranks: Sequence[_Rank], *, alike: bool) -> Job:
    first = min(int(one.at[0]) for one in ranks)
    size = max(int(one.at[-1]) for one in ranks) - first + 1
    spun, host, dark, covered, nobody, working = (
        np.array([one.on(name, first, size) for one in ranks])
        for name in ("spinning_s", "host_s", "dark_s", "d_s", "no_process_s", "working_s")
    )
    pipeline = _pipeline(ranks)
    raised = np.zeros_like(spun)
    if pipeline is not None:
        more, empty, steps = (
            np.array([one.on(name, first, size) for one in ranks])
            for name in ("underfilled_s", "empty_s", "steps")
        )
        kernels = [
            np.array([one.on(name, first, size) for one in ranks])
            for name in ("tensor_s", "memory_s")
        ]
        raised = pipelines.raised(
            pipeline, spun, more, empty, working, covered, steps, kernels if alike else ()
        )
        spun, working = spun + raised * more, working - raised * more
    spin = spun + host
    share = spin / np.maximum(covered, 1e-9)
    least = share.min(axis=0) + EQUAL_RATIO
    whole = (covered >= COVERED_RATIO * BIN_NS / 1e9).all(axis=0)
    # A rank that does not say whether it waits is not late where others say that they do; one
    # without a process has nobody to say it.
    silent = dark - nobody > (1 - COVERED_RATIO) * np.maximum(covered, 1e-9)
    whole &= (host <= 0).all(axis=0) | ~silent.any(axis=0)
    wait = np.where(whole, np.maximum(0.0, share - least) / np.maximum(share, 1e-9), np.nan)
    # Of several that do not communicate, one that is gone comes last.
    absent = nobody > GONE_RATIO * covered
    late = np.where(
        np.nan_to_num(wait).max(axis=0) > 0, (share - absent.astype(np.float64)).argmin(axis=0), -1
    )
    return Job(
        members=[one.run.gpu for one in ranks],
        ranks=[one.run.rank for one in ranks],
        own=[one.run.own for one in ranks],
        bins=[one.bins - first for one in ranks],
        spin=spin,
        covered=covered,
        late=late,
        wait=wait,
        working=working,
        pipeline=pipeline,
        raised=raised,
        gone=(late >= 0) & absent[late, np.arange(size)],
    )


def _late_by_arrival(job: Job, members: Sequence[Run], meetings: Meetings, first: int) -> None:
    """Name the rank that came last to calls, where calls tell it: shares of time may be even."""
    size = job.spin.shape[1]
    lateness = meetings.lateness([run.identities for run in members], first, size, BIN_NS)
    if lateness is None:
        return
    every = np.arange(size)
    latest, whole = lateness.argmax(axis=0), lateness.sum(axis=0)
    clear = lateness[latest, every] >= CLEAR_RATIO * np.maximum(whole, 1e-9)
    clear &= (whole > 0) & (job.late >= 0) & ~job.gone
    # Who waits itself for most of the time was late once, and is not what the others wait for.
    waited = np.nan_to_num(job.wait) * job.spin
    clear &= waited[latest, every] <= CLEAR_RATIO * waited.max(axis=0)
    job.late = np.where(clear, latest, job.late)


def _is_replayed(schedule: str | None, stages: int, batches: int, virtual: int) -> bool:
    """Say whether a schedule is replayed as it is; what is not may need less waiting."""
    if schedule == "interleaved":
        return virtual > 1 and batches % stages == 0
    return schedule in ("1f1b", "gpipe") and virtual == 1


def _pipeline(ranks: Sequence[_Rank]) -> Pipeline | None:
    """Return the pipeline that all members tell of, alike; else None."""
    if len({one.place[1:] for one in ranks}) != 1:
        return None
    stages, batches, virtual = ranks[0].place[1:]
    places = [one.place[0] for one in ranks if one.place[0] is not None]
    if not stages or not batches or set(places) != set(range(stages)):
        return None
    schedules: dict[str | None, Schedule] = {"gpipe": "gpipe", "interleaved": "interleaved"}
    return Pipeline(
        stage=np.array(places, dtype=np.int64),
        stages=stages,
        batches=batches,
        schedule=schedules.get(ranks[0].schedule, "1f1b"),
        virtual=virtual or 1,
        alone=len(ranks) == stages and all(one.probed for one in ranks),
        exact=all(_is_replayed(one.schedule, stages, batches, virtual or 1) for one in ranks),
    )
