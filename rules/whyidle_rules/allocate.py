"""Runs the compiled rules over evidence: every idle nanosecond is granted or left over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import duckdb
import numpy as np

from whyidle_rules.compile import Query, compile_rules
from whyidle_rules.compile_levels import quoted
from whyidle_rules.diagnosis import Grade
from whyidle_rules.groups import Pool
from whyidle_rules.heard import Array
from whyidle_rules.rule import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Windows by number and their nanoseconds: what a rule was granted, or what was left over.

    Without a rule, `subcause` is the one of `unattributed`.
    """

    rule: Rule | None
    subcause: str
    pool: Pool
    windows: Array
    ns: Array


def granted(con: duckdb.DuckDBPyConnection, queries: Sequence[Query]) -> Iterator[Given]:
    """Yield what compiled rules grant and leave over, as `allocate` puts into tables."""
    for query in queries:
        found = con.execute(query.sql, query.values or None).fetchnumpy()
        windows = np.asarray(found["window_id"])
        columns = [
            *((column, rule, rule.subcause) for column, rule in query.grants),
            *((left.column, None, left.subcause) for left in query.leftovers),
        ]
        for column, rule, subcause in columns:
            ns = np.asarray(found.pop(column))
            some = np.flatnonzero(ns > 0)
            if len(some):
                yield Given(
                    rule=rule,
                    subcause=subcause,
                    pool=query.pool,
                    windows=windows[some],
                    ns=ns[some],
                )


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
    queries = compile_rules(rules, evidence)
    _create(con, rules, queries)
    for query in queries:
        _run(con, query)


def _create(
    con: duckdb.DuckDBPyConnection, rules: Sequence[Rule], queries: Sequence[Query]
) -> None:
    """Create the tables: a window has up to ten rows, and numbered words take a tenth of texts."""
    lefts = [left for query in queries for left in query.leftovers]
    pools = _words(query.pool for query in queries)
    grants = {
        "window_id": "BIGINT",
        "rule": _words(rule.id for rule in rules),
        "cause": _words(rule.cause for rule in rules),
        "subcause": _words(rule.subcause for rule in rules),
        "grade": _words(get_args(Grade)),
        "group": _words(rule.group for rule in rules),
        "pool": pools,
        "ns": "BIGINT",
    }
    leftovers = {
        "window_id": "BIGINT",
        "group": _words(left.group for left in lefts),
        "pool": pools,
        "subcause": _words(left.subcause for left in lefts),
        "ns": "BIGINT",
    }
    for table, columns in (("grants", grants), ("leftovers", leftovers)):
        body = ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())
        con.execute(f"CREATE OR REPLACE TABLE {table} ({body})")


def _words(words: Iterable[str]) -> str:
    """Return the type of a column that holds some words."""
    listed = ", ".join(f"'{word}'" for word in sorted(set(words)))
    return f"ENUM ({listed})" if listed else "VARCHAR"


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
