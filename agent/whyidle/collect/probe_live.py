"""A counter page that is read twice a second or more, and what of it makes rows.

What stays as it is costs no rows but one a second. When it changes, the last reading of what it was
is told first: between two rows of a counter it always grew evenly, as interpolation assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

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
from whyidle.table import replaced

_R = TypeVar("_R", Probe, ProbeLoader)
_Parsed = tuple[page.Process, tuple[page.Loader, ...], tuple[groups_of.Group, ...]]
ProbeRow = Probe | ProbeCall | ProbeEvent | ProbeGroup | ProbeInfo | ProbeLoader
_INFO_EVERY_NS = 60 * NS_PER_S
_SAME_NS = NS_PER_S
# A page is read this often; one whose rings got so many records at the last reading, of the 88 that
# they hold, sooner. Less a part, since runs are a little late or early.
_READ_NS = NS_PER_S // 2 - 60_000_000
_SOON_NS = NS_PER_S // 4 - 60_000_000
_MANY_RECORDS = 16
# Totals of the process, its loaders and its groups, which the row of the process sums up; the ring
# lies between them, and changes with them.
_ALL = (page.PROCESS_AT, groups_of.CALLS_AT)


class _Part(Generic[_R]):
    """A stretch of a page: the reading that was told last, when that was, and its row."""

    __slots__ = ("_begin", "_data", "_end", "_ns", "_row")

    def __init__(self, begin: int, end: int) -> None:
        self._begin = begin
        self._end = end
        self._data = b""
        self._ns = -1
        self._row: _R | None = None

    def is_told(self, now_ns: int) -> bool:
        """Say whether a reading that is as the last one need not be told now."""
        return self._ns < now_ns < self._ns + _SAME_NS

    def rows(
        self, data: bytes, now_ns: int, last_ns: int, make: Callable[[bytes, int], _R]
    ) -> tuple[_R, ...]:
        """Return the rows that are to be told, the oldest first; `make` makes one of a reading.

        `last_ns` is when the page was read before: as it was told last, if this part differs now.
        """
        same = self._data[self._begin : self._end] == data[self._begin : self._end]
        if same and self.is_told(now_ns):
            return ()
        before, told_ns = self._row, self._ns
        self._data, self._ns, self._row = data, now_ns, make(data, now_ns)
        if before is not None and not same and told_ns < last_ns:
            # The same as it was told, a little later: reading it again would cost as much as this.
            return replaced(before, mono_ns=last_ns), self._row
        return (self._row,)


class Live:
    """A page: its header, its process, and what has been told of it."""

    __slots__ = (
        "_calls",
        "_data",
        "_groups",
        "_groups_due_ns",
        "_info_due_ns",
        "_loaders",
        "_parsed",
        "_stages",
        "_totals",
        "due_ns",
        "ended",
        "header",
        "owner",
        "path",
        "read_ns",
        "sequence",
    )

    def __init__(self, path: str, header: page.Header, owner: Owner) -> None:
        self.path = path
        self.header = header
        self.owner = owner
        self.sequence = 0
        self.due_ns = 0
        self.ended = False
        self._calls = 0
        self._data = b""
        self._groups: tuple[groups_of.Group, ...] = ()
        self._groups_due_ns = 0
        self._info_due_ns = 0
        self._parsed: _Parsed | None = None
        self.read_ns = 0
        self._stages: int | None = None
        self._totals: _Part[Probe] = _Part(*_ALL)
        self._loaders: list[_Part[ProbeLoader]] = []

    def unchanged(self, data: bytes, now_ns: int) -> bool:
        """Say whether a page is as it was and nothing is due to be told; it counts as read then."""
        if data != self._data or not self._totals.is_told(now_ns):
            return False
        self.read_ns = now_ns
        self.due_ns = now_ns + _READ_NS
        return True

    def read(self, host: Host, data: bytes) -> Iterator[ProbeRow]:
        """Yield the rows of a page as it is now; raises NotReadyError, ValueError."""
        if self.ended:
            return  # it has said so, and changes no more
        now_ns = host.clock.mono_ns()
        self._data = data
        if len(data) < groups_of.GROUPS_AT or not page.same_header(data, self.header):
            header = page.parse_header(data)
            if (header.pid, header.start_ns) != (self.header.pid, self.header.start_ns):
                raise ValueError("names another process than before")
            self.header = header
            self._info_due_ns = 0
        last_ns, self.read_ns = self.read_ns, now_ns
        before = self.sequence + self._calls
        if rows := self._totals.rows(data, now_ns, last_ns, self._total_row):
            yield from rows
            assert self._parsed is not None
            totals, loaders, groups = self._parsed
            yield from self._loader_rows(data, now_ns, last_ns, loaders)
            yield from self._group_rows(data, now_ns, groups, ended=totals.closed_ns is not None)
            yield from self._events(data, now_ns, totals)
            if totals.pipeline_stages != self._stages:
                self._stages = totals.pipeline_stages
                self._info_due_ns = 0
        many = self.sequence + self._calls - before >= _MANY_RECORDS
        self.due_ns = now_ns + (_SOON_NS if many else _READ_NS)
        if now_ns >= self._info_due_ns or self.ended:
            self._info_due_ns = now_ns + _INFO_EVERY_NS
            totals = page.parse_process(data, now_ns)
            yield info_row(now_ns, self.owner, self.header, totals, self.path)

    def _total_row(self, data: bytes, now_ns: int) -> Probe:
        totals = page.parse_process(data, now_ns)
        loaders = tuple(page.parse_loaders(data, now_ns))
        groups = tuple(groups_of.parse_groups(data, now_ns))
        self._parsed = totals, loaders, groups
        told = groups if len(data) > groups_of.GROUPS_AT else None
        return probe_row(now_ns, self.owner, self.header, totals, loaders, told)

    def _loader_rows(
        self, data: bytes, now_ns: int, last_ns: int, loaders: Sequence[page.Loader]
    ) -> Iterator[ProbeLoader]:
        while len(self._loaders) < len(loaders):
            begin = page.LOADERS_AT + len(self._loaders) * page.LOADER_BYTES
            self._loaders.append(_Part(begin, begin + page.LOADER_BYTES))
        for place, item in enumerate(loaders):

            def make(
                _: bytes, now_ns: int, place: int = place, item: page.Loader = item
            ) -> ProbeLoader:
                return loader_row(now_ns, self.owner, place, item)

            yield from self._loaders[place].rows(data, now_ns, last_ns, make)

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
