"""Counters and samples as arrays, and what they say of windows of time.

Between two readings a counter is taken to have grown evenly; before the first and after the last,
and across a gap in the readings, nothing is known: NaN, never 0. Times are int64 nanoseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt

from whyidle_rules import intervals
from whyidle_rules.intervals import Ints

Floats = npt.NDArray[np.float64]
Truths = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

_WRAP = {32: float(1 << 32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A counter: times of its readings, growth since the first one, and where readings are apart.

    `gaps` are the spans between two readings that are longer than allowed.
    """

    times: Ints
    growth: Floats
    gaps: Ints

    def between(self, starts: Ints, ends: Ints) -> Floats:
        """Return the growth inside each window; NaN where it is not wholly covered."""
        if len(self.times) < 2:
            return np.full(len(starts), np.nan)
        out = np.asarray(self._at(ends) - self._at(starts))
        out[~self.covers(starts, ends)] = np.nan
        return out

    def covers(self, starts: Ints, ends: Ints) -> Truths:
        """Return whether each window lies between the first and the last reading, off gaps."""
        if len(self.times) < 2:
            return np.zeros(len(starts), dtype=bool)
        inside = (starts >= self.times[0]) & (ends <= self.times[-1])
        if len(self.gaps):
            inside &= intervals.covered_ns(self.gaps, starts, ends) <= 0
        return np.asarray(inside, dtype=bool)

    def around(self, centres: Ints, half_ns: int | Ints, least_ns: int) -> tuple[Floats, Floats]:
        """Return growth and covered time in [centre - half, centre + half], cut to the readings.

        Both are 0 where less than `least_ns` of that is covered.
        """
        if len(self.times) < 2:
            nothing = np.zeros(len(centres))
            return nothing, nothing.copy()
        low = np.clip(centres - half_ns, self.times[0], self.times[-1])
        high = np.clip(centres + half_ns, self.times[0], self.times[-1])
        covered = high - low
        known = covered >= least_ns
        if len(self.gaps):
            known &= intervals.covered_ns(self.gaps, low, high) <= 0
        growth = self._at(high) - self._at(low)
        return np.where(known, growth, 0.0), np.where(known, covered.astype(np.float64), 0.0)

    def _at(self, times: Ints) -> Floats:
        return np.asarray(np.interp(times, self.times, self.growth))


def counter(times: Array, values: Array, *, gap_ns: int, bits: int = 64) -> Counter:
    """Return a counter of readings in order of time; NaN readings are left out.

    One that falls has wrapped, if it has so few bits and was in the upper half; otherwise it began
    anew, and what it shows now is what it grew by at least.
    """
    times, values = times.astype(np.int64, copy=False), values.astype(np.float64, copy=False)
    known = ~np.isnan(values)
    if not known.all():
        times, values = times[known], values[known]
    same = times[1:] == times[:-1]
    if same.any():  # two readings of one moment: the later one counts
        last = np.append(~same, True)
        times, values = times[last], values[last]
    steps = np.diff(values)
    if bits in _WRAP:
        wrapped = (steps < 0) & (values[:-1] > _WRAP[bits] / 2)
        steps = np.where(wrapped, steps + _WRAP[bits], steps)
    steps = np.where(steps < 0, values[1:] if len(values) else steps, steps)
    apart = np.flatnonzero(np.diff(times) > gap_ns)
    return Counter(
        times=times,
        growth=np.concatenate(([0.0], np.cumsum(steps))) if len(times) else np.empty(0),
        gaps=intervals.union(times[apart], times[apart + 1]),
    )


def nearest(times: Ints, centres: Ints, within_ns: int) -> Ints:
    """Return for each centre the index of the latest time at or before it, else of the next one.

    -1 where none is as near as `within_ns`.
    """
    if len(times) == 0:
        return np.full(len(centres), -1, dtype=np.int64)
    before = np.searchsorted(times, centres, side="right") - 1
    after = np.minimum(before + 1, len(times) - 1)
    held = np.maximum(before, 0)
    use_before = (before >= 0) & (centres - times[held] <= within_ns)
    use_after = np.abs(times[after] - centres) <= within_ns
    return np.asarray(np.where(use_before, held, np.where(use_after, after, -1)), dtype=np.int64)


def runs(truths: Truths) -> tuple[Ints, Ints]:
    """Return the first and the last place of each unbroken run of truths."""
    edges = np.diff(np.concatenate(([0], truths.astype(np.int8), [0])))
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1


def numbered(values: Array) -> tuple[Ints, list[Any]]:
    """Number values, None among them, in some order; return numbers and values.

    Equal neighbours are looked up once: sorting a day of texts would take ten times as long.
    """
    if len(values) == 0:
        return np.empty(0, dtype=np.int64), []
    begins = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
    if values.dtype != object and len(begins) > len(values) // 8:
        each, inverse = np.unique(values, return_inverse=True)
        return inverse.astype(np.int64).reshape(-1), each.tolist()
    seen: dict[Any, int] = {}
    numbers = [seen.setdefault(value, len(seen)) for value in values[begins].tolist()]
    lengths = np.diff(np.append(begins, len(values)))
    return np.repeat(np.array(numbers, dtype=np.int64), lengths), list(seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Rows of a query, column by column. Numbers that are NULL are NaN, texts None."""

    of: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.of[name]

    def __len__(self) -> int:
        return len(next(iter(self.of.values()))) if self.of else 0

    def where(self, chosen: Truths | slice | Ints) -> Columns:
        """Return some of the rows."""
        return Columns(of={name: values[chosen] for name, values in self.of.items()})

    def groups(self, *keys: str) -> dict[tuple[Any, ...], Columns]:
        """Return the rows by the values of `keys`, each group in the order of the rows."""
        size = len(self)
        if size == 0:
            return {}
        codes = np.zeros(size, dtype=np.int64)
        for key in keys:
            numbers, words = numbered(self.of[key])
            codes = codes * len(words) + numbers
        edges = np.flatnonzero(np.diff(codes)) + 1
        parts: Sequence[slice | Ints]
        if len(np.unique(codes[np.append(0, edges)])) == len(edges) + 1:  # in order already
            bounds = [0, *edges.tolist(), size]
            parts = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
        else:
            order = np.argsort(codes, kind="stable")
            parts = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
        found = {}
        for rows in parts:
            own = self.where(rows)
            found[tuple(own[key][0] for key in keys)] = own
        return found


def fetch(
    con: duckdb.DuckDBPyConnection, query: str, values: Sequence[Any] | Mapping[str, Any] = ()
) -> Columns:
    """Run a query. BIGINT columns that hold no NULL stay int64; others with NULLs are float64."""
    raw = con.execute(query, values or None).fetchnumpy()
    return Columns(of={name: _plain(column) for name, column in raw.items()})


def _plain(column: Array) -> Array:
    if not isinstance(column, np.ma.MaskedArray):
        return np.asarray(column)
    mask = np.ma.getmaskarray(column)
    if column.dtype == object:
        return np.array([None if gone else v for v, gone in zip(column.data, mask, strict=True)])
    if not mask.any() and column.dtype != bool:
        return np.asarray(column.data)
    plain = np.asarray(column.data).astype(np.float64)
    plain[mask] = np.nan
    return plain


def one(con: duckdb.DuckDBPyConnection, query: str, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the one row of a query that aggregates, and leave nothing of it open."""
    (row,) = con.execute(query, dict(values)).fetchall()
    return tuple(row)
