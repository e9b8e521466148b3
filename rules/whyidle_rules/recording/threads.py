"""What threads did around a window: ran, were ready without a CPU, were blocked in I/O, slept.

Processes are read once a second, so a window of an eighth of one is told from its neighbourhood.
CPU and run-queue time are counters; blocked time is one too where delay accounting is on. Where it
is off, and for waits that it does not count (opening files on FUSE), the time off the CPU is split
by the state that each reading found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.processes import Proc
from whyidle_rules.recording.series import Columns, Floats, Truths, counter

# Counters: one reading on each side, so that neighbours of a change are mixed for 1 s at most.
HALF_NS = NS_PER_S
LEAST_NS = 2 * NS_PER_S // 5
GAP_NS = 5 * NS_PER_S
# States: each reading is one draw. Four workers give 24 draws in 6 s: within 10 points of the
# truth two times of three.
STATES_HALF_NS = 3 * NS_PER_S
STATES_LEAST = 4
# Stalls that come now and then are met by few readings: those of a wider time tell more than those
# that found the thread while the GPU worked.
WIDE_HALF_NS = 15 * NS_PER_S
# Weighted by how empty the GPU was, a draw counts less: one whole one is needed.
WEIGHT_LEAST = 1.0
# One worker gives six draws in 6 s, and is 20 points off the truth one time of three. So what a
# wider time says, of when the GPU was as empty, counts as much as this many more.
WIDE_DRAWS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the time of some threads around each window; NaN where unknown. `count` of them lived.

    Parts of the time asleep: `in_socket` waits for the network, `in_poll` for any of some
    descriptors, `in_lock` for another thread; NaN where the kernel does not tell what for.
    `waits_wide` is of both of the latter, by readings of a wider time: one a second can meet the
    same part of each step for long. `run_when_empty` is the share of readings that found it on a
    CPU, of those while the GPU was empty; NaN with too few of them.
    """

    count: Floats
    run: Floats
    ready: Floats
    io: Floats
    stopped: Floats
    in_socket: Floats
    in_poll: Floats
    in_lock: Floats
    waits_wide: Floats
    run_when_empty: Floats
    covered_ns: Floats

    def with_run(self, run: Floats) -> Shares:
        """Return the same with more of the time on a CPU, which is taken from what is left."""
        return dataclasses.replace(self, run=run)

    def where(self, chosen: Truths) -> Shares:
        """Return the same for some windows; in others nobody lived."""
        parts = {
            part.name: np.where(chosen, getattr(self, part.name), np.nan)
            for part in dataclasses.fields(self)
        }
        return Shares(**{**parts, "count": np.where(chosen, self.count, 0.0)})

    @property
    def asleep(self) -> Floats:
        """What is left of the time."""
        return np.asarray(
            np.maximum(0.0, 1.0 - self.run - self.ready - self.io - np.nan_to_num(self.stopped))
        )


Emptiness = Callable[[Ints], Floats]


def shares(
    procs: Sequence[Proc],
    centres: Ints,
    emptiness: Emptiness | None = None,
    *,
    launches: bool = True,
) -> Shares:
    """Return what the main threads of processes did around each time.

    `emptiness` tells how empty the GPU was at some times: a thread that `launches` and sleeps while
    the GPU works says nothing of what it does while it is empty, so readings count as much as it
    was. Of other threads it says which readings of a wider time are alike.
    """
    return shares_of([proc.rows for proc in procs], centres, emptiness, launches=launches)


def shares_of(
    threads: Sequence[Columns],
    centres: Ints,
    emptiness: Emptiness | None = None,
    *,
    launches: bool = True,
) -> Shares:
    """Return the same of threads, by their readings."""
    size = len(centres)
    covered, run, ready, blkio = (np.zeros(size) for _ in range(4))
    count = np.zeros(size)
    ready_known, blkio_known = np.ones(size, dtype=bool), np.ones(size, dtype=bool)
    blind = False
    times: list[Ints] = []
    draws: dict[str, list[Floats]] = {name: [] for name in ("waits", "runs", *_STATES)}
    for own in threads:
        ns = own["mono_ns"].astype(np.int64)
        growth, seen = counter(ns, own["run_ns"], gap_ns=GAP_NS).around(centres, HALF_NS, LEAST_NS)
        run += growth
        covered += seen
        count += seen > 0
        for name, total, known in (
            ("ready_ns", ready, ready_known),
            ("blkio_ns", blkio, blkio_known),
        ):
            growth, told = counter(ns, own[name], gap_ns=GAP_NS).around(centres, HALF_NS, LEAST_NS)
            total += growth
            known &= (told > 0) | (seen == 0)
        # Rows may be held twice, by pieces of a recording that overlap.
        drawn = ~np.isnan(own["io"].astype(np.float64)) & (np.diff(ns, prepend=ns[:1] - 1) > 0)
        times.append(ns[drawn])
        for name, values in draws.items():
            values.append(np.nan_to_num(own[name][drawn].astype(np.float64)))
        blind |= bool(((own["channels"] != 1) & (own["waits"] == 1))[drawn].any())
    known = covered > 0
    whole = np.where(known, covered, np.nan)
    run_share = np.clip(run / whole, 0.0, 1.0)
    ready_share = np.where(ready_known, np.clip(ready / whole, 0.0, 1.0 - run_share), np.nan)
    off = np.maximum(0.0, 1.0 - run_share - ready_share)
    counted = np.where(blkio_known, np.minimum(blkio / whole, off), np.nan)
    looks = _Looks(times, draws["waits"], draws["io"], centres, emptiness, launches)
    parts = {name: np.asarray(off * looks.share(draws[name])) for name in _STATES}
    either = [poll + lock for poll, lock in zip(draws["in_poll"], draws["in_lock"], strict=True)]
    parts["waits_wide"] = np.asarray(off * looks.wide_share(either))
    if blind:
        parts.update({name: np.full(size, np.nan) for name in (*_CHANNELS, "waits_wide")})
    return Shares(
        count=count,
        run=run_share,
        ready=ready_share,
        io=np.asarray(np.fmax(counted, parts.pop("io"))),
        **parts,
        run_when_empty=looks.running(draws["runs"]),
        covered_ns=covered,
    )


