"""What a Kineto trace holds, computed another way than the product does it.

The product works on sorted unions of intervals in NumPy. Here every start and end is one entry of
a sweep with counters, times are exact integers (`decimal.Decimal` microseconds times 1000), and the
rules for names are written anew. It is slow and it shares no code with the product, on purpose.

Definitions, per GPU: window = first start to last end of its kernels, copies and sets; compute =
kernels that do not communicate; exposed communication = communication without compute; exposed
copy = copies and sets without either; idle = the rest.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

Json = dict[str, Any]

COMPUTE, COMM, COPY = 0, 1, 2

_COPY_CATEGORIES = {"gpu_memcpy", "gpu_memset", "memcpy", "memset"}
# Profiles of one run begin at most this many collectives apart.
_SHIFTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEvent:
    """One kernel, copy or set: [begin, end) in nanoseconds of the trace's clock."""

    begin_ns: int
    end_ns: int
    kind: int
    name: str
    device: int | str
    correlation: int | None = None
    args: Json | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Exact parts of a window, in nanoseconds."""

    window_ns: int
    compute_ns: int
    exposed_comm_ns: int
    exposed_copy_ns: int
    idle_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The GPU events of one file, and what is needed to name its collectives."""

    source: str
    rank: int | None
    events: list[GpuEvent]
    host: list[Json]

    def devices(self) -> list[int | str]:
        """Return the devices that the trace has events of, in order of appearance."""
        return list(dict.fromkeys(event.device for event in self.events))


def load(path: Path) -> Json:
    """Return the trace as plain JSON with exact numbers; raises what gzip and json raise."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    found = json.loads(raw, parse_float=Decimal)
    return found if isinstance(found, dict) else {"traceEvents": found}


def load_damaged(text: str) -> Json:
    """Return the whole events before the first damaged character of a trace text."""
    decoder = json.JSONDecoder(parse_float=Decimal)
    start = re.search(r'"traceEvents"\s*:\s*\[', text)
    events: list[Json] = []
    rank = re.search(r'"distributedInfo"\s*:\s*\{[^}]*"rank"\s*:\s*(\d+)', text)
    at = len(text) if start is None else start.end()
    while (begin := re.compile(r"\s*,?\s*").match(text, at)) is not None and begin.end() < len(
        text
    ):
        try:
            event, at = decoder.raw_decode(text, begin.end())
        except json.JSONDecodeError:
            break
        events.append(event)
    return {
        "traceEvents": events,
        "distributedInfo": {"rank": int(rank[1])} if rank else {},
    }


def nanoseconds(value: object) -> int | None:
    """Return microseconds as whole nanoseconds, None where the value is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return None
    try:
        return int((Decimal(value) * 1000).to_integral_value())
    except (InvalidOperation, OverflowError, ValueError):
        return None


def segments(name: str) -> list[str]:
    """Split a demangled kernel name into the `::` parts of its qualified function name."""
    plain = name.replace("(anonymous namespace)", "anon")
    plain = plain.split("<", 1)[0].split("(", 1)[0].strip()
    plain = plain.rsplit(" ", 1)[-1]
    return plain.split("::")


def communicates(name: str) -> bool:
    """Say whether a kernel of this name moves data between ranks."""
    parts = [part.lower() for part in segments(name)]
    last, outer = parts[-1], set(parts[:-1])
    if any(part.startswith(("nccl", "rccl", "nvshmem")) for part in parts):
        return True
    if outer & {"deep_ep"} or outer & {"internode", "intranode", "internode_ll"}:
        return True
    if outer & {"symmetric_memory"} and ("barrier" in last or "signal" in last):
        return True
    joined = last.replace("_", "")
    if joined.startswith("multimem"):
        return True
    if joined.startswith("crossdevicereduce"):
        return True
    return "allreduce" in joined and "collectivemainloop" not in joined


