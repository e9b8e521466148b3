"""Mounts: which file systems the node and its jobs have, on which disks or servers.

Source: /proc/self/mountinfo, and that of watched processes, which see the mounts of their container
(proc_pid_mountinfo(5)). The text is compared, and parsed only where it changed.
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.mount_table import OWN, MountTable, Place
from whyidle.collect.watched import watched_pids
from whyidle.host import Host
from whyidle.schema import Mount

_EVERY_S = 10.0
# Everything is told again this often, so that each segment of a recording explains itself.
_AGAIN_NS = 60 * NS_PER_S
# A node with a hundred containers has thousands of mounts, most of them of nobody's data.
MOUNTS_LIMIT = 2048
_DENIED = "not permitted to read the mounts of other users' processes: needs CAP_SYS_PTRACE"


def make() -> Collect:
    """Return the collector, with the mounts that it has told of."""
    table = MountTable()
    told: dict[int, tuple[Place, bool]] = {}
    told_ns: int | None = None

    def collect(host: Host) -> Iterator[Mount | Problem]:
        nonlocal told, told_ns
        try:
            own = table.read(host, OWN)
        except FileNotFoundError:
            raise NoData("the kernel lists no mounts (no /proc/self/mountinfo)") from None
        mono_ns = host.clock.mono_ns()
        yield from own.problems
        found = {number: (place, True) for number, place in own.places.items()}
        yield from _add_foreign(host, table, found)
        if len(found) > MOUNTS_LIMIT:
            message = f"{len(found)} mounts; the last {len(found) - MOUNTS_LIMIT} are not recorded"
            yield Problem(subject="mounts", message=message)
            found = dict(list(found.items())[:MOUNTS_LIMIT])
        again = told_ns is None or mono_ns - told_ns >= _AGAIN_NS
        known, told = told, found
        told_ns = mono_ns if again else told_ns
        for number, (place, own_namespace) in found.items():
            if again or known.get(number) != (place, own_namespace):
                yield _row(place, own_namespace, mono_ns)

    return collect


def _add_foreign(
    host: Host, table: MountTable, found: dict[int, tuple[Place, bool]]
) -> Iterator[Problem]:
    """Add what only watched processes see, in mount namespaces of their own."""
    gpu, commands = watched_pids(host)
    denied = False
    for pid in sorted({*(gpu or ()), *commands}):
        try:
            mounts = table.read(host, str(pid))
        except PermissionError:
            denied = True
        except OSError:
            continue  # it has ended, or is ending
        else:
            for number, place in mounts.places.items():
                found.setdefault(number, (place, False))
    if denied:
        yield Problem(subject="namespaces", message=_DENIED)


def _row(place: Place, own_namespace: bool, mono_ns: int) -> Mount:
    return Mount(
        mono_ns=mono_ns,
        mount_id=place.mount_id,
        device=place.device,
        fs_type=place.fs_type,
        kind=place.kind,
        source=place.source,
        mount_point=place.mount_point,
        root=place.root,
        block_device=place.block_device,
        nvme_transport=place.nvme_transport,
        own_namespace=own_namespace,
    )


MOUNT = Collector(name="mount", lane="slow", make=make, thread="process", every_s=_EVERY_S)
