"""What threads did around a window: ran, were ready without a CPU, were blocked in I/O, slept.

Processes are read once a second, so a window of an eighth of one is told from its neighbourhood.
CPU and run-queue time are counters; blocked time is one too where delay accounting is on. Where it
is off, and for waits that it does not count (opening files on FUSE), the time off the CPU is split
by the state that each reading found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.processes import Proc
from whyidle_rules.recording.series import Floats, counter

# Counters: one reading on each side, so that neighbours of a change are mixed for 1 s at most.
HALF_NS = NS_PER_S
LEAST_NS = 2 * NS_PER_S // 5
GAP_NS = 5 * NS_PER_S
# States: each reading is one draw. Four workers give 24 draws in 6 s: within 10 points of the
# truth two times of three.
STATES_HALF_NS = 3 * NS_PER_S
STATES_LEAST = 4
# Weighted by how empty the GPU was, a draw counts less: one whole one is needed.
WEIGHT_LEAST = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the time of some threads around each window; NaN where unknown. `count` of them lived."""

    count: Floats
    run: Floats
    ready: Floats
    io: Floats
    stopped: Floats
    covered_ns: Floats

    @property
    def asleep(self) -> Floats:
        """What is left of the time."""
        return np.asarray(
            np.maximum(0.0, 1.0 - self.run - self.ready - self.io - np.nan_to_num(self.stopped))
        )


def shares(
    procs: Sequence[Proc], centres: Ints, emptiness: Callable[[Ints], Floats] | None = None
) -> Shares:
    """Return what the main threads of processes did around each time.

    `emptiness` tells how empty the GPU was at some times: a thread that sleeps while the GPU works
    says nothing of what it does while it is empty, so readings count as much as it was.
    """
    size = len(centres)
    covered, run, ready, blkio = (np.zeros(size) for _ in range(4))
    count = np.zeros(size)
    ready_known, blkio_known = np.ones(size, dtype=bool), np.ones(size, dtype=bool)
    times: list[Ints] = []
    io: list[Floats] = []
    stopped: list[Floats] = []
    waits: list[Floats] = []
    for proc in procs:
        own = proc.rows
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
        drawn = ~np.isnan(own["io"].astype(np.float64))
        times.append(ns[drawn])
        io.append(own["io"][drawn].astype(np.float64))
        stopped.append(own["stopped"][drawn].astype(np.float64))
        waits.append(np.nan_to_num(own["waits"][drawn].astype(np.float64)))
    known = covered > 0
    whole = np.where(known, covered, np.nan)
    run_share = np.clip(run / whole, 0.0, 1.0)
    ready_share = np.where(ready_known, np.clip(ready / whole, 0.0, 1.0 - run_share), np.nan)
    off = np.maximum(0.0, 1.0 - run_share - ready_share)
    counted = np.where(blkio_known, np.minimum(blkio / whole, off), np.nan)
    found = off * _drawn(times, io, waits, centres, emptiness)
    return Shares(
        count=count,
        run=run_share,
        ready=ready_share,
        io=np.asarray(np.fmax(counted, found)),
        stopped=np.asarray(off * _drawn(times, stopped, waits, centres, emptiness)),
        covered_ns=covered,
    )


def _drawn(
    times: Sequence[Ints],
    io: Sequence[Floats],
    waits: Sequence[Floats],
    centres: Ints,
    emptiness: Callable[[Ints], Floats] | None,
) -> Floats:
    """Return the share of readings off the CPU that found a thread in I/O; NaN with too few."""
    if not times:
        return np.full(len(centres), np.nan)
    order = np.argsort(np.concatenate(times), kind="stable")
    when = np.concatenate(times)[order]
    in_io = np.concatenate(io)[order]
    off = np.maximum(np.concatenate(waits)[order], in_io)
    low = np.searchsorted(when, centres - STATES_HALF_NS, side="left")
    high = np.searchsorted(when, centres + STATES_HALF_NS, side="right")

    def summed(values: Floats) -> Floats:
        total = np.concatenate(([0.0], np.cumsum(values)))
        return np.asarray(total[high] - total[low])

    share = summed(in_io) / np.maximum(summed(off), 1.0)
    if emptiness is not None and len(when):
        weight = emptiness(when)
        draws = summed(off * weight)
        weighted = summed(in_io * weight) / np.maximum(draws, 1e-9)
        share = np.where(draws >= WEIGHT_LEAST, weighted, share)
    # Threads that were found on a CPU every time were not in I/O either.
    enough = (high - low) >= STATES_LEAST
    return np.asarray(np.where(enough, share, np.nan))


def grown(procs: Sequence[Proc], name: str, centres: Ints, half_ns: int) -> Floats:
    """Return how much a counter of all processes grew per second around each time; else NaN."""
    total, covered = np.zeros(len(centres)), np.zeros(len(centres))
    for proc in procs:
        own = counter(proc.rows["mono_ns"].astype(np.int64), proc.rows[name], gap_ns=GAP_NS)
        growth, seen = own.around(centres, half_ns, LEAST_NS)
        total += growth * 1e9 / np.maximum(seen, 1.0)
        covered += seen
    return np.asarray(np.where(covered > 0, total, np.nan))
