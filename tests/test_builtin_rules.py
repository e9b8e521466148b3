from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rule_make import Row, run_rules
from rule_strategies import faithful_row
from whyidle import causes
from whyidle_rules import evidence, groups, says
from whyidle_rules.case import Result, run_cases
from whyidle_rules.compile import open_rules
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import BUILTIN, load_rules

NO_SITE = Path("no/site/rules")
RULES = load_rules(site=NO_SITE)
RESULTS = run_cases(RULES)
S = 1_000_000_000
ALL_ZERO: Row = {column.name: 0.0 for column in evidence.OBSERVED if column.type == "DOUBLE"}


@pytest.mark.parametrize(
    "result", RESULTS, ids=[f"{result.rule.id}: {result.case.name}" for result in RESULTS]
)
def test_case(result: Result) -> None:
    assert result.passed, f"granted {result.granted_s} s, not {result.case.grants_s} s"


def test_every_file_is_a_rule_of_its_folder() -> None:
    files = {path.relative_to(BUILTIN) for path in BUILTIN.rglob("*") if path.is_file()}
    assert files == {Path(rule.cause) / f"{rule.id}.yaml" for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_prose(rule: Rule) -> None:
    assert causes.is_known(rule.cause, rule.subcause)
    assert rule.id not in ("fix", "use", "enable")
    assert len(rule.title) <= 80
    assert not rule.title.endswith(".")
    for text in (rule.says, rule.why, rule.advice):
        assert text.endswith(".")
    assert rule.advice[0].isupper()
    named = {field.name for field in says.fields(rule.says)}
    total = "beside_s" if rule.beside else "idle_s"
    assert {total, "share"} <= named
    totals = (total, "share", "wall_s", "ranks", *(["working_share"] if rule.beside else []))
    nothing = dict.fromkeys([*evidence.BY_NAME, *totals])
    assert "unknown s (unknown of wall)" in rule.render_says(nothing)
    values = {**dict.fromkeys(nothing, 1), "ranks": "0-2", "coll_transport": "ib"}
    assert "1.000 s (100.0% of wall)" in rule.render_says(values)


def test_rules_of_one_cause_rest_on_different_evidence() -> None:
    kinds = [
        (rule.cause, rule.subcause, frozenset(rule.reads), frozenset(rule.lacks)) for rule in RULES
    ]
    assert len(kinds) == len(set(kinds))


def test_no_rule_is_open() -> None:
    """So nothing is held back on traces that lack some kind of record."""
    assert open_rules(RULES) == ()


# What a piece of a trace is charged to, by the one column that fills it.
PIECES: list[tuple[str, dict[str, float | int | str | None], str]] = [
    ("checkpoint_save_s", {}, "storage/checkpoint_write"),
    ("checkpoint_load_s", {}, "storage/checkpoint_load"),
    ("data_wait_s", {"data_workers": 0}, "cpu_preprocessing/main_thread"),
    ("data_wait_s", {"data_workers": 4}, "unattributed/data_wait"),
    ("data_wait_s", {}, "unattributed/data_wait"),
    ("copy_h2d_s", {}, "host_transfer/exposed_copy"),
    ("copy_h2d_s", {"copy_h2d_pageable_s": 0.5}, "host_transfer/pageable_copy"),
    ("copy_d2h_s", {}, "host_transfer/exposed_copy"),
    ("copy_device_s", {}, "unattributed/unexplained"),
    ("gc_s", {}, "host_pause/gc"),
    ("compile_s", {}, "host_pause/compile"),
    ("allocator_s", {}, "host_pause/allocator"),
    ("logging_s", {}, "host_pause/logging"),
    ("profiler_s", {}, "host_pause/profiler"),
    ("evaluation_s", {}, "lifecycle/evaluation"),
    ("sync_s", {}, "host_pause/synchronisation"),
    ("launch_latency_s", {}, "host_pause/launch_bound"),
    ("host_busy_s", {"launch_late_s": 0.5}, "host_pause/launch_bound"),
    ("host_silent_s", {"launch_late_s": 0.5, "gap_s": 0.004}, "host_pause/launch_bound"),
    ("host_silent_s", {"launch_late_s": 0.5, "gap_s": 0.5}, "host_pause/main_thread"),
    ("queued_s", {}, "unattributed/kernel_gap"),
    ("gap_s", {}, "unattributed/unexplained"),
    ("coll_s", {"coll_wait_s": 0.5, "late_rank": 1}, "collective/late_rank"),
    ("coll_s", {"coll_transfer_s": 0.5}, "collective/transfer"),
    ("coll_s", {"coll_transfer_s": 0.5, "coll_transport": "nvlink"}, "collective/transfer_nvlink"),
    ("coll_s", {"coll_transfer_s": 0.5, "coll_transport": "ib"}, "collective/transfer_ib"),
    ("coll_s", {"coll_transfer_s": 0.5, "coll_transport": "roce"}, "collective/transfer_roce"),
    ("coll_s", {"coll_transfer_s": 0.5, "coll_transport": "tcp"}, "collective/transfer_tcp"),
    (
        "coll_s",
        dict.fromkeys(("coll_wait_s", "coll_gone_s", "coll_transfer_s")),
        "collective/exposed",
    ),
    (
        "p2p_s",
        dict.fromkeys(
            ("bubble_schedule_s", "bubble_imbalance_s", "bubble_late_s", "bubble_even_s")
        ),
        "pipeline_bubble/exposed",
    ),
]


def charges(rows: list[Row]) -> dict[int, dict[str, int]]:
    """Return nanoseconds by window and "cause/subcause"."""
    names = {rule.id: f"{rule.cause}/{rule.subcause}" for rule in RULES}
    grants, leftovers = run_rules(RULES, rows)
    found: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (window, rule), ns in grants.items():
        found[window][names[rule]] += ns
    for (window, _, _, subcause), ns in leftovers.items():
        found[window][f"unattributed/{subcause}"] += ns
    return found


def test_a_piece_of_a_trace_is_charged_whole_to_what_fills_it() -> None:
    rows: list[Row] = []
    for column, more, _ in PIECES:
        pool = "spinning_s" if column in ("coll_s", "p2p_s") else "empty_s"
        rows.append({**ALL_ZERO, pool: 0.5, column: 0.5, **more})
    found = charges(rows)
    expected = [{where: S // 2} for *_, where in PIECES]
    assert [dict(found[number]) for number in range(len(rows))] == expected


def test_a_trace_without_the_cpu_side_names_nothing() -> None:
    row: Row = {"empty_s": 1.0, "gap_s": 1.0, "data_workers": None}
    row |= dict.fromkeys(("copy_h2d_s", "copy_h2d_pageable_s", "copy_d2h_s"), 0.0)
    assert charges([row]) == {0: {"unattributed/no_evidence": S}}


def test_a_row_summed_over_many_pieces_is_charged_part_by_part() -> None:
    parts = {"gc_s": 1, "sync_s": 2, "host_busy_s": 3, "host_silent_s": 4, "queued_s": 5}
    row: Row = {**ALL_ZERO, "gap_s": 0.0001, "empty_s": 0.016}
    row |= {name: weight / 1000 for name, weight in parts.items()}
    assert charges([row]) == {
        0: {
            "host_pause/gc": S // 1000,
            "host_pause/synchronisation": 2 * S // 1000,
            "host_pause/launch_bound": 7 * S // 1000,
            "unattributed/kernel_gap": 5 * S // 1000,
            "unattributed/unexplained": S // 1000,
        }
    }


COLUMNS = [column.name for column in evidence.OBSERVED]
FALLBACKS = {rule.id for rule in RULES if rule.lacks}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_removing_evidence_never_raises_a_cause(data: st.DataObject) -> None:
    """Per window; a rule that `lacks` a column may rise, but only by what its own cause loses."""
    windows = data.draw(st.lists(faithful_row(), min_size=3, max_size=6))
    gone = data.draw(st.sets(st.sampled_from(COLUMNS), min_size=1, max_size=4))
    for parts in (
        {"coll_wait_s", "coll_gone_s", "coll_transfer_s"},
        {"bubble_schedule_s", "bubble_imbalance_s", "bubble_late_s", "bubble_even_s"},
    ):
        if gone & parts:
            gone |= data.draw(st.sampled_from([set[str](), parts]))
    rows: list[Row] = [
        row for whole in windows for row in (whole, {**whole, **dict.fromkeys(gone)})
    ]
    grants, leftovers = run_rules(RULES, rows)
    for at in range(0, len(rows), 2):
        by_cause = [defaultdict[str, int](int), defaultdict[str, int](int)]
        for rule in RULES:
            before, after = (grants.get((at + n, rule.id), 0) for n in range(2))
            by_cause[0][rule.cause] += before
            by_cause[1][rule.cause] += after
            assert rule.id in FALLBACKS or after <= before, f"{rule.id} without {gone}"
        for cause, before in by_cause[0].items():
            assert by_cause[1][cause] <= before, f"{cause} without {gone}"
        total = sum(by_cause[0].values())
        total += sum(ns for (window, *_), ns in leftovers.items() if window == at)
        assert total == sum(
            round(float(rows[at][f"{p}_s"] or 0) * S) for p in ("empty", "spinning")
        )


@pytest.mark.parametrize("column", COLUMNS)
def test_each_column_alone(column: str) -> None:
    rows: list[Row] = []
    for name, more, _ in PIECES:
        pool = "spinning_s" if name in ("coll_s", "p2p_s") else "empty_s"
        whole: Row = {**ALL_ZERO, pool: 0.5, name: 0.5, **more}
        rows += [whole, {**whole, column: None}]
    found = charges(rows)
    for at in range(0, len(rows), 2):
        for where, ns in found[at + 1].items():
            cause = where.partition("/")[0]
            before = sum(n for name, n in found[at].items() if name.startswith(f"{cause}/"))
            assert cause == "unattributed" or ns <= before, f"{where} without {column}"


def test_groups_have_members_or_say_why_not() -> None:
    used = {rule.group for rule in RULES if not rule.beside}
    assert used <= set(groups.BY_ID)
    without = set(groups.BY_ID) - used
    assert without == {"queue", "communication"}, "a gap between queued kernels is nobody's"
