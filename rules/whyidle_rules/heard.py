"""What rules have to say over many windows: their seconds, and the numbers that these rest on.

A run is heard in parts: a day of a node has five million windows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from whyidle_rules import evidence
from whyidle_rules.diagnosis import Grade
from whyidle_rules.rule import Rule
from whyidle_rules.says import fields

Array = npt.NDArray[Any]
_INTEGERS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a rule told of a run.

    `values` holds the columns that it reads and names: seconds summed over the windows in which it
    spoke, and of others the value that most of its seconds had; of a rule beside the ledger the
    mean of numbers, weighed by the seconds told. `working_s` is how long kernels computed on the
    GPUs that it spoke of, `grade` that of most of its seconds.
    """

    seconds: float
    working_s: float
    ranks: list[int]
    grade: Grade
    values: dict[str, Any]


@dataclass(slots=True)
class Heard:
    """One rule, as far as it was heard."""

    rule: Rule
    ns: float = 0.0
    working_s: float = 0.0
    ranks: set[int] = field(default_factory=set)
    grades: dict[Grade, float] = field(default_factory=lambda: defaultdict(float))
    sums: dict[str, float] = field(default_factory=dict)
    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    most: dict[str, tuple[float, Any]] = field(default_factory=dict)

    @property
    def columns(self) -> list[evidence.Column]:
        """The columns that it reads and names."""
        named = {field.name for field in fields(self.rule.says)} | set(self.rule.reads)
        return [column for column in evidence.COLUMNS if column.name in named]

    def add(self, ns: Array, of: Callable[[str], Array], inferred: Array) -> None:
        """Add windows in which it spoke, for so long each; `of` returns a column of them.

        Unknown numbers are NaN, texts None. `inferred` says where its grade is lowered to that.
        """
        self.ns += float(ns.sum())
        lowered = float(ns[inferred].sum())
        self.grades["inferred"] += lowered
        self.grades[self.rule.grade] += float(ns.sum()) - lowered
        ranks = _known(evidence.BY_NAME["rank"], of("rank"))[1]
        self.ranks |= {int(rank) for rank in np.unique(ranks)}
        for column in self.columns:
            known, values = _known(column, of(column.name))
            if len(values):
                self._add(column, ns[known], values)

    def _add(self, column: evidence.Column, ns: Array, values: Array) -> None:
        name = column.name
        if column.unit == "s":
            self.sums[name] = self.sums.get(name, 0.0) + float(values.sum())
        elif column.type == "DOUBLE" and self.rule.beside is not None:
            total, weight = self.means.get(name, (0.0, 0.0))
            more = float((values * ns).sum())
            self.means[name] = (total + more, weight + float(ns.sum()))
        else:
            place = int(ns.argmax())
            if name not in self.most or ns[place] > self.most[name][0]:
                self.most[name] = (float(ns[place]), _plain(column, values[place]))

    def told(self) -> Told:
        """Return what it told."""
        values: dict[str, Any] = {column.name: None for column in self.columns}
        values |= self.sums
        values |= {name: total / weight for name, (total, weight) in self.means.items()}
        values |= {name: value for name, (_, value) in self.most.items()}
        return Told(
            seconds=self.ns / 1e9,
            working_s=self.working_s,
            ranks=sorted(self.ranks),
            grade=max(self.grades, key=lambda grade: self.grades[grade], default=self.rule.grade),
            values=values,
        )


def _known(column: evidence.Column, values: Array) -> tuple[Array, Array]:
    """Return where values are known, and those: what does not fit its column is not."""
    if column.type == "VARCHAR":
        known = np.array([value is not None for value in values], dtype=bool)
    elif column.type == "INTEGER":
        known = np.abs(values) < _INTEGERS
    else:
        known = ~np.isnan(values)
    return known, values[known]


def _plain(column: evidence.Column, value: Any) -> Any:
    if column.type == "BOOLEAN":
        return bool(value > 0)
    if column.type == "VARCHAR":
        return value
    return float(value) if column.type == "DOUBLE" else round(float(value))
