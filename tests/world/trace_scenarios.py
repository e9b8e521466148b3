"""Training runs with one thing wrong each, and the same runs without it.

The stall of a scenario can be left out (`stalled=False`): what the idle time shrinks by is what the
stall truly cost, on its own rank and on every rank that waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from world.traces import COMM_STREAM, COPY_STREAM, Call, Group, Program, Rank, simulate

Steps = Generator[Call, int, None]
MS = 1_000_000

_GEMM = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"
_NORM = (
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>"
    "(int, float, c10::BFloat16 const*, c10::BFloat16 const*, c10::BFloat16 const*, float*, "
    "float*, c10::BFloat16*)"
)
_POINTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl, "
    "std::array<char*, 2ul> >(int, at::native::GeluCUDAKernelImpl, std::array<char*, 2ul>)"
)
_ATTENTION = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
    "cutlass::bfloat16_t>, false, true, false>(pytorch_flash::Flash_fwd_params)"
)
_OPTIMIZER = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>>(at::native::(anonymous namespace)"
    "::FusedOptimizerTensorListMetadata<4>)"
)
# Operator, kernel, and its share of a layer's forward time.
_LAYER: tuple[tuple[str, str, float], ...] = (
    ("aten::layer_norm", _NORM, 0.04),
    ("aten::addmm", _GEMM, 0.22),
    ("aten::_flash_attention_forward", _ATTENTION, 0.18),
    ("aten::addmm", _GEMM, 0.10),
    ("aten::layer_norm", _NORM, 0.04),
    ("aten::addmm", _GEMM, 0.19),
    ("aten::gelu", _POINTWISE, 0.05),
    ("aten::addmm", _GEMM, 0.18),
)


def _nothing(rank: Rank, step: int) -> None:
    """Do nothing."""


def _evenly(rank: Rank, step: int) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A data-parallel training loop, and hooks for what goes wrong in it.

    `load` fetches the batch, `middle` runs between forward and backward, `after` at the end of a
    step, `slowness` multiplies kernel times. `sync` says when a step reads its loss back: at its
    end, one step later, or never.
    """

    ranks: int = 4
    steps: int = 6
    layers: int = 3
    layer_ns: float = 2 * MS
    reduce_ns: float = 1.5 * MS
    host_ns: float = 9_000
    sync: Literal["step", "previous", "never"] = "step"
    load: Callable[[Rank, int], None] = _nothing
    middle: Callable[[Rank, int], None] = _nothing
    after: Callable[[Rank, int], None] = _nothing
    slowness: Callable[[Rank, int], float] = _evenly


