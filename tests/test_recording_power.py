"""Work that clocks slowed, told beside the ledger, and ranks that come late for their clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from recording_kit import make_row
from recording_rows import UUID, Rows, clocks, connect, gpu, s, windows
from test_recording_ranks import COMPUTES, POLLS, job, rank_rows, uuid_of
from whyidle.clock import NS_PER_S
from whyidle.schema import GpuState
from whyidle.table import Row
from whyidle_rules.diagnosis import Diagnosis, Finding
from whyidle_rules.recording import engine
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

MAX_MEGAHERTZ = 1980
IDLE_REASON = 0x1


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


def states(seconds: int, uuid: str = UUID, *, at: int = 0, **more: Any) -> list[Row]:
    """Return a state a second; counters that end in _ns grow by so much of each second."""
    made = []
    for second in range(at, at + seconds + 1):
        grown = {
            name: round(value * (second - at) * NS_PER_S) if name.endswith("_ns") else value
            for name, value in more.items()
        }
        made.append(make_row(GpuState, mono_ns=s(second), uuid=uuid, nvml_return=0, **grown))
    return list[Row](made)


def diagnosed(rows: Rows, rules: Sequence[Rule]) -> Diagnosis:
    con = connect(rows)
    return diagnose(con, ["x"], rules, spans(con, None, None))


def slow(found: Diagnosis) -> list[Finding]:
    return [finding for finding in found.findings if finding.cause == "slow_compute"]


def busy(seconds: int, share: float = 1.0, **more: Any) -> list[Row]:
    card = gpu(name="H100", max_sm_clock_megahertz=MAX_MEGAHERTZ)
    return [*clocks(0, seconds), card, *windows([share] * (8 * seconds), **more)]


def test_a_power_cap_is_told_beside_the_ledger_and_is_no_alarm(rules: Sequence[Rule]) -> None:
    rows = busy(100) + states(
        100, sw_power_cap_ns=0.4, hw_power_brake_ns=0.0, sw_thermal_ns=0.0, hw_thermal_ns=0.0,
        sm_clock_megahertz=1110, event_reasons=0x4,
    )  # fmt: skip
    found = diagnosed(rows, rules)
    (finding,) = slow(found)
    assert finding.rule == "power_capped"
    assert "1,110 of 1,980 MHz" in finding.says
    lost = 1 - 1110 / 1980
    assert finding.beside_s == pytest.approx(40 * lost, rel=0.02)
    assert (finding.idle_s, finding.severity) == (0.0, "info")
    assert found.totals.idle_s == 0
    assert sum(row.idle_s for row in found.ledger) == 0


def test_heat_is_told_apart_from_power(rules: Sequence[Rule]) -> None:
    rows = busy(100) + states(
        100, sw_power_cap_ns=0.9, sw_thermal_ns=0.6, hw_thermal_ns=0.1, sm_clock_megahertz=990
    )
    found = {finding.rule: finding for finding in slow(diagnosed(rows, rules))}
    assert found["overheated"].beside_s == pytest.approx(30, rel=0.02)
    # Both held for a while: what is told twice counts once.
    assert found["power_capped"].beside_s == pytest.approx(20, rel=0.02)
    assert found["overheated"].severity == "warning"


def test_without_the_drivers_totals_its_momentary_reasons_serve(rules: Sequence[Rule]) -> None:
    rows = busy(60) + states(60, sm_clock_megahertz=990, event_reasons=0x40)
    (finding,) = slow(diagnosed(rows, rules))
    assert finding.rule == "overheated"
    assert finding.beside_s == pytest.approx(30, rel=0.03)


@pytest.mark.parametrize(
    ("share", "state"),
    [
        (1.0, {"sm_clock_megahertz": 1980, "sw_power_cap_ns": 0.9}),
        (1.0, {"sm_clock_megahertz": 1200}),
        (0.3, {"sm_clock_megahertz": 1200, "sw_power_cap_ns": 0.0, "sw_thermal_ns": 0.0}),
        (0.0, {"sm_clock_megahertz": 210, "event_reasons": IDLE_REASON, "sw_power_cap_ns": 0.0}),
        # The clock of an idle moment says nothing of the work beside it.
        (0.5, {"sm_clock_megahertz": 210, "event_reasons": IDLE_REASON, "sw_power_cap_ns": 0.5}),
        (1.0, {"sm_clock_megahertz": None, "sw_power_cap_ns": 0.9}),
    ],
    ids=["full clock", "no reason known", "little to do", "idle", "idle reading", "no clock"],
)
def test_clocks_that_nothing_is_said_of(
    share: float, state: dict[str, Any], rules: Sequence[Rule]
) -> None:
    assert slow(diagnosed(busy(60, share) + states(60, **state), rules)) == []


def test_clocks_that_somebody_set_are_told(rules: Sequence[Rule]) -> None:
    rows = busy(60) + states(
        60, sm_clock_megahertz=1200, sw_power_cap_ns=0.0, hw_thermal_ns=0.0, event_reasons=0x2
    )
    (finding,) = slow(diagnosed(rows, rules))
    assert (finding.rule, finding.severity) == ("clock_held_low", "info")
    assert finding.beside_s == pytest.approx(60 * (1 - 1200 / MAX_MEGAHERTZ), rel=0.02)


def stuck(busy_watts: float, *, busy_s: int = 120, dram: float | None = None) -> list[Row]:
    """Return a GPU that is empty for 20 s at 20 W, then has a kernel on it."""
    card = gpu(name="B300", max_sm_clock_megahertz=MAX_MEGAHERTZ)
    end = 20 + busy_s
    return [
        *clocks(0, end),
        card,
        *windows([0.0] * 160),
        *windows([0.96] * (8 * busy_s), at=20, dram_active_ratio=dram),
        *states(19, power_milliwatts=20_000),
        *states(busy_s, at=20, power_milliwatts=round(busy_watts * 1000)),
    ]


def test_a_kernel_at_the_power_of_an_empty_gpu_is_told(rules: Sequence[Rule]) -> None:
    (finding,) = slow(diagnosed(stuck(21), rules))
    assert finding.rule == "stuck_kernel"
    assert finding.beside_s == pytest.approx(0.96 * 120, rel=0.02)
    assert "at 21 W" in finding.says and "draw 20 W" in finding.says


@pytest.mark.parametrize(
    "rows",
    [stuck(60), stuck(21, busy_s=30), stuck(21, dram=0.2)],
    ids=["draws power", "half a minute", "moves memory"],
)
def test_kernels_that_do_something_are_not_stuck(rows: list[Row], rules: Sequence[Rule]) -> None:
    assert slow(diagnosed(rows, rules)) == []


def test_nothing_is_stuck_where_no_empty_gpu_was_seen(rules: Sequence[Rule]) -> None:
    rows = busy(120, 0.96) + states(120, power_milliwatts=21_000)
    assert slow(diagnosed(rows, rules)) == []


WAITS = [POLLS] * 4 + [COMPUTES] * 4


def late_for(clock: int, **more: Any) -> list[Row]:
    """Return two ranks: one computes all the time and the other waits for half of it."""
    return job(
        rank_rows(0, WAITS),
        rank_rows(1, [COMPUTES] * 8),
        more=[
            *states(30, uuid_of(0), sm_clock_megahertz=1980, sw_power_cap_ns=0.0),
            *states(30, uuid_of(1), sm_clock_megahertz=clock, **more),
        ],
    )


def roots(found: Diagnosis) -> dict[str, float]:
    by_root: dict[str, float] = {}
    for row in found.ledger:
        if row.subcause == "late_rank":
            by_root[row.root.subcause] = by_root.get(row.root.subcause, 0.0) + row.idle_s
    whole = sum(by_root.values())
    return {name: seconds / whole for name, seconds in by_root.items()}


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"sw_power_cap_ns": 1.0}, "power_cap"),
        ({"sw_power_cap_ns": 0.0, "hw_thermal_ns": 1.0}, "heat"),
        ({"sw_power_cap_ns": 0.0}, "low_clock"),
    ],
    ids=["power", "heat", "neither"],
)
def test_a_rank_that_is_late_for_its_clock(
    more: dict[str, Any], name: str, rules: Sequence[Rule]
) -> None:
    found = roots(diagnosed(late_for(990, **more), rules))
    assert found[name] > 0.95
    # Halving the clock is what makes the same work take twice as long.


def test_a_rank_with_more_work_at_the_clock_of_all_has_more_work(rules: Sequence[Rule]) -> None:
    rows = job(
        rank_rows(0, WAITS),
        rank_rows(1, [COMPUTES] * 8),
        more=[
            row
            for rank in range(2)
            for row in states(30, uuid_of(rank), sm_clock_megahertz=1400, sw_power_cap_ns=1.0)
        ],
    )
    assert roots(diagnosed(rows, rules))["more_work"] > 0.95


def test_what_the_clock_cannot_explain_is_work(rules: Sequence[Rule]) -> None:
    """A tenth off the clock, and twice the time."""
    found = roots(diagnosed(late_for(1780, sw_power_cap_ns=1.0), rules))
    assert found["power_cap"] == pytest.approx(0.2, abs=0.05)
    assert found["more_work"] == pytest.approx(0.8, abs=0.05)


def test_evidence_of_power_takes_no_idle_second() -> None:
    rows = busy(30, 0.5) + states(30, sm_clock_megahertz=990, sw_thermal_ns=1.0)
    con = connect(rows)
    engine.fill(con)
    (found,) = con.execute(
        "SELECT sum(heat_slowed_s), sum(working_s), sum(empty_s) FROM evidence"
    ).fetchall()
    assert found[0] == pytest.approx(found[1], rel=0.02)
    assert found[2] == pytest.approx(15)
