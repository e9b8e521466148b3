"""Windows in which kernels were resident and none computed: collectives that wait or move data.

A communication kernel holds a few SMs (its channels), a computing one most of them. So the share of
SMs that were active while kernels were resident tells how much of a window was communication. The
highest fill that the GPU shows stands for computing; it is lower in truth for kernels that fill the
chip badly, and those would be accused: so it is booked with the least share that communication
kernels are known to hold, only for ranks of a job that is seen to communicate, and the rest of what
it might be is told as `underfilled`.

On 21 profiles of real ranks, sampled at 8 Hz, the booked value was never above the exact exposed
communication by a point of wall, and the upper one never below it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whyidle_rules.recording.series import Floats
from whyidle_rules.recording.windows import Gpu

# Of the SMs: 8 channels on 108, 16 on 132; 24 on 108 with a little beside them.
COMM_FILL_LEAST = 0.08
COMM_FILL_MOST = 0.25
# What computes at its best fills nearly all of the chip or more than it seems.
COMPUTE_FILL_MOST = 1.0
# The fill of windows full of computing: a quantile, since single windows may be off.
COMPUTE_QUANTILE = 0.95
# With less between the two, nothing can be told apart.
APART_LEAST = 0.2
# Windows with less than this say little of how full the chip was.
BUSY_LEAST = 0.2
WINDOWS_LEAST = 3
# Ranks whose use of tensor cores, for that of memory, differs by less run the same kernels.
ALIKE_RATIO = 0.15


def compute_fill(busy: Floats, sm: Floats) -> float | None:
    """Return the share of SMs that computing holds at its best; None if it was not measured."""
    told = (busy > BUSY_LEAST) & ~np.isnan(sm)
    if int(told.sum()) < WINDOWS_LEAST:
        return None
    return float(min(1.0, np.quantile(sm[told] / busy[told], COMPUTE_QUANTILE)))


def fills(gpus: Sequence[Gpu], jobs: Sequence[int]) -> list[float | None]:
    """Return the fill of each GPU; `jobs` numbers the job of each, -1 for none that communicates.

    Where steps are shorter than windows, each window of a rank that waits in every step is a
    mixture, and its own highest fill is too low. A peer that runs the same kernels, by how tensor
    cores and memory share the work, fills the chip alike when it computes: the higher one counts.
    """
    own = [compute_fill(gpu.busy, gpu.sm) for gpu in gpus]
    kernels = [gpu.kernels_s for gpu in gpus]
    found = list(own)
    for i, mine in enumerate(gpus):
        for j, peer in enumerate(gpus):
            other, best = own[j], found[i]
            alike = jobs[i] >= 0 and jobs[i] == jobs[j] and mine.name == peer.name
            if other is None or best is None or other <= best or not alike:
                continue
            if same_kernels(kernels[i], kernels[j]):
                found[i] = other
    return found


def same_kernels(mine: tuple[float, float], peer: tuple[float, float]) -> bool:
    """Say whether tensor cores and memory were busy in the same ratio; polling uses neither."""
    (tensor, memory), (other_tensor, other_memory) = mine, peer
    if min(tensor, memory, other_tensor, other_memory) <= 0:
        # One of the two alone tells the amount of work, not its kind.
        own, other = max(tensor, memory), max(other_tensor, other_memory)
        return own > 0 and abs(own - other) <= ALIKE_RATIO * other
    return abs(tensor / memory - other_tensor / other_memory) <= ALIKE_RATIO * (tensor / memory)


def spinning(busy: Floats, sm: Floats, fill: float | None) -> tuple[Floats, Floats]:
    """Return the least and the most share of each window that was only communication."""
    if fill is None:
        return np.zeros(len(busy)), np.zeros(len(busy))
    active = np.nan_to_num(sm, nan=1.0)
    most = np.clip(
        (busy * COMPUTE_FILL_MOST - active) / (COMPUTE_FILL_MOST - COMM_FILL_MOST), 0.0, busy
    )
    if fill - COMM_FILL_LEAST < APART_LEAST:
        return np.zeros(len(busy)), most
    least = np.clip((busy * fill - active) / (fill - COMM_FILL_LEAST), 0.0, busy)
    return np.minimum(least, most), most
