"""Time, and the only module that imports `time`.

Rows are keyed by the monotonic clock; wall time is a view through the `clock` table. Everything
that reads time or sleeps takes a `Clock`, so that replay and simulation run the same code as the
node does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """What time it is, and how to wait; every value is an integer of nanoseconds."""

    def mono_ns(self) -> int:
        """CLOCK_MONOTONIC: never steps, stops while the machine is suspended."""
        ...

    def boot_ns(self) -> int:
        """CLOCK_BOOTTIME: as monotonic, but counts suspended time."""
        ...

    def wall_ns(self) -> int:
        """CLOCK_REALTIME since 1970, UTC: may step either way."""
        ...

    def process_cpu_ns(self) -> int:
        """CPU time of this process, all threads."""
        ...

    def thread_cpu_ns(self) -> int:
        """CPU time of the calling thread."""
        ...

    def sleep_until(self, mono_ns: int) -> None:
        """Return once the monotonic clock is at or after `mono_ns`, or a signal came before."""
        ...


class SystemClock:
    """The machine's clocks; `sleep_until` waits with `wait_s`, by default `time.sleep`."""

    __slots__ = ("_wait_s",)

    def __init__(self, wait_s: Callable[[float], object] = time.sleep) -> None:
        self._wait_s = wait_s

    def mono_ns(self) -> int:
        """Return CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def boot_ns(self) -> int:
        """Return CLOCK_BOOTTIME."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def wall_ns(self) -> int:
        """Return CLOCK_REALTIME."""
        return time.time_ns()

    def process_cpu_ns(self) -> int:
        """Return CLOCK_PROCESS_CPUTIME_ID."""
        return time.process_time_ns()

    def thread_cpu_ns(self) -> int:
        """Return CLOCK_THREAD_CPUTIME_ID."""
        return time.thread_time_ns()

    def sleep_until(self, mono_ns: int) -> None:
        """Wait once for what is left; a waiter that a signal wakes (an Event) returns early."""
        left_ns = mono_ns - time.monotonic_ns()
        if left_ns > 0:
            self._wait_s(left_ns / NS_PER_S)


class VirtualClock:
    """A clock that moves only when it is told to: `sleep_until` jumps, reading costs nothing."""

    __slots__ = ("cpu_ns", "now_ns", "suspended_ns", "wall_offset_ns")

    def __init__(
        self, mono_ns: int = 0, *, wall_ns: int = 1_767_225_600 * NS_PER_S, suspended_ns: int = 0
    ) -> None:
        self.now_ns = mono_ns
        self.wall_offset_ns = wall_ns - mono_ns
        self.suspended_ns = suspended_ns
        self.cpu_ns = 0

    def mono_ns(self) -> int:
        """Return the monotonic time that was set."""
        return self.now_ns

    def boot_ns(self) -> int:
        """Return the monotonic time and the time spent suspended."""
        return self.now_ns + self.suspended_ns

    def wall_ns(self) -> int:
        """Return the monotonic time and the offset that was set."""
        return self.now_ns + self.wall_offset_ns

    def process_cpu_ns(self) -> int:
        """Return the CPU time that was set."""
        return self.cpu_ns

    def thread_cpu_ns(self) -> int:
        """Return the CPU time that was set."""
        return self.cpu_ns

    def sleep_until(self, mono_ns: int) -> None:
        """Jump to `mono_ns`; a time in the past leaves the clock as it is."""
        self.now_ns = max(self.now_ns, mono_ns)

    def advance(self, ns: int) -> None:
        """Move all clocks on by `ns`."""
        self.now_ns += ns

    def step_wall(self, ns: int) -> None:
        """Step the wall clock alone, as an administrator or NTP does."""
        self.wall_offset_ns += ns

    def suspend(self, ns: int) -> None:
        """Pass `ns` of suspended time: boot and wall time go on, monotonic time does not."""
        self.suspended_ns += ns
        self.wall_offset_ns += ns
