"""Network interfaces that came, went, or changed their state, from what rtnetlink reports.

Source: rtnetlink(7), RTM_NEWLINK and RTM_DELLINK; decoded by pyroute2. The kernel sends a message
for any change of an interface, such as its MTU: a row is made only where its state is another.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from whyidle.collect.collector import Problem
from whyidle.host import Event, Host, NotRecordedError
from whyidle.schema import LinkEvent

_NEW, _REMOVED = 16, 17  # RTM_NEWLINK, RTM_DELLINK
_UP, _RUNNING = 0x1, 0x40  # IFF_UP, IFF_RUNNING


class Report(NamedTuple):
    """What a message says of an interface."""

    number: int
    interface: str
    removed: bool
    operational: str | None
    carrier: bool | None
    flags: int

    @property
    def up(self) -> bool:
        """Whether it can be used; one without a state of its own, as lo, has but its flags."""
        if self.operational in (None, "unknown"):
            return self.flags & (_UP | _RUNNING) == _UP | _RUNNING
        return self.operational == "up"


class Parser:
    """Decodes messages; made once, because pyroute2 takes a tenth of a second to import."""

    __slots__ = ("_marshal",)

    def __init__(self) -> None:
        from pyroute2.netlink.rtnl.marshal import MarshalRtnl

        self._marshal: Any = MarshalRtnl()

    def parse(self, text: str) -> list[Report]:
        """Return the reports of a datagram in hex; raises ValueError."""
        try:
            messages = list(self._marshal.parse(bytes.fromhex(text)))
        except Exception as error:  # noqa: BLE001 - pyroute2 raises anything on what is damaged
            raise ValueError(f"rtnetlink: {type(error).__name__}: {error}") from None
        found = []
        for message in messages:
            kind = message["header"]["type"]
            if kind not in (_NEW, _REMOVED) or message["header"].get("error"):
                continue
            name, state = message.get_attr("IFLA_IFNAME"), message.get_attr("IFLA_OPERSTATE")
            if not isinstance(name, str):
                raise ValueError("rtnetlink: a link without a name")
            carrier = message.get_attr("IFLA_CARRIER")
            found.append(
                Report(
                    number=message["index"],
                    interface=name,
                    removed=kind == _REMOVED,
                    operational=str(state).lower() if state is not None else None,
                    carrier=None if carrier is None else bool(carrier),
                    flags=message["flags"],
                )
            )
        return found


class LinkWatch:
    """Keeps whether each interface was up, so that only changes are told."""

    __slots__ = ("_parser", "_up")

    def __init__(self) -> None:
        self._parser: Parser | None = None
        self._up: dict[str, bool | None] | None = None

    def listen(self, host: Host) -> Generator[Problem, None, tuple[Event, ...]]:
        """Return what was reported since the last run; yield a Problem if that failed."""
        if self._parser is None:
            self._parser = Parser()  # not at the first event, which would be late by the import
        try:
            return host.events("links")
        except (FileNotFoundError, NotRecordedError):
            return ()  # a recorded tree, or a journal from before this was asked
        except OSError as error:
            self._up = None  # what was lost may have changed any of them
            yield Problem(subject="link events", message=str(error.strerror))
            return ()

    def rows(
        self, events: Iterable[Event], shown: Mapping[str, bool | None]
    ) -> Iterator[LinkEvent | Problem]:
        """Yield a row for each change; `shown` are the interfaces that count, and their state."""
        if self._up is None:
            # Listening began before this was read, so nothing falls between the two.
            self._up = dict(shown)
        for event in events:
            try:
                reports = self._parser.parse(event.text) if self._parser is not None else []
            except ValueError as error:
                yield Problem(subject="link events", message=str(error))
                continue
            for report in reports:
                if report.interface in shown or report.interface in self._up:
                    yield from self._row(report, event.mono_ns)

    def _row(self, report: Report, mono_ns: int) -> Iterator[LinkEvent]:
        assert self._up is not None
        known = report.interface in self._up
        before = self._up.get(report.interface)
        if report.removed:
            self._up.pop(report.interface, None)
            what = "removed"
        else:
            self._up[report.interface] = report.up
            if known and before == report.up:
                return
            what = ("up" if report.up else "down") if known else "new"
        yield LinkEvent(
            mono_ns=mono_ns,
            interface=report.interface,
            index=report.number,
            event=what,
            operational=report.operational,
            carrier=report.carrier,
        )
