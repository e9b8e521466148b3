"""One GPU of one trace file: its exact partition, and pieces of idle time with their host side.

Partition (DESIGN, "For traces"): the window runs from the first GPU event to the last; compute is
the union of kernels that do not communicate, exposed communication is communication minus compute,
exposed copies are copies and sets minus both, idle is the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from whyidle_rules import intervals
from whyidle_rules.intervals import EMPTY, Ints
from whyidle_rules.trace.columns import Columns
from whyidle_rules.trace.comm import CommKernels, comm_kernels
from whyidle_rules.trace.gaps import Cut, HostSide, Piece, Pieces
from whyidle_rules.trace.names import Gpu

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
class DeviceTrace:
    """Everything that later stages need of one GPU of one file; times in its file's clock."""

    device: int
    parts: Parts
    steps: list[tuple[int, Parts]]
    compute: Ints
    exposed_comm: Ints
    pieces: Pieces
    prelude: Pieces  # from the first host event to the first GPU event: outside of the window
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
        self.prelude.spans = self.prelude.spans + base_ns
        self.comm.start = self.comm.start + base_ns
        self.comm.end = self.comm.end + base_ns


def analyse(columns: Columns) -> list[DeviceTrace]:
    """Return what the file says about each GPU in it, in order of their numbers."""
    devices = np.frombuffer(columns.gpu_device, dtype=np.int32)
    host = HostSide(columns)
    found = []
    for number, identity in sorted(enumerate(columns.devices), key=lambda pair: pair[1]):
        rows = np.flatnonzero(devices == number)
        found.append(_device(columns, rows, identity, host))
    return found


def _device(columns: Columns, rows: Ints, identity: int, host: HostSide) -> DeviceTrace:
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

    cut = Cut()
    copy = _exposed_copies(start, end, kind, kernels, host, cut)
    gaps = intervals.complement(intervals.merge(kernels, copy), begin, finish)
    host.explain(gaps, start, launch, cut)
    before = intervals.complement(EMPTY, min(host.begin, begin), begin)
    prelude = Cut()
    host.explain(before, start, launch, prelude)
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
        pieces=cut.pieces(empty),
        prelude=prelude.pieces(before),
        comm=comm_kernels(
            columns, rows[communicating], launch.start[communicating], launch.thread[communicating]
        ),
        gpu_events=len(rows),
        unlaunched=int((launch.call < 0).sum()),
    )


def _exposed_copies(
    start: Ints, end: Ints, kind: npt.NDArray[np.int8], kernels: Ints, host: HostSide, cut: Cut
) -> Ints:
    """Return when copies and sets ran without a kernel, and add it to the cut by their kinds."""
    taken = kernels
    found = []
    for gpu_kind, piece in _COPY_PIECES:
        copies = intervals.union(*_where(start, end, kind == gpu_kind))
        exposed = intervals.subtract(copies, taken)
        taken = intervals.merge(taken, copies)
        found.append(exposed)
        # Copies of a checkpoint are a part of saving or loading it.
        for phase in (Piece.CHECKPOINT_SAVE, Piece.CHECKPOINT_LOAD):
            inside = host.within(exposed, phase)
            cut.add(inside, phase)
            exposed = intervals.subtract(exposed, inside)
        cut.add(exposed, piece)
    return intervals.merge(*found)


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
