"""Without a counter page: what a job that starts reads, and what one that saves writes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recording_rows import Act, clocks, connect, gpu, holds, listed, process, windows
from whyidle.table import Row
from whyidle_rules.recording import engine

PID = 100
FUSE = "request_wait_answer"
IMPORTS = Act(run=0.9, state="R", asked=20e6, write=0)
MEGABYTES = Act(run=0.05, state="S", channel=FUSE, asked=5e6, write=0)


def total(rows: Sequence[Row], *columns: str) -> list[float]:
    with connect(rows) as con:
        engine.fill(con)
        query = ", ".join(f"coalesce(sum({column}), 0)" for column in columns)
        (found,) = con.execute(f"SELECT {query} FROM evidence").fetchall()
    return [float(value) for value in found]


def starting(acts: Sequence[tuple[float, Act]]) -> list[Row]:
    """Return a job that does these things for eight seconds, then computes for two."""
    busy = [0.0] * 64 + [1.0] * 16
    computes = (2.0, Act(run=0.1, asked=0, write=0))
    return [
        *clocks(-1, 12),
        gpu(),
        *listed(-1, 11),
        *windows(busy),
        *holds(PID, at=0, until=11),
        *process(PID, [*acts, computes]),
    ]


def test_a_start_that_is_blocked_in_bulk_reads_waits_for_storage() -> None:
    found = total(starting([(4, IMPORTS), (4, MEGABYTES)]), "startup_read_s", "startup_s")
    assert found[0] == pytest.approx(4, abs=0.8)
    assert sum(found) == pytest.approx(8, abs=0.1)


@pytest.mark.parametrize(
    "act",
    [
        Act(run=0.05, state="S", channel=FUSE, asked=20e3, write=0),
        Act(run=0.05, state="S", channel="futex_do_wait", asked=5e6, write=0),
        IMPORTS,
    ],
    ids=["lists a data set", "waits for a thread", "imports from memory"],
)
def test_a_start_that_waits_for_something_else_is_a_start(act: Act) -> None:
    found = total(starting([(4, IMPORTS), (4, act)]), "startup_read_s", "startup_s")
    assert found == [pytest.approx(0, abs=0.01), pytest.approx(8, abs=0.1)]


def saving(act: Act) -> list[Row]:
    """Return a job whose GPU is half empty for a quarter of each second, and what it does then."""
    second = [1.0] * 6 + [0.5, 0.5]
    return [
        *clocks(-1, 22),
        gpu(),
        *listed(-1, 21),
        *windows(second * 20),
        *holds(PID, at=-3, until=21, started=-3.0),
        *process(PID, [(24.0, act)], at=-3.0),
    ]


WRITES = Act(run=0.1, state="D", channel="folio_wait_bit_common", asked=0, write=5e6)


def test_a_short_stop_blocked_beside_bulk_writes_is_one_for_writing() -> None:
    blocked, writing = total(saving(WRITES), "main_blocked_s", "writing_s")
    # Of 2.5 s empty; at both ends of the readings nobody knows.
    assert blocked == pytest.approx(0, abs=0.2)
    assert writing >= 1.5


@pytest.mark.parametrize(
    "act",
    [
        Act(run=0.1, state="D", channel="folio_wait_bit_common", asked=0, write=1e6),
        Act(run=0.1, state="D", channel="folio_wait_bit_common", asked=9e6, write=5e6),
        Act(run=0.1, state="S", channel="futex_do_wait", asked=0, write=5e6),
    ],
    ids=["a log", "a copy of what it reads", "writes beside a wait for a thread"],
)
def test_what_is_no_stop_for_writing(act: Act) -> None:
    assert total(saving(act), "writing_s") == [0]
