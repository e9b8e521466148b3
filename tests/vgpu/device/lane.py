"""Streams as queues on a timeline: when each piece of work runs follows from when it was launched.

Nothing here waits. A kernel's interval is known as soon as its turn is: it begins when it was
launched or when the one before it ends, whichever is later. Copies and collectives depend on
others, so a stream that reaches one is *held* until the moment of its arrival has passed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vgpu.device.kinds import Activities, Activity
from vgpu.device.wire import Code, Op, Ring

FAR_NS = 1 << 62
# Events whose time has passed constrain nobody; so many are kept before the old ones are dropped.
_TOKENS_MAX = 4096


@dataclass(slots=True, kw_only=True, eq=False)
class Flow:
    """Bytes that move during a piece, evenly. A GPU's point of view: rx is what it receives."""

    pcie_tx: int = 0
    pcie_rx: int = 0
    nvlink_tx: int = 0
    nvlink_rx: int = 0


class Piece:
    """Something resident on the GPU from `begin_ns` to `end_ns`; `last`: the end of its op.

    A collective is two pieces: `first_ns`: its arrival; `ready_ns`: that of its last peer;
    `sequence`: its number in the group.
    """

    __slots__ = (
        "activity",
        "begin_ns",
        "end_ns",
        "first_ns",
        "flow",
        "last",
        "op",
        "ready_ns",
        "sequence",
    )

    def __init__(
        self,
        begin_ns: int,
        end_ns: int,
        activity: Activity,
        op: Op,
        *,
        first_ns: int | None = None,
        ready_ns: int | None = None,
        flow: Flow | None = None,
        sequence: int | None = None,
        last: bool = True,
    ) -> None:
        self.begin_ns = begin_ns
        self.end_ns = end_ns
        self.activity = activity
        self.op = op
        self.first_ns = begin_ns if first_ns is None else first_ns
        self.ready_ns = begin_ns if ready_ns is None else ready_ns
        self.flow = flow
        self.sequence = sequence
        self.last = last


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """A stream's turn has come to a copy or collective at `arrival_ns`.

    `parked`: the others know of it; `sequence`: its number in the group from then on. `activity`:
    what is resident meanwhile; None for a copy. `first_ns`: of a collective whose data move over
    the network since `arrival_ns`, when it had come.
    """

    op: Op
    arrival_ns: int
    activity: Activity | None
    parked: bool = False
    sequence: int | None = None
    first_ns: int | None = None


class Lane:
    """One stream. `ready_ns`: the end of everything whose time is known."""

    def __init__(self, context: Context, stream: int) -> None:
        self.context = context
        self.stream = stream
        self.waiting: deque[Op] = deque()
        self.pieces: deque[Piece] = deque()
        self.ready_ns = 0
        self.held: Held | None = None

    @property
    def end_ns(self) -> int | None:
        """When all that was launched is done; None while that is open."""
        return None if self.waiting else self.ready_ns

    def resolve(self, piece: Piece) -> None:
        """The held copy or collective has its (last) piece."""
        self.pieces.append(piece)
        if piece.last:
            self.ready_ns = piece.end_ns
            self.held = None
            self.waiting.popleft()

    def retire(self, until_ns: int) -> list[Piece]:
        """Takes out the pieces that have ended."""
        gone = []
        pieces = self.pieces
        while pieces and pieces[0].end_ns <= until_ns:
            gone.append(pieces.popleft())
        return gone


@dataclass(slots=True, kw_only=True, eq=False)
class Context:
    """One process on one GPU: its streams, events and queue."""

    pid: int
    gpu: int
    ring: Ring
    taken: int = 0
    done: int = 0
    memory_bytes: int = 0
    resident_ns: float = 0.0
    sm_percent: int = 0
    begin_ns: int = 0
    lanes: dict[int, Lane] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    forgotten: int = 0

    def lane(self, stream: int) -> Lane:
        """The stream of a number, new or known."""
        found = self.lanes.get(stream)
        if found is None:
            found = self.lanes[stream] = Lane(self, stream)
        return found

    def accept(self, op: Op, floor_ns: int, now_ns: int) -> None:
        """Queues a launch. Its stamp counts, but the past up to `floor_ns` is settled."""
        if not floor_ns <= op.stamp_ns <= now_ns:
            op = op._replace(stamp_ns=min(max(op.stamp_ns, floor_ns), now_ns))
        if op.code == Code.MEMORY:
            self.memory_bytes = op.size_bytes
            self.done += 1
            return
        self.lane(op.stream).waiting.append(op)

    def settle(self, activities: Activities, now_ns: int) -> None:
        """Times all work that depends on nobody else."""
        again = True
        while again:
            before = len(self.tokens)
            for lane in self.lanes.values():
                self._settle_lane(lane, activities)
            again = len(self.tokens) != before
        if len(self.tokens) > _TOKENS_MAX:
            self._forget(now_ns)

    def _settle_lane(self, lane: Lane, activities: Activities) -> None:
        waiting = lane.waiting
        while waiting and lane.held is None:
            op = waiting[0]
            start_ns = max(op.stamp_ns, lane.ready_ns)
            if op.code == Code.KERNEL:
                end_ns = start_ns + op.duration_ns
                activity = activities.kernel(op.detail, op.fill)
                lane.pieces.append(Piece(start_ns, end_ns, activity, op))
                lane.ready_ns = end_ns
            elif op.code == Code.RECORD:
                self.tokens[op.token] = lane.ready_ns = start_ns
                self.done += 1
            elif op.code == Code.WAIT:
                known_ns = self.token_ns(op.token)
                if known_ns is None:
                    return
                lane.ready_ns = max(start_ns, known_ns)
                self.done += 1
            else:
                lane.held = Held(op=op, arrival_ns=start_ns, activity=None)
                return
            waiting.popleft()

    def token_ns(self, token: int) -> int | None:
        """When an event happens; 0: long ago; None: not known yet."""
        return self.tokens.get(token, 0 if token <= self.forgotten else None)

    def _forget(self, now_ns: int) -> None:
        """Drops the oldest events while they lie in the past and none before them is open."""
        waiting = (op for lane in self.lanes.values() for op in lane.waiting)
        first_open = min((op.token for op in waiting if op.code == Code.RECORD), default=FAR_NS)
        for token in sorted(self.tokens)[: _TOKENS_MAX // 2]:
            if self.tokens[token] > now_ns or token > first_open:
                return
            self.forgotten = token
            del self.tokens[token]

    def end_ns(self) -> int | None:
        """When everything launched so far is done; None while that is open."""
        ends = [lane.end_ns for lane in self.lanes.values()]
        known = [end for end in ends if end is not None]
        return max(known, default=0) if len(known) == len(ends) else None
