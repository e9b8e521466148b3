"""Who loads a trainer's data: workers that wait for the network, or threads of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recording_rows import Act, clocks, connect, gpu, holds, listed, process, windows
from recording_stories import POLL, SOCKET, about, loader, pages, received, thread
from whyidle.schema.process import Process
from whyidle.table import Row, replaced
from whyidle_rules.recording import engine
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

SECONDS = 30
MB = 1e6
WAITS = Act(run=0.05, ready=0.0, state="S", channel=POLL, read=0, asked=0, write=0)
LOCKED = Act(run=0.05, ready=0.0, state="S", channel="futex_do_wait", read=0, asked=0, write=0)
SLEEPS = Act(run=0.05, ready=0.0, state="S", channel="hrtimer_nanosleep", read=0, asked=0, write=0)


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


def trainer(act: Act, busy: Sequence[float]) -> list[Row]:
    """A trainer that has the GPU for all of the story."""
    return [
        *windows([*busy] * (SECONDS * 8 // len(busy))),
        gpu(),
        *clocks(-1, SECONDS + 1),
        *process(100, [(float(SECONDS), act)], started=-5.0),
        *holds(100, started=-5.0, until=SECONDS),
        *listed(0, SECONDS),
        about(100, started=-5.0, thread_kinds="autograd"),
    ]


def workers(
    act: Act, bytes_per_s: float | None = 0, *, net_namespace: str | None = ""
) -> list[Row]:
    """Two workers, of which the first is seen to receive."""
    rows = received(101, bytes_per_s, -10, SECONDS, started=-4.0)
    for pid in (101, 102):
        rows += process(pid, [(float(SECONDS), act)], kind="data_worker", parent=100, started=-4.0)
        rows.append(about(pid, started=-4.0, net_namespace=net_namespace))
    return rows


def told(waited_ratio: float) -> list[Row]:
    """A counter page whose DataLoader was waited for, in each of the windows."""
    waits = [("data_wait", at / 8, at / 8 + 0.125 * waited_ratio) for at in range(SECONDS * 8)]
    at = [second / 2 for second in range(2 * SECONDS + 1)]
    return [*pages(100, waits, at, started=-5.0), *loader(100, at[:1], started=-5.0, workers=2)]


def causes(rows: list[Row], rules: Sequence[Rule]) -> dict[str, float]:
    """Shares of the idle time by cause and subcause; what is below a twentieth is left out."""
    with connect(rows) as con:
        engine.evaluate(con, rules)
        (idle,) = con.execute("SELECT sum(empty_s) FROM evidence").fetchone() or (0,)
        found = con.execute(
            "SELECT cause || '/' || subcause, sum(ns) / 1e9 FROM grants GROUP BY ALL"
        ).fetchall()
    return {name: s / idle for name, s in found if s / idle > 0.05}


@pytest.mark.parametrize("act", [WAITS, Act(run=0.05, state="S", channel=SOCKET)], ids=str)
def test_workers_that_receive_and_poll_wait_for_the_network(
    act: Act, rules: Sequence[Rule]
) -> None:
    rows = [*trainer(WAITS, [0.5]), *workers(act, MB), *told(0.5)]
    assert causes(rows, rules) == {"storage/object_read": pytest.approx(0.9, abs=0.1)}


@pytest.mark.parametrize("namespace", ["4026531999", None])
def test_of_workers_in_a_network_of_their_own_nothing_is_known(
    namespace: str | None, rules: Sequence[Rule]
) -> None:
    rows = [*trainer(WAITS, [0.5]), *workers(WAITS, MB, net_namespace=namespace), *told(0.5)]
    assert causes(rows, rules) == {}


@pytest.mark.parametrize("bytes_per_s", [0, 100, None])
def test_workers_that_poll_and_receive_next_to_nothing_are_idle(
    bytes_per_s: float | None, rules: Sequence[Rule]
) -> None:
    rows = [*trainer(WAITS, [0.5]), *workers(WAITS, bytes_per_s), *told(0.5)]
    assert causes(rows, rules) == {}


def test_without_a_page_a_gpu_that_is_never_full_is_starved(rules: Sequence[Rule]) -> None:
    rows = [*trainer(WAITS, [0.5]), *workers(WAITS, MB)]
    assert causes(rows, rules) == {"storage/object_read": pytest.approx(0.9, abs=0.1)}


def test_without_a_page_pauses_beside_full_windows_may_be_requests_of_its_own(
    rules: Sequence[Rule],
) -> None:
    assert causes([*trainer(WAITS, [1.0, 1.0, 0.0, 0.0]), *workers(WAITS, MB)], rules) == {}


def test_without_a_page_a_thread_that_may_wait_for_data_is_not_blamed(
    rules: Sequence[Rule],
) -> None:
    assert causes([*trainer(WAITS, [1.0, 0.0]), *workers(WAITS)], rules) == {}
    assert causes([*trainer(SLEEPS, [1.0, 0.0]), *workers(WAITS)], rules) == {
        "host_pause/main_thread": pytest.approx(0.9, abs=0.1)
    }


def test_a_worker_that_waits_for_its_threads_computes_when_they_do(rules: Sequence[Rule]) -> None:
    rows = [*trainer(WAITS, [0.5]), *told(0.5)]
    # The process uses a CPU although its main thread sleeps.
    crunch = [
        replaced(row, user_ns=row.mono_ns, system_ns=0) if isinstance(row, Process) else row
        for row in workers(LOCKED)
    ]
    (name,) = causes([*rows, *crunch], rules)
    assert name.startswith("cpu_preprocessing/")
    assert causes([*rows, *workers(LOCKED)], rules) == {}


READS = Act(run=0.05, ready=0.0, state="D", channel="folio_wait_bit")
DECODES = Act(run=0.97, ready=0.0, state="R")
ASKS = Act(run=0.05, ready=0.0, state="S", channel="futex_do_wait", read=MB, asked=MB, write=0)
WRITES = Act(run=0.05, ready=0.0, state="S", channel="futex_do_wait", read=0, asked=0, write=MB)


def own(act: Act, main: Act = ASKS, busy: Sequence[float] = (0.5,)) -> list[Row]:
    """A trainer without a DataLoader, and two threads of it."""
    rows = trainer(main, busy)
    for tid in (201, 202):
        rows += thread(100, tid, [(float(SECONDS), act)], started=-5.0)
    return rows


@pytest.mark.parametrize(
    ("act", "cause"), [(READS, "storage"), (DECODES, "cpu_preprocessing")], ids=["io", "cpu"]
)
def test_threads_of_a_trainer_may_be_its_loader(
    act: Act, cause: str, rules: Sequence[Rule]
) -> None:
    (found,) = causes(own(act), rules).items()
    assert found[0].startswith(cause)
    assert found[1] == pytest.approx(0.95, abs=0.1)


@pytest.mark.parametrize(
    "rows",
    [own(LOCKED), own(READS, WRITES), own(READS, SLEEPS)],
    ids=["threads that are idle", "a process that reads nothing", "a thread that sleeps"],
)
def test_other_threads_are_not(rows: list[Row], rules: Sequence[Rule]) -> None:
    assert causes(rows, rules) == {}


@pytest.mark.parametrize(("sleeps_every", "whole"), [(12, True), (2, False)])
def test_what_few_readings_leave_unknown_of_a_busy_worker_is_like_the_rest(
    sleeps_every: int, whole: bool
) -> None:
    """A worker that is blocked in reads, but for every so many readings that find it asleep."""
    blocked = Act(run=0.02, ready=0.0, state="D", channel="folio_wait_bit_common")
    acts = [(1.0, SLEEPS if second % sleeps_every == 0 else blocked) for second in range(SECONDS)]
    rows = [*trainer(WAITS, [0.5]), *told(0.5)]
    rows += process(101, acts, kind="data_worker", parent=100, started=-4.0)
    rows.append(about(101, started=-4.0))
    with connect(rows) as con:
        engine.fill(con)
        found = con.execute(
            "SELECT avg(loader_cpu_ratio + loader_runq_ratio + loader_io_ratio) FROM evidence"
        ).fetchone()
    assert found is not None
    assert (found[0] >= 0.96) == whole
    assert (found[0] <= 0.75) == (not whole)
