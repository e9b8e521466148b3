"""GPUDirect Storage that is set up and moves nothing: its compatibility mode.

cuFile then reads into host memory and copies from there, and says so only in its own log. What the
kernel module tells is that processes have buffers registered and that no read went through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.series import Columns as Rows
from whyidle_rules.recording.series import fetch, nearest
from whyidle_rules.recording.windows import Gpu

# It is read every five seconds.
_STALE_NS = 12 * NS_PER_S
# Less than this are logs and code, and no data for a GPU.
READS_BYTES_PER_S = 10e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Gds:
    """Readings of the module, with statistics on; `moved`: whether anything ever went through."""

    rows: Rows
    moved: bool


def load(
    con: duckdb.DuckDBPyConnection, node: str, boot_id: str, since_ns: int, until_ns: int
) -> Gds | None:
    """Return what the module told in [since, until]; None where nothing was counted."""
    at: Mapping[str, Any] = {"node": node, "boot": boot_id, "since": since_ns, "until": until_ns}
    rows = fetch(
        con,
        "SELECT mono_ns, processes::DOUBLE AS processes,"
        " reads::DOUBLE + coalesce(writes, 0) AS moved,"
        " shadow_buffer_bytes::DOUBLE AS buffers FROM gds WHERE node = $node"
        " AND boot_id = $boot AND mono_ns BETWEEN $since AND $until AND io_stats"
        " AND reads IS NOT NULL AND processes IS NOT NULL AND shadow_buffer_bytes IS NOT NULL"
        " ORDER BY mono_ns",
        at,
    )
    if len(rows) < 2:
        return None
    return Gds(rows=rows, moved=bool(rows["moved"].max() > rows["moved"].min()))


def add(gpu: Gpu, told: Gds | None, columns: Columns) -> None:
    """Fill in gds_bounced_s: the time that the trainer itself was blocked in reads by the host.

    A process that reads directly now and then knows how, and where it does not it was not asked to.
    """
    if told is None:
        return
    centres = (gpu.t0 + gpu.t1) // 2
    near = nearest(told.rows["mono_ns"].astype(np.int64), centres, _STALE_NS)
    known = near >= 0
    set_up = known & (told.rows["processes"][near] > 0) & (told.rows["buffers"][near] > 0)
    itself = np.nan_to_num(columns["loader_workers"], nan=1.0) == 0
    asked = np.nan_to_num(columns["loader_asked_bytes"]) * 1e9 / gpu.length
    bounced = set_up & itself & (asked >= READS_BYTES_PER_S) & (not told.moved)
    blocked = np.nan_to_num(columns["main_blocked_s"])
    wait = np.nan_to_num(columns["data_wait_s"])
    reading = np.clip(np.nan_to_num(columns["loader_io_ratio"]), 0.0, 1.0)
    taken = np.where(bounced, blocked + wait * reading, 0.0)
    columns["gds_bounced_s"] = np.where(known, taken, np.nan)
    columns["main_blocked_s"] = np.where(bounced, 0.0 * blocked, columns["main_blocked_s"])
    columns["data_wait_s"] = np.where(bounced, wait * (1.0 - reading), columns["data_wait_s"])
    # What is left of the wait did no reading: the other shares are of that now.
    left = np.maximum(1.0 - reading, 1e-9)
    for name in ("loader_cpu_ratio", "loader_runq_ratio"):
        scaled = np.clip(columns[name] / left, 0.0, 1.0)
        columns[name] = np.where(bounced, scaled, columns[name])
    columns["loader_io_ratio"] = np.where(bounced, 0.0, columns["loader_io_ratio"])
