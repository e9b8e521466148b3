"""The PCIe functions that matter: GPUs, NICs, NVMe drives, and the bridges above them.

Source: /sys/bus/pci/devices, whose links lead to /sys/devices/pciDDDD:BB/ROOT_PORT/.../FUNCTION.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from whyidle.collect.gpu_info import parse_numa_node
from whyidle.collect.rdma_device import CLASS, is_pci_address, pci_address
from whyidle.host import Host

Kind = Literal["gpu", "nic", "nvme", "bridge"]

PCI = "sys/bus/pci/devices"
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_NVIDIA = b"0x10de"
# Display controllers: VGA, 3D and other. A VGA of a management controller has another vendor.
_DISPLAY = b"0x03"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a function is: its host bridge, then every bridge on the way to it, itself last."""

    root: str | None
    chain: tuple[str, ...]
    numa_node: int | None

    @property
    def upstream(self) -> str | None:
        """The bridge above it, None at the root."""
        return self.chain[-2] if len(self.chain) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A PCIe function; `device` is the name that the kernel gave what it carries, '' if none."""

    address: str
    kind: Kind
    device: str
    place: Place


def parse_place(path: str, numa_node: int | None) -> Place:
    """Return the place of a function from its real path in /sys/devices."""
    parts = path.split("/")
    roots = [at for at, part in enumerate(parts) if _ROOT.fullmatch(part)]
    # A function behind another host bridge, as of VMD or Hyper-V, has two: the last is its own.
    root = roots[-1] if roots else None
    begin = 0 if root is None else root + 1
    chain = tuple(part for part in parts[begin:] if is_pci_address(part))
    return Place(root=None if root is None else parts[root], chain=chain, numa_node=numa_node)


def look(host: Host) -> Mapping[str, Function]:
    """Return the functions by address; raises FileNotFoundError without PCI, OSError.

    It is found anew each time, which costs some milliseconds: a wrong answer must not stay.
    """
    gpus = [name for name in host.names(PCI) if _is_gpu(host, name)]
    wanted: dict[str, tuple[Kind, str]] = dict.fromkeys(gpus, ("gpu", ""))
    wanted.update({address: ("nic", device) for device, address in _nics(host)})
    wanted.update({address: ("nvme", device) for device, address in _drives(host)})
    functions: dict[str, Function] = {}
    for address, (kind, device) in sorted(wanted.items()):
        place = _place(host, address)
        if place is None:
            continue  # it has gone
        functions[address] = Function(address=address, kind=kind, device=device, place=place)
        for bridge in place.chain[:-1]:
            above = None if bridge in functions else _place(host, bridge)
            if above is not None:
                functions[bridge] = Function(address=bridge, kind="bridge", device="", place=above)
    return functions


def _place(host: Host, address: str) -> Place | None:
    try:
        path = host.link(f"{PCI}/{address}")
    except FileNotFoundError:
        return None
    try:
        text = host.read_bytes(f"{PCI}/{address}/numa_node", keep=False)
    except FileNotFoundError:
        return parse_place(path, None)  # a kernel without NUMA
    return parse_place(path, parse_numa_node(text.decode("ascii", "replace")))


def _is_gpu(host: Host, address: str) -> bool:
    try:
        if not host.read_bytes(f"{PCI}/{address}/class", keep=False).startswith(_DISPLAY):
            return False
        vendor = host.read_bytes(f"{PCI}/{address}/vendor", keep=False)
    except FileNotFoundError:
        return False  # it has gone
    return vendor.strip() == _NVIDIA


def _nics(host: Host) -> Iterator[tuple[str, str]]:
    for device in _names(host, CLASS):
        address = pci_address(host, device)
        if address is not None:
            yield device, address


def _drives(host: Host) -> Iterator[tuple[str, str]]:
    """Yield NVMe controllers on PCIe; those of fabrics lie below devices/virtual."""
    for device in _names(host, "sys/class/nvme"):
        try:
            parts = host.link(f"sys/class/nvme/{device}").split("/")
        except FileNotFoundError:
            continue  # it has gone
        above = [part for part in parts if is_pci_address(part)]
        if above:
            yield device, above[-1]


def _names(host: Host, directory: str) -> tuple[str, ...]:
    try:
        return host.names(directory)
    except FileNotFoundError:
        return ()
