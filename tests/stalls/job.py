"""Runs jobs of one or more ranks on a virtual node of their own, recorded or bare."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalls.inject import Ground, ground, wait_for
from stalls.network import Link, links
from stalls.scenario import Setup
from stalls.truth import Run, load_run
from vgpu.device.serve import virtual_gpus

START_TIMEOUT_S = 60.0
_FIRST_PORT = 29_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run by GPU, and the identities of those. `half_ns`: when its surroundings changed."""

    runs: tuple[Run, ...]
    uuids: tuple[str, ...]
    half_ns: int | None


def run_job(setup: Setup, work: Path, seconds: float, record: tuple[str, ...]) -> Ran:
    """Runs it in a folder that it makes; raises RuntimeError with what it said if it fails."""
    work.mkdir(parents=True)
    with ExitStack() as stack:
        placed = []
        for number, job in enumerate(setup.jobs):
            setups = [job.of_rank(rank) for rank in range(job.ranks)]
            places = [
                stack.enter_context(ground(each, work / f"ground-{number}-{rank}"))
                for rank, each in enumerate(setups)
            ]
            rates = [each.link_bytes_per_s for each in setups]
            ends = stack.enter_context(links(rates)) if all(rates) else []
            placed.append((job, setups, places, ends))
        machines = setup.gpus if setup.nodes else 1
        with virtual_gpus(work, gpus=setup.gpus, machines=machines) as node:
            uuids = tuple(gpu.uuid for one in node.standins for gpu in one.state.gpus)
            own = [(*record, "--node", f"node{i}", "--") if record else () for i in range(machines)]
            words = _words(placed, work, seconds, own if setup.nodes else [], node.envs)
            env = {**os.environ, **node.env, "OMP_NUM_THREADS": "1"}
            if record and not setup.nodes:
                words = (*record, "--", *words)
            changing = placed[0][2][setup.late_one]
            half_ns = _run(words, env, setup, changing, work, seconds)
        runs: list[Run] = []
        for number, (job, *_) in enumerate(placed):
            gpus = tuple(range(len(runs), len(runs) + job.ranks))
            late = gpus[job.late_one] if number == 0 else None
            runs += [load_run(work, gpu, gpus, late) for gpu in gpus]
    return Ran(runs=tuple(runs), uuids=uuids, half_ns=half_ns)


_Placed = tuple[Setup, list[Setup], list[Ground], list[Link]]


def _words(
    placed: list[_Placed],
    work: Path,
    seconds: float,
    recorders: Sequence[tuple[str, ...]],
    envs: Sequence[dict[str, str]],
) -> tuple[str, ...]:
    """The command: one trainer, or a launcher of several.

    `recorders`: where each rank is on a node of its own, the words before its command there;
    `envs`: what it needs to see that node's GPU.
    """
    jobs: list[dict[str, Any]] = []
    first = 0
    for number, (job, setups, places, ends) in enumerate(placed):
        begun, stop = (
            (work / "started", work / "stop")
            if number == 0
            else (work / f"started-{number}", work / f"stop-{number}")
        )
        ranks = []
        for rank, (each, place) in enumerate(zip(setups, places, strict=True)):
            gpu = first + rank
            told = work / f"job-{gpu}.json"
            paths = {
                "data": place.data,
                "out": place.out,
                "started": begun,
                "stop": stop,
                "marks": work / f"marks-{gpu}.json",
            }
            plan = {
                "setup": dataclasses.asdict(each),
                "seconds": seconds,
                "gpu": gpu,
                "group": f"world-{number}",
                "ring": [end.address for end in ends],
                **{name: str(path) for name, path in paths.items()},
            }
            told.write_text(json.dumps(plan), encoding="utf-8")
            inside = ends[rank].command if ends else ()
            words = (*inside, *place.command, sys.executable, "-m", "stalls.train", str(told))
            ranks.append((*recorders[rank], *words) if recorders else words)
        late = setups[job.late_one]
        jobs.append(
            {
                "ranks": ranks,
                "nodes": job.nodes,
                "envs": envs if recorders else [{}] * job.ranks,
                "port": _FIRST_PORT + number,
                "started": str(begun),
                "late": job.late_one,
                "stop_every_s": late.stop_every_s,
                "stop_s": late.stop_s,
                "end_after_s": late.hang_after_s + late.hang_s if late.hang_after_s else None,
            }
        )
        first += job.ranks
    if first == 1:
        return tuple(jobs[0]["ranks"][0])
    plans = [work / f"plan-{number}.json" for number in range(len(jobs))]
    for path, told_job in zip(plans, jobs, strict=True):
        path.write_text(json.dumps(told_job), encoding="utf-8")
    return (sys.executable, "-m", "stalls.launch", *map(str, plans))


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
