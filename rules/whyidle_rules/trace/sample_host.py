"""What the agent would have recorded of the host of a traced run: the trainer and its waits.

The launching thread's spans become the records of a counter page, and its operators the CPU time of
a process that is read once a second. A thread that loads its data itself is taken to compute while
it does: a trace does not tell its reads from its decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from whyidle.clock import NS_PER_S
from whyidle_rules import intervals
from whyidle_rules.intervals import Ints
from whyidle_rules.trace.columns import NO_VALUE, Columns
from whyidle_rules.trace.load import FileTrace
from whyidle_rules.trace.names import Host

Values = npt.NDArray[Any]

_PAGE_NS = NS_PER_S // 8
_KINDS: Mapping[Host, str] = {
    Host.DATA: "data_wait",
    Host.DATA_IN_TRAINER: "data_wait",
    Host.CHECKPOINT_SAVE: "checkpoint_save",
    Host.CHECKPOINT_LOAD: "checkpoint_load",
    Host.EVALUATION: "evaluation",
    Host.GC: "gc",
}


def tables(
    file: FileTrace, columns: Columns, uuids: list[str], begin: int, end: int, pid: int
) -> dict[str, dict[str, Any]]:
    """Return columns by table; {} where the trace has no host side."""
    thread = _launching_thread(columns)
    if thread is None:
        return {}
    spans = _spans(columns, thread, file.base_ns)
    identity = {"pid": pid, "start_ns": 1}
    info = {
        "mono_ns": begin,
        **identity,
        "kind": "trainer",
        "rank": file.rank,
        "world_size": file.world_size or 1,
    }
    found: dict[str, dict[str, Any]] = {
        "process_info": info,
        "gpu_process": {
            "mono_ns": np.full(len(uuids), begin, dtype=np.int64),
            "uuid": np.array(uuids, dtype=object),
            "pid": np.full(len(uuids), pid, dtype=np.int64),
            "start_ns": np.full(len(uuids), 1, dtype=np.int64),
            "context": np.full(len(uuids), "compute", dtype=object),
        },
        "clock": {"mono_ns": begin, "boot_ns": begin, "wall_ns": begin, "bracket_ns": 0},
        "process": _process(columns, thread, file.base_ns, spans, begin, end, pid),
    }
    loaders = [kind for kind in (Host.DATA, Host.DATA_IN_TRAINER) if len(spans[kind])]
    found |= _page(spans, loaders, begin, end, pid)
    return found


def _launching_thread(columns: Columns) -> int | None:
    """Return the thread that waited for data, else the one that made most launches.

    The backward pass is launched by a thread of its own, which has no data to wait for.
    """
    kind = np.frombuffer(columns.span_kind, dtype=np.int8)
    loading = (kind == Host.DATA) | (kind == Host.DATA_IN_TRAINER)
    if loading.any():
        return int(
            np.bincount(np.frombuffer(columns.span_thread, dtype=np.int32)[loading]).argmax()
        )
    correlation = np.frombuffer(columns.call_correlation, dtype=np.int64)
    threads = np.frombuffer(columns.call_thread, dtype=np.int32)[correlation != NO_VALUE]
    return int(np.bincount(threads).argmax()) if len(threads) else None


def _spans(columns: Columns, thread: int, base_ns: int) -> dict[Host, Ints]:
    kind = np.frombuffer(columns.span_kind, dtype=np.int8)
    own = np.frombuffer(columns.span_thread, dtype=np.int32) == thread
    start = np.frombuffer(columns.span_start, dtype=np.int64) + base_ns
    end = np.frombuffer(columns.span_end, dtype=np.int64) + base_ns
    return {
        host: intervals.union(start[own & (kind == host)], end[own & (kind == host)])
        for host in _KINDS
    }


def _process(
    columns: Columns,
    thread: int,
    base_ns: int,
    spans: Mapping[Host, Ints],
    begin: int,
    end: int,
    pid: int,
) -> dict[str, Values]:
    own = np.frombuffer(columns.op_thread, dtype=np.int32) == thread
    start = np.frombuffer(columns.op_start, dtype=np.int64)[own] + base_ns
    stop = np.frombuffer(columns.op_end, dtype=np.int64)[own] + base_ns
    running = intervals.merge(intervals.union(start, stop), spans[Host.DATA_IN_TRAINER])
    running = intervals.subtract(running, spans[Host.DATA])
    times = _times(begin, end, NS_PER_S)
    run = intervals.covered_ns(running, np.full(len(times), begin), times)
    count = len(times)
    return {
        "mono_ns": times,
        "pid": np.full(count, pid, dtype=np.int64),
        "start_ns": np.ones(count, dtype=np.int64),
        "kind": np.full(count, "trainer", dtype=object),
        "state": np.full(count, "S", dtype=object),
        "main_run_ns": run,
        "main_run_delay_ns": np.zeros(count, dtype=np.int64),
        "blkio_delay_ns": np.zeros(count, dtype=np.int64),
    }


def _page(
    spans: Mapping[Host, Ints], loaders: list[Host], begin: int, end: int, pid: int
) -> dict[str, dict[str, Any]]:
    times = _times(begin, end, _PAGE_NS)
    count = len(times)
    start = np.full(count, begin, dtype=np.int64)
    waits = intervals.merge(spans[Host.DATA], spans[Host.DATA_IN_TRAINER])
    waited = intervals.covered_ns(waits, start, times)
    kinds = [np.full(len(spans[host]), kind, dtype=object) for host, kind in _KINDS.items()]
    events = np.concatenate([spans[host] for host in _KINDS])
    order = np.argsort(events[:, 1], kind="stable")
    page: dict[str, dict[str, Any]] = {
        "probe": {
            "mono_ns": times,
            "pid": np.full(count, pid, dtype=np.int64),
            "start_ns": np.ones(count, dtype=np.int64),
            "data_wait_ns": waited,
            "outside_wait_ns": np.zeros(count, dtype=np.int64),
        }
    }
    if len(events):
        page["probe_event"] = {
            # A record is read soon after it was written.
            "mono_ns": np.clip(events[order, 1], begin, end),
            "pid": np.full(len(events), pid, dtype=np.int64),
            "start_ns": np.ones(len(events), dtype=np.int64),
            "sequence": np.arange(1, len(events) + 1, dtype=np.int64),
            "kind": np.concatenate(kinds)[order],
            "background": np.zeros(len(events), dtype=bool),
            "begin_ns": events[order, 0],
            "end_ns": events[order, 1],
        }
    if len(loaders) == 1:
        page["probe_loader"] = {
            "mono_ns": end,
            "pid": pid,
            "start_ns": 1,
            "place": 0,
            "workers": 0 if loaders[0] == Host.DATA_IN_TRAINER else None,
            "wait_ns": int(waited[-1]),
        }
    return page


def _times(begin: int, end: int, step: int) -> Ints:
    """Return the moments at which something is read every `step`, both ends among them."""
    return np.append(np.arange(begin, end, step, dtype=np.int64), end)
