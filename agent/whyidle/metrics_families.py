"""Every family of metrics that the exporter serves, declared once; docs/metrics.md is made of it.

Names and units are Prometheus' own: base units, `_total` for counters, one family for one thing.
Values carry `gpu` (index) and `uuid`; what describes a GPU is in `whyidle_gpu_info`. `peer` is the
series of DCGM exporter or node_exporter that a dashboard asks for the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge"]

# A row that is older than this is no answer to how things are: after two misses of its lane.
STALE_S = 15
STALE_RARE_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family that is computed: counters have no `_total` in `name`, as in OpenMetrics."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    peer: str = ""

    @property
    def series(self) -> str:
        """Name of its series."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled(Family):
    """A family that shows the newest rows of a table, times `scale`.

    `keys` are the columns behind `labels`. With more than one column, each is a value of the label
    `by`. `mean` families are averages over the windows since the page before, `sum` ones add
    windows up from when the keeper began.
    """

    table: str
    columns: tuple[tuple[str, str], ...]
    keys: tuple[str, ...] = ("uuid",)
    by: str = ""
    scale: float = 1.0
    stale_s: int = STALE_S
    way: Literal["newest", "mean", "sum"] = "newest"


def _activity(name: str, column: str, meaning: str, peer: str) -> Sampled:
    return Sampled(
        name=f"whyidle_gpu_{name}_ratio",
        kind="gauge",
        meaning=f"{meaning}, mean of the last windows, 0 to 1.",
        labels=("gpu", "uuid"),
        peer=peer,
        table="gpu_activity",
        columns=((column, ""),),
        way="mean",
    )


def _gpu(
    name: str, kind: Kind, column: str, meaning: str, peer: str = "", scale: float = 1.0
) -> Sampled:
    return Sampled(
        name=f"whyidle_gpu_{name}",
        kind=kind,
        meaning=meaning,
        labels=("gpu", "uuid"),
        peer=peer,
        table="gpu_state",
        columns=((column, ""),),
        scale=scale,
    )


def _bytes(name: str, column: str, meaning: str, peer: str) -> Sampled:
    return Sampled(
        name=f"whyidle_gpu_{name}_bytes",
        kind="counter",
        meaning=f"{meaning}, summed over windows since the keeper began; needs GPM.",
        labels=("gpu", "uuid"),
        peer=f"{peer}, which is a rate",
        table="gpu_activity",
        columns=((column, ""),),
        way="sum",
    )


def _device(
    name: str, column: str, meaning: str, peer: str, scale: float = 1.0, table: str = "block_device"
) -> Sampled:
    return Sampled(
        name=f"whyidle_node_{name}",
        kind="counter",
        meaning=meaning,
        labels=("device",),
        peer=peer,
        table=table,
        columns=((column, ""),),
        keys=("device",) if table == "block_device" else ("interface",),
        scale=scale,
    )


