"""Merging: every row once, in the order of its key, however big the table and small the memory."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from recording_kit import everything, make_row
from whyidle import merge as merge_module
from whyidle.clock import NS_PER_S
from whyidle.merge import merge_into
from whyidle.schema import Cpu, GpuEvent, Process
from whyidle.segment import attach, connect, insert_piece, new_segment
from whyidle.spool_read import piece_of
from whyidle.table import Row
from world.machine import IDENTITY

SEGMENTS, SECONDS, PIDS = 4, 30, 7


def rows(segment: int) -> list[Row]:
    found: list[Row] = []
    for second in range(SECONDS):
        now = (segment * SECONDS + second) * NS_PER_S
        found += [
            make_row(Process, mono_ns=now + pid, pid=pid * 11, start_ns=5, threads=second)
            for pid in range(PIDS)
        ]
        found.append(make_row(Cpu, mono_ns=now, user_ns=now))
        found.append(
            make_row(GpuEvent, mono_ns=now, uuid=None if second % 3 else "GPU-1", kind="xid")
        )
    return found


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts") / IDENTITY.node / IDENTITY.boot8
    folder.mkdir(parents=True)
    made = []
    for number in range(SEGMENTS):
        target = folder / f"20260101T00000{number}Z-{number:013d}.duckdb"
        with new_segment(target, IDENTITY) as con:
            insert_piece(con, piece_of(rows(number)))
        made.append(target)
    return made


def merged(parts: list[Path], target: Path) -> duckdb.DuckDBPyConnection:
    target.parent.mkdir(parents=True)
    merge_into(target, IDENTITY, parts)
    con = connect()
    attach(con, target, "seg")
    return con


@pytest.mark.parametrize("rows_at_a_time", [1, 10, 31, 100, 10_000])
def test_every_row_is_there_once_and_sorted(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_a_time: int
) -> None:
    columns = len(Process.__slots__)  # type: ignore[attr-defined]
    monkeypatch.setattr(merge_module, "SORT_BYTES", rows_at_a_time * 8 * columns)
    target = tmp_path / IDENTITY.node / IDENTITY.boot8 / "20260101T000000Z-0000000000000.duckdb"
    con = merged(parts, target)
    got = con.execute("SELECT pid, mono_ns FROM seg.process").fetchall()
    assert got == sorted(got)
    assert len(got) == SEGMENTS * SECONDS * PIDS
    events = con.execute("SELECT uuid IS NOT NULL, mono_ns FROM seg.gpu_event").fetchall()
    assert events == sorted(events)
    con.close()
    assert everything(tmp_path) == everything(parts[0].parents[2])


def test_without_memory_to_sort_rows_are_merged_as_they_are(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Poor:
        """A connection that cannot sort."""

        def __init__(self, con: duckdb.DuckDBPyConnection) -> None:
            self.con = con
            self.refused = 0

        def execute(self, query: str, values: object = ()) -> duckdb.DuckDBPyConnection:
            if query.startswith("INSERT") and "ORDER BY" in query:
                self.refused += 1
                raise duckdb.OutOfMemoryException("no room to sort")
            return self.con.execute(query, values)

    poor: list[Poor] = []

    class PoorBatch(merge_module._Batch):
        def __init__(self, con: duckdb.DuckDBPyConnection) -> None:
            poor.append(Poor(con))
            super().__init__(poor[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(merge_module, "_Batch", PoorBatch)
    target = tmp_path / IDENTITY.node / IDENTITY.boot8 / "20260101T000000Z-0000000000000.duckdb"
    merged(parts, target).close()
    assert sum(one.refused for one in poor) == 1 + 3  # all at once, then each alone
    assert everything(tmp_path) == everything(parts[0].parents[2])
