"""What a launching thread told through its counter page: waits for data, phases, pauses.

Waits of a millisecond and more, phases and pauses have exact times; shorter ones, and those whose
records were overwritten before they were read, are only in the totals, and are spread over the time
between two readings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules import intervals
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.processes import Identity
from whyidle_rules.recording.series import Columns, Counter, Floats, Truths, counter, fetch

# A page is read 8 times a second, and tells at least once a second that it is still there.
GAP_NS = 3 * NS_PER_S

WAIT = "data_wait_s"
# Kinds of events and the columns that they fill; any other phase was named by the trainer.
_COLUMNS: Mapping[str, str] = {
    "data_wait": WAIT,
    "data_setup": WAIT,
    "checkpoint_save": "checkpoint_save_s",
    "checkpoint_load": "checkpoint_load_s",
    "evaluation": "evaluation_s",
    "compile": "compile_s",
    "logging": "logging_s",
    "setup": "startup_s",
    "gc": "gc_s",
}
OTHER = "other_phase_s"
# The most specific first: it has the time that it shares with those after it.
_ORDER = (
    "gc_s",
    "checkpoint_save_s",
    "checkpoint_load_s",
    "compile_s",
    "logging_s",
    WAIT,
    "startup_s",
    "evaluation_s",
    OTHER,
)
COLUMNS: tuple[str, ...] = _ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The timeline of one process, from `begin_ns` to `end_ns`.

    `spans` are disjoint, by column; `short_waits` grows by waits that no span stands for. `loaders`
    is how many DataLoaders it told of, `workers` the processes of the one that it waited for most;
    `fetches` says whether it fetched a batch at all.
    """

    begin_ns: int
    end_ns: int
    spans: Mapping[str, Ints]
    short_waits: Counter
    loaders: int
    workers: int | None
    steps: int | None
    info: Mapping[str, Any]

    def covers(self, t0: Ints, t1: Ints) -> Truths:
        """Return whether the page was read before, after, and often enough in each window."""
        inside = (t0 >= self.begin_ns) & (t1 <= self.end_ns)
        return np.asarray(inside & self.short_waits.covers(t0, t1), dtype=bool)

    def inside(self, t0: Ints, t1: Ints) -> dict[str, Floats]:
        """Return the nanoseconds of each column in each window, as far as it is covered."""
        found = {
            name: intervals.covered_ns(self.spans.get(name, intervals.EMPTY), t0, t1).astype(
                np.float64
            )
            for name in COLUMNS
        }
        spread = self.short_waits.between(t0, t1)
        found[WAIT] = found[WAIT] + np.where(np.isnan(spread), 0.0, spread)
        total = np.add.reduce(list(found.values()))
        scale = np.minimum(1.0, (t1 - t0) / np.maximum(total, 1.0))
        return {name: values * scale for name, values in found.items()}


def load(
    con: duckdb.DuckDBPyConnection, node: str, boot_id: str, since_ns: int, until_ns: int
) -> dict[Identity, Told]:
    """Return the timelines of all processes of a node that published a page."""
    at = {"node": node, "boot": boot_id, "since": since_ns, "until": until_ns}
    where = (
        "node = $node AND boot_id = $boot AND mono_ns BETWEEN $since AND $until"
        " AND pid IS NOT NULL AND start_ns IS NOT NULL"
    )
    totals = fetch(
        con,
        "SELECT pid, start_ns, mono_ns, data_wait_ns::DOUBLE AS data_wait_ns,"
        " outside_wait_ns::DOUBLE AS outside_wait_ns,"
        " waiting_since_ns::DOUBLE AS waiting_since_ns, phase,"
        " phase_since_ns::DOUBLE AS phase_since_ns, steps::DOUBLE AS steps,"
        f" batches::DOUBLE AS batches FROM probe WHERE {where} ORDER BY pid, start_ns, mono_ns",
        at,
    ).groups("pid", "start_ns")
    events = fetch(
        con,
        "SELECT pid, start_ns, sequence, kind, begin_ns, end_ns FROM probe_event"
        f" WHERE {where} AND NOT background AND kind <> 'step' AND begin_ns IS NOT NULL"
        " AND end_ns IS NOT NULL ORDER BY pid, start_ns, sequence",
        at,
    ).groups("pid", "start_ns")
    loaders = _loaders(con, at)
    infos = {
        (int(pid), int(start)): {"rank": rank, "world_size": world, "local_rank": local}
        for pid, start, rank, world, local in con.execute(
            "SELECT pid, start_ns, arg_max(rank, mono_ns), arg_max(world_size, mono_ns),"
            " arg_max(local_rank, mono_ns) FROM probe_info"
            " WHERE node = $node AND boot_id = $boot AND pid IS NOT NULL"
            " AND start_ns IS NOT NULL GROUP BY ALL",
            {"node": node, "boot": boot_id},
        ).fetchall()
    }
    return {
        who: _told(rows, events.get(who), loaders.get(who, []), infos.get(who, {}))
        for who, rows in totals.items()
    }


