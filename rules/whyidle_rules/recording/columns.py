"""The columns of one GPU's evidence while they are filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from whyidle_rules import evidence
from whyidle_rules.recording.series import Array


class Columns(dict[str, Array]):
    """Columns by name. One that nobody has set is unknown, and made when it is asked for.

    Most columns are unknown of any GPU, and a day of one has 700,000 windows.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __missing__(self, name: str) -> Array:
        kind = evidence.BY_NAME[name].type
        made: Array
        if kind == "VARCHAR":
            made = np.full(self.size, None, dtype=object)
        elif kind == "BIGINT":  # times and numbers of windows: always known, and exact
            made = np.zeros(self.size, dtype=np.int64)
        else:
            made = np.full(self.size, np.nan)
        self[name] = made
        return made

    @contextmanager
    def only(self, rows: slice) -> Iterator[Columns]:
        """Give some rows of all columns; what is set in them is set here."""
        if rows == slice(0, self.size):
            yield self
            return
        some = Columns(rows.stop - rows.start)
        for name, values in self.items():
            some[name] = values[rows].copy()
        yield some
        for name, values in some.items():
            self[name][rows] = values


def joined(parts: Sequence[Columns]) -> Columns:
    """Return the columns of several GPUs, one after another."""
    if len(parts) == 1:
        return parts[0]
    out = Columns(sum(part.size for part in parts))
    for name in sorted({name for part in parts for name in part}):
        out[name] = np.concatenate([part[name] for part in parts])
    return out


class Table:
    """Columns of one GPU's evidence, unknown until they are set."""

    def __init__(self, size: int) -> None:
        self.columns = Columns(size)

    def put(self, name: str, rows: slice, values: Array | float | str | None) -> None:
        """Set some rows of a column."""
        self.columns[name][rows] = values
