"""What a pipeline schedule costs by itself, and what unequal stages add: a replay of one step.

Each stage runs its forward and backward passes in the order of 1F1B (one forward, one backward,
once the pipeline is full) or of GPipe (all forwards, then all backwards), each as soon as the stage
is free and what it needs has come. Everything else follows from how long the passes take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from whyidle_rules.recording.series import Floats

Schedule = Literal["1f1b", "gpipe"]
Pass = tuple[Literal["F", "B"], int]  # forward or backward, of which micro-batch

# A backward pass computes gradients of inputs and of weights: twice the work of a forward pass.
BACKWARD_RATIO = 2.0


def order(schedule: Schedule, stage: int, stages: int, batches: int) -> list[Pass]:
    """Return the passes of a stage in the order in which it runs them."""
    if schedule == "gpipe":
        return [("F", i) for i in range(batches)] + [("B", i) for i in range(batches)]
    ahead = min(stages - 1 - stage, batches)
    passes: list[Pass] = [("F", i) for i in range(ahead)]
    for number in range(batches - ahead):
        passes += [("F", ahead + number), ("B", number)]
    return passes + [("B", i) for i in range(batches - ahead, batches)]


def replay(forward: Floats, backward: Floats, schedule: Schedule = "1f1b") -> float:
    """Return how long a step takes; durations have a row for each stage, a column for each batch.

    Sending between stages takes no time of its own. Raises ValueError where shapes differ.
    """
    if forward.shape != backward.shape or forward.ndim != 2:
        raise ValueError(f"durations of shapes {forward.shape} and {backward.shape}")
    stages, batches = forward.shape
    left = [order(schedule, stage, stages, batches)[::-1] for stage in range(stages)]
    free = [0.0] * stages
    done: dict[tuple[str, int, int], float] = {}
    while any(left):
        before = len(done)
        for stage, passes in enumerate(left):
            while passes:
                kind, batch = passes[-1]
                ready = _ready(done, kind, stage, batch, stages)
                if ready is None:
                    break
                took = (forward if kind == "F" else backward)[stage, batch]
                free[stage] = max(free[stage], ready) + float(took)
                done[kind, stage, batch] = free[stage]
                passes.pop()
        if len(done) == before:
            raise ValueError(f"the {schedule} schedule of {stages} stages cannot go on")
    return max(free)


def _ready(
    done: dict[tuple[str, int, int], float], kind: str, stage: int, batch: int, stages: int
) -> float | None:
    """Return when what a pass needs was there, None if it is not there yet."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, batch))
    if stage == stages - 1:
        return done.get(("F", stage, batch))
    return done.get(("B", stage + 1, batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A step as it is, and as it would be.

    `even_s`: with the same work spread evenly over the stages; `ideal_s`: that without any bubble.
    `only_s`: with one stage as it is and all others even, by stage.
    """

    step_s: float
    even_s: float
    ideal_s: float
    only_s: tuple[float, ...]

    @property
    def guilty(self) -> int:
        """The stage that slows the step down most by itself."""
        return int(np.argmax(self.only_s))

    @property
    def slowdown(self) -> float:
        """How many times longer the step takes than with even stages."""
        return self.step_s / self.even_s if self.even_s > 0 else 1.0


def what_if(forward: Floats, backward: Floats, schedule: Schedule = "1f1b") -> WhatIf:
    """Replay a step as it is, with even stages, and with each stage alone as it is."""
    even = (np.full_like(forward, forward.mean()), np.full_like(backward, backward.mean()))
    only = []
    for stage in range(forward.shape[0]):
        mixed = (even[0].copy(), even[1].copy())
        mixed[0][stage], mixed[1][stage] = forward[stage], backward[stage]
        only.append(replay(*mixed, schedule))
    return WhatIf(
        step_s=replay(forward, backward, schedule),
        even_s=replay(*even, schedule),
        ideal_s=float((forward + backward).sum() / forward.shape[0]),
        only_s=tuple(only),
    )


def of_totals(work_s: Floats, batches: int, schedule: Schedule = "1f1b") -> WhatIf:
    """Replay a step of which only each stage's computing is known: equal batches, 1 to 2 passes."""
    forward = np.repeat((work_s / batches / (1 + BACKWARD_RATIO))[:, None], batches, axis=1)
    return what_if(forward, forward * BACKWARD_RATIO, schedule)
