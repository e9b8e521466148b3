"""Network interfaces: bytes, packets, errors, and whether the link is up and how fast.

Source: /proc/net/dev and /sys/class/net (https://docs.kernel.org/networking/statistics.html). The
text costs 14 us for 4 interfaces, rtnetlink by pyroute2 940 us, measured in one run: so text.
RDMA traffic does not show here. Interfaces in network namespaces of ranks are read through
/proc/PID/net/dev; their state and speed are out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.link_watch import LinkWatch
from whyidle.collect.namespace import OWN, net_namespace
from whyidle.collect.numbers import whole, wholes
from whyidle.collect.watched import watched_pids
from whyidle.host import Host
from whyidle.schema import LinkEvent, NetLink

_T = TypeVar("_T")

# Reading the speed asks the driver, which may ask the firmware; links change rarely.
_LINKS_EVERY_NS = 10 * NS_PER_S
_NO_NAMESPACES = (
    "not permitted to look at network namespaces of other users' processes: needs CAP_SYS_PTRACE"
)
# Columns of /proc/net/dev: eight received, eight sent.
_COLUMNS = 16
_BITS_PER_MEGABIT = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What sysfs says of an interface; None where it does not say."""

    physical: bool
    up: bool | None
    speed_bits_per_s: int | None


_UNKNOWN = Link(physical=False, up=None, speed_bits_per_s=None)


def parse(
    text: str, mono_ns: int, links: Mapping[str, Link], namespace: str = OWN
) -> Iterator[NetLink | Problem]:
    """Yield a row for each interface of /proc/net/dev that is worth one.

    A node has hundreds of virtual interfaces of its containers, which only repeat what a physical
    one carries. Where nothing is physical, as inside a container, every interface counts.
    """
    some_physical = any(link.physical for link in links.values())
    for line in text.splitlines()[2:]:
        name, colon, rest = line.rpartition(":")
        name = name.strip()
        link = links.get(name, _UNKNOWN)
        if some_physical and name in links and not link.physical and name != "lo":
            continue
        words = rest.split()
        try:
            if not colon or len(words) < _COLUMNS:
                raise ValueError(f"net/dev: {line.strip()[:60]!r} is no line of {_COLUMNS} numbers")
            n = wholes(words, f"net/dev: {name}")
        except ValueError as error:
            yield Problem(subject=name, message=str(error))
            continue
        yield NetLink(
            mono_ns=mono_ns,
            namespace=namespace,
            interface=name,
            up=link.up,
            speed_bits_per_s=link.speed_bits_per_s,
            rx_bytes=n[0],
            tx_bytes=n[8],
            rx_packets=n[1],
            tx_packets=n[9],
            rx_errors=n[2],
            tx_errors=n[10],
            rx_drops=n[3],
            tx_drops=n[11],
        )


def parse_operstate(text: str) -> bool | None:
    """Return whether an interface is up; drivers without a carrier, as lo, say unknown: None."""
    state = text.strip()
    return None if state in ("unknown", "") else state == "up"


def parse_speed(text: str) -> int | None:
    """Return bits per second; a link that is down prints -1 or 2^32 - 1: None."""
    megabits = whole(text.strip(), "speed")
    return megabits * _BITS_PER_MEGABIT if 0 < megabits < 0xFFFFFFFF else None


class _Kept:
    """What is kept for ten seconds: sysfs of the own links, and who lives in other namespaces."""

    __slots__ = ("_asked_ns", "_lines", "links", "refused", "strangers")

    def __init__(self) -> None:
        self._asked_ns: int | None = None
        self._lines = 0
        self.links: dict[str, Link] = {}
        self.strangers: dict[str, int] = {}
        self.refused: str | None = None

    def refresh(self, host: Host, mono_ns: int, lines: int) -> None:
        """Look again if it was long ago or an interface came or went."""
        old = self._asked_ns is None or mono_ns - self._asked_ns >= _LINKS_EVERY_NS
        if old or lines != self._lines:
            self._asked_ns, self._lines = mono_ns, lines
            self.links = _links(host)
            self._find_strangers(host)

    def shown(self) -> dict[str, bool | None]:
        """Return the interfaces that count, and whether each is up."""
        physical = any(link.physical for link in self.links.values())
        return {name: link.up for name, link in self.links.items() if link.physical or not physical}

    def _find_strangers(self, host: Host) -> None:
        """Find a process in each network namespace that a rank has to itself."""
        self.strangers, self.refused = {}, None
        gpu, commands = watched_pids(host)
        for pid in sorted({*(gpu or ()), *commands}):
            try:
                namespace = net_namespace(host, pid)
            except PermissionError:
                self.refused = _NO_NAMESPACES
            except OSError:
                continue  # it has ended
            else:
                if namespace:
                    self.strangers.setdefault(namespace, pid)


def make() -> Collect:
    """Return the collector."""
    kept = _Kept()
    watch = LinkWatch()

    def collect(host: Host) -> Iterator[NetLink | LinkEvent | Problem]:
        try:
            text = host.read("proc/net/dev")
        except FileNotFoundError:
            raise NoData("the kernel has no network (no /proc/net/dev)") from None
        reports = yield from watch.listen(host)
        mono_ns = host.clock.mono_ns()
        kept.refresh(host, mono_ns, text.count("\n"))
        yield from parse(text, mono_ns, kept.links)
        yield from watch.rows(reports, kept.shown())
        for namespace, pid in kept.strangers.items():
            try:
                # Kept open it would keep the namespace alive after its last process.
                data = host.read_bytes(f"proc/{pid}/net/dev", keep=False)
            except OSError:
                continue  # it has ended; in ten seconds another is found
            yield from parse(data.decode("utf-8", "replace"), host.clock.mono_ns(), {}, namespace)
        if kept.refused is not None:
            yield Problem(subject="namespaces", message=kept.refused)

    return collect


def _links(host: Host) -> dict[str, Link]:
    try:
        names = host.names("sys/class/net")
    except OSError:
        return {}  # the counters come without link state then
    return {name: _link(host, f"sys/class/net/{name}") for name in names}


def _link(host: Host, directory: str) -> Link:
    return Link(
        # A bond is what its legs carry, but it is the bond that the job uses and that has a state.
        physical=_exists(host, f"{directory}/device") or _exists(host, f"{directory}/bonding"),
        up=_read(host, f"{directory}/operstate", parse_operstate),
        speed_bits_per_s=_read(host, f"{directory}/speed", parse_speed),
    )


def _exists(host: Host, path: str) -> bool:
    try:
        host.stat(path)
    except OSError:
        return False
    return True


def _read(host: Host, path: str, parse_: Callable[[str], _T | None]) -> _T | None:
    try:
        return parse_(host.read(path))
    except OSError:
        return None  # a link that is down refuses its speed with EINVAL; that is no failure


NET_LINK = Collector(name="net_link", lane="normal", make=make)
