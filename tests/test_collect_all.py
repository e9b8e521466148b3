"""All collectors together: the list, the tables that they cover, and surviving any answer."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fabric_make
import storage_tree
from fabric_kit import lay
from fabric_wire import connection, link_report
from job import LAUNCHER, RANK0, RANK1, job, put
from probe_pages import make_page, with_group
from trees import BEGIN_NS, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect import ALL
from whyidle.collect.collector import Collect, NoData, Problem
from whyidle.faults import ALL_FAULTS, FaultHost
from whyidle.host import Answer, Argument, Host, LiveHost, NvmlError
from whyidle.schema import (
    TABLES,
    FileUse,
    GdsGpu,
    GdsPeer,
    GpuActivity,
    LinkEvent,
    LustreTarget,
    Mount,
    NfsTransport,
    NvmeController,
    NvmeNamespace,
    NvmePath,
    ProbeEvent,
    ProbeInfo,
    Process,
    ProcessInfo,
    RdmaPort,
)
from whyidle.table import Row, replaced, table_of

UUIDS = ("GPU-a", "GPU-b")
# Tables that others write: the sampler about itself, readers of traces, and the keeper's ledger.
LEDGER = {"ledger_minute", "ledger_total", "settled", "settled_gpu", "settlement"}
RARE_STORAGE = (
    FileUse,
    GdsGpu,
    GdsPeer,
    LustreTarget,
    Mount,
    NfsTransport,
    NvmeController,
    NvmeNamespace,
    NvmePath,
)
NOT_COLLECTED = {"agent_self", "collector_error", "run_info", "tick", "trace_step"} | LEDGER


class ModelNvml:
    """Two GPUs that do the same for ever; GPM windows of 125 ms."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def answer(self, call: str, *args: Argument) -> Answer:
        """Answer as whyidle.nvml does."""
        now = self._clock.mono_ns()
        if call == "gpus":
            return tuple((uuid, index, None) for index, uuid in enumerate(UUIDS))
        if call == "gpm":
            shares = (50.0, 40.0, 30.0, 20.0, 10.0, 5.0, 1.0, 2.0)
            # It tells nothing of NVLink, so that the counters are read.
            return (now - 125_000_000, now, (*shares, None, None, *shares, 3.0))
        if call == "gpm_pipes":
            return (now - 5_000_000_000, now, tuple(float(number) for number in range(9)))
        if call == "gpm_values":
            return tuple(float(now) for _ in args[1:])
        if call == "xids":
            return ((UUIDS[0], 79, None),)
        if call == "LinkFieldValues":
            return tuple(1 for _ in args[2:])
        if call == "Processes":
            pid = RANK0 if args[0] == UUIDS[0] else RANK1
            return ((pid, 1 << 30),) if args[1] == "compute" else ()
        if call == "ProcessUtilization":
            return ()
        if call == "FieldValues":
            return tuple(3 for _ in args[1:])
        if call in ("UtilizationRates", "CudaComputeCapability"):
            return (9, 0)
        if call == "MemoryInfo":
            return (100, 1, 90, 9)
        if call == "PciBusId":
            return "00000000:19:00.0"
        if call in ("Name", "Serial", "DriverVersion", "NVMLVersion"):
            return "text"
        if call == "gpm_worked":
            return True
        if call == "MinorNumber":
            raise NvmlError(3, call, "Not Supported")
        return 7

    def close(self) -> None:
        """Hold nothing."""


def machine(root: Path) -> None:
    """A node with a job on it; made up, in the kernel's own formats."""
    storage_tree.node().put(root)
    put(root, job())
    # The drives are those of the storage.
    fabric = fabric_make.machine()
    lay(root, {at: what for at, what in fabric.items() if not at.startswith("sys/class/nvme")})
    # A page must belong to the user of its process, and files of tests belong to who runs them.
    status = root / f"proc/{RANK0}/status"
    uid = os.geteuid()
    status.write_text(status.read_text().replace("1000\t1001", f"{uid}\t{uid}"))
    base = "sys/fs/cgroup"
    task = "system.slice/slurmstepd.scope/job_4/step_0/user/task_0"
    psi = "some avg10=0 avg60=0 avg300=0 total=9\nfull avg10=0 avg60=0 avg300=0 total=4\n"
    write(
        root,
        {
            "run/whyidle/probe/a.page": with_group(make_page(pid=RANK0, start_ns=50 * NS_PER_S)),
            "dev/kmsg": "6,1,5,-;usb 1-1: new device\n",
            "proc/stat": "cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\nprocs_running 1\n",
            "proc/pressure/cpu": psi,
            "proc/pressure/io": psi,
            "proc/pressure/memory": psi,
            "proc/vmstat": "pgmajfault 5\nworkingset_refault_file 6\nnr_dirty 7\n",
            "proc/net/dev": "Inter-|\n face |\n eth0: 1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7\n",
            "sys/class/net/eth0/device/vendor": "0x15b3\n",
            "sys/class/net/eth0/operstate": "up\n",
            f"proc/{RANK0}/mountinfo": storage_tree.MOUNTINFO,
            f"proc/{RANK0}/fdinfo/7": "pos:\t0\nflags:\t0100000\nmnt_id:\t40\nino:\t3\n",
            f"{base}/cgroup.procs": "",
            f"{base}/{task}/cpu.stat": "usage_usec 5\nnr_periods 1\nnr_throttled 1\n",
            f"{base}/{task}/cpu.max": "100000 100000\n",
            f"{base}/{task}/cpu.pressure": psi,
            f"{base}/{task}/memory.current": "4096\n",
            "sys/bus/pci/devices/0000:1a:00.0/msi_irqs/41": "msix\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 1 kB\n",
            "sys/devices/system/node/node0/numastat": "numa_hit 5\n",
        },
    )


