"""Files of NCCL's Inspector plugin: exact times of collectives, and the bandwidth that they had.

Each line is a JSON object of one collective on one rank (format v4.0). They are written at the end
of a job, or every so often, so that a line says when it was written and not when its collective
ran: what they tell is of whole communicators. Files are hostile input: sizes, counts and numbers
are bounded, and a line that is none is counted and left out.

Source: NVIDIA/nccl, plugins/profiler/inspector (README.md, inspector_json.cc).
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import duckdb
import msgspec

from whyidle.errors import UserError
from whyidle_rules.diagnosis import NotSeen
from whyidle_rules.recording.series import one
from whyidle_rules.recording.windows import Gpu

TABLE = "nccl_operation"
FILES_MOST = 4096
LINE_BYTES_MOST = 1 << 16
# A day of a node with a collective each 10 ms; more are left out, and that is told.
ROWS_MOST = 2_000_000
# Unpacked, of one file: a bomb costs no more than this.
FILE_BYTES_MOST = 4 << 30
SUFFIXES = (".log", ".json", ".jsonl", ".gz")
# Collectives below move little, and take what their latency takes.
SMALL_BYTES = 256 << 10
_GB = 1e9
# No link is as fast, and no collective as long: damage.
_GBS_MOST, _US_MOST, _INTEGER_MOST = 1e5, 1e11, 1 << 62


class _Header(msgspec.Struct):
    id: str
    rank: int
    n_ranks: int


class _Metadata(msgspec.Struct):
    hostname: str
    pid: int
    dump_timestamp_us: int


class _Collective(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    coll_exec_time_us: float
    coll_busbw_gbs: float


class _Line(msgspec.Struct):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective


class _Other(msgspec.Struct):
    """What the plugin writes besides collectives: messages, counts of what it dropped."""

    header: _Header


_LINE = msgspec.json.Decoder(_Line)
_OTHER = msgspec.json.Decoder(_Other)


@dataclass(slots=True)
class Read:
    """What was read: rows of the table, lines that were none, whether some are left out."""

    rows: list[tuple[str, int, str, int, int, str, int, int, float, float]]
    bad_lines: int = 0
    cut: bool = False


def read(sources: Sequence[Path]) -> Read:
    """Return the collectives of files and folders; raises UserError where there are none."""
    found = Read(rows=[])
    paths = _paths(sources)
    for path in paths:
        try:
            for line in _lines(path, found):
                _take(line, found)
                if len(found.rows) >= ROWS_MOST:
                    found.cut = True
                    return found
        except (OSError, EOFError, zlib.error) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise UserError(
                f"{path}: cannot be read: {why}; leave it out, or name a folder of NCCL Inspector."
            ) from error
    if not found.rows:
        raise UserError(
            f"{sources[0]}: holds no collective; name the NCCL_INSPECTOR_DUMP_DIR of the job."
        )
    return found


def _paths(sources: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = (p for p in source.iterdir() if p.suffix in SUFFIXES and p.is_file())
            found += sorted(inside)
        elif source.is_file():
            found.append(source)
        else:
            raise UserError(f"{source}: is not there; name the NCCL_INSPECTOR_DUMP_DIR of the job.")
        if len(found) > FILES_MOST:
            raise UserError(f"{source}: has over {FILES_MOST:,} files; name the folder of one job.")
    return found


def _lines(path: Path, found: Read) -> Iterator[bytes]:
    taken = 0
    with _open(path) as file:
        while line := file.readline(LINE_BYTES_MOST + 1):
            taken += len(line)
            if taken > FILE_BYTES_MOST:
                found.cut = True
                return
            if len(line) > LINE_BYTES_MOST:
                found.bad_lines += 1
                while line and not line.endswith(b"\n"):
                    line = file.readline(LINE_BYTES_MOST)
                    taken += len(line)
                    if taken > FILE_BYTES_MOST:
                        found.cut = True
                        return
                continue
            if line.strip():
                yield line


def _open(path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _take(line: bytes, found: Read) -> None:
    try:
        told = _LINE.decode(line)
    except (msgspec.DecodeError, RecursionError):
        try:
            _OTHER.decode(line)
        except (msgspec.DecodeError, RecursionError):
            found.bad_lines += 1
        return
    header, meta, perf = told.header, told.metadata, told.coll_perf
    numbers = (meta.pid, header.rank, perf.coll_sn, perf.coll_msg_size_bytes)
    whole = all(0 <= number < _INTEGER_MOST for number in numbers)
    if (
        not whole
        or not header.rank < header.n_ranks <= 1 << 24
        or not (math.isfinite(perf.coll_exec_time_us) and 0 < perf.coll_exec_time_us < _US_MOST)
        or not (math.isfinite(perf.coll_busbw_gbs) and 0 <= perf.coll_busbw_gbs < _GBS_MOST)
    ):
        found.bad_lines += 1
        return
    found.rows.append(
        (
            meta.hostname[:256],
            meta.pid,
            header.id[:64],
            header.rank,
            header.n_ranks,
            perf.coll[:64],
            perf.coll_sn,
            perf.coll_msg_size_bytes,
            perf.coll_exec_time_us / 1e6,
            perf.coll_busbw_gbs * _GB,
        )
    )


_COLUMNS = (
    "hostname VARCHAR, pid BIGINT, communicator VARCHAR, rank BIGINT, ranks BIGINT, coll VARCHAR,"
    " number BIGINT, size_bytes BIGINT, took_s DOUBLE, bus_bytes_per_s DOUBLE"
)


def put(con: duckdb.DuckDBPyConnection, found: Read | None) -> None:
    """Make the table of collectives, of what was read; empty without anything."""
    con.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} ({_COLUMNS})")
    for begin in range(0, len(found.rows) if found else 0, 50_000):
        assert found is not None
        rows = found.rows[begin : begin + 50_000]
        columns = list(zip(*rows, strict=True))
        unnested = ", ".join("unnest(?)" for _ in columns)
        con.execute(f"INSERT INTO {TABLE} SELECT {unnested}", [list(c) for c in columns])


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """What a GPU's collectives had, None where nothing tells.

    The bus bandwidth of the large ones once all ranks had come, and the share of the moving time
    that small ones took; the share of all time that it waited for other ranks.
    """

    bus_bytes_per_s: float | None
    small_ratio: float | None
    wait_ratio: float | None


NOTHING = Exact(bus_bytes_per_s=None, small_ratio=None, wait_ratio=None)


def of_gpu(con: duckdb.DuckDBPyConnection, gpu: Gpu, pids: Sequence[int]) -> Exact:
    """Return what was told of a GPU's processes; `pids` are those of any namespace."""
    there = con.execute(
        "SELECT count(*) FROM duckdb_tables() WHERE table_name = $name", {"name": TABLE}
    ).fetchone()
    if not there or not there[0] or not pids:
        return NOTHING
    bus, small, moved, waited, whole = one(
        con,
        # The last rank to come waits for nobody: its time is what the bytes took.
        "WITH least AS (SELECT communicator, coll, number, min(took_s) AS least_s,"
        "  max(bus_bytes_per_s) AS bus, count(*) = any_value(ranks) AS whole"
        f"  FROM {TABLE} GROUP BY ALL)"
        " SELECT sum(l.bus * l.least_s) FILTER (l.whole AND size_bytes >= $small)"
        "   / sum(l.least_s) FILTER (l.whole AND size_bytes >= $small),"
        "  coalesce(sum(l.least_s) FILTER (l.whole AND size_bytes < $small), 0),"
        "  sum(l.least_s) FILTER (l.whole), sum(took_s - l.least_s) FILTER (l.whole),"
        "  sum(took_s) FILTER (l.whole)"
        f" FROM {TABLE} JOIN least l USING (communicator, coll, number)"
        " WHERE split_part(hostname, '.', 1) = split_part($node, '.', 1)"
        "  AND list_contains($pids, pid)",
        {"node": gpu.node, "pids": list(pids), "small": SMALL_BYTES},
    )
    return Exact(
        bus_bytes_per_s=bus,
        small_ratio=small / moved if moved else None,
        wait_ratio=waited / whole if whole else None,
    )


def left_out(found: Read, sources: Sequence[Path]) -> list[NotSeen]:
    """Return what of the files was not used, and why."""
    what = f"collectives in {sources[0].name}"
    told = []
    if found.bad_lines:
        why = f"{found.bad_lines:,} lines are none of NCCL Inspector's, format v4.0"
        told.append(NotSeen(what=f"some {what}", why=why, rules=[]))
    if found.cut:
        why = f"there are over {ROWS_MOST:,}, or a file is longer than any job writes"
        told.append(NotSeen(what=f"later {what}", why=why, rules=[]))
    return told
