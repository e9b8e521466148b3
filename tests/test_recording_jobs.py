"""Jobs of several nodes: waits on the host, jobs told apart, clocks brought together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import pytest

from ranks_kit import SECONDS, rank_rows, uuid_of
from recording_rows import (
    BOOT,
    HERE,
    WALL_AHEAD_NS,
    Machine,
    Rows,
    clocks,
    connect,
    event,
    s,
)
from whyidle.clock import NS_PER_S
from whyidle.table import Row, replaced, table_of
from whyidle_rules.diagnosis import Diagnosis
from whyidle_rules.recording import engine
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.meetings import relate
from whyidle_rules.recording.runs import missing
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

THERE: Machine = ("n1", BOOT[::-1])
# One waits for three quarters of each second for the other, which waits for its data meanwhile.
EARLY = ([1.0, 1.0, *[0.0] * 6], [(0.25, 1.0)])
LATE = ([*[0.0] * 6, 1.0, 1.0], [(0.995, 1.0)])
DATA = [(0.0, 0.75)]


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


def early(rank: int = 0, **more: Any) -> list[Row]:
    return rank_rows(rank, *EARLY, **more)


def late(rank: int = 1, **more: Any) -> list[Row]:
    return rank_rows(rank, *LATE, data=DATA, **more)


def diagnosed(rows: Rows, rules: Sequence[Rule]) -> Diagnosis:
    con = connect(rows)
    return diagnose(con, ["x"], rules, spans(con, None, None))


def felt(found: Diagnosis, *subcauses: str) -> float:
    return sum(row.idle_s for row in found.ledger if row.subcause in subcauses)


def sums(con: duckdb.DuckDBPyConnection, rank: int, *columns: str) -> list[float | None]:
    picked = ", ".join(f"sum({column})" for column in columns)
    return list(
        con.execute(f"SELECT {picked} FROM evidence WHERE uuid = ?", [uuid_of(rank)]).fetchall()[0]
    )


def test_a_thread_that_waits_in_gloo_waits_for_the_late_rank(rules: Sequence[Rule]) -> None:
    found = diagnosed([*clocks(0, SECONDS), *early(), *late()], rules)
    waits = [row for row in found.ledger if row.subcause == "late_rank"]
    assert {(row.cause, row.root.where, row.root.rank) for row in waits} == {
        ("collective", "rank", 1)
    }
    # Three quarters of each second, but for what is even in each half of one.
    assert felt(found, "late_rank") == pytest.approx(0.75 * SECONDS, rel=0.1)
    assert felt(found, "late_rank") <= 0.75 * SECONDS
    assert sum(row.spinning_s for row in found.ledger) == 0
    # What it was late for is not known here, but that it waited for data is.
    assert {row.root.subcause for row in waits} == {"data_wait"}
    assert found.gpus[0].waited_for == {"1": pytest.approx(0.75 * SECONDS, rel=0.1)}


def test_what_all_threads_wait_for_at_once_is_transfer(rules: Sequence[Rule]) -> None:
    both = ([1.0] * 6 + [0.0] * 2, [(0.75, 1.0)])
    found = diagnosed([*clocks(0, SECONDS), *rank_rows(0, *both), *rank_rows(1, *both)], rules)
    assert felt(found, "late_rank", "hang", "exposed") == 0
    assert felt(found, "transfer_tcp") == pytest.approx(2 * 0.25 * SECONDS, rel=0.05)


def test_a_rank_that_does_not_tell_is_not_accused(rules: Sequence[Rule]) -> None:
    found = diagnosed([*clocks(0, SECONDS), *early(), *late(probed=False)], rules)
    assert felt(found, "late_rank", "hang") == 0
    assert felt(found, "exposed") == pytest.approx(0.75 * SECONDS, rel=0.05)


def test_ranks_that_are_missing_are_named(rules: Sequence[Rule]) -> None:
    found = diagnosed([*clocks(0, SECONDS), *early(world=4), *late(world=4)], rules)
    assert felt(found, "late_rank") == 0
    whys = [item.why for item in found.not_seen]
    assert "ranks 2-3 of 4 are not in these recordings" in whys


@pytest.mark.parametrize(
    ("world", "ranks", "said"),
    [
        (16, [0, 1, 2, 3, 4, *range(9, 16)], "ranks 5-8 of 16 are not in these recordings"),
        (3, [0, 2], "rank 1 of 3 is not in these recordings"),
        (8, [1, 4, 6], "ranks 0, 2-3, 5, 7 of 8 are not in these recordings"),
    ],
)
def test_words_for_missing_ranks(world: int, ranks: list[int], said: str) -> None:
    assert missing(world, ranks) == said


def nodes(
    here: Sequence[Row], there: Sequence[Row], *, ahead_ns: int = 0
) -> Mapping[Machine, Sequence[Row]]:
    """Return two nodes, the second one's wall clock being ahead."""
    return {
        HERE: [*clocks(0, SECONDS), *here],
        THERE: [*clocks(0, SECONDS, wall_ahead_ns=WALL_AHEAD_NS + ahead_ns), *there],
    }


