"""Runs a job of one or more ranks on a virtual node of its own, recorded or bare."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stalls.inject import Ground, ground, wait_for
from stalls.scenario import Setup
from stalls.truth import Run, load_run
from vgpu.device.serve import virtual_gpus

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run by rank, and the GPUs that the ranks used. `half_ns`: when its surroundings changed."""

    runs: tuple[Run, ...]
    uuids: tuple[str, ...]
    half_ns: int | None


def run_job(setup: Setup, work: Path, seconds: float, record: tuple[str, ...]) -> Ran:
    """Runs it in a folder that it makes; raises RuntimeError with what it said if it fails."""
    work.mkdir(parents=True)
    setups = [setup.of_rank(rank) for rank in range(setup.ranks)]
    with ExitStack() as stack:
        places = [
            stack.enter_context(ground(each, work / f"ground-{rank}"))
            for rank, each in enumerate(setups)
        ]
        with virtual_gpus(work, gpus=setup.ranks) as node:
            uuids = tuple(gpu.uuid for gpu in node.standin.state.gpus)
            words = _words(setup, setups, places, work, seconds)
            env = {**os.environ, **node.env, "OMP_NUM_THREADS": "1"}
            half_ns = _run((*record, *words), env, setup, places[-1], work, seconds)
        runs = tuple(load_run(work, rank, setup.ranks) for rank in range(setup.ranks))
    return Ran(runs=runs, uuids=uuids, half_ns=half_ns)


def _words(
    setup: Setup, setups: list[Setup], places: list[Ground], work: Path, seconds: float
) -> tuple[str, ...]:
    """The job's command: one trainer, or a launcher of several."""
    ranks = []
    for rank, (each, place) in enumerate(zip(setups, places, strict=True)):
        told = work / f"job-{rank}.json"
        paths = {
            "data": place.data,
            "out": place.out,
            "started": work / "started",
            "stop": work / "stop",
            "marks": work / f"marks-{rank}.json",
        }
        job = {"setup": dataclasses.asdict(each), "seconds": seconds}
        job.update({name: str(path) for name, path in paths.items()})
        told.write_text(json.dumps(job), encoding="utf-8")
        ranks.append((*place.command, sys.executable, "-m", "stalls.train", str(told)))
    if setup.ranks == 1:
        return ranks[0]
    plan = {
        "ranks": ranks,
        "started": str(work / "started"),
        "stop_every_s": setups[-1].stop_every_s,
        "stop_s": setups[-1].stop_s,
    }
    (work / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    return (sys.executable, "-m", "stalls.launch", str(work / "plan.json"))


def _run(
    words: tuple[str, ...],
    env: dict[str, str],
    setup: Setup,
    changing: Ground,
    work: Path,
    seconds: float,
) -> int | None:
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_for(work / "started", START_TIMEOUT_S, process)
            half_ns = None
            if setup.half:
                time.sleep(seconds / 2)
                half_ns = time.monotonic_ns()
                changing.change()
            code = process.wait(seconds * 4 + START_TIMEOUT_S)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{error}; it said: {_tail(work / 'log')}") from error
        finally:
            _end(process)
    if code:
        raise RuntimeError(f"the job failed with {code}; it said: {_tail(work / 'log')}")
    return half_ns


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what still runs: the recorder passes the signal on to the job."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-2000:]
