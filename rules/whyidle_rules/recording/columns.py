"""The columns of one GPU's evidence while they are filled in."""

from __future__ import annotations

import numpy as np

from whyidle_rules import evidence
from whyidle_rules.recording.series import Array


class Table:
    """Columns of one GPU's evidence, unknown until they are set."""

    def __init__(self, size: int) -> None:
        self.columns: dict[str, Array] = {}
        for column in evidence.COLUMNS:
            if column.type == "VARCHAR":
                self.columns[column.name] = np.full(size, None, dtype=object)
            elif column.type == "BIGINT":  # times and numbers of windows: always known, and exact
                self.columns[column.name] = np.zeros(size, dtype=np.int64)
            else:
                self.columns[column.name] = np.full(size, np.nan)

    def put(self, name: str, rows: slice, values: Array | float | str | None) -> None:
        """Set some rows of a column."""
        self.columns[name][rows] = values
