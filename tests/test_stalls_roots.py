"""The stall ground's arithmetic across ranks: who waited for whom, and how that is scored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from stalls.rank_truth import waits
from stalls.root_score import score_roots
from stalls.scenario import Setup, load
from stalls.steps import passes
from stalls.truth import Run
from vgpu.device.kinds import WHATS
from vgpu.device.ledger import FIELDS
from vgpu.device.truth import Truth

S = 1_000_000_000
_NUMPY = {"q": "<i8", "i": "<i4", "f": "<f4", "H": "<u2"}
COMPUTES, REDUCES = WHATS.index("gemm"), WHATS.index("all_reduce")


def timeline(*rows: tuple[int, int, float, float, float, int]) -> Truth:
    """Of (gpu, what, begin, ready, end, sequence), in seconds; ready -1: never."""
    kind = np.dtype([(name, _NUMPY[code]) for name, code in FIELDS])
    made = np.zeros(len(rows), dtype=kind)
    for at, (gpu, what, begin, ready, end, sequence) in enumerate(rows):
        made[at]["gpu"], made[at]["what"], made[at]["sequence"] = gpu, what, sequence
        made[at]["begin_ns"], made[at]["end_ns"] = int(begin * S), int(end * S)
        made[at]["ready_ns"] = -1 if ready < 0 else int(ready * S)
        made[at]["group"] = 1 if what == REDUCES else -1
    return Truth(
        horizon_ns=100 * S,
        processes=(),
        rows=made[np.argsort(made["begin_ns"], kind="stable")],
        _whats=WHATS,
        _kernels=WHATS.index("copy_to_device"),
        _groups={1: "world"},
    )


def run_of(truth: Truth, ranks: int) -> Run:
    return Run(truth=truth, marks={}, gpu=0, gpus=tuple(range(ranks)), late=ranks - 1)


def test_the_last_to_come_is_who_is_waited_for_each_time_anew() -> None:
    truth = timeline(
        (0, REDUCES, 1, 3, 4, 0),
        (1, REDUCES, 3, 3, 4, 0),
        (2, REDUCES, 2, 3, 4, 0),
        (0, REDUCES, 9, 9, 10, 1),
        (1, REDUCES, 5, 9, 10, 1),
        (2, REDUCES, 9, 9, 10, 1),
    )
    assert waits(run_of(truth, 3), (0, 20 * S)) == {(0, 1): 2.0, (2, 1): 1.0, (1, 0): 4.0}
    # What lies outside of the stretch does not count.
    assert waits(run_of(truth, 3), (6 * S, 20 * S)) == {(1, 0): 3.0}


def test_waiting_beside_computing_costs_nothing() -> None:
    truth = timeline((0, REDUCES, 1, 5, 6, 0), (0, COMPUTES, 1, 1, 4, -1), (1, REDUCES, 5, 5, 6, 0))
    assert waits(run_of(truth, 2), (0, 20 * S)) == {(0, 1): 1.0}


def test_who_never_comes_is_who_is_waited_for() -> None:
    truth = timeline((0, REDUCES, 1, -1, 20, 0), (2, REDUCES, 3, -1, 20, 0))
    assert waits(run_of(truth, 3), (0, 20 * S)) == {(0, 1): 19.0, (2, 1): 17.0}


def told(*rows: tuple[int | None, str, str, float]) -> Any:
    """A diagnosis with waits of (rank, subcause felt, cause of the root, seconds)."""
    ledger = [
        SimpleNamespace(
            subcause=felt,
            idle_s=seconds,
            root=SimpleNamespace(where="self" if rank is None else "rank", rank=rank, cause=cause),
        )
        for rank, felt, cause, seconds in rows
    ]
    return cast(Any, SimpleNamespace(ledger=ledger, gpus=[]))


def truth_of(
    waited: list[list[float]], due: list[list[float]], causes: tuple[str, ...] = ("storage",)
) -> dict[str, Any]:
    return {
        "kind": "k",
        "strength": "s",
        "role": "stall",
        "probe": True,
        "windows": [{"wall_s": 20.0}, {"wall_s": 20.0}],
        "roots": {"jobs": [[0, 1, 2]], "waits": waited, "due": due, "causes": list(causes)},
    }


def test_the_right_rank_and_cause_score_in_full() -> None:
    truth = truth_of([[0, 1, 6.0], [2, 1, 4.0]], [[1, 9.0]])
    row = score_roots(truth, told((1, "late_rank", "storage", 9.5)), probe=True)
    assert (row.waited_s, row.booked_s, row.rank_share, row.cause_share) == (10.0, 9.5, 1.0, 1.0)
    assert row.accused_s == 0.0 and row.bars == ("root_rank", "root_cause")
    assert row.against("root_rank") == (1.0, True)


def test_a_wrong_rank_or_cause_or_nobody_is_not_right() -> None:
    truth = truth_of([[0, 1, 10.0]], [[1, 10.0]])
    row = score_roots(truth, told((2, "late_rank", "storage", 8.0)), probe=True)
    assert (row.rank_share, row.cause_share, row.accused_s) == (0.0, 0.0, 8.0)
    row = score_roots(truth, told((1, "late_rank", "slow_compute", 8.0)), probe=True)
    assert (row.rank_share, row.cause_share, row.wrong_cause_share) == (1.0, 0.0, 1.0)
    row = score_roots(truth, told((1, "late_rank", "unattributed", 8.0)), probe=True)
    assert (row.rank_share, row.cause_share, row.wrong_cause_share) == (1.0, 0.0, 0.0)
    row = score_roots(truth, told((None, "late_rank", "unattributed", 8.0)), probe=True)
    assert (row.rank_share, row.accused_s) == (0.0, 0.0)


def test_more_than_was_waited_is_not_right_either() -> None:
    truth = truth_of([[0, 1, 5.0]], [[1, 5.0]])
    row = score_roots(truth, told((1, "late_rank", "storage", 10.0)), probe=True)
    assert (row.rank_share, row.cause_share, row.accused_s) == (0.5, 0.5, 5.0)


def test_waiting_that_is_nobodys_fault_may_have_any_cause() -> None:
    truth = truth_of([[0, 1, 10.0]], [[1, 8.0]])
    rows = ((1, "late_rank", "storage", 8.0), (1, "late_rank", "host_pause", 2.0))
    assert score_roots(truth, told(*rows), probe=True).cause_share == 1.0
    rows = ((1, "late_rank", "storage", 6.0), (1, "late_rank", "host_pause", 4.0))
    assert score_roots(truth, told(*rows), probe=True).cause_share == pytest.approx(0.8)


def test_where_nobody_is_late_whoever_is_named_is_accused() -> None:
    row = score_roots(
        truth_of([[0, 1, 0.1]], []), told((1, "late_rank", "storage", 1.1)), probe=True
    )
    assert row.rank_share is None and row.bars == ("accused",)
    figure, met = row.against("accused")
    assert figure == pytest.approx(1.0 / 40) and not met


def test_other_idle_time_is_no_waiting() -> None:
    truth = truth_of([[0, 1, 10.0]], [[1, 10.0]])
    row = score_roots(truth, told((1, "transfer_tcp", "collective", 8.0)), probe=True)
    assert row.booked_s == 0.0 and row.against("root_rank") == (0.0, False)


@pytest.mark.parametrize(
    ("schedule", "stage", "order"),
    [("gpipe", 0, "FFFFBBBB"), ("1f1b", 0, "FFFBFBBB"), ("1f1b", 2, "FBFBFBFB")],
)
def test_passes_follow_the_schedule(schedule: Any, stage: int, order: str) -> None:
    setup = Setup(ranks=3, batches=4, schedule=schedule, style="pipeline")
    assert "".join("F" if one else "B" for one in passes(setup, stage)) == order


def test_the_late_rank_and_the_job_beside_it_have_setups_of_their_own() -> None:
    scenario = load("two_jobs", "medium")
    first, second = scenario.setup.jobs
    assert (first.late_one, scenario.setup.gpus) == (1, 4)
    assert first.of_rank(1).data == "fuse" and first.of_rank(0).data == "cached"
    assert second.of_rank(1).data == "cached" and second.step_ms == 90