def _gpu_event(event: Json) -> GpuEvent | None:
    category = str(event.get("cat", "")).lower()
    if event.get("ph") != "X" or not (category == "kernel" or category in _COPY_CATEGORIES):
        return None
    begin, length = nanoseconds(event.get("ts")), nanoseconds(event.get("dur"))
    if begin is None or length is None or length < 0:
        return None
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    name = str(event.get("name", ""))
    kind = COPY if category != "kernel" else COMM if communicates(name) else COMPUTE
    correlation, device = args.get("correlation"), args.get("device", event.get("pid", 0))
    return GpuEvent(
        begin_ns=begin,
        end_ns=begin + length,
        kind=kind,
        name=name,
        device=device if isinstance(device, int | str) else str(device),
        correlation=correlation if isinstance(correlation, int) else None,
        args=args,
    )


def trace_of(found: Json, source: str) -> Trace:
    """Pick the GPU events, and the launches and annotations that name collectives, out of JSON."""
    events: list[GpuEvent] = []
    host: list[Json] = []
    for event in found.get("traceEvents") or []:
        if not isinstance(event, dict):
            continue
        if (on_gpu := _gpu_event(event)) is not None:
            events.append(on_gpu)
        elif str(event.get("cat", "")).lower() in {"cuda_runtime", "runtime"} or str(
            event.get("name", "")
        ).startswith("nccl:"):
            host.append(event)
    info = found.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return Trace(
        source=source, rank=rank if isinstance(rank, int) else None, events=events, host=host
    )


def read(path: Path) -> Trace:
    """Read one whole trace file."""
    return trace_of(load(path), path.name)


