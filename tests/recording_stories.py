"""Stories of a node for the tests of recordings: one that tells everything, one without a page, and
any number of random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from recording_kit import make_row
from recording_rows import (
    Act,
    cgroup,
    clocks,
    cpu,
    event,
    gpu,
    holds,
    listed,
    page,
    process,
    s,
    start_of,
    windows,
)
from whyidle.schema.agent import Tick
from whyidle.schema.fabric import TcpSocket
from whyidle.schema.machine import Pressure, Vmstat
from whyidle.schema.probe import ProbeInfo, ProbeLoader
from whyidle.schema.process import Process, ProcessInfo, ProcessThread
from whyidle.schema.storage import FileUse
from whyidle.table import Row

Told = tuple[str, float, float]  # kind of event, begin, end
CGROUP = "/job"
FUSE = "request_wait_answer"


def pages(
    pid: int, told: Sequence[Told], at: Sequence[float], *, started: float = 0.0, steps: int = 3
) -> list[Row]:
    """Return a page that tells of these events: totals, what is going on, and records."""

    def total(*kinds: str) -> list[int]:
        return [
            round(
                sum(end - begin for kind, begin, end in told if kind in kinds and end <= when) * 1e9
            )
            for when in at
        ]

    def open_at(when: float, waits: bool) -> tuple[str, float] | None:
        found = [
            (kind, begin)
            for kind, begin, end in told
            if begin < when < end and kind != "gc" and (kind == "data_wait") == waits
        ]
        return max(found, key=lambda item: item[1], default=None)

    waiting = [open_at(when, True) for when in at]
    phase = [open_at(when, False) for when in at]
    rows = page(
        pid,
        at,
        started=started,
        steps=steps,
        data_wait_ns=total("data_wait"),
        outside_wait_ns=0,
        waiting_since_ns=[None if found is None else s(found[1]) for found in waiting],
        phase=[None if found is None else found[0] for found in phase],
        phase_since_ns=[None if found is None else s(found[1]) for found in phase],
        checkpoint_save_ns=total("checkpoint_save"),
        checkpoint_load_ns=total("checkpoint_load"),
        evaluation_ns=total("evaluation"),
        gc_ns=total("gc"),
    )
    ended = sorted((item for item in told if item[2] <= max(at)), key=lambda item: item[2])
    rows += [
        event(pid, kind, begin, end, sequence=number + 1, started=started)
        for number, (kind, begin, end) in enumerate(ended)
    ]
    return rows


def loader(pid: int, at: Sequence[float], *, started: float = 0.0, workers: int = 4) -> list[Row]:
    """Return what a page tells of its DataLoader."""
    return [
        make_row(
            ProbeLoader,
            mono_ns=s(when),
            pid=pid,
            start_ns=start_of(started),
            place=0,
            workers=workers,
            wait_ns=0,
            outside_wait_ns=0,
        )
        for when in at
    ]


def about(pid: int, *, started: float = 0.0, at: float = 0.0, **columns: object) -> Row:
    """Return what is known of a process."""
    return make_row(
        ProcessInfo,
        **{
            "mono_ns": s(at),
            "pid": pid,
            "start_ns": start_of(started),
            "cgroup": CGROUP,
            "cpus_allowed_count": 8,
            **columns,
        },
    )


def reads_from(
    pid: int, kind: str | None, point: str | None, begin: float, end: float, started: float = 0.0
) -> list[Row]:
    """Return looks at a process, one a second, that find a file open there."""
    return [
        make_row(
            FileUse,
            mono_ns=s(begin + number),
            pid=pid,
            start_ns=start_of(started),
            mount_id=1,
            kind=kind,
            mount_point=point,
            read_files=1,
        )
        for number in range(int(end - begin))
    ]


def thread(
    pid: int,
    tid: int,
    acts: Sequence[tuple[float, Act]],
    *,
    at: float = 0.0,
    started: float | None = None,
) -> list[Row]:
    """Return readings of a thread of a process, which is read as processes are."""
    return [
        make_row(
            ProcessThread,
            mono_ns=row.mono_ns,
            pid=pid,
            start_ns=row.start_ns,
            tid=tid,
            name="python3",
            state=row.state,
            wait_channel=row.wait_channel,
            run_ns=row.main_run_ns,
            run_delay_ns=row.main_run_delay_ns,
        )
        for row in process(tid, acts, at=at, started=started)
        if isinstance(row, Process)
    ]


def received(
    pid: int, bytes_per_s: float | None, begin: float, end: float, *, started: float = 0.0
) -> list[Row]:
    """Return looks at connections, one in five seconds, and what a process had received by then."""
    seconds = range(int(begin), int(end) + 1, 5)
    looks = [
        make_row(
            Tick, mono_ns=s(second), lane="normal", collector="tcp_socket", due_ns=s(second), rows=1
        )
        for second in seconds
    ]
    rows = [
        make_row(
            TcpSocket,
            mono_ns=s(second),
            service="http",
            pid=pid,
            start_ns=start_of(started),
            sockets=1,
            rx_bytes=None if bytes_per_s is None else round(bytes_per_s * (second - begin)),
        )
        for second in seconds
        if bytes_per_s != 0
    ]
    return [*looks, *rows]


def memory(begin: float, end: float) -> list[Row]:
    """Return memory that nobody waits for, a reading a second."""
    times = range(int(begin), int(end) + 1)
    pressure = [
        make_row(Pressure, mono_ns=s(when), resource="memory", cgroup="", some_ns=0)
        for when in times
    ]
    events = [
        make_row(Vmstat, mono_ns=s(when), refault_file_pages=0, page_bytes=4096) for when in times
    ]
    return [*pressure, *events]


WAITS: tuple[Told, ...] = tuple(
    ("data_wait", second + part, second + part + 0.25)
    for second in range(10, 20)
    for part in (0.25, 0.75)
)
PHASES: tuple[Told, ...] = (
    *WAITS,
    ("checkpoint_save", 20, 25),
    ("evaluation", 25, 30),
    ("data_wait", 26, 27),
    ("gc", 28, 28.5),
)


def eventful(*, probed: bool = True) -> list[Row]:
    """Return 55 s in which nearly everything happens, with a page or without one.

    0 nobody, 5 a process starts, 10 it computes and waits for data half of the time (FUSE to 15,
    then its workers compute), 20 saves, 25 evaluates, 30 works, 31 sleeps, 35 computes, 40 has no
    CPU for its quota, 45 the GPU works, 50 the process is gone.
    """
    half = [1.0, 1.0, 0.0, 0.0]  # two windows of work, two of waiting
    busy = [0.0] * 80 + half * 20 + [0.0] * 80 + [1.0] * 8 + [0.0] * 112 + [1.0] * 40 + [0.0] * 40
    idle, worker = Act(state="S", channel="futex_wait"), {"kind": "data_worker", "parent": 100}
    trainer = [
        (5.0, Act(run=0.9, state="R", read=0, asked=0)),
        (10.0, Act(run=0.4, read=0, asked=0)),
        (5.0, Act(run=0.3, state="D", read=0, asked=0, write=50e6)),
        (5.0, Act(run=0.3, read=0, asked=0)),
        (5.0, Act(run=0.0, read=0, asked=0)),
        (5.0, Act(run=1.0, state="R", read=0, asked=0)),
        (5.0, Act(run=0.1, ready=0.9, state="R", read=0, asked=0)),
        (5.0, Act(run=0.2, read=0, asked=0)),
    ]
    fuse = Act(run=0.1, state="S", channel=FUSE, read=0, asked=1e6)
    crunch = Act(run=0.95, state="R", read=0, asked=1e6)
    rows: list[Row] = [
        *windows(busy),
        gpu(name="NVIDIA H100 80GB HBM3"),
        *clocks(-1, 56),
        *cpu(-1, 56, cpus=8, used=4),
        *memory(-1, 56),
        *process(100, trainer, at=5, started=5),
        about(100, started=5, at=5, kind="trainer", world_size=1, rank=0, local_rank=0),
        *holds(100, started=5, at=6, until=49),
        *listed(-1, 56),
        *cgroup(5, 40, CGROUP, quota_ns=80_000_000, throttled=0.0),
    ]
    # From 40 s on half of the periods are cut short.
    rows += [
        make_row(
            type(rows[-1]),
            mono_ns=s(second),
            cgroup=CGROUP,
            version=2,
            quota_ns=80_000_000,
            periods=(second - 5) * 10,
            throttled_periods=(second - 40) * 5,
        )
        for second in range(41, 56)
    ]
    for number in range(4):
        pid = 101 + number
        rows += process(pid, [(5.0, fuse), (5.0, crunch), (30.0, idle)], at=10, started=8, **worker)  # type: ignore[arg-type]
        rows.append(about(pid, started=8, at=10, kind="data_worker"))
        rows += reads_from(pid, "fuse", "/data", 10, 20, started=8)
    if probed:
        at = [6 + number / 4 for number in range(177)]
        rows += pages(100, PHASES, at, started=5)
        rows += loader(100, [6.0, 30.0, 49.0], started=5)
        rows.append(
            make_row(ProbeInfo, mono_ns=s(6), pid=100, start_ns=start_of(5), rank=0, world_size=1)
        )
    return rows


def checkpointed() -> list[Row]:
    """Return half a minute: the trainer saves a checkpoint from 10 to 15 s, else the GPU works."""
    return [
        *windows([1.0] * 80),
        *windows([0.0] * 40, at=10),
        *windows([1.0] * 120, at=15),
        gpu(name="NVIDIA H100 80GB HBM3"),
        *clocks(-1, 31),
        *process(100, [(30.0, Act(run=0.1))]),
        *holds(100, until=30),
        *listed(0, 30),
        *page(100, [n / 2 for n in range(61)], data_wait_ns=0, outside_wait_ns=0, steps=5),
        event(100, "checkpoint_save", 10, 15),
        *loader(100, [0.0]),
    ]


KINDS = ("data_wait", "checkpoint_save", "evaluation", "gc", "logging", "compile", "mine", "setup")
STATES = ("R", "S", "D", None)
POLL, SOCKET = "poll_schedule_timeout", "sk_wait_data"
CHANNELS = (None, "futex_wait", FUSE, "folio_wait_bit", "rpc_wait_bit", POLL, SOCKET)


def anything(seed: int, seconds: int = 12) -> list[Row]:
    """Return a random recording; the seed decides everything."""
    dice = random.Random(seed)
    rows: list[Row] = []
    for number in range(dice.choice([1, 1, 2])):
        rows += _some_gpu(dice, number, seconds)
    if dice.random() < 0.8:
        rows += clocks(-1, seconds + 1)
    if dice.random() < 0.7:
        rows += listed(-1, seconds + 1, rows=dice.choice([0, 1, 1, None]))
    if dice.random() < 0.7:
        rows += cpu(-1, seconds + 1, cpus=dice.choice([1, 8, 64]), used=dice.uniform(0, 1))
    if dice.random() < 0.6:
        throttled = dice.choice([0.0, 0.05, 0.6, None])
        quota = dice.choice([None, 100_000_000])
        rows += cgroup(-1, seconds + 1, CGROUP, quota_ns=quota, throttled=throttled)
    if dice.random() < 0.5:
        rows += memory(-1, seconds + 1)
    return rows


def _some_gpu(dice: random.Random, number: int, seconds: int) -> list[Row]:
    uuid = f"GPU-{number}"
    busy = [
        dice.choice([0.0, 0.0, 0.01, 1.0, 1.0, dice.random()]) if dice.random() < 0.3 else 0.0
        for _ in range(seconds * 8)
    ]
    sm = [dice.choice([None, ratio * dice.random(), ratio]) for ratio in busy]
    rows: list[Row] = [gpu(uuid, number)] if dice.random() < 0.8 else []
    for at, (ratio, fill) in enumerate(zip(busy, sm, strict=True)):
        if dice.random() < 0.97:
            rows += windows([ratio], uuid=uuid, at=at / 8, sm_active_ratio=fill)
    pid = 100 * (number + 1)
    for begin in dice.choice([[0], [0], [0, seconds // 2], [seconds // 3]]):
        rows += _some_trainer(dice, pid, uuid, begin, seconds)
        pid += 20
    return rows


def _some_trainer(dice: random.Random, pid: int, uuid: str, begin: int, seconds: int) -> list[Row]:
    started = begin - dice.choice([0.0, 0.7, 3.0])
    length = dice.randint(2, seconds - begin)
    rows = process(pid, _some_acts(dice, length), at=begin, started=started)
    if dice.random() < 0.8:
        rows += holds(pid, uuid=uuid, started=started, at=begin, until=begin + length)
    if dice.random() < 0.8:
        world = dice.choice([None, 1, 2])
        rank = dice.choice([None, 0])
        kinds = dice.choice([None, "autograd", "nccl", "gloo,nccl"])
        rows.append(
            about(pid, started=started, at=begin, world_size=world, rank=rank, thread_kinds=kinds)
        )
    for worker in range(dice.choice([0, 0, 1, 4])):
        own = pid + 1 + worker
        rows += process(
            own,
            _some_acts(dice, length),
            at=begin,
            started=started,
            kind=dice.choice(["data_worker", "data_worker", None]),
            parent=pid,
        )
        rows.append(
            about(own, started=started, at=begin, net_namespace=dice.choice(["", "", "1", None]))
        )
        if dice.random() < 0.5:
            kind = dice.choice(["fuse", "nfs", "block", "overlay", None])
            rows += reads_from(own, kind, "/data", begin, begin + length, started=started)
    for tid in range(dice.choice([0, 0, 2])):
        rows += thread(pid, tid, _some_acts(dice, length), at=begin, started=started)
    if dice.random() < 0.4:
        rate = dice.choice([None, 0, 100, 1e6])
        rows += received(pid + dice.choice([0, 1]), rate, begin, begin + length, started=started)
    if dice.random() < 0.7:
        told = [_some_event(dice, begin, begin + length) for _ in range(dice.randint(0, 12))]
        step = dice.choice([0.125, 0.5, 1.0, 4.0])
        at = [begin + number * step for number in range(int(length / step) + 1)]
        rows += pages(pid, told, at, started=started, steps=dice.choice([0, 5]))
        rows += loader(pid, at[:1], started=started, workers=dice.choice([0, 4]))
    return rows


def _some_acts(dice: random.Random, seconds: int) -> list[tuple[float, Act]]:
    acts = []
    for _ in range(seconds):
        run = dice.choice([0.0, 1.0, dice.random()])
        acts.append(
            (
                1.0,
                Act(
                    run=dice.choice([run, run, run, None]),
                    ready=dice.choice([0.0, (1 - run) * dice.random(), None]),
                    blkio=dice.choice([None, 0.0, dice.random() * 3]),
                    state=dice.choice(STATES),
                    channel=dice.choice(CHANNELS),
                    read=dice.choice([None, 0.0, 1e6]),
                    asked=dice.choice([None, 0.0, 2e6]),
                    write=dice.choice([None, 0.0, 1e8]),
                ),
            )
        )
    return acts


def _some_event(dice: random.Random, begin: float, end: float) -> Told:
    first = dice.uniform(begin, end)
    return dice.choice(KINDS), first, first + dice.choice([0.0005, 0.05, 0.4, 3.0])
