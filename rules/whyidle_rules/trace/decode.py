"""The events of a trace as columns: only what the ledger needs, times as integers of nanoseconds.

Kineto writes microseconds with up to three decimals. With an epoch in front (1.7e15 us) they no
longer fit a float, so they are read as text. Only the declared fields of an event are decoded; the
rest (shapes, strides, call stacks: most of a file) is skipped by the parser: 2 to 10 times faster
than decoding everything, and in a fraction of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from whyidle_rules.trace import names
from whyidle_rules.trace.columns import (
    NO_VALUE,
    TIME_MAX_NS,
    Columns,
    CommArguments,
    CommCall,
)
from whyidle_rules.trace.names import Gpu, Host


class Arguments(msgspec.Struct, gc=False, frozen=True):
    """The members of an event's `args` that are read; every other one is skipped."""

    correlation: Any = None
    device: Any = None
    stream: Any = None
    grid: Any = None
    bytes: Any = None
    occupancy: Any = msgspec.field(default=None, name="est. achieved occupancy %")
    inputs: Any = msgspec.field(default=None, name="Concrete Inputs")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    group_size: Any = msgspec.field(default=None, name="Group size")
    sequence: Any = msgspec.field(default=None, name="Seq")
    elements: Any = msgspec.field(default=None, name="In msg nelems")


_NO_ARGUMENTS = Arguments()
_NO_TIME = msgspec.Raw(b"")


