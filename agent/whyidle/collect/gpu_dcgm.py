"""What a local DCGM exporter says of GPUs without GPM, if somebody named the exporter.

DCGM reads the profiling counters of GPUs before Hopper with means that need root and exclude other
profilers; where a site runs it anyway, its page tells how full the GPUs are. Each reading stands
for the time since the one before; the exporter refreshes once a second to once in 30 s, and says
the same until then. Source: the field reference of DCGM, DCGM_FI_PROF_*.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData
from whyidle.host import Host
from whyidle.schema import GpuActivity, GpuPipe
from whyidle.table import table_of

# Ratios of 0 to 1 by field, in DCGM's old names and those since 4.6.
_RATIOS: Mapping[str, str] = MappingProxyType(
    {
        "GR_ENGINE_ACTIVE": "gr_active_ratio",
        "GR_ENGINE_UTIL_RATIO": "gr_active_ratio",
        "SM_ACTIVE": "sm_active_ratio",
        "SM_UTIL_RATIO": "sm_active_ratio",
        "SM_OCCUPANCY": "sm_occupancy_ratio",
        "PIPE_TENSOR_ACTIVE": "tensor_active_ratio",
        "TENSOR_UTIL_RATIO": "tensor_active_ratio",
        "DRAM_ACTIVE": "dram_active_ratio",
        "DRAM_UTIL_RATIO": "dram_active_ratio",
        "PIPE_FP64_ACTIVE": "fp64_active_ratio",
        "PIPE_FP32_ACTIVE": "fp32_active_ratio",
        "PIPE_FP16_ACTIVE": "fp16_active_ratio",
    }
)
# Bytes a second, whatever their names say.
_RATES: Mapping[str, str] = MappingProxyType(
    {
        "PCIE_TX_BYTES": "pcie_tx_bytes",
        "PCIE_RX_BYTES": "pcie_rx_bytes",
        "NVLINK_TX_BYTES": "nvlink_tx_bytes",
        "NVLINK_RX_BYTES": "nvlink_rx_bytes",
    }
)
_LINE = re.compile(r"DCGM_FI_PROF_(\w+)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# Faster than any link is: DCGM writes numbers beyond for "blank" and "not supported".
_RATE_LIMIT = 1e13
# Over a pause this long a reading says nothing of most of it.
_WINDOW_LIMIT_NS = 10 * NS_PER_S
_ACTIVITY = {column.name for column in table_of(GpuActivity).columns}
_PIPE = {column.name for column in table_of(GpuPipe).columns}
_NO_ACTIVITY: Mapping[str, Any] = dict.fromkeys(_ACTIVITY)
_NO_PIPE: Mapping[str, Any] = dict.fromkeys(_PIPE)


def parse(text: str) -> dict[str, dict[str, float]]:
    """Return ratios and rates by column by UUID; what DCGM has blank is left out.

    Instances of MIG are left out: their samples bear the UUID of the whole GPU.
    """
    found: dict[str, dict[str, float]] = {}
    for field, labels, word in _LINE.findall(text):
        column = _RATIOS.get(field) or _RATES.get(field)
        if column is None:
            continue
        named = dict(_LABEL.findall(labels))
        uuid = named.get("UUID") or named.get("gpu_uuid")
        value = _number(word, 1.0 if field in _RATIOS else _RATE_LIMIT)
        if uuid and not named.get("GPU_I_ID") and value is not None:
            found.setdefault(uuid, {})[column] = value
    return found


def _number(word: str, limit: float) -> float | None:
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"the DCGM exporter's page has {word[:40]!r} for a number") from None
    # Averages come out a little above 1.
    return min(value, limit) if 0.0 <= value <= limit * 1.05 else None


def rows(
    uuid: str, values: Mapping[str, float], t0_ns: int, t1_ns: int
) -> Iterator[GpuActivity | GpuPipe]:
    """Yield the rows of a GPU for a window."""
    window_s = (t1_ns - t0_ns) / NS_PER_S
    known: dict[str, Any] = {
        "mono_ns": t1_ns,
        "uuid": uuid,
        "source": "dcgm",
        "t0_ns": t0_ns,
        "t1_ns": t1_ns,
    }
    for column, value in values.items():
        known[column] = round(value, 4) if column.endswith("_ratio") else round(value * window_s)
    pipes = {name: found for name, found in known.items() if name in _PIPE}
    activity = {name: found for name, found in known.items() if name in _ACTIVITY}
    yield GpuActivity(**{**_NO_ACTIVITY, **activity})
    if values.keys() & pipes.keys():
        yield GpuPipe(**{**_NO_PIPE, **pipes})


def make() -> Collect:
    """Return the collector; it keeps when the exporter answered last."""
    last_ns: int | None = None

    def collect(host: Host) -> Iterator[GpuActivity | GpuPipe]:
        nonlocal last_ns
        try:
            page = host.ask("dcgm")
        except KeyError:
            raise NoData("this host was not asked for a DCGM exporter") from None
        except OSError:
            last_ns = None
            raise
        if page is None:
            raise NoData("no DCGM exporter was named: WHYIDLE_DCGM_URL is not set")
        now_ns = host.clock.mono_ns()
        before_ns, last_ns = last_ns, now_ns
        found = parse(str(page))
        if not found:
            raise NoData(
                "the DCGM exporter offers no profiling fields: add DCGM_FI_PROF_GR_ENGINE_ACTIVE "
                "and DCGM_FI_PROF_SM_ACTIVE to its list of counters"
            )
        if before_ns is None or now_ns - before_ns > _WINDOW_LIMIT_NS:
            return
        told = host.ask("gpm_works")
        better = told if isinstance(told, (tuple, list)) else ()
        for uuid, values in found.items():
            if uuid not in better:
                yield from rows(uuid, values, before_ns, now_ns)

    return collect


GPU_DCGM = Collector(name="dcgm", lane="normal", make=make, thread="dcgm")