def load_ready(rank: Rank) -> None:
    """Fetch a batch that the workers had ready."""
    with rank.span("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
        rank.pause(60_000)


def _layer(rank: Rank, job: Job, step: int, work_ns: float) -> None:
    scale = job.slowness(rank, step)
    for op, kernel, share in _LAYER:
        rank.kernel(kernel, rank.vary(work_ns * share * scale), op, job.host_ns)


def _backward(rank: Rank, job: Job, step: int, group: Group) -> Steps:
    for _ in range(job.layers):
        _layer(rank, job, step, 2 * job.layer_ns)
        if job.reduce_ns and len(group.members) > 1:
            yield from rank.collective(group, "allreduce", job.reduce_ns)


def _optimize(rank: Rank, job: Job) -> None:
    with rank.span("Optimizer.step#AdamW.step"):
        rank.after(7, COMM_STREAM)
        for _ in range(3):
            rank.kernel(_OPTIMIZER, rank.vary(300_000), "aten::_fused_adamw_", job.host_ns)


def data_parallel(job: Job) -> Program:
    """Return a training loop whose gradients are reduced beside the backward pass."""
    group = Group(name="0", members=tuple(range(job.ranks)))

    def program(rank: Rank) -> Steps:
        for step in range(job.steps):
            with rank.span(f"ProfilerStep#{step + 3}"):
                job.load(rank, step)
                rank.copy("Pinned -> Device", 60_000, 1 << 20, stream=COPY_STREAM)
                rank.after(7, COPY_STREAM)
                for _ in range(job.layers):
                    _layer(rank, job, step, job.layer_ns)
                job.middle(rank, step)
                if job.sync == "previous" and step:
                    rank.item()
                yield from _backward(rank, job, step, group)
                _optimize(rank, job)
                if job.sync == "step":
                    rank.item()
                job.after(rank, step)

    return program


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run, what is wrong with it, and whom it comes from.

    `roots` are the (cause, subcause) pairs that name the stall rightly; `culprits` the ranks it
    arises on, empty where nothing is wrong.
    """

    name: str
    build: Callable[[bool], Program]
    ranks: int = 4
    roots: tuple[tuple[str, str], ...] = ()
    culprits: tuple[int, ...] = ()
    seed: int = 7

    def run(self, *, stalled: bool = True, quantum_ns: int = 1) -> tuple[Rank, ...]:
        """Simulate the run, with its stall or without."""
        program = self.build(stalled)
        return simulate(self.ranks, program, seed=self.seed, quantum_ns=quantum_ns)


def _job(
    stalled: bool, hook: Literal["load", "middle", "after"], stall: Callable[[Rank, int], None]
) -> Program:
    """Return a training loop with a stall in one place; `load` still fetches when not stalled."""

    def ready(rank: Rank, step: int) -> None:
        load_ready(rank)

    held = stall if stalled else ready if hook == "load" else _nothing
    return data_parallel(
        Job(
            load=held if hook == "load" else ready,
            middle=held if hook == "middle" else _nothing,
            after=held if hook == "after" else _nothing,
        )
    )


@contextmanager
def _python(rank: Rank, *names: str) -> Iterator[None]:
    """Nest Python frames."""
    if not names:
        yield
        return
    with rank.span(names[0], "python_function"), _python(rank, *names[1:]):
        yield


def healthy(_stalled: bool) -> Program:
    """Return a run that keeps its GPUs busy."""
    return data_parallel(
        Job(sync="previous", reduce_ns=0.15 * MS, load=lambda rank, _: load_ready(rank))
    )


def sleeping(stalled: bool) -> Program:
    """Return a run in which rank 2 does something that nothing records, on every second step."""

    def sleep(rank: Rank, step: int) -> None:
        if rank.index == 2 and step % 2:
            with rank.labelled("sleep"):
                rank.pause(25 * MS)

    return _job(stalled, "middle", sleep)


def loading_itself(stalled: bool, first_step: int = 1, steps: int = 6) -> Program:
    """Return a run in which rank 1 has no DataLoader workers.

    Before `first_step` its data is ready: what it loads before its first kernel lies outside its
    window, and so outside what the stall is seen to cost.
    """

    def load(rank: Rank, step: int) -> None:
        if rank.index != 1 or not stalled or step < first_step:
            load_ready(rank)
            return
        with (
            rank.labelled("load"),
            rank.span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
        ):
            for _ in range(8):
                with rank.span("aten::stack", "cpu_op"):
                    rank.pause(rank.vary(2 * MS))

    return data_parallel(Job(steps=steps, load=load))


def starved(stalled: bool) -> Program:
    """Return a run in which every rank waits for its DataLoader's workers."""

    def load(rank: Rank, _step: int) -> None:
        with (
            rank.labelled("load"),
            rank.span("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"),
        ):
            rank.pause(18 * MS)

    return _job(stalled, "load", load)


def collecting_garbage(stalled: bool) -> Program:
    """Return a run in which Python collects garbage on rank 3, in two steps."""

    def collect(rank: Rank, step: int) -> None:
        if rank.index == 3 and step in (1, 4):
            with rank.labelled("gc"), rank.span("Python GC", "python_function"):
                rank.pause(40 * MS)

    return _job(stalled, "middle", collect)


def checkpointing(stalled: bool) -> Program:
    """Return a run in which rank 0 saves a checkpoint while the others wait."""

    def save(rank: Rank, step: int) -> None:
        if rank.index == 0 and step == 2:
            with (
                rank.labelled("save"),
                _python(rank, "train.py(88): train", "torch/serialization.py(936): save"),
            ):
                for _ in range(12):
                    rank.copy("Device -> Pageable", 2 * MS, 1 << 24)
                    rank.pause(6 * MS)

    return _job(stalled, "after", save)


def copying_pageable(stalled: bool) -> Program:
    """Return a run whose inputs come from pageable memory: the GPU copies and nothing else."""

    def copy(rank: Rank, _step: int) -> None:
        load_ready(rank)
        if stalled:
            with rank.labelled("copy"):
                rank.copy("Pageable -> Device", 9 * MS, 96 << 20)

    return data_parallel(Job(load=copy))


def launch_bound(stalled: bool) -> Program:
    """Return a run whose kernels are shorter than their launches."""
    slow = 14_000 if stalled else 1_500
    return data_parallel(
        Job(
            layers=12,
            layer_ns=30_000,
            reduce_ns=0,
            steps=3,
            host_ns=slow,
            sync="previous",
            load=lambda rank, _: load_ready(rank),
        )
    )


def synchronising(stalled: bool) -> Program:
    """Return a run that reads scalars back between its forward kernels."""

    def read(rank: Rank, _step: int) -> None:
        for _ in range(20):
            rank.kernel(_POINTWISE, 60_000, "aten::gelu", 20_000)
            rank.item()
            rank.kernel(_POINTWISE, 60_000, "aten::gelu", 20_000)

    def keep(rank: Rank, _step: int) -> None:
        for _ in range(40):
            rank.kernel(_POINTWISE, 60_000, "aten::gelu", 20_000)

    return data_parallel(
        Job(
            ranks=1,
            sync="previous",
            load=lambda rank, _: load_ready(rank),
            middle=read if stalled else keep,
        )
    )