SAMPLED: tuple[Sampled, ...] = (
    _activity(
        "graphics_active",
        "gr_active_ratio",
        "Graphics or compute engine busy",
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    ),
    _activity("sm_active", "sm_active_ratio", "SMs with a warp", "DCGM_FI_PROF_SM_ACTIVE"),
    _activity("sm_occupancy", "sm_occupancy_ratio", "Resident warps", "DCGM_FI_PROF_SM_OCCUPANCY"),
    _activity(
        "tensor_active",
        "tensor_active_ratio",
        "Tensor pipes busy",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    ),
    _activity(
        "fp32_active", "fp32_active_ratio", "FP32 pipes busy", "DCGM_FI_PROF_PIPE_FP32_ACTIVE"
    ),
    _activity(
        "dram_active", "dram_active_ratio", "Memory bandwidth used", "DCGM_FI_PROF_DRAM_ACTIVE"
    ),
    _activity(
        "utilization",
        "utilization_ratio",
        "Time with a kernel resident",
        "DCGM_FI_DEV_GPU_UTIL / 100",
    ),
    _activity(
        "memory_utilization",
        "memory_utilization_ratio",
        "Time in which memory was read or written",
        "DCGM_FI_DEV_MEM_COPY_UTIL / 100",
    ),
    _bytes("pcie_transmit", "pcie_tx_bytes", "Sent to the host", "DCGM_FI_PROF_PCIE_TX_BYTES"),
    _bytes("pcie_receive", "pcie_rx_bytes", "Got from the host", "DCGM_FI_PROF_PCIE_RX_BYTES"),
    _bytes(
        "nvlink_transmit",
        "nvlink_tx_bytes",
        "Sent over all NVLink links",
        "DCGM_FI_PROF_NVLINK_TX_BYTES",
    ),
    _bytes(
        "nvlink_receive",
        "nvlink_rx_bytes",
        "Got over all NVLink links",
        "DCGM_FI_PROF_NVLINK_RX_BYTES",
    ),
    _gpu("power_watts", "gauge", "power_milliwatts", "Power.", "DCGM_FI_DEV_POWER_USAGE", 1e-3),
    _gpu(
        "power_limit_watts",
        "gauge",
        "power_limit_milliwatts",
        "Enforced power limit.",
        "DCGM_FI_DEV_ENFORCED_POWER_LIMIT",
        1e-3,
    ),
    _gpu(
        "energy_joules",
        "counter",
        "energy_millijoules",
        "Energy since the driver was loaded.",
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION / 1000",
        1e-3,
    ),
    _gpu(
        "memory_used_bytes",
        "gauge",
        "memory_used_bytes",
        "Device memory allocated.",
        "DCGM_FI_DEV_FB_USED * 1048576",
    ),
    _gpu(
        "memory_free_bytes",
        "gauge",
        "memory_free_bytes",
        "Device memory free.",
        "DCGM_FI_DEV_FB_FREE * 1048576",
    ),
    _gpu(
        "sm_clock_hertz",
        "gauge",
        "sm_clock_megahertz",
        "SM clock.",
        "DCGM_FI_DEV_SM_CLOCK * 1000000",
        1e6,
    ),
    _gpu(
        "memory_clock_hertz",
        "gauge",
        "memory_clock_megahertz",
        "Memory clock.",
        "DCGM_FI_DEV_MEM_CLOCK * 1000000",
        1e6,
    ),
    _gpu(
        "temperature_celsius",
        "gauge",
        "temperature_celsius",
        "Temperature.",
        "DCGM_FI_DEV_GPU_TEMP",
    ),
    _gpu(
        "memory_temperature_celsius",
        "gauge",
        "memory_temperature_celsius",
        "Temperature of its memory.",
        "DCGM_FI_DEV_MEMORY_TEMP",
    ),
    Sampled(
        name="whyidle_gpu_clock_limited_seconds",
        kind="counter",
        meaning="Time in which something held the clocks down.",
        labels=("gpu", "uuid"),
        peer="DCGM_FI_DEV_POWER_VIOLATION, DCGM_FI_DEV_THERMAL_VIOLATION",
        table="gpu_state",
        by="reason",
        columns=(
            ("sw_power_cap_ns", "power_cap"),
            ("sync_boost_ns", "sync_boost"),
            ("sw_thermal_ns", "software_thermal"),
            ("hw_thermal_ns", "hardware_thermal"),
            ("hw_power_brake_ns", "power_brake"),
        ),
        scale=1e-9,
    ),
    _gpu(
        "pcie_replays",
        "counter",
        "pcie_replays",
        "PCIe replays.",
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    ),
    _gpu(
        "pcie_link_generation",
        "gauge",
        "pcie_generation",
        "PCIe generation now; drops while the GPU is idle.",
        "DCGM_FI_DEV_PCIE_LINK_GEN",
    ),
    _gpu(
        "pcie_link_lanes",
        "gauge",
        "pcie_width",
        "PCIe lanes now.",
        "DCGM_FI_DEV_PCIE_LINK_WIDTH",
    ),
    Sampled(
        name="whyidle_gpu_ecc_errors",
        kind="counter",
        meaning="ECC errors since the driver was loaded.",
        labels=("gpu", "uuid"),
        peer="DCGM_FI_DEV_ECC_SBE_VOL_TOTAL, DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        table="gpu_state",
        by="type",
        columns=(("ecc_corrected", "corrected"), ("ecc_uncorrected", "uncorrected")),
    ),
    _gpu(
        "row_remap_failed",
        "gauge",
        "remap_failed",
        "1 if a memory row could not be remapped.",
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    ),
    _gpu(
        "row_remap_pending",
        "gauge",
        "remap_pending",
        "1 if memory rows wait for a reset to be remapped.",
        "DCGM_FI_DEV_ROW_REMAP_PENDING",
    ),
    _gpu(
        "recovery_action",
        "gauge",
        "recovery_action",
        "What the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset.",
        "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION",
    ),
    Sampled(
        name="whyidle_node_cpu_seconds",
        kind="counter",
        meaning="Time of all CPUs together.",
        peer="node_cpu_seconds_total, summed over cpu",
        table="cpu",
        keys=(),
        by="mode",
        columns=(
            ("user_ns", "user"),
            ("system_ns", "system"),
            ("interrupt_ns", "interrupt"),
            ("steal_ns", "steal"),
            ("iowait_ns", "iowait"),
            ("idle_ns", "idle"),
        ),
        scale=1e-9,
    ),
    Sampled(
        name="whyidle_node_pressure_waiting_seconds",
        kind="counter",
        meaning="Time in which some task of the node or cgroup waited for a resource.",
        labels=("resource", "cgroup"),
        peer="node_pressure_*_waiting_seconds_total",
        table="pressure",
        keys=("resource", "cgroup"),
        columns=(("some_ns", ""),),
        scale=1e-9,
    ),
    Sampled(
        name="whyidle_node_pressure_stalled_seconds",
        kind="counter",
        meaning="Time in which all tasks of the node or cgroup waited for a resource.",
        labels=("resource", "cgroup"),
        peer="node_pressure_*_stalled_seconds_total",
        table="pressure",
        keys=("resource", "cgroup"),
        columns=(("full_ns", ""),),
        scale=1e-9,
    ),
    _device("disk_read_bytes", "read_bytes", "Bytes read.", "node_disk_read_bytes_total"),
    _device("disk_written_bytes", "write_bytes", "Bytes written.", "node_disk_written_bytes_total"),
    _device(
        "disk_read_time_seconds",
        "read_ms",
        "Time of reads, summed over them.",
        "node_disk_read_time_seconds_total",
        1e-3,
    ),
    _device(
        "disk_io_time_seconds",
        "busy_ms",
        "Time with a request in flight.",
        "node_disk_io_time_seconds_total",
        1e-3,
    ),
    _device(
        "network_receive_bytes",
        "rx_bytes",
        "Bytes received, in the network namespace of the agent.",
        "node_network_receive_bytes_total",
        table="net_link",
    ),
    _device(
        "network_transmit_bytes",
        "tx_bytes",
        "Bytes sent, in the network namespace of the agent.",
        "node_network_transmit_bytes_total",
        table="net_link",
    ),
    Sampled(
        name="whyidle_agent_cpu_seconds",
        kind="counter",
        meaning="CPU time that the agent itself used.",
        labels=("part",),
        table="agent_self",
        keys=("part",),
        columns=(("cpu_ns", ""),),
        scale=1e-9,
    ),
    Sampled(
        name="whyidle_agent_resident_memory_bytes",
        kind="gauge",
        meaning="Memory that the agent itself holds.",
        labels=("part",),
        table="agent_self",
        keys=("part",),
        columns=(("rss_bytes", ""),),
    ),
    Sampled(
        name="whyidle_agent_written_bytes",
        kind="counter",
        meaning="Bytes that the agent wrote to its recording.",
        labels=("part",),
        table="agent_self",
        keys=("part",),
        columns=(("written_bytes", ""),),
    ),
    Sampled(
        name="whyidle_agent_lost_rows",
        kind="counter",
        meaning="Rows that could not be written, as when the disk was full.",
        labels=("part",),
        table="agent_self",
        keys=("part",),
        columns=(("rows_lost", ""),),
    ),
)
