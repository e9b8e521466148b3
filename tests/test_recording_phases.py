"""What counter pages tell: exact waits, waits only in totals, phases inside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recording_kit import make_row
from recording_rows import BOOT, connect, event, page, s, start_of
from recording_stories import Told as Story
from recording_stories import loader, pages
from whyidle.schema.probe import ProbeInfo
from whyidle.table import Row
from whyidle_rules.recording import phases
from whyidle_rules.recording.phases import Told

AT = [number / 8 for number in range(81)]  # ten seconds, as often as the agent reads


def told(rows: Sequence[Row], until: float = 100.0) -> Told:
    with connect(rows) as con:
        found = phases.load(con, "n0", BOOT, s(-100), s(until))
    assert list(found) == [(10, start_of(0))]
    return found[10, start_of(0)]


def inside(found: Told, begin: float, end: float) -> dict[str, float]:
    """Return the seconds of a window by column, without those that are nothing."""
    parts = found.inside(np.array([s(begin)]), np.array([s(end)]))
    return {name: float(ns[0]) / 1e9 for name, ns in parts.items() if ns[0]}


def near(**seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-6)


def totals(at: Sequence[float] = AT, **columns: object) -> list[Row]:
    """Return a page on which nothing has happened, but for these columns."""
    nothing: dict[str, Any] = {
        "data_wait_ns": 0,
        "outside_wait_ns": 0,
        "checkpoint_save_ns": 0,
        "checkpoint_load_ns": 0,
        "evaluation_ns": 0,
        "gc_ns": 0,
    }
    return page(10, at, **{**nothing, **columns})


def test_a_wait_with_a_record_is_where_it_was() -> None:
    found = told(pages(10, [("data_wait", 2.1, 2.6)], AT))
    assert inside(found, 2, 3) == near(data_wait_s=0.5)
    assert inside(found, 2.5, 3) == near(data_wait_s=0.1)
    assert inside(found, 2.6, 3) == {}
    assert inside(found, 1, 2.1) == {}


def test_short_waits_are_spread_between_two_readings() -> None:
    """From 4 to 4.125 s twenty waits of half a millisecond, without records."""
    waits = [0 if when <= 4 else 10_000_000 for when in AT]
    found = told(totals(data_wait_ns=waits))
    assert inside(found, 4, 4.125) == near(data_wait_s=0.01)
    assert inside(found, 4, 4.0625) == near(data_wait_s=0.005)
    assert inside(found, 0, 4) == {}
    assert inside(found, 4.125, 10) == {}


def test_waits_outside_of_steps_count_too() -> None:
    waits = [0 if when <= 4 else 10_000_000 for when in AT]
    assert inside(told(totals(outside_wait_ns=waits)), 4, 5) == near(data_wait_s=0.01)


def test_records_that_were_overwritten_are_in_the_totals() -> None:
    """Three waits of 100 ms in one second, of which the ring kept the last."""
    waits = [round(1e8 * sum(when >= end for end in (3.2, 3.5, 3.9))) for when in AT]
    rows = [*totals(data_wait_ns=waits), event(10, "data_wait", 3.8, 3.9, sequence=3)]
    found = told(rows)
    assert inside(found, 3, 4) == near(data_wait_s=0.3)
    # The lost ones are told where the total grew: by the reading after 3.2 s, and that at 3.5.
    assert inside(found, 3.125, 3.25) == near(data_wait_s=0.1)
    assert inside(found, 3.375, 3.5) == near(data_wait_s=0.1)
    assert inside(found, 3.8, 3.9) == near(data_wait_s=0.1)


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("checkpoint_save", "checkpoint_save_s"),
        ("checkpoint_load", "checkpoint_load_s"),
        ("evaluation", "evaluation_s"),
        ("gc", "gc_s"),
    ],
)
def test_phases_without_their_record_come_back_from_the_totals(kind: str, column: str) -> None:
    rows = pages(10, [(kind, 2.0, 2.1)], AT)[: len(AT)]
    assert inside(told(rows), 2, 3) == near(**{column: 0.1})


def test_a_wait_that_goes_on_at_the_end_has_begun() -> None:
    found = told(pages(10, [("data_wait", 8, 20)], AT))
    assert inside(found, 7, 9) == near(data_wait_s=1)
    assert inside(found, 9, 10) == near(data_wait_s=1)
    assert found.end_ns == s(10)


@pytest.mark.parametrize(
    ("kind", "column"),
    [("evaluation", "evaluation_s"), ("mine", "other_phase_s"), ("setup", "startup_s")],
)
def test_a_phase_that_goes_on_at_the_end_has_begun(kind: str, column: str) -> None:
    found = told(pages(10, [(kind, 8, 20)], AT))
    assert inside(found, 7, 9) == near(**{column: 1})


def test_a_wait_that_was_going_on_at_some_reading_counts_once() -> None:
    """It is in no total until it ends; then there is a record of it."""
    found = told(pages(10, [("data_wait", 1.05, 3.05)], AT))
    assert inside(found, 0, 10) == near(data_wait_s=2)
    assert inside(found, 1.5, 2.5) == near(data_wait_s=1)


def test_a_wait_in_an_evaluation_is_a_wait_and_garbage_in_a_wait_is_garbage() -> None:
    story: list[Story] = [("evaluation", 1, 5), ("data_wait", 2, 4), ("gc", 3, 3.5)]
    found = told(pages(10, story, AT))
    assert inside(found, 0, 10) == near(evaluation_s=2, data_wait_s=1.5, gc_s=0.5)
    assert inside(found, 2.9, 3.6) == near(data_wait_s=0.2, gc_s=0.5)


def test_phases_in_each_other_never_share_a_second() -> None:
    story: list[Story] = [
        ("mine", 0, 9),
        ("evaluation", 1, 8),
        ("data_wait", 2, 7),
        ("checkpoint_save", 3, 6),
        ("gc", 4, 5),
    ]
    found = told(pages(10, story, AT))
    assert inside(found, 0, 9) == near(
        other_phase_s=2, evaluation_s=2, data_wait_s=2, checkpoint_save_s=2, gc_s=1
    )


def test_what_other_threads_do_keeps_the_launching_one_from_nothing() -> None:
    rows = [*totals(), event(10, "checkpoint_save", 2, 5, background=True)]
    assert inside(told(rows), 0, 10) == {}


def test_steps_are_no_time_of_their_own() -> None:
    assert inside(told([*totals(), event(10, "step", 2, 5)]), 0, 10) == {}


def test_it_is_known_only_while_the_page_was_read() -> None:
    found = told(totals([1.0, 2.0, 3.0, 6.5, 7.0]))
    starts, ends = (
        np.array([s(0.9), s(1), s(2.5), s(6.5), s(6.9)]),
        np.array([s(1.5), s(3), s(3.1), s(7), s(7.1)]),
    )
    # Before the first reading, inside, into a gap of 3.5 s, after it, beyond the last.
    assert found.covers(starts, ends).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("column", ["data_wait_ns", "outside_wait_ns"])
def test_without_its_totals_waits_are_unknown(column: str) -> None:
    unknown: dict[str, Any] = {column: None}
    found = told(totals(**unknown))
    assert not found.covers(np.array([s(1)]), np.array([s(2)])).any()


def test_steps_are_those_that_were_counted_last() -> None:
    assert told(totals(steps=[None] * 40 + [7] * 40 + [None])).steps == 7
    assert told(totals()).steps is None


def test_workers_are_those_of_the_loader_that_was_waited_for_most() -> None:
    def of(place: int, workers: int, wait_s: float) -> Row:
        (row,) = loader(10, [5.0], workers=workers)
        values = {name: getattr(row, name) for name in ("mono_ns", "pid", "start_ns")}
        return make_row(
            type(row), **values, place=place, workers=workers, wait_ns=round(wait_s * 1e9)
        )

    found = told([*totals(), of(0, 8, 1.0), of(1, 2, 3.0), of(2, 0, 0.5)])
    assert (found.loaders, found.workers) == (3, 2)
    assert (told(totals()).loaders, told(totals()).workers) == (0, None)


@pytest.mark.parametrize(
    ("steps", "batches", "loaders"),
    [(100, 100, 1), (100, 25, 1), (100, 2, 0), (5, 0, 1), (None, 0, 1), (100, None, 1)],
)
def test_dataloaders_that_feed_no_steps_are_none(
    steps: int | None, batches: int | None, loaders: int
) -> None:
    """Of a trainer that loads by other means, and has a DataLoader for evaluation."""

    def growing(last: int | None) -> list[int | None]:
        return [None if last is None else round(last * at / 80) for at in range(81)]

    rows = [*totals(steps=growing(steps), batches=growing(batches)), *loader(10, [5.0])]
    assert told(rows).loaders == loaders


def test_a_page_says_who_published_it() -> None:
    info = make_row(ProbeInfo, mono_ns=s(0), pid=10, start_ns=start_of(0), rank=3, world_size=16)
    found = told([*totals(), info])
    assert (found.info["rank"], found.info["world_size"], found.info["local_rank"]) == (3, 16, None)
    assert told(totals()).info.get("rank") is None


def test_records_of_nobody_are_left_out() -> None:
    with connect([event(10, "gc", 1, 2)]) as con:
        assert phases.load(con, "n0", BOOT, s(0), s(10)) == {}


def test_one_reading_tells_nothing_of_any_window() -> None:
    found = told(totals([5.0]))
    assert not found.covers(np.array([s(4), s(5)]), np.array([s(5), s(6)])).any()


EVENTS = st.tuples(
    st.sampled_from(["data_wait", "gc", "evaluation", "checkpoint_save", "mine", "compile"]),
    st.floats(0, 9.9),
    st.sampled_from([0.0004, 0.02, 0.6, 4.0, 30.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=10), st.floats(0.01, 3), st.booleans())
def test_no_window_is_given_out_more_than_once(
    drawn: list[tuple[str, float, float]], length: float, lost: bool
) -> None:
    rows = pages(10, [(kind, begin, begin + long) for kind, begin, long in drawn], AT)
    if lost:
        rows = [row for number, row in enumerate(rows) if number < len(AT) or number % 2]
    found = told(rows)
    edges = np.array([s(0), *(s(at) for at in np.arange(length, 10, length)), s(10)])
    parts = found.inside(edges[:-1], edges[1:])
    total = np.add.reduce(list(parts.values()))
    assert (total <= np.diff(edges) * (1 + 1e-9) + 1).all()
    assert all((values >= 0).all() for values in parts.values())
