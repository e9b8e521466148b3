"""Where the waits of a traced run arose: the excess rule.

A rank waits because another one came late, and that one came late because of what it did longer
since the two last met. So between two meetings each rank's time is split by component (computing,
and each cause of idleness), and a wait is charged in proportion to what the late rank spent more of
than the waiting one. What the late rank did *during* the wait says nothing: a loader stall sits at
the start of a step, the wait at its end, when the late rank computes.

What the late rank itself waited for counts by its own root, so that chains walk back. A rank that
computes on while its collective waits gets ahead of the late one, and will wait again when that one
catches up: computing that was done ahead counts by the root of the wait that it was done in.

Meetings are collectives that both took part in; before the first one, time runs from the first
record of the host, and an excess that the profile does not hold stays unattributed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whyidle_rules import intervals
from whyidle_rules.intervals import Ints
from whyidle_rules.trace.columns import TIME_MAX_NS
from whyidle_rules.trace.fill import Filled
from whyidle_rules.trace.gaps import Piece
from whyidle_rules.trace.match import Matched
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


class _Left(NamedTuple):
    """When a GPU left a meeting, and its components then."""

    end: int
    components: Floats


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
        self._left: list[dict[int, _Left]] = [{} for _ in run.matched]
        # What each GPU computed while it waited for another one, which that one has yet to compute:
        # by that GPU, nanoseconds by the root of the wait.
        self._ahead: list[dict[int, Roots]] = [{} for _ in run.gpus]
        self._groups_of: dict[int, list[int]] = defaultdict(list)
        for number, group in enumerate(run.matched):
            for member in group.gpus:
                self._groups_of[member].append(number)

    def walk(self) -> list[dict[int, Roots]]:
        """Charge every exposed wait."""
        came, left = self._components()
        for meeting in self._meetings():
            here = came[meeting.group][meeting.instance]
            there = left[meeting.group][meeting.instance]
            self._meet(self._run.matched[meeting.group], meeting.instance, here, there)
            self._remember(meeting, there)
        return self._found

    def _meet(self, group: Matched, instance: int, here: Floats, there: Floats) -> None:
        """Charge the waits of one meeting; components when each member came and when it left."""
        rows = group.rows[instance].tolist()
        waits = group.wait_ns[instance].tolist()
        late = int(group.late[instance])
        if late < 0:
            return
        inside = there[:, -1] - here[:, -1]  # computed while the collective ran
        for member, gpu in enumerate(group.gpus):
            if member == late or rows[member] < 0 or waits[member] <= 0:
                self._ahead[gpu].clear()  # came last: nobody is behind it
                continue
            self._forget(gpu, waits[member], group.gpus, waits)
            late_gpu = group.gpus[late]
            roots = self._why(gpu, here[member], late_gpu, here[late], waits[member])
            self._get_ahead(
                gpu, late_gpu, float(inside[member] - inside[late]), waits[member], roots
            )
            exposed = self._exposed[gpu].get(rows[member], 0)
            if exposed > 0:
                charged = {key: part * exposed for key, part in roots.items()}
                self._found[gpu][rows[member]] = charged
                end = int(self._run.gpus[gpu].trace.comm.end[rows[member]])
                self._waited[gpu].append((end, charged))

    def _forget(self, gpu: int, wait: int, gpus: list[int], waits: list[int]) -> None:
        """Drop what a GPU was ahead of those who came before it now."""
        ahead = self._ahead[gpu]
        for other in [other for other in ahead if other in gpus]:
            if waits[gpus.index(other)] >= wait:
                del ahead[other]

    def _get_ahead(self, gpu: int, late: int, ns: float, wait: int, roots: Roots) -> None:
        """Remember what `gpu` computed more than `late` inside a collective, or less."""
        ahead = self._ahead[gpu].setdefault(late, {})
        if ns > 0:
            for key, part in roots.items():
                ahead[key] = ahead.get(key, 0.0) + part * min(ns, wait)
        elif ns < 0:
            _take(ahead, -ns)

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

    def _remember(self, meeting: _Meeting, there: Floats) -> None:
        group = self._run.matched[meeting.group]
        memory = self._left[meeting.group]
        for member, gpu in enumerate(group.gpus):
            row = int(group.rows[meeting.instance, member])
            if row < 0:
                memory.pop(gpu, None)
                continue
            memory[gpu] = _Left(int(self._run.gpus[gpu].trace.comm.end[row]), there[member])

    def _last_meeting(self, a: int, b: int) -> tuple[_Left, _Left] | None:
        """Return how two GPUs left the last meeting that they both took part in."""
        best: tuple[_Left, _Left] | None = None
        for number in self._groups_of[a]:
            left = self._left[number]
            if a in left and b in left and (best is None or left[a].end > best[0].end):
                best = (left[a], left[b])
        return best

    def _why(self, gpu: int, mine: Floats, late: int, theirs: Floats, wait_ns: int) -> Roots:
        """Return why `gpu` had to wait for `late`, as fractions that sum to 1.

        `mine` and `theirs` are the components of both when they came.
        """
        met = self._last_meeting(gpu, late)
        excess: Roots = {}
        since = (-TIME_MAX_NS, -TIME_MAX_NS)
        if met is not None:
            mine, theirs = mine - met[0].components, theirs - met[1].components
            since = (met[0].end, met[1].end)
        more = theirs - mine
        if more[-1] > 0:
            # They had to compute what we had computed while we waited: late for the same reason.
            excess = _take(self._ahead[gpu].get(late, {}), float(more[-1]))
            more[-1] -= sum(excess.values())
        for (cause, subcause), ns in zip(self._keys, more.tolist(), strict=True):
            if ns > 0:
                key = RootKey(late, cause, subcause)
                excess[key] = excess.get(key, 0.0) + ns
        my_waits = self._waits_since(gpu, since[0])
        for key, ns in self._waits_since(late, since[1]).items():
            ns -= my_waits.get(key, 0.0)
            if ns > 0:
                excess[key] = excess.get(key, 0.0) + ns
        # After a meeting the excess makes up the wait; before the first one it may fall short.
        whole = max(sum(excess.values()), float(wait_ns))
        roots = {key: ns / whole for key, ns in excess.items()}
        missing = 1.0 - sum(roots.values())
        if missing > 1e-9:
            unknown = RootKey(late, *UNKNOWN)
            roots[unknown] = roots.get(unknown, 0.0) + missing
        return roots

    def _waits_since(self, gpu: int, since: int) -> Roots:
        total: Roots = {}
        for time, roots in reversed(self._waited[gpu]):
            if time <= since:
                break
            for key, ns in roots.items():
                total[key] = total.get(key, 0.0) + ns
        return total


def _take(roots: Roots, ns: float) -> Roots:
    """Take up to `ns` out of a store, in its own proportions; returns what was taken."""
    total = sum(roots.values())
    if total <= 0:
        return {}
    share = min(1.0, ns / total)
    taken = {key: part * share for key, part in roots.items()}
    for key, part in taken.items():
        roots[key] -= part
    return taken


def _line(
    gpu: RunGpu,
    filled: Filled,
    place: int,
    charges: Mapping[int, list[Charged]],
    keys: list[tuple[str, str]],
) -> _Line:
    """Spread the charges of evidence rows over the pieces that they were made of.

    A wait is not a component: what it arose from is.
    """
    before, inside = filled.preludes[place], filled.timelines[place]
    spans = np.concatenate((before.spans, inside.spans))
    rows = np.concatenate((filled.prelude_rows[place], filled.rows[place]))
    column = {key: number for number, key in enumerate(keys)}
    unique, own = np.unique(rows, return_inverse=True)
    shares_of_row = np.zeros((len(unique), len(keys)))
    lengths = spans[:, 1] - spans[:, 0]
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
        starts=spans[:, 0],
        ends=spans[:, 1],
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
