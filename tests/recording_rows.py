"""Recordings made of declared rows: what a node did is written down, not sampled.

Times are CLOCK_MONOTONIC of the node; most stories begin at `BEGIN_NS`. The boot clock is ahead
by `BOOT_AHEAD_NS`, as after a suspend: who takes one clock for the other is off by that much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import duckdb

from recording_kit import make_row
from whyidle.clock import NS_PER_S
from whyidle.layout import Identity, stem
from whyidle.manifest import RECORDING, write_manifest
from whyidle.schema import TABLES
from whyidle.schema.agent import ClockReading, Tick
from whyidle.schema.gpu import GpuActivity, GpuInfo, GpuProcess
from whyidle.schema.machine import CgroupCpu, Cpu
from whyidle.schema.probe import Probe, ProbeEvent
from whyidle.schema.process import Process
from whyidle.segment import new_segment
from whyidle.table import Row, Table, identifier, table_of

Machine: TypeAlias = "tuple[str, str]"
Rows: TypeAlias = "Sequence[Row] | Mapping[Machine, Sequence[Row]]"

BOOT = "4f2a91c3-0c5e-4a5d-9e0b-2f6d1c7a8b90"
HERE: Machine = ("n0", BOOT)
BEGIN_NS = 1000 * NS_PER_S
BOOT_AHEAD_NS = 7 * NS_PER_S
WALL_AHEAD_NS = 1_780_000_000 * NS_PER_S
WINDOW_NS = NS_PER_S // 8
UUID = "GPU-0"


def s(seconds: float) -> int:
    """Return the monotonic time of a second of the story."""
    return BEGIN_NS + round(seconds * NS_PER_S)


def connect(rows: Rows) -> duckdb.DuckDBPyConnection:
    """Return a connection with tables as the views of a recording are, and these rows in them."""
    con = duckdb.connect(":memory:", config={"threads": "1"})
    for kind in TABLES:
        spec = table_of(kind)
        body = ", ".join(f"{identifier(c.name)} {c.type}" for c in spec.columns)
        con.execute(f"CREATE TABLE {identifier(spec.name)} (node VARCHAR, boot_id VARCHAR, {body})")
    by_machine = rows if isinstance(rows, Mapping) else {HERE: rows}
    for (node, boot), own in by_machine.items():
        for spec, group in _by_table(own):
            _insert(con, spec, group, identifier(spec.name), {"node": node, "boot_id": boot})
    return con


def write(folder: Path, rows: Rows, name_ns: int = BEGIN_NS) -> Path:
    """Write a recording of one segment for each machine; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    by_machine = rows if isinstance(rows, Mapping) else {HERE: rows}
    for (node, boot), own in by_machine.items():
        identity = Identity(node=node, boot_id=boot)
        target = identity.folder(folder) / f"{stem(WALL_AHEAD_NS + name_ns, name_ns)}.duckdb"
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_segment(target, identity) as con:
            for spec, group in _by_table(own):
                _insert(con, spec, group, f"seg.{identifier(spec.name)}", {})
    write_manifest(folder, RECORDING, {})
    return folder


def _by_table(rows: Sequence[Row]) -> list[tuple[Table, list[Row]]]:
    groups: dict[type[Row], list[Row]] = {}
    for row in rows:
        groups.setdefault(type(row), []).append(row)
    return [(table_of(kind), group) for kind, group in groups.items()]


def _insert(
    con: duckdb.DuckDBPyConnection,
    spec: Table,
    rows: Sequence[Row],
    target: str,
    fixed: Mapping[str, str],
) -> None:
    names = [*map(identifier, fixed), *(identifier(c.name) for c in spec.columns)]
    values: list[Any] = [*fixed.values()]
    picked = ["?" for _ in fixed]
    for column in spec.columns:
        picked.append(f"unnest(?::{column.type}[])")
        values.append([getattr(row, column.name) for row in rows])
    con.execute(f"INSERT INTO {target} ({', '.join(names)}) SELECT {', '.join(picked)}", values)


def windows(
    busy: Sequence[float | None],
    *,
    uuid: str = UUID,
    at: float = 0.0,
    length_ns: int = WINDOW_NS,
    **more: object,
) -> list[Row]:
    """Return GPM windows that touch, from second `at` on; `busy` is the share with kernels."""
    made = []
    for number, ratio in enumerate(busy):
        t1 = s(at) + (number + 1) * length_ns
        made.append(
            make_row(
                GpuActivity,
                **{
                    "mono_ns": t1,
                    "uuid": uuid,
                    "source": "gpm",
                    "t0_ns": t1 - length_ns,
                    "t1_ns": t1,
                    "gr_active_ratio": ratio,
                    **more,
                },
            )
        )
    return list[Row](made)


def gpu(uuid: str = UUID, index: int | None = 0, **more: object) -> Row:
    """Return what the driver says of a GPU."""
    return make_row(GpuInfo, **{"mono_ns": s(-1), "uuid": uuid, "gpu": index, **more})


