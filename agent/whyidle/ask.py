"""Questions to the kernel that are no file: the askers that a live host is made with."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from whyidle.clock import Clock
from whyidle.host import Answer, Asker

_STA_UNSYNC = 0x0040
_TIME_ERROR = 5


class _Timex(ctypes.Structure):
    """struct timex of <sys/timex.h>, the part that is read; the rest is room for the kernel."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def askers(clock: Clock) -> Mapping[str, Asker]:
    """Return every question that a live host answers by name."""
    libc = ctypes.CDLL(None, use_errno=True)
    timex = _Timex()

    def read_clocks() -> Answer:
        """Return monotonic, boot, wall, bracket, error bound, estimate (ns) and synchronised.

        The wall clock is read between two monotonic readings and paired with their middle. The last
        three are None where adjtimex is refused, as some sandboxes do.
        """
        before = clock.mono_ns()
        wall = clock.wall_ns()
        boot = clock.boot_ns()
        after = clock.mono_ns()
        timex.modes = 0
        state = libc.adjtimex(ctypes.byref(timex))
        middle = before + (after - before) // 2
        known: tuple[Answer, ...] = (None, None, None)
        if state >= 0:
            synchronised = state != _TIME_ERROR and not timex.status & _STA_UNSYNC
            known = (timex.maxerror * 1000, timex.esterror * 1000, synchronised)
        return (middle, boot, wall, after - before, *known)

    return {"clock": read_clocks}
