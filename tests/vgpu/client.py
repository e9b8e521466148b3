"""A process's view of the virtual GPU: launches that return at once, waits that block.

    from vgpu.client import connect

    gpu = connect()                                  # WHYIDLE_VGPU names the node's socket
    gpu.copy(64 << 20)                               # to the device, from pinned memory
    gpu.launch(12.5, kind="gemm")                    # milliseconds of work; returns at once
    gpu.all_reduce(3.0, gpu.group("world", rank, size))
    gpu.synchronize()                                # blocks until all of it is done

The device runs on its own timeline; nothing here marks busy time. Waits block in a system call
(like cudaDeviceScheduleBlockingSync) and hold no lock of the interpreter. A node that dies, or a
GPU that is lost, raises GpuLost in a wait at once, in launches after a second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from vgpu.device.kinds import COLLECTIVES, KIND_INDEX, TO_DEVICE, TO_HOST
from vgpu.device.wire import (
    BY_NETWORK_NS,
    DOORBELL,
    ENVIRONMENT,
    MESSAGE_BYTES_MAX,
    QUEUE_DEPTH,
    Code,
    Ring,
)

_NO_FILL = math.nan
_NS_PER_MS = 1e6
# No sign of life for so long: ask.
_SILENCE_NS = 1_000_000_000
# Pageable copies up to 64 KB are staged and return at once; larger ones block the host.
_STAGED_BYTES = 64 << 10
_CHANNELS = 16
# Bytes of a collective whose size was not given: its time at the bus rate of eight H100.
_BUS_BYTES_PER_MS = 240e6
_GONE = "the virtual GPU is gone: its node ended, or it fell off the bus"


class GpuLost(RuntimeError):
    """The node is gone, or the GPU fell off the bus: the context cannot be used any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A communicator: the number the node gave it."""

    number: int
    rank: int
    size: int


class Event:
    """A moment on a stream. Made by `VirtualGpu.event`."""

    def __init__(self, gpu: VirtualGpu, token: int) -> None:
        self._gpu, self.token = gpu, token

    def query(self) -> bool:
        """Whether it has happened. Does not wait."""
        return bool(self._gpu.ask(ask="query", token=self.token)["done"])

    def synchronize(self) -> None:
        """Waits until it has happened."""
        self._gpu.ask(ask="event", token=self.token)


class VirtualGpu:
    """One GPU of the node, used by this process. Threads may share it; a forked child may not."""

    def __init__(self, path: str, index: int, memory_bytes: int) -> None:
        self._pid = os.getpid()
        self._launching, self._asking = threading.Lock(), threading.Lock()
        self._sent, self._tokens, self._memory_bytes = 0, 0, memory_bytes
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(path)
            hello = {"ask": "hello", "gpu": index, "memory_bytes": memory_bytes}
            self._socket.send(json.dumps(hello).encode())
            data, files, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES_MAX, 1)
        except OSError as error:
            self._socket.close()
            raise GpuLost(f"no virtual GPU node answers at {path}: {error}") from error
        try:
            answer = _understood(data, path)
        except (GpuLost, ValueError):
            self._socket.close()
            raise
        self.index, self.uuid = index, str(answer["uuid"])
        self._ring = Ring(files[0])
        os.close(files[0])

    def __enter__(self) -> VirtualGpu:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the GPU back. What is still queued is dropped, as at the end of a process."""
        if self._socket.fileno() >= 0 and self._pid == os.getpid():
            with contextlib.suppress(OSError):  # the node went first
                self._socket.send(json.dumps({"ask": "bye"}).encode())
        self._socket.close()

    def launch(
        self, ms: float, *, kind: str = "gemm", fill: float | None = None, stream: int = 0
    ) -> None:
        """Enqueues a kernel of `ms` milliseconds.

        `kind`: see vgpu.device.kinds; `fill`: the share of SMs, else the kind's own.
        """
        if kind not in KIND_INDEX:
            raise ValueError(f"no kind of kernel is called {kind!r}; see {', '.join(KIND_INDEX)}")
        self._put(
            Code.KERNEL,
            duration_ns=round(ms * _NS_PER_MS),
            detail=KIND_INDEX[kind],
            fill=_NO_FILL if fill is None else fill,
            stream=stream,
        )

    def copy(
        self, size_bytes: int, *, to: str = "device", pinned: bool = True, stream: int = 0
    ) -> None:
        """Enqueues a copy over PCIe. From (to) pageable memory it blocks, beyond 64 KB."""
        direction = {"device": TO_DEVICE, "host": TO_HOST}[to]
        self._put(
            Code.COPY, size_bytes=size_bytes, detail=direction, peer=int(pinned), stream=stream
        )
        if not pinned and (direction == TO_HOST or size_bytes > _STAGED_BYTES):
            self.synchronize(stream)

    def allocate(self, size_bytes: int) -> None:
        """Takes (negative: gives back) device memory."""
        with self._launching:
            self._memory_bytes += size_bytes
            held = self._memory_bytes
        self._put(Code.MEMORY, size_bytes=held)

    def group(self, name: str, rank: int, size: int) -> Group:
        """Joins a communicator by name. Does not wait for the others."""
        number = self.ask(ask="group", name=name, rank=rank, size=size)["group"]
        return Group(number=int(number), rank=rank, size=size)

    def all_reduce(self, ms: float | None, group: Group, **how: int) -> None:
        """Enqueues a collective: `ms` of transfer from when all members' streams have come to it.

        Until then its kernel is resident and polls. `how`: `size_bytes`, `stream`, `channels`.
        Without `ms` the bytes go over the network: see vgpu.network.
        """
        self._collective("all_reduce", ms, group, **how)

    def all_gather(self, ms: float | None, group: Group, **how: int) -> None:
        """As all_reduce."""
        self._collective("all_gather", ms, group, **how)

    def reduce_scatter(self, ms: float | None, group: Group, **how: int) -> None:
        """As all_reduce."""
        self._collective("reduce_scatter", ms, group, **how)

    def all_to_all(self, ms: float, group: Group, **how: int) -> None:
        """As all_reduce."""
        self._collective("all_to_all", ms, group, **how)

    def broadcast(self, ms: float, group: Group, root: int = 0, **how: int) -> None:
        """As all_reduce; up to 4 MiB the root does not wait for the others."""
        self._collective("broadcast", ms, group, peer=root, **how)

    def send(self, ms: float, group: Group, to: int, **how: int) -> None:
        """To one member; up to 4 MiB it does not wait for the receiver."""
        self._collective("send", ms, group, peer=to, **how)

    def recv(self, ms: float, group: Group, source: int, **how: int) -> None:
        """From one member; waits for its send."""
        self._collective("recv", ms, group, peer=source, **how)

    def _collective(
        self,
        name: str,
        ms: float | None,
        group: Group,
        *,
        peer: int = 0,
        size_bytes: int | None = None,
        stream: int = 0,
        channels: int = _CHANNELS,
    ) -> None:
        self._put(
            Code.COLLECTIVE,
            duration_ns=BY_NETWORK_NS if ms is None else round(ms * _NS_PER_MS),
            size_bytes=round((ms or 0.0) * _BUS_BYTES_PER_MS) if size_bytes is None else size_bytes,
            token=group.number,
            detail=COLLECTIVES.index(name),
            peer=peer,
            channels=channels,
            stream=stream,
        )

    def event(self, stream: int = 0) -> Event:
        """Records an event behind everything on a stream."""
        return Event(self, self._put(Code.RECORD, stream=stream))

    def wait(self, event: Event, stream: int = 0) -> None:
        """Lets a stream wait for an event. Does not block the caller."""
        self._put(Code.WAIT, token=event.token, stream=stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Blocks until everything launched (on one stream, or on all) is done."""
        self.ask(ask="sync", stream=stream)

    def _put(
        self,
        code: Code,
        *,
        duration_ns: int = 0,
        size_bytes: int = 0,
        token: int = 0,
        fill: float = _NO_FILL,
        stream: int = 0,
        detail: int = 0,
        peer: int = 0,
        channels: int = 0,
    ) -> int:
        """Enqueues a record; an event's token. Blocks only while the queue is full."""
        self._own()
        with self._launching:
            words = self._ring.words()
            if self._sent - words.done >= QUEUE_DEPTH:
                self.ask(ask="room")
                words = self._ring.words()
            if code is Code.RECORD:
                self._tokens += 1
                token = self._tokens
            stamp_ns = time.monotonic_ns()
            self._ring.put(
                self._sent,
                (
                    stamp_ns,
                    duration_ns,
                    size_bytes,
                    token,
                    fill,
                    stream,
                    code,
                    detail,
                    peer,
                    channels,
                ),
            )
            self._sent += 1
            words = self._ring.words()
            if words.asleep or stamp_ns - words.heartbeat_ns > _SILENCE_NS:
                self._ring_bell()
        return token

    def _ring_bell(self) -> None:
        try:
            self._socket.send(DOORBELL)
        except OSError as error:
            raise GpuLost(_GONE) from error

    def _own(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                "a forked process cannot use its parent's GPU: connect in the child, or spawn it"
            )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Asks the node and waits for the answer."""
        self._own()
        with self._asking:
            try:
                self._socket.send(json.dumps(question).encode())
                data = self._socket.recv(MESSAGE_BYTES_MAX)
            except OSError as error:
                raise GpuLost(_GONE) from error
        return _understood(data, "the node")


def _understood(data: bytes, who: str) -> dict[str, Any]:
    if not data:
        raise GpuLost(f"{_GONE} ({who} closed the connection)")
    answer: dict[str, Any] = json.loads(data)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def connect(index: int | None = None, *, memory_bytes: int = 0) -> VirtualGpu:
    """A GPU of the node that WHYIDLE_VGPU names; by default that of LOCAL_RANK, or the first."""
    path = os.environ.get(ENVIRONMENT)
    if path is None:
        raise GpuLost(f"{ENVIRONMENT} is not set: start a node with vgpu.device.serve")
    chosen = int(os.environ.get("LOCAL_RANK", "0")) if index is None else index
    return VirtualGpu(path, chosen, memory_bytes)
