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
    if len(wait) == 0:
        return np.empty(0)
    block = np.cumsum(np.concatenate(([False], np.diff(starts // BLOCK_NS) != 0)))
    other = np.maximum(length - wait, 0.0)
    beside = _rates(wait, empty, other, length, block) * other
    return np.asarray(np.minimum(wait, np.maximum(empty - beside, 0.0)))


def _rates(wait: Floats, empty: Floats, other: Floats, length: Floats, block: Ints) -> Floats:
    """Return which share of the time without a wait is empty in the block of each window.

    A median of windows, as pauses are no rate.
    """
    hardly = np.flatnonzero(wait < HARDLY_RATIO * length)  # false for NaN
    rest = np.maximum(empty[hardly] - wait[hardly], 0.0) / np.maximum(other[hardly], 1e-9)
    # By block, and from the least to the greatest in each.
    ordered = rest[np.lexsort((rest, block[hardly]))]
    count = np.bincount(block[hardly], minlength=int(block[-1]) + 1)
    first = np.cumsum(count) - count
    enough = count >= WINDOWS_LEAST
    low, high = (first + (count - 1) // 2)[enough], (first + count // 2)[enough]
    rates = np.zeros(len(count))
    rates[enough] = np.clip((ordered[low] + ordered[high]) / 2.0, 0.0, 1.0)
    return np.asarray(rates[block])
