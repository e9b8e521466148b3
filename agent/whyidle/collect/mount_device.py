"""Which disks a block device stands on, and by which transport they are reached.

Source: /sys/dev/block (Documentation/ABI/testing/sysfs-block), the `slaves` of dm and md, and the
NVMe controllers above a namespace.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from whyidle.host import Host

# A volume of a pool of a mirror of partitions: deeper stacks are a loop in a damaged tree.
_DEPTH_LIMIT = 8
_NVME_DISK = re.compile(r"nvme\d+(c\d+)?n\d+")
_CONTROLLER = re.compile(r"nvme\d+")
_LOOP = re.compile(r"loop\d+")
_FABRICS = frozenset({"tcp", "rdma", "fc", "loop"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Disks:
    """Whole disks and NVMe transports, each sorted; empty where nobody says."""

    names: tuple[str, ...]
    transports: tuple[str, ...]

    @property
    def is_nvmeof(self) -> bool:
        """Whether some disk is reached over a network."""
        return not _FABRICS.isdisjoint(self.transports)


NO_DISKS = Disks(names=(), transports=())


def disks_of(host: Host, device: str, source: str) -> Disks:
    """Return the disks below a mount's device (`major:minor`) or, without one, its /dev source."""
    try:
        if not device.startswith("0:"):
            place = host.link(f"sys/dev/block/{device}")
        elif source.startswith("/dev/"):
            # /dev/mapper holds links to dm-0 and so on; in sysfs the name is the last part.
            name = _device_name(host, source)
            place = host.link(f"sys/class/block/{name}")
        else:
            return NO_DISKS
    except OSError:
        return NO_DISKS
    names: set[str] = set()
    transports: set[str] = set()
    _descend(host, place, names, transports, _DEPTH_LIMIT)
    return Disks(names=tuple(sorted(names)), transports=tuple(sorted(transports)))


def backing_file(host: Host, disk: str) -> str | None:
    """Return the file that a loop device is made of; None for any other disk."""
    return _text(host, f"sys/class/block/{disk}/loop/backing_file") if _LOOP.match(disk) else None


def _device_name(host: Host, source: str) -> str:
    path = source.lstrip("/")
    with suppress(OSError):  # a container lacks its host's /dev; sysfs may know the name anyhow
        path = host.link(path)
    return path.rpartition("/")[2]


def _descend(host: Host, place: str, names: set[str], transports: set[str], depth: int) -> None:
    """Add the disks at or below `place`, the real directory of a device in sysfs."""
    if _exists(host, f"{place}/partition"):
        place = place.rpartition("/")[0]
    below = _names(host, f"{place}/slaves")
    if not below or depth == 0:
        name = place.rpartition("/")[2]
        names.add(name.replace("!", "/"))
        if _NVME_DISK.fullmatch(name):
            transports.update(_transports(host, place))
        return
    for name in below:
        try:
            real = host.link(f"{place}/slaves/{name}")
        except OSError:
            continue  # it has just left its array
        _descend(host, real, names, transports, depth - 1)


def _transports(host: Host, place: str) -> set[str]:
    """Return the transports of an NVMe disk: of its controller, or of all of its subsystem's."""
    parent = place.rpartition("/")[0]
    found = {_text(host, f"{parent}/transport")}
    if found == {None}:  # the head of a multipath namespace: controllers lie beside it
        controllers = [name for name in _names(host, parent) if _CONTROLLER.fullmatch(name)]
        found = {_text(host, f"{parent}/{name}/transport") for name in controllers}
    return {transport for transport in found if transport}


def _exists(host: Host, path: str) -> bool:
    try:
        host.stat(path)
    except OSError:
        return False
    return True


def _names(host: Host, path: str) -> tuple[str, ...]:
    try:
        return host.names(path)
    except OSError:
        return ()


def _text(host: Host, path: str) -> str | None:
    try:
        return host.read_bytes(path, keep=False).decode("utf-8", "replace").strip()
    except OSError:
        return None
