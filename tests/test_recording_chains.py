"""Pipelines that nobody tells of are told from collectives by the bytes of their links."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recording_rows import clocks
from test_recording_ranks import COMPUTES, EMPTY, POLLS, SECONDS, Second, diagnosed, rank_rows
from whyidle.table import Row
from whyidle_rules.diagnosis import Diagnosis
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

WINDOW_BYTES = 50 << 20
WAITS = [POLLS] * 4 + [COMPUTES] * 4
LONGER = [COMPUTES] * 8
STALLS = [EMPTY] * 4 + [COMPUTES] * 4


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


def found(
    rules: Sequence[Rule], seconds: Sequence[Second], neighbours: Sequence[float]
) -> Diagnosis:
    """Return the diagnosis of ranks, of which each exchanged so many times the bytes of a link."""
    rows: list[Row] = [*clocks(0, SECONDS)]
    for rank, (second, times) in enumerate(zip(seconds, neighbours, strict=True)):
        moved = round(times * WINDOW_BYTES)
        rows += rank_rows(rank, second, world=len(seconds), nvlink_bytes=moved)
    return diagnosed(rows, rules)


def waited(diagnosis: Diagnosis) -> dict[str, float]:
    total: dict[str, float] = {}
    for row in diagnosis.ledger:
        if row.cause in ("collective", "pipeline_bubble"):
            name = f"{row.cause}/{row.subcause}"
            total[name] = total.get(name, 0.0) + row.idle_s
    return total


def test_stages_that_wait_for_a_longer_one(rules: Sequence[Rule]) -> None:
    told = found(rules, [WAITS, LONGER, WAITS], [1, 2, 1])
    seconds = waited(told)
    assert seconds["pipeline_bubble/stage_imbalance"] >= 0.85 * sum(seconds.values())
    assert not any(name.startswith("collective") for name in seconds)
    roots = {
        (row.root.rank, row.root.cause) for row in told.ledger if row.subcause == "stage_imbalance"
    }
    assert roots == {(1, "slow_compute")}


def test_stages_that_wait_for_one_that_stands_empty(rules: Sequence[Rule]) -> None:
    told = found(rules, [WAITS, STALLS, WAITS], [1, 2, 1])
    seconds = waited(told)
    assert seconds["pipeline_bubble/late_upstream"] >= 0.8 * sum(seconds.values())
    late = {row.root.rank for row in told.ledger if row.subcause == "late_upstream"}
    assert late == {1}


def test_what_all_stages_wait_alike_is_not_charged_to_one(rules: Sequence[Rule]) -> None:
    seconds = waited(found(rules, [WAITS] * 4, [1, 2, 2, 1]))
    assert set(seconds) == {"pipeline_bubble/exposed"}


@pytest.mark.parametrize(
    "neighbours",
    [(1, 1, 1), (1, 1.5, 1), (1, 2, 2), (1, 3, 1), (1, 1, 2), (0, 0, 0)],
    ids=["a ring", "not twice", "one end", "thrice", "an end", "no bytes"],
)
def test_other_bytes_are_no_pipeline(rules: Sequence[Rule], neighbours: tuple[float, ...]) -> None:
    seconds = waited(found(rules, [WAITS, LONGER, WAITS], neighbours))
    pipeline = [name for name in seconds if name.startswith("pipeline")]
    # Who is in the middle is not known beforehand: two that exchange half of the third's are ends.
    assert bool(pipeline) == (neighbours == (1, 1, 2))


def test_two_ranks_exchange_the_same_either_way(rules: Sequence[Rule]) -> None:
    seconds = waited(found(rules, [WAITS, LONGER], [1, 1]))
    assert not any(name.startswith("pipeline") for name in seconds)
