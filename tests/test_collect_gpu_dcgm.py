"""A DCGM exporter as a source: only if named, behind a deadline, never where GPM tells."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gpu_agent import GpuAgent
from trees import BEGIN_NS, gather
from vgpu import a100, h100, standin
from whyidle.clock import NS_PER_S, SystemClock, VirtualClock
from whyidle.collect.collector import NoData
from whyidle.collect.gpu_dcgm import GPU_DCGM, parse
from whyidle.dcgm import ENVIRONMENT, TIMEOUT_S, Dcgm
from whyidle.host import Answer, Asker, LiveHost

ONE, TWO = "GPU-1", "GPU-2"


def sample(field: str, uuid: str, value: float | str, more: str = "") -> str:
    labels = f'gpu="0",UUID="{uuid}",pci_bus_id="00000000:19:00.0",device="nvidia0"{more}'
    return f"DCGM_FI_PROF_{field}{{{labels}}} {value}\n"


PAGE = (
    "# HELP DCGM_FI_PROF_GR_ENGINE_ACTIVE Ratio of time the graphics engine is active.\n"
    "# TYPE DCGM_FI_PROF_GR_ENGINE_ACTIVE gauge\n"
    + sample("GR_ENGINE_ACTIVE", ONE, 0.75)
    + sample("SM_ACTIVE", ONE, 0.5)
    + sample("SM_OCCUPANCY", ONE, 0.25)
    + sample("PIPE_TENSOR_ACTIVE", ONE, 1.000001)
    + sample("DRAM_ACTIVE", ONE, "140737488355328.000000")
    + sample("PIPE_FP32_ACTIVE", ONE, 0.125)
    + sample("PCIE_TX_BYTES", ONE, 2_000_000_000)
    + sample("NVLINK_RX_BYTES", ONE, "1.5e+09")
    + sample("NVLINK_TX_BYTES", ONE, "9223372036854775794")
    + sample("GR_ENGINE_ACTIVE", TWO, 0)
    + sample("GR_ENGINE_ACTIVE", ONE, 0.1, ',GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"')
    + 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1"} 99\n'
)


def test_pages() -> None:
    found = parse(PAGE)
    assert found == {
        ONE: {
            "gr_active_ratio": 0.75,
            "sm_active_ratio": 0.5,
            "sm_occupancy_ratio": 0.25,
            "tensor_active_ratio": 1.0,
            "fp32_active_ratio": 0.125,
            "pcie_tx_bytes": 2e9,
            "nvlink_rx_bytes": 1.5e9,
        },
        TWO: {"gr_active_ratio": 0.0},
    }
    assert parse(sample("SM_UTIL_RATIO", ONE, 0.5)) == {ONE: {"sm_active_ratio": 0.5}}
    assert parse("") == parse("<html>no such page</html>") == {}
    with pytest.raises(ValueError, match="for a number"):
        parse(sample("SM_ACTIVE", ONE, "many"))


class _Exporter:
    """What the host is told."""

    def __init__(self) -> None:
        self.page: Answer = PAGE
        self.gpm: tuple[str, ...] = ()
        self.error: OSError | None = None

    def __call__(self) -> Answer:
        if self.error is not None:
            raise self.error
        return self.page


def host_with(exporter: _Exporter, clock: VirtualClock, root: Path) -> LiveHost:
    askers: dict[str, Asker] = {"dcgm": exporter, "gpm_works": lambda: exporter.gpm}
    return LiveHost(str(root), clock, askers=askers)


def test_each_reading_stands_for_the_time_since_the_last(tmp_path: Path) -> None:
    clock, exporter = VirtualClock(BEGIN_NS), _Exporter()
    host, collect = host_with(exporter, clock, tmp_path), GPU_DCGM.make()
    assert gather(collect, host) == ([], []), "the first only marks where the next begins"
    clock.advance(NS_PER_S // 2)
    (one, two), problems = gather(collect, host)
    assert problems == []
    assert (one.source, one.uuid, one.t0_ns, one.t1_ns) == (
        *("dcgm", ONE, BEGIN_NS),
        BEGIN_NS + NS_PER_S // 2,
    )
    assert one.mono_ns == one.t1_ns
    assert (one.gr_active_ratio, one.sm_active_ratio, one.fp32_active_ratio) == (0.75, 0.5, 0.125)
    assert (one.pcie_tx_bytes, one.nvlink_rx_bytes) == (1_000_000_000, 750_000_000)
    assert one.dram_active_ratio is one.nvlink_tx_bytes is one.utilization_ratio is None
    assert (two.gr_active_ratio, two.sm_active_ratio) == (0.0, None)
    clock.advance(NS_PER_S)
    again = gather(collect, host)[0][0]
    assert again.t0_ns == one.t1_ns, "windows touch"


def test_pipes_are_rows_of_their_own(tmp_path: Path) -> None:
    clock, exporter = VirtualClock(BEGIN_NS), _Exporter()
    host, collect = host_with(exporter, clock, tmp_path), GPU_DCGM.make()
    exporter.page = sample("SM_ACTIVE", ONE, 0.5) + sample("PIPE_FP64_ACTIVE", ONE, 0.25)
    gather(collect, host)
    clock.advance(NS_PER_S)
    (activity, pipe), problems = gather(collect, host)
    assert problems == []
    assert (activity.TABLE, activity.sm_active_ratio) == ("gpu_activity", 0.5)
    assert (pipe.TABLE, pipe.source, pipe.uuid) == ("gpu_pipe", "dcgm", ONE)
    assert (pipe.fp64_active_ratio, pipe.fp16_active_ratio) == (0.25, None)
    assert (pipe.t0_ns, pipe.t1_ns) == (BEGIN_NS, BEGIN_NS + NS_PER_S)


def test_where_gpm_tells_nothing_is_added(tmp_path: Path) -> None:
    clock, exporter = VirtualClock(BEGIN_NS), _Exporter()
    host, collect = host_with(exporter, clock, tmp_path), GPU_DCGM.make()
    gather(collect, host)
    clock.advance(NS_PER_S)
    exporter.gpm = (ONE,)
    assert [row.uuid for row in gather(collect, host)[0]] == [TWO]


def test_a_window_over_a_failure_is_not_made_up(tmp_path: Path) -> None:
    clock, exporter = VirtualClock(BEGIN_NS), _Exporter()
    host, collect = host_with(exporter, clock, tmp_path), GPU_DCGM.make()
    gather(collect, host)
    exporter.error = ConnectionRefusedError(111, "no DCGM exporter answers", "http://x")
    with pytest.raises(OSError, match="no DCGM exporter answers"):
        gather(collect, host)
    exporter.error = None
    clock.advance(NS_PER_S)
    assert gather(collect, host) == ([], [])
    clock.advance(60 * NS_PER_S)
    assert gather(collect, host) == ([], []), "nor over a pause of a minute"


def test_a_page_without_profiling_fields_is_no_data(tmp_path: Path) -> None:
    exporter = _Exporter()
    exporter.page = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1"} 99\n'
    with pytest.raises(NoData, match="DCGM_FI_PROF_GR_ENGINE_ACTIVE"):
        gather(GPU_DCGM.make(), host_with(exporter, VirtualClock(BEGIN_NS), tmp_path))


class _Handler(BaseHTTPRequestHandler):
    """Answers by path and counts."""

    hits = 0
    release = threading.Event()

    def do_GET(self) -> None:
        type(self).hits += 1
        if self.path == "/slow":
            self.release.wait(30)
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "/metrics")
            self.end_headers()
            return
        body = PAGE.encode() if self.path != "/big" else b"#" * (5 << 20)
        self.send_response(200 if self.path != "/gone" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            return  # who asked has hung up

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    _Handler.hits = 0
    _Handler.release.clear()
    yield f"http://127.0.0.1:{made.server_address[1]}"
    _Handler.release.set()
    made.shutdown()
    thread.join(10)
    made.server_close()


def test_a_real_exporter(server: str) -> None:
    assert Dcgm({ENVIRONMENT: f"{server}/metrics"})() == PAGE


def test_no_connection_unless_asked_for(server: str, tmp_path: Path) -> None:
    assert Dcgm({})() is Dcgm({ENVIRONMENT: ""})() is None
    host = LiveHost(str(tmp_path), VirtualClock(BEGIN_NS), askers={"dcgm": Dcgm({})})
    with pytest.raises(NoData, match="WHYIDLE_DCGM_URL"):
        gather(GPU_DCGM.make(), host)
    assert _Handler.hits == 0


@pytest.mark.parametrize(
    ("path", "said"),
    [("/gone", "answered 404"), ("/away", "answered 302"), ("/big", "larger than 4 MiB")],
)
def test_bad_answers(server: str, path: str, said: str) -> None:
    with pytest.raises(OSError, match=said):
        Dcgm({ENVIRONMENT: server + path})()


def test_an_exporter_that_hangs_is_given_up(server: str) -> None:
    clock = SystemClock()
    began = clock.mono_ns()
    with pytest.raises(OSError, match=r"timed out|no DCGM exporter answers"):
        Dcgm({ENVIRONMENT: f"{server}/slow"})()
    assert clock.mono_ns() - began < (TIMEOUT_S + 2) * NS_PER_S


def test_proxies_of_the_environment_are_not_used(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert Dcgm({ENVIRONMENT: f"{server}/metrics"})() == PAGE


def test_what_is_no_address_is_said() -> None:
    with pytest.raises(OSError, match="is no http address"):
        Dcgm({ENVIRONMENT: "file:///etc/passwd"})()
    with pytest.raises(OSError, match="no DCGM exporter answers"):
        Dcgm({ENVIRONMENT: "http://127.0.0.1:9/metrics"})()


def test_which_gpus_have_gpm_is_shared(tmp_path: Path) -> None:
    (tmp_path / "h").mkdir()
    with standin(tmp_path / "h", gpus=2, profile=h100) as node, GpuAgent(node) as agent:
        assert agent.ask("host.ask('gpm_works')") == []
        agent.window()
        assert agent.ask("host.ask('gpm_works')") == [gpu.uuid for gpu in node.state.gpus]
        node.state.gpus[0].gpm(code=4)
        agent.window()
        assert agent.ask("host.ask('gpm_works')") == [node.state.gpus[1].uuid]
    (tmp_path / "a").mkdir()
    with standin(tmp_path / "a", gpus=1, profile=a100) as node, GpuAgent(node) as agent:
        agent.window()
        assert agent.ask("host.ask('gpm_works')") == []
