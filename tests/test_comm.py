"""What is known of a communication kernel: of itself, and of the spans around its launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trace_make import ALLREDUCE, Event, call, collective, device, kernel, operator, span
from whyidle_rules.trace.columns import NO_VALUE
from whyidle_rules.trace.comm import CommKernel


def param_comms(begin: float, length: float, args: dict[str, Any], thread: int = 1) -> Event:
    event = operator(begin, length, "record_param_comms", thread)
    event["args"] = args
    return event


def bare(*around: Event, thread: int = 1) -> CommKernel:
    """Return what is known of a kernel that says nothing of itself, launched at 50 us."""
    events = [
        kernel(0, 10),
        collective(60, 10, None, group=None, launch=1),
        call(50, 2, 1, thread=thread),
        *around,
    ]
    (info,) = device(events).comm.info
    return info


NAMED: dict[str, Any] = {"Collective name": "allgather", "Process Group Name": "tp", "Seq": 4}


def test_a_kernel_that_says_everything_itself() -> None:
    event = collective(60, 10, 7, group="dp", ranks=(1, 5), launch=1)
    found = device([event, call(50, 2, 1), param_comms(49, 5, NAMED)]).comm
    assert found.info == [
        CommKernel(
            name=ALLREDUCE,
            operation="allreduce",
            group="dp",
            local_group="tp",
            ranks="[1, 5]",
            size=2,
            sequence=7,
        )
    ]


def test_a_kernel_that_the_operator_around_its_launch_speaks_for() -> None:
    info = bare(param_comms(49, 5, NAMED))
    assert (info.operation, info.local_group, info.sequence) == ("allgather", "tp", 4)
    # That name is one of the process; nobody says that it is the same elsewhere.
    assert info.group == ""
    assert info.size == NO_VALUE


def test_an_annotation_names_the_operation() -> None:
    info = bare(span(49, 5, "nccl:all_to_all"))
    assert (info.operation, info.local_group, info.sequence) == ("nccl:all_to_all", "", NO_VALUE)


def test_the_innermost_span_speaks_first_and_the_others_fill_in() -> None:
    info = bare(
        span(40, 20, "nccl:coalesced"),
        param_comms(45, 10, {"Process Group Name": "outer", "Seq": 9}),
        param_comms(49, 5, {"Process Group Name": "inner"}),
    )
    assert (info.operation, info.local_group, info.sequence) == ("nccl:coalesced", "inner", 9)


@pytest.mark.parametrize(
    "elsewhere",
    [
        param_comms(30, 20, NAMED),  # ended when the launch began
        param_comms(50.5, 20, NAMED),  # began after it
        param_comms(49, 5, NAMED, thread=2),
    ],
)
def test_spans_that_are_not_around_the_launch_are_not_asked(elsewhere: Event) -> None:
    info = bare(elsewhere)
    assert (info.operation, info.local_group, info.sequence) == ("", "", NO_VALUE)


def test_without_its_launch_nothing_speaks_for_a_kernel() -> None:
    found = device(
        [collective(60, 10, None, group=None), param_comms(0, 100, NAMED), call(50, 2, 9)]
    ).comm
    assert found.info[0].operation == ""


def test_columns_run_in_the_order_of_time() -> None:
    events = [
        collective(90, 5, 2, stream=21),
        kernel(0, 10),
        collective(60, 10, 1, operation="send"),
    ]
    found = device(events).comm
    assert found.start.tolist() == [60_000, 90_000]
    assert found.end.tolist() == [70_000, 95_000]
    assert found.stream.tolist() == [20, 21]
    assert found.blocks.tolist() == [24, 24]
    assert found.point_to_point.tolist() == [True, False]
    assert [info.sequence for info in found.info] == [1, 2]
    assert np.array_equal(device([kernel(0, 1)]).comm.start, np.empty(0))
