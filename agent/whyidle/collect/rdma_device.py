"""RDMA devices and their ports: which there are, and the interfaces and PCI functions they are on.

https://docs.kernel.org/admin-guide/abi-stable.html (sysfs-class-infiniband)
"""

from __future__ import annotations

import re
from contextlib import suppress

from whyidle.collect.collector import NoData
from whyidle.host import Host

CLASS = "sys/class/infiniband"
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def devices(host: Host) -> tuple[str, ...]:
    """Return the names of the devices; raises NoData where there are none, OSError."""
    try:
        found = host.names(CLASS)
    except FileNotFoundError:
        found = ()
    if not found:
        raise NoData("no RDMA device on this machine (nothing in /sys/class/infiniband)")
    return found


def ports(host: Host, device: str) -> tuple[int, ...]:
    """Return the numbers of a device's ports; raises OSError."""
    names = host.names(f"{CLASS}/{device}/ports")
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def pci_address(host: Host, device: str) -> str | None:
    """Return the PCI address of a device; None for one that is no PCI function, as rxe."""
    return pci_at(host, f"{CLASS}/{device}/device")


def pci_at(host: Host, path: str) -> str | None:
    """Return the PCI address that a link leads to, None if it leads elsewhere or nowhere."""
    try:
        last = host.link(path).rpartition("/")[2]
    except OSError:
        return None
    return last if _PCI.fullmatch(last) else None


def is_pci_address(name: str) -> bool:
    """Return whether a name is a PCI address of sysfs."""
    return _PCI.fullmatch(name) is not None


def interfaces(host: Host, device: str, port: int, count: int) -> tuple[str, ...]:
    """Return the network interfaces over a port of a device with `count` ports.

    The port's own table of GIDs names the one of RoCE; IPoIB interfaces are told apart by dev_port.
    """
    found = set()
    with suppress(OSError):  # an unset slot, or a driver without RoCE: what follows knows
        found.add(host.read(f"{CLASS}/{device}/ports/{port}/gid_attrs/ndevs/0").strip())
    directory = f"{CLASS}/{device}/device/net"
    try:
        names = host.names(directory)
    except OSError:
        names = ()
    for name in names:
        if count == 1 or _dev_port(host, f"{directory}/{name}") == port - 1:
            found.add(name)
    return tuple(sorted(found - {""}))


def _dev_port(host: Host, directory: str) -> int | None:
    for name in ("dev_port", "dev_id"):
        try:
            number = int(host.read(f"{directory}/{name}"), 0)
        except (OSError, ValueError):
            continue
        # Drivers of old leave dev_port at 0 and tell ports apart by dev_id alone.
        if number or name == "dev_id":
            return number
    return 0
