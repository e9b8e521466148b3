"""Activity of a GPU without GPM, as fine as its driver gives it.

The driver keeps rings of utilization, one sample each 1/6 s to 1 s (nvmlDeviceGetSamples): each
sample stands for the time since the one before, so they are windows. Where a driver has no rings,
nvmlDeviceGetUtilizationRates stands for the time since it was asked last; so it does for a ring
that runs dry, as that of an idle GPU may. Bytes of PCIe and NVLink are the driver's totals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whyidle.clock import NS_PER_S, Clock
from whyidle.collect.collector import Problem
from whyidle.collect.gpu_list import ABSENT, LISTS, Gpu, is_gone, number, value, whole
from whyidle.collect.gpu_units import Notes, kib, pair, parts, percent
from whyidle.host import Answer, Host, NvmlError
from whyidle.schema import GpuActivity, GpuTraffic
from whyidle.table import table_of

NVLINK_FIELDS = (138, 139)
_FIELDS = (197, 198, *NVLINK_FIELDS)
# nvmlSamplingType_t
_GPU_SAMPLES = 1
_MEMORY_SAMPLES = 2
# A ring holds at least 12 s: asked twice a second, nothing of it is lost.
_RING_EVERY_NS = NS_PER_S // 2
# Samples are at most 1 s apart: a ring that is silent for longer has run dry.
_DRY_NS = 5 * NS_PER_S // 2
# A gap beyond this is no sample period.
_PERIOD_LIMIT_NS = 2 * NS_PER_S
# A stamp this far from now is of no clock that we know.
_STAMP_LIMIT_NS = 60 * NS_PER_S
_US = 1_000
# What is not offered is asked again so often: a driver may have been replaced.
_AGAIN_NS = 60 * NS_PER_S
_UNKNOWN: Mapping[str, Any] = dict.fromkeys(column.name for column in table_of(GpuActivity).columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Utilization over [t0, t1), as ratios; t0 is None where it began nobody knows when."""

    t0_ns: int | None
    t1_ns: int
    busy: float | None
    memory: float | None


def parse_samples(answer: Answer) -> tuple[tuple[int, float], ...]:
    """Return (timestamp in us, percent) of an answer to "Samples"; raises ValueError."""
    found: list[tuple[int, float]] = []
    for item in answer if isinstance(answer, LISTS) else ():
        stamp, percents = pair(item)
        us, share = whole(stamp), number(percents)
        if us is None or share is None:
            raise ValueError(f"samples: {item!r} is not (us, percent)")
        found.append((us, share))
    return tuple(found)


def stamp_offset_ns(newest_us: int, clock: Clock) -> int | None:
    """Return what turns a driver's timestamp in ns into monotonic time; None if nothing does.

    Drivers stamp with wall time, some platforms with time since boot. Asked anew each time, because
    wall time steps.
    """
    stamp = newest_us * _US
    mono = clock.mono_ns()
    for now in (clock.wall_ns(), mono, clock.boot_ns()):
        if -NS_PER_S <= now - stamp <= _STAMP_LIMIT_NS:
            return mono - now
    return None


class _Ring:
    """The windows of one GPU: each begins where the one before ended."""

    __slots__ = ("_end_ns", "_period_ns", "_since_us", "due_ns", "fresh_ns", "refused_ns")

    def __init__(self, now_ns: int) -> None:
        self._end_ns: int | None = None
        self._period_ns: int | None = None
        self._since_us = 0
        self.due_ns = now_ns
        # When it gave a sample last, or began.
        self.fresh_ns = now_ns
        # When it was refused; None: it is not.
        self.refused_ns: int | None = None

    @property
    def since_us(self) -> int:
        """The timestamp of the newest sample that was taken."""
        return self._since_us

    def take(
        self,
        samples: Sequence[tuple[int, float]],
        memory: Mapping[int, float],
        offset_ns: int,
        now_ns: int,
    ) -> Iterator[Window]:
        """Yield the windows that new samples end. The first only marks where the next begins."""
        for us, busy in samples:
            if us <= self._since_us:
                continue
            before_us, self._since_us = self._since_us, us
            end = min(us * _US + offset_ns, now_ns)
            if before_us and (us - before_us) * _US <= _PERIOD_LIMIT_NS:
                self._period_ns = (us - before_us) * _US
            begin = self._end_ns
            if begin is not None and end <= begin:
                continue  # told already, by what stood in for a silent ring
            self._end_ns, self.fresh_ns = end, now_ns
            if begin is None or self._period_ns is None:
                continue
            if end - begin > _PERIOD_LIMIT_NS:
                begin = end - self._period_ns
            yield Window(t0_ns=begin, t1_ns=end, busy=percent(busy), memory=percent(memory.get(us)))

    def skip(self, samples: Sequence[tuple[int, float]], offset_ns: int) -> None:
        """Take a first answer as read: it is of a time before the recording."""
        self._since_us = samples[-1][0]
        self._end_ns = max(self._end_ns or 0, self._since_us * _US + offset_ns)
        if len(samples) > 1:
            self._period_ns = (samples[-1][0] - samples[-2][0]) * _US

    def now(self, rates: Answer, now_ns: int) -> Window | None:
        """Return the window from the last end to now, of the driver's rates; None without any."""
        busy, memory = pair(rates)
        begin, self._end_ns = self._end_ns, now_ns
        if number(busy) is None:
            return None
        return Window(t0_ns=begin, t1_ns=now_ns, busy=percent(busy), memory=percent(memory))


