"""Every table of a recording, in one explicit tuple.

Columns are added, never renamed or given another meaning; each addition raises VERSION. Older
recordings read as NULL in the new columns, newer ones are refused in a sentence.
"""

from __future__ import annotations

from whyidle.schema.agent import AgentSelf, ClockReading, CollectorError, Tick
from whyidle.schema.fabric import (
    EthtoolPause,
    EthtoolPort,
    GpudirectInfo,
    GpuDistance,
    LinkEvent,
    PcieLink,
    RdmaInfo,
    RdmaPort,
    RdmaTraffic,
    TcpSocket,
)
from whyidle.schema.gpu import (
    GpuActivity,
    GpuInfo,
    GpuProcess,
    GpuState,
    GpuTotal,
    GpuTraffic,
)
from whyidle.schema.gpu_link import GpuEvent, NvLink
from whyidle.schema.machine import (
    BlockDevice,
    CgroupCpu,
    Cpu,
    NetLink,
    Pressure,
    Vmstat,
)
from whyidle.schema.memory import CgroupMemory, NumaNode
from whyidle.schema.probe import Probe, ProbeEvent, ProbeInfo, ProbeLoader
from whyidle.schema.process import Process, ProcessInfo
from whyidle.schema.run import RunInfo, TraceStep
from whyidle.schema.settled import LedgerMinute, LedgerTotal, Settled, SettledGpu, Settlement
from whyidle.schema.storage import (
    FileUse,
    Mount,
    NfsMount,
    NfsOp,
    NfsTransport,
    NvmeController,
    NvmeNamespace,
    NvmePath,
)
from whyidle.table import Row

VERSION = 1

# Sorted by name, so that a forgotten or doubled table shows.
TABLES: tuple[type[Row], ...] = (
    AgentSelf,
    BlockDevice,
    CgroupCpu,
    CgroupMemory,
    ClockReading,
    CollectorError,
    Cpu,
    EthtoolPause,
    EthtoolPort,
    FileUse,
    GpuActivity,
    GpuDistance,
    GpuEvent,
    GpuInfo,
    GpuProcess,
    GpuState,
    GpuTotal,
    GpuTraffic,
    GpudirectInfo,
    LedgerMinute,
    LedgerTotal,
    LinkEvent,
    Mount,
    NetLink,
    NfsMount,
    NfsOp,
    NfsTransport,
    NumaNode,
    NvLink,
    NvmeController,
    NvmeNamespace,
    NvmePath,
    PcieLink,
    Pressure,
    Probe,
    ProbeEvent,
    ProbeInfo,
    ProbeLoader,
    Process,
    ProcessInfo,
    RdmaInfo,
    RdmaPort,
    RdmaTraffic,
    RunInfo,
    Settled,
    SettledGpu,
    Settlement,
    TcpSocket,
    Tick,
    TraceStep,
    Vmstat,
)

__all__ = [
    "TABLES",
    "VERSION",
    "AgentSelf",
    "BlockDevice",
    "CgroupCpu",
    "CgroupMemory",
    "ClockReading",
    "CollectorError",
    "Cpu",
    "EthtoolPause",
    "EthtoolPort",
    "FileUse",
    "GpuActivity",
    "GpuDistance",
    "GpuEvent",
    "GpuInfo",
    "GpuProcess",
    "GpuState",
    "GpuTotal",
    "GpuTraffic",
    "GpudirectInfo",
    "LedgerMinute",
    "LedgerTotal",
    "LinkEvent",
    "Mount",
    "NetLink",
    "NfsMount",
    "NfsOp",
    "NfsTransport",
    "NumaNode",
    "NvLink",
    "NvmeController",
    "NvmeNamespace",
    "NvmePath",
    "PcieLink",
    "Pressure",
    "Probe",
    "ProbeEvent",
    "ProbeInfo",
    "ProbeLoader",
    "Process",
    "ProcessInfo",
    "RdmaInfo",
    "RdmaPort",
    "RdmaTraffic",
    "RunInfo",
    "Settled",
    "SettledGpu",
    "Settlement",
    "TcpSocket",
    "Tick",
    "TraceStep",
    "Vmstat",
]
