"""Netlink messages as the kernel makes them, of links and of TCP connections; synthetic."""

from __future__ import annotations

import struct

INFO_BYTES = 228
UP, RUNNING = 0x1, 0x40
DOWN_STATE, UP_STATE = 2, 6  # IF_OPER_DOWN, IF_OPER_UP


def attribute(kind: int, data: bytes) -> bytes:
    """A netlink attribute, padded."""
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def link_report(
    interface: str, index: int, *, up: bool = True, removed: bool = False, mtu: int = 1500
) -> str:
    """A message of rtnetlink about an interface, in hex."""
    attributes = attribute(3, interface.encode() + b"\0") + attribute(4, struct.pack("=I", mtu))
    attributes += attribute(16, bytes([UP_STATE if up else DOWN_STATE]))
    attributes += attribute(33, bytes([up]))
    body = struct.pack("=BxHiII", 0, 1, index, (UP | RUNNING) if up else UP, 0) + attributes
    return (struct.pack("=IHHII", 16 + len(body), 17 if removed else 16, 0, 0, 0) + body).hex()


def connection(
    cookie: int,
    *,
    inode: int = 0,
    port: int = 443,
    rx: int = 0,
    tx: int = 0,
    retransmits: int = 0,
    rtt: int = 100,
    queues: tuple[int, int] = (0, 0),
    info_bytes: int = INFO_BYTES,
) -> bytes:
    """A message of one connection, as the kernel makes it."""
    info = bytearray(INFO_BYTES)
    struct.pack_into("=I", info, 68, rtt)
    struct.pack_into("=I", info, 100, retransmits)
    struct.pack_into("=QQ", info, 120, tx, rx)
    struct.pack_into("=QQQ", info, 168, 9, 8, 7)
    struct.pack_into("=Q", info, 200, tx)
    attributes = struct.pack("=HHB3x", 5, 8, 0)
    attributes += struct.pack("=HH", 4 + info_bytes, 2) + bytes(info[:info_bytes])
    body = struct.pack(">BBBBHH16s16s", 2, 1, 0, 0, 40_000, port, b"", b"")
    body += struct.pack("=IQIIIII", 0, cookie, 0, *queues, 1000, inode) + attributes
    return struct.pack("=IHHII", 16 + len(body), 18, 2, 1, 0) + body
