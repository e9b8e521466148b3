"""The stall ground's own arithmetic: idle spans, overlaps, scores, scenarios."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stalls.scenario import kinds, load, strengths
from stalls.score import score
from stalls.truth import idle_spans, length_s, overlap_s

CHARGED = {("storage", "fuse_read"): 6.0, ("host_pause", "gc"): 1.0, ("unattributed", "x"): 3.0}


def spans(*pairs: tuple[int, int]) -> Any:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


@pytest.mark.parametrize(
    ("busy", "idle"),
    [
        ((), [[0, 100]]),
        (((0, 100),), []),
        (((-50, 10), (20, 30)), [[10, 20], [30, 100]]),
        (((10, 40), (20, 30), (35, 60)), [[0, 10], [60, 100]]),
        (((10, 20), (90, 200), (150, 160)), [[0, 10], [20, 90]]),
        (((200, 300),), [[0, 100]]),
    ],
)
def test_what_no_span_covers_is_idle(busy: tuple[tuple[int, int], ...], idle: Any) -> None:
    assert idle_spans(spans(*busy), 0, 100).tolist() == idle


def test_overlap_is_what_is_in_both() -> None:
    idle = spans((0, 10_000_000_000), (20_000_000_000, 30_000_000_000))
    assert length_s(idle) == 20.0
    assert overlap_s(idle, [(5_000_000_000, 25_000_000_000)]) == 10.0
    assert overlap_s(spans(), [(0, 1)]) == 0.0


def window(causes: dict[str, float], idle_s: float) -> dict[str, Any]:
    stall_s = sum(causes.values())
    return {
        "name": "training",
        "rank": 0,
        "steps": 100,
        "wall_s": 20.0,
        "idle_s": idle_s,
        "stall_s": stall_s,
        "causes": causes,
    }


def truth(
    role: str = "stall", allowed: tuple[str, ...] = (), own_s: float | None = None
) -> dict[str, Any]:
    baseline = None if own_s is None else [{"steps": 100, "wall_s": 10.0, "idle_s": own_s}]
    return {
        "kind": "k",
        "strength": "s",
        "role": role,
        "subcause": "fuse_read",
        "allowed": list(allowed),
        "probe": True,
        "baseline": baseline,
        "foreign_cpu_s": 0.0,
    }


def test_a_stall_is_scored_by_its_cause() -> None:
    row = score(truth(), window({"storage": 8.0}, 10.0), CHARGED, probe=True)
    assert row.right_share == 0.75
    assert row.right_subcause_share == 0.75
    assert row.unattributed_share == pytest.approx(0.3)
    # Two seconds were idle without the stall: whoever has one of them is not wrong.
    assert row.wrong_s == 0.0


def test_what_is_charged_elsewhere_is_wrong() -> None:
    row = score(truth(), window({"cpu_preprocessing": 10.0}, 10.0), CHARGED, probe=True)
    assert row.right_share == 0.0
    assert row.wrong_share == pytest.approx(0.7 - 0.013)


def test_too_much_for_the_right_cause_is_wrong_too() -> None:
    row = score(truth(), window({"storage": 2.0}, 2.0), CHARGED, probe=True)
    assert row.right_share == 1.0
    assert row.wrong_s == pytest.approx(4.0 + 1.0 - 0.13)


def test_of_a_control_all_that_is_named_is_blamed_but_what_is_allowed() -> None:
    row = score(truth("control"), window({}, 10.0), CHARGED, probe=True)
    assert (row.right_share, row.blamed_share) == (None, 7 / 20)
    row = score(truth("control"), window({"storage": 5.0}, 10.0), CHARGED, probe=True)
    assert row.blamed_share == pytest.approx(2 / 20)
    row = score(truth("confuser", ("host_pause",)), window({}, 10.0), CHARGED, probe=True)
    assert (row.wrong_s, row.blamed_share, row.wrong_of_idle_share) == (6.0, 0.3, 0.6)


def test_of_a_rank_without_a_stall_its_own_idle_time_may_be_charged() -> None:
    row = score(truth(own_s=5.0), window({}, 10.0), CHARGED, probe=True)
    assert row.wrong_s == pytest.approx(7.0 - 5.0 - 0.13)
    assert score(truth(), window({}, 10.0), CHARGED, probe=True).wrong_s == 7.0


def test_a_mixture_is_off_by_its_worst_cause() -> None:
    due = {"storage": 5.0, "cpu_preprocessing": 5.0}
    row = score(truth("mixture"), window(due, 10.0), CHARGED, probe=True)
    assert row.points == 0.5


def test_every_scenario_can_be_read() -> None:
    assert len(kinds()) >= 20
    for kind in kinds():
        for strength in strengths(kind):
            scenario = load(kind, strength)
            assert scenario.setup.epoch_batches > 0
            blamed = scenario.role in ("stall", "mixture")
            felt = scenario.by_waiting or scenario.by_spinning
            told = scenario.causes or scenario.by_phases or scenario.victims or felt
            assert bool(told) >= blamed
            # A stall that is told by its counterfactual has one.
            if scenario.causes or scenario.victims:
                assert scenario.baseline is not None
            elif not felt:
                assert scenario.baseline is None


def test_what_a_scenario_cannot_mean_is_said() -> None:
    with pytest.raises(ValueError, match="there is no kind nothing"):
        load("nothing", "medium")
    with pytest.raises(ValueError, match="fuse_read: no strength absurd"):
        load("fuse_read", "absurd")
