"""Arithmetic on sets of half-open time intervals, in integers of nanoseconds.

A set is an int64 array of shape (n, 2), rows [start, end) sorted, disjoint, not touching and not
empty. Every function takes and returns such sets unless it says otherwise; nothing is rounded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

EMPTY: Ints = np.empty((0, 2), dtype=np.int64)
EMPTY.setflags(write=False)


def union(starts: Ints, ends: Ints) -> Ints:
    """Return the set that is covered by any of the intervals [start, end), in any order."""
    keep = ends > starts
    if not keep.all():
        starts, ends = starts[keep], ends[keep]
    if len(starts) == 0:
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.empty(len(starts), dtype=bool)
    first[0] = True
    np.greater(starts[1:], ends[:-1], out=first[1:])
    begin = np.flatnonzero(first)
    last = np.append(begin[1:] - 1, len(starts) - 1)
    return np.column_stack((starts[begin], ends[last]))


def merge(*sets: Ints) -> Ints:
    """Return the union of sets."""
    filled = [s for s in sets if len(s)]
    if not filled:
        return EMPTY
    if len(filled) == 1:
        return filled[0]
    both = np.concatenate(filled)
    return union(both[:, 0], both[:, 1])


def intersect(a: Ints, b: Ints) -> Ints:
    """Return what both sets cover."""
    return intersect_owned(a, b)[0]


def intersect_owned(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Return what both sets cover, and for each piece the row of `b` that it is a part of."""
    nobody = np.empty(0, dtype=np.int64)
    if len(a) == 0 or len(b) == 0:
        return EMPTY, nobody
    # For each interval of `a`, the run [low, high) of intervals of `b` that overlap it.
    low = np.searchsorted(b[:, 1], a[:, 0], side="right")
    high = np.searchsorted(b[:, 0], a[:, 1], side="left")
    counts = np.maximum(high - low, 0)
    total = int(counts.sum())
    if total == 0:
        return EMPTY, nobody
    ia = np.repeat(np.arange(len(a)), counts)
    offset = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    ib = np.repeat(low, counts) + offset
    both = np.column_stack((np.maximum(a[ia, 0], b[ib, 0]), np.minimum(a[ia, 1], b[ib, 1])))
    return both, np.asarray(ib, dtype=np.int64)


def flatten(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return disjoint spans covering the same time, and the interval that owns each.

    Where intervals overlap, the one that ends last owns the time.
    """
    keep = np.flatnonzero(ends > starts)
    order = keep[np.argsort(starts[keep], kind="stable")]
    s, e = starts[order], ends[order]
    if len(order) and (s[1:] < np.maximum.accumulate(e)[:-1]).any():
        # Rare: two collectives of different groups at once. Later-ending ones cut earlier ones.
        spans: list[tuple[int, int, int]] = []
        for begin, end, owner in zip(s.tolist(), e.tolist(), order.tolist(), strict=True):
            if spans and begin < spans[-1][1]:
                last_begin, last_end, last_owner = spans[-1]
                if end <= last_end:
                    continue
                spans[-1] = (last_begin, begin, last_owner)
                if begin == last_begin:
                    spans.pop()
            spans.append((begin, end, owner))
        flat = np.array(spans, dtype=np.int64).reshape(-1, 3)
        return flat[:, :2], flat[:, 2]
    return np.column_stack((s, e)), np.asarray(order, dtype=np.int64)


def complement(a: Ints, begin: int, end: int) -> Ints:
    """Return what the set leaves over of [begin, end)."""
    if end <= begin:
        return EMPTY
    starts = np.concatenate(([begin], np.clip(a[:, 1], begin, end)))
    ends = np.concatenate((np.clip(a[:, 0], begin, end), [end]))
    out = np.column_stack((starts, ends))
    return out[out[:, 1] > out[:, 0]]


def subtract(a: Ints, b: Ints) -> Ints:
    """Return what `a` covers and `b` does not."""
    if len(a) == 0 or len(b) == 0:
        return a
    return intersect(a, complement(b, int(a[0, 0]), int(a[-1, 1])))


def clip(a: Ints, begin: int, end: int) -> Ints:
    """Return the part of the set inside [begin, end)."""
    low = int(np.searchsorted(a[:, 1], begin, side="right"))
    high = int(np.searchsorted(a[:, 0], end, side="left"))
    if high <= low or end <= begin:
        return EMPTY
    return np.asarray(np.clip(a[low:high], begin, end), dtype=np.int64)


def length_ns(a: Ints) -> int:
    """Return how long the set is, in nanoseconds."""
    return int((a[:, 1] - a[:, 0]).sum())


def covered_ns(a: Ints, starts: Ints, ends: Ints) -> Ints:
    """Return for each [start, end) how many nanoseconds of it the set covers; shape (n,)."""
    if len(a) == 0:
        return np.zeros(len(starts), dtype=np.int64)
    total = np.concatenate(([0], np.cumsum(a[:, 1] - a[:, 0])))

    def before(times: Ints) -> Ints:
        index = np.searchsorted(a[:, 0], times, side="right") - 1
        inside = np.clip(times - a[index, 0], 0, a[index, 1] - a[index, 0])
        return np.asarray(np.where(index < 0, 0, total[index] + inside), dtype=np.int64)

    return np.asarray(before(ends) - before(starts), dtype=np.int64)


def holds(a: Ints, times: Ints) -> npt.NDArray[np.bool_]:
    """Return for each time whether the set covers it; shape (n,)."""
    if len(a) == 0:
        return np.zeros(len(times), dtype=bool)
    index = np.searchsorted(a[:, 0], times, side="right") - 1
    return np.asarray((index >= 0) & (times < a[np.maximum(index, 0), 1]), dtype=bool)
