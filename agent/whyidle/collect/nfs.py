"""NFS: what each mount asked of its server, how long that took, and how its connections are.

Source: /proc/self/mountstats, and that of a watched process whose container has NFS mounts of its
own. Reading it sends nothing to a server and waits for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.mount_table import OWN, Mounts, MountTable
from whyidle.collect.nfs_text import Block, Op, blocks, parse_block, parse_ops, point_of
from whyidle.collect.watched import watched_pids
from whyidle.host import Host
from whyidle.schema import NfsMount, NfsOp, NfsTransport

# Mounts come rarely; a node without NFS is asked again this often.
_AGAIN_NS = 10 * NS_PER_S
_NO_NFS = "no NFS is mounted"
# Places in the `events` of mountstats (enum nfs_stat_eventcounters).
_REVALIDATES, _DATA_DROPS, _OPENS, _LOOKUPS, _DELAYS, _PNFS_READS = 0, 2, 4, 5, 24, 25
_MS_PER_DECISECOND = 100

NfsRow: TypeAlias = "NfsMount | NfsOp | NfsTransport"


class _Kept:
    """Whose mountstats are read, which device a mount point is, and operations last parsed."""

    __slots__ = ("_table", "asked_ns", "devices", "none_until_ns", "ops", "told_ns", "who")

    def __init__(self) -> None:
        self._table = MountTable()
        self.asked_ns: int | None = None
        self.who: list[str] = [OWN]
        self.devices: dict[str, dict[str, str]] = {}
        self.none_until_ns = 0
        self.told_ns: int | None = None
        self.ops: dict[tuple[str, str], tuple[bytes, list[Op]]] = {}

    def refresh(self, host: Host, now_ns: int) -> None:
        """Look again, after ten seconds, at who has NFS mounts."""
        if self.asked_ns is not None and now_ns - self.asked_ns < _AGAIN_NS:
            return
        self.asked_ns = now_ns
        self.who, self.devices, self.ops = [OWN], {}, {}
        seen: set[str] = set()
        gpu, commands = watched_pids(host)
        for who in (OWN, *map(str, sorted({*(gpu or ()), *commands}))):
            try:
                mounts = self._table.read(host, who)
            except OSError:
                continue  # ended, or not permitted: what the agent sees itself is left
            found = _nfs_devices(mounts)
            if who == OWN or not seen.issuperset(found.values()):
                self.devices[who] = {p: d for p, d in found.items() if d not in seen}
                self.who = self.who if who == OWN else [*self.who, who]
            seen.update(found.values())

    def parsed_ops(self, who: str, block: Block) -> list[Op]:
        """Return operations, parsed only if their text is another; raises ValueError."""
        old = self.ops.get((who, block.mount_point))
        if old is None or old[0] != block.per_op:
            old = self.ops[who, block.mount_point] = block.per_op, parse_ops(block.per_op)
        return old[1]


def _nfs_devices(mounts: Mounts) -> dict[str, str]:
    return {
        place.mount_point: place.device for place in mounts.places.values() if place.kind == "nfs"
    }


def make() -> Collect:
    """Return the collector."""
    kept = _Kept()

    def collect(host: Host) -> Iterator[NfsRow | Problem]:
        now_ns = host.clock.mono_ns()
        if now_ns < kept.none_until_ns:
            raise NoData(_NO_NFS)
        kept.refresh(host, now_ns)
        found = False
        with_transports = kept.told_ns is None or now_ns - kept.told_ns >= _AGAIN_NS
        for who in kept.who:
            try:
                # Of a container it is not kept open: that would keep its mounts alive.
                data = host.read_bytes(f"proc/{who}/mountstats", keep=who == OWN)
            except OSError as error:
                if who == OWN and not isinstance(error, FileNotFoundError):
                    raise
                continue  # the kernel has none, or that process has ended
            mono_ns = host.clock.mono_ns()
            for item in _rows(kept, who, data, mono_ns, with_transports):
                found = True
                yield item
        if not found:
            kept.none_until_ns = now_ns + _AGAIN_NS
            raise NoData(_NO_NFS)
        kept.told_ns = now_ns if with_transports else kept.told_ns

    return collect


def _rows(
    kept: _Kept, who: str, data: bytes, mono_ns: int, with_transports: bool
) -> Iterator[NfsRow | Problem]:
    """Yield the rows of one namespace."""
    texts: dict[str, bytes] = {}
    for text in blocks(data):
        try:
            texts[point_of(text)] = text  # of two at one place only the last can be reached
        except ValueError as error:
            yield Problem(subject="mountstats", message=str(error))
    devices = kept.devices.get(who, {})
    told: set[str] = set()
    shared: dict[object, str] = {}
    for point, text in texts.items():
        device = devices.get(point)
        if (device is None and who != OWN) or device in told:
            continue  # another namespace, or a bind mount of the same file system
        try:
            block = parse_block(text)
        except ValueError as error:
            yield Problem(subject=point, message=str(error))
            continue
        if device is not None:
            told.add(device)
        first = shared.setdefault(_connections(block), block.mount_point)
        yield _mount(block, device, mono_ns, first if first != block.mount_point else None)
        try:
            yield from _ops(block, kept.parsed_ops(who, block), mono_ns)
        except ValueError as error:
            yield Problem(subject=block.mount_point, message=str(error))
        if with_transports:
            yield from _transports(block, mono_ns)


def _connections(block: Block) -> object:
    """Return what tells connections apart; those that never sent anything all look alike."""
    if any(one.sends for one in block.transports):
        return _server(block), block.transports
    return block.mount_point


def _server(block: Block) -> str:
    # The address of an IPv6 server has colons too, in brackets.
    return block.source.rpartition(":/")[0] or block.source


def _number(block: Block, option: str) -> int | None:
    text = block.options.get(option, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _event(block: Block, place: int) -> int | None:
    return block.events[place] if place < len(block.events) else None


def _total(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _version(block: Block) -> str | None:
    """Return the version; older kernels print the minor one apart."""
    major, minor = block.options.get("vers"), block.options.get("minorversion")
    return f"{major}.{minor}" if major == "4" and minor is not None else major


def _mount(block: Block, device: str | None, mono_ns: int, shares_with: str | None) -> NfsMount:
    options, all_ = block.options, block.transports
    timeout = _number(block, "timeo")
    size: tuple[int | None, ...] = block.sizes or (None,) * 8
    return NfsMount(
        mono_ns=mono_ns,
        mount_point=block.mount_point,
        device=device,
        server=_server(block),
        export="/" + block.source.rpartition(":/")[2],
        version=_version(block),
        protocol=options.get("proto"),
        security=options.get("sec"),
        hard="hard" in options if "hard" in options or "soft" in options else None,
        transfer_read_bytes=_number(block, "rsize"),
        transfer_write_bytes=_number(block, "wsize"),
        timeout_ms=None if timeout is None else timeout * _MS_PER_DECISECOND,
        age_ns=block.age_ns,
        connections=len(all_),
        shares_with=shares_with,
        read_bytes=size[0],
        write_bytes=size[1],
        direct_read_bytes=size[2],
        direct_write_bytes=size[3],
        server_read_bytes=size[4],
        server_write_bytes=size[5],
        opens=_event(block, _OPENS),
        lookups=_event(block, _LOOKUPS),
        attribute_checks=_event(block, _REVALIDATES),
        cache_drops=_event(block, _DATA_DROPS),
        delays=_event(block, _DELAYS),
        pnfs_reads=_event(block, _PNFS_READS),
        connects=_total(one.connects for one in all_),
        sends=_total(one.sends for one in all_),
        receives=_total(one.receives for one in all_),
        bad_replies=_total(one.bad_replies for one in all_),
        outstanding_sum=_total(one.outstanding_sum for one in all_),
        backlog_sum=_total(one.backlog_sum for one in all_),
        slots=max((one.slots for one in all_ if one.slots is not None), default=None),
    )


def _ops(block: Block, ops: list[Op], mono_ns: int) -> Iterator[NfsOp]:
    for op in ops:
        n = op.numbers
        yield NfsOp(
            mono_ns=mono_ns,
            mount_point=block.mount_point,
            op=op.name,
            ops=n[0],
            transmissions=n[1],
            timeouts=n[2],
            sent_bytes=n[3],
            received_bytes=n[4],
            queue_ms=n[5],
            rtt_ms=n[6],
            execute_ms=n[7],
            errors=n[8],
        )


def _transports(block: Block, mono_ns: int) -> Iterator[NfsTransport]:
    for number, one in enumerate(block.transports):
        yield NfsTransport(
            mono_ns=mono_ns,
            mount_point=block.mount_point,
            number=number,
            protocol=one.protocol,
            port=one.port,
            connects=one.connects,
            connecting_ns=one.connecting_ns,
            idle_ns=one.idle_ns,
            sends=one.sends,
            receives=one.receives,
            bad_replies=one.bad_replies,
            outstanding_sum=one.outstanding_sum,
            backlog_sum=one.backlog_sum,
            slots=one.slots,
            rdma_request_bytes=one.rdma_request_bytes,
            rdma_reply_bytes=one.rdma_reply_bytes,
            rdma_registrations=one.rdma_registrations,
            rdma_failures=one.rdma_failures,
        )


NFS = Collector(name="nfs", lane="normal", make=make, thread="storage")
