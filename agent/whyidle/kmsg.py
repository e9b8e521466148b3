"""The kernel log, /dev/kmsg: one record for each read, from the oldest that the kernel still holds.

Format: Documentation/ABI/testing/dev-kmsg of the kernel. Reading never waits and takes nothing away
from other readers. Records are passed on as they are: `whyidle.collect.kernel_log` parses them.
"""

from __future__ import annotations

import os
import stat

# The kernel makes no record longer than 8 KiB (PRINTKRB_RECORD_MAX, CONSOLE_EXT_LOG_MAX before).
RECORD_LIMIT_BYTES = 8192
# A storm must not hold a run up: 1 ms. The rest comes with the next call.
RECORDS_LIMIT = 1000


class Kmsg:
    """A reader with its own place in the log.

    Opening anew begins at the oldest record again; whoever asks tells by the sequence numbers.
    """

    __slots__ = ("_device", "_fd", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._device = True

    def read(self) -> list[str]:
        """Return the next records, at most RECORDS_LIMIT, with the lines that belong to them.

        Raises OSError: EPERM without CAP_SYSLOG where kernel.dmesg_restrict is set.
        """
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._device = stat.S_ISCHR(os.fstat(self._fd).st_mode)
        try:
            return self._records() if self._device else self._lines()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the device."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _records(self) -> list[str]:
        found: list[str] = []
        for _ in range(RECORDS_LIMIT):
            try:
                data = os.read(self._fd, RECORD_LIMIT_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten; their sequence numbers are missing
            if not data:
                break
            found.append(_text(data))
        return found

    def _lines(self) -> list[str]:
        """Read a recorded log, where records follow each other as lines."""
        found: list[str] = []
        data = b"".join(iter(lambda: os.read(self._fd, 1 << 16), b""))
        for line in data.splitlines(keepends=True):
            if line.startswith(b" ") and found:
                found[-1] += "\n" + _text(line)
            else:
                found.append(_text(line))
        return found


def _text(data: bytes) -> str:
    return data.removesuffix(b"\n").decode("utf-8", "surrogateescape")
