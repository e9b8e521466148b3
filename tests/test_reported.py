from __future__ import annotations

import pytest

from reported import REPORTS, Report
from rule_make import run_rules
from test_builtin_rules import RULES
from whyidle_rules import beside
from whyidle_rules.case import fill, sandbox

TOLD = [report for report in REPORTS if not report.not_told]
SURE = 0.85  # of the idle second
STRAY = 0.05


@pytest.mark.parametrize("report", TOLD, ids=lambda report: report.id)
def test_a_reported_case_gets_the_answer_that_was_found(report: Report) -> None:
    grants, _ = run_rules(RULES, [report.row])
    names = {rule.id: f"{rule.cause}/{rule.subcause}" for rule in RULES}
    found: dict[str, float] = {}
    for (_, rule), ns in grants.items():
        found[names[rule]] = found.get(names[rule], 0.0) + ns / 1e9
    slow = told_beside(report)
    for (_, rule), seconds in slow.items():
        found[names[rule]] = found.get(names[rule], 0.0) + seconds
    right = found.pop(report.says, 0.0)
    # What slow work cost is a part of it.
    assert right >= (0.5 if slow else SURE) or not report.says, found
    causes = {name for name in found if name.partition("/")[0] != report.says.partition("/")[0]}
    assert sum(found[name] for name in causes) <= STRAY, found


def told_beside(report: Report) -> dict[tuple[int, str], float]:
    """Return what is told beside the ledger."""
    with sandbox() as con:
        fill(con, [report.row])
        return beside.windows(con, RULES)


def test_all_reports_are_there_in_order() -> None:
    assert [report.id for report in REPORTS] == [f"S{n:02}" for n in range(1, 45)]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.id)
def test_what_is_not_told_says_why(report: Report) -> None:
    assert bool(report.row) != bool(report.not_told)
