"""When a launching process wrote in bulk while its GPU was empty, as nothing but a save does."""

from __future__ import annotations

import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.lifecycle import WHOLLY_EMPTY_RATIO
from whyidle_rules.recording.processes import Proc
from whyidle_rules.recording.series import Floats, Truths, counter, runs
from whyidle_rules.recording.threads import GAP_NS, Shares
from whyidle_rules.recording.windows import Gpu

# Written in one empty stretch by the launching process: more than a log, less than any checkpoint.
BULK_WRITE_BYTES = 4 << 20
# Around a window: readings are a second apart, so that growth is told a second too widely.
WRITES_HALF_NS = NS_PER_S
# At the rate that counts as growing a bulk is written in eight seconds: none of it is farther away.
BULK_HALF_NS = 8 * NS_PER_S
GROWS_BYTES = 1 << 20
# Of its time, after a bulk write: it waits for that to reach the device.
BLOCKED_RATIO = 0.2


def in_bulk(gpu: Gpu, proc: Proc, rows: slice, main: Shares) -> Floats:
    """Return in which wholly empty windows the process wrote in bulk: 1 or 0, NaN for unknown.

    It did where its writes grew, in a stretch in which they grew by much, and for as long after
    that as it is blocked: what was written goes to the device then.
    """
    void = gpu.busy[rows] <= WHOLLY_EMPTY_RATIO
    out = np.zeros(len(void))
    own = proc.rows
    t0, t1 = gpu.t0[rows], gpu.t1[rows]
    # Pages of a block device that it made dirty, or what it gave to write() for any other.
    written = [
        counter(own["mono_ns"].astype(np.int64), own[name], gap_ns=GAP_NS)
        for name in ("write_bytes", "wchar_bytes")
    ]
    if all(len(each.times) < 2 for each in written):
        return np.where(void, np.nan, 0.0)
    near = [each.around((t0 + t1) // 2, WRITES_HALF_NS, 0)[0] for each in written]
    grows = np.maximum(*near) >= GROWS_BYTES
    for first, last in zip(*runs(void), strict=True):
        part = slice(first, last + 1)
        # Readings are a second apart: what was written just before belongs to the stretch.
        begins = np.maximum(t0[first] - NS_PER_S, t0[part] - BULK_HALF_NS)
        ends = np.minimum(t1[last] + NS_PER_S, t1[part] + BULK_HALF_NS)
        grown = [e.around((begins + ends) // 2, (ends - begins) // 2, 0)[0] for e in written]
        bulk = grows[part] & (np.maximum(*grown) >= BULK_WRITE_BYTES)
        out[part] = _while_written(bulk, main.io[part] >= BLOCKED_RATIO)
    return out


def alone(proc: Proc, centres: Ints) -> Truths:
    """Return at which times a process wrote in bulk within a second, and read less than that."""
    own = proc.rows
    times = own["mono_ns"].astype(np.int64)

    def most(*names: str) -> Floats:
        near = (counter(times, own[name], gap_ns=GAP_NS) for name in names)
        return np.asarray(np.fmax(*(each.around(centres, WRITES_HALF_NS, 0)[0] for each in near)))

    wrote = most("write_bytes", "wchar_bytes")
    bulk = wrote >= BULK_WRITE_BYTES
    # Few ever do, and nobody else's reads have to be counted.
    return bulk & (most("read_bytes", "rchar_bytes") < wrote) if bulk.any() else bulk


def _while_written(grows: Truths, blocked: Truths) -> Floats:
    """Return 1 where writes grow, and on from there while the process is blocked; else 0."""
    out = grows.astype(np.float64)
    for place in range(1, len(out)):
        if out[place - 1] and blocked[place]:
            out[place] = 1.0
    return out
