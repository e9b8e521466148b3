"""What each GPU did since the last sample: GPM where the GPU has it, utilization where it has not.

Source: nvml.h, GPM functions (Hopper and newer). A GPM window is exactly the time between two
samples, so windows touch and none is shorter than 100 ms. The metrics of a MIG device are those of
its GPU instance. Without GPM see `gpu_coarse`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, Problem
from whyidle.collect.gpu_coarse import NVLINK_FIELDS, Coarse
from whyidle.collect.gpu_list import (
    ABSENT,
    LISTS,
    Gpu,
    Gpus,
    is_gone,
    number,
    refused,
    value,
    whole,
)
from whyidle.collect.gpu_units import (
    GpmWindow,
    Notes,
    bytes_of_rates,
    gpm_window,
    kib,
    pair,
    percent,
    percents,
)
from whyidle.host import Answer, Host, NvmlError
from whyidle.schema import GpuActivity, GpuTraffic

# Where GPM tells, utilization is only there to compare with what other tools show.
_COARSE_EVERY_NS = NS_PER_S
# nvmlGpmMetricId_t of an answer to "gpm", in its order: nvml_fast.GPM_METRICS. Old journals have
# more behind them. The rest of what GPM tells is in `gpu_pipe`.
METRICS = (1, 2, 3, 5, 10, 12, 20, 21, 60, 61)
_NUMBERS, _NUMBERS_OR_NONE = frozenset({float}), frozenset({float, type(None)})
_NVLINK_RX, _NVLINK_TX = METRICS.index(60), METRICS.index(61)
_NO_GPM = (
    "no GPM: Hopper and newer GPUs have it; the driver's own utilization serves, which cannot tell "
    "a spinning kernel from a computing one"
)


def gpm_row(uuid: str, window: GpmWindow, utilization: Answer) -> GpuActivity:
    """Return the row of a GPM window."""
    t0, t1, values = window
    gr, sm, occupancy, tensor, dram, fp32 = percents(values[:6])
    tx, rx, nvlink_rx, nvlink_tx = bytes_of_rates(values[6:], t1 - t0)
    busy, memory = pair(utilization)
    return GpuActivity(
        mono_ns=t1,
        uuid=uuid,
        source="gpm",
        t0_ns=t0,
        t1_ns=t1,
        gr_active_ratio=gr,
        sm_active_ratio=sm,
        sm_occupancy_ratio=occupancy,
        tensor_active_ratio=tensor,
        fp32_active_ratio=fp32,
        dram_active_ratio=dram,
        pcie_tx_bytes=tx,
        pcie_rx_bytes=rx,
        nvlink_tx_bytes=nvlink_tx,
        nvlink_rx_bytes=nvlink_rx,
        utilization_ratio=percent(busy),
        memory_utilization_ratio=percent(memory),
    )


# Of a sample: the windows that it ended, None where they are to be asked for, or why it failed.
_Sampled: TypeAlias = "NvmlError | tuple[Answer, ...] | None"


def _window(host: Host, uuid: str) -> _Sampled:
    try:
        window = host.nvml("gpm", uuid)
    except NvmlError as error:
        return error
    # The first sample, or less than 100 ms after the last: a later one covers it.
    return () if window is None else (window,)


def _error(answer: Sequence[Answer]) -> NvmlError:
    """Return the error of a sample that NVML refused; raises ValueError if it is none."""
    if len(answer) == 3 and (code := whole(answer[0])) is not None:
        return NvmlError(code, str(answer[1]), str(answer[2]))
    raise ValueError(f"gpm_sample: {answer!r} is not (code, call, text)")


class _Activity:
    """The collector; it keeps what was said of each GPU and the windows of those without GPM."""

    __slots__ = (
        "_absent",
        "_asked",
        "_begin_ns",
        "_coarse",
        "_coarse_due_ns",
        "_gpus",
        "_listed",
        "_notes",
        "_second",
    )

    def __init__(self) -> None:
        # How many metrics each GPU did not offer last.
        self._absent: dict[str, int] = {}
        self._gpus = Gpus()
        # Those that were listed last, and of these the ones that are asked.
        self._listed: tuple[Gpu, ...] = ()
        self._asked: tuple[Gpu, ...] = ()
        self._notes = Notes()
        self._coarse = Coarse(self._notes)
        self._coarse_due_ns = 0
        # When the seconds begin in which rows are held back; None: they are not.
        self._begin_ns: int | None = None
        self._second = -1

    def hold(self, begin_ns: int) -> None:
        """Give rows at the first run of each second from `begin_ns` on: GPM is evaluated then."""
        self._begin_ns = begin_ns

    def __call__(self, host: Host) -> Iterator[GpuActivity | GpuTraffic | Problem]:
        listed = self._gpus.ask(host)
        now_ns = host.clock.mono_ns()
        held = False
        if self._begin_ns is not None:
            second = (now_ns - self._begin_ns) // NS_PER_S
            held, self._second = second == self._second, second
            beside = not held
        else:
            beside = now_ns >= self._coarse_due_ns
            if beside:
                self._coarse_due_ns = now_ns + _COARSE_EVERY_NS
        if listed is not self._listed:
            self._listed = listed
            split = {gpu.parent for gpu in listed}
            # The MIG devices of a GPU are what runs; the whole has no activity of its own.
            self._asked = tuple(gpu for gpu in listed if gpu.uuid not in split)
        found = self._sample(host, self._asked)
        if held and not any(found):
            return
        for gpu, sampled in zip(self._asked, found, strict=True):
            uuid = gpu.uuid
            try:
                if isinstance(sampled, NvmlError):
                    yield from self._rows(host, uuid, self._rest(host, uuid), beside=False)
                    yield from self._without_gpm(host, gpu, sampled)
                elif not held:
                    windows = self._rest(host, uuid) if sampled is None else sampled
                    yield from self._rows(host, uuid, windows, beside=beside)
            except NvmlError as error:
                self._coarse.forget(uuid)
                yield Problem(subject=uuid, message=str(error))

    def _sample(self, host: Host, asked: Sequence[Gpu]) -> list[_Sampled]:
        """Sample each GPU."""
        if self._begin_ns is None:
            return [_window(host, gpu.uuid) for gpu in asked]
        try:
            answers = host.nvml("gpm_sample", *[gpu.uuid for gpu in asked])
        except NvmlError as error:
            return [error] * len(asked)  # the library has gone
        if not isinstance(answers, LISTS):
            raise ValueError(f"gpm_sample: {answers!r} is no list")
        return [_error(answer) if isinstance(answer, LISTS) else None for answer in answers]

    def release(self, host: Host) -> Iterator[GpuActivity]:
        """Yield the rows of the windows since the last turn of a second."""
        for gpu in self._gpus.ask(host):
            for window in self._rest(host, gpu.uuid):
                yield gpm_row(gpu.uuid, gpm_window("gpm", window, len(METRICS)), None)

    def _rest(self, host: Host, uuid: str) -> tuple[Answer, ...]:
        """Return the windows that were not evaluated yet."""
        windows = () if self._begin_ns is None else host.nvml("gpm_windows", uuid)
        return tuple(windows) if isinstance(windows, LISTS) else ()

    def _rows(
        self, host: Host, uuid: str, windows: tuple[Answer, ...], *, beside: bool
    ) -> Iterator[GpuActivity | GpuTraffic | Problem]:
        for window in windows:
            parsed = gpm_window("gpm", window, len(METRICS))
            if self._is_news(uuid, parsed[2]):
                yield from self._missing(host, uuid, parsed[2])
            # What other tools show is of now, and belongs to the newest.
            shown = beside and window is windows[-1]
            yield gpm_row(uuid, parsed, value(host, "UtilizationRates", uuid) if shown else None)
        if windows:
            self._coarse.forget(uuid)

    def _without_gpm(
        self, host: Host, gpu: Gpu, error: NvmlError
    ) -> Iterator[GpuActivity | GpuTraffic | Problem]:
        if is_gone(error):
            raise error
        if error.code in ABSENT:
            yield from self._notes.once(gpu.uuid, _NO_GPM)
        else:
            # Such as "no permission" in a container: said, and the coarse counters serve.
            yield Problem(subject=gpu.uuid, message=str(error))
        yield from self._coarse.rows(host, gpu)

    def _is_news(self, uuid: str, values: tuple[Answer, ...]) -> bool:
        """Return whether something is missing, and more than what this GPU has never offered."""
        kinds = set(map(type, values))
        if kinds == _NUMBERS:
            return False
        absent = values.count(None)
        known = self._absent.get(uuid) == absent and kinds == _NUMBERS_OR_NONE
        self._absent[uuid] = absent
        return not known or values[_NVLINK_RX] is values[_NVLINK_TX] is None

    def _missing(
        self, host: Host, uuid: str, values: tuple[Answer, ...]
    ) -> Iterator[GpuTraffic | Problem]:
        absent = [str(METRICS[at]) for at, part in enumerate(values) if part is None]
        if absent:
            text = f"some metrics are not offered: {', '.join(absent)}"
            yield from self._notes.once(f"{uuid} GPM", text)
        for code in {code for part in values if (code := refused(part)) is not None}:
            yield Problem(subject=uuid, message=f"GPM refuses some metrics (NVML error {code})")
        # NVLink's own counters cost the driver a call per sample: only where GPM is silent on them.
        if number(values[_NVLINK_RX]) is None and number(values[_NVLINK_TX]) is None:
            tx, rx = pair(value(host, "FieldValues", uuid, *NVLINK_FIELDS))
            if whole(tx) is not None or whole(rx) is not None:
                yield GpuTraffic(
                    mono_ns=host.clock.mono_ns(),
                    uuid=uuid,
                    pcie_tx_bytes=None,
                    pcie_rx_bytes=None,
                    nvlink_tx_bytes=kib(tx),
                    nvlink_rx_bytes=kib(rx),
                )


def make() -> Collect:
    """Return the collector."""
    return _Activity()


GPU_ACTIVITY = Collector(name="gpu_activity", lane="fast", make=make, thread="nvml")
