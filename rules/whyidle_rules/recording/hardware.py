"""What the hardware itself adds to a GPU's evidence: errors of the driver, and the PCIe link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules import evidence
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.series import Columns as Rows
from whyidle_rules.recording.series import fetch, nearest, one
from whyidle_rules.recording.windows import Gpu

# Errors after which the GPU, not the job, needs help (docs.nvidia.com/deploy/xid-errors): memory
# that cannot be corrected, NVLink, the GPU fallen off the bus, its firmware silent. Faults of the
# job's own kernels (13, 31, 43, 45) are not among them: the job ends, and that is told.
FATAL_XIDS = (46, 48, 61, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 154)
# A GPU that computes again is well; one that does not is in somebody's hands after a while.
XID_NS = 600 * NS_PER_S
# Bytes per second and lane that a link carries, encoding off: generation 1 to 6. Of that, packet
# headers leave about 85 %.
_LANE_BYTES_PER_S = np.array([np.nan, 0.25e9, 0.5e9, 0.985e9, 1.969e9, 3.938e9, 7.563e9])
_PAYLOAD_RATIO = 0.85
# From this share of what the link carries on, copies fill it.
FULL_RATIO = 0.6
_STALE_NS = 5 * NS_PER_S

_SPINNING = ("coll_s", "comm_s", "p2p_s")
_EMPTY = [c.name for c in evidence.OBSERVED if c.exclusive and c.name not in _SPINNING]
_LEFT = ("main_run_s", "main_ready_s", "main_blocked_s", "main_asleep_s", "main_stopped_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the GPUs of a node reported, by UUID; `watched`: whether errors were listened for.

    `asked` are the GPUs whose state was read, so that being lost would have been seen.
    """

    errors: Mapping[str, Sequence[tuple[int, int | None]]]
    watched: bool
    asked: frozenset[str]
    links: Mapping[str, Rows]
    best: Mapping[str, tuple[int | None, int | None]]


def load(
    con: duckdb.DuckDBPyConnection, node: str, boot_id: str, since_ns: int, until_ns: int
) -> Facts:
    """Return what is known of the hardware of a node in [since, until]."""
    here = {"node": node, "boot": boot_id}
    at = {**here, "since": since_ns, "until": until_ns}
    where = "node = $node AND boot_id = $boot AND mono_ns BETWEEN $since AND $until"
    errors: dict[str, list[tuple[int, int | None]]] = {}
    # The log knows addresses; where the driver did not tell whose they are, NVML did. A MIG device
    # goes with the GPU that it is a part of.
    for uuid, mono_ns, xid in con.execute(
        "SELECT i.uuid, e.mono_ns, e.xid FROM gpu_event e JOIN"
        "  (SELECT uuid, max(parent_uuid) AS parent, max(pci_bus_id) AS address FROM gpu_info"
        "   WHERE node = $node AND boot_id = $boot GROUP BY uuid) i"
        "  ON e.uuid IN (i.uuid, i.parent) OR (e.uuid IS NULL AND e.pci_bus_id = i.address)"
        f" WHERE {where} AND kind IN ('xid', 'lost')"
        f" AND (xid IS NULL OR xid IN {FATAL_XIDS}) ORDER BY mono_ns",
        at,
    ).fetchall():
        errors.setdefault(uuid, []).append((mono_ns, xid))
    watched = one(
        con,
        "SELECT count(*) FROM tick WHERE node = $node AND boot_id = $boot AND rows IS NOT NULL"
        " AND collector IN ('xid', 'gpu_event')",
        here,
    )
    asked = con.execute(
        "SELECT DISTINCT uuid FROM gpu_state WHERE node = $node AND boot_id = $boot"
        " AND uuid IS NOT NULL UNION SELECT i.uuid FROM gpu_info i JOIN gpu_state s"
        " ON s.uuid = i.parent_uuid WHERE i.node = $node AND i.boot_id = $boot"
        " AND s.node = $node AND s.boot_id = $boot",
        here,
    ).fetchall()
    links = fetch(
        con,
        "SELECT uuid, mono_ns, pcie_generation::DOUBLE AS generation, pcie_width::DOUBLE AS width"
        f" FROM gpu_state WHERE {where} AND uuid IS NOT NULL AND pcie_generation BETWEEN 1 AND 6"
        " AND pcie_width > 0 ORDER BY uuid, mono_ns",
        at,
    ).groups("uuid")
    best = con.execute(
        "SELECT uuid, max(max_pcie_generation), max(max_pcie_width) FROM gpu_info"
        " WHERE node = $node AND boot_id = $boot GROUP BY uuid",
        here,
    ).fetchall()
    return Facts(
        errors=errors,
        watched=bool(watched[0]),
        asked=frozenset(uuid for (uuid,) in asked),
        links={uuid: rows for (uuid,), rows in links.items()},
        best={uuid: (generation, width) for uuid, generation, width in best},
    )


