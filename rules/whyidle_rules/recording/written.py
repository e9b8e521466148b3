"""Files that were open for writing, and which mounts go with their node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import duckdb

from whyidle_rules.recording.processes import Identity
from whyidle_rules.recording.series import Columns, fetch

# Drives that a cloud gives to a machine for as long as it runs (instance store, local SSD).
_RENTED = (
    "Amazon EC2 NVMe Instance Storage",
    "nvme_card",
    "Microsoft NVMe Direct Disk",
    "Microsoft NVMe Direct Disk v2",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Looks at files open for writing, by process, and which mounts go with the node, and why."""

    files: Mapping[Identity, Columns]
    lost_with: Mapping[str, str]

    def why_lost(self, kind: str | None, point: str | None) -> str:
        """Return with what a mount's files are lost; "" where nothing says that they are."""
        if kind == "tmpfs":
            return "the memory of the node"
        if kind == "overlay":
            return "the container"
        return self.lost_with.get(point or "", "")


def load(
    con: duckdb.DuckDBPyConnection, node: str, boot_id: str, since_ns: int, until_ns: int
) -> Written:
    """Return what was seen of files open for writing in [since, until]."""
    here = {"node": node, "boot": boot_id}
    at: dict[str, Any] = {**here, "since": since_ns, "until": until_ns}
    rows = fetch(
        con,
        "SELECT pid, start_ns, mono_ns, kind, mount_point FROM file_use WHERE node = $node"
        " AND boot_id = $boot AND mono_ns BETWEEN $since AND $until AND write_files > 0"
        " AND pid IS NOT NULL AND start_ns IS NOT NULL ORDER BY pid, start_ns, mono_ns",
        at,
    ).groups("pid", "start_ns")
    rented = con.execute(
        "SELECT DISTINCT m.mount_point FROM mount m,"
        " unnest(string_split(m.block_device, ',')) AS below(device)"
        " JOIN nvme_namespace n ON n.node = m.node AND n.boot_id = m.boot_id"
        "  AND n.device = below.device"
        " JOIN nvme_controller c ON c.node = m.node AND c.boot_id = m.boot_id"
        "  AND list_contains(string_split(n.controllers, ','), c.controller)"
        " WHERE m.node = $node AND m.boot_id = $boot AND list_contains($models, trim(c.model))",
        {**here, "models": list(_RENTED)},
    ).fetchall()
    return Written(
        files={(int(pid), int(start)): own for (pid, start), own in rows.items()},
        lost_with={point: "the machine, which rents its disk for as long" for (point,) in rented},
    )
