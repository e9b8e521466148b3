"""Interval arithmetic against a model that cannot be wrong: sets of whole nanoseconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whyidle_rules import intervals
from whyidle_rules.intervals import EMPTY, Ints

Pairs = list[tuple[int, int]]
PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)
# Nanoseconds since 1970 do not fit a double.
BASES = st.sampled_from([0, -30, 1_748_736_000_000_000_001])
TIMES = st.integers(-2, 62)


def columns(pairs: Pairs, base: int = 0) -> tuple[Ints, Ints]:
    flat = np.array(pairs, dtype=np.int64).reshape(-1, 2) + base
    return flat[:, 0], flat[:, 1]


def as_set(pairs: Pairs, base: int = 0) -> Ints:
    return intervals.union(*columns(pairs, base))


def points(spans: Ints, base: int = 0) -> set[int]:
    """Return the nanoseconds that spans cover; they must be sorted, disjoint and not empty."""
    assert spans.dtype == np.int64
    assert spans.shape[1:] == (2,)
    assert (spans[:, 0] < spans[:, 1]).all(), spans
    assert (spans[1:, 0] >= spans[:-1, 1]).all()
    return {t for begin, end in (spans - base).tolist() for t in range(begin, end)}


def model(pairs: Pairs) -> set[int]:
    return {t for begin, end in pairs for t in range(begin, end)}


def canonical(spans: Ints) -> bool:
    return bool((spans[1:, 0] > spans[:-1, 1]).all())


@settings(deadline=None)
@given(PAIRS, BASES)
def test_union(pairs: Pairs, base: int) -> None:
    found = as_set(pairs, base)
    assert points(found, base) == model(pairs)
    assert canonical(found)
    assert intervals.length_ns(found) == len(model(pairs))


@settings(deadline=None)
@given(PAIRS, PAIRS, BASES)
def test_two_sets(a: Pairs, b: Pairs, base: int) -> None:
    one, other = as_set(a, base), as_set(b, base)
    merged = intervals.merge(one, other, EMPTY)
    assert points(merged, base) == model(a) | model(b)
    assert canonical(merged)
    assert points(intervals.intersect(one, other), base) == model(a) & model(b)
    left = intervals.subtract(one, other)
    assert points(left, base) == model(a) - model(b)
    assert intervals.length_ns(left) == len(model(a) - model(b))


@settings(deadline=None)
@given(PAIRS, PAIRS, BASES)
def test_what_both_cover_has_its_owner(a: Pairs, b: Pairs, base: int) -> None:
    one, other = as_set(a, base), as_set(b, base)
    spans, owner = intervals.intersect_owned(one, other)
    assert points(spans, base) == model(a) & model(b)
    assert len(owner) == len(spans)
    for (begin, end), row in zip(spans.tolist(), owner.tolist(), strict=True):
        assert other[row, 0] <= begin < end <= other[row, 1]


@settings(deadline=None)
@given(PAIRS, st.data())
def test_touching_pieces_of_several_owners_stay_apart(a: Pairs, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, 60), min_size=2, max_size=6)))
    other = np.column_stack((cuts[:-1], cuts[1:])).astype(np.int64)
    spans, owner = intervals.intersect_owned(as_set(a), other)
    expected = {t: row for row in range(len(other)) for t in range(cuts[row], cuts[row + 1])}
    found = {
        t: row
        for (begin, end), row in zip(spans.tolist(), owner.tolist(), strict=True)
        for t in range(begin, end)
    }
    assert found == {t: row for t, row in expected.items() if t in model(a)}


@settings(deadline=None)
@given(PAIRS, BASES)
def test_flatten_gives_time_to_the_one_that_ends_last(pairs: Pairs, base: int) -> None:
    spans, owner = intervals.flatten(*columns(pairs, base))
    assert points(spans, base) == model(pairs)
    for (begin, end), row in zip((spans - base).tolist(), owner.tolist(), strict=True):
        for t in range(begin, end):
            latest = max(stop for start, stop in pairs if start <= t < stop)
            assert pairs[row][0] <= t < pairs[row][1] == latest


@settings(deadline=None)
@given(PAIRS, TIMES, TIMES, BASES)
def test_bounds(pairs: Pairs, begin: int, end: int, base: int) -> None:
    inside = set(range(begin, end))
    found = as_set(pairs, base)
    assert points(intervals.complement(found, begin + base, end + base), base) == (
        inside - model(pairs)
    )
    clipped = intervals.clip(found, begin + base, end + base)
    assert points(clipped, base) == inside & model(pairs)


@settings(deadline=None)
@given(PAIRS, st.lists(st.tuples(TIMES, TIMES).map(sorted), max_size=6), BASES)
def test_covered(pairs: Pairs, windows: list[list[int]], base: int) -> None:
    starts, ends = columns([(begin, end) for begin, end in windows], base)
    found = intervals.covered_ns(as_set(pairs, base), starts, ends)
    assert found.dtype == np.int64
    assert found.tolist() == [len(set(range(a, b)) & model(pairs)) for a, b in windows]


@settings(deadline=None)
@given(PAIRS, st.lists(TIMES, max_size=8), BASES)
def test_holds(pairs: Pairs, times: list[int], base: int) -> None:
    found = intervals.holds(as_set(pairs, base), np.array(times, dtype=np.int64) + base)
    assert found.dtype == np.bool_
    assert found.tolist() == [t in model(pairs) for t in times]


def test_the_empty_set_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        EMPTY[:] = 1
