"""The sampler: every due run is accounted for, whatever happens; nothing delays a sample."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recording_kit import everything, make_row, sample, unaccounted
from whyidle.clock import NS_PER_S, Clock, SystemClock, VirtualClock
from whyidle.collect import ALL
from whyidle.collect.collector import Collector, NoData, Problem
from whyidle.faults import ALL_FAULTS, FaultHost
from whyidle.host import Host
from whyidle.runner import REST_S, RESTS_AFTER, Due, Runner
from whyidle.sampler import Sampler
from whyidle.schema import Cpu, Vmstat
from whyidle.spool import Rows, SpoolWriter
from whyidle.store import Recording
from whyidle.table import Row
from world.machine import IDENTITY, Machine


def vmstat_row(mono_ns: int, major_faults: int | None = 1) -> Vmstat:
    return make_row(Vmstat, mono_ns=mono_ns, major_faults=major_faults)


def test_importing_the_sampler_imports_no_duckdb_and_no_numpy() -> None:
    code = (
        "import sys, whyidle.sampler_process\n"
        "modules = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted({'duckdb', 'numpy', 'pandas'} & modules))"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "[]"


def test_a_minute_of_every_collector_on_a_simulated_node(tmp_path: Path) -> None:
    machine, clock = _machine(1)
    sample(tmp_path, ALL, lambda collector: machine, machine, clock, 61)
    with Recording([tmp_path]) as recording:
        assert unaccounted(recording, ALL) == {}
        ticks = dict(
            recording.con.execute("SELECT collector, sum(missed) FROM tick GROUP BY ALL").fetchall()
        )
        assert ticks == {collector.name: 0 for collector in ALL}
        # The simulated node has not every kind of device.
        failed = "SELECT * FROM collector_error WHERE kind <> 'no_data'"
        assert recording.con.execute(failed).fetchall() == []
        windows = recording.con.execute(
            "SELECT count(*), min(t1_ns - t0_ns) FROM gpu_activity"
        ).fetchone()
        # 8 Hz for two GPUs, but for the first sample that has no window before it.
        assert windows is not None
        assert windows[0] == pytest.approx(2 * 8 * 61, abs=4)
        assert windows[1] > 100_000_000
        workers = recording.con.execute(
            "SELECT count(DISTINCT (pid, start_ns)) FROM process WHERE kind = 'data_worker'"
        ).fetchone()
        assert workers == (2 * 3 * 2,)  # two epochs of three workers of two trainers


@pytest.mark.parametrize("seed", range(6))
def test_no_fault_stops_the_loop_or_loses_a_due_run(tmp_path: Path, seed: int) -> None:
    machine, clock = _machine(seed)
    faulty = FaultHost(machine, ALL_FAULTS, seed, hang=clock.advance, step=clock.step_wall)
    sample(tmp_path, ALL, lambda collector: faulty, machine, clock, 120)
    assert len(faulty.injected) >= 12, faulty.injected
    with Recording([tmp_path]) as recording:
        assert recording.damaged == []
        assert unaccounted(recording, ALL) == {}
        said = recording.con.execute("SELECT DISTINCT kind FROM collector_error").fetchall()
        assert {"failed", "late"} <= {kind for (kind,) in said}
        # Whatever was read wrongly, no row was refused: parsers raise instead of making things up.
        assert ("refused",) not in said


def test_a_fault_in_one_collector_changes_no_row_of_another(tmp_path: Path) -> None:
    def run(folder: Path, collectors: tuple[Collector, ...]) -> dict[str, list[tuple[object, ...]]]:
        clock = VirtualClock(NS_PER_S)
        machine = Machine(3, clock=clock)
        sample(folder, collectors, lambda collector: machine, machine, clock, 10)
        return everything(folder, without=("tick", "collector_error", "agent_self"))

    def bad(host: Host) -> Iterator[Row]:
        yield vmstat_row(host.clock.mono_ns())
        raise RuntimeError("a bug")

    good = Collector(name="good", lane="normal", make=lambda: _steady)
    broken = Collector(name="broken", lane="normal", make=lambda: bad)
    alone = run(tmp_path / "alone", (good,))
    beside = run(tmp_path / "beside", (good, broken))
    assert len(alone["cpu"]) == len(beside["cpu"]) == 10
    assert alone["cpu"] == beside["cpu"]
    assert len(beside["vmstat"]) == 10  # what it yielded before it failed is true and kept


def _steady(host: Host) -> Iterator[Row]:
    now = host.clock.mono_ns() // NS_PER_S
    yield make_row(Cpu, mono_ns=now * NS_PER_S, user_ns=now)


def test_errors_are_said_at_once_and_then_summed_up(tmp_path: Path) -> None:
    found = 0

    def failing(host: Host) -> Iterator[Row | Problem]:
        nonlocal found
        found += 1
        yield Problem(subject="mlx5_3", message="no answer")
        raise NoData("there is\nnothing here")

    machine, clock = _machine(0)
    collector = Collector(name="failing", lane="fast", make=lambda: failing)
    sample(tmp_path, (collector,), lambda collector: machine, machine, clock, 31)
    with Recording([tmp_path]) as recording:
        said = recording.con.execute(
            "SELECT kind, subject, message, list(repeats ORDER BY mono_ns) FROM collector_error "
            "GROUP BY ALL ORDER BY kind"
        ).fetchall()
        runs = recording.con.execute("SELECT count(*), sum(rows) FROM tick").fetchone()
    assert runs == (found, 0)
    assert [row[:3] for row in said] == [
        ("failed", "mlx5_3", "no answer"),
        ("no_data", "", "there is nothing here"),
    ]
    failed, no_data = said[0][3], said[1][3]
    assert failed[0] == no_data[0] == 1
    assert failed[-1] == no_data[-1] == found
    # The first, one each ten to fifteen seconds, and what is left at the end.
    assert 4 <= len(failed) <= 5
    assert len(no_data) == 2


def test_a_row_that_does_not_fit_is_refused_alone(tmp_path: Path) -> None:
    def odd(host: Host) -> Iterator[Row]:
        yield vmstat_row(host.clock.mono_ns(), 2**63)
        yield vmstat_row(host.clock.mono_ns(), 7)

    machine, clock = _machine(0)
    collector = Collector(name="odd", lane="normal", make=lambda: odd)
    sample(tmp_path, (collector,), lambda collector: machine, machine, clock, 5)
    with Recording([tmp_path]) as recording:
        assert recording.con.execute("SELECT DISTINCT major_faults FROM vmstat").fetchall() == [
            (7,)
        ]
        refused = recording.con.execute(
            "SELECT DISTINCT subject, message FROM collector_error WHERE kind = 'refused'"
        ).fetchall()
        lost = recording.con.execute("SELECT max(rows_lost) FROM agent_self").fetchone()
    assert refused == [
        (
            "vmstat.major_faults",
            "vmstat.major_faults is BIGINT and cannot hold 9223372036854775808",
        )
    ]
    assert lost is not None
    assert lost[0] >= 3


def test_a_late_loop_counts_what_it_missed() -> None:
    machine, clock = _machine(0)
    collector = Collector(name="slow", lane="fast", make=lambda: _steady)
    runner = Runner(collector, machine, clock.mono_ns())
    begin = clock.mono_ns()
    assert runner.claim(begin) == Due(begin)
    assert runner.claim(begin + 124_999_999) is None
    assert runner.claim(begin + 125_000_000 * 4 + 1) == Due(begin + 125_000_000 * 4, missed=3)


def test_what_is_not_there_is_looked_for_more_rarely_and_found_within_a_second(
    tmp_path: Path,
) -> None:
    machine, clock = _machine(0)
    begin = clock.mono_ns()
    absent = [(0.0, 10.3), (12.0, 12.9), (20.0, 31.0)]
    looked: list[float] = []

    def sometimes(host: Host) -> Iterator[Row]:
        at = (host.clock.mono_ns() - begin) / NS_PER_S
        looked.append(at)
        if any(first <= at < last for first, last in absent):
            raise NoData("there is nothing here")
        yield vmstat_row(host.clock.mono_ns())

    collector = Collector(name="sometimes", lane="fast", make=lambda: sometimes)
    sample(tmp_path, (collector,), lambda collector: machine, machine, clock, 30)
    with Recording([tmp_path]) as recording:
        assert unaccounted(recording, (collector,)) == {}
        ticks = recording.con.execute(
            "SELECT count(began_ns), sum(missed), sum(rested) FROM tick"
        ).fetchone()
        first = recording.con.execute("SELECT min(mono_ns) FROM vmstat").fetchone()
    assert ticks is not None
    assert first is not None
    assert ticks[0] == len(looked)
    assert ticks[1] == 0
    assert ticks[2] == 7 * (9 + 8)  # runs at 1 Hz, seven left out before each
    assert 0 <= (first[0] - begin) / NS_PER_S - 10.3 <= REST_S["fast"]
    assert sum(1 for at in looked if 2 <= at < 10) == 8
    assert sum(1 for at in looked if 10.9 < at < 20) >= 72  # a short absence changes nothing
    assert RESTS_AFTER == 16


class _Hanging:
    """A collector that hangs in its third run until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = threading.Event()
        self.runs = 0

    def __call__(self, host: Host) -> Iterator[Row]:
        self.runs += 1
        if self.runs == 3:
            self.entered.set()
            self.go.wait(20)
        yield vmstat_row(host.clock.mono_ns(), self.runs)


