"""Rules while a node records: what is charged of the last minute, against the whole recording."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from recording_kit import sample
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect import ALL
from whyidle.keeper import Keeper
from whyidle.keeper_live import Around
from whyidle.layout import PIECE, SEGMENT, files
from whyidle.settle import EVERY_NS, LOOKAHEAD_NS, Evaluation
from whyidle.store import Recording
from whyidle_rules.live import evaluator as module
from whyidle_rules.live.evaluator import RuleEvaluator, recent, time_limit
from whyidle_rules.recording.engine import evaluate
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules
from world.machine import IDENTITY, Machine

BEGIN_S, LENGTH_S = 6000, 330


@pytest.fixture(scope="module")
def rules() -> tuple[Rule, ...]:
    return load_rules((), site=Path(__file__).with_name("no-such-folder"))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five minutes and a half, the first four of them in segments."""
    folder = tmp_path_factory.mktemp("recording")
    clock = VirtualClock(BEGIN_S * NS_PER_S)
    machine = Machine(7, clock=clock)
    sample(folder, ALL, dict.fromkeys(ALL, machine).__getitem__, machine, clock, LENGTH_S)
    spool = IDENTITY.folder(folder) / "spool"
    away = files(spool, PIECE)[4:]
    for path in away:
        path.rename(path.with_suffix(".away"))
    Keeper(folder, IDENTITY, machine, pid=2).cycle(drain=True)
    for path in away:
        path.with_suffix(".away").rename(path)
    assert len(files(IDENTITY.folder(folder), SEGMENT)) == 4
    assert len(files(spool, PIECE)) == 2
    return folder


def settled(recording: Path, rules: tuple[Rule, ...]) -> list[Evaluation]:
    one = RuleEvaluator(Around(recording=recording, identity=IDENTITY, rules=()), rules)
    first = BEGIN_S * NS_PER_S
    return [
        one.evaluate(begin, begin + EVERY_NS)
        for begin in range(first, first + (LENGTH_S - 30) * NS_PER_S, EVERY_NS)
    ]


def in_hindsight(recording: Path, rules: tuple[Rule, ...]) -> tuple[dict[Any, int], int]:
    """Return what the whole recording says of the same time: ns by GPU and cause, windows."""
    end = (BEGIN_S + LENGTH_S - 30) * NS_PER_S
    with Recording([recording]) as opened:
        evaluate(opened.con, rules)
        rows = opened.con.execute(
            "SELECT uuid, pool, cause, sum(ns)::BIGINT FROM"
            " (SELECT window_id, pool, cause, ns FROM grants UNION ALL"
            "  SELECT window_id, pool, 'unattributed', ns FROM leftovers)"
            f" JOIN evidence USING (window_id) WHERE t1_ns <= {end} GROUP BY ALL"
        ).fetchall()
        count = opened.con.execute(f"SELECT count(*) FROM evidence WHERE t1_ns <= {end}").fetchone()
    assert count is not None
    return {tuple(key): ns for *key, ns in rows}, int(count[0])


def test_intervals_add_up_to_the_whole_and_name_the_same_causes(
    recording: Path, rules: tuple[Rule, ...]
) -> None:
    parts = settled(recording, rules)
    whole, windows = in_hindsight(recording, rules)
    found: dict[Any, int] = defaultdict(int)
    for part in parts:
        assert part.failure is None
        for row in part.causes:
            found[row.uuid, row.pool, row.cause] += row.idle_ns
        for gpu in part.gpus:
            for pool, ns in (("empty", gpu.empty_ns), ("spinning", gpu.spinning_ns)):
                own = [r.idle_ns for r in part.causes if r.uuid == gpu.uuid and r.pool == pool]
                assert sum(own) == ns  # what was idle is charged, all of it
    assert sum(part.windows for part in parts) == windows > 1000
    idle = sum(whole.values())
    assert sum(found.values()) == pytest.approx(idle, abs=idle * 0.001)
    # What live counters say of a cause is what hindsight says, but for the edges of what they see.
    for key in {*whole, *found}:
        assert found.get(key, 0) == pytest.approx(whole.get(key, 0), abs=idle * 0.02), key


