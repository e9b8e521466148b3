"""Settling: every second once, whatever fails or ends in between."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from settle_kit import BEGIN_S, Node, Seeded, charged, expected
from whyidle.clock import NS_PER_S
from whyidle.keeper import Keeper, Retention
from whyidle.layout import PIECE, SEGMENT, Identity, files
from whyidle.ledger import Ledger
from whyidle.ledger_counts import Counts, Part
from whyidle.settle import EVERY_NS, LAG_NS, MINUTE_NS, Settler
from whyidle.store import Recording
from world.machine import IDENTITY, Machine


def query(recording: Path, sql: str) -> list[tuple[Any, ...]]:
    with Recording([recording]) as opened:
        assert opened.damaged == []
        return opened.con.execute(sql).fetchall()


def stored(recording: Path) -> dict[Part, int]:
    """Return the sums of the settled rows, by part."""
    found: dict[Part, int] = {}
    for uuid, *pools in query(
        recording,
        "SELECT uuid, sum(working_ns)::BIGINT, sum(empty_ns)::BIGINT, sum(spinning_ns)::BIGINT "
        "FROM settled_gpu GROUP BY ALL",
    ):
        for pool, ns in zip(("working", "empty", "spinning"), pools, strict=True):
            found[Part(uuid, pool, None, None)] = ns
    for *part, ns in query(
        recording,
        "SELECT uuid, pool, cause, subcause, sum(idle_ns)::BIGINT FROM settled GROUP BY ALL",
    ):
        found[Part(*part)] = ns
    return found


def test_a_second_is_settled_once_and_half_a_minute_late(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.go(301)
    asked = node.evaluator.asked
    assert all(first[1] == second[0] for first, second in pairwise(asked))
    assert all(end - begin == EVERY_NS and end % EVERY_NS == 0 for begin, end in asked)
    lag = node.clock.now_ns - asked[-1][1]
    assert LAG_NS <= lag < LAG_NS + EVERY_NS + 5 * NS_PER_S
    assert asked[0][0] <= BEGIN_S * NS_PER_S  # nothing of the first seconds is left out
    assert node.settler.counts.total == expected(asked) == stored(tmp_path)


def test_what_the_sampler_has_not_written_is_waited_for(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.go(120)
    held = node.clock.now_ns
    before = len(node.evaluator.asked)
    for _ in range(40):  # the sampler hangs
        node.clock.advance(5 * NS_PER_S)
        node.settler.look(held)
    assert len(node.evaluator.asked) - before <= 1
    assert not node.settler.look(None)
    node.go(10)
    assert node.evaluator.asked[-1][1] > node.clock.now_ns - 61 * NS_PER_S
    assert node.settler.counts.total == expected(node.evaluator.asked)


def test_a_failure_is_a_row_and_costs_its_interval_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path)
    node.go(120)
    good = list(node.evaluator.asked)
    counted = dict(node.settler.counts.total)
    node.evaluator.raises = RuntimeError("a rule\nfell over")
    node.go(90)
    bad = node.evaluator.asked[len(good) :]
    assert len(bad) == 3
    assert node.settler.counts.total == counted
    assert node.settler.settling.failing
    assert node.settler.settling.failures == 3
    assert [record.getMessage() for record in caplog.records] == [
        "idle time cannot be charged, samples are kept: RuntimeError: a rule fell over"
    ]
    node.evaluator.raises = None
    node.go(30)
    assert not node.settler.settling.failing
    after = node.evaluator.asked[len(good) + len(bad) :]
    assert node.settler.counts.total == expected(good + after) == stored(tmp_path)
    rows = query(tmp_path, "SELECT failure, count(*), count(windows) FROM settlement GROUP BY ALL")
    assert ("RuntimeError: a rule fell over", 3, 0) in rows


def test_a_full_disk_counts_nothing_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    node.go(120)
    before = node.settler.counts.copy()
    write = type(node.ledger.spool).write

    def full(self: object, rows: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(node.ledger.spool), "write", full)
    for _ in range(20):
        node.clock.advance(5 * NS_PER_S)
        try:
            node.settler.look(node.clock.now_ns)
        except OSError:
            continue
    assert node.settler.counts == before
    monkeypatch.setattr(type(node.ledger.spool), "write", write)
    node.go(60)
    asked = sorted(set(node.evaluator.asked))
    assert node.settler.counts.total == expected(asked) == stored(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_counters_go_on_after_restarts_at_any_moment(tmp_path: Path, seed: int) -> None:
    luck = random.Random(seed)
    node = Node(tmp_path)
    for _ in range(6):
        node.go(luck.uniform(5, 1500), step=luck.choice((5.0, 31.0)))
        how = luck.randrange(3)
        if how == 0:  # in good order, with the sampler still there
            node.settler.finish(None)
            node.ledger.keep(drain=True)
        elif how == 1:  # with everything settled
            node.settler.finish(node.clock.now_ns)
            node.ledger.keep()
        # else it is killed
        counts = node.settler.counts.copy()
        node.restart()
        assert node.settler.counts.total == counts.total
        assert node.settler.counts.begin_ns == counts.begin_ns
        assert node.settler.counts.settled_ns == counts.settled_ns
        node.ledger.keep()
    node.settler.finish(node.clock.now_ns)
    node.ledger.keep(drain=True)
    node.ledger.merge()
    asked = sorted(set(node.evaluator.asked))
    assert all(first[1] == second[0] for first, second in pairwise(asked))
    assert node.settler.counts.total == expected(asked) == stored(tmp_path)
    assert files(node.ledger.folder / "spool", PIECE) == []
    assert len(files(node.ledger.folder, SEGMENT)) == 1
    minutes = query(
        tmp_path,
        "SELECT uuid, pool, cause, subcause, sum(part_ns)::BIGINT FROM ledger_minute GROUP BY ALL",
    )
    parts = {Part(*part): ns for *part, ns in minutes}
    sums = {part: ns for part, ns in node.settler.counts.total.items() if ns}
    sums = {p: ns for p, ns in sums.items() if p.cause is not None or p.pool == "working"}
    assert parts == sums


def test_after_a_boot_counters_begin_at_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.go(300)
    other = Identity(node="sim0", boot_id="ffffffff-89ab-cdef-0123-456789abcdef")
    ledger = Ledger(tmp_path, other, Machine(1, clock=node.clock), pid=1)
    settler = Settler(Seeded(), ledger.spool, node.clock, resumed=ledger.resume())
    assert settler.counts == Counts()


def test_hours_are_pieces_and_the_last_one_is_enough_to_go_on_from(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.go(4 * 3600, step=10)
    node.ledger.keep()
    assert len(files(node.ledger.folder, SEGMENT)) == 4
    for old in files(node.ledger.folder, SEGMENT)[:-2]:
        old.unlink()  # as retention does
    counts = node.settler.counts
    node.restart()
    assert node.settler.counts.total == counts.total == expected(node.evaluator.asked)
    assert node.settler.counts.by_job == counts.by_job
    assert list(node.settler.counts.gpus.values()) == [0, 1]


def test_samples_may_go_and_the_ledger_stays(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.go(3 * 3600, step=30)
    node.ledger.keep()
    held = files(node.ledger.folder, SEGMENT)
    assert len(held) == 2
    samples = Keeper(
        tmp_path, IDENTITY, node.machine, pid=1, retention=Retention(size_bytes=1, age_s=0.0)
    )
    samples.cycle()
    assert files(node.ledger.folder, SEGMENT) == held
    small = Ledger(tmp_path, IDENTITY, node.machine, pid=1, retention=Retention(size_bytes=1))
    small.keep()
    assert files(node.ledger.folder, SEGMENT) == held[-1:]  # the newest stays whatever is said


def test_what_is_too_old_is_skipped_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path)
    node.go(120)
    last = node.evaluator.asked[-1][1]
    node.clock.advance(5 * 3600 * NS_PER_S)
    node.restart()
    node.go(2000)
    first = node.evaluator.asked[len(set(node.evaluator.asked)) - len(node.evaluator.asked) :]
    assert first
    gaps = [b[0] - a[1] for a, b in pairwise(node.evaluator.asked) if b[0] != a[1]]
    assert len(gaps) == 1
    assert gaps[0] == node.settler.settling.skipped_ns
    assert 3.9 * 3600 * NS_PER_S < gaps[0] < 4.1 * 3600 * NS_PER_S
    assert "are too old to be charged now" in caplog.text
    (row,) = query(tmp_path, "SELECT begin_ns, skipped_ns FROM settlement WHERE skipped_ns > 0")
    assert row == (last + gaps[0], gaps[0])
    # It has caught up, a few intervals at each look.
    assert node.clock.now_ns - node.evaluator.asked[-1][1] < 70 * NS_PER_S


def test_the_end_is_settled_when_the_sampler_has_ended(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.go(100)
    end = node.clock.now_ns + 7
    node.settler.finish(end)
    assert node.evaluator.asked[-1][1] == end
    assert all(first[1] == second[0] for first, second in pairwise(node.evaluator.asked))
    assert node.settler.counts.total == expected(node.evaluator.asked) == stored(tmp_path)


def test_minutes_have_their_wall_time(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.go(400)
    rows = query(tmp_path, "SELECT DISTINCT mono_ns, wall_ns FROM ledger_minute ORDER BY 1")
    assert len(rows) > 5
    for mono, wall in rows:
        assert mono % MINUTE_NS == 0
        assert wall == mono + node.clock.wall_offset_ns


def test_jobs_are_counted_apart_and_few_are_kept(tmp_path: Path) -> None:
    counts = Counts()
    begin = 600 * NS_PER_S
    for number in range(100):
        found = charged(begin * number, begin * number + EVERY_NS)
        counts.settle(begin * number, begin * number + EVERY_NS, found.gpus, found.causes)
    assert list(counts.by_job) == [f"job{number}" for number in range(36, 100)]
    (working,) = [ns for part, ns in counts.by_job["job99"].items() if part.pool == "working"]
    last = charged(begin * 99, begin * 99 + EVERY_NS)
    assert working == last.gpus[1].working_ns
