"""Settles the ledger while it is recorded: every second is charged once, half a minute late.

Intervals are cut on a grid of the monotonic clock. An interval is settled when what the rules may
look ahead at has been written too: not before `LAG_NS` after its end, and not while the sampler is
behind. Its rows are in the ledger's spool before a counter shows them, so that no restart counts a
second twice. Whatever fails here costs charges and never a sample: the failure is a row as well.

The ledger is a small recording of its own, `DIR/_ledger`: it is kept longer than the samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from whyidle.clock import NS_PER_S, Clock
from whyidle.errors import UserError
from whyidle.ledger_counts import Counts, Part
from whyidle.runner import describe
from whyidle.schema import LedgerMinute, LedgerTotal, Settled, SettledGpu, Settlement
from whyidle.spool import SpoolWriter
from whyidle.table import Row

LOG = logging.getLogger("whyidle.keeper")
# No node can have this name, so that the folder is nobody's part of the recording.
FOLDER = "_ledger"
EVERY_NS = 30 * NS_PER_S
LAG_NS = 30 * NS_PER_S
# What rules may look ahead at, at most; the sampler flushes once a second.
LOOKAHEAD_NS = 10 * NS_PER_S
LOOKBACK_NS = 60 * NS_PER_S
MINUTE_NS = 60 * NS_PER_S
# A keeper that was away catches up on so much, a few intervals at each look.
BACK_NS = 3600 * NS_PER_S
INTERVALS_PER_LOOK = 4
# Pieces of the ledger; each begins with what the counters stand at.
PIECE_NS = 3600 * NS_PER_S
FAILURE_LIMIT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an interval came to; rows have `mono_ns` at its end. `failure` says what went wrong."""

    windows: int = 0
    gpus: Sequence[SettledGpu] = ()
    causes: Sequence[Settled] = ()
    failure: str | None = None


class Evaluator(Protocol):
    """Charges idle time; the rules are behind it."""

    def evaluate(self, begin_ns: int, end_ns: int) -> Evaluation:
        """Return what the GPU windows that end in (begin_ns, end_ns] come to.

        May raise anything: the interval then stays without charges.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Settling:
    """How settling goes; `failures` counts intervals that could not be charged as they should."""

    settled: int = 0
    failures: int = 0
    skipped_ns: int = 0
    windows: int = 0
    took_ns: int | None = None
    cpu_ns: int = 0
    failing: bool = False

    def copy(self) -> Settling:
        """Return a copy that later settlements leave alone."""
        return replace(self)


@dataclass(slots=True, kw_only=True)
class Minute:
    """The minute that is not over yet."""

    end_ns: int
    parts: dict[tuple[Part, str | None], int] = field(default_factory=dict)

    def add(self, gpus: Sequence[SettledGpu], causes: Sequence[Settled]) -> None:
        """Add a settled interval; empty and spinning are the sums of their causes."""
        for gpu in gpus:
            self._add(Part(gpu.uuid, "working", None, None), gpu.job, gpu.working_ns)
        for row in causes:
            self._add(Part(row.uuid, row.pool, row.cause, row.subcause), row.job, row.idle_ns)

    def rows(self, mono_ns: int, wall_ns: int, gpus: dict[str, int | None]) -> list[LedgerMinute]:
        """Return its rows."""
        return [
            LedgerMinute(
                mono_ns=mono_ns,
                uuid=part.uuid,
                pool=part.pool,
                cause=part.cause,
                subcause=part.subcause,
                job=job,
                gpu=gpus.get(part.uuid),
                wall_ns=wall_ns,
                part_ns=ns,
            )
            for (part, job), ns in self.parts.items()
            if ns > 0
        ]

    def _add(self, part: Part, job: str | None, ns: int) -> None:
        self.parts[part, job] = self.parts.get((part, job), 0) + ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What the ledger of this boot held when the keeper began."""

    totals: Sequence[LedgerTotal] = ()
    gpus: Sequence[SettledGpu] = ()
    causes: Sequence[Settled] = ()
    settlements: Sequence[Settlement] = ()
    # Up to where minutes have been written.
    minute_ns: int = 0


