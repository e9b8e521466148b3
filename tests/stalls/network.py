"""A network of ranks: a namespace each, joined by a switch, with a limited rate on every link.

Everything is in namespaces made here and goes with them; the machine's own interfaces stay as they
are. Limits are token buckets (tc-tbf) on what a rank sends and on what the switch sends to it.
Ranks are put inside by nsenter: `ip netns exec` would mount another /sys over theirs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_BURST_BYTES = 256 << 10  # of veth's largest packets, four
_LATENCY = "50ms"
_PORT = 29_400
_MADE = Path("/run/netns")
_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Where a rank is: the words before its command, and the address of its end of the ring."""

    command: tuple[str, ...]
    address: tuple[str, int]


def problem() -> str | None:
    """None if this machine can make it, else why not."""
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"no {tool}"
    name = f"stall-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except RuntimeError as error:
        return f"no network namespaces: {error}"
    try:
        _run("ip", "-n", name, "link", "add", "left", "type", "veth", "peer", "name", "right")
        _limit(name, "left", 1 << 20)
    except RuntimeError as error:
        return f"no limited links: {error}"
    finally:
        _run("ip", "netns", "delete", name)
    return None


@contextmanager
def links(rates_bytes_per_s: Sequence[int]) -> Iterator[list[Link]]:
    """A link a rank, of so many bytes a second each way."""
    prefix = f"stall-{os.getpid()}"
    switch = f"{prefix}-s"
    names = [f"{prefix}-{rank}" for rank in range(len(rates_bytes_per_s))]
    made: list[str] = []
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            made.append(name)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for rank, (name, rate) in enumerate(zip(names, rates_bytes_per_s, strict=True)):
            port = f"port{rank}"
            _run(
                *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", name),
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", name, "address", "add", f"{_address(rank)}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", interface, "up")
            _limit(name, "eth0", rate)
            _limit(switch, port, rate)
        yield [
            Link(command=("nsenter", f"--net={_MADE / name}"), address=(_address(rank), _PORT))
            for rank, name in enumerate(names)
        ]
    finally:
        for name in made:
            with contextlib.suppress(RuntimeError):
                _run("ip", "netns", "delete", name)


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _limit(namespace: str, interface: str, rate_bytes_per_s: int) -> None:
    bits = f"{8 * rate_bytes_per_s}bit"
    _run(
        *("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf"),
        *("rate", bits, "burst", str(_BURST_BYTES), "latency", _LATENCY),
    )


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
