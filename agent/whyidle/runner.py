"""Runs one collector when it is due, and accounts for every run that was due.

Each run leaves exactly one `tick` row. Runs that never began are counted in the `missed` of the
next row of the collector, or of a row of their own while it hangs; those that were left out since
the source is not on this machine, in `rested`. So at any moment

    rows with began_ns + sum(missed) + sum(rested) = runs due so far.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, cast

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collector, Holding, Lane, NoData, Problem
from whyidle.host import Host, NotRecordedError
from whyidle.schema import CollectorError, Tick
from whyidle.table import Row

# Fast is 8 Hz: GPM wants windows over 100 ms; of a nominal 10 Hz 47 % are shorter, of 8 Hz none.
PERIOD_S: dict[Lane, float] = {"fast": 0.125, "normal": 1.0, "slow": 60.0}
# A source that was not there this many times in a row is looked for more rarely: a run for nothing
# costs 0.1 ms with the wake-up, 0.1 % of a core at 8 Hz. What appears is seen within this time.
RESTS_AFTER = 16
REST_S: dict[Lane, float] = {"fast": 1.0, "normal": 5.0, "slow": 60.0}
# A collector that returns more rows than this in one run has gone astray.
ROWS_LIMIT = 100_000
MESSAGE_LIMIT = 300
# A repeated failure is said again after this long; what was counted meanwhile is in `repeats`.
REPEAT_NS = 10 * NS_PER_S
NO_DATA_REPEAT_NS = 60 * NS_PER_S
ERRORS_LIMIT = 1000


@dataclass(slots=True)
class _Said:
    mono_ns: int
    repeats: int
    said_repeats: int
    said_ns: int


class ErrorBook:
    """Failures by (collector, kind, subject, message): said at once, then summed up.

    The loop asks for repeats and says that a run is late while the run itself may be adding.
    """

    __slots__ = ("_lock", "_seen")

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str, str], _Said] = {}
        self._lock = threading.Lock()

    def add(self, mono_ns: int, name: str, kind: str, subject: str, message: str) -> list[Row]:
        """Count a failure; return its row if it is new."""
        key = (name, kind, subject[:MESSAGE_LIMIT], " ".join(message.split())[:MESSAGE_LIMIT])
        with self._lock:
            said = self._seen.get(key)
            if said is not None:
                said.mono_ns = mono_ns
                said.repeats += 1
                return []
            if len(self._seen) >= ERRORS_LIMIT:  # messages that never repeat must not fill memory
                self._seen.pop(next(iter(self._seen)))
            said = self._seen[key] = _Said(mono_ns, 1, 1, mono_ns)
            return [_error_row(key, said)]

    def repeated(self, now_ns: int, *, final: bool = False) -> list[Row]:
        """Return a row for each failure that repeated since it was last said long ago."""
        rows: list[Row] = []
        with self._lock:
            for key, said in self._seen.items():
                pause = NO_DATA_REPEAT_NS if key[1] == "no_data" else REPEAT_NS
                if said.repeats > said.said_repeats and (final or now_ns - said.said_ns >= pause):
                    said.said_repeats = said.repeats
                    said.said_ns = now_ns
                    rows.append(_error_row(key, said))
        return rows


def _error_row(key: tuple[str, str, str, str], said: _Said) -> Row:
    name, kind, subject, message = key
    return CollectorError(
        mono_ns=said.mono_ns,
        collector=name,
        kind=kind,
        subject=subject,
        message=message,
        repeats=said.repeats,
    )


class Due(NamedTuple):
    """A run: when it was due, and how many before it were missed, and left out on purpose."""

    due_ns: int
    missed: int = 0
    rested: int = 0


class RunObserver(Protocol):
    """Is told when a run begins and ends, in the thread of the run; a journal is one."""

    def begin(self, collector: str, due: Due) -> None:
        """A run is about to ask its first question."""
        ...

    def end(self) -> None:
        """It has asked its last."""
        ...


class Runner:
    """One collector with its schedule: due times are absolute, begin + k * period."""

    __slots__ = (
        "_absent",
        "_collect",
        "_errors",
        "_host",
        "_observer",
        "_rest",
        "_rested",
        "collector",
        "next_due_ns",
        "period_ns",
    )

    def __init__(
        self,
        collector: Collector,
        host: Host,
        begin_ns: int,
        observer: RunObserver | None = None,
    ) -> None:
        self._observer = observer
        self.collector = collector
        period_s = PERIOD_S[collector.lane] if collector.every_s is None else collector.every_s
        self.period_ns = int(period_s * NS_PER_S)
        self.next_due_ns = begin_ns
        self._rest = int(REST_S[collector.lane] * NS_PER_S) // self.period_ns - 1
        self._rested = 0
        # How many runs in a row found that the source is not there.
        self._absent = 0
        self._host = host
        self._collect = collector.make()
        self._errors = ErrorBook()

    def hold(self, begin_ns: int) -> None:
        """Let the collector give the rows of a second together, if it can, from `begin_ns` on."""
        if isinstance(self._collect, Holding):
            self._collect.hold(begin_ns)

    def release(self) -> list[Row]:
        """Return the rows that the collector holds back; there is no run after this."""
        rows: list[Row] = []
        if isinstance(self._collect, Holding):
            with suppress(Exception):  # what cannot be asked any more has been said by its runs
                _gather(self._collect.release(self._host), rows, [])
        return rows

    @property
    def deadline_ns(self) -> int:
        """How long a run on a thread may take before it is said to be late."""
        return int(self.collector.deadline_s * NS_PER_S)

    def claim(self, now_ns: int) -> Due | None:
        """Take the latest run that is due, None if none is."""
        if now_ns < self.next_due_ns:
            return None
        missed = (now_ns - self.next_due_ns) // self.period_ns
        due = self.next_due_ns + missed * self.period_ns
        self.next_due_ns = due + self.period_ns
        rested, self._rested = self._rested, 0
        return Due(due, missed, rested)

    def rest(self) -> None:
        """Leave runs out while the source is not there; to be called after a run."""
        if self._absent >= RESTS_AFTER and self._rest > 0:
            self._rested += self._rest
            self.next_due_ns += self._rest * self.period_ns

    def run(self, due: Due) -> list[Row]:
        """Run the collector; return its rows, its tick and what it failed at."""
        if self._observer is not None:
            self._observer.begin(self.collector.name, due)
        clock = self._host.clock
        began = clock.mono_ns()
        cpu = clock.thread_cpu_ns()
        rows: list[Row] = []
        failures: list[tuple[str, str, str]] = []
        count: int | None = None
        try:
            _gather(self._collect(self._host), rows, failures)
            count = len(rows)
            self._absent = 0
        except NoData as why:
            count = len(rows)
            failures.append(("no_data", "", str(why)))
            self._absent = 0 if count else self._absent + 1
        except NotRecordedError as error:
            failures.append(("not_recorded", "", str(error)))
        except Exception as error:  # noqa: BLE001 - one collector's bug must not blind the others
            failures.append(("failed", "", describe(error)))
        cpu = clock.thread_cpu_ns() - cpu
        ended = clock.mono_ns()
        if self._observer is not None:
            self._observer.end()
        rows.append(
            Tick(
                mono_ns=ended,
                lane=self.collector.lane,
                collector=self.collector.name,
                due_ns=due.due_ns,
                began_ns=began,
                took_ns=ended - began,
                cpu_ns=cpu,
                rows=count,
                missed=due.missed,
                rested=due.rested,
            )
        )
        for kind, subject, message in failures:
            rows += self._errors.add(ended, self.collector.name, kind, subject, message)
        return rows

    def skip(self, now_ns: int) -> list[Row]:
        """Account for the runs that are due while one hangs: they are missed."""
        due = self.claim(now_ns)
        if due is None:
            return []
        return [
            Tick(
                mono_ns=now_ns,
                lane=self.collector.lane,
                collector=self.collector.name,
                due_ns=due.due_ns,
                began_ns=None,
                took_ns=None,
                cpu_ns=None,
                rows=None,
                missed=due.missed + 1,
                rested=due.rested,
            )
        ]

    def late(self, now_ns: int) -> list[Row]:
        """Say that a run is past its deadline."""
        message = (
            f"no answer within {self.collector.deadline_s:g} s; not asked again until it returns"
        )
        return self._errors.add(now_ns, self.collector.name, "late", "", message)

    def repeated(self, now_ns: int, *, final: bool = False) -> list[Row]:
        """Return rows of failures that went on."""
        return self._errors.repeated(now_ns, final=final)


def _gather(
    found: Iterable[Row | Problem], rows: list[Row], failures: list[tuple[str, str, str]]
) -> None:
    """Put what a collector returned into rows and failures, up to where it raises."""
    items: list[Row | Problem] = []
    try:
        items.extend(islice(found, ROWS_LIMIT + 1))
    finally:
        # Kinds are few and rows many: looking at each row costs 0.4 us of the 5 that it takes.
        if all(hasattr(kind, "TABLE") for kind in set(map(type, items))):
            rows += cast("list[Row]", items)
        else:
            _sort_out(items, rows, failures)
    if len(items) > ROWS_LIMIT:
        raise RuntimeError(f"returned more than {ROWS_LIMIT} rows")


def _sort_out(
    items: Iterable[Row | Problem], rows: list[Row], failures: list[tuple[str, str, str]]
) -> None:
    for item in items:
        if isinstance(item, Problem):
            failures.append((item.kind, item.subject, item.message))
        elif hasattr(item, "TABLE"):
            rows.append(item)
        else:
            raise TypeError(f"returned {type(item).__name__}, which is no row of a table")


def describe(error: BaseException) -> str:
    """Return an exception as one line for people."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
