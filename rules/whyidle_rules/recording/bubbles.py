"""How much of a pipeline's time is its schedule's bubble, where samples alone tell too little.

Steps of a pipeline are often as short as a sampling window, so that each window holds a bit of its
bubble, and none shows how full computing alone would fill the chip: what is booked as spinning is
then too little. But steps cannot follow each other faster than the schedule lets them. How much
longer one stage computes than another shows in how long its tensor cores or its memory are busy, or
its SMs where stages do not run the same kernels. So where spinning is seen, and is said to be
possibly more, it is taken to be what the schedule needs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whyidle_rules.intervals import Ints
from whyidle_rules.pipeline import Schedule, period_s
from whyidle_rules.recording.series import Floats
from whyidle_rules.recording.spin import COMM_FILL_LEAST, COMM_FILL_MOST, COMPUTE_FILL_MOST

# Ten seconds: many steps, and short enough for a stall to stand out.
BLOCK_BINS = 20
# Of the computing, a part lies outside of the schedule: the optimizer, the loss, the data.
INSIDE_RATIO = 0.9
# Seen to spin for less than this share of what the schedule needs, it may not have run; unless
# ranks tell of steps, which are over sooner than a window where nothing of it shows.
SEEN_RATIO = 0.5
STEPS_LEAST = 3
# The same where a stage would wait for longer than in a pipeline of even stages: it may run kernels
# that fill the chip less than those of the others.
SEEN_UNEVEN_RATIO = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline: the stage of each member, stages, micro-batches of a step, and its schedule.

    `virtual` stages run on each member in turns. `alone`: nothing else is communicated, as far as
    is known; where ranks share stages, or options alone tell of the pipeline, there is more.
    `exact`: its schedule is one of those that are replayed, and is not only taken for one.
    """

    stage: Ints
    stages: int
    batches: int
    schedule: Schedule
    virtual: int
    alone: bool
    exact: bool


def raised(
    pipeline: Pipeline,
    spun: Floats,
    more: Floats,
    empty: Floats,
    working: Floats,
    covered: Floats,
    steps: Floats,
    kernels: Sequence[Floats] = (),
) -> Floats:
    """Return which share of `more` was spinning too, by member and bin; all are seconds.

    `spun` is the least that each spun, `more` what it may have spun besides, as a part of what
    counts as `working`, of `covered` in all; `steps` are those that it ended, as far as it told.
    `kernels` are the seconds in which tensor cores and memory were busy, if all run the same ones.
    """
    found = np.zeros_like(spun)
    resident = spun + working
    # What one does before the others have begun is no step.
    together = np.flatnonzero(np.all(resident > 0, axis=0))
    for begin in range(0, spun.shape[1], BLOCK_BINS):
        bins = together[(together >= begin) & (together < begin + BLOCK_BINS)]
        seen, rest, void, whole, held = (
            values[:, bins].sum(axis=1) for values in (spun, more, empty, covered, resident)
        )
        busy = [values[:, bins].sum(axis=1) for values in kernels]
        least, even = _waiting(pipeline, held, seen + rest, busy)
        # Time in which the GPU stood empty belongs to no step, or is the step's bubble already.
        needed = least * (whole - void)
        needed = np.where(seen >= SEEN_UNEVEN_RATIO * needed, needed, even * (whole - void))
        # More than there can have been: it did not run as it was told.
        possible = needed <= seen + rest
        needed = np.minimum(needed, seen + rest)
        steps_told = bool((steps[:, bins].sum(axis=1) >= STEPS_LEAST).all())
        runs = pipeline.exact and steps_told and bool(possible.all())
        enough = (seen >= SEEN_RATIO * needed) | runs
        lacking = np.where(enough, np.maximum(needed - seen, 0.0), 0.0)
        share = np.where(rest > 0, lacking / np.where(rest > 0, rest, 1.0), 0.0)
        found[:, bins] = np.clip(share, 0.0, 1.0)[:, None]
    return found


def _waiting(
    pipeline: Pipeline, resident: Floats, most: Floats, busy: Sequence[Floats]
) -> tuple[Floats, Floats]:
    """Return which share of a step each member waits by its schedule, at the least.

    The second is the same, but no more than with even stages. `resident` is how long kernels were,
    `most` how much of that was spinning at the most.
    """
    shape = (pipeline.batches, pipeline.schedule, pipeline.virtual)
    even = np.full(len(resident), _even(pipeline.stages, *shape))
    # Polling uses neither tensor cores nor, to speak of, memory. The one by which a stage computed
    # longer counts.
    shares = [values / values.mean() for values in busy if values.min() > 0]
    if shares:
        computing = np.maximum.reduce(shares)
    else:
        # How many SMs were active for how long, less what polling alone would hold: in proportion
        # to the computing, where polling holds no more than that; then stages differ by more.
        active = resident * COMPUTE_FILL_MOST - most * (COMPUTE_FILL_MOST - COMM_FILL_MOST)
        computing = active - resident * COMM_FILL_LEAST
    by_stage = np.array(
        [computing[pipeline.stage == stage].mean() for stage in range(pipeline.stages)]
    )
    if by_stage.min() <= 0:
        return even, even
    period = period_s(INSIDE_RATIO * by_stage, (1 - INSIDE_RATIO) * by_stage, *shape)
    waiting = np.maximum(1.0 - by_stage[pipeline.stage] / period, 0.0)
    return waiting, np.minimum(waiting, even)


@functools.lru_cache
def _even(stages: int, batches: int, schedule: Schedule, virtual: int) -> float:
    """Return the same of a pipeline of even stages."""
    ones = np.ones(stages)
    inside, outside = INSIDE_RATIO * ones, (1 - INSIDE_RATIO) * ones
    return 1.0 - 1.0 / period_s(inside, outside, batches, schedule, virtual)
