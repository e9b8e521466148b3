"""Tables of the fabric: RDMA ports, PCIe, what lies near which GPU, TCP sockets, link events."""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import counter, gauge, key, label, table


@table
class RdmaTraffic:
    """Bytes of an RDMA port that is active, in the fast lane; other ports move none."""

    TABLE: ClassVar[str] = "rdma_traffic"

    mono_ns: int = key("When it was read.", unit="ns")
    device: str = key("RDMA device, such as mlx5_0.")
    port: int = key("Port of the device, from 1.")
    rx_bytes: int | None = counter("Bytes received, RDMA only.", unit="bytes")
    tx_bytes: int | None = counter("Bytes sent, RDMA only.", unit="bytes")


@table
class RdmaPort:
    """State and counters of an RDMA port (/sys/class/infiniband/DEV/ports/N).

    Columns hold the counter of the same meaning of mlx5, mlx4, hfi1, bnxt_re, irdma and EFA; their
    file names are in whyidle.collect.rdma_counters. A counter that sticks stays at its maximum.
    Each second come state, bytes, tx_packets, tx_wait, retransmits, ack_timeouts, out_of_order and
    cnps_handled; the others every ten seconds, NULL between.
    """

    TABLE: ClassVar[str] = "rdma_port"

    mono_ns: int = key("When it was read.", unit="ns")
    device: str = key("RDMA device, such as mlx5_0.")
    port: int = key("Port of the device, from 1.")
    state: str | None = label("active, down, init, armed, active_defer or nop.")
    physical_state: str | None = label("link_up, polling, disabled, link_error_recovery ...")
    rate_bits_per_s: int | None = gauge("Rate of an active link.", unit="bits_per_s")
    rx_bytes: int | None = counter("Bytes received (port_rcv_data x 4).", unit="bytes")
    tx_bytes: int | None = counter("Bytes sent (port_xmit_data x 4).", unit="bytes")
    rx_packets: int | None = counter("Packets received.")
    tx_packets: int | None = counter("Packets sent.")
    tx_wait: int | None = counter(
        "Ticks with data to send and no credits to send it (port_xmit_wait); their length differs "
        "between devices.",
        bits=32,
        at_limit="sticks",
    )
    symbol_errors: int | None = counter("Minor lane errors.", bits=16, at_limit="sticks")
    link_recoveries: int | None = counter("Links trained anew.", bits=8, at_limit="sticks")
    link_downs: int | None = counter("Recoveries that failed.", bits=8, at_limit="sticks")
    rx_errors: int | None = counter("Bad packets received.", bits=16, at_limit="sticks")
    rx_remote_errors: int | None = counter(
        "Packets received that were marked bad before.", bits=16, at_limit="sticks"
    )
    rx_relay_errors: int | None = counter(
        "Packets a switch could not pass on.", bits=16, at_limit="sticks"
    )
    tx_discards: int | None = counter(
        "Packets dropped: the port was down or congested.", bits=16, at_limit="sticks"
    )
    rx_constraint_errors: int | None = counter(
        "Packets refused by partition or filter.", bits=8, at_limit="sticks"
    )
    tx_constraint_errors: int | None = counter(
        "Packets not sent for partition or filter.", bits=8, at_limit="sticks"
    )
    link_integrity_errors: int | None = counter(
        "Local errors over the threshold.", bits=4, at_limit="sticks"
    )
    buffer_overruns: int | None = counter(
        "Credits that were overrun (excessive_buffer_overrun_errors).", bits=4, at_limit="sticks"
    )
    management_drops: int | None = counter(
        "Management packets dropped (VL15_dropped).", bits=16, at_limit="sticks"
    )
    retransmits: int | None = counter("Packets sent again; mlx5: packet_seq_err.", bits=32)
    ack_timeouts: int | None = counter("Acknowledgements that did not come in time.", bits=32)
    receiver_not_ready: int | None = counter("Peer had no receive posted.", bits=32)
    out_of_order: int | None = counter("Packets received out of order.", bits=32)
    implied_naks: int | None = counter("Answers found missing by the sender.", bits=32)
    duplicate_requests: int | None = counter("Requests received twice.", bits=32)
    no_buffer: int | None = counter("Packets that found no receive posted here.", bits=32)
    retries_exceeded: int | None = counter("Connections given up after all retries.", bits=32)
    adaptive_retransmits: int | None = counter("Adaptive retransmissions (RoCE).", bits=32)
    adaptive_timeouts: int | None = counter("Such that timed out.", bits=32)
    slow_restarts: int | None = counter("Flows that began slowly again (RoCE).", bits=32)
    slow_restart_cnps: int | None = counter("Congestion packets sent while they did.", bits=32)
    ecn_marked_packets: int | None = counter("RoCE packets received with a congestion mark.")
    cnps_sent: int | None = counter("Congestion notifications sent, as a receiver.")
    cnps_handled: int | None = counter("Congestion notifications obeyed, as a sender.")
    cnps_ignored: int | None = counter("Congestion notifications ignored.")
    icrc_errors: int | None = counter("RoCE packets with a wrong checksum.")
    request_errors: int | None = counter("Requests completed in error; teardown counts.", bits=32)
    response_errors: int | None = counter("Receives completed in error.", bits=32)
    impaired_connections: int | None = counter("EFA: peers impaired or not responding.")


