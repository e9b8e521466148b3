"""The virtual GPUs without processes, sockets or waiting: launches with chosen stamps, for tests.

paper = Paper(gpus=2)
a = paper.process(gpu=0)
a.kernel(at_us=0, us=50)
paper.round(at_us=100)
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from vgpu.device.kinds import COLLECTIVES, KIND_INDEX, Activities
from vgpu.device.lane import Context, Lane
from vgpu.device.ledger import Ledger
from vgpu.device.machine import Device, Machine
from vgpu.device.truth import Truth
from vgpu.device.usage import Usage, measure
from vgpu.device.wire import Code, Op, Ring

_US = 1000


@dataclass(slots=True, kw_only=True, eq=False)
class PaperProcess:
    """A process on one GPU. What it launches reaches the node at the next round."""

    context: Context
    outbox: list[Op] = field(default_factory=list)
    tokens: int = 0

    def _put(self, at_us: int, code: Code, *, stream: int, **fields: int | float) -> None:
        blank = {"duration_ns": 0, "size_bytes": 0, "token": 0, "fill": math.nan}
        rest = {"detail": 0, "peer": 0, "channels": 0}
        values = {**blank, **rest, **fields}
        op = Op(sequence=0, stamp_ns=at_us * _US, stream=stream, code=code, **values)  # type: ignore[arg-type]
        self.outbox.append(op)

    def kernel(self, at_us: int, us: int, *, kind: str = "gemm", stream: int = 0) -> None:
        """Launches a kernel."""
        detail = KIND_INDEX[kind]
        self._put(at_us, Code.KERNEL, stream=stream, duration_ns=us * _US, detail=detail)

    def copy(self, at_us: int, size_bytes: int, *, to_host: bool = False, stream: int = 0) -> None:
        """Launches a copy with pinned memory."""
        self._put(
            at_us, Code.COPY, stream=stream, size_bytes=size_bytes, detail=int(to_host), peer=1
        )

    def record(self, at_us: int, *, stream: int = 0) -> int:
        """Records an event; its token."""
        self.tokens += 1
        self._put(at_us, Code.RECORD, stream=stream, token=self.tokens)
        return self.tokens

    def wait(self, at_us: int, token: int, *, stream: int = 0) -> None:
        """Lets a stream wait."""
        self._put(at_us, Code.WAIT, stream=stream, token=token)

    def collective(
        self,
        at_us: int,
        us: int,
        group: int,
        name: str = "all_reduce",
        *,
        size_bytes: int = 1 << 20,
        peer: int = 0,
        stream: int = 0,
    ) -> None:
        """Launches a collective."""
        self._put(
            at_us,
            Code.COLLECTIVE,
            stream=stream,
            duration_ns=us * _US,
            size_bytes=size_bytes,
            token=group,
            detail=COLLECTIVES.index(name),
            peer=peer,
            channels=16,
        )


class Paper:
    """A node on paper. `usage`: what its sweep has counted, by GPU."""

    def __init__(self, gpus: int) -> None:
        self.activities = Activities()
        devices = [Device(slot=i, multiprocessors=132, pcie_generation=5) for i in range(gpus)]
        self.machine = Machine(devices, self.activities)
        self.ledger = Ledger()
        self.usage = [Usage() for _ in range(gpus)]
        self.processes: list[PaperProcess] = []
        self.now_ns = 0

    def process(self, gpu: int) -> PaperProcess:
        """A process begins to use a GPU."""
        ring, file = Ring.create()
        os.close(file)
        context = Context(pid=1000 + len(self.processes), gpu=gpu, ring=ring, begin_ns=self.now_ns)
        self.machine.devices[gpu].contexts.append(context)
        self.ledger.enter(context)
        self.processes.append(PaperProcess(context=context))
        return self.processes[-1]

    def group(self, *members: PaperProcess, name: str = "world") -> int:
        """A communicator of these; its number."""
        numbers = {
            self.machine.join(member.context, name, rank, len(members))
            for rank, member in enumerate(members)
        }
        (number,) = numbers
        self.ledger.group(number, name)
        return number

    def lanes(self) -> list[Lane]:
        """All streams."""
        return [lane for device in self.machine.devices for lane in device.lanes()]

    def round(self, at_us: int) -> None:
        """The node wakes: takes what was launched by now, moves on, counts."""
        now_ns = at_us * _US
        for process in self.processes:
            due = [op for op in process.outbox if op.stamp_ns <= now_ns]
            process.outbox = process.outbox[len(due) :]
            for op in due:
                process.context.accept(op, self.now_ns, now_ns)
        self.machine.advance(now_ns)
        for device, usage in zip(self.machine.devices, self.usage, strict=True):
            usage.add(measure(device.lanes(), self.now_ns, now_ns, self.activities))
            for lane in device.lanes():
                self.ledger.finished(lane, lane.retire(now_ns))
        self.now_ns = now_ns

    def kill(self, process: PaperProcess) -> None:
        """It dies now."""
        self.ledger.leave(process.context, self.now_ns)
        self.machine.kill(process.context, self.now_ns)
        process.outbox.clear()

    def truth(self, folder: Path) -> Truth:
        """What happened by now."""
        self.ledger.write(folder / "truth", self.lanes(), self.now_ns)
        return Truth.load(folder / "truth")
