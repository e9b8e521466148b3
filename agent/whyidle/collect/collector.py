"""What a collector is, and what it must do.

A collector turns answers of a `Host` into rows: one file per source, one line in `collect.ALL`.
It MUST

- read through `host` only, take time from `host.clock` only; start no threads and no processes;
- stamp each row with its own read time: `host.clock.mono_ns()` straight after the read it is from
  (one reading may serve rows of the same read);
- return rows of declared tables, with raw counters in the source's own unit: rates are SQL;
- return None for what it does not know: never 0, never a sentinel of the driver;
- raise `NoData("why")` when the source is not on this machine; that is no failure;
- raise anything else when the source is there and cannot be read. Where one device of many is bad,
  yield a `Problem` for it and go on with the others;
- keep parsing in pure functions of text or bytes that skip what they do not know and raise
  ValueError, naming the field, on what they cannot read;
- keep state, if any, inside the callable that `make` returns: it is made once per sampler, called
  from one thread at a time, and must survive any answer, including none for a long while;
- never catch and drop: what is caught becomes None, a Problem or NoData.

The runner writes one `tick` row for each run and one `collector_error` row for each failure, so a
collector never reports on itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from whyidle.host import Host
from whyidle.table import Row

Lane = Literal["fast", "normal", "slow"]


class NoData(Exception):
    """The source is not on this machine; the message says why, in words of a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A part of a source that could not be read, while the rest could.

    Of kind "no_data" it is no failure: this device or driver does not offer the part.
    """

    subject: str
    message: str
    kind: Literal["failed", "no_data"] = "failed"


Collect = Callable[[Host], Iterable["Row | Problem"]]


@runtime_checkable
class Holding(Protocol):
    """A `Collect` that can give the rows of many runs in one, where making them at once is cheap.

    They go to disk no later: the spool is written once a second, after the first run of a second.
    """

    def hold(self, begin_ns: int) -> None:
        """Give rows at the first run of each second from `begin_ns` on; else, at each run."""
        ...

    def release(self, host: Host) -> Iterable[Row]:
        """Return the rows that are held back: there is no other run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """A source and how to ask it.

    `make` returns the callable that is run; a collector without state may return a plain function.
    `thread` names the blocking source that it asks: collectors of one name share a thread of that
    name, with a `Host` of its own, and a run past `deadline_s` is a recorded error while the loop
    goes on. '' runs in the loop itself, for what cannot block.
    `every_s` is the period; None takes that of the lane.
    """

    name: str
    lane: Lane
    make: Callable[[], Collect]
    thread: str = ""
    deadline_s: float = 2.0
    every_s: float | None = None

    @property
    def blocking(self) -> bool:
        """Whether it runs on a thread of its own."""
        return self.thread != ""
