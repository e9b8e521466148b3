"""The mounts that a process sees, with the disks below them, parsed once for each text.

Mount ids are of one kind for all mount namespaces of a machine, so that what containers see adds to
what the agent sees and never contradicts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Problem
from whyidle.collect.mount_device import NO_DISKS, Disks, backing_file, disks_of
from whyidle.collect.mount_text import MountText, parse
from whyidle.host import Host

OWN = "self"
# Arrays and paths below a mount change rarely: looked at again this often.
_DISKS_EVERY_NS = 60 * NS_PER_S
# The kernel writes the list anew for each look, 0.1 ms and more.
_OWN_EVERY_NS = 10 * NS_PER_S
# Where an image is as near as a disk of this machine.
_LOCAL = frozenset({"block", "overlay", "tmpfs", "other"})
# Texts that are kept parsed; more namespaces than this share nothing and are parsed each time.
_TEXTS_LIMIT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A mount with what is below it."""

    mount_id: int
    device: str
    fs_type: str
    kind: str
    source: str
    mount_point: str
    root: str
    block_device: str | None
    nvme_transport: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mounts:
    """The mounts of one namespace by mount id, and the lines that were none."""

    places: Mapping[int, Place]
    problems: tuple[Problem, ...]


class MountTable:
    """Reads and keeps mounts; one for each collector that needs them."""

    __slots__ = ("_disks", "_disks_ns", "_own", "_own_ns", "_texts")

    def __init__(self) -> None:
        self._texts: dict[bytes, Mounts] = {}
        self._own: bytes = b""
        self._disks: dict[tuple[str, str], Disks] = {}
        self._disks_ns: int | None = None
        self._own_ns: int | None = None

    def begin(self, host: Host) -> None:
        """Look at the agent's own mounts, unless it was just done; raises OSError."""
        now_ns = host.clock.mono_ns()
        if self._own_ns is None or now_ns - self._own_ns >= _OWN_EVERY_NS:
            self.read(host, OWN)

    def read(self, host: Host, who: str) -> Mounts:
        """Return the mounts that `who`, a pid or OWN, sees; raises OSError."""
        # A kept descriptor would keep the namespace of a container alive after its last process.
        data = host.read_bytes(f"proc/{who}/mountinfo", keep=who == OWN)
        now_ns = host.clock.mono_ns()
        old = self._disks_ns is None or now_ns - self._disks_ns >= _DISKS_EVERY_NS
        if old or (who == OWN and data != self._own):
            self._disks_ns = now_ns
            self._texts.clear()
            self._disks.clear()
        if who == OWN:
            self._own, self._own_ns = data, now_ns
        known = self._texts.get(data)
        if known is None:
            if len(self._texts) >= _TEXTS_LIMIT:
                self._texts.pop(next(iter(self._texts)))
            known = self._texts[data] = self._parse(host, data)
        return known

    def _parse(self, host: Host, data: bytes) -> Mounts:
        found = list(parse(data.decode("utf-8", "replace")))
        mounts = [item for item in found if isinstance(item, MountText)]
        # The directories of an overlay are named as the host sees them, not its container.
        hosts = self._texts.get(self._own) if data != self._own else None
        around = mounts if hosts is None else [*hosts.places.values()]
        places = {mount.mount_id: self._place(host, mount, around) for mount in mounts}
        problems = tuple(item for item in found if isinstance(item, Problem))
        return Mounts(places=places, problems=problems)

    def _place(self, host: Host, mount: MountText, around: Iterable[MountText | Place]) -> Place:
        disks = self._below(host, mount.device, mount.source)
        if mount.below is not None:
            holder = holder_of(mount.below, around)
            if holder is not None and holder.fs_type != "overlay":
                disks = self._below(host, holder.device, holder.source)
        return Place(
            mount_id=mount.mount_id,
            device=mount.device,
            fs_type=mount.fs_type,
            kind=self._kind(host, mount, disks, around),
            source=mount.source,
            mount_point=mount.mount_point,
            root=mount.root,
            block_device=",".join(disks.names) or None,
            nvme_transport=",".join(disks.transports) or None,
        )

    def _kind(
        self, host: Host, mount: MountText, disks: Disks, around: Iterable[MountText | Place]
    ) -> str:
        """Return the kind of a mount, by what its disks are reached over or made of."""
        if mount.kind != "block":
            return mount.kind
        if disks.is_nvmeof:
            return "nvmeof"
        # An image on a network file system, as containers and data sets on clusters often are.
        file = backing_file(host, disks.names[0]) if len(disks.names) == 1 else None
        holder = None if file is None else holder_of(file, around)
        return mount.kind if holder is None or holder.kind in _LOCAL else holder.kind

    def _below(self, host: Host, device: str, source: str) -> Disks:
        if device.startswith("0:") and not source.startswith("/dev/"):
            return NO_DISKS
        key = (device, source)
        if key not in self._disks:
            self._disks[key] = disks_of(host, device, source)
        return self._disks[key]


def holder_of(directory: str, mounts: Iterable[MountText | Place]) -> MountText | Place | None:
    """Return the mount that a directory lies in; of several at one place the last, on top."""
    best: MountText | Place | None = None
    for mount in mounts:
        point = mount.mount_point.rstrip("/")
        inside = directory == point or directory.startswith(f"{point}/")
        if inside and (best is None or len(point) >= len(best.mount_point.rstrip("/"))):
            best = mount
    return best