def test_only_what_ends_in_an_interval_is_charged_to_it(
    recording: Path, rules: tuple[Rule, ...]
) -> None:
    begin = (BEGIN_S + 120) * NS_PER_S
    one = RuleEvaluator(Around(recording=recording, identity=IDENTITY, rules=()), rules)
    for end in (begin + NS_PER_S, begin + EVERY_NS):
        part = one.evaluate(begin, end)
        for gpu in part.gpus:
            seen = gpu.working_ns + gpu.empty_ns + gpu.spinning_ns
            assert seen == pytest.approx(end - begin, abs=NS_PER_S // 4)
            assert gpu.mono_ns == end
            assert gpu.compute_fill_ratio is None or 0 < gpu.compute_fill_ratio <= 1
            assert gpu.underfilled_ns is None or 0 <= gpu.underfilled_ns <= gpu.working_ns
        assert {gpu.gpu for gpu in part.gpus} == {0, 1}
        assert any(gpu.compute_fill_ratio for gpu in part.gpus)
        assert all(row.mono_ns == end and row.idle_ns > 0 for row in part.causes)


def test_jobs_are_those_of_the_processes(recording: Path, rules: tuple[Rule, ...]) -> None:
    with Recording([recording]) as opened:
        jobs = opened.con.execute(
            "SELECT DISTINCT g.uuid, p.job FROM gpu_process g JOIN process_info p "
            "USING (pid, start_ns) WHERE job IS NOT NULL"
        ).fetchall()
    begin = (BEGIN_S + 90) * NS_PER_S
    one = RuleEvaluator(Around(recording=recording, identity=IDENTITY, rules=()), rules)
    part = one.evaluate(begin, begin + EVERY_NS)
    assert {gpu.uuid: gpu.job for gpu in part.gpus if gpu.job} == dict(jobs)
    assert jobs


def test_a_rule_that_fails_costs_attribution_and_no_second(
    recording: Path, rules: tuple[Rule, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = (BEGIN_S + 60) * NS_PER_S
    one = RuleEvaluator(Around(recording=recording, identity=IDENTITY, rules=()), rules)
    good = one.evaluate(begin, begin + EVERY_NS)
    real = evaluate

    def failing(con: Any, given: tuple[Rule, ...], *more: Any) -> Any:
        if given:
            con.execute("SELECT error('division by zero in a rule')")
        return real(con, given, *more)

    monkeypatch.setattr(module, "evaluate", failing)
    bad = one.evaluate(begin, begin + EVERY_NS)
    assert bad.failure is not None and "division by zero in a rule" in bad.failure
    assert bad.gpus == good.gpus
    assert {row.cause for row in bad.causes} == {"unattributed"}
    assert sum(row.idle_ns for row in bad.causes) == sum(row.idle_ns for row in good.causes)


def test_a_rule_that_takes_too_long_is_cut_off(recording: Path) -> None:
    with Recording([recording]) as opened:
        endless = "SELECT sum(sin(a.range * b.range)) FROM range(1000000) a, range(1000000) b"
        with pytest.raises(Exception, match=r"(?i)interrupt"), time_limit(opened.con, 0.2):
            opened.con.execute(endless).fetchall()
        assert opened.con.execute("SELECT 1").fetchall() == [(1,)]  # and goes on afterwards


def test_only_the_last_files_are_opened(recording: Path) -> None:
    folder = IDENTITY.folder(recording)
    every = recent(folder, 0)
    assert len(every) == 6
    late = recent(folder, (BEGIN_S + 200) * NS_PER_S)
    assert late == every[-3:]
    assert recent(folder, (BEGIN_S + 10**6) * NS_PER_S) == every[-1:]
    assert recent(folder / "nothing", 0) == []


def test_where_nothing_was_recorded_nothing_is_charged(
    tmp_path: Path, rules: tuple[Rule, ...]
) -> None:
    one = RuleEvaluator(Around(recording=tmp_path, identity=IDENTITY, rules=()), rules)
    assert one.evaluate(0, EVERY_NS) == Evaluation()


def test_what_is_looked_ahead_at_is_written_by_then() -> None:
    assert LOOKAHEAD_NS <= 10 * NS_PER_S
