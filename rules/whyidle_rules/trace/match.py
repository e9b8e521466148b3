"""Collectives matched across ranks, and how long each rank waited in them.

Ranks leave a collective together, so the one that came last has the shortest kernel and
`wait = duration - shortest duration`: no clock is compared. Kernels are paired by process group and
sequence number where the profiler wrote them; else by their order on the communicator's queue. Two
profiles need not begin at the same collective, so an order is only right up to a shift: the one
under which launch grids and names agree and the ends differ by a constant (the ranks' clocks).
Pairing by end time alone merges back-to-back collectives; order does not.

Broadcast, reduce and point-to-point have no common end; they are not matched.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whyidle_rules.intervals import Ints
from whyidle_rules.trace import names
from whyidle_rules.trace.columns import NO_VALUE
from whyidle_rules.trace.comm import CommKernels

# Ends of one collective on 4 to 8 ranks of a node differ by 30 us (median) to 0.9 ms (most seen).
END_SPREAD_NS = 300_000
END_SPREAD_MAX_NS = 1_000_000
AGREEMENT_MIN = 0.9  # of grids and names, under the best shift
SHIFTS_MAX = 48
SAMPLE = 512  # kernels that a shift is judged by


class Queue(NamedTuple):
    """The collectives of one communicator on one GPU, in order: rows of its CommKernels."""

    gpu: int
    rows: Ints
    signs: Ints  # a number per kernel, equal where launch grid and name are
    key: tuple[str, ...]  # process group; () where it is not comparable between processes
    size: int


@dataclass(frozen=True, slots=True)
class Matched:
    """Instances of one communicator's collectives.

    `rows[k, m]` is the kernel of member m in instance k, or -1; `wait_ns` likewise, -1 where the
    wait is not known. `late[k]` is the member that came last, or -1. `complete[k]` says whether
    every rank of the group was recorded in it. Where not, a wait is a lower bound (the others
    waited at least until the last recorded rank came) and what follows it is of unknown kind.
    """

    gpus: list[int]
    rows: Ints
    wait_ns: Ints
    late: Ints
    complete: npt.NDArray[np.bool_]


def match(kernels: list[CommKernels | None], world_size: int | None) -> list[Matched]:
    """Match the collectives of GPUs that belong to different ranks of one job.

    `kernels` holds None for a GPU that takes no part (its rank is unknown or not its own).
    """
    found = []
    for members in _communicators(kernels):
        if len(members) < 2:
            continue
        rows = _instances(kernels, members)
        if len(rows) == 0:
            continue
        size = max((queue.size for queue in members), default=NO_VALUE)
        if size == NO_VALUE:
            size = world_size if world_size is not None else len(members)
        found.append(_waits(kernels, members, rows, complete=len(members) >= size))
    return found


def _queues(gpu: int, kernels: CommKernels) -> list[Queue]:
    by_key: dict[tuple[str, ...], list[int]] = {}
    signs = np.array(
        [
            hash((blocks, info.name))
            for blocks, info in zip(kernels.blocks.tolist(), kernels.info, strict=True)
        ],
        dtype=np.int64,
    )
    sizes: dict[tuple[str, ...], int] = {}
    for row, info in enumerate(kernels.info):
        if kernels.point_to_point[row]:
            continue
        if info.group:
            key: tuple[str, ...] = ("group", info.group, info.ranks)
        elif info.local_group:
            key = ("local", info.local_group)
        else:
            key = ("stream", str(int(kernels.stream[row])))
        by_key.setdefault(key, []).append(row)
        sizes[key] = max(sizes.get(key, NO_VALUE), info.size, _listed(info.ranks))
    return [
        Queue(
            gpu,
            np.array(rows, dtype=np.int64),
            signs[rows],
            key if key[0] == "group" else (),
            sizes[key],
        )
        for key, rows in by_key.items()
    ]


def _listed(ranks: str) -> int:
    """Return how many ranks a list such as "[0, 1, 2, 3]" names; long ones are abridged."""
    try:
        value = json.loads(ranks)
    except ValueError:
        return NO_VALUE
    return len(value) if isinstance(value, list) else NO_VALUE


def _communicators(kernels: list[CommKernels | None]) -> list[list[Queue]]:
    """Put together the queues that belong to one communicator."""
    named: dict[tuple[str, ...], list[Queue]] = {}
    unnamed: list[list[Queue]] = []
    for gpu, own in enumerate(kernels):
        if own is None:
            continue
        for queue in _queues(gpu, own):
            if queue.key:
                named.setdefault(queue.key, []).append(queue)
                continue
            home = _best_home(kernels, unnamed, queue)
            if home is None:
                unnamed.append([queue])
            else:
                home.append(queue)
    return list(named.values()) + unnamed


def _best_home(
    kernels: list[CommKernels | None], homes: list[list[Queue]], queue: Queue
) -> list[Queue] | None:
    best: tuple[float, list[Queue] | None] = (END_SPREAD_NS, None)
    for home in homes:
        if any(member.gpu == queue.gpu for member in home):
            continue
        fit = _align(kernels, home[0], queue)
        if fit is not None and fit.spread_ns <= best[0]:
            best = (fit.spread_ns, home)
    return best[1]


class _Fit(NamedTuple):
    """Instance k of the reference is instance k + shift of the other; other's clock is ahead."""

    shift: int
    ahead_ns: int
    spread_ns: float


