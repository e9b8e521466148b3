"""NVMe controllers, namespaces and paths: where they are, and whether they answer.

Source: sysfs of the nvme driver. The states of controllers and paths are read every five seconds: a
controller that is connecting makes all I/O wait, and its workers sleep. All else is read once a
minute. Nothing here sends a command to a device (as nuse, temperatures and SMART logs would).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from whyidle.clock import NS_PER_S
from whyidle.collect.block_device import SECTOR_BYTES
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.nvme_text import parse_address, parse_number, parse_seconds
from whyidle.collect.nvme_tree import CONTROLLERS, SUBSYSTEMS, Disk, Path, Tree, look, names
from whyidle.host import Host
from whyidle.schema import NvmeController, NvmeNamespace, NvmePath
from whyidle.table import replaced

# A path that breaks is tried again after 10 s by default. 28 controllers and 16 paths take 0.5 to
# 1.3 ms.
_EVERY_S = 5.0
# Names are listed this often: 10 us. Attributes that rarely change are read again once a minute,
# which is also when every row is told again.
_LOOK_EVERY_NS = 5 * NS_PER_S
_AGAIN_NS = 60 * NS_PER_S
# What counts errors, on kernels that do.
_COUNTS_EVERY_NS = 10 * NS_PER_S
_IO_TIMEOUT = "sys/module/nvme_core/parameters/io_timeout"

Device: TypeAlias = "NvmeController | NvmeNamespace | NvmePath"


def _text(host: Host, path: str) -> str | None:
    """Return a file's text, stripped of the padding of its model or serial; None without it."""
    try:
        found = host.read_bytes(path, keep=False).decode("utf-8", "replace").strip(" \n\0")
    except OSError:
        return None  # older kernels, other transports and drives that just left lack it
    return found or None


def _number(host: Host, path: str) -> int | None:
    text = _text(host, path)
    return None if text is None else parse_number(text, path.rpartition("/")[2])


def _seconds(host: Host, path: str) -> int | None:
    text = _text(host, path)
    return None if text is None else parse_seconds(text, path.rpartition("/")[2])


def _state(host: Host, path: str) -> str | None:
    try:
        return host.read(path).strip() or None
    except OSError:
        return None  # it is going; the next look at the names will tell


def read_controller(host: Host, name: str, place: str, mono_ns: int) -> NvmeController:
    """Return all that sysfs says of a controller; raises ValueError."""
    address = parse_address(_text(host, f"{place}/address") or "")
    entries = _number(host, f"{place}/sqsize")
    give_up = _text(host, f"{place}/ctrl_loss_tmo")
    return NvmeController(
        mono_ns=mono_ns,
        controller=name,
        state=_state(host, f"{place}/state"),
        transport=_text(host, f"{place}/transport"),
        address=address.target,
        service=address.service,
        host_address=address.host,
        subsystem=_text(host, f"{place}/subsysnqn"),
        model=_text(host, f"{place}/model"),
        serial=_text(host, f"{place}/serial"),
        firmware=_text(host, f"{place}/firmware_rev"),
        controller_id=_number(host, f"{place}/cntlid"),
        numa_node=_number(host, f"{place}/numa_node"),
        queues=_number(host, f"{place}/queue_count"),
        queue_entries=None if entries is None else entries + 1,
        keep_alive_ns=_seconds(host, f"{place}/kato"),
        give_up_ns=None if give_up is None else parse_seconds(give_up, "ctrl_loss_tmo"),
        never_gives_up=None if give_up is None else give_up == "off" or give_up.startswith("-"),
        reconnect_delay_ns=_seconds(host, f"{place}/reconnect_delay"),
        fast_io_fail_ns=_seconds(host, f"{place}/fast_io_fail_tmo"),
        io_timeout_ns=_seconds(host, _IO_TIMEOUT),
        resets=_number(host, f"{place}/diag/reset_count"),
        reconnects=_number(host, f"{place}/diag/reconnect_count"),
        command_errors=_number(host, f"{place}/diag/command_error_count"),
    )


def read_namespace(host: Host, disk: Disk, tree: Tree, mono_ns: int) -> NvmeNamespace:
    """Return all that sysfs says of a disk; raises ValueError."""
    sectors = _number(host, f"{disk.place}/size")
    through = (tree.controllers.get(name) for name in disk.controllers)
    transports = {_text(host, f"{place}/transport") for place in through if place}
    policy = None if disk.subsystem is None else f"{SUBSYSTEMS}/{disk.subsystem}/iopolicy"
    return NvmeNamespace(
        mono_ns=mono_ns,
        device=disk.name,
        namespace_id=_number(host, f"{disk.place}/nsid"),
        size_bytes=None if sectors is None else sectors * SECTOR_BYTES,
        controllers=",".join(disk.controllers),
        transport=",".join(sorted(name for name in transports if name)) or None,
        paths=disk.paths,
        io_policy=_text(host, policy) if policy is not None and disk.paths else None,
        requeued=_number(host, f"{disk.place}/diag/io_requeue_no_usable_path_count"),
        failed=_number(host, f"{disk.place}/diag/io_fail_no_available_path_count"),
    )


