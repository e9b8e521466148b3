"""Ranks that wait for each other on the host: what their probes and GPUs would have recorded."""

from __future__ import annotations

from collections.abc import Sequence

from recording_kit import make_row
from recording_rows import Act, event, gpu, holds, listed, page, process, s, start_of, windows
from whyidle.clock import NS_PER_S
from whyidle.schema import ProbeCall, ProbeGroup, ProbeInfo, ProcessInfo
from whyidle.table import Row

SECONDS = 20
PID = 100


def uuid_of(rank: int) -> str:
    return f"GPU-{rank}"


def group_row(rank: int, *, world: int, key: int | None = 7, backend: str = "gloo") -> Row:
    return make_row(
        ProbeGroup,
        mono_ns=s(1),
        pid=PID + rank,
        start_ns=start_of(0.0),
        place=1,
        group_key=key,
        size=world,
        group_rank=rank,
        backend=backend,
    )


def call(rank: int, number: int, came: float, ended: float, *, wait: float | None = None) -> Row:
    """Return a recorded all-reduce; without a wait it was one from its call on."""
    waited = ended - came if wait is None else wait
    return make_row(
        ProbeCall,
        mono_ns=s(ended),
        pid=PID + rank,
        start_ns=start_of(0.0),
        sequence=number,
        place=1,
        operation="all_reduce",
        background=False,
        number=number,
        called_ns=s(came),
        ended_ns=s(ended),
        wait_ns=round(waited * NS_PER_S),
        size_bytes=4_000_000,
    )


def rank_rows(
    rank: int,
    busy: Sequence[float],
    waits: Sequence[tuple[float, float]],
    *,
    world: int = 2,
    data: Sequence[tuple[float, float]] = (),
    key: int | None = 7,
    job: str | None = None,
    place: int | None = None,
    probed: bool = True,
    seconds: int = SECONDS,
) -> list[Row]:
    """Return a rank that does the same in each second; `waits` and `data` are parts of a second.

    `busy` are its eight windows; `place` is its GPU on the node.
    """
    pid = PID + rank
    identity = {"pid": pid, "start_ns": start_of(0.0)}
    made = [gpu(uuid_of(rank), rank if place is None else place)]
    made += windows(list(busy) * seconds, uuid=uuid_of(rank))
    made += process(pid, [(seconds, Act(run=0.1))])
    made += holds(pid, uuid=uuid_of(rank), until=seconds)
    made += listed(0, seconds)
    made.append(
        make_row(
            ProcessInfo, mono_ns=s(0), rank=rank, world_size=world, job=job, kind="trainer",
            **identity,
        )
    )  # fmt: skip
    if not probed:
        return made
    times = [n / 8 for n in range(seconds * 8 + 1)]
    waited = sum(end - begin for begin, end in waits)
    loaded = sum(end - begin for begin, end in data)
    made += page(
        pid,
        times,
        steps=[int(t) for t in times],
        data_wait_ns=[round(_so_far(data, t, loaded) * NS_PER_S) for t in times],
        outside_wait_ns=0,
        coll_wait_ns=[round(_so_far(waits, t, waited) * NS_PER_S) for t in times],
        message_wait_ns=0,
        gc_ns=0,
    )
    made.append(make_row(ProbeInfo, mono_ns=s(0), rank=rank, world_size=world, **identity))
    made.append(group_row(rank, world=world, key=key))
    for second in range(seconds):
        for number, (begin, end) in enumerate(waits):
            place_of = second * len(waits) + number + 1
            made.append(call(rank, place_of, second + begin, second + end))
        for number, (begin, end) in enumerate(data):
            place_of = second * len(data) + number + 1
            made.append(event(pid, "data_wait", second + begin, second + end, sequence=place_of))
    return made


def _so_far(parts: Sequence[tuple[float, float]], t: float, each: float) -> float:
    """Return how much of what is done every second was done by a time."""
    whole, rest = divmod(t, 1.0)
    return whole * each + sum(max(0.0, min(end, rest) - begin) for begin, end in parts)
