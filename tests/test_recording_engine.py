"""Evidence and grants of whole recordings: what must hold whatever was recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import duckdb
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recording_rows import (
    BEGIN_NS,
    BOOT,
    HERE,
    Act,
    Machine,
    Rows,
    clocks,
    connect,
    gpu,
    holds,
    listed,
    process,
    s,
    windows,
)
from recording_stories import about, anything, eventful, loader, pages
from trace_run import check_sums
from whyidle.clock import NS_PER_S
from whyidle_rules import evidence
from whyidle_rules.recording import engine, writing
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

EMPTY = [
    column.name
    for column in evidence.OBSERVED
    if column.exclusive and column.name not in ("coll_s", "comm_s", "p2p_s")
]
RATIOS = [column.name for column in evidence.OBSERVED if column.unit == "ratio"]
SECONDS = [column.name for column in evidence.OBSERVED if column.unit == "s"]


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


def causes(con: duckdb.DuckDBPyConnection) -> dict[tuple[str, str], float]:
    """Return seconds by cause and subcause."""
    return {
        (cause, subcause): seconds
        for cause, subcause, seconds in con.execute(
            "SELECT cause, subcause, sum(ns) / 1e9 FROM grants GROUP BY ALL"
        ).fetchall()
    }


def evaluated(rows: Rows, rules: Sequence[Rule]) -> dict[tuple[str, str], float]:
    with connect(rows) as con:
        engine.evaluate(con, rules)
        check(con)
        return causes(con)


def rows_where(con: duckdb.DuckDBPyConnection, wrong: str) -> list[tuple[object, ...]]:
    return con.execute(f"SELECT * FROM evidence WHERE {wrong} LIMIT 3").fetchall()


def check(con: duckdb.DuckDBPyConnection) -> None:
    """Check what must hold in every window of every recording."""
    total = " + ".join(f"coalesce({name}, 0)" for name in EMPTY)
    assert rows_where(con, f"{total} > empty_s + 1e-9") == []
    assert rows_where(con, "abs(working_s + empty_s + spinning_s - d_s) > 1e-9") == []
    assert rows_where(con, "working_s < -1e-12 OR empty_s < 0 OR spinning_s < 0") == []
    assert rows_where(con, "t1_ns <= t0_ns OR abs((t1_ns - t0_ns) / 1e9 - d_s) > 1e-6") == []
    assert rows_where(con, "coalesce(coll_s, 0) + coalesce(p2p_s, 0) > spinning_s + 1e-9") == []
    for name in SECONDS:
        assert rows_where(con, f"{name} < -1e-12 OR isinf({name}) OR isnan({name})") == [], name
    for name in RATIOS:
        assert rows_where(con, f"NOT ({name} BETWEEN 0 AND 1 + 1e-9)") == [], name
    # Nobody gets more than there is, and all of it is given out.
    assert (
        con.execute(
            "SELECT e.window_id, c.pool, e.empty_s, e.spinning_s, sum(c.ns) FROM"
            " (SELECT window_id, pool, ns FROM grants UNION ALL"
            "  SELECT window_id, pool, ns FROM leftovers) c JOIN evidence e USING (window_id)"
            " GROUP BY ALL HAVING sum(c.ns) <> round(1e9 * CASE c.pool WHEN 'empty' THEN e.empty_s"
            " ELSE e.spinning_s END)::BIGINT"
        ).fetchall()
        == []
    )
    assert con.execute("SELECT count(*) FROM grants WHERE ns <= 0").fetchone() == (0,)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 32))
def test_what_must_hold_of_any_recording(seed: int) -> None:
    rules = load_rules()
    with connect(anything(seed)) as con:
        engine.evaluate(con, rules)
        check(con)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_diagnosis_of_any_recording_sums_up(seed: int) -> None:
    with connect(anything(seed)) as con:
        found = diagnose(con, ["x"], load_rules(), spans(con, None, None))
    check_sums(found.to_json())


def test_each_thing_that_happens_is_told_as_what_it_was(rules: Sequence[Rule]) -> None:
    """By hand: waits 2.5 s each on FUSE and on workers' CPU, and so on by the script."""
    found = evaluated(eventful(), rules)
    assert found["lifecycle", "no_job"] == pytest.approx(10, abs=0.7)
    assert found["lifecycle", "startup"] == pytest.approx(5, abs=0.1)
    assert found["storage", "checkpoint_write"] == pytest.approx(5, abs=0.1)
    # 5 s of evaluation less a second of waiting and half a second of garbage collection.
    assert found["lifecycle", "evaluation"] == pytest.approx(3.5, abs=0.1)
    assert found["host_pause", "gc"] == pytest.approx(0.5, abs=0.05)
    # Neighbours of a change are mixed for a second, states for three.
    assert found["storage", "fuse_read"] == pytest.approx(2.5 * 0.9, abs=0.9)
    by_cause: dict[str, float] = defaultdict(float)
    for (cause, _), seconds in found.items():
        by_cause[cause] += seconds
    assert by_cause["cpu_preprocessing"] == pytest.approx(2.5 + 5 * 0.9, abs=1.5)
    assert by_cause["storage"] == pytest.approx(5 + 2.25 + 1, abs=1.5)