@pytest.mark.parametrize(
    "labels",
    [({}, {}), ({"job": "17"}, {"job": "18"}), ({"key": 1}, {"key": 2})],
    ids=["a node each", "jobs with names", "meeting places"],
)
def test_two_jobs_of_one_size_are_two(
    labels: tuple[dict[str, Any], dict[str, Any]], rules: Sequence[Rule]
) -> None:
    """Each has a rank 0 that waits for its rank 1; on the second node it is the other way round."""
    one, other = labels
    if "key" not in one:
        one, other = {**one, "key": None}, {**other, "key": None}
    there = [*early(1, place=1, **other), *late(0, place=0, **other)]
    rows = nodes([*early(**one), *late(**one)], there)
    found = diagnosed(rows, rules)
    waited = {(gpu.node, gpu.rank): sorted(gpu.waited_for) for gpu in found.gpus}
    assert waited == {("n0", 0): ["1"], ("n0", 1): [], ("n1", 1): ["0"], ("n1", 0): []}
    assert not [item for item in found.not_seen if "several GPUs" in item.why]


def started_by(parent: int, rows: Sequence[Row], *, apart: int = 0) -> list[Row]:
    """Return ranks that one process started, their pids and GPUs `apart` from what they were."""
    made: list[Row] = []
    for row in rows:
        names = {column.name for column in table_of(type(row)).columns}
        more: dict[str, Any] = {}
        if "parent_pid" in names:
            more["parent_pid"] = parent
        for name in ("pid", "gpu", "index"):
            if name in names and getattr(row, name) is not None:
                more[name] = getattr(row, name) + apart
        if apart and "uuid" in names:
            more["uuid"] = f"{row.uuid}-{apart}"  # type: ignore[attr-defined]
        made.append(replaced(row, **more))
    return made


def test_two_jobs_without_names_on_one_node_are_told_by_who_started_them(
    rules: Sequence[Rule],
) -> None:
    one = started_by(900, [*early(key=None), *late(key=None)])
    other = started_by(901, [*early(1, key=None), *late(0, key=None)], apart=2)
    found = diagnosed({HERE: [*clocks(0, SECONDS), *one, *other]}, rules)
    waited = sorted((gpu.uuid or "", sorted(gpu.waited_for)) for gpu in found.gpus)
    assert waited == [
        ("GPU-0", ["1"]),
        ("GPU-0-2", []),
        ("GPU-1", []),
        ("GPU-1-2", ["0"]),
    ]
    # Started by one process, nobody can say whose rank 0 and 1 they are.
    other = started_by(900, [*early(1, key=None), *late(0, key=None)], apart=2)
    found = diagnosed({HERE: [*clocks(0, SECONDS), *one, *other]}, rules)
    assert not any(gpu.waited_for for gpu in found.gpus)


def test_halves_of_two_jobs_make_no_job(rules: Sequence[Rule]) -> None:
    rows = nodes(early(job="17", key=1), late(job="18", key=2))
    found = diagnosed(rows, rules)
    assert felt(found, "late_rank") == 0
    assert {item.why for item in found.not_seen if "not in these" in item.why} == {
        "rank 1 of 2 is not in these recordings",
        "rank 0 of 2 is not in these recordings",
    }


