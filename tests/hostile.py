"""Ways to feed `diagnose` hostile inputs: bounded in time, checked whatever comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import FrameType

import independent
from trace_run import Json, Outcome, check_one_sentence, check_sums, diagnose
from world.trace_scenarios import Job, data_parallel, load_ready
from world.trace_text import Dialect, trace_text
from world.traces import simulate

DIAGNOSE = (sys.executable, "-c", "import whyidle_rules.cli as c, sys; sys.exit(c.diagnose_main())")
STEP_S = 60
SLACK_S = 1e-6
# Of files that it could not use for one reason, a diagnosis names this many and counts the rest.
TOGETHER = 8
PARTS = ("window", "compute", "exposed_comm", "exposed_copy", "idle")


@contextmanager
def deadline() -> Iterator[None]:
    """Fail instead of hanging: what opens a pipe without a writer waits for ever."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError("diagnose hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(STEP_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(*sources: Path) -> Outcome:
    """Diagnose: a sentence, or sums that hold."""
    with deadline():
        outcome = diagnose("--json", *sources)
    assert outcome.code in (0, 1, 2), outcome
    assert "Traceback" not in outcome.stderr
    if outcome.code == 2:
        check_one_sentence(outcome)
    else:
        check_sums(outcome.found())
    return outcome


def refused(*sources: Path) -> str:
    """Return the sentence of a refusal."""
    outcome = run(*sources)
    assert outcome.code == 2, outcome.stdout[:500]
    return outcome.stderr


def says(found: Json, name: str) -> bool:
    """Say whether the damage of a file is told by its name."""
    return any(name in entry["what"] + entry["why"] for entry in found["not_seen"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a diagnosis of many files made of one of them; `parts` is None where it has no GPU."""

    parts: tuple[float, ...] | None
    said: bool


def run_together(folder: Path, files: dict[str, bytes]) -> dict[str, Read]:
    """Diagnose many files, some at once beside one that is whole; return what became of each."""
    found: dict[str, Read] = {}
    names = list(files)
    for first in range(0, len(names), TOGETHER):
        place = folder / str(first)
        place.mkdir()
        some = names[first : first + TOGETHER]
        for name in some:
            (place / name).write_bytes(files[name])
        (place / "whole.json").write_text(small_text())
        found |= _read_of(run(place).found(), some)
    return found


def _read_of(found: Json, names: list[str]) -> dict[str, Read]:
    by_source = {gpu["source"]: gpu["trace"] for gpu in found["gpus"]}
    assert len(by_source) == len(found["gpus"])
    assert "whole.json" in by_source
    return {
        name: Read(
            parts=tuple(by_source[name][f"{part}_s"] for part in PARTS)
            if name in by_source
            else None,
            said=says(found, name),
        )
        for name in names
    }


def same(these: tuple[float, ...] | None, those: tuple[float, ...] | None) -> bool:
    """Say whether two partitions are equal; two missing ones are."""
    if these is None or those is None:
        return these is those
    return all(abs(this - that) <= SLACK_S for this, that in zip(these, those, strict=True))


def small_text() -> str:
    """Return a small trace of one rank."""
    job = Job(ranks=1, steps=2, layers=1, load=lambda rank, _: load_ready(rank))
    (rank,) = simulate(1, data_parallel(job))
    return "".join(trace_text(rank, Dialect()))


def parts_of(found: Json) -> tuple[float, ...]:
    """Return the parts of the one GPU of a diagnosis, in seconds."""
    (gpu,) = found["gpus"]
    return tuple(gpu["trace"][f"{name}_s"] for name in PARTS)


def independent_parts(found: Json) -> tuple[float, ...] | None:
    """Return the parts of a trace by the independent computation, in seconds."""
    parts = independent.partition(independent.trace_of(found, "").events)
    if parts is None:
        return None
    return tuple(getattr(parts, f"{name}_ns") / 1e9 for name in PARTS)


def parts_of_events(events: object) -> tuple[float, ...] | None:
    """Return the independent parts of a list of events, as they stand in a file."""
    return independent_parts(json.loads(json.dumps({"traceEvents": events}), parse_float=Decimal))


def process(
    folder: Path,
    *arguments: bytes | Path | str,
    prefix: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> tuple[Outcome, int]:
    """Run `diagnose` as a process of its own; return what it left, and its peak memory in kB."""
    out, err = folder / "stdout", folder / "stderr"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        running = subprocess.Popen(
            [*prefix, *DIAGNOSE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=dict(os.environ) | (environment or {}),
        )
    until, peak_kb = time.monotonic() + STEP_S, 0
    while running.poll() is None and time.monotonic() < until:
        peak_kb = max(peak_kb, _peak_kb(running.pid))
        time.sleep(0.01)
    if running.poll() is None:
        running.kill()
        running.wait()
        raise AssertionError("diagnose hangs")
    outcome = Outcome(
        code=running.returncode,
        stdout=out.read_text(errors="strict"),
        stderr=err.read_text(errors="strict"),
    )
    return outcome, peak_kb


def _peak_kb(pid: int) -> int:
    """Return the peak so far; `ru_maxrss` would begin with that of the process that started it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) if lines else 0
