"""Tables of NVLink links and of what the driver reports by itself, keyed by the GPU's UUID."""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import counter, gauge, key, label, table


@table
class NvLink:
    """A link of a GPU: state, payload and errors since the driver was loaded; every 20 s."""

    TABLE: ClassVar[str] = "nvlink"

    mono_ns: int = key("When it was read.", unit="ns")
    uuid: str = key("NVML UUID of the GPU.")
    link: int = key("Number of the link.")
    up: bool | None = gauge("Whether the link is up; a link that sleeps is (field 165).")
    speed_bytes_per_s: int | None = gauge(
        "Speed each way of a link that is up (field 164).", unit="bytes_per_s"
    )
    version: int | None = label("NVLink version as NVML numbers it (field 166).")
    remote: str | None = label("What is at the other end: gpu, switch, ibmnpu or unknown.")
    remote_pci: str | None = label("PCI address of it, as sysfs writes it.")
    tx_bytes: int | None = counter("Payload sent (field 138, or 202).", unit="bytes")
    rx_bytes: int | None = counter("Payload received (field 139, or 204).", unit="bytes")
    replays: int | None = counter("Packets sent again (field 161; not on Blackwell).")
    recoveries: int | None = counter("Recoveries of the link (field 162, or 215).")
    recoveries_failed: int | None = counter("Recoveries that failed (field 214; Blackwell).")
    crc_errors: int | None = counter("Checksum errors (field 163; not on Blackwell).")
    rx_errors: int | None = counter("Packets with errors received (field 208; Blackwell).")
    effective_errors: int | None = counter("Errors after correction (field 219; Blackwell).")
    symbol_errors: int | None = counter("Errors in symbols received (field 221; Blackwell).")


@table
class GpuEvent:
    """What the driver reported by itself of a GPU or NVSwitch (docs.nvidia.com/deploy/xid-errors).

    The kernel log and NVML are two witnesses of the same Xid, each with a row of its own.
    """

    TABLE: ClassVar[str] = "gpu_event"

    mono_ns: int = key("When it was logged; from NVML, when it was taken.", unit="ns")
    uuid: str | None = key("NVML UUID of the GPU; NULL if nobody could tell it, as of a switch.")
    pci_bus_id: str | None = key("PCI address as sysfs writes it.")
    kind: str = key("xid; sxid: of an NVSwitch; lost: fallen off the bus without a number.")
    xid: int | None = label("Number of the Xid or SXid.")
    source: str = label("kmsg: the kernel log; nvml: the driver's event set.")
    pid: int | None = label("Process that the driver blames; in the host's pid namespace.")
    process: str | None = label("Its name.")
    gpu_instance: int | None = label("GPU instance of a MIG device that it happened on.")
    text: str | None = label("What the driver said, without addresses; cut at 200 characters.")
