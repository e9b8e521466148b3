"""Xids in the kernel log: what the NVIDIA driver says of a GPU that is in trouble.

Source: docs.nvidia.com/deploy/xid-errors, and the forms that drivers have printed since:

    NVRM: Xid (PCI:0000:19:00): 79, pid=1234, name=python, GPU has fallen off the bus.
    NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off ...
    NVRM: Xid (PCI:0000:07:00 GPU-I:05): 94, pid=7194, Contained: ...     a MIG device
    NVRM: Xid (PCI:0000:02:00): 31, Ch 00000010, engmask 00000101 ...     drivers before 440
    NVRM: Xid (0000:02:00): 31, ...    NVRM: Xid (0002:00): 13, ...       old ones
    NVRM: GPU 0000:5d:00.0: GPU has fallen off the bus.                   without a number
    nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, Problem
from whyidle.collect.kernel_log import KernelLog, KernelRecord
from whyidle.host import Host
from whyidle.kmsg import RECORDS_LIMIT
from whyidle.schema import GpuEvent

# What was logged earlier than this before the first look is of another time.
_EARLIER_NS = 10 * NS_PER_S
_TEXT_LIMIT = 200
_GPUS = "proc/driver/nvidia/gpus"

_ADDRESS = r"(?:PCI:)?(?P<pci>[0-9a-fA-F:]+(?:\.[0-7])?)"
_XID = re.compile(
    rf"NVRM: Xid \({_ADDRESS}(?: GPU-I:(?P<instance>[0-9a-fA-F]+))?\): (?P<xid>\d+)(?:,\s*|$)"
)
_SXID = re.compile(rf"nvidia-nvswitch\d+: SXid \({_ADDRESS}\): (?P<xid>\d+)(?:,\s*|$)")
_LOST = re.compile(rf"NVRM: (?:The NVIDIA )?GPU {_ADDRESS}:?.*fallen off the bus")
_PID = re.compile(r"pid='?(?P<pid>\d+|<unknown>)'?(?:,\s*|$)")
_NAME = re.compile(r"name=(?P<name>.*?)(?:,\s+|$)")
_UUID = re.compile(r"NVRM: GPU at PCI:(?P<pci>[0-9a-fA-F:.]+): (?P<uuid>GPU-[0-9a-f-]{36})")
_INFORMATION_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-f-]{36})")
# Addresses in memory and on the wire say nothing to who reads, and where things lie to who should
# not know; error codes are shorter.
_LONG = re.compile(r"\b(?:0x)?[0-9a-fA-F]{9,}\b|0x[0-9a-fA-F]{8,}")
_BUS = re.compile(r"(?:(?P<domain>[0-9a-f]+):)?(?P<bus>[0-9a-f]{1,4}):(?P<device>[0-9a-f]{1,2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """A report of the driver. None: it does not say."""

    kind: str
    pci_bus_id: str | None
    number: int | None
    pid: int | None
    process: str | None
    gpu_instance: int | None
    text: str | None


def parse_address(text: str) -> str | None:
    """Return a PCI address of the log, whose function may be missing, as sysfs writes it."""
    place, _, function = text.lower().partition(".")
    found = _BUS.fullmatch(place)
    if found is None:
        return None
    domain = int(found["domain"] or "0", 16)
    return (
        f"{domain:04x}:{int(found['bus'], 16):02x}:{int(found['device'], 16):02x}.{function or 0}"
    )


def parse(text: str) -> Xid | None:
    """Return the report in a line of the kernel log; None if there is none."""
    if "NVRM: " not in text and "SXid" not in text:
        return None
    for kind, pattern in (("xid", _XID), ("sxid", _SXID), ("lost", _LOST)):
        found = pattern.search(text)
        if found is None:
            continue
        rest = text[found.end() :] if kind != "lost" else ""
        pid, process, rest = _blamed(rest)
        instance = found.groupdict().get("instance")
        number = found.groupdict().get("xid")
        return Xid(
            kind=kind,
            pci_bus_id=parse_address(found["pci"]),
            number=None if number is None else int(number),
            pid=pid,
            process=process,
            gpu_instance=None if instance is None else int(instance, 16),
            text=_LONG.sub("...", rest).strip()[:_TEXT_LIMIT] or None,
        )
    return None


def _blamed(rest: str) -> tuple[int | None, str | None, str]:
    """Return pid and name of the process that is blamed, and what is said after them."""
    pid: int | None = None
    name: str | None = None
    if (found := _PID.match(rest)) is not None:
        pid = int(found["pid"]) if found["pid"].isdigit() else None
        rest = rest[found.end() :]
        if (found := _NAME.match(rest)) is not None:
            name = found["name"] if found["name"] != "<unknown>" else None
            rest = rest[found.end() :]
    return pid, name, rest


class _Xids:
    """The collector: its place in the log, and which GPU has which address."""

    __slots__ = ("_begin_ns", "_last_ns", "_log", "_uuids")

    def __init__(self) -> None:
        self._log = KernelLog()
        self._begin_ns: int | None = None
        self._last_ns = 0
        self._uuids: dict[str, str] = {}

    def __call__(self, host: Host) -> Iterator[GpuEvent | Problem]:
        now_ns = host.clock.mono_ns()
        if self._begin_ns is None:
            self._begin_ns = now_ns
            # While all is well: a driver in trouble may not answer.
            self._uuids = _addresses(host)
        count = 0
        for record in self._log.new(host):
            count += 1
            if isinstance(record, Problem):
                yield record
                continue
            self._name(record.text)
            found = parse(record.text)
            logged_ns = self._logged_ns(record)
            if found is not None and logged_ns >= self._begin_ns - _EARLIER_NS:
                yield self._row(host, found, logged_ns)
        if count < RECORDS_LIMIT:  # else the log holds more that is older than this look
            self._last_ns = now_ns

    def _logged_ns(self, record: KernelRecord) -> int:
        """Return when it was logged by the monotonic clock, from which that of the log drifts.

        It came after the last look and before it was read: that bounds the drift to a second.
        """
        return min(max(record.time_us * 1_000, self._last_ns), record.read_ns)

    def _name(self, text: str) -> None:
        found = _UUID.search(text)
        address = None if found is None else parse_address(found["pci"])
        if found is not None and address is not None:
            self._uuids[address] = found["uuid"]

    def _row(self, host: Host, found: Xid, logged_ns: int) -> GpuEvent:
        address = found.pci_bus_id
        if address is not None and address not in self._uuids and found.kind != "sxid":
            self._uuids.update(_addresses(host))
        return GpuEvent(
            mono_ns=logged_ns,
            uuid=None if address is None else self._uuids.get(address),
            pci_bus_id=address,
            kind=found.kind,
            xid=found.number,
            source="kmsg",
            pid=found.pid,
            process=found.process,
            gpu_instance=found.gpu_instance,
            text=found.text,
        )


def _addresses(host: Host) -> dict[str, str]:
    """Return UUIDs by PCI address, as the driver tells them in /proc/driver/nvidia."""
    found: dict[str, str] = {}
    try:
        for address in host.names(_GPUS):
            told = _INFORMATION_UUID.search(host.read(f"{_GPUS}/{address}/information"))
            if told is not None:
                found[address.lower()] = told[1]
    except OSError:
        return found  # no driver, or one in trouble: the row has the address
    return found


def make() -> Collect:
    """Return the collector."""
    return _Xids()


XID = Collector(name="xid", lane="normal", make=make, thread="process")