def _align(kernels: list[CommKernels | None], reference: Queue, other: Queue) -> _Fit | None:
    """Find the shift under which two queues are the same collectives, or None."""
    ours, theirs = kernels[reference.gpu], kernels[other.gpu]
    if ours is None or theirs is None:
        return None
    rows_a, rows_b = reference.rows, other.rows
    sign_a, sign_b = reference.signs, other.signs
    end_a, end_b = ours.end[rows_a], theirs.end[rows_b]
    reach = min(SHIFTS_MAX, max(len(rows_a), len(rows_b)) - 1)
    best: _Fit | None = None
    for shift in sorted(range(-reach, reach + 1), key=abs):
        low = max(0, -shift)
        high = min(len(rows_a), len(rows_b) - shift)
        overlap = high - low
        if overlap < max(1, min(len(rows_a), len(rows_b)) // 2):
            continue
        a = slice(low, min(high, low + SAMPLE))
        b = slice(a.start + shift, a.stop + shift)
        if float((sign_a[a] == sign_b[b]).mean()) < AGREEMENT_MIN:
            continue
        apart = end_b[b] - end_a[a]
        ahead = int(np.median(apart))
        spread = float(np.median(np.abs(apart - ahead)))
        if (
            best is None
            or spread < best.spread_ns
            or (spread == best.spread_ns and abs(ahead) < abs(best.ahead_ns))
        ):
            best = _Fit(shift, ahead, spread)
    return best


def _instances(kernels: list[CommKernels | None], members: list[Queue]) -> Ints:
    """Return the kernel rows of each instance, shape (instances, members), -1 where absent."""
    by_sequence = _by_sequence(kernels, members)
    if by_sequence is not None:
        return by_sequence
    reference = max(members, key=lambda queue: len(queue.rows))
    out = np.full((len(reference.rows), len(members)), -1, dtype=np.int64)
    for place, queue in enumerate(members):
        if queue is reference:
            out[:, place] = queue.rows
            continue
        fit = _align(kernels, reference, queue)
        if fit is None or fit.spread_ns > END_SPREAD_MAX_NS:
            continue
        low = max(0, -fit.shift)
        high = min(len(reference.rows), len(queue.rows) - fit.shift)
        rows = queue.rows[low + fit.shift : high + fit.shift]
        ours, theirs = kernels[reference.gpu], kernels[queue.gpu]
        assert ours is not None
        assert theirs is not None
        # An instance whose end is far from where this rank's clock puts it is another one: a record
        # was lost. All-to-alls of unequal sizes may end apart by a tenth of their length.
        there = reference.rows[low:high]
        apart = np.abs(theirs.end[rows] - ours.end[there] - fit.ahead_ns)
        longest = np.maximum(
            theirs.end[rows] - theirs.start[rows], ours.end[there] - ours.start[there]
        )
        near = apart <= np.maximum(END_SPREAD_MAX_NS, longest // 4)
        out[low:high, place] = np.where(near, rows, -1)
    return _shared(out)


def _shared(rows: Ints) -> Ints:
    """Return the instances in which at least two members take part."""
    return np.asarray(rows[(rows >= 0).sum(axis=1) > 1], dtype=np.int64)


def _by_sequence(kernels: list[CommKernels | None], members: list[Queue]) -> Ints | None:
    """Match by sequence number, if every kernel of every member has one of its own."""
    numbered: list[dict[int, int]] = []
    for queue in members:
        own = kernels[queue.gpu]
        assert own is not None
        rows = {own.info[row].sequence: row for row in queue.rows.tolist()}
        if len(rows) != len(queue.rows) or NO_VALUE in rows:
            return None
        numbered.append(rows)
    shared = sorted(set().union(*numbered))
    out = np.array([[rows.get(number, -1) for rows in numbered] for number in shared])
    return _shared(out.reshape(len(shared), len(members)))


def _waits(
    kernels: list[CommKernels | None], members: list[Queue], rows: Ints, *, complete: bool
) -> Matched:
    present = rows >= 0
    lasting = np.full(rows.shape, np.iinfo(np.int64).max, dtype=np.int64)
    common: npt.NDArray[np.bool_] = np.ones(len(rows), dtype=bool)
    for place, queue in enumerate(members):
        own = kernels[queue.gpu]
        assert own is not None
        here = present[:, place]
        mine = rows[here, place]
        lasting[here, place] = own.end[mine] - own.start[mine]
        ends_together = np.array(
            [names.has_common_end(own.info[row].operation or own.info[row].name) for row in mine],
            dtype=bool,
        )
        common[here] &= ends_together
    late = lasting.argmin(axis=1).astype(np.int64)
    shortest = lasting.min(axis=1)
    wait = np.where(present & common[:, None], lasting - shortest[:, None], -1)
    return Matched(
        gpus=[queue.gpu for queue in members],
        rows=rows,
        wait_ns=wait,
        late=np.where(common, late, np.int64(-1)).astype(np.int64),
        complete=np.logical_and(present.all(axis=1), np.full(len(rows), complete)),
    )
