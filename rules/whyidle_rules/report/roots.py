"""What to fix first: root causes gathered over the ranks on which they arose.

One fix usually cures a cause on every rank, so 64 ranks that each load their own data are one
cause of the whole run and not 64 small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from whyidle_rules.diagnosis import Grade, LedgerRow, RootCause

# A weaker grade over less than this share of a cause's seconds does not change how it is told.
_WEAK_RATIO = 0.05
# One origin with this share of a cause is where to look; from the second one on it is all of it.
_MOSTLY_RATIO = 0.8
_ONLY_RATIO = 0.99
# An origin with less than this share of the biggest one is noise beside it.
_NOISE_RATIO = 0.05

_STRONGEST_FIRST: tuple[Grade | None, ...] = ("measured", "observed", "inferred", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootGroup:
    """One cause wherever it arose: its root-cause rows, biggest first, and its ledger rows."""

    cause: str
    subcause: str
    idle_s: float
    origins: tuple[RootCause, ...]
    felt: tuple[LedgerRow, ...]

    @property
    def waited_s(self) -> float:
        """Seconds that other GPUs spent waiting for it."""
        return math.fsum(row.idle_s for row in self.felt if row.root.where == "rank")

    @property
    def outside_s(self) -> float:
        """Seconds that arose on something outside the recording."""
        return math.fsum(row.idle_s for row in self.felt if row.root.where == "outside")

    @property
    def grade(self) -> Grade | None:
        """The weakest grade that matters; None where a second of it was never graded.

        The ranks that waited grade the wait, the late rank alone grades why it was late, and its
        own seconds are few beside theirs: so the two are looked at apart.
        """
        own = [row for row in self.felt if row.root.where == "self"]
        waits = [row for row in self.felt if row.root.where != "self"]
        grades = [weakest(rows) for rows in (own, waits) if rows]
        return max(grades, key=_STRONGEST_FIRST.index, default=None)

    @property
    def main_origins(self) -> tuple[RootCause, ...]:
        """The origins worth naming: one, if most of it arose there."""
        first = self.origins[0]
        if first.idle_s >= _MOSTLY_RATIO * self.idle_s:
            return (first,)
        return tuple(row for row in self.origins if row.idle_s >= _NOISE_RATIO * first.idle_s)

    @property
    def is_only_there(self) -> bool:
        """Say whether the main origins are all of it, but for a rounding error."""
        return math.fsum(row.idle_s for row in self.main_origins) >= _ONLY_RATIO * self.idle_s


def group_roots(root_causes: Sequence[RootCause], ledger: Sequence[LedgerRow]) -> list[RootGroup]:
    """Gather root causes by (cause, subcause), biggest first; rows without seconds are left out."""
    by_pair: dict[tuple[str, str], list[RootCause]] = {}
    for row in root_causes:
        if row.idle_s > 0:
            by_pair.setdefault((row.cause, row.subcause), []).append(row)
    groups = [
        RootGroup(
            cause=cause,
            subcause=subcause,
            idle_s=math.fsum(row.idle_s for row in rows),
            origins=tuple(sorted(rows, key=_by_size)),
            felt=tuple(
                row
                for row in ledger
                if row.idle_s > 0 and (row.root.cause, row.root.subcause) == (cause, subcause)
            ),
        )
        for (cause, subcause), rows in by_pair.items()
    ]
    return sorted(groups, key=lambda group: (-group.idle_s, group.cause, group.subcause))


def weakest(rows: Sequence[LedgerRow]) -> Grade | None:
    """Return the weakest grade that covers more than a little of the rows' seconds."""
    total = math.fsum(row.idle_s for row in rows)
    found: Grade | None = None
    for grade in _STRONGEST_FIRST:
        covered = math.fsum(row.idle_s for row in rows if row.grade == grade)
        if total > 0 and covered >= _WEAK_RATIO * total:
            found = grade
    return found


def is_sure(grade: Grade | None) -> bool:
    """Say whether a claim of this grade may be made without "probably"."""
    return grade in ("measured", "observed")


def _by_size(row: RootCause) -> tuple[float, str, int]:
    return (-row.idle_s, row.node or "", -1 if row.rank is None else row.rank)
