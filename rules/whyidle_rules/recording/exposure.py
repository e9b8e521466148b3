"""How much of the empty time beside a wait for data is the wait's own.

In a window in which the trainer waited for 50 ms and the GPU was empty for 50 ms, both may have
been the same 50 ms, or the GPU ran on what was queued for it and was empty at another time. Windows
in which the trainer hardly waited show how empty the GPU is without it, as in a job that launches
too slowly. That much of the other time of a window counts as empty for that reason; a wait is
charged with what is left, as far as it is long enough. Without such windows, it has all.
"""

from __future__ import annotations

import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.series import Floats

# A job changes: ten seconds of windows are taken together, wherever a range of them begins.
BLOCK_NS = 10 * NS_PER_S
# Windows with less waiting than this show what the rest of the time is like.
HARDLY_RATIO = 0.2
WINDOWS_LEAST = 2


def exposed(wait: Floats, empty: Floats, length: Floats, starts: Ints) -> Floats:
    """Return how much of each wait the GPU was empty for; seconds, by window; NaN stays NaN.

    `starts` are the times at which the windows begin, in order, ns.
    """
    out = np.minimum(wait, empty)
    edges = np.flatnonzero(np.diff(starts // BLOCK_NS)) + 1
    for part in np.split(np.arange(len(out)), edges):
        other = np.maximum(length[part] - wait[part], 0.0)
        beside = _rate(wait[part], empty[part], other, length[part]) * other
        out[part] = np.minimum(wait[part], np.maximum(empty[part] - beside, 0.0))
    return out


def _rate(wait: Floats, empty: Floats, other: Floats, length: Floats) -> float:
    """Return which share of the time without a wait is empty; a median, as pauses are no rate."""
    hardly = wait < HARDLY_RATIO * length  # false for NaN
    if int(hardly.sum()) < WINDOWS_LEAST:
        return 0.0
    rest = np.maximum(empty[hardly] - wait[hardly], 0.0)
    return float(np.clip(np.median(rest / np.maximum(other[hardly], 1e-9)), 0.0, 1.0))
