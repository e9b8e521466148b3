"""Findings: what each rule has to say over a whole run, with the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb

from whyidle_rules import beside, evidence
from whyidle_rules.diagnosis import Finding, Grade, RootCause, Severity
from whyidle_rules.report.words import spans
from whyidle_rules.rule import Rule
from whyidle_rules.says import fields

WARNING_RATIO = 0.02  # of all GPU time
CRITICAL_RATIO = 0.10
# Below this share nobody would act, and hundreds of such lines would hide the others.
TOLD_RATIO = 0.001


def severity(share: float) -> Severity:
    """Return how grave a share of all GPU time is."""
    if share >= CRITICAL_RATIO:
        return "critical"
    return "warning" if share >= WARNING_RATIO else "info"


def findings(
    con: duckdb.DuckDBPyConnection,
    rules: Sequence[Rule],
    roots: Sequence[RootCause],
    wall_s: float,
) -> list[Finding]:
    """Return what the rules say of the tables `evidence` and `grants`, the most costly first."""
    granted = dict(
        con.execute("SELECT rule, sum(ns)::DOUBLE / 1e9 FROM grants GROUP BY rule").fetchall()
    )
    slow = beside.speaking(con, rules)
    found = []
    for rule in rules:
        if rule.beside is not None:
            if wall_s and slow.get(rule.id, 0.0) / wall_s >= TOLD_RATIO:
                told = beside.told(con, rule)
                found += [] if told is None else [_finding_beside(rule, told, wall_s)]
            continue
        idle_s = granted.get(rule.id, 0.0)
        share = idle_s / wall_s if wall_s else 0.0
        if share >= TOLD_RATIO:
            found.append(_finding(con, rule, roots, idle_s, wall_s))
    return sorted(found, key=lambda finding: (-finding.idle_s, -(finding.beside_s or 0.0)))


def _finding(
    con: duckdb.DuckDBPyConnection,
    rule: Rule,
    roots: Sequence[RootCause],
    idle_s: float,
    wall_s: float,
) -> Finding:
    ranks = [
        rank
        for (rank,) in con.execute(
            "SELECT DISTINCT e.rank FROM grants JOIN evidence e USING (window_id)"
            " WHERE grants.rule = ? AND e.rank IS NOT NULL ORDER BY 1",
            [rule.id],
        ).fetchall()
    ]
    told = {field.name for field in fields(rule.says)} | set(rule.reads)
    columns = [name for name in evidence.BY_NAME if name in told]
    values = _values(con, rule.id, columns)
    share = idle_s / wall_s
    returned = sum(
        root.idle_s for root in roots if (root.cause, root.subcause) == (rule.cause, rule.subcause)
    )
    return Finding(
        rule=rule.id,
        title=rule.title,
        severity=severity(max(share, returned / wall_s)),
        cause=rule.cause,
        subcause=rule.subcause,
        owner=rule.owner,
        idle_s=idle_s,
        says=rule.render_says(
            {
                **values,
                "idle_s": idle_s,
                "share": share,
                "wall_s": wall_s,
                "ranks": ", ".join(spans(ranks)) or None,
            }
        ),
        evidence=values,
        advice=rule.advice,
        # A cause that is only ever felt (waiting for a late rank) returns nothing by itself.
        what_if={"gpu_s_returned": returned} if returned > 0 else None,
        why=rule.why,
        grade=_grade(con, rule),
        ranks=ranks,
    )


def _finding_beside(rule: Rule, told: beside.Told, wall_s: float) -> Finding:
    share = told.seconds / wall_s
    grave: list[Severity] = ["info", "warning", "critical"]
    return Finding(
        rule=rule.id,
        title=rule.title,
        severity=min(severity(share), rule.at_most, key=grave.index),
        cause=rule.cause,
        subcause=rule.subcause,
        owner=rule.owner,
        idle_s=0.0,
        says=rule.render_says(
            {
                **told.values,
                "beside_s": told.seconds,
                "share": share,
                "wall_s": wall_s,
                "working_share": told.seconds / told.working_s if told.working_s else None,
                "ranks": ", ".join(spans(told.ranks)) or None,
            }
        ),
        evidence=told.values,
        advice=rule.advice,
        what_if=None,
        why=rule.why,
        grade=rule.grade,
        ranks=told.ranks,
        beside_s=told.seconds,
    )


def _grade(con: duckdb.DuckDBPyConnection, rule: Rule) -> Grade:
    """Return the grade under which most of its seconds were granted."""
    row = con.execute(
        "SELECT grade FROM grants WHERE rule = ? GROUP BY grade ORDER BY sum(ns) DESC LIMIT 1",
        [rule.id],
    ).fetchone()
    return row[0] if row else rule.grade


def _values(con: duckdb.DuckDBPyConnection, rule: str, columns: Sequence[str]) -> dict[str, Any]:
    """Return seconds columns summed, and of others the value that most granted seconds had."""
    if not columns:
        return {}
    expressions = ", ".join(
        f'sum(e."{name}")'
        if evidence.BY_NAME[name].unit == "s"
        else f'arg_max(e."{name}", grants.ns)'
        for name in columns
    )
    row = con.execute(
        f"SELECT {expressions} FROM grants JOIN evidence e USING (window_id) WHERE rule = ?",
        [rule],
    ).fetchone()
    return dict(zip(columns, row or (), strict=False))
