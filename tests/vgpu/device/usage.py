"""How much of a GPU was busy between two moments, from the pieces on its streams."""

from __future__ import annotations

from collections.abc import Iterable

from vgpu.device.kinds import SHARES, Activities, Activity
from vgpu.device.lane import FAR_NS, Flow, Lane

Clipped = tuple[int, int, Activity]


class Usage:
    """Totals: `shares` in ns times share, in the order of QUANTITIES; traffic in bytes."""

    __slots__ = ("nvlink_rx", "nvlink_tx", "pcie_rx", "pcie_tx", "shares")

    def __init__(self) -> None:
        self.shares = [0.0] * SHARES
        self.pcie_tx = self.pcie_rx = self.nvlink_tx = self.nvlink_rx = 0.0

    def add(self, other: Usage) -> None:
        """Adds another's totals."""
        self.shares = [a + b for a, b in zip(self.shares, other.shares, strict=True)]
        self.pcie_tx += other.pcie_tx
        self.pcie_rx += other.pcie_rx
        self.nvlink_tx += other.nvlink_tx
        self.nvlink_rx += other.nvlink_rx

    def any(self) -> bool:
        """Whether anything happened."""
        return any(self.shares)  # copies read or write memory as well

    def _flow(self, flow: Flow, share: float) -> None:
        self.pcie_tx += flow.pcie_tx * share
        self.pcie_rx += flow.pcie_rx * share
        self.nvlink_tx += flow.nvlink_tx * share
        self.nvlink_rx += flow.nvlink_rx * share

    def _activity(self, activity: Activity, length_ns: int) -> None:
        shares = self.shares
        for i, share in enumerate(activity.shares):
            shares[i] += share * length_ns


def measure(lanes: Iterable[Lane], begin_ns: int, end_ns: int, activities: Activities) -> Usage:
    """What is resident in [begin, end); a held collective is, from its arrival on."""
    usage = Usage()
    clipped = [part for lane in lanes if (part := _clip(lane, begin_ns, end_ns, usage))]
    if len(clipped) == 1:  # nothing overlaps: lengths add up by activity
        lengths: dict[Activity, int] = {}
        for first_ns, last_ns, activity in clipped[0]:
            lengths[activity] = lengths.get(activity, 0) + last_ns - first_ns
        for activity, length_ns in lengths.items():
            usage._activity(activity, length_ns)
    elif clipped:
        _overlap(clipped, usage, activities)
    return usage


def _clip(lane: Lane, begin_ns: int, end_ns: int, usage: Usage) -> list[Clipped]:
    """The lane's pieces inside the window; their traffic goes to `usage`."""
    inside = []
    for piece in lane.pieces:
        if piece.begin_ns >= end_ns:
            break
        first_ns = piece.begin_ns if piece.begin_ns > begin_ns else begin_ns
        last_ns = piece.end_ns if piece.end_ns < end_ns else end_ns
        if last_ns <= first_ns:
            continue
        inside.append((first_ns, last_ns, piece.activity))
        if piece.flow is not None:
            usage._flow(piece.flow, (last_ns - first_ns) / (piece.end_ns - piece.begin_ns))
    held = lane.held
    if held is not None and held.activity is not None and held.arrival_ns < end_ns:
        inside.append((max(held.arrival_ns, begin_ns), end_ns, held.activity))
    return inside


def _overlap(clipped: list[list[Clipped]], usage: Usage, activities: Activities) -> None:
    """Cuts the window where anything begins or ends."""
    edges: list[tuple[int, bool, Activity]] = []
    for part in clipped:
        for first_ns, last_ns, activity in part:
            edges.append((first_ns, True, activity))
            edges.append((last_ns, False, activity))
    edges.sort(key=lambda edge: edge[:2])
    resident: list[Activity] = []
    since_ns = edges[0][0]
    for at_ns, begins, activity in edges:
        if at_ns > since_ns and resident:
            usage._activity(activities.together(tuple(resident)), at_ns - since_ns)
        since_ns = at_ns
        if begins:
            resident.append(activity)
        else:
            resident.remove(activity)


def next_edge_ns(lanes: Iterable[Lane], after_ns: int) -> int:
    """The next moment at which something known begins or ends; FAR_NS is never."""
    first = FAR_NS
    for lane in lanes:
        for piece in lane.pieces:
            if piece.end_ns > after_ns:
                edge = piece.begin_ns if piece.begin_ns > after_ns else piece.end_ns
                first = min(first, edge)
                break
        held = lane.held
        if held is not None and held.arrival_ns > after_ns:
            first = min(first, held.arrival_ns)
    return first
