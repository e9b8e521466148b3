"""Bytes, state and counters of RDMA ports: InfiniBand, RoCE, Omni-Path, iWARP, EFA.

Source: /sys/class/infiniband/DEV/ports/N (https://docs.kernel.org/infiniband/sysfs.html). RDMA
traffic shows in no network interface. A read may be a command to the firmware, which takes its time
and can hang, so all of it runs on a thread of its own, and a port is asked so rarely that the
driver is at work for it at most a tenth of the time. Bytes are read 2 times a second, which is as
fine as ranks are set side by side; what tells of congestion once; errors and the rate, which change
rarely, every ten seconds.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from whyidle.clock import NS_PER_S
from whyidle.collect import rdma_counters as names_of
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.rdma_counters import parse_count, parse_rate, parse_state
from whyidle.collect.rdma_device import CLASS, devices, ports
from whyidle.host import Host
from whyidle.schema import RdmaPort, RdmaTraffic
from whyidle.table import table_of

_T = TypeVar("_T")

# 8 ports cost 0.12 % of a core at 8 Hz, without what the driver does.
_EVERY_S = 0.5
# A second and ten, less half a period: runs are a little late or early.
_FULL_EVERY_NS = NS_PER_S - 250_000_000
_RARE_EVERY_NS = 10 * NS_PER_S - 250_000_000
_LOOK_EVERY_NS = 30 * NS_PER_S
# After a failure devices are looked for sooner, but not in each run.
_LOOK_AGAIN_NS = 5 * NS_PER_S
# A port rests this many times as long as it took to read, up to a limit.
_REST = 10
_REST_MAX_NS = 10 * NS_PER_S
_NOT_THERE = frozenset({errno.ENOSYS, errno.EOPNOTSUPP})
# What a row has in columns that the port has no counter for.
_NOTHING: dict[str, Any] = {
    column.name: None for column in table_of(RdmaPort).columns if column.kind != "key"
}

_TRAFFIC = ("rx_bytes", "tx_bytes")
# What says that a sender was held up. Reading all 40 counters of 8 ports each second would cost
# 0.12 % of a core more, a third of that in the kernel.
_OFTEN = frozenset(
    {
        "tx_packets",
        "tx_wait",
        "retransmits",
        "ack_timeouts",
        "out_of_order",
        "cnps_handled",
    }
)

# A column, its files, and the factor to the unit of the column.
_Reading = tuple[str, tuple[str, ...], int]


class _RefusedError(Exception):
    """A counter was refused for good."""


class _Port:
    """A port: its files, whether it is active, and until when it rests."""

    __slots__ = (
        "active",
        "device",
        "directory",
        "fast_ns",
        "full_ns",
        "number",
        "often",
        "plain",
        "rare",
        "rare_ns",
        "traffic",
    )

    def __init__(self, device: str, number: int) -> None:
        self.device = device
        self.number = number
        self.directory = f"{CLASS}/{device}/ports/{number}"
        self.traffic: tuple[_Reading, ...] = ()
        # Files of bytes received and sent, and their unit, where there is one of each.
        self.plain: tuple[str, str, int] | None = None
        self.often: tuple[_Reading, ...] = ()
        self.rare: tuple[_Reading, ...] = ()
        self.active = False
        self.fast_ns = 0
        self.full_ns = 0
        self.rare_ns = 0

    @property
    def name(self) -> str:
        """How problems call it."""
        return f"{self.device}/{self.number}"

    def look(self, host: Host, ports_of_device: int) -> None:
        """Find out which counters there are."""
        where = {folder: f"{self.directory}/{folder}" for folder in names_of.FOLDERS}
        present = {folder: _names(host, path) for folder, path in where.items()}
        if not present["hw_counters"] and ports_of_device == 1:
            # Drivers before 5.14 had one set for the whole device.
            where["hw_counters"] = f"{CLASS}/{self.device}/hw_counters"
            present["hw_counters"] = _names(host, where["hw_counters"])
        readings: list[_Reading] = []
        for column, sums in names_of.SUMS.items():
            folder, files = names_of.chosen(sums, present)
            if files:
                paths = tuple(f"{where[folder]}/{name}" for name in files)
                unit = names_of.unit(column, folder)
                readings.append((column, paths, unit))
        for folder, known in names_of.SINGLE.items():
            readings += [
                (known[name], (f"{where[folder]}/{name}",), 1)
                for name in present[folder]
                if name in known
            ]
        self.traffic = tuple(reading for reading in readings if reading[0] in _TRAFFIC)
        single = [paths[0] for _, paths, _ in self.traffic if len(paths) == 1]
        if len(self.traffic) == len(single) == 2:
            self.plain = (single[0], single[1], self.traffic[0][2])
        self.often = tuple(reading for reading in readings if reading[0] in _OFTEN)
        self.rare = tuple(
            reading for reading in readings if reading[0] not in _OFTEN.union(_TRAFFIC)
        )


def _names(host: Host, directory: str) -> tuple[str, ...]:
    try:
        return host.names(directory)
    except FileNotFoundError:
        return ()


class _Ports:
    """All ports, what is wrong with them, and which devices are left alone."""

    def __init__(self) -> None:
        self._look_ns: int | None = None
        self._absent: str | None = None
        self._refused: set[str] = set()
        self._ports: list[_Port] = []

    def collect(self, host: Host) -> Iterator[RdmaTraffic | RdmaPort | Problem]:
        """Yield the bytes of active ports, and once a second the rest of all."""
        now = host.clock.mono_ns()
        if self._look_ns is None or now >= self._look_ns:
            yield from self._look(host, now)
        if self._absent is not None:
            raise NoData(self._absent)
        read, mono_ns = host.read_bytes, host.clock.mono_ns
        began = now
        for port in self._ports:
            if now < port.full_ns:
                if not port.active or now < port.fast_ns:
                    continue
                if port.plain is not None:
                    # Most of what this module costs is here: calls and dictionaries double it.
                    rx_path, tx_path, unit = port.plain
                    try:
                        rx, tx = int(read(rx_path)) * unit, int(read(tx_path)) * unit
                    except (OSError, ValueError):
                        rx = tx = -1  # asked again below, where it is told what is wrong
                    if 0 <= rx < names_of.LIMIT and 0 <= tx < names_of.LIMIT:
                        ended = mono_ns()
                        port.fast_ns = ended + min((ended - began) * _REST, _REST_MAX_NS)
                        began = ended
                        yield RdmaTraffic(
                            mono_ns=ended,
                            device=port.device,
                            port=port.number,
                            rx_bytes=rx,
                            tx_bytes=tx,
                        )
                        continue
            if port.device not in self._refused:
                yield from self._careful(host, port, full=now >= port.full_ns)
                began = mono_ns()

    def _careful(
        self, host: Host, port: _Port, *, full: bool
    ) -> Iterator[RdmaTraffic | RdmaPort | Problem]:
        try:
            yield from self._full(host, port) if full else self._fast(host, port)
        except _RefusedError:
            self._refused.add(port.device)
            self._ports = [one for one in self._ports if one.device != port.device]
            yield Problem(
                subject=port.device,
                message="its counters cannot be read (EINVAL), as those of a restricted "
                "function: it is left alone, because each try is a line in the kernel log",
            )

    def _look(self, host: Host, now: int) -> Iterator[Problem]:
        try:
            found = devices(host)
            self._absent = None
        except NoData as why:
            found, self._absent = (), str(why)
        self._look_ns = now + _LOOK_EVERY_NS
        self._refused &= set(found)
        for gone in {port.device for port in self._ports} - set(found):
            host.forget(f"{CLASS}/{gone}/")
        made = []
        for device in found:
            if device in self._refused:
                continue
            try:
                numbers = ports(host, device)
                for number in numbers:
                    port = _Port(device, number)
                    port.look(host, len(numbers))
                    made.append(port)
            except OSError as error:
                self._again(now)
                yield Problem(subject=device, message=f"{error.strerror}: {error.filename}")
        self._ports = made

    def _again(self, now: int) -> None:
        self._look_ns = min(self._look_ns or now, now + _LOOK_AGAIN_NS)

    def _fast(self, host: Host, port: _Port) -> Iterator[RdmaTraffic | Problem]:
        mono_ns = host.clock.mono_ns
        began = mono_ns()
        failed: list[str] = []
        values = _read_all(host, port.traffic, failed)
        ended = mono_ns()
        port.fast_ns = ended + _rest_ns(ended - began)
        yield from self._traffic(port, values, ended)
        if failed:
            yield self._problem(port, failed, ended)

    def _full(self, host: Host, port: _Port) -> Iterator[RdmaTraffic | RdmaPort | Problem]:
        began = host.clock.mono_ns()
        failed: list[str] = []
        bytes_ = _read_all(host, port.traffic, failed)
        read_ns = host.clock.mono_ns()
        port.fast_ns = read_ns + _rest_ns(read_ns - began)
        values: dict[str, Any] = {**_NOTHING, **bytes_, **_read_all(host, port.often, failed)}
        values["state"] = _text(host, f"{port.directory}/state", parse_state, failed)
        port.active = values["state"] == "active"
        if began >= port.rare_ns:
            port.rare_ns = began + _RARE_EVERY_NS
            values |= _read_all(host, port.rare, failed)
            where = port.directory
            values["physical_state"] = _text(host, f"{where}/phys_state", parse_state, failed)
            if port.active:  # what a link that is down prints is no rate
                values["rate_bits_per_s"] = _text(host, f"{where}/rate", parse_rate, failed)
        ended = host.clock.mono_ns()
        port.full_ns = began + max(_FULL_EVERY_NS, _rest_ns(ended - began))
        if port.active:
            yield from self._traffic(port, bytes_, read_ns)
        yield RdmaPort(mono_ns=read_ns, device=port.device, port=port.number, **values)
        if failed:
            yield self._problem(port, failed, ended)

    def _traffic(self, port: _Port, values: dict[str, Any], mono_ns: int) -> Iterator[RdmaTraffic]:
        if values:
            yield RdmaTraffic(
                mono_ns=mono_ns,
                device=port.device,
                port=port.number,
                rx_bytes=values.get("rx_bytes"),
                tx_bytes=values.get("tx_bytes"),
            )

    def _problem(self, port: _Port, failed: list[str], now: int) -> Problem:
        self._again(now)
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return Problem(subject=port.name, message=failed[0] + more)


def _rest_ns(took_ns: int) -> int:
    return min(took_ns * _REST, _REST_MAX_NS)


def _read_all(host: Host, readings: tuple[_Reading, ...], failed: list[str]) -> dict[str, Any]:
    """Return the values of readings; one that failed is None, and told of in `failed`."""
    read = host.read_bytes
    values: dict[str, Any] = {}
    for column, paths, factor in readings:
        total: int | None = 0
        for path in paths:
            try:
                count = parse_count(read(path), path)
            except ValueError as error:
                failed.append(str(error))
                count = None
            except OSError as error:
                count = None
                if error.errno == errno.EINVAL:
                    raise _RefusedError from error
                if error.errno not in _NOT_THERE:
                    failed.append(f"{error.strerror}: {path}")
            total = None if count is None or total is None else total + count * factor
        values[column] = total
    return values


def _text(host: Host, path: str, parse: Callable[[str], _T], failed: list[str]) -> _T | None:
    try:
        return parse(host.read(path))
    except ValueError as error:
        failed.append(str(error))
    except OSError as error:
        # A link that has not trained refuses its rate with EINVAL.
        if error.errno != errno.EINVAL:
            failed.append(f"{error.strerror}: {path}")
    return None


def make() -> Collect:
    """Return the collector."""
    return _Ports().collect


RDMA_PORT = Collector(
    name="rdma_port", lane="fast", make=make, thread="rdma", every_s=_EVERY_S, deadline_s=2.0
)