# Columns of the readings that tell where a thread off the CPU was, and those of them that only a
# wait channel tells.
_CHANNELS = ("in_socket", "in_poll", "in_lock")
_STATES = ("io", "stopped", *_CHANNELS)


class _Looks:
    """Readings of threads as draws: of those that found one off the CPU, the share somewhere.

    NaN with too few of them.
    """

    def __init__(
        self,
        times: Sequence[Ints],
        waits: Sequence[Floats],
        io: Sequence[Floats],
        centres: Ints,
        emptiness: Emptiness | None,
        launches: bool,
    ) -> None:
        self._size = len(centres)
        self._launches = launches
        self._none = not times
        if self._none:
            return
        when = np.concatenate(times)
        self._order = np.argsort(when, kind="stable")
        when = when[self._order]
        self._when = when
        self._near = self._reach(centres, STATES_HALF_NS)
        self._off = np.maximum(self._joined(waits), self._joined(io))
        self._weight = emptiness(when) if emptiness is not None and len(when) else None
        self._wide = self._reach(centres, WIDE_HALF_NS)
        # Threads that were found on a CPU every time were not in I/O either.
        self._enough = (self._near[1] - self._near[0]) >= STATES_LEAST

    def share(self, found: Sequence[Floats]) -> Floats:
        """Return the share of one kind of reading, of those off the CPU."""
        if self._none:
            return np.full(self._size, np.nan)
        values = self._joined(found)
        near, off = _summed(values, self._near), _summed(self._off, self._near)
        share = near / np.maximum(off, 1.0)
        if self._weight is not None and self._launches:
            share = self._while_empty(values, self._off, share)
        elif self._weight is not None:
            draws = _summed(self._off * self._weight, self._wide)
            wide = _summed(values * self._weight, self._wide) / np.maximum(draws, 1e-9)
            pulled = (near + WIDE_DRAWS * wide) / (off + WIDE_DRAWS)
            share = np.where(draws >= WEIGHT_LEAST, pulled, share)
        return np.asarray(np.where(self._enough, share, np.nan))

    def wide_share(self, found: Sequence[Floats]) -> Floats:
        """Return the share of one kind of reading in a wider time, of those off the CPU."""
        if self._none:
            return np.full(self._size, np.nan)
        of = self._off if self._weight is None else self._off * self._weight
        values = self._joined(found) * (1.0 if self._weight is None else self._weight)
        share = _summed(values, self._wide) / np.maximum(_summed(of, self._wide), 1e-9)
        return np.asarray(np.where(self._enough, share, np.nan))

    def running(self, found: Sequence[Floats]) -> Floats:
        """Return the share of readings on the CPU, of all while the GPU was empty."""
        if self._none or self._weight is None or not self._launches:
            return np.full(self._size, np.nan)
        values = self._joined(found)
        return self._while_empty(values, np.ones(len(values)), np.full(self._size, np.nan))

    def _while_empty(self, values: Floats, of: Floats, otherwise: Floats) -> Floats:
        """Return a share of readings weighted by how empty the GPU was: near ones, else wide."""
        assert self._weight is not None
        share = otherwise
        for reach in (self._wide, self._near):
            draws = _summed(of * self._weight, reach)
            found = _summed(values * self._weight, reach) / np.maximum(draws, 1e-9)
            share = np.where(draws >= WEIGHT_LEAST, found, share)
        return np.asarray(share)

    def _reach(self, centres: Ints, half_ns: int) -> tuple[Ints, Ints]:
        return (
            np.searchsorted(self._when, centres - half_ns, side="left"),
            np.searchsorted(self._when, centres + half_ns, side="right"),
        )

    def _joined(self, parts: Sequence[Floats]) -> Floats:
        return np.asarray(np.concatenate(parts)[self._order])


def _summed(values: Floats, reach: tuple[Ints, Ints]) -> Floats:
    total = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray(total[reach[1]] - total[reach[0]])


def computing(procs: Sequence[Proc], centres: Ints) -> Floats:
    """Return the CPU time of all threads of processes, of their time; NaN where unknown."""
    total, covered = np.zeros(len(centres)), np.zeros(len(centres))
    for proc in procs:
        own = counter(proc.rows["mono_ns"].astype(np.int64), proc.rows["cpu_ns"], gap_ns=GAP_NS)
        growth, seen = own.around(centres, HALF_NS, LEAST_NS)
        total += growth
        covered += seen
    return np.asarray(total / np.where(covered > 0, covered, np.nan))


def grown(procs: Sequence[Proc], name: str, centres: Ints, half_ns: int) -> Floats:
    """Return how much a counter of all processes grew per second around each time; else NaN."""
    total, covered = np.zeros(len(centres)), np.zeros(len(centres))
    for proc in procs:
        own = counter(proc.rows["mono_ns"].astype(np.int64), proc.rows[name], gap_ns=GAP_NS)
        growth, seen = own.around(centres, half_ns, LEAST_NS)
        total += growth * 1e9 / np.maximum(seen, 1.0)
        covered += seen
    return np.asarray(np.where(covered > 0, total, np.nan))
