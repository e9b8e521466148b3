"""NVML calls of the hot path: buffers that live as long as the library is open, decoded by struct.

The library and its structures are nvidia-ml-py's. Its accessors are not used here, because each
member of a structure costs 0.4-0.7 us through a Python __getattribute__: one sweep of 8 GPUs (10
gauges, 56 fields, GPM) costs 1.33 ms through them and 0.084 ms so. Reference: nvml.h.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pynvml

from whyidle.clock import Clock
from whyidle.host import Answer, NvmlError

# NVML counts its refresh in 100 ms: the header asks for more than that between two GPM samples.
GPM_WINDOW_MIN_NS = 100_000_000
# A window over a pause this long says nothing of any moment: begin anew.
GPM_WINDOW_MAX_NS = 60_000_000_000
# Samples that are kept of a GPU: a second of them and some to spare.
_RING_SAMPLES = 12
# Of windows that are asked for as they end.
PAIR_SAMPLES = 3
# nvmlGpmMetricId_t of what "gpm" answers, in this order.
GPM_METRICS = (1, 2, 3, 5, 10, 12, 20, 21, 60, 61)
# Means all links together in the scopeId of an NVLink field.
_ALL_LINKS = 0xFFFFFFFF
_NVLINK_FIELDS = frozenset({138, 139, 140, 141})

SUCCESS = 0
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13
# What says "not on this GPU or driver" for one value: old drivers do not know new fields' numbers.
ABSENT = frozenset({INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND})

_FIELD = struct.Struct("<IIqqiiQ")  # id, scope, timestamp us, latency us, type, return, value
_METRIC = "Iid24x"  # id, return, value, pointers to names
_METRICS_AT = 24
_SAMPLES = struct.Struct("<QQ")  # the older and the newer
_SAMPLES_AT = 8
_SAMPLE = struct.Struct("<QQ")  # timestamp us, value
# The driver's rings hold 72 to 100 samples.
_RING = 128
_INSUFFICIENT_SIZE = 7
_NOT_FOUND = 6
_DOUBLE = struct.Struct("<d")
_WORD = struct.Struct("<Q")

Call = Callable[..., Any]


def check(code: int, call: str) -> None:
    """Raise NvmlError for anything but success."""
    if code != SUCCESS:
        raise NvmlError(code, call, error_text(code))


def error_text(code: int) -> str:
    """Return NVML's own words for a code; `FUNCTION_NOT_FOUND` is ours where a symbol lacks."""
    try:
        return str(pynvml.nvmlErrorString(code))
    except Exception:  # noqa: BLE001 - the words are a comfort, the code is the fact
        return "error"


class Library:
    """libnvidia-ml, opened by nvidia-ml-py; used by one thread. Raises NvmlError."""

    __slots__ = ("_dll", "_requests", "_uint", "_uint_ref", "_ulong", "_ulong_ref")

    def __init__(self) -> None:
        try:
            # A driver without GPUs is a state to report, not a failure to start.
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
        except pynvml.NVMLError as error:
            raise NvmlError(int(error.value), "Init", str(error)) from None
        # The same library again, by the name that found it: calls of our own, so that nothing set
        # on them reaches nvidia-ml-py's.
        self._dll = ctypes.CDLL(pynvml.nvmlLib._name)
        # One for all devices, since each is answered before the next is asked: it has 19 KB.
        self._requests: dict[tuple[int, ...], GpmRequest] = {}
        self._uint = ctypes.c_uint()
        self._uint_ref = ctypes.byref(self._uint)
        self._ulong = ctypes.c_ulonglong()
        self._ulong_ref = ctypes.byref(self._ulong)

    def function(self, *names: str) -> Call | None:
        """Return the first function of these that the driver has; None if it has none."""
        for name in names:
            found: Call | None = getattr(self._dll, name, None)
            if found is not None:
                return found
        return None

    def require(self, *names: str) -> Call:
        """Return the first function that exists; raises NvmlError."""
        found = self.function(*names)
        if found is None:
            raise NvmlError(FUNCTION_NOT_FOUND, names[0], "Function Not Found")
        return found

    def gpm_request(self, metrics: tuple[int, ...]) -> GpmRequest:
        """Return the request of these metrics, without samples."""
        request = self._requests.get(metrics)
        if request is None:
            request = self._requests[metrics] = _gpm_request(metrics)
        return request

    def uint(self, function: Call, call: str, handle: Any, *args: int) -> int:
        """Return what a getter writes to its last argument, an unsigned int."""
        check(function(handle, *args, self._uint_ref), call)
        return self._uint.value

    def ulong(self, function: Call, call: str, handle: Any) -> int:
        """Return what a getter writes to its last argument, an unsigned long long."""
        check(function(handle, self._ulong_ref), call)
        return self._ulong.value

    def close(self) -> None:
        """Let go of the devices; the library itself stays loaded. Never raises."""
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return  # it was shut down by a driver reload: nothing is held


