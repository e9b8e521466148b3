"""Small traces made by hand: events at microseconds, and what is read out of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whyidle_rules.trace import decode
from whyidle_rules.trace.columns import Columns
from whyidle_rules.trace.device import DeviceTrace, analyse
from whyidle_rules.trace.load import FileTrace
from whyidle_rules.trace.names import Host

Event = dict[str, Any]
US = 1000  # nanoseconds

ALLREDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
THREAD = 1


def _event(category: str, name: str, begin: float, length: float, tid: int, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": begin,
        "dur": length,
        "args": args,
    }


def kernel(
    begin: float, length: float, launch: int = -1, *, name: str = "gemm", **args: Any
) -> Event:
    """Return a kernel; `launch` is the correlation of its launch call."""
    more = {"device": 0, "stream": 7, "correlation": launch, "grid": [64, 1, 1], **args}
    return _event("kernel", name, begin, length, 7, **more)


def copy(begin: float, length: float, launch: int = -1, *, route: str, **args: Any) -> Event:
    """Return a copy; `route` reads like "HtoD (Pinned -> Device)"."""
    more = {"device": 0, "stream": 24, "correlation": launch, **args}
    return _event("gpu_memcpy", f"Memcpy {route}", begin, length, 24, **more)


def collective(
    begin: float,
    length: float,
    sequence: int | None,
    *,
    group: str | None = "g",
    ranks: Sequence[int] = (0, 1),
    operation: str = "allreduce",
    name: str = ALLREDUCE,
    launch: int = -1,
    stream: int = 20,
) -> Event:
    """Return a communication kernel; without a group, as old profilers write it."""
    args: dict[str, Any] = {
        "device": 0,
        "stream": stream,
        "correlation": launch,
        "grid": [24, 1, 1],
    }
    if group is not None:
        args |= {
            "Collective name": operation,
            "Process Group Name": group,
            "Process Group Ranks": str(list(ranks)),
            "Group size": len(ranks),
        }
    if sequence is not None:
        args["Seq"] = sequence
    return _event("kernel", name, begin, length, stream, **args)


def call(
    begin: float,
    length: float,
    number: int = -1,
    *,
    name: str = "cudaLaunchKernel",
    thread: int = THREAD,
) -> Event:
    """Return a call of the CUDA runtime."""
    return _event("cuda_runtime", name, begin, length, thread, correlation=number)


def operator(begin: float, length: float, name: str = "aten::mm", thread: int = THREAD) -> Event:
    """Return an operator of the framework."""
    return _event("cpu_op", name, begin, length, thread)


def span(begin: float, length: float, name: str, thread: int = THREAD) -> Event:
    """Return an annotation of the host."""
    return _event("user_annotation", name, begin, length, thread)


def frame(begin: float, length: float, name: str, thread: int = THREAD) -> Event:
    """Return a Python frame."""
    return _event("python_function", name, begin, length, thread)


def columns(events: Sequence[Event]) -> Columns:
    """Return events as columns."""
    collector = decode.Collector()
    batch = decode.decode(json.dumps(list(events)).encode())
    assert batch.foreign == 0
    collector.add(batch.events)
    assert collector.columns.bad_times == 0
    return collector.columns


def device(events: Sequence[Event]) -> DeviceTrace:
    """Return the only GPU of a trace."""
    (found,) = analyse(columns(events))
    return found


def trace_file(rank: int | None, events: Sequence[Event], world_size: int | None = 2) -> FileTrace:
    """Return a trace as a file of that rank."""
    filled = columns(events)
    return FileTrace(
        path=Path(f"rank-{rank}.json"),
        rank=rank,
        world_size=world_size,
        node="node-a",
        devices=analyse(filled),
        events=filled.events,
        has_operators=len(filled.op_start) > 0,
        has_calls=len(filled.call_start) > 0,
        has_python=filled.has_python,
        has_gc=any(kind == Host.GC for kind in filled.span_kind),
    )
