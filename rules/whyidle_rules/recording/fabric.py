"""What carried the bytes of collectives: NVLink, RDMA ports or TCP, and in which state that was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording import gpudirect
from whyidle_rules.recording.series import (
    Array,
    Columns,
    Floats,
    Truths,
    counter,
    fetch,
    nearest,
    one,
)
from whyidle_rules.recording.threads import GAP_NS, LEAST_NS
from whyidle_rules.recording.windows import Gpu

_HALF_NS = NS_PER_S
# Below this rate a path carries heartbeats, metrics or ssh, and no collective.
CARRIES_BYTES_PER_S = 10e6
# A collective that is well moves its bytes at most of the line rate; small ones, slower.
LINE_RATIO = 0.3
# A port at less than this share of the rate that it had at another time runs degraded. Rates are
# read every ten seconds.
SAME_RATE_RATIO = 0.9
RATE_STALE_NS = 30 * NS_PER_S
# A sender told to pause for this share of the time, or with this share of its packets answered by a
# congestion notification, is held up by the fabric and not by its own rate.
PAUSED_RATIO = 0.05
CNP_RATIO = 0.01
# NCCL's timer for a receiver that is not ready is 0.64 ms: so many a second hold a port up for a
# twentieth of the time. They are counted every ten seconds.
UNREADY_PER_S = 80.0
_RARE_GAP_NS = 25 * NS_PER_S
_RARE_HALF_NS = 10 * NS_PER_S
# Packets sent again: a clean fabric has none at all, and 1 in 10,000 halves a flow.
RESENT_RATIO = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The fabric of a node around each of some times.

    `transport` is None where nothing carried bytes. `rdma_ports` counts the active ones.
    `degraded`, `congested` and `unready` (peers without a receive; None where not counted) are of
    the RDMA ports. `direct_why` says why cards do not reach the GPU's memory: "" if they do, None
    if that is not known; `line_ratio` is what ports carry, of their rates. `known` says where there
    were readings at all, and `links_known` where NVLink was read: without it GPUs of a node talk
    over PCIe, unseen. `most_s` is how long in each window the bytes can have taken,
    `line_bytes_per_s` what the links of one GPU, or its share of the ports, carry each way; NaN
    where the line rate is unknown.
    """

    transport: Array
    rdma_ports: int
    degraded: Truths
    congested: Truths
    unready: Truths | None
    direct_why: str | None
    line_ratio: Floats
    known: Truths
    links_known: Truths
    most_s: Floats
    line_bytes_per_s: Floats


def load(con: duckdb.DuckDBPyConnection, gpu: Gpu) -> Fabric:
    """Return the fabric of a GPU's node around each of its windows."""
    at = {"node": gpu.node, "boot": gpu.boot_id}
    centres = (gpu.t0 + gpu.t1) // 2
    links = _links(con, at)
    rdma, rdma_known = _rate(con, "rdma_traffic", "device, port", at, centres)
    tcp, tcp_known = _rate(con, "net_link", "namespace, interface", at, centres)
    nvlink, nvlink_known = _nvlink(con, at, centres)
    transport = np.full(len(centres), None, dtype=object)
    # Of several, the slowest kind: a collective over nodes uses NVLink inside of them as well.
    transport[nvlink > CARRIES_BYTES_PER_S] = "nvlink"
    kind = "roce" if links.ethernet else "ib"
    transport[rdma > CARRIES_BYTES_PER_S] = kind
    # RDMA over Ethernet may be counted by its network interface as well.
    own = tcp - (rdma if links.ethernet else 0.0)
    over_tcp = (own > CARRIES_BYTES_PER_S) & (own > rdma)
    transport[over_tcp] = "tcp"
    rates = _line_rates(con, at, gpu.uuid)
    most, line = (np.full(len(centres), np.nan) for _ in range(2))
    shared = 2.0 * max(1, rates.pop("gpus", 1))
    for name, per_s in (("nvlink", nvlink), (kind, rdma), ("tcp", own)):
        if rates.get(name):
            lasted = gpu.length / 1e9 * per_s / (rates[name] * LINE_RATIO)
            most = np.where(transport == name, lasted, most)
            line = np.where(transport == name, rates[name] / shared, line)
    return Fabric(
        most_s=most,
        line_bytes_per_s=line,
        transport=transport,
        rdma_ports=links.active,
        degraded=_degraded(con, at, centres),
        congested=_congested(con, at, centres),
        unready=_unready(con, at, centres),
        direct_why=gpudirect.why_off(con, gpu.node, gpu.boot_id, gpu.uuid),
        line_ratio=gpudirect.line_ratio(con, at, centres),
        known=rdma_known | tcp_known | nvlink_known,
        links_known=nvlink_known,
    )


