"""Evidence as DuckDB sees it: a table that is filled, or a view of the arrays themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import duckdb
import numpy as np

from whyidle.table import quoted as literal
from whyidle_rules import evidence
from whyidle_rules.compile_levels import quoted
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.series import Array, numbered

_ARRAYS = "whyidle_columns"


def insert(con: duckdb.DuckDBPyConnection, columns: Columns) -> None:
    """Insert columns into table `evidence`."""
    with _registered(con, columns, evidence.BY_NAME) as query:
        con.execute(f"INSERT INTO evidence {query}")


@contextmanager
def shown(
    con: duckdb.DuckDBPyConnection, columns: Columns, names: Collection[str], view: str
) -> Iterator[None]:
    """Create a view of evidence for the length of a `with` block; only `names` are filled in it."""
    with _registered(con, columns, names) as query:
        con.execute(f"CREATE OR REPLACE TEMP VIEW {quoted(view)} AS {query}")
        try:
            yield
        finally:
            con.execute(f"DROP VIEW IF EXISTS temp.{quoted(view)}")


@contextmanager
def _registered(
    con: duckdb.DuckDBPyConnection, columns: Columns, names: Collection[str]
) -> Iterator[str]:
    """Yield the query of columns; those that are wholly unknown are nothing but NULL."""
    arrays: dict[str, Array] = {}
    body = ", ".join(
        f"{_expression(column, columns, arrays)} AS {quoted(column.name)}"
        if column.name in names and column.name in columns
        else f"NULL::{column.type} AS {quoted(column.name)}"
        for column in evidence.COLUMNS
    )
    con.register(_ARRAYS, arrays)
    try:
        yield f"SELECT {body} FROM {_ARRAYS}"
    finally:
        con.unregister(_ARRAYS)


def _expression(column: evidence.Column, columns: Columns, arrays: dict[str, Array]) -> str:
    """Put a column into `arrays`; return the SQL that reads it."""
    name, values = quoted(column.name), columns[column.name]
    if column.type == "VARCHAR":
        # Numbers of words, as DuckDB takes long over arrays of Python's objects.
        numbers, found = numbered(values)
        arrays[column.name] = numbers + 1
        words = ", ".join("NULL" if word is None else literal(word) for word in found)
        return f"([{words}]::VARCHAR[])[{name}]"
    arrays[column.name] = values
    if column.type == "BIGINT":
        return name
    unknown = np.isnan(values)
    if unknown.all():
        del arrays[column.name]
        return f"NULL::{column.type}"
    known = f"CASE WHEN isnan({name}) THEN NULL ELSE {name} END" if unknown.any() else name
    if column.type == "BOOLEAN":
        return f"({known}) > 0"
    # A number that does not fit its column is none that anybody meant.
    return f"TRY_CAST({known} AS {column.type})"
