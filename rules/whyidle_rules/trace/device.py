"""One GPU of one trace file: its exact partition, and pieces of idle time with their host side.

Partition (DESIGN, "For traces"): the window runs from the first GPU event to the last; compute is
the union of kernels that do not communicate, exposed communication is communication minus compute,
exposed copies are copies and sets minus both, idle is the rest.

Every idle stretch ends with a GPU event, and that event was launched by a host thread. What that
thread did before its launch call says why the GPU was empty:

    gap begins        launch call begins        gap ends
        |--- launch late ----|--- launch latency ---|     the host was late
    |------------------- queued --------------------|     the launch came before the gap

Nothing else is joined to a launch: 4 to 30 % of GPU events have no launch record, and a gap before
such an event is of unknown cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from whyidle_rules.trace import intervals
from whyidle_rules.trace.comm import CommKernels, comm_kernels
from whyidle_rules.trace.decode import NO_VALUE, Columns
from whyidle_rules.trace.intervals import EMPTY, Ints
from whyidle_rules.trace.names import Gpu, Host

# GPU and host clocks of one trace agree to about this: launches up to 13 us after the kernel that
# they started were seen on V100.
CLOCK_SLACK_NS = 20_000


class Piece(IntEnum):
    """What is known of a stretch of time; each but the UNSEEN ones is an evidence column."""

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
    COPY_H2D_PAGEABLE = 17
    COPY_H2D = 18
    COPY_D2H = 19
    COPY_DEVICE = 20
    # Spinning, not empty: only communication runs.
    TRANSFER = 21
    WAIT = 22
    EXPOSED = 23
    POINT_TO_POINT = 24
    WORKING = 25


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
_COPY_PIECES: tuple[tuple[Gpu, Piece], ...] = (
    (Gpu.COPY_H2D_PAGEABLE, Piece.COPY_H2D_PAGEABLE),
    (Gpu.COPY_H2D, Piece.COPY_H2D),
    (Gpu.COPY_D2H, Piece.COPY_D2H),
    (Gpu.COPY_DEVICE, Piece.COPY_DEVICE),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Nanoseconds of a window: compute + exposed_comm + exposed_copy + idle = window."""

    begin: int
    end: int
    compute: int
    exposed_comm: int
    exposed_copy: int

    def shifted(self, by_ns: int) -> Parts:
        """Return the same parts of a window that begins later."""
        return replace(self, begin=self.begin + by_ns, end=self.end + by_ns)

    @property
    def window(self) -> int:
        """Length of the window."""
        return self.end - self.begin

    @property
    def idle(self) -> int:
        """What is left of the window."""
        return self.window - self.compute - self.exposed_comm - self.exposed_copy


@dataclass(slots=True)
class Pieces:
    """Stretches of idle time, sorted and disjoint; `gap_ns` is the whole gap around each."""

    spans: Ints
    kinds: npt.NDArray[np.int8]
    gap_ns: Ints


@dataclass(slots=True)
class DeviceTrace:
    """Everything that later stages need of one GPU of one file; times in its file's clock."""

    device: int
    parts: Parts
    steps: list[tuple[int, Parts]]
    compute: Ints
    exposed_comm: Ints
    pieces: Pieces
    comm: CommKernels
    gpu_events: int
    unlaunched: int

    def shift(self, base_ns: int) -> None:
        """Move every time by `base_ns`: from the file's own clock to the epoch."""
        if base_ns == 0:
            return
        self.parts = self.parts.shifted(base_ns)
        self.steps = [(number, parts.shifted(base_ns)) for number, parts in self.steps]
        self.compute = self.compute + base_ns
        self.exposed_comm = self.exposed_comm + base_ns
        self.pieces.spans = self.pieces.spans + base_ns
        self.comm.start = self.comm.start + base_ns
        self.comm.end = self.comm.end + base_ns


