"""Power and clocks of a GPU: work that its power limit or heat slowed, and kernels that do nothing.

None of it is idle time: it is told beside the ledger. The driver counts the time for which it held
the clock down; readings of the clock, a second apart, say how far. What that cost is an upper
bound: kernels that wait for memory lose less than their clock does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.series import Columns as Rows
from whyidle_rules.recording.series import (
    Floats,
    Truths,
    counter,
    fetch,
    nearest,
    runs,
)
from whyidle_rules.recording.threads import GAP_NS, LEAST_NS
from whyidle_rules.recording.windows import Gpu

_HALF_NS = NS_PER_S
_STALE_NS = 3 * NS_PER_S
# nvmlClocksEventReasons, for drivers that do not count the time: idle; the power limit and the
# power brake; heat, told by software or hardware.
_IDLE = 0x1
_POWER = 0x4 | 0x80
_HEAT = 0x20 | 0x40
_COUNTERS = {"power": ("sw_power_cap", "hw_power_brake"), "heat": ("sw_thermal", "hw_thermal")}

# A GPU with a kernel on it for as long as this, at the power of an empty one, runs none that
# computes; a kernel that polls a peer for shorter is an ordinary wait.
STUCK_S = 60.0
STUCK_BUSY_RATIO = 0.9
# Above the power of the empty GPU: readings of one state differ by as much.
STUCK_POWER_RATIO = 1.1
# Of the peak: whatever moves data is not stuck.
STUCK_DRAM_RATIO = 0.01
# The empty GPU has to have been seen for so many readings.
EMPTY_READINGS = 5
EMPTY_BUSY_RATIO = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """States of the GPUs of a node, by UUID; the highest SM clock; the power of an empty GPU.

    The least power is in milliwatts, by product name: GPUs of one kind draw alike when empty.
    `dram` reads how busy the memory of a GPU was: few are ever asked for.
    """

    states: Mapping[str, Rows]
    fastest: Mapping[str, float]
    dram: Callable[[str], Rows]
    empty_milliwatts: Mapping[str, float]


def load(
    con: duckdb.DuckDBPyConnection,
    node: str,
    boot_id: str,
    since_ns: int,
    until_ns: int,
    gpus: Sequence[Gpu],
) -> Power:
    """Return what is known of the power and the clocks of a node's GPUs in [since, until]."""
    at: dict[str, Any] = {"node": node, "boot": boot_id, "since": since_ns, "until": until_ns}
    here = "node = $node AND boot_id = $boot AND mono_ns BETWEEN $since AND $until"
    numbers = ("sw_power_cap_ns", "hw_power_brake_ns", "sw_thermal_ns", "hw_thermal_ns")
    picked = ", ".join(f"{name}::DOUBLE AS {name}" for name in numbers)
    states = fetch(
        con,
        f"SELECT uuid, mono_ns, {picked}, sm_clock_megahertz::DOUBLE AS clock,"
        " event_reasons::DOUBLE AS reasons,"
        " coalesce(power_instant_milliwatts, power_milliwatts)::DOUBLE AS milliwatts"
        f" FROM gpu_state WHERE {here} AND uuid IS NOT NULL AND nvml_return = 0"
        " ORDER BY uuid, mono_ns",
        at,
    ).groups("uuid")
    fastest = con.execute(
        "SELECT uuid, max(max_sm_clock_megahertz) FROM gpu_info WHERE node = $node"
        " AND boot_id = $boot AND max_sm_clock_megahertz > 0 GROUP BY uuid",
        {"node": node, "boot": boot_id},
    ).fetchall()

    def dram(uuid: str) -> Rows:
        return fetch(
            con,
            f"SELECT mono_ns, dram_active_ratio AS busy FROM gpu_activity WHERE {here}"
            " AND uuid = $uuid AND dram_active_ratio IS NOT NULL ORDER BY mono_ns",
            {**at, "uuid": uuid},
        )

    known = {uuid: rows for (uuid,), rows in states.items()}
    return Power(
        states=known,
        fastest={uuid: float(clock) for uuid, clock in fastest},
        dram=dram,
        empty_milliwatts=_empty(known, [gpu for gpu in gpus if gpu.machine == (node, boot_id)]),
    )


