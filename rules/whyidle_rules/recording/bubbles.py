"""How much of a pipeline's time is its schedule's bubble, where samples alone tell too little.

Steps of a pipeline are often as short as a sampling window, so that each window holds a bit of its
bubble, and none shows how full computing alone would fill the chip: what is booked as spinning is
then too little. But a schedule cannot have less of a bubble than it has with even stages. So where
spinning is seen, and is said to be possibly more, it is taken to be what the schedule needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whyidle_rules.intervals import Ints
from whyidle_rules.pipeline import Schedule, bubble_ratio, of_totals
from whyidle_rules.recording.series import Floats

# Ten seconds: many steps, and short enough for a stall to stand out.
BLOCK_BINS = 20
# Of the computing, a part lies outside of the schedule: the optimizer, the loss, the data.
INSIDE_RATIO = 0.9
# Seen to spin for less than this share of what the schedule needs, it may not have run at all.
SEEN_RATIO = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline: the stage of each member, stages, micro-batches of a step, and its schedule.

    `virtual` stages run on each member in turns. `alone`: nothing else is communicated, as far as
    is known; where ranks share stages, or options alone tell of the pipeline, there is more.
    """

    stage: Ints
    stages: int
    batches: int
    schedule: Schedule
    virtual: int
    alone: bool


def raised(
    pipeline: Pipeline,
    spun: Floats,
    more: Floats,
    empty: Floats,
    working: Floats,
    covered: Floats,
) -> Floats:
    """Return which share of `more` was spinning too, by member and bin; all are seconds.

    `spun` is the least that each spun, `more` what it may have spun besides, as a part of what
    counts as `working`, of `covered` in all.
    """
    found = np.zeros_like(spun)
    for begin in range(0, spun.shape[1], BLOCK_BINS):
        bins = slice(begin, begin + BLOCK_BINS)
        seen, rest, void, whole = (
            values[:, bins].sum(axis=1) for values in (spun, more, empty, covered)
        )
        least = INSIDE_RATIO * _waiting(pipeline, working[:, bins].sum(axis=1) - rest)
        # Time in which the GPU stood empty belongs to no step, or is the step's bubble already.
        needed = np.minimum(least * (whole - void), seen + rest)
        lacking = np.where(seen >= SEEN_RATIO * needed, np.maximum(needed - seen, 0.0), 0.0)
        share = np.where(rest > 0, lacking / np.where(rest > 0, rest, 1.0), 0.0)
        found[:, bins] = np.clip(share, 0.0, 1.0)[:, None]
    return found


def _waiting(pipeline: Pipeline, computing: Floats) -> Floats:
    """Return which share of a step each member waits by its schedule, at the least.

    `computing` is how long each computed, at the least. With even stages all wait alike; the
    longest one waits for shorter ones, and less.
    """
    shape = (pipeline.batches, pipeline.schedule, pipeline.virtual)
    ratio = bubble_ratio(pipeline.stages, *shape)
    even = np.full(len(computing), ratio / (1.0 + ratio))
    by_stage = np.array(
        [computing[pipeline.stage == stage].mean() for stage in range(pipeline.stages)]
    )
    if by_stage.min() <= 0:
        return even
    step_s = of_totals(by_stage, *shape).step_s
    return np.asarray(np.clip(1.0 - by_stage[pipeline.stage] / step_s, 0.0, even))