def _loaders(
    con: duckdb.DuckDBPyConnection, at: Mapping[str, Any]
) -> dict[Identity, list[tuple[int | None, float]]]:
    """Return the workers of each DataLoader of a process and how long it was waited for."""
    found: dict[Identity, list[tuple[int | None, float]]] = {}
    for pid, start, workers, waited in con.execute(
        "SELECT pid, start_ns, arg_max(workers, mono_ns),"
        " max(coalesce(wait_ns, 0)::DOUBLE + coalesce(outside_wait_ns, 0)) FROM probe_loader"
        " WHERE node = $node AND boot_id = $boot AND mono_ns BETWEEN $since AND $until"
        " AND pid IS NOT NULL AND start_ns IS NOT NULL"
        " GROUP BY pid, start_ns, place ORDER BY pid, start_ns, place",
        dict(at),
    ).fetchall():
        found.setdefault((int(pid), int(start)), []).append((workers, waited))
    return found


def _told(
    rows: Columns,
    events: Columns | None,
    loaders: list[tuple[int | None, float]],
    info: Mapping[str, Any],
) -> Told:
    spans: dict[str, list[Ints]] = {}
    waits: list[Ints] = []
    if events is not None:
        for (kind,), own in events.groups("kind").items():
            column = _COLUMNS.get(kind, OTHER)
            span = intervals.union(own["begin_ns"].astype(np.int64), own["end_ns"].astype(np.int64))
            spans.setdefault(column, []).append(span)
            if kind == "data_wait":
                waits.append(span)
    last_ns = int(rows["mono_ns"][-1])
    phase = rows["phase"][-1]
    for since, going_on in (
        (rows["waiting_since_ns"][-1], WAIT),
        (rows["phase_since_ns"][-1], None if phase is None else _COLUMNS.get(phase, OTHER)),
    ):
        # What is going on at the end has no record; a phase without a name is none.
        if going_on is not None and since == since and since < last_ns:
            span = np.array([[int(since), last_ns]], dtype=np.int64)
            spans.setdefault(going_on, []).append(span)
            if going_on == WAIT:
                waits.append(span)
    apart: dict[str, Ints] = {}
    taken = intervals.EMPTY
    for column in _ORDER:
        if column in spans:
            whole = intervals.merge(*spans[column])
            apart[column] = intervals.subtract(whole, taken)
            taken = intervals.merge(taken, whole)
    most = max(loaders, key=lambda item: item[1], default=(None, 0.0))
    steps = rows["steps"][~np.isnan(rows["steps"].astype(np.float64))]
    return Told(
        begin_ns=int(rows["mono_ns"][0]),
        end_ns=last_ns,
        spans=apart,
        short_waits=_short_waits(rows, intervals.merge(*waits)),
        loaders=len(loaders),
        workers=most[0],
        steps=int(steps[-1]) if len(steps) else None,
        info=info,
    )


def _short_waits(rows: Columns, known: Ints) -> Counter:
    """Return what the totals hold beyond the waits that have times of their own."""
    times = rows["mono_ns"].astype(np.int64)
    waiting = rows["waiting_since_ns"].astype(np.float64)
    under_way = np.where(np.isnan(waiting), 0.0, np.maximum(times - waiting, 0.0))
    total = rows["data_wait_ns"].astype(np.float64) + under_way
    total = total + rows["outside_wait_ns"].astype(np.float64)
    told = ~np.isnan(total)
    times, total = times[told], total[told]
    if len(times) == 0:
        return counter(times, total, gap_ns=GAP_NS)
    exact = intervals.covered_ns(known, np.full(len(times), times[0]), times)
    rest = np.maximum.accumulate(total - total[0] - exact)
    steps = np.maximum(np.diff(total) - np.diff(exact), 0.0)
    grown = np.concatenate(([0.0], np.cumsum(steps)))
    # Per reading a wait may be counted a reading late: what evens out is nothing new.
    return counter(times, np.minimum(grown, np.maximum(rest, 0.0)), gap_ns=GAP_NS)
