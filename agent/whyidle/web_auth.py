"""Basic authentication (RFC 7617) against bcrypt hashes.

A hash takes tens of milliseconds by design. One is computed at a time, and what was decided is
remembered by a keyed digest of what was sent, so that a scrape costs its hash once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import threading
from collections.abc import Mapping

# Decisions that are remembered: honest clients send one or two different things.
REMEMBERED_MAX = 64
# What bcrypt reads of a password.
PASSWORD_BYTES = 72
# Compared with where there is no such user, so that time does not tell which names exist.
NOBODY = b"$2b$10$abcdefghijklmnopqrstuuxU6rZBCwbk0GB1AcMuDq3qPDUrQuNPG"


class Passwords:
    """Says who may come in; with no users everybody may."""

    __slots__ = ("_key", "_known", "_lock", "_users")

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = dict(users)
        self._key = os.urandom(32)
        self._known: dict[bytes, bool] = {}
        self._lock = threading.Lock()

    def allow(self, header: str) -> bool:
        """Say whether an Authorization header lets its sender in."""
        if not self._users:
            return True
        sent = _credentials(header)
        if sent is None:
            return False
        digest = hmac.digest(self._key, sent, hashlib.sha256)
        known = self._known.get(digest)
        if known is not None:
            return known
        with self._lock:
            known = self._known.get(digest)
            if known is None:
                known = self._check(sent)
                if len(self._known) >= REMEMBERED_MAX:
                    # Guesses must not push honest clients out: those that were wrong go first.
                    self._known = {key: True for key, right in self._known.items() if right}
                    if len(self._known) >= REMEMBERED_MAX:
                        self._known = {}
                self._known[digest] = known
        return known

    def _check(self, sent: bytes) -> bool:
        import bcrypt  # only where there are passwords

        name, _, password = sent.partition(b":")
        hashed = self._users.get(name.decode("utf-8", "replace"))
        try:
            right = bcrypt.checkpw(
                password[:PASSWORD_BYTES], NOBODY if hashed is None else hashed.encode()
            )
        except ValueError:  # a password with a NUL, a hash with a salt that is none
            return False
        return right and hashed is not None


def _credentials(header: str) -> bytes | None:
    kind, _, value = header.partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
