"""The GPUs' own sampling windows: how long each was, and how long kernels were resident in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.series import Columns, Floats, fetch

# Without windows of its own a GPU's utilization stands for the time since the reading before.
STALE_NS = 2 * NS_PER_S
# Nobody samples less often: what claims to be longer, or lies further from zero, is damage.
LONGEST_NS = 3600 * NS_PER_S
LATEST_NS = 1 << 62
# NVML's answers of a GPU that is gone: NVML_ERROR_GPU_IS_LOST, and waiting for a reset,
# NVML_ERROR_RESET_REQUIRED.
RESET = 16
LOST = (15, RESET)
# In one window: less is heartbeats of the links themselves.
LINKED_BYTES = 1 << 20


class Lost(NamedTuple):
    """A span in which a GPU was gone, and whether the driver asked for a reset in it."""

    begin_ns: int
    end_ns: int
    reset: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of a node and its windows, in order and apart; `busy` is the share with kernels.

    `sm` is the mean share of SMs with a warp, `pcie_bytes` what went over PCIe in the busier
    direction, both NaN where that was not measured; `linked` says whether bytes went over NVLink at
    all, `linked_bytes` how many were sent and received; `kernels` has two rows, the shares in which
    its tensor cores and its memory were busy, 0 where that was not measured; `busy_before_ns` is
    when kernels ran last before these windows, `first_ns` when the recording begins to know of it.
    `lost` are the spans in which the driver answered that it is lost, and those in which it said
    that it has to be reset: they are made windows, since no sample tells of them.
    """

    node: str
    boot_id: str
    uuid: str
    index: int | None
    name: str | None
    t0: Ints
    t1: Ints
    busy: Floats
    sm: Floats
    pcie_bytes: Floats
    kernels: Floats
    source: str
    unknown_ns: int
    linked: bool = False
    linked_bytes: tuple[float, float] = (0.0, 0.0)
    busy_before_ns: int | None = None
    first_ns: int | None = None
    lost: tuple[Lost, ...] = ()

    @property
    def length(self) -> Ints:
        """Length of each window, ns."""
        return self.t1 - self.t0

    @property
    def kernels_s(self) -> tuple[float, float]:
        """For how long its tensor cores and its memory were busy in all."""
        tensor, memory = (self.kernels * self.length).sum(axis=1) / 1e9
        return float(tensor), float(memory)

    @property
    def machine(self) -> tuple[str, str]:
        """Node and boot id: whose monotonic clock the times are of."""
        return self.node, self.boot_id

    def emptiness(self, times: Ints) -> Floats:
        """Return how empty the GPU was in the window of each time; 0 outside of all."""
        if len(self.t1) == 0:
            return np.zeros(len(times))
        near = np.minimum(np.searchsorted(self.t1, times, side="left"), len(self.t1) - 1)
        inside = (times >= self.t0[near]) & (times <= self.t1[near])
        return np.asarray(np.where(inside, 1.0 - self.busy[near], 0.0))

    def at(self, rows: slice) -> Gpu:
        """Return the GPU with some of its windows that follow each other."""
        if rows == slice(0, len(self.t0)):
            return self
        return replace(
            self,
            t0=self.t0[rows],
            t1=self.t1[rows],
            busy=self.busy[rows],
            sm=self.sm[rows],
            pcie_bytes=self.pcie_bytes[rows],
            kernels=self.kernels[:, rows],
        )

    def between(self, since_ns: int, until_ns: int) -> Gpu:
        """Return the GPU with those of its windows that end in (since, until]."""
        chosen = (self.t1 > since_ns) & (self.t1 <= until_ns)
        used = self.t1[(self.t1 <= since_ns) & (self.busy > 0)]
        t0, t1 = self.t0[chosen], self.t1[chosen]
        return replace(
            self,
            t0=t0,
            t1=t1,
            busy=self.busy[chosen],
            sm=self.sm[chosen],
            pcie_bytes=self.pcie_bytes[chosen],
            kernels=self.kernels[:, chosen],
            unknown_ns=_apart_ns(t0, t1),
            busy_before_ns=int(used[-1]) if len(used) else self.busy_before_ns,
        )


