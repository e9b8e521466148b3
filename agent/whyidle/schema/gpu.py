"""Tables of GPUs, keyed by UUID because indices shuffle. Fields are numbered as in nvml.h."""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import counter, gauge, key, label, table


@table
class GpuInfo:
    """A GPU or MIG device as the driver describes it; read rarely."""

    TABLE: ClassVar[str] = "gpu_info"

    mono_ns: int = key("When it was read.", unit="ns")
    uuid: str = key("NVML UUID of the GPU, or of the MIG device.")
    gpu: int | None = label("NVML index at that time; for a MIG device that of its parent.")
    parent_uuid: str | None = label("GPU that a MIG device is a part of.")
    name: str | None = label("Product name.")
    architecture: str | None = label("Such as hopper.")
    compute_capability: str | None = label("CUDA compute capability, such as 9.0.")
    pci_bus_id: str | None = label("PCI address as sysfs writes it, such as 0000:19:00.0.")
    numa_node: int | None = label("NUMA node of the device.")
    minor: int | None = label("Number of its /dev/nvidia node.")
    serial: str | None = label("Serial number of the board.")
    driver_version: str | None = label("Version of the driver.")
    nvml_version: str | None = label("Version of the library.")
    mig: bool | None = label("Whether MIG is on.")
    gpm: bool | None = label("Whether GPM answers, tried with real samples.")
    memory_total_bytes: int | None = gauge("Device memory.", unit="bytes")
    power_limit_milliwatts: int | None = gauge("Enforced power limit.", unit="milliwatts")
    max_sm_clock_megahertz: int | None = gauge("Highest SM clock.", unit="megahertz")
    max_memory_clock_megahertz: int | None = gauge("Highest memory clock.", unit="megahertz")
    max_pcie_generation: int | None = gauge("Highest PCIe generation of GPU and slot.")
    max_pcie_width: int | None = gauge("Highest PCIe width.")
    nvlinks: int | None = gauge("NVLink links of the device.")
    nvlinks_active: int | None = gauge("NVLink links that are up.")
    multiprocessors: int | None = gauge("SMs; for a MIG device its share.")
    gpu_instance: int | None = label("Number of the GPU instance of a MIG device.")
    compute_instance: int | None = label("Number of the compute instance of a MIG device.")
    gpu_slices: int | None = gauge("Slices of the GPU instance, of the 7 or 8 of the whole GPU.")
    compute_slices: int | None = gauge("Slices of the compute instance.")
    fabric_cluster: str | None = label("UUID of the NVLink domain (nvmlGpuFabricInfo).")
    fabric_clique: int | None = label("Clique in the domain: its GPUs reach each other by NVLink.")
    fabric_state: str | None = label(
        "Registration with the fabric: not_supported, not_started, in_progress or completed."
    )
    fabric_status: int | None = gauge("NVML's code of a completed registration; 0: it succeeded.")
    fabric_health: str | None = label("healthy, unhealthy or limited_capacity.")
    fabric_health_mask: int | None = gauge("Bits of NVML_GPU_FABRIC_HEALTH_MASK.")