def read_path(host: Host, path: Path, mono_ns: int) -> NvmePath:
    """Return all that sysfs says of a path; raises ValueError."""
    return NvmePath(
        mono_ns=mono_ns,
        device=path.name,
        namespace=path.head,
        controller=path.controller,
        ana_state=_state(host, f"{path.place}/ana_state"),
        ana_group=_number(host, f"{path.place}/ana_grpid"),
        retries=_number(host, f"{path.place}/diag/command_retry_count"),
        command_errors=_number(host, f"{path.place}/diag/command_error_count"),
        failovers=_number(host, f"{path.place}/diag/multipath_failover_count"),
    )


@dataclass(slots=True)
class _Known:
    """The devices, what was told of each, and when what was looked at last."""

    tree: Tree | None = None
    listed: tuple[tuple[str, ...], ...] = ()
    looked_ns: int = 0
    told_ns: int = 0
    counted_ns: int = 0
    counts: bool = False
    controllers: dict[str, NvmeController] = field(default_factory=dict)
    paths: dict[str, NvmePath] = field(default_factory=dict)


def make() -> Collect:
    """Return the collector, with the devices that it has told of."""
    known = _Known()

    def collect(host: Host) -> Iterator[Device | Problem]:
        now_ns = host.clock.mono_ns()
        if known.tree is None or now_ns - known.looked_ns >= _LOOK_EVERY_NS:
            known.looked_ns = now_ns
            listed = (names(host, CONTROLLERS), names(host, SUBSYSTEMS))
            if known.tree is None or listed != known.listed:
                known.listed, known.tree, known.told_ns = listed, None, 0
        if known.tree is None or now_ns - known.told_ns >= _AGAIN_NS:
            yield from _tell_all(host, known, now_ns)
            return
        yield from _tell_changes(host, known, now_ns)

    return collect


def _tell_all(host: Host, known: _Known, now_ns: int) -> Iterator[Device | Problem]:
    tree = known.tree = look(host)
    known.told_ns = known.counted_ns = now_ns
    known.controllers.clear()
    known.paths.clear()
    if not tree.controllers:
        raise NoData("the machine has no NVMe device (nothing in /sys/class/nvme)")
    for name, place in tree.controllers.items():
        try:
            controller = read_controller(host, name, place, host.clock.mono_ns())
        except ValueError as error:
            yield Problem(subject=name, message=str(error))
            continue
        known.controllers[name] = controller
        yield controller
    for path in tree.paths:
        try:
            row = read_path(host, path, host.clock.mono_ns())
        except ValueError as error:
            yield Problem(subject=path.name, message=str(error))
            continue
        known.paths[path.name] = row
        yield row
    for disk in tree.disks:
        try:
            yield read_namespace(host, disk, tree, host.clock.mono_ns())
        except ValueError as error:
            yield Problem(subject=disk.name, message=str(error))
    controllers, paths = known.controllers.values(), known.paths.values()
    known.counts = any(row.command_errors is not None for row in controllers) or any(
        row.command_errors is not None for row in paths
    )


def _tell_changes(host: Host, known: _Known, now_ns: int) -> Iterator[Device | Problem]:
    tree = known.tree
    assert tree is not None
    if not tree.controllers:
        raise NoData("the machine has no NVMe device (nothing in /sys/class/nvme)")
    counts = known.counts and now_ns - known.counted_ns >= _COUNTS_EVERY_NS
    known.counted_ns = now_ns if counts else known.counted_ns
    for name, old in known.controllers.items():
        place = tree.controllers[name]
        state = _state(host, f"{place}/state")
        if counts or state != old.state:
            try:
                new = read_controller(host, name, place, host.clock.mono_ns())
            except ValueError as error:
                yield Problem(subject=name, message=str(error))
                continue
            if replaced(new, mono_ns=old.mono_ns) != old:
                known.controllers[name] = new
                yield new
    for path in tree.paths:
        was = known.paths.get(path.name)
        # Without ANA there is no state to read, and a failed open each second for nothing.
        if was is None or (was.ana_state is None and not counts):
            continue
        ana_state = _state(host, f"{path.place}/ana_state")
        if counts or ana_state != was.ana_state:
            try:
                row = read_path(host, path, host.clock.mono_ns())
            except ValueError as error:
                yield Problem(subject=path.name, message=str(error))
                continue
            if replaced(row, mono_ns=was.mono_ns) != was:
                known.paths[path.name] = row
                yield row


NVME = Collector(name="nvme", lane="normal", make=make, thread="storage", every_s=_EVERY_S)
