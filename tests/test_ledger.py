from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whyidle_rules.diagnosis import Grade, Root, RootCause
from whyidle_rules.ledger import Charge, Place, by_cause, ledger_rows, root_causes, split

A = Place(node="a", rank=0)
B = Place(node="b", rank=1)
GC = ("host_pause", "gc")


@settings(deadline=None)
@given(
    st.integers(0, 10**15) | st.integers(0, 10**19),
    st.dictionaries(st.integers(), st.floats(0, 1e12) | st.just(0.0), max_size=8),
)
def test_a_split_loses_and_makes_nothing(total: int, weights: dict[int, float]) -> None:
    parts = split(total, weights)
    whole = sum(weights.values())
    if total == 0 or whole == 0:
        assert parts == {}
        return
    assert sum(parts.values()) == total
    assert all(part > 0 for part in parts.values())
    for key, weight in weights.items():
        # Doubles keep 15 digits of a part.
        assert abs(parts.get(key, 0) - total * weight / whole) <= 1 + total * 1e-12


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        (10, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 4, "b": 3, "c": 3}),
        (1, {"a": 0.2, "b": 0.8}, {"b": 1}),
        (7, {"a": 0.0, "b": 3.0}, {"b": 7}),
        (5, {}, {}),
        (0, {"a": 1.0}, {}),
    ],
)
def test_the_largest_remainder_wins(
    total: int, weights: dict[str, float], parts: dict[str, int]
) -> None:
    assert split(total, weights) == parts


def charge(
    gpu: Place,
    cause: tuple[str, str],
    ns: int,
    *,
    pool: str = "empty",
    origin: Place | str | None = "self",
    root: tuple[str, str] | None = None,
    grade: Grade | None = "measured",
) -> Charge:
    return Charge(
        gpu=gpu,
        cause=cause[0],
        subcause=cause[1],
        grade=grade,
        pool="spinning" if pool == "spinning" else "empty",
        ns=ns,
        origin=gpu if isinstance(origin, str) else origin,
        root=root or cause,
    )


LATE = ("collective", "late_rank")
CHARGES = [
    charge(A, LATE, 600, pool="spinning", origin=B, root=GC),
    charge(A, LATE, 100, pool="spinning", origin=None, root=("unattributed", "no_evidence")),
    charge(A, GC, 30),
    charge(B, GC, 300),
    charge(B, GC, 20, grade="inferred"),
    charge(B, ("unattributed", "unexplained"), 50, grade=None),
]


def test_where_a_cause_arose() -> None:
    assert [one.where for one in CHARGES] == ["rank", "outside", "self", "self", "self", "self"]


def test_the_ledger_has_one_row_for_each_kind_of_charge() -> None:
    rows = ledger_rows(CHARGES, 10_000)
    told = [(row.cause, row.subcause, row.grade, row.root.where, row.idle_s) for row in rows]
    assert told == [
        ("collective", "late_rank", "measured", "rank", 600e-9),
        # What arose where it was felt is one row for all GPUs.
        ("host_pause", "gc", "measured", "self", 330e-9),
        ("collective", "late_rank", "measured", "outside", 100e-9),
        ("unattributed", "unexplained", None, "self", 50e-9),
        ("host_pause", "gc", "inferred", "self", 20e-9),
    ]
    assert rows[0].root == Root(where="rank", node="b", rank=1, cause="host_pause", subcause="gc")
    assert (rows[0].empty_s, rows[0].spinning_s, rows[0].share) == (0.0, 600e-9, 0.06)
    assert (rows[1].root.node, rows[1].root.rank) == (None, None)
    assert (rows[1].empty_s, rows[1].spinning_s) == (330e-9, 0.0)
    assert sum(row.idle_s for row in rows) == pytest.approx(1100e-9)


def test_one_row_of_both_pools() -> None:
    (row,) = ledger_rows([charge(A, GC, 5), charge(B, GC, 7, pool="spinning")], 100)
    assert (row.idle_s, row.empty_s, row.spinning_s) == (12e-9, 5e-9, 7e-9)


def test_root_causes_are_told_by_rank() -> None:
    rows = root_causes(CHARGES, 10_000)
    assert rows[0] == RootCause(
        cause="host_pause", subcause="gc", node="b", rank=1, idle_s=920e-9, share=0.092
    )
    told = [(row.cause, row.rank, row.idle_s) for row in rows[1:]]
    assert told == [
        ("unattributed", None, 100e-9),
        ("unattributed", 1, 50e-9),
        ("host_pause", 0, 30e-9),
    ]


def test_nothing_is_nothing() -> None:
    assert ledger_rows([], 0) == []
    assert root_causes([], 0) == []
    (row,) = ledger_rows([charge(A, GC, 5)], 0)
    assert row.share == 0.0


def test_causes_of_a_gpu_are_told_as_they_were_felt() -> None:
    assert by_cause(CHARGES) == {
        "collective": 700e-9,
        "host_pause": 350e-9,
        "unattributed": 50e-9,
    }
    assert next(iter(by_cause(CHARGES))) == "collective"