def _empty(states: Mapping[str, Rows], gpus: Sequence[Gpu]) -> dict[str, float]:
    """Return the power of empty GPUs by product name: the median of readings while empty."""
    found: dict[str, list[float]] = {}
    for gpu in gpus:
        if gpu.name is None or gpu.uuid not in states:
            continue
        rows = states[gpu.uuid]
        times = rows["mono_ns"].astype(np.int64)
        still = gpu.emptiness(times - _HALF_NS // 2) >= 1.0 - EMPTY_BUSY_RATIO
        still &= gpu.emptiness(times) >= 1.0 - EMPTY_BUSY_RATIO
        drawn = rows["milliwatts"][still & ~np.isnan(rows["milliwatts"])]
        found.setdefault(gpu.name, []).extend(float(value) for value in drawn)
    return {
        name: float(np.median(drawn))
        for name, drawn in found.items()
        if len(drawn) >= EMPTY_READINGS
    }


def add(gpu: Gpu, power: Power, columns: Columns) -> None:
    """Fill in the columns of power and clocks."""
    rows = power.states.get(gpu.uuid)
    if rows is None:
        return
    centres = (gpu.t0 + gpu.t1) // 2
    _clocks(rows, power.fastest.get(gpu.uuid), centres, columns)
    drawn = _near(rows, "milliwatts", centres)
    columns["power_watts"] = drawn / 1e3
    least = power.empty_milliwatts.get(gpu.name or "")
    if least is not None:
        columns["empty_power_watts"] = np.full(len(centres), least / 1e3)
        columns["stuck_s"] = _stuck(gpu, drawn, least, power.dram, columns)


def _clocks(rows: Rows, fastest: float | None, centres: Ints, columns: Columns) -> None:
    heat = _slowed(rows, "heat", centres)
    power = np.minimum(_slowed(rows, "power", centres), 1.0 - np.nan_to_num(heat))
    working = columns["working_s"]
    columns["heat_slowed_s"] = working * heat
    columns["power_slowed_s"] = working * power
    # An idle GPU lowers its clock by itself: such a reading says nothing of a window with work.
    asleep = (np.nan_to_num(rows["reasons"]).astype(np.int64) & _IDLE) > 0
    clock = _near(rows.where(~asleep), "clock", centres)
    columns["sm_clock_megahertz"] = clock
    if fastest is None:
        return
    columns["sm_clock_max_megahertz"] = np.full(len(centres), fastest)
    lost = np.clip(1.0 - clock / fastest, 0.0, 1.0)
    columns["heat_lost_s"] = columns["heat_slowed_s"] * lost
    columns["power_lost_s"] = columns["power_slowed_s"] * lost


def _slowed(rows: Rows, kind: str, centres: Ints) -> Floats:
    """Return for which share of the time around each window the clock was held down."""
    times = rows["mono_ns"].astype(np.int64)
    known = [f"{name}_ns" for name in _COUNTERS[kind] if (~np.isnan(rows[f"{name}_ns"])).any()]
    if not known:
        bits = _POWER if kind == "power" else _HEAT
        told = _near(rows, "reasons", centres)
        held = (np.nan_to_num(told).astype(np.int64) & bits) > 0
        return np.where(np.isnan(told), np.nan, held.astype(np.float64))
    share = np.zeros(len(centres))
    covered = np.zeros(len(centres), dtype=bool)
    for name in known:
        grown, seen = counter(times, rows[name].astype(np.float64), gap_ns=GAP_NS).around(
            centres, _HALF_NS, LEAST_NS
        )
        # Two reasons may hold at once: the longer one is how long it was slowed.
        share = np.maximum(share, grown / np.maximum(seen, 1.0))
        covered |= seen > 0
    return np.where(covered, np.clip(share, 0.0, 1.0), np.nan)


def _near(rows: Rows, name: str, centres: Ints) -> Floats:
    """Return the reading near each time; NaN where there is none."""
    rows = rows.where(~np.isnan(rows[name]))
    if len(rows) == 0:
        return np.full(len(centres), np.nan)
    near = nearest(rows["mono_ns"].astype(np.int64), centres, _STALE_NS)
    return np.where(near >= 0, rows[name][near], np.nan)


def _stuck(
    gpu: Gpu, milliwatts: Floats, empty: float, dram: Callable[[str], Rows], columns: Columns
) -> Floats:
    """Return the working time of long stretches at the power of an empty GPU; NaN for unknown."""
    still = (gpu.busy >= STUCK_BUSY_RATIO) & (milliwatts <= STUCK_POWER_RATIO * empty)
    still = long_enough(gpu, still)
    if still.any() and len(rows := dram(gpu.uuid)):
        near = nearest(rows["mono_ns"].astype(np.int64), gpu.t1, NS_PER_S)
        still &= ~((near >= 0) & (rows["busy"][near] > STUCK_DRAM_RATIO))
        still = long_enough(gpu, still)
    out = np.where(still, columns["working_s"], 0.0)
    return np.where(np.isnan(milliwatts), np.nan, out)


def long_enough(gpu: Gpu, still: Truths) -> Truths:
    """Return in which windows it is so, and has been or will be for `STUCK_S` without a break."""
    out = np.zeros(len(still), dtype=bool)
    first, last = runs(still)
    out[still] = np.repeat((gpu.t1[last] - gpu.t0[first]) / 1e9 >= STUCK_S, last - first + 1)
    return out
