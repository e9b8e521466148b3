"""Makes the synthetic node fixtures/tree/fabric-synthetic-v1.json; nothing in it was recorded.

    PYTHONPATH=tests python tests/fabric_make.py > fixtures/tree/fabric-synthetic-v1.json

Two GPUs, seven RDMA devices of six drivers and two NVMe drives below PCIe switches, in the kernel's
own formats. A path maps to its text, or to {"link": target} for a symbolic link.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Entry: TypeAlias = "str | dict[str, str]"

# Host bridge, bridges down to the function, NUMA node, class, vendor.
NVIDIA, MELLANOX, BROADCOM, INTEL, AMAZON, MICRON = (
    "0x10de",
    "0x15b3",
    "0x14e4",
    "0x8086",
    "0x1d0f",
    "0x1344",
)
CHAINS: Mapping[str, tuple[str, tuple[str, ...], int, str, str]] = {
    "0000:19:00.0": ("15", ("15:01.0", "16:00.0", "17:00.0"), 0, "0x030200", NVIDIA),
    "0000:1a:00.0": ("15", ("15:01.0", "16:00.0", "17:01.0"), 0, "0x020700", MELLANOX),
    "0000:18:00.0": ("15", ("15:01.0", "16:00.0", "17:02.0"), 0, "0x010802", MICRON),
    "0000:3b:00.0": ("37", ("37:01.0", "38:00.0", "39:00.0"), 0, "0x030200", NVIDIA),
    "0000:3c:00.0": ("37", ("37:01.0", "38:00.0", "39:01.0"), 0, "0x020000", MELLANOX),
    "0000:3f:00.0": (
        "37",
        ("37:01.0", "38:00.0", "39:02.0", "3d:00.0", "3e:00.0"),
        0,
        "0x010802",
        MICRON,
    ),
    "0000:40:00.0": ("37", ("37:02.0",), 0, "0x020000", BROADCOM),
    "0000:98:00.0": ("97", ("97:01.0",), 1, "0x020000", INTEL),
    "0000:a1:00.0": ("a0", ("a0:01.0",), 1, "0x020000", AMAZON),
    "0000:b1:00.0": ("b0", ("b0:01.0",), 1, "0x020800", INTEL),
    "0000:c1:00.0": ("c0", ("c0:01.0",), 1, "0x020700", MELLANOX),
    # The display of a management controller is no GPU.
    "0000:d1:00.0": ("d0", ("d0:01.0",), 0, "0x030000", "0x102b"),
}
GEN5, GEN4 = "32.0 GT/s PCIe\n", "16.0 GT/s PCIe\n"
CORRECTABLE = (
    "RxErr 3\nBadTLP 5\nBadDLLP 7\nRollover 1\nTimeout 2\nNonFatalErr 0\nCorrIntErr 0\n"
    "HeaderOF 0\nTOTAL_ERR_COR 18\n"
)
NONFATAL = "Undefined 0\nDLP 0\nCmpltTO 1\nTOTAL_ERR_NONFATAL 1\n"
FATAL = "Undefined 0\nDLP 0\nTOTAL_ERR_FATAL 0\n"

PMA = {
    "port_rcv_data": 1_000,
    "port_xmit_data": 2_000,
    "port_rcv_packets": 30,
    "port_xmit_packets": 40,
    "port_xmit_wait": 4_294_967_295,
    "symbol_error": 65_535,
    "link_error_recovery": 1,
    "link_downed": 255,
    "port_rcv_errors": 2,
    "port_rcv_remote_physical_errors": 3,
    "port_rcv_switch_relay_errors": 4,
    "port_xmit_discards": 5,
    "port_rcv_constraint_errors": 6,
    "port_xmit_constraint_errors": 7,
    "local_link_integrity_errors": 15,
    "excessive_buffer_overrun_errors": 8,
    "VL15_dropped": 9,
    "unicast_rcv_packets": 30,
}
MLX5 = {
    "lifespan": 10,
    "packet_seq_err": 11,
    "local_ack_timeout_err": 12,
    "rnr_nak_retry_err": 13,
    "out_of_sequence": 14,
    "implied_nak_seq_err": 15,
    "duplicate_request": 16,
    "out_of_buffer": 17,
    "roce_adp_retrans": 18,
    "roce_adp_retrans_to": 19,
    "roce_slow_restart": 20,
    "roce_slow_restart_cnps": 21,
    "np_ecn_marked_roce_packets": 22,
    "np_cnp_sent": 23,
    "rp_cnp_handled": 24,
    "rp_cnp_ignored": 25,
    "rx_icrc_encapsulated": 26,
    "req_cqe_error": 27,
    "resp_cqe_error": 28,
    "req_transport_retries_exceeded": 29,
    "rx_write_requests": 3_809_045_607,
}
BNXT = {
    "active_qps": 7,
    "rx_bytes": 1,
    "tx_bytes": 2,
    "rx_roce_only_bytes": 5_000,
    "tx_roce_only_bytes": 6_000,
    "rx_pkts": 50,
    "tx_pkts": 60,
    "to_retransmits": 61,
    "rnr_naks_rcvd": 62,
    "oos_drop_count": 63,
    "max_retry_exceeded": 64,
    "rx_ecn_marked_pkts": 65,
    "tx_cnp_pkts": 66,
    "rx_cnp_pkts": 67,
    "rx_out_of_buffer": 68,
    "missing_resp": 69,
}
IRDMA = {
    "ip4InOctets": 700,
    "ip6InOctets": 30,
    "ip4OutOctets": 800,
    "ip6OutOctets": 40,
    "ip4InPkts": 7,
    "ip6InPkts": 3,
    "ip4OutPkts": 8,
    "ip6OutPkts": 4,
    "tcpRetransSegs": 71,
    "cnpHandled": 72,
    "cnpIgnored": 73,
    "cnpSent": 74,
    "RxECNMrkd": 75,
}
EFA = {
    "tx_bytes": 9_000,
    "rx_bytes": 8_000,
    "tx_pkts": 90,
    "rx_pkts": 80,
    "rx_drops": 81,
    "retrans_pkts": 82,
    "retrans_timeout_events": 83,
    "unresponsive_remote_events": 84,
    "impaired_remote_conn_events": 85,
    "rdma_read_bytes": 86,
}
HFI1 = {"RcResend": 91, "RcTimeOut": 92, "RcSeqNak": 93, "SwLinkUp,32": 1, "DmaWait": 2}


def full(address: str) -> str:
    """A PCI address with its domain."""
    return address if address.count(":") == 2 else f"0000:{address}"


def directory(address: str) -> str:
    """Where sysfs has a function."""
    bridge, chain, *_ = CHAINS[address]
    return "/".join(["sys/devices", f"pci0000:{bridge}", *map(full, chain), address])


def pci() -> Iterator[tuple[str, Entry]]:
    """The PCI functions and the bridges above them."""
    for address, (bridge, chain, node, kind, vendor) in CHAINS.items():
        below = f"sys/devices/pci0000:{bridge}"
        for name in (*map(full, chain), address):
            below = f"{below}/{name}"
            last = name == address
            yield from (
                (f"{below}/class", f"{kind if last else '0x060400'}\n"),
                (f"{below}/vendor", f"{vendor if last else '0x1000'}\n"),
                (f"{below}/numa_node", f"{node}\n"),
                (f"{below}/current_link_speed", GEN4 if name == "0000:3c:00.0" else GEN5),
                (f"{below}/max_link_speed", GEN5),
                (f"{below}/current_link_width", "8\n" if name == "0000:3c:00.0" else "16\n"),
                (f"{below}/max_link_width", "16\n"),
                (f"{below}/power/runtime_status", "active\n"),
                (f"sys/bus/pci/devices/{name}", link_to(f"sys/bus/pci/devices/{name}", below)),
            )
        yield f"{below}/aer_dev_correctable", CORRECTABLE
        yield f"{below}/aer_dev_nonfatal", NONFATAL
        yield f"{below}/aer_dev_fatal", FATAL
        group = f"sys/kernel/iommu_groups/{address[5:7]}"
        yield f"{group}/type", "identity\n"
        yield f"{below}/iommu_group", link_to(f"{below}/iommu_group", group)


def link_to(path: str, target: str) -> Entry:
    """A symbolic link at `path` that leads to `target`."""
    return {"link": os.path.relpath(target, Path(path).parent)}


def rdma(
    device: str,
    address: str,
    driver: str,
    *,
    layer: str = "Ethernet",
    counters: Mapping[str, int] | None = None,
    hardware: Mapping[str, int] | None = None,
    state: tuple[str, str, str] = ("4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)"),
    interface: str = "",
    node_type: str = "1: CA",
) -> Iterator[tuple[str, Entry]]:
    """An RDMA device with one port."""
    function = directory(address)
    base = f"{function}/infiniband/{device}"
    port = f"{base}/ports/1"
    yield f"sys/class/infiniband/{device}", link_to(f"sys/class/infiniband/{device}", base)
    yield f"{base}/device", link_to(f"{base}/device", function)
    drivers = f"sys/bus/pci/drivers/{driver}"
    yield f"{drivers}/bind", ""
    yield f"{function}/driver", link_to(f"{function}/driver", drivers)
    yield f"{base}/node_type", f"{node_type}\n"
    yield f"{base}/node_guid", "0011:2233:4455:6677\n"
    yield f"{base}/fw_ver", "28.41.1000\n"
    yield f"{base}/hca_type", "MT4129\n"
    yield f"{base}/board_id", "MT_0000000838\n"
    for name, text in zip(("state", "phys_state", "rate"), state, strict=True):
        yield f"{port}/{name}", f"{text}\n"
    yield f"{port}/link_layer", f"{layer}\n"
    for folder, values in (("counters", counters), ("hw_counters", hardware)):
        for name, value in (values or {}).items():
            yield f"{port}/{folder}/{name}", f"{value}\n"
    if interface:
        yield f"{function}/net/{interface}/dev_port", "0\n"
        yield f"{function}/net/{interface}/operstate", "up\n"
        if layer == "Ethernet":
            yield f"{port}/gid_attrs/ndevs/0", f"{interface}\n"


def machine() -> dict[str, Entry]:
    """The node."""
    found: dict[str, Entry] = dict(pci())
    ib: dict[str, Any] = {"layer": "InfiniBand", "counters": PMA}
    found |= rdma("mlx5_0", "0000:1a:00.0", "mlx5_core", hardware=MLX5, interface="ib0", **ib)
    found |= rdma(
        "mlx5_1", "0000:3c:00.0", "mlx5_core", counters=PMA, hardware=MLX5, interface="eth1"
    )
    found |= rdma("bnxt_re0", "0000:40:00.0", "bnxt_en", hardware=BNXT, interface="eth2")
    found |= rdma(
        "irdma0", "0000:98:00.0", "ice", hardware=IRDMA, interface="eth3", node_type="4: RNIC"
    )
    found |= rdma(
        "rdmap161s0",
        "0000:a1:00.0",
        "efa",
        layer="Unknown",
        hardware=EFA,
        node_type="7: unspecified",
    )
    found |= rdma("hfi1_0", "0000:b1:00.0", "hfi1", hardware=HFI1, **ib)
    down = ("1: DOWN", "3: Disabled", "10 Gb/sec (4X SDR)")
    found |= rdma("mlx5_2", "0000:c1:00.0", "mlx5_core", hardware=MLX5, state=down, **ib)
    for device, address in (("nvme0", "0000:18:00.0"), ("nvme1", "0000:3f:00.0")):
        where = f"{directory(address)}/nvme/{device}"
        found[f"{where}/transport"] = "pcie\n"
        found[f"sys/class/nvme/{device}"] = link_to(f"sys/class/nvme/{device}", where)
    fabrics = "sys/devices/virtual/nvme-fabrics/ctl/nvme2"
    found[f"{fabrics}/transport"] = "tcp\n"
    found["sys/class/nvme/nvme2"] = link_to("sys/class/nvme/nvme2", fabrics)
    found["proc/cpuinfo"] = "processor\t: 0\nflags\t\t: fpu vme avx512f\n\n"
    found["proc/driver/nvidia/version"] = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n"
    )
    for module in ("nvidia", "nvidia_peermem", "ib_core"):
        found[f"sys/module/{module}/initstate"] = "live\n"
    return dict(sorted(found.items()))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(machine(), indent=1) + "\n")
