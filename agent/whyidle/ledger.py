"""Where the settled ledger lies: a small recording inside the recording, kept longer than it.

    DIR/_ledger/NODE/BOOT8/spool/UTC-MONO.wsp    an hour of settled rows; the newest is written
    DIR/_ledger/NODE/BOOT8/UTC-MONO.duckdb       finished hours, merged by the day

It can be copied and read by itself: fleet questions need nothing else.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

import duckdb

from whyidle.host import Host
from whyidle.keeper import Keeper, Retention
from whyidle.layout import PIECE, SEGMENT, Identity, files
from whyidle.schema import LedgerTotal, Settled, SettledGpu, Settlement
from whyidle.segment import first_line
from whyidle.settle import FOLDER, Resumed
from whyidle.spool import SpoolWriter
from whyidle.store import Recording
from whyidle.table import Row, identifier, table_of

LOG = logging.getLogger("whyidle.keeper")
DAY_MS = 86_400_000
# The settler begins pieces itself, each with what the counters stand at.
NEVER_S = 1e9
SPOOL_LIMIT_BYTES = 64 << 20
# Every piece begins with what the counters stand at: the last ones are enough to go on from.
SEGMENTS_BACK = 2
READ_MEMORY = "64MB"

_R = TypeVar("_R", bound=Row)


class Ledger:
    """The ledger of a node's boot."""

    __slots__ = ("_folder", "_keeper", "spool")

    def __init__(
        self,
        recording: Path,
        identity: Identity,
        host: Host,
        *,
        pid: int,
        retention: Retention | None = None,
    ) -> None:
        self._folder = identity.folder(recording / FOLDER)
        self._keeper = Keeper(
            recording / FOLDER,
            identity,
            host,
            pid=pid,
            retention=retention,
            merge_ms=DAY_MS,
            tells_of_itself=False,
        )
        self.spool = SpoolWriter(
            self._folder / "spool",
            identity,
            host.clock,
            rotate_s=NEVER_S,
            limit_bytes=SPOOL_LIMIT_BYTES,
        )

    @property
    def folder(self) -> Path:
        """Where this boot's part of it lies."""
        return self._folder

    def resume(self) -> Resumed:
        """Return what this boot has been charged already; what cannot be read is told and lost."""
        paths = [
            *files(self._folder, SEGMENT)[-SEGMENTS_BACK:],
            *files(self._folder / "spool", PIECE),
        ]
        if not paths:
            return Resumed()
        try:
            with Recording(paths, memory_limit=READ_MEMORY) as opened:
                resumed = opened.run(_resumed)
                for damaged in opened.damaged:
                    LOG.warning("the counters go on without %s: %s", damaged.path, damaged.why)
                return resumed
        except (OSError, duckdb.Error) as error:
            LOG.error("the counters begin at 0: %s: %s", self._folder, first_line(error))
            return Resumed()

    def keep(self, *, drain: bool = False) -> None:
        """Make segments of finished pieces, merge days, keep retention. As Keeper.cycle."""
        self._keeper.cycle(drain=drain)

    def merge(self) -> None:
        """Merge all segments into one."""
        self._keeper.merge(everything=True)


def _resumed(con: duckdb.DuckDBPyConnection) -> Resumed:
    total = "mono_ns = (SELECT max(mono_ns) FROM ledger_total)"
    # What is settled after the totals counts, and the minute that the restart cut in two.
    after = (
        "mono_ns > coalesce((SELECT max(mono_ns) FROM ledger_total), 0) "
        "OR mono_ns > (SELECT max(mono_ns) FROM settlement) - 60000000000"
    )
    minute = con.execute("SELECT coalesce(max(mono_ns), 0) FROM ledger_minute").fetchone()
    return Resumed(
        totals=_rows(con, LedgerTotal, total),
        gpus=_rows(con, SettledGpu, after),
        causes=_rows(con, Settled, after),
        settlements=_rows(con, Settlement, after),
        minute_ns=int(minute[0]) if minute else 0,
    )


def _rows(con: duckdb.DuckDBPyConnection, row: type[_R], where: str) -> list[_R]:
    spec = table_of(row)
    names = [column.name for column in spec.columns]
    listed = ", ".join(identifier(name) for name in names)
    found = con.execute(
        f"SELECT {listed} FROM {identifier(spec.name)} WHERE {where} ORDER BY mono_ns"
    ).fetchall()
    return [row(**dict(zip(names, values, strict=True))) for values in found]