@table
class GpuActivity:
    """What a GPU did in one sampling window [t0, t1); consecutive windows of a source touch."""

    TABLE: ClassVar[str] = "gpu_activity"

    mono_ns: int = key("When the window ended.", unit="ns")
    uuid: str = key("NVML UUID of the GPU, or of the MIG device.")
    source: str = label(
        "gpm; without it nvml (the driver's own utilization) and dcgm (a local exporter, if asked "
        "for); trace."
    )
    t0_ns: int | None = gauge(
        "Start of the window; NULL in a first row without GPM, of unknown beginning.", unit="ns"
    )
    t1_ns: int | None = gauge("End of the window.", unit="ns")
    gr_active_ratio: float | None = gauge(
        "Graphics or compute engine busy (GPM 1).", unit="ratio", rounded=True
    )
    sm_active_ratio: float | None = gauge(
        "SMs with a warp, mean over SMs (GPM 2).", unit="ratio", rounded=True
    )
    sm_occupancy_ratio: float | None = gauge(
        "Warps resident of the most (GPM 3).", unit="ratio", rounded=True
    )
    tensor_active_ratio: float | None = gauge(
        "Tensor pipes busy (GPM 5).", unit="ratio", rounded=True
    )
    fp32_active_ratio: float | None = gauge("FP32 pipes busy (GPM 12).", unit="ratio", rounded=True)
    dram_active_ratio: float | None = gauge(
        "Of the peak memory bandwidth (GPM 10).", unit="ratio", rounded=True
    )
    pcie_tx_bytes: int | None = gauge("Sent to the host in the window (GPM 20).", unit="bytes")
    pcie_rx_bytes: int | None = gauge("Got from the host in the window (GPM 21).", unit="bytes")
    nvlink_tx_bytes: int | None = gauge("Sent over NVLink in the window (GPM 61).", unit="bytes")
    nvlink_rx_bytes: int | None = gauge("Got over NVLink in the window (GPM 60).", unit="bytes")
    utilization_ratio: float | None = gauge(
        "Time with a kernel resident, as the driver counts it: over this window without GPM; with "
        "GPM once a second, over its own 1/6 s to 1 s.",
        unit="ratio",
        rounded=True,
    )
    memory_utilization_ratio: float | None = gauge(
        "Time in which memory was read or written, over the same time.",
        unit="ratio",
        rounded=True,
    )


@table
class GpuPipe:
    """Which pipes a GPU kept busy over some seconds [t0, t1): what kind of work it did."""

    TABLE: ClassVar[str] = "gpu_pipe"

    mono_ns: int = key("When the window ended.", unit="ns")
    uuid: str = key("NVML UUID of the GPU, or of the MIG device.")
    source: str = label("gpm or dcgm, as in gpu_activity.")
    t0_ns: int = gauge("Start of the window.", unit="ns")
    t1_ns: int = gauge("End of the window.", unit="ns")
    integer_active_ratio: float | None = gauge(
        "Integer pipes busy (GPM 4).", unit="ratio", rounded=True
    )
    tensor_hmma_ratio: float | None = gauge(
        "Tensor, FP16 and BF16 (GPM 7).", unit="ratio", rounded=True
    )
    tensor_imma_ratio: float | None = gauge("Tensor, integer (GPM 9).", unit="ratio", rounded=True)
    tensor_dfma_ratio: float | None = gauge("Tensor, DFMA (GPM 6).", unit="ratio", rounded=True)
    tensor_dmma_ratio: float | None = gauge("Tensor, DMMA (GPM 8).", unit="ratio", rounded=True)
    fp64_active_ratio: float | None = gauge("FP64 pipes busy (GPM 11).", unit="ratio", rounded=True)
    fp16_active_ratio: float | None = gauge("FP16 pipes busy (GPM 13).", unit="ratio", rounded=True)
    c2c_tx_bytes: int | None = gauge("Sent over chip-to-chip links (GPM 100).", unit="bytes")
    c2c_rx_bytes: int | None = gauge("Got over chip-to-chip links (GPM 101).", unit="bytes")


@table
class GpuTraffic:
    """Byte counters of a GPU's links, read where GPM does not tell of them."""

    TABLE: ClassVar[str] = "gpu_traffic"

    mono_ns: int = key("When it was read.", unit="ns")
    uuid: str = key("NVML UUID of the GPU.")
    pcie_tx_bytes: int | None = counter(
        "Sent to the host (field 197): wraps every 4 GiB.", unit="bytes", bits=32
    )
    pcie_rx_bytes: int | None = counter(
        "Got from the host (field 198): wraps every 4 GiB.", unit="bytes", bits=32
    )
    nvlink_tx_bytes: int | None = counter(
        "Payload sent over all links (field 138, KiB of the driver in bytes).", unit="bytes"
    )
    nvlink_rx_bytes: int | None = counter(
        "Payload received over all links (field 139, KiB of the driver in bytes).", unit="bytes"
    )