@table
class RdmaInfo:
    """What an RDMA port is, and where its device sits; read rarely."""

    TABLE: ClassVar[str] = "rdma_info"

    mono_ns: int = key("When it was read.", unit="ns")
    device: str = key("RDMA device, such as mlx5_0.")
    port: int = key("Port of the device, from 1.")
    link_layer: str | None = label("infiniband or ethernet; NULL for EFA, which says Unknown.")
    transport: str | None = label("infiniband, roce, efa, iwarp, usnic or opa.")
    driver: str | None = label("Kernel driver of the PCI function.")
    node_guid: str | None = label("GUID of the device.")
    firmware: str | None = label("Firmware version.")
    hca_type: str | None = label("Chip, such as MT4129.")
    board_id: str | None = label("Board, such as MT_0000000838.")
    interfaces: str | None = label("Network interfaces over it, joined with commas.")
    pci_bus_id: str | None = label("PCI address, such as 0000:1a:00.0.")
    numa_node: int | None = label("NUMA node of the device.")
    virtual_function: bool | None = label("Whether it is an SR-IOV virtual function.")
    bond: bool | None = label("Whether one RDMA port stands for several interfaces.")
    rate_bits_per_s: int | None = gauge("Rate of an active link.", unit="bits_per_s")


@table
class GpuDistance:
    """How far a NIC or an NVMe drive is from a GPU on PCIe; read rarely."""

    TABLE: ClassVar[str] = "gpu_distance"

    mono_ns: int = key("When it was read.", unit="ns")
    gpu_pci_bus_id: str = key("PCI address of the GPU, as in gpu_info.")
    device: str = key("Name of the device, such as mlx5_0 or nvme0.")
    kind: str = label("nic or nvme.")
    pci_bus_id: str = label("PCI address of the device.")
    path: str | None = label(
        "same_switch, switches (more than one), same_root, same_numa or other; NULL where the "
        "machine does not tell, as a virtual one."
    )
    bridges: int | None = gauge("PCIe bridges between the two, ports of switches counted.")
    nearest_gpu: bool | None = label("Whether no other GPU is nearer to the device.")
    nearest_device: bool | None = label("Whether no device of its kind is nearer to the GPU.")
    source: str = label("sysfs, or the NCCL topology file of a job.")


@table
class PcieLink:
    """A PCIe link and its errors, of GPUs, NICs, NVMe drives and the bridges above them."""

    TABLE: ClassVar[str] = "pcie_link"

    mono_ns: int = key("When it was read.", unit="ns")
    pci_bus_id: str = key("PCI address, such as 0000:19:00.0.")
    kind: str = label("gpu, nic, nvme or bridge.")
    device: str | None = label("Name of the device; NULL for GPUs and bridges.")
    upstream: str | None = label("PCI address of the bridge above; NULL at the root.")
    suspended: bool | None = label("Whether it sleeps; its link is not asked then.")
    generation: int | None = gauge("PCIe generation now; an idle GPU lowers it.")
    width: int | None = gauge("Lanes now.")
    max_generation: int | None = gauge("Highest generation of the device itself.")
    max_width: int | None = gauge("Most lanes of the device itself.")
    numa_node: int | None = label("NUMA node.")
    iommu: str | None = label("Type of its IOMMU group, such as identity, DMA or DMA-FQ.")
    acs_redirect: bool | None = label(
        "Whether ACS sends peer traffic to the root; NULL without the right to read it."
    )
    correctable_errors: int | None = counter("AER: errors that were corrected.")
    receiver_errors: int | None = counter("AER: of the receiver (RxErr).")
    bad_packets: int | None = counter("AER: bad packets, sent again (BadTLP, BadDLLP).")
    replay_timeouts: int | None = counter("AER: replays for a timeout (Timeout, Rollover).")
    nonfatal_errors: int | None = counter("AER: uncorrectable, not fatal.")
    fatal_errors: int | None = counter("AER: uncorrectable, fatal.")


@table
class GpudirectInfo:
    """Whether NICs and drives can reach GPU memory by themselves; read rarely."""

    TABLE: ClassVar[str] = "gpudirect_info"

    mono_ns: int = key("When it was read.", unit="ns")
    peer_memory: bool | None = label("Whether nvidia_peermem or nv_peer_mem is loaded.")
    open_kernel_module: bool | None = label("Whether the GPU driver is the open one: dma-buf.")
    storage: bool | None = label("Whether nvidia_fs is loaded (GPUDirect Storage).")
    copy: bool | None = label("Whether gdrdrv is loaded (GDRCopy).")
    iommu: bool | None = label("Whether the machine has an IOMMU that is on.")
    virtual: bool | None = label("Whether it is a virtual machine.")


