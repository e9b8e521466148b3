"""What a mount gave and what the job would have read, and checkpoints that go with their node."""

from __future__ import annotations

import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.known import Known
from whyidle_rules.recording.series import Floats
from whyidle_rules.recording.windows import Gpu

# A batch is read and used over some steps.
AROUND_NS = 5 * NS_PER_S
# With less of its time left to compute in, what a job would read is anybody's guess.
_MOST_WAITING_RATIO = 0.95
# Files are looked at in turn, a second or two apart.
_LOOK_NS = 2 * NS_PER_S
_MEGABYTE = 1e6


def add(gpu: Gpu, known: Known, columns: Columns) -> None:
    """Fill in what the loader got and would have read, and saves on what goes with the node."""
    _supply(gpu, columns)
    _saves(gpu, known, columns)


def _supply(gpu: Gpu, columns: Columns) -> None:
    reading = np.nan_to_num(columns["data_wait_s"] * columns["loader_io_ratio"])
    if not reading.any():
        return
    asked, fetched = columns["loader_asked_bytes"], columns["loader_read_bytes"]
    got = np.fmax(asked, fetched)  # what is mapped is not asked for
    length = gpu.length / 1e9
    centres = (gpu.t0 + gpu.t1) // 2
    whole = _around(length, centres)
    share = _around(reading, centres) / whole
    rate = np.where(np.isnan(got), np.nan, _around(np.nan_to_num(got), centres) / whole)
    # Where nobody waited for reads near a window, nothing is said of it, whatever the run holds.
    rate = np.where(share > 0, rate, np.nan)
    known = share <= _MOST_WAITING_RATIO
    columns["loader_megabytes_per_s"] = rate / _MEGABYTE
    columns["wanted_megabytes_per_s"] = np.where(
        known, rate / np.maximum(1.0 - share, 1.0 - _MOST_WAITING_RATIO) / _MEGABYTE, np.nan
    )


def _around(values: Floats, centres: Ints) -> Floats:
    """Return the sum of the values of windows whose middle is near each middle."""
    summed = np.concatenate(([0.0], np.cumsum(values)))
    low = np.searchsorted(centres, centres - AROUND_NS)
    high = np.searchsorted(centres, centres + AROUND_NS, side="right")
    return np.asarray(summed[high] - summed[low])


def _saves(gpu: Gpu, known: Known, columns: Columns) -> None:
    saving = np.nan_to_num(columns["checkpoint_save_s"]) > 0
    if not saving.any():
        return
    for rows, proc in known.stints(gpu):
        looks = known.written.files.get(proc.identity)
        if looks is None or not saving[rows].any():
            continue
        begins, ends = gpu.t0[rows][saving[rows]], gpu.t1[rows][saving[rows]]
        times = looks["mono_ns"].astype(np.int64)
        last = np.searchsorted(begins - _LOOK_NS, times, side="right") - 1
        near = (last >= 0) & (times <= ends[np.maximum(last, 0)] + _LOOK_NS)
        places = {
            (kind, point)
            for kind, point, one in zip(looks["kind"], looks["mount_point"], near, strict=True)
            if one and kind is not None
        }
        if not places:
            continue
        whys = {point: known.written.why_lost(kind, point) for kind, point in places}
        # One place that stays is where the checkpoint may be; the others hold logs.
        lost = all(whys.values())
        length = gpu.length[rows] / 1e9
        columns["save_lost_s"][rows] = np.where(saving[rows] & lost, length, 0.0)
        if lost:
            point, why = next(iter(sorted(whys.items(), key=str)))
            columns["save_mount"][rows] = point
            columns["save_lost_with"][rows] = why
