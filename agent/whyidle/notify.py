"""Tells systemd how the service is: sd_notify(3) without its library.

A datagram of lines to the socket that NOTIFY_SOCKET names; nothing happens where there is none. The
watchdog's interval comes in WATCHDOG_USEC, for the process that WATCHDOG_PID names.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

LOG = logging.getLogger("whyidle.agent")
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
# Longest status that systemctl shows on a line.
_STATUS_LIMIT = 160


class Notifier:
    """The manager of this service, or nobody."""

    __slots__ = ("_address", "_failed", "watchdog_s")

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # '@' stands for the abstract namespace; vsock and others are for virtual machines.
        self._address = (
            "\0" + address[1:]
            if address.startswith("@")
            else address
            if address.startswith("/")
            else ""
        )
        self._failed = False
        usec = environ.get("WATCHDOG_USEC", "")
        ours = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
        self.watchdog_s = int(usec) / 1e6 if ours and usec.isdecimal() and int(usec) > 0 else None

    def ready(self, status: str) -> None:
        """Say that the service does what it is for."""
        self._send("READY=1", _status(status))

    def status(self, status: str) -> None:
        """Say in a line what the service does."""
        self._send(_status(status))

    def reloading(self, mono_ns: int) -> None:
        """Say that the configuration is being read again; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={mono_ns // 1000}")

    def stopping(self) -> None:
        """Say that the service is on its way out."""
        self._send("STOPPING=1", _status("finishing the recording"))

    def alive(self) -> None:
        """Feed the watchdog; only progress is a reason to."""
        if self.watchdog_s is not None:
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as door:
                # A manager that does not listen must not hold the agent up.
                door.setblocking(False)
                door.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._failed:
                LOG.warning("systemd cannot be told anything: %s", error.strerror)
            self._failed = True
        else:
            self._failed = False


def _status(text: str) -> str:
    return "STATUS=" + text.replace("\n", "; ")[:_STATUS_LIMIT]
