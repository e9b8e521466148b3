"""Findings: what each rule has to say over a whole run, with the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import duckdb

from whyidle_rules import evidence
from whyidle_rules.compile_levels import quoted
from whyidle_rules.diagnosis import Finding, RootCause, Severity
from whyidle_rules.heard import Heard, Told
from whyidle_rules.recording.series import fetch
from whyidle_rules.report.words import spans
from whyidle_rules.rule import Rule

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
    told: Mapping[str, Told], rules: Sequence[Rule], roots: Sequence[RootCause], wall_s: float
) -> list[Finding]:
    """Return what the rules say, the most costly first; `told` is what they told, by id."""
    found = []
    for rule in rules:
        own = told.get(rule.id)
        if own is None or not wall_s or own.seconds / wall_s < TOLD_RATIO:
            continue
        found.append(_finding(rule, own, roots, wall_s))
    return sorted(found, key=lambda finding: (-finding.idle_s, -(finding.beside_s or 0.0)))


def heard(con: duckdb.DuckDBPyConnection, rules: Sequence[Rule]) -> dict[str, Told]:
    """Return what rules told of the tables `evidence` and `grants`."""
    found = {}
    for rule in rules:
        if rule.beside is not None:
            continue
        one = Heard(rule)
        names = dict.fromkeys(["rank", *(column.name for column in one.columns)])
        picked = ", ".join(f"e.{_number(evidence.BY_NAME[name])}" for name in names)
        rows = fetch(
            con,
            f"SELECT g.ns, g.grade = 'inferred' AS inferred, {picked} FROM grants g"
            " JOIN evidence e USING (window_id) WHERE g.rule = ? ORDER BY g.window_id",
            [rule.id],
        )
        if len(rows):
            one.add(rows["ns"], rows.__getitem__, rows["inferred"].astype(bool))
            found[rule.id] = one.told()
    return found


def _number(column: evidence.Column) -> str:
    name = quoted(column.name)
    return name if column.type == "VARCHAR" else f"{name}::DOUBLE AS {name}"


def _finding(rule: Rule, told: Told, roots: Sequence[RootCause], wall_s: float) -> Finding:
    share = told.seconds / wall_s
    returned = sum(
        root.idle_s for root in roots if (root.cause, root.subcause) == (rule.cause, rule.subcause)
    )
    grave = severity(max(share, returned / wall_s))
    idle_s: float | None = told.seconds
    beside_s: float | None = None
    if rule.beside is not None:
        order: list[Severity] = ["info", "warning", "critical"]
        grave = min(severity(share), rule.at_most, key=order.index)
        idle_s, beside_s, returned = None, told.seconds, 0.0
    return Finding(
        rule=rule.id,
        title=rule.title,
        severity=grave,
        cause=rule.cause,
        subcause=rule.subcause,
        owner=rule.owner,
        idle_s=idle_s or 0.0,
        says=rule.render_says(
            {
                **told.values,
                "idle_s": idle_s,
                "beside_s": beside_s,
                "share": share,
                "wall_s": wall_s,
                "working_share": told.seconds / told.working_s if told.working_s else None,
                "ranks": ", ".join(spans(told.ranks)) or None,
            }
        ),
        evidence=told.values,
        advice=rule.advice,
        # A cause that is only ever felt (waiting for a late rank) returns nothing by itself.
        what_if={"gpu_s_returned": returned} if returned > 0 else None,
        why=rule.why,
        grade=told.grade,
        ranks=told.ranks,
        beside_s=beside_s,
    )
