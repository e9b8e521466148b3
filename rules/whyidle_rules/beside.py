"""Rules beside the ledger: what they tell of each window, and their findings over a run.

Slow work is work: no second of it is idle, so no such rule takes part in the allocation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import duckdb
import numpy as np

from whyidle_rules.allocate import Given
from whyidle_rules.compile_levels import amount_sql, knows_sql, prefix, quoted
from whyidle_rules.rule import Rule


def granted(
    con: duckdb.DuckDBPyConnection, rules: Sequence[Rule], table: str = "evidence"
) -> Iterator[Given]:
    """Yield the windows in which each rule beside the ledger speaks, and for how long."""
    for rule in rules:
        if rule.beside is None:
            continue
        sql = f"SELECT window_id, {_seconds(rule)} AS s FROM {quoted(table)} WHERE s > 0"
        found = con.execute(sql, _bound(rule) or None).fetchnumpy()
        if len(found["s"]):
            windows, ns = np.asarray(found["window_id"]), np.asarray(found["s"]) * 1e9
            yield Given(rule=rule, subcause=rule.subcause, pool="empty", windows=windows, ns=ns)


def windows(con: duckdb.DuckDBPyConnection, rules: Sequence[Rule]) -> dict[tuple[int, str], float]:
    """Return the seconds that rules beside the ledger tell of, by window and rule."""
    return {
        (window, given.rule.id): ns / 1e9
        for given in granted(con, rules)
        for window, ns in zip(given.windows.tolist(), given.ns.tolist(), strict=True)
        if given.rule is not None
    }


def _seconds(rule: Rule) -> str:
    """Return the SQL of the seconds that a rule tells of a window: never more than its length."""
    speaks = knows_sql(rule)
    if rule.when:
        speaks = f"{speaks} AND {rule.when.sql(prefix(rule))}"
    amount = amount_sql(rule)
    return f"(CASE WHEN {speaks} AND {amount} > 0 THEN least({amount}, d_s) ELSE 0 END)"


def _bound(rule: Rule) -> Mapping[str, float | int | str]:
    """Return the parameters of that."""
    used = {*rule.amount.params, *(rule.when.params if rule.when else ())}
    return {f"{prefix(rule)}{p.name}": p.value for p in rule.params if p.name in used}
