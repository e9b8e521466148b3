"""The hardware: GPUs, copy engines and groups, moved forward to a moment in the order of time.

`advance(now)` handles every arrival up to now, earliest first. What an arrival at t sets free
begins at t or later, so everything before the moment of the last call is final: the sweep of
timeline.py counts it once, and a process that dies takes with it exactly what was not done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vgpu.device import meet
from vgpu.device.kinds import COPIES, Activities
from vgpu.device.lane import FAR_NS, Context, Flow, Held, Lane, Piece
from vgpu.device.meet import Group
from vgpu.device.wire import BY_NETWORK_NS, Code

# Measured copy rates of a x16 slot by PCIe generation; pageable memory is staged by the host.
_PINNED_BYTES_PER_S = {3: 12e9, 4: 25e9, 5: 52e9}
_PAGEABLE_BYTES_PER_S = 9e9
_COPY_LATENCY_NS = 8_000
_NS_PER_S = 1_000_000_000


@dataclass(slots=True, kw_only=True, eq=False)
class Engine:
    """A copy engine: one copy at a time. `owner`: of the last copy."""

    free_ns: int = 0
    owner: Context | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """One GPU's constants, its copy engines by direction, and the processes on it."""

    slot: int
    multiprocessors: int
    pcie_generation: int
    contexts: list[Context] = field(default_factory=list)
    engines: tuple[Engine, ...] = field(default_factory=lambda: tuple(Engine() for _ in COPIES))

    def lanes(self) -> Iterator[Lane]:
        """All streams on this GPU."""
        for context in self.contexts:
            yield from context.lanes.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A collective whose data a rank of a group is to move over the network from now on."""

    group: int
    rank: int
    sequence: int
    size_bytes: int
    passes: int


class Machine:
    """All GPUs of a node, and the groups among the processes that use them.

    `moves`: what the proxies of groups are to be told since somebody last looked.
    """

    def __init__(self, devices: list[Device], activities: Activities) -> None:
        self.devices = devices
        self._activities = activities
        self._groups: dict[int, Group] = {}
        self._by_name: dict[str, Group] = {}
        self._ranks: dict[tuple[int, int], int] = {}
        self._over_network: dict[tuple[int, int], Lane] = {}
        self.moves: list[Move] = []

    def contexts(self) -> Iterator[Context]:
        """All processes, once per GPU they use."""
        for device in self.devices:
            yield from device.contexts

    def join(self, context: Context, name: str, rank: int, size: int) -> int:
        """A member of a group; the group's number. A name whose group is broken starts anew."""
        group = self._by_name.get(name)
        if group is None or group.broken or rank in group.ranks or group.size != size:
            group = Group(number=len(self._groups) + 1, name=name, size=size)
            self._groups[group.number] = self._by_name[name] = group
        group.ranks[rank] = context
        self._ranks[group.number, id(context)] = rank
        return group.number

    def advance(self, now_ns: int) -> set[int]:
        """Handles everything that has arrived by now; the GPUs where that changed something."""
        changed: set[int] = set()
        for context in self.contexts():
            context.settle(self._activities, now_ns)
            self._dress(context)
        while True:
            lane = min(self._turns(), key=_arrival_ns, default=None)
            if lane is None or _arrival_ns(lane) > now_ns:
                return changed
            changed |= self._handle(lane, now_ns)

    def next_arrival_ns(self) -> int:
        """When `advance` has something to do by itself; FAR_NS is never."""
        return min((_arrival_ns(lane) for lane in self._turns()), default=FAR_NS)

    def _turns(self) -> Iterator[Lane]:
        for device in self.devices:
            for lane in device.lanes():
                if lane.held is not None and not lane.held.parked:
                    yield lane

    def _dress(self, context: Context) -> None:
        """A held collective's kernel is resident and polls."""
        for lane in context.lanes.values():
            held = lane.held
            if held is not None and held.activity is None and held.op.code == Code.COLLECTIVE:
                sms = self.devices[context.gpu].multiprocessors
                held.activity = self._activities.nccl(held.op.channels, sms, moving=False)

    def _handle(self, lane: Lane, now_ns: int) -> set[int]:
        held = lane.held
        assert held is not None
        if held.op.code == Code.COPY:
            self._copy(lane, held)
            met = [lane]
        else:
            met = self._collective(lane, held)
        for one in met:
            one.context.settle(self._activities, now_ns)
            self._dress(one.context)
        return {one.context.gpu for one in met}

    def _copy(self, lane: Lane, held: Held) -> None:
        device, op = self.devices[lane.context.gpu], held.op
        rate = _PINNED_BYTES_PER_S[device.pcie_generation] if op.peer else _PAGEABLE_BYTES_PER_S
        engine = device.engines[op.detail]
        begin_ns = max(held.arrival_ns, engine.free_ns)
        end_ns = begin_ns + _COPY_LATENCY_NS + round(op.size_bytes * _NS_PER_S / rate)
        engine.free_ns, engine.owner = end_ns, lane.context
        moved = Flow(pcie_tx=op.size_bytes) if op.detail else Flow(pcie_rx=op.size_bytes)
        lane.resolve(Piece(begin_ns, end_ns, self._activities.copy, op, flow=moved))

    def _collective(self, lane: Lane, held: Held) -> list[Lane]:
        group = self._groups[held.op.token]
        rank = self._ranks[group.number, id(lane.context)]
        meetings = group.arrive(rank, lane, held)
        for meeting in meetings:
            self._move(group, meeting)
        return [meeting.lane for meeting in meetings]

    def _move(self, group: Group, meeting: meet.Meeting) -> None:
        """The two pieces of a collective: polling until the peers are there, then data."""
        lane, held, ready_ns = meeting.lane, meeting.held, meeting.ready_ns
        op, context = held.op, lane.context
        rank = self._ranks[group.number, id(context)]
        assert held.activity is not None
        sms = self.devices[context.gpu].multiprocessors
        if ready_ns > held.arrival_ns:
            lane.resolve(
                Piece(
                    held.arrival_ns,
                    ready_ns,
                    held.activity,
                    op,
                    ready_ns=ready_ns,
                    sequence=held.sequence,
                    last=False,
                )
            )
        if op.duration_ns == BY_NETWORK_NS:
            self._hand_over(lane, held, group, rank, ready_ns)
            return
        lane.resolve(
            Piece(
                ready_ns,
                ready_ns + op.duration_ns,
                self._activities.nccl(op.channels, sms, moving=True),
                op,
                first_ns=held.arrival_ns,
                ready_ns=ready_ns,
                sequence=held.sequence,
                flow=meet.flow(op.detail, op.size_bytes, group.size, is_root=op.peer == rank),
            )
        )

    def _hand_over(self, lane: Lane, held: Held, group: Group, rank: int, ready_ns: int) -> None:
        """Leaves a collective's data to the rank's proxy: its kernel stays until that is done."""
        sms = self.devices[lane.context.gpu].multiprocessors
        assert held.sequence is not None
        lane.held = Held(
            op=held.op,
            arrival_ns=ready_ns,
            activity=self._activities.nccl(held.op.channels, sms, moving=True),
            parked=True,
            sequence=held.sequence,
            first_ns=held.arrival_ns,
        )
        self._over_network[group.number, rank] = lane
        self.moves.append(
            Move(
                group=group.number,
                rank=rank,
                sequence=held.sequence,
                size_bytes=held.op.size_bytes,
                passes=meet.passes(held.op.detail),
            )
        )

    def moved(self, group: int, rank: int, now_ns: int) -> set[int]:
        """A rank's proxy has moved the data of its collective; the GPUs where that changes much."""
        lane = self._over_network.pop((group, rank), None)
        if lane is None or lane.held is None:
            return set()
        held = lane.held
        assert held.activity is not None
        lane.resolve(
            Piece(
                held.arrival_ns,
                max(now_ns, held.arrival_ns + 1),
                held.activity,
                held.op,
                first_ns=held.first_ns,
                ready_ns=held.arrival_ns,
                sequence=held.sequence,
            )
        )
        lane.context.settle(self._activities, now_ns)
        self._dress(lane.context)
        return {lane.context.gpu}

    def kill(self, context: Context, now_ns: int) -> None:
        """A process is gone: `advance(now_ns)` first, and take what ran out of its lanes."""
        device = self.devices[context.gpu]
        device.contexts.remove(context)
        for engine in device.engines:
            if engine.owner is context:
                engine.free_ns = min(engine.free_ns, now_ns)
        for group in self._groups.values():
            if (group.number, id(context)) in self._ranks:
                del self._ranks[group.number, id(context)]
                group.leave(context)


def _arrival_ns(lane: Lane) -> int:
    assert lane.held is not None
    return lane.held.arrival_ns
