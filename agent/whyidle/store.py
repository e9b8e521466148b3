"""Reads recordings: any number of segments, spools, nodes and exports, as one set of views.

Each declared table is a view with `node` and `boot_id` before its own columns. Columns that an
older recording lacks are NULL, a newer schema is refused in a sentence, damaged parts are left out
and named in `Recording.damaged`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import TypeVar

import duckdb

from whyidle.errors import UserError
from whyidle.layout import Identity
from whyidle.manifest import read_manifest
from whyidle.schema import TABLES, VERSION
from whyidle.segment import (
    attach,
    columns_of,
    connect,
    first_line,
    insert_piece,
    known_hash,
    read_info,
    verify,
)
from whyidle.sources import Found, find
from whyidle.spool_read import NewerSchemaError, Piece, UnreadableError, read_piece
from whyidle.table import Column, Table, ddl, identifier, quoted, table_of

# A keeper may replace files between our listing them and opening them; then we list them again.
ATTEMPTS = 5

# What no damaged file is the reason of.
_OF_THE_QUERY = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.InterruptException,
    duckdb.OutOfMemoryException,
    duckdb.ParserException,
)

_T = TypeVar("_T")
# Of a catalog: the columns of each of its tables; None where they are today's.
_Shape = Mapping[str, Sequence[str]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """A part that was left out, and why."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Catalog:
    name: str
    identity: Identity
    shape: _Shape
    path: Path | None  # None for spools, which were read into memory


class _ChangedError(Exception):
    """Files went away while they were being opened."""


