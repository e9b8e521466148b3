"""Connections in the kernel's answer about TCP sockets (sock_diag).

Source: struct inet_diag_msg of <linux/inet_diag.h>, struct tcp_info of <linux/tcp.h>, which only
ever grows at its end: what an older kernel leaves out is None.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from whyidle.host import Answer

# Length and kind of a message; then peer's port (big-endian), cookie, queues and inode.
_HEAD = struct.Struct("=IH10x")
_MESSAGE = struct.Struct("=16x4x2xH32x4xQ4xII4xI")
_DONE = 3
_ATTRIBUTE = struct.Struct("=HH")
_INET_DIAG_INFO = 2
# rtt; retransmits; received; busy, receiver limited, sender limited; sent; out of order.
_INFO = struct.Struct("=68xI28xI24xQ32xQQQ8xQ16xI")
# How long the structure must be for each of these.
_LEAST = (72, 104, 136, 176, 184, 192, 208, 228)


class Connection(NamedTuple):
    """A TCP connection.

    `cookie` names it as long as it lives. `inode` is that of its socket, 0 if it has none. `begin`
    and `end` are where its attributes are: `parse_info` reads them, for those that are of interest.
    """

    cookie: int
    inode: int
    peer_port: int
    rx_queue_bytes: int
    tx_queue_bytes: int
    begin: int
    end: int


TOTALS = (
    "retransmits",
    "rx_bytes",
    "busy_us",
    "receiver_limited_us",
    "sender_limited_us",
    "tx_bytes",
    "out_of_order",
)
NOTHING: tuple[int | None, ...] = (None,) * len(TOTALS)


def parse_answer(answer: Answer) -> bytes:
    """Return the messages of an answer to "connections"; raises ValueError."""
    if not isinstance(answer, tuple | list) or not all(isinstance(one, str) for one in answer):
        raise ValueError(f"connections: {answer!r:.80} is no list of messages in hex")
    try:
        return b"".join([bytes.fromhex(str(piece)) for piece in answer])
    except ValueError:
        raise ValueError(f"connections: {answer!r:.80} is no hex") from None


def parse(data: bytes) -> Iterator[Connection]:
    """Yield the connections of netlink messages; raises ValueError on what is cut off."""
    at = 0
    while at < len(data):
        if at + _HEAD.size > len(data):
            raise ValueError(f"connections: {len(data) - at} bytes are no message")
        length, kind = _HEAD.unpack_from(data, at)
        if length < _HEAD.size or at + length > len(data):
            raise ValueError(f"connections: a message of {length} bytes is cut off")
        if kind > _DONE:
            yield _connection(data, at, at + length)
        at += length + 3 & ~3


def _connection(data: bytes, at: int, end: int) -> Connection:
    if end - at < _MESSAGE.size:
        raise ValueError(f"connections: a message of {end - at} bytes is too short")
    port, cookie, rx_queue, tx_queue, inode = _MESSAGE.unpack_from(data, at)
    peer_port = port >> 8 | (port & 0xFF) << 8  # as on the wire
    return Connection(cookie, inode, peer_port, rx_queue, tx_queue, at + _MESSAGE.size, end)


def parse_info(data: bytes, one: Connection) -> tuple[int | None, tuple[int | None, ...]]:
    """Return the round trip time and totals in the order of TOTALS; None is what nobody told.

    Raises ValueError on an attribute that is cut off.
    """
    at = one.begin
    while at + _ATTRIBUTE.size <= one.end:
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size or at + size > one.end:
            raise ValueError(f"connections: an attribute of {size} bytes is cut off")
        if kind == _INET_DIAG_INFO:
            return _info(data, at + _ATTRIBUTE.size, at + size)
        at += size + 3 & ~3
    return None, NOTHING


def _info(data: bytes, at: int, end: int) -> tuple[int | None, tuple[int | None, ...]]:
    if end - at >= _INFO.size:
        rtt, *rest = _INFO.unpack_from(data, at)
        return rtt, tuple(rest)
    short = data[at:end].ljust(_INFO.size, b"\0")
    known = [
        value if end - at >= least else None
        for value, least in zip(_INFO.unpack(short), _LEAST, strict=True)
    ]
    return known[0], tuple(known[1:])
