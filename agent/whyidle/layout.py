"""Where things lie in a recording, and what they are called.

    DIR/manifest.json                        what this is; may be missing
    DIR/NODE/BOOT8/UTC-MONO.duckdb           immutable segments
    DIR/NODE/BOOT8/spool/UTC-MONO.wsp        pieces of the spool, newest still being written
    DIR/NODE/BOOT8/journal/UTC-MONO.jsonl.gz answers of the machine, where asked for

The spool lies below its node, so that the nodes of a job can record into one shared directory.
Names carry wall time for people and monotonic milliseconds for order, since wall time may step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from whyidle.errors import UserError
from whyidle.host import Host

SEGMENT = ".duckdb"
PIECE = ".wsp"
PART = ".part"
JOURNAL = ".jsonl.gz"
# Held by the sampler that writes the newest piece.
SAMPLER_LOCK = ".sampler.lock"

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_NAME = re.compile(r"(\d{8}T\d{6}Z)-(\d{13,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who records: the node, and the boot since which its monotonic clock counts."""

    node: str
    boot_id: str

    @property
    def boot8(self) -> str:
        """First eight hex digits of the boot id."""
        return self.boot_id.replace("-", "")[:8]

    def folder(self, recording: Path) -> Path:
        """Return the folder of this node and boot in a recording."""
        return recording / self.node / self.boot8


def identify(host: Host, node: str | None = None) -> Identity:
    """Return who this machine is; `node` overrides the kernel's hostname. Raises UserError."""
    name = host.read("proc/sys/kernel/hostname").strip() if node is None else node
    if not _NODE.fullmatch(name):
        raise UserError(
            f"{name!r} cannot name a node in a recording: pass --node with letters, digits, dots, "
            "dashes and underscores"
        )
    boot_id = host.read("proc/sys/kernel/random/boot_id").strip()
    if not re.fullmatch(r"[0-9a-f-]{36}", boot_id):
        raise UserError(
            f"proc/sys/kernel/random/boot_id reads {boot_id[:40]!r}: is /proc mounted here?"
        )
    return Identity(node=name, boot_id=boot_id)


def stem(wall_ns: int, mono_ns: int) -> str:
    """Return the name, without ending, of something that began at these times."""
    utc = datetime.fromtimestamp(wall_ns // 1_000_000_000, tz=timezone.utc)
    return f"{utc:%Y%m%dT%H%M%SZ}-{mono_ns // 1_000_000:013d}"


def order(path: Path) -> tuple[int, str]:
    """Return what files of one folder are ordered by: monotonic time; foreign names go first."""
    match = _NAME.match(path.name)
    return (int(match[2]) if match else -1, path.name)


def files(folder: Path, ending: str) -> list[Path]:
    """Return the files in a folder with this ending, in order; none where there is no folder."""
    try:
        found = [path for path in folder.iterdir() if path.name.endswith(ending)]
    except FileNotFoundError:
        return []
    return sorted(found, key=order)
