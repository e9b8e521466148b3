"""What NVMe devices a machine has: controllers, their disks and paths, from the names in sysfs.

Source: /sys/class/nvme and /sys/class/nvme-subsystem. With native multipath a subsystem holds the
disk (head) and each controller a hidden path to it; without, a controller holds the disk itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whyidle.collect.nvme_text import CONTROLLER, DISK, PATH, head_of
from whyidle.host import Host

CONTROLLERS = "sys/class/nvme"
SUBSYSTEMS = "sys/class/nvme-subsystem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A hidden path: its directory, the disk that it belongs to and its controller."""

    name: str
    place: str
    head: str
    controller: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk: its directory, its controllers, and the subsystem with its policy, if any."""

    name: str
    place: str
    controllers: tuple[str, ...]
    subsystem: str | None
    paths: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Directories of the controllers by name, disks and paths."""

    controllers: Mapping[str, str]
    disks: tuple[Disk, ...]
    paths: tuple[Path, ...]


def names(host: Host, place: str) -> tuple[str, ...]:
    """Return the names in a directory; none where it is not there."""
    try:
        return host.names(place)
    except OSError:
        return ()


def look(host: Host) -> Tree:
    """Return the NVMe devices; empty where there are none."""
    controllers = {
        name: f"{CONTROLLERS}/{name}"
        for name in names(host, CONTROLLERS)
        if CONTROLLER.fullmatch(name)
    }
    members: dict[str, list[str]] = {}
    heads: dict[str, tuple[str, str]] = {}
    for subsystem in names(host, SUBSYSTEMS):
        inside = f"{SUBSYSTEMS}/{subsystem}"
        for name in names(host, inside):
            if CONTROLLER.fullmatch(name):
                members.setdefault(subsystem, []).append(name)
                # A container may show the subsystems and not the controllers.
                controllers.setdefault(name, f"{inside}/{name}")
            elif DISK.fullmatch(name):
                heads[name] = f"{inside}/{name}", subsystem
    return _assemble(host, controllers, members, heads)


def _assemble(
    host: Host,
    controllers: dict[str, str],
    members: dict[str, list[str]],
    heads: dict[str, tuple[str, str]],
) -> Tree:
    disks: list[Disk] = []
    paths: list[Path] = []
    above = {name: subsystem for subsystem, inside in members.items() for name in inside}
    for controller, place in sorted(controllers.items()):
        for name in names(host, place):
            if PATH.fullmatch(name):
                path = Path(
                    name=name, place=f"{place}/{name}", head=head_of(name), controller=controller
                )
                paths.append(path)
            elif DISK.fullmatch(name) and name not in heads:
                disks.append(
                    Disk(
                        name=name,
                        place=f"{place}/{name}",
                        controllers=(controller,),
                        subsystem=above.get(controller),
                        paths=0,
                    )
                )
    for name, (place, subsystem) in heads.items():
        through = sorted({path.controller for path in paths if path.head == name})
        disks.append(
            Disk(
                name=name,
                place=place,
                controllers=tuple(through or sorted(members.get(subsystem, ()))),
                subsystem=subsystem,
                paths=sum(path.head == name for path in paths),
            )
        )
    return Tree(
        controllers=controllers,
        disks=tuple(sorted(disks, key=lambda disk: disk.name)),
        paths=tuple(sorted(paths, key=lambda path: path.name)),
    )
