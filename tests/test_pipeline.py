from __future__ import annotations

import json
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whyidle_rules import pipeline
from whyidle_rules.pipeline import (
    Schedule,
    interleaved,
    of_totals,
    order,
    period_s,
    replay,
    what_if,
)
from whyidle_rules.recording.series import Floats

STRAGGLER = Path(__file__).parents[1].parent / "shared/recorded-runs/straggler-bytedance"


def bubble_ratio(stages: int, batches: int, schedule: Schedule = "1f1b", virtual: int = 1) -> float:
    """How much of its computing a device waits by the schedule alone, with even stages."""
    found = of_totals(np.ones(stages), batches, schedule, virtual)
    return found.even_s / found.ideal_s - 1.0


def even(
    stages: int, batches: int, forward: float = 1.0, backward: float = 2.0
) -> tuple[Floats, Floats]:
    return np.full((stages, batches), forward), np.full((stages, batches), backward)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 1), (2, 4), (4, 4), (4, 8), (8, 3)])
def test_even_stages_have_the_bubble_of_the_book(
    schedule: Schedule, stages: int, batches: int
) -> None:
    """(stages - 1) passes of each kind are waited for, whatever the order."""
    assert replay(*even(stages, batches), schedule) == 3.0 * (batches + stages - 1)


@pytest.mark.parametrize(
    ("devices", "batches", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 4, 3), (3, 9, 4), (1, 3, 2)]
)
def test_interleaved_stages_divide_the_bubble_by_their_number(
    devices: int, batches: int, virtual: int
) -> None:
    """Narayanan et al.: (devices - 1) / (virtual x micro-batches) of the computing."""
    found = bubble_ratio(devices, batches, "interleaved", virtual)
    assert found == pytest.approx((devices - 1) / (virtual * batches))
    plain = bubble_ratio(devices, batches, "1f1b")
    assert plain == pytest.approx((devices - 1) / batches)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_long_steps_take_what_a_replay_of_them_would(
    schedule: Schedule, virtual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = np.array([1.0, 1.3, 0.9, 1.1])
    replayed = of_totals(work, 32, schedule, virtual)
    monkeypatch.setattr(pipeline, "_REPLAY_MOST", 0)
    told = of_totals(work, 32, schedule, virtual)
    assert told.step_s == pytest.approx(replayed.step_s, rel=0.03)
    assert told.even_s == pytest.approx(replayed.even_s, rel=0.001)
    assert told.ideal_s == pytest.approx(replayed.ideal_s)
    assert told.guilty == replayed.guilty


def test_the_order_of_interleaved_stages() -> None:
    assert interleaved(1, 2, 4, 2)[:4] == [("F", 0, 0), ("F", 1, 0), ("F", 0, 1), ("B", 0, 1)]
    every = interleaved(0, 2, 4, 2)
    assert sorted(every) == sorted((k, b, c) for k in "FB" for b in range(4) for c in range(2))
    with pytest.raises(ValueError, match="unevenly"):
        interleaved(0, 2, 3, 2)


def test_a_longer_device_of_an_interleaved_schedule_is_the_guilty_one() -> None:
    found = of_totals(np.array([1.0, 1.0, 1.6, 1.0]), 8, "interleaved", 2)
    assert found.guilty == 2
    assert found.slowdown > 1.2


def test_the_order_of_1f1b() -> None:
    assert order("1f1b", 0, 3, 4) == [
        ("F", 0), ("F", 1), ("F", 2), ("B", 0), ("F", 3), ("B", 1), ("B", 2), ("B", 3),
    ]  # fmt: skip
    assert order("1f1b", 2, 3, 2) == [("F", 0), ("B", 0), ("F", 1), ("B", 1)]


def test_the_last_stage_twice_as_long_is_the_guilty_one() -> None:
    found = of_totals(np.array([1.0, 1.0, 1.0, 2.0]), batches=4)
    assert found.guilty == 3
    assert found.step_s > found.even_s > found.ideal_s
    assert found.ideal_s == pytest.approx(1.25)
    assert found.even_s == pytest.approx(1.25 * (4 + 3) / 4)


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(1, 5),
    batches=st.integers(1, 6),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    data=st.data(),
)
def test_a_step_is_never_shorter_than_its_longest_stage_nor_longer_than_all_passes(
    stages: int, batches: int, schedule: Schedule, data: st.DataObject
) -> None:
    length = st.floats(0.001, 10.0)
    forward, backward = (
        np.array(data.draw(st.lists(length, min_size=stages * batches, max_size=stages * batches)))
        .reshape(stages, batches)
        for _ in range(2)
    )  # fmt: skip
    step = replay(forward, backward, schedule)
    work = (forward + backward).sum(axis=1)
    assert work.max() <= step * (1 + 1e-9)
    assert step <= work.sum() * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_even_steps_follow_each_other_as_long_as_one_and_what_is_outside(
    schedule: Schedule,
) -> None:
    work, outside = np.full(4, 24.0), np.full(4, 2.0)
    assert period_s(work, outside, 8, schedule) == pytest.approx(33.0 + 2.0)


