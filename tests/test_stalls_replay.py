"""Recorded stalls, charged to their causes: the published accuracy, fixture by fixture.

What is missed is in fixtures/stalls/missed.json with its figure and must stay missed: a rule that
gets better takes its line out, none gets worse unseen. See stalls/score.py for what is measured.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from stalls.accuracy import PAGE, looked_at, page
from stalls.bars import bars, root_bars
from stalls.root_score import RootScore
from stalls.scenario import kinds, load
from stalls.score import Score, fixtures, score_fixture, score_roots_of, stretch
from whyidle.store import Recording
from whyidle_rules.recording.engine import evaluate
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

FOLDER = Path(__file__).parents[1] / "fixtures" / "stalls"
ALL = fixtures(FOLDER)
# What the main thread is at while the GPU is idle; all others wait for data.
PHASES = {"checkpoint_write": "checkpoint", "gc_pauses": "gc"}
FILE_BYTES_MAX, BYTES_MAX = 500_000, 16_000_000


@functools.cache
def rules() -> tuple[Rule, ...]:
    return load_rules((), site=FOLDER / "no-site")


@functools.cache
def scores(fixture: Path) -> tuple[Score, ...]:
    return tuple(score_fixture(fixture, rules()))


@functools.cache
def roots(fixture: Path) -> tuple[RootScore, ...]:
    return tuple(score_roots_of(fixture, rules()))


def missed() -> dict[str, float]:
    listed: dict[str, float] = json.loads((FOLDER / "missed.json").read_text(encoding="utf-8"))
    return listed


def countered() -> list[Path]:
    """The fixtures whose truth is told by a counterfactual."""
    found = []
    for fixture in ALL:
        truth = json.loads((fixture / "truth.json").read_text(encoding="utf-8"))
        scenario = load(truth["kind"], truth["strength"])
        if scenario.baseline is not None and not (scenario.by_waiting or scenario.by_spinning):
            found.append(fixture)
    return found


def cases() -> list[Any]:
    """A test for each bar of each stretch; strict about what is known to miss its bar."""
    known, made = missed(), []
    for fixture in ALL:
        truth = json.loads((fixture / "truth.json").read_text(encoding="utf-8"))
        for window in truth["windows"]:
            for probe in (True, False) if truth["probe"] else (False,):
                for bar in bars(truth, window):
                    name = f"{fixture.name}:{stretch(window)}:{'' if probe else 'no-'}probe:{bar}"
                    marks = []
                    if name in known:
                        why = f"misses its bar: {known[name]}"
                        marks = [pytest.mark.xfail(reason=why, strict=True)]
                    made.append(
                        pytest.param(fixture, stretch(window), probe, bar, id=name, marks=marks)
                    )
    return made


def root_cases() -> list[Any]:
    """A test for each bar of the waiting of a fixture's ranks; strict about what is missed."""
    known, made = missed(), []
    for fixture in ALL:
        truth = json.loads((fixture / "truth.json").read_text(encoding="utf-8"))
        if not truth.get("roots"):
            continue
        due_s = sum(seconds for _, seconds in truth["roots"]["due"])
        share = due_s / sum(window["wall_s"] for window in truth["windows"])
        for probe in (True, False) if truth["probe"] else (False,):
            for bar in root_bars(share, probe=probe):
                name = f"{fixture.name}:roots:{'' if probe else 'no-'}probe:{bar}"
                marks = []
                if name in known:
                    why = f"misses its bar: {known[name]}"
                    marks = [pytest.mark.xfail(reason=why, strict=True)]
                made.append(pytest.param(fixture, probe, bar, id=name, marks=marks))
    return made


@pytest.mark.parametrize(("fixture", "probe", "bar"), root_cases())
def test_where_waiting_arose(fixture: Path, probe: bool, bar: str) -> None:
    (row,) = [s for s in roots(fixture) if s.probe == probe]
    figure, met = row.against(bar)
    assert met, f"{bar} {figure:.4f}: {row.charged_s}"


@pytest.mark.parametrize(("fixture", "window", "probe", "bar"), cases())
def test_bar(fixture: Path, window: str, probe: bool, bar: str) -> None:
    (row,) = [s for s in scores(fixture) if s.window == window and s.probe == probe]
    figure, met = row.against(bar)
    assert met, f"{bar} {figure:.4f}: {row.charged_s}"


@pytest.mark.parametrize("fixture", ALL, ids=lambda path: path.name)
def test_what_is_missed_is_missed_by_as_much_as_is_said(fixture: Path) -> None:
    known = missed()
    rows: list[Score | RootScore] = [*scores(fixture), *roots(fixture)]
    for row in rows:
        for bar in row.bars:
            name = row.name(bar)
            if name in known:
                assert row.against(bar)[0] == pytest.approx(known[name], abs=0.005), name


@pytest.mark.parametrize("fixture", countered(), ids=lambda path: path.name)
def test_the_counterfactual_agrees_with_the_trainers_own_stopwatches(fixture: Path) -> None:
    truth = json.loads((fixture / "truth.json").read_text(encoding="utf-8"))
    setup = truth["setup"]
    late = setup.get("late_rank", -1) % setup["ranks"]
    for window in truth["windows"]:
        if setup["ranks"] == 1:
            told_s = window["host_s"][PHASES.get(truth["kind"], "data")]
        else:  # of several ranks the late one has nothing to run, and the others' GPUs poll for it
            on_host = setup.get("style") == "gloo"
            part = "nothing" if window["rank"] == late or on_host else "waiting"
            told_s = window["split_s"][part]
        if window["causes"]:
            assert window["stall_s"] == pytest.approx(told_s, rel=0.1, abs=0.1)


@pytest.mark.parametrize(
    "fixture", [path for path in ALL if path.name.startswith("inference-")], ids=lambda p: p.name
)
def test_a_single_rank_whose_kernels_fill_little_of_the_chip_does_not_spin(fixture: Path) -> None:
    with Recording([fixture / "recording"]) as recording:
        evaluate(recording.con, rules())
        row = recording.con.execute(
            "SELECT sum(spinning_s), sum(working_s), sum(d_s) FROM evidence"
        ).fetchone()
    assert row is not None
    spinning_s, working_s, wall_s = row
    assert spinning_s == 0.0
    assert working_s > 0.5 * wall_s


def test_fixtures_are_small_and_known() -> None:
    assert ALL, "no recorded stalls"
    total = 0
    for fixture in ALL:
        truth = json.loads((fixture / "truth.json").read_text(encoding="utf-8"))
        suffix = "" if truth["probe"] else "-no-probe"
        assert fixture.name == f"{truth['kind']}-{truth['strength']}{suffix}"
        size = sum(path.stat().st_size for path in fixture.rglob("*") if path.is_file())
        assert size <= FILE_BYTES_MAX
        total += size
    assert total <= BYTES_MAX


def test_every_miss_that_is_listed_exists() -> None:
    assert set(missed()) <= {case.id for case in [*cases(), *root_cases()]}


def test_kinds_that_were_tuned_on_exist() -> None:
    assert looked_at(FOLDER) <= set(kinds())


def test_the_page_of_documentation_is_that_of_these_rules() -> None:
    rows = [row for fixture in ALL for row in scores(fixture)]
    waiting = [row for fixture in ALL for row in roots(fixture)]
    assert PAGE.read_text(encoding="utf-8") == page(rows, waiting, looked_at(FOLDER)), (
        "run: cd tests && python -m stalls.accuracy ../fixtures/stalls --write"
    )
