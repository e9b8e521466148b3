"""Ranks of a pipeline: how much of their waiting the schedule costs, unequal stages, a late stage.

A stage that waits for its neighbours polls, like a collective. How long it would wait anyway
follows from the schedule, the micro-batches and how long each stage computes: a step is replayed
with the computing that was seen, and with the same spread evenly. What a stage waits in the even
replay is the schedule's, what it waits more in the real one is the longest stage's. Waiting beyond
both came from upstream: a stage that was empty, for a cause of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from whyidle_rules.intervals import Ints
from whyidle_rules.ledger import UNATTRIBUTED
from whyidle_rules.pipeline import WhatIf, of_totals
from whyidle_rules.recording.bubbles import BLOCK_BINS, Pipeline
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.jobs import SLOW, Job
from whyidle_rules.recording.series import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some seconds of a pipeline: shares of each member's waiting, and the longest stage's member.

    NaN where too little was covered.
    """

    bins: slice
    schedule: Floats
    imbalance: Floats
    longest: int


def blocks(job: Job, pipeline: Pipeline) -> list[Block]:
    """Return how the waiting of each member splits, block by block."""
    size = job.spin.shape[1]
    found = []
    for begin in range(0, size, BLOCK_BINS):
        bins = slice(begin, min(begin + BLOCK_BINS, size))
        waiting, working = job.spin[:, bins].sum(axis=1), job.working[:, bins].sum(axis=1)
        by_stage = np.array(
            [working[pipeline.stage == stage].mean() for stage in range(pipeline.stages)]
        )
        if by_stage.min() <= 0:
            nothing = np.full(len(waiting), np.nan)
            found.append(Block(bins=bins, schedule=nothing, imbalance=nothing, longest=-1))
            continue
        what = of_totals(by_stage, pipeline.batches, pipeline.schedule, pipeline.virtual)
        schedule, imbalance = _split(what, by_stage, pipeline, waiting)
        longest = int(np.flatnonzero(pipeline.stage == int(by_stage.argmax()))[0])
        found.append(Block(bins=bins, schedule=schedule, imbalance=imbalance, longest=longest))
    return found


def _split(
    what: WhatIf, by_stage: Floats, pipeline: Pipeline, waiting: Floats
) -> tuple[Floats, Floats]:
    idle = what.step_s - by_stage[pipeline.stage]
    schedule = np.clip(what.even_s - what.ideal_s, 0.0, np.maximum(idle, 0.0))
    imbalance = np.maximum(idle - schedule, 0.0)
    whole = np.maximum(waiting, 1e-9)
    of_schedule = np.minimum(schedule, waiting) / whole
    of_imbalance = np.minimum(imbalance, np.maximum(waiting - schedule, 0.0)) / whole
    return of_schedule, of_imbalance


def tell(job: Job, pipeline: Pipeline, row: int, at: Ints, columns: Columns) -> None:
    """Make the communication of a pipeline's rank sends and receives, and split it.

    `at` is the bin of each window.
    """
    if job.bubbles is None:
        schedule, imbalance = (np.full(job.spin.shape, np.nan) for _ in range(2))
        for block in blocks(job, pipeline):
            schedule[:, block.bins] = block.schedule[:, None]
            imbalance[:, block.bins] = block.imbalance[:, None]
        job.bubbles = schedule, imbalance
    more = np.nan_to_num(columns["underfilled_s"]) * job.raised[row][at]
    for name, sign in (("spinning_s", 1.0), ("working_s", -1.0), ("underfilled_s", -1.0)):
        columns[name] = columns[name] + sign * more
    own = columns["spinning_s"]
    of_schedule, of_imbalance = (own * share[row][at] for share in job.bubbles)
    late = np.maximum(0.0, own - of_schedule - of_imbalance)
    rest = np.zeros(len(at))
    if not pipeline.alone:
        # Ranks that share a stage reduce gradients as well, and tensors: what is more than the
        # schedule and unequal stages make them wait may be that.
        rest, late = late, rest
    columns["coll_s"], columns["comm_s"] = np.zeros(len(at)), rest
    columns["p2p_s"] = own - rest
    columns["bubble_schedule_s"] = of_schedule
    columns["bubble_imbalance_s"] = of_imbalance
    columns["bubble_late_s"] = late
    message = columns["host_p2p_s"]
    of_schedule, of_imbalance = (message * share[row][at] for share in job.bubbles)
    columns["host_schedule_s"] = of_schedule
    columns["host_imbalance_s"] = of_imbalance
    columns["host_upstream_s"] = np.maximum(0.0, message - of_schedule - of_imbalance)


def roots(
    job: Job, pipeline: Pipeline, subcause: str
) -> dict[int, dict[tuple[int, str, str], float]]:
    """Return, by GPU, what its waiting of a kind arose from: (GPU, cause, subcause) by weight."""
    found: dict[int, dict[tuple[int, str, str], float]] = {}
    for row, number in enumerate(job.members):
        weights: dict[tuple[int, str, str], float] = defaultdict(float)
        for block in blocks(job, pipeline):
            if block.longest < 0:
                continue
            waited = float(job.spin[row, block.bins].sum())
            if subcause == "stage_imbalance":
                key = (job.members[block.longest], SLOW[0], SLOW[1])
                weights[key] += waited * float(block.imbalance[row])
            else:
                rest = max(0.0, 1.0 - float(block.schedule[row]) - float(block.imbalance[row]))
                for whose, share in _upstream(job, row, block.bins).items():
                    weights[whose] += waited * rest * share
        found[number] = {key: weight for key, weight in weights.items() if weight > 0}
    return found


def _upstream(job: Job, row: int, bins: slice) -> dict[tuple[int, str, str], float]:
    """Return the causes for which the emptiest member stood empty, as shares."""
    causes = {cause: values for cause, values in job.causes.items() if cause != SLOW}
    if not causes:
        return {}
    empty = np.add.reduce([values[:, bins].sum(axis=1) for values in causes.values()])
    late = int(empty.argmax())
    if late == row or empty[late] <= 0:
        return {(job.members[row], UNATTRIBUTED, "unexplained"): 1.0}
    return {
        (job.members[late], cause[0], cause[1]): float(values[late, bins].sum() / empty[late])
        for cause, values in causes.items()
        if values[late, bins].sum() > 0
    }