class Coarse:
    """Rows of the GPUs without GPM."""

    __slots__ = ("_notes", "_rings", "_silent_ns")

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._rings: dict[str, _Ring] = {}
        # When a GPU last said that it has no byte counters.
        self._silent_ns: dict[str, int] = {}

    def forget(self, uuid: str) -> None:
        """Begin anew: the GPU was lost, or its GPM tells again."""
        self._rings.pop(uuid, None)
        self._silent_ns.pop(uuid, None)

    def rows(self, host: Host, gpu: Gpu) -> Iterator[GpuActivity | GpuTraffic | Problem]:
        """Yield what is new of a GPU; raises NvmlError."""
        now_ns = host.clock.mono_ns()
        ring = self._rings.get(gpu.uuid)
        if ring is None:
            ring = self._rings[gpu.uuid] = _Ring(now_ns)
        yield from self._windows(host, gpu.uuid, ring, now_ns)
        if gpu.parent is None:  # links belong to the whole GPU
            yield from self._traffic(host, gpu.uuid)

    def _windows(
        self, host: Host, uuid: str, ring: _Ring, now_ns: int
    ) -> Iterator[GpuActivity | Problem]:
        if ring.refused_ns is not None and now_ns - ring.refused_ns < _AGAIN_NS:
            yield from _rate(host, uuid, ring)
            return
        if now_ns < ring.due_ns:
            return
        ring.due_ns = now_ns + _RING_EVERY_NS
        try:
            samples = parse_samples(host.nvml("Samples", uuid, _GPU_SAMPLES, ring.since_us))
            offset_ns = stamp_offset_ns(samples[-1][0], host.clock) if samples else 0
            if offset_ns is None:
                raise ValueError(f"samples: {samples[-1][0]} us is the time of no clock here")
        except (NvmlError, ValueError) as error:
            if isinstance(error, NvmlError) and is_gone(error):
                raise
            ring.refused_ns = now_ns
            if isinstance(error, NvmlError) and error.code in ABSENT:
                yield from self._notes.once(f"{uuid} Samples", "the driver keeps no samples of it")
            else:
                yield Problem(subject=f"{uuid} Samples", message=str(error))
            yield from _rate(host, uuid, ring)
            return
        ring.refused_ns = None
        if ring.since_us == 0 and samples:
            ring.skip(samples, offset_ns)
            yield from _rate(host, uuid, ring)
            return
        for window in ring.take(samples, _memory(host, uuid, ring, samples), offset_ns, now_ns):
            yield _row(uuid, window)
        if not samples and now_ns - ring.fresh_ns >= _DRY_NS:
            yield from _rate(host, uuid, ring)

    def _traffic(self, host: Host, uuid: str) -> Iterator[GpuTraffic | Problem]:
        now_ns = host.clock.mono_ns()
        silent_ns = self._silent_ns.get(uuid)
        if silent_ns is not None and now_ns - silent_ns < _AGAIN_NS:
            return
        fields = parts(value(host, "FieldValues", uuid, *_FIELDS), len(_FIELDS))
        if all(whole(part) is None for part in fields):
            self._silent_ns[uuid] = now_ns
            text = "no byte counters of PCIe and NVLink are offered by this GPU or driver"
            yield from self._notes.once(f"{uuid} traffic", text)
            return
        yield GpuTraffic(
            mono_ns=host.clock.mono_ns(),
            uuid=uuid,
            pcie_tx_bytes=whole(fields[0]),
            pcie_rx_bytes=whole(fields[1]),
            nvlink_tx_bytes=kib(fields[2]),
            nvlink_rx_bytes=kib(fields[3]),
        )


def _memory(
    host: Host, uuid: str, ring: _Ring, samples: Sequence[tuple[int, float]]
) -> dict[int, float]:
    """Return memory utilization in percent by timestamp: both rings are filled together."""
    if not samples:
        return {}
    try:
        answer = value(host, "Samples", uuid, _MEMORY_SAMPLES, ring.since_us)
    except NvmlError as error:
        if is_gone(error):
            raise
        return {}  # its column is None; the ring that matters has answered
    return dict(parse_samples(answer))


def _rate(host: Host, uuid: str, ring: _Ring) -> Iterator[GpuActivity]:
    rates = value(host, "UtilizationRates", uuid)
    window = ring.now(rates, host.clock.mono_ns())
    if window is not None:
        yield _row(uuid, window)


def _row(uuid: str, window: Window) -> GpuActivity:
    known = {
        "mono_ns": window.t1_ns,
        "uuid": uuid,
        "source": "nvml",
        "t0_ns": window.t0_ns,
        "t1_ns": window.t1_ns,
        "utilization_ratio": window.busy,
        "memory_utilization_ratio": window.memory,
    }
    return GpuActivity(**{**_UNKNOWN, **known})
