"""What a recording tells of the agent's own cost and completeness."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import duckdb

from whyidle.collect import ALL
from whyidle.runner import PERIOD_S
from whyidle.schema import TABLES
from whyidle.store import Recording
from whyidle.table import identifier, table_of

NS_PER_S = 1_000_000_000
BEGINNING_NS = 8 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A collector: its runs, the rows that they made, and the CPU time of their threads."""

    name: str
    runs: int
    rows: int
    cpu_ns_per_run: float
    cpu_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The figures of a recording; a value is a field of a row that is not NULL."""

    costs: tuple[Cost, ...]
    tables: dict[str, tuple[int, int]]
    bytes_per_value: float
    unaccounted_ticks: int
    errors: tuple[str, ...]


def read(recording: Path) -> Recorded:
    """Read a recording that nobody writes any more."""
    with Recording([recording]) as store:
        tables = store.run(_tables)
        size = sum(path.stat().st_size for path in recording.rglob("*.duckdb"))
        values = sum(count for _, count in tables.values())
        return Recorded(
            costs=store.run(_costs),
            tables=tables,
            bytes_per_value=size / max(1, values),
            unaccounted_ticks=store.run(_unaccounted),
            errors=store.run(_errors),
        )


def _tables(con: duckdb.DuckDBPyConnection) -> dict[str, tuple[int, int]]:
    found = {}
    for row in TABLES:
        spec = table_of(row)
        counts = ", ".join(f"count({identifier(column.name)})" for column in spec.columns)
        got = con.execute(f"SELECT count(*), {counts} FROM {identifier(spec.name)}").fetchone()
        assert got is not None
        if got[0]:
            found[spec.name] = (int(got[0]), int(sum(got[1:])))
    return found


def _costs(con: duckdb.DuckDBPyConnection) -> tuple[Cost, ...]:
    # What is imported and looked for at the beginning is no cost of a run.
    got = con.execute(
        f"WITH begin AS (SELECT min(mono_ns) + {BEGINNING_NS} AS ns FROM tick) "
        "SELECT collector, count(began_ns), sum(rows), sum(cpu_ns), "
        "(SELECT max(mono_ns) - min(ns) FROM tick, begin) "
        "FROM tick, begin WHERE mono_ns > ns GROUP BY collector ORDER BY sum(cpu_ns) DESC"
    ).fetchall()
    return tuple(
        Cost(
            name=name,
            runs=runs,
            rows=int(rows or 0),
            cpu_ns_per_run=cpu_ns / max(1, runs),
            cpu_ratio=cpu_ns / max(1, wall_ns),
        )
        for name, runs, rows, cpu_ns, wall_ns in got
    )


def _unaccounted(con: duckdb.DuckDBPyConnection) -> int:
    """Runs that were due and are neither a run nor counted as missed or rested."""
    lost = 0
    for collector in ALL:
        period_s = PERIOD_S[collector.lane] if collector.every_s is None else collector.every_s
        got = con.execute(
            "SELECT count(began_ns) + sum(missed) + sum(rested), max(due_ns) - min(due_ns) "
            "FROM tick WHERE collector = ?",
            [collector.name],
        ).fetchone()
        assert got is not None
        if got[1] is None:
            lost += 1  # it never ran
            continue
        # The first row's own misses lie before the first due time; there are none at a start.
        due = round(got[1] / (period_s * NS_PER_S)) + 1
        lost += abs(due - int(got[0]))
    return lost


def _errors(con: duckdb.DuckDBPyConnection) -> tuple[str, ...]:
    got = con.execute(
        "SELECT collector, kind, subject, message, max(repeats) FROM collector_error "
        "GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    return tuple(" | ".join(map(str, line)) for line in got)
