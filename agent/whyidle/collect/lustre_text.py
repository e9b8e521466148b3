"""Lustre's statistics in the text of its client, in the forms of versions 2.5 to 2.15.

Source: `name N samples [unit] min max sum sumsq`, of which the last four may be missing, and the
import of a target, which looks like YAML. Manual of Lustre, chapter "Lustre Parameters".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whyidle.collect.numbers import whole

_TIMES = ("[usec]", "[usecs]")
_SIGNED_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A counter: how often, and the sum in its unit where it has one."""

    count: int
    unit: str
    total: int | None

    @property
    def total_us(self) -> int | None:
        """The sum, if it is a time."""
        return self.total if self.unit in _TIMES else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """How a target is reached; None for what the text lacks."""

    state: str | None
    connection: str | None
    connects: int | None
    in_flight: int | None
    timeouts: int | None


def parse_stats(text: str) -> Mapping[str, Sample]:
    """Return the counters of a stats file by name; raises ValueError that names a bad one."""
    found: dict[str, Sample] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or words[2] != "samples":
            continue
        name, unit = words[0], words[3]
        count = whole(words[1], f"lustre: {name[:40]}")
        total = whole(words[6], f"lustre: sum of {name[:40]}") if len(words) > 6 else None
        if not 0 <= count < _SIGNED_LIMIT:
            raise ValueError(f"lustre: {name[:40]} has a number of more than 63 bits")
        if total is not None and not 0 <= total < _SIGNED_LIMIT:
            total = None  # it has wrapped: not known any more
        found[name] = Sample(count=count, unit=unit, total=total)
    return found


def parse_import(text: str) -> Import:
    """Return the state of an import; raises ValueError."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.strip().partition(":")
        # Newer versions put servers in quotes.
        if colon and (known := value.strip(' "')):
            found.setdefault(name, known)

    def number(name: str) -> int | None:
        return whole(found[name].split()[0], f"lustre: {name}") if name in found else None

    return Import(
        state=found.get("state"),
        connection=found.get("current_connection"),
        connects=number("connection_attempts"),
        in_flight=number("inflight"),
        timeouts=number("timeouts"),
    )


def file_system_of(instance: str) -> str:
    """Return the file system of llite's lustre-ffff88105db50000: its own name may have dashes."""
    return instance.rpartition("-")[0] or instance


def target_of(instance: str) -> str:
    """Return lustre-OST0000 of lustre-OST0000-osc-ffff88105db50000."""
    for kind in ("-osc-", "-mdc-"):
        name, found, _ = instance.rpartition(kind)
        if found:
            return name
    return instance
