"""Charges the idle time of an interval by the rules, from the last minutes of a recording.

Evidence is made of the interval and what rules may look back and ahead at, and only windows that
end in the interval are charged. A rule that fails, or takes too long, costs its attribution and not
the seconds: they are then charged to `unattributed`, and the failure is said.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb

from whyidle.clock import NS_PER_S
from whyidle.keeper_live import Around
from whyidle.layout import PIECE, SEGMENT, files
from whyidle.runner import describe
from whyidle.schema import Settled, SettledGpu
from whyidle.segment import span
from whyidle.settle import LOOKAHEAD_NS, LOOKBACK_NS, Evaluation
from whyidle.store import Recording
from whyidle_rules.recording.engine import evaluate
from whyidle_rules.recording.spin import COMM_FILL_LEAST, compute_fill
from whyidle_rules.rule import Rule

# Readings that are rare, such as what a GPU is called, come once a minute.
RARE_NS = 75 * NS_PER_S
MEMORY_LIMIT = "96MB"
TIME_LIMIT_S = 20.0
# Windows without GPM begin at the reading before: one that lies before the range is wanted too.
_UNATTRIBUTED = "unattributed"


class RuleEvaluator:
    """Evaluates compiled rules on one node's part of a recording; an `Evaluator` of the keeper."""

    __slots__ = ("_ahead_ns", "_back_ns", "_folder", "_limit_s", "_rules")

    def __init__(
        self, around: Around, rules: Sequence[Rule], *, limit_s: float = TIME_LIMIT_S
    ) -> None:
        self._folder = around.identity.folder(around.recording)
        self._rules = tuple(rules)
        back_s = max((rule.lookback_s for rule in self._rules), default=0.0)
        ahead_s = max((rule.lookahead_s for rule in self._rules), default=0.0)
        # Rules that were not read from files may ask for more than there is to be had.
        self._back_ns = min(int(back_s * NS_PER_S), LOOKBACK_NS)
        self._ahead_ns = min(int(ahead_s * NS_PER_S), LOOKAHEAD_NS)
        self._limit_s = limit_s

    def evaluate(self, begin_ns: int, end_ns: int) -> Evaluation:
        """Charge what ends in (begin_ns, end_ns]. Raises duckdb.Error, OSError or UserError."""
        since, until = begin_ns - self._back_ns, end_ns + self._ahead_ns
        paths = recent(self._folder, since - RARE_NS)
        if not paths:
            return Evaluation()
        with Recording(paths, memory_limit=MEMORY_LIMIT) as opened:
            con = opened.con
            failure = None
            try:
                with time_limit(con, self._limit_s):
                    filled = evaluate(con, self._rules, since, until)
            except Exception as error:  # noqa: BLE001 - whatever a rule does, time is still charged
                failure = f"the rules failed: {describe(error)}"
                with time_limit(con, self._limit_s):
                    filled = evaluate(con, (), since, until)
            fills = {gpu.uuid: compute_fill(gpu.busy, gpu.sm) for gpu in filled.gpus}
            return _charged(con, begin_ns, end_ns, fills, failure)


def recent(folder: Path, since_ns: int) -> list[Path]:
    """Return the segments and pieces of a boot that hold what came after `since_ns`."""
    found = [
        (held, path)
        for path in (*files(folder, SEGMENT), *files(folder / "spool", PIECE))
        if (held := span(path)) is not None
    ]
    found.sort(key=lambda item: item[0])
    since_ms = since_ns // 1_000_000
    # A file begins at its name's time and goes on to where the next one begins.
    ends = [begin for (begin, _), _ in found[1:]]
    last = [path for _, path in found[-1:]]
    return [path for (_, path), end in zip(found, ends, strict=False) if end > since_ms] + last


@contextmanager
def time_limit(con: duckdb.DuckDBPyConnection, limit_s: float) -> Iterator[None]:
    """Interrupt what runs in a connection after so long: DuckDB has no limit of its own."""
    timer = threading.Timer(limit_s, con.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _charged(
    con: duckdb.DuckDBPyConnection,
    begin_ns: int,
    end_ns: int,
    fills: Mapping[str, float | None],
    failure: str | None,
) -> Evaluation:
    jobs = _jobs(con, begin_ns, end_ns)
    inside = "t1_ns > $begin AND t1_ns <= $end"
    limits = {"begin": begin_ns, "end": end_ns}
    gpus = [
        SettledGpu(
            mono_ns=end_ns,
            uuid=uuid,
            gpu=gpu,
            job=jobs.get(uuid),
            windows=windows,
            working_ns=length - empty - spinning,
            empty_ns=empty,
            spinning_ns=spinning,
            underfilled_ns=underfilled,
            compute_fill_ratio=fills.get(uuid),
            comm_fill_ratio=COMM_FILL_LEAST,
        )
        for uuid, gpu, windows, length, empty, spinning, underfilled in con.execute(
            # Rounded as the rules' query rounds, so that grants and leftovers sum to these.
            "SELECT uuid, any_value(gpu), count(*), sum(t1_ns - t0_ns)::BIGINT,"
            " sum(round(empty_s * 1e9))::BIGINT, sum(round(spinning_s * 1e9))::BIGINT,"
            " sum(round(underfilled_s * 1e9))::BIGINT"
            f" FROM evidence WHERE {inside} GROUP BY uuid ORDER BY min(gpu), uuid",
            limits,
        ).fetchall()
    ]
    causes = [
        Settled(
            mono_ns=end_ns,
            uuid=uuid,
            pool=pool,
            cause=cause,
            subcause=subcause,
            grade=grade,
            gpu=gpu,
            job=jobs.get(uuid),
            idle_ns=ns,
        )
        for uuid, gpu, pool, cause, subcause, grade, ns in con.execute(
            "SELECT e.uuid, any_value(e.gpu), c.pool, c.cause, c.subcause, c.grade,"
            " sum(c.ns)::BIGINT FROM"
            " (SELECT window_id, pool, cause, subcause, grade, ns FROM grants UNION ALL"
            f"  SELECT window_id, pool, '{_UNATTRIBUTED}', subcause, NULL, ns FROM leftovers) c"
            f" JOIN evidence e USING (window_id) WHERE {inside}"
            " GROUP BY e.uuid, c.pool, c.cause, c.subcause, c.grade ORDER BY ALL",
            limits,
        ).fetchall()
    ]
    return Evaluation(
        windows=sum(gpu.windows for gpu in gpus), gpus=gpus, causes=causes, failure=failure
    )


def _jobs(con: duckdb.DuckDBPyConnection, begin_ns: int, end_ns: int) -> dict[str, str]:
    """Return the job that had each GPU last, where a process of it names one."""
    rows = con.execute(
        "SELECT g.uuid, arg_max(p.job, g.mono_ns) FROM gpu_process g JOIN"
        " (SELECT pid, start_ns, arg_max(job, mono_ns) AS job FROM process_info"
        "  WHERE job IS NOT NULL GROUP BY pid, start_ns) p USING (pid, start_ns)"
        " WHERE g.mono_ns > $begin AND g.mono_ns <= $end GROUP BY g.uuid",
        {"begin": begin_ns, "end": end_ns},
    ).fetchall()
    return {uuid: job for uuid, job in rows if job}
