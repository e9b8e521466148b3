"""What threads did around a window, from counters and from the states that readings found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from recording_rows import BOOT, Act, connect, process, s
from whyidle.table import Row
from whyidle_rules.recording import processes
from whyidle_rules.recording.processes import Proc
from whyidle_rules.recording.threads import Shares, grown, shares

FUSE = "request_wait_answer"


def procs(*groups: Sequence[Row]) -> list[Proc]:
    with connect([row for group in groups for row in group]) as con:
        known = processes.load(con, "n0", BOOT).procs
        return list(processes.read(con, ("n0", BOOT), 0, s(1000), known.values()).values())


def around(seconds: float, *groups: Sequence[Row]) -> Shares:
    return shares(procs(*groups), np.array([s(seconds)]))


def only(values: object) -> float:
    (value,) = np.asarray(values).tolist()
    return float(value)


def test_shares_are_of_the_time_around_a_window() -> None:
    found = around(5, process(10, [(10, Act(run=0.5, ready=0.2, blkio=0.1, state="R"))]))
    assert only(found.run) == pytest.approx(0.5)
    assert only(found.ready) == pytest.approx(0.2)
    assert only(found.io) == pytest.approx(0.1)
    assert only(found.asleep) == pytest.approx(0.2)
    assert only(found.count) == 1
    assert only(found.covered_ns) == 2e9


def test_a_change_is_mixed_for_a_second_on_each_side_and_no_longer() -> None:
    rows = process(10, [(10, Act(run=1.0)), (10, Act(run=0.0))])
    assert only(around(8.9, rows).run) == pytest.approx(1)
    assert only(around(10, rows).run) == pytest.approx(0.5)
    assert only(around(10.5, rows).run) == pytest.approx(0.25)
    assert only(around(11.1, rows).run) == pytest.approx(0)


def test_threads_of_a_loader_share_their_time() -> None:
    found = around(5, process(10, [(10, Act(run=1.0))]), process(11, [(10, Act(run=0.5))]))
    assert only(found.run) == pytest.approx(0.75)
    assert only(found.count) == 2


def test_a_worker_that_has_ended_counts_no_more() -> None:
    rows = [process(10, [(10, Act(run=1.0))]), process(11, [(4, Act(run=0.0))])]
    found = around(8, *rows)
    assert only(found.run) == pytest.approx(1)
    assert only(found.count) == 1


def test_blocked_time_is_never_more_than_was_off_the_cpu() -> None:
    """The kernel counts a task that is woken early again and again."""
    found = around(5, process(10, [(10, Act(run=0.3, ready=0.1, blkio=5.0))]))
    assert only(found.io) == pytest.approx(0.6)
    assert only(found.asleep) == pytest.approx(0)


@pytest.mark.parametrize(
    ("act", "io"),
    [
        (Act(run=0.2, state="D"), 0.8),
        (Act(run=0.2, state="S", channel=FUSE), 0.8),
        (Act(run=0.2, state="S", channel="futex_wait_queue"), 0.0),
        (Act(run=0.2, state="R"), 0.0),
    ],
    ids=["disk", "fuse", "asleep", "running"],
)
def test_without_delay_accounting_states_split_the_time_off_the_cpu(act: Act, io: float) -> None:
    assert only(around(5, process(10, [(10, act)])).io) == pytest.approx(io)


def test_states_are_draws_that_add_up() -> None:
    """In I/O every even second: of the seven readings around the 5th four, of the 6th three."""
    act, idle = Act(run=0.0, state="D"), Act(run=0.0, state="S")
    rows = process(10, [(1.0, act), (1.0, idle)] * 6)
    assert only(around(5, rows).io) == pytest.approx(4 / 7)
    assert only(around(6, rows).io) == pytest.approx(3 / 7)


def test_readings_on_the_cpu_are_no_draws_of_what_it_does_off_it() -> None:
    rows = process(10, [(1.0, Act(run=0.5, state="R")), (1.0, Act(run=0.5, state="D"))] * 6)
    assert only(around(5, rows).io) == pytest.approx(0.5)


def test_the_larger_of_counted_and_found_is_taken() -> None:
    """Delay accounting knows nothing of opening files on FUSE."""
    act = Act(run=0.2, blkio=0.1, state="S", channel=FUSE)
    assert only(around(5, process(10, [(10, act)])).io) == pytest.approx(0.8)
    act = Act(run=0.2, blkio=0.3, state="S", channel="futex_wait")
    assert only(around(5, process(10, [(10, act)])).io) == pytest.approx(0.3)


def test_too_few_draws_are_no_word() -> None:
    rows = process(10, [(2.0, Act(run=0.2, state="D"))])
    assert np.isnan(only(around(1, rows).io))
    assert np.isnan(only(around(1, rows).asleep))
    assert only(around(1, rows).run) == pytest.approx(0.2)
    more = process(11, [(2.0, Act(run=0.2, state="D"))])  # six readings of two are enough
    assert only(around(1, rows, more).io) == pytest.approx(0.8)


def test_an_unknown_state_is_no_draw() -> None:
    rows = process(10, [(10, Act(run=0.2, state=None))])
    assert np.isnan(only(around(5, rows).io))
    counted = process(10, [(10, Act(run=0.2, blkio=0.3, state=None))])
    assert only(around(5, counted).io) == pytest.approx(0.3)


@pytest.mark.parametrize("column", ["run", "ready"])
def test_a_counter_that_is_missing_leaves_the_rest_unknown(column: str) -> None:
    act = dataclasses.replace(Act(run=0.5, ready=0.2, state="D"), **{column: None})
    found = around(5, process(10, [(10, act)]))
    assert np.isnan(only(getattr(found, column)))
    assert np.isnan(only(found.io))
    assert np.isnan(only(found.asleep))


def test_one_of_several_without_a_counter_makes_it_unknown() -> None:
    known, unknown = Act(run=0.5, ready=0.2), Act(run=0.5, ready=None)
    found = around(5, process(10, [(10, known)]), process(11, [(10, unknown)]))
    assert np.isnan(only(found.ready))
    assert only(found.run) == pytest.approx(0.5)


def test_without_processes_nothing_is_known() -> None:
    found = shares([], np.array([s(1), s(2)]))
    for values in (found.run, found.ready, found.io, found.asleep):
        assert np.isnan(values).all()
    assert found.count.tolist() == [0, 0]


def test_away_from_the_readings_nothing_is_known() -> None:
    rows = process(10, [(4, Act(run=0.5, state="D"))])
    for seconds in (-5, 20):
        found = around(seconds, rows)
        assert np.isnan(only(found.run))
        assert only(found.count) == 0


def test_rates_add_up_over_processes_that_were_seen() -> None:
    found = procs(
        process(10, [(10, Act(read=1000.0))]),
        process(11, [(10, Act(read=500.0))]),
        process(12, [(10, Act(read=None))]),
    )
    assert only(grown(found, "read_bytes", np.array([s(5)]), 10**9)) == pytest.approx(1500)
    assert np.isnan(only(grown(found[2:], "read_bytes", np.array([s(5)]), 10**9)))
    assert np.isnan(only(grown([], "read_bytes", np.array([s(5)]), 10**9)))


ACTS = st.builds(
    Act,
    run=st.sampled_from([0.0, 0.3, 1.0, None]),
    ready=st.sampled_from([0.0, 0.5, None]),
    blkio=st.sampled_from([0.0, 0.7, 9.0, None]),
    state=st.sampled_from(["R", "S", "D", None]),
    channel=st.sampled_from([None, FUSE, "futex_wait"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(ACTS, min_size=1, max_size=8), min_size=1, max_size=3))
def test_shares_are_parts_of_one(groups: list[list[Act]]) -> None:
    rows = [
        process(10 + number, [(1.0, act) for act in acts]) for number, acts in enumerate(groups)
    ]
    found = shares(procs(*rows), np.arange(s(-1), s(10), 10**9 // 4))
    total = found.run + found.ready + found.io + found.asleep
    known = ~np.isnan(total)
    assert_allclose(total[known], 1, atol=1e-9)
    for values in (found.run, found.ready, found.io):
        held = values[~np.isnan(values)]
        assert ((held >= 0) & (held <= 1 + 1e-9)).all()


def while_empty(
    begin: float, end: float, seconds: float, rows: Sequence[Row], *, launches: bool = True
) -> Shares:
    """The same, beside a GPU that was empty from `begin` to `end`."""

    def emptiness(times: np.ndarray) -> np.ndarray:
        return np.where((times >= s(begin)) & (times <= s(end)), 1.0, 0.0)

    return shares(procs(*[rows]), np.array([s(seconds)]), emptiness, launches=launches)


def test_few_readings_of_a_loader_are_pulled_to_what_alike_ones_of_a_wider_time_say() -> None:
    """In I/O every even second of twelve: what a wider time says counts as much as four more."""
    act, idle = Act(run=0.0, state="D"), Act(run=0.0, state="S")
    rows = process(10, [(1.0, act), (1.0, idle)] * 6)
    found = while_empty(0, 12, 5, rows, launches=False)
    assert only(found.io) == pytest.approx((4 + 4 * 6 / 13) / 11)


def test_a_loader_is_told_by_what_it_did_while_the_gpu_was_as_empty() -> None:
    """It slept for ten seconds beside a full GPU, and reads since the GPU is empty."""
    rows = process(10, [(10.0, Act(run=0.0, state="S")), (10.0, Act(run=0.0, state="D"))])
    assert only(while_empty(10, 20, 13, rows, launches=False).io) == pytest.approx(1)
    assert only(while_empty(0, 20, 13, rows, launches=False).io) < 0.9
    assert only(while_empty(30, 40, 13, rows, launches=False).io) == pytest.approx(1)


def test_readings_while_the_gpu_was_empty_tell_what_a_thread_did_then() -> None:
    rows = process(10, [(6, Act(run=0.1, state="S")), (3, Act(run=0.1, state="D"))])
    assert only(while_empty(6, 9, 7, rows).io) == pytest.approx(0.9)


def test_rare_readings_of_a_wider_time_are_better_than_many_of_another_thing() -> None:
    """Stopped for a second, ten seconds before; around the window it was seen asleep only."""
    stop, sleep = Act(run=0.1, state="T"), Act(run=0.1, state="S")
    rows = process(10, [(2, sleep), (2, stop), (20, sleep)])
    assert only(while_empty(2, 3.5, 14, rows).stopped) == pytest.approx(0.9)
    assert only(while_empty(100, 101, 14, rows).stopped) == pytest.approx(0)
    # Farther than fifteen seconds nothing is looked at.
    assert only(while_empty(2, 3.5, 20, rows).stopped) == pytest.approx(0)


def test_what_ran_while_the_gpu_was_empty() -> None:
    rows = process(10, [(4, Act(run=0.5, state="R")), (6, Act(run=0.5, state="S"))])
    assert only(while_empty(0, 3.5, 5, rows).run_when_empty) == pytest.approx(1)
    assert only(while_empty(5, 9, 5, rows).run_when_empty) == pytest.approx(0)
    assert np.isnan(only(while_empty(100, 101, 5, rows).run_when_empty))
    assert np.isnan(only(around(5, rows).run_when_empty))


def test_where_a_thread_sleeps_is_unknown_without_wait_channels() -> None:
    known = process(10, [(10, Act(run=0.2, state="S", channel="poll_schedule_timeout"))])
    assert only(around(5, known).in_poll) == pytest.approx(0.8)
    assert only(around(5, known).in_lock) == pytest.approx(0)
    unknown = process(11, [(10, Act(run=0.2, state="S"))])
    assert np.isnan(only(around(5, unknown).in_poll))
    running = process(12, [(10, Act(run=1.0, state="R"))])  # had no occasion to tell
    assert only(around(5, running).in_poll) == pytest.approx(0)
    assert np.isnan(only(around(5, known, unknown).in_poll))


def test_where_a_thread_waits_is_told_by_readings_of_a_wider_time_too() -> None:
    lock, other = "futex_do_wait", "do_nanosleep"
    rows = process(
        10,
        [
            (12, Act(run=0.1, state="S", channel=lock)),
            (12, Act(run=0.1, state="S", channel=other)),
        ],
    )
    found = while_empty(0, 24, 18, rows)
    assert only(found.in_lock) == pytest.approx(0)
    assert only(found.waits_wide) == pytest.approx(0.9 * 9 / 22, abs=0.05)
