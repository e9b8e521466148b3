"""Where the waits of a traced run arose: the excess rule.

A rank waits because another one came late, and that one came late because of what it did longer
since the two last met. So between two meetings each rank's time is split by component (computing,
and each cause of idleness), and a wait is charged in proportion to what the late rank spent more of
than the waiting one. What the late rank did *during* the wait says nothing: a loader stall sits at
the start of a step, the wait at its end, when the late rank computes.

What the late rank itself waited for counts by its own root, so that chains walk back. Meetings are
collectives that both took part in; before the first one, time runs from the start of the profile,
and an excess that the profile does not hold stays unattributed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whyidle_rules.trace import intervals
from whyidle_rules.trace.device import Piece
from whyidle_rules.trace.fill import Filled
from whyidle_rules.trace.intervals import Ints
from whyidle_rules.trace.run import RunGpu, TraceRun

Floats = npt.NDArray[np.float64]

SLOW_COMPUTE = ("slow_compute", "more_work")
UNKNOWN = ("unattributed", "no_evidence")


class Charged(NamedTuple):
    """A grant, or what was left over, of one row of the evidence view."""

    cause: str
    subcause: str
    ns: int


class RootKey(NamedTuple):
    """A cause on one GPU (its place in the run)."""

    gpu: int
    cause: str
    subcause: str


Roots = dict[RootKey, float]


class _Meeting(NamedTuple):
    """One instance of a collective: when each member came and left, in its own clock."""

    group: int
    instance: int
    moment: int


@dataclass(slots=True)
class _Line:
    """Cumulative nanoseconds of each component of one GPU, at any time."""

    begin: int
    starts: Ints
    ends: Ints
    totals: Floats  # (pieces + 1, components), before each piece
    shares: Floats  # (pieces, components), of each piece's length
    compute: Ints

    def at(self, times: Ints) -> Floats:
        """Return (times, components + 1); the last column is computing."""
        index = np.searchsorted(self.starts, times, side="right")
        before = np.maximum(index - 1, 0)
        out = np.zeros((len(times), self.totals.shape[1] + 1))
        if len(self.starts):
            inside = np.clip(
                times - self.starts[before], 0, self.ends[before] - self.starts[before]
            )
            partial = self.totals[before] + self.shares[before] * inside[:, None]
            out[:, :-1] = np.where(index[:, None] > 0, partial, 0.0)
        begin = np.full(len(times), self.begin, dtype=np.int64)
        out[:, -1] = intervals.covered_ns(self.compute, begin, np.maximum(times, begin))
        return out


def roots_of_waits(
    run: TraceRun, filled: Filled, charges: Mapping[int, list[Charged]]
) -> list[dict[int, Roots]]:
    """Return for each GPU what its exposed waits arose from, by the row of its kernel.

    `charges` holds the grants and leftovers of each evidence row. Every inner dictionary sums to
    the exposed wait of that kernel in nanoseconds.
    """
    found: list[dict[int, Roots]] = [{} for _ in run.gpus]
    if not run.matched:
        return found
    return _Walk(run, filled, charges).walk()


class _Walk:
    """Goes through all meetings in the order of time."""

    def __init__(self, run: TraceRun, filled: Filled, charges: Mapping[int, list[Charged]]) -> None:
        self._run = run
        keys = sorted(
            {
                (charge.cause, charge.subcause)
                for row in charges.values()
                for charge in row
                if (charge.cause, charge.subcause) != ("collective", "late_rank")
            }
        )
        self._keys = [*keys, SLOW_COMPUTE]
        self._lines = [
            _line(gpu, filled, place, charges, keys) for place, gpu in enumerate(run.gpus)
        ]
        self._exposed = [_exposed_waits(gpu) for gpu in run.gpus]
        self._found: list[dict[int, Roots]] = [{} for _ in run.gpus]
        # What each GPU waited for so far: (its own time, by root), the newest last.
        self._waited: list[list[tuple[int, Roots]]] = [[] for _ in run.gpus]
        # For each group, the time at which each member left its last meeting, and its components.
        self._left: list[dict[int, tuple[int, Floats]]] = [{} for _ in run.matched]
        self._groups_of: dict[int, list[int]] = defaultdict(list)
        for number, group in enumerate(run.matched):
            for member in group.gpus:
                self._groups_of[member].append(number)

    def walk(self) -> list[dict[int, Roots]]:
        """Charge every exposed wait."""
        came, left = self._components()
        for meeting in self._meetings():
            group = self._run.matched[meeting.group]
            rows = group.rows[meeting.instance]
            late_member = int(group.late[meeting.instance])
            late = group.gpus[late_member] if late_member >= 0 else -1
            for member, gpu in enumerate(group.gpus):
                row = int(rows[member])
                if row < 0 or late < 0 or gpu == late:
                    continue
                exposed = self._exposed[gpu].get(row, 0)
                if exposed > 0:
                    mine = came[meeting.group][meeting.instance, member]
                    theirs = came[meeting.group][meeting.instance, late_member]
                    late_row = int(rows[late_member])
                    roots = self._charge(gpu, row, mine, late, late_row, theirs, exposed)
                    self._found[gpu][row] = roots
                    end = int(self._run.gpus[gpu].trace.comm.end[row])
                    self._waited[gpu].append((end, roots))
            self._remember(meeting, left)
        return self._found

    def _components(self) -> tuple[list[Floats], list[Floats]]:
        """Return per group the components of each member when it came and when it left."""
        came, left = [], []
        for group in self._run.matched:
            shape = (*group.rows.shape, len(self._keys))
            at_start, at_end = np.zeros(shape), np.zeros(shape)
            for member, gpu in enumerate(group.gpus):
                comm = self._run.gpus[gpu].trace.comm
                here = np.flatnonzero(group.rows[:, member] >= 0)
                rows = group.rows[here, member]
                at_start[here, member] = self._lines[gpu].at(comm.start[rows])
                at_end[here, member] = self._lines[gpu].at(comm.end[rows])
            came.append(at_start)
            left.append(at_end)
        return came, left

    def _meetings(self) -> list[_Meeting]:
        found = []
        for number, group in enumerate(self._run.matched):
            ends = np.full(group.rows.shape, np.iinfo(np.int64).min, dtype=np.int64)
            for member, gpu in enumerate(group.gpus):
                here = group.rows[:, member] >= 0
                ends[here, member] = self._run.gpus[gpu].trace.comm.end[group.rows[here, member]]
            moments = ends.max(axis=1)
            found += [_Meeting(number, k, int(moments[k])) for k in range(len(moments))]
        return sorted(found, key=lambda meeting: (meeting.moment, meeting.group, meeting.instance))

    def _remember(self, meeting: _Meeting, left: list[Floats]) -> None:
        group = self._run.matched[meeting.group]
        for member, gpu in enumerate(group.gpus):
            row = int(group.rows[meeting.instance, member])
            if row >= 0:
                end = int(self._run.gpus[gpu].trace.comm.end[row])
                components = left[meeting.group][meeting.instance, member]
                self._left[meeting.group][gpu] = (end, components)
            else:
                self._left[meeting.group].pop(gpu, None)

    def _last_meeting(self, a: int, b: int) -> tuple[tuple[int, Floats], tuple[int, Floats]] | None:
        """Return when two GPUs last left a meeting together, each in its own clock."""
        best: tuple[tuple[int, Floats], tuple[int, Floats]] | None = None
        for number in self._groups_of[a]:
            left = self._left[number]
            if a in left and b in left and (best is None or left[a][0] > best[0][0]):
                best = (left[a], left[b])
        return best

    def _charge(
        self,
        gpu: int,
        row: int,
        mine: Floats,
        late: int,
        late_row: int,
        theirs: Floats,
        exposed: int,
    ) -> Roots:
        """Split one exposed wait of `gpu` by what `late` spent more since their last meeting."""
        met = self._last_meeting(gpu, late)
        if met is not None:
            (my_since, my_before), (their_since, their_before) = met
            mine, theirs = mine - my_before, theirs - their_before
        else:
            my_since = their_since = -(1 << 62)
        excess: Roots = {}
        for (cause, subcause), more in zip(self._keys, (theirs - mine).tolist(), strict=True):
            if more > 0:
                excess[RootKey(late, cause, subcause)] = more
        comm = self._run.gpus
        my_waits = self._waits_since(gpu, my_since, int(comm[gpu].trace.comm.start[row]))
        their_waits = self._waits_since(
            late, their_since, int(comm[late].trace.comm.start[late_row])
        )
        for key, waited in their_waits.items():
            more = waited - my_waits.get(key, 0.0)
            if more > 0:
                excess[key] = excess.get(key, 0.0) + more
        total = sum(excess.values())
        if total <= 0:
            return {RootKey(late, *UNKNOWN): float(exposed)}
        # Since a meeting the excess makes up the wait; before the first one it may fall short.
        wait = float(self._run.gpus[gpu].waits.wait_ns[row])
        scale = exposed / max(total, wait)
        roots = {key: more * scale for key, more in excess.items()}
        missing = exposed - total * scale
        if missing > 0:
            unknown = RootKey(late, *UNKNOWN)
            roots[unknown] = roots.get(unknown, 0.0) + missing
        return roots

    def _waits_since(self, gpu: int, since: int, until: int) -> Roots:
        total: Roots = {}
        for time, roots in reversed(self._waited[gpu]):
            if time <= since:
                break
            if time <= until:
                for key, ns in roots.items():
                    total[key] = total.get(key, 0.0) + ns
        return total


def _line(
    gpu: RunGpu,
    filled: Filled,
    place: int,
    charges: Mapping[int, list[Charged]],
    keys: list[tuple[str, str]],
) -> _Line:
    """Spread the charges of evidence rows over the pieces that they were made of."""
    line, rows = filled.timelines[place], filled.rows[place]
    column = {key: number for number, key in enumerate(keys)}
    unique, own = np.unique(rows, return_inverse=True)
    shares_of_row = np.zeros((len(unique), len(keys)))
    lengths = line.spans[:, 1] - line.spans[:, 0]
    row_ns = np.bincount(own.reshape(-1), weights=lengths, minlength=len(unique))
    for number, row in enumerate(unique.tolist()):
        for charge in charges.get(row, ()):
            place_of = column.get((charge.cause, charge.subcause))
            if place_of is not None and row_ns[number] > 0:
                shares_of_row[number, place_of] += charge.ns / row_ns[number]
    shares = shares_of_row[own.reshape(-1)] if len(unique) else np.zeros((0, len(keys)))
    totals = np.zeros((len(lengths) + 1, len(keys)))
    np.cumsum(shares * lengths[:, None], axis=0, out=totals[1:])
    return _Line(
        begin=gpu.trace.parts.begin,
        starts=line.spans[:, 0],
        ends=line.spans[:, 1],
        totals=totals,
        shares=shares,
        compute=gpu.trace.compute,
    )


def _exposed_waits(gpu: RunGpu) -> dict[int, int]:
    """Return the exposed wait of each communication kernel, in nanoseconds."""
    spin = gpu.spin
    waiting = spin.kinds == Piece.WAIT
    lengths = (spin.spans[:, 1] - spin.spans[:, 0])[waiting]
    total: dict[int, int] = {}
    for row, ns in zip(spin.kernel[waiting].tolist(), lengths.tolist(), strict=True):
        total[row] = total.get(row, 0) + ns
    return total
