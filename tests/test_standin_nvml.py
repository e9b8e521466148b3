"""The stand-in NVML library as unmodified nvidia-ml-py sees it: values, units, versions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vgpu import Process, Standin, a100, standin, v100
from vgpu.ask import Asker

GIB = 1 << 30


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=8) as made:
        yield made


@pytest.fixture
def ask(node: Standin) -> Iterator[Asker]:
    with Asker(node.env) as asker:
        asker.do("h = nvmlDeviceGetHandleByIndex(0)")
        yield asker


def test_system_and_enumeration(ask: Asker) -> None:
    assert ask("nvmlDeviceGetCount()") == 8
    assert ask("nvmlSystemGetDriverVersion()") == "595.45.04"
    assert ask("nvmlSystemGetNVMLVersion()") == "13.595.45.04"
    assert ask("nvmlSystemGetCudaDriverVersion()") == 13020
    assert ask("nvmlSystemGetCudaDriverVersion_v2()") == 13020
    assert ask("nvmlErrorString(15)") == "GPU is lost"
    assert ask("nvmlErrorString(12345)") == "Unknown Error"
    assert ask.code("nvmlDeviceGetHandleByIndex(8)") == 2


def test_identity(ask: Asker) -> None:
    ask.do("hs = [nvmlDeviceGetHandleByIndex(i) for i in range(8)]")
    assert ask("[nvmlDeviceGetIndex(h) for h in hs]") == list(range(8))
    assert ask("[nvmlDeviceGetMinorNumber(h) for h in hs]") == list(range(8))
    assert ask("[nvmlDeviceGetNumaNodeId(h) for h in hs]") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(set(ask("[nvmlDeviceGetUUID(h) for h in hs]"))) == 8
    assert len(set(ask("[nvmlDeviceGetSerial(h) for h in hs]"))) == 8
    assert ask("nvmlDeviceGetName(h)") == "NVIDIA H100 80GB HBM3"
    assert ask("nvmlDeviceGetArchitecture(h)") == 9
    assert ask("nvmlDeviceGetCudaComputeCapability(h)") == [9, 0]
    assert ask("nvmlDeviceGetNumGpuCores(h)") == 132 * 128
    assert ask("nvmlDeviceGetBoardPartNumber(h)").startswith("692-")
    assert ask("nvmlDeviceGetVbiosVersion(h)") == "96.00.99.00.01"
    assert ask("nvmlDeviceGetBoardId(hs[1])") == 0x4300
    assert ask("nvmlDeviceGetModuleId(hs[2], c_uint())") == 3
    assert ask("nvmlDeviceGetBrand(h)") == 1
    assert ask("nvmlDeviceGetMultiGpuBoard(h)") == 0
    assert ask("nvmlDeviceGetPersistenceMode(h)") == 1
    assert ask("nvmlDeviceGetDisplayMode(h)") == ask("nvmlDeviceGetDisplayActive(h)") == 0
    assert ask("nvmlDeviceGetComputeMode(h)") == 0


def test_pci_addresses_and_topology(ask: Asker) -> None:
    ask.do("hs = [nvmlDeviceGetHandleByIndex(i) for i in range(8)]")
    pci = ask("nvmlDeviceGetPciInfo(hs[7])")
    assert pci["busId"] == "00000000:DF:00.0"
    assert pci["busIdLegacy"] == "0000:DF:00.0"
    assert (pci["domain"], pci["bus"], pci["device"]) == (0, 0xDF, 0)
    assert pci["pciDeviceId"] == 0x233010DE
    ask.do("e = nvmlPciInfoExt_v1_t(); e.version = nvmlPciInfoExt_v1")
    ask.do("nvmlDeviceGetPciInfoExt(hs[7], byref(e))")
    assert ask("(e.busId, e.baseClass, e.subClass)") == ["00000000:DF:00.0", 3, 2]
    assert ask("nvmlDeviceGetTopologyCommonAncestor(hs[0], hs[3])") == 40
    assert ask("nvmlDeviceGetTopologyCommonAncestor(hs[0], hs[4])") == 50
    assert ask("nvmlDeviceGetTopologyCommonAncestor(hs[0], hs[0])") == 0


@pytest.mark.parametrize(
    "lookup",
    [
        "nvmlDeviceGetHandleByUUID('GPU-00000000-0000-4000-8000-000000000003')",
        "nvmlDeviceGetHandleByPciBusId('00000000:61:00.0')",
        "nvmlDeviceGetHandleByPciBusId('0000:61:00.0')",
        "nvmlDeviceGetHandleByPciBusId('61:00.0')",
        "nvmlDeviceGetHandleBySerial('1650000000003')",
    ],
)
def test_a_device_is_found_by(ask: Asker, lookup: str) -> None:
    assert ask(f"nvmlDeviceGetIndex({lookup})") == 3


def test_what_does_not_exist_is_not_found(ask: Asker) -> None:
    assert ask.code("nvmlDeviceGetHandleByUUID('GPU-1')") == 6
    assert ask.code("nvmlDeviceGetHandleByUUID('MIG-1')") == 6
    assert ask.code("nvmlDeviceGetHandleByPciBusId('0000:62:00.0')") == 6
    assert ask.code("nvmlDeviceGetHandleBySerial('')") == 6
    assert ask.code("nvmlDeviceGetName(c_nvmlDevice_t())") == 2


def test_initialisation_is_counted(ask: Asker) -> None:
    ask.do("nvmlInit(); nvmlShutdown()")
    assert ask("nvmlDeviceGetCount()") == 8
    ask.do("nvmlShutdown()")
    assert ask.code("nvmlDeviceGetCount()") == 1
    assert ask.code("nvmlDeviceGetName(h)") == 1
    assert ask.code("nvmlGpmSampleAlloc()") == 1
    assert ask.code("nvmlShutdown()") == 1
    ask.do("nvmlInitWithFlags(NVML_INIT_FLAG_NO_ATTACH)")
    assert ask.code("nvmlDeviceGetName(h)") == 2  # a handle of the time before


def test_memory_in_bytes(node: Standin, ask: Asker) -> None:
    node.state.gpus[0].set(memory_used_bytes=10 * GIB, bar1_used_bytes=3 << 20)
    total, reserved = 81559 << 20, 546 << 20
    assert ask("nvmlDeviceGetMemoryInfo(h, nvmlMemory_v2)") == {
        "version": 0x02000028,
        "total": total,
        "reserved": reserved,
        "used": 10 * GIB,
        "free": total - reserved - 10 * GIB,
    }
    # The first version counts what the driver reserves as used.
    old = ask("nvmlDeviceGetMemoryInfo(h)")
    assert old == {
        "total": total,
        "used": 10 * GIB + reserved,
        "free": total - reserved - 10 * GIB,
    }
    bar1 = ask("nvmlDeviceGetBAR1MemoryInfo(h)")
    assert (bar1["bar1Total"], bar1["bar1Used"]) == (128 * GIB, 3 << 20)
    assert bar1["bar1Free"] == 128 * GIB - (3 << 20)


def test_unified_memory_has_no_size_of_its_own(node: Standin, ask: Asker) -> None:
    node.state.gpus[0].set(memory_total_bytes=0xFFFFFFFFFFFFFFFF)
    assert ask.code("nvmlDeviceGetMemoryInfo(h)") == 3
    assert ask.code("nvmlDeviceGetMemoryInfo(h, nvmlMemory_v2)") == 3


VERSIONED = {
    "memory": "nvmlDeviceGetMemoryInfo(h, {version})",
    "temperature": "_call('nvmlDeviceGetTemperatureV', c_nvmlTemperature_v1_t, {version})",
    "pci": "_call('nvmlDeviceGetPciInfoExt', nvmlPciInfoExt_v1_t, {version})",
    "processes": "_call('nvmlDeviceGetProcessesUtilizationInfo',"
    " c_nvmlProcessesUtilizationInfo_v1_t, {version})",
    "gpm": "_call('nvmlGpmQueryDeviceSupport', c_nvmlGpmSupport_t, {version})",
    "fabric": "_call('nvmlDeviceGetGpuFabricInfoV', c_nvmlGpuFabricInfo_v3_t, {version})",
}


@pytest.mark.parametrize("name", VERSIONED)
@pytest.mark.parametrize("version", [2, 0x01000001, 0xFF000028])
def test_a_wrong_structure_version_is_refused(ask: Asker, name: str, version: int) -> None:
    ask.do(
        "def _call(name, kind, version):\n"
        "    made = kind(); made.version = version\n"
        "    _nvmlCheckReturn(_nvmlGetFunctionPointer(name)(h, byref(made)))"
    )
    assert ask.code(VERSIONED[name].format(version=version)) == 25


def test_gauges_with_their_units(node: Standin, ask: Asker) -> None:
    node.state.gpus[0].set(
        clock_mhz=[1755, 1740, 2619, 1500],
        temperature_celsius=61.75,
        memory_temperature_celsius=70,
        event_reasons=0x4 | 0x20,
        pstate=2,
        pcie_generation=4,
        pcie_width=8,
        pcie_replays=12,
        power_limit_mw=650_000,
    )
    assert ask("[nvmlDeviceGetClockInfo(h, kind) for kind in range(4)]") == [1755, 1740, 2619, 1500]
    assert ask("nvmlDeviceGetMaxClockInfo(h, NVML_CLOCK_SM)") == 1980
    assert ask.code("nvmlDeviceGetClockInfo(h, 4)") == 2
    assert ask("nvmlDeviceGetTemperature(h, NVML_TEMPERATURE_GPU)") == 61
    assert ask("nvmlDeviceGetTemperatureV(h, NVML_TEMPERATURE_GPU)") == 61
    assert ask.code("nvmlDeviceGetTemperature(h, 1)") == 2
    assert ask("nvmlDeviceGetCurrentClocksEventReasons(h)") == 0x24
    assert ask("nvmlDeviceGetCurrentClocksThrottleReasons(h)") == 0x24
    # All that the header knows: 0x1FF in 13.0, two more bits since.
    assert ask("nvmlDeviceGetSupportedClocksEventReasons(h)") in (0x1FF, 0x7FF)
    assert ask("nvmlDeviceGetPerformanceState(h)") == 2
    assert ask("nvmlDeviceGetCurrPcieLinkGeneration(h)") == 4
    assert ask("nvmlDeviceGetCurrPcieLinkWidth(h)") == 8
    assert ask("nvmlDeviceGetMaxPcieLinkGeneration(h)") == 5
    assert ask("nvmlDeviceGetGpuMaxPcieLinkGeneration(h)") == 5
    assert ask("nvmlDeviceGetMaxPcieLinkWidth(h)") == 16
    assert ask("nvmlDeviceGetPcieReplayCounter(h)") == 12
    assert ask("nvmlDeviceGetEnforcedPowerLimit(h)") == 650_000
    assert ask("nvmlDeviceGetPowerManagementLimit(h)") == 650_000
    assert ask("nvmlDeviceGetPowerManagementDefaultLimit(h)") == 700_000
    assert ask("nvmlDeviceGetPowerManagementLimitConstraints(h)") == [200_000, 700_000]


def test_what_the_board_lacks_is_not_supported(node: Standin, ask: Asker) -> None:
    assert ask.code("nvmlDeviceGetFanSpeed(h)") == 3
    assert ask("nvmlDeviceGetNumFans(h)") == 0
    node.state.gpus[1].set(fan_percent=42)
    ask.do("h1 = nvmlDeviceGetHandleByIndex(1)")
    assert (ask("nvmlDeviceGetFanSpeed(h1)"), ask("nvmlDeviceGetNumFans(h1)")) == (42, 1)


def test_gauges_repeat_until_the_driver_refreshes_them(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    gpu.set(clock_mhz=[1000, 1000, 2619, 1000])
    begin = time.monotonic()
    assert ask("nvmlDeviceGetClockInfo(h, NVML_CLOCK_SM)") == 1000
    gpu.set(clock_mhz=[1200, 1200, 2619, 1000])
    seen: list[int] = []
    while not seen or seen[-1] != 1200:
        seen.append(ask("nvmlDeviceGetClockInfo(h, NVML_CLOCK_SM)"))
        elapsed_s = time.monotonic() - begin
        if elapsed_s < 0.1:
            assert seen[-1] == 1000, "newer than the driver's refresh"
        assert elapsed_s < 5, "never refreshed"
        time.sleep(0.01)
    assert set(seen) == {1000, 1200}


def test_power_is_an_average_and_energy_its_integral(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    gpu.set(power_mw=300_000)
    gpu.steady()
    assert ask("nvmlDeviceGetPowerUsage(h)") == pytest.approx(300_000, abs=2)
    gpu.set(power_mw=600_000)
    begin = time.monotonic()
    time.sleep(0.4)
    least = gpu.value("energy_mj")
    energy = ask("nvmlDeviceGetTotalEnergyConsumption(h)")
    assert least <= energy <= gpu.value("energy_mj")
    average = ask("nvmlDeviceGetPowerUsage(h)")
    share = min(1.0, time.monotonic() - begin)  # of the last second, at 600 W
    assert 340_000 < average <= 300_000 + 300_000 * share
    fields = ask("nvmlDeviceGetFieldValues(h, [NVML_FI_DEV_POWER_INSTANT])")
    assert fields[0]["value"]["uiVal"] == 600_000


def test_old_boards_report_power_of_the_moment_and_lack_what_is_newer(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=1, profile=v100) as node, Asker(node.env) as ask:
        node.state.gpus[0].set(power_mw=123_000)
        ask.do("h = nvmlDeviceGetHandleByIndex(0)")
        assert ask("nvmlDeviceGetPowerUsage(h)") == 123_000
        assert ask("nvmlGpmQueryDeviceSupport(h).isSupportedDevice") == 0
        assert ask.code("nvmlGpmSampleGet(h, nvmlGpmSampleAlloc())") == 3
        assert ask.code("nvmlDeviceGetMigMode(h)") == 3
        assert ask.code("nvmlDeviceGetRemappedRows(h)") == 3
        assert ask.code("nvmlDeviceGetGpuFabricInfoV(h, byref(c_nvmlGpuFabricInfo_v3_t()))") == 3


def test_processes(node: Standin, ask: Asker) -> None:
    assert ask("nvmlDeviceGetComputeRunningProcesses(h)") == []
    node.state.gpus[0].processes(
        [
            Process(pid=100, used_bytes=5 * GIB, sm_percent=80, mem_percent=30),
            Process(pid=101, used_bytes=None),
            Process(pid=102, used_bytes=GIB, kind=1),
            Process(pid=103, used_bytes=2 * GIB, kind=2),
        ]
    )
    rows = ask("nvmlDeviceGetComputeRunningProcesses(h)")
    assert [(row["pid"], row["usedGpuMemory"]) for row in rows] == [(100, 5 * GIB), (101, None)]
    assert {row["gpuInstanceId"] for row in rows} == {0xFFFFFFFF}
    assert [row["pid"] for row in ask("nvmlDeviceGetGraphicsRunningProcesses(h)")] == [102]
    assert [row["pid"] for row in ask("nvmlDeviceGetMPSComputeRunningProcesses(h)")] == [103]
    assert ask("nvmlDeviceGetComputeRunningProcesses(nvmlDeviceGetHandleByIndex(1))") == []


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetProcessUtilization"]
)
def test_process_utilization_since_a_time(node: Standin, ask: Asker, call: str) -> None:
    # nvidia-ml-py turns "no process, success" into an error of value 0.
    assert ask.code(f"{call}(h, 0)") == 0
    node.state.gpus[0].processes([Process(pid=7, used_bytes=GIB)])
    assert ask.code(f"{call}(h, 0)") == 6  # it runs, but did nothing
    node.state.gpus[0].processes(
        [
            Process(pid=7, used_bytes=GIB, sm_percent=91, mem_percent=44),
            Process(pid=8, used_bytes=0),
        ]
    )
    rows = ask(f"{call}(h, 0)")
    assert [(row["pid"], row["smUtil"], row["memUtil"]) for row in rows] == [(7, 91, 44)]
    assert abs(rows[0]["timeStamp"] / 1e6 - time.time()) < 1.0
    assert ask.code(f"{call}(h, {rows[0]['timeStamp'] + 10_000_000})") == 6


def test_a100_reports_in_its_own_units(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=2, profile=a100) as node, Asker(node.env) as ask:
        ask.do("h = nvmlDeviceGetHandleByIndex(1)")
        assert ask("nvmlDeviceGetName(h)") == "NVIDIA A100-SXM4-80GB"
        assert ask("nvmlDeviceGetMaxPcieLinkGeneration(h)") == 4
        assert ask("nvmlDeviceGetMigMode(h)") == [0, 0]
        assert ask("[nvmlDeviceGetNvLinkState(h, i) for i in range(12)]") == [1] * 12
        assert ask.code("nvmlDeviceGetNvLinkState(h, 12)") == 2
        assert ask("nvmlDeviceGetNvLinkVersion(h, 0)") == 4
