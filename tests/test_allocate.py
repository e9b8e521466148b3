from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rule_make import Grants, Leftovers, Row, make_rule, run_rules
from rule_reference import Window
from rule_strategies import faithful_row, faithful_rules, wild_row, wild_rules
from whyidle_rules import evidence, groups
from whyidle_rules.allocate import allocate
from whyidle_rules.case import fill, sandbox
from whyidle_rules.compile import compile_rules
from whyidle_rules.rule import Rule

S = 1_000_000_000
NOTHING_HAPPENED: Row = {
    column.name: 0.0 for column in evidence.OBSERVED if column.type == "DOUBLE"
}


def row(**values: float | int | str | None) -> Row:
    return {**NOTHING_HAPPENED, **values}


def one(rules: list[Rule], **values: float | int | str | None) -> tuple[dict[str, int], Leftovers]:
    """Run one window; return grants by rule and the leftovers."""
    grants, leftovers = run_rules(rules, [row(**values)])
    return {rule: ns for (_, rule), ns in grants.items()}, leftovers


GC = make_rule("gc", "pause", "gc_s")
LOGGING = make_rule("log", "pause", "logging_s")
SYNC = make_rule("sync", "sync", "sync_s")
LATE = make_rule("late", "launch", "launch_late_s")  # an open rule: its seconds may be anybody's


