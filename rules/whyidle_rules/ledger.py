"""The ledger: idle nanoseconds by what they were felt as and by where they arose.

Everything is added up in integers, so the rows sum to the idle total exactly whatever was split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from whyidle_rules.diagnosis import Grade, LedgerRow, Root, RootCause, Where

UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A GPU as the ledger names it: its node, and its rank where that is known."""

    node: str | None
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Idle nanoseconds of one GPU, felt as one cause and arisen at `origin` as `root`.

    `origin` is None where the cause arose outside of what was recorded.
    """

    gpu: Place
    cause: str
    subcause: str
    grade: Grade | None
    pool: Literal["empty", "spinning"]
    ns: int
    origin: Place | None
    root: tuple[str, str]

    @property
    def where(self) -> Where:
        """Say whether the cause arose on this GPU, on another one, or outside."""
        if self.origin is None:
            return "outside"
        return "self" if self.origin == self.gpu else "rank"


T = TypeVar("T")


def split(total: int, weights: Mapping[T, float]) -> dict[T, int]:
    """Split an integer by weights, without losing or making a unit; the largest remainders win."""
    whole = sum(weights.values())
    if total <= 0 or whole <= 0:
        return {}
    exact = {key: total * weight / whole for key, weight in weights.items()}
    parts = {key: int(value) for key, value in exact.items()}
    missing = total - sum(parts.values())
    if not 0 <= missing <= len(parts):  # beyond 2**53 doubles lose whole units
        parts[max(parts, key=lambda key: parts[key])] += missing
        missing = 0
    by_remainder = sorted(parts, key=lambda key: parts[key] - exact[key])
    for key in by_remainder[:missing]:
        parts[key] += 1
    return {key: part for key, part in parts.items() if part}


def ledger_rows(charges: Iterable[Charge], gpu_ns: int) -> list[LedgerRow]:
    """Return the ledger over all GPUs, the largest row first."""
    empty: dict[tuple[str, str, Grade | None, Root], int] = defaultdict(int)
    spinning: dict[tuple[str, str, Grade | None, Root], int] = defaultdict(int)
    for charge in charges:
        # What arose where it was felt is told by GPU elsewhere; here it is one row for all.
        away = charge.origin if charge.where == "rank" else None
        root = Root(
            where=charge.where,
            node=away.node if away else None,
            rank=away.rank if away else None,
            cause=charge.root[0],
            subcause=charge.root[1],
        )
        pool = empty if charge.pool == "empty" else spinning
        pool[charge.cause, charge.subcause, charge.grade, root] += charge.ns
    rows = []
    for key in dict.fromkeys([*empty, *spinning]):
        cause, subcause, grade, root = key
        idle = empty.get(key, 0) + spinning.get(key, 0)
        rows.append(
            LedgerRow(
                cause=cause,
                subcause=subcause,
                grade=grade,
                idle_s=idle / 1e9,
                empty_s=empty.get(key, 0) / 1e9,
                spinning_s=spinning.get(key, 0) / 1e9,
                share=idle / gpu_ns if gpu_ns else 0.0,
                root=root,
            )
        )
    return sorted(rows, key=lambda row: (-row.idle_s, row.cause, row.subcause, str(row.root)))


def root_causes(charges: Iterable[Charge], gpu_ns: int) -> list[RootCause]:
    """Return idle time of all GPUs by where and as what it arose, the largest first."""
    total: dict[tuple[str, str, str | None, int | None], int] = defaultdict(int)
    for charge in charges:
        node = charge.origin.node if charge.origin else None
        rank = charge.origin.rank if charge.origin else None
        cause, subcause = charge.root
        total[cause, subcause, node, rank] += charge.ns
    rows = [
        RootCause(
            cause=cause,
            subcause=subcause,
            node=node,
            rank=rank,
            idle_s=ns / 1e9,
            share=ns / gpu_ns if gpu_ns else 0.0,
        )
        for (cause, subcause, node, rank), ns in total.items()
    ]
    return sorted(rows, key=lambda row: (-row.idle_s, row.cause, row.subcause, row.rank or 0))


def by_cause(charges: Sequence[Charge]) -> dict[str, float]:
    """Return seconds by top-level cause as it was felt, the largest first."""
    total: dict[str, int] = defaultdict(int)
    for charge in charges:
        total[charge.cause] += charge.ns
    return {cause: ns / 1e9 for cause, ns in sorted(total.items(), key=lambda item: -item[1])}
