"""Network interfaces that come, go or change: a source of events.

Source: rtnetlink(7), group RTNLGRP_LINK. Nothing is asked, so links that stay as they are cost
nothing. Reports are netlink messages in hex: whyidle.collect.net_link parses them.
"""

from __future__ import annotations

import socket

_LINK_GROUP = 1  # RTMGRP_LINK
_DATAGRAM_BYTES = 1 << 16
# Messages of 1.5 kB: what comes while nobody asks for ten seconds, even if many pods start.
_BUFFER_BYTES = 1 << 20
# A storm must not hold a run up: the rest comes with the next call.
_READ_LIMIT = 100


class LinkEvents:
    """Listens in the network namespace of the thread that asks first; one thread asks."""

    __slots__ = ("_socket",)

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def read(self) -> list[str]:
        """Return messages since the last call, in hex; the first call only begins to listen.

        Raises OSError: ENOBUFS where some were lost.
        """
        if self._socket is None:
            self._socket = self._listen()
        found = []
        for _ in range(_READ_LIMIT):
            try:
                found.append(self._socket.recv(_DATAGRAM_BYTES).hex())
            except BlockingIOError:
                break
        return found

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _listen(self) -> socket.socket:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        made = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            made.bind((0, _LINK_GROUP))
        except OSError:
            made.close()
            raise
        return made