def test_a_claim_is_granted_and_the_rest_is_unexplained() -> None:
    grants, left = one([GC], empty_s=1.0, gc_s=0.4)
    assert grants == {"gc": 4 * S // 10}
    assert left == {(0, "empty", "", "unexplained"): 6 * S // 10}


def test_rows_carry_what_the_rule_says_of_itself() -> None:
    with sandbox() as con:
        fill(con, [row(empty_s=1.0, gc_s=0.25)])
        allocate(con, [GC])
        allocate(con, [GC])  # a second run replaces the first
        found = con.execute("SELECT * FROM grants").fetchall()
        types = con.execute("SELECT * FROM grants").description
        tables = con.execute("SELECT table_name FROM duckdb_tables() ORDER BY 1").fetchall()
    assert found == [(0, "gc", "cause_gc", "sub", "measured", "pause", "empty", S // 4)]
    assert [name for name, *_ in types] == [
        "window_id",
        "rule",
        "cause",
        "subcause",
        "grade",
        "group",
        "pool",
        "ns",
    ]
    assert tables == [("evidence",), ("grants",), ("leftovers",)]


def test_a_group_with_a_witness_shares_out_what_it_shows_and_keeps_the_rest() -> None:
    half = make_rule("half", "input", share="0.5")
    late = make_rule("launch", "launch", "host_silent_s")
    values = {"empty_s": 1.0, "data_wait_s": 0.6, "host_silent_s": 0.4}
    grants, left = one([half, late], **values)
    assert grants == {"half": 3 * S // 10, "launch": 4 * S // 10}
    assert left == {(0, "empty", "input", "data_wait"): 3 * S // 10}


def test_seconds_of_a_witness_never_fall_to_a_later_group() -> None:
    grants, left = one([LATE], empty_s=1.0, data_wait_s=1.0, launch_late_s=1.0)
    assert grants == {}
    assert left == {(0, "empty", "input", "data_wait"): S}


def test_shares_are_absolute_and_only_scaled_down() -> None:
    a, b = make_rule("a", "input", share="0.75"), make_rule("b", "input", share="0.5")
    grants, left = one([a, b], empty_s=1.0, data_wait_s=1.0)
    assert grants == {"a": 6 * S // 10, "b": 4 * S // 10}
    assert left == {}
    grants, left = one([b], empty_s=1.0, data_wait_s=1.0)
    assert grants == {"b": S // 2}


def test_an_unknown_share_stays_with_the_group() -> None:
    reading = make_rule("reading", "input", share="0.5")
    decoding = make_rule("decoding", "input", share="gap_s")
    grants, left = one([reading, decoding], empty_s=1.0, data_wait_s=1.0, gap_s=None)
    assert grants == {"reading": S // 2}
    assert left == {(0, "empty", "input", "data_wait"): S // 2}


@pytest.mark.parametrize("share", ["-1", "0", "1 / 0", "0 * 1"])
def test_a_share_below_0_or_unknown_takes_nothing(share: str) -> None:
    grants, _ = one([make_rule("a", "input", share=share)], empty_s=1.0, data_wait_s=1.0)
    assert grants == {}


def test_a_share_above_1_is_1() -> None:
    grants, _ = one([make_rule("a", "input", share="7")], empty_s=1.0, data_wait_s=0.25)
    assert grants == {"a": S // 4}


def test_the_earlier_group_goes_first() -> None:
    grants, _ = one([LATE, GC], empty_s=1.0, gc_s=0.7, launch_late_s=1.0)
    assert grants == {"gc": 7 * S // 10, "late": 3 * S // 10}


def test_claims_of_a_group_are_scaled_down_alike() -> None:
    a, b = make_rule("a", "pause", "gap_s"), make_rule("b", "pause", "launch_late_s")
    grants, left = one([a, b], empty_s=1.0, gap_s=1.0, launch_late_s=0.5)
    assert grants == {"a": 666_666_666, "b": 333_333_333}
    assert left == {(0, "empty", "", "unexplained"): 1}


@pytest.mark.parametrize("claim", ["-gc_s", "gc_s / 0", "gc_s * 1e300 * 1e300", "0"])
def test_a_claim_that_is_no_duration_is_none(claim: str) -> None:
    grants, left = one([make_rule("a", "pause", claim)], empty_s=1.0, gc_s=1.0)
    assert grants == {}
    assert left == {(0, "empty", "", "unexplained"): S}


def test_a_claim_is_held_to_the_exclusive_seconds_that_it_cites() -> None:
    grants, _ = one([make_rule("a", "pause", "gc_s * 3")], empty_s=1.0, gc_s=0.1)
    assert grants == {"a": S // 10}


def test_pools_do_not_mix() -> None:
    ring = make_rule("ring", "collective", "coll_s")
    grants, left = one([GC, ring], spinning_s=1.0, gc_s=1.0, coll_s=0.25)
    assert grants == {"ring": S // 4}
    assert left == {(0, "spinning", "", "unexplained"): 3 * S // 4}
    grants, _ = one([GC, ring], empty_s=1.0, gc_s=0.5, coll_s=1.0)
    assert grants == {"gc": S // 2}


def test_missing_evidence_is_said_and_does_not_hold_back_exclusive_columns() -> None:
    grants, left = one([GC, SYNC], empty_s=1.0, gc_s=None, sync_s=0.25)
    assert grants == {"sync": S // 4}
    assert left == {(0, "empty", "", "no_evidence"): 3 * S // 4}


def test_missing_evidence_holds_back_rules_that_may_take_the_same_seconds() -> None:
    rules = [GC, LATE]
    assert one(rules, empty_s=1.0, gc_s=0.75, launch_late_s=0.25)[0]["late"] == S // 4
    grants, left = one(rules, empty_s=1.0, gc_s=None, launch_late_s=0.25)
    assert grants == {}
    assert left == {(0, "empty", "", "no_evidence"): S}


def test_what_cannot_be_claimed_whatever_is_missing_is_unexplained() -> None:
    known_amount = make_rule("fabric", "collective", "coll_s", when="coll_transport = 'ib'")
    _, left = one([known_amount], spinning_s=1.0, coll_s=0.25, coll_transport=None)
    assert left == {
        (0, "spinning", "", "no_evidence"): S // 4,
        (0, "spinning", "", "unexplained"): 3 * S // 4,
    }


def test_a_condition_that_is_false_whatever_is_missing_silences_a_rule() -> None:
    rule = make_rule("a", "pause", "gc_s", when="gap_s > 1 AND coll_transport = 'ib'")
    _, left = one([rule], empty_s=1.0, gap_s=0.5, gc_s=None, coll_transport=None)
    assert left == {(0, "empty", "", "unexplained"): S}


def test_members_of_a_group_count_what_an_unknown_one_might_claim() -> None:
    a, b = make_rule("a", "pause", "gap_s"), make_rule("b", "pause", "launch_late_s")
    grants, left = one([a, b], empty_s=1.0, gap_s=1.0, launch_late_s=None)
    assert grants == {"a": S // 2}
    assert left == {(0, "empty", "", "no_evidence"): S // 2}


def test_an_unknown_witness_holds_back_open_rules_only() -> None:
    grants, left = one([LATE, SYNC], empty_s=1.0, data_wait_s=None, launch_late_s=0.0, sync_s=0.5)
    assert grants == {"sync": S // 2}
    grants, left = one([LATE], empty_s=1.0, data_wait_s=None, launch_late_s=0.5)
    assert grants == {}
    assert left == {(0, "empty", "", "no_evidence"): S}


def test_two_groups_with_the_same_column_are_open() -> None:
    early, late = make_rule("early", "pause", "gc_s"), make_rule("late", "phase", "gc_s")
    gated = make_rule("gated", "checkpoint", "sync_s", when="gap_s > 0")
    rules = [early, late, gated]
    assert one(rules, empty_s=1.0, gc_s=0.5, gap_s=1.0)[0] == {"early": S // 2, "late": S // 2}
    # sync_s is known, so `gated` might claim exactly that; only 0.4 s are certainly left
    grants, left = one(rules, empty_s=1.0, gc_s=0.5, sync_s=0.6, gap_s=None)
    assert grants == {"early": 4 * S // 10}
    assert left == {(0, "empty", "", "no_evidence"): 6 * S // 10}


def test_a_coarser_rule_speaks_where_a_column_is_missing() -> None:
    fine = [
        make_rule(name, "collective", "coll_transfer_s", when=f"coll_transport = '{name}'")
        for name in ("ib", "tcp")
    ]
    coarse = make_rule("any", "collective", "coll_transfer_s", lacks=["coll_transport"])
    values = {"spinning_s": 1.0, "coll_s": 1.0, "coll_transfer_s": 1.0}
    assert one([*fine, coarse], **values, coll_transport="ib")[0] == {"ib": S}
    grants, left = one([*fine, coarse], **values, coll_transport=None)
    assert grants == {"any": S}
    assert left == {}


def test_rules_that_are_stood_in_for_hold_nothing_back() -> None:
    fine = make_rule("ib", "collective", "coll_transfer_s", when="coll_transport = 'ib'")
    coarse = make_rule("any", "collective", "coll_transfer_s", lacks=["coll_transport"])
    stage = make_rule("stage", "pipeline", "gap_s")
    values = {"spinning_s": 1.0, "coll_s": 0.5, "coll_transfer_s": 0.5, "gap_s": 0.25}
    grants, left = one([fine, coarse, stage], **values, coll_transport=None)
    assert grants == {"any": S // 2, "stage": S // 4}
    assert left == {(0, "spinning", "", "unexplained"): S // 4}
    grants, left = one([fine, stage], **values, coll_transport=None)
    assert grants == {"stage": S // 4}
    assert left[0, "spinning", "", "no_evidence"] == S // 2


def test_windows_are_apart() -> None:
    rows = [row(empty_s=1.0, gc_s=1.0), row(working_s=1.0), row(empty_s=None), row(spinning_s=1.0)]
    grants, left = run_rules([GC], rows)
    assert grants == {(0, "gc"): S}
    assert left == {(3, "spinning", "", "unexplained"): S}


def test_without_rules_and_without_windows() -> None:
    assert run_rules([], []) == ({}, {})
    _, left = run_rules([], [row(empty_s=1.0, queued_s=0.25)])
    assert left == {
        (0, "empty", "queue", "kernel_gap"): S // 4,
        (0, "empty", "", "unexplained"): 3 * S // 4,
    }


def test_parameters_are_bound_and_kept_apart_by_rule() -> None:
    text = "'); DROP TABLE grants; --"
    a = make_rule("a", "pause", "gc_s", when="gc_s > $least_s", params={"least_s": 0.5})
    b = make_rule("b", "pause", "logging_s", when="logging_s > $least_s", params={"least_s": 0.1})
    c = make_rule("c", "pause", "profiler_s", when="coll_transport = $kind", params={"kind": text})
    values = {"empty_s": 1.0, "gc_s": 0.25, "logging_s": 0.25, "profiler_s": 0.25}
    grants, _ = one([a, b, c], **values, coll_transport=text)
    assert grants == {"b": S // 4, "c": S // 4}
    assert all(text not in query.sql for query in compile_rules([a, b, c]))


def test_any_name_of_a_table_is_quoted() -> None:
    with sandbox() as con:
        fill(con, [row(empty_s=1.0, gc_s=1.0)])
        con.execute('CREATE VIEW "my "" view" AS SELECT * FROM evidence')
        allocate(con, [GC], 'my " view')
        assert con.execute("SELECT ns FROM grants").fetchall() == [(S,)]


def check_sums(rules: list[Rule], rows: list[Row], grants: Grants, left: Leftovers) -> None:
    pools = {rule.id: groups.BY_ID[rule.group].pool for rule in rules}
    for number, values in enumerate(rows):
        for pool in ("empty", "spinning"):
            window = Window(pool, rules, values)
            granted = sum(
                ns for (at, rule), ns in grants.items() if at == number and pools[rule] == pool
            )
            rest = sum(ns for (at, of, *_), ns in left.items() if at == number and of == pool)
            assert granted + rest == window.pool_ns


@settings(max_examples=50, deadline=None)
@given(rules=wild_rules(), rows=st.lists(wild_row(), min_size=1, max_size=6))
def test_the_query_allocates_as_the_definition_says(rules: list[Rule], rows: list[Row]) -> None:
    grants, left = run_rules(rules, rows)
    check_sums(rules, rows, grants, left)
    for number, values in enumerate(rows):
        for pool in ("empty", "spinning"):
            window = Window(pool, [r for r in rules if groups.BY_ID[r.group].pool == pool], values)
            window.allocate()
            for rule, ns in window.grants.items():
                assert grants.get((number, rule), 0) == ns
                assert ns <= window.claimed[rule]
            for (group, subcause), ns in window.leftovers.items():
                assert left.get((number, pool, group, subcause), 0) == ns


NULLABLE = [column.name for column in evidence.OBSERVED if column.name != "d_s"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_removing_evidence_never_raises_a_rule(data: st.DataObject) -> None:
    rules = data.draw(faithful_rules())
    windows = data.draw(st.lists(faithful_row(), min_size=4, max_size=8))
    used = {name for rule in rules for name in rule.reads} | {"data_wait_s", "queued_s"}
    names = st.sets(st.sampled_from(sorted(used & set(NULLABLE))), max_size=3)
    first = data.draw(names)
    more = first | data.draw(names)
    rows: list[Row] = []
    for whole in windows:
        rows += [whole, {**whole, **dict.fromkeys(first)}, {**whole, **dict.fromkeys(more)}]
    grants, left = run_rules(rules, rows)
    check_sums(rules, rows, grants, left)
    for at in range(0, len(rows), 3):
        for rule in rules:
            before, between, after = (grants.get((at + n, rule.id), 0) for n in range(3))
            assert before >= between >= after, f"{rule.id} in window {at}"
        assert not any(
            number == at and subcause == "no_evidence" for number, _, _, subcause in left
        ), "all was known there"
