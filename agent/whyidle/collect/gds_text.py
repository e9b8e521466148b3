"""GPUDirect Storage in the text of /proc/driver/nvidia-fs, of drivers 2.3 to 2.28.

Source: the statistics of the nvidia-fs module and NVIDIA's GPUDirect Storage troubleshooting guide.
Units were MB before 2.8 or so and MiB since; both mean 2^20 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from whyidle.collect.numbers import whole

_MIB = 1 << 20
_SIGNED_LIMIT = 1 << 63
_PAIR = re.compile(r"([\w()%/-]+)=(-?[\w.]+)")
_GPU = re.compile(r"GPU (\S+)\s+uuid:([0-9a-fA-F-]+)\s*:(.*)")
_DRIVER = re.compile(r"NVFS Driver\(version: ?([\w.]+)\)")
_SWITCHES = re.compile(r"IO stats: (\w+), peer IO stats: (\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU: sizes in bytes, None where the text lacks them."""

    pci: str
    uuid: str
    registered_bytes: int | None
    cache_bytes: int | None
    max_pinned_bytes: int | None
    cross_root_port_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The statistics: the numbers of each line by the line's name, in the kernel's own units."""

    version: str | None
    driver: str | None
    io_stats: bool | None
    peer_stats: bool | None
    shadow_buffer_bytes: int | None
    processes: int | None
    lines: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()

    def number(self, line: str, *names: str) -> int | None:
        """Return a number of a line by the first of its names that is there."""
        numbers = self.lines.get(line, {})
        return next((numbers[name] for name in names if name in numbers), None)

    def io(self, line: str, *names: str) -> int | None:
        """Return what is only counted while statistics are on: None while they are off."""
        return None if self.io_stats is False else self.number(line, *names)

    def io_bytes(self, line: str, *names: str) -> int | None:
        """Return MiB of I/O as bytes."""
        found = self.io(line, *names)
        return None if found is None else found * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A row of peer_distance."""

    gpu_pci: str
    peer_pci: str
    peer_class: str | None
    rank: int | None
    distance: int | None
    link_width: int | None
    link_generation: int | None
    numa_node: int | None


def parse_stats(text: str) -> Stats:
    """Return the statistics; raises ValueError that names the line."""
    version = driver = None
    switches: tuple[bool | None, bool | None] = (None, None)
    shadow: int | None = None
    processes: int | None = None
    lines: dict[str, dict[str, int]] = {}
    gpus: list[Gpu] = []
    for line in text.splitlines():
        gpu = _GPU.match(line)
        if gpu is not None:
            gpus.append(_gpu(gpu[1], gpu[2], _pairs(gpu[3], "GPU", floats=True)))
            continue
        name, colon, rest = (part.strip() for part in line.partition(":"))
        if (found := _DRIVER.search(line)) is not None:
            driver = found[1]
        elif (found := _SWITCHES.search(line)) is not None:
            switches = (found[1] == "Enabled", found[2] == "Enabled")
        elif name == "GDS Version":
            version = rest or None
        elif name.startswith("Active Shadow-Buffer"):
            shadow = _stored(rest, name) * _MIB
        elif name == "Active Process":
            processes = _stored(rest, name)
        elif colon and "=" in rest:
            # Reads and Writes have a second line, with what the driver has smoothed.
            numbers = {key: int(value) for key, value in _pairs(rest, name).items()}
            lines[name] = {**numbers, **lines.get(name, {})}
    return Stats(
        version=version,
        driver=driver,
        io_stats=switches[0],
        peer_stats=switches[1],
        shadow_buffer_bytes=shadow,
        processes=processes,
        lines=lines,
        gpus=tuple(gpus),
    )


def _stored(word: str, field_: str) -> int:
    number = whole(word, f"nvidia-fs: {field_}")
    if not 0 <= number < _SIGNED_LIMIT // _MIB:
        raise ValueError(f"nvidia-fs: {field_} has a number out of range")
    return number


def _pairs(text: str, line: str, *, floats: bool = False) -> dict[str, float]:
    """Return name=number pairs; a number with a point only where `floats`."""
    found: dict[str, float] = {}
    for name, value in _PAIR.findall(text):
        if floats and "." in value:
            try:
                found[name] = float(value)
            except ValueError:
                raise ValueError(f"nvidia-fs: {line} {name} is {value[:40]!r}") from None
        elif "Bandwidth" not in name and "Latency" not in name:
            found[name] = _stored(value, f"{line} {name}")
    return found


def _gpu(pci: str, uuid: str, numbers: Mapping[str, float]) -> Gpu:
    def size(name: str) -> int | None:
        found = numbers.get(f"{name}_MiB", numbers.get(f"{name}_MB"))
        return None if found is None else int(found) * _MIB

    crossing = numbers.get("cross_root_port(%)")
    return Gpu(
        pci=pci,
        uuid=f"GPU-{uuid}",
        registered_bytes=size("Registered"),
        cache_bytes=size("Cache"),
        max_pinned_bytes=size("max_pinned"),
        cross_root_port_ratio=None if crossing is None else crossing / 100,
    )


def parse_peers(text: str) -> tuple[Peer, ...]:
    """Return the rows of peer_distance, whose columns differ by version; raises ValueError."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    heads = lines[0] if lines else []
    if lines and not {"gpu", "peer"} <= set(heads):
        raise ValueError(f"nvidia-fs: peer_distance begins with {' '.join(heads)[:60]!r}")
    found = []
    for words in lines[1:]:
        row = dict(zip(heads, words, strict=False))
        if len(words) < len(heads):
            raise ValueError(f"nvidia-fs: peer_distance {' '.join(words)[:60]!r} is too short")
        found.append(
            Peer(
                gpu_pci=row["gpu"],
                peer_pci=row["peer"],
                peer_class=row.get("class"),
                rank=_hexadecimal(row, "peerrank"),
                distance=_hexadecimal(row, "p2pdist"),
                link_width=_hexadecimal(row, "link"),
                link_generation=_hexadecimal(row, "gen"),
                numa_node=_hexadecimal(row, "numa"),
            )
        )
    return tuple(found)


def _hexadecimal(row: Mapping[str, str], name: str) -> int | None:
    """Return a number such as 0x820088; negative ones, as of no memory node, are none."""
    if name not in row:
        return None
    try:
        number = int(row[name], 0)
    except ValueError:
        raise ValueError(f"nvidia-fs: {name} is {row[name][:40]!r}, not a number") from None
    return number if 0 <= number < _SIGNED_LIMIT else None
