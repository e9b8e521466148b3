"""What each GPU did since the last sample: GPM where the GPU has it, utilization where it has not.

Source: nvml.h, GPM functions (Hopper and newer) and nvmlDeviceGetUtilizationRates. A GPM window is
exactly the time between two samples, so windows touch and none is shorter than 100 ms. The metrics
of a MIG device are those of its GPU instance.
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, Problem
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
from whyidle.host import Answer, Host, NvmlError
from whyidle.schema import GpuActivity

MIB = 1 << 20
KIB = 1 << 10
# GPM has no finer truth than a ten-thousandth, and the digits below would cost 6 bytes a value.
_DIGITS = 4
# PCIe bytes, then NVLink payload over all links: see schema.GpuActivity for their widths.
_PCIE_FIELDS = (197, 198)
_NVLINK_FIELDS = (138, 139)
# Where GPM tells, utilization is only there to compare with what other tools show.
_COARSE_EVERY_NS = NS_PER_S
# How many values an answer to "gpm" has: nvml_fast.GPM_METRICS.
_METRICS = 10


def percent(answer: Answer) -> float | None:
    """Return percent as a ratio."""
    found = answer if type(answer) is float else number(answer)
    return None if found is None else round(found / 100, _DIGITS)


def bytes_of_rate(answer: Answer, window_ns: int) -> int | None:
    """Return the bytes that a rate in MiB/s makes over a window."""
    found = answer if type(answer) is float else number(answer)
    return None if found is None else round(found * MIB * window_ns / NS_PER_S)


def parse_gpm(answer: Answer) -> tuple[int, int, tuple[Answer, ...]]:
    """Return t0, t1 and the values of an answer to "gpm"."""
    if isinstance(answer, LISTS) and len(answer) == 3:
        t0, t1 = whole(answer[0]), whole(answer[1])
        values = tuple(answer[2]) if isinstance(answer[2], LISTS) else ()
        if t0 is not None and t1 is not None and len(values) >= _METRICS:
            return t0, t1, values
    raise ValueError(f"gpm: {answer!r} is not (t0, t1, ten values)")


def gpm_row(
    uuid: str, window: tuple[int, int, tuple[Answer, ...]], utilization: Answer, nvlink: Answer
) -> GpuActivity:
    """Return the row of a GPM window; `nvlink` are the fields, asked where GPM has no NVLink."""
    t0, t1, values = window
    gr, sm, occupancy, tensor, dram, fp32, tx, rx, nvlink_rx, nvlink_tx = values[:_METRICS]
    busy, memory = _pair(utilization)
    total_tx, total_rx = _pair(nvlink)
    return GpuActivity(
        mono_ns=t1,
        uuid=uuid,
        source="gpm",
        t0_ns=t0,
        t1_ns=t1,
        gr_active_ratio=percent(gr),
        sm_active_ratio=percent(sm),
        sm_occupancy_ratio=percent(occupancy),
        tensor_active_ratio=percent(tensor),
        fp32_active_ratio=percent(fp32),
        dram_active_ratio=percent(dram),
        pcie_tx_bytes=bytes_of_rate(tx, t1 - t0),
        pcie_rx_bytes=bytes_of_rate(rx, t1 - t0),
        nvlink_tx_bytes=bytes_of_rate(nvlink_tx, t1 - t0),
        nvlink_rx_bytes=bytes_of_rate(nvlink_rx, t1 - t0),
        pcie_tx_total_bytes=None,
        pcie_rx_total_bytes=None,
        nvlink_tx_total_bytes=_kib(total_tx),
        nvlink_rx_total_bytes=_kib(total_rx),
        utilization_ratio=percent(busy),
        memory_utilization_ratio=percent(memory),
    )


def nvml_row(uuid: str, mono_ns: int, utilization: Answer, fields: Answer) -> GpuActivity | None:
    """Return the row of a GPU without GPM; None if it answered nothing, as one split by MIG."""
    busy, memory = _pair(utilization)
    parts = tuple(fields) if isinstance(fields, LISTS) and len(fields) == 4 else (None,) * 4
    if busy is None and all(number(part) is None for part in parts):
        return None
    return GpuActivity(
        mono_ns=mono_ns,
        uuid=uuid,
        source="nvml",
        t0_ns=None,
        t1_ns=None,
        gr_active_ratio=None,
        sm_active_ratio=None,
        sm_occupancy_ratio=None,
        tensor_active_ratio=None,
        fp32_active_ratio=None,
        dram_active_ratio=None,
        pcie_tx_bytes=None,
        pcie_rx_bytes=None,
        nvlink_tx_bytes=None,
        nvlink_rx_bytes=None,
        pcie_tx_total_bytes=whole(parts[0]),
        pcie_rx_total_bytes=whole(parts[1]),
        nvlink_tx_total_bytes=_kib(parts[2]),
        nvlink_rx_total_bytes=_kib(parts[3]),
        utilization_ratio=percent(busy),
        memory_utilization_ratio=percent(memory),
    )


def _pair(answer: Answer) -> tuple[Answer, Answer]:
    if isinstance(answer, LISTS) and len(answer) == 2:
        return answer[0], answer[1]
    return None, None


def _kib(answer: Answer) -> int | None:
    found = whole(answer)
    return None if found is None else found * KIB


def make() -> Collect:
    """Return the collector."""
    gpus = Gpus()
    coarse_due_ns = 0

    def collect(host: Host) -> Iterator[GpuActivity | Problem]:
        nonlocal coarse_due_ns
        listed = gpus.ask(host)
        now_ns = host.clock.mono_ns()
        coarse = now_ns >= coarse_due_ns
        if coarse:
            coarse_due_ns = now_ns + _COARSE_EVERY_NS
        split = {gpu.parent for gpu in listed}
        for gpu in listed:
            if gpu.uuid in split:
                continue  # its MIG devices are what runs; the whole has no activity of its own
            try:
                yield from _rows(host, gpu, coarse)
            except NvmlError as error:
                yield Problem(subject=gpu.uuid, message=str(error))

    return collect


def _rows(host: Host, gpu: Gpu, coarse: bool) -> Iterator[GpuActivity | Problem]:
    uuid = gpu.uuid
    try:
        window = host.nvml("gpm", uuid)
    except NvmlError as error:
        if is_gone(error):
            raise
        if error.code not in ABSENT:
            # Such as "no permission" in a container: said, and the coarse counters serve instead.
            yield Problem(subject=uuid, message=str(error))
        yield from _coarse(host, uuid)
        return
    if window is None:
        return  # the first sample, or less than 100 ms after the last: a later window covers it
    parsed = parse_gpm(window)
    nvlink: Answer = None
    if any(type(part) is not float for part in parsed[2]):
        values = parsed[2]
        for code in {code for part in values if (code := refused(part)) is not None}:
            yield Problem(subject=uuid, message=f"GPM refuses some metrics (NVML error {code})")
        # NVLink's own counters cost the driver a call per sample: only where GPM is silent on them.
        if number(values[8]) is None and number(values[9]) is None:
            nvlink = value(host, "FieldValues", uuid, *_NVLINK_FIELDS)
    utilization = value(host, "UtilizationRates", uuid) if coarse else None
    yield gpm_row(uuid, parsed, utilization, nvlink)


def _coarse(host: Host, uuid: str) -> Iterator[GpuActivity]:
    utilization = value(host, "UtilizationRates", uuid)
    fields = value(host, "FieldValues", uuid, *_PCIE_FIELDS, *_NVLINK_FIELDS)
    row = nvml_row(uuid, host.clock.mono_ns(), utilization, fields)
    if row is not None:
        yield row


GPU_ACTIVITY = Collector(name="gpu_activity", lane="fast", make=make, thread="nvml")
