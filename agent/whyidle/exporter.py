"""The exporter: one page of metrics over HTTP or HTTPS, served from memory.

It runs in threads of the keeper, whom nobody waits for: a slow, hostile or numerous client costs
itself an answer and the node nothing. Connections are few at a time, each has one request, a size
limit and a deadline, and a handshake or a password is never checked in the thread that accepts.
"""

from __future__ import annotations

import gzip
import logging
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BufferedIOBase
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Protocol

from whyidle.clock import NS_PER_S, Clock
from whyidle.errors import UserError
from whyidle.web_auth import Passwords
from whyidle.web_config import WebConfig, read_web_config

LOG = logging.getLogger("whyidle.keeper")
# Above the range that Prometheus gives out (9100-9999), all of which is taken.
PORT = 19836
LOOPBACK = "127.0.0.1"
# Prometheus holds one connection, a fleet's worth of mistakes a few more.
CONNECTIONS_MAX = 32
# A scrape asks in one packet. Prometheus waits 10 s for the answer by default.
DEADLINE_NS = 10 * NS_PER_S
REQUEST_LIMIT_BYTES = 16 << 10
POLL_S = 0.5
_LISTEN = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^:\[\]\s]*))(?::(\d+))?")
_INDEX = (
    b"<!DOCTYPE html><html lang=en><title>whyidle</title><h1>whyidle</h1>"
    b"<p>Why the GPUs of this node are idle.<p><a href=metrics>Metrics</a></html>\n"
)


class Page(Protocol):
    """Makes the page of metrics; called by several threads at once."""

    def __call__(self, accept: str) -> tuple[bytes, str]:
        """Return the body and its content type for an Accept header."""
        ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen; an empty host stands for all addresses."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(slots=True, kw_only=True)
class Served:
    """What became of connections."""

    answers: dict[int, int]
    refused: int = 0
    broken: int = 0
    late: int = 0
    reload_failed: bool = False


def parse_listen(text: str) -> Address:
    """Return the address in HOST:PORT, HOST, :PORT or [IPV6]:PORT. Raises UserError."""
    match = _LISTEN.fullmatch(text)
    port = int(match[3]) if match and match[3] and len(match[3]) <= 5 else PORT
    if match is None or not text or not 0 < port < 65536 or (match[3] and len(match[3]) > 5):
        raise UserError(
            f"{text!r} is no address to listen on: write HOST:PORT, such as {LOOPBACK}:{PORT}, or "
            f":{PORT} for all addresses"
        )
    return Address(match[1] or match[2] or "", port)


def listen(address: Address) -> socket.socket:
    """Return a socket that listens. Raises UserError."""
    try:
        if not address.host:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(
                ("", address.port), family=family, dualstack_ipv6=both, backlog=CONNECTIONS_MAX
            )
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        where = (address.host, address.port)
        return socket.create_server(where, family=family, backlog=CONNECTIONS_MAX)
    except OSError as error:
        raise UserError(
            f"cannot serve metrics on {address}: {error.strerror or error}; choose another address "
            "with metrics.listen, or stop what listens there"
        ) from error


class Exporter:
    """Serves a page until closed. Making one listens; raises UserError if that cannot be."""

    __slots__ = ("_server", "_thread", "served")

    def __init__(
        self, page: Page, address: Address, clock: Clock, *, web_config: Path | None = None
    ) -> None:
        self.served = Served(answers={})
        settings = Settings(web_config, self.served)
        self._server = _Server(listen(address), page, settings, self.served, clock)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="exporter", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self._server.socket.getsockname()[1])

    def close(self) -> None:
        """Stop listening and cut what is still open."""
        self._server.shutdown()
        self._server.cut(None)
        self._server.server_close()
        self._thread.join()


class Settings:
    """The web configuration, read anew when its file or a certificate changes."""

    __slots__ = ("_lock", "_path", "_served", "_stamp", "config", "passwords")

    def __init__(self, path: Path | None, served: Served) -> None:
        self._path = path
        self._served = served
        self._lock = threading.Lock()
        self.config = WebConfig() if path is None else read_web_config(path)
        self.passwords = Passwords(self.config.users)
        self._stamp = _stamp(self.config.files)

    def refresh(self) -> None:
        """Take a changed file over; one that is not in order leaves all as it was, and is told."""
        if self._path is None:
            return
        with self._lock:
            stamp = _stamp(self.config.files)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                config = read_web_config(self._path)
            except UserError as error:
                self._served.reload_failed = True
                LOG.error("the web configuration stays as it was: %s", error)
                return
            self._served.reload_failed = False
            self.config, self.passwords = config, Passwords(config.users)
            self._stamp = _stamp(config.files)
            LOG.info("%s was read anew", self._path)