def clocks(begin: float, end: float, *, wall_ahead_ns: int = WALL_AHEAD_NS) -> list[Row]:
    """Return readings of the clocks, one a second."""
    return [
        make_row(
            ClockReading,
            mono_ns=s(second),
            boot_ns=s(second) + BOOT_AHEAD_NS,
            wall_ns=s(second) + wall_ahead_ns,
        )
        for second in range(int(begin), int(end) + 1)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What a process does for a while: shares of the time of its main thread, and bytes a second.

    None is what the machine does not tell.
    """

    run: float | None = 0.0
    ready: float | None = 0.0
    blkio: float | None = None
    state: str | None = "S"
    channel: str | None = None
    read: float | None = None
    asked: float | None = None
    write: float | None = None


def process(
    pid: int,
    acts: Sequence[tuple[float, Act]],
    *,
    at: float = 0.0,
    kind: str | None = "trainer",
    parent: int | None = 1,
    started: float | None = None,
    every: float = 1.0,
) -> list[Row]:
    """Return readings of a process from second `at` on: for each act its length in seconds.

    `started` is when it began, by default at its first reading.
    """
    totals = dict.fromkeys(("run", "ready", "blkio", "read", "asked", "write"), 0.0)
    made: list[Row] = []
    when = at
    for length, act in acts:
        for _ in range(round(length / every)):
            made.append(_reading(pid, when, at if started is None else started, act, totals))
            values = {name: getattr(act, name) for name in totals}
            for name, value in values.items():
                totals[name] += (value or 0.0) * every
            when += every
    made.append(_reading(pid, when, at if started is None else started, acts[-1][1], totals))
    return [_with(row, kind=kind, parent_pid=parent) for row in made]


def start_of(started: float) -> int:
    """Return when a process that began at this second started, on the boot clock."""
    return s(started) + BOOT_AHEAD_NS


def _with(row: Row, **values: object) -> Row:
    spec = table_of(type(row))
    held = {column.name: getattr(row, column.name) for column in spec.columns}
    return spec.row(**{**held, **values})


def _reading(pid: int, when: float, started: float, act: Act, totals: Mapping[str, float]) -> Row:
    def ns(name: str) -> int | None:
        return None if getattr(act, name) is None else round(totals[name] * NS_PER_S)

    def of(name: str) -> int | None:
        return None if getattr(act, name) is None else round(totals[name])

    return make_row(
        Process,
        mono_ns=s(when),
        pid=pid,
        start_ns=start_of(started),
        state=act.state,
        wait_channel=act.channel,
        main_run_ns=ns("run"),
        main_run_delay_ns=ns("ready"),
        blkio_delay_ns=ns("blkio"),
        read_bytes=of("read"),
        rchar_bytes=of("asked"),
        write_bytes=of("write"),
        wchar_bytes=of("write"),
    )


def holds(
    pid: int, *, uuid: str = UUID, started: float = 0.0, at: float = 0.0, until: float | None = None
) -> list[Row]:
    """Return what the driver lists of a process: that it has the GPU from second `at` on."""
    last = at if until is None else until
    return [
        make_row(
            GpuProcess,
            mono_ns=s(second),
            uuid=uuid,
            pid=pid,
            start_ns=start_of(started),
            context="compute",
        )
        for second in range(int(at), int(last) + 1)
    ]


def listed(begin: float, end: float, *, rows: int | None = 1) -> list[Row]:
    """Return runs of the collector that asks the driver who has the GPUs, one a second."""
    return [
        make_row(
            Tick,
            mono_ns=s(second),
            lane="normal",
            collector="gpu_process",
            due_ns=s(second),
            began_ns=s(second),
            took_ns=1000,
            rows=rows,
        )
        for second in range(int(begin), int(end) + 1)
    ]


def cpu(begin: float, end: float, *, cpus: int, used: float) -> list[Row]:
    """Return readings of the node's CPUs, of which `used` are busy."""
    return [
        make_row(
            Cpu,
            mono_ns=s(second),
            cpus=cpus,
            user_ns=round((second - begin) * used * NS_PER_S),
            idle_ns=round((second - begin) * (cpus - used) * NS_PER_S),
        )
        for second in range(int(begin), int(end) + 1)
    ]


def cgroup(
    begin: float, end: float, path: str, *, quota_ns: int | None, throttled: float | None
) -> list[Row]:
    """Return readings of a cgroup with ten periods a second, of which a share is cut short."""
    return [
        make_row(
            CgroupCpu,
            mono_ns=s(second),
            cgroup=path,
            version=2,
            quota_ns=quota_ns,
            period_ns=NS_PER_S // 10,
            periods=round((second - begin) * 10),
            throttled_periods=None
            if throttled is None
            else round((second - begin) * 10 * throttled),
        )
        for second in range(int(begin), int(end) + 1)
    ]


def page(
    pid: int, at: Sequence[float], *, started: float = 0.0, **columns: Sequence[object] | object
) -> list[Row]:
    """Return readings of a counter page; a column is a value for each reading, or one for all."""
    return [
        make_row(
            Probe,
            mono_ns=s(second),
            pid=pid,
            start_ns=start_of(started),
            **{
                name: values[number] if isinstance(values, list) else values
                for name, values in columns.items()
            },
        )
        for number, second in enumerate(at)
    ]


def event(
    pid: int,
    kind: str,
    begin: float,
    end: float,
    *,
    sequence: int = 1,
    started: float = 0.0,
    background: bool = False,
) -> Row:
    """Return a record of a page's ring; it was read when it ended."""
    return make_row(
        ProbeEvent,
        mono_ns=s(end),
        pid=pid,
        start_ns=start_of(started),
        sequence=sequence,
        kind=kind,
        background=background,
        begin_ns=s(begin),
        end_ns=s(end),
    )
