"""NFS in the text of /proc/PID/mountstats: mounts, operations, connections, in every version.

Source: fs/nfs/super.c, net/sunrpc/stats.c and the print_stats of each transport. Where mountstats
prints a number of 64 bits without sign, times that ran backwards come out as almost 2^64: unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whyidle.clock import NS_PER_S
from whyidle.collect.mount_text import unescape
from whyidle.collect.numbers import whole, wholes

_HEAD = re.compile(rb"device (.*) mounted on (.*) with fstype (nfs4?)(?: statvers=([\d.]+))?\s*")
_PER_OP = b"per-op statistics"
# Operations of statvers 1.0 have eight numbers, of RPC iostats 1.1 a ninth.
_OP_LEAST, _OP_ERRORS = 8, 9
_BYTES_LEAST = 8
_SIGNED_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A connection; None for what its kind or its kernel does not count."""

    protocol: str
    port: int | None
    connects: int | None
    connecting_ns: int | None
    idle_ns: int | None
    sends: int
    receives: int
    bad_replies: int
    outstanding_sum: int
    backlog_sum: int
    slots: int | None = None
    rdma_request_bytes: int | None = None
    rdma_reply_bytes: int | None = None
    rdma_registrations: int | None = None
    rdma_failures: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation: its nine numbers in the kernel's order, None where unknown."""

    name: str
    numbers: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A mount: `per_op` is its operations' text, parsed only when it has changed."""

    source: str
    mount_point: str
    fs_type: str
    options: Mapping[str, str]
    age_ns: int | None
    events: tuple[int, ...]
    sizes: tuple[int, ...]
    transports: tuple[Transport, ...]
    per_op: bytes


def blocks(data: bytes) -> Iterator[bytes]:
    """Yield the text of each NFS mount."""
    for block in data.split(b"\ndevice "):
        head = block.split(b"\n", 1)[0]
        if b" with fstype nfs" in head and b" with fstype nfsd" not in head:
            yield block if block.startswith(b"device ") else b"device " + block


def point_of(block: bytes) -> str:
    """Return where a mount is; raises ValueError."""
    head = _HEAD.fullmatch(block.split(b"\n", 1)[0])
    if head is None:
        raise ValueError(f"mountstats: {block[:60]!r} is no NFS mount")
    return _unescape(head[2])


def parse_block(block: bytes) -> Block:
    """Return a mount; raises ValueError."""
    top, _, per_op = block.partition(_PER_OP)
    lines = top.split(b"\n")
    head = _HEAD.fullmatch(lines[0])
    if head is None:
        raise ValueError(f"mountstats: {lines[0][:60]!r} is no NFS mount")
    options: Mapping[str, str] = {}
    age_ns: int | None = None
    events: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    transports: list[Transport] = []
    for line in lines[1:]:
        name, _, rest = line.strip().partition(b":")
        if name == b"opts":
            options = parse_options(rest.decode("utf-8", "replace"))
        elif name == b"age":
            # Some kernels' text is followed by a remark in brackets.
            age_ns = whole((rest.split() or [b""])[0], "mountstats: age") * NS_PER_S
        elif name == b"events":
            events = tuple(_stored(rest.split(), "mountstats: events"))
        elif name == b"bytes":
            sizes = tuple(_stored(rest.split(), "mountstats: bytes"))
            if len(sizes) < _BYTES_LEAST:
                raise ValueError(f"mountstats: bytes has {len(sizes)} numbers, not {_BYTES_LEAST}")
        elif name == b"xprt":
            transports.append(parse_transport(rest.split()))
    return Block(
        source=_unescape(head[1]),
        mount_point=_unescape(head[2]),
        fs_type=head[3].decode(),
        options=options,
        age_ns=age_ns,
        events=events,
        sizes=sizes,
        transports=tuple(transports),
        per_op=per_op,
    )


def parse_options(text: str) -> Mapping[str, str]:
    """Return mount options; one without a value maps to ''."""
    pairs = (word.strip().partition("=") for word in text.split(","))
    return {name: value for name, _, value in pairs if name}


def parse_transport(words: list[bytes]) -> Transport:
    """Return a connection of an xprt line; raises ValueError."""
    if not words:
        raise ValueError("mountstats: xprt is empty")
    protocol = words[0].decode("utf-8", "replace")
    n = _stored(words[1:], f"mountstats: xprt {protocol}")
    if protocol == "udp":  # no connection: port, binds, then requests
        n = [*n[:2], -1, -1, -1, *n[2:]]
    elif protocol == "local":  # no port either
        n = [-1, *n]
    if len(n) < 10:
        raise ValueError(f"mountstats: xprt {protocol} has too few numbers")
    slots = n[10] if protocol != "rdma" and len(n) > 10 else None
    rdma = n[10:] if protocol == "rdma" and len(n) >= 21 else None
    return Transport(
        protocol=protocol,
        port=n[0] if n[0] > 0 else None,
        connects=n[2] if n[2] >= 0 else None,
        connecting_ns=n[3] * NS_PER_S if n[3] >= 0 else None,
        idle_ns=n[4] * NS_PER_S if n[4] >= 0 else None,
        sends=n[5],
        receives=n[6],
        bad_replies=n[7],
        outstanding_sum=n[8],
        backlog_sum=n[9],
        slots=slots,
        rdma_request_bytes=None if rdma is None else rdma[3],
        rdma_reply_bytes=None if rdma is None else rdma[4],
        rdma_registrations=None if rdma is None else rdma[7],
        rdma_failures=None if rdma is None else rdma[8] + rdma[9],
    )


def parse_ops(per_op: bytes) -> list[Op]:
    """Return the operations that were ever used; raises ValueError that names a bad one."""
    found = []
    for line in per_op.split(b"\n"):
        name, colon, rest = line.partition(b":")
        # Most of sixty operations are never used, and splitting them all costs most of a run.
        if not colon or rest.startswith(b" 0 0 "):
            continue
        op = name.strip().decode("utf-8", "replace")
        numbers = wholes(rest.split(), f"mountstats: {op[:40]}")
        if len(numbers) < _OP_LEAST:
            raise ValueError(f"mountstats: {op[:40]} has {len(numbers)} numbers, not {_OP_LEAST}")
        known = [n if 0 <= n < _SIGNED_LIMIT else None for n in numbers[:_OP_ERRORS]]
        if len(known) < _OP_ERRORS:
            known.append(None)
        found.append(Op(name=op, numbers=tuple(known)))
    return found


def _stored(words: list[bytes], field: str) -> list[int]:
    """Return numbers that a column can hold; raises ValueError."""
    numbers = wholes(words, field)
    if numbers and (max(numbers) >= _SIGNED_LIMIT or min(numbers) < 0):
        raise ValueError(f"{field} has a number of more than 63 bits")
    return numbers


def _unescape(word: bytes) -> str:
    return unescape(word.decode("utf-8", "replace"))
