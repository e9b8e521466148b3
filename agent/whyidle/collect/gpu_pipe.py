"""Which pipes each GPU kept busy: GPM's metrics that tell kinds of work apart, over five seconds.

Source: nvml.h, GPM functions (Hopper and newer). What decides whether a GPU was idle comes eight
times a second from `gpu_activity`; these would double its cost there. Samples are of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle.collect.collector import Collect, Collector, Problem
from whyidle.collect.gpu_list import Gpus, value
from whyidle.collect.gpu_units import GpmWindow, Notes, bytes_of_rates, gpm_window, percents
from whyidle.host import Host, NvmlError
from whyidle.schema import GpuPipe

# nvmlGpmMetricId_t in the order of the columns: pipes, then chip-to-chip links.
METRICS = (4, 7, 9, 6, 8, 11, 13, 100, 101)
_RATES_FROM = METRICS.index(100)
_EVERY_S = 5.0


def row(uuid: str, window: GpmWindow) -> GpuPipe:
    """Return the row of a window."""
    t0, t1, values = window
    integer, hmma, imma, dfma, dmma, fp64, fp16 = percents(values[:_RATES_FROM])
    c2c_tx, c2c_rx = bytes_of_rates(values[_RATES_FROM:], t1 - t0)
    return GpuPipe(
        mono_ns=t1,
        uuid=uuid,
        source="gpm",
        t0_ns=t0,
        t1_ns=t1,
        integer_active_ratio=integer,
        tensor_hmma_ratio=hmma,
        tensor_imma_ratio=imma,
        tensor_dfma_ratio=dfma,
        tensor_dmma_ratio=dmma,
        fp64_active_ratio=fp64,
        fp16_active_ratio=fp16,
        c2c_tx_bytes=c2c_tx,
        c2c_rx_bytes=c2c_rx,
    )


def make() -> Collect:
    """Return the collector; it remembers what was said of what is not offered."""
    gpus = Gpus()
    notes = Notes()

    def collect(host: Host) -> Iterator[GpuPipe | Problem]:
        listed = gpus.ask(host)
        # The MIG devices of a GPU are what runs; the whole has no activity of its own.
        split = {gpu.parent for gpu in listed}
        for gpu in listed:
            if gpu.uuid in split:
                continue
            try:
                answer = value(host, "gpm_pipes", gpu.uuid, *METRICS)
            except NvmlError as error:
                yield Problem(subject=gpu.uuid, message=str(error))
                continue
            if answer is None:
                continue  # the first sample, or gpu_activity says why there is no GPM
            window = gpm_window("gpm_pipes", answer, len(METRICS))
            absent = [str(of) for of, part in zip(METRICS, window[2], strict=True) if part is None]
            if absent:
                text = f"some metrics are not offered: {', '.join(absent)}"
                yield from notes.once(f"{gpu.uuid} GPM", text)
            yield row(gpu.uuid, window)

    return collect


GPU_PIPE = Collector(name="gpu_pipe", lane="slow", make=make, thread="nvml", every_s=_EVERY_S)
