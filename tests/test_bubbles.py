"""What a pipeline's schedule needs of waiting, on made-up pipelines whose computing is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from whyidle_rules.pipeline import Schedule, period_s
from whyidle_rules.recording.bubbles import INSIDE_RATIO, Pipeline, raised
from whyidle_rules.recording.series import Floats
from whyidle_rules.recording.spin import spinning

# Half a second each: two blocks.
BINS = 40
POLLING_FILL = 0.12


def pipeline(
    stages: int, batches: int, schedule: Schedule = "1f1b", *, exact: bool = True
) -> Pipeline:
    return Pipeline(
        stage=np.arange(stages),
        stages=stages,
        batches=batches,
        schedule=schedule,
        virtual=1,
        alone=True,
        exact=exact,
    )


def seen(share: Floats, full: Floats, believed: Floats) -> tuple[Floats, Floats]:
    """What is told of stages that compute for a share of the time and poll for the rest of it.

    `full` is how full computing fills each chip, `believed` what that is taken for: as little as
    the fullest window shows. Returns the least that each bin spun and the most, in seconds.
    """
    found = [
        spinning(np.ones(BINS), np.full(BINS, c * f + (1 - c) * POLLING_FILL), float(b))
        for c, f, b in zip(share, full, believed, strict=True)
    ]
    least, most = (np.array([one[at] for one in found]) / 2 for at in (0, 1))
    return least, most


def booked(
    one: Pipeline,
    share: Floats,
    full: Floats,
    believed: Floats,
    *,
    steps: float = 0.0,
    kernels: Sequence[Floats] = (),
) -> Floats:
    """Which share of the time each stage is said to have waited; `steps` end in each bin.

    `kernels` are shares in which tensor cores and memory were busy, by stage.
    """
    least, most = seen(share, full, believed)
    covered, empty = np.full_like(least, 0.5), np.zeros_like(least)
    more = most - least
    ended = np.full_like(least, steps)
    busy = [np.repeat(each[:, None] / 2, BINS, axis=1) for each in kernels]
    found = raised(one, least, more, empty, covered - least, covered, ended, busy)
    return np.asarray((least + found * more).sum(axis=1) / covered.sum(axis=1))


def computing(one: Pipeline, work: Floats) -> Floats:
    """Which share of the time stages compute whose steps follow each other without a pause."""
    inside, outside = INSIDE_RATIO * work, (1 - INSIDE_RATIO) * work
    return np.asarray(work / period_s(inside, outside, one.batches, one.schedule))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_even_stages_wait_for_what_the_schedule_needs(schedule: Schedule) -> None:
    one = pipeline(3, 8, schedule)
    share = computing(one, np.ones(3))
    full = np.full(3, 0.9)
    # Windows are mixtures: the fullest one is at three quarters of what computing alone fills.
    little, _ = seen(share, full, np.full(3, 0.84))
    assert (little.sum(axis=1) / 20 < 0.8 * (1 - share)).all()
    assert booked(one, share, full, np.full(3, 0.84)) == pytest.approx(1 - share, abs=0.002)


def test_shorter_stages_wait_for_the_longest() -> None:
    one = pipeline(3, 6)
    share = computing(one, np.array([1.0, 1.8, 1.0]))
    full, believed = np.full(3, 0.9), np.full(3, 0.86)
    little = seen(share, full, believed)[0].sum(axis=1) / 20
    found = booked(one, share, full, believed)
    assert (little <= found).all() and found[0] > little[0] + 0.01
    # Never more than they wait, as far as polling holds what it is known to hold at the least.
    assert (found <= 1 - share + 0.002).all()


def test_kernels_that_fill_the_chip_less_are_no_shorter_stage() -> None:
    """All compute alike, and the first stage fills 60 % of the chip: it does not wait for others.

    What fills it is known here, as it is where a stage has windows full of computing.
    """
    one = pipeline(3, 8)
    share = computing(one, np.ones(3))
    full = np.array([0.6, 1.0, 1.0])
    found = booked(one, share, full, full)
    assert (found <= 1 - share + 0.01).all()


@pytest.mark.parametrize("unused", ["tensor cores", "memory"])
def test_stages_of_the_same_kernels_are_compared_by_what_polling_does_not_use(unused: str) -> None:
    """Polling holds more of the SMs than computing is known to do without: two kernels at once."""
    one = pipeline(3, 6)
    share = computing(one, np.array([1.0, 1.8, 1.0]))
    full, believed = np.full(3, 0.9), np.full(3, 0.86)
    busy, nothing = 0.6 * share, np.zeros(3)
    kernels = (nothing, busy) if unused == "tensor cores" else (busy, nothing)
    by_sms = booked(one, share, full, believed)
    found = booked(one, share, full, believed, steps=5, kernels=kernels)
    assert found == pytest.approx(1 - share, abs=0.002)
    assert (by_sms[[0, 2]] < 1 - share[[0, 2]] - 0.01).all()
    # By the one by which a stage computed longer, if they do not tell the same.
    more = booked(one, share, full, believed, kernels=(busy, busy * np.array([1.1, 1.0, 1.0])))
    assert more[0] < 1 - share[0] - 0.02


def test_a_pipeline_that_is_not_seen_to_wait_is_not_said_to() -> None:
    one = pipeline(3, 3)
    assert booked(one, np.ones(3), np.full(3, 0.9), np.full(3, 0.9)).max() == 0


def test_what_one_stage_does_before_the_others_is_no_step() -> None:
    one = pipeline(2, 4)
    share = computing(one, np.ones(2))
    least, most = seen(share, np.full(2, 0.9), np.full(2, 0.84))
    covered, empty = np.full_like(least, 0.5), np.zeros_like(least)
    working = covered - least
    for values in (least, most, working):
        values[1, :10] = 0.0
    empty[1, :10] = 0.5
    found = raised(one, least, most - least, empty, working, covered, np.zeros_like(least))
    assert found[:, :10].max() == 0
    assert found[0, 10:] == pytest.approx(found[1, 10:])


@pytest.mark.parametrize(("exact", "steps"), [(True, 5.0), (True, 0.0), (False, 5.0)])
def test_steps_shorter_than_windows_wait_for_what_the_schedule_needs(
    exact: bool, steps: float
) -> None:
    """Every window is the same mixture, and nothing shows of it; steps say that the schedule runs.

    Not where the schedule is only taken for one that is replayed: others need less.
    """
    one = pipeline(2, 8, exact=exact)
    share = computing(one, np.ones(2))
    full, believed = np.full(2, 0.96), np.full(2, 0.9)
    found = booked(one, share, full, believed, steps=steps)
    if exact and steps:
        assert found == pytest.approx(1 - share, abs=0.002)
    else:
        assert (found < 0.5 * (1 - share)).all()
