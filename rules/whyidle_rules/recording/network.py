"""What processes received over TCP.

Connections are looked at every few seconds, in the agent's own network namespace. A process of
another one, or a recording in which files of processes could not be looked at, says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.processes import Identity, Proc
from whyidle_rules.recording.series import Counter, Floats, counter, fetch

HALF_NS = 15 * NS_PER_S
_LEAST_NS = NS_PER_S
_GAP_NS = 30 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Looks at connections: when, and what each process had received by then."""

    looks: Ints
    received: Mapping[Identity, Counter]

    def bytes_per_s(self, procs: Sequence[Proc], centres: Ints) -> Floats:
        """Return what processes received per second around each time; NaN if it is not known."""
        total, seen = np.zeros(len(centres)), np.zeros(len(centres))
        if not all(proc.info.get("net_namespace") == "" for proc in procs):
            return np.full(len(centres), np.nan)
        for proc in procs:
            own = self.received.get(proc.identity)
            if own is None:
                # No connection of its own was found.
                lived = self.looks[(self.looks >= proc.begin_ns) & (self.looks <= proc.end_ns)]
                seen += _near(lived, centres)
                continue
            growth, covered = own.around(centres, HALF_NS, _LEAST_NS)
            total += growth * 1e9 / np.maximum(covered, 1.0)
            seen += covered > 0
        return np.asarray(np.where(seen > 0, total, np.nan))


def _near(looks: Ints, centres: Ints) -> Ints:
    low = np.searchsorted(looks, centres - HALF_NS)
    return np.asarray(np.searchsorted(looks, centres + HALF_NS) > low, dtype=np.int64)


def load(con: duckdb.DuckDBPyConnection, at: Mapping[str, Any], where: str) -> Network:
    """Return what is known of a node; `where` is a condition on any table, `at` its parameters."""
    looks = fetch(
        con,
        f"SELECT mono_ns FROM tick WHERE collector = 'tcp_socket' AND rows IS NOT NULL AND {where}"
        " AND NOT EXISTS (FROM collector_error WHERE collector = 'tcp_socket'"
        f" AND subject = 'processes' AND {where}) ORDER BY mono_ns",
        at,
    )["mono_ns"].astype(np.int64)
    rows = fetch(
        con,
        "SELECT pid, start_ns, mono_ns, sum(rx_bytes)::DOUBLE AS rx_bytes FROM tcp_socket"
        f" WHERE pid IS NOT NULL AND start_ns IS NOT NULL AND {where} GROUP BY ALL"
        " ORDER BY pid, start_ns, mono_ns",
        at,
    )
    ever = con.execute("SELECT min(mono_ns) FROM tick WHERE collector = 'tcp_socket'").fetchone()
    first = ever[0] if ever else None
    received = {}
    for (pid, start_ns), own in rows.groups("pid", "start_ns").items():
        times, values = own["mono_ns"].astype(np.int64), own["rx_bytes"].astype(np.float64)
        before = looks[looks < times[0]]
        if len(before) > 1 or (len(before) == 1 and before[0] == first):
            # Its connections are newer than the last look without it, and are counted in whole. Of
            # the first look of a range the rows may be just outside; at the very first they are 0.
            times = np.concatenate((before[-1:], times))
            values = np.concatenate(([0.0], values))
        received[int(pid), int(start_ns)] = counter(times, values, gap_ns=_GAP_NS)
    return Network(looks=looks, received=received)
