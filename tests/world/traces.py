"""A seeded model of training ranks that knows its own truth: what profiler traces are made from.

Each rank is a program: its host thread launches kernels into streams and moves on, a stream runs
them in order, a collective ends for all of its ranks once the last of them has come. Times are
integer nanoseconds of one clock; a rank's own clock may be off by a constant. The truth is not
measured on the finished timeline: each kind of work runs in order and one at a time, so its parts
are sums of what was scheduled, corrected by pairwise overlaps, and waits are what the collectives
knew when they matched. `world.trace_text` writes the ranks as Kineto does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Span = tuple[int, int]

COMPUTE_STREAM, COMM_STREAM, COPY_STREAM = 7, 20, 24
# Start of a launch call to the start of its kernel on an idle stream, as on A100.
LAUNCH_NS = 5_000
COMMON_END = {"allreduce", "_allgather_base", "_reduce_scatter_base", "all_to_allv"}

COLLECTIVE_KERNELS = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": (
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    ),
    "all_to_allv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "recv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
_ANNOTATIONS = {
    "allreduce": "nccl:all_reduce",
    "all_to_allv": "nccl:all_to_all",
    "send": "nccl:send",
    "recv": "nccl:recv",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One complete event; `lane` is its stream on the GPU, its thread on the host."""

    category: str
    name: str
    begin_ns: int
    dur_ns: int
    lane: int
    correlation: int | None = None
    args: dict[str, object] = field(default_factory=dict)

    @property
    def span(self) -> Span:
        """Return [begin, end)."""
        return (self.begin_ns, self.begin_ns + self.dur_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group of global ranks; `pair` tells sends inside one group apart."""

    name: str
    members: tuple[int, ...]
    description: str = "default_pg"
    pair: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One rank's arrival in a collective."""

    group: Group
    operation: str
    order: int
    start_ns: int
    transfer_ns: int
    root: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Time from a rank's arrival in a collective to that of the late rank."""

    begin_ns: int
    end_ns: int
    late: int


Program = Callable[["Rank"], Generator[Call, int, None]]


class Rank:
    """A rank's host thread and streams: what it has run so far."""

    def __init__(self, index: int, count: int, seed: int, quantum_ns: int) -> None:
        self.index = index
        self.count = count
        self.pid = 4000 + 17 * index
        self.now_ns = 1_000_000
        self.events: list[Event] = []
        self.waits: list[Wait] = []
        self.labels: list[tuple[str, Span]] = []
        self._free_ns: Counter[int] = Counter()
        self._orders: Counter[tuple[str, str]] = Counter()
        self._correlation = 1000
        self._random = random.Random(f"{seed}/{index}")
        self._quantum_ns = quantum_ns

    def _whole(self, duration_ns: float) -> int:
        return max(1, round(duration_ns / self._quantum_ns)) * self._quantum_ns

    def vary(self, duration_ns: float, ratio: float = 0.01) -> int:
        """Return a duration that differs a little on each call and rank."""
        return self._whole(duration_ns * (1 + ratio * (2 * self._random.random() - 1)))

    def _record(self, category: str, name: str, span: Span, lane: int, **args: object) -> None:
        number = args.pop("correlation", None)
        self.events.append(
            Event(
                category=category,
                name=name,
                begin_ns=span[0],
                dur_ns=span[1] - span[0],
                lane=lane,
                correlation=number if isinstance(number, int) else None,
                args=args,
            )
        )

    @contextmanager
    def span(self, name: str, category: str = "user_annotation") -> Iterator[None]:
        """Record what the host does meanwhile as one event of the host thread."""
        begin = self.now_ns
        yield
        self._record(category, name, (begin, self.now_ns), self.pid)

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Remember, in the truth alone, why the host is held up meanwhile."""
        begin = self.now_ns
        yield
        self.labels.append((label, (begin, self.now_ns)))

    def pause(self, duration_ns: float) -> None:
        """Let the host do nothing that a profiler sees."""
        self.now_ns += self._whole(duration_ns)

    def _launch(self, op: str, call: str, host_ns: float) -> tuple[int, int]:
        """Record an operator with its launch call; return its correlation and earliest start."""
        self._correlation += 1
        begin = self.now_ns
        call_begin, call_end = (
            begin + self._whole(host_ns * 0.4),
            begin + self._whole(host_ns * 0.8),
        )
        self.now_ns = begin + self._whole(host_ns)
        self._record("cpu_op", op, (begin, self.now_ns), self.pid)
        self._record(
            "cuda_runtime", call, (call_begin, call_end), self.pid, correlation=self._correlation
        )
        return self._correlation, call_begin + self._whole(LAUNCH_NS)

    def kernel(self, name: str, duration_ns: float, op: str, host_ns: float = 9_000) -> None:
        """Launch a compute kernel."""
        number, ready = self._launch(op, "cudaLaunchKernel", host_ns)
        self.on_gpu("kernel", name, duration_ns, ready, COMPUTE_STREAM, correlation=number)

    def on_gpu(
        self,
        category: str,
        name: str,
        duration_ns: float,
        ready_ns: int,
        stream: int,
        **args: object,
    ) -> int:
        """Run something on a stream once it is launched and the stream is free; return its end."""
        begin = max(ready_ns, self._free_ns[stream])
        end = begin + self._whole(duration_ns)
        self._record(category, name, (begin, end), stream, **args)
        self._free_ns[stream] = end
        return end

    def copy(
        self, route: str, duration_ns: float, size_bytes: int, *, stream: int = COMPUTE_STREAM
    ) -> None:
        """Copy; a route with pageable memory, as "Pageable -> Device", holds the host meanwhile."""
        kind = {"Device": "HtoD"}.get(route.rsplit(" ", 1)[-1], "DtoH")
        number, ready = self._launch("aten::copy_", "cudaMemcpyAsync", 11_000)
        name = f"Memcpy {kind} ({route})"
        end = self.on_gpu(
            "gpu_memcpy", name, duration_ns, ready, stream, correlation=number, bytes=size_bytes
        )
        if "Pageable" in route:
            self.now_ns = max(self.now_ns, end + self._whole(2_000))

    def clear(self, duration_ns: float) -> None:
        """Launch a memset."""
        number, ready = self._launch("aten::zero_", "cudaMemsetAsync", 8_000)
        self.on_gpu(
            "gpu_memset", "Memset (Device)", duration_ns, ready, COMPUTE_STREAM, correlation=number
        )

    def synchronise(self, streams: Iterable[int] = (COMPUTE_STREAM,)) -> None:
        """Wait on the host until the streams have run dry."""
        self._correlation += 1
        begin = self.now_ns
        done = max(self._free_ns[stream] for stream in streams)
        self.now_ns = max(begin + self._whole(3_000), done + self._whole(4_000))
        self._record(
            "cuda_runtime",
            "cudaStreamSynchronize",
            (begin, self.now_ns),
            self.pid,
            correlation=self._correlation,
        )

    def item(self) -> None:
        """Read a scalar back: a small copy, and the host waits for it."""
        with self.span("aten::item", "cpu_op"):
            self.copy("Device -> Pinned", 1_500, 4)
            self.synchronise()

    def after(self, stream: int, other: int) -> None:
        """Let a stream wait for what another one holds now."""
        self._free_ns[stream] = max(self._free_ns[stream], self._free_ns[other])

    def collective(
        self,
        group: Group,
        operation: str,
        transfer_ns: float,
        *,
        root: int | None = None,
        stream: int = COMM_STREAM,
    ) -> Generator[Call, int, None]:
        """Take part in a collective on a stream that first waits for the compute stream."""
        order = self._orders[group.name + group.pair, operation]
        self._orders[group.name + group.pair, operation] += 1
        with self.span(_ANNOTATIONS.get(operation, f"nccl:{operation}")):
            number, ready = self._launch("record_param_comms", "cudaLaunchKernelExC", 30_000)
        self.after(stream, COMPUTE_STREAM)
        begin = max(ready, self._free_ns[stream])
        end = yield Call(
            group=group,
            operation=operation,
            order=order,
            start_ns=begin,
            transfer_ns=self._whole(transfer_ns),
            root=root,
        )
        self.on_gpu(
            "kernel",
            COLLECTIVE_KERNELS[operation],
            end - begin,
            begin,
            stream,
            correlation=number,
            collective=operation,
            group=group,
            seq=order + 1,
        )


def _ends(calls: dict[int, Call]) -> tuple[dict[int, int], int]:
    """Return each rank's end of a collective, and the arrival of the last one."""
    last = max(call.start_ns for call in calls.values())
    root = next(iter(calls.values())).root
    if root is None:
        return {rank: last + call.transfer_ns for rank, call in calls.items()}, last
    sent = calls[root].start_ns
    return {rank: max(call.start_ns, sent) + call.transfer_ns for rank, call in calls.items()}, last


def simulate(
    count: int, program: Program, *, seed: int = 1, quantum_ns: int = 1
) -> tuple[Rank, ...]:
    """Run the program on each rank until all have ended; raises if collectives never match."""
    ranks = [Rank(index, count, seed, quantum_ns) for index in range(count)]
    running = {rank.index: program(rank) for rank in ranks}
    arrived: dict[tuple[str, str, int], dict[int, Call]] = {}
    answers: dict[int, int | None] = dict.fromkeys(running)
    while answers:
        ready, answers = answers, {}
        for index, answer in ready.items():
            try:
                call = next(running[index]) if answer is None else running[index].send(answer)
            except StopIteration:
                del running[index]
                continue
            key = (
                call.group.name + call.group.pair,
                call.operation.replace("recv", "send"),
                call.order,
            )
            calls = arrived.setdefault(key, {})
            calls[index] = call
            if len(calls) == len(call.group.members):
                ends, last = _ends(calls)
                answers.update(ends)
                _note_waits(ranks, calls, last)
    if running:
        raise AssertionError(f"ranks {sorted(running)} wait for ever")
    return tuple(ranks)


def _note_waits(ranks: list[Rank], calls: dict[int, Call], last_ns: int) -> None:
    if next(iter(calls.values())).operation not in COMMON_END:
        return
    late = next(index for index, call in sorted(calls.items()) if call.start_ns == last_ns)
    for index, call in calls.items():
        if call.start_ns < last_ns:
            ranks[index].waits.append(Wait(begin_ns=call.start_ns, end_ns=last_ns, late=late))