def analyse(columns: Columns) -> list[DeviceTrace]:
    """Return what the file says about each GPU in it, in order of their numbers."""
    devices = np.frombuffer(columns.gpu_device, dtype=np.int32)
    host = _HostSide(columns)
    found = []
    for number, identity in sorted(enumerate(columns.devices), key=lambda pair: pair[1]):
        rows = np.flatnonzero(devices == number)
        found.append(_device(columns, rows, identity, host))
    return found


def _device(columns: Columns, rows: Ints, identity: int, host: _HostSide) -> DeviceTrace:
    start = np.frombuffer(columns.gpu_start, dtype=np.int64)[rows]
    order = np.argsort(start, kind="stable")
    rows, start = rows[order], start[order]
    end = np.frombuffer(columns.gpu_end, dtype=np.int64)[rows]
    kind = np.frombuffer(columns.gpu_kind, dtype=np.int8)[rows]
    launch = host.launches(np.frombuffer(columns.gpu_correlation, dtype=np.int64)[rows])

    compute = intervals.union(*_where(start, end, kind == Gpu.COMPUTE))
    communicating = (kind == Gpu.COLLECTIVE) | (kind == Gpu.POINT_TO_POINT)
    comm = intervals.union(*_where(start, end, communicating))
    kernels = intervals.merge(compute, comm)
    exposed_comm = intervals.subtract(comm, compute)
    begin, finish = int(start[0]), int(end.max())

    taken = kernels
    spans, kinds = [], []
    exposed_copy = []
    for gpu_kind, piece in _COPY_PIECES:
        copies = intervals.union(*_where(start, end, kind == gpu_kind))
        exposed = intervals.subtract(copies, taken)
        taken = intervals.merge(taken, copies)
        spans.append(exposed)
        kinds.append(np.full(len(exposed), piece, dtype=np.int8))
        exposed_copy.append(exposed)
    copy = intervals.merge(*exposed_copy)
    gaps = intervals.complement(taken, begin, finish)
    gap_spans, gap_kinds = host.explain(gaps, start, launch)
    spans.append(gap_spans)
    kinds.append(gap_kinds)

    empty = intervals.complement(kernels, begin, finish)
    parts = Parts(
        begin,
        finish,
        intervals.length_ns(compute),
        intervals.length_ns(exposed_comm),
        intervals.length_ns(copy),
    )
    steps = [
        (number, _clipped(begin_ns, end_ns, compute, exposed_comm, copy))
        for number, begin_ns, end_ns in sorted(set(columns.steps), key=lambda step: step[1])
    ]
    return DeviceTrace(
        device=identity,
        parts=parts,
        steps=steps,
        compute=compute,
        exposed_comm=exposed_comm,
        pieces=_pieces(spans, kinds, empty),
        comm=comm_kernels(
            columns, rows[communicating], launch.start[communicating], launch.thread[communicating]
        ),
        gpu_events=len(rows),
        unlaunched=int((launch.call < 0).sum()),
    )


