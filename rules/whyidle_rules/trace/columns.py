"""The events of one trace file, column by column: what decoding fills and analysis reads."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

TIME_MAX_NS = 1 << 62
NO_VALUE = -1  # in columns of numbers that are never negative


class CommCall(NamedTuple):
    """What the host wrote down about one collective or transfer that it launched."""

    thread: int
    start_ns: int
    end_ns: int
    operation: str
    group: str
    sequence: int


class CommArguments(NamedTuple):
    """What a communication kernel itself says about its collective."""

    operation: str
    group: str
    ranks: str
    size: int
    sequence: int
    elements: int


@dataclass(slots=True)
class Columns:
    """The events of one file, column by column; times in nanoseconds of the file's own clock.

    GPU columns run in parallel, and so do those of driver calls, of host operators, and of spans
    that mean something by their name. `device` and `thread` are the file's own identities, numbered
    in order of appearance.
    """

    gpu_start: array[int] = field(default_factory=lambda: array("q"))
    gpu_end: array[int] = field(default_factory=lambda: array("q"))
    gpu_kind: array[int] = field(default_factory=lambda: array("b"))
    gpu_device: array[int] = field(default_factory=lambda: array("i"))
    gpu_stream: array[int] = field(default_factory=lambda: array("q"))
    gpu_correlation: array[int] = field(default_factory=lambda: array("q"))
    gpu_blocks: array[int] = field(default_factory=lambda: array("q"))
    gpu_name: array[int] = field(default_factory=lambda: array("i"))
    gpu_bytes: array[int] = field(default_factory=lambda: array("q"))
    gpu_occupancy: array[int] = field(default_factory=lambda: array("b"))  # percent
    call_start: array[int] = field(default_factory=lambda: array("q"))
    call_end: array[int] = field(default_factory=lambda: array("q"))
    call_thread: array[int] = field(default_factory=lambda: array("i"))
    call_kind: array[int] = field(default_factory=lambda: array("b"))
    call_correlation: array[int] = field(default_factory=lambda: array("q"))
    op_start: array[int] = field(default_factory=lambda: array("q"))
    op_end: array[int] = field(default_factory=lambda: array("q"))
    op_thread: array[int] = field(default_factory=lambda: array("i"))
    span_start: array[int] = field(default_factory=lambda: array("q"))
    span_end: array[int] = field(default_factory=lambda: array("q"))
    span_thread: array[int] = field(default_factory=lambda: array("i"))
    span_kind: array[int] = field(default_factory=lambda: array("b"))
    steps: list[tuple[int, int, int]] = field(default_factory=list)  # number, start, end
    comm_calls: list[CommCall] = field(default_factory=list)
    comm_arguments: dict[int, CommArguments] = field(default_factory=dict)  # by GPU row
    gpu_names: list[str] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    threads: list[tuple[str, str]] = field(default_factory=list)
    events: int = 0
    bad_times: int = 0
    nameless: int = 0
    has_python: bool = False
    has_gc: bool = False
