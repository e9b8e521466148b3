"""Rules beside the ledger: what they tell of each window, and their findings over a run.

Slow work is work: no second of it is idle, so no such rule takes part in the allocation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from whyidle_rules import evidence
from whyidle_rules.compile_levels import amount_sql, knows_sql, prefix, quoted
from whyidle_rules.rule import Rule
from whyidle_rules.says import fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a rule told of a run.

    `values` holds the columns that it reads and names: seconds summed over the windows in which it
    spoke, other numbers as their mean weighed by the seconds told, and what is no number as most of
    those seconds had it. `working_s` is how long kernels computed on the GPUs that it spoke of.
    """

    seconds: float
    working_s: float
    ranks: list[int]
    gpus: int
    values: dict[str, Any]


def windows(
    con: duckdb.DuckDBPyConnection, rules: Sequence[Rule], table: str = "evidence"
) -> dict[tuple[int, str], float]:
    """Return the seconds that rules beside the ledger tell of, by window and rule."""
    found: dict[tuple[int, str], float] = {}
    for rule in rules:
        if rule.beside is None:
            continue
        sql = f"SELECT window_id, {_seconds(rule)} AS s FROM {quoted(table)} WHERE s > 0"
        for window, seconds in con.execute(sql, _bound(rule) or None).fetchall():
            found[window, rule.id] = float(seconds)
    return found


def speaking(con: duckdb.DuckDBPyConnection, rules: Sequence[Rule]) -> dict[str, float]:
    """Return the seconds that rules beside the ledger tell of table `evidence`, if any, by rule."""
    own = [rule for rule in rules if rule.beside is not None]
    if not own:
        return {}
    bound = {name: value for rule in own for name, value in _bound(rule).items()}
    sums = ", ".join(f"sum({_seconds(rule)})" for rule in own)
    (row,) = con.execute(f"SELECT {sums} FROM evidence", bound or None).fetchall()
    return {rule.id: float(s) for rule, s in zip(own, row, strict=True) if s}


def told(con: duckdb.DuckDBPyConnection, rule: Rule) -> Told | None:
    """Return what a rule beside the ledger tells of table `evidence`; None if it is silent."""
    named = {field.name for field in fields(rule.says)} | set(rule.reads)
    columns = [column for column in evidence.COLUMNS if column.name in named]
    picked = "".join(f", {_picked(column)}" for column in columns)
    (row,) = con.execute(
        f"WITH told AS (SELECT *, {_seconds(rule)} AS whyidle_s FROM evidence),"
        " spoken AS (SELECT * FROM told WHERE whyidle_s > 0)"
        " SELECT sum(whyidle_s), list(DISTINCT rank ORDER BY rank) FILTER (rank IS NOT NULL),"
        " count(DISTINCT (node, uuid)),"
        " (SELECT sum(working_s) FROM evidence e SEMI JOIN spoken s USING (node, uuid))"
        f"{picked} FROM spoken",
        _bound(rule) or None,
    ).fetchall()
    if not row[0]:
        return None
    seconds, ranks, gpus, working, *values = row
    return Told(
        seconds=float(seconds),
        working_s=float(working or 0.0),
        ranks=list(ranks or []),
        gpus=int(gpus),
        values=dict(zip((column.name for column in columns), values, strict=True)),
    )


def _picked(column: evidence.Column) -> str:
    name = quoted(column.name)
    if column.unit == "s":
        return f"sum({name})"
    if column.type == "DOUBLE":
        known = f"FILTER ({name} IS NOT NULL)"
        return f"sum({name} * whyidle_s) {known} / sum(whyidle_s) {known}"
    return f"arg_max({name}, whyidle_s)"


def _seconds(rule: Rule) -> str:
    """Return the SQL of the seconds that a rule tells of a window: never more than its length."""
    speaks = knows_sql(rule)
    if rule.when:
        speaks = f"{speaks} AND {rule.when.sql(prefix(rule))}"
    amount = amount_sql(rule)
    return f"(CASE WHEN {speaks} AND {amount} > 0 THEN least({amount}, d_s) ELSE 0 END)"


def _bound(rule: Rule) -> Mapping[str, float | int | str]:
    used = {*rule.amount.params, *(rule.when.params if rule.when else ())}
    return {f"{prefix(rule)}{p.name}": p.value for p in rule.params if p.name in used}