class LinkDown:
    """Reports again and again that a link is down."""

    def read(self) -> list[str]:
        """The report."""
        return [link_report("eth0", 4, up=False)]

    def close(self) -> None:
        """Hold nothing."""


def live(root: Path, clock: VirtualClock) -> LiveHost:
    return LiveHost(
        str(root),
        clock,
        nvml=ModelNvml(clock),
        askers={
            "connections": lambda: (connection(1, port=4420).hex(),),
            "ethtool_names": lambda name: ("rx_discards_phy", "rx_prio3_pause"),
            "ethtool_values": lambda name, count, *places: tuple(7 for _ in places),
            "socket_inodes": lambda pid: (),
            "clock": lambda: (clock.mono_ns(), clock.boot_ns(), clock.wall_ns(), 1, 2, 3, True),
            "open_files": lambda pid: ((7, "/data/train.bin"),) if pid == RANK0 else (),
            "dcgm": lambda: 'DCGM_FI_PROF_SM_ACTIVE{UUID="GPU-a"} 0.5\n',
            "gpm_works": lambda: UUIDS,
            "watched": lambda: {"gpu": (RANK0, RANK1), "commands": (LAUNCHER,)},
        },
        sources={"links": LinkDown()},
    )


def test_the_list() -> None:
    names = [collector.name for collector in ALL]
    assert len(set(names)) == len(names)
    for collector in ALL:
        # NVML can hang and /proc/PID can block: neither may hold up the loop.
        expected = "nvml" if collector.name.startswith("gpu") else None
        assert expected is None or collector.thread == expected
    fast = [collector.name for collector in ALL if collector.lane == "fast"]
    assert fast == ["gpu_activity", "probe", "rdma_port"]


def test_every_table_is_written_by_some_collector(tmp_path: Path) -> None:
    machine(tmp_path)
    host = live(tmp_path, VirtualClock(BEGIN_NS))
    written = {
        type(item).TABLE
        for collector in ALL
        for item in collector.make()(host)
        if not isinstance(item, Problem)
    }
    host.close()
    # That a thread runs shows at the second look.
    assert written == {table_of(row).name for row in TABLES} - NOT_COLLECTED - {"process_thread"}


# What a collector may raise about a machine. Anything else, such as a TypeError, is a bug in it.
OF_THE_MACHINE = (OSError, ValueError, NvmlError, NoData, RuntimeError)


def attempt(collect: Collect, host: Host) -> list[Row]:
    rows: list[Row] = []
    with suppress(*OF_THE_MACHINE):
        rows.extend(item for item in collect(host) if not isinstance(item, Problem))
    return rows


def told(rows: list[Row]) -> set[Any]:
    """Rows without what is told once or in a rhythm of its own: profiles, events, slow values."""
    rare = (*RARE_STORAGE, LinkEvent, ProbeEvent, ProbeInfo, ProcessInfo, RdmaPort)
    return {_without_slow(row) for row in rows if not isinstance(row, rare)}


def _without_slow(row: Row) -> Row:
    if isinstance(row, Process):
        return replaced(row, rss_bytes=None, voluntary_switches=None, involuntary_switches=None)
    if isinstance(row, GpuActivity):
        return replaced(row, utilization_ratio=None, memory_utilization_ratio=None)
    return row


@pytest.mark.parametrize("seed", range(25))
def test_faults_pass_and_leave_nothing_behind(tmp_path: Path, seed: int) -> None:
    machine(tmp_path)
    clock = VirtualClock(BEGIN_NS)
    inner = live(tmp_path, clock)
    faulty = FaultHost(inner, ALL_FAULTS, seed, hang=clock.advance, step=clock.step_wall)
    made = {collector.name: collector.make() for collector in ALL}
    for _ in range(40):
        for collect in made.values():
            for row in attempt(collect, faulty):
                spec = table_of(type(row))
                for column in spec.columns:
                    assert column.nullable or getattr(row, column.name) is not None
        clock.advance(NS_PER_S)
    assert faulty.injected
    clock.advance(1200 * NS_PER_S)  # all processes are looked at anew after ten minutes
    inner.forget("")
    for collect in made.values():
        attempt(collect, inner)  # a first clean run may still be letting go of what was lost
    clock.advance(NS_PER_S)
    for name, collect in made.items():
        fresh = next(collector for collector in ALL if collector.name == name).make()
        attempt(fresh, inner)
        assert told(attempt(collect, inner)) == told(attempt(fresh, inner)), f"{name}, seed {seed}"
    inner.close()
