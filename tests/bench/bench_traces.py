"""Races `diagnose` against HolisticTraceAnalysis 0.5.0 on recorded traces, side by side.

    HTA_PYTHON=/path/to/python PYTHONPATH=tests python -m bench.bench_traces FOLDER
        [--repeats 5] [--copies 8] [--accuracy FOLDER ...] [--json OUT]

FOLDER holds one trace a rank (rank-0.json.gz, ...). Both programs run as whole processes, one after
the other in turn, on the folder as it is and on eight copies of it with other ranks. HTA_PYTHON is
an interpreter with HTA; where it is not set, an environment is made and HTA installed into it.
Besides speed and memory it prints where HTA's figures differ from an exact computation, on FOLDER
and on the folders of --accuracy.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import independent
from bench.measure import Memory, Spread, Time, memory, spread, timed

HERE = Path(__file__).resolve().parent
HTA = "HolisticTraceAnalysis==0.5.0"
COPIES = 8
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One program on one set of traces."""

    program: str
    wall_s: Spread
    cpu_s: Spread
    rss_mb: Spread
    pss_mb: Spread
    processes: int
    samples: int


@contextmanager
def hta_python() -> Iterator[Path]:
    """Give an interpreter that has HTA."""
    if given := os.environ.get("HTA_PYTHON"):
        yield Path(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", HTA], check=True)
        yield python


def copy_ranks(source: Path, target: Path, copies: int) -> int:
    """Write `copies` of every trace with ranks that go on counting; return how many ranks."""
    texts = [gzip.decompress(path.read_bytes()) for path in sorted(source.glob("rank-*.json.gz"))]
    world = len(texts) * copies
    for copy in range(copies):
        for place, text in enumerate(texts):
            rank = copy * len(texts) + place
            changed, count = re.subn(
                rb'("distributedInfo": \{[^}]*"rank": )\d+(, "world_size": )\d+',
                rb"\g<1>%d\g<2>%d" % (rank, world),
                text,
            )
            if count != 1:
                raise RuntimeError("a trace does not say which rank it is")
            (target / f"rank-{rank}.json.gz").write_bytes(gzip.compress(changed, 6))
    return world


def race(commands: dict[str, list[str]], repeats: int, out: Path) -> list[Result]:
    """Run all programs in turn, `repeats` times for time and again for memory."""
    times: dict[str, list[Time]] = {name: [] for name in commands}
    peaks: dict[str, list[Memory]] = {name: [] for name in commands}
    for measure in range(2):
        for _ in range(repeats):
            for name, command in commands.items():
                if measure == 0:
                    times[name].append(timed(command, out))
                else:
                    peaks[name].append(memory(command, out))
    return [
        Result(
            program=name,
            wall_s=spread([one.wall_s for one in times[name]]),
            cpu_s=spread([one.cpu_s for one in times[name]]),
            rss_mb=spread([peak.rss_bytes / MB for peak in peaks[name]]),
            pss_mb=spread([peak.pss_bytes / MB for peak in peaks[name]]),
            processes=max(peak.processes for peak in peaks[name]),
            samples=min(peak.samples for peak in peaks[name]),
        )
        for name in commands
    ]


def _last_json(out: Path) -> Any:
    return json.loads(out.read_text().strip().rsplit("\n", 1)[-1])


def accuracy(folder: Path, hta: dict[str, Any], ours: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare window, idle time and compute of both with the exact ones, by rank, in seconds."""
    rows = []
    by_rank = {row["rank"]: row for row in hta["temporal"]}
    gpus = {gpu["rank"]: gpu["trace"] for gpu in ours["gpus"]}
    for path in sorted(folder.glob("rank-*.json.gz"), key=lambda path: int(path.name[5:-8])):
        trace = independent.read(path)
        exact = independent.partition(trace.events)
        if exact is None or trace.rank is None:
            continue
        theirs, mine = by_rank[trace.rank], gpus[trace.rank]
        streams = [
            row["idle_time"] / 1e6 for row in hta.get("idle", []) if row["rank"] == trace.rank
        ]
        rows.append(
            {
                "rank": trace.rank,
                "window_s": exact.window_ns / 1e9,
                "hta_window_s": theirs["kernel_time(us)"] / 1e6,
                "whyidle_window_s": mine["window_s"],
                "idle_s": exact.idle_ns / 1e9,
                "hta_idle_s": theirs["idle_time(us)"] / 1e6,
                "hta_idle_over_streams_s": sum(streams),
                "whyidle_idle_s": mine["idle_s"],
                "compute_s": exact.compute_ns / 1e9,
                "hta_compute_s": theirs["compute_time(us)"] / 1e6,
                "whyidle_compute_s": mine["compute_s"],
            }
        )
    return rows


def table(results: list[Result], ranks: int) -> str:
    """Return the results as text, with ratios to the first one."""
    titles = ("wall s", "CPU s", "RSS MB", "PSS MB")
    head = "".join(f"{title:>24}" for title in titles)
    lines = [f"{f'{ranks} ranks':<30}{head}{'processes':>10}"]
    first = results[0]
    for result in results:
        cells = "".join(
            f"{f'{one.median:.2f} ({one.min:.2f}-{one.max:.2f})':>24}"
            for one in (result.wall_s, result.cpu_s, result.rss_mb, result.pss_mb)
        )
        lines.append(f"  {result.program:<28}{cells}{result.processes:>10}")
    lines += [
        f"  {result.program} / {first.program}: "
        f"wall {result.wall_s.median / first.wall_s.median:.1f}x, "
        f"CPU {result.cpu_s.median / first.cpu_s.median:.1f}x, "
        f"RSS {result.rss_mb.median / first.rss_mb.median:.1f}x, "
        f"PSS {result.pss_mb.median / first.pss_mb.median:.1f}x"
        for result in results[1:]
    ]
    return "\n".join(lines)


def _wrong(name: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"{name}: exact seconds (HTA's; ours); HTA's idle also as the sum over its streams"]
    for row in rows:
        cells = "".join(
            f"  {part} {row[f'{part}_s']:.6f} "
            f"({row[f'hta_{part}_s']:.6f}; {row[f'whyidle_{part}_s']:.6f})"
            for part in ("window", "idle", "compute")
        )
        lines.append(f"  {row['rank']:>3}{cells}  streams {row['hta_idle_over_streams_s']:.6f}")
    return "\n".join(lines)


def _commands(folder: Path, python: Path) -> dict[str, list[str]]:
    script = str(HERE / "hta_run.py")
    return {
        "diagnose": [str(Path(sys.executable).parent / "diagnose"), "--json", str(folder)],
        "HTA, all four analyses": [str(python), script, str(folder), "all"],
        "HTA, temporal only": [str(python), script, str(folder), "temporal"],
    }


def _accuracy(folder: Path, python: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """Run both once and compare them with the exact figures."""
    commands = _commands(folder, python)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        timed(commands["HTA, all four analyses"], out)
        theirs = _last_json(out)
        timed(commands["diagnose"], out)
        ours = json.loads(out.read_text())
    rows = accuracy(folder, theirs, ours)
    say(_wrong(folder.name, rows[:8]))
    say(f"HTA's potential stragglers: {theirs['stragglers']}")
    return {"folder": folder.name, "ranks": rows, "hta_stragglers": theirs["stragglers"]}


def _one_set(
    folder: Path, python: Path, repeats: int, say: Callable[[str], object]
) -> dict[str, Any]:
    ranks = len(list(folder.iterdir()))
    with tempfile.TemporaryDirectory() as scratch:
        results = race(_commands(folder, python), repeats, Path(scratch) / "out")
    say(table(results, ranks))
    return {
        "ranks": ranks,
        "results": [asdict(result) for result in results],
        "ratios": {
            result.program: {
                "wall": result.wall_s.median / results[0].wall_s.median,
                "cpu": result.cpu_s.median / results[0].cpu_s.median,
                "rss": result.rss_mb.median / results[0].rss_mb.median,
                "pss": result.pss_mb.median / results[0].pss_mb.median,
            }
            for result in results[1:]
        },
    }


def main() -> None:
    """Race on the folder and on eight copies of it."""
    options = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    options.add_argument("folder", type=Path, help="one trace a rank")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--copies", type=int, default=COPIES, help="of the larger set; 0: none")
    options.add_argument("--accuracy", type=Path, nargs="*", default=[], help="more runs")
    options.add_argument("--json", type=Path, help="write every figure here")
    chosen = options.parse_args()
    sets, exact = [], []

    def say(text: str) -> None:
        sys.stdout.write(text + "\n\n")
        sys.stdout.flush()

    with hta_python() as python, tempfile.TemporaryDirectory() as scratch:
        for copies in filter(None, (1, chosen.copies)):
            folder = Path(scratch) / f"copies-{copies}"
            folder.mkdir()
            copy_ranks(chosen.folder, folder, copies)
            sets.append(_one_set(folder, python, chosen.repeats, say))
        for number, source in enumerate([chosen.folder, *chosen.accuracy]):
            folder = Path(scratch) / f"{number}-{source.name}"
            folder.mkdir()
            copy_ranks(source, folder, 1)
            exact.append(_accuracy(folder, python, say))
    if chosen.json is not None:
        figures = {"cpus": os.cpu_count(), "sets": sets, "accuracy": exact}
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
