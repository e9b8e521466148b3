"""PCIe links: generation, width and errors of GPUs, NICs, NVMe drives and the bridges above them.

Source: /sys/bus/pci/devices (https://docs.kernel.org/PCI/sysfs-pci.html and PCI/pcieaer-howto);
ACS as in the PCI Express base specification, extended capability 0x000D. An idle GPU lowers its
generation, so that means something under load only; its width never changes by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

from whyidle.clock import NS_PER_S
from whyidle.collect import pcie_tree
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.numbers import whole
from whyidle.collect.pcie_tree import PCI, Function
from whyidle.host import Host
from whyidle.schema import PcieLink

_T = TypeVar("_T")

_GENERATIONS: Mapping[str, int] = MappingProxyType(
    {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16.0": 4, "16": 4, "32.0": 5, "64.0": 6}
)
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s")
# The kernel prints 0 or 255 lanes where the link is down or the function has none.
_MOST_LANES = 32
# Reading 4 KiB of configuration space stalls a CPU for about a millisecond, and ACS never changes
# by itself.
_ACS_EVERY_NS = 3600 * NS_PER_S
_EXTENDED = 0x100
_ACS_ID = 0x000D
# Control register: request redirect, completion redirect, upstream forwarding.
_REDIRECTS = 0b1_1100


def parse_generation(text: str) -> int | None:
    """Return the generation of "32.0 GT/s PCIe"; None for "Unknown". Raises ValueError."""
    words = text.strip()
    if words.startswith("Unknown") or not words:
        return None
    found = _SPEED.match(words)
    if found is None:
        raise ValueError(f"link speed is {words[:40]!r}, not GT/s")
    return _GENERATIONS.get(found[1])


def parse_width(text: str) -> int | None:
    """Return lanes; None where the link has none. Raises ValueError."""
    lanes = whole(text.strip(), "link width")
    return lanes if 0 < lanes <= _MOST_LANES else None


def parse_errors(text: str) -> dict[str, int]:
    """Return the counts of an aer_dev file by name; the count is the last word of a line.

    Raises ValueError.
    """
    found = {}
    for line in text.splitlines():
        name, space, count = line.strip().rpartition(" ")
        if not space:
            raise ValueError(f"aer: {line.strip()[:40]!r} is no name and count")
        found[name] = whole(count, f"aer: {name[:40]}")
    return found


def parse_acs(config: bytes) -> bool | None:
    """Return whether ACS redirects peer traffic; None without the right to read all of it.

    A function without the capability redirects nothing.
    """
    if len(config) <= _EXTENDED:
        return None
    at, seen = _EXTENDED, set()
    while at >= _EXTENDED and at not in seen and at + 8 <= len(config):
        seen.add(at)
        head = int.from_bytes(config[at : at + 4], "little")
        if head & 0xFFFF == _ACS_ID:
            return bool(int.from_bytes(config[at + 6 : at + 8], "little") & _REDIRECTS)
        at = head >> 20 & 0xFFC
    return False


class _Links:
    """Reads the functions one by one; keeps what ACS said."""

    __slots__ = ("_acs", "_acs_ns", "_problems")

    def __init__(self) -> None:
        self._acs: dict[str, bool | None] = {}
        self._acs_ns: int | None = None
        self._problems: list[str] = []

    def collect(self, host: Host) -> Iterator[PcieLink | Problem]:
        """Yield a row for each function."""
        try:
            functions = pcie_tree.look(host)
        except FileNotFoundError:
            raise NoData("no PCI devices here (no /sys/bus/pci)") from None
        if not functions:
            raise NoData("no NVIDIA GPU, no RDMA NIC and no NVMe drive on the PCI bus")
        now = host.clock.mono_ns()
        if self._acs_ns is None or now - self._acs_ns >= _ACS_EVERY_NS:
            self._acs, self._acs_ns = {}, now
        for function in functions.values():
            self._problems = []
            yield self._row(host, function)
            if self._problems:
                yield Problem(subject=function.address, message=self._problems[0])

    def _row(self, host: Host, function: Function) -> PcieLink:
        base = f"{PCI}/{function.address}"
        status = self._ask(host, f"{base}/power/runtime_status", str.strip)
        suspended = None if status is None else status == "suspended"

        def link(name: str, parse: Callable[[str], int | None]) -> int | None:
            # Asking would wake it.
            return None if suspended else self._ask(host, f"{base}/{name}", parse)

        correctable = self._ask(host, f"{base}/aer_dev_correctable", parse_errors) or {}
        nonfatal = self._ask(host, f"{base}/aer_dev_nonfatal", parse_errors) or {}
        fatal = self._ask(host, f"{base}/aer_dev_fatal", parse_errors) or {}
        return PcieLink(
            mono_ns=host.clock.mono_ns(),
            pci_bus_id=function.address,
            kind=function.kind,
            device=function.device or None,
            upstream=function.place.upstream,
            suspended=suspended,
            generation=link("current_link_speed", parse_generation),
            width=link("current_link_width", parse_width),
            max_generation=link("max_link_speed", parse_generation),
            max_width=link("max_link_width", parse_width),
            numa_node=function.place.numa_node,
            iommu=self._ask(host, f"{base}/iommu_group/type", str.strip),
            acs_redirect=None if suspended else self._redirects(host, function),
            correctable_errors=correctable.get("TOTAL_ERR_COR"),
            receiver_errors=correctable.get("RxErr"),
            bad_packets=_sum(correctable, "BadTLP", "BadDLLP"),
            replay_timeouts=_sum(correctable, "Timeout", "Rollover"),
            nonfatal_errors=nonfatal.get("TOTAL_ERR_NONFATAL"),
            fatal_errors=fatal.get("TOTAL_ERR_FATAL"),
        )

    def _redirects(self, host: Host, function: Function) -> bool | None:
        if function.kind != "bridge":
            return None
        if function.address not in self._acs:
            try:
                config = host.read_bytes(f"{PCI}/{function.address}/config", keep=False)
            except FileNotFoundError:
                return None
            except OSError as error:
                self._problems.append(f"{error.strerror}: {error.filename}")
                return None
            self._acs[function.address] = parse_acs(config)
        return self._acs[function.address]

    def _ask(self, host: Host, path: str, parse: Callable[[str], _T]) -> _T | None:
        try:
            return parse(host.read_bytes(path, keep=False).decode("utf-8", "replace"))
        except FileNotFoundError:
            return None  # firmware keeps its errors to itself, or there is no IOMMU
        except OSError as error:
            self._problems.append(f"{error.strerror}: {path}")
        except ValueError as error:
            self._problems.append(str(error))
        return None


def _sum(counts: Mapping[str, int], *names: str) -> int | None:
    found = [counts[name] for name in names if name in counts]
    return sum(found) if len(found) == len(names) else None


def make() -> Collect:
    """Return the collector."""
    return _Links().collect


PCIE_LINK = Collector(
    name="pcie_link", lane="slow", make=make, thread="pcie", deadline_s=5.0, every_s=120.0
)
