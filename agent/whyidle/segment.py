"""Segments: immutable DuckDB files, one for each piece of the spool, merged by the hour.

A segment has the name of the piece that it was made from, a merged one the times of its first and
last: `UTC-MONO.duckdb`, `UTC-MONO0-MONO1.duckdb`. So what a file stands for is known before it is
opened, and a crash between writing one and deleting what it replaces leaves nothing to guess.

Files are written as `.part`, synced, renamed. STORAGE_VERSION v1.4.0 keeps them readable for every
DuckDB since 1.4. Every segment holds every table, so that readers need not look, and only merged
ones hold the comments: those cost 45 ms for 18 tables, the tables themselves 6.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from whyidle.layout import PART, SEGMENT, Identity
from whyidle.schema import TABLES, VERSION
from whyidle.spool import schema_hash, schema_text
from whyidle.spool_read import Columns, ColumnValues, Piece
from whyidle.table import Column, Table, ddl, identifier, quoted, table_of

STORAGE_VERSION = "v1.4.0"
# Every table with rows takes a block at least, and a minute of most tables is small: in blocks of
# 64 KiB a minute of a busy node takes 1.9 MB, in these 1.4. Merged in such small ones DuckDB stops
# compressing: 20 minutes take 2.8 bytes a value in blocks of 32 KiB, 1.8 in those of 64.
MINUTE_BLOCK_BYTES = 16 << 10
MERGED_BLOCK_BYTES = 64 << 10
# Rows in the making take a row group at a time: half of DuckDB's own lets tables of 100 columns
# fit. Sorting takes more; 15 minutes of a busy node fit into the lower limit too.
MEMORY_LIMIT = "40MB"
MERGE_MEMORY_LIMIT = "48MB"
ROW_GROUP_ROWS = 61_440
# A commit beyond this is written into the file at once. Below it, 16 MB by default, rows go into
# the log first and are written twice: 2.6 MB a minute instead of 1.9.
LOG_LIMIT = "1KB"
INFO = "segment_info"
_SPAN = re.compile(r"\d{8}T\d{6}Z-(\d{13,})(?:-(\d{13,}))?\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """What a segment says of itself."""

    schema_version: int
    schema_hash: int
    identity: Identity


def span(path: Path) -> tuple[int, int] | None:
    """Return the monotonic milliseconds of a file's first and last piece; None: a foreign name."""
    match = _SPAN.match(path.name)
    return (int(match[1]), int(match[2] or match[1])) if match else None


def known_hash() -> int:
    """Return the hash of today's schema: a segment that has it needs no look at its columns."""
    return schema_hash(schema_text([table_of(row) for row in TABLES]))


def merged_name(first: Path, last: Path) -> str:
    """Return the name of the segment that replaces those from `first` to `last`."""
    begin, end = span(first), span(last)
    assert begin is not None
    assert end is not None
    return f"{first.name.split('-', 1)[0]}-{begin[0]:013d}-{end[1]:013d}{SEGMENT}"


def connect(
    *, memory_limit: str = MEMORY_LIMIT, threads: int = 1, spill: str = ""
) -> duckdb.DuckDBPyConnection:
    """Return an in-memory connection that reaches for nothing by itself.

    `spill` is the folder that it may make for what does not fit into memory; '' for nowhere, where
    DuckDB would by itself take the current one.
    """
    return duckdb.connect(
        ":memory:",
        config={
            "threads": str(threads),
            "memory_limit": memory_limit,
            "temp_directory": spill,
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        },
    )