@table
class EthtoolPort:
    """Counters of the driver of an RDMA network interface (ethtool -S)."""

    TABLE: ClassVar[str] = "ethtool_port"

    mono_ns: int = key("When it was read.", unit="ns")
    interface: str = key("Network interface.")
    rx_rdma_bytes: int | None = counter("RDMA bytes received (unicast).", unit="bytes")
    tx_rdma_bytes: int | None = counter("RDMA bytes sent (unicast).", unit="bytes")
    rx_discards: int | None = counter("Packets dropped by the port for want of buffers.")
    tx_discards: int | None = counter("Packets dropped instead of sent.")
    rx_no_buffer: int | None = counter("Packets that found no receive buffer (rx_out_of_buffer).")
    rx_crc_errors: int | None = counter("Frames with a wrong checksum.")
    rx_symbol_errors: int | None = counter("Errors that the line code could not correct.")
    rx_corrected_bits: int | None = counter("Bits that the line code corrected.")
    rx_buffer_passed: int | None = counter("Times the receive buffer passed its threshold.")
    link_downs: int | None = counter("Times the link went down.")
    pause_storm_warnings: int | None = counter("Long pauses that the NIC sent.")
    pause_storm_errors: int | None = counter("Pauses so long that the NIC cut them off.")
    pci_write_stalled_ratio: float | None = gauge(
        "Part of the last second in which the NIC could not write to PCIe for want of credits.",
        unit="ratio",
    )
    pci_read_stalled_ratio: float | None = gauge("The same of reads.", unit="ratio")
    pci_write_stalls: int | None = counter("Seconds in which writes stalled over 30 %.")
    pci_read_stalls: int | None = counter("Seconds in which reads stalled over 30 %.")
    pci_overflows: int | None = counter("Packets lost because PCIe was too slow.")
    pci_signal_errors: int | None = counter("Signal integrity errors of PCIe, both directions.")


@table
class EthtoolPause:
    """Pauses of one priority of an RDMA network interface; the driver lists those in use."""

    TABLE: ClassVar[str] = "ethtool_pause"

    mono_ns: int = key("When it was read.", unit="ns")
    interface: str = key("Network interface.")
    priority: str = key("0 to 7, or global for pauses of the whole link.")
    rx_pauses: int | None = counter("Pauses received: the peer told us to wait.")
    tx_pauses: int | None = counter("Pauses sent: we told the peer to wait.")
    rx_pause_us: int | None = counter("Time in which we might not send.", unit="us")
    tx_pause_us: int | None = counter("Time in which the peer might not send.", unit="us")
    rx_discards: int | None = counter("Packets of it dropped on receipt.")


@table
class LinkEvent:
    """A network interface that came, went, or changed its state (rtnetlink)."""

    TABLE: ClassVar[str] = "link_event"

    mono_ns: int = key("When it was read: within a second of when it came.", unit="ns")
    interface: str = key("Name of the interface.")
    index: int = key("Its number, which stays when the name changes.")
    event: str = label("up, down, new or removed.")
    operational: str | None = label("Operational state, such as up, down or lowerlayerdown.")
    carrier: bool | None = label("Whether it has a carrier.")


@table
class TcpSocket:
    """TCP connections by service and owner, summed; those that closed stay in the counters.

    Counters begin when the agent does: they hold what it saw of each connection between two looks,
    and all of one that is new. One that opens and closes between two looks is not seen.
    """

    TABLE: ClassVar[str] = "tcp_socket"

    mono_ns: int = key("When it was read.", unit="ns")
    service: str = key("nvme, nfs, lustre, smb, iscsi, ceph, http or peer (any other).")
    pid: int | None = key("Process that holds them; NULL for the kernel's own (NVMe, NFS).")
    start_ns: int | None = key("When that process started, boot clock.", unit="ns")
    sockets: int = gauge("Connections now.")
    tx_bytes: int | None = counter("Bytes sent, repeats in it (tcpi_bytes_sent).", unit="bytes")
    rx_bytes: int | None = counter("Bytes received in order (tcpi_bytes_received).", unit="bytes")
    retransmits: int | None = counter("Segments sent again (tcpi_total_retrans).")
    out_of_order: int | None = counter("Segments received out of order (tcpi_rcv_ooopack).")
    busy_us: int | None = counter("Time with something to send, summed.", unit="us")
    receiver_limited_us: int | None = counter(
        "Part of it that waited for the peer to read (tcpi_rwnd_limited).", unit="us"
    )
    sender_limited_us: int | None = counter(
        "Part of it that waited for the own send buffer (tcpi_sndbuf_limited).", unit="us"
    )
    rx_queue_bytes: int | None = gauge("Received and not read yet.", unit="bytes")
    tx_queue_bytes: int | None = gauge("Written and not acknowledged yet.", unit="bytes")
    rtt_us: int | None = gauge("Round trip time, mean over the connections.", unit="us")
    rtt_max_us: int | None = gauge("The longest of them.", unit="us")
