"""When a GPU had no process, one that had not begun to use it, or one that was ending."""

from __future__ import annotations

import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.known import Known
from whyidle_rules.recording.processes import Proc
from whyidle_rules.recording.series import Floats, runs
from whyidle_rules.recording.threads import HALF_NS
from whyidle_rules.recording.windows import Gpu

# A window in which kernels ran for less than this is wholly empty: gaps are made of such windows.
WHOLLY_EMPTY_RATIO = 0.02
# Longer than this after its last kernel, a process was not just ending.
SHUTDOWN_NS = 15 * NS_PER_S
# A process that began so shortly before the recording had not computed by then: it was importing.
JUST_BEFORE_NS = 5 * NS_PER_S
# Read by a process that starts, while it is blocked: a data set that is listed is fewer bytes, and
# modules that memory holds come without waiting.
READS_BYTES = 4 << 20
READS_BYTES_PER_S = 1 << 20


def gaps(gpu: Gpu) -> Floats:
    """Return how long the stretch of wholly empty windows is that each window is in; else NaN."""
    void = gpu.busy <= WHOLLY_EMPTY_RATIO
    first, last = runs(void)
    out = np.full(len(void), np.nan)
    out[void] = np.repeat((gpu.t1[last] - gpu.t0[first]) / 1e9, last - first + 1)
    return out


def columns(gpu: Gpu, known: Known, empty: Floats) -> dict[str, Floats]:
    """Tell when no process had the GPU, when one had not begun to use it, and when it had ended."""
    found: dict[str, Floats] = {}
    launchers = known.node.launchers(gpu.uuid)
    present, starting, ending, unmet = (np.zeros(len(gpu.t0), dtype=bool) for _ in range(4))
    active = np.flatnonzero(gpu.busy > 0)
    for proc in launchers:
        alive = (gpu.t1 > proc.begin_ns) & (gpu.t0 < proc.end_ns)
        present |= alive
        used = active[(gpu.t1[active] > proc.begin_ns) & (gpu.t0[active] < proc.end_ns)]
        # Of a process that was there first, only its page tells whether it had computed before.
        told = known.told.get(proc.identity)
        met = gpu.first_ns is None or proc.begin_ns >= gpu.first_ns - JUST_BEFORE_NS
        if not met and (told is None or told.steps is not None):
            unmet |= alive
        before = gpu.busy_before_ns
        began = before is not None and before > proc.begin_ns
        if len(used) and not began:
            starting |= alive & (gpu.t1 <= gpu.t0[used[0]])
        last = int(gpu.t1[used[-1]]) if len(used) else before if began else None
        # A job that hangs and is killed at last was not ending all the while.
        if last is not None and proc.end_ns - last <= SHUTDOWN_NS and proc.end_ns < gpu.t1[-1]:
            ending |= alive & (gpu.t0 >= last)
    for first, last in known.node.unread.get(gpu.uuid, ()):
        present |= (gpu.t1 > first) & (gpu.t0 < last)
    # Without a clock, who is seen later may have been there already.
    latest = max((proc.begin_ns for proc in launchers), default=0)
    sure = present | (gpu.t0 >= latest) if not known.node.dated else np.ones_like(present)
    # Who lists processes badly, as inside a container, would say that nobody computed.
    if known.node.listed and not (gpu.busy[~present] > 0).any():
        found["no_process_s"] = np.where(sure, np.where(present, 0.0, empty), np.nan)
    if launchers:
        starts = np.where(starting, np.where(unmet, np.nan, empty), 0.0)
        found["startup_s"] = np.where(sure, starts, np.nan)
        found["shutdown_s"] = np.where(ending, empty, 0.0)
    return found


def blocked_reading(proc: Proc, centres: Ints) -> Floats:
    """Return for which share of the time around a process was blocked in bulk reads; NaN: unknown.

    A start lasts seconds and is read once in each, so that a time is told by the readings before
    and after it.
    """
    told = ~np.isnan(proc.rows["io"].astype(np.float64))
    times = proc.rows["mono_ns"].astype(np.int64)[told]
    if len(times) < 2:
        return np.full(len(centres), np.nan)
    blocked = proc.rows["io"].astype(np.float64)[told]
    read = [proc.rows[name].astype(np.float64)[told] for name in ("rchar_bytes", "read_bytes")]
    if np.isnan(read).all():
        return np.full(len(centres), np.nan)
    for first, last in zip(*runs(blocked > 0), strict=True):
        after = min(last + 1, len(times) - 1)
        # A long read counts when it ends.
        grown = np.nan_to_num([total[after] - total[first] for total in read]).max()
        if grown < max(READS_BYTES, READS_BYTES_PER_S * (times[after] - times[first]) / NS_PER_S):
            blocked[first : last + 1] = 0.0
    near = (centres >= times[0] - HALF_NS) & (centres <= times[-1] + HALF_NS)
    return np.asarray(np.where(near, np.interp(centres, times, blocked), np.nan))