@contextmanager
def new_segment(
    target: Path,
    identity: Identity,
    *,
    merged: bool = False,
    memory_limit: str | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Make a segment: fill the tables of catalog `seg` inside; it appears whole or not at all.

    A merged one holds more, and the meaning of each column as its comment. Its rows are not put in
    by one transaction, which would hold what is not a full row group in memory.
    """
    part = target.with_name(target.name + PART)
    part.unlink(missing_ok=True)
    part.with_name(part.name + ".wal").unlink(missing_ok=True)
    con = connect(memory_limit=memory_limit or (MERGE_MEMORY_LIMIT if merged else MEMORY_LIMIT))
    try:
        block = MERGED_BLOCK_BYTES if merged else MINUTE_BLOCK_BYTES
        con.execute(f"SET checkpoint_threshold = '{LOG_LIMIT}'")
        con.execute(
            f"ATTACH {quoted(str(part))} AS seg (STORAGE_VERSION '{STORAGE_VERSION}', "
            f"BLOCK_SIZE {block}, ROW_GROUP_SIZE {ROW_GROUP_ROWS})"
        )
        con.execute("BEGIN")
        for row in TABLES:
            statements = ddl(table_of(row), schema="seg")
            for statement in statements if merged else statements[:1]:
                con.execute(statement)
        # A view, since a table of one row would take a block of 256 KiB.
        con.execute(
            f"CREATE VIEW seg.{INFO} AS SELECT {VERSION}::BIGINT AS schema_version, "
            f"{known_hash()}::BIGINT AS schema_hash, "
            f"{quoted(identity.node)} AS node, {quoted(identity.boot_id)} AS boot_id, "
            f"{quoted(duckdb.__version__)} AS duckdb_version"
        )
        if merged:
            con.execute("COMMIT")
        yield con
        if not merged:
            con.execute("COMMIT")
        con.execute("CHECKPOINT seg")
        con.execute("DETACH seg")
    except BaseException:
        con.close()
        part.unlink(missing_ok=True)
        part.with_name(part.name + ".wal").unlink(missing_ok=True)
        raise
    con.close()
    sync(part)
    part.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Make a file or a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def insert_piece(con: duckdb.DuckDBPyConnection, piece: Piece, catalog: str = "seg") -> int:
    """Insert everything that a piece holds; return how many rows. Unknown tables are left out."""
    inserted = 0
    for row in TABLES:
        spec = table_of(row)
        columns = piece.tables.get(spec.name)
        if columns and piece.counts[spec.name]:
            _insert(con, spec, columns, catalog)
            inserted += piece.counts[spec.name]
    return inserted


def _insert(con: duckdb.DuckDBPyConnection, spec: Table, columns: Columns, catalog: str) -> None:
    """Insert columns as arrays: 60,000 rows take 50 ms, as Python values they take a second."""
    arrays: dict[str, Any] = {}
    words: dict[str, list[str]] = {}
    names: list[str] = []
    chosen: list[str] = []
    for number, column in enumerate(spec.columns):
        values = columns.get(column.name)
        if values is None or values.type != column.type:
            continue  # an older schema: the column stays NULL
        names.append(identifier(column.name))
        chosen.append(written(column, _expression(values, f"c{number}", arrays, words)))
    con.register("incoming", arrays)
    try:
        con.execute(
            f"INSERT INTO {catalog}.{identifier(spec.name)} ({', '.join(names)}) "
            f"SELECT {', '.join(chosen)} FROM incoming",
            words,
        )
    finally:
        con.unregister("incoming")


def written(column: Column, expression: str) -> str:
    """Return an SQL expression as a column stores it: what a decimal cannot hold is unknown."""
    if column.stored == column.type:
        return expression
    return f"TRY_CAST({expression} AS {column.stored})"


def _expression(
    values: ColumnValues, name: str, arrays: dict[str, Any], words: dict[str, list[str]]
) -> str:
    """Put the arrays of a column into `arrays` and `words`; return the SQL that reads them."""
    raw = np.frombuffer(values.values, dtype=values.values.typecode)
    present = np.frombuffer(values.present, dtype=np.bool_)
    if values.type == "VARCHAR":
        words[name] = list(values.words)
        # Index 0 is before the list and reads as NULL.
        arrays[name] = np.where(present, raw.astype(np.int64) + 1, 0)
        return f"${name}[{name}]"
    arrays[name] = raw.astype(np.bool_) if values.type == "BOOLEAN" else raw
    if present.all():
        return name
    arrays[f"{name}p"] = present
    return f"CASE WHEN {name}p THEN {name} END"


def read_info(con: duckdb.DuckDBPyConnection, catalog: str) -> SegmentInfo:
    """Return what the attached segment says of itself; raises duckdb.Error, ValueError."""
    row = con.execute(
        f"SELECT schema_version, schema_hash, node, boot_id FROM {identifier(catalog)}.{INFO}"
    ).fetchone()
    if row is None:
        raise ValueError("it does not say what it is")
    return SegmentInfo(
        schema_version=int(row[0]),
        schema_hash=int(row[1]),
        identity=Identity(node=str(row[2]), boot_id=str(row[3])),
    )


def attach(con: duckdb.DuckDBPyConnection, path: Path, catalog: str) -> None:
    """Attach a segment to read it; raises duckdb.Error."""
    con.execute(f"ATTACH {quoted(str(path))} AS {identifier(catalog)} (READ_ONLY)")


def columns_of(con: duckdb.DuckDBPyConnection, catalog: str) -> Mapping[str, Sequence[str]]:
    """Return the tables of an attached segment and their columns."""
    found: dict[str, list[str]] = {}
    rows = con.execute(
        "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = $1 "
        "AND table_name <> $2 ORDER BY column_index",
        [catalog, INFO],
    ).fetchall()
    for name, column in rows:
        found.setdefault(str(name), []).append(str(column))
    return found


def verify(path: Path) -> str | None:
    """Read every value of a segment; return why it cannot be read, None if all is well."""
    con = connect()
    try:
        attach(con, path, "seg")
        read_info(con, "seg")
        for name in columns_of(con, "seg"):
            con.execute(f"SELECT bit_xor(hash(t)) FROM seg.{identifier(name)} t").fetchall()
    except (duckdb.Error, ValueError, OSError) as error:
        return first_line(error)
    finally:
        con.close()
    return None


def first_line(error: BaseException) -> str:
    """Return what an exception says, on one line and not too long."""
    text = str(error).strip().split("\n", 1)[0]
    return (text or type(error).__name__)[:300]
