"""The topology file that a cloud gives its virtual machines, so that NCCL knows what lies where.

Source: NCCL_TOPO_FILE, of /etc/nccl.conf or of a watched process; the format is that of NCCL's
topology dump: <cpu numaid> around nested <pci busid>. A process can name any path, so only a file
is read that nobody but root could have put there.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from stat import S_ISDIR

from whyidle.collect.collector import Problem
from whyidle.collect.pcie_tree import Function, Place
from whyidle.collect.watched import watched_pids
from whyidle.host import Host

_CONFIG = "etc/nccl.conf"
_NAME = "NCCL_TOPO_FILE"
# Ranks of a job name the same file.
_PROCESSES = 8
_WRITABLE_BY_OTHERS = 0o022


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a file says: `path` is None where there is none to be trusted."""

    path: str | None
    places: Mapping[str, Place]
    problems: tuple[Problem, ...] = ()


def parse(text: str) -> Mapping[str, Place]:
    """Return the place of each function that the file names; raises ValueError."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"is no XML: {error}") from None
    if root.tag != "system":
        raise ValueError(f"begins with <{root.tag[:40]}>, not with <system>")
    found: dict[str, Place] = {}
    for number, cpu in enumerate(root.findall("cpu")):
        numa = cpu.get("numaid", "")
        node = int(numa) if numa.isdecimal() else None
        for address, chain in _nested(cpu, ()):
            found[address] = Place(root=f"cpu {number}", chain=chain, numa_node=node)
    return found


def _nested(
    element: ElementTree.Element, above: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for child in element.findall("pci"):
        address = child.get("busid", "").lower()
        chain = (*above, address)
        yield address, chain
        yield from _nested(child, chain)


def parse_config(text: str) -> str | None:
    """Return the topology file that /etc/nccl.conf names."""
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip() == _NAME:
            return value.strip() or None
    return None


def parse_environ(data: bytes) -> str | None:
    """Return the topology file that a process's environment names."""
    for entry in data.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == _NAME.encode():
            return value.decode("utf-8", "replace") or None
    return None


def placed(functions: Mapping[str, Function], places: Mapping[str, Place]) -> dict[str, Function]:
    """Return the functions where the file puts them; what it does not name is nowhere."""
    nowhere = Place(root=None, chain=(), numa_node=None)
    return {
        address: replace(function, place=places.get(address, nowhere))
        for address, function in functions.items()
    }


def look(host: Host) -> Told:
    """Return what the first file says that is named and can be trusted."""
    problems = []
    for path in dict.fromkeys(_named(host)):
        if not _of_root_alone(host, path):
            said = "may be changed by others than root or is not there; not read"
            problems.append(Problem(subject=path, message=f"the topology file {said}"))
            continue
        try:
            data = host.read_bytes(path.lstrip("/"), keep=False)
            places = parse(data.decode("utf-8", "replace"))
        except ValueError as error:
            problems.append(Problem(subject=path, message=f"the topology file {error}"))
            continue
        return Told(path=path, places=places, problems=tuple(problems))
    return Told(path=None, places={}, problems=tuple(problems))


def _named(host: Host) -> Iterator[str]:
    try:
        named = parse_config(host.read_bytes(_CONFIG, keep=False).decode("utf-8", "replace"))
    except FileNotFoundError:
        named = None
    if named is not None:
        yield named
    gpu, _ = watched_pids(host)
    for pid in (gpu or ())[:_PROCESSES]:
        try:
            named = parse_environ(host.read_bytes(f"proc/{pid}/environ", keep=False))
        except OSError:
            continue  # it has ended, or is not ours to look at
        if named is not None:
            yield named


def _of_root_alone(host: Host, path: str) -> bool:
    """Return whether root alone can write the file and every directory above it."""
    if not path.startswith("/") or "/../" in path:
        return False
    parts = path.strip("/").split("/")
    try:
        for count in range(1, len(parts)):
            above = host.stat("/".join(parts[:count]))
            if above.user_id != 0 or not S_ISDIR(above.mode) or above.mode & _WRITABLE_BY_OTHERS:
                return False
        file = host.stat("/".join(parts))
    except OSError:
        return False
    return file.is_file and file.user_id == 0 and not file.mode & _WRITABLE_BY_OTHERS
