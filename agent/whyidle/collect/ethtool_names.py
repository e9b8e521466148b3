"""What the statistics of network drivers are called, and which column each is.

Source: drivers/net/ethernet of the kernel: mlx5 (also over IPoIB), bnxt_en, ice and i40e. A driver
has a thousand names, most of them for each of its queues: what is not here is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

GLOBAL = "global"

PORT: Mapping[str, str] = MappingProxyType(
    {
        "rx_vport_rdma_unicast_bytes": "rx_rdma_bytes",
        "tx_vport_rdma_unicast_bytes": "tx_rdma_bytes",
        "rx_discards_phy": "rx_discards",
        "rx_stat_discard": "rx_discards",
        "rx_dropped.nic": "rx_discards",
        "tx_discards_phy": "tx_discards",
        "tx_stat_discard": "tx_discards",
        "rx_out_of_buffer": "rx_no_buffer",
        "rx_crc_errors_phy": "rx_crc_errors",
        "rx_fcs_err_frames": "rx_crc_errors",
        "rx_crc_errors.nic": "rx_crc_errors",
        "rx_pcs_symbol_err_phy": "rx_symbol_errors",
        "rx_corrected_bits_phy": "rx_corrected_bits",
        "rx_buffer_passed_thres_phy": "rx_buffer_passed",
        "rx_buffer_passed_threshold": "rx_buffer_passed",
        "link_down_events_phy": "link_downs",
        "tx_pause_storm_warning_events": "pause_storm_warnings",
        "tx_pause_storm_error_events": "pause_storm_errors",
        "outbound_pci_stalled_wr": "pci_write_stalled_ratio",
        "outbound_pci_stalled_rd": "pci_read_stalled_ratio",
        "outbound_pci_stalled_wr_events": "pci_write_stalls",
        "outbound_pci_stalled_rd_events": "pci_read_stalls",
        "outbound_pci_buffer_overflow": "pci_overflows",
        "rx_pci_signal_integrity": "pci_signal_errors",
        "tx_pci_signal_integrity": "pci_signal_errors",
    }
)
# Pauses of the whole link: bnxt_en and ice count frames alone.
_GLOBAL: Mapping[str, str] = MappingProxyType(
    {
        "rx_global_pause": "rx_pauses",
        "tx_global_pause": "tx_pauses",
        "rx_global_pause_duration": "rx_pause_us",
        "tx_global_pause_duration": "tx_pause_us",
        "rx_pause_frames": "rx_pauses",
        "tx_pause_frames": "tx_pauses",
        "link_xoff_rx.nic": "rx_pauses",
        "link_xoff_tx.nic": "tx_pauses",
    }
)
# By priority: mlx5, mlx5, bnxt_en, bnxt_en, ice and i40e.
_BY_PRIORITY: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"([rt]x)_prio(\d)_pause"), "{}_pauses"),
    (re.compile(r"([rt]x)_prio(\d)_pause_duration"), "{}_pause_us"),
    (re.compile(r"(rx)_prio(\d)_discards"), "{}_discards"),
    (re.compile(r"([rt]x)_pfc_ena_frames_pri(\d)"), "{}_pauses"),
    (re.compile(r"([rt]x)_priority_(\d)_xoff(?:\.nic)?"), "{}_pauses"),
)
_BNXT_DURATION = re.compile(r"pfc_pri(\d)_([rt]x)_duration_us")
# A priority that only counts discards is in no use for lossless traffic.
_PAUSING = frozenset({"rx_pauses", "tx_pauses", "rx_pause_us", "tx_pause_us"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Where the values of an interface are: columns of the port, and of each priority in use.

    `indices` are the places in the driver's list; the other two hold places in `indices`.
    """

    count: int
    indices: tuple[int, ...]
    port: tuple[tuple[str, int], ...]
    priorities: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


def by_priority(name: str) -> tuple[str, str] | None:
    """Return the priority and the column of a statistic; None for any other."""
    if name in _GLOBAL:
        return GLOBAL, _GLOBAL[name]
    for pattern, column in _BY_PRIORITY:
        found = pattern.fullmatch(name)
        if found:
            return found[2], column.format(found[1])
    found = _BNXT_DURATION.fullmatch(name)
    return (found[1], f"{found[2]}_pause_us") if found else None


def wanted(names: Iterable[str]) -> Wanted:
    """Choose from a driver's names; of a name that comes twice the first counts."""
    port: dict[tuple[str, str], int] = {}
    priorities: dict[str, dict[str, int]] = {}
    indices: list[int] = []
    count = 0
    for index, each in enumerate(names):
        count = index + 1
        name = each.strip()
        column = PORT.get(name)
        if column is not None:
            if (column, name) not in port:
                port[column, name] = len(indices)
                indices.append(index)
            continue
        found = by_priority(name)
        if found is not None and found[1] not in priorities.setdefault(found[0], {}):
            priorities[found[0]][found[1]] = len(indices)
            indices.append(index)
    return Wanted(
        count=count,
        indices=tuple(indices),
        port=tuple((column, at) for (column, _), at in port.items()),
        priorities=tuple(
            (priority, tuple(columns.items()))
            for priority, columns in sorted(priorities.items())
            if _PAUSING & columns.keys()
        ),
    )