def test_a_stage_goes_on_while_others_still_compute() -> None:
    """The middle stage ends before the first, which has the last backward pass: it waits less."""
    work, outside = np.array([108.0, 198.0, 108.0]), np.array([12.0, 22.0, 12.0])
    found = period_s(work, outside, 6)
    assert 220.0 <= found < of_totals(work, 6).step_s + 22.0


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from(["1f1b", "gpipe"]),
)
def test_steps_follow_each_other_within_bounds(
    times: list[float], batches: int, schedule: Schedule
) -> None:
    work = np.array(times)
    outside = work / 10
    found = period_s(work, outside, batches, schedule)
    assert found >= (work + outside).max() - 1e-9
    assert found <= of_totals(work, batches, schedule).step_s + outside.max() + 1e-9


def test_shapes_have_to_fit() -> None:
    with pytest.raises(ValueError, match="shapes"):
        replay(np.ones((2, 3)), np.ones((2, 2)))


@pytest.mark.shared
@pytest.mark.skipif(not STRAGGLER.is_dir(), reason="no recorded runs beside the checkout")
def test_a_real_job_with_a_long_last_stage() -> None:
    """Slow-down and guilty stage as its authors published them, within 5 %."""
    published = json.loads((STRAGGLER / "result-ST.json").read_text())
    rows = (
        duckdb.connect()
        .execute(
            "SELECT step, dp_rank, optype, stage, mb_id, duration, start_ts"
            f" FROM '{STRAGGLER / 'trace-ST.parquet'}' WHERE optype LIKE '%-compute'"
        )
        .fetchall()
    )
    steps: dict[tuple[int, int], dict[str, Floats]] = {}
    spans: dict[int, tuple[float, float]] = {}
    for step, replica, kind, stage, batch, duration, start in rows:
        passes = steps.setdefault((step, replica), {})
        passes.setdefault(kind, np.zeros((4, 4)))[stage, batch] = duration
        begin, end = spans.get(step, (start, start))
        spans[step] = min(begin, start), max(end, start + duration)
    found = {
        key: what_if(passes["forward-compute"], passes["backward-compute"])
        for key, passes in steps.items()
    }
    replayed = [max(found[step, 0].step_s, found[step, 1].step_s) for step in spans]
    measured = [end - begin for begin, end in spans.values()]
    assert np.mean(replayed) == pytest.approx(np.mean(measured), rel=0.01)
    assert {what.guilty for what in found.values()} == {3}
    # What comes after the passes (gradients, optimizer) takes as long either way.
    whole = np.mean([published["step_t_base"][str(step)] for step in spans])
    lost = np.mean([what.step_s - what.even_s for what in found.values()])
    assert whole / (whole - lost) == pytest.approx(published["blocking_slowdown"], rel=0.05)
    alone = np.mean([what.only_s[3] - what.even_s for what in found.values()])
    by_stage = published["blocking_decompose_by_stage"]
    assert (whole - lost + alone) / (whole - lost) == pytest.approx(by_stage["3"], rel=0.05)
