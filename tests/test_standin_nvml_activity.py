"""The stand-in NVML library's activity: utilization, sample rings, GPM, field values, traffic."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vgpu import Standin, b200, h100, standin
from vgpu.ask import Asker
from vgpu.profiles import GpuSpec

MIB = 1 << 20
ALL_LINKS = 0xFFFFFFFF
DOUBLE, UNSIGNED, UNSIGNED_LONG_LONG = 0, 1, 3

GPM = """
import time
a, b = nvmlGpmSampleAlloc(), nvmlGpmSampleAlloc()

def window(*ids, pause=0.12, device=None):
    nvmlGpmSampleGet(device or h, a)
    time.sleep(pause)
    nvmlGpmSampleGet(device or h, b)
    return metrics(a, b, *ids)

def metrics(first, second, *ids):
    get = c_nvmlGpmMetricsGet_t()
    get.version, get.numMetrics = NVML_GPM_METRICS_GET_VERSION, len(ids)
    get.sample1, get.sample2 = first, second
    for i, metric in enumerate(ids):
        get.metrics[i].metricId = metric
    nvmlGpmMetricsGet(get)
    rows = [get.metrics[i] for i in range(len(ids))]
    return [(row.nvmlReturn, row.value) for row in rows]
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=2) as made:
        yield made


@pytest.fixture
def ask(node: Standin) -> Iterator[Asker]:
    with Asker(node.env) as asker:
        asker.do("h = nvmlDeviceGetHandleByIndex(0)\n" + GPM)
        yield asker


def _values(rows: Sequence[tuple[int, float]]) -> list[float]:
    assert [code for code, _ in rows] == [0] * len(rows)
    return [value for _, value in rows]


