"""The evidence of a traced run: which column a stretch of time fills, and which are unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import duckdb
import numpy as np
import pytest

from trace_make import US, collective, frame, kernel, operator, span, trace_file
from whyidle_rules import database, evidence
from whyidle_rules.trace import fill as fill_module
from whyidle_rules.trace.fill import BINS, LONG_GAP_NS, Filled, fill
from whyidle_rules.trace.gaps import Piece, Pieces
from whyidle_rules.trace.run import TraceRun, assemble
from whyidle_rules.trace.spin import SpinPieces

LATE = {"launch_late_s"}
# What each kind of piece fills beside its length; everything else is 0, or NULL as below.
FILLS: dict[Piece, set[str]] = {
    Piece.UNSEEN: set(),
    Piece.LATE_UNSEEN: LATE,
    Piece.CHECKPOINT_SAVE: LATE | {"checkpoint_save_s"},
    Piece.CHECKPOINT_LOAD: LATE | {"checkpoint_load_s"},
    Piece.DATA: LATE | {"data_wait_s"},
    Piece.DATA_IN_TRAINER: LATE | {"data_wait_s"},
    Piece.GC: LATE | {"gc_s"},
    Piece.COMPILE: LATE | {"compile_s"},
    Piece.LOGGING: LATE | {"logging_s"},
    Piece.PROFILER: LATE | {"profiler_s"},
    Piece.ALLOCATOR: LATE | {"allocator_s"},
    Piece.EVALUATION: LATE | {"evaluation_s"},
    Piece.SYNC: LATE | {"sync_s"},
    Piece.BUSY: LATE | {"host_busy_s"},
    Piece.SILENT: LATE | {"host_silent_s"},
    Piece.LATENCY: {"launch_latency_s"},
    Piece.QUEUED: {"queued_s"},
    Piece.HELD: set(),
    Piece.COPY_H2D_PAGEABLE: {"copy_h2d_s", "copy_h2d_pageable_s"},
    Piece.COPY_H2D: {"copy_h2d_s"},
    Piece.COPY_D2H: {"copy_d2h_s"},
    Piece.COPY_DEVICE: {"copy_device_s"},
    Piece.TRANSFER: {"coll_s", "coll_transfer_s"},
    Piece.WAIT: {"coll_s", "coll_wait_s"},
    Piece.EXPOSED: {"coll_s"},
    Piece.POINT_TO_POINT: {"p2p_s"},
    Piece.WORKING: {"working_s"},
}
HOST = {
    *("data_wait_s", "checkpoint_save_s", "checkpoint_load_s", "evaluation_s", "compile_s", "gc_s"),
    *("allocator_s", "logging_s", "profiler_s", "sync_s", "host_busy_s", "host_silent_s"),
}
UNKNOWN: dict[Piece, set[str]] = {
    Piece.UNSEEN: HOST | {"launch_late_s", "launch_latency_s", "queued_s"},
    Piece.LATE_UNSEEN: HOST,
    Piece.SILENT: {"gc_s", "logging_s", "checkpoint_save_s", "checkpoint_load_s"},
    Piece.BUSY: {"gc_s", "logging_s", "checkpoint_save_s", "checkpoint_load_s"},
    Piece.EXPOSED: {"coll_wait_s", "coll_gone_s", "coll_transfer_s"},
}
SECONDS = [column.name for column in evidence.TRACED if column.unit == "s"]
EMPTY_KINDS = [kind for kind in Piece if kind < Piece.TRANSFER]
SPIN_KINDS = [kind for kind in Piece if Piece.TRANSFER <= kind < Piece.WORKING]


@pytest.fixture
def con() -> Iterator[duckdb.DuckDBPyConnection]:
    with database.memory() as opened:
        yield opened


def run_of(*ranks: int | None, python: bool = False) -> TraceRun:
    events = [kernel(0, 900), operator(0, 1), kernel(1000, 1)]
    if python:
        events.append(frame(0, 1, "train.py(1): step"))
    return assemble([trace_file(rank, events) for rank in ranks])


def put(
    run: TraceRun,
    place: int,
    empty: Sequence[tuple[Piece, int]],
    spinning: Sequence[tuple[Piece, int]] = (),
    *,
    gap_ns: int = 10,
    late: int = -1,
) -> None:
    """Give a GPU pieces of these kinds and lengths, one after the other."""
    gpu = run.gpus[place]
    begin = gpu.trace.parts.begin
    ends = begin + np.cumsum([ns for _, ns in [*empty, *spinning]], dtype=np.int64)
    spans = np.column_stack((np.append([begin], ends[:-1]), ends)).astype(np.int64)
    count = len(empty)
    gpu.trace.pieces = Pieces(
        spans=spans[:count],
        kinds=np.array([kind for kind, _ in empty], dtype=np.int8),
        gap_ns=np.full(count, gap_ns, dtype=np.int64),
    )
    kinds = np.array([kind for kind, _ in spinning], dtype=np.int8)
    gpu.spin = SpinPieces(
        spans=spans[count:],
        kinds=kinds,
        kernel=np.zeros(len(spinning), dtype=np.int64),
        late=np.where(kinds == Piece.WAIT, late, -1).astype(np.int64),
    )


def rows(con: duckdb.DuckDBPyConnection, table: str = "evidence") -> list[dict[str, Any]]:
    found = con.execute(f"FROM {table} ORDER BY window_id")
    names = [column[0] for column in found.description or []]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def by_kind(con: duckdb.DuckDBPyConnection) -> dict[Piece, dict[str, Any]]:
    kinds = dict(con.execute("SELECT window_id, kind FROM trace_rows").fetchall())
    return {Piece(kinds[row["window_id"]]): row for row in rows(con)}


def test_the_tables_speak_of_every_kind() -> None:
    assert set(FILLS) == set(Piece)
    assert set().union(*FILLS.values()) | {
        "d_s",
        "empty_s",
        "spinning_s",
        "gap_s",
        "coll_gone_s",
    } == set(SECONDS)


@pytest.mark.parametrize("kind", Piece, ids=lambda kind: kind.name)
@pytest.mark.parametrize("python", [False, True], ids=["bare", "python"])
def test_a_piece_fills_the_columns_of_its_kind(
    kind: Piece, python: bool, con: duckdb.DuckDBPyConnection
) -> None:
    run = run_of(0, 1, python=python)
    put(
        run,
        0,
        [(one, 1000 + one) for one in EMPTY_KINDS],
        [(one, 2000 + one) for one in SPIN_KINDS],
        late=1,
    )
    fill(con, run)
    row = next(
        row
        for row in rows(con)
        if row["rank"] == 0
        and con.execute(
            "SELECT kind FROM trace_rows WHERE window_id = ?", [row["window_id"]]
        ).fetchone()
        == (kind,)
    )
    empty, spinning = kind in EMPTY_KINDS, kind in SPIN_KINDS
    length_s = (901_000 if kind is Piece.WORKING else (1000 if empty else 2000) + kind) / 1e9
    unknown = UNKNOWN.get(kind, set())
    if python and kind in (Piece.SILENT, Piece.BUSY):
        unknown = set()  # frames would have shown them
    expected: dict[str, float | None] = dict.fromkeys(SECONDS, 0.0)
    expected |= dict.fromkeys(FILLS[kind], length_s)
    expected |= dict.fromkeys(unknown, None)
    expected |= {
        "d_s": length_s,
        "empty_s": length_s if empty else 0.0,
        "spinning_s": length_s if spinning else 0.0,
        "gap_s": 1e-8 if empty else None,
    }
    assert {name: row[name] for name in SECONDS} == expected
    assert row["data_workers"] == (0 if kind is Piece.DATA_IN_TRAINER else None)
    assert row["late_rank"] == (1 if kind is Piece.WAIT else None)
    assert row["coll_transport"] is None
    assert row["uuid"] is None


def test_keys_of_a_row(con: duckdb.DuckDBPyConnection) -> None:
    fill(con, run_of(3, None))
    first, second = (row for row in rows(con) if row["working_s"])
    assert (first["node"], first["gpu"], first["rank"], first["world_size"]) == ("node-a", 0, 3, 2)
    assert (first["t0_ns"], first["t1_ns"]) == (0, 1001 * US)
    assert second["rank"] is None
    ids = [row["window_id"] for row in rows(con)]
    assert ids == list(range(len(ids)))


def totals(filled: Filled) -> list[Counter[tuple[int, int]]]:
    """Return nanoseconds of each GPU by kind and late GPU, as its timeline has them."""
    out = []
    for line in filled.timelines:
        total: Counter[tuple[int, int]] = Counter()
        lengths = (line.spans[:, 1] - line.spans[:, 0]).tolist()
        for kind, late, ns in zip(line.kinds.tolist(), line.late.tolist(), lengths, strict=True):
            total[kind, late] += ns
        out.append(total)
    return out


@pytest.mark.parametrize("gap_ns", [10, LONG_GAP_NS])
@pytest.mark.parametrize("long_max", [5, 20_000])
def test_putting_pieces_together_changes_no_total(
    gap_ns: int, long_max: int, con: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_module, "LONG_PIECES_MAX", long_max)
    chance = np.random.default_rng(1)
    run = run_of(0, 1)
    for place in (0, 1):
        empty = [(Piece(one), 7) for one in chance.integers(0, Piece.TRANSFER, 3000).tolist()]
        spinning = [
            (Piece(one), 11) for one in chance.integers(Piece.TRANSFER, Piece.WORKING, 900).tolist()
        ]
        put(run, place, empty, spinning, gap_ns=gap_ns, late=1 - place)
    filled = fill(con, run)
    found: list[Counter[tuple[int, int]]] = [Counter(), Counter()]
    for place, kind, ns, late in con.execute(
        "SELECT place, kind, ns, late_rank FROM trace_rows JOIN evidence USING (window_id)"
    ).fetchall():
        if kind != Piece.WORKING:
            found[place][kind, -1 if late is None else late] += ns
    assert found == totals(filled)
    count = len(rows(con))
    assert count == filled.count
    alone = gap_ns >= LONG_GAP_NS and long_max > 3000
    assert count > 6000 if alone else count < BINS * len(Piece)


def test_each_piece_knows_its_row(con: duckdb.DuckDBPyConnection) -> None:
    run = run_of(0, 1)
    put(run, 0, [(Piece.BUSY, 5), (Piece.SYNC, 6), (Piece.BUSY, 7)], [(Piece.WAIT, 8)], late=1)
    put(run, 1, [(Piece.BUSY, 9)])
    filled = fill(con, run)
    kinds = dict(con.execute("SELECT window_id, kind FROM trace_rows").fetchall())
    for line, own in zip(filled.timelines, filled.rows, strict=True):
        assert [kinds[row] for row in own.tolist()] == line.kinds.tolist()
    assert not set(filled.rows[0].tolist()) & set(filled.rows[1].tolist())


def test_long_gaps_stay_apart(con: duckdb.DuckDBPyConnection) -> None:
    run = run_of(0)
    put(run, 0, [(Piece.SILENT, 5), (Piece.SILENT, 6)], gap_ns=LONG_GAP_NS)
    fill(con, run)
    assert sorted(row["host_silent_s"] for row in rows(con) if row["empty_s"]) == [5e-9, 6e-9]


def test_the_prelude_is_no_part_of_the_ledger(con: duckdb.DuckDBPyConnection) -> None:
    events = [
        operator(-500, 10),
        span(-400, 200, "next_batch"),
        kernel(0, 100),
        collective(200, 9, 1),
    ]
    filled = fill(con, assemble([trace_file(0, events)]))
    assert all(row["t0_ns"] >= 0 for row in rows(con))
    before = [row for row in rows(con, "trace_evidence") if row["window_id"] >= filled.count]
    assert sum(row["d_s"] for row in before) == pytest.approx(500e-6)
    assert sum(row["data_wait_s"] or 0 for row in before) == pytest.approx(200e-6)
    assert sorted(set(filled.prelude_rows[0].tolist())) == [row["window_id"] for row in before]
