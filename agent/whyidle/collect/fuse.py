"""FUSE file systems: how many requests wait for their daemon.

Source: /sys/fs/fuse/connections/N (Documentation/filesystems/fuse), where N is the minor number of
the device of the mount. A number that stays above 0 while the daemon does nothing is a daemon that
hangs or waits for its server.
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.mount_table import OWN, MountTable, Place
from whyidle.collect.numbers import whole
from whyidle.collect.watched import watched_pids
from whyidle.host import Host
from whyidle.schema import FuseConnection

_CONNECTIONS = "sys/fs/fuse/connections"
_LOOK_EVERY_NS = 10 * NS_PER_S
_DENIED = (
    "not permitted to read waiting of FUSE connections: run the agent as root or with "
    "CAP_DAC_READ_SEARCH"
)


class _Kept:
    """The mounts of connections, the limits of each, and the names that were listed last."""

    __slots__ = ("_table", "limits", "looked_ns", "names", "places")

    def __init__(self) -> None:
        self._table = MountTable()
        self.looked_ns: int | None = None
        self.names: tuple[str, ...] = ()
        self.places: dict[str, Place] = {}
        self.limits: dict[str, tuple[int | None, int | None]] = {}

    def look(self, host: Host, now_ns: int) -> None:
        """List the connections; look at mounts again when they changed or it was long ago."""
        try:
            listed = host.names(_CONNECTIONS)
        except OSError:
            listed = ()  # no FUSE, or fusectl is not mounted
        names = tuple(name for name in listed if name.isascii() and name.isdigit())
        old = self.looked_ns is None or now_ns - self.looked_ns >= _LOOK_EVERY_NS
        if names == self.names and not (old and names):
            return
        self.looked_ns, self.names = now_ns, names
        self.limits = {name: _limits(host, name) for name in names}
        self.places = {}
        gpu, commands = watched_pids(host)
        for who in (OWN, *map(str, sorted({*(gpu or ()), *commands}))):
            try:
                mounts = self._table.read(host, who)
            except OSError:
                continue  # ended, or not permitted
            for place in mounts.places.values():
                if place.fs_type.startswith(("fuse", "virtiofs")):
                    self.places.setdefault(place.device, place)


def _number(host: Host, path: str) -> int:
    return whole(host.read(path).strip(), path.rpartition("/")[2])


def _limits(host: Host, name: str) -> tuple[int | None, int | None]:
    try:
        return (
            _number(host, f"{_CONNECTIONS}/{name}/max_background"),
            _number(host, f"{_CONNECTIONS}/{name}/congestion_threshold"),
        )
    except (OSError, ValueError):
        return None, None  # not permitted, or just unmounted: waiting tells which


def make() -> Collect:
    """Return the collector."""
    kept = _Kept()

    def collect(host: Host) -> Iterator[FuseConnection | Problem]:
        kept.look(host, host.clock.mono_ns())
        if not kept.names:
            raise NoData("no FUSE file system is mounted, or /sys/fs/fuse/connections is not")
        denied = False
        for name in kept.names:
            try:
                waiting: int | None = _number(host, f"{_CONNECTIONS}/{name}/waiting")
            except FileNotFoundError:
                continue  # just unmounted
            except PermissionError:
                denied, waiting = True, None
            except (OSError, ValueError) as error:
                yield Problem(subject=f"connection {name}", message=str(error))
                continue
            yield _row(kept, name, waiting, host.clock.mono_ns())
        if denied:
            yield Problem(subject="waiting", message=_DENIED)

    return collect


def _row(kept: _Kept, name: str, waiting: int | None, mono_ns: int) -> FuseConnection:
    device = f"0:{name}"
    place = kept.places.get(device)
    max_background, congestion_threshold = kept.limits.get(name, (None, None))
    return FuseConnection(
        mono_ns=mono_ns,
        device=device,
        mount_point=None if place is None else place.mount_point,
        fs_type=None if place is None else place.fs_type,
        kind=None if place is None else place.kind,
        waiting=waiting,
        max_background=max_background,
        congestion_threshold=congestion_threshold,
    )


FUSE = Collector(name="fuse", lane="normal", make=make, thread="storage")