def _where(start: Ints, end: Ints, mask: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    return start[mask], end[mask]


def _clipped(begin: int, end: int, compute: Ints, comm: Ints, copy: Ints) -> Parts:
    return Parts(
        begin,
        end,
        intervals.length_ns(intervals.clip(compute, begin, end)),
        intervals.length_ns(intervals.clip(comm, begin, end)),
        intervals.length_ns(intervals.clip(copy, begin, end)),
    )


def _pieces(spans: list[Ints], kinds: list[npt.NDArray[np.int8]], empty: Ints) -> Pieces:
    all_spans = np.concatenate(spans) if spans else EMPTY
    all_kinds = np.concatenate(kinds) if kinds else np.empty(0, dtype=np.int8)
    order = np.argsort(all_spans[:, 0], kind="stable")
    all_spans, all_kinds = all_spans[order], all_kinds[order]
    around = np.searchsorted(empty[:, 0], all_spans[:, 0], side="right") - 1
    lengths = empty[:, 1] - empty[:, 0]
    gap_ns = lengths[around] if len(empty) else np.empty(0, dtype=np.int64)
    return Pieces(all_spans, all_kinds, gap_ns)


@dataclass(slots=True)
class _Launches:
    """For each GPU event its launch call: row of the call or -1, start, end and thread."""

    call: Ints
    start: Ints
    thread: Ints


class _HostSide:
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

    def launches(self, correlation: Ints) -> _Launches:
        """Join GPU events to the calls that launched them."""
        if len(self._correlations) == 0:
            nothing = np.full(len(correlation), -1, dtype=np.int64)
            return _Launches(nothing, nothing, nothing)
        found = np.searchsorted(self._correlations, correlation)
        found = np.minimum(found, len(self._correlations) - 1)
        known = (self._correlations[found] == correlation) & (correlation != NO_VALUE)
        call = np.where(known, self._by_correlation[found], -1)
        start = np.where(known, self._start[call], -1)
        thread = np.where(known, self._thread[call], -1)
        return _Launches(call, start, thread)

    def explain(
        self, gaps: Ints, event_start: Ints, launch: _Launches
    ) -> tuple[Ints, npt.NDArray[np.int8]]:
        """Cut gaps into pieces of one kind each."""
        out = _Cut()
        if len(gaps) == 0:
            return out.result()
        # A gap ends where an event starts; of several that start there, a launched one counts.
        following = np.searchsorted(event_start, gaps[:, 1], side="left")
        following = np.minimum(following, len(event_start) - 1)
        again = np.minimum(following + 1, len(event_start) - 1)
        twin = (launch.call[following] < 0) & (event_start[again] == gaps[:, 1])
        following = np.where(twin, again, following)
        known = launch.call[following] >= 0
        launched = np.clip(launch.start[following], gaps[:, 0], gaps[:, 1])
        late = known & (launch.start[following] > gaps[:, 0])

        out.add(gaps[known & ~late], Piece.QUEUED)
        out.add(_columns(launched[late], gaps[late, 1]), Piece.LATENCY)
        self._unseen(gaps[~known], out)
        late_spans = _columns(gaps[late, 0], launched[late])
        threads = launch.thread[following][late]
        for thread in np.unique(threads):
            self._late(late_spans[threads == thread], int(thread), out)
        return out.result()

    def _unseen(self, gaps: Ints, out: _Cut) -> None:
        """Before a launch that is not recorded, only a wait for data on any thread is telling."""
        rest = gaps
        for kind, piece in (
            (Host.DATA_IN_TRAINER, Piece.DATA_IN_TRAINER),
            (Host.DATA, Piece.DATA),
        ):
            rest = out.take(rest, self._spans(kind, None), piece)
        out.add(rest, Piece.UNSEEN)

    def _late(self, spans: Ints, thread: int, out: _Cut) -> None:
        """Cut the time in which `thread` had not launched, by what it did instead."""
        mine = self._thread == thread
        ops = self._op_thread == thread
        calls_seen = intervals.union(self._start[mine], self._end[mine])
        began = spans[:, 0]
        rest = spans
        for kind, piece in _SPAN_PIECES:
            rest = out.take(rest, self._spans(kind, thread), piece)
        waits = mine & (self._kind == Host.SYNC)
        waiting = intervals.union(self._start[waits], self._end[waits] + CLOCK_SLACK_NS)
        after_wait = spans[intervals.holds(waiting, began)]
        rest = out.take(rest, after_wait, Piece.SYNC)
        if not ops.any():
            # Calls of the driver alone, or a thread whose identity the profiler mixed up.
            out.add(rest, Piece.LATE_UNSEEN)
            return
        busy = intervals.merge(calls_seen, intervals.union(self._op_start[ops], self._op_end[ops]))
        rest = out.take(rest, busy, Piece.BUSY)
        out.add(rest, Piece.SILENT)

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


class _Cut:
    """Collects spans with their kinds."""

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

    def result(self) -> tuple[Ints, npt.NDArray[np.int8]]:
        """Return spans and kinds, unsorted."""
        if not self._spans:
            return EMPTY, np.empty(0, dtype=np.int8)
        return np.concatenate(self._spans), np.concatenate(self._kinds)


def _columns(start: Ints, end: Ints) -> Ints:
    return np.column_stack((start, end))
