"""A counter page that is read 8 times a second, and what of it makes rows.

What stays as it is costs no rows but one a second. When it changes, the last reading of what it was
is told first: between two rows of a counter it always grew evenly, as interpolation assumes.
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle import probe_groups as groups_of
from whyidle import probe_page as page
from whyidle.clock import NS_PER_S
from whyidle.collect.probe_owner import Owner
from whyidle.collect.probe_rows import (
    call_row,
    event_rows,
    group_row,
    info_row,
    loader_row,
    probe_row,
)
from whyidle.host import Host
from whyidle.schema import Probe, ProbeCall, ProbeEvent, ProbeGroup, ProbeInfo, ProbeLoader

ProbeRow = Probe | ProbeCall | ProbeEvent | ProbeGroup | ProbeInfo | ProbeLoader
_INFO_EVERY_NS = 60 * NS_PER_S
_SAME_NS = NS_PER_S
# Totals of the process, its loaders and its groups, which the row of the process sums up; the ring
# lies between them, and changes with them.
_ALL = (page.PROCESS_AT, groups_of.CALLS_AT)


class _Part:
    """A stretch of a page: the reading that was told last, and when that was."""

    __slots__ = ("_begin", "_data", "_end", "_ns")

    def __init__(self, begin: int, end: int) -> None:
        self._begin = begin
        self._end = end
        self._data = b""
        self._ns = -1

    def readings(self, data: bytes, now_ns: int, last_ns: int) -> tuple[tuple[int, bytes], ...]:
        """Return the readings that are to be told, the oldest first.

        `last_ns` is when the page was read before: as it was told last, if this part differs now.
        """
        before, told_ns = self._data, self._ns
        same = before[self._begin : self._end] == data[self._begin : self._end]
        if same and told_ns < now_ns < told_ns + _SAME_NS:
            return ()
        self._data, self._ns = data, now_ns
        if before and not same and told_ns < last_ns:
            return (last_ns, before), (now_ns, data)
        return ((now_ns, data),)


class Live:
    """A page: its header, its process, and what has been told of it."""

    __slots__ = (
        "_calls",
        "_groups",
        "_groups_due_ns",
        "_info_due_ns",
        "_loaders",
        "_read_ns",
        "_stages",
        "_totals",
        "ended",
        "header",
        "owner",
        "path",
        "sequence",
    )

    def __init__(self, path: str, header: page.Header, owner: Owner) -> None:
        self.path = path
        self.header = header
        self.owner = owner
        self.sequence = 0
        self.ended = False
        self._calls = 0
        self._groups: tuple[groups_of.Group, ...] = ()
        self._groups_due_ns = 0
        self._info_due_ns = 0
        self._read_ns = 0
        self._stages: int | None = None
        self._totals = _Part(*_ALL)
        self._loaders: list[_Part] = []

    def read(self, host: Host, data: bytes) -> Iterator[ProbeRow]:
        """Yield the rows of a page as it is now; raises NotReadyError, ValueError."""
        if self.ended:
            return  # it has said so, and changes no more
        now_ns = host.clock.mono_ns()
        if len(data) < groups_of.GROUPS_AT or not page.same_header(data, self.header):
            header = page.parse_header(data)
            if (header.pid, header.start_ns) != (self.header.pid, self.header.start_ns):
                raise ValueError("names another process than before")
            self.header = header
            self._info_due_ns = 0
        last_ns, self._read_ns = self._read_ns, now_ns
        readings = self._totals.readings(data, now_ns, last_ns)
        for read_ns, reading in readings:
            totals = page.parse_process(reading, read_ns)
            loaders = tuple(page.parse_loaders(reading, read_ns))
            groups = tuple(groups_of.parse_groups(reading, read_ns))
            told = groups if len(reading) > groups_of.GROUPS_AT else None
            yield probe_row(read_ns, self.owner, self.header, totals, loaders, told)
        if readings:
            yield from self._loader_rows(data, now_ns, last_ns, len(loaders))
            yield from self._group_rows(data, now_ns, groups, ended=totals.closed_ns is not None)
            yield from self._events(data, now_ns, totals)
        if readings and totals.pipeline_stages != self._stages:
            self._stages = totals.pipeline_stages
            self._info_due_ns = 0
        if now_ns >= self._info_due_ns or self.ended:
            self._info_due_ns = now_ns + _INFO_EVERY_NS
            totals = page.parse_process(data, now_ns)
            yield info_row(now_ns, self.owner, self.header, totals, self.path)

    def _loader_rows(
        self, data: bytes, now_ns: int, last_ns: int, count: int
    ) -> Iterator[ProbeLoader]:
        while len(self._loaders) < count:
            begin = page.LOADERS_AT + len(self._loaders) * page.LOADER_BYTES
            self._loaders.append(_Part(begin, begin + page.LOADER_BYTES))
        for place, part in enumerate(self._loaders[:count]):
            for read_ns, reading in part.readings(data, now_ns, last_ns):
                item = page.parse_loader(reading, place, read_ns)
                yield loader_row(read_ns, self.owner, place, item)

    def _group_rows(
        self, data: bytes, now_ns: int, groups: tuple[groups_of.Group, ...], *, ended: bool
    ) -> Iterator[ProbeGroup | ProbeCall]:
        """Tell of the groups once a second: what has to be finer is in the process's own row."""
        self._calls, calls = groups_of.parse_calls(data, self._calls)
        for call in calls:
            yield call_row(now_ns, self.owner, call)
        if now_ns < self._groups_due_ns and not ended:
            return
        self._groups_due_ns = now_ns + _SAME_NS
        before, self._groups = self._groups, groups
        for place, item in enumerate(groups):
            if place >= len(before) or item != before[place]:
                yield group_row(now_ns, self.owner, item)

    def _events(self, data: bytes, now_ns: int, totals: page.Process) -> Iterator[ProbeEvent]:
        records = page.parse_records(data, self.header, totals.sequence, self.sequence)
        yield from event_rows(now_ns, self.owner, records)
        self.sequence = totals.sequence
        self.ended = totals.closed_ns is not None
