"""TCP connections by service and owner: NVMe over TCP, NFS, and those of watched processes.

Source: sock_diag(7) for connections, /proc/PID/fd for who holds which. Only the agent's own network
namespace is seen, which is where the kernel's mounts live; ranks in containers with a network of
their own are not. A connection belongs to a watched process from the next look at its files. A look
costs a millisecond with 200 connections, so there is one every five seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.process_text import parse_stat
from whyidle.collect.process_tree import ProcessTree
from whyidle.collect.socket_text import (
    NOTHING,
    TOTALS,
    Connection,
    parse,
    parse_answer,
    parse_info,
)
from whyidle.collect.watched import watched_pids
from whyidle.host import Answer, Host
from whyidle.schema import TcpSocket

PEER = "peer"
# Well-known ports of the file systems that the kernel itself talks to.
KERNEL: Mapping[int, str] = MappingProxyType(
    {
        4420: "nvme",
        8009: "nvme",
        2049: "nfs",
        988: "lustre",
        445: "smb",
        3260: "iscsi",
        3300: "ceph",
        6789: "ceph",
    }
)
# Object stores, by TLS, in the clear, and MinIO.
_HTTP = frozenset({80, 443, 9000})
_ROUND_EVERY_NS = 10 * NS_PER_S
# Of others, and of processes that could not be looked at: asked again after this long.
_FORGET_NS = 60 * NS_PER_S
# A process of a job holds a hundred descriptors, at 1.1 us each.
_PROCESSES_BUDGET = 12
_DENIED = (
    "not permitted to look at open files of other users' processes: needs CAP_SYS_PTRACE and "
    "CAP_DAC_READ_SEARCH"
)

# Service, pid and start of the process.
_Key = tuple[str, "int | None", "int | None"]
_Totals = tuple["int | None", ...]


def service_of(peer_port: int, *, kernel: bool) -> str | None:
    """Return the service at a peer's port; None where the kernel has no business there."""
    found = KERNEL.get(peer_port)
    if kernel or found is not None:
        return found
    return "http" if peer_port in _HTTP else PEER