def add(gpu: Gpu, facts: Facts, columns: Columns) -> None:
    """Fill in the columns of the hardware; what they take, no other column keeps."""
    errors = facts.errors.get(gpu.uuid, ())
    if errors or facts.watched:
        _xid(gpu, errors, columns)
    if gpu.uuid in facts.asked:
        _lost(gpu, columns)
    if gpu.uuid in facts.links and not np.isnan(gpu.pcie_bytes).all():
        best = facts.best.get(gpu.uuid, (None, None))
        _pcie(gpu, facts.links[gpu.uuid], best, columns)


def _xid(gpu: Gpu, errors: Sequence[tuple[int, int | None]], columns: Columns) -> None:
    hit = np.zeros(len(gpu.t0), dtype=bool)
    number = np.full(len(gpu.t0), np.nan)
    active = gpu.t1[gpu.busy > 0]
    for mono_ns, xid in errors:
        later = active[active > mono_ns + NS_PER_S]  # what ran when it happened may end
        end = min(int(later[0]) if len(later) else mono_ns + XID_NS, mono_ns + XID_NS)
        inside = (gpu.t0 >= mono_ns) & (gpu.t1 <= end)
        hit |= inside
        number[inside] = np.nan if xid is None else float(xid)
    empty = columns["empty_s"]
    columns["xid_s"] = np.where(hit, empty, 0.0)
    columns["xid"] = number
    if not hit.any():
        return
    for name in _EMPTY:
        if name != "xid_s":
            columns[name] = np.where(hit & ~np.isnan(columns[name]), 0.0, columns[name])


def _lost(gpu: Gpu, columns: Columns) -> None:
    """Give the time in which the GPU was lost, or had to be reset, to that alone."""
    gone = np.zeros(len(gpu.t0), dtype=bool)
    reset = np.zeros(len(gpu.t0), dtype=bool)
    for lost in gpu.lost:
        inside = (gpu.t0 >= lost.begin_ns) & (gpu.t1 <= lost.end_ns) & (gpu.busy <= 0)
        gone |= inside
        reset |= inside & lost.reset
    columns["lost_s"] = np.where(gone & ~reset, columns["empty_s"], 0.0)
    columns["reset_s"] = np.where(reset, columns["empty_s"], 0.0)
    if not gone.any():
        return
    for name in _EMPTY:
        if name not in ("lost_s", "reset_s"):
            columns[name] = np.where(gone & ~np.isnan(columns[name]), 0.0, columns[name])


def _pcie(gpu: Gpu, state: Rows, best: tuple[int | None, int | None], columns: Columns) -> None:
    centres = (gpu.t0 + gpu.t1) // 2
    near = nearest(state["mono_ns"].astype(np.int64), centres, _STALE_NS)
    known = near >= 0
    generation, width = state["generation"][near], state["width"][near]
    per_s = _LANE_BYTES_PER_S[generation.astype(np.int64)] * width * _PAYLOAD_RATIO
    ratio = np.where(known, gpu.pcie_bytes / (per_s * gpu.length / 1e9), np.nan)
    ratio = np.clip(ratio, 0.0, 1.0)
    columns["pcie_ratio"] = ratio
    if best[0] is not None and best[1] is not None:
        # Under traffic a link does not sleep: what it runs at is what it can.
        reduced = (generation < best[0]) | (width < best[1])
        columns["pcie_reduced"] = np.where(known, reduced.astype(np.float64), np.nan)
    left = np.add.reduce([np.nan_to_num(columns[name]) for name in _LEFT])
    full = np.nan_to_num(ratio) >= FULL_RATIO
    taken = np.where(full, np.minimum(left, gpu.length / 1e9 * np.nan_to_num(ratio)), 0.0)
    columns["pcie_copy_s"] = np.where(np.isnan(ratio), np.nan, taken)
    scale = np.where(left > 0, 1.0 - taken / np.maximum(left, 1e-12), 1.0)
    for name in _LEFT:
        columns[name] = columns[name] * scale