class Recording:
    """Open recordings; `con` has the views.

    Damage inside a segment shows only when a query reads that block. `run` does a piece of work,
    and does it again without the damaged part; it may be called with another connection then.
    """

    __slots__ = (
        "_catalogs",
        "_dropped",
        "_exports",
        "_known_hash",
        "_memory_limit",
        "_sources",
        "_threads",
        "con",
        "damaged",
    )

    def __init__(
        self, sources: Sequence[str | Path], *, threads: int = 1, memory_limit: str = "2GB"
    ) -> None:
        self._sources = tuple(sources)
        self._threads = threads
        self._memory_limit = memory_limit
        self._catalogs: list[_Catalog] = []
        self._exports: list[Path] = []
        self._dropped: list[Damaged] = []
        self._known_hash = known_hash()
        self.damaged: list[Damaged] = []
        self.con = self._connect()
        self._open()

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, sorted."""
        names = {catalog.identity.node for catalog in self._catalogs}
        for export in self._exports:
            names |= {path.name.split("=", 1)[1] for path in export.glob("*/node=*")}
        return sorted(names)

    def run(self, work: Callable[[duckdb.DuckDBPyConnection], _T]) -> _T:
        """Return `work(con)`. If it hits a damaged part, leave that part out and do it again."""
        while True:
            try:
                return work(self.con)
            except _OF_THE_QUERY:
                raise
            except duckdb.Error:
                if not self._drop_damaged():
                    raise

    def seal(self) -> None:
        """Let what runs from now on reach no file but this recording's, for queries of others.

        There is no way back on this connection. Attached segments stay readable, and exports, which
        are read when a query asks; nothing else is, and no setting can be changed.
        """
        allowed = [f"{name}/" for path in self._exports for name in (path, path.absolute())]
        listed = ", ".join(quoted(name) for name in allowed)
        self.con.execute(f"SET allowed_directories = [{listed}]")
        self.con.execute("SET python_enable_replacements = false")
        self.con.execute("SET enable_external_access = false")
        self.con.execute("SET lock_configuration = true")

    def close(self) -> None:
        """Close all files."""
        self.con.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> None:
        for _ in range(ATTEMPTS):
            try:
                self._open_found(find(self._sources))
            except _ChangedError:
                self.con.close()
                self.con = self._connect()
                continue
            return
        raise UserError(
            f"{', '.join(map(str, self._sources))} changes faster than it can be opened: copy it "
            "and read the copy"
        )

    def _open_found(self, found: Found) -> None:
        dropped = {damaged.path for damaged in self._dropped}
        self._catalogs, self.damaged = [], list(self._dropped)
        self._exports = found.exports
        for export in found.exports:
            version = (read_manifest(export) or {}).get("schema_version")
            if isinstance(version, int) and version > VERSION:
                raise _newer(export, version)
        for path in found.segments:
            if path not in dropped:
                self._open_segment(path)
        self._open_pieces(found.pieces)
        for row in TABLES:
            self.con.execute(self._view(table_of(row)))

    def _open_segment(self, path: Path) -> None:
        name = f"part{len(self._catalogs)}"
        try:
            attach(self.con, path, name)
            info = read_info(self.con, name)
        except (duckdb.Error, ValueError) as error:
            if not path.exists():
                raise _ChangedError from error
            self.damaged.append(Damaged(path=path, why=first_line(error)))
            self.con.execute(f"DETACH DATABASE IF EXISTS {identifier(name)}")
            return
        if info.schema_version > VERSION:
            raise _newer(path, info.schema_version)
        known = info.schema_hash == self._known_hash
        shape = None if known else columns_of(self.con, name)
        self._catalogs.append(_Catalog(name=name, identity=info.identity, shape=shape, path=path))

    def _open_pieces(self, paths: Sequence[Path]) -> None:
        pieces: dict[Identity, list[Piece]] = {}
        for path in paths:
            try:
                piece = read_piece(path)
            except NewerSchemaError as error:
                raise _newer(path, error.version) from error
            except UnreadableError as error:
                if path.stat().st_size:  # an agent that begins leaves an empty file for a moment
                    self.damaged.append(Damaged(path=path, why=str(error)))
                continue
            except OSError as error:
                if not path.exists():
                    raise _ChangedError from error
                self.damaged.append(Damaged(path=path, why=error.strerror or str(error)))
                continue
            if piece.damaged_bytes:
                why = f"{piece.damaged_bytes} damaged bytes inside were skipped"
                self.damaged.append(Damaged(path=path, why=why))
            pieces.setdefault(piece.identity or self._identity_of(path), []).append(piece)
        for identity, group in pieces.items():
            name = f"part{len(self._catalogs)}"
            self.con.execute(f"ATTACH ':memory:' AS {name}")
            for row in TABLES:
                self.con.execute(ddl(table_of(row), schema=name)[0])
            for piece in group:
                insert_piece(self.con, piece, name)
            self._catalogs.append(_Catalog(name=name, identity=identity, shape=None, path=None))

    def _identity_of(self, piece: Path) -> Identity:
        """Return who wrote a piece that lost its header: its neighbours, else its folder."""
        boot8 = piece.parent.parent.name
        for catalog in self._catalogs:
            if catalog.identity.boot8 == boot8:
                return catalog.identity
        return Identity(node=piece.parent.parent.parent.name, boot_id=boot8)

    def _view(self, spec: Table) -> str:
        parts = [_select(spec, catalog) for catalog in self._catalogs]
        parts += [self._select_export(spec, export) for export in self._exports]
        chosen = [part for part in parts if part is not None]
        if not chosen:
            columns = ", ".join(
                f"NULL::{column.type} AS {identifier(column.name)}" for column in spec.columns
            )
            chosen = [
                f"SELECT NULL::VARCHAR AS node, NULL::VARCHAR AS boot_id, {columns} WHERE false"
            ]
        return f"CREATE VIEW {identifier(spec.name)} AS {' UNION ALL '.join(chosen)}"

    def _select_export(self, spec: Table, export: Path) -> str | None:
        folder = export / spec.name
        files = sorted(folder.glob("*/*/*.parquet"))
        if not files:
            return None
        try:
            return _select_files(self.con, spec, quoted(str(folder / "*" / "*" / "*.parquet")))
        except duckdb.InterruptException:
            raise
        except duckdb.Error:
            good = [path for path in files if self._is_parquet(path)]
        if len(good) == len(files):
            raise UserError(f"{folder} cannot be read as one table: export the recording anew")
        listed = ", ".join(quoted(str(path)) for path in good)
        return _select_files(self.con, spec, f"[{listed}]") if good else None

    def _is_parquet(self, path: Path) -> bool:
        try:
            self.con.execute(f"DESCRIBE SELECT * FROM {_parquet(quoted(str(path)))}")
        except duckdb.InterruptException:
            raise
        except duckdb.Error as error:
            self.damaged.append(Damaged(path=path, why=first_line(error)))
            return False
        return True

    def _drop_damaged(self) -> bool:
        """Look for parts that cannot be read through, leave them out; say whether any was found."""
        paths = [catalog.path for catalog in self._catalogs if catalog.path is not None]
        self.con.close()  # DuckDB 1.4 opens no file twice in a process
        damaged = [Damaged(path=path, why=why) for path in paths if (why := verify(path))]
        self._dropped += damaged
        self.con = self._connect()
        self._open()
        return bool(damaged)

    def _connect(self) -> duckdb.DuckDBPyConnection:
        con = connect(
            memory_limit=self._memory_limit,
            threads=self._threads,
            spill=str(Path(gettempdir()) / f"whyidle-{os.getuid()}-{os.getpid()}"),
        )
        con.execute("SET enable_progress_bar = false")  # it would go to stdout, into our results
        return con


def _newer(path: Path, version: int) -> UserError:
    return UserError(
        f"{path} was written by a newer whyidle (schema {version}, this one reads up to "
        f"{VERSION}): update whyidle to read it"
    )


def _select(spec: Table, catalog: _Catalog) -> str | None:
    held = None if catalog.shape is None else catalog.shape.get(spec.name, ())
    if held is not None and not held:
        return None
    columns = ", ".join(
        _as_declared(column)
        if held is None or column.name in held
        else f"NULL::{column.type} AS {identifier(column.name)}"
        for column in spec.columns
    )
    return (
        f"SELECT {quoted(catalog.identity.node)} AS node, {quoted(catalog.identity.boot_id)} "
        f"AS boot_id, {columns} FROM {catalog.name}.{identifier(spec.name)}"
    )


def _as_declared(column: Column) -> str:
    name = identifier(column.name)
    return name if column.stored == column.type else f"{name}::{column.type} AS {name}"


def _parquet(files: str) -> str:
    return (
        f"read_parquet({files}, hive_partitioning = true, "
        "hive_types = {'node': VARCHAR, 'hour': VARCHAR}, union_by_name = true)"
    )


def _select_files(con: duckdb.DuckDBPyConnection, spec: Table, files: str) -> str:
    source = _parquet(files)
    held = {str(row[0]) for row in con.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
    columns = ", ".join(
        f"{identifier(column.name)}::{column.type} AS {identifier(column.name)}"
        if column.name in held
        else f"NULL::{column.type} AS {identifier(column.name)}"
        for column in spec.columns
    )
    return f"SELECT node, boot_id, {columns} FROM {source}"
