"""The columns of one GPU's evidence while they are filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from whyidle_rules import evidence
from whyidle_rules.compile_levels import Facts
from whyidle_rules.recording.series import Array

_INTEGERS = 1 << 31


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


def facts(columns: Columns) -> Facts:
    """Return what is the same in all windows."""
    null = {name for name in evidence.BY_NAME if name not in columns}
    zero, full = set(), set()
    for name, values in columns.items():
        kind = evidence.BY_NAME[name].type
        if kind in ("VARCHAR", "BIGINT"):
            continue
        # What does not fit its column is unknown too; false for NaN.
        known = np.abs(values) < _INTEGERS if kind == "INTEGER" else ~np.isnan(values)
        if known.all():
            full.add(name)
            if kind == "DOUBLE" and not values.any():
                zero.add(name)
        elif not known.any():
            null.add(name)
    return Facts(null=frozenset(null), zero=frozenset(zero), full=frozenset(full))


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
