"""Demand against supply, in SQL: what trainers asked of each mount, and what its device served.

`storage_second` is a view over the tables of a recording. One row for each mount and second, times
in seconds of the monotonic clock of the node. Counters are spread over the time between two of
their rows, so that totals are kept; a counter that fell, and a gap, give no bytes.
"""

from __future__ import annotations

import duckdb

VIEW = "storage_second"

# A process's bytes go to mounts by the share of its open files there, over all looks at it: exact
# for a process that reads from one mount. Pipes count in rchar, and what is read from a socket does
# not, so that a file system in Python itself (fsspec, boto3) has no demand here.
SELECT = """
WITH
gaps(name, gap_ns) AS (VALUES ('second', 5_000_000_000), ('targets', 25_000_000_000)),
place AS (
    SELECT node, boot_id, mount_id, max(mono_ns) AS told_ns,
           arg_max(mount_point, mono_ns) AS mount_point, arg_max(kind, mono_ns) AS kind,
           arg_max(device, mono_ns) AS device, arg_max(block_device, mono_ns) AS block_device
    FROM mount GROUP BY node, boot_id, mount_id
),
counting AS (
    SELECT node, boot_id, device, bool_or(reads > 0 OR writes > 0) AS counts
    FROM block_device WHERE role <> 'path' GROUP BY node, boot_id, device
),
disk AS (
    SELECT d.node, d.boot_id, coalesce(d.head, d.device) AS disk, d.device AS part, d.mono_ns,
           d.read_bytes AS bytes
    FROM block_device d
    LEFT JOIN counting c ON c.node = d.node AND c.boot_id = d.boot_id AND c.device = d.head
    WHERE d.role <> 'path' OR NOT coalesce(c.counts, FALSE)
),
supplied AS (
    SELECT p.node, p.boot_id, p.mount_id, d.part, 'second' AS rhythm, d.mono_ns, d.bytes
    FROM place p
    CROSS JOIN unnest(string_split(p.block_device, ',')) AS below(name)
    JOIN disk d ON d.node = p.node AND d.boot_id = p.boot_id AND d.disk = below.name
    UNION ALL
    SELECT p.node, p.boot_id, p.mount_id, n.mount_point, 'second', n.mono_ns, n.server_read_bytes
    FROM place p
    JOIN nfs_mount n ON n.node = p.node AND n.boot_id = p.boot_id AND p.kind = 'nfs'
        AND coalesce(n.device = p.device, n.mount_point = p.mount_point)
    UNION ALL
    SELECT p.node, p.boot_id, p.mount_id, t.instance, 'targets', t.mono_ns, t.read_bytes
    FROM place p
    JOIN (SELECT DISTINCT node, boot_id, file_system, mount_point FROM lustre_mount) l
        ON l.node = p.node AND l.boot_id = p.boot_id AND l.mount_point = p.mount_point
    JOIN lustre_target t ON t.node = p.node AND t.boot_id = p.boot_id AND p.kind = 'lustre'
        AND t.kind = 'ost' AND starts_with(t.target, l.file_system || '-')
),
share AS (
    SELECT node, boot_id, pid, start_ns, mount_id,
           files / sum(files) OVER (PARTITION BY node, boot_id, pid, start_ns) AS share
    FROM (
        SELECT node, boot_id, pid, start_ns, mount_id, sum(read_files) AS files
        FROM file_use WHERE read_files > 0 GROUP BY ALL
    )
),
asked AS (
    SELECT p.node, p.boot_id, s.mount_id, p.mono_ns,
           p.pid::VARCHAR || '/' || p.start_ns || '/' || coalesce(s.mount_id, -1) AS part,
           p.rchar_bytes * coalesce(s.share, 1) AS wanted,
           p.read_bytes * coalesce(s.share, 1) AS fetched
    FROM process p
    LEFT JOIN share s ON s.node = p.node AND s.boot_id = p.boot_id AND s.pid = p.pid
        AND s.start_ns = p.start_ns
    WHERE p.kind IN ('trainer', 'data_worker')
),
reading AS (
    SELECT node, boot_id, mount_id, part, rhythm, mono_ns, bytes AS served,
           NULL::DOUBLE AS wanted, NULL::DOUBLE AS fetched
    FROM supplied
    UNION ALL
    SELECT node, boot_id, mount_id, part, 'second', mono_ns, NULL, wanted, fetched FROM asked
),
step AS (
    SELECT node, boot_id, mount_id, rhythm, lag(mono_ns) OVER w AS t0, mono_ns AS t1,
           served - lag(served) OVER w AS served, wanted - lag(wanted) OVER w AS wanted,
           fetched - lag(fetched) OVER w AS fetched
    FROM reading
    WINDOW w AS (
        PARTITION BY node, boot_id, mount_id, part, rhythm, served IS NULL ORDER BY mono_ns
    )
),
part AS (
    SELECT node, boot_id, mount_id, t0, t1,
           unnest(range(t0 // 1_000_000_000, (t1 - 1) // 1_000_000_000 + 1)) AS second,
           if(served >= 0, served, NULL) AS served, if(wanted >= 0, wanted, NULL) AS wanted,
           if(fetched >= 0, fetched, NULL) AS fetched
    FROM step JOIN gaps ON gaps.name = step.rhythm
    WHERE t1 > t0 AND t1 - t0 <= gaps.gap_ns
),
whole AS (
    SELECT node, boot_id, mount_id, second, sum(wanted * ratio) AS wanted_bytes,
           sum(fetched * ratio) AS fetched_bytes, sum(served * ratio) AS served_bytes
    FROM (
        SELECT *, (least(t1, (second + 1) * 1_000_000_000) - greatest(t0, second * 1_000_000_000))
                  / (t1 - t0) AS ratio
        FROM part
    )
    GROUP BY ALL
)
SELECT w.node, w.boot_id, w.second, w.mount_id, p.mount_point, p.kind, p.block_device,
       w.wanted_bytes, w.fetched_bytes, w.served_bytes
FROM whole w
LEFT JOIN place p ON p.node = w.node AND p.boot_id = w.boot_id AND p.mount_id = w.mount_id
"""


def create_view(con: duckdb.DuckDBPyConnection) -> None:
    """Create `storage_second` in a connection that has the views of a recording.

    wanted_bytes: what trainers and their workers asked of read() there; NULL mount_id where none of
    their looks found a file. fetched_bytes: what of that, and of mapped files, came from storage
    and not from the page cache. served_bytes: what the disks or the server below gave to everybody;
    NULL for FUSE and file systems that count nothing.
    """
    con.execute(f"CREATE OR REPLACE TEMP VIEW {VIEW} AS {SELECT}")
