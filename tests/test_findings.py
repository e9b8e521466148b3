from __future__ import annotations

from collections.abc import Iterator, Sequence

import duckdb
import pytest

from rule_make import Row
from whyidle_rules import database, evidence
from whyidle_rules.allocate import allocate
from whyidle_rules.case import fill
from whyidle_rules.diagnosis import Finding, RootCause
from whyidle_rules.findings import findings, heard, severity
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

RULES = load_rules()


@pytest.fixture
def con() -> Iterator[duckdb.DuckDBPyConnection]:
    with database.memory() as opened:
        opened.execute(evidence.ddl("evidence"))
        yield opened


def told(
    con: duckdb.DuckDBPyConnection,
    rows: Sequence[Row],
    wall_s: float,
    roots: Sequence[RootCause] = (),
    rules: Sequence[Rule] = RULES,
) -> list[Finding]:
    # What no row names was recorded and did not happen, but for the keys.
    zero: Row = {column.name: 0.0 for column in evidence.OBSERVED if column.type == "DOUBLE"}
    fill(con, [{**zero, "late_rank": None, "coll_transport": None, **row} for row in rows])
    allocate(con, rules)
    return findings(heard(con, rules), rules, roots, wall_s)


def empty(rank: int | None, seconds: float, column: str = "gc_s") -> Row:
    return {"rank": rank, "d_s": seconds, "empty_s": seconds, column: seconds, "gap_s": seconds}


@pytest.mark.parametrize(
    ("share", "grave"),
    [(0.0, "info"), (0.0199, "info"), (0.02, "warning"), (0.0999, "warning"), (0.1, "critical")],
)
def test_severity(share: float, grave: str) -> None:
    assert severity(share) == grave


def test_a_finding_says_its_rule_with_its_numbers(con: duckdb.DuckDBPyConnection) -> None:
    (found,) = told(con, [empty(0, 1.0), empty(1, 2.0), empty(2, 1.5), empty(7, 0.5)], 100.0)
    rule = next(rule for rule in RULES if rule.id == "gc")
    assert (found.rule, found.title, found.owner) == ("gc", rule.title, rule.owner)
    assert (found.cause, found.subcause, found.grade) == ("host_pause", "gc", "measured")
    assert found.idle_s == 5.0
    assert found.severity == "warning"
    assert found.says == (
        "The GPU stood empty for 5.000 s (5.0% of wall) while Python collected garbage."
    )
    assert found.ranks == [0, 1, 2, 7]
    assert found.evidence == {"gc_s": 5.0}
    assert (found.why, found.advice) == (rule.why, rule.advice)
    assert found.what_if is None


def test_evidence_sums_seconds_and_tells_the_value_that_most_seconds_had(
    con: duckdb.DuckDBPyConnection,
) -> None:
    def wait(late: int, seconds: float) -> Row:
        return {
            "rank": 0,
            "d_s": seconds,
            "spinning_s": seconds,
            "coll_s": seconds,
            "coll_wait_s": seconds,
            "late_rank": late,
        }

    (found,) = told(con, [wait(3, 1.0), wait(9, 5.0), wait(3, 2.0)], 100.0)
    assert found.evidence == {"coll_wait_s": 8.0, "late_rank": 9}
    assert found.says.endswith("mostly for rank 9.")


def test_what_comes_back_is_what_arose_as_its_cause(con: duckdb.DuckDBPyConnection) -> None:
    roots = [
        RootCause(cause="host_pause", subcause="gc", node=None, rank=0, idle_s=9.0, share=0.09),
        RootCause(cause="host_pause", subcause="gc", node=None, rank=1, idle_s=2.0, share=0.02),
        RootCause(cause="host_pause", subcause="logging", node=None, rank=1, idle_s=50, share=0.5),
    ]
    (found,) = told(con, [empty(0, 1.0)], 100.0, roots)
    assert found.idle_s == 1.0
    assert found.what_if == {"gpu_s_returned": 11.0}
    assert found.severity == "critical"  # by what it returns, not by what was felt


def test_the_most_costly_comes_first_and_crumbs_are_left_out(
    con: duckdb.DuckDBPyConnection,
) -> None:
    rows = [empty(0, 1.0), empty(0, 3.0, "logging_s"), empty(0, 0.09, "compile_s")]
    assert [found.rule for found in told(con, rows, 100.0)] == ["logging", "gc"]


def test_ranks_that_nobody_knows_are_not_named(con: duckdb.DuckDBPyConnection) -> None:
    (found,) = told(con, [empty(None, 1.0)], 10.0)
    assert found.ranks == []


def test_nothing_granted_is_nothing_found(con: duckdb.DuckDBPyConnection) -> None:
    assert told(con, [{"rank": 0, "d_s": 1.0, "working_s": 1.0}], 1.0) == []
    assert findings(heard(con, RULES), RULES, [], 0.0) == []