class Buffer:
    """A ctypes object and the bytes below it."""

    __slots__ = ("bytes", "ref", "whole")

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self.ref = ctypes.byref(whole)
        self.bytes = memoryview(whole).cast("B")


class GpmRequest(NamedTuple):
    """A request of some metrics, and how its answers lie in it: all are decoded in one step."""

    buffer: Buffer
    layout: struct.Struct


class Fields:
    """A set of field values of one device, asked in one call of the driver.

    `link` is the NVLink that they are of; None: of the GPU, and of all links together.
    """

    __slots__ = ("_buffer", "_count", "_function", "_handle")

    def __init__(
        self, library: Library, handle: Any, ids: Sequence[int], link: int | None = None
    ) -> None:
        array = (pynvml.c_nvmlFieldValue_t * len(ids))()
        self._buffer = Buffer(array)
        for index, number in enumerate(ids):
            scope = link
            if scope is None:
                scope = _ALL_LINKS if number in _NVLINK_FIELDS else 0
            struct.pack_into("<II", self._buffer.bytes, index * _FIELD.size, number, scope)
        self._handle = handle
        self._count = ctypes.c_int(len(ids))
        self._function = library.require("nvmlDeviceGetFieldValues")

    def read(self) -> tuple[Answer, ...]:
        """Return a value per field: a number; None if absent here; (code,) if refused."""
        check(self._function(self._handle, self._count, self._buffer.ref), "FieldValues")
        return tuple(
            _field(kind, code, word)
            for _, _, _, _, kind, code, word in _FIELD.iter_unpack(self._buffer.bytes)
        )


def _field(kind: int, code: int, word: int) -> Answer:
    """Decode a value by its nvmlValueType_t: the wrong member gives plausible garbage."""
    if code != SUCCESS:
        return None if code in ABSENT else (code,)
    if kind in (2, 3):  # unsigned long, unsigned long long
        return word
    if kind == 1:  # unsigned int
        return word & 0xFFFFFFFF
    if kind == 0:  # double
        value: float = _DOUBLE.unpack(_WORD.pack(word))[0]
        return value if math.isfinite(value) else None
    if kind == 4:  # signed long long
        return word - (1 << 64) if word >> 63 else word
    if kind == 5:  # signed int
        low = word & 0xFFFFFFFF
        return low - (1 << 32) if low >> 31 else low
    if kind == 6:  # unsigned short
        return word & 0xFFFF
    return None  # a type that this header does not know


class Ring:
    """The driver's ring of samples of one device and kind (nvmlSamplingType_t)."""

    __slots__ = ("_buffer", "_count", "_function", "_handle", "_kind", "_type")

    def __init__(self, library: Library, handle: Any, kind: int) -> None:
        self._handle = handle
        self._kind = kind
        self._function = library.require("nvmlDeviceGetSamples")
        self._buffer = Buffer((pynvml.c_nvmlSample_t * _RING)())
        self._count = ctypes.c_uint()
        self._type = ctypes.c_int()

    def read(self, since_us: int) -> tuple[Answer, ...]:
        """Return (timestamp us, value) of the samples after a timestamp, the oldest first."""
        self._count.value = len(self._buffer.whole)
        code = self._ask(since_us)
        if code == _INSUFFICIENT_SIZE:
            self._buffer = Buffer((pynvml.c_nvmlSample_t * (2 * len(self._buffer.whole)))())
            self._count.value = len(self._buffer.whole)
            code = self._ask(since_us)
        if code == _NOT_FOUND:
            return ()  # none is newer, or the ring of an idle GPU has run dry
        check(code, "Samples")
        end = self._count.value * _SAMPLE.size
        return tuple(
            (stamp, _field(self._type.value, SUCCESS, word))
            for stamp, word in _SAMPLE.iter_unpack(self._buffer.bytes[:end])
        )

    def _ask(self, since_us: int) -> int:
        return int(
            self._function(
                self._handle,
                self._kind,
                ctypes.c_ulonglong(since_us),
                ctypes.byref(self._type),
                ctypes.byref(self._count),
                self._buffer.ref,
            )
        )


