"""Parquet for fleets: DIR/TABLE/node=NODE/hour=UTC/*.parquet, read back by `store.Recording`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import duckdb

from whyidle.errors import UserError
from whyidle.manifest import PARQUET, write_manifest
from whyidle.redact import Redaction
from whyidle.schema import TABLES, VERSION
from whyidle.segment import first_line
from whyidle.store import Recording
from whyidle.table import Table, identifier, quoted, table_of

# Where a boot has no clock reading the hour is unknown, and says so.
UNKNOWN_HOUR = "unknown"


def export(recording: Recording, folder: Path, redaction: Redaction | None = None) -> int:
    """Write every table that has rows; return how many. Raises UserError.

    With a `redaction`, names of people, machines, paths and jobs are pseudonyms. Journals, which
    hold what the machine answered word by word, are never exported.
    The hour is that of wall time at the row's `mono_ns`, by the first clock reading of the boot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: name a new folder with -o")
        written = 0
        for row in TABLES:
            written += recording.run(partial(_export, table_of(row), folder, redaction))
        about = {"duckdb_version": duckdb.__version__, "redacted": redaction is not None}
        write_manifest(folder, PARQUET, about)
    except (OSError, duckdb.IOException) as error:
        raise UserError(f"cannot export into {folder}: {first_line(error)}") from error
    return written


def _export(
    spec: Table, folder: Path, redaction: Redaction | None, con: duckdb.DuckDBPyConnection
) -> int:
    name = spec.name
    columns = "t.*" if redaction is None else redaction.select(spec, "t")
    counted = con.execute(f"SELECT count(*) FROM {identifier(name)}").fetchone()
    if counted is None or not counted[0]:
        return 0
    con.execute(
        f"""
        COPY (
            SELECT {columns}, coalesce(
                strftime(make_timestamp((t.mono_ns + o.offset_ns) // 1000), '%Y%m%dT%H'),
                '{UNKNOWN_HOUR}'
            ) AS hour
            FROM {identifier(name)} t
            LEFT JOIN (
                SELECT node, boot_id, arg_min(wall_ns - mono_ns, mono_ns) AS offset_ns
                FROM clock GROUP BY ALL
            ) o USING (node, boot_id)
            ORDER BY t.node, t.mono_ns
        ) TO {quoted(str(folder / name))} (
            FORMAT parquet, COMPRESSION zstd, PARTITION_BY (node, hour), OVERWRITE_OR_IGNORE,
            KV_METADATA {{whyidle_schema_version: '{VERSION}'}}
        )
        """
    )
    return int(counted[0])