def test_without_a_page_little_is_claimed_and_nothing_that_was_not(rules: Sequence[Rule]) -> None:
    found = evaluated(eventful(probed=False), rules)
    assert found["lifecycle", "no_job"] == pytest.approx(10, abs=0.7)
    assert found["lifecycle", "startup"] == pytest.approx(5, abs=0.2)
    # Megabytes were written from 20 to 25 s; the GPU was empty to 30 s.
    assert 2 <= found["storage", "checkpoint_write"] <= 11
    assert ("lifecycle", "evaluation") not in found
    assert ("host_pause", "gc") not in found


def test_an_empty_recording_is_no_evidence(rules: Sequence[Rule]) -> None:
    with connect([]) as con:
        assert engine.evaluate(con, rules).gpus == []
        for table in ("evidence", "grants", "leftovers"):
            assert con.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


def test_evaluating_again_replaces_what_was_there(rules: Sequence[Rule]) -> None:
    with connect(eventful()) as con:
        engine.evaluate(con, rules)
        whole = causes(con)
        engine.evaluate(con, rules, s(20), s(25))
        assert con.execute("SELECT count(*) FROM evidence").fetchone() == (40,)
        engine.evaluate(con, rules)
        assert causes(con) == whole


# Told by the whole run on purpose: the length of a stretch, the loader that was waited for most,
# and whether the driver lists everybody who computes.
OF_THE_RUN = ("window_id", "gap_s", "loaders", "loader_workers", "no_process_s")


def columns_of(con: duckdb.DuckDBPyConnection, begin: float, end: float) -> dict[str, list[object]]:
    """Return the evidence of the windows that end in (begin, end], column by column."""
    found: dict[str, list[object]] = {}
    for column in evidence.COLUMNS:
        if column.name not in OF_THE_RUN:
            rows = con.execute(
                f'SELECT "{column.name}" FROM evidence WHERE t1_ns > $1 AND t1_ns <= $2'
                " ORDER BY uuid, t1_ns",
                [s(begin), s(end)],
            ).fetchall()
            found[column.name] = [value for (value,) in rows]
    return found


def differing(
    one: dict[str, list[object]], other: dict[str, list[object]]
) -> list[tuple[str, int, object, object]]:
    """Return which values differ by more than rounding: column, row, and both of them."""
    return [
        (name, number, left, right)
        for name, values in one.items()
        for number, (left, right) in enumerate(zip(values, other[name], strict=True))
        if left != right
        and not (
            isinstance(left, float)
            and isinstance(right, float)
            and left == pytest.approx(right, abs=1e-9)
        )
    ]


EDGE_S = engine.EDGE_NS / NS_PER_S


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_range_cut_out_says_the_same_of_its_windows(seed: int) -> None:
    """Where nothing that spans the whole range is asked: see OF_THE_RUN.

    A process that wrote in bulk and is blocked ever since is waiting for that, however long ago.
    """
    rules = load_rules()
    near_s = (writing.BULK_HALF_NS + NS_PER_S) / NS_PER_S
    with connect(anything(seed, seconds=55)) as con:
        engine.evaluate(con, rules)
        whole = columns_of(con, 4 + EDGE_S, 52 - EDGE_S)
        wide = columns_of(con, 4 + near_s, 52 - near_s)
        engine.evaluate(con, rules, s(4), s(52))
        again = columns_of(con, 4 + near_s, 52 - near_s)
        assume(not differing({"writing_s": wide["writing_s"]}, again))
        assert differing(whole, columns_of(con, 4 + EDGE_S, 52 - EDGE_S)) == []


