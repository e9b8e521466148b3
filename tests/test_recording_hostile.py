"""Recordings with values that nobody would write: a diagnosis or a sentence, and never a crash."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import duckdb
import pytest

from recording_kit import make_row
from recording_rows import (
    BOOT,
    Act,
    clocks,
    connect,
    gpu,
    holds,
    process,
    s,
    windows,
)
from recording_stories import about, anything, eventful
from test_recording_engine import check
from trace_run import check_sums
from whyidle.clock import NS_PER_S
from whyidle.errors import UserError
from whyidle.schema import TABLES
from whyidle.schema.gpu import GpuActivity
from whyidle.table import Row, table_of
from whyidle_rules.recording import engine
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import moment, spans
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

USED = sorted({table_of(type(row)).name for row in eventful()})
TOP = (1 << 63) - 1
WHOLE = (-1, 0, 1, TOP, -TOP - 1, TOP - NS_PER_S, 1 << 62, 1 << 53, 1 << 33)
REAL = (float("nan"), float("inf"), float("-inf"), -5.0, 1e308, 1e-308)
TEXT = ("", "ü" * 300, "data_wait", "'; DROP TABLE evidence; --", "a\nb", "\x1b[31m", "%s{}")


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


def look(
    con: duckdb.DuckDBPyConnection, rules: Sequence[Rule], *, ranges: Sequence[str] = ("", "5s")
) -> None:
    """Diagnose, from its begin and from within; what comes out must be whole."""
    for since in (moment(text) if text else None for text in ranges):
        try:
            asked = spans(con, since, None)
        except UserError as error:
            assert str(error).count("\n") == 0
            continue
        found = diagnose(con, ["x"], rules, asked)
        engine.evaluate(con, rules, spans=asked)
        check(con)
        check_sums(found.to_json())


def spoil(con: duckdb.DuckDBPyConnection, table: str, dice: random.Random) -> None:
    """Put values of the right type and no sense into a column, in some rows or in all."""
    spec = next(table_of(kind) for kind in TABLES if table_of(kind).name == table)
    column = dice.choice(spec.columns)
    by_type: dict[str, Sequence[Any]] = {
        "BIGINT": WHOLE,
        "DOUBLE": REAL,
        "VARCHAR": TEXT,
        "BOOLEAN": (True, False),
    }
    value = dice.choice(by_type[column.type])
    some = dice.choice(["true", "mono_ns % 3 = 0", "rowid = 5"])
    con.execute(f'UPDATE "{table}" SET "{column.name}" = $1 WHERE {some}', [value])


@pytest.mark.parametrize("table", USED)
def test_values_without_sense(table: str, rules: Sequence[Rule]) -> None:
    dice = random.Random(table)
    for number in range(5):
        with connect(eventful(probed=dice.random() < 0.8)) as con:
            spoil(con, table, dice)
            look(con, rules, ranges=("5s",) if number % 2 else ("",))


@pytest.mark.parametrize("seed", range(8))
def test_many_values_without_sense(seed: int, rules: Sequence[Rule]) -> None:
    dice = random.Random(seed)
    with connect(anything(seed)) as con:
        for _ in range(dice.randint(1, 30)):
            spoil(con, dice.choice(USED), dice)
        look(con, rules)


def window(t0: int, t1: int, busy: float, uuid: str = "GPU-0") -> Row:
    return make_row(
        GpuActivity,
        mono_ns=t1,
        uuid=uuid,
        source="gpm",
        t0_ns=t0,
        t1_ns=t1,
        gr_active_ratio=busy,
        sm_active_ratio=busy,
    )


@pytest.mark.parametrize(
    ("t0", "t1"),
    [
        (s(2), s(1)),
        (s(1), s(1)),
        (-TOP, s(1)),
        (s(1), TOP),
        (TOP - 5, TOP),
        (-TOP - 1, -TOP),
        (0, 1),
        (TOP, -TOP),
    ],
)
def test_windows_of_no_sense(t0: int, t1: int, rules: Sequence[Rule]) -> None:
    rows = [
        *windows([0.5] * 40),
        window(t0, t1, 0.0),
        gpu(),
        *clocks(-1, 6),
        *process(100, [(5.0, Act(run=0.5))]),
        *holds(100, until=5),
    ]
    with connect(rows) as con:
        look(con, rules)
    with connect([window(t0, t1, 0.0)]) as con:
        look(con, rules)


def test_ranks_whose_clocks_are_worlds_apart_are_not_laid_on_one_grid(
    rules: Sequence[Rule],
) -> None:
    """Two ranks of a job, one of them on a node that read no clock."""

    def rank(number: int) -> list[Row]:
        return [
            *windows([0.9] * 40, sm_active_ratio=0.5, nvlink_tx_bytes=10**8),
            gpu(),
            *process(100, [(5.0, Act(run=0.5))]),
            *holds(100, until=5),
            about(100, rank=number, world_size=2, thread_kinds="nccl"),
        ]

    with connect({("n0", BOOT): [*rank(0), *clocks(-1, 6)], ("n1", BOOT): rank(1)}) as con:
        engine.evaluate(con, rules)
        check(con)
        assert con.execute("SELECT count(coll_wait_s) FROM evidence").fetchone() == (0,)


def test_a_rank_of_no_sense(rules: Sequence[Rule]) -> None:
    for rank in (1 << 31, 1 << 40, -1, TOP):
        rows = [
            *windows([0.9] * 40),
            gpu(),
            *clocks(-1, 6),
            *process(100, [(5.0, Act(run=0.5))]),
            *holds(100, until=5),
            about(100, rank=rank, world_size=rank),
        ]
        with connect(rows) as con:
            look(con, rules)


def test_names_are_told_as_they_are(rules: Sequence[Rule]) -> None:
    name = "knoten-\u00fc'; DROP TABLE evidence; --\n"
    with connect({(name, BOOT): eventful()}) as con:
        found = diagnose(con, ["x"], rules, spans(con, None, None))
        check_sums(found.to_json())
        assert found.run.nodes == [name]


def test_the_same_rows_twice_count_once(rules: Sequence[Rule]) -> None:
    """As where a segment and the piece that it was made of are both there."""
    with connect(eventful()) as con:
        engine.evaluate(con, rules)
        once = con.execute("SELECT cause, subcause, sum(ns) FROM grants GROUP BY ALL").fetchall()
        for (table,) in con.execute("SHOW TABLES").fetchall():
            if table not in ("evidence", "grants", "leftovers"):
                con.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}"')
        engine.evaluate(con, rules)
        check(con)
        twice = con.execute("SELECT cause, subcause, sum(ns) FROM grants GROUP BY ALL").fetchall()
    assert {row[:2]: row[2] / 1e9 for row in twice} == pytest.approx(
        {row[:2]: row[2] / 1e9 for row in once}, abs=0.05
    )


def test_a_gpu_without_any_window_is_none(rules: Sequence[Rule]) -> None:
    rows = [row for row in eventful() if not isinstance(row, GpuActivity)]
    with connect(rows) as con:
        found = diagnose(con, ["x"], rules, spans(con, None, None))
    assert found.totals.gpu_s == 0
    assert found.gpus == []
    assert found.run.begin_ns is None


def test_thousands_of_processes_that_live_for_a_moment(rules: Sequence[Rule]) -> None:
    rows = list(eventful())
    for number in range(1500):
        rows += process(
            5000 + number, [(0.0, Act())], at=number / 30, kind="data_worker", parent=100
        )
    with connect(rows) as con:
        engine.evaluate(con, rules)
        check(con)
