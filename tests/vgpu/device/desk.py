"""Where clients of the node stand: their sockets, and the questions they wait for."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vgpu.device.lane import Context
from vgpu.device.wire import DOORBELL, MESSAGE_BYTES_MAX, QUEUE_DEPTH, QUEUE_SLACK, Ring

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
Message = dict[str, Any]
# Questions whose answer is a moment on the timeline.
QUESTIONS = ("sync", "event", "room")


@dataclass(slots=True, kw_only=True, eq=False)
class Client:
    """A connection. `life`: a descriptor that is readable once the process has ended.

    The socket alone would not tell: forked children keep it open when their parent is killed.
    """

    line: socket.socket
    pid: int
    life: int
    context: Context | None = None
    inbox: deque[Message] = field(default_factory=deque)
    asking: Message | None = None  # a question that waits for the timeline
    gone: bool = False

    @classmethod
    def accept(cls, listener: socket.socket) -> Client | None:
        """The next connection; None if its process is gone already."""
        connection, _ = listener.accept()
        connection.setblocking(False)
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid = _CREDENTIALS.unpack(credentials)[0]
        try:
            life = os.pidfd_open(pid)
        except ProcessLookupError:
            connection.close()
            return None
        return cls(line=connection, pid=pid, life=life)

    def close(self) -> None:
        """Lets go of it."""
        os.close(self.life)
        self.line.close()

    def read(self) -> None:
        """Takes in what was sent; doorbells only wake."""
        while True:
            try:
                data = self.line.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.gone = True
                return
            if data == DOORBELL:
                continue
            message = _parse(data)
            if message is None or message.get("ask") == "bye":
                self.gone = True
                return
            self.inbox.append(message)

    def reply(self, **answer: Any) -> None:
        """Answers. A client that is gone, or does not read, is noticed elsewhere."""
        try:
            self.line.send(json.dumps(answer).encode())
        except OSError:
            self.gone = True

    def welcome(self, ring_file: int, **answer: Any) -> None:
        """Answers with the ring's descriptor."""
        try:
            socket.send_fds(self.line, [json.dumps(answer).encode()], [ring_file])
        except OSError:
            self.gone = True

    def due_ns(self, now_ns: int) -> int | None:
        """When the question it waits with has its answer; None while that is open."""
        assert self.asking is not None and self.context is not None
        context, what = self.context, self.asking["ask"]
        if what == "room":
            waiting = context.taken - context.done
            return now_ns if waiting <= QUEUE_DEPTH - QUEUE_SLACK else None
        if what == "event":
            return context.token_ns(self.asking["token"])
        if self.asking.get("stream") is None:
            return context.end_ns()
        lane = context.lanes.get(self.asking["stream"])
        return 0 if lane is None else lane.end_ns


def _parse(data: bytes) -> Message | None:
    """None: no client of ours."""
    try:
        message = json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def new_context(client: Client, gpu: int, memory_bytes: int, now_ns: int) -> tuple[Context, int]:
    """A process begins to use a GPU; its context, and the ring's descriptor to send and close."""
    ring, file = Ring.create()
    context = Context(
        pid=client.pid, gpu=gpu, ring=ring, memory_bytes=memory_bytes, begin_ns=now_ns
    )
    client.context = context
    return context, file