@dataclass(slots=True)
class Sum:
    """Connections of one key: what is now, and totals since the agent began."""

    totals: list[int | None] = field(default_factory=lambda: list(NOTHING))
    sockets: int = 0
    rx_queue_bytes: int = 0
    tx_queue_bytes: int = 0
    rtts_us: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Forget what was."""
        self.sockets = self.rx_queue_bytes = self.tx_queue_bytes = 0
        self.rtts_us = []

    def add(
        self, connection: Connection, rtt_us: int | None, totals: _Totals, before: _Totals | None
    ) -> None:
        """Count a connection; `before` is what has been counted of it, None if nothing has."""
        self.sockets += 1
        self.rx_queue_bytes += connection.rx_queue_bytes
        self.tx_queue_bytes += connection.tx_queue_bytes
        if rtt_us is not None:
            self.rtts_us.append(rtt_us)
        for at, value in enumerate(totals):
            if value is not None:
                counted = (before[at] or 0) if before is not None else 0
                self.totals[at] = (self.totals[at] or 0) + max(0, value - counted)

    def row(self, key: _Key, mono_ns: int) -> TcpSocket:
        """Return the row."""
        service, pid, start_ns = key
        return TcpSocket(
            mono_ns=mono_ns,
            service=service,
            pid=pid,
            start_ns=start_ns,
            sockets=self.sockets,
            **dict(zip(TOTALS, self.totals, strict=True)),
            rx_queue_bytes=self.rx_queue_bytes,
            tx_queue_bytes=self.tx_queue_bytes,
            rtt_us=sum(self.rtts_us) // len(self.rtts_us) if self.rtts_us else None,
            rtt_max_us=max(self.rtts_us, default=None),
        )


def parse_inodes(answer: Answer) -> tuple[int, ...]:
    """Return the inodes of an answer to "socket_inodes"; raises ValueError."""
    if not isinstance(answer, tuple | list):
        raise ValueError(f"socket_inodes: {answer!r:.80} is no list of inodes")
    found = tuple(inode for inode in answer if isinstance(inode, int))
    if len(found) != len(answer):
        raise ValueError(f"socket_inodes: {answer!r:.80} has what is no inode")
    return found


class Owners:
    """Which watched process holds a socket. Looks through their files only for sockets it has not
    seen, some processes a run.
    """

    __slots__ = (
        "_forget_ns",
        "_others",
        "_round",
        "_round_ns",
        "_tree",
        "_wanted",
        "of",
        "refused",
    )

    def __init__(self) -> None:
        self._tree = ProcessTree()
        self._others: set[int] = set()
        self._wanted: set[int] = set()
        self._round: list[int] = []
        self._round_ns: int | None = None
        self._forget_ns = 0
        self.of: dict[int, tuple[int, int]] = {}
        self.refused = False

    def refresh(self, host: Host, inodes: set[int]) -> None:
        """Find out who holds sockets that are new; forget what has gone. Raises OSError."""
        now = host.clock.mono_ns()
        if now >= self._forget_ns:
            self._others, self._forget_ns = set(), now + _FORGET_NS
        self._others &= inodes
        self.of = {inode: owner for inode, owner in self.of.items() if inode in inodes}
        new = inodes - self.of.keys() - self._others
        rested = self._round_ns is None or now - self._round_ns >= _ROUND_EVERY_NS
        if new and not self._round and rested:
            self._round_ns, self._wanted, self.refused = now, new, False
            gpu, commands = watched_pids(host)
            self._tree.scan(host, {*(gpu or ()), *commands})
            self._round = sorted(self._tree.watched, reverse=True)
        for _ in range(min(_PROCESSES_BUDGET, len(self._round))):
            self._ask(host, self._round.pop())
        if not self._round:
            self._others |= self._wanted - self.of.keys()
            self._wanted = set()

    def alive(self, pid: int) -> bool:
        """Return whether a process was watched at the last look."""
        return pid in self._tree.watched

    def _ask(self, host: Host, pid: int) -> None:
        try:
            start_ns = parse_stat(host.read_bytes(f"proc/{pid}/stat", keep=False)).start_ns
            inodes = parse_inodes(host.ask("socket_inodes", pid))
        except PermissionError:
            self.refused = True
            return
        except (OSError, KeyError, ValueError):
            self._tree.drop(pid)  # it has ended
            return
        for inode in inodes:
            # Workers inherit what their parent holds: the parent, which came first, keeps it.
            self.of.setdefault(inode, (pid, start_ns))


class _Sockets:
    """Sums of connections, and what has been counted of each."""

    __slots__ = ("_counted", "_owners", "_sums")

    def __init__(self) -> None:
        self._owners = Owners()
        # None until the first look, whose connections began before the agent.
        self._counted: dict[int, _Totals] | None = None
        self._sums: dict[_Key, Sum] = {}

    def collect(self, host: Host) -> Iterator[TcpSocket | Problem]:
        """Yield a row for each service and owner."""
        try:
            data = parse_answer(host.ask("connections"))
        except KeyError:
            raise NoData("this host was not asked for its connections") from None
        mono_ns = host.clock.mono_ns()
        connections = list(parse(data))
        self._owners.refresh(host, {one.inode for one in connections if one.inode})
        self._count(data, connections)
        for key, total in self._sums.items():
            yield total.row(key, mono_ns)
        if self._owners.refused:
            yield Problem(subject="processes", message=_DENIED)

    def _count(self, data: bytes, connections: Sequence[Connection]) -> None:
        first = self._counted is None
        known = self._counted or {}
        counted: dict[int, _Totals] = {}
        self._sums = {key: total for key, total in self._sums.items() if self._lives(key)}
        for total in self._sums.values():
            total.begin()
        for one in connections:
            key = self._key(one)
            if key is None and not first:
                if one.cookie in known:
                    counted[one.cookie] = known[one.cookie]
                continue
            rtt_us, totals = parse_info(data, one)
            counted[one.cookie] = totals
            if key is not None:
                before = totals if first else known.get(one.cookie)
                self._sums.setdefault(key, Sum()).add(one, rtt_us, totals, before)
        self._counted = counted

    def _lives(self, key: _Key) -> bool:
        return key[1] is None or self._owners.alive(key[1])

    def _key(self, connection: Connection) -> _Key | None:
        owner = self._owners.of.get(connection.inode)
        service = service_of(connection.peer_port, kernel=owner is None)
        if service is None:
            return None
        return (service, None, None) if owner is None else (service, *owner)


def make() -> Collect:
    """Return the collector."""
    return _Sockets().collect


TCP_SOCKET = Collector(
    name="tcp_socket", lane="normal", make=make, thread="sockets", every_s=5.0, deadline_s=5.0
)
