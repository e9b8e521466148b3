"""Counters over windows: totals are conserved, and what nobody read is not known."""

from __future__ import annotations

from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from whyidle.clock import NS_PER_S
from whyidle_rules.recording.series import Counter, counter, fetch, nearest

GAP_NS = 3 * NS_PER_S


def made(times: list[float], values: list[float], bits: int = 64) -> Counter:
    """Return a counter read at these seconds."""
    return counter(ns(*times), np.array(values, dtype=np.float64), gap_ns=GAP_NS, bits=bits)


def ns(*seconds: float) -> Any:
    return np.array([round(second * NS_PER_S) for second in seconds], dtype=np.int64)


def between(read: Counter, *edges: float) -> list[float]:
    """Return growth in the windows between these edges, in seconds."""
    return list(map(float, read.between(ns(*edges[:-1]), ns(*edges[1:]))))


def test_growth_is_spread_evenly_between_two_readings() -> None:
    read = made([0, 1, 2], [100, 110, 150])
    # A quarter of the first second, its middle half with none of the next, across the reading.
    assert between(read, 0, 0.25) == [2.5]
    assert between(read, 0.25, 0.75) == [5]
    assert between(read, 0.9, 1.5) == [pytest.approx(1 + 20)]


def test_windows_that_touch_sum_to_the_growth() -> None:
    read = made([0, 1, 2], [0, 7, 8])
    parts = between(read, 0, 0.3, 0.301, 1, 1.7, 2)
    assert sum(parts) == pytest.approx(8)
    assert parts[0] == pytest.approx(2.1)
    assert parts[3] == pytest.approx(0.7)


def test_before_the_first_and_after_the_last_reading_nothing_is_known() -> None:
    read = made([1, 2], [0, 10])
    assert_array_equal(np.isnan(between(read, 0.5, 1, 1.5, 2, 2.5)), [True, False, False, True])
    assert np.isnan(between(read, 0.999, 1.5)).all()  # partly known is not known
    assert np.isnan(between(read, 1.5, 2.001)).all()


@pytest.mark.parametrize("seconds", [[], [1.0]], ids=["none", "one"])
def test_without_two_readings_nothing_is_known(seconds: list[float]) -> None:
    read = made(seconds, [5.0] * len(seconds))
    assert np.isnan(between(read, 1, 1, 2)).all()
    assert not read.covers(ns(1), ns(1)).any()
    assert [part.tolist() for part in read.around(ns(1, 2), NS_PER_S, 1)] == [[0, 0], [0, 0]]


def test_a_counter_that_begins_anew_grew_by_what_it_shows() -> None:
    # 40 to 50, a restart, 6 shown at 2 s, then 6 to 16.
    read = made([0, 1, 2, 3], [40, 50, 6, 16])
    assert between(read, 0, 1, 2, 3) == [10, 6, 10]


def test_a_counter_of_32_bits_that_wraps_lost_nothing() -> None:
    top = 2**32
    assert between(made([0, 1], [top - 5, 20], bits=32), 0, 1) == [25]
    # The same readings of 64 bits are a restart.
    assert between(made([0, 1], [top - 5, 20], bits=64), 0, 1) == [20]
    # In the lower half it would have had to grow by more than half of all: it began anew.
    assert between(made([0, 1], [2**31 - 10, 20], bits=32), 0, 1) == [20]


def test_a_gap_is_unknown_and_its_neighbours_are_not() -> None:
    # 3 s apart is just allowed, 3.5 s is not.
    read = made([0, 1, 4, 7.5, 8], [0, 1, 4, 9, 9.5])
    assert between(read, 0, 1, 4) == [1, 3]
    assert np.isnan(between(read, 3.5, 4.001, 5, 7.499, 7.501)).tolist() == [True] * 4
    assert between(read, 3.5, 4) == [0.5]
    assert between(read, 7.5, 8) == [0.5]


def test_of_two_readings_at_once_the_later_one_counts() -> None:
    read = made([0, 1, 1, 2], [0, 3, 5, 6])
    assert between(read, 0, 1, 2) == [5, 1]


def test_readings_that_failed_are_left_out() -> None:
    read = made([0, 1, 2, 3], [0, np.nan, 4, 5])
    assert between(read, 0, 1, 2, 3) == [2, 2, 1]
    # Left out they leave a gap like any other.
    read = made([0, 1, 2, 3, 4], [0, np.nan, np.nan, np.nan, 8])
    assert np.isnan(between(read, 1, 2)).all()


