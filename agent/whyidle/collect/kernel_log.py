r"""Records of the kernel log, for every collector that looks for something in it.

A record of /dev/kmsg is "priority,sequence,time,flags;text", and lines of " KEY=value" that name
the device which it is about. What is not printable comes as \xNN.

https://docs.kernel.org/admin-guide/abi-testing.html (dev-kmsg)
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass

from whyidle.collect.collector import NoData, Problem
from whyidle.host import Event, Host

_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """A record: what the kernel said, and when.

    `time_us` is microseconds since boot by the clock of the kernel log: not CLOCK_MONOTONIC, but
    within some milliseconds an hour of it. `read_ns` is CLOCK_MONOTONIC when it was read; one that
    is older than the agent is read late. `sequence` counts records since boot. `device` is such as
    "+pci:0000:3b:00.0" or "b259:0", None if the record names none.
    """

    sequence: int
    time_us: int
    read_ns: int
    level: int
    facility: int
    text: str
    device: str | None


def parse_record(text: str, read_ns: int) -> KernelRecord:
    """Return a record as it was read from /dev/kmsg. Raises ValueError."""
    head, semicolon, said = text.partition(";")
    fields = head.split(",")
    if not semicolon or len(fields) < 3 or not all(field.isdecimal() for field in fields[:3]):
        raise ValueError(f"no record of the kernel log: {text[:80]!r}")
    priority, sequence, time_us = map(int, fields[:3])
    line, *more = said.split("\n")
    devices = [_plain(each[8:]) for each in more if each.startswith(" DEVICE=")]
    return KernelRecord(
        sequence=sequence,
        time_us=time_us,
        read_ns=read_ns,
        level=priority & 7,
        facility=priority >> 3,
        text=_plain(line),
        device=devices[0] if devices else None,
    )


def _plain(text: str) -> str:
    if "\\x" not in text:
        return text
    raw = text.encode("utf-8", "surrogateescape")
    return _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), raw).decode("utf-8", "replace")


class KernelLog:
    """Gives each record once, the oldest that the kernel still holds first."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: int | None = None

    def new(self, host: Host) -> Iterable[KernelRecord | Problem]:
        """Yield the records since the last call, and a Problem where some were overwritten.

        At most 1000 records a call. Raises NoData where the log cannot be read, OSError else.
        """
        for event in _events(host):
            try:
                record = parse_record(event.text, event.mono_ns)
            except ValueError as error:
                yield Problem(subject="kmsg", message=str(error))
                continue
            if self._last is not None:
                if record.sequence <= self._last:
                    continue  # the source was opened anew
                lost = record.sequence - self._last - 1
                if lost:
                    yield Problem(subject="kmsg", message=f"{lost} records were overwritten")
            self._last = record.sequence
            yield record


def _events(host: Host) -> tuple[Event, ...]:
    try:
        return host.events("kmsg")
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise NoData(
                "the kernel log may not be read: give the agent CAP_SYSLOG and /dev/kmsg, or set "
                "kernel.dmesg_restrict=0"
            ) from error
        if error.errno in (errno.ENOENT, errno.ENXIO, errno.ENODEV):
            raise NoData(
                "there is no kernel log here: a container needs /dev/kmsg of its machine"
            ) from error
        raise
