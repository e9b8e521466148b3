"""A sysfs tree of PCI functions made of the text of `lspci -vvv`, for the recorded H100 node."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fabric_make import Entry, link_to

_HEAD = re.compile(r"^([0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([^:]+): (.*)$")
_BUS = re.compile(r"Bus: primary=\w+, secondary=(\w+),")
_STATUS = re.compile(r"LnkSta:\tSpeed ([\d.]+)GT/s[^,]*, Width x(\d+)")
_CAPABLE = re.compile(r"LnkCap:.*Speed ([\d.]+)GT/s, Width x(\d+)")
_CLASSES = {
    "PCI bridge": "0x060400",
    "3D controller": "0x030200",
    "Ethernet controller": "0x020000",
    "Non-Volatile memory controller": "0x010802",
}
_VENDORS = {"NVIDIA": "0x10de", "Mellanox": "0x15b3", "Broadcom": "0x14e4"}
# Where a made configuration space has its only extended capability.
_ACS_AT = 0x100


@dataclass(slots=True)
class Listed:
    """A function as lspci lists it."""

    address: str
    kind: str
    name: str
    secondary: str | None = None
    lines: list[str] = field(default_factory=list)


def parse(text: str) -> list[Listed]:
    """Return the functions of the classes that matter."""
    found: list[Listed] = []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            found.append(Listed(head[1], head[2], head[3]))
        elif found:
            found[-1].lines.append(line)
            bus = _BUS.search(line)
            if bus:
                found[-1].secondary = bus[1]
    return [one for one in found if one.kind in _CLASSES]


def acs_config(flags: str) -> bytes:
    """A configuration space whose ACS control register is as an ACSCtl line says."""
    names = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd")
    control = sum(1 << bit for bit, name in enumerate(names) if f"{name}+" in flags)
    config = bytearray(4096)
    config[_ACS_AT : _ACS_AT + 4] = (0x000D | 1 << 16).to_bytes(4, "little")
    config[_ACS_AT + 6 : _ACS_AT + 8] = control.to_bytes(2, "little")
    return bytes(config)


def tree(text: str) -> dict[str, Entry]:
    """Return the tree; ConnectX-7 become mlx5_N and NVMe drives nvmeN, in the order of the list."""
    functions = parse(text)
    bridges = {one.secondary: one for one in functions if one.secondary is not None}
    entries: dict[str, Entry] = {}
    counts = {"mlx5_": 0, "nvme": 0}

    def path(one: Listed) -> str:
        above = bridges.get(one.address[:2])
        parent = f"sys/devices/pci0000:{one.address[:2]}" if above is None else path(above)
        return f"{parent}/0000:{one.address}"

    for one in functions:
        base = path(one)
        entries[f"sys/bus/pci/devices/0000:{one.address}"] = link_to(
            f"sys/bus/pci/devices/0000:{one.address}", base
        )
        entries[f"{base}/class"] = f"{_CLASSES[one.kind]}\n"
        entries[f"{base}/vendor"] = f"{_VENDORS.get(one.name.split()[0], '0x8086')}\n"
        for line in one.lines:
            _attributes(entries, base, line)
        prefix = "nvme" if one.kind.startswith("Non") else "mlx5_"
        if prefix == "nvme" or "ConnectX-7" in one.name:
            name = f"{prefix}{counts[prefix]}"
            counts[prefix] += 1
            kind = "nvme" if prefix == "nvme" else "infiniband"
            entries[f"{base}/{kind}/{name}/ports/1/state"] = "4: ACTIVE\n"
            entries[f"{base}/{kind}/{name}/device"] = link_to(f"{base}/{kind}/{name}/device", base)
            entries[f"sys/class/{kind}/{name}"] = link_to(
                f"sys/class/{kind}/{name}", f"{base}/{kind}/{name}"
            )
    entries["proc/cpuinfo"] = "processor\t: 0\nflags\t\t: fpu vme\n"
    return entries


def _attributes(entries: dict[str, Entry], base: str, line: str) -> None:
    node, status, capable = re.search(r"NUMA node: (\d+)", line), _STATUS.search(line), None
    if node:
        entries[f"{base}/numa_node"] = f"{node[1]}\n"
    capable = _CAPABLE.search(line)
    for found, which in ((status, "current"), (capable, "max")):
        if found:
            speed = found[1] if "." in found[1] else f"{found[1]}.0"
            entries[f"{base}/{which}_link_speed"] = f"{speed} GT/s PCIe\n"
            entries[f"{base}/{which}_link_width"] = f"{found[2]}\n"
