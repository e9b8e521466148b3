"""What is said of a gap, by hand: kernels at [0, 100) and from 400 us on, and a host."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from trace_make import (
    THREAD,
    US,
    Event,
    call,
    collective,
    copy,
    device,
    frame,
    kernel,
    operator,
    span,
)
from whyidle_rules import intervals
from whyidle_rules.intervals import EMPTY
from whyidle_rules.trace.device import DeviceTrace
from whyidle_rules.trace.gaps import CLOCK_SLACK_NS, Piece, Pieces

Told = list[tuple[float, float, str]]
OTHER_THREAD = 2
SLACK = CLOCK_SLACK_NS / US


def told(pieces: Pieces) -> Told:
    return [
        (begin / US, end / US, Piece(kind).name)
        for (begin, end), kind in zip(pieces.spans.tolist(), pieces.kinds.tolist(), strict=True)
    ]


def gap(*host: Event, launch: Event | None = None, until: float = 400) -> Told:
    """Return the pieces of the gap from 100 us on, which ends with a kernel."""
    events = [kernel(0, 100), operator(-5, 2), kernel(until, 10, 1), *host]
    events.append(launch or call(until - 10, 5, 1))
    return told(device(events).pieces)


def test_a_host_that_left_no_record_is_silent() -> None:
    assert gap() == [(100, 390, "SILENT"), (390, 400, "LATENCY")]


NAMES = {
    "CHECKPOINT_SAVE": "save_checkpoint",
    "CHECKPOINT_LOAD": "load_checkpoint",
    "DATA": "next_batch",
    "DATA_IN_TRAINER": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "GC": "gc.collect",
    "COMPILE": "_compile.compile_inner",
    "LOGGING": "wandb.log",
    "EVALUATION": "evaluate",
}


@pytest.mark.parametrize(("kind", "name"), NAMES.items())
@pytest.mark.parametrize("record", [span, operator, frame])
def test_a_late_host_did_what_its_span_says(
    kind: str, name: str, record: Callable[..., Event]
) -> None:
    assert gap(record(150, 150, name)) == [
        (100, 150, "SILENT"),
        (150, 300, kind),
        (300, 390, "SILENT"),
        (390, 400, "LATENCY"),
    ]


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("ALLOCATOR", call(150, 150, name="cudaMalloc")),
        ("COMPILE", call(150, 150, name="cuModuleLoadData")),
        ("BUSY", call(150, 150, name="cudaEventQuery")),
        ("BUSY", operator(150, 150)),
        ("PROFILER", {**span(150, 150, "Buffer Flush"), "cat": "overhead"}),
    ],
)
def test_calls_and_operators(kind: str, event: Event) -> None:
    assert gap(event)[1] == (150, 300, kind)


def test_the_most_specific_span_wins() -> None:
    assert gap(
        span(100, 280, "evaluate"),
        operator(100, 290),
        span(120, 200, "next_batch"),
        span(150, 20, "save_checkpoint"),
        call(200, 50, name="cudaMalloc"),
    ) == [
        (100, 120, "EVALUATION"),
        (120, 150, "DATA"),
        (150, 170, "CHECKPOINT_SAVE"),
        (170, 320, "DATA"),
        (320, 380, "EVALUATION"),
        (380, 390, "BUSY"),
        (390, 400, "LATENCY"),
    ]


def test_other_threads_are_no_excuse() -> None:
    assert gap(
        span(150, 100, "next_batch", OTHER_THREAD),
        operator(100, 200, thread=OTHER_THREAD),
        call(300, 50, name="cudaMalloc", thread=OTHER_THREAD),
    ) == [(100, 390, "SILENT"), (390, 400, "LATENCY")]


def test_a_launch_that_had_begun_is_latency() -> None:
    assert gap(launch=call(90, 50, 1)) == [(100, 400, "LATENCY")]


def test_a_launch_that_had_ended_is_a_queue() -> None:
    assert gap(launch=call(80, 10, 1), until=199.999) == [(100, 199.999, "QUEUED")]
    assert gap(launch=call(80, 10, 1), until=200) == [(100, 200, "HELD")]


def test_a_wait_for_the_gpu_costs_the_short_gap_after_it() -> None:
    wait = call(20, 82, name="cudaStreamSynchronize")
    assert gap(wait) == [(100, 400, "SYNC")]
    # Less what is more specific.
    assert gap(wait, span(200, 50, "gc.collect")) == [
        (100, 200, "SYNC"),
        (200, 250, "GC"),
        (250, 400, "SYNC"),
    ]
    # Clocks of host and GPU agree only so far.
    assert gap(call(20, 80 - SLACK + 1, name="cudaStreamSynchronize")) == [(100, 400, "SYNC")]
    assert gap(call(20, 80 - SLACK - 1, name="cudaStreamSynchronize"))[0][2] == "SILENT"


def test_in_a_long_gap_only_the_wait_itself_is_a_wait() -> None:
    wait = call(20, 100, name="cudaDeviceSynchronize")
    assert gap(wait, until=6000) == [
        (100, 120 + SLACK, "SYNC"),
        (120 + SLACK, 5990, "SILENT"),
        (5990, 6000, "LATENCY"),
    ]


def test_without_the_launch_only_a_wait_for_data_tells() -> None:
    nothing = call(0, 1, 99)
    assert gap(launch=nothing) == [(100, 400, "UNSEEN")]
    assert gap(operator(100, 290), span(100, 50, "gc.collect"), launch=nothing) == [
        (100, 400, "UNSEEN")
    ]
    assert gap(span(150, 100, "next_batch", OTHER_THREAD), launch=nothing) == [
        (100, 150, "UNSEEN"),
        (150, 250, "DATA"),
        (250, 400, "UNSEEN"),
    ]


def test_without_operators_a_late_launch_has_no_reason() -> None:
    events = [kernel(0, 100), kernel(400, 10, 1), call(390, 5, 1), call(150, 50)]
    assert told(device(events).pieces) == [(100, 390, "LATE_UNSEEN"), (390, 400, "LATENCY")]


def test_of_two_events_that_end_a_gap_the_launched_one_counts() -> None:
    launched, other = kernel(400, 10, 1), kernel(400, 5, 77)
    for pair in ([launched, other], [other, launched]):
        found = device([kernel(0, 100), operator(-5, 2), *pair, call(390, 5, 1)])
        assert told(found.pieces) == [(100, 390, "SILENT"), (390, 400, "LATENCY")]


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        ("HtoD (Pageable -> Device)", "COPY_H2D_PAGEABLE"),
        ("HtoD (Pinned -> Device)", "COPY_H2D"),
        ("DtoH (Device -> Pinned)", "COPY_D2H"),
        ("DtoD (Device -> Device)", "COPY_DEVICE"),
    ],
)
def test_copies_are_told_by_their_route(route: str, kind: str) -> None:
    found = device(
        [
            operator(-5, 2),
            kernel(0, 100),
            copy(150, 50, 2, route=route),
            call(148, 1, 2),
            kernel(400, 10, 1),
            call(390, 5, 1),
        ]
    )
    assert told(found.pieces) == [
        (100, 148, "SILENT"),
        (148, 150, "LATENCY"),
        (150, 200, kind),
        (200, 390, "SILENT"),
        (390, 400, "LATENCY"),
    ]
    # Each is a piece of one stretch without a kernel.
    assert set(found.pieces.gap_ns.tolist()) == {300 * US}
    assert found.parts.exposed_copy == 50 * US


def test_copies_at_once_count_as_the_most_telling_one() -> None:
    found = device(
        [
            kernel(0, 100),
            copy(100, 100, route="DtoD (Device -> Device)"),
            copy(120, 60, route="DtoH (Device -> Pinned)"),
            copy(140, 20, route="HtoD (Pageable -> Device)"),
            kernel(200, 10),
        ]
    )
    assert told(found.pieces) == [
        (100, 120, "COPY_DEVICE"),
        (120, 140, "COPY_D2H"),
        (140, 160, "COPY_H2D_PAGEABLE"),
        (160, 180, "COPY_D2H"),
        (180, 200, "COPY_DEVICE"),
    ]


def test_copies_of_a_checkpoint_are_the_checkpoint() -> None:
    found = gap(copy(150, 50, 2, route="DtoH (Device -> Pageable)"), span(140, 40, "torch.save"))
    assert (150, 180, "CHECKPOINT_SAVE") in found
    assert (180, 200, "COPY_D2H") in found


def test_before_the_first_event_the_host_is_told_apart() -> None:
    found = device(
        [operator(-300, 100), span(-150, 50, "next_batch"), call(-20, 5, 1), kernel(0, 100, 1)]
    )
    assert told(found.prelude) == [
        (-300, -200, "BUSY"),
        (-200, -150, "SILENT"),
        (-150, -100, "DATA"),
        (-100, -20, "SILENT"),
        (-20, 0, "LATENCY"),
    ]
    assert told(found.pieces) == []
    assert found.parts.window == 100 * US


def soup(seed: int) -> list[Event]:
    """Return events that overlap, touch and nest as they like."""
    chance = random.Random(seed)
    names = [*NAMES.values(), "aten::mm", "cudaStreamSynchronize", "cudaMalloc", "cudaLaunchKernel"]
    events: list[Event] = []
    for number in range(60):
        begin, length = chance.randrange(9000), chance.choice((0, 1, 40, 400))
        route = chance.choice(("HtoD (Pageable -> Device)", "DtoH (Device -> Pinned)"))
        thread = chance.choice((THREAD, OTHER_THREAD))
        events += chance.choice(
            (
                [kernel(begin, length, number)],
                [copy(begin, length, number, route=route)],
                [collective(begin, length, number)],
                [span(begin, length, chance.choice(names), thread)],
                [operator(begin, length, chance.choice(names), thread)],
            )
        )
        events.append(call(begin - chance.randrange(60), 20, number, thread=thread))
        events.append(call(begin, length, name=chance.choice(names[-3:]), thread=thread))
    return [kernel(5000, 10), *events]


def covered(found: DeviceTrace) -> intervals.Ints:
    return intervals.union(found.pieces.spans[:, 0], found.pieces.spans[:, 1])


@pytest.mark.parametrize("seed", range(60))
def test_pieces_cover_empty_time_exactly_once(seed: int) -> None:
    found = device(soup(seed))
    spans = found.pieces.spans
    assert (spans[:, 0] < spans[:, 1]).all()
    assert (spans[1:, 0] >= spans[:-1, 1]).all()
    kernels = intervals.merge(
        found.compute,
        intervals.union(found.comm.start, found.comm.end) if len(found.comm.start) else EMPTY,
    )
    empty = intervals.complement(kernels, found.parts.begin, found.parts.end)
    assert np.array_equal(covered(found), empty)
    copies = (found.pieces.kinds >= Piece.COPY_H2D_PAGEABLE) & (
        found.pieces.kinds <= Piece.COPY_DEVICE
    )
    phases = np.isin(found.pieces.kinds, (Piece.CHECKPOINT_SAVE, Piece.CHECKPOINT_LOAD))
    copied = intervals.length_ns(spans[copies])
    assert copied <= found.parts.exposed_copy <= copied + intervals.length_ns(spans[phases])
    assert intervals.length_ns(spans) == found.parts.idle + found.parts.exposed_copy