class Event(msgspec.Struct, gc=False):
    """One event; `ts` and `dur` stay text."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = _NO_TIME
    dur: msgspec.Raw = _NO_TIME
    args: Arguments = _NO_ARGUMENTS


_STRICT = msgspec.json.Decoder(list[Event])
_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_ONE = msgspec.json.Decoder(Event)


@dataclass(slots=True)
class Batch:
    """Decoded events of one piece, and how many of it were JSON but no events."""

    events: list[Event]
    foreign: int = 0


def decode(piece: bytes) -> Batch:
    """Decode a JSON array of events; raises msgspec.DecodeError where it is no JSON.

    Things of another shape among the events are counted, not fatal.
    """
    try:
        return Batch(_STRICT.decode(piece))
    except msgspec.ValidationError:
        batch = Batch([])
        for raw in _RAW_LIST.decode(piece):
            try:
                batch.events.append(_ONE.decode(raw))
            except msgspec.ValidationError:
                batch.foreign += 1
        return batch


_TENS = (0, 100, 10, 1)  # nanoseconds of the last digit of a fraction of so many


def nanoseconds(raw: msgspec.Raw) -> int:
    """Return microseconds in JSON text as whole nanoseconds; raises ValueError."""
    text = bytes(raw)
    dot = text.find(b".")
    try:
        if dot < 0:
            return int(text) * 1000
        digits = len(text) - dot - 1
        if digits <= 3 and text[:1] != b"-":
            return int(text[:dot]) * 1000 + int(text[dot + 1 :]) * _TENS[digits]
    except ValueError:
        pass
    try:
        value = Decimal(text.decode("ascii").strip('"')) * 1000
        if not value.is_finite() or abs(value) > TIME_MAX_NS:
            raise ValueError(f"{value} is no time")
        return int(value.to_integral_value())
    except (InvalidOperation, UnicodeDecodeError) as error:
        raise ValueError("no number") from error


class Collector:
    """Fills Columns from batches of events."""

    def __init__(self) -> None:
        self.columns = Columns()
        self._kernels: dict[str, tuple[Gpu, int]] = {}
        self._copies: dict[str, tuple[Gpu, int]] = {}
        self._calls: dict[str, tuple[Host, bool]] = {}
        self._spans: dict[str, Host] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._devices: dict[Any, int] = {}
        kernel, copy, call = self._kernel, self._copy, self._call
        operator, annotation, frame = self._operator, self._annotation, self._frame
        # New and old names of Kineto's categories; what is not here is no work of GPU or host.
        self._handlers: dict[str, Callable[[Event, int, int], None]] = {
            "kernel": kernel,
            "Kernel": kernel,
            "gpu_memcpy": copy,
            "gpu_memset": copy,
            "Memcpy": copy,
            "Memset": copy,
            "cuda_runtime": call,
            "cuda_driver": call,
            "hip_runtime": call,
            "hip_driver": call,
            "Runtime": call,
            "Driver": call,
            "cpu_op": operator,
            "Operator": operator,
            "cpu_instant_event": self._nothing,
            "user_annotation": annotation,
            "python_function": frame,
            "PythonFunction": frame,
            "python_gc": frame,
            "overhead": self._overhead,
        }

    def add(self, events: list[Event]) -> None:
        """Take the events of one batch."""
        handlers, columns = self._handlers, self.columns
        columns.events += len(events)
        for event in events:
            if event.ph != "X":
                continue
            try:
                handler = handlers.get(event.cat)
            except TypeError:  # a category that is no text
                continue
            if handler is None:
                continue
            if type(event.name) is not str:
                columns.nameless += 1
                continue
            try:
                start = nanoseconds(event.ts)
                length = nanoseconds(event.dur)
            except ValueError:
                columns.bad_times += 1
                continue
            if length < 0 or not -TIME_MAX_NS < start < TIME_MAX_NS - length:
                columns.bad_times += 1
                continue
            handler(event, start, start + length)

    def _kernel(self, event: Event, start: int, end: int) -> None:
        known = self._kernels.get(event.name)
        if known is None:
            known = self._kernels[event.name] = (names.gpu_kernel(event.name), self._name(event))
        if known[0] is Gpu.COLLECTIVE:
            args = event.args
            if args.collective is not None or args.group is not None:
                self.columns.comm_arguments[len(self.columns.gpu_start)] = CommArguments(
                    operation=_text(args.collective),
                    group=_text(args.group),
                    ranks=_text(args.group_ranks),
                    size=whole(args.group_size),
                    sequence=whole(args.sequence),
                    elements=whole(args.elements),
                )
        self._gpu(event, known, start, end)

    def _copy(self, event: Event, start: int, end: int) -> None:
        known = self._copies.get(event.name)
        if known is None:
            known = self._copies[event.name] = (names.gpu_copy(event.name), self._name(event))
        self._gpu(event, known, start, end)

    def _name(self, event: Event) -> int:
        self.columns.gpu_names.append(event.name)
        return len(self.columns.gpu_names) - 1

    def _gpu(self, event: Event, known: tuple[Gpu, int], start: int, end: int) -> None:
        columns, args = self.columns, event.args
        columns.gpu_start.append(start)
        columns.gpu_end.append(end)
        columns.gpu_kind.append(known[0])
        columns.gpu_name.append(known[1])
        columns.gpu_device.append(self._device(event.pid if args.device is None else args.device))
        columns.gpu_stream.append(whole(args.stream))
        columns.gpu_correlation.append(whole(args.correlation))
        columns.gpu_blocks.append(_product(args.grid))
        columns.gpu_bytes.append(whole(args.bytes))
        occupancy = whole(args.occupancy)
        columns.gpu_occupancy.append(occupancy if 0 <= occupancy <= 100 else NO_VALUE)

    def _device(self, identity: Any) -> int:
        key = whole(identity)
        number = self._devices.get(key)
        if number is None:
            number = self._devices[key] = len(self._devices)
            self.columns.devices.append(key)
        return number

    def _thread(self, event: Event) -> int:
        key = (event.pid, event.tid)
        try:
            number = self._threads.get(key)
        except TypeError:
            key = (repr(event.pid), repr(event.tid))
            number = self._threads.get(key)
        if number is None:
            # "25738" and 25738 are the same thread: old files write both.
            as_text = (str(event.pid), str(event.tid))
            number = self._threads.get(as_text)
            if number is None:
                number = self._threads[as_text] = len(self.columns.threads)
                self.columns.threads.append(as_text)
            self._threads[key] = number
        return number

    def _call(self, event: Event, start: int, end: int) -> None:
        columns = self.columns
        known = self._calls.get(event.name)
        if known is None:
            known = (names.driver_call(event.name), names.is_launch(event.name))
            self._calls[event.name] = known
        columns.call_start.append(start)
        columns.call_end.append(end)
        columns.call_thread.append(self._thread(event))
        columns.call_kind.append(known[0])
        columns.call_correlation.append(whole(event.args.correlation) if known[1] else NO_VALUE)

    def _operator(self, event: Event, start: int, end: int) -> None:
        columns = self.columns
        thread = self._thread(event)
        columns.op_start.append(start)
        columns.op_end.append(end)
        columns.op_thread.append(thread)
        if event.name == "record_param_comms":
            self._comm_call(event, thread, start, end)
        else:
            self._named(event.name, thread, start, end)

    def _annotation(self, event: Event, start: int, end: int) -> None:
        thread = self._thread(event)
        if event.name.startswith("nccl:"):
            self.columns.comm_calls.append(CommCall(thread, start, end, event.name, "", NO_VALUE))
        else:
            self._named(event.name, thread, start, end)

    def _frame(self, event: Event, start: int, end: int) -> None:
        self.columns.has_python = True
        self._named(event.name, self._thread(event), start, end)

    def _named(self, name: str, thread: int, start: int, end: int) -> None:
        kind = self._spans.get(name)
        if kind is None:
            step = names.step_number(name)
            if step is not None:
                self.columns.steps.append((step, start, end))
                return
            kind = self._spans[name] = names.host_span(name)
        if kind is not Host.OTHER:
            self._span(kind, thread, start, end)

    def _span(self, kind: Host, thread: int, start: int, end: int) -> None:
        columns = self.columns
        columns.span_start.append(start)
        columns.span_end.append(end)
        columns.span_thread.append(thread)
        columns.span_kind.append(kind)
        if kind is Host.GC:
            columns.has_gc = True

    def _overhead(self, event: Event, start: int, end: int) -> None:
        self._span(Host.PROFILER, self._thread(event), start, end)

    def _nothing(self, event: Event, start: int, end: int) -> None:
        pass

    def _comm_call(self, event: Event, thread: int, start: int, end: int) -> None:
        args = event.args
        group, sequence = _text(args.group), whole(args.sequence)
        # Before PyTorch 2.2 the values stand only in the operator's inputs: [tensors,] sequence,
        # the process group as a pointer of this process, rank, name, splits, world size.
        inputs = args.inputs if isinstance(args.inputs, list) else []
        if len(inputs) >= 8 and sequence == NO_VALUE:
            sequence = whole(inputs[1])
            group = group or _text(inputs[2])
        self.columns.comm_calls.append(
            CommCall(thread, start, end, _text(args.collective), group, sequence)
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:200]


def whole(value: Any) -> int:
    """Return a number, or text of one ("7", "stream 7"), as an int; NO_VALUE for anything else."""
    if type(value) is int:
        return value if -TIME_MAX_NS < value < TIME_MAX_NS else NO_VALUE
    if isinstance(value, str):
        digits = value.rpartition(" ")[2]
        if digits.isascii() and digits.isdigit() and len(digits) < 19:
            return int(digits)
    return NO_VALUE


def _product(grid: Any) -> int:
    """Return the number of blocks of a grid [x, y, z], or NO_VALUE."""
    if not isinstance(grid, list) or not 1 <= len(grid) <= 3:
        return NO_VALUE
    blocks = 1
    for side in grid:
        if type(side) is not int or not 0 < side < 1 << 31:
            return NO_VALUE
        blocks *= side
    return min(blocks, TIME_MAX_NS)
