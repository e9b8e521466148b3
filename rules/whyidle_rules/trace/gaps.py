"""What the host did while a GPU was empty.

Every idle stretch ends with a GPU event, and that event was launched by a host thread. What that
thread did before its launch call says why the GPU was empty:

    gap begins        launch call begins        gap ends
        |--- launch late ----|--- launch latency ---|     the host was late
        |-------------- launch latency -------------|     the call had begun, and took its time
        |------------------ queued -----------------|     the call had ended before the gap began

Nothing else is joined to a launch: 4 to 30 % of GPU events have no launch record, and a gap before
such an event is of unknown cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from whyidle_rules import intervals
from whyidle_rules.intervals import EMPTY, Ints
from whyidle_rules.trace.columns import NO_VALUE, TIME_MAX_NS, Columns
from whyidle_rules.trace.names import Host

# GPU and host clocks of one trace agree to about this: launches up to 13 us after the kernel that
# they started were seen on V100.
CLOCK_SLACK_NS = 20_000
# Python and the dispatcher take up to a few milliseconds from one launch to the next; a host that
# is later than this was at something else. The rules of the launch group ask for the same length.
LONG_GAP_NS = 5_000_000
# A GPU takes 1 to 20 us from one queued kernel to the next; whatever holds one up for longer
# (an event of another process, a callback of the host) is not recorded.
KERNEL_GAP_MAX_NS = 100_000


class Piece(IntEnum):
    """What is known of a stretch of time; each but UNSEEN and HELD ones is an evidence column."""

    UNSEEN = 0  # the launch is not recorded
    LATE_UNSEEN = 1  # the launch came late; nothing says what its thread did
    CHECKPOINT_SAVE = 2
    CHECKPOINT_LOAD = 3
    DATA = 4
    DATA_IN_TRAINER = 5
    GC = 6
    COMPILE = 7
    LOGGING = 8
    PROFILER = 9
    ALLOCATOR = 10
    EVALUATION = 11
    SYNC = 12
    BUSY = 13
    SILENT = 14
    LATENCY = 15
    QUEUED = 16
    HELD = 17  # queued for longer than a GPU needs from one kernel to the next
    COPY_H2D_PAGEABLE = 18
    COPY_H2D = 19
    COPY_D2H = 20
    COPY_DEVICE = 21
    # Spinning, not empty: only communication runs.
    TRANSFER = 22
    WAIT = 23
    EXPOSED = 24
    POINT_TO_POINT = 25
    WORKING = 26


# The most specific first: a second that fits two kinds is the first one's.
_SPAN_PIECES: tuple[tuple[Host, Piece], ...] = (
    (Host.CHECKPOINT_SAVE, Piece.CHECKPOINT_SAVE),
    (Host.CHECKPOINT_LOAD, Piece.CHECKPOINT_LOAD),
    (Host.DATA_IN_TRAINER, Piece.DATA_IN_TRAINER),
    (Host.DATA, Piece.DATA),
    (Host.GC, Piece.GC),
    (Host.COMPILE, Piece.COMPILE),
    (Host.LOGGING, Piece.LOGGING),
    (Host.PROFILER, Piece.PROFILER),
    (Host.ALLOCATOR, Piece.ALLOCATOR),
    (Host.EVALUATION, Piece.EVALUATION),
)


@dataclass(slots=True)
class Pieces:
    """Stretches of time without a kernel, sorted and disjoint.

    `gap_ns` is the length of the whole stretch around each.
    """

    spans: Ints
    kinds: npt.NDArray[np.int8]
    gap_ns: Ints


@dataclass(slots=True)
class Launches:
    """For each GPU event its launch call: row of the call, start, end, thread; -1 if unknown."""

    call: Ints
    start: Ints
    end: Ints
    thread: Ints


class HostSide:
    """What the host threads of one file did."""

    def __init__(self, columns: Columns) -> None:
        self._start = np.frombuffer(columns.call_start, dtype=np.int64)
        self._end = np.frombuffer(columns.call_end, dtype=np.int64)
        self._thread = np.frombuffer(columns.call_thread, dtype=np.int32).astype(np.int64)
        self._kind = np.frombuffer(columns.call_kind, dtype=np.int8)
        correlation = np.frombuffer(columns.call_correlation, dtype=np.int64)
        launching = np.flatnonzero(correlation != NO_VALUE)
        order = launching[np.argsort(correlation[launching], kind="stable")]
        self._by_correlation = order
        self._correlations = correlation[order]
        self._op_start = np.frombuffer(columns.op_start, dtype=np.int64)
        self._op_end = np.frombuffer(columns.op_end, dtype=np.int64)
        self._op_thread = np.frombuffer(columns.op_thread, dtype=np.int32)
        self._span_start = np.frombuffer(columns.span_start, dtype=np.int64)
        self._span_end = np.frombuffer(columns.span_end, dtype=np.int64)
        self._span_thread = np.frombuffer(columns.span_thread, dtype=np.int32)
        self._span_kind = np.frombuffer(columns.span_kind, dtype=np.int8)
        firsts = (self._start, self._op_start, self._span_start)
        # The first moment that the host side tells of; the far future where there is none.
        self.begin = int(min(first.min(initial=TIME_MAX_NS) for first in firsts))

    def launches(self, correlation: Ints) -> Launches:
        """Join GPU events to the calls that launched them."""
        if len(self._correlations) == 0:
            nothing = np.full(len(correlation), -1, dtype=np.int64)
            return Launches(nothing, nothing, nothing, nothing)
        found = np.searchsorted(self._correlations, correlation)
        found = np.minimum(found, len(self._correlations) - 1)
        known = (self._correlations[found] == correlation) & (correlation != NO_VALUE)
        call = np.where(known, self._by_correlation[found], -1)
        start = np.where(known, self._start[call], -1)
        end = np.where(known, self._end[call], -1)
        thread = np.where(known, self._thread[call], -1)
        return Launches(call, start, end, thread)

    def explain(self, gaps: Ints, event_start: Ints, launch: Launches, out: Cut) -> None:
        """Cut gaps into pieces of one kind each."""
        if len(gaps) == 0:
            return
        # A gap ends where an event starts; of several that start there, a launched one counts.
        following = np.searchsorted(event_start, gaps[:, 1], side="left")
        following = np.minimum(following, len(event_start) - 1)
        again = np.minimum(following + 1, len(event_start) - 1)
        twin = (launch.call[following] < 0) & (event_start[again] == gaps[:, 1])
        following = np.where(twin, again, following)
        known = launch.call[following] >= 0
        launched = np.clip(launch.start[following], gaps[:, 0], gaps[:, 1])
        late = known & (launch.start[following] > gaps[:, 0])
        queued = known & (launch.end[following] <= gaps[:, 0])

        short = gaps[:, 1] - gaps[:, 0] < KERNEL_GAP_MAX_NS
        out.add(gaps[queued & short], Piece.QUEUED)
        out.add(gaps[queued & ~short], Piece.HELD)
        out.add(gaps[known & ~queued & ~late], Piece.LATENCY)
        self._unseen(gaps[~known], out)
        threads = np.where(late, launch.thread[following], -1)
        for thread in np.unique(threads[late]):
            mine = threads == thread
            self._late(gaps[mine], launched[mine], int(thread), out)

    def _unseen(self, gaps: Ints, out: Cut) -> None:
        """Before a launch that is not recorded, only a wait for data on any thread is telling."""
        rest = gaps
        for kind, piece in (
            (Host.DATA_IN_TRAINER, Piece.DATA_IN_TRAINER),
            (Host.DATA, Piece.DATA),
        ):
            rest = out.take(rest, self._spans(kind, None), piece)
        out.add(rest, Piece.UNSEEN)

    def _late(self, gaps: Ints, launched: Ints, thread: int, out: Cut) -> None:
        """Cut gaps before which `thread` launched late, by what it did instead."""
        mine = self._thread == thread
        waits = mine & (self._kind == Host.SYNC)
        waiting = intervals.union(self._start[waits], self._end[waits] + CLOCK_SLACK_NS)
        # A host that waited for the GPU has no launches in store: a short gap after that is its
        # price, the launch latency with it. In a long one the host did something else as well.
        after_wait = intervals.holds(waiting, gaps[:, 0])
        price = after_wait & (gaps[:, 1] - gaps[:, 0] < LONG_GAP_NS)
        until = np.where(price, gaps[:, 1], launched)
        out.add(_columns(until, gaps[:, 1]), Piece.LATENCY)
        rest = _columns(gaps[:, 0], until)
        rest = rest[rest[:, 1] > rest[:, 0]]
        for kind, piece in _SPAN_PIECES:
            rest = out.take(rest, self._spans(kind, thread), piece)
        rest = out.take(rest, gaps[price], Piece.SYNC)
        rest = out.take(rest, intervals.intersect(gaps[after_wait], waiting), Piece.SYNC)
        ops = self._op_thread == thread
        if not ops.any():
            # Calls of the driver alone, or a thread whose identity the profiler mixed up.
            out.add(rest, Piece.LATE_UNSEEN)
            return
        busy = intervals.merge(
            intervals.union(self._start[mine], self._end[mine]),
            intervals.union(self._op_start[ops], self._op_end[ops]),
        )
        rest = out.take(rest, busy, Piece.BUSY)
        out.add(rest, Piece.SILENT)

    def within(self, spans: Ints, kind: Piece) -> Ints:
        """Return the part of the spans in which some thread did what `kind` says."""
        host = next(host for host, piece in _SPAN_PIECES if piece is kind)
        return intervals.intersect(spans, self._spans(host, None))

    def _spans(self, kind: Host, thread: int | None) -> Ints:
        rows = self._span_kind == kind
        if thread is not None:
            rows &= self._span_thread == thread
        start, end = self._span_start[rows], self._span_end[rows]
        if kind in (Host.ALLOCATOR, Host.COMPILE) and thread is not None:
            mine = (self._thread == thread) & (self._kind == kind)
            start = np.concatenate((start, self._start[mine]))
            end = np.concatenate((end, self._end[mine]))
        return intervals.union(start, end)


class Cut:
    """Collects spans with their kinds, in any order."""

    def __init__(self) -> None:
        self._spans: list[Ints] = []
        self._kinds: list[npt.NDArray[np.int8]] = []

    def add(self, spans: Ints, kind: Piece) -> None:
        """Add non-empty spans of one kind."""
        spans = spans[spans[:, 1] > spans[:, 0]]
        if len(spans):
            self._spans.append(spans)
            self._kinds.append(np.full(len(spans), kind, dtype=np.int8))

    def take(self, spans: Ints, kind_spans: Ints, kind: Piece) -> Ints:
        """Add what `kind_spans` covers of sorted, disjoint spans; returns what it does not."""
        if len(spans) == 0 or len(kind_spans) == 0:
            return spans
        self.add(intervals.intersect(spans, kind_spans), kind)
        return intervals.subtract(spans, kind_spans)

    def pieces(self, around: Ints) -> Pieces:
        """Return everything that was added, sorted; each piece lies in one interval of `around`."""
        spans = np.concatenate(self._spans) if self._spans else EMPTY
        kinds = np.concatenate(self._kinds) if self._kinds else np.empty(0, dtype=np.int8)
        order = np.argsort(spans[:, 0], kind="stable")
        spans, kinds = spans[order], kinds[order]
        if len(spans) == 0:
            return Pieces(spans, kinds, np.empty(0, dtype=np.int64))
        place = np.searchsorted(around[:, 0], spans[:, 0], side="right") - 1
        return Pieces(spans, kinds, (around[:, 1] - around[:, 0])[place])


def _columns(start: Ints, end: Ints) -> Ints:
    return np.column_stack((start, end))
