"""Lustre clients: bytes and times of their mounts, and how each of their servers answers.

Source: llite, osc and mdc below /proc/fs/lustre (up to 2.11 or so) or /sys/kernel/debug/lustre
(newer; for root only). Nothing of it asks a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.lustre_text import (
    Import,
    Sample,
    file_system_of,
    parse_import,
    parse_stats,
    target_of,
)
from whyidle.collect.mount_table import OWN, MountTable
from whyidle.host import Host
from whyidle.schema import LustreMount, LustreTarget

_BASES = ("proc/fs/lustre", "sys/kernel/debug/lustre", "sys/fs/lustre")
# Clients come and go with mounts. Targets may be hundreds, at 30 us each.
_LOOK_EVERY_NS = 10 * NS_PER_S
TARGETS_LIMIT = 256
_DENIED = (
    "not permitted to read Lustre's statistics in debugfs: run the agent as root or with "
    "CAP_DAC_READ_SEARCH"
)
_NONE = Import(state=None, connection=None, connects=None, in_flight=None, timeouts=None)


class _Kept:
    """Directories of clients and of their targets, and where clients are mounted."""

    __slots__ = ("_table", "clients", "denied", "looked_ns", "points", "targets")

    def __init__(self) -> None:
        self._table = MountTable()
        self.looked_ns: int | None = None
        self.clients: dict[str, str] = {}
        self.targets: dict[str, str] = {}
        self.points: dict[str, str] = {}
        self.denied = False

    def look(self, host: Host, now_ns: int) -> bool:
        """Look for clients and targets if it was long ago; return whether it was."""
        if self.looked_ns is not None and now_ns - self.looked_ns < _LOOK_EVERY_NS:
            return False
        self.looked_ns = now_ns
        self.denied = False
        self.clients = self._find(host, "llite")
        self.targets = {**self._find(host, "osc"), **self._find(host, "mdc")}
        self.points = {}
        if self.clients:
            try:
                places = self._table.read(host, OWN).places.values()
            except OSError:
                return True  # without mounts clients have no mount point
            self.points = {
                place.source.rpartition(":/")[2].split("/")[0]: place.mount_point
                for place in reversed(list(places))
                if place.kind == "lustre"
            }
        return True

    def _find(self, host: Host, kind: str) -> dict[str, str]:
        """Return the directories of `kind` that have statistics, by the name of the instance."""
        found: dict[str, str] = {}
        for base in _BASES:
            try:
                names = host.names(f"{base}/{kind}")
            except PermissionError:
                self.denied = True
                continue
            except OSError:
                continue
            for name in names:
                directory = f"{base}/{kind}/{name}"
                try:
                    host.stat(f"{directory}/stats")
                except OSError:
                    continue
                found.setdefault(name, directory)
        return found


def make() -> Collect:
    """Return the collector."""
    kept = _Kept()

    def collect(host: Host) -> Iterator[LustreMount | LustreTarget | Problem]:
        looked = kept.look(host, host.clock.mono_ns())
        if not kept.clients:
            raise NoData(_DENIED if kept.denied else "no Lustre is mounted")
        for name, directory in kept.clients.items():
            try:
                stats = parse_stats(host.read(f"{directory}/stats"))
            except FileNotFoundError:
                continue  # just unmounted
            except (OSError, ValueError) as error:
                yield Problem(subject=name, message=str(error))
                continue
            yield _mount(name, kept.points, stats, host.clock.mono_ns())
        if not looked:
            return
        for name, directory in list(kept.targets.items())[:TARGETS_LIMIT]:
            yield from _target(host, name, directory)
        if len(kept.targets) > TARGETS_LIMIT:
            message = f"{len(kept.targets)} targets; {TARGETS_LIMIT} of them are recorded"
            yield Problem(subject="targets", message=message)

    return collect


def _count(stats: Mapping[str, Sample], *names: str) -> int | None:
    found = next((stats[name] for name in names if name in stats), None)
    return None if found is None else found.count


def _sum(stats: Mapping[str, Sample], name: str) -> int | None:
    found = stats.get(name)
    return None if found is None else found.total


def _time(stats: Mapping[str, Sample], name: str) -> int | None:
    found = stats.get(name)
    return None if found is None else found.total_us


def _mount(
    name: str, points: Mapping[str, str], stats: Mapping[str, Sample], mono_ns: int
) -> LustreMount:
    file_system = file_system_of(name)
    return LustreMount(
        mono_ns=mono_ns,
        instance=name,
        file_system=file_system,
        mount_point=points.get(file_system),
        reads=_count(stats, "read_bytes", "read"),
        read_bytes=_sum(stats, "read_bytes"),
        read_us=_time(stats, "read"),
        writes=_count(stats, "write_bytes", "write"),
        write_bytes=_sum(stats, "write_bytes"),
        write_us=_time(stats, "write"),
        opens=_count(stats, "open"),
        open_us=_time(stats, "open"),
        getattrs=_count(stats, "getattr"),
        getattr_us=_time(stats, "getattr"),
    )


def _target(host: Host, name: str, directory: str) -> Iterator[LustreTarget | Problem]:
    try:
        stats = parse_stats(host.read(f"{directory}/stats"))
        known = _import(host, directory)
    except FileNotFoundError:
        return  # just unmounted
    except (OSError, ValueError) as error:
        yield Problem(subject=name, message=str(error))
        return
    yield LustreTarget(
        mono_ns=host.clock.mono_ns(),
        instance=name,
        target=target_of(name),
        kind="mdt" if "/mdc/" in directory else "ost",
        state=known.state,
        connection=known.connection,
        connects=known.connects,
        timeouts=known.timeouts,
        in_flight=known.in_flight,
        requests=_count(stats, "req_waittime"),
        request_us=_time(stats, "req_waittime"),
        read_bytes=_sum(stats, "read_bytes"),
        write_bytes=_sum(stats, "write_bytes"),
        reads=_count(stats, "ost_read"),
        read_us=_time(stats, "ost_read"),
        writes=_count(stats, "ost_write"),
        write_us=_time(stats, "ost_write"),
    )


def _import(host: Host, directory: str) -> Import:
    try:
        return parse_import(host.read(f"{directory}/import"))
    except (FileNotFoundError, PermissionError):
        return _NONE  # newer ones keep it where only root reads


LUSTRE = Collector(name="lustre", lane="normal", make=make, thread="storage")