def load(con: duckdb.DuckDBPyConnection, since_ns: int | None, until_ns: int | None) -> list[Gpu]:
    """Return all GPUs that have windows which end in (since, until], by node and index."""
    infos = _infos(con)
    split = {(key[0], info[1]) for key, info in infos.items() if info[1] is not None}
    # What is split into MIG devices is not a GPU; they are.
    seen = [one for one in _seen(con, since_ns) if (one.node, one.uuid) not in split]
    if not seen:
        return []
    rows = fetch(
        con,
        "SELECT k.number, mono_ns, t0_ns, t1_ns, gr_active_ratio, sm_active_ratio,"
        " utilization_ratio, coalesce(nvlink_tx_bytes, 0)::DOUBLE AS nvlink_tx,"
        " coalesce(nvlink_rx_bytes, 0)::DOUBLE AS nvlink_rx,"
        " tensor_active_ratio, dram_active_ratio,"
        " greatest(pcie_tx_bytes, pcie_rx_bytes)::DOUBLE AS pcie_bytes FROM gpu_activity a JOIN"
        # Numbers instead of three words in each of five million rows.
        " (SELECT unnest($nodes) AS node, unnest($boots) AS boot_id, unnest($uuids) AS uuid,"
        "  unnest($numbers) AS number) k USING (node, boot_id, uuid)"
        " WHERE mono_ns > $since AND mono_ns <= $until ORDER BY k.number, mono_ns",
        {
            "since": -(1 << 62) if since_ns is None else since_ns,
            "until": (1 << 62) if until_ns is None else until_ns,
            "nodes": [one.node for one in seen],
            "boots": [one.boot_id for one in seen],
            "uuids": [one.uuid for one in seen],
            "numbers": list(range(len(seen))),
        },
    )
    found = []
    lost = _lost(con, since_ns, until_ns)
    groups = rows.groups("number")
    for number, one in enumerate(seen):
        key = (one.node, one.boot_id, one.uuid)
        own = groups.get((number,), rows.where(slice(0, 0)))
        # A MIG device goes with the GPU that it is a part of.
        whole = (one.node, one.boot_id, infos[key][1] or one.uuid) if key in infos else key
        gpu = _with_lost(_gpu(own, one, infos.get(key)), lost.get(whole, ()))
        if len(gpu.t0):
            found.append(gpu)
    return sorted(found, key=lambda gpu: (gpu.node, gpu.boot_id, gpu.index or 0, gpu.uuid))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A GPU of a boot: its source of windows, when it was read first, and when it was busy last."""

    node: str
    boot_id: str
    uuid: str
    source: str | None
    busy_before_ns: int | None
    first_ns: int | None


def _seen(con: duckdb.DuckDBPyConnection, since_ns: int | None) -> list[_Seen]:
    """Return the GPUs; busy up to `since_ns`: what has computed once is not starting."""
    return [
        _Seen(
            node=node,
            boot_id=boot_id,
            uuid=uuid,
            source=source,
            busy_before_ns=busy,
            first_ns=first,
        )
        for node, boot_id, uuid, source, busy, first in con.execute(
            "SELECT node, boot_id, uuid,"
            " arg_min(source, mono_ns) FILTER (gr_active_ratio + t0_ns + t1_ns IS NOT NULL),"
            " max(mono_ns) FILTER (mono_ns <= $since"
            "  AND coalesce(gr_active_ratio, utilization_ratio) > 0),"
            " min(coalesce(t0_ns, mono_ns)) FROM gpu_activity WHERE uuid IS NOT NULL GROUP BY ALL",
            {"since": -(1 << 62) if since_ns is None else since_ns},
        ).fetchall()
    ]


_Info = tuple["int | None", "str | None", "str | None", "str | None"]


def _infos(con: duckdb.DuckDBPyConnection) -> dict[tuple[str, str, str], _Info]:
    """Return index, parent, name and architecture of each GPU, as they were told last."""
    return {
        (node, boot_id, uuid): (index, parent, name, architecture)
        for node, boot_id, uuid, index, parent, name, architecture in con.execute(
            "SELECT node, boot_id, uuid, arg_max(gpu, mono_ns), arg_max(parent_uuid, mono_ns),"
            " arg_max(name, mono_ns), arg_max(architecture, mono_ns) FROM gpu_info"
            " GROUP BY ALL"
        ).fetchall()
    }


def _gpu(rows: Columns, seen: _Seen, info: _Info | None) -> Gpu:
    index, _, name, _ = info or (None, None, None, None)
    measured = ~np.isnan(rows["gr_active_ratio"].astype(np.float64))
    begin, end = (rows[name].astype(np.float64) for name in ("t0_ns", "t1_ns"))
    # False for NaN.
    windowed = measured & (end - begin <= LONGEST_NS) & (np.abs(end) < LATEST_NS)
    source = "nvml"
    tx, rx = rows["nvlink_tx"], rows["nvlink_rx"]
    if windowed.any():
        rows = rows.where(windowed)
        source = seen.source or "unknown"
        t0, t1 = rows["t0_ns"].astype(np.int64), rows["t1_ns"].astype(np.int64)
        busy = rows["gr_active_ratio"].astype(np.float64)
        sm = np.clip(rows["sm_active_ratio"].astype(np.float64), 0.0, 1.0)
    else:
        rows = rows.where(~np.isnan(rows["utilization_ratio"].astype(np.float64)))
        t1 = rows["mono_ns"].astype(np.int64)
        t0 = np.append(t1[:1], t1[:-1])
        t0 = np.where(t1 - t0 > STALE_NS, t1, t0)
        busy = rows["utilization_ratio"].astype(np.float64)
        sm = np.full(len(busy), np.nan)
    pcie = rows["pcie_bytes"].astype(np.float64)
    kernels = np.nan_to_num(
        [rows[name].astype(np.float64) for name in ("tensor_active_ratio", "dram_active_ratio")]
    )
    order = np.argsort(t1, kind="stable")
    t0, t1 = t0[order], t1[order]
    busy, sm, pcie, kernels = busy[order], sm[order], pcie[order], kernels[:, order]
    if len(t1):
        t0 = np.maximum(t0, np.append(t0[:1], np.maximum.accumulate(t1)[:-1]))
    keep = t1 > t0
    t0, t1 = t0[keep], t1[keep]
    busy, sm, pcie, kernels = busy[keep], sm[keep], pcie[keep], kernels[:, keep]
    return Gpu(
        node=seen.node,
        boot_id=seen.boot_id,
        uuid=seen.uuid,
        index=None if index is None else int(index),
        name=name,
        t0=t0,
        t1=t1,
        busy=np.clip(busy, 0.0, 1.0),
        sm=sm,
        pcie_bytes=pcie,
        kernels=kernels,
        source=source,
        linked=bool((tx + rx > LINKED_BYTES).any()),
        linked_bytes=(float(tx.sum()), float(rx.sum())),
        unknown_ns=_apart_ns(t0, t1),
        busy_before_ns=seen.busy_before_ns,
        first_ns=seen.first_ns,
    )


def _lost(
    con: duckdb.DuckDBPyConnection, since_ns: int | None, until_ns: int | None
) -> dict[tuple[str, str, str], tuple[Lost, ...]]:
    """Return when each GPU was lost: spans between two such answers of the driver in a row."""
    found: dict[tuple[str, str, str], list[Lost]] = {}
    for node, boot, uuid, begin, end, answer in con.execute(
        "SELECT node, boot_id, uuid, before_ns, mono_ns, nvml_return FROM (SELECT *,"
        "  lag(mono_ns) OVER w AS before_ns, lag(nvml_return) OVER w AS before"
        "  FROM gpu_state WHERE uuid IS NOT NULL AND mono_ns > $since AND mono_ns <= $until"
        "  WINDOW w AS (PARTITION BY node, boot_id, uuid ORDER BY mono_ns))"
        f" WHERE nvml_return IN {LOST} AND before IN {LOST} AND mono_ns - before_ns <= {STALE_NS}"
        " AND mono_ns > before_ns ORDER BY mono_ns",
        {
            "since": -(1 << 62) if since_ns is None else since_ns,
            "until": (1 << 62) if until_ns is None else until_ns,
        },
    ).fetchall():
        found.setdefault((node, boot, uuid), []).append(Lost(int(begin), int(end), answer == RESET))
    return {key: tuple(spans) for key, spans in found.items()}


def _with_lost(gpu: Gpu, lost: tuple[Lost, ...]) -> Gpu:
    """Return the GPU with a window more for each span in which it was lost and not sampled."""
    made = [(begin, end) for begin, end, _ in lost if not ((gpu.t0 < end) & (gpu.t1 > begin)).any()]
    if not made:
        return replace(gpu, lost=lost)
    begins, ends = np.array(made, dtype=np.int64).T
    order = np.argsort(np.concatenate((gpu.t1, ends)), kind="stable")
    t0 = np.concatenate((gpu.t0, begins))[order]
    t1 = np.concatenate((gpu.t1, ends))[order]
    nothing = np.zeros(len(made))
    unknown = np.full(len(made), np.nan)
    return replace(
        gpu,
        t0=t0,
        t1=t1,
        busy=np.concatenate((gpu.busy, nothing))[order],
        sm=np.concatenate((gpu.sm, unknown))[order],
        pcie_bytes=np.concatenate((gpu.pcie_bytes, unknown))[order],
        kernels=np.concatenate((gpu.kernels, np.zeros((2, len(made)))), axis=1)[:, order],
        unknown_ns=_apart_ns(t0, t1),
        lost=lost,
    )


def _apart_ns(t0: Ints, t1: Ints) -> int:
    """Return the time between windows."""
    return int(np.maximum(t0[1:] - t1[:-1], 0).sum())
