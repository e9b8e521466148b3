"""Tools of others, unmodified, on the stand-in NVML library."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from vgpu import Process, Standin, standin

GIB = 1 << 30
TIMEOUT_S = 60.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=8) as made:
        for gpu in made.state.gpus:
            gpu.run(gr=0.1 + 0.1 * gpu.slot, mem=0.05 * gpu.slot, nvlink_rx=64e6, pcie_rx=1e9)
            gpu.set(power_mw=100_000 + 1000 * gpu.slot, memory_used_bytes=(gpu.slot + 1) * GIB)
            gpu.steady()
        made.state.gpus[2].processes(
            [Process(pid=os.getpid(), used_bytes=5 * GIB, sm_percent=33, mem_percent=11)]
        )
        yield made


def _tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed")
    return str(path)


def test_nvitop_prints_every_gpu(node: Standin) -> None:
    done = subprocess.run(
        [_tool("nvitop"), "--once"],
        env={**os.environ, **node.env, "COLUMNS": "120", "LINES": "60", "TERM": "xterm"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "FunctionNotFound" not in done.stderr
    rows = re.findall(r"^│ +(\d) +H100 80GB HBM3 .*│ (\S+) Off", done.stdout, re.MULTILINE)
    assert [int(index) for index, _ in rows] == list(range(8))
    assert rows[0][1] == "00000000:1B:00.0"
    details = re.findall(r"(\d+)W / 700W │ +(\d+)MiB / 79.65GiB │ +(\d+)%", done.stdout)
    assert details == [(str(100 + i), str(1024 * (i + 1)), str(10 + 10 * i)) for i in range(8)]
    assert re.search(rf"│ +2 +{os.getpid()} C .* 5120MiB +33 +11 ", done.stdout)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _page(url: str) -> dict[str, Metric]:
    """The metric families of a page; none while the exporter does not listen."""
    try:
        with urllib.request.urlopen(url, timeout=5) as page:
            text = str(page.read().decode())
    except urllib.error.URLError:
        return {}
    return {family.name: family for family in text_string_to_metric_families(text)}


def _by_gpu(families: dict[str, Metric], name: str) -> dict[int, float]:
    if name not in families:
        return {}
    return {int(sample.labels["index"]): sample.value for sample in families[name].samples}


def _settled(url: str, exporter: subprocess.Popen[str]) -> dict[str, Metric]:
    """The first page with rates of all GPUs: those need two readings."""
    end = time.monotonic() + TIMEOUT_S
    while True:
        assert exporter.poll() is None, "the exporter ended"
        assert time.monotonic() < end, "the exporter never had rates of all GPUs"
        families = _page(url)
        rates = _by_gpu(families, "gpu_nvlink_total_rx_throughput_MiBps")
        if len(rates) == 8 and all(rate > 0 for rate in rates.values()):
            return families
        time.sleep(0.2)


def test_nvitop_exporter_serves_every_gpu(node: Standin, tmp_path: Path) -> None:
    port = _free_port()
    command = [_tool("nvitop-exporter"), "--port", str(port), "--interval", "1", "-H", "test"]
    with (tmp_path / "log").open("w") as log:
        exporter = subprocess.Popen(
            command, env={**os.environ, **node.env}, stdout=log, stderr=log, text=True
        )
        try:
            families = _settled(f"http://127.0.0.1:{port}/metrics", exporter)
        finally:
            exporter.terminate()
            exporter.wait(TIMEOUT_S)
    gpus = range(8)
    assert _by_gpu(families, "gpu_utilization_Percentage") == {i: 10 + 10 * i for i in gpus}
    assert _by_gpu(families, "gpu_memory_used_MiB") == {i: 1024 * (i + 1) for i in gpus}
    power = _by_gpu(families, "gpu_power_usage_W")
    assert power == pytest.approx({i: 100 + i for i in gpus}, abs=0.1)
    uuids = {sample.labels["uuid"] for sample in families["gpu_memory_used_MiB"].samples}
    assert uuids == {gpu.uuid for gpu in node.state.gpus}
    # It takes KB for KiB.
    pcie = _by_gpu(families, "gpu_pcie_rx_throughput_MiBps")
    assert pcie == pytest.approx(dict.fromkeys(gpus, 1000000000.0 / 1000 / 1024), rel=0.01)
    links = families["gpu_nvlink_rx_throughput_MiBps"].samples
    assert len(links) == 8 * 18
    assert [link.value for link in links] == pytest.approx([64e6 / 2**20] * 144, rel=0.1)