def test_utilization_is_the_share_of_the_last_whole_period(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    gpu.run(gr=0.6, mem=0.25, enc=0.1, dec=0.2, jpg=0.3, ofa=0.4)
    gpu.steady()
    assert ask("nvmlDeviceGetUtilizationRates(h)") == {"gpu": 60, "memory": 25}
    for engine, share in (("Encoder", 10), ("Decoder", 20), ("Jpg", 30), ("Ofa", 40)):
        assert ask(f"nvmlDeviceGet{engine}Utilization(h)") == [share, 166666]
    assert ask("nvmlDeviceGetUtilizationRates(nvmlDeviceGetHandleByIndex(1))")["gpu"] == 0


def test_the_period_of_utilization_can_be_a_second(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=1, sample_period_s=1.0) as node, Asker(node.env) as ask:
        node.state.gpus[0].run(enc=0.5)
        node.state.gpus[0].steady()
        assert ask("nvmlDeviceGetEncoderUtilization(nvmlDeviceGetHandleByIndex(0))") == [
            50,
            1000000,
        ]


def test_the_ring_remembers_what_happened_between_readings(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    gpu.run(gr=0.3)
    gpu.steady()
    changes = [(time.monotonic_ns(), 0.3)]
    for share in (1.0, 0.0, 0.5):
        time.sleep(0.25)
        gpu.run(gr=share, at_ns=(at_ns := time.monotonic_ns()))
        changes.append((at_ns, share))
    time.sleep(0.25)
    kind, rows = ask("nvmlDeviceGetSamples(h, NVML_GPU_UTILIZATION_SAMPLES, 0)")
    assert kind == UNSIGNED
    assert len(rows) == 72
    stamps = [row["timeStamp"] for row in rows]
    assert {b - a for a, b in pairwise(stamps)} <= {166666, 166667}
    offset_us = (time.time_ns() - time.monotonic_ns()) / 1000
    for row in rows[1:]:
        end_ns = (row["timeStamp"] - offset_us) * 1000
        begin_ns = end_ns - 166_666_667
        expected = _busy_share(changes, begin_ns, end_ns) * 100
        assert row["sampleValue"]["uiVal"] == pytest.approx(expected, abs=1.5)


def _busy_share(changes: list[tuple[int, float]], begin_ns: float, end_ns: float) -> float:
    """Mean of a step function; before its first step the first value."""
    total = changes[0][1] * max(0.0, min(end_ns, changes[0][0]) - begin_ns)
    ends = [at_ns for at_ns, _ in changes[1:]] + [10**30]
    for (at_ns, share), until_ns in zip(changes, ends, strict=True):
        total += share * max(0.0, min(end_ns, until_ns) - max(begin_ns, at_ns))
    return total / (end_ns - begin_ns)


def test_a_ring_is_drained_by_its_cursor_and_runs_dry(node: Standin, ask: Asker) -> None:
    rows = ask("nvmlDeviceGetSamples(h, NVML_GPU_UTILIZATION_SAMPLES, 0)")[1]
    newer = ask(f"nvmlDeviceGetSamples(h, NVML_GPU_UTILIZATION_SAMPLES, {rows[-4]['timeStamp']})")[
        1
    ]
    assert [row["timeStamp"] for row in newer[:3]] == [row["timeStamp"] for row in rows[-3:]]
    last = rows[-1]["timeStamp"] + 10_000_000
    assert ask.code(f"nvmlDeviceGetSamples(h, NVML_GPU_UTILIZATION_SAMPLES, {last})") == 6
    assert ask.code("nvmlDeviceGetSamples(h, NVML_PROCESSOR_CLK_SAMPLES, 0)") == 3
    ask.do("n, t = c_uint(3), c_int(); few = (c_nvmlSample_t * 3)()")
    call = "_nvmlGetFunctionPointer('nvmlDeviceGetSamples')(h, 1, c_ulonglong(0), byref(t),"
    assert ask(f"{call} byref(n), few)") == 7
    assert ask(f"{call} byref(c_uint(0)), few)") == 2


def test_power_samples_come_from_the_energy(node: Standin, ask: Asker) -> None:
    node.state.gpus[0].set(power_mw=456_000)
    node.state.gpus[0].steady()
    kind, rows = ask("nvmlDeviceGetSamples(h, NVML_TOTAL_POWER_SAMPLES, 0)")
    assert kind == UNSIGNED
    assert [row["sampleValue"]["uiVal"] for row in rows] == pytest.approx([456_000] * 72, abs=10)


def test_gpm_metrics_with_their_units(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    shares = {
        "gr": (1, 0.735), "sm": (2, 0.4125), "occupancy": (3, 0.22), "integer": (4, 0.05),
        "tensor": (5, 0.31), "dfma": (6, 0.01), "hmma": (7, 0.3), "dmma": (8, 0.02),
        "imma": (9, 0.03), "dram": (10, 0.27), "fp64": (11, 0.04), "fp32": (12, 0.06),
        "fp16": (13, 0.07), "dec": (30, 0.11), "jpg": (40, 0.12), "ofa": (50, 0.13),
    }  # fmt: skip
    gpu.set_rates({name: share for name, (_, share) in shares.items()})
    gpu.run(pcie_tx=20 * MIB, pcie_rx=3000 * MIB, nvlink_rx=5 * MIB, nvlink_tx=2 * MIB)
    gpu.run_link(3, tx=100 * MIB, rx=50 * MIB)
    ids = [metric for metric, _ in shares.values()]
    percent = _values(ask(f"window({', '.join(map(str, ids))})"))
    assert percent == pytest.approx([share * 100 for _, share in shares.values()], rel=1e-5)
    traffic = _values(ask("window(20, 21, 60, 61, 62, 63, 68, 69)"))
    rates = [20, 3000, 17 * 5 + 50, 17 * 2 + 100, 5, 2, 50, 100]
    assert traffic == pytest.approx(rates, rel=1e-4)


def test_gpm_names_its_metrics(ask: Asker) -> None:
    ask.do(
        "window(1)\n"
        "get = c_nvmlGpmMetricsGet_t()\n"
        "get.version, get.numMetrics, get.sample1, get.sample2 = 1, 2, a, b\n"
        "get.metrics[0].metricId, get.metrics[1].metricId = 10, 20\n"
        "nvmlGpmMetricsGet(get)"
    )
    info = ask("[get.metrics[i].metricInfo for i in range(2)]")
    assert [row["unit"] for row in info] == ["%", "MiB/s"]
    assert info[0]["shortName"] == "DRAM Bandwidth Util"


def test_gpm_counts_what_lies_between_the_two_calls(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    ask.do("nvmlGpmSampleGet(h, a)")
    begin = time.monotonic()
    gpu.add(gr=60_000_000, sm=15_000_000, pcie_rx=7 * MIB)
    time.sleep(0.12)
    ask.do("nvmlGpmSampleGet(h, b)")
    elapsed_s = time.monotonic() - begin
    busy, sm, rx = _values(ask("metrics(a, b, 1, 2, 21)"))
    assert busy / sm == pytest.approx(4.0)
    assert rx / busy == pytest.approx(7 / 6)  # 7 MiB against 60 ms, both over the window
    assert 6.0 / elapsed_s * 0.8 < busy <= 6.0 / 0.12


def test_gpm_within_the_refresh_period_repeats_itself(node: Standin, ask: Asker) -> None:
    node.state.gpus[0].run(gr=0.5)
    code, value = ask("window(1, pause=0)")[0]
    assert code == 0 and math.isnan(value)
    ask.do("time.sleep(0.11)")
    ask.do("nvmlGpmSampleGet(h, a)")  # taken anew
    assert _values(ask("metrics(b, a, 1)")) == pytest.approx([50.0])


def test_gpm_reports_per_metric_what_it_cannot_give(node: Standin, ask: Asker) -> None:
    node.state.gpus[0].gpm(without=[3, 20])
    rows = ask("window(1, 2, 3, 20, 96, 98, 212, 100, 0, 500, 900)")
    assert [code for code, _ in rows] == [0, 0, 3, 3, 0, 3, 3, 3, 2, 3, 2]


def test_gpm_link_ids_are_not_contiguous(tmp_path: Path) -> None:
    def many_links(index: int) -> GpuSpec:

        return replace(h100(index), links=36)

    with standin(tmp_path, gpus=1, profile=many_links) as node, Asker(node.env) as ask:
        ask.do("h = nvmlDeviceGetHandleByIndex(0)\n" + GPM)
        for link in range(36):
            node.state.gpus[0].run_link(link, rx=(link + 1) * MIB, tx=(link + 101) * MIB)
        ids = [*range(62, 98), *range(212, 248)]
        got = _values(ask(f"window({', '.join(map(str, ids))})"))
        expected = [rate for link in range(36) for rate in (link + 1, link + 101)]
        assert got == pytest.approx(expected, rel=1e-4)


def test_gpm_refuses_pairs_that_are_no_window(node: Standin, ask: Asker) -> None:
    ask.do("h1 = nvmlDeviceGetHandleByIndex(1); c = nvmlGpmSampleAlloc()")
    assert ask.code("metrics(a, b, 1)") == 2  # never filled
    ask.do("nvmlGpmSampleGet(h, a); nvmlGpmSampleGet(h1, b)")
    assert ask.code("metrics(a, b, 1)") == 2  # two devices
    ask.do("get = c_nvmlGpmMetricsGet_t(); get.version, get.sample1, get.sample2 = 2, a, a")
    assert ask.code("nvmlGpmMetricsGet(get)") == 25
    ask.do("nvmlGpmSampleFree(c)")


def test_gpm_without_permission_or_support(node: Standin, ask: Asker) -> None:
    assert ask("nvmlGpmQueryDeviceSupport(h).isSupportedDevice") == 1
    node.state.gpus[0].gpm(code=4)
    assert ask("nvmlGpmQueryDeviceSupport(h).isSupportedDevice") == 1
    assert ask.code("nvmlGpmSampleGet(h, a)") == 4
    node.state.gpus[0].gpm(supported=False)
    assert ask("nvmlGpmQueryDeviceSupport(h).isSupportedDevice") == 0
    assert ask.code("nvmlGpmSampleGet(h, a)") == 3
    node.state.gpus[0].gpm()
    assert ask.code("nvmlGpmSampleGet(h, a)") == 0


def test_pcie_throughput_blocks_for_its_window(node: Standin, ask: Asker) -> None:
    node.state.gpus[0].run(pcie_tx=5e9, pcie_rx=250e6)
    begin = time.monotonic()
    assert ask("nvmlDeviceGetPcieThroughput(h, NVML_PCIE_UTIL_TX_BYTES)") == pytest.approx(
        5e6, rel=0.001
    )
    assert ask("nvmlDeviceGetPcieThroughput(h, NVML_PCIE_UTIL_RX_BYTES)") == pytest.approx(
        250e3, rel=0.001
    )
    assert time.monotonic() - begin >= 0.04
    assert ask.code("nvmlDeviceGetPcieThroughput(h, 2)") == 2


def _fields(ask: Asker, *fields: int | tuple[int, int]) -> list[dict[str, Any]]:
    return list(ask(f"nvmlDeviceGetFieldValues(h, {list(fields)!r})"))


def test_throttling_accumulates_in_ns(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    names = {
        74: "throttle_power", 75: "throttle_thermal", 76: "throttle_sync_boost",
        77: "throttle_board_limit", 78: "throttle_low_utilization", 79: "throttle_reliability",
        80: "throttle_app_clocks", 81: "throttle_base_clocks", 269: "throttle_sw_thermal",
        270: "throttle_hw_thermal", 271: "throttle_hw_power_brake",
    }  # fmt: skip
    gpu.add(**{name: field * 1000 for field, name in names.items()})
    rows = _fields(ask, *names)
    assert [row["value"]["ullVal"] for row in rows] == [field * 1000 for field in names]
    assert {row["valueType"] for row in rows} == {UNSIGNED_LONG_LONG}
    gpu.run(throttle_power=0.5)
    least = gpu.value("throttle_power")
    row = _fields(ask, 74)[0]
    assert least <= row["value"]["ullVal"] <= gpu.value("throttle_power")
    assert abs(row["timestamp"] / 1e6 - time.time()) < 1.0
    assert 0 <= row["latencyUsec"] < 1_000_000


def test_gauges_as_fields(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    gpu.set(
        temperature_celsius=61.75, memory_temperature_celsius=70, power_mw=600_000,
        pcie_replays=4, remapped_correctable=1, remapped_uncorrectable=2, remap_pending=1,
        recovery_action=1,
    )  # fmt: skip
    gpu.ecc(uncorrected=False, aggregate=False, sram=1, dram=10)
    gpu.ecc(uncorrected=True, aggregate=False, dram=20)
    gpu.ecc(uncorrected=False, aggregate=True, dram=30)
    gpu.ecc(uncorrected=True, aggregate=True, dram=40)
    rows = _fields(ask, 1, 2, 82, 91, 94, 142, 143, 144, 145, 186, 187, 188, 189, 190, 192, 230)
    assert {(row["nvmlReturn"], row["valueType"]) for row in rows} == {(0, UNSIGNED)}
    assert [row["value"]["uiVal"] for row in rows] == [
        1, 1, 70, 18, 4, 1, 2, 1, 0, 600_000, 200_000, 700_000, 700_000, 700_000, 700_000, 1,
    ]  # fmt: skip
    rows = _fields(ask, 3, 4, 5, 6)
    assert [row["value"]["ullVal"] for row in rows] == [11, 20, 30, 40]
    (temperature,) = _fields(ask, 308)
    assert (temperature["valueType"], temperature["value"]["dVal"]) == (DOUBLE, 61.75)
    assert _fields(ask, 83)[0]["value"]["ullVal"] >= 10**9
    assert _fields(ask, (186, 1))[0]["nvmlReturn"] == 3  # no module with a CPU here


def test_nvlink_counters_are_cumulative_kib(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    gpu.add(nvlink_tx=10 * 1024, nvlink_rx=3 * 1024)
    rows = _fields(ask, (138, 0), (138, 17), (139, 5), (138, ALL_LINKS), (139, ALL_LINKS))
    assert [row["value"]["ullVal"] for row in rows] == [10, 10, 3, 180, 54]
    assert {row["valueType"] for row in rows} == {UNSIGNED_LONG_LONG}
    assert [row["nvmlReturn"] for row in _fields(ask, (138, 18), (140, 0), (202, 0))] == [2, 3, 3]


def test_nvlink_state_and_errors(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    gpu.link(4, active=0)
    gpu.link(5, replays=7, recoveries=2, crc_errors=9)
    rows = _fields(ask, (164, 3), (164, 4), (165, 3), (165, 4), (166, 3))
    assert [row["value"]["uiVal"] for row in rows] == [26562, 0, 1, 0, 6]
    rows = _fields(ask, (161, 5), (162, 5), (163, 5))
    assert [row["value"]["ullVal"] for row in rows] == [7, 2, 9]
    assert ask("[nvmlDeviceGetNvLinkState(h, i) for i in (3, 4)]") == [1, 0]
    assert ask("[nvmlDeviceGetNvLinkErrorCounter(h, 5, kind) for kind in range(3)]") == [7, 2, 9]
    assert ask("nvmlDeviceGetNvLinkRemoteDeviceType(h, 0)") == 2
    assert ask.code("nvmlDeviceGetNvLinkState(h, 18)") == 2


def test_blackwell_counts_nvlink_under_new_ids(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=1, profile=b200) as node, Asker(node.env) as ask:
        ask.do("h = nvmlDeviceGetHandleByIndex(0)")
        node.state.gpus[0].add(nvlink_tx=1000, nvlink_rx=2000)
        node.state.gpus[0].link(0, recoveries=3)
        rows = _fields(ask, (202, 0), (204, 0), (204, ALL_LINKS), (215, 0))
        assert [row["value"]["ullVal"] for row in rows] == [1000, 2000, 36_000, 3]
        assert [row["nvmlReturn"] for row in _fields(ask, (161, 0), (162, 0), (163, 0))] == [3] * 3


def test_pcie_byte_counters_wrap_at_32_bits(node: Standin, ask: Asker) -> None:
    node.state.gpus[0].add(pcie_tx=(1 << 32) + 5, pcie_rx=(1 << 32) - 1)
    rows = _fields(ask, 197, 198)
    assert [row["value"]["uiVal"] for row in rows] == [5, (1 << 32) - 1]


def test_fields_that_the_driver_does_not_know(node: Standin, ask: Asker) -> None:
    node.state.gpus[0].fields(without=[269, 74])
    rows = _fields(ask, 74, 75, 269, 400, 0)
    assert [row["nvmlReturn"] for row in rows] == [3, 0, 3, 3, 2]