class Settler:
    """Settles one interval after the other; `counts` is what has been charged."""

    __slots__ = (
        "_clock",
        "_evaluator",
        "_every_ns",
        "_lag_ns",
        "_minute",
        "_piece_ns",
        "_said",
        "_spool",
        "counts",
        "settling",
    )

    def __init__(
        self,
        evaluator: Evaluator,
        spool: SpoolWriter,
        clock: Clock,
        *,
        resumed: Resumed | None = None,
        every_ns: int = EVERY_NS,
        lag_ns: int = LAG_NS,
    ) -> None:
        self._evaluator = evaluator
        self._spool = spool
        self._clock = clock
        self._every_ns = every_ns
        self._lag_ns = lag_ns
        self._minute: Minute | None = None
        self._piece_ns: int | None = None
        self._said: str | None = None
        self.counts = Counts()
        self.settling = Settling()
        if resumed is not None:
            self._resume(resumed)

    def look(self, newest_ns: int | None) -> bool:
        """Settle what is due; say whether anything was. `newest_ns`: how far samples are written.

        Raises OSError if the ledger cannot be written; nothing is counted then, and the next look
        tries again.
        """
        if newest_ns is None:
            return False
        now = self._clock.mono_ns()
        return self._until(min(now - self._lag_ns, newest_ns - min(LOOKAHEAD_NS, self._lag_ns)))

    def finish(self, newest_ns: int | None) -> None:
        """Settle the rest, when the sampler has ended and nothing is to come. Raises OSError."""
        if newest_ns is not None:
            while self._until(newest_ns):
                pass
            if self.counts.settled_ns is not None and newest_ns > self.counts.settled_ns:
                self._settle(self.counts.settled_ns, newest_ns)
        if self._minute is not None and self._minute.parts:
            now, wall = self._clock.mono_ns(), self._clock.wall_ns()
            self._spool.write({LedgerMinute: self._rows_of(self._minute, now, wall)})
            self._minute = None
        self._spool.close()

    def _until(self, limit_ns: int) -> bool:
        done = 0
        while done < INTERVALS_PER_LOOK:
            begin = self.counts.settled_ns
            if begin is None:
                begin = limit_ns // self._every_ns * self._every_ns - self._every_ns
            skipped = 0
            if limit_ns - begin > BACK_NS:
                away = (limit_ns - BACK_NS) // self._every_ns * self._every_ns
                begin, skipped = away, away - begin
            end = (begin // self._every_ns + 1) * self._every_ns
            if end > limit_ns:
                break
            self._settle(begin, end, skipped)
            done += 1
        return done > 0

    def _settle(self, begin_ns: int, end_ns: int, skipped_ns: int = 0) -> None:
        began, cpu = self._clock.mono_ns(), self._clock.thread_cpu_ns()
        try:
            evaluation = self._evaluator.evaluate(begin_ns, end_ns)
        except Exception as error:  # noqa: BLE001 - nothing that rules do may end the keeper
            said = str(error) if isinstance(error, UserError) else describe(error)
            evaluation = Evaluation(windows=-1, failure=" ".join(said.split())[:FAILURE_LIMIT])
        now, wall = self._clock.mono_ns(), self._clock.wall_ns()
        took, used = now - began, self._clock.thread_cpu_ns() - cpu
        settlement = Settlement(
            mono_ns=end_ns,
            begin_ns=begin_ns,
            settled_ns=now,
            wall_ns=wall - (now - end_ns),
            took_ns=took,
            cpu_ns=used,
            windows=evaluation.windows if evaluation.windows >= 0 else None,
            skipped_ns=skipped_ns,
            failure=evaluation.failure,
        )
        self._write(settlement, evaluation)
        self.counts.settle(begin_ns, end_ns, evaluation.gpus, evaluation.causes)
        self._account(settlement)

    def _write(self, settlement: Settlement, evaluation: Evaluation) -> None:
        block: dict[type[Row], list[Row]] = {Settlement: [settlement]}
        minute = self._minute_of(settlement, block)
        minute.add(evaluation.gpus, evaluation.causes)
        if evaluation.gpus:
            block[SettledGpu] = list(evaluation.gpus)
        if evaluation.causes:
            block[Settled] = list(evaluation.causes)
        if self._piece_ns is None or settlement.mono_ns - self._piece_ns >= PIECE_NS:
            self._spool.close()
            if totals := self.counts.rows():
                block[LedgerTotal] = list(totals)
        self._spool.write(block)
        if LedgerTotal in block or self._piece_ns is None:
            self._piece_ns = settlement.mono_ns
        self._minute = minute

    def _minute_of(self, settlement: Settlement, block: dict[type[Row], list[Row]]) -> Minute:
        """Return the minute to add to, a copy; one that is over goes into the block."""
        end = -(-settlement.mono_ns // MINUTE_NS) * MINUTE_NS
        minute = self._minute
        if minute is not None and minute.end_ns == end:
            return Minute(end_ns=end, parts=dict(minute.parts))
        if minute is not None and minute.parts:
            block[LedgerMinute] = self._rows_of(minute, settlement.mono_ns, settlement.wall_ns)
        return Minute(end_ns=end)

    def _rows_of(self, minute: Minute, mono_ns: int, wall_ns: int) -> list[Row]:
        last = self.counts.settled_ns
        assert last is not None
        return list(minute.rows(last, wall_ns - (mono_ns - last), self.counts.gpus))

    def _account(self, settlement: Settlement) -> None:
        settling = self.settling
        settling.settled += 1
        settling.skipped_ns += settlement.skipped_ns
        settling.windows += settlement.windows or 0
        settling.took_ns = settlement.took_ns
        settling.cpu_ns += settlement.cpu_ns
        settling.failing = settlement.failure is not None
        settling.failures += settling.failing
        if settlement.failure != self._said:
            if settlement.failure is not None:
                LOG.error("idle time cannot be charged, samples are kept: %s", settlement.failure)
            else:
                LOG.info("idle time is charged again")
            self._said = settlement.failure
        if settlement.skipped_ns:
            LOG.warning(
                "%.0f s are too old to be charged now; diagnose still can",
                settlement.skipped_ns / NS_PER_S,
            )

    def _resume(self, resumed: Resumed) -> None:
        self.counts.resume(resumed.totals)
        known = self.counts.settled_ns
        for settlement in sorted(resumed.settlements, key=lambda row: row.mono_ns):
            if known is not None and settlement.mono_ns <= known:
                continue
            end = settlement.mono_ns
            gpus = [row for row in resumed.gpus if row.mono_ns == end]
            causes = [row for row in resumed.causes if row.mono_ns == end]
            self.counts.settle(settlement.begin_ns, end, gpus, causes)
        last = self.counts.settled_ns
        if last is None:
            return
        end = -(-last // MINUTE_NS) * MINUTE_NS
        begin = max(end - MINUTE_NS, resumed.minute_ns)
        minute = Minute(end_ns=end)  # that was not written yet
        minute.add(
            [row for row in resumed.gpus if begin < row.mono_ns <= last],
            [row for row in resumed.causes if begin < row.mono_ns <= last],
        )
        self._minute = minute
