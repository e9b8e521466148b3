from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_make import ALLREDUCE, US, collective, columns, frame, kernel, operator, span
from whyidle_rules.trace.columns import NO_VALUE, TIME_MAX_NS, Columns, CommArguments, CommCall
from whyidle_rules.trace.decode import Collector, decode, nanoseconds, whole
from whyidle_rules.trace.names import Gpu, Host

TIMES = st.integers(-(10**15), 2 * 10**18)


def ns(text: str) -> int:
    return nanoseconds(msgspec.Raw(text.encode()))


@settings(deadline=None)
@given(TIMES)
def test_decimals_of_microseconds_are_exact(time_ns: int) -> None:
    sign, size = "-" if time_ns < 0 else "", abs(time_ns)
    text = f"{sign}{size // 1000}.{size % 1000:03d}"
    assert ns(text) == time_ns
    assert ns(text.rstrip("0").rstrip(".")) == time_ns
    assert ns(f'"{text}"') == time_ns
    assert ns(f"{text}e0") == time_ns
    assert ns(f"{time_ns}E-3") == time_ns
    assert ns(f"{time_ns}") == time_ns * 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("-0.5", -500),
        ("-1.25", -1250),
        ("1.7e15", 1_700_000_000_000_000_000),
        ("1748739600001069.4", 1_748_739_600_001_069_400),
        ("1748739600001069.400", 1_748_739_600_001_069_400),
        ("1.0004", 1000),
        ("1.00051", 1001),
        ("0.000", 0),
        ("1e-3", 1),
        ("1e-9", 0),
        ("2.5e3", 2_500_000),
    ],
)
def test_times(text: str, expected: int) -> None:
    assert ns(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "true",
        '"soon"',
        "[1]",
        "{}",
        '"NaN"',
        '"Infinity"',
        "1e400",
        '"1,5"',
        '"\u0661"',
    ],
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"time|number"):
        ns(text)


def collected(events: list[Any]) -> tuple[Columns, int]:
    batch = decode(json.dumps(events).encode())
    collector = Collector()
    collector.add(batch.events)
    return collector.columns, batch.foreign


def test_things_of_another_shape_cost_themselves() -> None:
    good = kernel(1, 2)
    events = [good, 5, None, "text", [good], {**good, "args": 7}, {**good, "args": [1]}, good]
    found, foreign = collected(events)
    assert foreign == 6
    assert found.gpu_start.tolist() == [1 * US, 1 * US]


@pytest.mark.parametrize(
    "change",
    [
        {"ts": None},
        {"ts": "soon"},
        {"dur": -1},
        {"dur": "NaN"},
        {"ts": TIME_MAX_NS},
        {"ts": -TIME_MAX_NS},
        {"dur": TIME_MAX_NS},
    ],
)
def test_impossible_times_are_counted(change: dict[str, Any]) -> None:
    found, _ = collected([{**kernel(1, 2), **change}, kernel(3, 4)])
    assert found.gpu_start.tolist() == [3 * US]
    assert found.bad_times == 1


@pytest.mark.parametrize(
    "change",
    [{"ph": "B"}, {"ph": None}, {"cat": "ac2g"}, {"cat": None}, {"cat": ["kernel"]}],
)
def test_events_that_are_no_work_are_passed_over(change: dict[str, Any]) -> None:
    found, foreign = collected([{**kernel(1, 2), **change}, kernel(3, 4)])
    assert found.gpu_start.tolist() == [3 * US]
    assert (found.bad_times, found.nameless, foreign) == (0, 0, 0)


def test_work_without_a_name_is_counted() -> None:
    found, _ = collected([{**kernel(1, 2), "name": 7}, kernel(3, 4)])
    assert found.gpu_start.tolist() == [3 * US]
    assert found.nameless == 1


@pytest.mark.parametrize(
    ("category", "column"),
    [
        ("kernel", "gpu_start"),
        ("Kernel", "gpu_start"),
        ("gpu_memcpy", "gpu_start"),
        ("Memcpy", "gpu_start"),
        ("gpu_memset", "gpu_start"),
        ("Memset", "gpu_start"),
        ("cuda_runtime", "call_start"),
        ("cuda_driver", "call_start"),
        ("hip_runtime", "call_start"),
        ("Runtime", "call_start"),
        ("cpu_op", "op_start"),
        ("Operator", "op_start"),
        ("overhead", "span_start"),
    ],
)
def test_old_and_new_categories(category: str, column: str) -> None:
    found, _ = collected([{**kernel(1, 2), "cat": category}])
    filled = {
        name
        for name in ("gpu_start", "call_start", "op_start", "span_start")
        if getattr(found, name)
    }
    assert filled == {column}


