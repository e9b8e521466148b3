"""Writes simulated ranks as Kineto writes traces, in the dialects of its versions.

The layout follows files of PyTorch 1.8 to 2.9 on CUDA and ROCm: keys, their order, categories,
line breaks, and numbers with three decimals (nanoseconds since PyTorch 2.3).
"""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from world.traces import Event, Group, Rank

# 2025-06-01T00:00:00Z; traces of PyTorch 2.3 and later count from such a base.
BASE_NS = 1_748_736_000_000_000_000
_COMMON_NS = 3_600_000_000_000
_OLD_CATEGORIES = {
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
    "cuda_runtime": "Runtime",
    "cpu_op": "Operator",
    "user_annotation": "Operator",
    "python_function": "python_function",
}
_HIP = {
    "cudaLaunchKernel": "hipLaunchKernel",
    "cudaLaunchKernelExC": "hipExtLaunchKernel",
    "cudaMemcpyAsync": "hipMemcpyWithStream",
    "cudaMemsetAsync": "hipMemsetAsync",
    "cudaStreamSynchronize": "hipStreamSynchronize",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a trace is written.

    `clock`: "base" counts from baseTimeNanoseconds, "epoch" writes microseconds since 1970 with
    decimals, "whole" without. `unlaunched_ratio` is the share of GPU events whose launch is not in
    the trace. `clock_offsets_ns` are errors of the ranks' clocks.
    """

    old_names: bool = False
    clock: Literal["base", "epoch", "whole"] = "base"
    distributed_info: bool = True
    steps: bool = True
    unlaunched_ratio: float = 0.0
    rocm: bool = False
    collective_args: bool = True
    minified: bool = False
    metadata_last: bool = False
    flows: bool = True
    clock_offsets_ns: tuple[int, ...] = ()


def _time(dialect: Dialect, rank: Rank, instant_ns: int) -> str:
    offsets = dialect.clock_offsets_ns
    total = _COMMON_NS + instant_ns + (offsets[rank.index] if offsets else 0)
    if dialect.clock != "base":
        total += BASE_NS
    return _microseconds(total, whole=dialect.clock == "whole")


def _microseconds(total_ns: int, *, whole: bool) -> str:
    if whole:
        if total_ns % 1000:
            raise AssertionError("whole microseconds need a simulation with a quantum of 1000 ns")
        return str(total_ns // 1000)
    return f"{total_ns // 1000}.{total_ns % 1000:03d}"


def _collective_args(event: Event, rank: Rank) -> dict[str, object]:
    group = event.args["group"]
    if not isinstance(group, Group):
        raise TypeError("a collective has no group")
    operation = str(event.args["collective"])
    args: dict[str, object] = {
        "Collective name": operation,
        "In msg nelems": 4_194_304,
        "Out msg nelems": 4_194_304,
        "Group size": len(group.members),
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": group.name,
        "Process Group Description": group.description,
        "Process Group Ranks": str(list(group.members)),
        "Rank": group.members.index(rank.index),
        "Seq": event.args["seq"],
    }
    if operation in {"send", "recv"}:
        peer = next(member for member in group.members if member != rank.index)
        mine, other = ("Src Rank", "Dst Rank") if operation == "send" else ("Dst Rank", "Src Rank")
        args |= {mine: rank.index, other: peer}
    return args


def _gpu_args(event: Event, rank: Rank, dialect: Dialect) -> dict[str, object]:
    args: dict[str, object] = {}
    if not dialect.old_names:
        args["External id"] = event.correlation
    if event.category == "kernel" and not dialect.rocm:
        args["queued"] = 0
    args["device"] = rank.index % 8
    if not dialect.rocm:
        args["context"] = 1
    args |= {"stream": event.lane, "correlation": event.correlation}
    if event.category != "kernel":
        args["bytes"] = event.args.get("bytes", 4096)
        args["memory bandwidth (GB/s)"] = 10.25
        return args
    if dialect.rocm:
        args["kind"] = "Dispatch Kernel"
    communicates = "collective" in event.args
    if not dialect.rocm:
        args |= {
            "registers per thread": 96 if communicates else 64,
            "shared memory": 88016 if communicates else 0,
            "blocks per SM": 0.222222 if communicates else 9.481481,
            "warps per SM": 3.777778 if communicates else 75.851852,
        }
    args |= {"grid": [24 if communicates else 1024, 1, 1], "block": [256, 1, 1]}
    if not dialect.rocm:
        args["est. achieved occupancy %"] = 0 if communicates else 87
    if communicates and dialect.collective_args:
        args |= _collective_args(event, rank)
    return args


def _args(event: Event, rank: Rank, dialect: Dialect, index: int) -> dict[str, object]:
    if event.category.startswith(("kernel", "gpu_")):
        return _gpu_args(event, rank, dialect)
    if event.category == "cuda_runtime":
        cbid = "cid" if dialect.rocm else "cbid"
        return {"External id": event.correlation, cbid: 211, "correlation": event.correlation}
    if event.category == "python_function":
        return {"Python parent id": None, "Python id": index, "Ev Idx": index}
    return {"External id": 1_000_000 + index, "Record function id": 0, "Ev Idx": index}


def _complete(event: Event, rank: Rank, dialect: Dialect, index: int) -> dict[str, Any]:
    on_gpu = event.category.startswith(("kernel", "gpu_"))
    lane: int | str = event.lane
    if dialect.old_names:
        lane = f"stream {event.lane}" if on_gpu else str(event.lane)
    name = event.name
    if dialect.rocm:
        name = _HIP.get(name, name)
        if "Memcpy " in name:
            name = {"HtoD": "CopyHostToDevice", "DtoH": "CopyDeviceToHost"}[name.split(" ")[1]]
    return {
        "ph": "X",
        "cat": _OLD_CATEGORIES[event.category] if dialect.old_names else event.category,
        "name": name,
        "pid": rank.index % 8 if on_gpu else rank.pid,
        "tid": lane,
        "ts": _time(dialect, rank, event.begin_ns),
        "dur": _microseconds(event.dur_ns, whole=dialect.clock == "whole"),
        "args": _args(event, rank, dialect, index),
    }


def _flow(event: dict[str, Any], end: bool, dialect: Dialect) -> dict[str, Any]:
    flow = {
        "ph": "f" if end else "s",
        "id": event["args"]["correlation"],
        "pid": event["pid"],
        "tid": event["tid"],
        "ts": event["ts"],
        "cat": "async" if dialect.old_names else "ac2g",
        "name": "launch" if dialect.old_names else "ac2g",
    }
    return flow | {"bp": "e"} if end else flow


def _meta(name: str, pid: object, tid: object, stamp: str, /, **args: object) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": stamp, "pid": pid, "tid": tid, "args": args}


def _last(rank: Rank, dialect: Dialect) -> Iterator[dict[str, Any]]:
    """Yield what Kineto writes after the activities: names of processes, and the span of it all."""
    begin = min(event.begin_ns for event in rank.events)
    end = max(event.span[1] for event in rank.events)
    stamp = _time(dialect, rank, begin)
    device = rank.index % 8
    for pid, label in ((rank.pid, "CPU"), (device, f"GPU {device}")):
        yield _meta("process_name", pid, 0, stamp, name="python")
        yield _meta("process_labels", pid, 0, stamp, labels=label)
        yield _meta("process_sort_index", pid, 0, stamp, sort_index=pid)
    for stream in sorted({event.lane for event in rank.events if event.lane != rank.pid}):
        yield _meta("thread_name", device, stream, stamp, name=f"stream {stream} ")
    profiler = "PyTorch Profiler"
    length = _microseconds(end - begin, whole=dialect.clock == "whole")
    span = {"ph": "X", "cat": "Trace", "ts": stamp, "dur": length, "pid": "Spans", "tid": profiler}
    yield span | {"name": f"{profiler} (0)", "args": {"Op count": 0}}
    mark = {"ph": "i", "s": "g", "pid": "Traces", "tid": f"Trace {profiler}", "ts": stamp}
    yield {"name": f"Iteration Start: {profiler}"} | mark
    closing = {"ph": "i", "s": "g", "pid": "", "tid": "", "ts": _time(dialect, rank, end)}
    yield {"name": "Record Window End"} | closing


def entries(rank: Rank, dialect: Dialect) -> Iterator[dict[str, Any]]:
    """Yield the entries of `traceEvents`; times are texts, so that no digit is lost."""
    chance = random.Random(rank.index)
    dropped = {
        event.correlation
        for event in rank.events
        if event.category.startswith(("kernel", "gpu_"))
        and chance.random() < dialect.unlaunched_ratio
    }
    for index, event in enumerate(rank.events):
        if not dialect.steps and event.name.startswith("ProfilerStep#"):
            continue
        if event.category == "cuda_runtime" and event.correlation in dropped:
            continue
        entry = _complete(event, rank, dialect, index)
        yield entry
        if event.correlation is not None and dialect.flows and event.correlation not in dropped:
            yield _flow(entry, event.category != "cuda_runtime", dialect)
    yield from _last(rank, dialect)


def _text(entry: dict[str, Any], minified: bool) -> str:
    """Write one entry; `ts` and `dur` stay the digits that they are."""
    times = {key: entry[key] for key in ("ts", "dur") if key in entry}
    marked = {key: f"\0{value}\0" for key, value in times.items()}
    if minified:
        text = json.dumps(entry | marked, separators=(",", ":"), ensure_ascii=False)
        return text.replace('"\\u0000', "").replace('\\u0000"', "")
    args = entry.get("args")
    head = {key: value for key, value in (entry | marked).items() if key != "args"}
    text = json.dumps(head, ensure_ascii=False)[1:-1]
    text = text.replace('"\\u0000', "").replace('\\u0000"', "")
    text = text.replace(', "ts":', ',\n    "ts":')
    if args is None:
        return f"  {{\n    {text}\n  }}"
    inner = json.dumps(args, ensure_ascii=False)[1:-1]
    return f'  {{\n    {text},\n    "args": {{\n      {inner}\n    }}\n  }}'


def _metadata(rank: Rank, dialect: Dialect) -> dict[str, Any]:
    devices = [
        {
            "id": number,
            "name": "AMD Instinct MI300X" if dialect.rocm else "NVIDIA A100-SXM4-80GB",
            "totalGlobalMem": 85_174_583_296,
            "computeMajor": 8,
            "computeMinor": 0,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerMultiprocessor": 2048,
            "regsPerBlock": 65536,
            "warpSize": 32,
            "sharedMemPerBlock": 49152,
            "numSms": 108,
        }
        for number in range(8)
    ]
    found: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": devices}
    if dialect.distributed_info:
        found["distributedInfo"] = {
            "backend": "nccl",
            "rank": rank.index,
            "world_size": rank.count,
        }
    if dialect.clock == "base":
        found |= {"displayTimeUnit": "ms", "baseTimeNanoseconds": BASE_NS}
    return found


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _spread(value: object) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    lines = (json.dumps(one)[1:-1].replace(', "compute', ',\n      "compute', 1) for one in value)
    return "[\n" + ",\n".join(f"    {{\n      {line}\n    }}" for line in lines) + "\n  ]"


def trace_text(rank: Rank, dialect: Dialect) -> Iterator[str]:
    """Yield a trace in pieces."""
    minified = dialect.minified
    between, colon = (",", ":") if minified else (",\n  ", ": ")
    meta = [
        json.dumps(key) + colon + (_compact(value) if minified else _spread(value))
        for key, value in _metadata(rank, dialect).items()
    ]
    yield "{" if minified else "\n{\n  "
    if not dialect.metadata_last:
        yield between.join(meta) + between
    yield f'"traceEvents"{colon}['
    for index, entry in enumerate(entries(rank, dialect)):
        yield ("," if index else "") + ("" if minified else "\n") + _text(entry, minified)
    yield "]" if minified else "\n  ]"
    if dialect.metadata_last:
        yield between + between.join(meta)
    yield "}" if minified else "\n}"


def packed(pieces: Iterable[str]) -> bytes:
    """Compress a text into gzip with nothing of the clock or the machine in it."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as out:
        for piece in pieces:
            out.write(piece.encode())
    return buffer.getvalue()


def write(ranks: Iterable[Rank], folder: Path, dialect: Dialect, *, zipped: bool = True) -> None:
    """Write one file a rank into the folder: rank-0.json.gz, rank-1.json.gz, and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        pieces = trace_text(rank, dialect)
        if zipped:
            (folder / f"rank-{rank.index}.json.gz").write_bytes(packed(pieces))
        else:
            (folder / f"rank-{rank.index}.json").write_text("".join(pieces), encoding="utf-8")
