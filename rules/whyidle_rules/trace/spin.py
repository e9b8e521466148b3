"""Exposed communication cut into waiting for a late rank, transfer, and what cannot be told.

A kernel waits first and transfers then. Where kernels of different groups run at once, a transfer
counts before a wait, because something moves; of two waits the one that ends last is the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whyidle_rules import intervals
from whyidle_rules.intervals import EMPTY, Ints
from whyidle_rules.trace.comm import CommKernels
from whyidle_rules.trace.gaps import Piece
from whyidle_rules.trace.match import Matched


@dataclass(slots=True)
class Waits:
    """What matching says of each communication kernel of one GPU; parallel columns.

    `wait_ns` is -1 where unknown; `late` is the GPU (its place in the run) that came last, or -1.
    """

    wait_ns: Ints
    late: Ints
    complete: npt.NDArray[np.bool_]


@dataclass(slots=True)
class SpinPieces:
    """Pieces of exposed communication, sorted; `kernel` is a row of CommKernels."""

    spans: Ints
    kinds: npt.NDArray[np.int8]
    kernel: Ints
    late: Ints


def waits_of(gpu: int, kernels: CommKernels, matched: list[Matched]) -> Waits:
    """Collect what matching says of the kernels of one GPU."""
    count = len(kernels.start)
    out = Waits(
        wait_ns=np.full(count, -1, dtype=np.int64),
        late=np.full(count, -1, dtype=np.int64),
        complete=np.zeros(count, dtype=bool),
    )
    for group in matched:
        if gpu not in group.gpus:
            continue
        place = group.gpus.index(gpu)
        members = np.array(group.gpus, dtype=np.int64)
        instances = np.flatnonzero((group.rows[:, place] >= 0) & (group.wait_ns[:, place] >= 0))
        rows = group.rows[instances, place]
        out.wait_ns[rows] = group.wait_ns[instances, place]
        out.late[rows] = members[group.late[instances]]
        out.complete[rows] = group.complete[instances]
    return out


def cut(exposed: Ints, kernels: CommKernels, waits: Waits) -> SpinPieces:
    """Cut the exposed communication of one GPU; the pieces cover it exactly."""
    known = waits.wait_ns >= 0
    came = kernels.start + np.maximum(waits.wait_ns, 0)
    moved = known & waits.complete
    apart = kernels.point_to_point
    untold = ~apart & ~moved
    parts = (
        (Piece.TRANSFER, moved, came, kernels.end),
        (Piece.WAIT, known, kernels.start, came),
        (Piece.POINT_TO_POINT, apart, kernels.start, kernels.end),
        (Piece.EXPOSED, untold, came, kernels.end),
    )
    spans, kinds, owners = [], [], []
    rest = exposed
    for kind, rows, starts, ends in parts:
        chosen = np.flatnonzero(rows)
        flat, owner = intervals.flatten(starts[chosen], ends[chosen])
        pieces, index = intervals.intersect_owned(rest, flat)
        spans.append(pieces)
        kinds.append(np.full(len(pieces), kind, dtype=np.int8))
        owners.append(chosen[owner[index]] if len(pieces) else index)
        rest = intervals.subtract(rest, flat)
    assert len(rest) == 0, "exposed communication outside of every kernel"
    all_spans = np.concatenate(spans) if spans else EMPTY
    order = np.argsort(all_spans[:, 0], kind="stable")
    kernel = np.concatenate(owners)[order].astype(np.int64)
    kind_column = np.concatenate(kinds)[order]
    late = waits.late[kernel] if len(kernel) else kernel
    return SpinPieces(
        spans=all_spans[order],
        kinds=kind_column,
        kernel=kernel,
        late=np.where(kind_column == Piece.WAIT, late, np.int64(-1)).astype(np.int64),
    )
