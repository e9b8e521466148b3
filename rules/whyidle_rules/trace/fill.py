"""The evidence view of a traced run.

Pieces are exact, but a long trace has millions of them, most a few microseconds long. Pieces of one
kind that lie in the same 200th of the run become one row: all of its seconds are in the same
columns, so no claim comes out differently. Long gaps, about which rules ask how long they are, keep
rows of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import numpy as np
import numpy.typing as npt

from whyidle_rules import evidence
from whyidle_rules.intervals import Ints
from whyidle_rules.trace.device import Parts
from whyidle_rules.trace.gaps import Piece
from whyidle_rules.trace.run import Timeline, TraceRun, is_spinning, prelude, timeline

BINS = 200
LONG_GAP_NS = 1_000_000
LONG_PIECES_MAX = 20_000  # of one GPU; with more of them, they are put together like short ones


@dataclass(slots=True)
class Filled:
    """What the rows were made of, GPU by GPU.

    `rows` holds for each piece of a timeline its window_id. Preludes lie before the window: they
    are no part of the ledger, but tell why a rank came late to the first collective. Their rows
    have numbers from `count` on.
    """

    timelines: list[Timeline]
    rows: list[Ints]
    preludes: list[Timeline]
    prelude_rows: list[Ints]
    count: int


# Columns that a piece of a kind fills with its length.
_FILLS: dict[str, tuple[Piece, ...]] = {
    "data_wait_s": (Piece.DATA, Piece.DATA_IN_TRAINER),
    "checkpoint_save_s": (Piece.CHECKPOINT_SAVE,),
    "checkpoint_load_s": (Piece.CHECKPOINT_LOAD,),
    "evaluation_s": (Piece.EVALUATION,),
    "compile_s": (Piece.COMPILE,),
    "gc_s": (Piece.GC,),
    "allocator_s": (Piece.ALLOCATOR,),
    "logging_s": (Piece.LOGGING,),
    "profiler_s": (Piece.PROFILER,),
    "sync_s": (Piece.SYNC,),
    "host_busy_s": (Piece.BUSY,),
    "host_silent_s": (Piece.SILENT,),
    "launch_latency_s": (Piece.LATENCY,),
    "queued_s": (Piece.QUEUED,),
    "copy_h2d_s": (Piece.COPY_H2D, Piece.COPY_H2D_PAGEABLE),
    "copy_h2d_pageable_s": (Piece.COPY_H2D_PAGEABLE,),
    "copy_d2h_s": (Piece.COPY_D2H,),
    "copy_device_s": (Piece.COPY_DEVICE,),
    "coll_s": (Piece.TRANSFER, Piece.WAIT, Piece.EXPOSED),
    "coll_wait_s": (Piece.WAIT,),
    "coll_transfer_s": (Piece.TRANSFER,),
    "p2p_s": (Piece.POINT_TO_POINT,),
    "working_s": (Piece.WORKING,),
}
_LATE: tuple[Piece, ...] = (
    Piece.LATE_UNSEEN,
    Piece.CHECKPOINT_SAVE,
    Piece.CHECKPOINT_LOAD,
    Piece.DATA,
    Piece.DATA_IN_TRAINER,
    Piece.GC,
    Piece.COMPILE,
    Piece.LOGGING,
    Piece.PROFILER,
    Piece.ALLOCATOR,
    Piece.EVALUATION,
    Piece.SYNC,
    Piece.BUSY,
    Piece.SILENT,
)
# Kinds in which a column is unknown although no other column has the time: nothing was seen of the
# launching thread, or the thing only shows where Python frames were recorded.
_UNSEEN = (Piece.UNSEEN, Piece.LATE_UNSEEN)
_HOST_COLUMNS = (
    "data_wait_s",
    "checkpoint_save_s",
    "checkpoint_load_s",
    "evaluation_s",
    "compile_s",
    "gc_s",
    "allocator_s",
    "logging_s",
    "profiler_s",
    "sync_s",
    "host_busy_s",
    "host_silent_s",
)
_PYTHON_COLUMNS = ("gc_s", "logging_s", "checkpoint_save_s", "checkpoint_load_s")
_LAUNCH_COLUMNS = ("launch_latency_s", "queued_s")


def fill(con: duckdb.DuckDBPyConnection, run: TraceRun) -> Filled:
    """Create the evidence of a run.

    Table `trace_evidence` holds all rows, view `evidence` those inside the windows, and table
    `trace_rows` the GPU and kind of each of those.
    """
    rows = _Rows()
    timelines = [timeline(gpu) for gpu in run.gpus]
    inside = [
        rows.add(place, gpu.trace.parts, line, working=True)
        for place, (gpu, line) in enumerate(zip(run.gpus, timelines, strict=True))
    ]
    count = rows.count
    preludes = [prelude(gpu) for gpu in run.gpus]
    before = [
        rows.add(place, gpu.trace.parts, line, working=False)
        for place, (gpu, line) in enumerate(zip(run.gpus, preludes, strict=True))
    ]
    _create(con, run, rows, count)
    return Filled(timelines, inside, preludes, before, count)


class _Rows:
    """Collects rows of the evidence, column by column."""

    def __init__(self) -> None:
        self._columns: list[dict[str, npt.NDArray[np.generic]]] = []
        self.count = 0

    def add(self, place: int, parts: Parts, line: Timeline, *, working: bool) -> Ints:
        """Add the rows of one timeline; returns for each of its pieces the row it is part of."""
        columns, own = _rows(parts, line)
        if working:
            mark = {"kind": int(Piece.WORKING), "late": -1, "t0_ns": parts.begin, "gap_ns": 0}
            mark |= {"t1_ns": parts.end, "ns": parts.compute}
            columns = {name: np.append(values, mark[name]) for name, values in columns.items()}
        size = len(columns["ns"])
        columns["window_id"] = np.arange(self.count, self.count + size, dtype=np.int64)
        columns["place"] = np.full(size, place, dtype=np.int64)
        self._columns.append(columns)
        own = own + self.count
        self.count += size
        return own

    def table(self) -> dict[str, Ints]:
        """Return all rows."""
        names = ("window_id", "place", "kind", "late", "t0_ns", "t1_ns", "ns", "gap_ns")
        nothing = [np.empty(0, dtype=np.int64)]
        return {
            name: np.concatenate([mine[name] for mine in self._columns] or nothing).astype(np.int64)
            for name in names
        }


def _rows(parts: Parts, line: Timeline) -> tuple[dict[str, npt.NDArray[np.generic]], Ints]:
    """Return the rows of one GPU, and for each piece the number of its row."""
    starts = line.spans[:, 0]
    lengths = line.spans[:, 1] - starts
    bins = np.maximum(starts - parts.begin, 0) // max(1, -(-parts.window // BINS))
    long = (line.gap_ns >= LONG_GAP_NS) & ~is_spinning(line.kinds)
    if int(long.sum()) > LONG_PIECES_MAX:
        alone = np.where(long, 1 + np.log2(np.maximum(line.gap_ns, 1)).astype(np.int64), 0)
    else:
        alone = np.where(long, np.arange(1, len(starts) + 1), 0)
    # One number for (alone, bin, kind, late): np.unique sorts numbers ten times faster than rows.
    lates = int(line.late.max(initial=-1)) + 2
    keys = (alone * (BINS + 1) + bins) * len(Piece) + line.kinds.astype(np.int64)
    keys = keys * lates + line.late + 1
    unique, first, own = np.unique(keys, return_index=True, return_inverse=True)
    own = own.reshape(-1).astype(np.int64)
    size = len(unique)
    pieces = np.bincount(own, minlength=size)
    gap_sum = np.bincount(own, weights=line.gap_ns.astype(np.float64), minlength=size)
    last = np.zeros(size, dtype=np.int64)
    np.maximum.at(last, own, line.spans[:, 1])
    ns = np.zeros(size, dtype=np.int64)
    np.add.at(ns, own, lengths)
    return {
        "kind": line.kinds[first].astype(np.int64),
        "late": line.late[first],
        "t0_ns": starts[first],
        "t1_ns": last,
        "ns": ns,
        "gap_ns": (gap_sum / np.maximum(pieces, 1)).astype(np.int64),
    }, own


def _create(con: duckdb.DuckDBPyConnection, run: TraceRun, rows: _Rows, count: int) -> None:
    table = rows.table()
    place = table["place"]
    # What belongs to the GPU is laid beside each row here, -1 for unknown: a join would bring 5 MB
    # of DuckDB's code and tables into memory.
    for name, values in _by_gpu(run).items():
        table[name] = np.append(values, -1)[place]
    table["late_rank"] = np.append(_by_gpu(run)["rank"], -1)[table["late"]]
    con.register("trace_pieces", table)
    nodes = {"nodes": [gpu.node for gpu in run.gpus]}
    con.execute(f"CREATE TABLE trace_evidence AS {_query()}", nodes)
    con.execute(f"CREATE VIEW evidence AS FROM trace_evidence WHERE window_id < {count}")
    con.execute(
        "CREATE TABLE trace_rows AS SELECT window_id, place, kind, ns FROM trace_pieces"
        f" WHERE window_id < {count}"
    )
    con.unregister("trace_pieces")


def _by_gpu(run: TraceRun) -> dict[str, Ints]:
    """Return what every row of a GPU shares; -1 for unknown."""

    def known(value: int | None) -> int:
        return -1 if value is None else value

    columns: dict[str, list[int]] = {"gpu": [], "rank": [], "world_size": [], "has_gc": []}
    for gpu in run.gpus:
        columns["gpu"].append(gpu.trace.device)
        columns["rank"].append(known(gpu.rank))
        columns["world_size"].append(known(run.world_size or gpu.file.world_size))
        columns["has_gc"].append(int(gpu.file.has_python or gpu.file.has_gc))
    return {name: np.array(values, dtype=np.int64) for name, values in columns.items()}


def _query() -> str:
    empty = [kind for kind in Piece if kind < Piece.TRANSFER]
    spinning = [kind for kind in Piece if Piece.TRANSFER <= kind < Piece.WORKING]
    expressions: dict[str, str] = {
        "window_id": "window_id",
        "node": "$nodes[place + 1]",
        "gpu": "nullif(gpu, -1)",
        "uuid": "NULL",
        "rank": "nullif(rank, -1)",
        "t0_ns": "t0_ns",
        "t1_ns": "t1_ns",
        "d_s": "ns / 1e9",
        "empty_s": _when(empty),
        "spinning_s": _when(spinning),
        "gap_s": f"CASE WHEN kind IN ({_list(empty)}) THEN gap_ns / 1e9 END",
        "data_workers": f"CASE WHEN kind = {int(Piece.DATA_IN_TRAINER)} THEN 0 END",
        "launch_late_s": f"CASE WHEN kind = {int(Piece.UNSEEN)} THEN NULL ELSE {_when(_LATE)} END",
        # A trace of a rank that was gone would not be there.
        "coll_gone_s": f"CASE WHEN kind = {int(Piece.EXPOSED)} THEN NULL ELSE 0.0 END",
        "coll_transport": "NULL",
        "late_rank": "nullif(late_rank, -1)",
        "world_size": "nullif(world_size, -1)",
    }
    for name, kinds in _FILLS.items():
        expressions[name] = f"CASE {_unknown(name)} ELSE {_when(kinds)} END"
    body = ", ".join(
        f'CAST({expressions.get(column.name, "NULL")} AS {column.type}) AS "{column.name}"'
        for column in evidence.COLUMNS
    )
    return f"SELECT {body} FROM trace_pieces"


def _unknown(name: str) -> str:
    """Return the WHEN clauses under which a column is NULL; at least one that never holds."""
    kinds: list[Piece] = []
    if name in _HOST_COLUMNS:
        kinds.extend(_UNSEEN)
    if name in _LAUNCH_COLUMNS:
        kinds.append(Piece.UNSEEN)
    if name in ("coll_wait_s", "coll_transfer_s"):
        kinds.append(Piece.EXPOSED)
    clause = f"WHEN kind IN ({_list(kinds)}) THEN NULL" if kinds else "WHEN false THEN NULL"
    if name in _PYTHON_COLUMNS:
        # A pause shows as silence, or as one long operator, unless Python frames say what it was.
        clause += f" WHEN kind IN ({_list((Piece.SILENT, Piece.BUSY))}) AND has_gc = 0 THEN NULL"
    return clause


def _when(kinds: tuple[Piece, ...] | list[Piece]) -> str:
    return f"CASE WHEN kind IN ({_list(kinds)}) THEN ns / 1e9 ELSE 0.0 END"


def _list(kinds: tuple[Piece, ...] | list[Piece]) -> str:
    return ", ".join(str(int(kind)) for kind in kinds)
