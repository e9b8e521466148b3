"""What the tests of recording share: samplers in virtual time, and reading back what they wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import Collector
from whyidle.host import Host
from whyidle.layout import Identity
from whyidle.runner import PERIOD_S, RunObserver
from whyidle.sampler import Sampler
from whyidle.schema import TABLES
from whyidle.spool import SpoolWriter
from whyidle.store import Recording
from whyidle.table import Row, table_of
from world.machine import IDENTITY


def sample(
    recording: Path,
    collectors: Sequence[Collector],
    host_for: Callable[[Collector], Host],
    host: Host,
    clock: VirtualClock,
    seconds: float,
    *,
    identity: Identity = IDENTITY,
    rotate_s: float = 60.0,
    observer_for: Callable[[Collector], RunObserver | None] = lambda collector: None,
) -> None:
    """Sample for so many virtual seconds into the spool of a recording."""
    end = clock.mono_ns() + int(seconds * NS_PER_S)
    spool = SpoolWriter(identity.folder(recording) / "spool", identity, clock, rotate_s=rotate_s)
    sampler = Sampler(
        collectors, host_for, host, spool, pid=1, inline=True, observer_for=observer_for
    )
    sampler.run(lambda: clock.mono_ns() >= end)


_T = TypeVar("_T")
_LEAST = {"BIGINT": 0, "DOUBLE": 0.0, "VARCHAR": "", "BOOLEAN": False}


def make_row(kind: Callable[..., _T], /, **values: object) -> _T:
    """Return a row with these values, NULL where that may be and else the least there is."""
    filled: dict[str, object] = {
        column.name: None if column.nullable else _LEAST[column.type]
        for column in table_of(cast("type[Row]", kind)).columns
    }
    return kind(**{**filled, **values})


def rows(recording: Recording, table: str, without: Sequence[str] = ()) -> list[tuple[Any, ...]]:
    """Return all rows of a table, in order of their values."""
    columns = [
        column.name
        for row in TABLES
        if table_of(row).name == table
        for column in table_of(row).columns
        if column.name not in without
    ]
    listed = ", ".join(f'"{column}"' for column in columns)
    found: list[tuple[Any, ...]] = recording.con.execute(
        f'SELECT node, boot_id, {listed} FROM "{table}" ORDER BY ALL'
    ).fetchall()
    return found


def everything(*sources: Path, without: Sequence[str] = ()) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of all tables but those named."""
    with Recording(sources) as recording:
        assert recording.damaged == []
        return {
            table_of(row).name: rows(recording, table_of(row).name)
            for row in TABLES
            if table_of(row).name not in without
        }


def unaccounted(recording: Recording, collectors: Sequence[Collector]) -> dict[str, str]:
    """Return what is wrong with the accounts of each collector: {} if every due run is there.

    Due times are a period apart, so the runs begun and missed up to the last due time are known.
    """
    wrong: dict[str, str] = {}
    for collector in collectors:
        period = int((collector.every_s or PERIOD_S[collector.lane]) * NS_PER_S)
        ticks = recording.con.execute(
            "SELECT due_ns, began_ns, missed + rested FROM tick WHERE collector = $1 "
            "ORDER BY due_ns",
            [collector.name],
        ).fetchall()
        if not ticks:
            wrong[collector.name] = "never ran"
            continue
        next_due: int | None = None
        for due, began, without in ticks:
            # A row without a run counts its own due time among the missed.
            first = due - (without - (began is None)) * period
            if next_due is not None and first != next_due:
                wrong[collector.name] = f"expected {next_due}, accounted for from {first}"
            next_due = due + period
    return wrong
