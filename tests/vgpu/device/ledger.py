"""The node's own account of what ran when, as it writes it down. `vgpu.device.truth` reads it."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from vgpu.device.kinds import FIRST_COLLECTIVE, FIRST_COPY, KINDS, SM, WHATS, Activity
from vgpu.device.lane import Context, Held, Lane, Piece
from vgpu.device.wire import Code, Op

FORMAT = "vgpu.truth/1"
# The reader builds its numpy type from this: name, struct code. -1 is "never" or "none".
FIELDS = (
    ("launch_ns", "q"),
    ("begin_ns", "q"),
    ("ready_ns", "q"),
    ("end_ns", "q"),
    ("size_bytes", "q"),
    ("sequence", "q"),
    ("pid", "i"),
    ("group", "i"),
    ("fill", "f"),
    ("gpu", "H"),
    ("stream", "H"),
    ("what", "H"),
    ("cut", "H"),
)
_RECORD = struct.Struct("<" + "".join(code for _, code in FIELDS))
_NONE = -1


def _what(op: Op) -> int:
    if op.code == Code.KERNEL:
        return op.detail
    return (FIRST_COPY if op.code == Code.COPY else FIRST_COLLECTIVE) + op.detail


class Ledger:
    """Finished intervals, and who was there."""

    def __init__(self) -> None:
        self._records = bytearray()
        self._processes: list[dict[str, int | str | None]] = []
        self._groups: dict[int, str] = {}

    def group(self, number: int, name: str) -> None:
        """A group exists."""
        self._groups[number] = name

    def enter(self, context: Context) -> None:
        """A process is there."""
        self._processes.append(
            {"pid": context.pid, "gpu": context.gpu, "begin_ns": context.begin_ns, "end_ns": None}
        )

    def leave(self, context: Context, now_ns: int) -> None:
        """It is gone; what ran is cut off, what waited never was."""
        for lane in context.lanes.values():
            self._records += _running(lane, now_ns)
        for row in self._processes:
            same = (row["pid"], row["gpu"], row["begin_ns"])
            if same == (context.pid, context.gpu, context.begin_ns):
                row["end_ns"] = now_ns

    def finished(self, lane: Lane, pieces: list[Piece]) -> None:
        """Writes down what has ended; a collective once, with its last piece."""
        for piece in pieces:
            if piece.last:
                self._records += _record(lane, piece, piece.end_ns)

    def write(self, path: Path, lanes: list[Lane], now_ns: int) -> None:
        """Everything up to now, with what runs now cut off at now; the file appears whole."""
        records = bytes(self._records) + b"".join(_running(lane, now_ns) for lane in lanes)
        head: dict[str, Any] = {
            "format": FORMAT,
            "horizon_ns": now_ns,
            "whats": WHATS,
            "kernels": len(KINDS),
            "fields": FIELDS,
            "groups": self._groups,
            "processes": self._processes,
        }
        draft = path.with_name(f"{path.name}.{os.getpid()}.part")
        with draft.open("wb") as out:
            out.write(json.dumps(head).encode() + b"\n")
            out.write(records)
        draft.rename(path)


def _record(lane: Lane, piece: Piece, end_ns: int, *, cut: bool = False) -> bytes:
    ready_ns = piece.ready_ns if piece.ready_ns <= end_ns else _NONE
    times = (piece.first_ns, ready_ns, end_ns)
    return _pack(lane, piece.op, times, piece.sequence, piece.activity, cut)


def _pack(
    lane: Lane,
    op: Op,
    times: tuple[int, int, int],
    sequence: int | None,
    activity: Activity | None,
    cut: bool,
) -> bytes:
    return _RECORD.pack(
        op.stamp_ns,
        *times,
        op.size_bytes,
        _NONE if sequence is None else sequence,
        lane.context.pid,
        op.token if op.code == Code.COLLECTIVE else _NONE,
        0.0 if activity is None else activity.shares[SM],
        lane.context.gpu,
        lane.stream,
        _what(op),
        cut,
    )


def _running(lane: Lane, now_ns: int) -> bytes:
    """Records of what is resident now; of a collective's two pieces the last knows both."""
    rows = b""
    for piece in lane.pieces:
        if piece.first_ns >= now_ns:
            break
        if piece.last:
            rows += _record(lane, piece, min(piece.end_ns, now_ns), cut=piece.end_ns > now_ns)
    held: Held | None = lane.held
    if held is not None and held.op.code == Code.COLLECTIVE and held.arrival_ns < now_ns:
        times = (held.arrival_ns, _NONE, now_ns)
        if held.first_ns is not None:
            times = (held.first_ns, held.arrival_ns, now_ns)
        rows += _pack(lane, held.op, times, held.sequence, held.activity, True)
    return rows
