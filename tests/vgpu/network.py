"""Collectives over a network: a rank's proxy thread moves their bytes through TCP, in a ring.

    group = gpu.group("world", rank, size)
    proxy = Proxy(group, [("10.0.0.1", 5000), ("10.0.0.2", 5000)])    # one address a rank, in order
    gpu.all_reduce(None, group, size_bytes=25 << 20)                  # as long as the bytes take

As with NCCL: the kernel polls until all ranks have come; then a thread of each process sends a
part to the next rank and receives one from the rank before, round by round, and the kernel ends
with the last. So links, sockets and interface counters see what they would of a real job, and a
slow link makes the collective slow for all. A proxy whose neighbour is gone stops: all others hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import threading
import time
from collections.abc import Sequence

from vgpu.client import Group
from vgpu.device.wire import ENVIRONMENT, MESSAGE_BYTES_MAX

_CONNECT_S = 60.0
_AGAIN_S = 0.05
_PIECE_BYTES = 256 << 10
_PR_SET_NAME = 15
# What NCCL calls the thread that moves a communicator's bytes.
_NAME = b"NCCL Progress 0"

Address = tuple[str, int]


class Proxy:
    """Moves the data of a group's collectives for one rank. Connects at once; waits for the others.

    Raises OSError where that takes longer than a minute.
    """

    def __init__(self, group: Group, addresses: Sequence[Address]) -> None:
        self._group = group
        self._out, self._in = _ring(group, addresses)
        self._node = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._node.connect(os.environ[ENVIRONMENT])
        self._tell("proxy")
        self._node.recv(MESSAGE_BYTES_MAX)
        threading.Thread(target=self._serve, daemon=True).start()

    def _tell(self, ask: str) -> None:
        told = {"ask": ask, "group": self._group.number, "rank": self._group.rank}
        self._node.send(json.dumps(told).encode())

    def _serve(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME, 0, 0, 0)
        room = memoryview(bytearray(_PIECE_BYTES))
        with contextlib.suppress(OSError):  # the node or a neighbour went
            while data := self._node.recv(MESSAGE_BYTES_MAX):
                move = json.loads(data)
                size = self._group.size
                for _ in range(move["passes"] * (size - 1)):
                    self._exchange(move["size_bytes"] // size, room)
                self._tell("moved")

    def _exchange(self, size_bytes: int, room: memoryview) -> None:
        """One round: sends so many bytes to the next rank, receives as many from the one before."""
        to_send = to_receive = size_bytes
        while to_send or to_receive:
            readable, writable, _ = select.select(
                [self._in] if to_receive else [], [self._out] if to_send else [], []
            )
            if writable:
                to_send -= self._out.send(room[: min(to_send, _PIECE_BYTES)])
            if readable:
                received = self._in.recv_into(room[: min(to_receive, _PIECE_BYTES)])
                if not received:
                    raise OSError("the rank before has closed its connection")
                to_receive -= received


def _ring(group: Group, addresses: Sequence[Address]) -> tuple[socket.socket, socket.socket]:
    """The connections to the next rank and from the one before; neither ever blocks."""
    with socket.create_server(addresses[group.rank]) as listener:
        listener.settimeout(_CONNECT_S)
        onward = _connect(addresses[(group.rank + 1) % group.size])
        back, _ = listener.accept()
    for one in (onward, back):
        one.setblocking(False)
    return onward, back


def _connect(address: Address) -> socket.socket:
    end = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection(address, timeout=_CONNECT_S)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(_AGAIN_S)
