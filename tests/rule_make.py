"""Rules and windows made by hand for the tests of the rules, and the allocator run on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from whyidle_rules.allocate import allocate
from whyidle_rules.case import fill, sandbox
from whyidle_rules.expression import Expression, Kind
from whyidle_rules.expression_parser import parse
from whyidle_rules.rule import Param, Rule, Value

Row = dict[str, Value]
Grants = dict[tuple[int, str], int]
Leftovers = dict[tuple[int, str, str, str], int]

RULE_TEXT = """\
id: slow_thing
title: A thing is slow
cause: host_pause
subcause: gc
group: pause
needs: [gc_s]
grade: measured
params:
  least_s: {value: 0.01, reason: Shorter ones do not matter.}
when: gc_s > $least_s
claim: gc_s
says: The thing took {idle_s:.1f} s.
why: It is slow.
advice: Make it fast.
owner: application
refs: [https://docs.python.org/3/library/gc.html]
cases:
  - name: it speaks
    rows: [{empty_s: 1, gc_s: 0.5}]
    unnamed: 0
    grants: 0.5
  - name: it is silent
    rows: [{empty_s: 1}]
    unnamed: 0
    grants: 0
"""


def write_rule(root: Path, text: str = RULE_TEXT, where: str = "host_pause/slow_thing") -> Path:
    """Write a rule file under a folder."""
    path = root / f"{where}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def make_rule(
    rule_id: str,
    group: str,
    claim: str = "",
    *,
    share: str = "",
    when: str = "",
    needs: Sequence[str] = (),
    lacks: Sequence[str] = (),
    params: Mapping[str, float | str] | None = None,
) -> Rule:
    """Return a rule with a cause of its own, so that totals by cause are totals by rule."""
    given = params or {}
    kinds: dict[str, Kind] = {
        name: "text" if isinstance(value, str) else "number" for name, value in given.items()
    }

    def read(text: str, kind: Kind) -> Expression | None:
        return parse(text, kinds, kind) if text else None

    return Rule(
        id=rule_id,
        title=rule_id,
        cause=f"cause_{rule_id}",
        subcause="sub",
        group=group,
        needs=tuple(needs),
        lacks=tuple(lacks),
        grade="measured",
        params=tuple(Param(name=name, value=value, reason="test") for name, value in given.items()),
        when=read(when, "truth"),
        claim=read(claim, "number"),
        share=read(share, "number"),
        says="{idle_s}",
        why="",
        advice="",
        owner="application",
        refs=(),
        cases=(),
        file=f"{rule_id}.yaml",
    )


def run_rules(
    rules: Sequence[Rule], rows: Sequence[Mapping[str, Value]]
) -> tuple[Grants, Leftovers]:
    """Return nanoseconds by (window, rule), and by (window, pool, group, subcause)."""
    grants: Grants = defaultdict(int)
    leftovers: Leftovers = defaultdict(int)
    with sandbox() as con:
        fill(con, [dict(row) for row in rows])
        allocate(con, rules)
        for window, rule, ns in con.execute("SELECT window_id, rule, ns FROM grants").fetchall():
            assert ns > 0
            grants[window, rule] += ns
        found = con.execute('SELECT window_id, pool, "group", subcause, ns FROM leftovers')
        for window, pool, group, subcause, ns in found.fetchall():
            assert ns > 0
            leftovers[window, pool, group, subcause] += ns
    return grants, leftovers
