"""Totals since boot that newer drivers offer through GPM: they bridge runs that were missed.

Source: nvml.h, nvmlGpmMetricId_t 248 to 260. They are evaluated on the samples that `gpu_activity`
has just taken, so the driver is not asked once more.
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, Problem
from whyidle.collect.gpu_list import Gpus, number, value
from whyidle.collect.gpu_units import Notes, parts
from whyidle.host import Answer, Host, NvmlError
from whyidle.schema import GpuTotal

# nvmlGpmMetricId_t in the order of the columns.
METRICS = (248, 249, 250, 259, 255, 256)
# They lose nothing between, and serve where runs were missed.
_EVERY_S = 5.0
# Who offers none is asked again so often: GPM may have been refused for a while.
_AGAIN_NS = 60 * NS_PER_S


def row(uuid: str, mono_ns: int, values: tuple[Answer, ...]) -> GpuTotal | None:
    """Return the row of the values of METRICS; None if none of them is known."""
    known = [None if (found := number(part)) is None else round(found) for part in values]
    if all(total is None for total in known):
        return None
    elapsed, active, tensor, fp32, tx, rx = known
    return GpuTotal(
        mono_ns=mono_ns,
        uuid=uuid,
        sm_elapsed_cycles=elapsed,
        sm_active_cycles=active,
        tensor_active_cycles=tensor,
        fp32_active_cycles=fp32,
        pcie_tx_bytes=tx,
        pcie_rx_bytes=rx,
    )


def make() -> Collect:
    """Return the collector; it remembers who offers nothing."""
    gpus = Gpus()
    notes = Notes()
    silent_ns: dict[str, int] = {}

    def collect(host: Host) -> Iterator[GpuTotal | Problem]:
        listed = gpus.ask(host)
        split = {gpu.parent for gpu in listed}
        now_ns = host.clock.mono_ns()
        for gpu in listed:
            since_ns = silent_ns.get(gpu.uuid)
            if gpu.uuid in split or (since_ns is not None and now_ns - since_ns < _AGAIN_NS):
                continue
            try:
                if value(host, "gpm_worked", gpu.uuid) is not True:
                    continue  # no window yet, or gpu_activity says why there is none
                answer = value(host, "gpm_values", gpu.uuid, *METRICS)
            except NvmlError as error:
                yield Problem(subject=gpu.uuid, message=str(error))
                continue
            if answer is None:
                continue  # between two samples that failed
            found = row(gpu.uuid, host.clock.mono_ns(), parts(answer, len(METRICS)))
            if found is not None:
                yield found
            else:
                silent_ns[gpu.uuid] = now_ns
                text = "totals since boot are not offered by this GPU or driver (GPM 248 to 260)"
                yield from notes.once(gpu.uuid, text)

    return collect


GPU_TOTAL = Collector(name="gpu_total", lane="slow", make=make, thread="nvml", every_s=_EVERY_S)