def test_a_source_that_hangs_is_told_counted_and_delays_nobody(tmp_path: Path) -> None:
    hanging = _Hanging()
    stuck = Collector(
        name="stuck", lane="fast", make=lambda: hanging, thread="stuck", deadline_s=0.5
    )
    steady = Collector(name="steady", lane="fast", make=lambda: _steady)
    clock = SystemClock()
    host = Machine(0)
    real = _RealTime(host, clock)
    spool = SpoolWriter(IDENTITY.folder(tmp_path) / "spool", IDENTITY, clock)
    sampler = Sampler((stuck, steady), lambda collector: real, real, spool, pid=1)
    end = time.monotonic() + 4.2

    def stopping() -> bool:
        if time.monotonic() > end - 1.2:
            hanging.go.set()
        return time.monotonic() > end

    assert sampler.run(stopping) == []
    with Recording([tmp_path]) as recording:
        assert unaccounted(recording, (stuck, steady)) == {}
        late = recording.con.execute(
            "SELECT collector, message FROM collector_error WHERE kind = 'late'"
        ).fetchall()
        assert late == [("stuck", "no answer within 0.5 s; not asked again until it returns")]
        missed = dict(
            recording.con.execute("SELECT collector, sum(missed) FROM tick GROUP BY ALL").fetchall()
        )
        told_meanwhile = recording.con.execute(
            "SELECT count(*) FROM tick WHERE began_ns IS NULL"
        ).fetchone()
        longest = recording.con.execute(
            "SELECT max(took_ns) FROM tick WHERE collector = 'stuck'"
        ).fetchone()
    assert hanging.entered.is_set()
    assert missed["stuck"] >= 15
    assert missed["steady"] <= 8  # another process may have had the CPU
    assert told_meanwhile is not None
    assert told_meanwhile[0] >= 2  # not only once it returned
    assert longest is not None
    assert longest[0] > 2_000_000_000


