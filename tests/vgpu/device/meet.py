"""Collectives: who has arrived, and when the data can move.

A group is an NCCL communicator. Its members' n-th collectives belong together, as do the n-th send
and receive of a pair. Where members disagree on which one comes next, nobody ever leaves, as with
NCCL. A sender (or the root of a broadcast) whose data fit NCCL's buffers leaves without its peers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vgpu.device.kinds import COLLECTIVES
from vgpu.device.lane import Context, Flow, Held, Lane

BROADCAST, SEND, RECV = (COLLECTIVES.index(name) for name in ("broadcast", "send", "recv"))
_REDUCE = COLLECTIVES.index("all_reduce")
# NCCL_BUFFSIZE's default: what a sender can leave behind for a peer that is not there yet.
EAGER_BYTES = 4 << 20

Key = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One member of a collective whose data move from `ready_ns` on."""

    lane: Lane
    held: Held
    ready_ns: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Gathering:
    here: dict[int, tuple[Lane, Held]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    source_ns: int | None = None  # when the data of a root or sender were there


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A communicator of `size` members; `number` is its token on the wire."""

    number: int
    name: str
    size: int
    ranks: dict[int, Context] = field(default_factory=dict)
    broken: bool = False
    _next: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    _open: dict[Key, _Gathering] = field(default_factory=dict)

    def arrive(self, rank: int, lane: Lane, held: Held) -> list[Meeting]:
        """A member's stream has come to its next collective. Who can move data now, if anyone."""
        key, parties, source = self._key(rank, held)
        gathering = self._open.setdefault(key, _Gathering())
        gathering.here[rank] = (lane, held)
        held.parked = True
        if source is None:
            met = self._common(gathering, parties)
        else:
            met = self._from_source(gathering, parties, source)
        if len(gathering.left) == parties:
            del self._open[key]
        return met

    def leave(self, context: Context) -> None:
        """A member is dead: what it had come to never happens."""
        self.broken = True
        for gathering in self._open.values():
            for rank, (waiting, _) in list(gathering.here.items()):
                if waiting.context is context:
                    del gathering.here[rank]

    @staticmethod
    def _counter(rank: int, held: Held) -> tuple[int, int, int]:
        """What is counted: a member's collectives, or its sends (receives) with one peer."""
        if held.op.detail in (SEND, RECV):
            return rank, held.op.detail, held.op.peer
        return rank, -1, -1

    def _key(self, rank: int, held: Held) -> tuple[Key, int, int | None]:
        """Who meets whom: the key, how many there are, and the rank the data come from."""
        op = held.op
        counter = self._counter(rank, held)
        sequence = self._next[counter]
        self._next[counter] += 1
        held.sequence = sequence
        if op.detail == SEND:
            return (SEND, sequence, rank, op.peer), 2, rank
        if op.detail == RECV:
            return (SEND, sequence, op.peer, rank), 2, op.peer
        if op.detail == BROADCAST and op.size_bytes <= EAGER_BYTES:
            return (op.detail, sequence, op.peer, -1), self.size, op.peer
        return (op.detail, sequence, -1, -1), self.size, None

    @staticmethod
    def _common(gathering: _Gathering, parties: int) -> list[Meeting]:
        if len(gathering.here) < parties:
            return []
        ready_ns = max(held.arrival_ns for _, held in gathering.here.values())
        gathering.left.update(gathering.here)
        return [
            Meeting(lane=lane, held=held, ready_ns=ready_ns)
            for lane, held in gathering.here.values()
        ]

    def _from_source(self, gathering: _Gathering, parties: int, source: int) -> list[Meeting]:
        at_source = gathering.here.get(source)
        if gathering.source_ns is None and at_source is not None:
            gathering.source_ns = at_source[1].arrival_ns
        if gathering.source_ns is None:
            return []
        if at_source is not None and at_source[1].op.size_bytes > EAGER_BYTES:
            return self._common(gathering, parties)
        met = []
        for rank, (lane, held) in list(gathering.here.items()):
            ready_ns = max(held.arrival_ns, gathering.source_ns)
            met.append(Meeting(lane=lane, held=held, ready_ns=ready_ns))
            gathering.left.add(rank)
            del gathering.here[rank]
        return met


def passes(op_detail: int) -> int:
    """How often a ring goes round: to reduce, and to give the result to all."""
    return 2 if op_detail == _REDUCE else 1


def flow(op_detail: int, size_bytes: int, size: int, *, is_root: bool) -> Flow:
    """Bytes over NVLink of one member: rings, as NCCL moves them between GPUs of a node."""
    if op_detail == SEND:
        return Flow(nvlink_tx=size_bytes)
    if op_detail == RECV:
        return Flow(nvlink_rx=size_bytes)
    if op_detail == BROADCAST:
        return Flow(nvlink_tx=size_bytes) if is_root else Flow(nvlink_rx=size_bytes)
    moved = passes(op_detail) * size_bytes * (size - 1) // size
    return Flow(nvlink_tx=moved, nvlink_rx=moved)