def test_a_job_that_stalls_at_the_beginning_of_a_range_is_not_starting(
    rules: Sequence[Rule],
) -> None:
    """It computed for 30 s, then its GPU is empty for 30 s, and only those are asked for."""
    rows = [
        *windows([1.0] * 240 + [0.0] * 240 + [1.0] * 8),
        gpu(),
        *clocks(-1, 62),
        *process(100, [(61.0, Act(run=0.1))], started=0.0),
        *holds(100, until=61),
        *listed(0, 61),
    ]
    with connect(rows) as con:
        engine.evaluate(con, rules, s(30), s(60))
        assert con.execute("SELECT sum(startup_s), sum(empty_s) FROM evidence").fetchone() == (
            0,
            pytest.approx(30),
        )
        machine: dict[Machine, tuple[int, int]] = {HERE: (s(30), s(60))}
        engine.evaluate(con, rules, spans=machine)
        assert con.execute("SELECT sum(startup_s) FROM evidence").fetchone() == (0,)


def test_nodes_have_clocks_of_their_own(rules: Sequence[Rule]) -> None:
    """The same minute on two nodes, of which one has been up for a day longer."""
    day = 86_400 * NS_PER_S
    one = eventful()
    with connect({("n0", BOOT): one, ("n1", BOOT): one}) as con:
        for table in con.execute("SHOW TABLES").fetchall():
            names = con.execute(
                "SELECT column_name FROM duckdb_columns() WHERE table_name = $1 AND"
                " (column_name = 'mono_ns' OR column_name IN ('t0_ns', 't1_ns', 'begin_ns',"
                " 'end_ns', 'start_ns', 'boot_ns', 'waiting_since_ns', 'phase_since_ns', 'due_ns',"
                " 'began_ns'))",
                [table[0]],
            ).fetchall()
            if names:
                shift = ", ".join(f'"{name}" = "{name}" + {day}' for (name,) in names)
                con.execute(f"UPDATE \"{table[0]}\" SET {shift} WHERE node = 'n1'")
        engine.evaluate(con, rules)
        check(con)
        per_node = con.execute(
            "SELECT cause, subcause, sum(ns) FILTER (node = 'n0'), sum(ns) FILTER (node = 'n1')"
            " FROM grants JOIN evidence USING (window_id) GROUP BY ALL"
        ).fetchall()
        assert per_node
        for cause, subcause, here, there in per_node:
            assert here == pytest.approx(there, rel=1e-6), (cause, subcause)
        asked = spans(con, None, None)
        assert asked["n1", BOOT][0] - asked["n0", BOOT][0] == day


def test_the_ledger_of_a_diagnosis_is_idle_time_to_the_nanosecond(rules: Sequence[Rule]) -> None:
    with connect(eventful()) as con:
        found = diagnose(con, ["x"], rules, spans(con, None, None))
        engine.evaluate(con, rules)
        idle = con.execute(
            "SELECT (SELECT sum(ns) FROM grants) + (SELECT sum(ns) FROM leftovers)"
        ).fetchone()
    assert idle is not None
    assert sum(round(row.idle_s * 1e9) for row in found.ledger) == idle[0]
    check_sums(found.to_json())


def test_two_trainers_on_a_gpu_one_after_the_other(rules: Sequence[Rule]) -> None:
    rows = [
        *windows([1.0] * 72 + [0.0] * 16 + [1.0] * 72),
        gpu(),
        *clocks(-1, 21),
        *process(100, [(9.0, Act(run=0.1))], started=0.0),
        *process(200, [(9.0, Act(run=0.1))], at=11, started=11.0),
        about(100, rank=3, world_size=8),
        about(200, started=11, at=11, rank=5, world_size=8),
        *holds(100, until=9),
        *holds(200, started=11, at=11, until=20),
        *listed(0, 20),
    ]
    with connect(rows) as con:
        engine.evaluate(con, rules)
        check(con)
        ranks = con.execute(
            "SELECT rank, count(*) FROM evidence GROUP BY rank ORDER BY rank NULLS LAST"
        ).fetchall()
        # 9.5 s each lived as rows tell, the second to the end; 1.5 s nobody had it.
        assert ranks == [(3, 76), (5, 72), (None, 12)]
        assert causes(con)["lifecycle", "no_job"] == pytest.approx(1.5)


