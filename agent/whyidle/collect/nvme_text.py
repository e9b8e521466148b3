"""NVMe attributes in the kernel's text.

Source: /sys/class/nvme (nvme driver, sysfs.c); values that mean "none" become None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from whyidle.clock import NS_PER_S
from whyidle.collect.numbers import whole

CONTROLLER = re.compile(r"nvme\d+")
DISK = re.compile(r"nvme\d+n\d+")
PATH = re.compile(r"nvme(\d+)c(\d+)n(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a controller is: target, its port, and this side of the connection."""

    target: str | None
    service: str | None
    host: str | None


def parse_address(text: str) -> Address:
    """Return an address: a PCI function, an FC name, or traddr=...,trsvcid=... of fabrics."""
    words = text.strip().replace(" ", ",").split(",")
    found = {name: value for name, equals, value in (w.partition("=") for w in words) if equals}
    if not found:
        return Address(target=text.strip() or None, service=None, host=None)
    host = found.get("host_iface") or found.get("host_traddr") or found.get("src_addr")
    return Address(target=found.get("traddr"), service=found.get("trsvcid"), host=host)


def parse_number(text: str, field: str) -> int | None:
    """Return a number; empty, negative and N/A mean that there is none. Raises ValueError."""
    word = text.strip()
    if word in ("", "N/A"):
        return None
    number = whole(word, field)
    return None if number < 0 else number


def parse_seconds(text: str, field: str) -> int | None:
    """Return ns of a time in seconds; "off" means that there is none. Raises ValueError."""
    if text.strip() == "off":
        return None
    number = parse_number(text, field)
    return None if number is None else number * NS_PER_S


def head_of(path: str) -> str:
    """Return the disk that a hidden path belongs to: nvme0c1n1 is a path of nvme0n1."""
    match = PATH.fullmatch(path)
    if match is None:
        raise ValueError(f"{path[:40]!r} is no path of an NVMe namespace")
    return f"nvme{match[1]}n{match[3]}"
