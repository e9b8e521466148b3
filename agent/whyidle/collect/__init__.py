"""The collectors, in one explicit list; the order is that of the runs inside a lane."""

from __future__ import annotations

from whyidle.collect.block_device import BLOCK_DEVICE
from whyidle.collect.cgroup_cpu import CGROUP_CPU
from whyidle.collect.cgroup_memory import CGROUP_MEMORY
from whyidle.collect.clocks import CLOCKS
from whyidle.collect.collector import Collector
from whyidle.collect.cpu import CPU
from whyidle.collect.ethtool_port import ETHTOOL_PORT
from whyidle.collect.file_use import FILE_USE
from whyidle.collect.fuse import FUSE
from whyidle.collect.gds import GDS
from whyidle.collect.gpu_activity import GPU_ACTIVITY
from whyidle.collect.gpu_dcgm import GPU_DCGM
from whyidle.collect.gpu_event import GPU_EVENT
from whyidle.collect.gpu_info import GPU_INFO
from whyidle.collect.gpu_nvlink import GPU_NVLINK
from whyidle.collect.gpu_pipe import GPU_PIPE
from whyidle.collect.gpu_process import GPU_PROCESS
from whyidle.collect.gpu_state import GPU_STATE
from whyidle.collect.gpu_total import GPU_TOTAL
from whyidle.collect.irq import IRQ
from whyidle.collect.lustre import LUSTRE
from whyidle.collect.mount import MOUNT
from whyidle.collect.net_link import NET_LINK
from whyidle.collect.nfs import NFS
from whyidle.collect.numa import NUMA
from whyidle.collect.nvme import NVME
from whyidle.collect.parallel_fs import PARALLEL_FS
from whyidle.collect.pcie_gpudirect import GPUDIRECT
from whyidle.collect.pcie_link import PCIE_LINK
from whyidle.collect.pressure import PRESSURE
from whyidle.collect.probe import PROBE
from whyidle.collect.process import PROCESS
from whyidle.collect.process_thread import PROCESS_THREAD
from whyidle.collect.rdma_info import RDMA_INFO
from whyidle.collect.rdma_port import RDMA_PORT
from whyidle.collect.socket_tcp import TCP_SOCKET
from whyidle.collect.topology import TOPOLOGY
from whyidle.collect.vmstat import VMSTAT
from whyidle.collect.xid import XID

ALL: tuple[Collector, ...] = (
    CLOCKS,
    GPU_ACTIVITY,
    PROBE,
    GPU_STATE,
    GPU_TOTAL,
    GPU_PIPE,
    GPU_EVENT,
    GPU_DCGM,
    GPU_PROCESS,
    GPU_INFO,
    GPU_NVLINK,
    CPU,
    PRESSURE,
    VMSTAT,
    NUMA,
    XID,
    BLOCK_DEVICE,
    NET_LINK,
    PROCESS,
    PROCESS_THREAD,
    CGROUP_CPU,
    CGROUP_MEMORY,
    MOUNT,
    FILE_USE,
    NVME,
    NFS,
    RDMA_PORT,
    RDMA_INFO,
    ETHTOOL_PORT,
    PCIE_LINK,
    TOPOLOGY,
    GPUDIRECT,
    IRQ,
    TCP_SOCKET,
    LUSTRE,
    FUSE,
    GDS,
    PARALLEL_FS,
)
