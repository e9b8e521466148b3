"""What is true of a simulated rank, known from how it was made.

Nothing is measured on a sorted timeline: each kind of work runs in order and one at a time, so its
parts are sums of what was scheduled, corrected by pairwise overlaps, and waits are what the
collectives knew when they matched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from world.traces import Event, Rank, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What is true of one rank, in nanoseconds; `waited_ns` counts waiting without compute."""

    window_ns: int
    compute_ns: int
    exposed_comm_ns: int
    exposed_copy_ns: int
    idle_ns: int
    waited_ns: dict[int, int]
    labelled_ns: dict[str, int]


def overlaps(these: Iterable[Span], those: Iterable[Span]) -> list[Span]:
    """Return the pieces that two lists share; each list is in order and free of overlaps."""
    left, right = list(these), list(those)
    shared: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            shared.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length_ns(spans: Iterable[Span]) -> int:
    """Sum the lengths."""
    return sum(end - begin for begin, end in spans)


def _in_order(events: Iterable[Event]) -> list[Span]:
    spans = sorted(event.span for event in events)
    if any(following[0] < span[1] for span, following in pairwise(spans)):
        raise AssertionError("work of one kind overlaps itself; its truth is not a sum")
    return spans


def truth(rank: Rank) -> Truth:
    """Return what is true of a rank; raises where work of one kind ran beside itself."""
    gpu = [event for event in rank.events if event.category.startswith(("kernel", "gpu_mem"))]
    comm = _in_order(event for event in gpu if "collective" in event.args)
    copies = _in_order(event for event in gpu if event.category != "kernel")
    compute = _in_order(
        event for event in gpu if event.category == "kernel" and "collective" not in event.args
    )
    begin, end = min(event.span[0] for event in gpu), max(event.span[1] for event in gpu)
    hidden_comm = overlaps(comm, compute)
    exposed_comm = length_ns(comm) - length_ns(hidden_comm)
    exposed_copy = (
        length_ns(copies)
        - length_ns(overlaps(copies, compute))
        - length_ns(overlaps(copies, comm))
        + length_ns(overlaps(copies, hidden_comm))
    )
    waited: Counter[int] = Counter()
    for wait in rank.waits:
        span = (wait.begin_ns, wait.end_ns)
        waited[wait.late] += length_ns([span]) - length_ns(overlaps([span], compute))
    labelled: Counter[str] = Counter()
    for label, span in rank.labels:
        inside = (max(span[0], begin), min(span[1], end))
        busy = length_ns(overlaps([inside], compute)) + length_ns(overlaps([inside], comm))
        both = length_ns(overlaps([inside], hidden_comm))
        labelled[label] += max(0, inside[1] - inside[0]) - busy + both
    return Truth(
        window_ns=end - begin,
        compute_ns=length_ns(compute),
        exposed_comm_ns=exposed_comm,
        exposed_copy_ns=exposed_copy,
        idle_ns=end - begin - length_ns(compute) - exposed_comm - exposed_copy,
        waited_ns=dict(waited),
        labelled_ns=dict(labelled),
    )
