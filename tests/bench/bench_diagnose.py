"""How long `diagnose` takes on a node-hour and on a node-day, and how much memory.

    PYTHONPATH=tests python -m bench.bench_diagnose                    an hour
    PYTHONPATH=tests python -m bench.bench_diagnose --hours 24         a day
    PYTHONPATH=tests python -m bench.bench_diagnose --nodes 8          an hour of several nodes
    PYTHONPATH=tests python -m bench.bench_diagnose --profile          where the time goes

8 GPUs at 8 Hz, 72 processes once a second, a counter page for each of 8 ranks, and what else a busy
node records, made straight into merged segments of 15 minutes as the keeper leaves them. All nodes
have one job. Goals on two cores: an hour in 2 s, a day in 5 s. Exits with 1 if a goal was missed.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import sys
import tempfile
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

from bench.measure import memory, timed
from recording_rows import BEGIN_NS, BOOT, BOOT_AHEAD_NS, WALL_AHEAD_NS
from whyidle.clock import NS_PER_S
from whyidle.layout import Identity, stem
from whyidle.manifest import RECORDING, write_manifest
from whyidle.schema import TABLES as SCHEMA
from whyidle.segment import new_segment
from whyidle.store import Recording
from whyidle.table import table_of
from whyidle_rules.diagnose_tell import get_ready
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans

GPUS = 8
WORKERS = 8  # of each rank
HOUR_S = 3600
MERGED_S = 900
GOALS_S: Mapping[int, float] = {1: 2.0, 24: 5.0}
COMMAND = (str(Path(sys.executable).with_name("diagnose")),)

# A step takes 0.5 s; each tenth one its data is 1.5 s late, so that there is something to find.
# $b is the begin of a segment, $n its first second, $r the first rank, $w their number; t is a
# second, w a window, g a GPU.
_AT = f"($b + t * {NS_PER_S})::BIGINT"
_AT8 = f"($b + (w + 1) * {NS_PER_S // 8})::BIGINT"
_START = f"({BEGIN_NS + BOOT_AHEAD_NS - 60 * NS_PER_S})::BIGINT"
_LATE = "(w % 160 >= 148)"
_SECONDS = f"range($n, $n + {MERGED_S}) s(i), LATERAL (SELECT i - $n AS t)"
_WINDOWS = f"range($n * 8, ($n + {MERGED_S}) * 8) s(i), LATERAL (SELECT i - $n * 8 AS w)"
_RANKS = f"range({GPUS}) r(g)"
_PROCESSES = f"range({GPUS * (WORKERS + 1)}) r(p)"
_PID = "(1000 + p)::BIGINT"
_RUN = "CASE WHEN p < 8 THEN 0.4 ELSE 0.85 END"

TABLES: Mapping[str, str] = {
    "gpu_activity": f"""SELECT {_AT8} AS mono_ns, 'GPU-' || g AS uuid, 'gpm' AS source,
      {_AT8} - {NS_PER_S // 8} AS t0_ns, {_AT8} AS t1_ns,
      CASE WHEN {_LATE} THEN 0.0 ELSE 0.9 + (hash(i, g) % 100) / 1000.0 END AS gr_active_ratio,
      CASE WHEN {_LATE} THEN 0.0 ELSE 0.7 + (hash(g, i) % 100) / 1000.0 END AS sm_active_ratio,
      (hash(i) % 1000) / 1000.0 AS tensor_active_ratio,
      (hash(i + 1) % 1000) / 1000.0 AS dram_active_ratio,
      (hash(i, g) % 1000000)::BIGINT AS pcie_rx_bytes,
      (hash(i, g) % 1000000)::BIGINT AS pcie_tx_bytes FROM {_WINDOWS}, {_RANKS}""",
    "gpu_info": f"""SELECT {_AT} AS mono_ns, 'GPU-' || g AS uuid, g AS gpu,
      'NVIDIA H100 80GB HBM3' AS name, true AS gpm, 5 AS max_pcie_generation,
      16 AS max_pcie_width FROM {_SECONDS}, {_RANKS} WHERE t % 60 = 0""",
    "gpu_state": f"""SELECT {_AT} AS mono_ns, 'GPU-' || g AS uuid, 0 AS nvml_return,
      (300000 + hash(i, g) % 400000)::BIGINT AS power_milliwatts, 5 AS pcie_generation,
      16 AS pcie_width FROM {_SECONDS}, {_RANKS}""",
    "gpu_process": f"""SELECT {_AT} AS mono_ns, 'GPU-' || g AS uuid, 1000 + g AS pid,
      {_START} AS start_ns, 'compute' AS context FROM {_SECONDS}, {_RANKS}""",
    "process": f"""SELECT {_AT} AS mono_ns, {_PID} AS pid, {_START} AS start_ns,
      CASE WHEN p < 8 THEN 1 ELSE 1000 + p % 8 END AS parent_pid,
      CASE WHEN p < 8 THEN 'trainer' ELSE 'data_worker' END AS kind,
      CASE WHEN hash(i, p) % 100 < 85 THEN 'R' ELSE 'S' END AS state,
      CASE WHEN hash(i, p) % 100 < 85 THEN NULL ELSE 'futex_wait_queue' END AS wait_channel,
      (i * 1e9 * {_RUN})::BIGINT AS user_ns, (i * 1e7)::BIGINT AS system_ns,
      (i * 1e9 * {_RUN})::BIGINT AS main_run_ns, (i * 1e7)::BIGINT AS main_run_delay_ns,
      i * 300 AS minor_faults, 4 AS threads, hash(i, p) % 64 AS last_cpu,
      i * 4096 AS read_bytes, i * 4096 AS write_bytes, (i * 5e6)::BIGINT AS rchar_bytes,
      i * 100000 AS wchar_bytes FROM {_SECONDS}, {_PROCESSES}""",
    "process_info": f"""SELECT {_AT} AS mono_ns, {_PID} AS pid, {_START} AS start_ns,
      CASE WHEN p < 8 THEN 'trainer' ELSE 'data_worker' END AS kind, 'python' AS comm,
      'python train.py' AS command, CASE WHEN p < 8 THEN $r + p END AS rank,
      CASE WHEN p < 8 THEN p END AS local_rank, $w AS world_size, '/job' AS cgroup,
      64 AS cpus_allowed_count, CASE WHEN p < 8 THEN 'autograd,nccl' END AS thread_kinds
      FROM {_SECONDS}, {_PROCESSES} WHERE t % 60 = 0""",
    "probe": f"""SELECT {_AT8} AS mono_ns, 1000 + g AS pid, {_START} AS start_ns,
      i // 4 AS steps, i // 4 AS batches,
      ((i // 160) * 1500000000 + greatest(0, w % 160 - 148) * {NS_PER_S // 8}
        + i * 100000)::BIGINT AS data_wait_ns,
      0 AS outside_wait_ns, i // 80 * 10000000 AS gc_ns, 0 AS checkpoint_save_ns,
      0 AS checkpoint_load_ns, 0 AS evaluation_ns FROM {_WINDOWS}, {_RANKS}""",
    "probe_event": f"""SELECT {_AT8} AS mono_ns, 1000 + g AS pid, {_START} AS start_ns,
      i AS sequence, CASE WHEN w % 160 = 159 THEN 'data_wait' WHEN w % 80 = 79 THEN 'gc'
      ELSE 'step' END AS kind, false AS background,
      {_AT8} - CASE WHEN w % 160 = 159 THEN 1500000000 WHEN w % 80 = 79 THEN 10000000
      ELSE {NS_PER_S // 2} END AS begin_ns, {_AT8} AS end_ns, i // 4 AS step
      FROM {_WINDOWS}, {_RANKS} WHERE w % 4 = 3""",
    "probe_info": f"""SELECT {_AT} AS mono_ns, 1000 + g AS pid, {_START} AS start_ns,
      $r + g AS rank, $w AS world_size, g AS local_rank
      FROM {_SECONDS}, {_RANKS} WHERE t % 60 = 0""",
    "probe_loader": f"""SELECT {_AT8} AS mono_ns, 1000 + g AS pid, {_START} AS start_ns,
      0 AS place, {WORKERS} AS workers, i // 4 AS batches, (i * 1e7)::BIGINT AS wait_ns,
      0 AS outside_wait_ns FROM {_WINDOWS}, {_RANKS}""",
    "clock": f"""SELECT {_AT} AS mono_ns, {_AT} + {BOOT_AHEAD_NS} AS boot_ns,
      {_AT} + {WALL_AHEAD_NS} AS wall_ns, 1000 AS bracket_ns, true AS synchronised,
      50000 AS wall_error_ns FROM {_SECONDS}""",
    "cpu": f"""SELECT {_AT} AS mono_ns, 64 AS cpus, (i * 50e9)::BIGINT AS user_ns,
      (i * 1e9)::BIGINT AS system_ns, (i * 13e9)::BIGINT AS idle_ns FROM {_SECONDS}""",
    "cgroup_cpu": f"""SELECT {_AT} AS mono_ns, '/job' AS cgroup, 2 AS version, 0 AS periods,
      0 AS throttled_periods FROM {_SECONDS}""",
    "file_use": f"""SELECT {_AT} AS mono_ns, (1008 + (i * 8 + g) % 64)::BIGINT AS pid,
      {_START} AS start_ns, 7 AS mount_id, 'lustre' AS kind, '/scratch' AS mount_point,
      1 AS read_files, 0 AS write_files FROM {_SECONDS}, {_RANKS}""",
    "pressure": f"""SELECT {_AT} AS mono_ns, 'memory' AS resource, '' AS cgroup, 0 AS some_ns
      FROM {_SECONDS}""",
    "vmstat": f"""SELECT {_AT} AS mono_ns, 0 AS refault_file_pages, 4096 AS page_bytes
      FROM {_SECONDS}""",
    "tick": f"""SELECT {_AT} AS mono_ns, 'normal' AS lane,
      CASE WHEN c = 0 THEN 'gpu_process' ELSE 'collector' || c END AS collector, {_AT} AS due_ns,
      {_AT} AS began_ns, (hash(i, c) % 1000000)::BIGINT AS took_ns, 8 AS rows, 0 AS missed
      FROM {_SECONDS}, range(44) r(c)""",
    "agent_self": f"""SELECT {_AT} AS mono_ns, 'sampler' AS part, 1 AS pid, i * 9000000 AS cpu_ns,
      i * 10000 AS written_bytes, 0 AS rows_lost FROM {_SECONDS} WHERE t % 10 = 0""",
}


def make(folder: Path, hours: int, nodes: int = 1) -> int:
    """Write a recording of some nodes; return its bytes."""
    keys = {
        spec.name: [column.name for column in spec.columns if column.kind == "key"]
        for spec in map(table_of, SCHEMA)
    }
    for number in range(nodes):
        identity = Identity(node=f"node-{number + 1}", boot_id=f"{number:08x}{BOOT[8:]}")
        for first_s in range(0, hours * HOUR_S, MERGED_S):
            begin = BEGIN_NS + first_s * NS_PER_S
            target = identity.folder(folder) / f"{stem(WALL_AHEAD_NS + begin, begin)}.duckdb"
            target.parent.mkdir(parents=True, exist_ok=True)
            with new_segment(target, identity, merged=True, memory_limit="1GB") as con:
                for table, query in TABLES.items():
                    text = query.replace("$b", str(begin)).replace("$n", str(first_s))
                    text = text.replace("$r", str(GPUS * number)).replace("$w", str(GPUS * nodes))
                    order = ", ".join(sorted(keys[table], key=lambda name: name == "mono_ns"))
                    con.execute(
                        f"INSERT INTO seg.{table} BY NAME SELECT * FROM ({text}) ORDER BY {order}"
                    )
    write_manifest(folder, RECORDING, {})
    return sum(path.stat().st_size for path in folder.rglob("*.duckdb"))


def profile(folder: Path, lines: int) -> str:
    """Return where the time of one diagnosis goes, in this process."""
    rules = get_ready([])
    profiler = cProfile.Profile()
    with Recording([folder], threads=2, memory_limit="4GB") as recording:
        profiler.enable()
        diagnose(recording.con, [str(folder)], rules, spans(recording.con, None, None))
        profiler.disable()
    out = StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("cumulative").print_stats(lines)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{out.getvalue()}peak of this process: {peak:.0f} MiB\n"


def measure(folder: Path, out: Path, runs: int) -> dict[str, float]:
    """Return wall and CPU time (the best of `runs`) and the peak of memory of a diagnosis."""
    command = [*COMMAND, str(folder), "--json"]
    times = [timed(command, out) for _ in range(runs)]
    if complaint := out.with_suffix(".err").read_text():
        raise RuntimeError(complaint)
    found = json.loads(out.read_text())
    best = min(times, key=lambda each: each.wall_s)
    return {
        "wall_s": round(best.wall_s, 2),
        "cpu_s": round(best.cpu_s, 2),
        "peak_rss_mebibytes": round(memory(command, out).rss_bytes / 2**20),
        "gpu_s": found["totals"]["gpu_s"],
        "idle_s": found["totals"]["idle_s"],
        "named_s": sum(row["idle_s"] for row in found["ledger"] if row["cause"] != "unattributed"),
    }


def main() -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", type=int, nargs="?", const=45, metavar="LINES")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make it there, or use it again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-diagnose-") as scratch:
        folder = args.keep or Path(scratch) / "recording"
        made = 0 if folder.exists() else make(folder, args.hours, args.nodes)
        if args.profile:
            sys.stdout.write(profile(folder, args.profile))
            return 0
        found = measure(folder, Path(scratch) / "out", args.runs)
    found |= {
        "hours": args.hours,
        "nodes": args.nodes,
        "recording_bytes": made,
    }
    goal = GOALS_S.get(args.hours) if args.nodes == 1 else None
    missed = goal is not None and found["wall_s"] > goal
    sys.stdout.write(json.dumps({**found, "goal_s": goal, "missed": missed}, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
