"""Counters of RDMA ports by file name, over vendors, and how their text is read.

`counters/` holds those of the InfiniBand architecture (PMA), 4 to 64 bits wide; the narrow ones
stick at their maximum. `hw_counters/` are the driver's own, named as in drivers/infiniband/hw.

https://docs.kernel.org/infiniband/sysfs.html
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

from whyidle.collect.numbers import whole

# Data counters of PMA count words of four octets.
WORD_BYTES = 4
# A counter beyond a signed 64-bit integer is no count: drivers print -1 as 2^64 - 1.
LIMIT = 1 << 63
_GIGABIT = 1_000_000_000
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
# Older kernels print this where a device has no PMA, such as i40iw.
_NO_PMA = b"N/A"

PMA: Mapping[str, str] = MappingProxyType(
    {
        "port_xmit_wait": "tx_wait",
        "symbol_error": "symbol_errors",
        "link_error_recovery": "link_recoveries",
        "link_downed": "link_downs",
        "port_rcv_errors": "rx_errors",
        "port_rcv_remote_physical_errors": "rx_remote_errors",
        "port_rcv_switch_relay_errors": "rx_relay_errors",
        "port_xmit_discards": "tx_discards",
        "port_rcv_constraint_errors": "rx_constraint_errors",
        "port_xmit_constraint_errors": "tx_constraint_errors",
        "local_link_integrity_errors": "link_integrity_errors",
        "excessive_buffer_overrun_errors": "buffer_overruns",
        "VL15_dropped": "management_drops",
    }
)
# Names of mlx5, bnxt_re, irdma, EFA and hfi1; no driver has two of one column.
HARDWARE: Mapping[str, str] = MappingProxyType(
    {
        "packet_seq_err": "retransmits",
        "to_retransmits": "retransmits",
        "tcpRetransSegs": "retransmits",
        "retrans_pkts": "retransmits",
        "RcResend": "retransmits",
        "local_ack_timeout_err": "ack_timeouts",
        "retrans_timeout_events": "ack_timeouts",
        "RcTimeOut": "ack_timeouts",
        "rnr_nak_retry_err": "receiver_not_ready",
        "rnr_naks_rcvd": "receiver_not_ready",
        "out_of_sequence": "out_of_order",
        "oos_drop_count": "out_of_order",
        "RcSeqNak": "out_of_order",
        "implied_nak_seq_err": "implied_naks",
        "missing_resp": "implied_naks",
        "duplicate_request": "duplicate_requests",
        "dup_req": "duplicate_requests",
        "out_of_buffer": "no_buffer",
        "rx_out_of_buffer": "no_buffer",
        "rx_drops": "no_buffer",
        "req_transport_retries_exceeded": "retries_exceeded",
        "max_retry_exceeded": "retries_exceeded",
        "roce_adp_retrans": "adaptive_retransmits",
        "roce_adp_retrans_to": "adaptive_timeouts",
        "roce_slow_restart": "slow_restarts",
        "roce_slow_restart_cnps": "slow_restart_cnps",
        "np_ecn_marked_roce_packets": "ecn_marked_packets",
        "rx_ecn_marked_pkts": "ecn_marked_packets",
        "RxECNMrkd": "ecn_marked_packets",
        "np_cnp_sent": "cnps_sent",
        "tx_cnp_pkts": "cnps_sent",
        "cnpSent": "cnps_sent",
        "rp_cnp_handled": "cnps_handled",
        "rx_cnp_pkts": "cnps_handled",
        "cnpHandled": "cnps_handled",
        "rp_cnp_ignored": "cnps_ignored",
        "cnpIgnored": "cnps_ignored",
        "rx_icrc_encapsulated": "icrc_errors",
        "req_cqe_error": "request_errors",
        "resp_cqe_error": "response_errors",
    }
)
FOLDERS = ("counters", "counters_ext", "hw_counters")
SINGLE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"counters": PMA, "hw_counters": HARDWARE}
)
# What adds up to a column: the first of these folders whose files are there. The byte counters of
# RDMA alone come before those of the whole port; mlx4 counts 32 bits in counters/, 64 beside it.
Sums = tuple[tuple[str, tuple[str, ...]], ...]
SUMS: Mapping[str, Sums] = MappingProxyType(
    {
        "rx_bytes": (
            ("counters_ext", ("port_rcv_data_64",)),
            ("counters", ("port_rcv_data",)),
            ("hw_counters", ("rx_roce_only_bytes",)),
            ("hw_counters", ("rx_bytes",)),
            ("hw_counters", ("ip4InOctets", "ip6InOctets")),
        ),
        "tx_bytes": (
            ("counters_ext", ("port_xmit_data_64",)),
            ("counters", ("port_xmit_data",)),
            ("hw_counters", ("tx_roce_only_bytes",)),
            ("hw_counters", ("tx_bytes",)),
            ("hw_counters", ("ip4OutOctets", "ip6OutOctets")),
        ),
        "rx_packets": (
            ("counters", ("port_rcv_packets",)),
            ("hw_counters", ("rx_pkts",)),
            ("hw_counters", ("ip4InPkts", "ip6InPkts")),
        ),
        "tx_packets": (
            ("counters", ("port_xmit_packets",)),
            ("hw_counters", ("tx_pkts",)),
            ("hw_counters", ("ip4OutPkts", "ip6OutPkts")),
        ),
        "impaired_connections": (
            ("hw_counters", ("unresponsive_remote_events", "impaired_remote_conn_events")),
        ),
    }
)


def unit(column: str, folder: str) -> int:
    """Return what one count of a file in `folder` is worth in the unit of `column`."""
    return WORD_BYTES if column.endswith("_bytes") and folder != "hw_counters" else 1


def chosen(sums: Sums, present: Mapping[str, Collection[str]]) -> tuple[str, tuple[str, ...]]:
    """Return the best of `sums` that a port has: its folder and files; none is ("", ())."""
    for folder, names in sums:
        found = tuple(name for name in names if name in present.get(folder, ()))
        if found:
            return folder, found
    return "", ()


def parse_count(data: bytes, field: str) -> int | None:
    """Return a counter; None where the device has none. Raises ValueError that names `field`."""
    try:
        count = int(data)
    except ValueError:
        if data.startswith(_NO_PMA):
            return None
        count = whole(data, field)
    return count if 0 <= count < LIMIT else None


def parse_state(text: str) -> str | None:
    """Return the word of a state such as "4: ACTIVE", in lower case; raises ValueError."""
    number, colon, word = text.strip().partition(":")
    if not colon or not number.strip().isdecimal():
        raise ValueError(f"state is {text.strip()[:40]!r}, not a number and a word")
    # LinkUp and LinkErrorRecovery are two words.
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word.strip()).lower() or None


def parse_rate(text: str) -> int:
    """Return bit/s of a rate such as "400 Gb/sec (4X NDR)"; raises ValueError."""
    found = _RATE.match(text.strip())
    if found is None:
        raise ValueError(f"rate is {text.strip()[:40]!r}, not Gb/sec")
    return round(float(found[1]) * _GIGABIT)
