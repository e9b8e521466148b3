"""What goes wrong on demand in the stand-in NVML library, events, and MIG."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vgpu import Count, MigDevice, Process, Standin, standin
from vgpu.ask import Asker, Failed

GIB = 1 << 30
FOREVER_S = 60.0  # a call that hangs must not end a test run with it


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=4) as made:
        yield made


@pytest.fixture
def ask(node: Standin) -> Iterator[Asker]:
    with Asker(node.env) as asker:
        asker.do("import time\nhs = [nvmlDeviceGetHandleByIndex(i) for i in range(4)]\nh = hs[0]")
        yield asker
        node.state.clear()


def _uuids(ask: Asker) -> list[str]:
    """What is enumerated now."""
    count = int(ask("nvmlDeviceGetCount()"))
    return [ask(f"nvmlDeviceGetUUID(nvmlDeviceGetHandleByIndex({i}))") for i in range(count)]


def test_a_function_fails_on_one_device_a_number_of_times(node: Standin, ask: Asker) -> None:
    node.state.fail("nvmlDeviceGetPowerUsage", 999, gpu=1, times=2)
    codes = [ask.code(f"nvmlDeviceGetPowerUsage(hs[{i}])") for i in (0, 1, 1, 1)]
    assert codes == [0, 999, 999, 0]
    assert ask.code("nvmlDeviceGetName(hs[1])") == 0


def test_everything_that_asks_the_driver_fails(node: Standin, ask: Asker) -> None:
    ask.do("s = nvmlGpmSampleAlloc()")
    fault = node.state.fail("", 9)
    for call in (
        "nvmlDeviceGetCount()",
        "nvmlSystemGetDriverVersion()",
        "nvmlDeviceGetUtilizationRates(h)",
        "nvmlDeviceGetFieldValues(h, [83])",
        "nvmlGpmSampleGet(h, s)",
        "nvmlDeviceGetHandleByIndex(0)",
        "nvmlInit()",
    ):
        assert ask.code(call) == 9, call
    # These never leave the process.
    assert ask.code("nvmlGpmSampleAlloc()") == 0
    assert ask.code("nvmlGpmSampleFree(s)") == 0
    assert ask.code("nvmlShutdown()") == 0
    assert ask.code("nvmlInit()") == 9
    node.state.clear(fault)
    assert ask.code("nvmlInit()") == 0


def test_a_driver_that_does_not_match_the_library(node: Standin) -> None:
    node.state.fail("nvmlInitWithFlags", 18, times=1)
    with Asker(node.env, init=False) as ask:
        with pytest.raises(Failed) as caught:
            ask.do("nvmlInit()")
        assert (caught.value.kind, caught.value.value) == ("NVMLError_LibRmVersionMismatch", 18)
        ask.do("nvmlInit()")
        assert ask("nvmlDeviceGetCount()") == 4


def test_a_hung_call_blocks_only_its_thread_and_burns_nothing(node: Standin, ask: Asker) -> None:
    node.state.hang("nvmlDeviceGetPowerUsage", gpu=0)
    cpu_s = ask("time.process_time()")
    ask.start("nvmlDeviceGetPowerUsage(h)")
    node.state.wait_blocked()
    assert ask("nvmlDeviceGetPowerUsage(hs[1])") == pytest.approx(70_000, abs=1)
    time.sleep(0.5)
    assert ask("time.process_time()") - cpu_s < 0.1
    node.state.wait_blocked()  # still
    node.state.clear()
    assert ask.finish() == pytest.approx(70_000, abs=1)
    assert node.state.calls()["nvmlDeviceGetPowerUsage"] == 2


def test_a_call_blocks_for_a_time_and_then_answers_or_fails(node: Standin, ask: Asker) -> None:
    node.state.hang("nvmlDeviceGetName", seconds=0.3, times=1)
    begin = time.monotonic()
    assert ask("nvmlDeviceGetName(h)") == "NVIDIA H100 80GB HBM3"
    assert time.monotonic() - begin >= 0.3
    node.state.hang("nvmlDeviceGetName", seconds=0.1, code=10)
    begin = time.monotonic()
    assert ask.code("nvmlDeviceGetName(h)") == 10
    assert time.monotonic() - begin >= 0.1


def test_a_hung_initialisation(node: Standin) -> None:
    node.state.hang("nvmlInitWithFlags", code=999)
    with Asker(node.env, init=False) as ask:
        ask.start("nvmlInit()")
        node.state.wait_blocked()
        node.state.clear()
        with pytest.raises(Failed) as caught:
            ask.finish()
        assert caught.value.value == 999
        ask.do("nvmlInit()")


def test_a_lost_gpu_answers_so_and_leaves_the_enumeration(node: Standin, ask: Asker) -> None:
    all_uuids = _uuids(ask)
    node.state.gpus[1].lose()
    assert ask.code("nvmlDeviceGetPowerUsage(hs[1])") == 15
    assert ask.code("nvmlDeviceGetUUID(hs[1])") == 15
    assert ask.code("nvmlDeviceGetHandleByIndex(1)") == 15
    assert ask.code(f"nvmlDeviceGetHandleByUUID('{all_uuids[1]}')") == 15
    assert ask.code("nvmlDeviceGetPowerUsage(hs[2])") == 0
    assert ask("nvmlDeviceGetCount()") == 4  # until the driver is asked anew
    ask.do("nvmlShutdown(); nvmlInit()")
    assert _uuids(ask) == [all_uuids[0], all_uuids[2], all_uuids[3]]
    assert ask.code(f"nvmlDeviceGetHandleByUUID('{all_uuids[1]}')") == 6
    node.state.gpus[1].recover()
    ask.do("nvmlShutdown(); nvmlInit()")
    assert _uuids(ask) == all_uuids


def test_a_gpu_with_an_unknown_error_is_lost_too(node: Standin, ask: Asker) -> None:
    node.state.gpus[0].lose(999)
    assert ask.code("nvmlDeviceGetHandleByIndex(0)") == 999
    ask.do("nvmlShutdown(); nvmlInit()")
    assert ask("nvmlDeviceGetCount()") == 3


def test_a_gpu_that_needs_a_reset_stays_enumerated(node: Standin, ask: Asker) -> None:
    node.state.gpus[2].lose(16)
    ask.do("nvmlShutdown(); nvmlInit(); h2 = nvmlDeviceGetHandleByIndex(2)")
    assert ask("nvmlDeviceGetCount()") == 4
    assert ask.code("nvmlDeviceGetUtilizationRates(h2)") == 16


def test_indices_shuffle_at_the_next_initialisation(node: Standin, ask: Asker) -> None:
    before = _uuids(ask)
    node.state.order([2, 0, 3])
    assert _uuids(ask) == before
    ask.do("nvmlInit()")  # counted: the driver is not asked anew
    assert _uuids(ask) == before
    ask.do("nvmlShutdown(); nvmlShutdown(); nvmlInit()")
    assert _uuids(ask) == [before[2], before[0], before[3]]
    found = f"nvmlDeviceGetHandleByUUID('{before[3]}')"
    assert ask(f"nvmlDeviceGetIndex({found})") == 2


def test_a_node_without_gpus_initialises(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=0) as node, Asker(node.env) as ask:
        assert ask("nvmlDeviceGetCount()") == 0


EVENTS = """
events = nvmlEventSetCreate()
def wait(ms):
    try:
        data = nvmlEventSetWait_v2(events, ms)
    except NVMLError as error:
        return error.value
    return (nvmlDeviceGetIndex(data.device), data.eventType, data.eventData)
