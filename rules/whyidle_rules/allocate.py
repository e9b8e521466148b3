"""Runs the compiled rules over evidence: every idle nanosecond is granted or left over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import duckdb

from whyidle_rules.compile import Query, compile_rules
from whyidle_rules.compile_levels import quoted
from whyidle_rules.rule import Rule

_GRANTS = (
    "window_id BIGINT, rule VARCHAR, cause VARCHAR, subcause VARCHAR, grade VARCHAR, "
    '"group" VARCHAR, pool VARCHAR, ns BIGINT'
)
_LEFTOVERS = 'window_id BIGINT, "group" VARCHAR, pool VARCHAR, subcause VARCHAR, ns BIGINT'


def allocate(
    con: duckdb.DuckDBPyConnection, rules: Sequence[Rule], evidence: str = "evidence"
) -> None:
    """Create or replace the tables `grants` and `leftovers` from an evidence table or view.

    grants(window_id, rule, cause, subcause, grade, "group", pool, ns) and leftovers(window_id,
    "group", pool, subcause, ns) hold positive nanoseconds only. Per window, both together sum to
    round(empty_s * 1e9) + round(spinning_s * 1e9). A leftover of a group carries the subcause of
    `unattributed` that the group declares; "group" is '' where no group had the seconds. The table
    must have all columns of the evidence view, and window_id must be unique.
    """
    con.execute(f"CREATE OR REPLACE TABLE grants ({_GRANTS})")
    con.execute(f"CREATE OR REPLACE TABLE leftovers ({_LEFTOVERS})")
    for query in compile_rules(rules, evidence):
        _run(con, query)


def _run(con: duckdb.DuckDBPyConnection, query: Query) -> None:
    wide = f"whyidle_{query.pool}_split"
    con.execute(f"CREATE OR REPLACE TEMP TABLE {quoted(wide)} AS {query.sql}", query.values or None)
    grants = [
        f"SELECT window_id, '{rule.id}', '{rule.cause}', '{rule.subcause}', '{rule.grade}', "
        f"'{rule.group}', '{query.pool}', {column} FROM {quoted(wide)} WHERE {column} > 0"
        for column, rule in query.grants
    ]
    leftovers = [
        f"SELECT window_id, '{left.group}', '{query.pool}', '{left.subcause}', {left.column} "
        f"FROM {quoted(wide)} WHERE {left.column} > 0"
        for left in query.leftovers
    ]
    _insert(con, "grants", grants)
    _insert(con, "leftovers", leftovers)
    con.execute(f"DROP TABLE {quoted(wide)}")


def _insert(con: duckdb.DuckDBPyConnection, table: str, selects: Iterable[str]) -> None:
    if union := " UNION ALL ".join(selects):
        con.execute(f"INSERT INTO {table} {union}")