def _stamp(files: tuple[Path, ...]) -> tuple[tuple[int, int, int] | None, ...]:
    found: list[tuple[int, int, int] | None] = []
    for path in files:
        try:
            stat = path.stat()
        except OSError:
            found.append(None)
            continue
        found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        listening: socket.socket,
        page: Page,
        settings: Settings,
        served: Served,
        clock: Clock,
    ) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.page = page
        self.settings = settings
        self._served = served
        self._clock = clock
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, int] = {}

    def count(self, code: int) -> None:
        """Count an answer."""
        with self._lock:
            self._served.answers[code] = self._served.answers.get(code, 0) + 1

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread, or turn it away when there are too many."""
        if not self._room.acquire(blocking=False):
            self._served.refused += 1
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request; the handshake is part of it."""
        connection: socket.socket = request
        try:
            self.settings.refresh()
            tls = self.settings.config.tls
            if tls is not None:
                connection = tls.wrap_socket(
                    request, server_side=True, do_handshake_on_connect=False
                )
            connection.settimeout(DEADLINE_NS / NS_PER_S)
            with self._lock:
                self._deadlines[connection] = self._clock.mono_ns() + DEADLINE_NS
            self.finish_request(connection, client_address)
        except (OSError, ValueError):
            self._served.broken += 1  # gone, too slow, too long, or no TLS where there should be
        finally:
            with self._lock:
                self._deadlines.pop(connection, None)
            self.shutdown_request(connection)
            self._room.release()

    def service_actions(self) -> None:
        """Cut connections that are past their deadline; called at least every `POLL_S`."""
        self.cut(self._clock.mono_ns())

    def cut(self, now_ns: int | None) -> None:
        """Cut connections that are overdue, or all of them."""
        with self._lock:
            overdue = [
                connection
                for connection, deadline in self._deadlines.items()
                if now_ns is None or deadline <= now_ns
            ]
            for connection in overdue:
                del self._deadlines[connection]
                self._served.late += 1
        for connection in overdue:
            try:
                # Not SSLSocket's own, which another thread is inside of.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
            except OSError:
                continue  # it has just ended by itself


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "whyidle"
    sys_version = ""
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def setup(self) -> None:
        """Shake hands, and read no more than a request may have."""
        handshake = getattr(self.request, "do_handshake", None)
        if handshake is not None:
            handshake()
        super().setup()
        self.rfile = _Limited(self.rfile)  # type: ignore[assignment] # reads lines, as is needed

    def do_GET(self) -> None:
        """Answer with a page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer with its headers."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        settings = self.server.settings
        if not settings.passwords.allow(self.headers.get("Authorization", "")):
            self._send(401, b"Unauthorized\n", {"WWW-Authenticate": 'Basic realm="whyidle"'})
            return
        path = self.path.partition("?")[0]
        if path == "/metrics":
            body, kind = self.server.page(self.headers.get("Accept", ""))
            headers = {"Content-Type": kind, "Vary": "Accept, Accept-Encoding"}
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                body = gzip.compress(body, 1, mtime=0)
                headers["Content-Encoding"] = "gzip"
            self._send(200, body, headers, with_body=with_body)
        elif path in ("/-/healthy", "/-/ready"):
            self._send(200, b"OK\n", {}, with_body=with_body)
        elif path == "/":
            self._send(200, _INDEX, {"Content-Type": "text/html"}, with_body=with_body)
        else:
            self._send(404, b"Not found; metrics are at /metrics\n", {}, with_body=with_body)

    def _send(
        self, code: int, body: bytes, headers: Mapping[str, str], *, with_body: bool = True
    ) -> None:
        self.send_response(code)
        for name, value in {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(body)),
            **self.server.settings.config.headers,
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def send_response(self, code: int, message: str | None = None) -> None:
        """Count each answer, those of http.server's own to broken requests too."""
        self.server.count(code)
        super().send_response(code, message)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with an error; http.server's own words would repeat what a stranger sent."""
        super().send_error(code)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: what strangers send does not belong into the log; it is counted."""


class _Limited:
    """Reads lines, and fails once a request is longer than any honest one."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = REQUEST_LIMIT_BYTES

    def readline(self, size: int = -1) -> bytes:
        """Return the next line; raises ValueError beyond the limit."""
        line = self._file.readline(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise ValueError("the request is too long")
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()