def test_ranks_that_a_restart_gave_anew_are_two_attempts(rules: Sequence[Rule]) -> None:
    """After half of the time both processes end, and others take the ranks the other way round."""
    half = SECONDS // 2
    first = [*early(seconds=half), *late(seconds=half)]
    shifted: list[Row] = []
    for rank, rows in ((0, rank_rows(0, *EARLY, seconds=half)), (1, late(seconds=half))):
        for row in rows:
            names = {column.name for column in table_of(type(row)).columns}
            moved = {
                name: getattr(row, name) + half * NS_PER_S
                for name in names & {"mono_ns", "t0_ns", "t1_ns", "begin_ns", "end_ns",
                                     "called_ns", "ended_ns", "start_ns"}
                if getattr(row, name) is not None
            }  # fmt: skip
            if (pid := getattr(row, "pid", None)) is not None:
                moved["pid"] = pid + 50
            # The GPU of the other one: who is rank 0 now was rank 1.
            if "uuid" in names:
                moved["uuid"] = uuid_of(1 - rank)
            if "gpu" in names and row.gpu is not None:  # type: ignore[attr-defined]
                moved["gpu"] = 1 - rank
            shifted.append(replaced(row, **moved))
    con = connect([*clocks(0, SECONDS), *first, *shifted])
    filled = engine.fill(con)
    assert [job.ranks for job in filled.waits.jobs] == [[0, 1], [0, 1]]
    assert [job.members for job in filled.waits.jobs] == [[0, 1], [1, 0]]
    late_ranks = con.execute(
        "SELECT uuid, late_rank, min(t0_ns), max(t1_ns) FROM evidence WHERE late_rank IS NOT NULL"
        " GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    assert [(uuid, who) for uuid, who, _, _ in late_ranks] == [("GPU-0", 1), ("GPU-1", 1)]
    assert late_ranks[0][3] <= s(half) <= late_ranks[1][2]


def test_clocks_are_brought_together_by_the_ends_of_collectives(rules: Sequence[Rule]) -> None:
    """The second node's wall clock is 3 s ahead; what it waits for says so."""
    rows = nodes(early(), late(), ahead_ns=3 * NS_PER_S + 200_000_000)
    con = connect(rows)
    found = relate(con, {HERE, THERE})
    apart = found.offset(THERE) - found.offset(HERE)
    assert found.error_ns is not None
    # The late one waits for 5 ms itself: that is how well it can be told.
    assert abs(apart) <= found.error_ns <= 5_000_000
    told = diagnosed(rows, rules)
    assert felt(told, "late_rank") == pytest.approx(0.75 * SECONDS, rel=0.1)
    assert told.quality.clock_error_ns == found.error_ns


def test_clocks_that_nothing_relates_keep_their_own_times() -> None:
    rows = nodes(early(key=1), late(key=2), ahead_ns=3 * NS_PER_S)
    found = relate(connect(rows), {HERE, THERE})
    assert found.error_ns is None
    assert found.offset(THERE) - found.offset(HERE) == 3 * NS_PER_S


def test_a_clock_that_was_never_read_goes_by_the_steps() -> None:
    def steps(rank: int, lag: float) -> list[Row]:
        return [
            _step(event(100 + rank, "step", n + lag, n + 1 + lag, sequence=n + 1), n)
            for n in range(25)
        ]

    rows = {HERE: [*clocks(0, 30), *steps(0, 0.0)], THERE: steps(1, 0.25)}
    found = relate(connect(rows), {HERE, THERE})
    assert found.related == {HERE, THERE}
    assert found.offset(THERE) == pytest.approx(WALL_AHEAD_NS - 250_000_000, abs=1000)
    assert found.error_ns is not None and found.error_ns < 1_000_000


def _step(row: Row, number: int) -> Row:
    return replaced(row, step=number)


def test_the_last_to_come_is_late_where_shares_of_time_are_even(rules: Sequence[Rule]) -> None:
    """Of three ranks two hardly wait, but one of them always comes a little before the other."""
    busy = [1.0] * 4 + [0.0] * 4
    ranks = [
        rank_rows(0, busy, [(0.5, 1.0)], world=3),
        rank_rows(1, busy, [(0.97, 1.0)], data=[(0.5, 0.97)], world=3),
        rank_rows(2, busy, [(0.98, 1.0)], data=[(0.5, 0.98)], world=3),
    ]
    con = connect([*clocks(0, SECONDS), *(row for rank in ranks for row in rank)])
    engine.fill(con)
    assert con.execute(
        "SELECT DISTINCT late_rank FROM evidence WHERE host_coll_wait_s > 0"
    ).fetchall() == [(2,)]
