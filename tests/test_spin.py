from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_make import US, collective, device, kernel
from whyidle_rules import intervals
from whyidle_rules.intervals import Ints
from whyidle_rules.trace.comm import CommKernels
from whyidle_rules.trace.gaps import Piece
from whyidle_rules.trace.match import Matched
from whyidle_rules.trace.spin import SpinPieces, Waits, cut, waits_of

Told = list[tuple[float, float, str, int, int]]


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def comm(*spans: tuple[float, float], sends: bool = False) -> CommKernels:
    events = [
        collective(begin, end - begin, n, operation="send" if sends else "allreduce")
        for n, (begin, end) in enumerate(spans)
    ]
    return device(events).comm if events else device([kernel(0, 1)]).comm


def waits(*known: tuple[float, int, bool]) -> Waits:
    """Return (wait in microseconds or -1, late GPU, complete) of each kernel."""
    return Waits(
        wait_ns=ints(*(round(us * US) if us >= 0 else -1 for us, _, _ in known)),
        late=ints(*(late for _, late, _ in known)),
        complete=np.array([complete for _, _, complete in known], dtype=bool),
    )


def everything(kernels: CommKernels) -> Ints:
    return intervals.union(kernels.start, kernels.end)


def told(found: SpinPieces) -> Told:
    """Return begin, end, kind, kernel and late GPU of each piece."""
    return [
        (begin / US, end / US, Piece(kind).name, row, late)
        for (begin, end), kind, row, late in zip(
            found.spans.tolist(),
            found.kinds.tolist(),
            found.kernel.tolist(),
            found.late.tolist(),
            strict=True,
        )
    ]


def test_a_kernel_waits_first_and_transfers_then() -> None:
    kernels = comm((0, 100), (200, 250))
    found = cut(everything(kernels), kernels, waits((60, 3, True), (0, -1, True)))
    assert told(found) == [
        (0, 60, "WAIT", 0, 3),
        (60, 100, "TRANSFER", 0, -1),
        (200, 250, "TRANSFER", 1, -1),
    ]


def test_what_follows_a_wait_in_a_group_with_ranks_missing_is_open() -> None:
    kernels = comm((0, 100), (200, 250))
    found = cut(everything(kernels), kernels, waits((60, 3, False), (0, -1, False)))
    assert told(found) == [
        (0, 60, "WAIT", 0, 3),
        (60, 100, "EXPOSED", 0, -1),
        (200, 250, "EXPOSED", 1, -1),
    ]


def test_without_a_match_nothing_is_told() -> None:
    kernels = comm((0, 100))
    assert told(cut(everything(kernels), kernels, waits((-1, -1, False)))) == [
        (0, 100, "EXPOSED", 0, -1)
    ]
    sends = comm((0, 100), sends=True)
    assert told(cut(everything(sends), sends, waits((-1, -1, False)))) == [
        (0, 100, "POINT_TO_POINT", 0, -1)
    ]


def test_only_what_is_exposed_is_cut() -> None:
    kernels = comm((0, 100))
    exposed = np.array([[10, 30], [50, 70], [90, 100]], dtype=np.int64) * US
    assert told(cut(exposed, kernels, waits((60, 1, True)))) == [
        (10, 30, "WAIT", 0, 1),
        (50, 60, "WAIT", 0, 1),
        (60, 70, "TRANSFER", 0, -1),
        (90, 100, "TRANSFER", 0, -1),
    ]


def test_while_something_moves_nobody_waits() -> None:
    kernels = comm((0, 100), (20, 80))
    found = cut(everything(kernels), kernels, waits((90, 1, True), (30, 2, True)))
    assert told(found) == [
        (0, 50, "WAIT", 0, 1),
        (50, 80, "TRANSFER", 1, -1),
        (80, 90, "WAIT", 0, 1),
        (90, 100, "TRANSFER", 0, -1),
    ]


def test_of_two_waits_the_one_that_ends_last_is_the_reason() -> None:
    kernels = comm((0, 100), (20, 100))
    found = cut(everything(kernels), kernels, waits((50, 1, True), (70, 2, True)))
    assert told(found) == [
        (0, 20, "WAIT", 0, 1),
        (20, 50, "WAIT", 1, 2),
        (50, 100, "TRANSFER", 0, -1),
    ]


def test_no_communication_is_no_pieces() -> None:
    kernels = comm()
    assert told(cut(everything(kernels), kernels, waits())) == []


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(-1, 30)), max_size=6)


@settings(deadline=None)
@given(SPANS, st.lists(st.booleans(), min_size=6, max_size=6), st.sets(st.integers(0, 89)))
def test_pieces_cover_what_is_exposed_exactly_once(
    spans: list[tuple[int, int, int]], complete: list[bool], hidden: set[int]
) -> None:
    spans = sorted(spans)
    kernels = comm(*((begin, begin + length) for begin, length, _ in spans))
    known = waits(
        *(
            (min(wait, length), row if wait > 0 else -1, complete[row])
            for row, (_, length, wait) in enumerate(spans)
        )
    )
    starts = np.array(sorted(hidden), dtype=np.int64) * US
    exposed = intervals.subtract(everything(kernels), intervals.union(starts, starts + US))
    found = cut(exposed, kernels, known)
    assert (found.spans[:, 0] < found.spans[:, 1]).all()
    assert (found.spans[1:, 0] >= found.spans[:-1, 1]).all()
    assert np.array_equal(intervals.union(found.spans[:, 0], found.spans[:, 1]), exposed)
    for begin, end, kind, row, late in told(found):
        assert kernels.start[row] <= begin * US < end * US <= kernels.end[row]
        came = kernels.start[row] + max(0, int(known.wait_ns[row]))
        assert end * US <= came if kind == "WAIT" else begin * US >= came
        assert (late >= 0) == (kind == "WAIT")
        assert (kind == "TRANSFER") <= bool(known.complete[row])


def matched(gpus: list[int], rows: list[list[int]], wait: list[list[int]]) -> Matched:
    return Matched(
        gpus=gpus,
        rows=np.array(rows, dtype=np.int64),
        wait_ns=np.array(wait, dtype=np.int64),
        late=np.array([row.index(0) if 0 in row else -1 for row in wait], dtype=np.int64),
        complete=np.array([min(row) >= 0 for row in rows], dtype=bool),
    )


def test_waits_of_all_groups_come_together() -> None:
    kernels = comm(*((n * 100.0, n * 100.0 + 50) for n in range(5)))
    first = matched([4, 7], [[0, 0], [2, 1], [-1, 2]], [[500, 0], [0, 300], [-1, 0]])
    second = matched([7, 9], [[4, 0], [3, 1]], [[800, 0], [-1, -1]])
    other = matched([1, 9], [[0, 0]], [[0, 9]])
    found = waits_of(7, kernels, [first, second, other])
    assert found.wait_ns.tolist() == [0, 300, 0, -1, 800]
    assert found.late.tolist() == [7, 4, 7, -1, 9]
    assert found.complete.tolist() == [True, True, False, False, True]
    nothing = waits_of(3, kernels, [first, second, other])
    assert set(nothing.wait_ns.tolist()) == set(nothing.late.tolist()) == {-1}
    assert not nothing.complete.any()


def test_exposed_time_outside_of_every_kernel_is_an_error_of_ours() -> None:
    kernels = comm((0, 100))
    with pytest.raises(AssertionError, match="outside of every kernel"):
        cut(np.array([[0, 200 * US]], dtype=np.int64), kernels, waits((0, -1, True)))
