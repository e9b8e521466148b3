"""What client and node share: a ring of launches in memory, and messages over a socket.

A launch is one record in the ring and no system call, as with a real driver: the client stamps it,
writes it, and moves `head`. Only when the node sleeps does the client ring its doorbell. Everything
that waits or answers goes over the socket (SOCK_SEQPACKET, a JSON object a message).

The ring needs stores to be seen in their order, as x86-64 has it.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from typing import NamedTuple

ENVIRONMENT = "WHYIDLE_VGPU"
DOORBELL = b"!"
MESSAGE_BYTES_MAX = 4096

# CUDA lets about 1,024 launches of a context wait; the next one blocks the caller.
QUEUE_DEPTH = 1024
# A caller that was blocked goes on once this many places are free: one wake-up for many launches.
QUEUE_SLACK = 64
# More than QUEUE_DEPTH, so that a ring is never full.
RING_SLOTS = 2048
ABSENT = 0xFFFFFFFF
# As the duration of a collective: its data move until the proxies of its group say that they did.
BY_NETWORK_NS = 1 << 62

_HEADER_BYTES = 4096
_SLOT = struct.Struct("<QQQQQfHBBIH10x")
SLOT_BYTES = _SLOT.size
PAGE_BYTES = _HEADER_BYTES + RING_SLOTS * SLOT_BYTES
_HEAD = struct.Struct("<Q")
_NODE = struct.Struct("<QQQ")
_NODE_AT = 64  # the node's words on a cache line of their own


class Code(IntEnum):
    """What a record asks for."""

    KERNEL = 0
    COPY = 1
    COLLECTIVE = 2
    RECORD = 3  # an event, by token
    WAIT = 4  # for an event, by token
    MEMORY = 5  # bytes this context holds from now on


class Op(NamedTuple):
    """One record. `token`: an event, or a group; `detail`: kernel kind, direction or collective.

    `fill` is NaN for the kind's own; `peer`: a root or the other side; `channels`: SMs of NCCL.
    """

    sequence: int
    stamp_ns: int
    duration_ns: int
    size_bytes: int
    token: int
    fill: float
    stream: int
    code: int
    detail: int
    peer: int
    channels: int


class NodeWords(NamedTuple):
    """What the node tells a client without being asked."""

    asleep: int
    heartbeat_ns: int
    done: int


class Ring:
    """The shared page, seen from either side."""

    def __init__(self, file: int) -> None:
        """Maps a descriptor of PAGE_BYTES; the descriptor is not kept."""
        self._map = mmap.mmap(file, PAGE_BYTES)

    @classmethod
    def create(cls) -> tuple[Ring, int]:
        """A new page and its descriptor, to be sent and closed."""
        file = os.memfd_create("vgpu-ring", os.MFD_CLOEXEC)
        os.ftruncate(file, PAGE_BYTES)
        return cls(file), file

    def put(self, sequence: int, op: tuple[int | float, ...]) -> None:
        """The client's side: writes launch number `sequence` (from 0), then shows it."""
        at = _HEADER_BYTES + (sequence % RING_SLOTS) * SLOT_BYTES
        _SLOT.pack_into(self._map, at, sequence, *op)
        _HEAD.pack_into(self._map, 0, sequence + 1)

    def words(self) -> NodeWords:
        """The client's side: what the node last wrote."""
        return NodeWords._make(_NODE.unpack_from(self._map, _NODE_AT))

    def head(self) -> int:
        """The node's side: how many launches there are by now."""
        return int(_HEAD.unpack_from(self._map, 0)[0])

    def take(self, begin: int, end: int) -> list[Op]:
        """The node's side: launches `begin` to `end` (exclusive)."""
        ops = []
        for sequence in range(begin, end):
            at = _HEADER_BYTES + (sequence % RING_SLOTS) * SLOT_BYTES
            ops.append(Op._make(_SLOT.unpack_from(self._map, at)))
        return ops

    def tell(self, *, asleep: bool, heartbeat_ns: int, done: int) -> None:
        """The node's side: its words."""
        _NODE.pack_into(self._map, _NODE_AT, asleep, heartbeat_ns, done)