class Gpm:
    """GPU performance monitoring of a device: samples in a ring, so that windows touch.

    A MIG device is sampled through its GPU and the number of its GPU instance. Windows are
    evaluated when they are asked for, which needs no driver: eight at once cost half of what they
    cost one by one, eight times a second.
    """

    __slots__ = (
        *("_addresses", "_asked", "_get", "_handle", "_instance", "_latest", "_latest_ns"),
        *("_library", "_metrics", "_open", "_pair", "_ready", "_samples", "worked"),
    )

    def __init__(
        self,
        library: Library,
        handle: Any,
        instance: int | None,
        metrics: tuple[int, ...] = GPM_METRICS,
        samples: int = _RING_SAMPLES,
    ) -> None:
        self._asked = metrics
        self._library = library
        self._handle = handle
        self._instance = instance
        # None: not tried yet with a pair of samples.
        self.worked: bool | None = None
        self._metrics = library.require("nvmlGpmMetricsGet")
        self._get = library.require(
            "nvmlGpmSampleGet" if instance is None else "nvmlGpmMigSampleGet"
        )
        self._samples: list[Any] = []
        for _ in range(samples):
            self._samples.append(_allocate(library))
        self._addresses = [ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self._samples]
        self._latest = 0
        self._latest_ns: int | None = None
        # Of the last window: its older and newer sample; None: there is none.
        self._pair: tuple[int, int] | None = None
        # Windows that are not evaluated yet, as (t0_ns, t1_ns, its samples), and those that are.
        self._open: list[tuple[int, int, tuple[int, int]]] = []
        self._ready: list[Answer] = []

    def window(self, clock: Clock) -> Answer:
        """Sample; return (t0_ns, t1_ns, values) of the window that this ends, or None.

        None: it is the first, or too soon. Times are those of the monotonic clock half way through
        the samples; values are in the order of its metrics, in percent and MiB/s.
        """
        if not self.sample(clock):
            return None
        return self.windows()[-1]

    def sample(self, clock: Clock) -> bool:
        """Sample; return whether this ended a window. Raises NvmlError."""
        mono_ns = clock.mono_ns
        began, before = mono_ns(), self._latest_ns
        if before is not None and began - before < GPM_WINDOW_MIN_NS:
            return False
        if len(self._open) >= len(self._samples) - 2:
            self._evaluate_open()  # nobody asked in time: what they are made of is overwritten next
        older = self._latest
        target = (older + 1) % len(self._samples)
        self._latest_ns = self._pair = None  # should it fail, neither sample is a beginning
        if self._instance is None:
            code = self._get(self._handle, self._samples[target])
        else:
            code = self._get(self._handle, self._instance, self._samples[target])
        if code:
            self.worked = False
            check(code, "GpmSampleGet" if self._instance is None else "GpmMigSampleGet")
        now = began + (mono_ns() - began) // 2
        self._latest, self._latest_ns = target, now
        if before is None or now - before > GPM_WINDOW_MAX_NS:
            return False
        self._pair = (self._addresses[older], self._addresses[target])
        self._open.append((before, now, self._pair))
        return True

    def windows(self) -> tuple[Answer, ...]:
        """Return the windows since the last question, as `window` does; raises NvmlError."""
        self._evaluate_open()
        ready, self._ready = tuple(self._ready), []
        return ready

    def values(self, metrics: tuple[int, ...]) -> tuple[Answer, ...] | None:
        """Return further metrics of the last window, in the header's units; None without one."""
        return None if self._pair is None else self._evaluate(self._pair, metrics)

    def _evaluate_open(self) -> None:
        opened, self._open = self._open, []
        for t0, t1, pair in opened:
            self._ready.append((t0, t1, self._evaluate(pair, self._asked)))
            self.worked = True

    def _evaluate(self, pair: tuple[int, int], metrics: tuple[int, ...]) -> tuple[Answer, ...]:
        buffer, layout = self._library.gpm_request(metrics)
        _SAMPLES.pack_into(buffer.bytes, _SAMPLES_AT, *pair)
        code = self._metrics(buffer.ref)
        if code:
            check(code, "GpmMetricsGet")
        return _values(layout.unpack_from(buffer.bytes, _METRICS_AT))

    def free(self) -> None:
        """Give the sample buffers back; nothing else does."""
        release = self._library.function("nvmlGpmSampleFree")
        for sample in self._samples:
            if release is not None:
                release(sample)
        self._samples.clear()
        self._open.clear()
        self._latest_ns = self._pair = None


def _allocate(library: Library) -> Any:
    sample = pynvml.c_nvmlGpmSample_t()
    check(library.require("nvmlGpmSampleAlloc")(ctypes.byref(sample)), "GpmSampleAlloc")
    return sample


def _gpm_request(metrics: tuple[int, ...]) -> GpmRequest:
    """Return a request without samples; its array is sized for all metrics, 19 KB."""
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(metrics)
    for index, metric in enumerate(metrics):
        request.metrics[index].metricId = metric
    return GpmRequest(Buffer(request), struct.Struct("<" + _METRIC * len(metrics)))


def _values(found: tuple[Any, ...]) -> tuple[Answer, ...]:
    codes, values = found[1::3], found[2::3]
    if math.isfinite(sum(values)):  # as all of them are then
        if not any(codes):
            return values
        return tuple(
            [_no_value(code) if code else value for code, value in zip(codes, values, strict=True)]
        )
    return tuple(
        [
            value if code == SUCCESS and math.isfinite(value) else _no_value(code)
            for code, value in zip(codes, values, strict=True)
        ]
    )


def _no_value(code: int) -> Answer:
    return None if code == SUCCESS or code in ABSENT else (code,)
