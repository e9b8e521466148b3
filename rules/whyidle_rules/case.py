"""Runs the cases of rules in the real allocator, beside all other rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import duckdb

from whyidle_rules import beside, database, evidence
from whyidle_rules.allocate import allocate
from whyidle_rules.rule import Case, Rule, Value

TOLERANCE_S = 1e-6  # a window's nanoseconds are rounded a few times


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a rule was granted in one of its cases, or told beside the ledger, in seconds."""

    rule: Rule
    case: Case
    granted_s: float

    @property
    def passed(self) -> bool:
        """Whether that is what the case says."""
        return abs(self.granted_s - self.case.grants_s) <= TOLERANCE_S


@contextmanager
def sandbox() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database with an empty evidence table, no way out of it and no way to open one."""
    with database.memory() as con:
        con.execute("SET lock_configuration = true")
        con.execute(evidence.ddl("evidence"))
        yield con


def check_query(rules: Sequence[Rule]) -> None:
    """Run the compiled rules over no evidence at all: DuckDB binds every column and type."""
    with sandbox() as con:
        allocate(con, rules)
        beside.windows(con, rules)


def run_cases(rules: Sequence[Rule], only: Collection[str] | None = None) -> list[Result]:
    """Run the cases of the rules whose ids are in `only` (of all without it) in one allocation."""
    cases = [
        (rule, case) for rule in rules if only is None or rule.id in only for case in rule.cases
    ]
    owner: list[int] = []  # number of the case by window_id
    rows: list[dict[str, Value]] = []
    for number, (_, case) in enumerate(cases):
        rows += case.rows
        owner += [number] * len(case.rows)
    granted_s = [0.0] * len(cases)
    with sandbox() as con:
        fill(con, rows)
        allocate(con, rules)
        granted = con.execute("SELECT window_id, rule, ns FROM grants").fetchall()
        told = beside.windows(con, rules)
    for window_id, rule_id, ns in granted:
        number = owner[window_id]
        if cases[number][0].id == rule_id:
            granted_s[number] += ns / 1e9
    for (window_id, rule_id), seconds in told.items():
        number = owner[window_id]
        if cases[number][0].id == rule_id:
            granted_s[number] += seconds
    return [
        Result(rule=rule, case=case, granted_s=seconds)
        for (rule, case), seconds in zip(cases, granted_s, strict=True)
    ]


def fill(con: duckdb.DuckDBPyConnection, rows: Sequence[dict[str, Value]]) -> None:
    """Insert rows of evidence, numbered by window_id from 0; what they do not name is NULL."""
    if not rows:
        return
    names = [column.name for column in evidence.COLUMNS if column.name != "window_id"]
    lists = ", ".join(f"unnest(${name}::{evidence.BY_NAME[name].type}[])" for name in names)
    values = {name: [row.get(name) for row in rows] for name in names}
    sql = f"INSERT INTO evidence SELECT unnest(range({len(rows)})), {lists}"
    con.execute(sql, values)
