"""What any reader of NVML sees of the virtual GPUs, against their timeline."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vgpu.ask import Asker, Failed
from vgpu.client import VirtualGpu
from vgpu.device.publish import CONTEXT_BYTES, PLAN_NS
from vgpu.device.serve import VirtualNode, virtual_gpus
from vgpu.device.truth import Truth
from vgpu.device.wire import ENVIRONMENT
from vgpu.profiles import v100

MS = 1_000_000
MIB = 1 << 20
GR, SM, DRAM = 1, 2, 10  # NVML_GPM_METRIC_*
PCIE_TX, PCIE_RX, NVLINK_RX, NVLINK_TX = 20, 21, 60, 61
# The counters follow the timeline to within a plan's length, and as late as the node wakes up:
# on a machine whose cores are taken, that is a time slice of the scheduler and more.
LATE_NS = 25 * MS

READER = """
import time
rows = []

def sample():
    one = nvmlGpmSampleAlloc()
    begin_ns = time.monotonic_ns()
    nvmlGpmSampleGet(h, one)
    return begin_ns, time.monotonic_ns(), one

def windows(count, ids):
    out, last = [], sample()
    for _ in range(count):
        time.sleep(0.125)
        now = sample()
        get = c_nvmlGpmMetricsGet_t()
        get.version, get.numMetrics = NVML_GPM_METRICS_GET_VERSION, len(ids)
        get.sample1, get.sample2 = last[2], now[2]
        for i, metric in enumerate(ids):
            get.metrics[i].metricId = metric
        nvmlGpmMetricsGet(get)
        out.append([last[:2], now[:2], [get.metrics[i].value for i in range(len(ids))]])
        last = now
    return out
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[VirtualNode]:
    with virtual_gpus(tmp_path, gpus=2) as made:
        yield made


def use(node: VirtualNode, index: int = 0, memory_bytes: int = 0) -> VirtualGpu:
    return VirtualGpu(node.env[ENVIRONMENT], index, memory_bytes)


def say(figure: str) -> None:
    """A measured figure, for whoever reads the test's output."""
    sys.stdout.write(f"\n{figure}\n")


def busy_ns(truth: Truth, gpu: int, begin_ns: int, end_ns: int) -> int:
    split = truth.split(gpu=gpu, begin_ns=begin_ns, end_ns=end_ns)
    return split.working_ns + split.spinning_ns


def filled_ns(truth: Truth, gpu: int, begin_ns: int, end_ns: int) -> float:
    """SM time of a GPU whose kernels do not overlap."""
    return sum(
        row.fill * max(0, min(row.end_ns, end_ns) - max(row.begin_ns, begin_ns))
        for row in truth.intervals(gpu=gpu)
    )


TRAINING = """
import sys, time
from vgpu.client import connect
rank = int(sys.argv[1])
gpu = connect(rank)
world = gpu.group("world", rank, 2)
for _ in range(int(sys.argv[2])):
    for _ in range(12):
        gpu.launch(0.7, kind="gemm")
        gpu.launch(0.15, kind="elementwise")
    if rank == 1:
        time.sleep(0.02)
    gpu.all_reduce(4.0, world, size_bytes=64 << 20)
    gpu.launch(2.0, kind="optimizer")
    gpu.synchronize()
    time.sleep(0.012)
"""


def train(node: VirtualNode, steps: int) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(rank), str(steps)],
            env={**os.environ, **node.env},
        )
        for rank in range(2)
    ]


def test_gpm_windows_equal_the_timeline(node: VirtualNode) -> None:
    trainers = train(node, 60)
    with Asker(node.env) as ask:
        ask.do("h = nvmlDeviceGetHandleByIndex(0)\n" + READER)
        time.sleep(0.5)
        windows: list[Any] = ask(f"windows(14, [{GR}, {SM}, {NVLINK_TX}])")
    assert [process.wait(60) for process in trainers] == [0, 0]
    truth = node.truth()
    errors: dict[str, list[float]] = {"gr": [], "sm": [], "nvlink": []}
    blurred = 0
    for first, second, (gr, sm, nvlink) in windows:
        if max(first[1] - first[0], second[1] - second[0]) > 2 * MS:
            blurred += 1  # the reader was not running while it took the sample
            continue
        begin_ns, end_ns = sum(first) // 2, sum(second) // 2
        length_ns = end_ns - begin_ns
        errors["gr"].append(gr - 100 * busy_ns(truth, 0, begin_ns, end_ns) / length_ns)
        errors["sm"].append(sm - 100 * filled_ns(truth, 0, begin_ns, end_ns) / length_ns)
        errors["nvlink"].append(nvlink)
    assert blurred < len(windows) / 2
    for name in ("gr", "sm"):
        sizes = [abs(error) for error in errors[name]]
        say(
            f"{name} of {len(sizes)} windows of 125 ms against the timeline: off by "
            f"{statistics.mean(sizes):.2f} points mean, {max(sizes):.2f} at most"
        )
        assert statistics.mean(sizes) < 3
        assert max(sizes) < 100 * (PLAN_NS + LATE_NS) / (125 * MS)
    # 64 MiB a rank and step; an all-reduce of two sends all of it once.
    steps = len(truth.intervals(gpu=0, what="all_reduce"))
    rate = 64 * steps / (truth.rows["end_ns"].max() - truth.rows["begin_ns"].min()) * 1e9
    assert statistics.mean(errors["nvlink"]) == pytest.approx(rate, rel=0.15)