def test_two_trainers_on_a_gpu_at_once(rules: Sequence[Rule]) -> None:
    """The one that publishes a page is told of, whichever began first."""
    rows = [
        *windows([0.5] * 80),
        gpu(),
        *clocks(-1, 11),
        *process(100, [(10.0, Act(run=0.1))], started=-5.0),
        *process(200, [(10.0, Act(run=0.1))], started=0.0),
        about(100, started=-5, rank=3),
        about(200, rank=5),
        *holds(100, started=-5, until=10),
        *holds(200, until=10),
    ]
    with connect(rows) as con:
        engine.evaluate(con, rules)
        assert con.execute("SELECT DISTINCT rank FROM evidence").fetchall() == [(3,)]
    rows += [*pages(200, [], [n / 2 for n in range(21)]), *loader(200, [0.0])]
    with connect(rows) as con:
        engine.evaluate(con, rules)
        assert con.execute("SELECT DISTINCT rank, probed FROM evidence").fetchall() == [(5, True)]


def test_what_is_inferred_is_graded_so(rules: Sequence[Rule]) -> None:
    """Workers that are busy all the time; half of it the GPU is empty, and the trainer sleeps."""
    rows = [
        *windows([1.0, 0.0] * 60),
        gpu(),
        *clocks(-1, 16),
        *process(100, [(15.0, Act(run=0.1))], started=0.0),
        *holds(100, until=15),
        *listed(0, 15),
        about(100),
    ]
    for pid in (101, 102):
        crunch = Act(run=0.98, state="R", read=0, asked=0)
        rows += process(pid, [(15.0, crunch)], kind="data_worker", parent=100, started=0.0)
    with connect(rows) as con:
        engine.evaluate(con, rules)
        check(con)
        found = con.execute("SELECT DISTINCT cause, grade FROM grants").fetchall()
        assert found == [("cpu_preprocessing", "inferred")]
        assert con.execute("SELECT sum(ns) / 1e9 FROM grants").fetchone() == (
            pytest.approx(7.5 * 0.9, abs=0.4),
        )


def test_times_are_exact_however_long_a_node_has_been_up(rules: Sequence[Rule]) -> None:
    """Beyond 2^53 ns, 104 days, doubles no longer hold every nanosecond."""
    late = (1 << 55) - BEGIN_NS
    with connect(eventful()) as con:
        engine.evaluate(con, rules)
        before = causes(con)
        for table, names in (
            ("gpu_activity", ("mono_ns", "t0_ns", "t1_ns")),
            ("process", ("mono_ns", "start_ns")),
            ("process_info", ("mono_ns", "start_ns")),
            ("probe", ("mono_ns", "start_ns", "waiting_since_ns", "phase_since_ns")),
            ("probe_event", ("mono_ns", "start_ns", "begin_ns", "end_ns")),
            ("probe_info", ("mono_ns", "start_ns")),
            ("probe_loader", ("mono_ns", "start_ns")),
            ("gpu_process", ("mono_ns", "start_ns")),
            ("clock", ("mono_ns", "boot_ns")),
            ("cpu", ("mono_ns",)),
            ("cgroup_cpu", ("mono_ns",)),
            ("file_use", ("mono_ns", "start_ns")),
            ("pressure", ("mono_ns",)),
            ("vmstat", ("mono_ns",)),
            ("tick", ("mono_ns",)),
        ):
            shift = ", ".join(f"{name} = {name} + {late}" for name in names)
            con.execute(f"UPDATE {table} SET {shift}")
        engine.evaluate(con, rules)
        check(con)
        after = causes(con)
    assert set(after) == set(before)
    for key, seconds in before.items():
        assert after[key] == pytest.approx(seconds, abs=1e-3), key
