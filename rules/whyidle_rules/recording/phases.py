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
from whyidle_rules.recording.series import Array, Columns, Counter, Floats, Truths, counter, fetch

# A page is read twice a second, and tells at least once a second that it is still there.
GAP_NS = 3 * NS_PER_S
READY_HALF_NS = 2 * NS_PER_S
READY_LEAST = 4  # arrivals

# A DataLoader that feeds a trainer gives it a batch a step, or one for some steps of several
# optimizers. A few steps tell nothing.
BATCHES_PER_STEP = 0.1
FEW_STEPS = 8

WAIT = "data_wait_s"
SETUP = "data_setup_s"
# Waits for other ranks, as the page's calls on process groups tell of them.
PEERS = ("host_coll_s", "host_p2p_s")
# Kinds of events and the columns that they fill; any other phase was named by the trainer.
_COLUMNS: Mapping[str, str] = {
    "data_wait": WAIT,
    "data_setup": SETUP,
    "checkpoint_save": "checkpoint_save_s",
    "checkpoint_load": "checkpoint_load_s",
    "evaluation": "evaluation_s",
    "compile": "compile_s",
    "logging": "logging_s",
    "setup": "startup_s",
    "gc": "gc_s",
    "collective": PEERS[0],
    "message": PEERS[1],
}
OTHER = "other_phase_s"
# The most specific first: it has the time that it shares with those after it.
_ORDER = (
    "gc_s",
    "checkpoint_save_s",
    "checkpoint_load_s",
    *PEERS,
    "compile_s",
    "logging_s",
    SETUP,
    WAIT,
    "startup_s",
    "evaluation_s",
    OTHER,
)
COLUMNS: tuple[str, ...] = _ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The timeline of one process, from `begin_ns` to `end_ns`.

    `spans` are disjoint, by column; `untimed` grows by what the totals hold and no span stands for:
    short waits and pauses, and records that were lost. `loaders` is how many DataLoaders feed its
    steps, `workers` the processes of the one that it had waited for most by the end. `peers_known`
    says whether its probe tells of process groups: older ones do not.
    """

    begin_ns: int
    end_ns: int
    spans: Mapping[str, Ints]
    untimed: Mapping[str, Counter]
    arrivals: Counter
    empty_arrivals: Counter
    loaders: int
    workers: int | None
    steps: int | None
    stepped: Counter
    peers_known: bool
    info: Mapping[str, Any]

    def ready(self, centres: Ints) -> Floats:
        """Return how often a batch was ready when the trainer came, around each time."""
        came, _ = self.arrivals.around(centres, READY_HALF_NS, 1)
        nothing, told = self.empty_arrivals.around(centres, READY_HALF_NS, 1)
        known = (told > 0) & (came >= READY_LEAST)
        share = 1.0 - nothing / np.maximum(came, 1.0)
        return np.asarray(np.where(known, np.clip(share, 0.0, 1.0), np.nan))

    def covers(self, t0: Ints, t1: Ints) -> Truths:
        """Return whether the page was read before, after, and often enough in each window."""
        inside = (t0 >= self.begin_ns) & (t1 <= self.end_ns)
        return np.asarray(inside & self.untimed[WAIT].covers(t0, t1), dtype=bool)

    def inside(self, t0: Ints, t1: Ints, columns: tuple[str, ...] = COLUMNS) -> dict[str, Floats]:
        """Return the nanoseconds of each column in each window, as far as it is covered."""
        found = {
            name: intervals.covered_ns(self.spans.get(name, intervals.EMPTY), t0, t1).astype(
                np.float64
            )
            for name in columns
        }
        for name in set(columns) & set(self.untimed):
            spread = self.untimed[name].between(t0, t1)
            found[name] = found[name] + np.where(np.isnan(spread), 0.0, spread)
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
        " checkpoint_save_ns::DOUBLE AS checkpoint_save_ns,"
        " checkpoint_load_ns::DOUBLE AS checkpoint_load_ns,"
        " evaluation_ns::DOUBLE AS evaluation_ns, gc_ns::DOUBLE AS gc_ns,"
        " coll_wait_ns::DOUBLE AS coll_wait_ns, message_wait_ns::DOUBLE AS message_wait_ns,"
        " coll_waiting_since_ns::DOUBLE AS coll_waiting_since_ns,"
        " coll_waiting_for IN ('send', 'recv', 'coalesced') AS for_message,"
        f" batches::DOUBLE AS batches FROM probe WHERE {where} ORDER BY pid, start_ns, mono_ns",
        at,
    ).groups("pid", "start_ns")
    events = fetch(
        con,
        "SELECT pid, start_ns, sequence, kind, begin_ns, end_ns FROM (SELECT * FROM probe_event"
        f" WHERE {where} AND NOT background AND kind <> 'step' AND begin_ns IS NOT NULL"
        # What a call waited for lies before its end.
        " AND end_ns IS NOT NULL UNION ALL BY NAME SELECT pid, start_ns, sequence,"
        " CASE WHEN operation IN ('send', 'recv', 'coalesced') THEN 'message'"
        "  ELSE 'collective' END AS kind, ended_ns - wait_ns AS begin_ns, ended_ns AS end_ns"
        f" FROM probe_call WHERE {where} AND NOT background AND wait_ns >= 1000000)"
        " ORDER BY pid, start_ns, sequence",
        at,
    ).groups("pid", "start_ns")
    loaders = _loaders(con, at)
    queues = fetch(
        con,
        "SELECT pid, start_ns, mono_ns, sum(batches)::DOUBLE AS batches,"
        " sum(empty_arrivals)::DOUBLE AS empty FROM probe_loader"
        f" WHERE {where} AND workers > 0 AND place = 0 GROUP BY ALL"
        " ORDER BY pid, start_ns, mono_ns",
        at,
    ).groups("pid", "start_ns")
    infos = _infos(con, node, boot_id)
    return {
        who: _told(rows, events.get(who), loaders.get(who, []), queues.get(who), infos.get(who, {}))
        for who, rows in totals.items()
    }


def _infos(
    con: duckdb.DuckDBPyConnection, node: str, boot_id: str
) -> dict[Identity, dict[str, Any]]:
    """Return who publishes pages; `world_key` is that of the first group, all ranks of a job."""
    infos: dict[Identity, dict[str, Any]] = {
        (int(pid), int(start)): dict(zip(_INFO, values, strict=True))
        for pid, start, *values in con.execute(
            f"SELECT pid, start_ns, {', '.join(f'arg_max({n}, mono_ns)' for n in _INFO)}"
            " FROM probe_info"
            " WHERE node = $node AND boot_id = $boot AND pid IS NOT NULL"
            " AND start_ns IS NOT NULL GROUP BY ALL",
            {"node": node, "boot": boot_id},
        ).fetchall()
    }
    for pid, start, key in con.execute(
        "SELECT pid, start_ns, min(group_key) FROM probe_group WHERE node = $node"
        " AND boot_id = $boot AND place = 1 AND group_key IS NOT NULL AND pid IS NOT NULL"
        " AND start_ns IS NOT NULL GROUP BY ALL",
        {"node": node, "boot": boot_id},
    ).fetchall():
        infos.setdefault((int(pid), int(start)), {})["world_key"] = key
    return infos


_INFO = (
    "rank", "world_size", "local_rank", "pipeline_stage", "pipeline_stages", "pipeline_batches",
    "pipeline_schedule", "pipeline_virtual", "inner_pid",
)  # fmt: skip


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
    queues: Columns | None,
    info: Mapping[str, Any],
) -> Told:
    spans: dict[str, list[Ints]] = {}
    known: dict[str, Ints] = {}
    if events is not None:
        for (kind,), own in events.groups("kind").items():
            column = _COLUMNS.get(kind, OTHER)
            span = intervals.union(own["begin_ns"].astype(np.int64), own["end_ns"].astype(np.int64))
            spans.setdefault(column, []).append(span)
            known[kind] = span
    last_ns = int(rows["mono_ns"][-1])
    phase = rows["phase"][-1]
    for_message = rows["for_message"][-1] == 1  # not NaN, which is as good as true
    for since, kind in (
        (rows["waiting_since_ns"][-1], "data_wait"),
        (rows["phase_since_ns"][-1], phase),
        (rows["coll_waiting_since_ns"][-1], "message" if for_message else "collective"),
    ):
        # What is going on at the end has no record; a phase without a name is none.
        if kind is not None and since == since and since < last_ns:
            span = np.array([[int(since), last_ns]], dtype=np.int64)
            spans.setdefault(_COLUMNS.get(kind, OTHER), []).append(span)
            known[kind] = intervals.merge(known.get(kind, intervals.EMPTY), span)
    apart: dict[str, Ints] = {}
    taken = intervals.EMPTY
    for column in _ORDER:
        if column in spans:
            whole = intervals.merge(*spans[column])
            apart[column] = intervals.subtract(whole, taken)
            taken = intervals.merge(taken, whole)
    most = max(loaders, key=lambda item: item[1], default=(None, 0.0))
    counted = ~np.isnan(rows["steps"].astype(np.float64))
    steps = rows["steps"][counted].astype(np.float64)
    return Told(
        begin_ns=int(rows["mono_ns"][0]),
        end_ns=last_ns,
        spans=apart,
        untimed=_untimed(rows, known),
        arrivals=_queue(queues, "batches"),
        empty_arrivals=_queue(queues, "empty"),
        loaders=len(loaders) if _feeds(rows) else 0,
        workers=most[0],
        steps=int(steps[-1]) if len(steps) else None,
        stepped=counter(rows["mono_ns"][counted].astype(np.int64), steps, gap_ns=GAP_NS),
        peers_known=not np.isnan(rows["coll_wait_ns"].astype(np.float64)).all(),
        info=info,
    )


def _feeds(rows: Columns) -> bool:
    """Whether the main thread takes batches for its steps from DataLoaders, as far as is known.

    Others fetch them in another thread, or use a DataLoader for evaluation alone.
    """
    steps, batches = (_growth(rows[name].astype(np.float64)) for name in ("steps", "batches"))
    return not (steps >= FEW_STEPS and batches < BATCHES_PER_STEP * steps)


def _growth(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known[-1] - known[0]) if len(known) else np.nan


def _queue(rows: Columns | None, name: str) -> Counter:
    if rows is None:
        return counter(np.empty(0), np.empty(0), gap_ns=GAP_NS)
    times = rows["mono_ns"].astype(np.int64)
    return counter(times, rows[name].astype(np.float64), gap_ns=GAP_NS)


# Totals of a page, by the kind of event that tells the same with times, and the column they fill.
_TOTALS: Mapping[str, tuple[str, str]] = {
    "checkpoint_save": ("checkpoint_save_ns", "checkpoint_save_s"),
    "checkpoint_load": ("checkpoint_load_ns", "checkpoint_load_s"),
    "evaluation": ("evaluation_ns", "evaluation_s"),
    "gc": ("gc_ns", "gc_s"),
    "collective": ("coll_wait_ns", PEERS[0]),
    "message": ("message_wait_ns", PEERS[1]),
}


def _untimed(rows: Columns, known: Mapping[str, Ints]) -> dict[str, Counter]:
    """Return what the totals hold beyond the spans of `known`, by column."""
    times = rows["mono_ns"].astype(np.int64)

    def under_way(since: Array, when: Array | bool = True) -> Floats:
        began = since.astype(np.float64)
        going_on = ~np.isnan(began) & when
        return np.where(going_on, np.maximum(times - began, 0.0), 0.0)

    total = rows["data_wait_ns"].astype(np.float64) + rows["outside_wait_ns"].astype(np.float64)
    total = total + under_way(rows["waiting_since_ns"])
    found = {WAIT: _beyond(times, total, known.get("data_wait", intervals.EMPTY))}
    for kind, (name, column) in _TOTALS.items():
        total, spans = rows[name].astype(np.float64), known.get(kind, intervals.EMPTY)
        if column in PEERS:
            message = rows["for_message"] == 1
            when = message if column == PEERS[1] else ~message
            total = total + under_way(rows["coll_waiting_since_ns"], when)
        elif kind != "gc":
            total = total + under_way(rows["phase_since_ns"], rows["phase"] == kind)
        found[column] = _beyond(times, total, spans)
    return found


def _beyond(times: Ints, total: Floats, known: Ints) -> Counter:
    """Return the growth of a total that no span stands for."""
    told = ~np.isnan(total)
    times, total = times[told], total[told]
    if len(times) == 0:
        return counter(times, total, gap_ns=GAP_NS)
    exact = intervals.covered_ns(known, np.full(len(times), times[0]), times)
    rest = np.maximum.accumulate(total - total[0] - exact)
    steps = np.maximum(np.diff(total) - np.diff(exact), 0.0)
    grown = np.concatenate(([0.0], np.cumsum(steps)))
    # What is counted a reading late evens out, and is nothing new.
    return counter(times, np.minimum(grown, np.maximum(rest, 0.0)), gap_ns=GAP_NS)