def _strays(node: VirtualNode, seconds: float) -> list[tuple[int, int, int]]:
    """Readings of GPU 0: when, and its counters of residency and SM time."""
    state, gpu = node.standin.state, node.standin.state.gpus[0]
    readings = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with state.exclusive():
            at_ns = time.monotonic_ns()
            readings.append((at_ns, gpu.value("gr", at_ns), gpu.value("sm", at_ns)))
        time.sleep(0.0031)
    return readings


def test_counters_stray_from_the_timeline_by_a_bounded_time(node: VirtualNode) -> None:
    trainers = train(node, 40)
    readings = _strays(node, 2.5)
    assert [process.wait(60) for process in trainers] == [0, 0]
    truth = node.truth()
    origin_ns = truth.processes[0].begin_ns
    rows = truth.intervals(gpu=0)
    strays = []
    for at_ns, gr, _ in readings:
        if at_ns > rows[0].begin_ns:
            strays.append((gr - busy_ns(truth, 0, origin_ns, at_ns)) / MS)
    sizes = sorted(abs(stray) for stray in strays)
    say(
        f"residency as reported against the timeline, {len(sizes)} readings: "
        f"{statistics.mean(strays):+.3f} ms mean, off by {sizes[len(sizes) // 2]:.3f} ms median, "
        f"{sizes[int(len(sizes) * 0.99)]:.3f} ms p99, {sizes[-1]:.3f} ms at most"
    )
    assert sizes[len(sizes) // 2] < PLAN_NS / MS
    assert sizes[-1] < (PLAN_NS + LATE_NS) / MS
    # Nothing adds up: at rest both agree, and no counter ever went back.
    at_ns, gr, sm = readings[-1]
    assert gr == pytest.approx(busy_ns(truth, 0, origin_ns, at_ns), abs=1000)
    assert sm == pytest.approx(filled_ns(truth, 0, origin_ns, at_ns), abs=1000)
    for before, after in pairwise(readings):
        assert after[1] >= before[1] and after[2] >= before[2]


def test_a_polling_kernel_is_full_utilization_and_few_sms(node: VirtualNode) -> None:
    with use(node) as gpu, Asker(node.env) as ask:
        world = gpu.group("world", 0, 2)
        gpu.all_reduce(1.0, world, channels=16)
        ask.do("h = nvmlDeviceGetHandleByIndex(0)\n" + READER)
        time.sleep(0.5)
        assert ask("nvmlDeviceGetUtilizationRates(h)")["gpu"] == 100
        (window,) = ask(f"windows(1, [{GR}, {SM}, {DRAM}, {NVLINK_TX}])")
        assert window[2] == pytest.approx([100.0, 100 * 16 / 132, 0.0, 0.0], abs=0.01)
        spinning_mw = ask("nvmlDeviceGetPowerUsage(h)")
    assert 150_000 < spinning_mw < 350_000


def test_copies_are_bytes_and_no_work(node: VirtualNode) -> None:
    with use(node) as gpu, Asker(node.env) as ask:
        ask.do("h = nvmlDeviceGetHandleByIndex(0)\n" + READER)
        ask.start(f"windows(1, [{GR}, {PCIE_TX}, {PCIE_RX}, {NVLINK_RX}])")
        time.sleep(0.03)
        gpu.copy(256 * MIB)
        gpu.copy(128 * MIB, to="host")
        gpu.synchronize()
        ((first, second, values),) = ask.finish()
    length_s = (sum(second) - sum(first)) / 2e9
    moved = [values[1] * length_s, values[2] * length_s]
    assert moved == pytest.approx([128, 256], rel=0.05)
    assert values[0] == values[3] == 0.0


def test_processes_and_memory_come_and_go(node: VirtualNode) -> None:
    with Asker(node.env) as ask:
        ask.do("h = nvmlDeviceGetHandleByIndex(0)")
        assert ask("nvmlDeviceGetComputeRunningProcesses(h)") == []
        assert ask("nvmlDeviceGetClockInfo(h, NVML_CLOCK_SM)") == 345
        before = ask("nvmlDeviceGetMemoryInfo(h).used")
        with use(node, memory_bytes=MIB) as gpu:
            gpu.allocate(1023 * MIB)
            gpu.launch(0.1)
            gpu.synchronize()
            (row,) = ask("nvmlDeviceGetComputeRunningProcesses(h)")
            held = CONTEXT_BYTES + 1024 * MIB
            assert (row["pid"], row["usedGpuMemory"]) == (os.getpid(), held)
            assert ask("nvmlDeviceGetMemoryInfo(h).used") - before == held
            time.sleep(0.12)  # gauges are refreshed every 100 ms
            assert ask("nvmlDeviceGetClockInfo(h, NVML_CLOCK_SM)") == 1980
        gpu.close()
        until = time.monotonic() + 5
        while ask("nvmlDeviceGetComputeRunningProcesses(h)") and time.monotonic() < until:
            time.sleep(0.01)
        assert ask("nvmlDeviceGetMemoryInfo(h).used") == before


def test_older_gpus_show_utilization(tmp_path: Path) -> None:
    with (
        virtual_gpus(tmp_path, gpus=1, profile=v100) as node,
        use(node) as gpu,
        Asker(node.env) as ask,
    ):
        ask.do("h = nvmlDeviceGetHandleByIndex(0)")
        gpu.copy(12_000_000)  # 1 ms at generation 3
        gpu.launch(500.0, fill=0.01)
        time.sleep(0.4)
        assert ask("nvmlDeviceGetUtilizationRates(h)")["gpu"] == 100
    copy, kernel = Truth.load(node.truth_path).intervals()
    assert copy.end_ns - copy.begin_ns == MS + 8000
    assert kernel.fill == pytest.approx(0.01, abs=1 / 256)


def test_processes_that_share_a_gpu_have_their_own_share(node: VirtualNode) -> None:
    code = (
        "import sys\nfrom vgpu.client import connect\n"
        "gpu = connect(0)\nprint('there', flush=True)\nsys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **node.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other, use(node) as gpu, Asker(node.env) as ask:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        ask.do("h = nvmlDeviceGetHandleByIndex(0)")
        for _ in range(40):
            gpu.launch(20.0)
        time.sleep(0.7)
        rows = ask("nvmlDeviceGetProcessUtilization(h, 0)")
        assert {row["pid"]: row["smUtil"] for row in rows} == {
            os.getpid(): pytest.approx(100, abs=15)
        }
        gpu.synchronize()
        until = time.monotonic() + 5
        while _shares(ask) and time.monotonic() < until:
            time.sleep(0.05)
        assert _shares(ask) == []


def _shares(ask: Asker) -> list[Any]:
    """Processes with a share; the driver says NOT_FOUND where there are none."""
    try:
        return list(ask("nvmlDeviceGetProcessUtilization(h, 0)"))
    except Failed as failed:
        assert failed.value == 6
        return []


def test_power_follows_the_work(node: VirtualNode) -> None:
    with use(node) as gpu, Asker(node.env) as ask:
        ask.do("h = nvmlDeviceGetHandleByIndex(0)")

        def mean_w(seconds: float) -> float:
            first, begin = ask("nvmlDeviceGetTotalEnergyConsumption(h)"), time.monotonic()
            time.sleep(seconds)
            energy_mj = ask("nvmlDeviceGetTotalEnergyConsumption(h)") - first
            return float(energy_mj / 1000 / (time.monotonic() - begin))

        resting = mean_w(0.3)
        for _ in range(600):
            gpu.launch(1.0, kind="gemm")
        time.sleep(0.05)
        working = mean_w(0.3)
    assert resting == pytest.approx(114, abs=15)  # 70 W, and the clocks of a context
    assert 500 < working < 700


def test_a_node_of_eight_gpus_costs_a_fraction_of_a_core(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom vgpu.client import connect\n"
        "gpus = [connect(i) for i in range(8)]\n"
        "due = time.monotonic(); end = due + 2.4\n"
        "while due < end:\n"
        "    for gpu in gpus:\n"
        "        for _ in range(20): gpu.launch(0.3)\n"
        "    due += 0.01; time.sleep(max(0.0, due - time.monotonic()))\n"
    )
    with virtual_gpus(tmp_path, gpus=8) as node:
        at_rest = _cpu_share(node.pid, 0.5)
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **node.env})
        time.sleep(0.6)
        at_work = _cpu_share(node.pid, 1.2)
        assert process.wait(60) == 0
        launches = len(node.truth().rows)
    say(
        f"8 GPUs with {launches / 2.4 / 8:.0f} launches/s each: {100 * at_work:.1f} % of a core; "
        f"at rest {100 * at_rest:.1f} %"
    )
    assert at_rest < 0.03
    assert at_work < 0.6


def _cpu_share(pid: int, seconds: float) -> float:
    def used_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before, begin = used_s(), time.monotonic()
    time.sleep(seconds)
    return (used_s() - before) / (time.monotonic() - begin)
