"""The command `diagnose` on recordings: files, the service of this node, or exports."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import duckdb

from whyidle.config import SERVICE_FOLDER
from whyidle.errors import UserError
from whyidle.storage_sql import create_view
from whyidle.store import Recording
from whyidle_rules.diagnose_tell import get_ready, tell
from whyidle_rules.live.as_live import diagnose_settled
from whyidle_rules.recording import flight, inspector
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.engine import evaluate
from whyidle_rules.recording.spans import LAST_TEN_MINUTES, moment, spans

if TYPE_CHECKING:
    from whyidle_rules.diagnosis import Diagnosis

_T = TypeVar("_T")
_THREADS = 2
_MEMORY = "4GB"
# Rows of --sql that are held at a time: a day of a node has five million windows.
_ROWS = 10_000


def run(args: argparse.Namespace) -> int:
    """Diagnose, and print what was asked for."""
    sources = _sources(args)
    rules = get_ready(args.rules_dir)
    collectives = inspector.read(args.nccl_inspector) if args.nccl_inspector else None
    dumps = flight.read(args.flight_recorder) if args.flight_recorder else None
    since = moment(args.since) if args.since else LAST_TEN_MINUTES if args.live else None
    until = moment(args.until) if args.until else None
    with Recording(sources, threads=_THREADS, memory_limit=_MEMORY) as recording:

        def work(con: duckdb.DuckDBPyConnection) -> Diagnosis | None:
            if args.as_live:
                found = diagnose_settled(con, sources, since, until)
            elif args.sql is None:
                asked = spans(con, since, until)
                inspector.put(con, collectives)
                flight.put(con, dumps)
                found = diagnose(con, sources, rules, asked, recording.damaged)
                if dumps is not None:
                    found.not_seen.extend(flight.left_out(dumps))
                    found.flight_recorder.extend(flight.hangs(dumps))
                if collectives is not None:
                    found.not_seen.extend(inspector.left_out(collectives, args.nccl_inspector))
                return found
            else:
                found = None
                inspector.put(con, collectives)
                flight.put(con, dumps)
                evaluate(con, rules, spans=spans(con, since, until))
            if args.sql is not None:
                create_view(con)
                recording.seal()
                _print_rows(con, args.sql)
            return found

        found = _interruptible(lambda: recording.run(work), recording)
        if args.sql is not None or found is None:
            return 0
    if found.totals.gpu_s <= 0:
        lost = "; ".join(f"{item.path.name}: {item.why}" for item in recording.damaged[:3])
        damage = f" (left out: {lost})" if lost else ""
        raise UserError(f"{sources[0]}{damage}: {found.headline}")
    return tell(args, found)


def _sources(args: argparse.Namespace) -> list[str]:
    if args.live and args.source:
        raise UserError(
            "--live reads what the service on this node records; leave out the sources, or --live."
        )
    if args.live and not SERVICE_FOLDER.exists():
        raise UserError(
            f"{SERVICE_FOLDER} is not there: no service records on this node; start "
            "whyidle-agent.service, or name a recording."
        )
    return [str(SERVICE_FOLDER)] if args.live else list(args.source)


def _interruptible(work: Callable[[], _T], recording: Recording) -> _T:
    """Return `work()`, which is done beside the main thread; Ctrl-C ends it.

    DuckDB looks for signals between its tasks alone, and one task may be a join of hours.
    """
    with ThreadPoolExecutor(1) as beside:
        future = beside.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            while not future.done():  # there may be another query after the one that ends
                with suppress(duckdb.Error):
                    recording.con.interrupt()
                wait([future], timeout=0.05)
            raise


def _print_rows(con: duckdb.DuckDBPyConnection, query: str) -> None:
    """Print the rows of a query as CSV, its columns first."""
    try:
        statements = con.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise UserError("--sql takes one SELECT; write one query.")
        cursor = con.execute(statements[0])
        out = csv.writer(sys.stdout, lineterminator="\n")
        out.writerow([str(column[0]) for column in cursor.description or ()])
        while rows := cursor.fetchmany(_ROWS):
            out.writerows(rows)
    except duckdb.Error as error:
        tables = "evidence, grants, leftovers"
        line = str(error).splitlines()[0]
        raise UserError(
            f"--sql: {line}; there are tables {tables} and those of `whyidle tables`."
        ) from error
