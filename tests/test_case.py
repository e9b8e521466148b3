from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from rule_make import RULE_TEXT, make_rule
from whyidle_rules.case import TOLERANCE_S, Result, check_query, run_cases, sandbox
from whyidle_rules.rule import Case, Rule
from whyidle_rules.rule_read import read_rule


def read(text: str = RULE_TEXT) -> Rule:
    return read_rule(text, Path("host_pause/slow_thing.yaml")).rule


def outcomes(results: list[Result]) -> list[tuple[str, float, bool]]:
    return [(result.case.name, round(result.granted_s, 9), result.passed) for result in results]


def test_cases_pass_and_fail_by_what_is_granted() -> None:
    assert outcomes(run_cases([read()])) == [("it speaks", 0.5, True), ("it is silent", 0.0, True)]
    wrong = read(RULE_TEXT.replace("grants: 0.5", "grants: 0.25"))
    assert outcomes(run_cases([wrong]))[0] == ("it speaks", 0.5, False)


def test_cases_run_beside_all_other_rules() -> None:
    greedy = make_rule("greedy", "checkpoint", "empty_s * 0.75")
    results = run_cases([read(), greedy])
    assert outcomes(results)[0] == ("it speaks", 0.25, False)


def test_only_the_chosen_rules_are_tried() -> None:
    assert len(run_cases([read()], {"slow_thing"})) == 2
    assert run_cases([read()], {"other"}) == []
    assert run_cases([]) == []


def test_rows_of_a_case_are_summed_and_cases_are_apart() -> None:
    text = RULE_TEXT.replace(
        "rows: [{empty_s: 1, gc_s: 0.5}]",
        "rows: [{empty_s: 1, gc_s: 0.125}, {working_s: 1}, {empty_s: 1, gc_s: 0.375}]",
    )
    assert outcomes(run_cases([read(text)])) == [
        ("it speaks", 0.5, True),
        ("it is silent", 0.0, True),
    ]


@pytest.mark.parametrize(("granted", "passed"), [(1.0 + TOLERANCE_S / 2, True), (1.000_01, False)])
def test_the_tolerance(granted: float, passed: bool) -> None:
    case = Case(name="x", rows=(), grants_s=1.0)
    assert Result(rule=read(), case=case, granted_s=granted).passed is passed


def test_the_whole_query_binds() -> None:
    check_query([read()])


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM read_text('/etc/hostname')",
        "COPY evidence TO 'evidence.csv'",
        "ATTACH 'other.duckdb'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SET threads = 8",
    ],
)
def test_the_sandbox_has_no_way_out(statement: str) -> None:
    with sandbox() as con, pytest.raises(duckdb.Error):
        con.execute(statement)
