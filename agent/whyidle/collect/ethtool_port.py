"""Pauses, discards and PCIe stalls of RDMA network interfaces, as their drivers count them.

Source: ethtool -S (SIOCETHTOOL). That is where RoCE shows its losses: the counters of RDMA ports
know nothing of pauses. A driver may ask its firmware for a minute's worth of registers, so it has a
thread of its own and is asked every two seconds.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.ethtool_names import Wanted, wanted
from whyidle.collect.rdma_device import devices, interfaces, ports
from whyidle.host import Answer, Host
from whyidle.schema import EthtoolPause, EthtoolPort
from whyidle.table import table_of

_LOOK_EVERY_NS = 60 * NS_PER_S
# After a failure, interfaces are looked for sooner.
_LOOK_AGAIN_NS = 10 * NS_PER_S
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_LIMIT = 1 << 63
_PERCENT = 100
_NO_PORT: dict[str, Any] = {
    column.name: None for column in table_of(EthtoolPort).columns if column.kind != "key"
}
_NO_PAUSE: dict[str, Any] = {
    column.name: None for column in table_of(EthtoolPause).columns if column.kind != "key"
}


def parse_names(answer: Answer) -> tuple[str, ...]:
    """Return the names of an answer to "ethtool_names"; raises ValueError."""
    if not isinstance(answer, tuple | list) or not all(isinstance(one, str) for one in answer):
        raise ValueError(f"ethtool_names: {answer!r:.80} is no list of names")
    return tuple(str(one) for one in answer)


def parse_values(answer: Answer, count: int) -> tuple[int | None, ...]:
    """Return the values of an answer to "ethtool_values"; raises ValueError.

    A count beyond a signed 64-bit integer is none: drivers print -1 so.
    """
    if not isinstance(answer, tuple | list) or len(answer) != count:
        raise ValueError(f"ethtool_values: {answer!r:.80} is not {count} numbers")
    found: list[int | None] = []
    for value in answer:
        if not isinstance(value, int):
            raise ValueError(f"ethtool_values: {value!r:.80} is no number")
        found.append(value if 0 <= value < _LIMIT else None)
    return tuple(found)


def rows(
    interface: str, plan: Wanted, values: tuple[int | None, ...], mono_ns: int
) -> Iterator[EthtoolPort | EthtoolPause]:
    """Yield the row of an interface, and one for each priority in use."""
    if plan.port:
        port = dict(_NO_PORT)
        for column, at in plan.port:
            value = values[at]
            if value is not None and column.endswith("_ratio"):
                port[column] = value / _PERCENT
            elif value is not None:  # two statistics of one column add up
                port[column] = value + (port[column] or 0)
        yield EthtoolPort(mono_ns=mono_ns, interface=interface, **port)
    for priority, columns in plan.priorities:
        pause = dict(_NO_PAUSE)
        for column, at in columns:
            pause[column] = values[at]
        yield EthtoolPause(mono_ns=mono_ns, interface=interface, priority=priority, **pause)


def rdma_interfaces(host: Host) -> tuple[str, ...]:
    """Return the interfaces over RDMA devices, and the legs of their bonds. Raises NoData."""
    found: set[str] = set()
    for device in devices(host):
        try:
            numbers = ports(host, device)
        except FileNotFoundError:
            continue  # it has gone
        for number in numbers:
            found.update(interfaces(host, device, number, len(numbers)))
    for name in tuple(found):
        legs = _legs(host, name)
        if legs:
            found.discard(name)
            found.update(legs)
    if not found:
        raise NoData("no RDMA device on this machine has a network interface")
    return tuple(sorted(found))


def _legs(host: Host, interface: str) -> tuple[str, ...]:
    try:
        return tuple(host.read(f"sys/class/net/{interface}/bonding/slaves").split())
    except FileNotFoundError:
        return ()


class _Interfaces:
    """The interfaces and where their values are."""

    __slots__ = ("_absent", "_look_ns", "_plans")

    def __init__(self) -> None:
        self._look_ns: int | None = None
        self._absent: str | None = None
        self._plans: dict[str, Wanted] = {}

    def collect(self, host: Host) -> Iterator[EthtoolPort | EthtoolPause | Problem]:
        """Yield the rows of every interface."""
        now = host.clock.mono_ns()
        if self._look_ns is None or now >= self._look_ns:
            yield from self._look(host, now)
        if self._absent is not None:
            raise NoData(self._absent)
        for interface, plan in tuple(self._plans.items()):
            try:
                answer = host.ask("ethtool_values", interface, plan.count, *plan.indices)
                values = parse_values(answer, len(plan.indices))
            except (OSError, ValueError) as error:
                self._look_ns = min(self._look_ns or now, now + _LOOK_AGAIN_NS)
                if isinstance(error, OSError) and error.errno == errno.ESTALE:
                    self._look_ns = now  # queues were added or taken away
                    continue
                yield Problem(subject=interface, message=str(error))
                continue
            yield from rows(interface, plan, values, host.clock.mono_ns())

    def _look(self, host: Host, now: int) -> Iterator[Problem]:
        try:
            found, self._absent = rdma_interfaces(host), None
        except NoData as why:
            found, self._absent = (), str(why)
        self._look_ns = now + _LOOK_EVERY_NS
        plans = {}
        for interface in found:
            try:
                plan = wanted(parse_names(host.ask("ethtool_names", interface)))
            except KeyError:
                self._absent = "this host was not asked for the statistics of its interfaces"
                break
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno in _UNSUPPORTED:
                    continue
                self._look_ns = now + _LOOK_AGAIN_NS
                yield Problem(subject=interface, message=str(error))
                continue
            if plan.indices:
                plans[interface] = plan
        self._plans = plans


def make() -> Collect:
    """Return the collector."""
    return _Interfaces().collect


ETHTOOL_PORT = Collector(
    name="ethtool_port",
    lane="normal",
    make=make,
    thread="ethtool",
    deadline_s=5.0,
    every_s=2.0,
)