"""


def test_xids_arrive_in_order_after_registration(node: Standin, ask: Asker) -> None:
    gpus = node.state.gpus
    ask.do(EVENTS)
    gpus[0].xid(13)
    assert ask("nvmlDeviceGetSupportedEventTypes(h)") & 8
    ask.do(
        "for i in (0, 2): nvmlDeviceRegisterEvents(hs[i], nvmlEventTypeXidCriticalError, events)"
    )
    gpus[2].xid(79)
    gpus[1].xid(48)  # nobody registered for this one
    gpus[0].xid(31)
    node.state.event(1, 0, 0)  # nor for this type
    assert [ask("wait(2000)") for _ in range(2)] == [[2, 8, 79], [0, 8, 31]]
    begin = time.monotonic()
    assert ask("wait(150)") == 10
    assert time.monotonic() - begin >= 0.15
    assert ask.code("nvmlDeviceRegisterEvents(h, 0x4000, events)") == 3
    gpus[0].xid(94)  # the set is still usable
    assert ask("wait(2000)") == [0, 8, 94]
    ask.do("nvmlEventSetFree(events)")


def test_a_waiting_set_wakes_at_once_and_burns_nothing(node: Standin, ask: Asker) -> None:
    ask.do(EVENTS + "nvmlDeviceRegisterEvents(h, nvmlEventTypeXidCriticalError, events)")
    cpu_s = ask("time.process_time()")
    ask.start("(wait(30_000), time.monotonic_ns())")
    time.sleep(0.4)
    begin_ns = time.monotonic_ns()
    node.state.gpus[0].xid(119)
    answer, at_ns = ask.finish()
    assert answer == [0, 8, 119]
    assert at_ns - begin_ns < 0.3e9
    assert ask("time.process_time()") - cpu_s < 0.1


def test_a_waiting_set_hears_that_its_gpu_is_lost(node: Standin, ask: Asker) -> None:
    ask.do(EVENTS + "nvmlDeviceRegisterEvents(h, nvmlEventTypeXidCriticalError, events)")
    ask.start("wait(30_000)")
    node.state.gpus[1].lose()  # not in the set
    time.sleep(0.05)
    node.state.gpus[0].lose()
    assert ask.finish() == 15


def test_an_overrun_of_the_queue_drops_the_oldest(node: Standin, ask: Asker) -> None:
    ask.do(EVENTS + "nvmlDeviceRegisterEvents(h, nvmlEventTypeXidCriticalError, events)")
    for number in range(300):
        node.state.gpus[0].xid(number)
    got = ask("[wait(0) for _ in range(257)]")
    assert [row[2] for row in got[:256]] == list(range(44, 300))
    assert got[256] == 10


def _slice(index: int) -> MigDevice:
    return MigDevice(
        uuid=f"MIG-00000000-0000-4000-8000-{index:012x}",
        gpu_instance=index + 7,
        memory_total_bytes=(9 + index) * GIB,
        memory_used_bytes=index * GIB,
        slices=1 + index,
        multiprocessors=16 * (1 + index),
    )


def test_mig_devices(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    assert ask("nvmlDeviceGetMigMode(h)") == [0, 0]
    assert ask("nvmlDeviceGetMaxMigDeviceCount(h)") == 0
    assert ask.code("nvmlDeviceGetMigDeviceHandleByIndex(h, 0)") == 3
    gpu.mig([_slice(0), _slice(1)])
    assert ask("nvmlDeviceGetMigMode(h)") == [1, 1]
    assert ask("nvmlDeviceGetMaxMigDeviceCount(h)") == 7
    ask.do("m = [nvmlDeviceGetMigDeviceHandleByIndex(h, i) for i in (0, 1)]")
    assert ask.code("nvmlDeviceGetMigDeviceHandleByIndex(h, 2)") == 6
    assert ask.code("nvmlDeviceGetMigDeviceHandleByIndex(h, 7)") == 2
    assert ask("[nvmlDeviceGetGpuInstanceId(x) for x in m]") == [7, 8]
    assert ask("[nvmlDeviceGetComputeInstanceId(x) for x in m]") == [0, 0]
    assert ask("[nvmlDeviceIsMigDeviceHandle(x).value for x in (h, *m)]") == [0, 1, 1]
    assert ask("[nvmlDeviceGetUUID(x) for x in m]") == [_slice(0).uuid, _slice(1).uuid]
    assert (
        ask(f"nvmlDeviceGetUUID(nvmlDeviceGetHandleByUUID('{_slice(1).uuid}'))") == _slice(1).uuid
    )
    parent = "nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m[1])"
    assert ask(f"nvmlDeviceGetIndex({parent})") == 0
    assert ask("nvmlDeviceGetMemoryInfo(m[1], nvmlMemory_v2)")["used"] == GIB
    attributes = ask("nvmlDeviceGetAttributes(m[1])")
    assert (attributes["multiprocessorCount"], attributes["memorySizeMB"]) == (32, 10 * 1024)
    assert ask.code("nvmlDeviceGetGpuInstanceId(h)") == 2
    assert ask.code("nvmlDeviceGetPowerUsage(m[0])") == 3
    for call in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEncoderUtilization"):
        assert ask.code(f"{call}(h)") == 3
    assert ask.code("nvmlDeviceGetRemappedRows(h)") == 3
    assert ask.code("nvmlDeviceGetProcessesUtilizationInfo(h, 0)") == 3


def test_mig_processes_belong_to_their_instance(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    gpu.mig([_slice(0), _slice(1)])
    gpu.processes(
        [
            Process(pid=1, used_bytes=1, gpu_instance=7, compute_instance=0),
            Process(pid=2, used_bytes=2, gpu_instance=8, compute_instance=0),
        ]
    )
    rows = ask("nvmlDeviceGetComputeRunningProcesses(h)")
    assert [(row["pid"], row["gpuInstanceId"]) for row in rows] == [(1, 7), (2, 8)]
    rows = ask("nvmlDeviceGetComputeRunningProcesses(nvmlDeviceGetMigDeviceHandleByIndex(h, 1))")
    assert [row["pid"] for row in rows] == [2]


def test_mig_activity_is_the_instances(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    gpu.mig([_slice(0), _slice(1)])
    gpu.run(gr=1.0)
    gpu.run_mig(0, {Count.GR: 0.25})
    gpu.run_mig(1, {Count.GR: 0.75, Count.SM: 0.5})
    ask.do(
        "m = nvmlDeviceGetMigDeviceHandleByIndex(h, 1)\n"
        "s = [nvmlGpmSampleAlloc() for _ in range(4)]\n"
        "def take(x, y):\n"
        "    nvmlGpmMigSampleGet(h, 7, x)\n"
        "    nvmlGpmSampleGet(m, y)\n"
        "def value(x, y, metric):\n"
        "    get = c_nvmlGpmMetricsGet_t()\n"
        "    get.version, get.numMetrics, get.sample1, get.sample2 = 1, 1, x, y\n"
        "    get.metrics[0].metricId = metric\n"
        "    nvmlGpmMetricsGet(get)\n"
        "    return get.metrics[0].nvmlReturn or get.metrics[0].value\n"
        "take(s[0], s[1]); time.sleep(0.12); take(s[2], s[3])"
    )
    assert ask("value(s[0], s[2], 1)") == pytest.approx(25.0)
    assert ask("[value(s[1], s[3], metric) for metric in (1, 2)]") == pytest.approx([75.0, 50.0])
    assert ask("value(s[1], s[3], 20)") == 3  # PCIe belongs to the whole GPU
    assert ask.code("value(s[0], s[3], 1)") == 2  # two instances
    assert ask.code("nvmlGpmMigSampleGet(h, 99, s[0])") == 6
    assert ask.code("nvmlGpmMigSampleGet(hs[1], 7, s[0])") == 3


def test_handles_of_an_old_mig_layout_are_invalid(node: Standin, ask: Asker) -> None:
    gpu = node.state.gpus[0]
    gpu.mig([_slice(0)])
    ask.do("m = nvmlDeviceGetMigDeviceHandleByIndex(h, 0)")
    gpu.mig([_slice(0), _slice(1)])
    assert ask.code("nvmlDeviceGetUUID(m)") == 2
    gpu.mig(None)
    assert ask("nvmlDeviceGetMigMode(h)") == [0, 0]
    assert ask.code("nvmlDeviceGetUtilizationRates(h)") == 0