def test_around_is_cut_to_the_readings_and_says_how_much_it_saw() -> None:
    read = made([0, 1, 2], [0, 10, 30])
    growth, covered = read.around(ns(1, 0, 2.5), NS_PER_S // 2, NS_PER_S // 4)
    # [0.5, 1.5]: 5 + 10; [-0.5, 0.5] cut to half a second; [2, 3]: nothing of it was read.
    assert_allclose(growth, [15, 5, 0])
    assert_array_equal(covered, ns(1, 0.5, 0))


def test_around_says_nothing_near_a_gap_or_of_too_little() -> None:
    read = made([0, 1, 5, 6], [0, 10, 50, 60])
    growth, covered = read.around(ns(0.5, 3, 5.8), NS_PER_S // 2, NS_PER_S // 4)
    assert_allclose(growth, [10, 0, 7])
    assert_array_equal(covered, ns(1, 0, 0.7))
    growth, covered = read.around(ns(6.3), NS_PER_S // 2, NS_PER_S // 4)
    assert (growth.tolist(), covered.tolist()) == ([0], [0])  # 0.2 s are less than 0.25


def test_nearest_prefers_the_latest_reading_that_was() -> None:
    times = ns(1, 2, 5)
    found = nearest(times, ns(0.6, 1, 1.9, 2.9, 3.6, 4.4, 5.2, 9), NS_PER_S)
    assert found.tolist() == [0, 0, 0, 1, -1, 2, 2, -1]
    assert nearest(ns(), ns(1), NS_PER_S).tolist() == [-1]


readings = st.lists(
    st.tuples(st.integers(1, 2 * NS_PER_S), st.integers(0, 10**9)), min_size=2, max_size=12
)


@given(readings, st.lists(st.floats(0, 1), max_size=8))
def test_touching_windows_have_all_of_the_growth_between_their_edges(
    steps: list[tuple[int, int]], places: list[float]
) -> None:
    times = np.cumsum([step for step, _ in steps])
    values = np.cumsum([grown for _, grown in steps]).astype(np.float64)
    read = counter(times, values, gap_ns=GAP_NS)
    begin, end = int(times[0]), int(times[-1])
    edges = np.unique([begin, end, *(begin + int((end - begin) * place) for place in places)])
    parts = read.between(edges[:-1], edges[1:])
    assert (parts >= 0).all()
    assert parts.sum() == pytest.approx(values[-1] - values[0], rel=1e-9, abs=1e-3)


@given(readings, st.data())
def test_growth_is_what_every_step_by_itself_says(
    steps: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Restarts anywhere: between two readings the growth is their difference, or the new value."""
    times = np.cumsum([step for step, _ in steps])
    values = [value for _, value in steps]  # as they come: up and down
    read = counter(times, np.array(values, dtype=np.float64), gap_ns=GAP_NS)
    at = data.draw(st.integers(0, len(values) - 2))
    before, after = values[at], values[at + 1]
    grown = after - before if after >= before else after
    assert read.between(times[at : at + 1], times[at + 1 : at + 2])[0] == pytest.approx(
        grown, abs=1e-3
    )


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=20))
def test_a_32_bit_counter_never_runs_backwards(values: list[int]) -> None:
    times = np.arange(len(values), dtype=np.int64) * NS_PER_S
    read = counter(times, np.array(values, dtype=np.float64), gap_ns=GAP_NS, bits=32)
    parts = read.between(times[:-1], times[1:])
    assert (parts >= 0).all()
    assert (parts < 2**32).all()


def test_columns_keep_what_is_unknown_apart_from_zero() -> None:
    with duckdb.connect() as con:
        got = fetch(
            con,
            "SELECT * FROM (VALUES (1, NULL::BIGINT, 'x', true), (2, 0, NULL, NULL)) t(a, b, c, d)"
            " ORDER BY a",
        )
    assert got["a"].dtype == np.int32 or got["a"].dtype == np.int64
    assert_array_equal(got["b"], [np.nan, 0])
    assert got["c"].tolist() == ["x", None]
    assert_array_equal(got["d"].astype(np.float64), [1, np.nan])


def test_whole_numbers_without_null_stay_exact() -> None:
    big = 2**62 + 1
    with duckdb.connect() as con:
        got = fetch(con, "SELECT $1::BIGINT AS t", [big])
    assert got["t"].tolist() == [big]


def test_groups_keep_the_order_of_rows_and_tell_null_apart() -> None:
    with duckdb.connect() as con:
        got = fetch(
            con,
            "SELECT * FROM (VALUES ('b', 1, 10), (NULL, 1, 20), ('b', 2, 30), ('b', 1, 40))"
            " t(k, n, v)",
        )
    found = {key: own["v"].tolist() for key, own in got.groups("k", "n").items()}
    assert found == {("b", 1): [10, 40], (None, 1): [20], ("b", 2): [30]}
    assert got.where(np.zeros(4, dtype=bool)).groups("k") == {}
