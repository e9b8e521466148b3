"""Follows the spool while the sampler writes it: what came since the last look, by rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whyidle.layout import PIECE, files, order
from whyidle.spool_read import Columns, Piece, read_on

# What a look reads at most of pieces that are finished already: after a pause of the keeper what
# is older is of no use to gauges, and the recording has it.
PIECES_BACK = 1

Record = Mapping[str, Any]


class SpoolTail:
    """The newest pieces of a spool, read once each from where the last look ended."""

    __slots__ = ("_folder", "_offset", "_path")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._offset = 0

    def look(self) -> list[Piece]:
        """Return what was appended since the last look, oldest first; [] if nothing was.

        Raises OSError if the spool cannot be read.
        """
        pieces = files(self._folder, PIECE)
        if self._path is None:
            pieces = pieces[-PIECES_BACK - 1 :]
        else:
            at = order(self._path)
            pieces = [path for path in pieces if order(path) >= at][-PIECES_BACK - 1 :]
        found: list[Piece] = []
        for path in pieces:
            if path != self._path:
                self._path, self._offset = path, 0
            try:
                piece, self._offset = read_on(path, self._offset)
            except FileNotFoundError:  # the keeper took it over just now
                continue
            if piece.blocks:
                found.append(piece)
        return found


def records(piece: Piece, table: str) -> Iterator[Record]:
    """Yield the rows of a table as dictionaries by column; NULL is None."""
    columns = piece.tables.get(table)
    if not columns:
        return
    values = {name: _values(columns, name) for name in columns}
    for index in range(piece.counts[table]):
        yield {name: column[index] for name, column in values.items()}


def _values(columns: Columns, name: str) -> list[Any]:
    column = columns[name]
    if column.type == "VARCHAR":
        words = list(column.words)
        plain: list[Any] = [words[number] if words else None for number in column.values]
    elif column.type == "BOOLEAN":
        plain = [bool(value) for value in column.values]
    else:
        plain = column.values.tolist()
    return [value if there else None for value, there in zip(plain, column.present, strict=True)]


def newest_ns(piece: Piece) -> int | None:
    """Return when the newest run of a collector in it was accounted for; None if none was."""
    ticks = piece.tables.get("tick")
    if not ticks or not piece.counts["tick"]:
        return None
    return int(max(ticks["mono_ns"].values))
