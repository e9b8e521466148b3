"""Puts segments together, sorted by what their rows are about.

Readings of one GPU, process or port that follow each other differ little, and DuckDB stores small
differences in few bits: sorted by key, then time, rows take two thirds of what they take in the
order in which they came. Sorting needs all rows in memory, so that a big table is sorted range by
range of its first key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from whyidle.layout import Identity
from whyidle.schema import TABLES
from whyidle.segment import (
    attach,
    columns_of,
    connect,
    known_hash,
    new_segment,
    read_info,
    written,
)
from whyidle.table import Table, identifier, table_of

# What is sorted at a time, as plain 8-byte values; DuckDB takes about three times that for it.
SORT_BYTES = 8 << 20


def newest_schema(group: Sequence[Path]) -> int:
    """Return the newest version among segments; raises duckdb.Error, ValueError."""
    con = connect()
    try:
        for number, path in enumerate(group):
            attach(con, path, f"old{number}")
        return max(read_info(con, f"old{number}").schema_version for number in range(len(group)))
    finally:
        con.close()


def merge_into(target: Path, identity: Identity, group: Sequence[Path]) -> None:
    """Make one segment of several; it appears whole or not at all. Raises duckdb.Error, OSError."""
    with new_segment(target, identity, merged=True) as con:
        held: list[tuple[str, Mapping[str, Sequence[str]]]] = []
        today = {
            spec.name: [column.name for column in spec.columns] for spec in map(table_of, TABLES)
        }
        for number, path in enumerate(group):
            catalog = f"old{number}"
            attach(con, path, catalog)
            # Looking at the columns of one goes through those of all: 3 MB and 50 ms for each.
            known = read_info(con, catalog).schema_hash == known_hash()
            held.append((catalog, today if known else columns_of(con, catalog)))
        batch = _Batch(con)
        for row in TABLES:
            spec = table_of(row)
            parts = [_select(spec, catalog, tables.get(spec.name)) for catalog, tables in held]
            chosen = " UNION ALL ".join(part for part in parts if part)
            if chosen:
                _copy(con, spec, chosen, batch)
        batch.write()


def _select(spec: Table, catalog: str, held: Sequence[str] | None) -> str:
    """Return the query of a table in today's columns; '' where an older segment has it not."""
    if not held:
        return ""
    columns = ", ".join(
        f"{written(column, identifier(column.name))} AS {identifier(column.name)}"
        if column.name in held
        else f"NULL::{column.stored} AS {identifier(column.name)}"
        for column in spec.columns
    )
    return f"SELECT {columns} FROM {catalog}.{identifier(spec.name)}"


def _copy(con: duckdb.DuckDBPyConnection, spec: Table, source: str, batch: _Batch) -> None:
    into = f"INSERT INTO seg.{identifier(spec.name)}"
    keys = [column.name for column in spec.columns if column.kind == "key"]
    keys.sort(key=lambda name: name == "mono_ns")  # time last, the others as declared
    order = ", ".join(f"{identifier(name)} NULLS FIRST" for name in keys)
    for part in _parts(con, spec, keys[0], source):
        chosen = f"{into} SELECT * FROM ({source}) {part.where}"
        batch.add(
            _Step(chosen, f" ORDER BY {order}", part.values), part.rows * 8 * len(spec.columns)
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """A statement that copies rows, the order in which it does, and its parameters."""

    text: str
    order: str
    values: Sequence[object]


class _Batch:
    """Statements that are committed together.

    A commit leaves memory and writes the lists of all tables anew, 0.6 MB: one for each table would
    write 44 MB for a merged segment of 9.
    """

    __slots__ = ("_con", "_size_bytes", "_steps")

    def __init__(self, con: duckdb.DuckDBPyConnection) -> None:
        self._con = con
        self._steps: list[_Step] = []
        self._size_bytes = 0

    def add(self, step: _Step, size_bytes: int) -> None:
        """Take a statement; `size_bytes` is about what its rows take in memory."""
        if self._size_bytes + size_bytes > SORT_BYTES:
            self.write()
        self._steps.append(step)
        self._size_bytes += size_bytes

    def write(self) -> None:
        """Run what was taken; raises duckdb.Error."""
        steps, self._steps, self._size_bytes = self._steps, [], 0
        try:
            self._con.execute("BEGIN")
            for step in steps:
                self._con.execute(step.text + step.order, step.values)
            self._con.execute("COMMIT")
        except duckdb.OutOfMemoryException:
            self._con.execute("ROLLBACK")
            for step in steps:
                self._alone(step)

    def _alone(self, step: _Step) -> None:
        try:
            self._con.execute(step.text + step.order, step.values)
        except duckdb.OutOfMemoryException:
            # It takes more room then, which is better than not at all.
            self._con.execute(step.text, step.values)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that are sorted at a time: about how many, an SQL condition and its parameters."""

    rows: int
    where: str = ""
    values: Sequence[object] = ()


def _parts(con: duckdb.DuckDBPyConnection, spec: Table, key: str, source: str) -> Iterator[_Part]:
    """Yield parts of a table in the order of `key`, each small enough to be sorted in memory."""
    limit = SORT_BYTES // (8 * len(spec.columns))
    rows = _one(con, f"SELECT count(*) FROM ({source})", ())[0]
    if rows <= limit:
        yield from [_Part(rows)] if rows else []
        return
    name = identifier(key)
    if key == "mono_ns":
        yield from _spans(con, source, _Part(rows, "WHERE true"), limit)
        return
    counts = con.execute(
        f"SELECT {name}, count(*) FROM ({source}) WHERE {name} IS NOT NULL GROUP BY 1 ORDER BY 1"
    ).fetchall()
    unknown = rows - sum(count for _, count in counts)
    if unknown:
        yield _Part(unknown, f"WHERE {name} IS NULL")
    while counts:
        first, total = counts[0]
        taken = 1
        while taken < len(counts) and total + counts[taken][1] <= limit:
            total += counts[taken][1]
            taken += 1
        part = _Part(total, f"WHERE {name} BETWEEN ? AND ?", (first, counts[taken - 1][0]))
        yield from [part] if total <= limit else _spans(con, source, part, limit)
        counts = counts[taken:]


def _spans(con: duckdb.DuckDBPyConnection, source: str, part: _Part, limit: int) -> Iterator[_Part]:
    """Yield a part cut by time into as many pieces as it takes."""
    first, last = _one(
        con, f"SELECT min(mono_ns), max(mono_ns) FROM ({source}) {part.where}", part.values
    )
    pieces = -(-part.rows // limit)
    edges = [first + (last + 1 - first) * piece // pieces for piece in range(pieces + 1)]
    for begin, end in itertools.pairwise(edges):
        where = f"{part.where} AND mono_ns >= ? AND mono_ns < ?"
        yield _Part(limit, where, (*part.values, begin, end))


def _one(con: duckdb.DuckDBPyConnection, query: str, values: Sequence[object]) -> tuple[int, ...]:
    found = con.execute(query, values).fetchone()
    assert found is not None
    return found
