"""What a pipeline schedule costs by itself, and what unequal stages add: a replay of one step.

Each stage runs its forward and backward passes in the order of 1F1B (one forward, one backward,
once the pipeline is full), of GPipe (all forwards, then all backwards), or of interleaved 1F1B
(each device runs several stages in turns), each as soon as the device is free and what it needs has
come. Everything else follows from how long the passes take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from whyidle_rules.recording.series import Floats

Schedule = Literal["1f1b", "gpipe", "interleaved"]
Pass = tuple[Literal["F", "B"], int]  # forward or backward, of which micro-batch
# The same of one of the stages that a device runs: its chunk.
ChunkPass = tuple[Literal["F", "B"], int, int]

# A backward pass computes gradients of inputs and of weights: twice the work of a forward pass.
BACKWARD_RATIO = 2.0
# Passes: a replay takes a microsecond for each, and there is one for every ten seconds of a run.
_REPLAY_MOST = 4000
# After this many steps, each takes as long as the one before.
_STEPS = 4


def order(schedule: Schedule, stage: int, stages: int, batches: int) -> list[Pass]:
    """Return the passes of a stage in the order in which it runs them."""
    if schedule == "gpipe":
        return [("F", i) for i in range(batches)] + [("B", i) for i in range(batches)]
    ahead = min(stages - 1 - stage, batches)
    passes: list[Pass] = [("F", i) for i in range(ahead)]
    for number in range(batches - ahead):
        passes += [("F", ahead + number), ("B", number)]
    return passes + [("B", i) for i in range(batches - ahead, batches)]


def interleaved(device: int, devices: int, batches: int, virtual: int) -> list[ChunkPass]:
    """Return the passes of a device that runs `virtual` stages, as interleaved 1F1B orders them.

    Micro-batches go round in as many as there are devices; raises ValueError where they do not come
    out even. Source: Narayanan et al., arXiv 2104.04473, and Megatron-LM's schedules.py.
    """
    if batches % devices:
        raise ValueError(f"{batches} micro-batches go round {devices} stages unevenly")
    total, round_ = batches * virtual, devices * virtual

    def batch(number: int) -> int:
        return number // round_ * devices + number % devices

    forward: list[ChunkPass] = [("F", batch(n), n % round_ // devices) for n in range(total)]
    backward: list[ChunkPass] = [
        ("B", batch(n), virtual - 1 - n % round_ // devices) for n in range(total)
    ]
    ahead = total
    if batches > devices:
        ahead = min(total, (devices - 1 - device) * 2 + (virtual - 1) * devices)
    passes = forward[:ahead]
    for number in range(total - ahead):
        passes += [forward[ahead + number], backward[number]]
    return passes + backward[total - ahead :]


def replay(
    forward: Floats, backward: Floats, schedule: Schedule = "1f1b", virtual: int = 1
) -> float:
    """Return how long a step takes; durations have a row for each stage, a column for each batch.

    With `virtual` stages on each device, device d runs the stages d, d + devices, ... Sending
    between stages takes no time of its own. Raises ValueError where shapes differ.
    """
    return max(_ends(forward, backward, schedule, virtual, [0.0] * (len(forward) // virtual)))


def _ends(
    forward: Floats, backward: Floats, schedule: Schedule, virtual: int, begins: Sequence[float]
) -> list[float]:
    """Return when each device ends its part of a step that it begins at `begins`."""
    if forward.shape != backward.shape or forward.ndim != 2:
        raise ValueError(f"durations of shapes {forward.shape} and {backward.shape}")
    stages, batches = forward.shape
    devices = stages // virtual
    if devices * virtual != stages:
        raise ValueError(f"{stages} stages are not {virtual} on each device")
    left = [_passes(schedule, device, devices, batches, virtual) for device in range(devices)]
    free = list(begins)
    done: dict[tuple[str, int, int], float] = {}
    while any(left):
        before = len(done)
        for device, passes in enumerate(left):
            while passes:
                kind, batch, chunk = passes[-1]
                stage = chunk * devices + device
                ready = _ready(done, kind, stage, batch, stages)
                if ready is None:
                    break
                took = (forward if kind == "F" else backward)[stage, batch]
                free[device] = max(free[device], ready) + float(took)
                done[kind, stage, batch] = free[device]
                passes.pop()
        if len(done) == before:
            raise ValueError(f"the {schedule} schedule of {stages} stages cannot go on")
    return free


def _passes(
    schedule: Schedule, device: int, devices: int, batches: int, virtual: int
) -> list[ChunkPass]:
    """Return the passes of a device, the last one first."""
    if schedule == "interleaved":
        return interleaved(device, devices, batches, virtual)[::-1]
    return [(kind, batch, 0) for kind, batch in order(schedule, device, devices, batches)][::-1]


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


def what_if(
    forward: Floats, backward: Floats, schedule: Schedule = "1f1b", virtual: int = 1
) -> WhatIf:
    """Replay a step as it is, with even stages, and with each device alone as it is."""
    even = (np.full_like(forward, forward.mean()), np.full_like(backward, backward.mean()))
    devices = forward.shape[0] // virtual
    only = []
    for device in range(devices):
        mixed = (even[0].copy(), even[1].copy())
        own = slice(device, None, devices)
        mixed[0][own], mixed[1][own] = forward[own], backward[own]
        only.append(replay(*mixed, schedule, virtual))
    return WhatIf(
        step_s=replay(forward, backward, schedule, virtual),
        even_s=replay(*even, schedule, virtual),
        ideal_s=float((forward + backward).sum() / devices),
        only_s=tuple(only),
    )


def of_totals(
    work_s: Floats, batches: int, schedule: Schedule = "1f1b", virtual: int = 1
) -> WhatIf:
    """Replay a step of which only each device's computing is known: batches and stages alike.

    A backward pass takes twice as long as a forward one. Long steps are not replayed: with equal
    batches they take what the longest device does, and one batch of all others.
    """
    schedule, virtual = _known(len(work_s), batches, schedule, virtual)
    if len(work_s) * batches * virtual > _REPLAY_MOST:
        return _by_the_book(work_s, batches * virtual)
    return what_if(*_alike(work_s, batches, virtual), schedule, virtual)


def period_s(
    work_s: Floats,
    outside_s: Floats,
    batches: int,
    schedule: Schedule = "1f1b",
    virtual: int = 1,
) -> float:
    """Return how long a step takes at the least where steps follow each other.

    `work_s` is what each device computes in the schedule, `outside_s` what it does by itself after
    it: a device that is done goes on to that, and to the next step, while others still compute.
    """
    schedule, virtual = _known(len(work_s), batches, schedule, virtual)
    if len(work_s) * batches * virtual * _STEPS > _REPLAY_MOST:
        return _by_the_book(work_s, batches * virtual).step_s + float(outside_s.min())
    passes = _alike(work_s, batches, virtual)
    begins, ends = [0.0] * len(work_s), []
    for _ in range(_STEPS):
        done = _ends(*passes, schedule, virtual, begins)
        begins = [at + float(more) for at, more in zip(done, outside_s, strict=True)]
        ends.append(max(begins))
    return ends[-1] - ends[-2]


def _known(devices: int, batches: int, schedule: Schedule, virtual: int) -> tuple[Schedule, int]:
    """Return a schedule that can be replayed."""
    if schedule == "interleaved" and (virtual < 2 or batches % devices):
        return "1f1b", 1
    return schedule, virtual


def _alike(work_s: Floats, batches: int, virtual: int) -> tuple[Floats, Floats]:
    """Return forward and backward passes of stages and batches that are alike."""
    each = np.tile(work_s / virtual, virtual) / batches / (1 + BACKWARD_RATIO)
    forward = np.repeat(each[:, None], batches, axis=1)
    return forward, forward * BACKWARD_RATIO


def _by_the_book(work_s: Floats, turns: int) -> WhatIf:
    ideal = float(work_s.mean())

    def step(work: Floats) -> float:
        return float(work.max() + (work.sum() - work.max()) / turns)

    only = []
    for device in range(len(work_s)):
        mixed = np.full(len(work_s), ideal)
        mixed[device] = work_s[device]
        only.append(step(mixed))
    return WhatIf(
        step_s=step(work_s),
        even_s=step(np.full(len(work_s), ideal)),
        ideal_s=ideal,
        only_s=tuple(only),
    )
