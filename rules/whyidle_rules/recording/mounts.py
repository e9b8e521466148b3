"""What a mount gave and what the job would have read, and checkpoints that go with their node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.processes import Identity
from whyidle_rules.recording.series import Columns as Rows
from whyidle_rules.recording.series import Floats, fetch
from whyidle_rules.recording.windows import Gpu

if TYPE_CHECKING:
    from whyidle_rules.recording.known import Known

# A batch is read and used over some steps.
AROUND_NS = 5 * NS_PER_S
# With less of its time left to compute in, what a job would read is anybody's guess.
_MOST_WAITING_RATIO = 0.95
# Files are looked at in turn, a second or two apart.
_LOOK_NS = 2 * NS_PER_S
# Drives that a cloud gives to a machine for as long as it runs (instance store, local SSD).
_RENTED = (
    "Amazon EC2 NVMe Instance Storage",
    "nvme_card",
    "Microsoft NVMe Direct Disk",
    "Microsoft NVMe Direct Disk v2",
)
_MEGABYTE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Looks at files open for writing, by process, and which mounts go with the node, and why."""

    files: Mapping[Identity, Rows]
    lost_with: Mapping[str, str]

    def why_lost(self, kind: str | None, point: str | None) -> str:
        """Return with what a mount's files are lost; "" where nothing says that they are."""
        if kind == "tmpfs":
            return "the memory of the node"
        if kind == "overlay":
            return "the container"
        return self.lost_with.get(point or "", "")


def load(
    con: duckdb.DuckDBPyConnection, node: str, boot_id: str, since_ns: int, until_ns: int
) -> Written:
    """Return what was seen of files open for writing in [since, until]."""
    here = {"node": node, "boot": boot_id}
    at: dict[str, Any] = {**here, "since": since_ns, "until": until_ns}
    rows = fetch(
        con,
        "SELECT pid, start_ns, mono_ns, kind, mount_point FROM file_use WHERE node = $node"
        " AND boot_id = $boot AND mono_ns BETWEEN $since AND $until AND write_files > 0"
        " AND pid IS NOT NULL AND start_ns IS NOT NULL ORDER BY pid, start_ns, mono_ns",
        at,
    ).groups("pid", "start_ns")
    rented = con.execute(
        "SELECT DISTINCT m.mount_point FROM mount m,"
        " unnest(string_split(m.block_device, ',')) AS below(device)"
        " JOIN nvme_namespace n ON n.node = m.node AND n.boot_id = m.boot_id"
        "  AND n.device = below.device"
        " JOIN nvme_controller c ON c.node = m.node AND c.boot_id = m.boot_id"
        "  AND list_contains(string_split(n.controllers, ','), c.controller)"
        " WHERE m.node = $node AND m.boot_id = $boot AND list_contains($models, trim(c.model))",
        {**here, "models": list(_RENTED)},
    ).fetchall()
    return Written(
        files={(int(pid), int(start)): own for (pid, start), own in rows.items()},
        lost_with={point: "the machine, which rents its disk for as long" for (point,) in rented},
    )


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
    from whyidle_rules.recording.fill import stints

    saving = np.nan_to_num(columns["checkpoint_save_s"]) > 0
    if not saving.any():
        return
    for rows, proc in stints(gpu, known):
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