@table
class GpuTotal:
    """Totals since boot, where GPU and driver offer them through GPM; read once a second."""

    TABLE: ClassVar[str] = "gpu_total"

    mono_ns: int = key("When it was read.", unit="ns")
    uuid: str = key("NVML UUID of the GPU, or of the MIG device.")
    sm_elapsed_cycles: int | None = counter("SM cycles that passed (GPM 248).")
    sm_active_cycles: int | None = counter("SM cycles with a warp (GPM 249).")
    tensor_active_cycles: int | None = counter("Tensor pipes busy (GPM 250).")
    fp32_active_cycles: int | None = counter("FP32 pipes busy (GPM 259).")
    pcie_tx_bytes: int | None = counter("Sent to the host (GPM 255).", unit="bytes")
    pcie_rx_bytes: int | None = counter("Got from the host (GPM 256).", unit="bytes")


@table
class GpuState:
    """The state of a GPU: power, memory, clocks, temperature, throttling, errors."""

    TABLE: ClassVar[str] = "gpu_state"

    mono_ns: int = key("When it was read.", unit="ns")
    uuid: str = key("NVML UUID of the GPU.")
    nvml_return: int = gauge("NVML's answer when asked: 0 success, 15 the GPU is lost, 16 reset.")
    power_milliwatts: int | None = gauge("Power, as averaged by the driver.", unit="milliwatts")
    power_instant_milliwatts: int | None = gauge("Power now (field 186).", unit="milliwatts")
    power_limit_milliwatts: int | None = gauge("Enforced power limit.", unit="milliwatts")
    energy_millijoules: int | None = counter("Energy since driver load.", unit="millijoules")
    memory_used_bytes: int | None = gauge("Memory allocated, reserve not in it.", unit="bytes")
    memory_free_bytes: int | None = gauge("Memory free.", unit="bytes")
    sm_clock_megahertz: int | None = gauge("SM clock.", unit="megahertz")
    memory_clock_megahertz: int | None = gauge("Memory clock.", unit="megahertz")
    temperature_celsius: int | None = gauge("GPU temperature.", unit="celsius")
    memory_temperature_celsius: int | None = gauge("HBM (field 82).", unit="celsius")
    performance_state: int | None = gauge("P-state, 0 the fastest.")
    event_reasons: int | None = gauge("Bits of nvmlClocksEventReason.")
    sw_power_cap_ns: int | None = counter("Slowed by the power cap (field 74).", unit="ns")
    sync_boost_ns: int | None = counter("Slowed by sync boost (field 76).", unit="ns")
    sw_thermal_ns: int | None = counter("Slowed by software, heat (field 269).", unit="ns")
    hw_thermal_ns: int | None = counter("Slowed by hardware, heat (field 270).", unit="ns")
    hw_power_brake_ns: int | None = counter("Slowed by power brake (field 271).", unit="ns")
    pcie_generation: int | None = gauge("PCIe generation now; drops while the GPU is idle.")
    pcie_width: int | None = gauge("PCIe lanes now; must not drop.")
    pcie_replays: int | None = counter("PCIe replays.", bits=32)
    ecc_corrected: int | None = counter("ECC errors corrected since driver load.")
    ecc_uncorrected: int | None = counter("ECC errors not corrected since driver load.")
    remapped_corrected: int | None = counter("Rows remapped for corrected errors (field 142).")
    remapped_uncorrected: int | None = counter("Rows remapped for uncorrected ones (field 143).")
    remap_pending: bool | None = gauge("Rows wait for a reset to be remapped.")
    remap_failed: bool | None = gauge("A row could not be remapped.")
    recovery_action: int | None = gauge(
        "What the driver asks for (field 230): 0 nothing, 1 reset, 2 reboot, 3 drain P2P, 4 both."
    )


@table
class GpuProcess:
    """A process with a context on a GPU."""

    TABLE: ClassVar[str] = "gpu_process"

    mono_ns: int = key("When it was read.", unit="ns")
    uuid: str = key("NVML UUID of the GPU, or of the MIG device.")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int | None = key("When it started, boot clock; NULL if it had gone.", unit="ns")
    context: str = label("compute, graphics or mps.")
    memory_bytes: int | None = gauge("Device memory that it holds.", unit="bytes")
    sm_utilization_ratio: float | None = gauge("Time it had kernels resident.", unit="ratio")
