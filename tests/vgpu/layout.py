"""The stand-in library's shared file as ctypes structures: the mirror of nvml/state.h.

`tests/test_standin_nvml_build.py` compares every offset with the C compiler's. Units last in names.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_double, c_int32, c_int64, c_uint8, c_uint32, c_uint64
from enum import IntEnum

MAGIC = 0x4C4D564E4E415453
VERSION = 1
GPUS = 16
LINKS = 36
PROCESSES = 64
MIGS = 8
FAULTS = 32
EVENTS = 256
FUNCTIONS = 192
SLOTS = 128
METRICS = 512
ABSENT = 0xFFFFFFFF
ANY_GPU = 0xFFFFFFFF
FOREVER = 0xFFFFFFFFFFFFFFFF


class Count(IntEnum):
    """Cumulative quantities of a GPU. Activity is in ns (times a share), traffic in bytes."""

    GR = 0
    SM = 1
    OCCUPANCY = 2
    INTEGER = 3
    TENSOR = 4
    DFMA = 5
    HMMA = 6
    DMMA = 7
    IMMA = 8
    DRAM = 9
    FP64 = 10
    FP32 = 11
    FP16 = 12
    MEM = 13
    ENC = 14
    DEC = 15
    JPG = 16
    OFA = 17
    ENERGY_MJ = 18
    PCIE_TX = 19
    PCIE_RX = 20
    THROTTLE_POWER = 21
    THROTTLE_THERMAL = 22
    THROTTLE_SYNC_BOOST = 23
    THROTTLE_BOARD_LIMIT = 24
    THROTTLE_LOW_UTILIZATION = 25
    THROTTLE_RELIABILITY = 26
    THROTTLE_APP_CLOCKS = 27
    THROTTLE_BASE_CLOCKS = 28
    THROTTLE_SW_THERMAL = 29
    THROTTLE_HW_THERMAL = 30
    THROTTLE_HW_POWER_BRAKE = 31
    C2C_TX = 32
    C2C_RX = 33


NVLINK_TX = 34
NVLINK_RX = NVLINK_TX + LINKS
COUNTERS = NVLINK_RX + LINKS
ACTIVITIES = int(Count.MEM)

# The counters whose history the driver samples, in the order of standin_sampled_id.
SAMPLED = (
    Count.GR,
    Count.MEM,
    Count.ENC,
    Count.DEC,
    Count.JPG,
    Count.OFA,
    Count.ENERGY_MJ,
)


class Counter(ctypes.Structure):
    """`value + rate_per_s * (min(t, until_ns) - at_ns) / 1e9`; until_ns 0 is no end."""

    _fields_ = (
        ("value", c_int64),
        ("rate_per_s", c_double),
        ("at_ns", c_uint64),
        ("until_ns", c_uint64),
    )


class Gauges(ctypes.Structure):
    """Values that the driver refreshes every `refresh_ns`."""

    _fields_ = (
        ("temperature_celsius", c_double),
        ("memory_temperature_celsius", c_double),
        ("event_reasons", c_uint64),
        ("ecc_dram", c_uint64 * 2 * 2),
        ("ecc_sram", c_uint64 * 2 * 2),
        ("power_mw", c_uint32),
        ("power_limit_mw", c_uint32),
        ("power_limit_default_mw", c_uint32),
        ("power_limit_min_mw", c_uint32),
        ("power_limit_max_mw", c_uint32),
        ("clock_mhz", c_uint32 * 4),
        ("clock_max_mhz", c_uint32 * 4),
        ("fan_percent", c_uint32),
        ("pstate", c_uint32),
        ("pcie_generation", c_uint32),
        ("pcie_width", c_uint32),
        ("pcie_replays", c_uint32),
        ("ecc_enabled", c_uint32),
        ("remapped_correctable", c_uint32),
        ("remapped_uncorrectable", c_uint32),
        ("remap_pending", c_uint32),
        ("remap_failure", c_uint32),
        ("recovery_action", c_uint32),
        ("persistence", c_uint32),
        ("reserved", c_uint32),
    )


class Link(ctypes.Structure):
    """One NVLink."""

    _fields_ = (
        ("active", c_uint32),
        ("replays", c_uint32),
        ("recoveries", c_uint32),
        ("crc_errors", c_uint32),
        ("recoveries_failed", c_uint32),
        ("rx_errors", c_uint32),
        ("effective_errors", c_uint32),
        ("symbol_errors", c_uint32),
    )


class Process(ctypes.Structure):
    """One process on a GPU; kind 0 compute, 1 graphics, 2 MPS."""

    _fields_ = (
        ("used_bytes", c_uint64),
        ("pid", c_uint32),
        ("kind", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("sm_percent", c_uint32),
        ("mem_percent", c_uint32),
        ("enc_percent", c_uint32),
        ("dec_percent", c_uint32),
    )


class Mig(ctypes.Structure):
    """One MIG device: a GPU instance with one compute instance."""

    _fields_ = (
        ("uuid", c_char * 80),
        ("memory_total_bytes", c_uint64),
        ("memory_used_bytes", c_uint64),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("slices", c_uint32),
        ("multiprocessors", c_uint32),
        ("counters", Counter * ACTIVITIES),
    )


class GpuState(ctypes.Structure):
    """One GPU: identity, conditions, gauges, counters and their history."""

    _fields_ = (
        ("seq", c_uint64),
        ("name", c_char * 96),
        ("uuid", c_char * 80),
        ("serial", c_char * 32),
        ("part_number", c_char * 80),
        ("vbios", c_char * 32),
        ("pci_domain", c_uint32),
        ("pci_bus", c_uint32),
        ("pci_device", c_uint32),
        ("pci_device_id", c_uint32),
        ("pci_subsystem_id", c_uint32),
        ("minor", c_uint32),
        ("numa_node", c_uint32),
        ("architecture", c_uint32),
        ("cc_major", c_uint32),
        ("cc_minor", c_uint32),
        ("brand", c_uint32),
        ("module_id", c_uint32),
        ("links", c_uint32),
        ("link_speed_mbps", c_uint32),
        ("nvlink_version", c_uint32),
        ("pcie_generation_max", c_uint32),
        ("pcie_width_max", c_uint32),
        ("multiprocessors", c_uint32),
        ("lost", c_uint32),
        ("gpm", c_uint32),
        ("gpm_return", c_uint32),
        ("mig_enabled", c_uint32),
        ("mig_epoch", c_uint32),
        ("mig_count", c_uint32),
        ("process_count", c_uint32),
        ("c2c", c_uint32),
        ("gpm_unsupported", c_uint8 * (METRICS // 8)),
        ("field_unsupported", c_uint8 * (METRICS // 8)),
        ("fabric_cluster", c_uint8 * 16),
        ("fabric_state", c_uint32),
        ("fabric_clique", c_uint32),
        ("fabric_health_mask", c_uint32),
        ("fabric_health_summary", c_uint32),
        ("memory_total_bytes", c_uint64),
        ("memory_reserved_bytes", c_uint64),
        ("memory_used_bytes", c_uint64),
        ("bar1_total_bytes", c_uint64),
        ("bar1_used_bytes", c_uint64),
        ("gauges", Gauges),
        ("link", Link * LINKS),
        ("processes", Process * PROCESSES),
        ("migs", Mig * MIGS),
        ("counters", Counter * COUNTERS),
        ("samples_slot", c_uint64),
        ("samples", c_int64 * SLOTS * len(SAMPLED)),
    )


class FaultState(ctypes.Structure):
    """A function that blocks, fails or both."""

    _fields_ = (
        ("function", c_char * 64),
        ("block_ns", c_uint64),
        ("gpu", c_uint32),
        ("code", c_int32),
        ("active", c_uint32),
        ("serial", c_uint32),
        ("remaining", c_int32),
        ("reserved", c_uint32),
    )


class Event(ctypes.Structure):
    """One event of an event set: an Xid, for instance."""

    _fields_ = (
        ("type", c_uint64),
        ("data", c_uint64),
        ("gpu", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("reserved", c_uint32),
    )


class Calls(ctypes.Structure):
    """How often a function was called, by all processes together."""

    _fields_ = (("function", c_char * 56), ("count", c_uint64))


class State(ctypes.Structure):
    """The whole file."""

    _fields_ = (
        ("magic", c_uint64),
        ("version", c_uint32),
        ("gpu_count", c_uint32),
        ("size", c_uint64),
        ("epoch_offset_ns", c_uint64),
        ("refresh_ns", c_uint64),
        ("sample_period_ns", c_uint64),
        ("driver_version", c_char * 80),
        ("nvml_version", c_char * 80),
        ("cuda_version", c_uint32),
        ("order_count", c_uint32),
        ("order", c_uint32 * GPUS),
        ("wake", c_uint32),
        ("blocked", c_uint32),
        ("fault_count", c_uint32),
        ("reserved", c_uint32),
        ("event_head", c_uint64),
        ("faults", FaultState * FAULTS),
        ("events", Event * EVENTS),
        ("calls", Calls * FUNCTIONS),
        ("gpus", GpuState * GPUS),
    )