def _degraded(con: duckdb.DuckDBPyConnection, at: dict[str, Any], centres: Ints) -> Truths:
    """Return when a port ran below the rate that it had itself at another time.

    Ports of a node differ by design, as those for storage do: one is held against itself alone.
    """
    found = np.zeros(len(centres), dtype=bool)
    rows = fetch(
        con,
        "SELECT device, port, mono_ns, rate_bits_per_s::DOUBLE AS rate FROM rdma_port"
        " WHERE node = $node AND boot_id = $boot AND rate_bits_per_s > 0 ORDER BY mono_ns",
        at,
    )
    for own in rows.groups("device", "port").values():
        near = nearest(own["mono_ns"].astype(np.int64), centres, RATE_STALE_NS)
        rate = np.where(near >= 0, own["rate"][near], np.nan)
        found |= np.nan_to_num(rate, nan=np.inf) < SAME_RATE_RATIO * own["rate"].max()
    return found


def _line_rates(con: duckdb.DuckDBPyConnection, at: dict[str, Any], uuid: str) -> dict[str, float]:
    """Return bytes a second, both ways, by what carries them, of the node; and its GPUs."""
    own = {**at, "uuid": uuid}
    nvlink = one(
        con,
        "SELECT sum(speed) FROM (SELECT link, max(speed_bytes_per_s) AS speed FROM nvlink"
        " WHERE node = $node AND boot_id = $boot AND uuid = $uuid GROUP BY link)",
        own,
    )[0]
    gpus = one(
        con,
        "SELECT count(DISTINCT uuid) FROM gpu_activity WHERE node = $node AND boot_id = $boot",
        at,
    )[0]
    rdma = one(
        con,
        "SELECT sum(rate) FROM (SELECT device, port, max(rate_bits_per_s) AS rate FROM rdma_port"
        " WHERE node = $node AND boot_id = $boot GROUP BY device, port)",
        at,
    )[0]
    found: dict[str, float] = {"gpus": float(gpus or 1)}
    if nvlink:
        found["nvlink"] = 2.0 * float(nvlink) * max(1, int(gpus or 1))
    if rdma:
        found["ib"] = found["roce"] = 2.0 * float(rdma) / 8
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    active: int
    ethernet: bool


def _links(con: duckdb.DuckDBPyConnection, at: dict[str, Any]) -> _Links:
    rows = con.execute(
        "SELECT p.device, p.port, arg_max(p.state, p.mono_ns), max(i.link_layer) FROM rdma_port p"
        " LEFT JOIN rdma_info i ON i.node = p.node AND i.boot_id = p.boot_id"
        "  AND i.device = p.device"
        " WHERE p.node = $node AND p.boot_id = $boot GROUP BY p.device, p.port",
        at,
    ).fetchall()
    up = [row for row in rows if row[2] == "active"]
    return _Links(
        active=len(up),
        ethernet=any(row[3] == "ethernet" for row in up),
    )


def _rate(
    con: duckdb.DuckDBPyConnection, table: str, keys: str, at: dict[str, Any], centres: Ints
) -> tuple[Floats, Truths]:
    """Return bytes a second, sent and received, over all links of a table, and where known."""
    more = " AND interface <> 'lo'" if table == "net_link" else ""
    rows = fetch(
        con,
        f"SELECT {keys}, mono_ns, coalesce(rx_bytes, 0)::DOUBLE + coalesce(tx_bytes, 0)::DOUBLE"
        f" AS bytes FROM {table} WHERE node = $node AND boot_id = $boot{more} ORDER BY mono_ns",
        at,
    )
    total, covered = np.zeros(len(centres)), np.zeros(len(centres))
    for own in rows.groups(*keys.split(", ")).values():
        grown, seen = counter(
            own["mono_ns"].astype(np.int64), own["bytes"].astype(np.float64), gap_ns=GAP_NS
        ).around(centres, _HALF_NS, LEAST_NS)
        total += grown * 1e9 / np.maximum(seen, 1.0)
        covered += seen
    return total, np.asarray(covered > 0)