def test_what_a_kernel_says() -> None:
    event = kernel(1.5, 2.25, 7, device=3, stream=20, grid=[4, 5, 6])
    event["args"]["est. achieved occupancy %"] = 40
    found = columns([event, kernel(9, 1, 8, device=3), kernel(20, 1, device=1, grid=[0, 1, 1])])
    assert found.gpu_start.tolist() == [1500, 9000, 20_000]
    assert found.gpu_end.tolist() == [3750, 10_000, 21_000]
    assert found.gpu_kind.tolist() == [Gpu.COMPUTE] * 3
    assert found.devices == [3, 1]
    assert found.gpu_device.tolist() == [0, 0, 1]
    assert found.gpu_stream.tolist() == [20, 7, 7]
    assert found.gpu_correlation.tolist() == [7, 8, -1]
    assert found.gpu_blocks.tolist() == [120, 64, NO_VALUE]
    assert found.gpu_occupancy.tolist() == [40, NO_VALUE, NO_VALUE]
    assert [found.gpu_names[row] for row in found.gpu_name] == ["gemm"] * 3


@pytest.mark.parametrize("percent", [-5, 101, 100_000, "high", 12.5])
def test_an_occupancy_that_cannot_be_is_unknown(percent: object) -> None:
    event = kernel(1, 2)
    event["args"]["est. achieved occupancy %"] = percent
    assert columns([event]).gpu_occupancy.tolist() == [NO_VALUE]


def test_old_files_name_the_gpu_as_the_process_and_the_thread_as_text() -> None:
    event = {**kernel(1, 2), "pid": 2, "args": {"stream": "stream 7", "correlation": "12"}}
    found = columns([event, {**operator(3, 1), "tid": "25738"}, {**operator(5, 1), "tid": 25738}])
    assert found.devices == [2]
    assert (found.gpu_stream[0], found.gpu_correlation[0]) == (7, 12)
    assert found.op_thread.tolist() == [0, 0]


def test_spans_steps_and_frames() -> None:
    found = columns(
        [
            span(0, 10, "ProfilerStep#4"),
            span(1, 2, "next_batch"),
            operator(3, 1, "aten::mm"),
            operator(4, 1, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
            frame(5, 1, "<built-in function collect>"),
            frame(6, 1, "train.py(3): forward"),
        ]
    )
    assert found.steps == [(4, 0, 10 * US)]
    assert found.span_kind.tolist() == [Host.DATA, Host.DATA_IN_TRAINER, Host.GC]
    assert found.span_start.tolist() == [1 * US, 4 * US, 5 * US]
    assert found.op_start.tolist() == [3 * US, 4 * US]
    assert found.has_python
    assert not columns([span(1, 2, "next_batch")]).has_python


def test_what_a_collective_says_of_itself() -> None:
    found = columns(
        [kernel(0, 1), collective(1, 2, 5, ranks=(0, 3)), collective(4, 2, None, group=None)]
    )
    assert found.gpu_kind.tolist() == [Gpu.COMPUTE, Gpu.COLLECTIVE, Gpu.COLLECTIVE]
    assert found.comm_arguments == {
        1: CommArguments(
            operation="allreduce",
            group="g",
            ranks="[0, 3]",
            size=2,
            sequence=5,
            elements=NO_VALUE,
        )
    }


def test_what_the_host_says_of_a_collective() -> None:
    named = operator(1, 2, "record_param_comms")
    named["args"] = {"Collective name": "allreduce", "Process Group Name": "tp", "Seq": 9}
    pointers = operator(5, 2, "record_param_comms")
    pointers["args"] = {
        "Concrete Inputs": ["", "8", "0x7f21", "0", "allreduce", "[]", "[]", "4"],
    }
    bare = operator(9, 2, "record_param_comms")
    found = columns([named, pointers, bare, span(12, 2, "nccl:all_reduce")])
    assert found.comm_calls == [
        CommCall(0, 1 * US, 3 * US, "allreduce", "tp", 9),
        CommCall(0, 5 * US, 7 * US, "", "0x7f21", 8),
        CommCall(0, 9 * US, 11 * US, "", "", NO_VALUE),
        CommCall(0, 12 * US, 14 * US, "nccl:all_reduce", "", NO_VALUE),
    ]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, 7),
        (-3, -3),
        ("7", 7),
        ("stream 7", 7),
        ("default", NO_VALUE),
        ("", NO_VALUE),
        (7.0, NO_VALUE),
        (True, NO_VALUE),
        (None, NO_VALUE),
        ([7], NO_VALUE),
        (1 << 80, NO_VALUE),
        ("9" * 30, NO_VALUE),
        ("\u0667", NO_VALUE),
    ],
)
def test_whole_numbers(value: object, number: int) -> None:
    assert whole(value) == number


def test_a_name_is_kept_once() -> None:
    found = columns([kernel(n, 0.5, name=ALLREDUCE if n % 2 else "gemm") for n in range(10)])
    assert found.gpu_names == ["gemm", ALLREDUCE]
    assert found.gpu_name.tolist() == [0, 1] * 5
