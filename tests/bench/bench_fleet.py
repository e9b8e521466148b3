"""What a question to a fleet costs: the ledgers by the minute of 1,000 GPUs, one day.

    PYTHONPATH=tests python -m bench.bench_fleet [--nodes 125]

One node's day is made, as the keeper stores it, and copied under the names of the others.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from whyidle.layout import SEGMENT, Identity, stem
from whyidle.segment import new_segment
from whyidle.settle import FOLDER
from whyidle.store import Recording

GPUS, MINUTES = 8, 1440
GOAL_S = 10.0
WALL_NS = 1_767_225_600_000_000_000
# Per minute and GPU: working, and idle time of four causes.
ROWS = f"""
    INSERT INTO seg.ledger_minute
    SELECT
        (minute + 1) * 60000000000, format('GPU-{{node}}-{{}}', gpu),
        CASE part WHEN 0 THEN 'working' WHEN 4 THEN 'spinning' ELSE 'empty' END,
        CASE part WHEN 0 THEN NULL WHEN 1 THEN 'storage' WHEN 2 THEN 'host_pause'
            WHEN 3 THEN 'unattributed' ELSE 'collective' END,
        CASE part WHEN 0 THEN NULL WHEN 1 THEN 'nfs_read' WHEN 2 THEN 'gc'
            WHEN 3 THEN 'no_evidence' ELSE 'late_rank' END,
        format('job{{}}', minute // 180), gpu, {WALL_NS} + (minute + 1) * 60000000000,
        CASE part WHEN 0 THEN 30000000000 ELSE 1 END
            + (hash(minute * 64 + gpu * 8 + part) % 7000000000)::BIGINT
    FROM range({MINUTES}) a(minute), range({GPUS}) b(gpu), range(5) c(part)
    ORDER BY minute, gpu, part
"""
QUESTIONS = {
    "idle GPU-hours by cause": "SELECT cause, sum(part_ns) / 3.6e12 FROM ledger_minute "
    "WHERE pool <> 'working' GROUP BY cause ORDER BY 2 DESC",
    "the ten worst GPUs": "SELECT node, uuid, sum(part_ns) FROM ledger_minute "
    "WHERE pool <> 'working' GROUP BY ALL ORDER BY 3 DESC LIMIT 10",
    "idle by hour and cause": "SELECT wall_ns // 3600000000000, cause, sum(part_ns) "
    "FROM ledger_minute WHERE pool <> 'working' GROUP BY ALL ORDER BY ALL",
}


def make(folder: Path, nodes: int) -> int:
    """Write the ledgers; return the bytes of one."""
    size = 0
    for number in range(nodes):
        identity = Identity(
            node=f"n{number:03}", boot_id=f"{number:08x}-0000-0000-0000-000000000000"
        )
        target = identity.folder(folder / FOLDER) / (stem(WALL_NS, 60_000_000_000) + SEGMENT)
        target.parent.mkdir(parents=True)
        with new_segment(target, identity, merged=True, memory_limit="1GB") as con:
            con.execute(ROWS.replace("{node}", identity.node))
        size = target.stat().st_size
    return size


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=125)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="whyidle-fleet-") as name:
        size = make(Path(name), options.nodes)
        sys.stdout.write(f"{options.nodes} nodes of {GPUS} GPUs, {size / 1e6:.2f} MB a day each\n")
        begin = time.monotonic()
        with Recording([name], threads=2) as fleet:
            sys.stdout.write(f"{'open':<26}{time.monotonic() - begin:>8.2f} s\n")
            for question, sql in QUESTIONS.items():
                at = time.monotonic()
                rows = len(fleet.con.execute(sql).fetchall())
                sys.stdout.write(f"{question:<26}{time.monotonic() - at:>8.2f} s{rows:>6} rows\n")
        whole = time.monotonic() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(f"{'all of it':<26}{whole:>8.2f} s, {peak:.0f} MiB\n")
    return 0 if whole <= GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
