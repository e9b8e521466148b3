"""Clocks: the machine's, and one that moves when it is told to."""

from __future__ import annotations

import time

from whyidle.clock import NS_PER_S, SystemClock, VirtualClock


def test_the_system_clock_is_the_kernels() -> None:
    clock = SystemClock()
    assert abs(time.monotonic_ns() - clock.mono_ns()) < NS_PER_S
    assert clock.boot_ns() >= clock.mono_ns() - NS_PER_S
    assert abs(time.time_ns() - clock.wall_ns()) < NS_PER_S
    assert 0 < clock.thread_cpu_ns() <= clock.process_cpu_ns()


def test_sleeping_ends_at_the_time_and_not_before() -> None:
    clock = SystemClock()
    until = clock.mono_ns() + 20_000_000
    clock.sleep_until(until)
    assert until <= clock.mono_ns() < until + NS_PER_S
    begin = clock.mono_ns()
    clock.sleep_until(begin - NS_PER_S)
    assert clock.mono_ns() - begin < NS_PER_S // 2


def test_a_waiter_may_end_the_sleep_early() -> None:
    waited: list[float] = []
    clock = SystemClock(waited.append)
    clock.sleep_until(clock.mono_ns() + 5 * NS_PER_S)
    assert len(waited) == 1
    assert 4.9 < waited[0] <= 5.0


def test_the_virtual_clock_moves_when_it_is_told_to() -> None:
    clock = VirtualClock(10, wall_ns=1000)
    clock.sleep_until(50)
    clock.sleep_until(20)
    assert (clock.mono_ns(), clock.boot_ns(), clock.wall_ns()) == (50, 50, 1040)
    clock.step_wall(-100)
    clock.suspend(7)
    clock.advance(1)
    assert (clock.mono_ns(), clock.boot_ns(), clock.wall_ns()) == (51, 58, 948)
