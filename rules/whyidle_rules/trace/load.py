"""Trace files of a run, each read once, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from whyidle_rules.trace import decode
from whyidle_rules.trace.columns import NO_VALUE, TIME_MAX_NS, Columns
from whyidle_rules.trace.device import DeviceTrace, analyse
from whyidle_rules.trace.stream import EventStream, NotATrace, open_trace

# tensorboard_trace_handler names files <host>_<pid>.<time>.pt.trace.json
_HANDLER_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]*)_(\d+)\.\d{6,}\.pt\.trace\.json")
_RANK_NAME = re.compile(r"rank[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE)

Progress = Callable[[int], None]  # told the bytes of each file that is done


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as the trace describes it; None where it does not."""

    name: str | None
    sm_count: int | None


@dataclass(slots=True, kw_only=True)
class FileTrace:
    """What one file says. `rank`, `world_size` and `node` are None where it does not say."""

    path: Path
    rank: int | None = None
    world_size: int | None = None
    rank_in_name: int | None = None
    node: str | None = None
    base_ns: int = 0
    gpus: dict[int, Gpu] = field(default_factory=dict)
    devices: list[DeviceTrace] = field(default_factory=list)
    events: int = 0
    has_operators: bool = False
    has_calls: bool = False
    has_python: bool = False
    has_gc: bool = False
    problems: list[str] = field(default_factory=list)
    refusal: str | None = None  # why nothing of the file can be used


def load(
    paths: Sequence[Path], progress: Progress, meanwhile: Callable[[], None] = _nothing
) -> list[FileTrace]:
    """Read the files, on as many processors as there are; in the order of `paths`.

    `meanwhile` is called once, after the helpers were forked: for what must not be in them, and
    for imports that would otherwise keep the other processors waiting.
    """
    sizes = [_size(path) for path in paths]
    order = sorted(range(len(paths)), key=lambda index: -sizes[index])
    workers = min(len(paths), len(os.sched_getaffinity(0)))
    found: dict[int, FileTrace] = {}

    def done(index: int, trace: FileTrace) -> None:
        found[index] = trace
        progress(sizes[index])

    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        meanwhile()
        for index in order:
            done(index, read(paths[index]))
    else:
        _read_together(paths, order, workers, done, meanwhile)
    return [found[index] for index in range(len(paths))]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_together(
    paths: Sequence[Path],
    order: list[int],
    workers: int,
    done: Callable[[int, FileTrace], None],
    meanwhile: Callable[[], None],
) -> None:
    """Read with helpers beside this process; each takes the next largest file.

    Forked, not spawned: a fresh interpreter with numpy costs 0.15 s, more than a small trace.
    """
    context = multiprocessing.get_context("fork")
    taken: Synchronized[int] = context.Value("q", 0)
    results: Queue[tuple[int, FileTrace]] = context.Queue()
    helpers = [
        context.Process(target=_help, args=(paths, order, taken, results), daemon=True)
        for _ in range(workers - 1)
    ]
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at a fork. The only ones are numpy's, idle, and not used by
        # the helpers.
        warnings.simplefilter("ignore", DeprecationWarning)
        for helper in helpers:
            helper.start()
    try:
        meanwhile()
        mine = _take(paths, order, taken, done)
        _collect(paths, set(order) - mine, helpers, results, done)
    finally:
        for helper in helpers:
            if helper.is_alive():
                helper.terminate()
            helper.join()
        results.close()


def _take(
    paths: Sequence[Path],
    order: list[int],
    taken: Synchronized[int],
    done: Callable[[int, FileTrace], None],
) -> set[int]:
    mine = set()
    while (index := _next(order, taken)) is not None:
        mine.add(index)
        done(index, read(paths[index]))
    return mine


def _next(order: list[int], taken: Synchronized[int]) -> int | None:
    with taken.get_lock():
        place = taken.value
        taken.value += 1
    return order[place] if place < len(order) else None