def test_a_source_that_never_returns_does_not_hold_up_the_end(tmp_path: Path) -> None:
    forever = threading.Event()

    def stuck(host: Host) -> Iterator[Row]:
        forever.wait(30)
        yield vmstat_row(host.clock.mono_ns())

    collector = Collector(
        name="stuck", lane="fast", make=lambda: stuck, thread="stuck", deadline_s=0.2
    )
    clock = SystemClock()
    real = _RealTime(Machine(0), clock)
    spool = SpoolWriter(IDENTITY.folder(tmp_path) / "spool", IDENTITY, clock)
    sampler = Sampler((collector,), lambda collector: real, real, spool, pid=1)
    begin = time.monotonic()
    assert sampler.run(lambda: time.monotonic() > begin + 1.5) == ["stuck"]
    assert time.monotonic() - begin < 6
    forever.set()
    with Recording([tmp_path]) as recording:
        kinds = recording.con.execute("SELECT kind FROM collector_error").fetchall()
        assert kinds == [("late",)]


class _FullDisk(SpoolWriter):
    """A spool whose disk is full for a while."""

    full = False

    def write(self, rows: Rows) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(rows)


def test_a_full_disk_loses_what_it_must_and_says_how_much(tmp_path: Path) -> None:
    machine, clock = _machine(0)
    spool = _FullDisk(IDENTITY.folder(tmp_path) / "spool", IDENTITY, clock)
    collector = Collector(name="steady", lane="normal", make=lambda: _steady)
    sampler = Sampler((collector,), lambda c: machine, machine, spool, pid=1, inline=True)
    begin = clock.mono_ns()

    def stopping() -> bool:
        spool.full = 5 * NS_PER_S < clock.mono_ns() - begin < 15 * NS_PER_S
        return clock.mono_ns() - begin > 30 * NS_PER_S

    sampler.run(stopping)
    with Recording([tmp_path]) as recording:
        found = recording.con.execute(
            "SELECT (SELECT count(*) FROM cpu), (SELECT max(rows_lost) FROM agent_self), "
            "(SELECT any_value(message) FROM collector_error WHERE subject = 'spool')"
        ).fetchone()
    assert found is not None
    assert 19 <= found[0] <= 22
    assert found[1] >= 2 * (30 - found[0]) - 2  # the rows and their ticks
    assert found[2] == "No space left on device"


class _RealTime(Machine):
    """The simulated machine with the clock of this one."""

    def __init__(self, machine: Machine, clock: SystemClock) -> None:
        super().__init__(0)
        self._real = clock

    @property
    def clock(self) -> Clock:
        return self._real


def _machine(seed: int) -> tuple[Machine, VirtualClock]:
    clock = VirtualClock(1000 * NS_PER_S)
    return Machine(seed, clock=clock), clock
