"""The node's clocks, paired once a second: what turns monotonic time into wall time.

Source: clock_gettime(2) and adjtimex(2), whose maxerror and status say how far the wall clock can
be trusted between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

from whyidle.collect.collector import Collector
from whyidle.host import Answer, Host
from whyidle.schema import ClockReading


def parse(answer: Answer) -> ClockReading:
    """Return the row of an answer to "clock"; raises ValueError if it is no such answer."""
    if not isinstance(answer, tuple | list) or len(answer) != 7:
        raise ValueError(f"clock: {answer!r} is not seven values")
    mono, boot, wall, bracket, error, estimate, synchronised = answer
    return ClockReading(
        mono_ns=_whole("mono", mono),
        boot_ns=_whole("boot", boot),
        wall_ns=_whole("wall", wall),
        bracket_ns=_whole("bracket", bracket),
        wall_error_ns=None if error is None else _whole("maxerror", error),
        wall_estimate_ns=None if estimate is None else _whole("esterror", estimate),
        synchronised=None if synchronised is None else bool(synchronised),
    )


def _whole(name: str, value: Answer) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"clock: {name} is {value!r}, not a whole number")


def collect(host: Host) -> Iterable[ClockReading]:
    """Return one reading of all clocks."""
    return (parse(host.ask("clock")),)


CLOCKS = Collector(name="clock", lane="normal", make=lambda: collect)