def _help(
    paths: Sequence[Path],
    order: list[int],
    taken: Synchronized[int],
    results: Queue[tuple[int, FileTrace]],
) -> None:
    try:
        _take(paths, order, taken, lambda index, trace: results.put((index, trace)))
    except KeyboardInterrupt:  # the parent says so
        os._exit(130)


def _collect(
    paths: Sequence[Path],
    missing: set[int],
    helpers: Sequence[BaseProcess],
    results: Queue[tuple[int, FileTrace]],
    done: Callable[[int, FileTrace], None],
) -> None:
    while missing:
        alive = any(helper.is_alive() for helper in helpers)
        try:
            index, trace = results.get(timeout=0.2 if alive else 1.0)
        except queue.Empty:
            if alive:
                continue
            for index in sorted(missing):
                refusal = "reading it was killed, perhaps for want of memory"
                done(index, FileTrace(path=paths[index], refusal=refusal))
            return
        missing.discard(index)
        done(index, trace)


def read(path: Path) -> FileTrace:
    """Read one file; what is wrong with it is in the result, nothing is raised."""
    return read_columns(path)[0]


def read_columns(path: Path) -> tuple[FileTrace, Columns | None]:
    """Read one file and return its events beside what they say; None where it was refused."""
    trace = FileTrace(path=path)
    columns = None
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            trace.refusal = "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file"
            return trace, None
        with open_trace(path) as source:
            columns = _fill(trace, EventStream(source, decode.decode))
    except NotATrace as problem:
        trace.refusal = str(problem)
    except OSError as error:
        trace.refusal = (error.strerror or type(error).__name__).lower()
    except MemoryError:
        trace.refusal = "there is not enough memory for it"
    return trace, None if trace.refusal else columns


def _fill(trace: FileTrace, stream: EventStream) -> Columns:
    collector = decode.Collector()
    foreign = 0
    batch: decode.Batch
    for batch in stream:
        collector.add(batch.events)
        foreign += batch.foreign
    columns = collector.columns
    _describe(trace, stream.header)
    trace.events = columns.events
    trace.has_operators = len(columns.op_start) > 0
    trace.has_calls = len(columns.call_start) > 0
    trace.has_python = columns.has_python
    trace.has_gc = columns.has_gc
    trace.problems.extend(stream.damage.notes)
    for count, what in (
        (stream.damage.events, "damaged"),
        (foreign + columns.nameless, "of an unknown shape"),
        (columns.bad_times, "at an impossible time"),
    ):
        if count:
            trace.problems.append(f"{count} event(s) {what}, left out")
    if columns.events == 0:
        trace.refusal = trace.problems[0] if trace.problems else "it has no events"
    elif columns.gpu_start:
        trace.devices = analyse(columns)
        for device in trace.devices:
            device.shift(trace.base_ns)
    return columns


def _describe(trace: FileTrace, header: dict[str, Any]) -> None:
    info = header.get("distributedInfo")
    if isinstance(info, dict):
        trace.rank = _count(info.get("rank"))
        trace.world_size = _count(info.get("world_size"))
    base = header.get("baseTimeNanoseconds")
    if type(base) is int and 0 < base < TIME_MAX_NS // 2:
        trace.base_ns = base
    properties = header.get("deviceProperties")
    for device in properties if isinstance(properties, list) else []:
        if isinstance(device, dict) and (number := _count(device.get("id"))) is not None:
            name = device.get("name")
            trace.gpus[number] = Gpu(
                name=name if isinstance(name, str) and name else None,
                sm_count=_count(device.get("numSms")),
            )
    for text in (header.get("traceName"), trace.path.name):
        if isinstance(text, str) and (match := _HANDLER_NAME.search(text)):
            trace.node = match.group(1)
            break
    match = _RANK_NAME.search(trace.path.name)
    trace.rank_in_name = int(match.group(1)) if match else None


def _count(value: Any) -> int | None:
    number = decode.whole(value)
    return None if number == NO_VALUE or number < 0 else number
