"""DuckDB as the engine uses it: in memory, one thread, nothing loaded, nothing reached outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import duckdb

# One thread: on a node whose cores are the trainer's, the engine must not take them. Rules read no
# files and load no extensions, whatever they say.
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "enable_external_access": False,
}


@contextmanager
def memory() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database in memory for the length of a `with` block."""
    con = duckdb.connect(":memory:", config=_CONFIG)
    try:
        con.execute("SET preserve_insertion_order = false")
        yield con
    finally:
        con.close()
