"""How much longer ranks computed because their clocks were lower than those of their peers.

Only the difference counts: a rank that has more to do at the clock of all others has more work.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np

from whyidle_rules.intervals import Ints
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.jobs import BIN_NS, SLOW, Cause, Job
from whyidle_rules.recording.series import Floats, Truths

POWER: Cause = ("slow_compute", "power_cap")
HEAT: Cause = ("slow_compute", "heat")
CLOCK: Cause = ("slow_compute", "low_clock")
# Clocks of healthy ranks differ by a few steps of 15 MHz.
LOWER_RATIO = 0.95
# For more than this share of the time that it computed, the driver held its clock down for it.
REASON_RATIO = 0.5
# Steps of both ranks have to lie wholly in what is compared, or the phase of one would be excess.
AROUND_BINS = 4_000_000_000 // BIN_NS


def add(job: Job, row: int, at: Ints, columns: Columns) -> None:
    """Add up a member's clock and the time for which it was held down; `at` are bins of windows."""
    shape = job.working.shape
    if not job.clocks:
        job.clocks = {name: np.zeros(shape) for name in ("power", "heat")}
        job.clocks["clock"] = np.full(shape, np.nan)
    working, size = np.nan_to_num(columns["working_s"]), shape[1]
    for name in ("power", "heat"):
        if f"{name}_slowed_s" in columns:
            held = np.nan_to_num(columns[f"{name}_slowed_s"])
            job.clocks[name][row] = np.bincount(at, weights=held, minlength=size)
    if "sm_clock_megahertz" in columns:
        clock = columns["sm_clock_megahertz"]
        known = ~np.isnan(clock) & (working > 0)
        weight = np.bincount(at[known], weights=working[known], minlength=size)
        sums = np.bincount(at[known], weights=(working * clock)[known], minlength=size)
        job.clocks["clock"][row] = np.where(weight > 0, sums / np.maximum(weight, 1e-12), np.nan)


def lost(job: Job) -> dict[Cause, Floats]:
    """Return what a clock below those of its peers cost each member by bin, by its reason.

    Working seconds, at most: kernels that wait for memory lose less than the clock does. To be
    called once all members are added.
    """
    clock, power, heat = (job.clocks[name] for name in ("clock", "power", "heat"))
    cost = job.working * _lower(clock)
    hot = heat > REASON_RATIO * job.working
    capped = ~hot & (power > REASON_RATIO * job.working)
    return {
        HEAT: np.where(hot, cost, 0.0),
        POWER: np.where(capped, cost, 0.0),
        CLOCK: np.where(~hot & ~capped, cost, 0.0),
    }


def _lower(clock: Floats) -> Floats:
    """Return by how much each clock is below the median of the others; 0 where that is unknown.

    A rank that does not compute in a bin has the clock that it had last.
    """
    held = _held(clock)
    out = np.zeros(clock.shape)
    if np.isnan(held).all():
        return out
    for row in range(len(clock)):
        with warnings.catch_warnings():
            # Bins in which no other one is known are all NaN.
            warnings.simplefilter("ignore", RuntimeWarning)
            peers = np.nanmedian(np.delete(held, row, axis=0), axis=0)
        ratio = clock[row] / peers
        out[row] = np.where(ratio < LOWER_RATIO, 1.0 - ratio, 0.0)
    return out


def _held(values: Floats) -> Floats:
    """Return each row with what is unknown as it was last."""
    places = np.where(np.isnan(values), 0, np.arange(values.shape[1]))
    last = np.maximum.accumulate(places, axis=1)
    return np.asarray(np.take_along_axis(values, last, axis=1))


def apart(
    job: Job, row: int, weights: Mapping[tuple[int, str, str], float], cost: Mapping[Cause, Floats]
) -> dict[tuple[int, str, str], float]:
    """Return the weights of what a member's waits arose from, with clocks apart from more work.

    Of what the late one computed more around those waits, its clock explains what it cost.
    """
    found: dict[tuple[int, str, str], float] = {}
    waited = (job.spin[row] * np.nan_to_num(job.wait[row]) > 0) & ~job.gone
    for (number, *cause), weight in weights.items():
        left = weight
        if tuple(cause) == SLOW:
            late = job.members.index(number)
            near = _around(waited & (job.late == late))
            more = float((job.working[late] - job.working[row])[near].sum())
            each = {kind: float(values[late, near].sum()) for kind, values in cost.items()}
            whole = max(more, sum(each.values()))
            for kind, seconds in each.items():
                if seconds > 0:
                    part = weight * seconds / whole
                    found[number, kind[0], kind[1]] = part
                    left -= part
        found[number, cause[0], cause[1]] = max(0.0, left)
    return found


def _around(chosen: Truths) -> Truths:
    """Return whether each bin is near one that is chosen."""
    count = np.convolve(chosen.astype(np.float64), np.ones(2 * AROUND_BINS + 1))
    return np.asarray(count[AROUND_BINS : AROUND_BINS + len(chosen)] > 0.5)