def partition(events: Iterable[GpuEvent]) -> Parts | None:
    """Sweep over every start and end and sum the pieces by what runs in them; None for no event."""
    changes: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for event in events:
        changes[event.begin_ns][event.kind] += 1
        changes[event.end_ns][event.kind] -= 1
    if not changes:
        return None
    running, sums = [0, 0, 0], [0, 0, 0, 0]
    edges = sorted(changes)
    for edge, following in pairwise(edges):
        for kind, change in enumerate(changes[edge]):
            running[kind] += change
        state = next((kind for kind, count in enumerate(running) if count), 3)
        sums[state] += following - edge
    return Parts(
        window_ns=edges[-1] - edges[0],
        compute_ns=sums[COMPUTE],
        exposed_comm_ns=sums[COMM],
        exposed_copy_ns=sums[COPY],
        idle_ns=sums[3],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One rank's part in one collective: its group, its operation, its place in their order."""

    group: str
    operation: str
    order: int
    event: GpuEvent


def _annotation_of(trace: Trace) -> dict[int, str]:
    """Return the `nccl:` annotation around each launch, by correlation."""
    spans: dict[object, list[tuple[int, int, str]]] = defaultdict(list)
    launches: list[tuple[int, object, int]] = []
    for event in trace.host:
        begin, length = nanoseconds(event.get("ts")), nanoseconds(event.get("dur"))
        if begin is None or length is None:
            continue
        name, thread = str(event.get("name")), event.get("tid")
        if name.startswith("nccl:"):
            spans[thread].append((begin, begin + length, name[5:]))
        elif isinstance(number := (event.get("args") or {}).get("correlation"), int):
            launches.append((begin, thread, number))
    named: dict[int, str] = {}
    for begin, thread, number in launches:
        around = [span for span in spans[thread] if span[0] <= begin < span[1]]
        if around:
            named[number] = min(around, key=lambda span: span[1] - span[0])[2]
    return named


def collectives(trace: Trace) -> list[Collective]:
    """Name and number the communication kernels of one rank, in order of their start."""
    annotations = _annotation_of(trace)
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for event in sorted(
        (event for event in trace.events if event.kind == COMM), key=lambda event: event.begin_ns
    ):
        args = event.args or {}
        group = str(args.get("Process Group Name", ""))
        if event.correlation is not None and event.correlation in annotations:
            operation = annotations[event.correlation]
        else:
            operation = str(args.get("Collective name") or segments(event.name)[-1])
        key = (group, operation)
        found.append(Collective(group=group, operation=operation, order=counts[key], event=event))
        counts[key] += 1
    return found


def has_common_end(operation: str) -> bool:
    """Say whether all ranks leave an operation of this name together."""
    plain = operation.lower().replace("_", "")
    words = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")
    return any(word in plain for word in words)


def _shift(reference: list[int], other: list[int]) -> int:
    """Return how many entries `other` lacks at its head, so that the ends fit best.

    Only differences of ends count, so clocks may differ by a constant.
    """

    def misfit(shift: int) -> tuple[float, int]:
        pairs = [
            (reference[i], other[i - shift])
            for i in range(len(reference))
            if 0 <= i - shift < len(other)
        ]
        if not pairs:
            return (float("inf"), abs(shift))
        apart = [a - b for a, b in pairs]
        middle = median(apart)
        return (sum(abs(gap - middle) for gap in apart) / len(apart), abs(shift))

    if len(reference) == len(other):
        return 0
    return min(range(-_SHIFTS, _SHIFTS + 1), key=misfit)


def matched(ranks: dict[int, list[Collective]]) -> Iterator[dict[int, GpuEvent]]:
    """Yield the collectives with a common end that at least two ranks recorded, by rank."""
    series: dict[tuple[str, str], dict[int, list[GpuEvent]]] = defaultdict(dict)
    for rank, found in ranks.items():
        for one in found:
            series[one.group, one.operation].setdefault(rank, []).append(one.event)
    for (_, operation), members in series.items():
        if not has_common_end(operation) or len(members) < 2:
            continue
        reference = max(members, key=lambda rank: (len(members[rank]), -rank))
        ends = [event.end_ns for event in members[reference]]
        shifts = {
            rank: _shift(ends, [event.end_ns for event in events])
            for rank, events in members.items()
        }
        for order in range(len(ends)):
            together = {
                rank: events[order - shifts[rank]]
                for rank, events in members.items()
                if 0 <= order - shifts[rank] < len(events)
            }
            if len(together) > 1:
                yield together


def _exposed(waits: list[tuple[int, int, int]], events: Iterable[GpuEvent]) -> dict[int, int]:
    """Sum waiting pieces without compute, by late rank; the earliest wait owns shared pieces."""
    changes: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for event in events:
        if event.kind == COMPUTE:
            changes[event.begin_ns].append(("compute", 0, 1))
            changes[event.end_ns].append(("compute", 0, -1))
    for index, (begin, end, _) in enumerate(waits):
        changes[begin].append(("wait", index, 1))
        changes[end].append(("wait", index, -1))
    computing, open_waits = 0, set[int]()
    sums: Counter[int] = Counter()
    for edge, following in pairwise(sorted(changes)):
        for what, index, change in changes[edge]:
            if what == "compute":
                computing += change
            elif change > 0:
                open_waits.add(index)
            else:
                open_waits.discard(index)
        if open_waits and not computing:
            owner = min(open_waits, key=lambda index: waits[index][0])
            sums[waits[owner][2]] += following - edge
    return dict(sums)


def wait_matrix(traces: Iterable[Trace], *, exposed: bool = True) -> dict[int, dict[int, int]]:
    """Return nanoseconds that each rank waited, by the rank it waited for.

    Whoever has the shortest part in a collective came last; every other rank waited for the
    difference at the start of its own part. `exposed` leaves out waiting under compute.
    """
    by_rank = {trace.rank: trace for trace in traces if trace.rank is not None}
    waits: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in by_rank}
    for together in matched({rank: collectives(trace) for rank, trace in by_rank.items()}):
        length = {rank: event.end_ns - event.begin_ns for rank, event in together.items()}
        late = min(length, key=lambda rank: (length[rank], rank))
        for rank, event in together.items():
            waited = length[rank] - length[late]
            if rank != late and waited > 0:
                waits[rank].append((event.begin_ns, event.begin_ns + waited, late))
    matrix: dict[int, dict[int, int]] = {}
    for rank, found in waits.items():
        if exposed:
            matrix[rank] = _exposed(found, by_rank[rank].events)
            continue
        sums: Counter[int] = Counter()
        for begin, end, late in found:
            sums[late] += end - begin
        matrix[rank] = dict(sums)
    return matrix
