"""Puts the live host together: the machine's files, its kernel questions and its NVML."""

from __future__ import annotations

from whyidle.ask import askers
from whyidle.clock import Clock
from whyidle.host import LiveHost
from whyidle.nvml import NoNvml


def live_host(root: str, clock: Clock) -> LiveHost:
    """Return a host for one thread; threads share nothing."""
    return LiveHost(root, clock, nvml=NoNvml("NVML is not wired up"), askers=askers(clock))
