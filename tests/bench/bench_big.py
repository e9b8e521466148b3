"""Diagnoses one generated trace of about a gigabyte: wall time, peak memory, and the right answer.

    PYTHONPATH=tests python -m bench.bench_big [--megabytes 1000] [--json OUT]

The trace is one simulated training step written again and again with later times; its truth is
the step's, times the number of steps. It lies in a temporary folder and is deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from bench.measure import memory, timed
from world.trace_scenarios import Job, data_parallel, load_ready
from world.trace_text import Dialect, trace_text
from world.trace_truth import truth
from world.traces import Rank, simulate

GOAL_BYTES = 1e9
# Every number that must differ from step to step, marked in the text of one step.
_MOVING = re.compile(r'("ts": |"correlation": |"id": |"External id": )(\d+)(\.\d{3})?')


def one_step() -> Rank:
    """Simulate one step of one rank that starts and ends with the GPU idle."""
    job = Job(ranks=1, steps=1, layers=24, load=lambda rank, _: load_ready(rank))
    (rank,) = simulate(1, data_parallel(job))
    return rank


def pieces(rank: Rank) -> list[tuple[str, int, bool]]:
    """Split the entries of one step into texts, each with the number after it; True for a time."""
    text = "".join(trace_text(rank, Dialect()))
    begin = text.index('"traceEvents": [') + len('"traceEvents": [')
    body = text[begin : text.index('"name": "process_name"')].rsplit("},", 1)[0] + "},"
    found, last = [], 0
    for match in _MOVING.finditer(body):
        is_time = match[3] is not None
        number = int(match[2] + match[3][1:]) if is_time else int(match[2])
        found.append((body[last : match.start(2)], number, is_time))
        last = match.end()
    found.append((body[last:], -1, False))
    return found


def steps(rank: Rank, count: int, period_ns: int) -> Iterator[str]:
    """Yield the whole trace, one step after the other."""
    text = "".join(trace_text(rank, Dialect()))
    yield text[: text.index('"traceEvents": [') + len('"traceEvents": [')]
    parts = pieces(rank)
    for step in range(count):
        out = []
        for constant, number, is_time in parts:
            out.append(constant)
            if is_time:
                moved = number + step * period_ns
                out.append(f"{moved // 1000}.{moved % 1000:03d}")
            elif number >= 0:
                out.append(str(number + step * 2_000_000))
        yield "".join(out).replace("ProfilerStep#3", f"ProfilerStep#{step + 3}")
    yield '\n  {\n    "name": "process_name", "ph": "M", "pid": 0, "args": {}\n  }\n]}'


def main() -> None:
    """Generate, measure, compare with the truth, and delete."""
    options = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    options.add_argument("--megabytes", type=int, default=1000)
    options.add_argument("--json", type=Path, help="write every figure here")
    chosen = options.parse_args()
    rank = one_step()
    period_ns = max(event.span[1] for event in rank.events)
    step_bytes = sum(len(constant) + 12 for constant, _, _ in pieces(rank))
    count = max(2, chosen.megabytes * 1_000_000 // step_bytes)
    diagnose = str(Path(sys.executable).parent / "diagnose")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.json"
        with path.open("w", encoding="utf-8") as out:
            out.writelines(steps(rank, count, period_ns))
        size = path.stat().st_size
        result = Path(folder) / "out"
        time = timed([diagnose, "--json", str(path)], result)
        parts = json.loads(result.read_text())["gpus"][0]["trace"]
        peak = memory([diagnose, "--json", str(path)], result)
    one = truth(rank)
    expected = replace(
        one,
        window_ns=one.window_ns + (count - 1) * period_ns,
        compute_ns=one.compute_ns * count,
        exposed_comm_ns=one.exposed_comm_ns * count,
        exposed_copy_ns=one.exposed_copy_ns * count,
    )
    figures = {
        "bytes": size,
        "steps": count,
        "wall_s": time.wall_s,
        "cpu_s": time.cpu_s,
        "mb_per_s": size / 1e6 / time.wall_s,
        "memory": asdict(peak),
        "below_goal": peak.rss_bytes < GOAL_BYTES,
        "window_error_s": parts["window_s"] - expected.window_ns / 1e9,
        "compute_error_s": parts["compute_s"] - expected.compute_ns / 1e9,
        "copy_error_s": parts["exposed_copy_s"] - expected.exposed_copy_ns / 1e9,
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
