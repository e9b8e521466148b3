"""What a step launches: kernels and collectives, as the styles of training have them."""

from __future__ import annotations

from stalls.scenario import Setup
from vgpu.client import Group, VirtualGpu

# A backward pass computes gradients of inputs and of weights.
BACKWARD_RATIO = 2
_LAUNCH_SHARE = 0.9  # of a step; the rest is the optimizer's


class Step:
    """Launches steps of one rank; collectives go over its link where it has one."""

    def __init__(self, setup: Setup, gpu: VirtualGpu, world: Group) -> None:
        self._setup, self._gpu, self._world = setup, gpu, world
        self._comm_ms = None if setup.link_bytes_per_s else setup.comm_ms
        self._how = {"size_bytes": setup.comm_bytes} if setup.link_bytes_per_s else {}

    def launch(self, number: int) -> None:
        """A step's kernels and collectives, but for the optimizer: forward, then backward."""
        setup = self._setup
        if setup.style == "pipeline":
            self._stage()
            return
        ms = (setup.step_ms + self._turn_ms(number)) * _LAUNCH_SHARE / setup.kernels
        if setup.style == "fsdp":
            self._sharded(ms)
        elif setup.style == "overlapped":
            self._overlapped(ms)
        else:
            if setup.mixed_ms:
                self._gpu.launch(setup.mixed_ms, kind="gemm")
            for _ in range(setup.kernels):
                self._gpu.launch(ms, kind=setup.kernel)
            if self._world.size > 1 and setup.style != "gloo":
                self._gpu.all_reduce(self._comm_ms, self._world, **self._how)

    def _turn_ms(self, number: int) -> float:
        """What a rank has to do more while it is its turn, as with sequences of unequal length."""
        every = self._setup.turns_every
        mine = every and number // every % self._world.size == self._world.rank
        return self._setup.turns_ms if mine else 0.0

    def _overlapped(self, ms: float) -> None:
        """Gradients are reduced in buckets, each as soon as the backward pass has filled it."""
        setup, gpu = self._setup, self._gpu
        for index in range(setup.kernels):
            gpu.launch(ms, kind=setup.kernel)
            if index >= setup.kernels // 3:
                gpu.wait(gpu.event(), stream=1)
                gpu.all_reduce(self._comm_ms, self._world, stream=1, **self._how)
        gpu.wait(gpu.event(1))

    def _sharded(self, ms: float) -> None:
        """Parameters come on a stream of their own, ahead of their use."""
        setup, gpu = self._setup, self._gpu
        for index in range(setup.kernels):
            gpu.all_gather(self._comm_ms, self._world, stream=1, **self._how)
            gpu.wait(gpu.event(1))
            gpu.launch(ms, kind=setup.kernel)
            if index >= setup.kernels // 2:
                gpu.wait(gpu.event(), stream=1)
                gpu.reduce_scatter(self._comm_ms, self._world, stream=1, **self._how)
        gpu.wait(gpu.event(1))

    def _stage(self) -> None:
        """One stage: a pass begins when its micro-batch has come, and sends beside the next one."""
        setup, gpu, rank = self._setup, self._gpu, self._world.rank
        forward_ms = setup.step_ms * _LAUNCH_SHARE / setup.batches / (1 + BACKWARD_RATIO)
        last = self._world.size - 1
        for forward in passes(setup, rank):
            source, to = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
            if 0 <= source <= last:
                gpu.recv(setup.comm_ms, self._world, source)
            gpu.launch(forward_ms * (1 if forward else BACKWARD_RATIO), kind=setup.kernel)
            if 0 <= to <= last:
                gpu.wait(gpu.event(), stream=1)
                gpu.send(setup.comm_ms, self._world, to, stream=1)
        gpu.wait(gpu.event(1))


def passes(setup: Setup, stage: int) -> list[bool]:
    """The passes of a stage in their order; True is a forward pass."""
    count = setup.batches
    ahead = count if setup.schedule == "gpipe" else min(setup.ranks - 1 - stage, count)
    order = [True] * ahead
    for _ in range(count - ahead):
        order += [True, False]
    return order + [False] * ahead