def _nvlink(
    con: duckdb.DuckDBPyConnection, at: dict[str, Any], centres: Ints
) -> tuple[Floats, Truths]:
    rows = fetch(
        con,
        "SELECT uuid, mono_ns, (coalesce(nvlink_tx_bytes, 0) + coalesce(nvlink_rx_bytes, 0))"
        "::DOUBLE AS bytes FROM gpu_activity WHERE node = $node AND boot_id = $boot"
        " AND nvlink_tx_bytes IS NOT NULL ORDER BY mono_ns",
        at,
    )
    total, covered = np.zeros(len(centres)), np.zeros(len(centres))
    for own in rows.groups("uuid").values():
        growth = np.cumsum(own["bytes"].astype(np.float64))
        grown, seen = counter(own["mono_ns"].astype(np.int64), growth, gap_ns=GAP_NS).around(
            centres, _HALF_NS, LEAST_NS
        )
        total += grown * 1e9 / np.maximum(seen, 1.0)
        covered += seen
    return total, np.asarray(covered > 0)


def _congested(con: duckdb.DuckDBPyConnection, at: dict[str, Any], centres: Ints) -> Truths:
    found = np.zeros(len(centres), dtype=bool)
    ports = fetch(
        con,
        "SELECT device, port, mono_ns, tx_packets::DOUBLE AS packets,"
        " cnps_handled::DOUBLE AS cnps, (coalesce(retransmits, 0) + coalesce(out_of_order, 0))"
        "::DOUBLE AS resent FROM rdma_port WHERE node = $node AND boot_id = $boot"
        " ORDER BY mono_ns",
        at,
    )
    for own in ports.groups("device", "port").values():
        packets = _grown(own, "packets", centres)
        for name, ratio in (("cnps", CNP_RATIO), ("resent", RESENT_RATIO)):
            found |= np.nan_to_num(_grown(own, name, centres)) > ratio * np.maximum(packets, 1e4)
    pauses = fetch(
        con,
        "SELECT interface, priority::VARCHAR AS priority, mono_ns, rx_pause_us::DOUBLE AS us"
        " FROM ethtool_pause WHERE node = $node AND boot_id = $boot ORDER BY mono_ns",
        at,
    )
    for own in pauses.groups("interface", "priority").values():
        found |= np.nan_to_num(_grown(own, "us", centres)) / 1e6 > PAUSED_RATIO
    return found


def _unready(con: duckdb.DuckDBPyConnection, at: dict[str, Any], centres: Ints) -> Truths | None:
    """Return when peers kept saying that they had no receive posted; None where not counted."""
    rows = fetch(
        con,
        "SELECT device, port, mono_ns, receiver_not_ready::DOUBLE AS answers FROM rdma_port"
        " WHERE node = $node AND boot_id = $boot AND receiver_not_ready IS NOT NULL"
        " ORDER BY mono_ns",
        at,
    )
    if len(rows) == 0:
        return None
    found = np.zeros(len(centres), dtype=bool)
    for own in rows.groups("device", "port").values():
        grown, seen = counter(
            own["mono_ns"].astype(np.int64), own["answers"], gap_ns=_RARE_GAP_NS, bits=32
        ).around(centres, _RARE_HALF_NS, LEAST_NS)
        found |= grown * 1e9 > UNREADY_PER_S * np.maximum(seen, 1.0)
    return found


def _grown(rows: Columns, name: str, centres: Ints) -> Floats:
    """Return growth per second."""
    grown, seen = counter(
        rows["mono_ns"].astype(np.int64), rows[name].astype(np.float64), gap_ns=GAP_NS
    ).around(centres, 2 * _HALF_NS, LEAST_NS)
    return np.asarray(grown * 1e9 / np.maximum(seen, 1.0))
